"""The functions of global arrays that are run as maps, of traced arrays too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.array import MAPPED

__all__ = ["implements"]


def implements(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the implementation of functions of NumPy."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            MAPPED[function] = handler
        return handler

    return register
