"""Rules of functions that pick entries: by number, along diagonals, on one side of them."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from spmd.autodiff import devices, tracer
from spmd.autodiff.apply import joined
from spmd.autodiff.indexing import at
from spmd.autodiff.primitive import composite, handlers
from spmd.autodiff.registry import primitive, rule
from spmd.autodiff.rules.shape import along, entries
from spmd.autodiff.tracer import Array, value_of
from spmd.errors import DtypeError, describe


def pick(a, index) -> Any:
    """a[index], where the index may be an Array of a body, or of a device, and a may be bare."""
    a = devices.beside(a, value_of(index))
    array: Any = Array(a, tracer.mixing.ambient()) if type(index) is Array and type(a) is not Array else a
    return array[index]


def _always(fun):
    """Declare a composition of which each part decides by itself whether NumPy computes it."""
    return lambda f: handlers.setdefault(fun, f)


@composite(np.take)
def take(a, indices, axis=None, out=None, mode="raise"):
    if axis is None:
        a, axis = np.ravel(a), 0
    a = np.atleast_1d(a)
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
    if getattr(obj, "dtype", np.dtype(int)).kind not in "biu":
        raise DtypeError.at(
            "np.delete", argument="obj", got=describe(obj), need="integers or a mask", mend="obj.astype(int)"
        )
    arr, axis = (np.ravel(arr), 0) if axis is None else (arr, axis)
    return np.take(arr, np.delete(np.arange(arr.shape[axis]), obj), axis)


@composite(np.insert)
def insert(arr, obj, values, axis=None):
    """The entries of arr and values side by side, in the order in which NumPy inserts their numbers."""
    arr = entries(arr)
    arr, axis = (np.ravel(arr), 0) if axis is None else (arr, axis % arr.ndim)
    n, values = arr.shape[axis], entries(values)
    if not np.can_cast(values.dtype, arr.dtype, "same_kind"):
        raise DtypeError.at(
            "np.insert",
            argument="values",
            got=f"{values.dtype} for an array of {arr.dtype}",
            need=f"values that {arr.dtype} can hold: others would be cut, and their gradient lost",
            mend=f"arr.astype({str(values.dtype)!r})",
        )
    values = values.astype(arr.dtype)
    count = len(np.insert(np.arange(n), obj, 0)) - n
    if count == 1:
        values = np.reshape(values, (1,) * (arr.ndim - values.ndim) + values.shape)
        if np.ndim(obj) == 0 and not isinstance(obj, slice):
            values = np.moveaxis(values, 0, axis)
        count = values.shape[axis]
    values = np.broadcast_to(values, [count if i == axis else m for i, m in enumerate(arr.shape)])
    order = np.insert(np.arange(n), obj, np.arange(n, n + count))
    return np.take(np.concatenate([arr, values], axis), order, axis)


@composite(np.select)
def select(condlist, choicelist, default=0):
    if len(condlist) != len(choicelist) or not len(condlist):
        raise ValueError("np.select needs as many choices as conditions, and at least one")
    if any(entries(c).dtype != bool for c in condlist):
        raise TypeError("np.select needs conditions that are boolean arrays")
    result = default
    for condition, choice in zip(reversed(condlist), reversed(choicelist), strict=True):
        result = np.where(condition, choice, result)
    return result


@composite(np.choose)
def choose(a, choices, out=None, mode="raise"):
    n, a = len(choices), entries(a)
    if mode == "raise" and np.any(value_of((a < 0) | (a >= n))):
        raise ValueError(f"np.choose has {n} choices, and an entry that is none of 0 to {n - 1}")
    a = np.remainder(a, n) if mode == "wrap" else np.clip(a, 0, n - 1)
    result = choices[n - 1]
    for i in reversed(range(n - 1)):
        result = np.where(a == i, choices[i], result)
    return np.broadcast_to(result, np.broadcast_shapes(a.shape, np.shape(result)))


# The functions that these are given may use Arrays of a body, so that they are compositions there as well.


def _is_array(x) -> bool:
    return isinstance(x, list | np.ndarray | Array) or devices.is_array(x)


@_always(np.piecewise)
def piecewise(x, condlist, funclist, *args, **kw):
    x = entries(x)
    several = isinstance(condlist, list | tuple) or np.ndim(condlist) > 0
    if not several or (x.ndim and not _is_array(condlist[0])):
        condlist = [condlist]
    conditions = [entries(c).astype(bool) for c in condlist]
    if len(conditions) == len(funclist) - 1:
        conditions.append(np.logical_not(functools.reduce(np.logical_or, conditions)))
    if len(conditions) != len(funclist):
        raise ValueError(f"np.piecewise has {len(conditions)} conditions and {len(funclist)} functions")
    y = np.zeros_like(x)
    for condition, f in zip(conditions, funclist, strict=True):
        if not callable(f):
            y = at(y)[condition].set(f)
        elif np.any(value_of(condition)):
            y = at(y)[condition].set(f(pick(x, condition), *args, **kw))
    return y


@_always(np.apply_along_axis)
def apply_along_axis(func1d, axis, arr, *args, **kwargs):
    arr = entries(arr)
    axis %= arr.ndim
    rows = np.moveaxis(arr, axis, -1)
    outer = rows.shape[:-1]
    if not math.prod(outer):
        raise ValueError(f"np.apply_along_axis needs a row to apply to, and got the shape {arr.shape}")
    results = [entries(func1d(rows[i], *args, **kwargs)) for i in np.ndindex(outer)]
    stacked = np.reshape(np.stack(results), outer + results[0].shape)
    inner = range(len(outer), stacked.ndim)
    return np.moveaxis(stacked, tuple(inner), tuple(range(axis, axis + len(inner))))


@_always(np.apply_over_axes)
def apply_over_axes(func, a, axes):
    a = entries(a)
    for axis in np.atleast_1d(axes).tolist():
        axis += a.ndim if axis < 0 else 0
        result = func(a, axis)
        a, shape = (result if result.ndim == a.ndim else np.expand_dims(result, axis)), a.shape
        if a.ndim != len(shape):
            raise ValueError("np.apply_over_axes needs a function that keeps or removes one dimension")
    return a


@composite(np.ix_)
def ix_(*args):
    found = []
    for k, arg in enumerate(joined(args)):
        x = entries(arg)
        if x.ndim != 1:
            raise ValueError(f"np.ix_ needs sequences, and got an array of shape {x.shape}")
        # An empty list is one of no numbers, not of no floating numbers.
        x = np.flatnonzero(x) if x.dtype == bool else x.astype(int) if x is not arg and not x.size else x
        found.append(np.reshape(x, [-1 if i == k else 1 for i in range(len(args))]))
    return tuple(found)


@composite(np.lib.stride_tricks.sliding_window_view)
def sliding_window_view(x, window_shape, axis=None, *, subok=False, writeable=False):
    x = entries(x)
    widths = np.atleast_1d(window_shape).tolist()
    axes = range(x.ndim) if axis is None else [a % x.ndim for a in np.atleast_1d(axis).tolist()]
    if len(widths) != len(axes):
        raise ValueError("sliding_window_view needs one length for each axis")
    for a, n in zip(axes, widths, strict=True):
        starts = np.arange(x.shape[a] - n + 1)
        if not 0 <= n <= x.shape[a]:
            raise ValueError("sliding_window_view needs windows that fit into the array")
        x = np.moveaxis(np.take(x, starts[:, None] + np.arange(n), a), a + 1, -1)
    return x


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
    if v.ndim not in (1, 2):
        raise ValueError(f"np.diag needs an array of one or two dimensions, and got the shape {v.shape}")
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
