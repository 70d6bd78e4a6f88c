"""Choose the scheduler of a map for arguments of given shapes, by timing some of its calls.

The first calls run in lockstep. If one core works only briefly between two waits, lockstep stays for good. If it works
so long in two calls that threads are most likely faster, threads are chosen; the first call also imports and compiles.
In between, a few calls of each are timed, and more if neither is much faster, because threads that have just started
may share a core for some calls. Noise only adds time, so the shortest time counts.

A busy moment of the machine may still spoil every timed call of one scheduler. So the choice is made anew later, from
new times of both, after waits that double: a wrong choice does not last, and the calls that are timed become rare. Both
schedulers give the same bits.
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
"""Seconds between two waits from which threads are chosen without a trial, at first."""
_TIMES_MIN = 3
"""How often each scheduler is timed if the choice is not clear."""
_TIMES_MAX = 8
"""How often if one is less than _CLEAR_RATIO times as fast as the other."""
_CLEAR_RATIO = 1.5
_FIRST_WAIT = 32
"""Calls with the first choice until both schedulers are timed again; twice as many after each further choice."""

_lock = RLock()
"""Several threads of the user may call a map, and so may a signal handler that interrupts one of them."""


class SchedulerTrial:
    """Some calls of a map for arguments of given shapes. chosen: the scheduler; None before the first choice.

    seconds: those of the calls since the last choice. segment: the longest work of one core between two waits, in
    seconds. quiet: whether no worker waited in the last call in lockstep. wait: calls with each choice, which doubles;
    inf if the choice is for good. left: how many of them are left.
    """

    __slots__ = ("chosen", "left", "quiet", "seconds", "segment", "wait")

    def __init__(self) -> None:
        self.chosen: str | None = None
        self.quiet = False
        self.segment = inf
        self.seconds: dict[str, list[float]] = {"lockstep": [], "threads": []}
        self.wait: float = _FIRST_WAIT
        self.left: float = 0

    @property
    def next(self) -> str:
        if self.chosen is not None and self.left > 0:
            return self.chosen
        return "threads" if len(self.seconds["threads"]) <= len(self.seconds["lockstep"]) - 2 else "lockstep"

    def learn(self, scheduler: str, outcome: Outcome, mesh: Mesh) -> str | None:
        """Take the outcome of a call with this scheduler into account. Returns the choice, if one is made."""
        with _lock:
            if self.left > 0:
                self.left -= 1
                return None
            self.seconds[scheduler].append(outcome.seconds)
            if scheduler == "lockstep":
                segment = (outcome.seconds - outcome.shared) / (outcome.switches + mesh.size)
                self.segment = min(self.segment, segment)
            choice = self._choice(mesh)
            if choice is not None:
                self.chosen, self.left, self.wait = choice, self.wait, 2 * self.wait
                self.seconds = {"lockstep": [], "threads": []}
            return choice

    def _choice(self, mesh: Mesh) -> str | None:
        lockstep, threads = self.seconds["lockstep"], self.seconds["threads"]
        if self.segment <= _SEGMENT_MIN or usable_cores() == 1 or mesh.size == 1:
            self.wait = inf
            return "lockstep"
        if self.chosen is None and self.segment > _SEGMENT_CERTAIN and len(lockstep) > 1:
            return "threads"
        count = min(len(lockstep), len(threads))
        if count < _TIMES_MIN:
            return None
        shorter, longer = sorted((min(lockstep), min(threads)))
        if count < _TIMES_MAX and longer < _CLEAR_RATIO * shorter:
            return None
        return "threads" if min(threads) < min(lockstep) else "lockstep"
