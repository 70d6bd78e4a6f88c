"""Functions of SciPy for traced arrays too, under SciPy's names: `spmd.scipy.fft.dct(x)`.

NumPy's protocols do not reach all of SciPy. A function here takes bare, stated and traced arrays alike, and gives
what SciPy's gives. The parts, and SciPy with them, are imported when they are first used.
"""

from __future__ import annotations

import importlib

_PARTS = ("fft", "special")


def __getattr__(name: str):
    if name in _PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'spmd.scipy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PARTS])
