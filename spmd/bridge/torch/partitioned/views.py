"""Views of partitioned tensors, and functions along one dimension that no axis splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from spmd.bridge.torch.partitioned.arguments import (
    Shape,
    arguments_by_name,
    layout_of_dims,
    refuse,
    split_dims,
    split_dims_or_refuse,
    whole_dim,
)
from spmd.bridge.torch.partitioned.registry import handles
from spmd.bridge.torch.partitioned.tensor import PartitionedTensor, with_block
from spmd.layout import Layout


@handles("view _unsafe_view _reshape_alias")
def _viewed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x: Any = args[0]
    size: Any = args[1]
    if isinstance(size, torch.dtype):
        refuse(func, args, kwargs)
    shape = tuple(torch.empty(tuple(x.shape), device="meta").view(tuple(size)).shape)
    strides = _probe(func, args, kwargs).stride()
    if shape == tuple(x.shape):
        return with_block(x, x._block.detach(), None, shape, strides)
    dims = split_dims(x)
    regrouped = _regrouped(x, dims, shape) if dims is not None else None
    if regrouped is not None:
        return with_block(x, x._block.view(regrouped[0]), regrouped[1], shape, strides)
    # A view that only elementwise functions and `whole()` can use: the blocks stay as they are.
    return with_block(x, x._block.detach(), None, shape, strides)


def _probe(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result for a tensor of the shape and strides of the whole, without data."""
    x = args[0]
    return func(torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device="meta"), *args[1:], **kwargs)


def _regrouped(x: PartitionedTensor, dims: Any, shape: Shape) -> tuple[Shape, Layout] | None:
    """The shape of the block and the layout of a view, if the axes that split x can split the view; else None.

    A split dimension may be merged with whole ones after it, or divided into itself and whole ones. The blocks of the
    new dimension are longer or shorter by the same factor.
    """
    sized = lambda n: n or 1_000_003  # tells apart the places before and after an empty dimension
    before = lambda lengths, d: math.prod(map(sized, lengths[:d]))
    old = tuple(x.shape)
    out = [whole_dim(n) for n in shape]
    start = 0
    for d, (names, cut) in enumerate(dims):
        if not names:
            continue
        candidates = (j for j in range(start, len(shape)) if before(shape, j) == before(old, d))
        j = next((j for j in candidates if _rescaled(cut, old[d], shape[j])), None)
        if j is None:
            return None
        out[j] = names, _rescaled(cut, old[d], shape[j])
        start = j + 1
    layout = layout_of_dims(x, out, shape)
    local = layout.block_shape(x._placement.index)
    return (local, layout) if math.prod(local) == x._block.numel() else None


def _rescaled(cut: Sequence[int], old: int, new: int) -> tuple[int, ...] | None:
    """The sizes of the blocks of a dimension of another length, in proportion; None if they are not integers."""
    if old == new:
        return tuple(cut)
    if not old or not new or any(n * new % old for n in cut):
        return None
    return tuple(n * new // old for n in cut)


@handles("t transpose.int permute")
def _permuted(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    dims = split_dims_or_refuse(func, args, kwargs)
    probe = _probe(func, args, kwargs)
    order = func(torch.empty(tuple(range(2, 2 + x.ndim)), device="meta"), *args[1:], **kwargs).shape
    layout = layout_of_dims(x, [dims[n - 2] for n in order], tuple(probe.shape))
    return with_block(x, func(x._block, *args[1:], **kwargs), layout, probe.shape, probe.stride())


@handles("unsqueeze")
def _unsqueezed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, dim = args
    dims = split_dims_or_refuse(func, args, kwargs)
    dim = dim + x.ndim + 1 if dim < 0 else dim
    shape = (*x.shape[:dim], 1, *x.shape[dim:])
    layout = layout_of_dims(x, [*dims[:dim], whole_dim(1), *dims[dim:]], shape)
    return with_block(x, x._block.unsqueeze(dim), layout, shape, _probe(func, args, kwargs).stride())


@handles("squeeze squeeze.dim squeeze.dims")
def _squeezed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    dims = split_dims_or_refuse(func, args, kwargs)
    squeezable = range(x.ndim) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    removed = {d % x.ndim for d in squeezable if x.shape[d] == 1}
    if any(dims[d][0] for d in removed):
        refuse(func, args, kwargs)
    remaining = [d for d in range(x.ndim) if d not in removed]
    shape = tuple(x.shape[d] for d in remaining)
    block = x._block.squeeze(tuple(removed)) if removed else x._block.detach()
    layout = layout_of_dims(x, [dims[d] for d in remaining], shape)
    return with_block(x, block, layout, shape, _probe(func, args, kwargs).stride())


@handles("expand")
def _expanded(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, size = args[0], args[1]
    dims = split_dims_or_refuse(func, args, kwargs)
    lead = len(size) - x.ndim
    shape = tuple(x.shape[d - lead] if n == -1 else n for d, n in enumerate(size))
    out, local = [whole_dim(n) for n in shape[:lead]], list(shape[:lead])
    for d, n in enumerate(shape[lead:]):
        if n == x.shape[d]:
            out.append(dims[d])
            local.append(x._block.shape[d])
        elif dims[d][0]:
            refuse(func, args, kwargs)
        else:
            out.append(whole_dim(n))
            local.append(n)
    return with_block(
        x, x._block.expand(local), layout_of_dims(x, out, shape), shape, _probe(func, args, kwargs).stride()
    )


@handles("view_as_real")
def _as_real(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Real and imaginary parts along a last dimension, which no axis splits: optimisers write to them."""
    x = args[0]
    dims, shape = split_dims_or_refuse(func, args, kwargs), (*x.shape, 2)
    layout = layout_of_dims(x, [*dims, whole_dim(2)], shape)
    return with_block(x, func(x._block), layout, shape, _probe(func, args, kwargs).stride())


@handles("view_as_complex")
def _as_complex(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    dims, shape = split_dims_or_refuse(func, args, kwargs), tuple(x.shape[:-1])
    if dims[-1][0]:
        refuse(func, args, kwargs)
    layout = layout_of_dims(x, dims[:-1], shape)
    return with_block(x, func(x._block), layout, shape, _probe(func, args, kwargs).stride())


@handles(
    "select.int slice.Tensor narrow split.Tensor split_with_sizes unbind.int",
    "cumsum cumprod _softmax _log_softmax argmax argmin max.dim min.dim sort sort.stable topk median.dim logsumexp",
    "flip select_backward slice_backward _softmax_backward_data _log_softmax_backward_data logcumsumexp mode kthvalue",
)
def _one_dimension(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Functions along one dimension, which no axis may split."""
    by_name = arguments_by_name(func, args, kwargs)
    dim: Any = by_name.get("dim", by_name.get("dims"))
    x = args[0]
    others = [a for a in args[1:] if isinstance(a, torch.Tensor)]
    dims = split_dims_or_refuse(func, args, kwargs)
    if dim is None or others or not isinstance(x, PartitionedTensor):
        refuse(func, args, kwargs)
    ndim = x.ndim
    own_dims = {d % ndim for d in ([dim] if isinstance(dim, int) else dim)}
    if func._schema.name == "aten::slice":
        bounds = slice(by_name["start"], by_name["end"], by_name["step"])
        if bounds.indices(x.shape[dim]) == (0, x.shape[dim], 1):
            return with_block(x, x._block.detach(), None, x.shape, x.stride())
    if any(dims[d][0] for d in own_dims) or "backward" in func._schema.name:
        refuse(func, args, kwargs)
    result = func(x._block, *args[1:], **kwargs)
    probe = _probe(func, args, kwargs)

    def wrap(block: torch.Tensor, whole: torch.Tensor) -> Any:
        shape = tuple(whole.shape)
        remaining = dims if len(shape) == ndim else [split for d, split in enumerate(dims) if d not in own_dims]
        out = [split if split[0] else whole_dim(n) for split, n in zip(remaining, shape, strict=True)]
        return with_block(x, block, layout_of_dims(x, out, shape), shape, whole.stride())

    if isinstance(result, torch.Tensor):
        return wrap(result, probe)
    parts = [wrap(r, p) for r, p in zip(result, probe, strict=True)]
    return parts if isinstance(result, list) else tuple(parts)
