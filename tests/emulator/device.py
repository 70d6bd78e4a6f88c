"""The GPU's kernels on the CPU: `with emulated() as gpu:` gives `spmd.kernels.gpu` over a module that plays CuPy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

import emulator
from emulator import fake_cupy
from spmd import kernels

__all__ = ["available", "emulated", "get", "put"]

_world: dict[str, ModuleType] = {}


def available() -> bool:
    """Whether sources can be compiled for the CPU."""
    return emulator.COMPILER is not None


def _ours(name: str) -> bool:
    return name.partition(".")[0] in ("cupy", "cupyx") or name.startswith("spmd.kernels.gpu")


@contextmanager
def emulated() -> Iterator[ModuleType]:
    """Inside, `import cupy` finds the player, and the kernels for the GPU are a copy that was loaded over it."""
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name)}
    gpu = vars(kernels).pop("gpu", None)
    sys.modules.update(_world or fake_cupy.make())
    try:
        yield importlib.import_module("spmd.kernels.gpu")
    finally:
        _world.update((name, sys.modules.pop(name)) for name in list(sys.modules) if _ours(name))
        sys.modules.update(real)
        vars(kernels).pop("gpu", None)
        if gpu is not None:
            kernels.gpu = gpu


def put(x: Any) -> Any:
    """An argument on the device: arrays, also those in lists and tuples. How an array lies in memory is kept."""
    if isinstance(x, list | tuple):
        return type(x)(put(y) for y in x)
    if not isinstance(x, np.ndarray):
        return x
    if x.strides and max(map(abs, x.strides)) > 1 << 28:
        return fake_cupy.wrap(x)
    base = np.lib.stride_tricks.as_strided(x, writeable=False)
    return fake_cupy.wrap(base.copy(order="K") if base.flags.forc or 0 not in x.strides else base)


def get(x: Any) -> Any:
    """A result on the host."""
    if isinstance(x, list | tuple):
        return type(x)(get(y) for y in x)
    return x.get() if type(x) is fake_cupy.ndarray else x
