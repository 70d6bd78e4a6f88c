"""Functions of the user's, subclasses of torch.autograd.Function, in bodies whose tensors carry their state.

torch applies them without asking what their arguments are. So `apply` is made to do here what all functions of torch do
there: Invariant arguments that are differentiated are varied before they meet Varying ones, so that what backward gives
for them is summed once over the workers; results know their state; and so do the cotangents of a backward that is
differentiated itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.modules._functions import BackwardHookFunction

from spmd.bridge.torch.tensor import Tensor, joined_state, state_of_tensor, stated, varied_arguments
from spmd.mesh import WORKER
from spmd.state import State

__all__: list[str] = []

_OF_TORCH = ("torch.utils.checkpoint", "torch._functorch.")
"""Functions that run functions of the user's, on tensors in the states that they had."""

_apply: Any = torch.autograd.Function.__dict__["apply"].__func__
_backward: Any = BackwardCFunction.apply


def _applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
    worker = WORKER.get()
    if worker is None or not worker.tracked or cls.__module__.startswith(_OF_TORCH):
        return _apply(cls, *args, **kwargs)
    state = joined_state(args, kwargs)
    if not state.varying:
        return _apply(cls, *args, **kwargs)
    if cls is BackwardHookFunction:  # of the arguments or results of a module, each as it is
        states = [state_of_tensor(a) if isinstance(a, torch.Tensor) else None for a in args]
        return _with_states(_apply(cls, *args, **kwargs), states)
    args, kwargs = varied_arguments(args, kwargs, state)
    out = _apply(cls, *args, **kwargs)
    several = isinstance(out, tuple)
    outs = out if several else (out,)
    states = [_state_of_result(y, state) for y in outs]
    for y in outs:
        node = y.grad_fn if isinstance(y, torch.Tensor) else None
        if isinstance(node, BackwardCFunction):
            node.spmd_states = states  # type: ignore[attr-defined]
    return _with_states(out, states)


def _state_of_result(y: Any, state: State) -> State | None:
    """A result that forward has computed by functions of torch knows its state, also one that is less Varying."""
    if not isinstance(y, torch.Tensor):
        return None
    return y.state if isinstance(y, Tensor) else state


def _with_states(out: Any, states: list[State | None]) -> Any:
    outs = out if isinstance(out, tuple) else (out,)
    found = tuple(
        stated(y, s) if s is not None and type(y) is torch.Tensor else y for y, s in zip(outs, states, strict=True)
    )
    return found if isinstance(out, tuple) else found[0]


def _back(self: Any, *cotangents: Any) -> Any:
    states = getattr(self, "spmd_states", None)
    if states is not None and torch.is_grad_enabled() and WORKER.get() is not None:
        cotangents = tuple(
            g if s is None or not isinstance(g, torch.Tensor) else stated(g, s)
            for g, s in zip(cotangents, states, strict=True)
        )
    return _backward(self, *cotangents)


torch.autograd.Function.apply = classmethod(functools.wraps(_apply)(_applied))  # type: ignore[assignment]
BackwardCFunction.apply = functools.wraps(_backward)(_back)  # type: ignore[method-assign]
