"""A real GPU: what `device` is for the emulated one."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["get", "put"]


def put(x: Any) -> Any:
    """An argument on the device: arrays, also those in lists and tuples."""
    import cupy

    if isinstance(x, list | tuple):
        return type(x)(put(y) for y in x)
    return cupy.asarray(x) if isinstance(x, np.ndarray) else x


def get(x: Any) -> Any:
    """A result on the host."""
    if isinstance(x, list | tuple):
        return type(x)(get(y) for y in x)
    return x.get() if hasattr(x, "get") else x
