"""Functions along dimensions: reductions over all workers, and functions of dimensions that are whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from spmd.bridge.torch.call_arguments import argument
from spmd.bridge.torch.global_tensors.meeting import WHOLE, Dim, as_global, layout_of_dims
from spmd.bridge.torch.global_tensors.registry import handles, unhandled
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor, result
from spmd.bridge.torch.global_tensors.views import normal, own_dims
from spmd.operators.reduce import pmax, pmin, psum


def _axes(dims: Sequence[Dim], over: Sequence[int]) -> tuple[str, ...]:
    return tuple(n for d in over for n in dims[d].names)


def _reduced_layout(shape: Sequence[int], dims: Sequence[Dim], over: Sequence[int], keepdim: bool) -> Any:
    kept = [(1, WHOLE) if d in over else (shape[d], dims[d]) for d in range(len(shape)) if keepdim or d not in over]
    return layout_of_dims([n for n, _ in kept], [dim for _, dim in kept])


@handles("max min")
def _largest(func: Any, args: Any, kwargs: Any) -> Any:
    """The largest entry; of a dimension with its index; of two tensors entry by entry."""
    if len(args) == 1 and not kwargs:
        return _reduce(func, args, kwargs)
    if isinstance(argument(args, kwargs, 1, "other"), torch.Tensor):
        return {"max": torch.maximum, "min": torch.minimum}[func.__name__](*args, **kwargs)
    return _along(func, args, kwargs)


@handles("sum nansum mean amax amin all any count_nonzero")
def _reduce(func: Any, args: Any, kwargs: Any) -> Any:
    x, name = args[0], func.__name__
    over, keepdim, options = _dimensions(args, kwargs, 1)
    x, dims = _separate(func, x, over, args, kwargs)
    shape = x._layout.shape
    over = _normal_dims(over, len(shape))
    axes, out = _axes(dims, over), _reduced_layout(shape, dims, over, keepdim)
    added = lambda block: psum(block, axes) if axes else block
    count = math.prod(shape[d] for d in over)
    if name in ("sum", "nansum"):
        return result(added(func(x._block, over, keepdim, **options)), out)
    if name == "mean":
        return result(added(x._block.sum(over, keepdim, **options)) / count if over else x._block, out)
    if name in ("all", "any", "count_nonzero"):
        total = added((x._block != 0).sum(over, keepdim))
        return result(total if name == "count_nonzero" else total == count if name == "all" else total > 0, out)
    if axes and not count:
        raise IndexError(f"{name}(): Expected reduction dims {over} to have entries")  # as torch does
    largest = "max" in name
    block = _extremum(x._block, over, keepdim, largest) if over else x._block
    return result((pmax if largest else pmin)(block, axes) if axes else block, out)


def _extremum(block: Any, over: Any, keepdim: bool, largest: bool) -> Any:
    """The largest or smallest entries of a block. Of none: what any other worker's exceed, with the history."""
    if all(block.shape[d] for d in over):
        return (torch.amax if largest else torch.amin)(block, over, keepdim)
    kind = block.dtype
    none = block.sum(over, keepdim, dtype=kind)
    if kind is torch.bool:
        return none if largest else ~none
    if kind.is_floating_point:
        return none - math.inf if largest else none + math.inf
    return none + (torch.iinfo(kind).min if largest else torch.iinfo(kind).max)


@handles("allclose equal")
def _all_alike(func: Any, args: Any, kwargs: Any) -> bool:
    if func.__name__ == "equal":
        a, b = args
        return a.shape == b.shape and bool((a == b).all())
    return bool(torch.isclose(*args, **kwargs).all())


def _dimensions(args: Any, kwargs: Any, position: int) -> tuple[Any, bool, dict[str, Any]]:
    """The dimensions of a reduction, whether they stay, and its other options."""
    options = dict(kwargs)
    over = options.pop("dim", options.pop("axis", args[position] if len(args) > position else None))
    keepdim = options.pop("keepdim", args[position + 1] if len(args) > position + 1 else False)
    return over, bool(keepdim), options


def _normal_dims(over: Any, ndim: int) -> list[int]:
    if over is None or over in ((), []):
        return list(range(ndim))
    return sorted({normal(d, ndim) for d in ([over] if isinstance(over, int) else over)})


def _separate(func: Any, x: GlobalTensor, over: Any, args: Any, kwargs: Any) -> tuple[GlobalTensor, list[Dim]]:
    """x and how its dimensions lie. Where all entries are reduced, it does not matter that dimensions are joined."""
    if over is None and x.joins:
        x = GlobalTensor(x._block, x._layout)
    if over is None and x._layout.spec is None:  # each worker of a grid has entries of its own, or none
        return x, [Dim(tuple(x._layout.axes)), *[WHOLE] * (len(x._layout.shape) - 1)]
    return x, own_dims(func, x, args, kwargs)


@handles("var std var_mean std_mean")
def _variance(func: Any, args: Any, kwargs: Any) -> Any:
    x, name = args[0], func.__name__
    if len(args) > 1 and isinstance(args[1], bool):  # the older signature: unbiased
        args, kwargs = (x, *args[2:]), {**kwargs, "correction": int(args[1])}
    if len(args) > 2 and isinstance(args[2], bool):
        args, kwargs = (*args[:2], *args[3:]), {**kwargs, "correction": int(args[2])}
    over, keepdim, options = _dimensions(args, kwargs, 1)
    x, _ = _separate(func, x, over, args, kwargs)
    over = _normal_dims(over, x.ndim)
    correction = options.get("correction", int(options.get("unbiased", True)))
    rest = math.prod(x._layout.shape[d] for d in over) - (1 if correction is None else correction)
    mean = x.mean(over, True) if x._layout.spec is not None else x.mean()
    square = (x - mean).abs().square()
    total = square.sum(over, keepdim) if x._layout.spec is not None else square.sum()
    variance = total * (1 / rest if rest > 0 else math.nan)
    spread = variance if name.startswith("var") else _root(variance)
    return (spread, mean if keepdim or x._layout.spec is None else x.mean(over)) if name.endswith("_mean") else spread


@handles("norm vector_norm")
def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    p = argument(args, kwargs, 1, "p", kwargs.get("ord"))
    of_matrix = func.__name__ == "linalg_norm" and p not in (None, "fro")
    p = 2 if p in (None, "fro") else p
    over, keepdim, options = _dimensions(args, {k: v for k, v in kwargs.items() if k not in ("p", "ord")}, 2)
    if p not in (0, 1, 2, math.inf) or any(v is not None for v in options.values()):
        raise unhandled(func, args, kwargs, "p = 0, 1, 2 or infinity, in the dtype of the tensor")
    x, _ = _separate(func, x, over, args, kwargs)
    over, size = _normal_dims(over, x.ndim), x.abs()
    if of_matrix and len(over) == 2:
        raise unhandled(func, args, kwargs, "torch.linalg.vector_norm, or the norm of Frobenius of matrices")
    if p == math.inf:
        return size.amax(over, keepdim)
    if p == 0:
        return (size != 0).to(size.dtype).sum(over, keepdim)
    return size.sum(over, keepdim) if p == 1 else _root(size.square().sum(over, keepdim))


def _root(square: Any) -> Any:
    """The square root of a norm's square, whose gradient at 0 is 0, as in torch."""
    zero = square == 0
    return square.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


@handles("normalize")
def _normalize(func: Any, args: Any, kwargs: Any) -> Any:
    x, p, d, eps, out = (argument(args, kwargs, k, name) for k, name in enumerate(("input", "p", "dim", "eps", "out")))
    if out is not None:
        raise unhandled(func, args, kwargs, "no out=")
    size: Any = torch.norm(x, 2.0 if p is None else p, 1 if d is None else d, True)
    return x / size.clamp_min(1e-12 if eps is None else eps)


# Functions along dimensions

_POSITION = {"kthvalue": 2, "topk": 2, "roll": 2}
"""Where the dimension stands among the arguments, if not second."""
_LAST = {"topk", "sort", "argsort", "glu", "kthvalue"}
"""Functions along the last dimension, if none is given."""


@handles("diff")
def _differences(func: Any, args: Any, kwargs: Any) -> Any:
    x, n, d, before, after = (argument(args, kwargs, k, name) for k, name in enumerate(_DIFF))
    d = normal(-1 if d is None else d, x.ndim)
    x = as_global(torch.cat([a for a in (before, x, after) if a is not None], d))
    for _ in range(1 if n is None else n):
        x = x.narrow(d, 1, x.shape[d] - 1) - x.narrow(d, 0, x.shape[d] - 1) if x.shape[d] else x
    return x


_DIFF = "input", "n", "dim", "prepend", "append"


@handles("flip")
def _flip(func: Any, args: Any, kwargs: Any) -> Any:
    x, *given = args
    over = kwargs.get("dims", given[0] if len(given) == 1 else given)
    dims = own_dims(func, x, args, kwargs)
    over = [normal(d, len(dims)) for d in ([over] if isinstance(over, int) else over)]
    if _axes(dims, over):
        raise unhandled(func, args, kwargs, f"dimensions {over} whole on each worker")
    return GlobalTensor(x._block.flip(over), x._layout)


@handles(
    "cumsum cumprod cummax cummin logcumsumexp argmax argmin sort argsort topk kthvalue median mode prod "
    "roll softmin glu logsumexp"
)
def _along(func: Any, args: Any, kwargs: Any) -> Any:
    """A function along dimensions that are whole."""
    x, name = args[0], func.__name__
    dims, shape = own_dims(func, x, args, kwargs), x._layout.shape
    if name in ("logsumexp",):
        over = argument(args, kwargs, 1, "dim")
        return _logsumexp(x, dims, over, bool(argument(args, kwargs, 2, "keepdim", False)))
    over = argument(args, kwargs, _POSITION.get(name, 1), "dim", kwargs.get("dims"))
    if over is None and name in _LAST:
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
    out = _reduced_layout(x._layout.shape, dims, over, keepdim)
    if not _axes(dims, over):
        return result(torch.logsumexp(x._block, over, keepdim), out)
    top = x.detach().amax(over, True)
    top = top.masked_fill(top.isinf(), 0)
    return (x - top).exp().sum(over, keepdim).log() + (top if keepdim else top.sum(over))


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
    return log if func.__name__.endswith("log_softmax") else log.exp()
