"""Layers of `torch.nn.functional`: those of `spt.functions`, with the layouts of the operands as specs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from spmd import functions
from spmd.bridge.torch.call_arguments import argument
from spmd.bridge.torch.dropout import dropout as spt_dropout
from spmd.bridge.torch.global_tensors.contractions import joined_linear
from spmd.bridge.torch.global_tensors.meeting import WHOLE, as_global, block_in, dims_of, layout_of_dims
from spmd.bridge.torch.global_tensors.registry import HANDLERS, functions_named, handles, unhandled
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor, result, whole_layout
from spmd.bridge.torch.global_tensors.views import own_dims
from spmd.bridge.torch.partitioned.registry import FUNCTIONS
from spmd.errors import LayoutError
from spmd.functions.planned import recorded_layouts

_BOUNDARIES = {"zeros": "zero", "circular": "periodic", "reflect": "reflect", "replicate": "edge"}


def _joins(x: Any) -> bool:
    return isinstance(x, GlobalTensor) and len(x._groups) != len(x._layout.shape)


def _block(x: Any) -> Any:
    return x._block if isinstance(x, GlobalTensor) else x


def _spec(x: Any) -> Any:
    """The layout of an operand for a function of blocks; None for a whole."""
    return x._layout if isinstance(x, GlobalTensor) else None


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function of blocks whose result lies as its plan says."""
    with recorded_layouts() as found:
        y = function(*args, **kwargs)
    return _placed(y, found[-1])


def _placed(y: Any, layout: Any) -> Any:
    if isinstance(layout, tuple):
        return tuple(_placed(each, lies) for each, lies in zip(y, layout, strict=True))
    return result(y, layout)


def _whole_operand(x: Any) -> Any:
    return x.whole() if isinstance(x, GlobalTensor) else x


@handles("linear")
def _linear(func: Any, args: Any, kwargs: Any) -> Any:
    x, w, bias = _named(args, kwargs, "input weight bias")
    x, w, bias = as_global(x), as_global(w), as_global(bias)
    if any(map(_joins, (x, w, bias))):
        return joined_linear(x, w, bias)
    bias = _bias_like(w, bias, 0)
    return _run(functions.linear, _block(x), _block(w), _block(bias), spec=_spec(x), w_spec=_spec(w))


def _named(args: Any, kwargs: Any, names: str) -> list[Any]:
    return [argument(args, kwargs, k, name) for k, name in enumerate(names.split())]


def _bias_like(w: Any, bias: Any, d: int) -> Any:
    """A bias that lies as a dimension of the weights."""
    if bias is None:
        return None
    if not isinstance(w, GlobalTensor) or w._layout.spec is None:
        return bias.whole() if isinstance(bias, GlobalTensor) and w._layout.spec is not None else bias
    target = layout_of_dims(w._layout.shape[d : d + 1], dims_of(w)[d : d + 1])
    if not target.varying:
        return _whole_operand(bias)
    return GlobalTensor(block_in(bias, target.shape, target), target)


@handles("conv1d conv2d conv3d")
def _conv(func: Any, args: Any, kwargs: Any) -> Any:
    names = "input weight bias stride padding dilation groups"
    x, w, bias, stride, padding, dilation, groups = _named(args, kwargs, names)
    x, w = as_global(x), as_global(w)
    batched = x.ndim == w.ndim
    x = x if batched else x.unsqueeze(0)
    bias = _bias_like(w, as_global(bias), 0)
    padding = padding.upper() if isinstance(padding, str) else _pairs(padding)
    y = _run(
        functions.conv,
        _block(x),
        _block(w),
        _block(bias),
        _or(stride, 1),
        padding if padding is not None else 0,
        _or(dilation, 1),
        _or(groups, 1),
        spec=_lies(x, w),
        w_spec=_spec(w),
    )
    return y if batched else y.squeeze(0)


def _lies(x: Any, *others: Any) -> Any:
    """The layout of x; that of a whole beside operands that are split."""
    return _spec(x)


def _or(x: Any, default: Any) -> Any:
    return default if x is None else x if isinstance(x, int) else tuple(x) if len(tuple(x)) != 1 else x[0]


def _pairs(padding: Any) -> Any:
    """Padding as torch gives it, a number for each dimension, as pairs (low, high)."""
    if padding is None or isinstance(padding, int):
        return padding
    values = tuple(padding)
    return values[0] if len(values) == 1 else tuple((p, p) for p in values)


@handles("conv_transpose1d conv_transpose2d conv_transpose3d")
def _conv_transpose(func: Any, args: Any, kwargs: Any) -> Any:
    names = "input weight bias stride padding output_padding groups dilation"
    x, w, bias, stride, padding, extra, groups, dilation = _named(args, kwargs, names)
    x, w, bias = as_global(x), as_global(w), as_global(bias)
    batched = x.ndim == w.ndim
    x = x if batched else x.unsqueeze(0)
    groups = _or(groups, 1)
    if bias is not None and groups == 1:
        bias = _bias_like(w, bias, 1)
    y = _run(
        functions.conv_transpose,
        _block(x),
        _block(w),
        _block(_whole_operand(bias) if groups > 1 else bias),
        _or(stride, 1),
        _or(_pairs(padding), 0),
        _or(extra, 0),
        groups,
        _or(dilation, 1),
        spec=_spec(x),
        w_spec=_spec(w),
    )
    return y if batched else y.squeeze(0)


def _pool(function: Any, names: str) -> Callable[..., Any]:
    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        given = dict(zip(names.split(), _named(args, kwargs, names), strict=True))
        x, window = given.pop("input"), given.pop("kernel_size")
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None}
        if "padding" in options:
            options["padding"] = _or(_pairs(options["padding"]), 0)
        d = int(func.__name__.removesuffix("_with_indices").rstrip("d")[-1])
        batched = x.ndim == d + 2
        x = x if batched else x.unsqueeze(0)
        indices = options.pop("return_indices", False) or func.__name__.endswith("_with_indices")
        if indices:
            options["return_indices"] = True
        y = _run(function, x._block, _or(window, window), **options, spec=x._layout)
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
    x, size = _named(args, kwargs, "input output_size")
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
        return result(func(x._block, size), layout)
    if any(n % m for n, m in zip(own, size, strict=True)):
        raise unhandled(func, args, kwargs, "a size that divides the length of split dimensions")
    window = tuple(n // m for n, m in zip(own, size, strict=True))
    return _run(functions.avg_pool, x._block, window, spec=x._layout)


# Norms


@handles("batch_norm")
def _batch_norm(func: Any, args: Any, kwargs: Any) -> Any:
    names = "input running_mean running_var weight bias training momentum eps"
    x, mean, variance, weight, bias, training, momentum, eps = _named(args, kwargs, names)
    x = as_global(x)
    own_dims(func, x, args, kwargs)
    weight, bias = (_channels(x, p, 1) for p in (weight, bias))
    running = None if mean is None else tuple(_channels(x, as_global(b), 1) for b in (mean, variance))
    options = {"training": bool(training), "momentum": _or(momentum, 0.1), "eps": _or(eps, 1e-5)}
    y = functions.batch_norm(x._block, weight, bias, running, **options, spec=x._layout)
    if running is None:
        return result(y, x._layout)
    y, updated = y
    if training:
        for buffer, value in zip((mean, variance), updated, strict=True):
            _store(buffer, value.detach(), x)
    return result(y, x._layout)


def _channels(x: GlobalTensor, p: Any, d: int) -> Any:
    """This worker's part of a parameter with an entry for each index of a dimension of x."""
    if p is None:
        return None
    p = as_global(p)
    target = layout_of_dims(x._layout.shape[d : d + 1], dims_of(x)[d : d + 1])
    if not target.varying:
        return _whole_operand(p)
    return block_in(p, target.shape, target)


def _store(buffer: Any, value: torch.Tensor, x: GlobalTensor) -> None:
    """Write new running statistics, which lie as the channels, to a buffer."""
    target = layout_of_dims(x._layout.shape[1:2], dims_of(x)[1:2])
    made = result(value, target)
    with torch.no_grad():
        if hasattr(type(buffer), "block_layout"):
            buffer.copy_(_whole_operand(made))
        else:
            buffer.copy_(_whole_operand(made))


@handles("layer_norm rms_norm")
def _layer_norm(func: Any, args: Any, kwargs: Any) -> Any:
    root = func.__name__ == "rms_norm"
    names = "input normalized_shape weight eps" if root else "input normalized_shape weight bias eps"
    x, shape, weight, *rest = _named(args, kwargs, names)
    x = as_global(x)
    own_dims(func, x, args, kwargs)
    n = 1 if isinstance(shape, int) else len(tuple(shape))
    target = layout_of_dims(x._layout.shape[-n:], dims_of(x)[-n:])
    parameters = [_over(p, target) for p in (weight, *rest[:-1])]
    function = functions.rms_norm if root else functions.layer_norm
    eps = rest[-1]
    if eps is None:
        eps = torch.finfo(x.dtype).eps if root else 1e-5
    return result(function(x._block, *parameters, eps, ndim=n, spec=x._layout), x._layout)


def _over(p: Any, target: Any) -> Any:
    if p is None:
        return None
    p = as_global(p)
    return _whole_operand(p) if not target.varying else block_in(p, target.shape, target)


@handles("group_norm")
def _group_norm(func: Any, args: Any, kwargs: Any) -> Any:
    x, groups, weight, bias, eps = _named(args, kwargs, "input num_groups weight bias eps")
    x = as_global(x)
    own_dims(func, x, args, kwargs)
    weight, bias = (_channels(x, p, 1) for p in (weight, bias))
    y = functions.group_norm(x._block, groups, weight, bias, _or(eps, 1e-5), spec=x._layout)
    return result(y, x._layout)


@handles("instance_norm")
def _instance_norm(func: Any, args: Any, kwargs: Any) -> Any:
    names = "input running_mean running_var weight bias use_input_stats momentum eps"
    x, mean, _, weight, bias, own, _, eps = _named(args, kwargs, names)
    x = as_global(x)
    own_dims(func, x, args, kwargs)
    if mean is not None or own is False:
        raise unhandled(func, args, kwargs, "statistics of the input: track_running_stats=False")
    weight, bias = (_channels(x, p, 1) for p in (weight, bias))
    return result(functions.instance_norm(x._block, weight, bias, _or(eps, 1e-5), spec=x._layout), x._layout)


# Sizes


@handles("pad")
def _pad(func: Any, args: Any, kwargs: Any) -> Any:
    x, widths, mode, value = _named(args, kwargs, "input pad mode value")
    own_dims(func, x, args, kwargs)
    pairs = [(0, 0)] * (x.ndim - len(widths) // 2) + list(zip(widths[-2::-2], widths[-1::-2], strict=True))
    mode = {None: "constant", "replicate": "edge", "circular": "wrap"}.get(mode, mode)
    return _run(functions.pad, x._block, tuple(map(tuple, pairs)), mode, 0 if value is None else value, spec=x._layout)


@handles("interpolate upsample")
def _interpolate(func: Any, args: Any, kwargs: Any) -> Any:
    names = "input size scale_factor mode align_corners recompute_scale_factor antialias"
    x, size, scale, mode, align, recompute, antialias = _named(args, kwargs, names)
    own_dims(func, x, args, kwargs)
    method = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic", None: "nearest"}.get(mode, mode)
    options = {"align_corners": bool(align), "antialias": bool(antialias), "recompute_scale_factor": bool(recompute)}
    if method == "cubic":
        options["cubic"] = -0.5 if antialias else -0.75
    size = tuple(size) if isinstance(size, list | torch.Size) else size
    scale = tuple(scale) if isinstance(scale, list) else scale
    return _run(functions.resize, x._block, method=method, size=size, scale_factor=scale, **options, spec=x._layout)


# Attention


@handles("scaled_dot_product_attention")
def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    names = "query key value attn_mask dropout_p is_causal scale enable_gqa"
    q, k, v, mask, rate, causal, scale, gqa = _named(args, kwargs, names)
    q, k, v, mask = (as_global(a) for a in (q, k, v, mask))
    if rate:
        return _attention_by_hand(q, k, v, mask, rate, causal, scale, gqa)
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
    x, rate, training, inplace = (args[0], *_named(args[1:], kwargs, "p training inplace"))
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
            ones = torch.ones(target.block_shape(_index()), dtype=x.dtype, device=x.device)
        keep = GlobalTensor(ones, target)._block if not target.varying else _varying(ones, target)
        return x * result(spt_dropout(keep, rate, spec=target), target)
    return GlobalTensor(spt_dropout(x._block, rate, spec=x._layout), x._layout, x._groups)


def _index() -> int:
    from spmd.mesh import here

    return here("a global tensor").index


def _varying(x: torch.Tensor, target: Any) -> torch.Tensor:
    from spmd.operators.varying import varying

    return varying(x, tuple(n for n in target.axes if n in target.varying))


@handles("embedding")
def _embedding(func: Any, args: Any, kwargs: Any) -> Any:
    ids, table, padding, max_norm, norm_type, by_freq, sparse = _named(
        args, kwargs, "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    )
    if not isinstance(ids, torch.Tensor):
        ids, table = table, ids
    ids, table = as_global(ids), as_global(table)
    if max_norm is not None or by_freq or sparse:
        raise unhandled(func, args, kwargs, "max_norm=None, scale_grad_by_freq=False, sparse=False")
    padding = None if padding is None or padding < 0 and func is not F.embedding else padding
    specs = {"spec": _spec(ids), "table_spec": _spec(table)}
    return _run(functions.embedding, _block(table), _block(ids), padding_idx=padding, **specs)


# Losses


def _loss(name: str, names: str, renamed: Sequence[tuple[str, str]] = ()) -> None:
    function = getattr(functions, name)

    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        given = dict(zip(names.split(), _named(args, kwargs, names), strict=True))
        x, target = as_global(given.pop("input")), as_global(given.pop("target"))
        reduction = _reduction(given)
        options = {new: given[old] for old, new in renamed if given.get(old) is not None}
        return _loss_of(function, func, x, target, reduction, options, args, kwargs)

    handles(name)(handler)


def _reduction(given: dict[str, Any]) -> str:
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return F._Reduction.legacy_get_string(given.get("size_average"), given.get("reduce"), emit_warning=False)
    return given.get("reduction") or "mean"


def _loss_of(
    function: Any, func: Any, x: Any, target: Any, reduction: str, options: Any, args: Any, kwargs: Any
) -> Any:
    classes = function in (functions.cross_entropy, functions.nll_loss)
    if not isinstance(x, GlobalTensor):
        if classes and target.ndim < x.ndim:
            c = 1 if x.ndim > 1 else 0
            dims = [*dims_of(target)[:c], WHOLE, *dims_of(target)[c:]]
        else:
            dims = dims_of(target)
        layout = layout_of_dims(x.shape, dims)
        x = GlobalTensor(block_in(x, layout.shape, layout), layout)
    lies, dims = x._layout, own_dims(func, x, args, kwargs)
    if classes and target.ndim < x.ndim:
        c = 1 if x.ndim > 1 else 0
        rest = [d for d in range(x.ndim) if d != c]
        of_target = layout_of_dims([lies.shape[d] for d in rest], [dims[d] for d in rest])
    else:
        of_target = lies
    out = of_target if classes else lies
    weight = options.pop("weight", None)
    if weight is not None and classes:
        options["weight"] = _channels(x, weight, min(1, x.ndim - 1))
    elif weight is not None:
        options["weight"] = block_in(as_global(weight), lies.shape, lies)
    if options.get("pos_weight") is not None:
        options["pos_weight"] = block_in(as_global(options["pos_weight"]), lies.shape, lies)
    y = function(x._block, block_in(target, of_target.shape, of_target), reduction=reduction, **options, spec=lies)
    return result(y, out) if reduction == "none" else y


_WEIGHT = ("weight", "weight")
_loss("mse_loss", "input target size_average reduce reduction weight", [_WEIGHT])
_loss("l1_loss", "input target size_average reduce reduction weight", [_WEIGHT])
_loss("smooth_l1_loss", "input target size_average reduce reduction beta", [("beta", "beta")])
_loss("huber_loss", "input target reduction delta weight", [("delta", "delta"), _WEIGHT])
_loss("binary_cross_entropy", "input target weight size_average reduce reduction", [_WEIGHT])
_loss(
    "binary_cross_entropy_with_logits",
    "input target weight size_average reduce reduction pos_weight",
    [_WEIGHT, ("pos_weight", "pos_weight")],
)
_loss("kl_div", "input target size_average reduce reduction log_target", [("log_target", "log_target")])
_loss(
    "poisson_nll_loss",
    "input target log_input full size_average eps reduce reduction",
    [("log_input", "log_input"), ("full", "full"), ("eps", "eps")],
)
_loss(
    "nll_loss",
    "input target weight size_average ignore_index reduce reduction",
    [_WEIGHT, ("ignore_index", "ignore_index")],
)
_loss(
    "cross_entropy",
    "input target weight size_average ignore_index reduce reduction label_smoothing",
    [_WEIGHT, ("ignore_index", "ignore_index"), ("label_smoothing", "label_smoothing")],
)

# Fourier transforms


def _transform(name: str) -> None:
    from spmd import fft

    function = getattr(fft, name)
    several = name.endswith(("n", "2"))

    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        x, size, axes, norm = _named(args, kwargs, "input s dim norm" if several else "input n dim norm")
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

# Layers whose parameters lie in blocks are called so whatever x is.
FUNCTIONS |= {
    function: HANDLERS[function]
    for function in functions_named(
        "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d embedding batch_norm layer_norm "
        "rms_norm group_norm instance_norm"
    )
}
