"""The names of numpy.fft: NumPy's own functions, which take traced arrays by its protocols."""

from numpy.fft import *  # noqa: F403
from numpy.fft import __all__ as __all__

from spmd.autodiff.namespace import fftfreq as fftfreq
from spmd.autodiff.namespace import rfftfreq as rfftfreq
