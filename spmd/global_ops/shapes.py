"""Functions that permute, add, remove and join dimensions of global arrays: what splits a dimension goes with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from spmd.array import PartitionedArray, check_usable, relayout
from spmd.array_functions import broadcast_shape, of_parts
from spmd.autodiff.registry import primitive
from spmd.errors import LayoutError, describe
from spmd.global_ops.along import Along, along, moved_spec
from spmd.global_ops.call import (
    Arguments,
    as_spec,
    dims_of,
    global_of,
    global_value,
    layout_by,
    names_of,
    on_blocks,
    spec_of,
)
from spmd.global_ops.registry import implements
from spmd.global_ops.whole import whole
from spmd.layout import Layout, P, block_sizes, offsets
from spmd.layout_rules import Rule
from spmd.mesh import WORKER
from spmd.operators.halo import halo_exchange
from spmd.operators.repartition import repartition
from spmd.operators.splitting import normal_axis

__all__ = ["permuted"]


def _split(x: Any) -> list[tuple[str, ...]]:
    """The axes that split each dimension, as x goes to a map."""
    return names_of(as_spec(x), global_of(x).ndim)


def permuted(where: str, x: Any, order: Sequence[int]) -> Any:
    """x with its dimensions in this order."""
    check_usable(where, global_of(x))
    return _permuted(x, tuple(order))


def _permuted_back(g: Any, _ans: Any, _x: Any, order: tuple[int, ...]) -> Any:
    return _permuted(g, tuple(order.index(d) for d in range(len(order))))


@primitive("np.transpose", _permuted_back)
def _permuted(x: PartitionedArray, order: tuple[int, ...]) -> PartitionedArray:
    x = x.settled
    if x.layout.spec is None:
        return _permuted(relayout(x, layout_by(as_spec(x), x)), order)
    layout = _permuted_layout(x.layout, order)
    return of_parts(lambda block: np.transpose(block, order), [x], [x.layout], layout, x.mesh)


@lru_cache(maxsize=1024)
def _permuted_layout(layout: Layout, order: tuple[int, ...]) -> Layout:
    spec = P(*(layout.spec.dims[d] for d in order), unreduced=layout.unreduced)
    return Layout([layout.shape[d] for d in order], spec, layout.axes, [layout.cuts[d] for d in order])


def _ndim(x: Any) -> int:
    return len(x.shape)


@implements(np.transpose, np.permute_dims, rule=Rule.PERMUTED)
def transpose(a: Any, axes: Any = None) -> Any:
    n = _ndim(a)
    order = [*range(n)][::-1] if axes is None else [normal_axis("np.transpose", "axes", d, n) for d in axes]
    if sorted(order) != [*range(n)]:
        raise LayoutError.at(
            "np.transpose",
            argument="axes",
            got=f"{axes}, for {describe(a)}",
            need=f"the {n} dimensions, each once",
            mend="np.moveaxis moves one",
        )
    return permuted("np.transpose", a, order)


@implements(np.matrix_transpose, rule=Rule.PERMUTED)
def matrix_transpose(x: Any, /) -> Any:
    return np.swapaxes(x, -1, -2)


@implements(np.swapaxes, rule=Rule.PERMUTED)
def swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    order = [*range(_ndim(a))]
    i, j = (normal_axis("np.swapaxes", name, d, len(order)) for name, d in (("axis1", axis1), ("axis2", axis2)))
    order[i], order[j] = order[j], order[i]
    return permuted("np.swapaxes", a, order)


@implements(np.moveaxis, rule=Rule.PERMUTED)
def moveaxis(a: Any, source: Any, destination: Any) -> Any:
    return permuted("np.moveaxis", a, _order(np.moveaxis, a, source, destination))


@implements(np.rollaxis, rule=Rule.PERMUTED)
def rollaxis(a: Any, axis: int, start: int = 0) -> Any:
    return permuted("np.rollaxis", a, _order(np.rollaxis, a, axis, start))


def _order(fun: Callable, a: Any, *options: Any) -> list[int]:
    """The order in which a function of NumPy puts the dimensions."""
    return [n - 1 for n in fun(np.empty([d + 1 for d in range(_ndim(a))], np.bool_), *options).shape]


@implements(np.squeeze, rule=Rule.PERMUTED)
def squeeze(a: Any, axis: Any = None) -> Any:
    ones = [d for d, n in enumerate(a.shape) if n == 1]
    dims = ones if axis is None else [*dims_of("np.squeeze", axis, _ndim(a))]
    if not set(dims) <= set(ones):
        raise ValueError("cannot select an axis to squeeze out which has size not equal to one")
    spec = moved_spec(as_spec(a), a.shape, dims)
    if spec is None:
        return whole(np.squeeze, (a,), {"axis": tuple(dims)})
    out = spec_of(names for d, names in enumerate(names_of(spec, _ndim(a))) if d not in dims)
    return on_blocks("np.squeeze", _squeezing, (tuple(dims),), [a], [spec], out, global_of(a).mesh)


def _squeezing(dims: tuple[int, ...]) -> Callable[..., Any]:
    return lambda x: np.squeeze(x, dims)


@implements(np.ravel, rule=Rule.RESHAPED)
def ravel(a: Any, order: Any = "C") -> Any:
    return np.reshape(a, (-1,), order=order)


def _rolling(spec: P, widths: tuple[tuple[int, int], ...], lengths: tuple[Any, ...]) -> Callable[..., Any]:
    local = tuple(d for d, (low, _) in enumerate(widths) if low and not lengths[d])

    def body(x: Any) -> Any:
        for d in local:
            x = np.roll(x, widths[d][0], d)
        if any(low and lengths[d] for d, (low, _) in enumerate(widths)):
            over = [w if lengths[d] else (0, 0) for d, w in enumerate(widths)]
            x = halo_exchange(x, spec, over, "periodic", sizes=[n or None for n in lengths])
        return x

    return body


@implements(np.roll, rule=Rule.KEPT)
def roll(a: Any, shift: Any, axis: Any = None) -> Any:
    """Along a split dimension each block gets the entries that come from its neighbours, and gives as many away."""
    value = global_value(a)
    if value is None or axis is None:
        return whole(np.roll, (a, shift), {"axis": axis})
    axes = (axis,) if np.ndim(axis) == 0 else tuple(axis)
    shifts = np.broadcast_to(shift, np.broadcast_shapes(np.shape(shift), (len(axes),))).tolist()
    if len(axes) == 1:
        axes = axes * len(shifts)
    total = [0] * value.ndim
    for s, d in zip(shifts, axes, strict=True):
        total[normal_axis("np.roll", "axis", d, value.ndim)] += s
    spec = as_spec(a)
    widths = []
    for n, s in zip(value.shape, total, strict=True):
        s = s % n if n else 0
        s = s - n if 2 * s > n else s  # the shorter way round
        widths.append((s, -s))
    split = _split(a)
    lengths = tuple(cut if names else None for cut, names in zip(layout_by(spec, value).cuts, split, strict=True))
    static = (spec_of(split), tuple(widths), lengths)
    return on_blocks("np.roll", _rolling, static, [a], [spec], spec, value.mesh)


_MISSING: Any = np._NoValue  # type: ignore[attr-defined]


@implements(np.diff, rule=Rule.INDEXED)
def diff(a: Any, n: int = 1, axis: int = -1, prepend: Any = _MISSING, append: Any = _MISSING) -> Any:
    """Along a split dimension each block gets the n entries that follow it."""
    d = normal_axis("np.diff", "axis", axis, _ndim(a))
    if prepend is not _MISSING or append is not _MISSING:
        line = tuple(1 if k == d else length for k, length in enumerate(a.shape))
        parts = [x for x in (prepend, a, append) if x is not _MISSING]
        return np.diff(np.concatenate([x if np.ndim(x) else np.broadcast_to(x, line) for x in parts], d), n, d)
    value = global_of(a)
    if n < 1 or not _split(a)[d]:
        return along(np.diff, Along(-1), (a,), {"n": n, "axis": d})
    spec = as_spec(a)
    lengths = tuple(cut if names else None for cut, names in zip(layout_by(spec, value).cuts, _split(a), strict=True))
    static = (spec_of(_split(a)), int(n), d, lengths)
    return on_blocks("np.diff", _differing, static, [a], [spec], static[0], value.mesh)


def _differing(spec: P, n: int, d: int, lengths: tuple[Any, ...]) -> Callable[..., Any]:
    widths = [(0, n if k == d else 0) for k in range(len(lengths))]
    return lambda x: np.diff(halo_exchange(x, spec, widths, sizes=lengths), n, d)


@implements(np.concatenate, rule=Rule.ALONG)
def concatenate(
    arrays: Any, /, axis: Any = 0, out: Any = None, *, dtype: Any = None, casting: Any = "same_kind"
) -> Any:
    arrays = [np.asarray(a) if isinstance(a, list | tuple) else a for a in arrays]
    options = {"dtype": dtype, "casting": casting}
    first = next(a for a in arrays if global_value(a) is not None)
    if axis is None:
        return np.concatenate([np.reshape(a, (-1,)) for a in arrays], axis=0, **options)
    d = normal_axis("np.concatenate", "axis", axis, _ndim(first))
    if any(len(np.shape(a)) != _ndim(first) for a in arrays):
        raise LayoutError.at(
            "np.concatenate",
            got=" and ".join(describe(a) for a in arrays),
            need="arrays of as many dimensions each",
            mend="np.expand_dims(x, axis) first",
        )
    if len({(*np.shape(a)[:d], *np.shape(a)[d + 1 :]) for a in arrays}) > 1:
        raise LayoutError.at(
            "np.concatenate",
            got=f"{' and '.join(describe(a) for a in arrays)}, along dimension {d}",
            need="arrays of equal lengths in all other dimensions",
            mend="transpose one of them, or name another axis",
        )
    spec = moved_spec(as_spec(first), first.shape, (d,))
    if spec is None:
        return whole(np.concatenate, (arrays,), {"axis": d, **options})
    spec = spec_of(names_of(spec, _ndim(first)))  # balanced: others may have other blocks
    arguments = Arguments((arrays,), {"axis": d, **options})
    return arguments.run(np.concatenate, [spec] * len(arguments.arrays), spec)


@implements(np.append, rule=Rule.ALONG)
def append(arr: Any, values: Any, axis: Any = None) -> Any:
    return np.concatenate([arr, values], axis)


@implements(np.vstack, rule=Rule.ALONG)
def vstack(tup: Any, *, dtype: Any = None, casting: Any = "same_kind") -> Any:
    return np.concatenate([_at_least(a, 2) for a in tup], axis=0, dtype=dtype, casting=casting)


@implements(np.hstack, rule=Rule.ALONG)
def hstack(tup: Any, *, dtype: Any = None, casting: Any = "same_kind") -> Any:
    arrays = [_at_least(a, 1) for a in tup]
    return np.concatenate(arrays, axis=0 if _ndim(arrays[0]) == 1 else 1, dtype=dtype, casting=casting)


@implements(np.column_stack, rule=Rule.ALONG)
def column_stack(tup: Any) -> Any:
    return np.concatenate([np.expand_dims(a, 1) if np.ndim(a) == 1 else _at_least(a, 2) for a in tup], axis=1)


@implements(np.atleast_1d, rule=Rule.PERMUTED)
def atleast_1d(*arys: Any) -> Any:
    found = tuple(_at_least(a, 1) for a in arys)
    return found[0] if len(found) == 1 else found


@implements(np.atleast_2d, rule=Rule.PERMUTED)
def atleast_2d(*arys: Any) -> Any:
    found = tuple(_at_least(a, 2) for a in arys)
    return found[0] if len(found) == 1 else found


def _at_least(a: Any, ndim: int) -> Any:
    missing = ndim - len(np.shape(a))
    return np.expand_dims(a, tuple(range(missing))) if missing > 0 else a


@implements(np.split, rule=Rule.INDEXED)
def split(ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    d = normal_axis("np.split", "axis", axis, _ndim(ary))
    if not np.ndim(indices_or_sections) and ary.shape[d] % indices_or_sections:
        raise ValueError(f"{ary.shape[d]} entries do not split into {indices_or_sections} equal parts")
    return np.array_split(ary, indices_or_sections, d)


@implements(np.array_split, rule=Rule.INDEXED)
def array_split(ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    d = normal_axis("np.split", "axis", axis, _ndim(ary))
    if np.ndim(indices_or_sections):
        marks = [0, *np.asarray(indices_or_sections).tolist(), ary.shape[d]]
    else:
        marks = offsets(block_sizes(ary.shape[d], int(indices_or_sections)))
    return [ary[(slice(None),) * d + (slice(a, b),)] for a, b in pairwise(marks)]


@implements(np.unstack, rule=Rule.INDEXED)
def unstack(x: Any, /, *, axis: int = 0) -> Any:
    d = normal_axis("np.unstack", "axis", axis, _ndim(x))
    return tuple(x[(slice(None),) * d + (k,)] for k in range(x.shape[d]))


@implements(np.reshape, rule=Rule.RESHAPED)
def reshape(a: Any, shape: Sequence[int], order: str = "C") -> Any:
    """Where a split dimension does not stay, each worker holds a range of the entries, before and after."""
    value = global_of(a)
    if order != "C":
        return whole(np.reshape, (a, tuple(shape)), {"order": order})
    names, mesh = tuple(n for dim in _split(a) for n in dim), value.mesh
    workers = math.prod(mesh.axes[n] for n in names)
    if not shape or min(value.shape[0], shape[0]) < workers:
        return whole(np.reshape, (a, tuple(shape)), {})
    spec = P(names)
    before, after = mesh.layout(value.shape, spec), mesh.layout(tuple(shape), spec)
    static = (before, after)
    return on_blocks("np.reshape", _reshaping, static, [a], [spec], spec, mesh)


def _flat(layout: Layout) -> Layout:
    """The layout of the entries in order, of an array whose rows are split."""
    row = math.prod(layout.shape[1:])
    return Layout(
        (layout.shape[0] * row,), spec_of(layout.spec.trimmed), layout.axes, [[n * row for n in layout.cuts[0]]]
    )


def _reshaping(before: Layout, after: Layout) -> Callable[..., Any]:
    flat = _flat(before), _flat(after)

    def body(x: Any) -> Any:
        worker = WORKER.get()
        assert worker is not None
        return np.reshape(repartition(np.reshape(x, (-1,)), *flat), after.block_shape(worker.index))

    return body


@implements(np.broadcast_arrays, rule=Rule.PERMUTED)
def broadcast_arrays(*args: Any, subok: bool = False) -> tuple[Any, ...]:
    shape = broadcast_shape("np.broadcast_arrays", args)
    return tuple(np.broadcast_to(a, shape) for a in args)


@implements(np.meshgrid, rule=Rule.PERMUTED)
def meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> tuple[Any, ...]:
    if indexing not in ("xy", "ij"):
        raise ValueError('np.meshgrid: indexing is "xy" or "ij"')
    n = len(xi)
    order = [1, 0, *range(2, n)] if indexing == "xy" and n > 1 else [*range(n)]
    lines = [
        np.expand_dims(np.reshape(x, (-1,)), [d for d in range(n) if d != k]) for x, k in zip(xi, order, strict=True)
    ]
    return tuple(lines) if sparse else tuple(np.broadcast_arrays(*lines))


# What needs no entries.


@implements(np.shape, rule=Rule.KNOWN)
def shape(a: Any) -> tuple[int, ...]:
    return tuple(a.shape)


@implements(np.ndim, rule=Rule.KNOWN)
def ndim(a: Any) -> int:
    return _ndim(a)


@implements(np.size, rule=Rule.KNOWN)
def size(a: Any, axis: Any = None) -> int:
    return math.prod(a.shape[d] for d in dims_of("np.size", axis, _ndim(a)))


@implements(np.iscomplexobj, rule=Rule.KNOWN)
def iscomplexobj(x: Any) -> bool:
    return x.dtype.kind == "c"


@implements(np.isrealobj, rule=Rule.KNOWN)
def isrealobj(x: Any) -> bool:
    return x.dtype.kind != "c"


def _dtypes(args: Sequence[Any]) -> list[Any]:
    return [a if global_value(a) is None else a.dtype for a in args]


@implements(np.result_type, rule=Rule.KNOWN)
def result_type(*arrays_and_dtypes: Any) -> np.dtype:
    return np.result_type(*_dtypes(arrays_and_dtypes))


@implements(np.common_type, rule=Rule.KNOWN)
def common_type(*arrays: Any) -> Any:
    return np.common_type(*(np.empty(0, a.dtype) for a in arrays))


@implements(np.can_cast, rule=Rule.KNOWN)
def can_cast(from_: Any, to: Any, casting: Any = "safe") -> bool:
    source, target = _dtypes([from_, to])
    return np.can_cast(source, target, casting)


@implements(np.copy, rule=Rule.KEPT)
def copy(a: Any, order: Any = "K", subok: bool = False) -> Any:
    return a


@implements(np.array_repr, rule=Rule.KNOWN)
def array_repr(arr: Any, *options: Any, **more: Any) -> str:
    return repr(arr)


@implements(np.array_str, rule=Rule.KNOWN)
def array_str(a: Any, *options: Any, **more: Any) -> str:
    return str(a)


@implements(np.array2string, rule=Rule.KNOWN)
def array2string(a: Any, *options: Any, **more: Any) -> str:
    return np.array2string(np.asarray(a), *options, **more)
