"""Losses of global tensors: sums and means over the entries of all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn import _reduction as _Reduction
from torch.nn import functional as F

from spmd import functions
from spmd.bridge.torch.global_tensors.layers import joins, named
from spmd.bridge.torch.global_tensors.meeting import (
    WHOLE,
    as_global,
    block_in,
    check_whole,
    dims_of,
    laid,
    layout_of_dims,
)
from spmd.bridge.torch.global_tensors.norms import channels
from spmd.bridge.torch.global_tensors.registry import HANDLERS, unhandled
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor, result
from spmd.bridge.torch.global_tensors.views import own_dims


def _loss(name: str, names: str, renamed: Sequence[tuple[str, str]] = ()) -> None:
    function = getattr(functions, name)

    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        given = dict(zip(names.split(), named(args, kwargs, names), strict=True))
        x, target = as_global(given.pop("input")), as_global(given.pop("target"))
        reduction = _reduction(given)
        options = {new: given[old] for old, new in renamed if given.get(old) is not None}
        _check_shapes(name, x, target, options)
        return _loss_of(function, func, x, target, reduction, options, args, kwargs)

    HANDLERS[getattr(F, name)] = handler  # those of `torch` take a number as reduction, in another place


def _check_shapes(name: str, x: Any, target: Any, options: dict[str, Any]) -> None:
    """Compare the shapes of wholes: blocks could fit a target, or weights, that the whole does not."""
    where, shape, c = f"torch's {name}", tuple(x.shape), min(1, x.ndim - 1)
    by_class = name in ("cross_entropy", "nll_loss")
    indexed = by_class and (name == "nll_loss" or target.ndim < x.ndim)
    check_whole(where, "target", target, shape[:c] + shape[c + 1 :] if indexed else shape)
    for option in {"weight", "pos_weight"} & {*options}:
        if by_class:
            check_whole(where, option, options[option], shape[c : c + 1])
        else:
            check_whole(where, option, options[option], shape, broadcasts=True)


def _reduction(given: dict[str, Any]) -> str:
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return _Reduction.legacy_get_string(given.get("size_average"), given.get("reduce"), emit_warning=False)
    return given.get("reduction") or "mean"


def _loss_of(
    function: Any, func: Any, x: Any, target: Any, reduction: str, options: Any, args: Any, kwargs: Any
) -> Any:
    indexed = function in (functions.cross_entropy, functions.nll_loss) and target.ndim < x.ndim
    if joins(x) or joins(target):
        outer, by_sample = tuple(x.shape), function in (functions.cross_entropy, functions.nll_loss)
        x, target = _unjoined(func, x, target, indexed, args, kwargs)
        if reduction == "batchmean":
            return _loss_of(function, func, x, target, "sum", options, args, kwargs) / outer[0]
        y = _loss_of(function, func, x, target, reduction, options, args, kwargs)
        if reduction != "none":
            return y
        return y.reshape(-1) if by_sample else y.movedim(1, -1).reshape(outer) if len(outer) > 1 else y.reshape(outer)
    c = min(1, x.ndim - 1)
    if not isinstance(x, GlobalTensor):
        dims = dims_of(laid(target))
        layout = layout_of_dims(x.shape, [*dims[:c], WHOLE, *dims[c:]] if indexed else dims)
        x = GlobalTensor(block_in(x, layout.shape, layout), layout)
    lies, dims = x._layout, own_dims(func, x, args, kwargs)
    rest = [d for d in range(x.ndim) if d != c or not indexed]
    of_target = layout_of_dims([lies.shape[d] for d in rest], [dims[d] for d in rest])
    out = layout_of_dims(lies.shape, dims)
    if function in (functions.cross_entropy, functions.nll_loss):
        rest = [d for d in range(x.ndim) if d != c]
        out = layout_of_dims([lies.shape[d] for d in rest], [dims[d] for d in rest])
        if options.get("weight") is not None:
            options["weight"] = channels(x, options["weight"], c)
    elif options.get("weight") is not None:
        options["weight"] = block_in(as_global(options["weight"]), lies.shape, lies)
    if options.get("pos_weight") is not None:
        options["pos_weight"] = block_in(as_global(options["pos_weight"]), lies.shape, lies)
    y = function(x._block, block_in(target, of_target.shape, of_target), reduction=reduction, **options, spec=lies)
    return result(y, out) if reduction == "none" else y


def _unjoined(func: Any, x: Any, target: Any, indexed: bool, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The operands of a loss with samples of several dimensions, where these are joined; classes come second."""
    lead = x if joins(x) else target
    n = lead._groups[0]
    shape = lead._layout.shape[:n]
    if any(k != 1 for k in lead._groups[1:]) or (indexed and x.ndim != 2):
        raise unhandled(func, args, kwargs, "samples that are joined, and classes that are not")
    x, target = (_opened(a, shape) for a in (x, target))
    move = lambda a: a.movedim(-1, 1) if a.ndim > n else a
    return (move(x), target if indexed else move(target)) if x.ndim > n else (x, target)


def _opened(a: Any, shape: Sequence[int]) -> Any:
    """A tensor whose first dimension is several."""
    if not joins(a):
        return a.reshape(*shape, *a.shape[1:])
    return GlobalTensor(a._block, a._layout)


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
