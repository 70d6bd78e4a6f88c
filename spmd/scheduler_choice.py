"""Choose the scheduler of a map for arguments of given shapes, by timing its first calls.

The first calls run in lockstep. If one core works only briefly between two waits, lockstep stays. If it works so long
in two calls that threads are certainly faster, threads are chosen; the first call also imports and compiles. In
between, a few calls of each are timed, and more if neither is much faster, because threads that have just started may
share a core for some calls. Noise only adds time, so the shortest time counts. Both schedulers give the same bits.
"""

from __future__ import annotations

from math import inf
from threading import RLock

from spmd.mesh import Mesh
from spmd.transport.blas_threads import usable_cores
from spmd.transport.handles import Outcome

__all__ = ["SchedulerTrial"]

_SEGMENT_MIN = 400e-6
"""Seconds between two waits from which threads may be faster: a handoff across cores takes about 35 us."""
_SEGMENT_CERTAIN = 10 * _SEGMENT_MIN
"""Seconds between two waits from which threads are faster."""
_TIMES_MIN = 3
"""How often each scheduler is timed if the choice is not clear."""
_TIMES_MAX = 8
"""How often if one is less than _CLEAR_RATIO times as fast as the other."""
_CLEAR_RATIO = 1.5

_lock = RLock()
"""Several threads of the user may call a map, and so may a signal handler that interrupts one of them."""


class SchedulerTrial:
    """The first calls of a map for arguments of given shapes. chosen: the scheduler; None before the choice.

    seconds: those of the calls so far. segment: the longest work of one core between two waits, in seconds. quiet:
    whether no worker waited in the last call in lockstep.
    """

    __slots__ = ("chosen", "quiet", "seconds", "segment")

    def __init__(self) -> None:
        self.chosen: str | None = None
        self.quiet = False
        self.segment = inf
        self.seconds: dict[str, list[float]] = {"lockstep": [], "threads": []}

    @property
    def next(self) -> str:
        in_turns = "threads" if len(self.seconds["threads"]) <= len(self.seconds["lockstep"]) - 2 else "lockstep"
        return self.chosen or in_turns

    def learn(self, scheduler: str, outcome: Outcome, mesh: Mesh) -> None:
        """Take the outcome of a call with this scheduler into account."""
        with _lock:
            if self.chosen is None:
                self.seconds[scheduler].append(outcome.seconds)
                if scheduler == "lockstep":
                    segment = (outcome.seconds - outcome.shared) / (outcome.switches + mesh.size)
                    self.segment = min(self.segment, segment)
                self.chosen = self._choice(mesh)

    def _choice(self, mesh: Mesh) -> str | None:
        lockstep, threads = self.seconds["lockstep"], self.seconds["threads"]
        if self.segment <= _SEGMENT_MIN or usable_cores() == 1 or mesh.size == 1:
            return "lockstep"
        if self.segment > _SEGMENT_CERTAIN and len(lockstep) > 1:
            return "threads"
        count = min(len(lockstep), len(threads))
        if count < _TIMES_MIN:
            return None
        shorter, longer = sorted((min(lockstep), min(threads)))
        if count < _TIMES_MAX and longer < _CLEAR_RATIO * shorter:
            return None
        return "threads" if min(threads) < min(lockstep) else "lockstep"
