"""Objects that are made once: operators, and what their methods find out."""

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
    """A table that an operator keeps, emptied if it has grown long."""
    if len(table) >= _TABLE_MAX:
        table.clear()
    return table


def memoised(method: F) -> F:
    """A method of a collective that finds something out, which is not None, of arguments that can be hashed: once for
    each of them."""
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
    """The one collective of a kind with these parameters, that keeps what has been found out about it. Parameters that
    cannot be hashed are no right ones, which the collective says itself when it is applied."""
    try:
        return _interned(kind, *parameters)
    except TypeError:
        return kind(*parameters)


@lru_cache(maxsize=4096, typed=True)
def _interned(kind: Any, *parameters: Any) -> Any:
    return kind(*parameters)


def rebound(op: C, **changes: Any) -> C:
    """A collective of the same class with other parameters, once they are known: the same object each time."""
    return _rebound(op, tuple(changes.items()))


@lru_cache(maxsize=4096)
def _replaced(op: Any, changes: tuple[tuple[str, Any], ...]) -> Any:
    return replace(op, **dict(changes))


@memoised
def _rebound(op: Any, changes: tuple[tuple[str, Any], ...]) -> Any:
    return _replaced(op, changes)
