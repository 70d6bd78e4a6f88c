"""Which scheduler suits a map on arguments of some shapes: found out by its first calls.

The first call runs in lockstep. Where what one core does between two waits is short, that stays. Where it is long, a
second call is looked at, because a first one also imports and compiles; and where that is not so long that threads are
sure to be sooner, a few calls of each are timed. The results have the same bits either way.
"""

from __future__ import annotations

from threading import Lock

from spmd.mesh import Mesh
from spmd.transport.base import Outcome
from spmd.transport.blas import usable_cores

__all__ = ["Trial"]

_LONG = 400e-6
"""Seconds between two waits from which threads may pay for their handoffs (about 35 us each across cores)."""
_SURE = 10 * _LONG
"""Seconds from which they do."""
_CALLS = ("lockstep", "lockstep", "threads", "threads", "lockstep", "threads", "lockstep")
"""What is tried. The first call does not count, and of three times the least does: machines are shared."""


class Trial:
    """The first calls of a map on some shapes. chosen: the scheduler that they have come to, None before that."""

    __slots__ = ("calls", "chosen", "lock", "taken")

    def __init__(self) -> None:
        self.lock = Lock()
        self.chosen: str | None = None
        self.calls = 0
        self.taken: dict[str, list[float]] = {"lockstep": [], "threads": []}

    @property
    def next(self) -> str:
        """The scheduler of the next call."""
        return self.chosen or _CALLS[min(self.calls, len(_CALLS) - 1)]

    def learn(self, scheduler: str, outcome: Outcome, mesh: Mesh) -> None:
        """How a call went with this scheduler."""
        with self.lock:  # the user's threads may call at once
            if self.chosen is None:
                self.calls += 1
                self.taken[scheduler].append(outcome.seconds)
                self.chosen = self._choice(outcome, mesh)

    def _choice(self, outcome: Outcome, mesh: Mesh) -> str | None:
        if self.calls > 2:
            if self.calls < len(_CALLS):
                return None
            least = {name: min(seconds, default=0.0) for name, seconds in self.taken.items()}
            return min(least, key=least.__getitem__)
        segment = (outcome.seconds - outcome.shared) / (outcome.switches + mesh.size)
        if segment <= _LONG or usable_cores() == 1 or mesh.size == 1:
            return "lockstep"
        if self.calls == 1:
            self.taken["lockstep"].clear()
            return None
        return "threads" if segment > _SURE else None
