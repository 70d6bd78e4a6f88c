"""Array code for one block: no mesh, no tape.

    reference/   every kernel in a few lines of plain NumPy: the documentation, and the oracle of the tests
    cpu/         fast kernels for NumPy arrays, with loops compiled by numba where it is installed
    gpu/         kernels for CuPy arrays, in CUDA

The three packages have the same names and signatures. `of(x)` gives the package for x.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from spmd.kernels import cpu
from spmd.kernels.registry import FAMILIES

__all__ = ["FAMILIES", "of", "on_device", "register"]

_others: dict[type, ModuleType] = {}


def on_device(x: object) -> bool:
    """Whether x is an array of CuPy."""
    return type(x).__module__.partition(".")[0] == "cupy"


def of(x: object) -> ModuleType:
    """The kernels for the array x: `spmd.kernels.gpu` for CuPy's, else `spmd.kernels.cpu`, or what is registered."""
    if type(x) is not np.ndarray:
        if on_device(x):
            from spmd.kernels import gpu

            return gpu
        return _others.get(type(x), cpu)
    return cpu


def register(array_type: type, package: ModuleType) -> None:
    """Let `of` give this package of kernels for arrays of another class."""
    _others[array_type] = package
