"""Subclasses of torch.autograd.Function that users write, in bodies whose tensors carry their state.

torch applies them without calling `__torch_function__`. So this module replaces `apply`: Invariant arguments that are
differentiated are varied before they meet Varying ones, so that their cotangents are summed once over the workers, and
results get their state. In backward cotangents and saved tensors have the states of what they belong to, so that a
backward may use collectives, and be differentiated itself.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.modules._functions import BackwardHookFunction

from spmd.bridge.torch.tensor import common_state, cotangent_with_state, set_state, varied_arguments, with_state
from spmd.bridge.torch.tensor_state import INVARIANT, state_of_tensor, without_state
from spmd.bridge.torch.worker_context import WorkerContext, context_of, resumed
from spmd.mesh import WORKER
from spmd.state import State

__all__: list[str] = []

_OF_TORCH = ("torch.utils.checkpoint", "torch._functorch.")
"""Modules whose functions run other functions, which handle states themselves."""

_apply: Any = torch.autograd.Function.__dict__["apply"].__func__
_backward: Any = BackwardCFunction.apply
_saved: Any = BackwardCFunction.saved_tensors


def _apply_with_states(cls: Any, *args: Any, **kwargs: Any) -> Any:
    worker = WORKER.get()
    if worker is None or cls.__module__.startswith(_OF_TORCH):
        return _apply(cls, *args, **kwargs)
    state = common_state(args, kwargs) if worker.tracked else INVARIANT
    if cls is BackwardHookFunction:  # returns the arguments or results of a module unchanged
        out = _apply(cls, *args, **kwargs)
        for a, y in zip(args, out if isinstance(out, tuple) else (out,), strict=True):
            if state.varying and type(y) is torch.Tensor:
                set_state(y, state_of_tensor(a))  # in place, because torch looks up their node
        return out
    if state.varying:
        args, kwargs = varied_arguments(args, kwargs, state)
    out = _apply(cls, *args, **kwargs)
    results = out if isinstance(out, tuple) else (out,)
    nodes = (y.grad_fn for y in results if isinstance(y, torch.Tensor))
    node: Any = next((n for n in nodes if getattr(n, "_forward_cls", None) is cls), None)
    if state.varying:
        # Results that forward computed by functions of torch have a state, which may be less Varying.
        results = tuple(with_state(y, state) if type(y) is torch.Tensor else y for y in results)
    if node is not None:  # that of an argument that forward wrote to is another one
        states = tuple(state_of_tensor(y) if isinstance(y, torch.Tensor) else INVARIANT for y in results)
        node._spmd_states = _States(state, states, context_of(worker))
    return results if isinstance(out, tuple) else results[0]


class _States(NamedTuple):
    """The state of a call's differentiated arguments, the states of its results, and the context of its worker."""

    arguments: State
    results: tuple[State, ...]
    context: WorkerContext


def _backward_with_states(self: Any, *cotangents: Any) -> Any:
    states = getattr(self, "_spmd_states", None)
    if states is None:
        return _backward(self, *cotangents)
    with resumed(states.context):
        grads = _backward(self, *map(cotangent_with_state, cotangents, states.results))
    return tuple(map(without_state, grads)) if isinstance(grads, tuple) else without_state(grads)


def _saved_with_states(self: Any) -> Any:
    """What forward saved. torch gives results, and what hooks have packed, as plain tensors."""
    saved, states = _saved.__get__(self), getattr(self, "_spmd_states", None)
    if states is None:
        return saved

    def stateful(x: Any) -> Any:
        if type(x) is not torch.Tensor or not x.requires_grad:
            return x
        state = states.results[x.output_nr] if x.grad_fn is self else states.arguments
        return with_state(x, state) if state.varying else x

    return tuple(map(stateful, saved))


torch.autograd.Function.apply = classmethod(functools.wraps(_apply)(_apply_with_states))  # type: ignore[assignment]
BackwardCFunction.apply = functools.wraps(_backward)(_backward_with_states)  # type: ignore[method-assign]
BackwardCFunction.saved_tensors = property(_saved_with_states)  # type: ignore[assignment]
