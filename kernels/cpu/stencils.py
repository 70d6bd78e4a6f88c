"""Stencils that read and write memory once: by `spmd.kernels.cpu.shifts` with numba, else by
`spmd.kernels.cpu.neighbours`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from spmd.kernels import jit
from spmd.kernels.cpu.chunks import CACHE, accurate
from spmd.kernels.cpu.neighbours import inside, weighted_sums
from spmd.kernels.cpu.shifts import shifted_products, shifted_sums
from spmd.kernels.memory import pool
from spmd.kernels.windows import reach

Pair = tuple[int, int]
Offsets = Sequence[Sequence[int]]


def stencil(
    x: np.ndarray, offsets: Offsets, weights: Sequence[Any], padding: Sequence[Pair], loose: Sequence[int] = ()
) -> np.ndarray:
    """y[i] = sum over k of weights[k] * x[i + offsets[k]]; the last dimensions of x are those of the offsets.

    loose: those of them at whose ends the entries that see padding may be anything.
    """
    wide = accurate(x.dtype)
    if wide != x.dtype:
        result = stencil(x.astype(wide), offsets, weights, padding, loose)
        with np.errstate(all="ignore"):  # an overflow may be one of loose ends
            return result.astype(x.dtype)
    source, table, lengths = _as_3d(x, offsets, padding)
    result = pool.empty((*x.shape[: x.ndim - len(padding)], *lengths[3 - len(padding) :]), x.dtype)
    out = result.reshape(source.shape[0], *lengths)
    if out.size == 0:
        return result
    factors = np.asarray([np.asarray(w) for w in weights]).astype(x.dtype)
    if source.size == 0:
        out.fill(0)
    elif x.dtype.char in "fd" and jit.fits(x):
        shifted_sums(out, np.ascontiguousarray(source)[:, None], table, factors[None])
    else:
        weighted_sums(out, source, table[:, 1:], factors, [3 - len(padding) + d for d in loose])
    return result


def stencil_weights(g: np.ndarray, x: np.ndarray, offsets: Offsets, padding: Sequence[Pair]) -> np.ndarray:
    """For each offset the sum over i of g[i] * x[i + offset]."""
    dtype = np.result_type(g, x)
    wide = accurate(dtype)
    source, table, lengths = _as_3d(x.astype(wide, copy=False), offsets, padding)
    wide_g = np.ascontiguousarray(g, wide).reshape(source.shape[0], *lengths)
    if wide.char in "fd" and jit.fits(wide_g, source):
        source = np.ascontiguousarray(source)[:, None]
        return shifted_products(wide_g, source, table, 1)[0].astype(dtype)
    weights = np.zeros(len(table), wide if wide.kind == "c" else np.float64)
    for k, (_, *at) in enumerate(table):
        spans = [inside(int(a), n, m) for a, n, m in zip(at, source.shape[1:], lengths, strict=True)]
        if all(a < b for a, b in spans):
            target = tuple(slice(a, b) for a, b in spans)
            read = tuple(slice(a + int(s), b + int(s)) for (a, b), s in zip(spans, at, strict=True))
            weights[k] = sum(_dot(a[target], b[read]) for a, b in zip(wide_g, source, strict=True))
    return weights.astype(dtype)


def _dot(a: np.ndarray, b: np.ndarray) -> Any:
    """The sum of a * b, of three dimensions each, by some rows of a layer at a time: only these are contiguous."""
    step = max(1, CACHE // max(1, a.shape[2] * a.itemsize))
    total = a.dtype.type(0) if a.dtype.kind == "c" else 0.0
    for z in range(a.shape[0]):
        for y in range(0, a.shape[1], step):
            total += np.dot(a[z, y : y + step].reshape(-1), b[z, y : y + step].reshape(-1))
    return total


def _as_3d(x: np.ndarray, offsets: Offsets, padding: Sequence[Pair]) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """x with one leading and three spatial dimensions; the table of taps for `shifts`, with 0, the plane, and the shift
    against the result; the lengths of the result."""
    dims = len(padding)
    lead, n = x.shape[: x.ndim - dims], x.shape[x.ndim - dims :]
    table, lengths = _taps(n, tuple(map(tuple, offsets)), tuple(map(tuple, padding)))
    return x.reshape(math.prod(lead), *(1,) * (3 - dims), *n), table, lengths


@lru_cache(maxsize=1024)
def _taps(
    n: tuple[int, ...], offsets: tuple[tuple[int, ...], ...], padding: tuple[Pair, ...]
) -> tuple[np.ndarray, tuple[int, ...]]:
    dims, ends = len(padding), reach(offsets)
    lengths = tuple(
        max(0, k + before + after - low - high)
        for k, (before, after), (low, high) in zip(n, padding, ends, strict=True)
    )
    table = np.zeros((len(offsets), 4), np.int64)
    table[:, 4 - dims :] = np.asarray(offsets) + [
        low - before for (low, _), (before, _) in zip(ends, padding, strict=True)
    ]
    table.flags.writeable = False
    return table, (*(1,) * (3 - dims), *lengths)
