"""Where virtual workers meet: what each brings, who waits, and what came of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from spmd.errors import MismatchError
from spmd.kernels.parallel import split_work
from spmd.kernels.parallel.thread_pool import Stopped
from spmd.transport.base import Comm
from spmd.transport.call import Call, Group, Side, deadlock, mismatch, raised_by
from spmd.transport.handles import Outcome

__all__ = ["Participant", "Rendezvous", "RepeatedRendezvous", "Run", "Waiting", "own_error"]


class RepeatedRendezvous:
    """Those of a group who call again what they have called: who has come, with what, and what came of it.

    members: those who have come, by their places; missing: how many are to come; waiters: whom to wake. number, clock:
    the collectives behind them, as in a meeting; count: those of the group. done: there is nothing to wait for.
    blocks: those that they bring, then their results; None if they are turned down.
    """

    __slots__ = ("blocks", "clock", "count", "done", "members", "missing", "number", "waiters")

    def __init__(self, size: int, number: int, count: int):
        self.members: list[Any] = [None] * size
        self.blocks: Any = [None] * size
        self.missing = size
        self.number = number
        self.count = count
        self.clock = 0
        self.done = False
        self.waiters: list[Any] = []


class Rendezvous:
    """One collective of one group: who has come, with what, and what came of it."""

    __slots__ = ("calls", "clock", "contributions", "done", "error", "group", "missing", "numbers", "result", "waiters")

    def __init__(self, group: Group):
        self.group = group
        self.calls: list[Any] = [None] * group.size
        self.contributions: list[Any] = [None] * group.size
        self.numbers: list[int] = [0] * group.size
        self.missing = group.size
        self.clock = 0
        self.waiters: list[Any] = []
        self.result: Any = None
        self.error: Exception | None = None
        self.done = False


class Participant(Comm):
    """A virtual worker, as its run knows it.

    counts: the collectives of each group so far. last: the latest call. waiting: the meeting that it waits for.
    """

    def __init__(self, run: Run, worker: int):
        self.execution = run
        self.worker = worker
        self.counts: dict[Any, int] = {}
        self.clock = 0
        self.last: Call | None = None
        self.waiting: Rendezvous | None = None


class Waiting:
    """A handle on a meeting: wait for it, then take this worker's part."""

    __slots__ = ("comm", "meeting", "take", "value")

    def __init__(self, comm: Participant, meeting: Rendezvous, take: Callable[[Rendezvous], Any]):
        self.comm = comm
        self.meeting: Rendezvous | None = meeting
        self.take: Callable[[Rendezvous], Any] = take
        self.value: Any = None

    def wait(self) -> Any:
        meeting, comm = self.meeting, self.comm
        if meeting is None:
            return self.value
        if not meeting.done:
            comm.waiting = meeting
            try:
                comm.execution.wait(meeting, comm)
            finally:
                comm.waiting = None
        if comm.clock < meeting.clock:
            comm.clock = meeting.clock
        if meeting.error is not None:
            raise own_error(meeting.error)
        self.value = self.take(meeting)
        self.meeting = None
        del self.take
        return self.value


def own_error(error: Exception) -> Exception:
    """The error of a meeting, for one of its members: an object that no other thread raises at the same time."""
    try:
        return type(error)(*error.args)
    except Exception:
        return error


class Run:
    """One execution of all workers. Schedulers say how a worker waits and how it is woken.

    A worker's clock counts the collectives behind it, its own and those that its partners had behind them. So what
    a worker does at one clock depends on nothing that others do at later clocks, whatever the timing.

    limit: the clock past which nobody needs to go: that of the first error, -1 when all are to stop.
    repeated: those who meet because they call again what they have called, by group; None where none do.
    """

    repeated: dict[str, RepeatedRendezvous] | None = None

    def __init__(self, size: int, describe: Callable[[int], str]):
        self.describe = describe
        self.lock = threading.Lock()
        self.open: dict[Any, Rendezvous] = {}
        self.comms: Sequence[Participant] = ()
        self.size = size
        self.results: dict[int, Any] = {}
        self.errors: list[tuple[int, int, BaseException]] = []
        self.limit: float = math.inf
        self.left = size
        self.switches = 0

    def wait(self, meeting: Rendezvous | RepeatedRendezvous, comm: Participant) -> None:
        """Let others run until the meeting is done that a worker waits for."""
        raise NotImplementedError

    def wake(self, meeting: Any) -> None:
        """Let those that wait for the meeting go on."""
        raise NotImplementedError

    def stop(self) -> None:
        """All workers are to end. Needs the lock."""
        self.limit = -1

    def work(self, comm: Participant, body: Callable[[Comm], Any]) -> None:
        """A worker's life."""
        try:
            self.results[comm.worker] = body(comm)
        except Stopped:
            pass
        except BaseException as error:
            with self.lock:
                self._fail(comm, error)

    def _fail(self, comm: Participant, error: BaseException) -> None:
        if self.limit < 0:
            return  # What a worker raises while it is being stopped says nothing new.
        self.errors.append((comm.clock, comm.worker, error))
        if isinstance(error, Exception):
            self.limit = min(self.limit, comm.clock)
        else:
            self.stop()

    def stalled(self) -> None:
        """All who are left wait: for some that failed, or it is a deadlock. Needs the lock."""
        if self.limit >= 0:
            if not self.errors:
                self.errors.append((0, 0, deadlock(self._waits())))
            self.stop()

    def turn_down(self, key: str) -> None:
        """Let those of a group who have gathered go by the verbs."""
        assert self.repeated is not None
        gathering = self.repeated.pop(key)
        gathering.blocks = None
        gathering.done = True
        self.wake(gathering)

    def make(self, group: Group, nbytes: int, make: Callable[[], Any]) -> Any:
        """What one worker makes for its group of so many bytes."""
        return make() if nbytes < split_work.SPLIT_MIN else split_work.call_for_all(make, group.size / self.size)

    def post(self, comm: Participant, group: Group, call: Call, payload: Any, finish) -> Rendezvous:
        """Leave a call and its payload in the group's meeting; the last to come completes it."""
        meeting, last = self.enter(comm, group, call, payload)
        if last:
            self._complete(meeting, finish)
            self.wake(meeting)
        return meeting

    def enter(self, comm: Participant, group: Group, call: Call, payload: Any) -> tuple[Rendezvous, bool]:
        """The group's meeting, and whether this worker is the last to come."""
        if self.repeated:
            gathering = self.repeated.get(group.key)
            if gathering is not None and gathering.count <= comm.counts.get(group.key, 0):  # else they are only ahead
                self.turn_down(group.key)
        comm.clock += 1
        comm.number += 1
        if comm.clock > self.limit:
            raise Stopped
        comm.last = call
        count = comm.counts.get(group.key, 0)
        comm.counts[group.key] = count + 1
        key = (group.key, count)
        meeting = self.open.get(key)
        if meeting is None:
            meeting = self.open[key] = Rendezvous(group)
        place = group.index if meeting.group.axes == group.axes else meeting.group.members.index(comm.worker)
        meeting.calls[place] = call
        meeting.contributions[place] = payload
        meeting.numbers[place] = comm.number
        if meeting.clock < comm.clock:
            meeting.clock = comm.clock
        meeting.missing -= 1
        if meeting.missing:
            return meeting, False
        del self.open[key]
        return meeting, True

    def _complete(self, meeting: Rendezvous, finish: Callable[[list[Any]], Any] | None) -> None:
        """Verify that all called alike, and make the shared result. Whatever goes wrong is everyone's error."""
        try:
            calls, size = meeting.calls, meeting.group.size
            first = calls[0]
            if calls.count(first) < size or meeting.numbers.count(meeting.numbers[0]) < size:
                self._compare(meeting)
            if first.needs_grad is not None:
                asked = [call.needs_grad for call in calls if call.needs_grad is not None]
                if any(needs_grad[0] for needs_grad in asked):
                    for needs_grad in asked:
                        needs_grad[0] = True
            if finish is not None:
                meeting.result = finish(meeting.contributions)
        except Exception as error:
            meeting.error = error.with_traceback(None)
        meeting.calls = []
        meeting.done = True

    def _compare(self, meeting: Rendezvous) -> None:
        """Raise MismatchError where workers have called different things, or in a different order."""
        first, number = meeting.calls[0], meeting.numbers[0]
        for place, call in enumerate(meeting.calls):
            if meeting.numbers[place] != number or (call is not first and call.key != first.key):
                who = [self.describe(meeting.group.members[k]) for k in (0, place)]
                raise mismatch(Side.of(who[0], first, number), Side.of(who[1], call, meeting.numbers[place]))

    def _waits(self) -> list[str]:
        """What each worker waits for, and who has left."""
        lines = []
        for comm in self.comms[:_SHOWN]:
            who, call, meeting = self.describe(comm.worker), comm.last, comm.waiting
            if meeting is not None:
                call = meeting.calls[meeting.group.members.index(comm.worker)]
                absent = [m for m, c in zip(meeting.group.members, meeting.calls, strict=True) if c is None]
                names = ", ".join(self.describe(m) for m in absent[:_SHOWN]) + ", ..." * (len(absent) > _SHOWN)
                lines.append(f"{who} waits in {call} for {names}")
            elif call is not None:
                lines.append(f"{who} has left the map; the last it called was {call}")
            else:
                lines.append(f"{who} has left the map and called nothing")
            if call is not None:
                lines.append(f"  {call.source}")
        more = len(self.comms) - _SHOWN
        return [*lines, f"and {more} more"] if more > 0 else lines

    def close(self) -> None:
        """Let go of everything: workers know their run, and errors know its frames; nothing big may hang on that."""
        self.comms = []
        self.results = {}
        self.errors = []
        self.open.clear()
        self.repeated = None

    def outcome(self, seconds: float, shared: float = 0.0) -> Outcome:
        """The results, or the first error: first by the clock, then by worker."""
        errors, self.errors = self.errors, []
        if not errors:
            self._ended_alike()
            return Outcome(dict(sorted(self.results.items())), seconds, self.switches, shared)
        urgent = [e for e in errors if not isinstance(e[2], Exception)]
        errors = sorted(urgent or errors, key=lambda e: e[:2])
        error = errors[0][2]
        if not isinstance(error, MismatchError):
            self._note(errors)
        try:
            raise error
        finally:
            del error, errors, urgent

    def _ended_alike(self) -> None:
        """Raise where workers made different numbers of collectives."""
        first = self.comms[0] if self.comms else None
        for comm in self.comms:
            if first is not None and comm.number != first.number:
                raise mismatch(self._end_of(first), self._end_of(comm))

    def _end_of(self, comm: Participant) -> Side:
        after = f"after {comm.last} {comm.last.source}" if comm.last is not None else "without any call before"
        return Side(self.describe(comm.worker), "the end of the map", after, comm.number)

    def _note(self, errors: list[tuple[int, int, BaseException]]) -> None:
        """Say on the first error who raised it, and what others raised at the same clock."""
        clock, worker, error = errors[0]
        said = _text(error)
        others = [(w, _text(e)) for c, w, e in errors[1:] if c == clock]
        alike = sum(text == said for _, text in others)
        lines = [self.describe(worker) + (f", and alike by {alike} more" if alike else "")]
        lines += [f"{self.describe(w)} raised {text}" for w, text in others if text != said]
        raised_by(error, "\n".join(lines))


_SHOWN = 16
"""Workers that a report shows one by one."""


def _text(error: BaseException) -> str:
    from traceback import format_exception_only

    return "".join(format_exception_only(type(error), error)[:1]).strip()
