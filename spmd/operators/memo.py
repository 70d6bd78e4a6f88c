"""Objects that are created once: operators, and the results of their methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, TypeVar

__all__ = ["bounded", "interned", "memoised", "rebound"]

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])

_TABLE_MAX = 512
"""Entries of a table after which it is emptied."""


def bounded(table: dict) -> dict:
    """A table, emptied if it has grown long."""
    if len(table) >= _TABLE_MAX:
        table.clear()
    return table


def memoised(method: F) -> F:
    """A method that computes its result, which is not None, once for each combination of hashable arguments."""
    name = f"memoised {method.__qualname__}"

    @wraps(method)
    def cached(self: Any, *arguments: Any) -> Any:
        table = self.__dict__.get(name)
        if table is None:
            table = self.__dict__[name] = {}
        value = table.get(arguments)
        if value is None:
            value = bounded(table)[arguments] = method(self, *arguments)
        return value

    return cached  # type: ignore[return-value]


def interned(kind: type[C], *parameters: Any) -> C:
    """The one collective of a kind with these parameters, which keeps its plans. Unhashable parameters are wrong ones:
    the collective says so when it is applied."""
    try:
        return _interned(kind, *parameters)
    except TypeError:
        return kind(*parameters)


@lru_cache(maxsize=4096, typed=True)
def _interned(kind: Any, *parameters: Any) -> Any:
    return kind(*parameters)


def rebound(op: C, **changes: Any) -> C:
    """A copy of a collective with other parameters: the same object each time."""
    return _rebound(op, tuple(changes.items()))


@lru_cache(maxsize=4096)
def _replaced(op: Any, changes: tuple[tuple[str, Any], ...]) -> Any:
    return replace(op, **dict(changes))


@memoised
def _rebound(op: Any, changes: tuple[tuple[str, Any], ...]) -> Any:
    return _replaced(op, changes)
