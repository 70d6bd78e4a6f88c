"""Subclasses of torch.autograd.Function that users write, in bodies whose tensors carry their state.

torch applies them without calling `__torch_function__`. So this module replaces `apply`: Invariant arguments that are
differentiated are varied before they meet Varying ones, so that their cotangents are summed once over the workers, and
results get their state. In backward a cotangent has the state of its result. A backward that is itself differentiated
ignores the states of values, because they are varied already.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.modules._functions import BackwardHookFunction

from spmd.bridge.torch.tensor import common_state, cotangent_with_state, set_state, varied_arguments, with_state
from spmd.bridge.torch.tensor_state import INVARIANT, state_of_tensor, without_state
from spmd.mesh import WORKER

__all__: list[str] = []

_OF_TORCH = ("torch.utils.checkpoint", "torch._functorch.")
"""Modules whose functions run other functions, which handle states themselves."""

_apply: Any = torch.autograd.Function.__dict__["apply"].__func__
_backward: Any = BackwardCFunction.apply


def _apply_with_states(cls: Any, *args: Any, **kwargs: Any) -> Any:
    worker = WORKER.get()
    if worker is None or not worker.tracked or cls.__module__.startswith(_OF_TORCH):
        return _apply(cls, *args, **kwargs)
    state = common_state(args, kwargs)
    if not state.varying:
        return _apply(cls, *args, **kwargs)
    if cls is BackwardHookFunction:  # returns the arguments or results of a module unchanged
        out = _apply(cls, *args, **kwargs)
        for a, y in zip(args, out if isinstance(out, tuple) else (out,), strict=True):
            if type(y) is torch.Tensor:
                set_state(y, state_of_tensor(a))  # in place, because torch looks up their node
        return out
    args, kwargs = varied_arguments(args, kwargs, state)
    out = _apply(cls, *args, **kwargs)
    # Results that forward computed by functions of torch have a state, which may be less Varying.
    stateful = lambda y: with_state(y, state) if type(y) is torch.Tensor else y
    made = out if isinstance(out, tuple) else (out,)
    outs = tuple(map(stateful, made))
    node: Any = next((y.grad_fn for y in made if isinstance(y, torch.Tensor) and y.grad_fn is not None), None)
    if node is not None:
        node._spmd_states = tuple(state_of_tensor(y) if isinstance(y, torch.Tensor) else INVARIANT for y in outs)
    return outs if isinstance(out, tuple) else outs[0]


def _backward_with_states(self: Any, *cotangents: Any) -> Any:
    states = getattr(self, "_spmd_states", None)
    if states is None or WORKER.get() is None:
        return _backward(self, *cotangents)
    cotangents = tuple(map(cotangent_with_state, cotangents, states))
    with torch._C.DisableTorchFunction() if torch.is_grad_enabled() else nullcontext():
        grads = _backward(self, *cotangents)
    return tuple(map(without_state, grads)) if isinstance(grads, tuple) else without_state(grads)


torch.autograd.Function.apply = classmethod(functools.wraps(_apply)(_apply_with_states))  # type: ignore[assignment]
BackwardCFunction.apply = functools.wraps(_backward)(_backward_with_states)  # type: ignore[method-assign]
