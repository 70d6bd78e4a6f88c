"""Functions that torch's compiler does not trace."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

import torch

__all__ = ["left_alone"]

F = TypeVar("F", bound=Callable[..., Any])


def left_alone(reason: str) -> Callable[[F], F]:
    """A decorator: the compiler leaves a function, and what it calls, as they are, in a break of the graph.

    reason: what the error of the compiler says with fullgraph=True, from torch 2.8.
    """
    takes_reason = "reason" in signature(torch.compiler.disable).parameters
    options = {"reason": reason} if takes_reason else {}
    disable: Any = torch.compiler.disable
    return lambda function: disable(function, **options)
