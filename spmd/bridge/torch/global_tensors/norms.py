"""Norms of global tensors: statistics over all workers."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from spmd import functions
from spmd.bridge.torch.global_tensors.layers import named, or_default, whole_operand
from spmd.bridge.torch.global_tensors.meeting import as_global, block_in, check_whole, dims_of, laid, layout_of_dims
from spmd.bridge.torch.global_tensors.registry import handles, unhandled
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor, result
from spmd.bridge.torch.global_tensors.views import own_dims

__all__ = ["channels"]


def _of_norm(functional: bool, args: Any, kwargs: Any) -> list[Any]:
    """The input, the running statistics and the parameters, which functions of `torch` take in another order."""
    if functional:
        return named(args, kwargs, "input running_mean running_var weight bias")
    x, weight, bias, mean, variance = named(args, kwargs, "input weight bias running_mean running_var")
    return [x, mean, variance, weight, bias]


@handles("batch_norm")
def _batch_norm(func: Any, args: Any, kwargs: Any) -> Any:
    x, mean, variance, weight, bias = _of_norm(func is F.batch_norm, args, kwargs)
    training, momentum, eps = named(args[5:], kwargs, "training momentum eps")
    x = laid(x)
    own_dims(func, x, args, kwargs)
    weight, bias = (channels(x, p, 1) for p in (weight, bias))
    running = None if mean is None else tuple(channels(x, as_global(b), 1) for b in (mean, variance))
    options = {"training": bool(training), "momentum": or_default(momentum, 0.1), "eps": or_default(eps, 1e-5)}
    y: Any = functions.batch_norm(x._block, weight, bias, running, **options, spec=x._layout)
    if running is None:
        return result(y, x._layout)
    y, updated = y
    if training:
        for buffer, value in zip((mean, variance), updated, strict=True):
            _store(buffer, value.detach(), x)
    return result(y, x._layout)


def channels(x: GlobalTensor, p: Any, d: int) -> Any:
    """This worker's part of a parameter with an entry for each index of a dimension of x."""
    if p is None:
        return None
    p = as_global(p)
    target = layout_of_dims(x._layout.shape[d : d + 1], dims_of(x)[d : d + 1])
    check_whole("a function of torch", "a parameter of channels", p, target.shape)
    if not target.varying:
        return whole_operand(p)
    return block_in(p, target.shape, target)


def _store(buffer: Any, value: torch.Tensor, x: GlobalTensor) -> None:
    """Write new running statistics, which lie as the channels, to a buffer."""
    target = layout_of_dims(x._layout.shape[1:2], dims_of(x)[1:2])
    made = result(value, target)
    with torch.no_grad():
        if hasattr(type(buffer), "block_layout"):
            buffer.copy_(whole_operand(made))
        else:
            buffer.copy_(whole_operand(made))


@handles("layer_norm rms_norm")
def _layer_norm(func: Any, args: Any, kwargs: Any) -> Any:
    root = func.__name__ == "rms_norm"
    names = "input normalized_shape weight eps" if root else "input normalized_shape weight bias eps"
    x, shape, weight, *rest = named(args, kwargs, names)
    x = laid(x)
    own_dims(func, x, args, kwargs)
    n = 1 if isinstance(shape, int) else len(tuple(shape))
    target = layout_of_dims(x._layout.shape[-n:], dims_of(x)[-n:])
    parameters = [_over(p, target) for p in (weight, *rest[:-1])]
    function: Any = functions.rms_norm if root else functions.layer_norm
    eps = rest[-1]
    if eps is None:
        eps = torch.finfo(x.dtype).eps if root else 1e-5
    return result(function(x._block, *parameters, eps, ndim=n, spec=x._layout), x._layout)


def _over(p: Any, target: Any) -> Any:
    if p is None:
        return None
    p = as_global(p)
    check_whole("a norm of torch", "weight or bias", p, target.shape)
    return whole_operand(p) if not target.varying else block_in(p, target.shape, target)


@handles("group_norm")
def _group_norm(func: Any, args: Any, kwargs: Any) -> Any:
    x, groups, weight, bias, eps = named(args, kwargs, "input num_groups weight bias eps")
    x = laid(x)
    own_dims(func, x, args, kwargs)
    weight, bias = (channels(x, p, 1) for p in (weight, bias))
    y = functions.group_norm(x._block, groups, weight, bias, or_default(eps, 1e-5), spec=x._layout)
    return result(y, x._layout)


@handles("instance_norm")
def _instance_norm(func: Any, args: Any, kwargs: Any) -> Any:
    x, mean, _, weight, bias = _of_norm(func is F.instance_norm, args, kwargs)
    own, _, eps = named(args[5:], kwargs, "use_input_stats momentum eps")
    x = laid(x)
    own_dims(func, x, args, kwargs)
    if mean is not None or own is False:
        raise unhandled(func, args, kwargs, "statistics of the input: track_running_stats=False")
    weight, bias = (channels(x, p, 1) for p in (weight, bias))
    return result(functions.instance_norm(x._block, weight, bias, or_default(eps, 1e-5), spec=x._layout), x._layout)


@handles("_weight_norm")
def _weight_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """v scaled to norms g, over all dimensions besides one (-1: over all), as parametrizations.weight_norm does."""
    v, g, d = named(args, kwargs, "v g dim")
    v, g = laid(v), as_global(g)
    over = list(range(v.ndim)) if d == -1 else [k for k in range(v.ndim) if k != (d or 0) % v.ndim]
    return v * (g / torch.linalg.vector_norm(v, 2, over, True))
