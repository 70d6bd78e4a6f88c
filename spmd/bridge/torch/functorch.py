"""Tensors that the transformations of torch.func wrap, and the level of dual numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

__all__ = [
    "current_level",
    "has_tangent",
    "is_wrapped",
    "is_wrapped_by_grad",
    "shared_dual_level",
    "unwrapped",
    "unwrapped_once",
]


_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]


current_level: Callable[[], Any] = _functorch.maybe_current_level
"""The level of the innermost transformation of torch.func in this thread; None outside of them."""
is_wrapped_by_grad: Callable[[Any], bool] = _functorch.is_gradtrackingtensor
unwrapped_once: Callable[[Any], Any] = _functorch.get_unwrapped


def unwrapped(x: Any) -> Any:
    """The tensor that the transformations of torch.func have wrapped."""
    while isinstance(x, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def is_wrapped(x: torch.Tensor) -> bool:
    """Whether a transformation of torch.func wraps x, so that its data cannot be read here."""
    return current_level() is not None and _functorch.is_functorch_wrapped_tensor(x)


class _DualLevel:
    """The level of dual numbers that workers in threads share.

    torch has one level for the whole process. The outermost torch.func.jvp enters it. When it leaves, the tangents of
    all threads are lost. So the level is held while bodies run, and every jvp in a body counts as an inner one.
    """

    lock = threading.Lock()
    holders = 0
    entered = False


@contextmanager
def shared_dual_level() -> Iterator[None]:
    """Hold the level of dual numbers while several workers run in threads of this process."""
    nesting: Any = eager_transforms
    with _DualLevel.lock:
        if not _DualLevel.holders and forward_ad._current_level < 0:
            forward_ad.enter_dual_level()
            _DualLevel.entered = True
        _DualLevel.holders += 1
        nesting.JVP_NESTING += 1
    try:
        yield
    finally:
        with _DualLevel.lock:
            nesting.JVP_NESTING -= 1
            _DualLevel.holders -= 1
            if not _DualLevel.holders and _DualLevel.entered:
                _DualLevel.entered = False
                forward_ad.exit_dual_level()


def has_tangent(x: torch.Tensor) -> bool:
    """Whether x has a tangent of torch.autograd.forward_ad. While the level is held, only torch.func makes tangents."""
    return forward_ad._current_level >= 0 and not _DualLevel.holders and forward_ad.unpack_dual(x).tangent is not None
