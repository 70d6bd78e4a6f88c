"""The names of numpy.fft: NumPy's own functions, which take traced arrays by its protocols."""

from numpy.fft import *  # noqa: F403
from numpy.fft import __all__ as __all__
