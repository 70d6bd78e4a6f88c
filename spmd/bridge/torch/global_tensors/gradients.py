"""Gradients with respect to global tensors, which are global tensors that lie alike, and hooks on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.bridge.torch.call_arguments import argument
from spmd.bridge.torch.global_tensors.meeting import as_global, block_in
from spmd.bridge.torch.global_tensors.registry import HANDLERS, handles, unhandled
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor
from spmd.bridge.torch.tensor import cotangent_with_state
from spmd.bridge.torch.tensor_state import state_of_tensor, without_state

__all__ = ["block_of_cotangent", "global_cotangent"]


def _block(x: Any) -> Any:
    return x._block if isinstance(x, GlobalTensor) else x


def _tuple(x: Any) -> tuple[Any, ...]:
    return (x,) if isinstance(x, torch.Tensor) else tuple(x)


def _cotangent(func: Any, y: Any, cotangent: Any, args: Any, kwargs: Any) -> Any:
    """A cotangent that lies as what it belongs to."""
    if not isinstance(y, GlobalTensor):
        return cotangent.whole() if isinstance(cotangent, GlobalTensor) else cotangent
    cotangent = as_global(cotangent)
    if cotangent is None or tuple(cotangent.shape) != tuple(y.shape):
        raise unhandled(func, args, kwargs, f"a cotangent of shape {list(y.shape)}, or the gradient of a number")
    if isinstance(cotangent, GlobalTensor) and (cotangent._layout, cotangent._groups) == (y._layout, y._groups):
        return cotangent._block
    if not y.is_separate:
        raise unhandled(func, args, kwargs, "a cotangent that lies as the tensor")
    return block_in(cotangent, y._layout.shape, y._layout)


def block_of_cotangent(x: GlobalTensor, cotangent: Any) -> Any:
    """This worker's block of a cotangent of x."""
    return _cotangent(torch.Tensor.backward, x, cotangent, (x,), {})


def global_cotangent(x: GlobalTensor, g: torch.Tensor) -> GlobalTensor:
    """The cotangent of x of which this worker's block is g, in the state of the block of x."""
    return GlobalTensor(cotangent_with_state(g, state_of_tensor(x._block)), x._layout, x._groups)


def _cotangents(func: Any, ys: tuple[Any, ...], given: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    given = (None,) * len(ys) if given is None else _tuple(given)
    return tuple(_cotangent(func, y, g, args, kwargs) for y, g in zip(ys, given, strict=True))


def _gradients(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    outputs, inputs = (_tuple(argument(args, kwargs, k, name)) for k, name in enumerate(("outputs", "inputs")))
    cotangents = _cotangents(func, outputs, argument(args, kwargs, 2, "grad_outputs"), args, kwargs)
    rest = {k: v for k, v in kwargs.items() if k not in ("outputs", "inputs", "grad_outputs")}
    found = func(tuple(map(_block, outputs)), tuple(map(_block, inputs)), cotangents, *args[3:], **rest)
    return tuple(
        GlobalTensor(g, x._layout, x._groups) if isinstance(x, GlobalTensor) and g is not None else g
        for x, g in zip(inputs, found, strict=True)
    )


HANDLERS[torch.autograd.grad] = _gradients


@handles("backward")
def _backward(func: Any, args: Any, kwargs: Any) -> None:
    y = args[0]
    (cotangent,) = _cotangents(func, (y,), argument(args, kwargs, 1, "gradient"), args, kwargs)
    rest = {k: v for k, v in kwargs.items() if k not in ("gradient", "inputs")}
    inputs = argument(args, kwargs, 4, "inputs")
    inputs = None if inputs is None else tuple(map(_block, _tuple(inputs)))
    func(_block(y), cotangent, *args[2:4], **rest, inputs=inputs)


@handles("register_hook")
def _register_hook(func: Any, args: Any, kwargs: Any) -> Any:
    """A hook gets the gradient as a global tensor, and may give another one."""
    x, hook = args[0], argument(args, kwargs, 1, "hook")
    return func(x._block, _on_blocks(func, x, hook))


def _on_blocks(func: Any, x: GlobalTensor, hook: Callable[[Any], Any]) -> Callable[[torch.Tensor], Any]:
    def run(g: torch.Tensor) -> Any:
        changed = hook(global_cotangent(x, g))
        return None if changed is None else without_state(_cotangent(func, x, changed, (x,), {}))

    return run
