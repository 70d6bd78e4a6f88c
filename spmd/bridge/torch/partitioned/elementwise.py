"""Elementwise functions of partitioned tensors, copies, new tensors like others, and random entries."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from spmd.bridge.torch.partitioned.arguments import (
    Shape,
    first_partitioned,
    layout_of_dims,
    operator_error,
    partitioned_among,
    refuse,
    refuse_plain_target,
    split_dims,
    whole_dim,
    writes_first,
)
from spmd.bridge.torch.partitioned.placement import MEND
from spmd.bridge.torch.partitioned.registry import OPERATORS, handles
from spmd.bridge.torch.partitioned.tensor import PartitionedTensor, gathered, with_block
from spmd.bridge.torch.rng import drawing
from spmd.bridge.torch.tensor import Tensor
from spmd.errors import LayoutError, describe
from spmd.layout import Layout, P


def _part(func: Any, x: Any, shape: Shape, lead: PartitionedTensor, layout: Layout) -> Any:
    """The part of an operand for this worker's block of a result of this shape and layout."""
    if isinstance(x, list | tuple):
        return type(x)(_part(func, y, shape, lead, layout) for y in x)
    if not isinstance(x, torch.Tensor):
        return x
    if isinstance(x, PartitionedTensor):
        return _refined(x, shape, layout, lead._placement.index)
    if isinstance(x, Tensor) and x.state.varying:
        raise LayoutError.at(
            f"torch's {func._schema.name.partition('::')[2]}",
            got=f"{describe(x)} beside {describe(lead)}",
            need="a tensor that is the same on all workers",
            mend=MEND,
        )
    if not x.ndim:
        return x
    whole = x.expand(shape)
    if tuple(shape) != layout.shape:
        whole = whole.reshape(layout.shape)
    return whole[layout.slices(lead._placement.index)]


def _refined(x: PartitionedTensor, shape: Shape, layout: Layout, index: int) -> torch.Tensor:
    """The part of a block for a layout that splits more dimensions."""
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
    """The broadcast shape of tensors."""
    shapes: list[Any] = []
    for a in args:
        if isinstance(a, torch.Tensor):
            shapes.append(a.shape)
        elif isinstance(a, list | tuple):
            shapes.extend(x.shape for x in a if isinstance(x, torch.Tensor))
    return tuple(torch.broadcast_shapes(*shapes))


def _common_layout(func: Any, tensors: list[PartitionedTensor], shape: Shape) -> tuple[PartitionedTensor, Layout]:
    """The first tensor, and the layout of an elementwise function of all."""
    lead = tensors[0]
    layout = lead._placement.layout
    if all(x._placement.layout == layout and tuple(x.shape) == shape for x in tensors):
        return lead, layout
    return lead, _broadcast_layout(func, tensors, shape)


def _broadcast_layout(func: Any, tensors: list[PartitionedTensor], shape: Shape) -> Layout:
    """The layout of tensors of several shapes, if their blocks broadcast as the wholes do."""
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
            raise operator_error(
                func,
                " and ".join(f"{list(x.shape)} that lies as {x._placement.layout}" for x in tensors),
                "tensors that lie alike",
                "spt.Parameter(whole, spec) with one spec; or " + MEND,
            )
    used = [n for split in names for n in split or ()]
    if len(set(used)) < len(used):
        raise operator_error(
            func,
            f"dimensions that are split over the same axes, {used}",
            "one dimension to each",
            f"p.whole() of one; {MEND}",
        )
    return Layout(shape, P(*names), axes, cuts)


_SCALARS = (int, float, bool, complex, type(None))


def _pointwise(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    first = args[0]
    operands = (*args, *kwargs.values()) if kwargs else args
    lead = first if isinstance(first, PartitionedTensor) else first_partitioned(operands)
    placement = lead._placement
    blocks: list[Any] = []
    for a in args:
        if isinstance(a, PartitionedTensor) and a._placement == placement and a.shape == lead.shape:
            blocks.append(a._block)
        elif type(a) in _SCALARS:
            blocks.append(a)
        else:
            return _broadcast_pointwise(func, args, kwargs, operands)
    if any(isinstance(v, torch.Tensor) for v in kwargs.values()):
        return _broadcast_pointwise(func, args, kwargs, operands)
    result = func(*blocks, **kwargs)
    if writes_first(func):
        return first
    return _wrapped(result, lead, placement.layout, lead.shape)


def _broadcast_pointwise(func: Any, args: Any, kwargs: dict[str, Any], operands: Any) -> Any:
    """An elementwise function of partitioned and other tensors of several shapes."""
    shape = _shape_of(operands)
    tensors = list(partitioned_among(operands))
    lead, layout = _common_layout(func, tensors, shape)
    target = args[0] if writes_first(func) else kwargs.get("out")
    if target is not None:
        refuse_plain_target(func, target, lead)
        if tuple(target.shape) != shape or target._placement.layout != layout:
            raise operator_error(
                func,
                f"a result of shape {list(shape)} that lies as {layout}, to be written to one of {list(target.shape)}",
                "a target that lies as the result",
            )
    part = lambda x: _part(func, x, shape, lead, layout)
    result = func(*map(part, args), **{k: part(v) for k, v in kwargs.items()})
    return target if target is not None else _wrapped(result, lead, layout, shape)


def _wrapped(result: Any, lead: PartitionedTensor, layout: Layout, shape: Shape) -> Any:
    if isinstance(result, torch.Tensor):
        return with_block(lead, result, layout, shape)
    return type(result)(_wrapped(r, lead, layout, shape) for r in result)


handles(
    "abs_ fill_ fill zero_ masked_fill_ floor_divide floor_divide_ eq_ ne_ lt_ le_ gt_ ge_ elu_backward "
    "softplus_backward leaky_relu_backward hardtanh_backward hardswish hardswish_ hardswish_backward "
    "hardsigmoid_backward "
    "hardshrink_backward softshrink_backward mish_backward log_sigmoid_forward log_sigmoid_backward "
    "isreal resolve_conj resolve_neg absolute_ fix_ negative_ copysign_ signbit heaviside_ "
    "nan_to_num_ where masked_fill sign_ softplus"
)(_pointwise)


@handles("_conj _neg_view")
def _conjugated(func: Any, args: Any, _kwargs: dict[str, Any]) -> Any:
    """Conjugates and negatives that torch would leave to the next operator, which does not see it of a block."""
    x: Any = args[0]
    return with_block(x, x._block.conj_physical() if func is torch.ops.aten._conj.default else -x._block, None, x.shape)


def _listwise(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Elementwise functions of lists of tensors: entry by entry."""
    n = len(args[0])
    leads: list[tuple[PartitionedTensor, Layout, Shape] | None] = []
    for k in range(n):
        entries = [v[k] for v in (*args, *kwargs.values()) if isinstance(v, list | tuple) and len(v) == n]
        tensors = list(partitioned_among(entries))
        if not tensors:
            leads.append(None)
            continue
        shape = _shape_of([x for x in entries if isinstance(x, torch.Tensor)])
        leads.append((*_common_layout(func, tensors, shape), shape))
    if writes_first(func):
        for x, lead in zip(args[0], leads, strict=True):
            if lead is not None:
                refuse_plain_target(func, x, lead[0])

    def blocks(v: Any) -> Any:
        if not isinstance(v, list | tuple):
            if isinstance(v, PartitionedTensor):
                refuse(func, args, kwargs)
            return v
        if len(v) != n:
            return v
        return [
            x if lead is None or not isinstance(x, torch.Tensor) else _part(func, x, lead[2], lead[0], lead[1])
            for x, lead in zip(v, leads, strict=True)
        ]

    result = func(*map(blocks, args), **{k: blocks(v) for k, v in kwargs.items()})
    if writes_first(func) or result is None:
        return result
    return [
        r if lead is None else with_block(lead[0], r, lead[1], lead[2]) for r, lead in zip(result, leads, strict=True)
    ]


# Copies, and tensors like others


@handles("copy_")
def _copied(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    refuse_plain_target(func, target, first_partitioned(args))
    if not isinstance(source, PartitionedTensor) or source._placement == target._placement:
        return _broadcast_pointwise(func, args, kwargs, (*args, *kwargs.values()))
    return _broadcast_pointwise(func, (target, gathered(source), *args[2:]), kwargs, (target, gathered(source)))


@handles("clone _to_copy detach alias lift_fresh contiguous zeros_like ones_like empty_like full_like")
def _like_first(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"} if x._block.ndim not in (4, 5) else kwargs
    strides = x.stride() if func._schema.name in ("aten::detach", "aten::alias") else None
    return with_block(x, func(x._block, *args[1:], **kwargs), None, x.shape, strides)


@handles("new_empty new_zeros new_ones new_full new_empty_strided")
def _new(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A new tensor. It has the layout of x if its shape is that of x, or has length 1 in some dimensions of x.
    Otherwise it is a plain tensor of this worker."""
    x, size, *rest = args
    shape = tuple(size)
    layout = _reduced_layout(x, shape)
    if layout is not None and func._schema.name != "aten::new_empty_strided":
        return with_block(x, func(x._block, layout.block_shape(x._placement.index), *rest, **kwargs), layout)
    if math.prod(shape) != x.numel() or not x.numel():
        return func(x._block, size, *rest, **kwargs)
    if func._schema.name == "aten::new_empty_strided":
        return with_block(x, torch.empty_like(x._block, **kwargs), None, shape)
    return with_block(x, func(x._block, x._block.shape, *rest, **kwargs), None, shape)


def _reduced_layout(x: PartitionedTensor, shape: Shape) -> Layout | None:
    """The layout of the shape of x with length 1 in some dimensions; None if no axis splits the others."""
    dims = split_dims(x)
    if dims is None or len(shape) != x.ndim or shape == tuple(x.shape):
        return None
    if any(n not in (1, m) for n, m in zip(shape, x.shape, strict=True)):
        return None
    dims = [s if n == m else whole_dim(1) for n, m, s in zip(shape, x.shape, dims, strict=True)]
    return layout_of_dims(x, dims, shape) if any(names for names, _ in dims) else None


@handles("index_put_")
def _index_put(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Write one number where a mask of the layout of x is true."""
    x, indices, values, *rest = args
    mask: Any = indices[0] if len(indices) == 1 else None
    fits = isinstance(x, PartitionedTensor) and isinstance(mask, PartitionedTensor) and mask.dtype is torch.bool
    if not fits or mask._placement != x._placement or mask.shape != x.shape or values.ndim or any(rest):
        refuse(func, args, kwargs)
    func(x._block, [mask._block], values)
    return x


@handles(
    "normal_ uniform_ bernoulli_.float bernoulli_ exponential_ geometric_ cauchy_ log_normal_ random_",
    "rand_like randn_like randint_like",
)
def _random(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Random entries: each worker draws those of the whole and keeps its part."""
    x, *rest = args
    if any(isinstance(a, torch.Tensor) for a in (*rest, *kwargs.values())):
        refuse(func, args, kwargs)
    layout = x._placement.layout
    generator = kwargs.get("generator")
    device = "cpu" if generator is None else generator.device
    if x._block.device.type == "meta":
        return x if writes_first(func) else with_block(x, x._block, None, x.shape)
    options = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory", "memory_format")}
    with contextlib.nullcontext() if generator is not None else drawing():
        whole = torch.empty(tuple(x.shape), dtype=x.dtype, device=device)
        whole = func(whole, *rest, **options)
    own = whole.reshape(layout.shape)[layout.slices(x._placement.index)]
    if writes_first(func):
        x._block.copy_(own)
        return x
    return with_block(x, own.to(kwargs.get("device") or x._block.device, copy=True).contiguous(), None, x.shape)


OPERATORS |= {"*": _pointwise, "_foreach_*": _listwise}
