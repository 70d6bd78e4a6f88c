"""What the functions of torch do with partitioned tensors: one table, by the names of torch's operators.

Each keeps the layout (elementwise functions, copies, views that keep dimensions), or gives the value of the whole
(reductions: a collective over the axes that split what is reduced; products and decompositions: on the whole, on every
worker), or raises. What has no line here raises: nothing takes a block for the whole.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from spmd.bridge.torch.drawing import drawing
from spmd.bridge.torch.function import apply, seat_of
from spmd.bridge.torch.partitioned import MEND, Parameter, PartitionedTensor, gathered, like, worker_of
from spmd.bridge.torch.tensor import Tensor
from spmd.errors import LayoutError, describe, message
from spmd.layout import Layout, P
from spmd.operators.gather import AllGather
from spmd.operators.sums import Sum

__all__ = ["run", "unscaling"]

Shape = tuple[int, ...]
Handler = Callable[[Any, Any, dict[str, Any]], Any]

_NAMED: dict[str, Handler] = {}
_FOUND: dict[Any, Handler] = {}


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Apply an operator of torch."""
    handler = _FOUND.get(func)
    if handler is None:
        handler = _FOUND[func] = _handler(func)
    return handler(func, args, kwargs)


def _handler(func: Any) -> Handler:
    space, _, name = func._schema.name.partition("::")
    overload = func._overloadname
    if space == "aten":
        found = _NAMED.get(f"{name}.{overload}") or _NAMED.get(name)
        if found is not None:
            return found
        if name.startswith(("_foreach_", "_fused_")) and name.strip("_") not in _NO_LISTS:
            return _listwise
        if torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags:
            return _pointwise
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return _decomposed  # which comes here where autograd is off, as in inference mode
    return _refused


def _decomposed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func.decompose(*args, **kwargs)


def _names(*names: str) -> Callable[[Handler], Handler]:
    """Say which operators a function handles: by name, or by name and overload."""

    def add(handler: Handler) -> Handler:
        for name in " ".join(names).split():
            _NAMED[name] = handler
        return handler

    return add


def _error(func: Any, got: str, need: str, mend: str = MEND) -> LayoutError:
    return LayoutError(message(f"torch's {func._schema.name.partition('::')[2]}", got=got, need=need, mend=mend))


def _lead(args: Any) -> PartitionedTensor:
    """The first partitioned tensor among arguments."""
    return next(_partitioned(args))


def _partitioned(args: Any) -> Iterator[PartitionedTensor]:
    for a in args:
        if isinstance(a, PartitionedTensor):
            yield a
        elif isinstance(a, list | tuple):
            yield from _partitioned(a)


def _refused(func: Any, args: Any, kwargs: dict[str, Any]) -> NoReturn:
    raise _error(
        func,
        describe(_lead((*args, *kwargs.values()))),
        "an elementwise function, a reduction, or a product outside of autograd",
    )


def _writes(func: Any) -> bool:
    """Whether an operator writes to its first argument."""
    alias = func._schema.arguments[0].alias_info if func._schema.arguments else None
    return alias is not None and alias.is_write


def _no_plain_target(func: Any, target: Any, source: PartitionedTensor) -> None:
    if not isinstance(target, PartitionedTensor):
        raise _error(
            func,
            f"{describe(source)}, to be written to a tensor of this worker's own",
            "a tensor of one kind: what is written to would not know that it holds a block",
            "x.copy_(p.whole()), which is collective; or x.copy_(p.block()), where x is a block too",
        )


# Elementwise functions


def _part(func: Any, x: Any, shape: Shape, lead: PartitionedTensor, layout: Layout) -> Any:
    """The part of an operand that meets this worker's block, where the whole result has this shape and layout."""
    if isinstance(x, list | tuple):
        return type(x)(_part(func, y, shape, lead, layout) for y in x)
    if not isinstance(x, torch.Tensor):
        return x
    if isinstance(x, PartitionedTensor):
        return _refined(x, shape, layout, lead._placement.index)
    if isinstance(x, Tensor) and x.state.varying:
        raise LayoutError(
            message(
                f"torch's {func._schema.name.partition('::')[2]}",
                got=f"{describe(x)} beside {describe(lead)}",
                need="a tensor that is the same on all workers",
                mend=MEND,
            )
        )
    if not x.ndim:
        return x
    whole = x.expand(shape)
    if tuple(shape) != layout.shape:
        whole = whole.reshape(layout.shape)
    return whole[layout.slices(lead._placement.index)]


def _refined(x: PartitionedTensor, shape: Shape, layout: Layout, index: int) -> torch.Tensor:
    """The part of a block that meets that of a layout which splits more dimensions."""
    own: Any = x._placement.layout
    if own == layout or own.spec is None or tuple(x.shape) != own.shape:
        return x._block
    lead = len(shape) - x.ndim
    slices = layout.slices(index)[lead:]
    return x._block[
        tuple(
            s if n == shape[lead + d] and not own.spec.dims[d] else slice(None)
            for d, (n, s) in enumerate(zip(x.shape, slices, strict=True))
        )
    ]


def _shape_of(args: Any) -> Shape:
    """The shape in which tensors meet."""
    shapes: list[Any] = []
    for a in args:
        if isinstance(a, torch.Tensor):
            shapes.append(a.shape)
        elif isinstance(a, list | tuple):
            shapes.extend(x.shape for x in a if isinstance(x, torch.Tensor))
    return tuple(torch.broadcast_shapes(*shapes))


def _common(func: Any, tensors: list[PartitionedTensor], shape: Shape) -> tuple[PartitionedTensor, Layout]:
    """The layout of what is made of these by elements."""
    lead = tensors[0]
    layout = lead._placement.layout
    if all(x._placement.layout == layout and tuple(x.shape) == shape for x in tensors):
        return lead, layout
    return lead, _broadcast_layout(func, tensors, shape)


def _broadcast_layout(func: Any, tensors: list[PartitionedTensor], shape: Shape) -> Layout:
    """The layout of tensors of several shapes, where their blocks broadcast as they do."""
    names: list[tuple[str, ...] | None] = [None] * len(shape)
    cuts: list[Any] = [None] * len(shape)
    axes = dict(tensors[0]._placement.layout.axes)
    for x in tensors:
        layout = x._placement.layout
        dims = () if layout.spec is None else layout.spec.dims
        fits = layout.spec is not None and tuple(x.shape) == layout.shape and layout.axes == axes
        lead = len(shape) - len(x.shape)
        for d, n in enumerate(x.shape) if fits else ():
            split, cut = dims[d], layout.cuts[d]
            if n != shape[lead + d]:
                fits = fits and not split
            elif split and not names[lead + d]:
                names[lead + d], cuts[lead + d] = split, cut
            elif split:
                fits = fits and names[lead + d] == split and cuts[lead + d] == cut
        if not fits:
            raise _error(
                func,
                " and ".join(f"{list(x.shape)} that lies as {x._placement.layout}" for x in tensors),
                "tensors that lie alike",
                "spt.Parameter(whole, spec) with one spec; or " + MEND,
            )
    used = [n for split in names for n in split or ()]
    if len(set(used)) < len(used):
        raise _error(
            func,
            f"dimensions that are split over the same axes, {used}",
            "one dimension to each",
            f"p.whole() of one; {MEND}",
        )
    return Layout(shape, P(*names), axes, cuts)


_SCALARS = (int, float, bool, complex, type(None))


def _pointwise(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    first = args[0]
    every = (*args, *kwargs.values()) if kwargs else args
    lead = first if type(first) is PartitionedTensor or isinstance(first, PartitionedTensor) else _lead(every)
    placement = lead._placement
    blocks: list[Any] = []
    for a in args:
        if isinstance(a, PartitionedTensor) and a._placement == placement and a.shape == lead.shape:
            blocks.append(a._block)
        elif type(a) in _SCALARS:
            blocks.append(a)
        else:
            return _general(func, args, kwargs, every)
    if any(isinstance(v, torch.Tensor) for v in kwargs.values()):
        return _general(func, args, kwargs, every)
    result = func(*blocks, **kwargs)
    if _writes(func):
        return first
    return _wrapped(result, lead, placement.layout, lead.shape)


def _general(func: Any, args: Any, kwargs: dict[str, Any], every: Any) -> Any:
    """An elementwise function of tensors of several kinds and shapes."""
    shape = _shape_of(every)
    tensors = list(_partitioned(every))
    lead, layout = _common(func, tensors, shape)
    target = args[0] if _writes(func) else kwargs.get("out")
    if target is not None:
        _no_plain_target(func, target, lead)
        if tuple(target.shape) != shape or target._placement.layout != layout:
            raise _error(
                func,
                f"a result of shape {list(shape)} that lies as {layout}, to be written to one of {list(target.shape)}",
                "a target that lies as the result",
            )
    part = lambda x: _part(func, x, shape, lead, layout)
    result = func(*map(part, args), **{k: part(v) for k, v in kwargs.items()})
    return target if target is not None else _wrapped(result, lead, layout, shape)


def _wrapped(result: Any, lead: PartitionedTensor, layout: Layout, shape: Shape) -> Any:
    if isinstance(result, torch.Tensor):
        return like(lead, result, layout, shape)
    return type(result)(_wrapped(r, lead, layout, shape) for r in result)


for _name in (
    "abs_ fill_ fill zero_ masked_fill_ floor_divide floor_divide_ eq_ ne_ lt_ le_ gt_ ge_ elu_backward "
    "softplus_backward leaky_relu_backward hardtanh_backward hardswish hardswish_ hardswish_backward "
    "hardsigmoid_backward "
    "hardshrink_backward softshrink_backward mish_backward log_sigmoid_forward log_sigmoid_backward "
    "isreal _conj _neg_view resolve_conj resolve_neg absolute_ fix_ negative_ copysign_ signbit heaviside_ "
    "nan_to_num_ where masked_fill sign_ softplus"
).split():
    _NAMED[_name] = _pointwise


_NO_LISTS = {"foreach_powsum"}


def _listwise(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Elementwise functions of lists: what stands at one place of the lists meets."""
    n = len(args[0])
    leads: list[tuple[PartitionedTensor, Layout, Shape] | None] = []
    for k in range(n):
        met = [v[k] for v in (*args, *kwargs.values()) if isinstance(v, list | tuple) and len(v) == n]
        tensors = list(_partitioned(met))
        if not tensors:
            leads.append(None)
            continue
        shape = _shape_of([x for x in met if isinstance(x, torch.Tensor)])
        leads.append((*_common(func, tensors, shape), shape))
    if _writes(func):
        for x, lead in zip(args[0], leads, strict=True):
            if lead is not None:
                _no_plain_target(func, x, lead[0])

    def blocks(v: Any) -> Any:
        if not isinstance(v, list | tuple):
            if isinstance(v, PartitionedTensor):
                _refused(func, args, kwargs)
            return v
        if len(v) != n:
            return v
        return [
            x if lead is None or not isinstance(x, torch.Tensor) else _part(func, x, lead[2], lead[0], lead[1])
            for x, lead in zip(v, leads, strict=True)
        ]

    result = func(*map(blocks, args), **{k: blocks(v) for k, v in kwargs.items()})
    if _writes(func) or result is None:
        return result
    return [r if lead is None else like(lead[0], r, lead[1], lead[2]) for r, lead in zip(result, leads, strict=True)]


# Copies, and tensors like others


@_names("copy_")
def _copied(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    _no_plain_target(func, target, _lead(args))
    if not isinstance(source, PartitionedTensor) or source._placement == target._placement:
        return _general(func, args, kwargs, (*args, *kwargs.values()))
    return _general(func, (target, gathered(source), *args[2:]), kwargs, (target, gathered(source)))


@_names("clone _to_copy detach alias lift_fresh contiguous zeros_like ones_like empty_like full_like")
def _alike(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"} if x._block.ndim not in (4, 5) else kwargs
    strides = x.stride() if func._schema.name in ("aten::detach", "aten::alias") else None
    return like(x, func(x._block, *args[1:], **kwargs), None, x.shape, strides)


@_names("new_empty new_zeros new_ones new_full new_empty_strided")
def _new(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Of as many entries as the whole, or of one in some dimensions: it lies as the whole does. Of others: a tensor
    of this worker's own."""
    x, size, *rest = args
    shape = tuple(size)
    layout = _one_in_some(x, shape)
    if layout is not None and func._schema.name != "aten::new_empty_strided":
        return like(x, func(x._block, layout.block_shape(x._placement.index), *rest, **kwargs), layout)
    if math.prod(shape) != x.numel() or not x.numel():
        return func(x._block, size, *rest, **kwargs)
    if func._schema.name == "aten::new_empty_strided":
        return like(x, torch.empty_like(x._block, **kwargs), None, shape)
    return like(x, func(x._block, x._block.shape, *rest, **kwargs), None, shape)


def _one_in_some(x: PartitionedTensor, shape: Shape) -> Layout | None:
    """The layout of what has one entry in some dimensions, and else the shape of x; None where nothing splits it."""
    dims = _spec_of(x)
    if dims is None or len(shape) != x.ndim or shape == tuple(x.shape):
        return None
    if any(n not in (1, m) for n, m in zip(shape, x.shape, strict=True)):
        return None
    left = [s if n == m else _whole_dim(1) for n, m, s in zip(shape, x.shape, dims, strict=True)]
    return _arranged(x, left, shape) if any(names for names, _ in left) else None


@_names("index_put_")
def _put(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One number where a mask that lies as its target is true."""
    x, indices, values, *rest = args
    mask: Any = indices[0] if len(indices) == 1 else None
    fits = isinstance(x, PartitionedTensor) and isinstance(mask, PartitionedTensor) and mask.dtype is torch.bool
    if not fits or mask._placement != x._placement or mask.shape != x.shape or values.ndim or any(rest):
        _refused(func, args, kwargs)
    func(x._block, [mask._block], values)
    return x


@_names(
    "normal_ uniform_ bernoulli_.float bernoulli_ exponential_ geometric_ cauchy_ log_normal_ random_",
    "rand_like randn_like randint_like",
)
def _drawn(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Random entries: those that the whole would have, of which each worker keeps its part."""
    x, *rest = args
    if any(isinstance(a, torch.Tensor) for a in (*rest, *kwargs.values())):
        _refused(func, args, kwargs)
    layout = x._placement.layout
    generator = kwargs.get("generator")
    device = "cpu" if generator is None else generator.device
    if x._block.device.type == "meta":
        return x if _writes(func) else like(x, x._block, None, x.shape)
    options = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory", "memory_format")}
    with contextlib.nullcontext() if generator is not None else drawing():
        whole = torch.empty(tuple(x.shape), dtype=x.dtype, device=device)
        whole = func(whole, *rest, **options)
    own = whole.reshape(layout.shape)[layout.slices(x._placement.index)]
    if _writes(func):
        x._block.copy_(own)
        return x
    return like(x, own.to(kwargs.get("device") or x._block.device, copy=True).contiguous(), None, x.shape)


# Views


def _spec_of(x: PartitionedTensor) -> list[tuple[tuple[str, ...], Any]] | None:
    """For each dimension the axes that split it and the sizes of its blocks; None where that is not how it lies."""
    layout = x._placement.layout
    if layout.spec is None or tuple(x.shape) != layout.shape:
        return None
    return list(zip(layout.spec.dims, layout.cuts, strict=True))


def _arranged(x: PartitionedTensor, dims: Sequence[tuple[tuple[str, ...], Any]], shape: Shape) -> Layout:
    """The layout whose dimensions are split so."""
    return Layout(shape, P(*(names or None for names, _ in dims)), x._placement.layout.axes, [cut for _, cut in dims])


def _whole_dim(n: int) -> tuple[tuple[str, ...], Any]:
    return (), (n,)


@_names("view _unsafe_view _reshape_alias")
def _viewed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x: Any = args[0]
    size: Any = args[1]
    if isinstance(size, torch.dtype):
        _refused(func, args, kwargs)
    shape = tuple(torch.empty(tuple(x.shape), device="meta").view(tuple(size)).shape)
    strides = _probe(func, args, kwargs).stride()
    if shape == tuple(x.shape):
        return like(x, x._block.detach(), None, shape, strides)
    dims = _spec_of(x)
    found = _regrouped(x, dims, shape) if dims is not None else None
    if found is not None:
        return like(x, x._block.view(found[0]), found[1], shape, strides)
    # Another view of the same blocks: what it is as a whole, and by elements, is known.
    return like(x, x._block.detach(), None, shape, strides)


def _probe(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What torch makes of a tensor of the shape and strides of the whole, without data."""
    x = args[0]
    return func(torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device="meta"), *args[1:], **kwargs)


def _regrouped(x: PartitionedTensor, dims: Any, shape: Shape) -> tuple[Shape, Layout] | None:
    """The shape of the block, and the layout, of a view in which what splits x splits dimensions too; None where not.

    A split dimension may be joined with whole ones after it, or parted into itself and whole ones: its blocks are then
    those of the new dimension, as many times longer or shorter.
    """
    sized = lambda n: n or 1_000_003  # an empty dimension has its place too
    before = lambda lengths, d: math.prod(map(sized, lengths[:d]))
    old = tuple(x.shape)
    out = [_whole_dim(n) for n in shape]
    least = 0
    for d, (names, cut) in enumerate(dims):
        if not names:
            continue
        places = (j for j in range(least, len(shape)) if before(shape, j) == before(old, d))
        j = next((j for j in places if _rescaled(cut, old[d], shape[j])), None)
        if j is None:
            return None
        out[j] = names, _rescaled(cut, old[d], shape[j])
        least = j + 1
    layout = _arranged(x, out, shape)
    local = layout.block_shape(x._placement.index)
    return (local, layout) if math.prod(local) == x._block.numel() else None


def _rescaled(cut: Sequence[int], old: int, new: int) -> tuple[int, ...] | None:
    """The sizes of the blocks of a dimension of another length, in proportion; None where there are none."""
    if old == new:
        return tuple(cut)
    if not old or not new or any(n * new % old for n in cut):
        return None
    return tuple(n * new // old for n in cut)


@_names("t transpose.int permute")
def _permuted(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    dims = _dims_or_refuse(func, args, kwargs)
    probe = _probe(func, args, kwargs)
    order = func(torch.empty(tuple(range(2, 2 + x.ndim)), device="meta"), *args[1:], **kwargs).shape
    arranged = [dims[n - 2] for n in order]
    layout = _arranged(x, arranged, tuple(probe.shape))
    return like(x, func(x._block, *args[1:], **kwargs), layout, probe.shape, probe.stride())


def _dims_or_refuse(func: Any, args: Any, kwargs: dict[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    dims = _spec_of(args[0])
    if dims is None:
        _refused(func, args, kwargs)
    return dims


@_names("unsqueeze")
def _unsqueezed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, dim = args
    dims = _dims_or_refuse(func, args, kwargs)
    dim = dim + x.ndim + 1 if dim < 0 else dim
    shape = (*x.shape[:dim], 1, *x.shape[dim:])
    layout = _arranged(x, [*dims[:dim], _whole_dim(1), *dims[dim:]], shape)
    return like(x, x._block.unsqueeze(dim), layout, shape, _probe(func, args, kwargs).stride())


@_names("squeeze squeeze.dim squeeze.dims")
def _squeezed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    dims = _dims_or_refuse(func, args, kwargs)
    asked = range(x.ndim) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = {d % x.ndim for d in asked if x.shape[d] == 1}
    if any(dims[d][0] for d in gone):
        _refused(func, args, kwargs)
    keep = [d for d in range(x.ndim) if d not in gone]
    shape = tuple(x.shape[d] for d in keep)
    block = x._block.squeeze(tuple(gone)) if gone else x._block.detach()
    return like(x, block, _arranged(x, [dims[d] for d in keep], shape), shape, _probe(func, args, kwargs).stride())


@_names("expand")
def _expanded(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, size = args[0], args[1]
    dims = _dims_or_refuse(func, args, kwargs)
    lead = len(size) - x.ndim
    shape = tuple(x.shape[d - lead] if n == -1 else n for d, n in enumerate(size))
    out, local = [_whole_dim(n) for n in shape[:lead]], list(shape[:lead])
    for d, n in enumerate(shape[lead:]):
        if n == x.shape[d]:
            out.append(dims[d])
            local.append(x._block.shape[d])
        elif dims[d][0]:
            _refused(func, args, kwargs)
        else:
            out.append(_whole_dim(n))
            local.append(n)
    return like(x, x._block.expand(local), _arranged(x, out, shape), shape, _probe(func, args, kwargs).stride())


@_names(
    "select.int slice.Tensor narrow split.Tensor split_with_sizes unbind.int",
    "cumsum cumprod _softmax _log_softmax argmax argmin max.dim min.dim sort sort.stable topk median.dim logsumexp",
    "flip select_backward slice_backward _softmax_backward_data _log_softmax_backward_data logcumsumexp mode kthvalue",
)
def _along(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What works along one dimension, where that is not split."""
    names = [a.name for a in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    chosen: Any = given.get("dim", given.get("dims", defaults.get("dim")))
    x = args[0]
    others = [a for a in args[1:] if isinstance(a, torch.Tensor)]
    dims = _dims_or_refuse(func, args, kwargs)
    if chosen is None or others or not isinstance(x, PartitionedTensor):
        _refused(func, args, kwargs)
    ndim = x.ndim
    wanted = {d % ndim for d in ([chosen] if isinstance(chosen, int) else chosen)}
    if func._schema.name == "aten::slice":
        bounds = slice(given.get("start"), given.get("end"), given.get("step"))
        if bounds.indices(x.shape[chosen]) == (0, x.shape[chosen], 1):
            return like(x, x._block.detach(), None, x.shape, x.stride())
    if any(dims[d][0] for d in wanted) or "backward" in func._schema.name:
        _refused(func, args, kwargs)
    result = func(x._block, *args[1:], **kwargs)
    probe = _probe(func, args, kwargs)

    def wrap(block: torch.Tensor, whole: torch.Tensor) -> Any:
        shape = tuple(whole.shape)
        kept = dims if len(shape) == ndim else [d for k, d in enumerate(dims) if k not in wanted]
        out = [d if d[0] else _whole_dim(n) for d, n in zip(kept, shape, strict=True)]
        return like(x, block, _arranged(x, out, shape), shape, whole.stride())

    if isinstance(result, torch.Tensor):
        return wrap(result, probe)
    parts = [wrap(r, p) for r, p in zip(result, probe, strict=True)]
    return parts if isinstance(result, list) else tuple(parts)


# Reductions


def _bound(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by their names."""
    given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    return given | {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs


class _Reduction:
    """What is reduced of a tensor: the dimensions, and the axes over which workers meet."""

    def __init__(self, func: Any, x: PartitionedTensor, dim: Any, keepdim: bool):
        self.x = x
        layout = x._placement.layout
        asked = range(x.ndim) if dim is None or dim == [] or dim == () else [dim] if isinstance(dim, int) else dim
        self.dims = tuple(sorted({d % x.ndim for d in asked}))
        self.all = len(self.dims) == x.ndim
        self.keepdim = keepdim
        self.count = math.prod(x.shape[d] for d in self.dims)
        spec = _spec_of(x)
        if spec is None and not self.all:
            raise _error(func, f"a dimension of {describe(x)} that lies as {layout}", "all dimensions, or a spec")
        block = x._block
        if spec is None:
            self.names: tuple[str, ...] = tuple(layout.axes)
            self.block = block
            self.reduced = tuple(range(block.ndim))
            self.result = None
            if layout.owners[x._placement.index] != x._placement.index:
                self.block = block.reshape(-1)[:0].reshape([0] * block.ndim)
        else:
            split = {n for d in self.dims for n in spec[d][0]}
            self.names = tuple(n for n in layout.axes if n in split)
            self.block, self.reduced = block, self.dims
            self.result = self._left(spec)

    def _left(self, spec: list[tuple[tuple[str, ...], Any]]) -> Layout | None:
        """The layout of the result; None where it is whole."""
        x = self.x
        left = [
            _whole_dim(1) if d in self.dims else s for d, s in enumerate(spec) if self.keepdim or d not in self.dims
        ]
        if not any(names for names, _ in left):
            return None
        shape = [1 if d in self.dims else n for d, n in enumerate(x.shape) if self.keepdim or d not in self.dims]
        return _arranged(x, left, tuple(shape))

    def local(self, f: Callable[[torch.Tensor, Any], torch.Tensor], identity: Any = None) -> torch.Tensor:
        """What this worker's block gives, with dimensions kept; the identity for one without entries."""
        if identity is not None and 0 in [self.block.shape[d] for d in self.reduced]:
            shape = [1 if d in self.reduced else n for d, n in enumerate(self.block.shape)]
            return f(self.block.new_full([1] * self.block.ndim, 1), self.reduced).new_full(shape, identity)
        return f(self.block, self.reduced)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Parts added over the workers."""
        if not self.names or part.device.type == "meta" or self._alone():
            return part
        return apply(Sum(self.names), part.contiguous(), seat_of(self._worker()))

    def joined(self, part: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Parts reduced over the workers by a function of their stack."""
        if not self.names or part.device.type == "meta" or self._alone():
            return part
        stack = apply(AllGather(self.names, 0, False), part.contiguous(), seat_of(self._worker()))
        return f(stack)

    def _alone(self) -> bool:
        axes = self.x._placement.layout.axes
        return math.prod(axes[n] for n in self.names) == 1

    def _worker(self) -> Any:
        _eager(self.block)
        return worker_of(self.x, "a reduction of a partitioned tensor")

    def given(self, value: torch.Tensor) -> Any:
        """The result as torch has it: whole, or in blocks."""
        if self.x._placement.layout.spec is None or not self.result and self.all and not self.keepdim:
            return value.reshape([1] * self.x.ndim if self.keepdim else [])
        if not self.keepdim:
            value = value.squeeze(self.dims)
        return value if self.result is None else like(self.x, value, self.result)


def _eager(block: torch.Tensor) -> None:
    """Raise in a compiled graph, whose collectives go otherwise."""
    if is_traceable_wrapper_subclass(block) or type(block).__name__ in ("FakeTensor", "FunctionalTensor"):
        raise LayoutError(
            message(
                "torch.compile",
                got="a reduction of a partitioned tensor",
                need="functions of blocks in compiled functions",
                mend="p.block() inside, or the reduction outside of the compiled function",
            )
        )


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of this one are taken."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@_names("sum sum.dim_IntList nansum mean mean.dim")
def _sum(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    a = _bound(func, args, kwargs)
    x = a["self"]
    r = _Reduction(func, x, a.get("dim"), a.get("keepdim", False))
    name = func._schema.name
    dtype = a.get("dtype") or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)
    if (
        name == "aten::mean"
        and not (dtype.is_floating_point or dtype.is_complex)
        or (x.dtype, name) == (torch.bool, "aten::mean")
    ):
        return func(torch.empty(tuple(x.shape), dtype=x.dtype), *args[1:], **kwargs)  # which says what is wrong
    take = torch.nansum if name == "aten::nansum" else torch.sum
    part = take(r.block, r.reduced, keepdim=True, dtype=_accumulated(dtype))
    total = r.sum(part)
    if name == "aten::mean":
        total = total / r.count
    return r.given(total.to(dtype))


@_names("count_nonzero count_nonzero.dim_IntList")
def _counted(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    a = _bound(func, args, kwargs)
    r = _Reduction(func, a["self"], a.get("dim"), False)
    return r.given(r.sum((r.block != 0).sum(r.reduced, keepdim=True)))


@_names("prod prod.dim_int")
def _product(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    a = _bound(func, args, kwargs)
    x = a["self"]
    r = _Reduction(func, x, a.get("dim"), a.get("keepdim", False))
    dtype = a.get("dtype") or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)
    part = r.block.to(_accumulated(dtype))
    for d in r.reduced:
        part = part.prod(d, keepdim=True)
    return r.given(r.joined(part, lambda s: s.prod(0)).to(dtype))


@_names("any any.dim any.dims all all.dim all.dims")
def _any(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    a = _bound(func, args, kwargs)
    r = _Reduction(func, a["self"], a.get("dim"), a.get("keepdim", False))
    wanted = r.block != 0
    some = func._schema.name == "aten::any"
    count = (wanted if some else ~wanted).sum(r.reduced, keepdim=True)
    total = r.sum(count)
    return r.given(total > 0 if some else total == 0)


def _extreme(dtype: torch.dtype, largest: bool) -> Any:
    """What is no larger (or smaller) than anything."""
    if dtype is torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    info = torch.iinfo(dtype)
    return info.min if largest else info.max


@_names("amax amin max min")
def _extremum(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    a = _bound(func, args, kwargs)
    x = a["self"]
    r = _Reduction(func, x, a.get("dim"), a.get("keepdim", False))
    largest = func._schema.name in ("aten::amax", "aten::max")
    if not r.count:
        return func(torch.empty(tuple(x.shape), dtype=x.dtype), *args[1:], **kwargs)  # which says what is wrong
    take = torch.amax if largest else torch.amin
    part = r.local(lambda b, dims: take(b, dims, keepdim=True), _extreme(x.dtype, largest))
    return r.given(r.joined(part, lambda s: take(s, 0)))


for _name in ("max", "min"):
    # Their overloads of two tensors work by elements; those of one dimension give indices.
    _NAMED[f"{_name}.other"] = _pointwise


@_names("aminmax")
def _both(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    a = _bound(func, args, kwargs)
    given = {"dim": [] if a["dim"] is None else [a["dim"]], "keepdim": a["keepdim"]}
    return tuple(f(a["self"], **given) for f in (torch.ops.aten.amin.default, torch.ops.aten.amax.default))


@_names("linalg_vector_norm norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype norm")
def _norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    a = _bound(func, args, kwargs)
    order = a.get("ord", a.get("p"))
    order = 2.0 if order is None else float(order)
    r = _Reduction(func, a["self"], a.get("dim"), a.get("keepdim", False))
    power, root = _norms(order)
    joined = r.sum(_powers(r, order)) if power else r.joined(_powers(r, order), _largest(order))
    return r.given(root(joined).to(_norm_dtype(a["self"], a.get("dtype"))))


def _norm_dtype(x: PartitionedTensor, dtype: torch.dtype | None) -> torch.dtype:
    dtype = dtype or x.dtype
    return dtype.to_real() if dtype.is_complex else dtype


def _powers(r: _Reduction, order: float) -> torch.Tensor:
    """What is added, or compared, over the workers."""
    wide = torch.complex128 if r.block.is_complex() else torch.float64
    identity = math.inf if order == -math.inf else 0.0
    norm = r.local(lambda b, dims: torch.linalg.vector_norm(b, order, dims, keepdim=True, dtype=wide), identity)
    return norm**order if order not in (0.0, math.inf, -math.inf) else norm


def _norms(order: float) -> tuple[bool, Callable[[torch.Tensor], torch.Tensor]]:
    """Whether parts are added, and what becomes of the sum."""
    if order in (math.inf, -math.inf):
        return False, lambda t: t
    if order == 0:
        return True, lambda t: t
    return True, lambda t: t ** (1 / order)


def _largest(order: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda s: s.amax(0) if order > 0 else s.amin(0)


@_names("_foreach_norm")
def _list_of_norms(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The norms of several tensors, of which those over the same axes travel together."""
    a = _bound(func, args, kwargs)
    order, tensors = float(a["ord"]), a["self"]
    power, root = _norms(order)
    results: list[Any] = [None] * len(tensors)
    together: dict[tuple[str, ...], list[tuple[int, _Reduction, torch.Tensor]]] = {}
    for k, x in enumerate(tensors):
        if not isinstance(x, PartitionedTensor):
            results[k] = torch.linalg.vector_norm(x, order, dtype=a["dtype"])
            continue
        r = _Reduction(func, x, None, False)
        together.setdefault(r.names, []).append((k, r, _powers(r, order).reshape(())))
    for parts in together.values():
        r = parts[0][1]
        stack = torch.stack([part for _, _, part in parts])
        whole = r.sum(stack) if power else r.joined(stack, _largest(order))
        for (k, _, _), value in zip(parts, root(whole).unbind(), strict=True):
            results[k] = value.to(_norm_dtype(tensors[k], a["dtype"]))
    return results


@_names("_foreach_max")
def _list_of_largest(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return [torch.ops.aten.max.default(x) for x in args[0]]


@_names("var.correction std.correction var_mean.correction std_mean.correction")
def _variance(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    a = _bound(func, args, kwargs)
    x, correction = a["self"], 1 if a.get("correction") is None else a["correction"]
    r = _Reduction(func, x, a.get("dim"), a.get("keepdim", False))
    wide = torch.complex128 if x.dtype.is_complex else torch.float64
    block = r.block.to(wide)
    mean = r.sum(block.sum(r.reduced, keepdim=True)) / r.count
    squares = r.sum((block - mean).abs().square().sum(r.reduced, keepdim=True))
    free = max(r.count - correction, 0)
    value = squares / free if free else squares * math.nan if r.count <= correction else squares
    name = func._schema.name
    value = (value.sqrt() if "std" in name else value).to(_norm_dtype(x, None))
    return (r.given(value), r.given(mean.to(x.dtype))) if "mean" in name else r.given(value)


@_names("equal")
def _equal(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    x, y = args
    if x.shape != y.shape:
        return False
    return bool(torch.ops.aten.all.default(torch.ops.aten.eq.Tensor(x, y)))


@_names("is_same_size")
def _same_size(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return args[0].shape == args[1].shape


@_names("allclose")
def _close(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(torch.ops.aten.all.default(torch.isclose(*args, **kwargs)))


@_names("_local_scalar_dense item")
def _item(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if args[0].numel() != 1:
        _refused(func, args, kwargs)
    return gathered(args[0]).item()


# Products and decompositions: on the whole


@_names(
    "mm addmm bmm baddbmm mv addmv dot vdot addr ger outer linalg_qr _linalg_svd linalg_svdvals _linalg_eigh",
    "_linalg_det _linalg_slogdet linalg_inv_ex linalg_cholesky_ex linalg_lu_factor_ex _linalg_solve_ex",
    "linalg_matrix_exp linalg_lstsq linalg_pinv.atol_rtol_tensor linalg_householder_product trace tril triu",
)
def _of_wholes(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What contracts dimensions. In a network with gradients the block is meant: there it raises."""
    plain = [a for a in args if isinstance(a, torch.Tensor) and not isinstance(a, PartitionedTensor)]
    if torch.is_grad_enabled() and plain:
        _refused(func, args, kwargs)
    return _on_wholes(func, args, kwargs)


@_names("cat stack hstack vstack")
def _on_wholes(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if _writes(func) or kwargs.get("out") is not None:
        _refused(func, args, kwargs)
    _eager(_lead(args)._block)
    kept: dict[int, torch.Tensor] = {}

    def whole(x: Any) -> Any:
        if isinstance(x, PartitionedTensor):
            if id(x) not in kept:
                kept[id(x)] = gathered(x)
            return kept[id(x)]
        return type(x)(map(whole, x)) if isinstance(x, list | tuple) else x

    return func(*map(whole, args), **{k: whole(v) for k, v in kwargs.items()})


# torch's optimisers take lists where they are faster.
_foreach_types = getattr(sys.modules[torch.optim.Optimizer.__module__], "_foreach_supported_types", None)
if isinstance(_foreach_types, list):
    _foreach_types += [PartitionedTensor, Parameter]


# Loss scaling

_unscaling: ContextVar[bool] = ContextVar("spmd_torch_unscaling", default=False)


@contextlib.contextmanager
def unscaling() -> Iterator[None]:
    """Admit the check of gradients that loss scaling makes, whose result workers are then told."""
    token = _unscaling.set(True)
    try:
        yield
    finally:
        _unscaling.reset(token)


@_names("_amp_foreach_non_finite_check_and_unscale_")
def _unscaled(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not _unscaling.get():
        raise _error(
            func,
            "gradients in blocks: what one worker finds infinite the others would not know of",
            "a scaler whose workers agree on each step",
            "spt.GradScaler in place of torch.amp.GradScaler",
        )
    grads, found, scale = args
    return func([g._block if isinstance(g, PartitionedTensor) else g for g in grads], found, scale)
