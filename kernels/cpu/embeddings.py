"""Rows of a table by index. Sums have a fixed order; short dtypes are summed in float32."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spmd.kernels import jit
from spmd.kernels.cpu.chunks import CACHE, accurate
from spmd.kernels.memory import pool


def take_rows(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The rows of ids; zeros where they are -1."""
    shape = (*ids.shape, *table.shape[1:])
    if not table.shape[0]:
        return pool.zeros(shape, table.dtype)
    out = pool.empty(shape, table.dtype)
    np.take(table, ids, axis=0, out=out, mode="clip")  # this mode neither checks nor copies
    if ids.size and ids.min() < 0:
        out[ids < 0] = 0
    return out


def add_rows(ids: np.ndarray, g: np.ndarray, rows: int) -> np.ndarray:
    """A table of so many rows, each the sum of the entries of g with its id."""
    shape = (rows, *g.shape[ids.ndim :])
    wide, row_size = accurate(g.dtype), math.prod(shape[1:])
    if not ids.size or not rows * row_size:
        return pool.zeros(shape, g.dtype)
    flat_ids, entries = np.ascontiguousarray(ids, np.int64).reshape(-1), g.reshape(ids.size, row_size)
    if g.dtype.char in "fdFD" and jit.fits(g):
        out, real = pool.empty(shape, wide), g.dtype.type(0).real.dtype
        table, entries = (np.ascontiguousarray(a).view(real) for a in (out.reshape(rows, row_size), entries))
        _sum(table, np.zeros(rows, bool), flat_ids, entries)
        return out
    out = pool.zeros(shape, wide)
    table = out.reshape(rows, row_size)
    if wide != g.dtype and jit.available():
        step = max(1, CACHE // (row_size * 4))
        for k in range(0, ids.size, step):
            _add(table, flat_ids[k : k + step], np.ascontiguousarray(entries[k : k + step], wide))
    else:
        _add_sorted(table, flat_ids, entries)
    if wide == g.dtype:
        return out
    rounded = pool.empty(shape, g.dtype)
    rounded[...] = out
    return rounded


@jit.loops("out", "seen")
def _sum(out: Any, seen: Any, ids: Any, g: Any) -> None:
    """The first entry of a row is written, and others are added to it, so nothing is zeroed before."""
    for i in range(ids.shape[0]):
        row = ids[i]
        if row < 0:
            continue
        if seen[row]:
            for j in range(g.shape[1]):
                out[row, j] += g[i, j]
        else:
            seen[row] = True
            for j in range(g.shape[1]):
                out[row, j] = g[i, j]
    for row in range(out.shape[0]):
        if not seen[row]:
            for j in range(g.shape[1]):
                out[row, j] = 0


@jit.loops("out")
def _add(out: Any, ids: Any, g: Any) -> None:
    for i in range(ids.shape[0]):
        row = ids[i]
        if row >= 0:
            for j in range(g.shape[1]):
                out[row, j] += g[i, j]


def _add_sorted(out: np.ndarray, ids: np.ndarray, g: np.ndarray) -> None:
    """Without numba: sort the entries by row, and let NumPy sum those of each row."""
    order = np.argsort(ids, kind="stable")
    order = order[np.searchsorted(ids[order], 0) :]
    step = max(1, CACHE // max(1, out.shape[1] * out.itemsize))
    for start in range(0, len(order), step):
        piece = order[start : start + step]
        rows = ids[piece]
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        out[rows[starts]] += np.add.reduceat(g[piece], starts, axis=0, dtype=out.dtype)
