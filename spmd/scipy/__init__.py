"""Functions of SciPy for traced arrays too, under SciPy's names: `spmd.scipy.fft.dct(x)`.

NumPy's protocols do not reach all of SciPy. A function here takes bare, stated and traced arrays alike, and gives
what SciPy's gives. The parts, and SciPy with them, are imported when they are first used.
"""

from __future__ import annotations

from spmd.lazy_imports import late

__getattr__, __dir__ = late(__name__, {}, parts=("fft", "special"))
