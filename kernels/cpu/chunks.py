"""Work in pieces that fit into the cache, so that several passes of NumPy read memory once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.kernels.memory import pool

__all__ = ["CACHE", "STRETCH", "accurate", "by_planes", "dots", "into_rows"]

CACHE = 1 << 19
"""Bytes of an operand in a piece: several operands and temporaries fit into a core's own cache."""

STRETCH = 4096
"""Entries of a row that are summed in their own precision; sums of these sums are float64. In loops the indices within
a stretch are unsigned: only then does the compiler vectorise."""


def accurate(dtype: np.dtype) -> np.dtype:
    """The dtype to compute in: float32 for float16, bfloat16 and float8, the short dtypes; else the same."""
    short = dtype.itemsize < 4 and (dtype.kind == "f" or dtype.kind == "V" and dtype.name[0] in "bf")
    return np.dtype(np.float32) if short else dtype


def by_planes(f: Callable[..., Any], *arrays: np.ndarray) -> Any:
    """f(*arrays), where f maps each plane of arrays (N, C, ...) to a plane of one or several such arrays.

    Short dtypes are widened on the way, and results of the widened dtype are rounded once.
    """
    x = arrays[0]
    wide = accurate(x.dtype)
    n, c = x.shape[:2]
    planes = [a.reshape(n * c, 1, *a.shape[2:]) for a in arrays]
    step = max(1, CACHE // max(1, *(p[:1].size * wide.itemsize for p in planes)))
    outs: list[np.ndarray] = []
    is_tuple = False
    for start in range(0, max(1, n * c), step):
        piece = slice(start, start + step)
        results = f(*(p[piece].astype(wide) if p.dtype == x.dtype else p[piece] for p in planes))
        is_tuple = isinstance(results, tuple)
        ys = results if is_tuple else (results,)
        if not outs:
            outs = [pool.empty((n * c, *y.shape[1:]), x.dtype if y.dtype == wide else y.dtype) for y in ys]
        for out, y in zip(outs, ys, strict=True):
            out[piece] = y
    shaped = tuple(out.reshape(n, c, *out.shape[2:]) for out in outs)
    return shaped if is_tuple else shaped[0]


def into_rows(f: Callable[..., None], outs: tuple[np.ndarray, ...], *arrays: np.ndarray, whole: bool = False) -> None:
    """f(*outs, *arrays), which writes into outs, on as many rows at a time as fit into the cache.

    The leading dimension of all arrays counts the rows. Short dtypes are widened on the way, and the results are
    rounded once. whole: all rows at once where nothing is widened, for compiled loops.
    """
    operands = (*outs, *arrays)
    dtypes = [accurate(a.dtype) for a in operands]
    rows = len(operands[0])
    if not rows:
        return
    if whole and all(a.dtype == dtype for a, dtype in zip(operands, dtypes, strict=True)):
        f(*operands)
        return
    row_bytes = [math.prod(a.shape[1:]) * dtype.itemsize for a, dtype in zip(operands, dtypes, strict=True)]
    step = max(1, CACHE // max(1, *row_bytes))
    for start in range(0, rows, step):
        pieces = [a[start : start + step] for a in operands]
        wide = [
            np.empty(a.shape, dtype) if i < len(outs) and a.dtype != dtype else a.astype(dtype, copy=False)
            for i, (a, dtype) in enumerate(zip(pieces, dtypes, strict=True))
        ]
        f(*wide)
        for out, result in zip(pieces[: len(outs)], wide, strict=False):
            if result is not out:
                out[...] = result


def dots(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The inner products of rows, in stretches: BLAS sums a row in few accumulators, however long it is."""
    rows, n = a.shape
    if n <= STRETCH:
        return np.vecdot(a, b)
    whole = n - n % STRETCH
    parts = [c[:, :whole].reshape(rows, -1, STRETCH) for c in (a, b)]
    sums = np.sum(np.vecdot(*parts), axis=-1, dtype=float) + np.vecdot(a[:, whole:], b[:, whole:])
    return sums.astype(a.dtype)
