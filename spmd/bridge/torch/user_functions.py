"""Subclasses of torch.autograd.Function that users write, in bodies whose tensors carry their state.

torch applies them without calling `__torch_function__`. So `apply` is replaced here: it varies Invariant arguments that
are differentiated before they meet Varying ones, so that their cotangents are summed once over the workers. It gives
results their state. A backward that is itself differentiated has only values that are varied already: cotangents and
what forward has saved. So it ignores states.
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


def _applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
    worker = WORKER.get()
    if worker is None or not worker.tracked or cls.__module__.startswith(_OF_TORCH):
        return _apply(cls, *args, **kwargs)
    state = common_state(args, kwargs)
    if not state.varying:
        return _apply(cls, *args, **kwargs)
    if cls is BackwardHookFunction:  # of the arguments or results of a module, each as it is
        out = _apply(cls, *args, **kwargs)
        for a, y in zip(args, out if isinstance(out, tuple) else (out,), strict=True):
            if type(y) is torch.Tensor:
                set_state(y, state_of_tensor(a))  # in place: torch looks for their node
        return out
    args, kwargs = varied_arguments(args, kwargs, state)
    out = _apply(cls, *args, **kwargs)
    # What forward has computed by functions of torch knows its state, also a result that is less Varying.
    one = lambda y: with_state(y, state) if type(y) is torch.Tensor else y
    return tuple(map(one, out)) if isinstance(out, tuple) else one(out)


def _back(self: Any, *cotangents: Any) -> Any:
    worker, module = WORKER.get(), self._forward_cls.__module__
    if worker is None or not torch.is_grad_enabled() or module.startswith(("spmd.", *_OF_TORCH)):
        return _backward(self, *cotangents)
    with torch._C.DisableTorchFunction():
        return _backward(self, *cotangents)


torch.autograd.Function.apply = classmethod(functools.wraps(_apply)(_applied))  # type: ignore[assignment]
BackwardCFunction.apply = functools.wraps(_backward)(_back)  # type: ignore[method-assign]
