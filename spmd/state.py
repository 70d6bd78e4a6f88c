"""The states of a value along the axes of a mesh.

Along each axis a value is Invariant (one value, a copy on every worker), Varying (one value per worker) or Rooted (one
value, held by one worker). The inner product counts an Invariant value once, sums a Varying one over the workers, and
counts a Rooted one at its root.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar

__all__ = ["INVARIANT", "REPLICAS", "ROOTED", "VARYING", "State", "state_of"]

INVARIANT, VARYING, ROOTED = "Invariant", "Varying", "Rooted"
REPLICAS: ContextVar[bool] = ContextVar("spmd_replicas", default=False)
"""Whether every Invariant array is compared across workers: `spmd.debug(replicas=True)`."""


class State:
    """The axes along which an array of a body varies; it is Invariant along all others.

    States are interned by `state_of`: equal states are one object, and compare without cost.
    A Rooted value is never mixed with arrays; it is a separate handle (`spmd.operators.root.Rooted`).
    """

    __slots__ = ("varying",)

    def __init__(self, varying: frozenset[str]):
        self.varying = varying

    def __or__(self, other: State) -> State:
        return state_of(self.varying | other.varying)

    def __repr__(self) -> str:
        return f"State({', '.join(map(repr, sorted(self.varying)))})"

    def __str__(self) -> str:
        return f"Varying({', '.join(sorted(self.varying))})" if self.varying else INVARIANT

    def along(self, name: str) -> str:
        return VARYING if name in self.varying else INVARIANT


_interned: dict[frozenset[str], State] = {}


def state_of(varying: Iterable[str]) -> State:
    """The one State that varies along these axes."""
    key = frozenset(varying)
    state = _interned.get(key)
    return _interned.setdefault(key, State(key)) if state is None else state
