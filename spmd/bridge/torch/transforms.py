"""torch.func and torch.utils.checkpoint in bodies whose tensors carry their state.

The transformations wrap arguments in plain tensors, and unwrap results. The functions of torch that do so are replaced
here by functions that keep the state. A checkpoint that is reentrant, or inside hooks of saved tensors, calls its
function a second time on plain tensors, which get the states of the first call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap
from torch.utils import checkpoint

from spmd.bridge.torch.rng import BodyMode, has_body_mode, in_body
from spmd.bridge.torch.tensor import Tensor, in_backward, set_state
from spmd.bridge.torch.tensor_state import is_partitioned
from spmd.tracebacks import boundary_like

__all__: list[str] = []


def _keeping_state(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        y = function(x, *args, **kwargs)
        if isinstance(x, Tensor) and type(y) is torch.Tensor:
            set_state(y, x.state)
        return y

    return call


for _module, _name in (
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_unwrap_for_grad"),
    (vmap, "_add_batch_dim"),
    (vmap, "_remove_batch_dim"),
):
    setattr(_module, _name, _keeping_state(getattr(_module, _name)))


def _with_saved_states(checkpointed: Callable, place: int) -> Callable:
    """A function of torch, `place` of whose arguments is the function that is called again.

    The last arguments are those of that function.
    """

    @functools.wraps(checkpointed)
    def call(*args: Any, **kwargs: Any) -> Any:
        states = [x.state if isinstance(x, Tensor) else None for x in args]
        if not any(states):
            return checkpointed(*args, **kwargs)
        function = args[place]

        def recompute(*inputs: Any, **options: Any) -> Any:
            for x, state in zip(inputs, states[len(states) - len(inputs) :], strict=True):
                if state is not None and type(x) is torch.Tensor:
                    set_state(x, state)
            return function(*inputs, **options)

        return checkpointed(*args[:place], recompute, *args[place + 1 :], **kwargs)

    return call


def _keeping_blocks(save_inputs: Callable) -> Callable:
    """Inputs of which each worker holds a block are kept as they are: hooks of saved tensors would detach them."""

    @functools.wraps(save_inputs)
    def call(frame: Any, *args: Any) -> None:
        save_inputs(frame, *[None if is_partitioned(x) else x for x in args])
        frame.saved_args = [x if is_partitioned(x) else saved for x, saved in zip(args, frame.saved_args, strict=True)]

    return call


def _with_overrides(engine: Callable) -> Callable:
    """Python code that backward calls, such as a checkpointed function, handles states as forward does."""

    @boundary_like(engine)
    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            if in_backward():
                stack.enter_context(torch._C._EnableTorchFunction())  # type: ignore[attr-defined]
            if in_body() and not has_body_mode():
                stack.enter_context(BodyMode())
            return engine(*args, **kwargs)

    return call


torch.autograd._engine_run_backward = _with_overrides(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
checkpoint.CheckpointFunction.forward = staticmethod(_with_saved_states(checkpoint.CheckpointFunction.forward, 1))
checkpoint._checkpoint_without_reentrant_generator = _with_saved_states(
    checkpoint._checkpoint_without_reentrant_generator, 0
)
_frame: Any = checkpoint._CheckpointFrame
if hasattr(_frame, "save_inputs"):  # earlier versions of torch save inputs otherwise
    _frame.save_inputs = _keeping_blocks(_frame.save_inputs)
