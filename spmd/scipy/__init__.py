"""SciPy functions that also take traced arrays, under SciPy's names: `spmd.scipy.fft.dct(x)`.

NumPy's protocols do not reach all of SciPy. These functions take bare, stated and traced arrays and give SciPy's
results. The submodules, and SciPy with them, are imported on first use.
"""

from __future__ import annotations

from spmd.lazy_imports import lazy_attributes

__getattr__, __dir__ = lazy_attributes(__name__, {}, parts=("fft", "special"))
