"""The functions of global arrays that are run as maps, of traced arrays too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.global_functions import MAPPED
from spmd.layout_rules import RULES, Rule

__all__ = ["implements"]


def implements(*functions: Any, rule: Rule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the implementation of functions of NumPy. rule: how it lays out the result."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            MAPPED[function], RULES[function] = handler, rule
        return handler

    return register
