"""What a profile records while a program runs: an observer of maps, collectives and kernels.

Each event is a short tuple that is added to a list. All else is computed when the profile ends, or when a list is full.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

from spmd.kernels.memory import pool
from spmd.mesh import WORKER, Mesh
from spmd.transport.call import Observer, Origin
from spmd.transport.observing import Phase, Sent

__all__ = ["Collective", "Recorder", "Span", "Total", "Track"]

Span = tuple[str, str, float, float, float, int]
"""A time on a track: kind ("map", "step" or "kernel"), name, start, end, the seconds of a map in which its worker
waits, and the step."""
Collective = tuple[Sent, Sequence[Phase]]

_MEMORY_INTERVAL = 2e-3
"""Seconds between two samples of the memory at least."""
_ROOM = 4096
"""Events beyond the limit that are kept until they are counted."""


class Total:
    """The sum over all collectives of one origin, or over all spans of one name."""

    __slots__ = ("messages", "name", "nbytes", "origin", "seconds", "times", "waited")

    def __init__(self, name: str, origin: Origin | None):
        self.name, self.origin = name, origin
        self.times = self.messages = self.nbytes = 0
        self.seconds = self.waited = 0.0


class Track:
    """The events of one worker of a mesh. Worker None: the program around the maps.

    events: at most `limit`, once `count` has run. left_out: how many more there were; full_at: when the first of them
    came. totals: by origin or name, of all events.
    """

    def __init__(self, mesh: Mesh | None, worker: int | None, limit: int):
        self.mesh, self.worker, self.limit = mesh, worker, limit
        self.events: list[Span | Collective] = []
        self.full = limit + _ROOM
        self.left_out = 0
        self.full_at = 0.0
        self.totals: dict[Any, Total] = {}
        self._counted = 0

    def add(self, event: Span | Collective) -> None:
        """Keep an event."""
        events = self.events
        events.append(event)
        if len(events) >= self.full:
            self.count()

    def count(self) -> None:
        """Add the new events to the totals, and forget those beyond the limit."""
        for event in self.events[self._counted :]:
            if len(event) == 2:
                self._count_collective(*event)
            else:
                kind, name, start, end, waited, _ = event
                total = self._total((kind, name), name)
                total.times += 1
                total.seconds += end - start
                total.waited += waited
        beyond = self.events[self.limit :]
        if beyond:
            first = beyond[0]
            self.full_at = self.full_at or (first[1][0][0] if len(first) == 2 else first[2])
            self.left_out += len(beyond)
            del self.events[self.limit :]
        self._counted = len(self.events)

    def _count_collective(self, sent: Sent, phases: Sequence[Phase]) -> None:
        total = self._total(sent.origin.key, sent.name, sent.origin)
        total.times += 1
        total.messages += sent.messages
        total.nbytes += sent.nbytes
        for start, end, waited in phases:
            total.seconds += end - start
            total.waited += waited

    def _total(self, key: Any, name: str, origin: Origin | None = None) -> Total:
        return self.totals.get(key) or self.totals.setdefault(key, Total(name, origin))


class Recorder(Observer):
    """What the workers of this process do. limit: events per worker. memory: (when, bytes in use), sampled."""

    replays = True

    def __init__(self, limit: int):
        self.limit = limit
        self.start = perf_counter()
        self.end = self.start
        self.tracks: dict[tuple[int, int | None], Track] = {}
        self.program = self.track(None, None)
        self.memory: list[tuple[float, int]] = []
        self.step, self._step_start = 0, self.start
        self._running: dict[Any, Track] = {}
        """The tracks of the workers that run, by their `Comm`."""
        self._sampled = 0.0
        self._statm = _open_statm()

    def track(self, mesh: Mesh | None, worker: int | None) -> Track:
        """The events of a worker. The track keeps the mesh, so that its id stays unique."""
        key = id(mesh), worker
        return self.tracks.get(key) or self.tracks.setdefault(key, Track(mesh, worker, self.limit))

    def run(self, worker: Any, name: Sequence[str], body: Callable[[Any], Any]) -> Any:
        """Run the body of a map, as a span of its worker."""
        comm = worker.comm
        track = self._running[comm] = self.track(worker.mesh, worker.index)
        waited, start = comm.waited, perf_counter()
        try:
            return body(worker)
        finally:
            end = perf_counter()
            track.add(("map", ", ".join(map(str, name)) or "run", start, end, comm.waited - waited, self.step))
            self._running.pop(comm, None)
            if end - self._sampled > _MEMORY_INTERVAL:
                self.sample_memory(end)

    def collective(self, comm: Any, sent: Sent, phases: Sequence[Phase]) -> None:
        """Record a collective."""
        self._running.get(comm, self.program).add((sent, phases))

    def kernel(self, name: str, start: float) -> None:
        """Record a kernel of the worker that runs."""
        end, worker = perf_counter(), WORKER.get()
        track = self.program if worker is None else self._running.get(worker.comm, self.program)
        track.add(("kernel", name, start, end, 0.0, 0))

    def next_step(self) -> None:
        """End a step, and begin the next one."""
        now = perf_counter()
        self.program.add(("step", f"step {self.step}", self._step_start, now, 0.0, self.step))
        self.step, self._step_start = self.step + 1, now
        self.sample_memory(now)

    def sample_memory(self, now: float) -> None:
        """Note the memory of this process that is in use."""
        if self._statm is None or len(self.memory) >= self.limit:
            return
        self._sampled = now
        with suppress(OSError, ValueError):
            resident = int(os.pread(self._statm, 64, 0).split()[1]) * _PAGE
            self.memory.append((now, max(0, resident - pool.idle())))

    def close(self) -> None:
        """Count all events; nothing more is recorded."""
        self.end = perf_counter()
        self.sample_memory(self.end)
        for track in self.tracks.values():
            track.count()
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None


_PAGE = os.sysconf("SC_PAGE_SIZE")


def _open_statm() -> int | None:
    """Linux's file of the memory of this process; None where there is none."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return None
