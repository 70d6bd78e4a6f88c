"""Memory: for large results, NumPy's own until somebody says where there is better; and who may write to it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["owns_memory", "product", "scaled", "take_from", "writable"]

_empty: Callable[..., np.ndarray] = np.empty
_least: Callable[[], int] = lambda: sys.maxsize


def take_from(empty: Callable[..., np.ndarray], least: Callable[[], int]) -> None:
    """Take memory by empty(shape, dtype), for results of at least least() bytes."""
    global _empty, _least
    _empty, _least = empty, least


def product(x: Any, y: Any, /, *more: Any, **options: Any) -> Any:
    """np.matmul; what is large lies in such memory."""
    if type(x) is np.ndarray and type(y) is np.ndarray and not more and not options and x.ndim == 2 == y.ndim:
        dtype, rows, columns = x.dtype, len(x), y.shape[1]
        if rows * columns * dtype.itemsize >= _least() and dtype == y.dtype and dtype.isnative and dtype.kind in "fc":
            return np.matmul(x, y, out=_empty((rows, columns), dtype))
    return np.matmul(x, y, *more, **options)


_SINGLE = frozenset((np.ndarray, np.float32, np.float64))


def scaled(g: Any, x: Any) -> Any:
    """g * x, for a single number g; what is large lies in such memory. Where g is one, as at the start of most sweeps,
    that is x itself if nobody may write to x: it is not read and written for that."""
    if type(g) not in _SINGLE or type(x) is not np.ndarray or g.dtype != x.dtype or not x.dtype.isnative:
        return g * x
    if g == 1 and not writable(x):
        return x
    return g * x if x.nbytes < _least() else np.multiply(g, x, out=_empty(x.shape, x.dtype))


def owns_memory(x: np.ndarray) -> bool:
    """Whether the memory of an array is its own, or used again when x is gone: it is a view of no other array."""
    base = x.base
    return base is None or type(base).__name__ == "PooledBase"


def writable(x: Any) -> bool:
    """Whether somebody may write to x: to itself, or to what it is a view of, unless that was frozen. Memory that
    is used again is nobody else's while x is there."""
    while isinstance(x, np.ndarray) and type(x).__name__ not in ("PooledBase", "ExtendedBase", "Frozen"):
        if x.flags.writeable:
            return True
        x = x.base
    return False
