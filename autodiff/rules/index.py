"""Rules of functions that pick entries: by number, along diagonals, on one side of them."""

from __future__ import annotations

import numpy as np

from spmd.autodiff.primitive import composite, primitive, rule
from spmd.autodiff.rules.shape import along


@composite(np.take)
def take(a, indices, axis=None, out=None, mode="raise"):
    if axis is None:
        a, axis = np.ravel(a), 0
    if mode == "wrap":
        indices = np.remainder(indices, a.shape[axis])
    elif mode == "clip":
        indices = np.clip(indices, 0, a.shape[axis] - 1)
    return a[along(axis, a.ndim, list(indices) if isinstance(indices, tuple) else indices)]


@composite(np.take_along_axis)
def take_along_axis(arr, indices, axis=-1):
    if axis is None:
        return np.ravel(arr)[indices]
    grid: list = list(np.ogrid[tuple(slice(n) for n in np.shape(arr))])
    grid[axis] = indices
    return arr[tuple(grid)]


@composite(np.compress)
def compress(condition, a, axis=None, out=None):
    return np.take(a, np.flatnonzero(condition), axis)


@composite(np.extract)
def extract(condition, arr):
    return np.take(arr, np.flatnonzero(condition))


@composite(np.delete)
def delete(arr, obj, axis=None):
    arr, axis = (np.ravel(arr), 0) if axis is None else (arr, axis)
    return np.take(arr, np.delete(np.arange(arr.shape[axis]), obj), axis)


@composite(np.select)
def select(condlist, choicelist, default=0):
    result = default
    for condition, choice in zip(reversed(condlist), reversed(choicelist), strict=True):
        result = np.where(condition, choice, result)
    return result


# Diagonals


@primitive("embed_diagonal", lambda g, _ans, _d, _shape, offset, axis1, axis2: np.diagonal(g, offset, axis1, axis2))
def embed_diagonal(d, shape, offset, axis1, axis2):
    """Zeros of `shape` with d on a diagonal: the transpose of np.diagonal."""
    rows, columns = shape[axis1], shape[axis2]
    *batch, n = d.shape
    flat = np.zeros_like(d, shape=(*batch, rows * columns))
    start = offset if offset >= 0 else -offset * columns
    flat[..., start : start + n * (columns + 1) : columns + 1] = d
    return np.moveaxis(np.reshape(flat, (*batch, rows, columns)), (-2, -1), (axis1, axis2))


rule(
    np.diagonal,
    lambda g, _ans, _x, offset=0, axis1=0, axis2=1: embed_diagonal(g, _x.shape, offset, axis1, axis2),
)
rule(np.tril, lambda g, _ans, _m, k=0: np.tril(g, k))
rule(np.triu, lambda g, _ans, _m, k=0: np.triu(g, k))


@composite(np.diag)
def diag(v, k=0):
    n = v.shape[0] + abs(k)
    return embed_diagonal(v, (n, n), k, 0, 1) if v.ndim == 1 else np.diagonal(v, k)


@composite(np.diagflat)
def diagflat(v, k=0):
    return np.diag(np.ravel(v), k)


@composite(np.trace)
def trace(a, offset=0, axis1=0, axis2=1, dtype=None, out=None):
    return np.sum(np.diagonal(a, offset, axis1, axis2), -1, dtype=dtype)


@composite(np.linalg.diagonal)
def linalg_diagonal(x, /, *, offset=0):
    return np.diagonal(x, offset, -2, -1)


@composite(np.linalg.trace)
def linalg_trace(x, /, *, offset=0, dtype=None):
    return np.trace(x, offset, -2, -1, dtype)
