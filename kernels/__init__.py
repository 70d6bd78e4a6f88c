"""Array code for one block: no mesh, no tape.

    reference/   what every kernel computes, in a few lines of plain NumPy: their documentation, and the tests' oracle
    cpu/         the same for speed on NumPy arrays, with loops compiled by numba where it is installed
    gpu/         the same for CuPy arrays, with sources in CUDA

The three have the same names and signatures. `of(x)` gives the kernels that fit x.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from spmd.kernels import cpu, registry

__all__ = ["FAMILIES", "of", "on_device", "register"]

FAMILIES = registry.FAMILIES
"""The kernels by family: a module of that name in each of the three packages."""


def on_device(x: object) -> bool:
    """Whether x is an array of CuPy."""
    return type(x).__module__.partition(".")[0] == "cupy"


def of(x: object) -> ModuleType:
    """The kernels for the array x: `spmd.kernels.gpu` for one of CuPy, else `spmd.kernels.cpu`."""
    if type(x) is not np.ndarray:
        if on_device(x):
            from spmd.kernels import gpu

            return gpu
        return _others.get(type(x), cpu)
    return cpu


_others: dict[type, ModuleType] = {}


def register(kind: type, engine: ModuleType) -> None:
    """Arrays of another class have these kernels."""
    _others[kind] = engine
