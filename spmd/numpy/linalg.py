"""The names of numpy.linalg: NumPy's own functions, which take traced arrays by its protocols."""

from numpy.linalg import *  # noqa: F403
from numpy.linalg import __all__ as __all__
