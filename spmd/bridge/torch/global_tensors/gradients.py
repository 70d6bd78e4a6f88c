"""Gradients with respect to global tensors, which are global tensors that lie alike, and hooks on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from spmd.bridge.torch.call_arguments import argument
from spmd.bridge.torch.global_tensors.meeting import as_global, block_in
from spmd.bridge.torch.global_tensors.registry import HANDLERS, handles, unhandled
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor
from spmd.bridge.torch.tensor import cotangent_with_state
from spmd.bridge.torch.tensor_state import state_of_tensor, without_state
from spmd.bridge.torch.worker_context import for_this_worker
from spmd.layout import Layout
from spmd.state import State

__all__ = ["CotangentSpace"]


def _block(x: Any) -> Any:
    return x._block if isinstance(x, GlobalTensor) else x


def _tuple(x: Any) -> tuple[Any, ...]:
    return (x,) if isinstance(x, torch.Tensor) else tuple(x)


class CotangentSpace(NamedTuple):
    """What cotangents of a global tensor are: global tensors of its shape that lie alike, in the state of its block.

    It holds no data. Hooks belong to the node of a block, so a tensor that they held would never be freed.
    """

    shape: tuple[int, ...]
    layout: Layout
    groups: tuple[int, ...]
    state: State

    @classmethod
    def of(cls, x: GlobalTensor) -> CotangentSpace:
        return cls(tuple(x.shape), x._layout, x._groups, state_of_tensor(x._block))

    def cotangent(self, block: torch.Tensor) -> GlobalTensor:
        """The cotangent of which this worker has this block."""
        return GlobalTensor(cotangent_with_state(block, self.state), self.layout, self.groups)

    def block(self, cotangent: Any, func: Any = torch.Tensor.backward, *named: Any) -> Any:
        """This worker's block of a cotangent that was given to func, wherever it lies. named: what errors name."""
        given = as_global(cotangent)
        if given is None or tuple(given.shape) != self.shape:
            need = f"a cotangent of shape {list(self.shape)}, or the gradient of a number"
            raise unhandled(func, named or (cotangent,), {}, need)
        if isinstance(given, GlobalTensor) and (given._layout, given._groups) == (self.layout, self.groups):
            return given._block
        if self.layout.spec is None or len(self.groups) != len(self.layout.shape):
            raise unhandled(func, named or (cotangent,), {}, "a cotangent that lies as the tensor")
        return block_in(given, self.layout.shape, self.layout)


def _cotangents(func: Any, ys: tuple[Any, ...], given: Any) -> tuple[Any, ...]:
    """What autograd takes as the cotangents of some tensors."""
    given = (None,) * len(ys) if given is None else _tuple(given)
    return tuple(
        CotangentSpace.of(y).block(g, func, y)
        if isinstance(y, GlobalTensor)
        else g.whole()
        if isinstance(g, GlobalTensor)
        else g
        for y, g in zip(ys, given, strict=True)
    )


def _gradients(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    outputs, inputs = (_tuple(argument(args, kwargs, k, name)) for k, name in enumerate(("outputs", "inputs")))
    cotangents = _cotangents(func, outputs, argument(args, kwargs, 2, "grad_outputs"))
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
    (cotangent,) = _cotangents(func, (y,), argument(args, kwargs, 1, "gradient"))
    rest = {k: v for k, v in kwargs.items() if k not in ("gradient", "inputs")}
    inputs = argument(args, kwargs, 4, "inputs")
    inputs = None if inputs is None else tuple(map(_block, _tuple(inputs)))
    func(_block(y), cotangent, *args[2:4], **rest, inputs=inputs)


@handles("register_hook")
def _register_hook(func: Any, args: Any, kwargs: Any) -> Any:
    """A hook gets the gradient as a global tensor, and may give another one."""
    x, hook = args[0], argument(args, kwargs, 1, "hook")
    return func(x._block, _on_blocks(hook, CotangentSpace.of(x)))


def _on_blocks(hook: Callable[[Any], Any], space: CotangentSpace) -> Callable[[torch.Tensor], Any]:
    own = for_this_worker(hook)

    def run(g: torch.Tensor) -> Any:
        changed = own(space.cotangent(g))
        return None if changed is None else without_state(space.block(changed, torch.Tensor.register_hook))

    return run
