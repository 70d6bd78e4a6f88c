"""Rows of a table by number. Sums are taken in a fixed order, short floating-point numbers in float32."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spmd.kernels import jit
from spmd.kernels.cpu.chunks import CACHE, accurate
from spmd.kernels.memory import pool


def take_rows(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The rows that ids name; zeros where they are -1."""
    shape = (*ids.shape, *table.shape[1:])
    if not table.shape[0]:
        return pool.zeros(shape, table.dtype)
    out = pool.empty(shape, table.dtype)
    np.take(table, ids, axis=0, out=out, mode="clip")  # in this mode nothing is checked or copied on the way
    if ids.size and ids.min() < 0:
        out[ids < 0] = 0
    return out


def add_rows(ids: np.ndarray, g: np.ndarray, rows: int) -> np.ndarray:
    """A table of so many rows, each the sum of the entries of g that ids give to it."""
    shape = (rows, *g.shape[ids.ndim :])
    wide, each = accurate(g.dtype), math.prod(shape[1:])
    if not ids.size or not rows * each:
        return pool.zeros(shape, g.dtype)
    flat, entries = np.ascontiguousarray(ids, np.int64).reshape(-1), g.reshape(ids.size, each)
    if g.dtype.char in "fdFD" and jit.fits(g):
        out, real = pool.empty(shape, wide), g.dtype.type(0).real.dtype
        _sum(out.reshape(rows, each).view(real), np.zeros(rows, bool), flat, np.ascontiguousarray(entries).view(real))
        return out
    out = pool.zeros(shape, wide)
    into = out.reshape(rows, each)
    if wide != g.dtype and jit.available():
        step = max(1, CACHE // (each * 4))
        for k in range(0, ids.size, step):
            _add(into, flat[k : k + step], np.ascontiguousarray(entries[k : k + step], wide))
    else:
        _add_sorted(into, flat, entries)
    return out if wide == g.dtype else _rounded(out, g.dtype)


@jit.loops("out", "seen")
def _sum(out: Any, seen: Any, ids: Any, g: Any) -> None:
    """The first entry of a row is written, others are added to it; so nothing is zeroed before."""
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
    """Without numba: entries of one row are brought together, and added up by NumPy."""
    order = np.argsort(ids, kind="stable")
    order = order[np.searchsorted(ids[order], 0) :]
    step = max(1, CACHE // max(1, out.shape[1] * out.itemsize))
    for start in range(0, len(order), step):
        some = order[start : start + step]
        to = ids[some]
        first = np.flatnonzero(np.diff(to, prepend=-1))
        out[to[first]] += np.add.reduceat(g[some], first, axis=0, dtype=out.dtype)


def _rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    out = pool.empty(x.shape, dtype)
    out[...] = x
    return out
