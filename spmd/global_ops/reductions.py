"""Reductions of global arrays over dimensions that may be split: of the blocks, and then over the workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.autodiff.dtypes import mean_dtype
from spmd.autodiff.primitive import Method, name_of
from spmd.errors import DtypeError, LayoutError, describe
from spmd.global_functions import MAPPED
from spmd.global_ops.along import Along, along
from spmd.global_ops.call import as_spec, dims_of, global_of, global_value, layout_by, names_of, on_blocks, spec_of
from spmd.global_ops.registry import implements
from spmd.global_ops.whole import whole
from spmd.layout import Layout, P
from spmd.layout_rules import Rule
from spmd.mesh import WORKER
from spmd.operators import reductions
from spmd.operators.gather import all_gather
from spmd.placement import put

__all__ = ["reduced"]

_MISSING: Any = np._NoValue  # type: ignore[attr-defined]


def _or_none(option: Any) -> Any:
    return None if option is _MISSING else option


def reduced(
    where: str,
    make: Callable[..., Callable[..., Any]],
    x: Any,
    axis: Any,
    keepdims: Any,
    *static: Any,
    where_mask: Any = _MISSING,
) -> Any:
    """A reduction of x over dimensions, Invariant along the axes that split them.

    make(dims, names, layout, *static): the body, which reduces the dimensions of a block, and over the workers along
    the axes `names`, and keeps no dimension. layout: that of x. where_mask: a mask, a second operand of the body.
    """
    value = global_value(x)
    if value is None:  # the mask is a global array
        value = put(np.zeros(np.shape(x)), P(), global_value(where_mask).mesh)  # type: ignore[union-attr]
    spec, dims = as_spec(x), dims_of(where, axis, value.ndim)
    layout, split = layout_by(spec, value), names_of(spec, value.ndim)
    summed = {n for d in dims for n in split[d]}
    names, keep = tuple(n for n in value.mesh.axes if n in summed), _or_none(keepdims) is not None and bool(keepdims)
    kept = [() if d in dims else each for d, each in enumerate(split) if keep or d not in dims]
    operands, specs = [x], [spec]
    if where_mask is not _MISSING and where_mask is not True:
        where_mask = where_mask if hasattr(where_mask, "dtype") else np.asarray(where_mask)
        if where_mask.dtype != np.bool_:
            raise DtypeError.at(
                where, argument="where", got=describe(where_mask), need="a mask of booleans", mend="x != 0"
            )
        operands.append(np.broadcast_to(where_mask, value.shape))
        specs.append(spec)
    static = (make, dims, names, keep, layout, *static)
    return on_blocks(where, _reducing, static, operands, specs, spec_of(kept), value.mesh)


def _reducing(
    make: Callable[..., Callable[..., Any]], dims: tuple[int, ...], names: tuple[str, ...], keep: bool, *static: Any
) -> Callable[..., Any]:
    reduce = make(dims, names, *static)

    def body(*blocks: Any) -> Any:
        result = reduce(*blocks)
        return np.expand_dims(result, dims) if keep and dims else result

    return body


def _masked(x: Any, mask: tuple[Any, ...], identity: Any) -> Any:
    return np.where(mask[0], x, identity) if mask else x


def _total(x: Any, names: tuple[str, ...], dims: tuple[int, ...]) -> Any:
    """The sum over dimensions, and over the workers along these axes."""
    return reductions.sum(x, names, dims) if names else np.sum(x, axis=dims)


def _sum(dims: tuple[int, ...], names: tuple[str, ...], layout: Layout, dtype: Any, initial: Any) -> Callable[..., Any]:
    def body(x: Any, *mask: Any) -> Any:
        x = _masked(x if dtype is None else x.astype(dtype), mask, 0)
        total = _total(x, names, dims)
        total = total if dtype is None else total.astype(dtype)  # sums of small integers are wide
        return total if initial is None else total + total.dtype.type(initial)

    return body


def _mean(dims: tuple[int, ...], names: tuple[str, ...], layout: Layout, dtype: Any) -> Callable[..., Any]:
    def body(x: Any, *mask: Any) -> Any:
        x = x if dtype is None else x.astype(dtype)
        if not names and not mask:
            mean = np.mean(x, axis=dims)
        else:
            wide = np.dtype(np.float64) if x.dtype.kind in "biu" else mean_dtype(x.dtype)
            added = _masked(x if wide is None else x.astype(wide), mask, 0)
            total = _total(added, names, dims)
            count: Any = math.prod(layout.shape[d] for d in dims)
            if mask:
                hits = mask[0].astype(total.dtype)
                count = _total(hits, names, dims)
            mean = total / count
            mean = mean if x.dtype.kind in "biu" else mean.astype(x.dtype)
        return mean if dtype is None else mean.astype(dtype)

    return body


def _extremum(dims: tuple[int, ...], names: tuple[str, ...], layout: Layout, how: str, initial: Any) -> Callable:
    local, over = (np.max, reductions.max) if how == "max" else (np.min, reductions.min)
    pick = np.maximum if how == "max" else np.minimum

    def body(x: Any, *mask: Any) -> Any:
        start: Any = None if initial is None else x.dtype.type(initial)
        x = _masked(x, mask, start)
        if initial is not None and not math.prod(layout.shape[d] for d in dims):
            total = _total(x, names, dims)
            return (total + start).astype(x.dtype)  # of no entries
        result = over(x, names, dims) if names else local(x, axis=dims)
        return result if initial is None else pick(result, start)

    return body


def _product(dims: tuple[int, ...], names: tuple[str, ...], layout: Layout, dtype: Any, initial: Any) -> Callable:
    def body(x: Any, *mask: Any) -> Any:
        x = _masked(x if dtype is None else x.astype(dtype), mask, 1)
        part = np.prod(x, axis=dims)
        if names:
            part = np.prod(all_gather(part, names, to="invariant"), axis=0).astype(part.dtype)
        part = part if dtype is None else part.astype(dtype)
        return part if initial is None else part * part.dtype.type(initial)

    return body


def _count(dims: tuple[int, ...], names: tuple[str, ...], layout: Layout, of: str) -> Callable[..., Any]:
    """How many entries are zero, or not; and whether any or all are not."""

    def body(x: Any, *mask: Any) -> Any:
        hits = x == 0 if of == "all" else x != 0
        if mask:
            hits = hits & mask[0]
        hits = hits.astype(np.int64)
        count = _total(hits, names, dims)
        return count == 0 if of == "all" else count > 0 if of == "any" else count

    return body


def _variance(
    dims: tuple[int, ...], names: tuple[str, ...], layout: Layout, dtype: Any, ddof: Any, root: bool
) -> Callable[..., Any]:
    count = math.prod(layout.shape[d] for d in dims)

    def body(x: Any) -> Any:
        x = x if dtype is None else x.astype(dtype)
        short = None if x.dtype.kind in "biuc" else mean_dtype(x.dtype)
        wide = x if short is None else x.astype(short)
        mean = reductions.sum(wide, names, dims) / count if names else np.mean(wide, axis=dims)
        apart = np.abs(wide - np.expand_dims(mean, dims)) ** 2 if dims else np.abs(wide - mean) ** 2
        total = _total(apart, names, dims)
        variance = total / max(count - ddof, 0)
        result = _root(variance) if root else variance
        return result if short is None else result.astype(x.dtype)

    return body


def _root(x: Any) -> Any:
    """The square root, with derivative 0 at 0."""
    some = x != 0
    return np.where(some, np.sqrt(np.where(some, x, np.ones_like(x))), np.zeros_like(x))


def _place(dims: tuple[int, ...], names: tuple[str, ...], layout: Layout, how: str) -> Callable[..., Any]:
    """The place of the first largest (smallest) entry: in the whole array in order, or along one dimension."""
    local = np.argmax if how == "argmax" else np.argmin
    lengths = [layout.shape[d] for d in dims]

    def body(x: Any) -> Any:
        worker = WORKER.get()
        assert worker is not None
        box = layout.boxes[worker.index]
        # The dimensions that are reduced last, as one.
        rest = [d for d in range(len(layout.shape)) if d not in dims]
        x = np.transpose(x, (*rest, *dims))
        kept = x.shape[: len(rest)]
        sizes = x.shape[len(rest) :]
        n = math.prod(sizes)
        flat = np.reshape(x, (*kept, n))
        if not n:
            flat = np.zeros((*kept, 1), x.dtype, like=x)
        at = local(flat, axis=-1)
        entry = np.take_along_axis(flat, np.expand_dims(at, -1), -1)[..., 0]
        places = np.unravel_index(at, sizes if n else [1] * len(sizes))
        index = np.ravel_multi_index(
            tuple(p + box[d][0] if n else p for p, d in zip(places, dims, strict=True)), [max(1, m) for m in lengths]
        )
        if not names:
            return index.astype(np.intp)
        index = np.where(n > 0, index, math.prod(lengths))  # those of nothing come last
        entries, indices = all_gather(entry, names, to="invariant"), all_gather(index, names, to="invariant")
        order = np.argsort(indices, axis=0, kind="stable")
        entries = np.take_along_axis(entries, order, 0)
        indices = np.take_along_axis(indices, order, 0)
        boxes = [layout.boxes[w] for w in worker.group(names).members]
        count = sum(all(a < b for a, b in (box[d] for d in dims)) for box in boxes)  # of workers that have entries
        first = local(entries[:count], axis=0)
        return np.take_along_axis(indices, np.expand_dims(first, 0), 0)[0].astype(np.intp)

    return body


def _added(fun: Any, make: Callable[..., Callable[..., Any]], rule: Rule) -> None:
    @implements(fun, rule=rule)
    def handler(
        a: Any,
        axis: Any = None,
        dtype: Any = None,
        out: Any = None,
        keepdims: Any = _MISSING,
        initial: Any = None,
        where: Any = _MISSING,
    ) -> Any:
        return reduced(name_of(fun), make, a, axis, keepdims, dtype, _or_none(initial), where_mask=where)


_added(np.sum, _sum, Rule.SUMMED)  # `array_functions` has it for what is given no `initial` and no `where`
_added(np.prod, _product, Rule.REDUCED)


@implements(np.mean, rule=Rule.REDUCED)
def mean(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = _MISSING, *, where: Any = _MISSING
):
    """Reduced at once: if workers divided their parts of the sum, each would be rounded, and the mean of equal entries
    would be another number."""
    return reduced("np.mean", _mean, a, axis, keepdims, dtype, where_mask=where)


def _extreme(fun: Any, how: str) -> None:
    @implements(fun, rule=Rule.REDUCED)
    def handler(
        a: Any,
        axis: Any = None,
        out: Any = None,
        keepdims: Any = _MISSING,
        initial: Any = None,
        where: Any = _MISSING,
    ) -> Any:
        initial = _or_none(initial)
        if a.dtype.kind == "c":  # in an order of their own
            options = {"keepdims": keepdims, "initial": initial, "where": where}
            given = {name: option for name, option in options.items() if _or_none(option) is not None}
            return along(fun, Along(None, True), (a,), {"axis": axis, **given})
        if initial is None and where is not _MISSING and where is not True:
            raise LayoutError.at(
                name_of(fun),
                argument="initial",
                got="nothing, beside a mask",
                need="a number",
                mend="initial=-np.inf, say",
            )
        return reduced(name_of(fun), _extremum, a, axis, keepdims, how, initial, where_mask=where)


for _maximum in (np.max, np.amax):
    _extreme(_maximum, "max")
for _minimum in (np.min, np.amin):
    _extreme(_minimum, "min")


def _truth(fun: Any, of: str) -> None:
    @implements(fun, rule=Rule.REDUCED)
    def handler(a: Any, axis: Any = None, out: Any = None, keepdims: Any = _MISSING, *, where: Any = _MISSING) -> Any:
        return reduced(name_of(fun), _count, a, axis, keepdims, of, where_mask=where)


_truth(np.any, "any")
_truth(np.all, "all")


@implements(np.count_nonzero, rule=Rule.REDUCED)
def count_nonzero(a: Any, axis: Any = None, *, keepdims: bool = False):
    return reduced("np.count_nonzero", _count, a, axis, keepdims, "count")


def _deviation(fun: Any, root: bool) -> None:
    @implements(fun, rule=Rule.REDUCED)
    def handler(
        a: Any,
        axis: Any = None,
        dtype: Any = None,
        out: Any = None,
        ddof: Any = 0,
        keepdims: Any = _MISSING,
        *,
        correction: Any = _MISSING,
        where: Any = _MISSING,
        mean: Any = _MISSING,
    ) -> Any:
        ddof = ddof if _or_none(correction) is None else correction
        options = {"axis": axis, "dtype": dtype, "keepdims": keepdims, "where": where, "mean": mean}
        given = {name: option for name, option in options.items() if option is not _MISSING}
        kind = "" if dtype is None else np.dtype(dtype).kind
        if kind and (kind in "biuc" or a.dtype.kind == "c"):
            return whole(fun, (a,), {**given, "ddof": ddof})
        if where is _MISSING and mean is _MISSING:
            return reduced(name_of(fun), _variance, a, axis, keepdims, dtype, ddof, root)
        variance = _composed_variance(a, ddof, **given)
        return np.sqrt(variance) if root else variance


_deviation(np.var, root=False)
_deviation(np.std, root=True)


def _composed_variance(
    a: Any, ddof: Any, axis: Any, dtype: Any, keepdims: Any = False, mean: Any = None, **mask: Any
) -> Any:
    """The variance of the entries of a mask, around a given mean. mask: `where`, if there is one."""
    if mean is None:
        mean = np.mean(a, axis=axis, dtype=dtype, keepdims=True, **mask)
    apart = np.square(np.abs((a if dtype is None else a.astype(dtype)) - mean))
    ones = np.ones_like(a, dtype=mean.dtype).real
    count = np.sum(ones, axis=axis, keepdims=bool(keepdims), **mask) - ddof
    total = np.sum(apart, axis=axis, keepdims=bool(keepdims), **mask)
    return (total / np.maximum(count, 0)).astype(apart.dtype)


def _placed(fun: Any, how: str) -> None:
    @implements(fun, rule=Rule.REDUCED)
    def handler(a: Any, axis: Any = None, out: Any = None, *, keepdims: Any = _MISSING) -> Any:
        where = name_of(fun)
        if axis is not None and np.ndim(axis):
            raise LayoutError.at(where, argument="axis", got=str(axis), need="one dimension, or None", mend="axis=0")
        if not math.prod(a.shape[d] for d in dims_of(where, axis, len(a.shape))):
            raise LayoutError.at(
                where, got=describe(global_of(a)), need="an entry to choose", mend="ask for x.size first"
            )
        return reduced(where, _place, a, axis, keepdims, how)


_placed(np.argmax, "argmax")
_placed(np.argmin, "argmin")


@implements(np.ptp, rule=Rule.REDUCED)
def ptp(a: Any, axis: Any = None, out: Any = None, keepdims: Any = _MISSING):
    return np.max(a, axis, keepdims=keepdims) - np.min(a, axis, keepdims=keepdims)


def _of_ufunc(ufunc: np.ufunc, function: Any) -> None:
    @implements(Method((ufunc, "reduce")), rule=Rule.SUMMED if function is np.sum else Rule.REDUCED)
    def handler(array: Any, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: Any = False, **options: Any):
        takes = function in (np.sum, np.prod)
        if dtype is not None and not takes:
            array = array.astype(dtype)
        given = {"dtype": dtype} if dtype is not None and takes else {}
        run = function if global_value(array) is not None else MAPPED[function]  # else a mask is global
        return run(array, axis=axis, keepdims=keepdims, **given, **options)


for _ufunc, _function in {
    np.add: np.sum,
    np.multiply: np.prod,
    np.maximum: np.max,
    np.minimum: np.min,
    np.logical_and: np.all,
    np.logical_or: np.any,
}.items():
    _of_ufunc(_ufunc, _function)
