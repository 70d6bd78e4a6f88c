"""Layers of `torch.nn.functional`: those of `spt.functions`, with the layouts of the operands as specs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from spmd import fft, functions
from spmd.bridge.torch.call_arguments import argument
from spmd.bridge.torch.dropout import dropout as spt_dropout
from spmd.bridge.torch.global_tensors.contractions import joined_linear
from spmd.bridge.torch.global_tensors.meeting import (
    WHOLE,
    Dim,
    as_global,
    block_in,
    check_whole,
    declared,
    dims_of,
    layout_of_dims,
)
from spmd.bridge.torch.global_tensors.registry import HANDLERS, handles, unhandled
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor, result, whole_layout
from spmd.bridge.torch.global_tensors.views import own_dims
from spmd.errors import LayoutError
from spmd.functions.planned import recorded_layouts
from spmd.mesh import here


def joins(x: Any) -> bool:
    """Whether x is a global tensor with dimensions that join several of its layout."""
    return isinstance(x, GlobalTensor) and x.joins


def _block(x: Any) -> Any:
    """The block of an operand. Raises where its dimensions join several of the layout's: the block has other ones."""
    return x.block() if isinstance(x, GlobalTensor) else x


def _spec(x: Any) -> Any:
    """The layout of an operand for a function of blocks; None for a whole."""
    return x._layout if isinstance(x, GlobalTensor) else None


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function of blocks whose result lies as its plan says."""
    with recorded_layouts() as found:
        y = function(*args, **kwargs)
    return _placed(y, found[-1]) if found else y


def _placed(y: Any, layout: Any) -> Any:
    if isinstance(layout, tuple):
        return tuple(_placed(each, lies) for each, lies in zip(y, layout, strict=True))
    return result(y, layout)


def _weights(x: Any) -> Any:
    """Weights of a layer: a global tensor that lies by a spec, or the whole."""
    x = as_global(x)
    return x.whole() if isinstance(x, GlobalTensor) and x._layout.spec is None else x


def whole_operand(x: Any) -> Any:
    return x.whole() if isinstance(x, GlobalTensor) else x


@handles("linear")
def _linear(func: Any, args: Any, kwargs: Any) -> Any:
    x, w, bias = named(args, kwargs, "input weight bias")
    x, w, bias = as_global(x), _weights(w), as_global(bias)
    if any(map(joins, (x, w, bias))):
        return joined_linear(x, w, bias)
    return _plain_linear(x, w, bias, None)


def _plain_linear(x: Any, w: Any, bias: Any, out: Any) -> Any:
    bias = _block(_bias_like(w, bias, 0))
    return _run(functions.linear, _block(x), _block(w), bias, spec=_spec(x), w_spec=_spec(w), out_spec=out)


def scattered_linear(x: Any, w: Any, bias: Any, dim: int, names: tuple[str, ...]) -> Any:
    """`F.linear`, whose result is split by axes in a dimension."""
    x, w, bias = as_global(x), _weights(w), as_global(bias)
    if not -x.ndim <= dim < x.ndim - 1 or dim == -1:
        raise LayoutError.at(
            "spt.row",
            argument="sequence",
            got=f"{dim}, for an input of shape {list(x.shape)}",
            need="a dimension of the result other than the last",
            mend="sequence=1 for (sample, position, feature)",
        )
    dim %= x.ndim
    own = dims_of(x) if isinstance(x, GlobalTensor) else [WHOLE] * x.ndim
    taken = {*names}
    dims = [
        Dim(n) if (n := tuple(n for n in each.names if n not in taken)) != each.names else each for each in own[:-1]
    ]
    dims[dim] = Dim(names)
    target = layout_of_dims((*x.shape[:-1], w.shape[0]), [*dims, WHOLE])
    return _plain_linear(x, w, bias, target)


def named(args: Any, kwargs: Any, names: str) -> list[Any]:
    return [argument(args, kwargs, k, name) for k, name in enumerate(names.split())]


def _bias_like(w: Any, bias: Any, d: int) -> Any:
    """A bias that lies as a dimension of the weights."""
    if bias is None:
        return None
    if not isinstance(w, GlobalTensor):
        return whole_operand(bias)
    bias = whole_operand(bias) if joins(bias) else bias
    target = layout_of_dims(w._layout.shape[d : d + 1], dims_of(w)[d : d + 1])
    check_whole("a layer of torch", "bias", bias, target.shape)
    if not target.varying:
        return whole_operand(bias)
    return GlobalTensor(block_in(bias, target.shape, target), target)


@handles("conv1d conv2d conv3d")
def _conv(func: Any, args: Any, kwargs: Any) -> Any:
    names = "input weight bias stride padding dilation groups"
    x, w, bias, stride, padding, dilation, groups = named(args, kwargs, names)
    x, w = as_global(x), _weights(w)
    batched = _is_batched(func, x, w)
    x = x if batched else x.unsqueeze(0)
    bias = _bias_like(w, as_global(bias), 0)
    padding = padding.upper() if isinstance(padding, str) else _pairs(padding)
    y = _run(
        functions.conv,
        _block(x),
        _block(w),
        _block(bias),
        or_default(stride, 1),
        padding if padding is not None else 0,
        or_default(dilation, 1),
        or_default(groups, 1),
        spec=_spec(x),
        w_spec=_spec(w),
    )
    return y if batched else y.squeeze(0)


def _is_batched(func: Any, x: Any, w: Any) -> bool:
    """Whether x has a dimension of samples. Raises as torch does where x or w have other dimensions."""
    d = int(func.__name__[-2])
    if w.ndim != d + 2 or x.ndim not in (d + 1, d + 2):
        raise RuntimeError(
            f"Expected {d + 1}D (unbatched) or {d + 2}D (batched) input to {func.__name__} and {d + 2}D weights, but "
            f"got input of size: {list(x.shape)} and weights of size: {list(w.shape)}"
        )
    return x.ndim == d + 2


def or_default(x: Any, default: Any) -> Any:
    if x is None or isinstance(x, int | float):
        return default if x is None else x
    return x[0] if len(tuple(x)) == 1 else tuple(x)


def _pairs(padding: Any) -> Any:
    """Padding as torch gives it, a number for each dimension, as pairs (low, high)."""
    if padding is None or isinstance(padding, int):
        return padding
    values = tuple(padding)
    return values[0] if len(values) == 1 else tuple((p, p) for p in values)


@handles("conv_transpose1d conv_transpose2d conv_transpose3d")
def _conv_transpose(func: Any, args: Any, kwargs: Any) -> Any:
    names = "input weight bias stride padding output_padding groups dilation"
    x, w, bias, stride, padding, extra, groups, dilation = named(args, kwargs, names)
    x, w, bias = as_global(x), _weights(w), as_global(bias)
    batched = _is_batched(func, x, w)
    x = x if batched else x.unsqueeze(0)
    groups = or_default(groups, 1)
    if bias is not None and groups == 1:
        bias = _bias_like(w, bias, 1)
    y = _run(
        functions.conv_transpose,
        _block(x),
        _block(w),
        _block(whole_operand(bias) if groups > 1 else bias),
        or_default(stride, 1),
        or_default(_pairs(padding), 0),
        or_default(extra, 0),
        groups,
        or_default(dilation, 1),
        spec=_spec(x),
        w_spec=_spec(w),
    )
    return y if batched else y.squeeze(0)


def _pool(function: Any, names: str) -> Callable[..., Any]:
    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        given = dict(zip(names.split(), named(args, kwargs, names), strict=True))
        x, window = given.pop("input"), given.pop("kernel_size")
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None}
        if "padding" in options:
            options["padding"] = or_default(_pairs(options["padding"]), 0)
        d = int(func.__name__.removesuffix("_with_indices").rstrip("d")[-1])
        batched = x.ndim == d + 2
        x = x if batched else x.unsqueeze(0)
        indices = options.pop("return_indices", False) or func.__name__.endswith("_with_indices")
        if indices:
            options["return_indices"] = True
        y = _run(function, _block(x), or_default(window, window), **options, spec=x._layout)
        parts = y if isinstance(y, tuple) else (y,)
        parts = parts if batched else tuple(p.squeeze(0) for p in parts)
        return parts if indices else parts[0]

    return handler


_MAX = "input kernel_size stride padding dilation ceil_mode return_indices"
handles("max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices")(
    _pool(functions.max_pool, _MAX)
)
handles("avg_pool1d")(_pool(functions.avg_pool, "input kernel_size stride padding ceil_mode count_include_pad"))
handles("avg_pool2d avg_pool3d")(
    _pool(functions.avg_pool, "input kernel_size stride padding ceil_mode count_include_pad divisor_override")
)


@handles("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d")
def _adaptive_avg_pool(func: Any, args: Any, kwargs: Any) -> Any:
    x, size = named(args, kwargs, "input output_size")
    d = int(func.__name__[-2])
    size = (size,) * d if isinstance(size, int) or size is None else tuple(size)
    over = list(range(x.ndim - d, x.ndim))
    own = [x.shape[k] for k in over]
    size = [n if m is None else m for n, m in zip(own, size, strict=True)]
    if all(m == 1 for m in size):
        return x.mean(over, True)
    dims = own_dims(func, x, args, kwargs)
    if not any(dims[k].names for k in over):
        layout = layout_of_dims([*x._layout.shape[:-d], *size], [*dims[:-d], *[WHOLE] * d])
        block = x._block  # torch refuses empty ones; the sum keeps the history, which all workers need alike
        empty = lambda: block.new_zeros(layout.block_shape(here("a global tensor").index)) + block.sum()
        return result(func(block, size) if block.numel() else empty(), layout)
    if any(n % m for n, m in zip(own, size, strict=True)):
        raise unhandled(func, args, kwargs, "a size that divides the length of split dimensions")
    window = tuple(n // m for n, m in zip(own, size, strict=True))
    return _run(functions.avg_pool, x._block, window, spec=x._layout)


# Sizes


@handles("pad")
def _pad(func: Any, args: Any, kwargs: Any) -> Any:
    x, widths, mode, value = named(args, kwargs, "input pad mode value")
    own_dims(func, x, args, kwargs)
    pairs = [(0, 0)] * (x.ndim - len(widths) // 2) + list(zip(widths[-2::-2], widths[-1::-2], strict=True))
    mode = {None: "constant", "replicate": "edge", "circular": "wrap"}.get(mode, mode)
    return _run(functions.pad, x._block, tuple(map(tuple, pairs)), mode, 0 if value is None else value, spec=x._layout)


@handles("interpolate upsample")
def _interpolate(func: Any, args: Any, kwargs: Any) -> Any:
    names = "input size scale_factor mode align_corners recompute_scale_factor antialias"
    x, size, scale, mode, align, recompute, antialias = named(args, kwargs, names)
    own_dims(func, x, args, kwargs)
    method = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic", None: "nearest"}.get(mode, mode)
    options: dict[str, Any] = {
        "align_corners": bool(align),
        "antialias": bool(antialias),
        "recompute_scale_factor": bool(recompute),
    }
    if method == "cubic":
        options["cubic"] = -0.5 if antialias else -0.75
    size = tuple(size) if isinstance(size, list | torch.Size) else size
    scale = tuple(scale) if isinstance(scale, list) else scale
    return _run(functions.resize, x._block, method=method, size=size, scale_factor=scale, **options, spec=x._layout)


# Attention


@handles("scaled_dot_product_attention")
def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    names = "query key value attn_mask dropout_p is_causal scale enable_gqa"
    q, k, v, mask, rate, causal, scale, gqa = named(args, kwargs, names)
    q, k, v, mask = (as_global(a) for a in (q, k, v, mask))
    if rate:
        return _attention_by_hand(q, k, v, mask, rate, causal, scale, gqa)
    lies = _common_heads(q, k, v)
    if lies is not None:  # each worker has all positions of its heads: torch's kernel serves
        blocks = [block_in(a, tuple(a.shape), layout_of_dims(a.shape, lies)) for a in (q, k, v)]
        if mask is not None:
            shape = (*q.shape[:-1], k.shape[-2])
            mask = block_in(mask, shape, layout_of_dims(shape, lies))
        return result(func(*blocks, mask, 0.0, bool(causal), scale=scale), layout_of_dims(q.shape, lies))
    given = {"mask": None, "bias": None, "mask_spec": None, "bias_spec": None}
    if mask is not None:
        kind = "mask" if mask.dtype is torch.bool else "bias"
        given |= {kind: _block(mask), f"{kind}_spec": _spec(mask)}
    return _run(
        functions.attention,
        *map(_block, (q, k, v)),
        causal=bool(causal),
        scale=scale,
        spec=_spec(q) or whole_layout(q.shape),
        kv_spec=_spec(k) or whole_layout(k.shape),
        v_spec=_spec(v) or whole_layout(v.shape),
        **given,
    )


def _common_heads(q: Any, k: Any, v: Any) -> list[Dim] | None:
    """How samples and heads lie, if queries, keys and values lie alike, in nothing else."""
    lies = None
    for x in (q, k, v):
        if tuple(x.shape[:-2]) != tuple(q.shape[:-2]):
            return None
        if not isinstance(x, GlobalTensor):
            continue
        if not x.is_separate or any(d.names for d in dims_of(x)[-2:]):
            return None
        if lies is not None and dims_of(x) != lies:
            return None
        lies = dims_of(x)
    return lies


def _attention_by_hand(q: Any, k: Any, v: Any, mask: Any, rate: float, causal: Any, scale: Any, gqa: Any) -> Any:
    """Attention with dropout of the weights."""
    if gqa and q.shape[1] != k.shape[1]:
        raise LayoutError.at(
            "torch's scaled_dot_product_attention",
            argument="dropout_p",
            got=f"{rate}, with enable_gqa",
            need="no dropout, or as many heads of keys as of queries",
            mend="dropout_p=0.0",
        )
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return F.dropout(scores.softmax(-1), rate) @ v


@handles("dropout dropout_ alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d feature_dropout")
def _dropout(func: Any, args: Any, kwargs: Any) -> Any:
    name = func.__name__
    x, rate, training, _ = (args[0], *named(args[1:], kwargs, "p training inplace"))
    rate = 0.5 if rate is None else rate
    training = (name not in ("dropout",) or func is F.dropout) if training is None else training
    if not training or not rate:
        return x
    if name not in ("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d"):
        raise unhandled(func, args, kwargs, "dropout of entries or of channels")
    if name[-1] == "d":  # of whole channels
        dims, shape = own_dims(func, x, args, kwargs), list(x._layout.shape)
        space = range(len(shape) - int(name[-2]), len(shape))
        shape = [1 if d in space else n for d, n in enumerate(shape)]
        target = layout_of_dims(shape, [WHOLE if d in space else dim for d, dim in enumerate(dims)])
        with torch.no_grad():
            ones = torch.ones(target.block_shape(here("a global tensor").index), dtype=x.dtype, device=x.device)
        return x * result(spt_dropout(declared(ones, target), rate, spec=target), target)
    return GlobalTensor(spt_dropout(x._block, rate, spec=x._layout), x._layout, x._groups)


@handles("embedding")
def _embedding(func: Any, args: Any, kwargs: Any) -> Any:
    ids, table, padding, max_norm, _, by_freq, sparse = named(
        args, kwargs, "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    )
    if not isinstance(ids, torch.Tensor):
        ids, table = table, ids
    ids, table = as_global(ids), as_global(table)
    if table.ndim != 2:
        raise RuntimeError("'weight' must be 2-D")  # as torch does
    if max_norm is not None or by_freq or sparse:
        raise unhandled(func, args, kwargs, "max_norm=None, scale_grad_by_freq=False, sparse=False")
    if padding is not None and padding < 0:  # for `torch.embedding` it means none
        padding = padding + table.shape[0] if func is F.embedding else None
    specs = {"spec": _spec(ids), "table_spec": _spec(table)}
    return _run(functions.embedding, _block(table), _block(ids), padding_idx=padding, **specs)


# Fourier transforms


def _transform(name: str) -> None:
    function = getattr(fft, name)
    several = name.endswith(("n", "2"))

    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        x, size, axes, norm = named(args, kwargs, "input s dim norm" if several else "input n dim norm")
        own_dims(func, x, args, kwargs)
        options: dict[str, Any] = {"norm": norm, "spec": x._layout}
        size = tuple(size) if isinstance(size, list) else size
        axes = tuple(axes) if isinstance(axes, list) else axes
        if several:
            options |= {"s": size} | ({} if axes is None else {"axes": axes})
        else:
            options |= {"n": size} | ({} if axes is None else {"axis": axes})
        return _run(function, x._block, **options)

    HANDLERS[getattr(torch.fft, name)] = handler


for _name in "fft ifft rfft irfft hfft ihfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn".split():
    _transform(_name)
