"""Memory of large results, which a pool may provide, and whether an array may be written to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["owns_memory", "product", "scaled", "set_allocator", "writable"]

_empty: Callable[..., np.ndarray] = np.empty
_minimum: Callable[[], int] = lambda: sys.maxsize


def set_allocator(empty: Callable[..., np.ndarray], minimum: Callable[[], int]) -> None:
    """Allocate results of at least minimum() bytes by empty(shape, dtype)."""
    global _empty, _minimum
    _empty, _minimum = empty, minimum


def product(x: Any, y: Any, /, *more: Any, **options: Any) -> Any:
    """np.matmul; a large result comes from the pool."""
    if type(x) is np.ndarray and type(y) is np.ndarray and not more and not options and x.ndim == 2 == y.ndim:
        dtype, rows, columns = x.dtype, len(x), y.shape[1]
        if rows * columns * dtype.itemsize >= _minimum() and dtype == y.dtype and dtype.isnative and dtype.kind in "fc":
            return np.matmul(x, y, out=_empty((rows, columns), dtype))
    return np.matmul(x, y, *more, **options)


_SINGLE = frozenset((np.ndarray, np.float32, np.float64))


def scaled(g: Any, x: Any) -> Any:
    """g * x, for a single number g; a large result comes from the pool.

    If g is 1, as at the start of most sweeps, the result is x itself, unless x may be written to."""
    if type(g) not in _SINGLE or type(x) is not np.ndarray or g.dtype != x.dtype or not x.dtype.isnative:
        return g * x
    if g == 1 and not writable(x):
        return x
    return g * x if x.nbytes < _minimum() else np.multiply(g, x, out=_empty(x.shape, x.dtype))


def owns_memory(x: np.ndarray) -> bool:
    """Whether x is a view of no other array: it owns its memory, or has it from the pool."""
    base = x.base
    return base is None or type(base).__name__ == "PooledBase"


def writable(x: Any) -> bool:
    """Whether x, or an array that it is a view of, is writable. The search stops at frozen arrays, and at memory of the
    pool, which belongs to x alone."""
    while isinstance(x, np.ndarray) and type(x).__name__ not in ("PooledBase", "ExtendedBase", "Frozen"):
        if x.flags.writeable:
            return True
        x = x.base
    return False
