"""torch.utils.checkpoint inside of units: what it computes again in backward has the units' whole parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from typing import Any, Protocol

from torch.utils import checkpoint

__all__ = ["RUNNING", "RunningUnit"]


class RunningUnit(Protocol):
    """A unit whose forward runs, or ran."""

    def again(self) -> AbstractContextManager[None]:
        """Inside, its module has whole parameters once more."""
        ...


RUNNING: ContextVar[tuple[RunningUnit, ...]] = ContextVar("spmd_torch_running_units", default=())
"""The units whose forward runs, the outermost first."""


def _in_units(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that, called again in backward, runs in the units in which it runs now."""
    units = RUNNING.get()
    if not units:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for unit in units:
                stack.enter_context(unit.again())
            return function(*args, **kwargs)

    return call


def _patched(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function of torch whose argument of this name runs again in backward."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not RUNNING.get():
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.arguments[name] = _in_units(bound.arguments[name])
        return original(*bound.args, **bound.kwargs)

    return call


_generator: Any = checkpoint._checkpoint_without_reentrant_generator
checkpoint._checkpoint_without_reentrant_generator = _patched(_generator, "fn")
checkpoint.CheckpointFunction.forward = staticmethod(_patched(checkpoint.CheckpointFunction.forward, "run_function"))
