"""What a profile records while a program runs: an observer of maps, collectives and kernels.

Each event is added to a list. All else is computed when the profile ends, or when a list is full.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

from spmd.kernels.memory import pool
from spmd.mesh import WORKER, Mesh
from spmd.operators.partial_comm import whole_comm
from spmd.transport.call import Observer, Origin
from spmd.transport.observing import Phase, Sent

__all__ = ["END", "Name", "Recorder", "Total", "Track"]


class Name(NamedTuple):
    """What a span is. kind: "map", "step", "kernel" or "stage". name: of a map, the body and the kind of run; of a
    stage of a pipeline, the kind of action and the stage. number: of a map its step, of a stage the microbatch."""

    kind: str
    name: str | tuple[Any, ...]
    number: int = 0

    @property
    def text(self) -> str:
        """The name as a text."""
        if self.kind == "stage":
            return "{} of stage {}".format(*self.name)
        return self.name if isinstance(self.name, str) else ", ".join(map(str, self.name)) or "run"


class _EndOfCollective:
    """In place of a `Sent`: the second phase of the collective before."""


END = _EndOfCollective()

_MEMORY_INTERVAL = 20e-3
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

    events: four entries each: a `Name`, a `Sent` or END, start, end, and the seconds of waiting. A flat list has no
    tuples, which the garbage collector would visit again and again. limit: the most events once `count` has run.
    left_out: how many more there were; full_at: when the first of them came. totals: by origin or name, of all events.
    """

    def __init__(self, mesh: Mesh | None, worker: int | None, limit: int):
        self.mesh, self.worker, self.limit = mesh, worker, limit
        self.events: list[Any] = []
        self.full = 4 * (limit + _ROOM)
        self.left_out = 0
        self.full_at = 0.0
        self.totals: dict[Any, Total] = {}
        self._counted = 0

    def add(self, what: Any, start: float, end: float, waited: float) -> None:
        """Keep an event."""
        events = self.events
        events.extend((what, start, end, waited))
        if len(events) >= self.full:
            self.count()

    def each(self) -> Iterator[tuple[Any, float, float, float]]:
        """The events."""
        events = self.events
        return zip(events[::4], events[1::4], events[2::4], events[3::4], strict=True)

    def count(self) -> None:
        """Add the new events to the totals, and forget those beyond the limit."""
        events = self.events
        total = Total("", None)
        for at in range(self._counted, len(events), 4):
            what, start, end, waited = events[at : at + 4]
            if what is not END:
                total = self._total_of(what)
                total.times += 1
            total.seconds += end - start
            total.waited += waited
        most = 4 * self.limit
        if len(events) > most:
            while most < len(events) and events[most] is END:
                most += 4  # it belongs to the one before
            self.full_at = self.full_at or (events[most + 1] if most < len(events) else 0.0)
            self.left_out += sum(events[at] is not END for at in range(most, len(events), 4))
            del events[most:]
        self._counted = len(events)

    def _total_of(self, what: Name | Sent) -> Total:
        """The sum to which an event belongs."""
        if isinstance(what, Sent):
            total = self._total(what.origin.key, what.name, what.origin)
            total.messages += what.messages
            total.nbytes += what.nbytes
            return total
        return self._total((what.kind, what.text), what.text)

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
        self._names: dict[Any, Name] = {}
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
            track.add(self._map_name(tuple(name)), start, end, comm.waited - waited)
            self._running.pop(comm, None)
            if end - self._sampled > _MEMORY_INTERVAL:
                self.sample_memory(end)

    def collective(self, comm: Any, sent: Any, phases: Sequence[Phase]) -> None:
        """Record a collective."""
        track = self._running.get(comm, self.program)
        for phase in phases:
            track.add(sent, *phase)
            sent = END

    def kernel(self, name: Name, start: float) -> None:
        """Record a kernel of the worker that runs."""
        end, worker = perf_counter(), WORKER.get()
        track = self.program if worker is None else self._running.get(whole_comm(worker.comm), self.program)
        track.add(name, start, end, 0.0)

    def action(self, worker: Any, kind: str, stage: int, microbatch: int, start: float) -> None:
        """Record what a stage of a pipeline has done."""
        track = self._running.get(whole_comm(worker.comm), self.program)
        track.add(Name("stage", (kind, stage), microbatch), start, perf_counter(), 0.0)

    def _map_name(self, name: tuple[str, ...]) -> Name:
        """One object for each map and step."""
        key = name, self.step
        return self._names.get(key) or self._names.setdefault(key, Name("map", *key))

    def next_step(self) -> None:
        """End a step, and begin the next one."""
        now = perf_counter()
        self.program.add(Name("step", f"step {self.step}"), self._step_start, now, 0.0)
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
