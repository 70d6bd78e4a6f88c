"""Subclasses of torch.autograd.Function that users write, in bodies whose tensors carry their state.

torch applies them without calling `__torch_function__`. So this module replaces `apply`: Invariant arguments that are
differentiated are varied before they meet Varying ones, so that their cotangents are summed once over the workers, and
results get their state. A backward that is itself differentiated ignores states, because its values, cotangents and
those that forward saved, are varied already.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.modules._functions import BackwardHookFunction

from spmd.bridge.torch.tensor import common_state, set_state, varied_arguments, with_state
from spmd.bridge.torch.tensor_state import state_of_tensor
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
    return tuple(map(stateful, out)) if isinstance(out, tuple) else stateful(out)


def _backward_without_states(self: Any, *cotangents: Any) -> Any:
    worker, module = WORKER.get(), self._forward_cls.__module__
    if worker is None or not torch.is_grad_enabled() or module.startswith(("spmd.", *_OF_TORCH)):
        return _backward(self, *cotangents)
    with torch._C.DisableTorchFunction():
        return _backward(self, *cotangents)


torch.autograd.Function.apply = classmethod(functools.wraps(_apply)(_apply_with_states))  # type: ignore[assignment]
BackwardCFunction.apply = functools.wraps(_backward)(_backward_without_states)  # type: ignore[method-assign]
