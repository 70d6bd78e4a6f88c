"""Rendezvous of virtual workers: their contributions, the waiting workers, and the result."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

from spmd.errors import MismatchError
from spmd.kernels.parallel import split_work
from spmd.kernels.parallel.thread_pool import Stopped
from spmd.transport.base import Comm
from spmd.transport.call import Call, Group, Side, deadlock, mismatch, raised_by
from spmd.transport.handles import Outcome

__all__ = ["Participant", "Rendezvous", "RepeatedRendezvous", "Run", "Waiting", "own_error"]


class RepeatedRendezvous:
    """A rendezvous of members that repeat their calls.

    members: the plans of the members that have come, by place. missing: how many have not come. waiters: those to wake.
    number, clock: the collectives before it, as in a `Rendezvous`; count: those of the group. done: whether no member
    has to wait. blocks: the contributions, then the results; None if the members fall back to the verbs.
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
    """One collective of one group: the calls and contributions of the members that have come, and the result."""

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
    """The state of a virtual worker in a run.

    counts: the collectives of each group so far. last: the latest call. waiting: the rendezvous that it waits for.
    """

    def __init__(self, run: Run, worker: int):
        self.execution = run
        self.worker = worker
        self.counts: dict[Any, int] = {}
        self.clock = 0
        self.last: Call | None = None
        self.waiting: Rendezvous | None = None

    def timed(self) -> AbstractContextManager[None]:
        """Count the seconds in which this worker waits for others, in `waited`."""
        self.execution.time_waits()
        return _UNTIL_THE_RUN_ENDS


_UNTIL_THE_RUN_ENDS = nullcontext()


class Waiting:
    """A handle on a rendezvous: wait for it, then take this worker's part."""

    __slots__ = ("comm", "rendezvous", "take", "value")

    def __init__(self, comm: Participant, rendezvous: Rendezvous, take: Callable[[Rendezvous], Any]):
        self.comm = comm
        self.rendezvous: Rendezvous | None = rendezvous
        self.take: Callable[[Rendezvous], Any] = take
        self.value: Any = None

    def wait(self) -> Any:
        rendezvous, comm = self.rendezvous, self.comm
        if rendezvous is None:
            return self.value
        if not rendezvous.done:
            comm.waiting = rendezvous
            try:
                comm.execution.wait(rendezvous, comm)
            finally:
                comm.waiting = None
        if comm.clock < rendezvous.clock:
            comm.clock = rendezvous.clock
        if rendezvous.error is not None:
            raise own_error(rendezvous.error)
        self.value = self.take(rendezvous)
        self.rendezvous = None
        del self.take
        return self.value


def own_error(error: Exception) -> Exception:
    """A copy of a rendezvous's error for one member: several threads may not raise the same object."""
    try:
        return type(error)(*error.args)
    except Exception:
        return error


class Run:
    """One execution of all workers. Schedulers define how a worker waits and how it is woken.

    A worker's clock is the number of collectives in the longest chain before it, through its own and its partners'. So
    a worker at one clock never depends on what others do at later clocks.

    limit: the clock at which workers stop: that of the first error, or -1 to stop at once. repeated: the open
    rendezvous of repeated plans, by group; None if the scheduler has none.
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

    def wait(self, rendezvous: Rendezvous | RepeatedRendezvous, comm: Participant) -> None:
        """Yield to other workers until the rendezvous is done."""
        raise NotImplementedError

    def time_waits(self) -> None:
        """Measure all waits from now on."""
        if "wait" in vars(self):
            return
        wait = self.wait

        def timed(rendezvous: Rendezvous | RepeatedRendezvous, comm: Participant) -> None:
            start = perf_counter()
            try:
                wait(rendezvous, comm)
            finally:
                comm.waited += perf_counter() - start

        self.wait = timed

    def wake(self, rendezvous: Any) -> None:
        """Wake the workers that wait for the rendezvous."""
        raise NotImplementedError

    def stop(self) -> None:
        """End all workers. Needs the lock."""
        self.limit = -1

    def work(self, comm: Participant, body: Callable[[Comm], Any]) -> None:
        """Run the body for a worker."""
        try:
            self.results[comm.worker] = body(comm)
        except Stopped:
            pass
        except BaseException as error:
            with self.lock:
                self._fail(comm, error)

    def _fail(self, comm: Participant, error: BaseException) -> None:
        if self.limit < 0:
            return  # errors of a worker that is being stopped are not reported
        self.errors.append((comm.clock, comm.worker, error))
        if isinstance(error, Exception):
            self.limit = min(self.limit, comm.clock)
        else:
            self.stop()

    def stalled(self) -> None:
        """Stop all workers: all that remain wait, for failed workers or in a deadlock. Needs the lock."""
        if self.limit >= 0:
            if not self.errors:
                self.errors.append((0, 0, deadlock(self._waits())))
            self.stop()

    def fall_back(self, key: str) -> None:
        """Let the waiting members of a repeated rendezvous fall back to the verbs."""
        assert self.repeated is not None
        rendezvous = self.repeated.pop(key)
        rendezvous.blocks = None
        rendezvous.done = True
        self.wake(rendezvous)

    def make(self, group: Group, nbytes: int, make: Callable[[], Any]) -> Any:
        """make(), which one worker runs for its group. nbytes: of the result."""
        return make() if nbytes < split_work.SPLIT_MIN else split_work.call_for_all(make, group.size / self.size)

    def post(self, comm: Participant, group: Group, call: Call, payload: Any, finish) -> Rendezvous:
        """Join the group's rendezvous with a call and its payload. The last worker to come completes it."""
        rendezvous, last = self.enter(comm, group, call, payload)
        if last:
            self._complete(rendezvous, finish)
            self.wake(rendezvous)
        return rendezvous

    def enter(self, comm: Participant, group: Group, call: Call, payload: Any) -> tuple[Rendezvous, bool]:
        """The group's rendezvous, and whether this worker is the last to come."""
        if self.repeated:
            repeated = self.repeated.get(group.key)
            if repeated is not None and repeated.count <= comm.counts.get(
                group.key, 0
            ):  # else its members are ahead of this worker
                self.fall_back(group.key)
        comm.clock += 1
        comm.number += 1
        if comm.clock > self.limit:
            raise Stopped
        comm.last = call
        count = comm.counts.get(group.key, 0)
        comm.counts[group.key] = count + 1
        key = (group.key, count)
        rendezvous = self.open.get(key)
        if rendezvous is None:
            rendezvous = self.open[key] = Rendezvous(group)
        place = group.index if rendezvous.group.axes == group.axes else rendezvous.group.members.index(comm.worker)
        rendezvous.calls[place] = call
        rendezvous.contributions[place] = payload
        rendezvous.numbers[place] = comm.number
        if rendezvous.clock < comm.clock:
            rendezvous.clock = comm.clock
        rendezvous.missing -= 1
        if rendezvous.missing:
            return rendezvous, False
        del self.open[key]
        return rendezvous, True

    def _complete(self, rendezvous: Rendezvous, finish: Callable[[list[Any]], Any] | None) -> None:
        """Check that all calls are the same, and compute the shared result. All members raise an error of it."""
        try:
            calls, size = rendezvous.calls, rendezvous.group.size
            first = calls[0]
            if calls.count(first) < size or rendezvous.numbers.count(rendezvous.numbers[0]) < size:
                self._compare(rendezvous)
            if first.needs_grad is not None:
                flags = [call.needs_grad for call in calls if call.needs_grad is not None]
                if any(flag[0] for flag in flags):
                    for flag in flags:
                        flag[0] = True
            if finish is not None:
                rendezvous.result = finish(rendezvous.contributions)
        except Exception as error:
            rendezvous.error = error.with_traceback(None)
        rendezvous.calls = []
        rendezvous.done = True

    def _compare(self, rendezvous: Rendezvous) -> None:
        """Raise MismatchError if calls differ, or come in a different order."""
        first, number = rendezvous.calls[0], rendezvous.numbers[0]
        for place, call in enumerate(rendezvous.calls):
            if rendezvous.numbers[place] != number or (call is not first and call.key != first.key):
                who = [self.describe(rendezvous.group.members[k]) for k in (0, place)]
                raise mismatch(Side.of(who[0], first, number), Side.of(who[1], call, rendezvous.numbers[place]))

    def _waits(self) -> list[str]:
        """Lines for a report: per worker, the call in which it waits and for whom, or that it has left."""
        lines = []
        for comm in self.comms[:_WORKERS_SHOWN]:
            who, call, rendezvous = self.describe(comm.worker), comm.last, comm.waiting
            if rendezvous is not None:
                call = rendezvous.calls[rendezvous.group.members.index(comm.worker)]
                absent = [m for m, c in zip(rendezvous.group.members, rendezvous.calls, strict=True) if c is None]
                names = ", ".join(self.describe(m) for m in absent[:_WORKERS_SHOWN]) + ", ..." * (
                    len(absent) > _WORKERS_SHOWN
                )
                lines.append(f"{who} waits in {call} for {names}")
            elif call is not None:
                lines.append(f"{who} has left the map; the last it called was {call}")
            else:
                lines.append(f"{who} has left the map and called nothing")
            if call is not None:
                lines.append(f"  {call.source}")
        more = len(self.comms) - _WORKERS_SHOWN
        return [*lines, f"and {more} more"] if more > 0 else lines

    def close(self) -> None:
        """Drop references: workers refer to their run, and errors to its frames."""
        self.comms = []
        self.results = {}
        self.errors = []
        self.open.clear()
        self.repeated = None
        vars(self).pop("wait", None)

    def outcome(self, seconds: float, shared: float = 0.0) -> Outcome:
        """The results, or the first error: first by the clock, then by worker."""
        errors, self.errors = self.errors, []
        if not errors:
            self._check_numbers()
            self._check_open()
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

    def _check_numbers(self) -> None:
        """Raise if workers have called different numbers of collectives."""
        first = self.comms[0] if self.comms else None
        for comm in self.comms:
            if first is not None and comm.number != first.number:
                raise mismatch(self._end_of(first), self._end_of(comm))

    def _check_open(self) -> None:
        """Raise if a worker has sent another what that one has not taken, although it has made as many calls."""
        for rendezvous in self.open.values():
            place = next(k for k, call in enumerate(rendezvous.calls) if call is not None)
            who = [self.describe(m) for m in rendezvous.group.members]
            sent = Side.of(who[place], rendezvous.calls[place], rendezvous.numbers[place])
            raise mismatch(sent, self._end_of(self.comms[rendezvous.group.members[1 - place]]))

    def _end_of(self, comm: Participant) -> Side:
        after = f"after {comm.last} {comm.last.source}" if comm.last is not None else "without any call before"
        return Side(self.describe(comm.worker), "the end of the map", after, comm.number)

    def _note(self, errors: list[tuple[int, int, BaseException]]) -> None:
        """Add a note to the first error: its worker, and the errors of others at the same clock."""
        clock, worker, error = errors[0]
        text = _text(error)
        others = [(w, _text(e)) for c, w, e in errors[1:] if c == clock]
        same = sum(other == text for _, other in others)
        lines = [self.describe(worker) + (f", and alike by {same} more" if same else "")]
        lines += [f"{self.describe(w)} raised {other}" for w, other in others if other != text]
        raised_by(error, "\n".join(lines))


_WORKERS_SHOWN = 16
"""The most workers that a report lists."""


def _text(error: BaseException) -> str:
    from traceback import format_exception_only

    return "".join(format_exception_only(type(error), error)[:1]).strip()
