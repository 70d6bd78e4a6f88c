"""Virtual workers of this process: one data path, two schedulers.

Workers meet in a `Meeting`: each leaves its block there, the last to come completes it, all take what is theirs.
Blocks are handed over as they are, read-only, and copied only where they are lent. Where something new is made of
several, the last to come makes it for all, so that nobody needs the others' blocks when the collective is over.

`lockstep` runs the workers as greenlets of one thread: the order is deterministic, a switch costs about 1 us, and a
worker that waits in vain is known at once. `threads` runs them in a persistent pool. In both, workers that are all
waiting are a deadlock, reported with what each waits for.
"""

from __future__ import annotations

import contextvars
import ctypes
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spmd import kernels
from spmd.device import copied
from spmd.errors import MismatchError, TransportError, message
from spmd.kernels.parallel import split_work
from spmd.kernels.parallel.thread_pool import Stopped, Thread, pool
from spmd.transport.base import (
    LEDGERS,
    ONE_BY_ONE,
    Boxes,
    Call,
    Comm,
    Eager,
    Group,
    Handle,
    Join,
    Outcome,
    Ready,
    Sends,
    Shape,
    Side,
    Transport,
    deadlock,
    exchange_cost,
    mismatch,
    raised_by,
    sealed,
)
from spmd.transport.blas import blas_threads, share_of_cores, usable_cores
from spmd.transport.recurring import Gathering, Recurring

if TYPE_CHECKING:
    from spmd.cuda import Places

__all__ = ["LocalTransport"]


class Meeting:
    """One collective of one group: who has come, with what, and what came of it."""

    __slots__ = ("calls", "clock", "done", "error", "group", "missing", "numbers", "payloads", "result", "waiters")

    def __init__(self, group: Group):
        self.group = group
        self.calls: list[Any] = [None] * group.size
        self.payloads: list[Any] = [None] * group.size
        self.numbers: list[int] = [0] * group.size
        self.missing = group.size
        self.clock = 0
        self.waiters: list[Any] = []
        self.result: Any = None
        self.error: Exception | None = None
        self.done = False


class Waiting:
    """A handle on a meeting: wait for it, then take this worker's part."""

    __slots__ = ("comm", "meeting", "take", "value")

    def __init__(self, comm: LocalComm, meeting: Meeting, take: Callable[[Meeting], Any]):
        self.comm = comm
        self.meeting: Meeting | None = meeting
        self.take: Callable[[Meeting], Any] = take
        self.value: Any = None

    def wait(self) -> Any:
        meeting, comm = self.meeting, self.comm
        if meeting is None:
            return self.value
        if not meeting.done:
            comm.waiting = meeting
            try:
                comm.run.wait(meeting, comm)
            finally:
                comm.waiting = None
        if comm.clock < meeting.clock:
            comm.clock = meeting.clock
        if meeting.error is not None:
            raise _own(meeting.error)
        self.value = self.take(meeting)
        self.meeting = None
        del self.take
        return self.value


def _own(error: Exception) -> Exception:
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
    gatherings: those who meet because they call again what they have called, by group; None where none do.
    """

    gatherings: dict[str, Gathering] | None = None

    def __init__(self, size: int, describe: Callable[[int], str]):
        self.describe = describe
        self.lock = threading.Lock()
        self.open: dict[Any, Meeting] = {}
        self.comms = [LocalComm(self, w) for w in range(size)]
        self.size = size
        self.results: dict[int, Any] = {}
        self.errors: list[tuple[int, int, BaseException]] = []
        self.limit: float = math.inf
        self.left = size
        self.switches = 0

    def wait(self, meeting: Meeting | Gathering, comm: LocalComm) -> None:
        """Let others run until the meeting is done that a worker waits for."""
        raise NotImplementedError

    def wake(self, meeting: Any) -> None:
        """Let those that wait for the meeting go on."""
        raise NotImplementedError

    def stop(self) -> None:
        """All workers are to end. Needs the lock."""
        self.limit = -1

    def work(self, comm: LocalComm, body: Callable[[Comm], Any]) -> None:
        """A worker's life."""
        try:
            self.results[comm.worker] = body(comm)
        except Stopped:
            pass
        except BaseException as error:
            with self.lock:
                self._fail(comm, error)

    def _fail(self, comm: LocalComm, error: BaseException) -> None:
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
        assert self.gatherings is not None
        gathering = self.gatherings.pop(key)
        gathering.blocks = None
        gathering.done = True
        self.wake(gathering)

    def make(self, group: Group, nbytes: int, make: Callable[[], Any]) -> Any:
        """What one worker makes for its group of so many bytes."""
        return make() if nbytes < split_work.LEAST else split_work.for_all(make, group.size / self.size)

    def post(self, comm: LocalComm, group: Group, call: Call, payload: Any, finish) -> Meeting:
        """Leave a call and its payload in the group's meeting; the last to come completes it."""
        meeting, last = self.enter(comm, group, call, payload)
        if last:
            self._complete(meeting, finish)
            self.wake(meeting)
        return meeting

    def enter(self, comm: LocalComm, group: Group, call: Call, payload: Any) -> tuple[Meeting, bool]:
        """The group's meeting, and whether this worker is the last to come."""
        if self.gatherings:
            gathering = self.gatherings.get(group.key)
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
            meeting = self.open[key] = Meeting(group)
        place = group.index if meeting.group.axes == group.axes else meeting.group.members.index(comm.worker)
        meeting.calls[place] = call
        meeting.payloads[place] = payload
        meeting.numbers[place] = comm.number
        if meeting.clock < comm.clock:
            meeting.clock = comm.clock
        meeting.missing -= 1
        if meeting.missing:
            return meeting, False
        del self.open[key]
        return meeting, True

    def _complete(self, meeting: Meeting, finish: Callable[[list[Any]], Any] | None) -> None:
        """Verify that all called alike, and make the shared result. Whatever goes wrong is everyone's error."""
        try:
            calls, size = meeting.calls, meeting.group.size
            first = calls[0]
            if calls.count(first) < size or meeting.numbers.count(meeting.numbers[0]) < size:
                self._compare(meeting)
            if first.asks is not None:
                asked = [call.asks for call in calls if call.asks is not None]
                if any(asks[0] for asks in asked):
                    for asks in asked:
                        asks[0] = True
            if finish is not None:
                meeting.result = finish(meeting.payloads)
        except Exception as error:
            meeting.error = error.with_traceback(None)
        meeting.calls = []
        meeting.done = True

    def _compare(self, meeting: Meeting) -> None:
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
        self.gatherings = None

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

    def _end_of(self, comm: LocalComm) -> Side:
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


def _no_frames_of_optree() -> None:
    """Raise where a worker is to wait inside optree's C++ code: that does not survive a switch of greenlets."""
    optree = sys.modules.get("optree.ops")
    if optree is None:
        return
    theirs = vars(optree)
    frame, body = sys._getframe(4), Run.work.__code__  # below: this, the wait, and at least two of the library's
    while frame is not None and frame.f_code is not body:
        if frame.f_globals is theirs:
            raise TransportError(
                message(
                    "a collective",
                    got=f"a call from within optree.{frame.f_code.co_name}, under the lockstep scheduler",
                    need="no C++ frames between the body and the collective",
                    mend="give the collective the whole tree, spmd.psum(tree, axis_name), or use spmd.tree.map",
                )
            )
        frame = frame.f_back


@cache
def _greenlets() -> tuple[Callable[[], Any], type]:
    """greenlet.getcurrent and the class: imported late, found once."""
    from greenlet import getcurrent, greenlet

    return getcurrent, greenlet


class LockstepRun(Run):
    """Workers take turns in the calling thread; each runs until it has to wait. All but the last begin in greenlets;
    the last one is the caller itself: to begin a greenlet takes longer than a collective.

    quiet: none is expected to wait. Then the caller itself runs one after the other, and the next ones begin in
    greenlets only while one does wait.

    hub: the greenlet that goes on where nobody is ready: that of the caller. own: the worker that it runs; others: the
    greenlets of others. fresh: the workers that have not begun; context: what they begin in, each in a copy.
    """

    def __init__(self, size: int, describe: Callable[[int], str], quiet: bool = False):
        super().__init__(size, describe)
        self.quiet = quiet
        self.gatherings = {}
        self.ready: deque[Any] = deque()
        self.hub: Any = None
        self.own: LocalComm | None = None
        self.others: list[Any] = []
        self.fresh: deque[LocalComm] = deque()
        self.context: contextvars.Context
        self.body: Any = None
        self.current: Callable[[], Any]
        self.greenlet: type

    def execute(self, body: Callable[[Comm], Any]) -> Outcome:
        self.current, self.greenlet = _greenlets()
        self.hub, self.context, self.body = self.current(), contextvars.copy_context(), body
        fresh, workers = self.fresh, self.others
        fresh.extend(self.comms)
        crew = split_work.of(usable_cores)  # one worker runs at a time: the other cores help it with what is large
        started = time.perf_counter()
        try:
            with crew, crew:
                while fresh and self.limit >= 0:
                    comm = fresh.popleft()
                    if fresh and not self.quiet:
                        self._begin(comm)
                    else:
                        self.own = comm
                        self.context.copy().run(self.work, comm, body)
                    if self.ready:
                        self._go_on()
            while self.gatherings and self.limit >= 0:
                self._turn_down_all()
                self._go_on()
            for worker in workers:
                if not worker.dead:
                    self.stalled()
                    break
        finally:
            self.stop()
            self._end_all()
        return self.outcome(time.perf_counter() - started, crew.seconds)

    def _end_all(self) -> None:
        """End the workers that have begun and wait."""
        self.stop()
        for worker in self.others:
            if worker:
                worker.throw(Stopped)
        self.others.clear()
        self.fresh.clear()
        self.ready.clear()
        self.own = self.body = None  # They know their run.

    def close(self) -> None:
        if self.others:  # An interrupt came while they were to be ended.
            self._end_all()
        super().close()

    def _begin(self, comm: LocalComm) -> None:
        """Let a worker begin in a greenlet of its own, and run until it has to wait."""
        worker = self.greenlet(self.work)
        worker.gr_context = self.context.copy()
        self.others.append(worker)
        worker.switch(comm, self.body)

    def _go_on(self) -> None:
        """Let those run that need not wait any longer."""
        while self.ready and self.limit >= 0:
            self.ready.popleft().switch()

    def wake(self, meeting: Any) -> None:
        self.ready.extend(meeting.waiters)
        meeting.waiters = []

    def _turn_down_all(self) -> None:
        """Where nobody is ready: by the verbs it shows what those who have gathered wait for."""
        for key in list(self.gatherings or ()):
            self.turn_down(key)

    def wait(self, meeting: Meeting | Gathering, comm: LocalComm) -> None:
        _no_frames_of_optree()
        self.switches += 1
        me, hub, ready = self.current(), self.hub, self.ready
        meeting.waiters.append(me)
        if comm is not self.own or me is hub:
            while not meeting.done:
                if ready and self.limit >= 0:
                    ready.popleft().switch()
                else:
                    self._idle(me)
        else:
            # A greenlet that the hub's body has made itself: the hub waits for it, and may not go on before it.
            self._make_hub(me)
            try:
                while not meeting.done:
                    self._idle(me)
            finally:
                self._make_hub(hub)
        if ready and me in ready:
            ready.remove(me)  # It was not taken from there where one that has ended went on to it.
        if self.limit < 0:
            raise Stopped  # One that ran meanwhile has ended them all.

    def _make_hub(self, hub: Any) -> None:
        self.hub = hub
        for worker in self.others:
            if worker:
                worker.parent = hub  # to whom it goes on when it ends

    def _idle(self, me: Any) -> None:
        """Let another greenlet run, where this one has to wait."""
        if self.limit < 0:
            raise Stopped
        if self.ready:
            self.ready.popleft().switch()
        elif me is not self.hub:
            self.hub.switch()
        elif self.fresh:
            self._begin(self.fresh.popleft())
        elif self.gatherings:
            self._turn_down_all()
        else:
            self.stalled()  # All others wait too, or have left.


class ThreadRun(Run):
    """Workers in threads of a persistent pool. The caller's thread only waits, so an interrupt finds it there.

    running: the workers that neither wait nor have left. parked: what wakes those that wait. inside: the threads
    of those that are in the body.
    """

    def __init__(self, size: int, describe: Callable[[int], str]):
        super().__init__(size, describe)
        self.running = size
        self.parked: set[Any] = set()
        self.inside: dict[int, int] = {}
        self.begun = False
        self.first: list[None] = []
        """Has an entry when the first worker's thread has its task."""
        self.over = threading.Lock()
        self.over.acquire()
        self.process = os.getpid()

    def execute(self, body: Callable[[Comm], Any]) -> Outcome:
        started = time.perf_counter()
        context = contextvars.copy_context()
        threads = pool.take(self.left)
        try:  # at once: an interrupt before would lose the threads
            threads[0].begin(partial(self._begin, context, body, threads), self._leave, self.first)
            self._join()
        except BaseException:
            self._interrupt(threads)
            raise
        return self.outcome(time.perf_counter() - started)

    def _begin(self, context: contextvars.Context, body: Callable[[Comm], Any], threads: list[Thread]) -> None:
        """In the first worker's thread: let the others begin, then work."""
        with self.lock:
            begun, self.begun = self.begun, True
        if begun:
            return  # Interrupted before.
        first, *others = self.comms
        for comm, thread in zip(others, threads[1:], strict=True):
            thread.begin(partial(self._work_in, context.copy(), comm, body), self._leave)
        self._work_in(context, first, body)

    def _work_in(self, context: contextvars.Context, comm: LocalComm, body: Callable[[Comm], Any]) -> None:
        with self.lock:
            if self.limit < 0:
                return
            self.inside[comm.worker] = threading.get_ident()
        try:
            context.run(self.work, comm, body)
        finally:
            with self.lock:
                self.inside.pop(comm.worker)

    def _leave(self) -> None:
        with self.lock:
            self.left -= 1
            self.running -= 1
            if self.left == 0:
                self.over.release()
            elif self.running == 0:
                self.stalled()

    def _interrupt(self, threads: list[Thread]) -> None:
        """End all workers, wherever they are, and wait for that; a second interrupt leaves them to themselves."""
        with self.lock:
            begun, self.begun = self.begun, True
            running = begun and self.left
            self.stop()
            for thread in self.inside.values():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Stopped))
        if not begun:
            pool.give(threads[len(self.first) :])
        if running:
            self._join()

    def _join(self) -> None:
        """Wait until all workers have left. In rounds: a wait does not see a signal that came just before it began."""
        while not self.over.acquire(timeout=0.5):
            pass

    def stop(self) -> None:
        super().stop()
        self._release(self.parked)

    def enter(self, comm: LocalComm, group: Group, call: Call, payload: Any) -> tuple[Meeting, bool]:
        with self.lock:
            return super().enter(comm, group, call, payload)

    def make(self, group: Group, nbytes: int, make: Callable[[], Any]) -> Any:
        """All of the group wait for it, so their share of the cores helps."""
        if nbytes < split_work.LEAST:
            return make()
        crew = split_work.of(lambda: usable_cores() * group.size // self.size)
        with crew, crew:
            return make()

    def wake(self, meeting: Any) -> None:
        with self.lock:
            self._release(meeting.waiters)
            meeting.waiters = []

    def _release(self, signals: Iterable[Any]) -> None:
        for signal in list(signals):
            if signal in self.parked:
                self.parked.remove(signal)
                self.running += 1
                signal.release()

    def wait(self, meeting: Meeting | Gathering, comm: LocalComm) -> None:
        if os.getpid() != self.process:
            raise _forked()
        signal = threading.Lock()
        signal.acquire()
        try:
            with self.lock:
                if meeting.done:
                    return
                if self.limit < 0:
                    raise Stopped
                self.switches += 1
                meeting.waiters.append(signal)
                self.parked.add(signal)
                self.running -= 1
                if self.running == 0:
                    self.stalled()
            signal.acquire()
        finally:
            with self.lock:
                self._release([signal])
        if not meeting.done:
            raise Stopped


def _forked() -> TransportError:
    return TransportError(
        message(
            "a collective",
            got="a process that was forked inside a body: the other workers' threads stayed behind",
            need="the process that called the map",
            mend="fork outside of bodies, or start the process by multiprocessing's spawn",
        )
    )


class LocalComm(Comm):
    """A virtual worker's view: every verb is a meeting.

    counts: the collectives of each group so far. last: the latest call. waiting: the meeting that it waits for.
    """

    def __init__(self, run: Run, worker: int):
        self.run = run
        self.worker = worker
        self.counts: dict[Any, int] = {}
        self.clock = 0
        self.last: Call | None = None
        self.waiting: Meeting | None = None

    def repeated(self, call: Call, way: Eager, x: np.ndarray) -> Recurring | None:
        return Recurring(call, way, x) if Recurring.serves(way, x) else None

    def _meet(self, group: Group, call: Call, payload: Any, take: Callable[[Meeting], Any], finish=None) -> Handle:
        if group.size == 1:
            alone = Meeting(group)
            alone.payloads = [payload]
            alone.result = finish(alone.payloads) if finish is not None else None
            return Ready(take(alone))
        return Waiting(self, self.run.post(self, group, call, payload, finish), take)

    def meet(self, group: Group, call: Call, shapes: Iterable[Any]) -> list[Any]:
        """Tell every member the shape of what comes for it (None: nothing), and learn theirs."""
        return self._meet(group, call, list(shapes), lambda m: [p[group.index] for p in m.payloads]).wait()

    def _shapes(self, group: Group, call: Call) -> Handle:
        return self._meet(group, call, call.shape, lambda m: list(m.payloads))

    def _each(
        self, group: Group, call: Call, parts: Mapping[int, np.ndarray], make: Make, sums: bool = False
    ) -> Handle:
        """parts[k] goes to member k; the result is what this worker's `make` makes of what comes for it, in the order
        of the senders. The last to come makes it for all. sums: it is as large as one part, not as all together."""

        def finish(brought: list[tuple[Mapping[int, np.ndarray], Make, bool]]) -> list[Any]:
            fresh, sizes, todo = False, [], []
            for k, (_, make, lent) in enumerate(brought):
                received = {s: b[0][k] for s, b in enumerate(brought) if k in b[0]}
                size = 0
                for x in received.values():
                    size = x.nbytes if sums else size + x.nbytes
                sizes.append(size)
                fresh = fresh or lent
                todo.append((make, received))
            brought.clear()
            nbytes = sum(sizes)
            if nbytes < split_work.LEAST:
                return [_tried(make, received, fresh) for make, received in todo]
            tasks = [partial(_tried, make, received, fresh) for make, received in todo]
            return self.run.make(group, nbytes, lambda: split_work.each(tasks, sizes))

        def take(m: Meeting) -> Any:
            mine = m.result[group.index]
            if type(mine) is Failed:
                raise _own(mine.error)
            m.result[group.index] = None  # so that this may be the only name of what it takes
            return mine

        return self._meet(group, call, ({k: sealed(x) for k, x in parts.items()}, make, call.lent), take, finish)

    def _all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        def finish(xs: list[np.ndarray]):
            combine = kernels.of(x).combine
            if x.nbytes < split_work.LEAST:
                return sealed(combine(xs, how))
            return self.run.make(group, x.nbytes, lambda: sealed(combine(xs, how)))

        return self._meet(group, call, sealed(x), _result, finish)

    def _all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray], spare: Sequence[bool]) -> Handle:
        """Sums are written over blocks of the first worker or the second one, where these can be spared."""

        def finish(brought: list[tuple[Sequence[np.ndarray], Sequence[bool]]]):
            def total(k: int) -> np.ndarray:
                blocks = [xs[k] for xs, _ in brought]
                into = next((x for x, (_, spare) in zip(blocks[:2], brought, strict=False) if spare[k]), None)
                return sealed(kernels.of(blocks[0]).combine(blocks, into=into))

            totals = self.run.make(group, nbytes, lambda: [total(k) for k in range(count)])
            brought.clear()  # The handle may be asked much later.
            return totals

        count, nbytes = len(xs), sum(x.nbytes for x in xs)
        for x, own in zip(xs, spare, strict=True):
            if not own:
                sealed(x)
        return self._meet(group, call, (xs, spare), _result, finish)

    def _reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        def make(received: Mapping[int, np.ndarray], fresh: bool) -> np.ndarray:
            xs = list(received.values())
            return sealed(kernels.of(xs[0]).combine(xs))

        return self._each(group, call, dict(enumerate(parts)), make, sums=True)

    def _all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle:
        return self._meet(group, call, handed(call, x), lambda m: list(m.payloads))

    def _all_gather_as(self, group: Group, call: Call, x: np.ndarray, join: Join) -> Handle:
        def finish(brought: list[tuple[np.ndarray, bool]]):
            xs, fresh = [x for x, _ in brought], any(lent for _, lent in brought)
            return self.run.make(group, sum(x.nbytes for x in xs), lambda: join(xs, fresh))

        return self._meet(group, call, (sealed(x), call.lent), _result, finish)

    def _all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        handed_out = [sealed(p) if k == group.index else handed(call, p) for k, p in enumerate(parts)]
        return self._meet(group, call, handed_out, lambda m: [p[group.index] for p in m.payloads])

    def _all_to_all_as(self, group: Group, call: Call, parts: Sequence[np.ndarray], join: Join) -> Handle:
        def make(received: Mapping[int, np.ndarray], fresh: bool) -> Any:
            return join(list(received.values()), fresh)

        return self._each(group, call, dict(enumerate(parts)), make)

    def _broadcast(self, group: Group, call: Call, x: np.ndarray | None, root: int) -> Handle:
        brought = None if x is None else handed(call, x)
        return self._meet(group, call, brought, lambda m: m.payloads[root])

    def _reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        def finish(xs: list[np.ndarray]) -> np.ndarray:
            return self.run.make(group, x.nbytes, lambda: sealed(kernels.of(x).combine(xs)))

        def take(m: Meeting) -> Any:
            if group.index != root:
                return None
            total, m.result = m.result, None
            return total

        return self._meet(group, call, sealed(x), take, finish)

    def _exchange(self, group: Group, call: Call, sends: Mapping[int, np.ndarray]) -> Handle:
        return self._meet(group, call, _parts(group, call, sends), lambda m: _taken(group, m.payloads))

    def exchange_learnt(self, group: Group, call: Call, sends: Sends) -> Handle | None:
        counted = bool(LEDGERS.get())
        if counted:
            self._count("shapes", 0, 0)

        def parts_for(shapes: Sequence[Shape]) -> tuple[dict[int, np.ndarray], Any]:
            given = sends(shapes)
            cost = exchange_cost(group, given) if counted and given is not None else None
            return _parts(group, call, given or {}), cost

        def finish(brought: list[tuple[Shape, Callable[[Sequence[Shape]], Any]]]):
            shapes = [shape for shape, _ in brought]
            made = [parts_of(shapes) for _, parts_of in brought]
            brought.clear()  # They know the blocks.
            return shapes, [parts for parts, _ in made], [cost for _, cost in made]

        def take(m: Meeting):
            shapes, parts, costs = m.result
            if costs[group.index] is not None:
                self._count("exchange", *costs[group.index])
            return shapes, _taken(group, parts)

        return self._meet(group, call, (call.shape, parts_for), take, finish)

    def _exchange_boxes(self, group: Group, call: Call, sends: Mapping[int, np.ndarray], boxes: Boxes) -> Handle:
        return self._each(group, call, sends, boxes.filled)


Make = Callable[[Mapping[int, np.ndarray], bool], Any]
"""What makes a worker's result of what comes for it, by sender. True: in memory of its own, never in what came."""


class Failed(NamedTuple):
    """In place of a worker's result the error that is its own."""

    error: Exception


def _tried(make: Make, received: Mapping[int, np.ndarray], fresh: bool) -> Any:
    try:
        return make(received, fresh)
    except Exception as error:
        return Failed(error.with_traceback(None))


def _parts(group: Group, call: Call, sends: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """What a member of the group sends, as others may keep it."""
    return {k: sealed(x) if k == group.index else handed(call, x) for k, x in sends.items()}


def _taken(group: Group, parts: Sequence[dict[int, np.ndarray]]) -> dict[int, np.ndarray]:
    """What all members send this one: out of what they brought, so that it may be the only name of what it takes."""
    return {k: p.pop(group.index) for k, p in enumerate(parts) if group.index in p}


def handed(call: Call, x: np.ndarray) -> np.ndarray:
    """What this worker brings as others may keep it: a copy of what is only lent."""
    return sealed(copied(x) if call.lent else x)


def _result(m: Meeting):
    return m.result


class LocalTransport(Transport):
    """n virtual workers in this process. places: where their arrays lie on GPUs, if they do."""

    name = "local"

    def __init__(self, size: int, places: Places | None = None):
        self.size = size
        self.local = range(size)
        self.places = places

    def threads(self) -> int:
        return share_of_cores(self.size)

    def run(self, body: Callable[[Comm], Any], scheduler: str, describe: Callable[[int], str]) -> Outcome:
        in_threads = scheduler == "threads" and self.size > 1
        execution = (
            ThreadRun(self.size, describe) if in_threads else LockstepRun(self.size, describe, scheduler == ONE_BY_ONE)
        )
        limit = blas_threads(self.threads())
        with limit, limit:
            try:
                return execution.execute(body) if self.places is None else self._on_devices(execution, body)
            finally:
                execution.close()

    def _on_devices(self, execution: LockstepRun | ThreadRun, body: Callable[[Comm], Any]) -> Outcome:
        """Every worker on a stream of its own, after what the caller has submitted and before what it will."""
        from spmd.transport.device import DeviceComm

        places = self.places
        assert places is not None

        def work(comm: Any) -> Any:
            comm.place.enter()
            return comm.returned(body(comm))

        with places.joined(self.size) as callers:
            execution.comms[:] = [DeviceComm(execution, w, places(w), callers) for w in range(self.size)]
            return execution.execute(work)

    def share(self, local: dict[int, Any]) -> dict[int, Any]:
        return local
