"""Rules of functions that reshape, reorder, join or split arrays."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from spmd.autodiff.apply import joined
from spmd.autodiff.devices import is_array
from spmd.autodiff.dispatch import by_numpy
from spmd.autodiff.primitive import composite, handlers
from spmd.autodiff.registry import primitive, rule
from spmd.autodiff.tracer import Array, bare, find, value_of
from spmd.errors import DifferentiationError


def along(axis: int, ndim: int, index) -> tuple:
    """The index that selects along one dimension: x[along(1, x.ndim, i)] is x[:, i]."""
    return (slice(None),) * (axis % ndim) + (index,)


def entries(x) -> Any:
    """x with its shape and dtype: lists and Python numbers, traced ones too, become arrays."""
    if type(x) is Array and not hasattr(value_of(x), "dtype"):
        return np.reshape(x, ())
    return x if hasattr(x, "shape") else np.asarray(x)


# What is known without looking at the entries, and what is printed, is no array and has no state.


def _on_bare(fun):
    return lambda *args, **kwargs: fun(*bare(args), **bare(kwargs))


def _on_shapes(fun):
    """A function that looks at the shapes of arrays alone; those of a device stay there."""

    def run(*args, **kwargs):
        return fun(
            *[np.broadcast_to(np.zeros((), a.dtype), a.shape) if is_array(a) else a for a in bare(args)], **kwargs
        )

    return run


def _on_memory(fun):
    """A function that asks whether two arrays overlap: the host's memory is not a device's."""

    def run(a, b, *args, **kwargs):
        a, b = value_of(a), value_of(b)
        return is_array(a) == is_array(b) and fun(a, b, *args, **kwargs)

    return run


def _printed(fun):
    def run(a, *args, **kwargs):
        value = value_of(a)
        return fun(value.get() if hasattr(value, "get") else value, *args, **kwargs)

    return run


metadata_functions: dict = {
    np.shape: lambda a: a.shape,
    np.ndim: lambda a: a.ndim,
    np.size: lambda a, axis=None: a.size if axis is None else math.prod(a.shape[i] for i in np.atleast_1d(axis)),
    np.iscomplexobj: lambda x: x.dtype.kind == "c",
    np.isrealobj: lambda x: x.dtype.kind != "c",
    np.tril_indices_from: lambda arr, k=0: np.tril_indices(arr.shape[-2], k, arr.shape[-1]),
    np.triu_indices_from: lambda arr, k=0: np.triu_indices(arr.shape[-2], k, arr.shape[-1]),
    np.diag_indices_from: lambda arr: np.diag_indices_from(np.empty(arr.shape, bool)),
    **{f: _on_bare(f) for f in (np.can_cast, np.common_type, np.min_scalar_type, np.result_type)},
    np.einsum_path: _on_shapes(np.einsum_path),
    **{f: _on_memory(f) for f in (np.may_share_memory, np.shares_memory)},
    **{f: _printed(f) for f in (np.array2string, np.array_repr, np.array_str)},
}
handlers.update(metadata_functions)

# Shape


def _reshape(g, _ans, _x, shape, order: Any = "C", copy=None):
    if order not in "CF":
        raise _unordered("np.reshape, in a backward sweep", order)
    return np.reshape(g, _x.shape, order=order)


def _unordered(where: str, order) -> Exception:
    return DifferentiationError.at(
        where,
        argument="order",
        got=f"{order!r}, which depends on how the array lies in memory",
        need="order 'C' or 'F'",
        mend="name the order that is meant",
    )


rule(np.reshape, _reshape)
rule(np.broadcast_to, lambda g, _ans, _x, shape: g)
rule(np.expand_dims, lambda g, _ans, _x, axis: np.reshape(g, _x.shape))
rule(np.squeeze, lambda g, _ans, _x, axis=None: np.reshape(g, _x.shape))
rule(np.copy, lambda g, _ans, _x: g)


@composite(np.ravel)
def ravel(a, order: Any = "C"):
    if order in ("A", "K") and a.ndim > 1:
        flags = getattr(value_of(a), "flags", None)
        if not (flags is None or flags.c_contiguous or flags.f_contiguous):
            raise _unordered("np.ravel", order)
        order = "C" if flags is None or flags.c_contiguous else "F"
    return np.reshape(a, -1, "C" if order in ("A", "K") else order)


def _each(f, arrays):
    results = tuple(f(a) for a in arrays)
    return results[0] if len(results) == 1 else results


@composite(np.atleast_1d)
def atleast_1d(*arrays):
    return _each(lambda a: a if np.ndim(a) else np.reshape(a, 1), arrays)


@composite(np.atleast_2d)
def atleast_2d(*arrays):
    return _each(lambda a: a if np.ndim(a) > 1 else np.reshape(a, (1, -1)), arrays)


@composite(np.atleast_3d)
def atleast_3d(*arrays):
    shapes = {0: (1, 1, 1), 1: (1, -1, 1)}
    return _each(lambda a: a if np.ndim(a) > 2 else np.reshape(a, shapes.get(np.ndim(a), (*np.shape(a), 1))), arrays)


@composite(np.broadcast_arrays)
def broadcast_arrays(*arrays, subok=False):
    shape = np.broadcast_shapes(*map(np.shape, arrays))
    return tuple(np.broadcast_to(a, shape) for a in joined(arrays))


@composite(np.meshgrid)
def meshgrid(*xi, copy=True, sparse=False, indexing="xy"):
    if indexing not in ("xy", "ij"):
        raise ValueError("np.meshgrid needs 'xy' or 'ij' for its indexing")
    n = len(xi)
    order = [1, 0, *range(2, n)] if indexing == "xy" and n > 1 else range(n)
    grid = [np.reshape(x, [-1 if i == k else 1 for i in range(n)]) for k, x in zip(order, joined(xi), strict=True)]
    return tuple(grid) if sparse else np.broadcast_arrays(*grid)


if hasattr(np, "astype"):

    @composite(np.astype)
    def astype(x, dtype, /, *, copy=True, device=None):
        return x.astype(dtype)


# Order


def _transpose_back(g, axes):
    return np.transpose(g, None if axes is None else np.argsort([a % g.ndim for a in axes]))


rule(np.transpose, lambda g, _ans, _x, axes=None: _transpose_back(g, axes))
rule(np.swapaxes, lambda g, _ans, _x, axis1, axis2: np.swapaxes(g, axis1, axis2))
rule(np.moveaxis, lambda g, _ans, _x, source, destination: np.moveaxis(g, destination, source))
rule(np.flip, lambda g, _ans, _x, axis=None: np.flip(g, axis))
rule(np.fliplr, lambda g, _ans, _x: np.fliplr(g))
rule(np.flipud, lambda g, _ans, _x: np.flipud(g))
rule(np.rot90, lambda g, _ans, _x, k=1, axes=(0, 1): np.rot90(g, -k, axes))
rule(np.roll, lambda g, _ans, _x, shift, axis=None: np.roll(g, np.negative(shift), axis))


@composite(np.matrix_transpose, np.linalg.matrix_transpose)
def matrix_transpose(x, /):
    return np.swapaxes(x, -1, -2)


@composite(np.rollaxis)
def rollaxis(a, axis, start=0):
    axis, start = axis % a.ndim, start + a.ndim if start < 0 else start
    return np.moveaxis(a, axis, start - (axis < start))


# Join


def _join(k, g, _ans, *_arrays, axis):
    sizes = [np.shape(a)[axis] for a in _arrays[: k + 1]]
    return g[along(axis, g.ndim, slice(sum(sizes[:-1]), sum(sizes)))]


@primitive("concatenate", variadic=_join)
def _concatenate(*arrays, axis):
    return np.concatenate(arrays, axis)


@primitive("stack", variadic=lambda k, g, _ans, *_arrays, axis: g[along(axis, g.ndim, k)])
def _stack(*arrays, axis):
    return np.stack(arrays, axis)


def cast(x, dtype, casting):
    if dtype is None:
        return x
    if not np.can_cast(x.dtype, dtype, casting):
        raise TypeError(f"cannot cast from {x.dtype} to {np.dtype(dtype)} by the rule {casting!r}")
    return x.astype(dtype)


@composite(np.concatenate)
def concatenate(arrays, /, axis=0, out=None, *, dtype=None, casting: Any = "same_kind"):
    if axis is None:
        arrays, axis = [np.ravel(a) for a in arrays], 0
    return cast(_concatenate(*arrays, axis=axis), dtype, casting)


@composite(np.stack)
def stack(arrays, axis=0, out=None, *, dtype=None, casting: Any = "same_kind"):
    return cast(_stack(*arrays, axis=axis), dtype, casting)


# Older releases of NumPy have np.row_stack as another name.
@composite(*{np.vstack, getattr(np, "row_stack", np.vstack)})
def vstack(tup, *, dtype=None, casting: Any = "same_kind"):
    return np.concatenate([np.atleast_2d(a) for a in tup], 0, dtype=dtype, casting=casting)


@composite(np.hstack)
def hstack(tup, *, dtype=None, casting: Any = "same_kind"):
    arrays = [np.atleast_1d(a) for a in tup]
    return np.concatenate(arrays, 0 if arrays[0].ndim == 1 else 1, dtype=dtype, casting=casting)


@composite(np.dstack)
def dstack(tup):
    return np.concatenate([np.atleast_3d(a) for a in tup], 2)


@composite(np.column_stack)
def column_stack(tup):
    return np.concatenate([a if np.ndim(a) > 1 else np.reshape(a, (-1, 1)) for a in tup], 1)


@composite(np.append)
def append(arr, values, axis=None):
    return np.concatenate([arr, values], axis)


@composite(np.block)
def block(arrays):
    def depth(tree):
        return 1 + depth(tree[0]) if isinstance(tree, list) else 0

    def leaves(tree):
        return [leaf for t in tree for leaf in leaves(t)] if isinstance(tree, list) else [tree]

    def build(tree, axis):
        if isinstance(tree, list):
            return np.concatenate([build(t, axis + 1) for t in tree], axis)
        return np.reshape(tree, (1,) * (ndim - np.ndim(tree)) + np.shape(tree))

    ndim = max(depth(arrays), *map(np.ndim, leaves(arrays)))
    return build(arrays, -depth(arrays))


# Part


@composite(np.array_split)
def array_split(ary, indices_or_sections, axis=0):
    size = ary.shape[axis]
    if np.ndim(indices_or_sections):
        cuts = [0, *indices_or_sections, size]
    else:
        if indices_or_sections < 1:
            raise ValueError(f"np.array_split needs a section or more, and got {indices_or_sections}")
        each, extra = divmod(size, int(indices_or_sections))
        cuts = [i * each + min(i, extra) for i in range(int(indices_or_sections) + 1)]
    return [ary[along(axis, ary.ndim, slice(low, high))] for low, high in itertools.pairwise(cuts)]


@composite(np.split)
def split(ary, indices_or_sections, axis=0):
    if np.ndim(indices_or_sections) == 0 and ary.shape[axis] % indices_or_sections:
        raise ValueError("array split does not result in an equal division")
    return np.array_split(ary, indices_or_sections, axis)


@composite(np.hsplit)
def hsplit(ary, indices_or_sections):
    return np.split(ary, indices_or_sections, min(ary.ndim - 1, 1))


@composite(np.vsplit)
def vsplit(ary, indices_or_sections):
    return np.split(ary, indices_or_sections, 0)


@composite(np.dsplit)
def dsplit(ary, indices_or_sections):
    return np.split(ary, indices_or_sections, 2)


if hasattr(np, "unstack"):

    @composite(np.unstack)
    def unstack(x, /, *, axis=0):
        return tuple(x[along(axis, x.ndim, i)] for i in range(x.shape[axis]))


# Repeat and pad


@composite(np.repeat)
def repeat(a, repeats, axis=None):
    if axis is None:
        a, axis = np.ravel(a), 0
    a = np.atleast_1d(a)
    axis %= a.ndim
    if np.size(repeats) != 1:
        return np.take(a, np.repeat(np.arange(a.shape[axis]), repeats), axis)
    n, shape = int(np.reshape(repeats, ())), a.shape
    columns = np.broadcast_to(np.expand_dims(a, axis + 1), (*shape[: axis + 1], n, *shape[axis + 1 :]))
    return np.reshape(columns, (*shape[:axis], shape[axis] * n, *shape[axis + 1 :]))


@composite(np.tile)
def tile(A, reps):
    reps = np.atleast_1d(reps).tolist()
    reps = [1] * (A.ndim - len(reps)) + reps
    shape = (1,) * (len(reps) - A.ndim) + A.shape
    pairs = list(zip(reps, shape, strict=True))
    tiles = np.broadcast_to(np.reshape(A, [m for n in shape for m in (1, n)]), [m for pair in pairs for m in pair])
    return np.reshape(tiles, [r * n for r, n in pairs])


@composite(np.resize)
def resize(a, new_shape):
    shape = tuple(new_shape) if np.ndim(new_shape) else (int(new_shape),)
    if min(shape, default=0) < 0:
        raise ValueError("np.resize needs lengths that are not negative")
    a, size = np.ravel(a), math.prod(shape)
    if a.size == 0 or size == 0:
        return np.zeros_like(a, shape=shape)
    return np.reshape(np.tile(a, -(-size // a.size))[:size], shape)


@composite(np.trim_zeros)
def trim_zeros(filt, trim="fb", axis=None):
    if trim.lower() not in ("fb", "bf", "f", "b"):
        raise ValueError(f"np.trim_zeros needs 'f', 'b' or both, and has {trim!r}")
    filt = entries(filt)
    if filt.ndim == 0:
        return filt
    axes = range(filt.ndim) if axis is None else [i % filt.ndim for i in np.atleast_1d(axis).tolist()]
    index: list[slice] = [slice(None)] * filt.ndim
    for i, positions in enumerate(np.nonzero(value_of(filt))):
        if i in axes:
            first, last = (int(positions.min()), int(positions.max()) + 1) if positions.size else (0, 0)
            whole = positions.size == 0
            index[i] = slice(
                first if whole or "f" in trim.lower() else None, last if whole or "b" in trim.lower() else None
            )
    return filt[tuple(index)]


def _inside(widths, shape) -> tuple[slice, ...]:
    return tuple(slice(low, low + n) for (low, _), n in zip(widths, shape, strict=True))


@primitive("pad", lambda g, _ans, _x, widths, **_: g[_inside(widths, _x.shape)])
def _pad(x, widths, **values):
    return np.pad(x, widths, **values)


def _reflected(x, axis, low, high, mode):
    """x with its reflections in its end points, 2 edge - x; "symmetric" repeats the edge. Several laps if need be."""
    first, period = (0, x.shape[axis]) if mode == "symmetric" else (1, x.shape[axis] - 1)
    while low or high:
        n = x.shape[axis]
        most = (n - first) // period * period
        before, after = min(most, low), min(most, high)
        part = lambda start, stop, x=x: x[along(axis, x.ndim, slice(start, stop))]
        left = 2 * part(0, 1) - np.flip(part(first, first + before), axis)
        right = 2 * part(n - 1, n) - np.flip(part(n - first - after, n - first), axis)
        x = np.concatenate([left, x, right], axis)
        low, high = low - before, high - after
    return x


_STATISTICS = {"maximum": "max", "minimum": "min", "mean": "mean", "median": "median"}

_PAD_OPTIONS = {
    "constant": "constant_values",
    "linear_ramp": "end_values",
    "reflect": "reflect_type",
    "symmetric": "reflect_type",
    **dict.fromkeys(_STATISTICS, "stat_length"),
    **dict.fromkeys(("edge", "empty", "wrap")),
}


def _ends(x, axis, widths, mode, options):
    """What mode puts before x and after it; `options` are a pair."""
    n = x.shape[axis]
    for k, (width, option) in enumerate(zip(widths, options, strict=True)):
        shape = [width if i == axis else m for i, m in enumerate(x.shape)]
        if mode == "constant":
            end = option
        elif mode == "linear_ramp":
            edge = x[along(axis, x.ndim, -k)]
            end = np.linspace(option, edge, width, endpoint=False, dtype=x.dtype, axis=axis)
            end = np.flip(end, axis) if k else end
        else:
            m = n if option is None else min(option, n)
            part = x[along(axis, x.ndim, slice(n - m, n) if k else slice(0, m))]
            end = getattr(np, _STATISTICS[mode])(part, axis, keepdims=True)
        yield np.broadcast_to(entries(end).astype(x.dtype), shape)


@composite(np.pad)
def pad(array, pad_width, mode: Any = "constant", **kwargs):
    ndim = array.ndim
    if isinstance(pad_width, dict):
        pad_width = [pad_width.get(i, pad_width.get(i - ndim, 0)) for i in range(ndim)]
        pad_width = [(w, w) if np.ndim(w) == 0 else w for w in pad_width]
    if callable(mode):
        raise DifferentiationError.at(
            "np.pad",
            argument="mode",
            got="a function, which writes into the padded array",
            need=f"one of {', '.join(_PAD_OPTIONS)}",
            mend="np.concatenate the edges that are meant",
        )
    if mode not in _PAD_OPTIONS:
        raise ValueError(f"np.pad has no mode {mode!r}")
    name = _PAD_OPTIONS[mode]
    if not set(kwargs) <= {name}:
        raise ValueError(f"np.pad takes {name or 'no option'} for the mode {mode!r}, and has {', '.join(kwargs)}")
    if ndim == 0:
        return array
    widths = tuple(map(tuple, np.broadcast_to(pad_width, (ndim, 2)).tolist()))  # plain numbers: no data of any device
    if mode == "empty" or (mode == "constant" and not find(kwargs, [])):
        return _pad(array, widths, mode=mode, **kwargs)
    if mode in _COPIES and kwargs.get("reflect_type", "even") != "odd":
        return _padded(array, widths, mode, kwargs)
    return by_numpy(
        np.pad, lambda x, widths, mode, **kwargs: _padded(x, widths, mode, kwargs), array, widths, mode, **kwargs
    )


_COPIES = {"edge", "reflect", "symmetric", "wrap"}
"""The modes in which every entry of the result is one of the array."""


def _padded(array, widths, mode, kwargs):
    """The array between what the mode puts before and after it, one dimension after the other."""
    ndim, name = array.ndim, _PAD_OPTIONS[mode]
    even = name == "reflect_type" and kwargs.get(name, "even") != "odd"
    sizes, options = array.shape, None
    if name != "reflect_type" and name is not None:
        options = np.broadcast_to(kwargs.get(name, None if name == "stat_length" else 0), (ndim, 2))
    for axis, (low, high) in enumerate(widths):
        if low == high == 0:
            continue
        if sizes[axis] == 0 and mode != "constant":
            raise ValueError(f"can't extend empty axis {axis} using modes other than 'constant' or 'empty'")
        if options is not None:
            before, after = _ends(array, axis, (low, high), mode, options[axis])
            array = np.concatenate([before, array, after], axis)
        elif name is None or even or sizes[axis] == 1:
            array = np.take(array, np.pad(np.arange(sizes[axis]), (low, high), mode=mode), axis)
        else:
            array = _reflected(array, axis, low, high, mode)
    return array
