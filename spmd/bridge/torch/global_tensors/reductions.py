"""Functions along dimensions: sums and other reductions over all workers, and functions of dimensions that are whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from spmd import functions
from spmd.bridge.torch.call_arguments import argument
from spmd.bridge.torch.global_tensors.meeting import WHOLE, Dim, layout_of_dims
from spmd.bridge.torch.global_tensors.registry import handles, unhandled
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor, result
from spmd.bridge.torch.global_tensors.views import normal, own_dims
from spmd.operators.reduce import pmax, pmin, psum

_OVER_ALL = {"sum": psum, "amax": pmax, "amin": pmin, "max": pmax, "min": pmin}


def _axes(dims: Sequence[Dim], over: Sequence[int]) -> tuple[str, ...]:
    return tuple(n for d in over for n in dims[d].names)


def _reduced_layout(shape: Sequence[int], dims: Sequence[Dim], over: Sequence[int], keepdim: bool) -> Any:
    kept = [(1, WHOLE) if d in over else (shape[d], dims[d]) for d in range(len(shape)) if keepdim or d not in over]
    return layout_of_dims([n for n, _ in kept], [dim for _, dim in kept])


@handles("sum mean amax amin max min var std var_mean std_mean norm vector_norm all any count_nonzero nansum")
def _reduce(func: Any, args: Any, kwargs: Any) -> Any:
    x, name = args[0], func.__name__.removeprefix("linalg_")
    if name in ("max", "min") and (len(args) > 1 or kwargs):
        if isinstance(argument(args, kwargs, 1, "other"), torch.Tensor):
            return {"max": torch.maximum, "min": torch.minimum}[name](*args, **kwargs)
        return _along(func, args, kwargs)
    if len(x._groups) != len(x._layout.shape):  # over all entries it does not matter how dimensions are joined
        over = argument(args, kwargs, 2 if "norm" in name else 1, "dim")
        if over is not None or x._layout.spec is None:
            raise unhandled(func, args, kwargs)
        x = GlobalTensor(x._block, x._layout)
    dims, shape = own_dims(func, x, args, kwargs), x._layout.shape
    options = dict(kwargs)
    over = options.pop("dim", None)
    if "norm" in name:
        return _norm(func, x, dims, args, kwargs)
    position = 1
    if name in ("var", "std") and len(args) > 1 and isinstance(args[1], bool):
        options["correction"], over = int(args[1]), None  # the older signature: unbiased
    elif len(args) > position and over is None:
        over = args[position]
        if len(args) > position + 1:
            options["keepdim"] = args[position + 1]
    given = range(len(shape)) if over is None or over == () or over == [] else [over] if isinstance(over, int) else over
    over = sorted({normal(d, len(shape)) for d in given})
    keepdim = bool(options.pop("keepdim", False))
    if name in ("var", "std", "var_mean", "std_mean"):
        return _variance(name, x, dims, over, keepdim, options)
    axes, out = _axes(dims, over), _reduced_layout(shape, dims, over, keepdim)
    if name == "mean":
        dtype = options.get("dtype")
        block = x._block if dtype is None else x._block.to(dtype)
        total = block.sum(over, keepdim)
        total = psum(total, axes) if axes else total
        return result(total / math.prod(shape[d] for d in over) if over else total, out)
    if name in ("all", "any", "count_nonzero"):
        block = (x._block != 0).sum(over, keepdim)
        total = psum(block, axes) if axes else block
        count = math.prod(shape[d] for d in over)
        return result(total if name == "count_nonzero" else total == count if name == "all" else total > 0, out)
    if name == "nansum":
        return result(
            psum(torch.nansum(x._block, over, keepdim), axes) if axes else torch.nansum(x._block, over, keepdim), out
        )
    if name == "sum":
        block = x._block.sum(over, keepdim, **options)
        return result(psum(block, axes) if axes else block, out)
    if any(n == 0 for n in x._block.shape) and axes and all(shape):  # a worker without entries
        raise unhandled(func, args, kwargs, "entries on every worker for the largest or smallest of all")
    block = getattr(x._block, "amax" if "max" in name else "amin")(over, keepdim) if over else x._block
    return result(_OVER_ALL[name](block, axes) if axes else block, out)


def _variance(name: str, x: GlobalTensor, dims: Any, over: list[int], keepdim: bool, options: dict) -> Any:
    unbiased = options.pop("unbiased", None)
    correction = options.pop("correction", 1)
    correction = 1 if correction is None else correction
    correction = correction if unbiased is None else int(unbiased)
    mean = x.mean(over, True)
    deviation = x - mean
    square = deviation.abs().square() if deviation.is_complex() else deviation.square()
    count = math.prod(x._layout.shape[d] for d in over)
    variance = (
        square.sum(over, keepdim) / max(0, count - correction)
        if count - correction > 0
        else square.sum(over, keepdim) * math.nan
    )
    spread = variance if name.startswith("var") else variance.sqrt()
    return (spread, x.mean(over, keepdim)) if name.endswith("_mean") else spread


def _norm(func: Any, x: GlobalTensor, dims: Any, args: Any, kwargs: Any) -> Any:
    p = argument(args, kwargs, 1, "p", kwargs.get("ord", 2))
    p = 2 if p in (None, "fro") else p
    if p not in (1, 2, math.inf) or argument(args, kwargs, 4, "dtype") is not None:
        raise unhandled(func, args, kwargs, "p = 1, 2 or infinity")
    over = argument(args, kwargs, 2, "dim")
    keepdim = bool(argument(args, kwargs, 3, "keepdim", False))
    over = list(range(x.ndim)) if over is None else over
    size = x.abs()
    if p == math.inf:
        return size.amax(over, keepdim)
    return size.sum(over, keepdim) if p == 1 else size.square().sum(over, keepdim).sqrt()


# Functions along dimensions

_POSITION = {"norm": 2, "renorm": 2, "softmax": 1, "log_softmax": 1, "kthvalue": 2, "topk": 2, "quantile": 2}


@handles(
    "cumsum cumprod cummax cummin logcumsumexp argmax argmin sort argsort topk kthvalue median mode flip diff prod "
    "roll softmin glu normalize logsumexp"
)
def _along(func: Any, args: Any, kwargs: Any) -> Any:
    """A function along dimensions that are whole."""
    x, name = args[0], func.__name__
    dims, shape = own_dims(func, x, args, kwargs), x._layout.shape
    if name in ("logsumexp",):
        over = argument(args, kwargs, 1, "dim")
        return _logsumexp(x, dims, over, bool(argument(args, kwargs, 2, "keepdim", False)))
    over = argument(args, kwargs, _POSITION.get(name, 1), "dim", kwargs.get("dims"))
    if name in ("roll",):
        over = argument(args, kwargs, 2, "dims")
    if name in ("topk", "sort", "argsort", "glu", "diff") and over is None:
        over = -1
    if over is None:
        raise unhandled(func, args, kwargs, "a dimension that is whole on each worker")
    over = [normal(d, len(shape)) for d in ([over] if isinstance(over, int) else over)]
    if _axes(dims, over):
        raise unhandled(func, args, kwargs, f"dimension {over[0]} whole on each worker")
    y = func(x._block, *args[1:], **kwargs)
    return _with_dims(y, shape, dims, over)


def _with_dims(y: Any, shape: Sequence[int], dims: Sequence[Dim], over: Sequence[int]) -> Any:
    """Results of a block, whose dimensions besides some are those of the block."""
    if isinstance(y, tuple):
        parts = [_with_dims(part, shape, dims, over) for part in y]
        return type(y)(parts) if hasattr(y, "n_fields") else tuple(parts)
    if y.ndim == len(shape):
        sizes = [y.shape[d] if d in over else n for d, n in enumerate(shape)]
        return result(y, layout_of_dims(sizes, dims))
    return result(y, _reduced_layout(shape, dims, over, False))


def _logsumexp(x: GlobalTensor, dims: Sequence[Dim], over: Any, keepdim: bool) -> Any:
    over = sorted(normal(d, len(dims)) for d in ([over] if isinstance(over, int) else over))
    axes = _axes(dims, over)
    out = _reduced_layout(x._layout.shape, dims, over, keepdim)
    if not axes:
        return result(torch.logsumexp(x._block, over, keepdim), out)
    return result(functions.logsumexp(x._block, tuple(over), keepdims=keepdim, axis_name=axes), out)


@handles("softmax log_softmax")
def _softmax(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    dims = own_dims(func, x, args, kwargs)
    d = argument(args, kwargs, 1, "dim")
    d = normal(-1 if d is None else d, len(dims))
    dtype = kwargs.get("dtype")
    if not dims[d].names:
        return GlobalTensor(func(x._block, d, dtype=dtype), x._layout)
    x = x if dtype is None else x.to(dtype)
    shifted = x - x.detach().amax(d, True)
    log = shifted - shifted.exp().sum(d, True).log()
    return log if func.__name__ == "log_softmax" else log.exp()
