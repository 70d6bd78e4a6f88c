"""The handlers of operators and functions of torch that are given a sharded tensor. `operators` and `functions` set
them when they are imported: they need the class, whose methods call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HANDLERS: dict[str, Callable[[Any, Any, dict[str, Any]], Any]] = {}
"""run: of operators (`__torch_dispatch__`). call: of functions (`__torch_function__`)."""


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Apply an operator of torch."""
    return HANDLERS["run"](func, args, kwargs)


def call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function of torch."""
    return HANDLERS["call"](func, args, kwargs)
