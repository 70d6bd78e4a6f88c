"""Which scheduler suits a map on arguments of some shapes: found out by its first calls.

The first calls run in lockstep. Where what one core does between two waits is short, that stays. Where it is so long in
two of them that threads are sure to be sooner, they are chosen; a first call also imports and compiles. Between both a
few calls of each are timed, and some more where neither is much sooner: threads that have just started may share a core
for some calls. Noise only adds to a time, so the least one counts. The results have the same bits.
"""

from __future__ import annotations

from math import inf
from threading import RLock

from spmd.mesh import Mesh
from spmd.transport.blas_threads import usable_cores
from spmd.transport.handles import Outcome

__all__ = ["Trial"]

_LONG = 400e-6
"""Seconds between two waits from which threads may pay for their handoffs (about 35 us each across cores)."""
_SURE = 10 * _LONG
"""Seconds from which they do."""
_TIMES = 3
"""How often each scheduler is timed, where it is not clear."""
_MORE = 8
"""How often where one is less than _MUCH times as fast as the other."""
_MUCH = 1.5

_lock = RLock()
"""The user's threads may call a map at once, and so may the handler of a signal that interrupts one of them."""


class Trial:
    """The first calls of a map on some shapes. chosen: the scheduler that they have come to, None before that.

    taken: the seconds of the calls so far. segment: what one core did at most between two waits, in seconds. quiet:
    whether no worker has waited the last time that they ran in lockstep.
    """

    __slots__ = ("chosen", "quiet", "segment", "taken")

    def __init__(self) -> None:
        self.chosen: str | None = None
        self.quiet = False
        self.segment = inf
        self.taken: dict[str, list[float]] = {"lockstep": [], "threads": []}

    @property
    def next(self) -> str:
        """The scheduler of the next call."""
        in_turns = "threads" if len(self.taken["threads"]) <= len(self.taken["lockstep"]) - 2 else "lockstep"
        return self.chosen or in_turns

    def learn(self, scheduler: str, outcome: Outcome, mesh: Mesh) -> None:
        """How a call went with this scheduler."""
        with _lock:
            if self.chosen is None:
                self.taken[scheduler].append(outcome.seconds)
                if scheduler == "lockstep":
                    segment = (outcome.seconds - outcome.shared) / (outcome.switches + mesh.size)
                    self.segment = min(self.segment, segment)
                self.chosen = self._choice(mesh)

    def _choice(self, mesh: Mesh) -> str | None:
        lockstep, threads = self.taken["lockstep"], self.taken["threads"]
        if self.segment <= _LONG or usable_cores() == 1 or mesh.size == 1:
            return "lockstep"
        if self.segment > _SURE and len(lockstep) > 1:
            return "threads"
        times = min(len(lockstep), len(threads))
        if times < _TIMES:
            return None
        sooner, later = sorted((min(lockstep), min(threads)))
        if times < _MORE and later < _MUCH * sooner:
            return None
        return "threads" if min(threads) < min(lockstep) else "lockstep"
