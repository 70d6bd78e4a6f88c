"""Padding, and entries by their indices, on one block of NumPy or CuPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.functions.local import namespace

__all__ = ["pad", "take"]


def pad(x: Any, widths: Sequence[tuple[int, int]], value: complex = 0) -> Any:
    """x with (low, high) entries of a value around each dimension."""
    return np.pad(x, tuple(widths), constant_values=value) if any(map(any, widths)) else x


def take(x: Any, index: np.ndarray, axis: int) -> Any:
    """The entries at these indices along an axis."""
    xp = namespace(x)
    return xp.take(x, xp.asarray(index), axis=axis)
