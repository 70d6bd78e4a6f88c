"""Work in pieces that fit into the cache: what NumPy computes in several passes then reads from memory once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.kernels.memory import pool

__all__ = ["CACHE", "STRETCH", "accurate", "by_planes", "dots", "into_rows"]

CACHE = 1 << 19
"""Bytes of one operand in a piece: several operands and temporaries fit into a core's own cache together."""

STRETCH = 4096
"""Entries of a row that are added up in their own precision; sums of sums are of float64. In loops, places in a stretch
are unsigned: only then the compiler makes vectors."""


def accurate(dtype: np.dtype) -> np.dtype:
    """The dtype to compute in: float32 for the short ones, float16, bfloat16 and float8; else the same."""
    short = dtype.itemsize < 4 and (dtype.kind == "f" or dtype.kind == "V" and dtype.name[0] in "bf")
    return np.dtype(np.float32) if short else dtype


def by_planes(f: Callable[..., Any], *arrays: np.ndarray) -> Any:
    """f(*arrays), where f works on every plane by itself: arrays (N, C, ...) of the same N and C; it gives such arrays.

    Short floating-point numbers are widened on the way, and results of the widened dtype are rounded once.
    """
    x = arrays[0]
    wide = accurate(x.dtype)
    n, c = x.shape[:2]
    planes = [a.reshape(n * c, 1, *a.shape[2:]) for a in arrays]
    step = max(1, CACHE // max(1, *(p[:1].size * wide.itemsize for p in planes)))
    outs: list[np.ndarray] = []
    several = False
    for start in range(0, max(1, n * c), step):
        piece = slice(start, start + step)
        found = f(*(p[piece].astype(wide) if p.dtype == x.dtype else p[piece] for p in planes))
        several = isinstance(found, tuple)
        each = found if several else (found,)
        if not outs:
            outs = [pool.empty((n * c, *y.shape[1:]), x.dtype if y.dtype == wide else y.dtype) for y in each]
        for out, y in zip(outs, each, strict=True):
            out[piece] = y
    shaped = tuple(out.reshape(n, c, *out.shape[2:]) for out in outs)
    return shaped if several else shaped[0]


def into_rows(f: Callable[..., None], outs: tuple[np.ndarray, ...], *arrays: np.ndarray, whole: bool = False) -> None:
    """f(*outs, *arrays), which writes into outs, on as many rows at a time as fit into the cache.

    The leading dimension of all arrays counts the rows. Short floating-point numbers are widened on the way, and the
    results are rounded once. whole: all rows at once where nothing is widened, as loops want it.
    """
    everything = (*outs, *arrays)
    rows = len(everything[0])
    short = any(accurate(a.dtype) != a.dtype for a in everything)
    if not rows:
        return
    if whole and not short:
        f(*everything)
        return
    step = max(1, CACHE // max(1, max(math.prod(a.shape[1:]) * accurate(a.dtype).itemsize for a in everything)))
    for start in range(0, rows, step):
        pieces = [a[start : start + step] for a in everything]
        wide = [
            np.empty(a.shape, accurate(a.dtype))
            if i < len(outs) and accurate(a.dtype) != a.dtype
            else a.astype(accurate(a.dtype), copy=False)
            for i, a in enumerate(pieces)
        ]
        f(*wide)
        for out, made in zip(pieces[: len(outs)], wide, strict=False):
            if made is not out:
                out[...] = made


def dots(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The inner products of rows, in stretches: BLAS adds up in few numbers, however long a row is."""
    rows, n = a.shape
    if n <= STRETCH:
        return np.vecdot(a, b)
    whole = n - n % STRETCH
    parts = [c[:, :whole].reshape(rows, -1, STRETCH) for c in (a, b)]
    found = np.sum(np.vecdot(*parts), axis=-1, dtype=float) + np.vecdot(a[:, whole:], b[:, whole:])
    return found.astype(a.dtype)
