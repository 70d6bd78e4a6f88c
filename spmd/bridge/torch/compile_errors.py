"""One clear error where torch.compile meets tensors that carry their state.

The compiler traces this library's code too, and its own errors from there do not help.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from spmd.bridge.torch.tensor import STATE_IN_COMPILED
from spmd.errors import StateError
from spmd.mesh import WORKER

__all__ = ["clear_errors"]


def clear_errors() -> None:
    """Let torch's compiler, if it is imported, raise an error in bodies that says what it cannot compile."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    wrapper: Any = getattr(frames, "CatchErrorsWrapper", None)
    if wrapper is None or hasattr(wrapper.__call__, "__wrapped__"):
        return
    compiler = wrapper.__call__

    @functools.wraps(compiler)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return compiler(self, *args, **kwargs)
        except Exception as error:
            worker = WORKER.get()
            if worker is None or not worker.tracked or not _is_state_error(error):
                raise
        raise StateError(STATE_IN_COMPILED)

    wrapper.__call__ = call


def _is_state_error(error: Exception) -> bool:
    """Whether the compiler failed because of states: it met the error for them, or recursed too deep."""
    return isinstance(error, StateError | RecursionError) or any(
        word in str(error) for word in ("RecursionError", "carries its state", "StateError")
    )


def _with_clear_errors(compile: Any) -> Any:
    @functools.wraps(compile)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiled = compile(*args, **kwargs)
        clear_errors()
        return compiled

    return call


torch.compile = _with_clear_errors(torch.compile)
