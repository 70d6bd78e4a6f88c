"""NumPy functions of global arrays that are run on the blocks as they lie, without a map: ufuncs, sums, stacks,
reshapes. Traced arrays have the derivative rules of NumPy's functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from spmd.array import PartitionedArray, as_block, device_of_worker, owned_on, relayout, share_copies
from spmd.autodiff.admission import admit
from spmd.autodiff.dtypes import mean_dtype
from spmd.autodiff.primitive import name_of
from spmd.autodiff.staging.recorder import is_slot
from spmd.autodiff.staging.together import at_worker
from spmd.errors import LayoutError, MeshError, describe, message
from spmd.global_functions import MAPPED, implements
from spmd.kernels import on_device
from spmd.layout import Layout, P
from spmd.layout_rules import Rule
from spmd.mesh import Mesh
from spmd.operators.splitting import normal_axis

_OPERANDS = {PartitionedArray, int, float, complex, bool}


def _operand(x: Any, where: str) -> Any:
    """An operand that is not a global array, checked."""
    if x is None or on_device(x) or is_slot(x) or isinstance(x, np.number | np.bool):
        return x
    return admit(x, where)


@implements(np.ufunc, rule=Rule.BLOCKWISE)
def _blockwise(ufunc, inputs, kwargs):
    """A ufunc of operands that agree in layout, on the blocks of every worker."""
    where = f"np.{ufunc.__name__}"
    inputs = [x if type(x) in _OPERANDS else _operand(x, where) for x in inputs]
    arrays = [x for x in inputs if type(x) is PartitionedArray]
    mesh, shape = common_mesh(where, arrays), broadcast_shape(where, inputs)
    layout = None
    if any(a.layout.unreduced for a in arrays):
        inputs = [x.settled if type(x) is PartitionedArray else x for x in inputs]
        arrays = [x for x in inputs if type(x) is PartitionedArray]
        layout = None if kwargs else _layout_of_sums(ufunc, inputs, arrays)
        if layout is None:
            inputs = [x.reduced if type(x) is PartitionedArray else x for x in inputs]
            arrays = [x for x in inputs if type(x) is PartitionedArray]
    if layout is None:
        layout = joint_layout(arrays, shape)
    if layout is not arrays[0].layout or len(arrays) > 1:
        inputs = [_for_blocks(x, layout) if type(x) is PartitionedArray else x for x in inputs]

    fun: Any = operator.pow if ufunc is np.power and not kwargs else ufunc  # `x ** 2` is faster than np.power

    def block(w: int) -> Any:
        with device_of_worker(mesh, w):
            result = fun(*(operand_part(x, layout, w, mesh) for x in inputs), **kwargs)
            return tuple(map(as_block, result)) if isinstance(result, tuple) else as_block(result)

    results = mesh.shared(layout, block)
    if isinstance(next(iter(results.values())), tuple):
        return tuple(PartitionedArray({w: r[k] for w, r in results.items()}, layout, mesh) for k in range(ufunc.nout))
    return PartitionedArray(results, layout, mesh)


def common_mesh(where: str, arrays: Sequence[PartitionedArray]) -> Mesh:
    """The mesh that global arrays lie on. Raises MeshError where there are several."""
    mesh = arrays[0].mesh
    for a in arrays[1:]:
        if a.mesh != mesh:
            raise MeshError.at(
                where,
                got=f"arrays on {mesh} and on {a.mesh}",
                need="arrays on one mesh",
                mend="spmd.put(x.numpy(), spec, mesh)",
            )
    return mesh


def of_parts(
    fun: Callable[..., Any], operands: Sequence[Any], layouts: Sequence[Layout], out: Layout, mesh: Mesh
) -> PartitionedArray:
    """The array whose blocks are fun of the blocks of operands. layouts: how each is laid out for it. out: of the
    result. Nothing is sent but what lays an operand out."""
    parts: list[Callable[[int], Any]] = []
    for x, layout in zip(operands, layouts, strict=True):
        if type(x) is PartitionedArray:
            parts.append(relayout(x, layout).blocks.__getitem__)
        else:
            parts.append(partial(operand_part, x, layout, mesh=mesh))

    def block(w: int) -> Any:
        with device_of_worker(mesh, w):
            return as_block(fun(*(part(w) for part in parts)))

    return PartitionedArray(mesh.shared(out, block), out, mesh)


_SUMS = {np.add, np.subtract}
_SIGNS = {np.negative, np.positive, np.conjugate}


def _layout_of_sums(ufunc: np.ufunc, inputs: Sequence[Any], arrays: Sequence[PartitionedArray]) -> Layout | None:
    """The layout of a result that stays the sum of what workers hold along some axes; None where it does not: the
    operands are reduced first.

    It stays for sums and differences of arrays that lie alike, for products with a finite number, and for changes of
    sign, none of which may change the dtype. Numbers of short floating point are added first: parts of a sum may be
    out of their range.
    """
    first, dtype = arrays[0].layout, arrays[0].dtype
    same_dtype = np.result_type(*(x.dtype if type(x) is PartitionedArray else x for x in inputs)) == dtype
    if not same_dtype or is_short(dtype):
        return None
    if ufunc in _SIGNS:
        return first
    if ufunc in _SUMS:
        return first if len(arrays) == len(inputs) and all(a.layout == first for a in arrays) else None
    if ufunc not in (np.multiply, np.divide) or len(arrays) > 1:
        return None
    number = inputs[1] if inputs[0] is arrays[0] else inputs[0]
    if is_slot(number) or not isinstance(number, int | float | complex | np.number) or not np.isfinite(number):
        return None  # a program does not know whether its numbers are finite
    divides = inputs[0] is arrays[0] and number != 0 and dtype.kind in "fc"
    return first if ufunc is np.multiply or divides else None


def is_short(dtype: np.dtype) -> bool:
    """Whether these are floating-point numbers that are added up in a longer dtype."""
    return dtype.kind not in "biuc" and mean_dtype(dtype) is not None


def broadcast_shape(where: str, operands: Sequence[Any]) -> tuple[int, ...]:
    """The shape to which operands broadcast. Raises LayoutError where they do not."""
    try:
        return np.broadcast_shapes(*map(np.shape, operands))
    except ValueError as error:
        raise LayoutError.at(
            where,
            got=" and ".join(map(describe, operands)),
            need="shapes that broadcast",
            mend="give them the same shape, or length 1 where one is to be repeated",
        ) from error


def joint_layout(arrays: Sequence[PartitionedArray], shape: tuple[int, ...]) -> Layout:
    """The layout of a result of operands that broadcast to a shape: what splits any of them splits it. Where they are
    split differently it is the layout of the largest that can have it."""
    layouts = [a.layout.reduced for a in arrays]
    first = layouts[0]
    if first.shape == shape and all(layout == first for layout in layouts):
        return first
    layout = _joint_layout(tuple(layouts), shape)
    for each in () if layout is not None else sorted(layouts, key=lambda each: -math.prod(each.shape)):
        layout = layout or _joint_layout((each,), shape)
    return layout or arrays[0].mesh.layout(shape, P())


def split_names(shape: tuple[int, ...], mesh: Mesh, names: tuple[str, ...], whole: Sequence[int] = ()) -> P:
    """A spec by which these axes split the longest dimension that need not be whole; P() if there is none."""
    free = [d for d in range(len(shape)) if d not in whole]
    if not free or not names:
        return P()
    longest = max(free, key=lambda d: shape[d])
    return P(*[None] * longest, names)


@lru_cache(maxsize=1024)
def part_layout(shape: tuple[int, ...], layout: Layout) -> Layout:
    """The layout of an operand of a shape that broadcasts to an array in a layout."""
    if shape == layout.shape:
        return layout
    if layout.spec is None:
        return Layout(shape, P(), layout.axes)
    skip = len(layout.shape) - len(shape)
    dims = [layout.spec.dims[d + skip] if n == layout.shape[d + skip] else () for d, n in enumerate(shape)]
    cuts = [layout.cuts[d + skip] if names else None for d, names in enumerate(dims)]
    return Layout(shape, P(*(names or None for names in dims)), layout.axes, cuts)


def layout_like(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The layout of an array of some shape as in another layout: equal to it if the shape is. Otherwise what splits a
    dimension splits the same dimension, counted from the first, in the same blocks if it is as long; dimensions that
    follow are whole. A grid serves shapes of as many dimensions; arrays of others are copied to all workers."""
    layout = layout.reduced
    invariant = layout.spec is None or layout.copies == "invariant"
    if shape == layout.shape and invariant:
        return layout
    ndim = len(layout.shape)
    same = [d < ndim and n == layout.shape[d] for d, n in enumerate(shape)]
    cuts = [layout.cuts[d] if is_same else None for d, is_same in enumerate(same)]
    if layout.spec is not None:
        return Layout(shape, P(*layout.spec.dims[: len(shape)]), layout.axes, cuts)
    if len(shape) != ndim:
        return Layout(shape, P(), layout.axes)
    return Layout.grid(shape, [len(cut) for cut in layout.cuts], layout.axes, layout.workers, cuts)


def _for_blocks(x: PartitionedArray, layout: Layout) -> PartitionedArray:
    """x as it lies if each worker has the part that its block of a result needs, else laid out anew."""
    if x.layout is layout:
        return x
    if x.layout.unreduced - layout.unreduced:
        x = x.reduced
    if _joint_layout((x.layout.reduced, layout.reduced), layout.shape) == layout.reduced:
        return x
    return relayout(x, part_layout(x.shape, layout.reduced))


@lru_cache(maxsize=1024)
def _joint_layout(layouts: tuple[Layout, ...], shape: tuple[int, ...]) -> Layout | None:
    """The layout of operands that broadcast to a shape; None if they are split differently."""
    grids = {layout for layout in layouts if layout.spec is None}
    if grids:
        alone = len(grids) == 1 and not any(layout.spec is not None and layout.spec.axes for layout in layouts)
        return next((grid for grid in grids if alone and grid.shape == shape), None)
    dims: list[tuple[str, ...]] = [()] * len(shape)
    cuts: list[tuple[int, ...] | None] = [None] * len(shape)
    for layout in layouts:
        for k, (names, cut) in enumerate(zip(layout.spec.dims, layout.cuts, strict=True)):
            d = k + len(shape) - len(layout.shape)
            if not names:
                continue
            if layout.shape[k] != shape[d] or (dims[d] and (dims[d], cuts[d]) != (names, cut)):
                return None
            dims[d], cuts[d] = names, cut
    used = [n for names in dims for n in names]
    if len(set(used)) < len(used):
        return None
    return Layout(shape, P(*dims), layouts[0].axes, cuts)


def operand_part(x, layout: Layout, worker: int, mesh: Mesh):
    """The part of an operand that enters a worker's block of the result."""
    if type(x) is PartitionedArray and x.layout == layout:
        return x.blocks[worker]
    x = at_worker(x, worker)
    box = layout.slices(worker)
    if type(x) is PartitionedArray:
        data, whole = x.blocks[worker], [not names for names in x.spec.dims]
    elif np.ndim(x) == 0:
        return x[()] if mesh.places is not None and isinstance(x, np.ndarray) else x
    else:
        data = mesh.places.own(x, worker) if mesh.places is not None else x if is_slot(x) else np.asarray(x)
        whole = [True] * data.ndim
    skip = len(box) - data.ndim
    long = [data.shape[d] == layout.shape[d + skip] for d in range(data.ndim)]
    cut = tuple(box[d + skip] if whole[d] and long[d] else slice(None) for d in range(data.ndim))
    return data[cut]


def _plain(option: Any) -> Any:
    """An option, if it is none of the arrays, which are compared entry by entry."""
    return option if option is None or option is True or option is np._NoValue else ...  # type: ignore[attr-defined]


@implements(np.sum, rule=Rule.SUMMED)
def _sum(a, axis=None, dtype=None, out=None, keepdims=False, **options) -> PartitionedArray:
    """np.sum over dimensions of the global array."""
    x = a
    keepdims = keepdims is not np._NoValue and bool(keepdims)  # type: ignore[attr-defined]
    dims = range(x.ndim) if axis is None else (axis,) if np.ndim(axis) == 0 else axis
    plain = all(option in (None, True, np._NoValue) for option in map(_plain, options.values()))
    if type(x) is not PartitionedArray or not plain or not x.ndim or is_short(x.dtype) or _repeats(dims, x.ndim):
        return MAPPED[np.sum](x, axis, dtype, None, keepdims, **options)
    x, summed = x.settled, sorted({normal_axis("np.sum", "axis", int(d), x.ndim) for d in dims})
    if x.layout.spec is None and len(summed) < x.ndim:
        x = relayout(x, x.mesh.layout(x.shape, split_names(x.shape, x.mesh, tuple(x.mesh.axes), summed)))
    if x.layout.unreduced and np.sum(np.zeros(0, x.dtype), dtype=dtype).dtype != x.dtype:
        x = x.reduced
    fun = partial(np.sum, axis=tuple(summed), dtype=dtype, keepdims=keepdims)
    total = of_parts(fun, [x], [x.layout], _summed_layout(x.layout, tuple(summed), keepdims), x.mesh)
    return total if total.ndim else total.reduced  # a number is what programs print, on one process only


def _repeats(dims: Any, ndim: int) -> bool:
    """Whether dimensions are named twice, or as if they were axes of the mesh."""
    found = [d if isinstance(d, str) else int(d) + ndim * (int(d) < 0) for d in dims]
    return len({*found}) < len(found) or any(isinstance(d, str) for d in found)


@lru_cache(maxsize=1024)
def _summed_layout(layout: Layout, summed: tuple[int, ...], keepdims: bool) -> Layout:
    """The layout of a sum over dimensions: unreduced along the axes that split them; all, for a grid."""
    ndim = len(layout.shape)
    split = [tuple(layout.axes)] * ndim if layout.spec is None else layout.spec.dims
    added = {n for d in summed for n in split[d]} | layout.unreduced
    dims = [d for d in range(ndim) if keepdims or d not in summed]
    spec = P(*(None if d in summed else split[d] for d in dims), unreduced=added)
    shape = [1 if d in summed else layout.shape[d] for d in dims]
    return Layout(shape, spec, layout.axes, [None if d in summed else layout.cuts[d] for d in dims])


@implements(np.broadcast_to, rule=Rule.PERMUTED)
def _broadcast_to(array: PartitionedArray, shape, subok=False) -> PartitionedArray:
    x, shape = array.settled, (shape,) if np.ndim(shape) == 0 else shape
    if x.layout.spec is None and not x.ndim and len(shape):
        x = relayout(x, x.mesh.layout((), P()))  # one number on all workers, such as the cotangent of a sum
    layout = joint_layout([x], tuple(shape))
    if x.layout.unreduced and _joint_layout((x.layout.reduced, layout), layout.shape) == layout:
        layout = layout.with_unreduced(x.layout.unreduced)
    x = _for_blocks(x, layout)
    return share_copies({w: np.broadcast_to(b, layout.block_shape(w)) for w, b in x.blocks.items()}, layout, x.mesh)


def _with_whole(layout: Layout, new: Mapping[int, int]) -> Layout:
    """A layout with additional whole dimensions. new: their lengths, by position."""
    dims: list[tuple[str, ...]] = [] if layout.spec is None else list(layout.spec.dims)
    cuts = list(layout.cuts)
    for d, n in sorted(new.items()):
        dims.insert(d, ())
        cuts.insert(d, (n,))
    shape = [sum(c) for c in cuts]
    if layout.spec is None:
        return Layout.grid(shape, [len(c) for c in cuts], layout.axes, layout.workers, cuts)
    return Layout(shape, P(*dims, unreduced=layout.unreduced), layout.axes, cuts)


@implements(np.expand_dims, rule=Rule.PERMUTED)
def _expand_dims(a: PartitionedArray, axis) -> PartitionedArray:
    x = a.settled
    ndim = x.ndim + np.size(axis)
    for d in np.atleast_1d(axis):
        if not -ndim <= d < ndim:
            need = f"a dimension of the result, from {-ndim} to {ndim - 1}"
            raise np.exceptions.AxisError(
                message("np.expand_dims", argument="axis", got=f"{d}, for {describe(x)}", need=need, mend="axis=0")
            )
    new = tuple(normal_axis("np.expand_dims", "axis", d, ndim) for d in np.atleast_1d(axis))
    layout = _with_whole(x.layout, dict.fromkeys(new, 1))
    return share_copies({w: np.reshape(b, layout.block_shape(w)) for w, b in x.blocks.items()}, layout, x.mesh)


@implements(np.stack, rule=Rule.PERMUTED)
def _stack(arrays, axis=0, out=None, *, dtype=None, casting: Any = "same_kind") -> PartitionedArray:
    """np.stack along a new, whole dimension."""
    if dtype is not None:
        return _stack(arrays, axis).astype(dtype, casting=casting)
    bare = lambda a: a if on_device(a) or is_slot(a) else admit(a, "np.stack", "arrays")
    arrays = [a.settled if type(a) is PartitionedArray else bare(a) for a in arrays]
    global_arrays = [a for a in arrays if type(a) is PartitionedArray]
    shape, mesh = global_arrays[0].shape, global_arrays[0].mesh
    if any(np.shape(a) != shape for a in arrays):
        raise LayoutError.at(
            "np.stack",
            got=" and ".join(describe(a) for a in arrays),
            need="arrays of one shape",
            mend="np.broadcast_to(x, shape) first",
        )
    layout = global_arrays[0].layout
    if len(global_arrays) < len(arrays) or any((a.layout, a.dtype) != (layout, arrays[0].dtype) for a in arrays):
        layout = joint_layout(global_arrays, shape)
    arrays = [_for_blocks(a, layout) if type(a) is PartitionedArray else a for a in arrays]
    d = normal_axis("np.stack", "axis", axis, len(shape) + 1)
    stacked = _with_whole(layout, {d: len(arrays)})
    dtype = np.result_type(*(a.dtype if hasattr(a, "dtype") else np.asarray(a).dtype for a in arrays))

    def block(w: int) -> np.ndarray:
        if layout.positions(w) is None:
            return owned_on(mesh, np.zeros(stacked.block_shape(w), dtype), w)
        with device_of_worker(mesh, w):
            return np.stack([operand_part(a, layout, w, mesh) for a in arrays], d)

    return share_copies({w: as_block(block(w)) for w in global_arrays[0].blocks}, stacked, mesh)


@implements(np.reshape, rule=Rule.RESHAPED)
def _reshape(a: PartitionedArray, shape, order="C", copy=None) -> PartitionedArray:
    """np.reshape, if it keeps the split dimensions."""
    x = a.settled
    new_shape = [int(n) for n in np.atleast_1d(shape)] if np.size(shape) else []
    if new_shape.count(-1) == 1:
        new_shape[new_shape.index(-1)] = x.size // max(1, math.prod(n for n in new_shape if n != -1))
    if math.prod(new_shape) != x.size or min(new_shape, default=0) < 0:
        raise LayoutError.at(
            "np.reshape",
            argument="shape",
            got=f"{shape}, for {describe(x)}",
            need=f"a shape of {x.size} entries",
            mend="-1 in one place stands for the length that fits",
        )
    if order != "C":
        return MAPPED[np.reshape](x, new_shape, order)
    spec, workers = x.layout.spec, x.layout.workers
    dims: list[tuple[str, ...]] = [()] * len(new_shape)
    cuts: list[tuple[int, ...]] = [(n,) for n in new_shape]
    first = 0
    for d, cut in enumerate(x.layout.cuts):
        if spec.dims[d] if spec is not None else len(cut) > 1:
            before = math.prod(x.shape[:d])
            fits = (n == x.shape[d] and math.prod(new_shape[:e]) == before for e, n in enumerate(new_shape))
            e = next((e for e, fit in enumerate(fits) if fit and e >= first), None)
            if e is None:
                return MAPPED[np.reshape](x, new_shape)
            first, cuts[e] = e + 1, cut
            if spec is not None:
                dims[e] = spec.dims[d]
    if spec is not None:
        layout = Layout(new_shape, P(*dims, unreduced=spec.unreduced), x.mesh.axes, cuts)
    else:
        layout = Layout.grid(new_shape, [len(cut) for cut in cuts], x.mesh.axes, workers, cuts, copies=x.layout.copies)
    return share_copies({w: b.reshape(layout.block_shape(w)) for w, b in x.blocks.items()}, layout, x.mesh)


def _like_function(make):
    """np.zeros_like and the like: laid out as x is, by `layout_like` where the shape is another."""

    def like(a, *options_in_order, shape=None, **options):
        x = a
        names = ("fill_value",) * (make is np.full_like) + ("dtype", "order", "subok")
        options |= dict(zip(names, options_in_order, strict=False))
        number = (options.pop("fill_value"),) if make is np.full_like else ()
        dtype = options.pop("dtype", None)
        if any(np.ndim(n) for n in number):
            raise LayoutError.at(
                name_of(make),
                argument="fill_value",
                got="an array",
                need="one number",
                mend="np.zeros_like(x) + values",
            )
        shape = x.shape if shape is None else tuple(shape) if np.ndim(shape) else (shape,)
        layout = layout_like(x.layout.reduced, shape)

        def block(w: int) -> np.ndarray:
            with device_of_worker(x.mesh, w):
                return as_block(make(x.blocks[w], *number, dtype=dtype, shape=layout.block_shape(w), **options))

        return PartitionedArray(x.mesh.shared(layout, block), layout, x.mesh)

    return like


for _make in (np.zeros_like, np.ones_like, np.full_like):
    implements(_make, rule=Rule.KEPT)(_like_function(_make))
implements(np.empty_like, rule=Rule.KEPT)(_like_function(np.zeros_like))
implements(np.real, rule=Rule.BLOCKWISE)(lambda val: val.on_blocks(np.real))
implements(np.imag, rule=Rule.BLOCKWISE)(lambda val: val.on_blocks(np.imag))
