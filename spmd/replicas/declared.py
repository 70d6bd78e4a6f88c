"""The memory that a body declared to vary."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

__all__ = ["DeclaredMemory", "owner_of"]

Bounds = tuple[int, int]


def owner_of(x: np.ndarray) -> Any:
    """The array that owns the memory of x: x itself, or the last array of which it is a view."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


class DeclaredMemory:
    """The memory that a body declared to vary, while it exists. It is not kept alive: a loop declares many arrays."""

    __slots__ = ("_parts",)

    def __init__(self):
        self._parts: dict[int, tuple[weakref.ref, set[Bounds]]] = {}

    def add(self, owner: Any, x: np.ndarray) -> None:
        """Note the memory of x. owner: an object that exists as long as this memory."""
        key = id(owner)
        if key not in self._parts:
            self._parts[key] = weakref.ref(owner, lambda _: self._parts.pop(key, None)), set()
        self._parts[key][1].add(_bounds(x))

    def overlaps(self, x: np.ndarray) -> bool:
        """Whether some of this memory may be that of x."""
        low, high = own = _bounds(x)
        parts = [*self._parts.values()]
        return any(b == own or (b[0] < high and low < b[1]) for _, bounds in parts for b in bounds)

    def __len__(self) -> int:
        return len(self._parts)


def _bounds(x: np.ndarray) -> Bounds:
    return np.lib.array_utils.byte_bounds(x)
