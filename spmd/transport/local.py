"""Virtual workers of this process: one data path, two schedulers.

Workers meet in a `Meeting`: each leaves its block there, the last to come completes it, all take what is theirs.
Blocks are handed over as they are, read-only; nothing is copied but where a sum makes something new.

`lockstep` runs the workers as greenlets of one thread: the order is deterministic, a switch costs about 1 us, and a
worker that waits in vain is known at once. `threads` runs them in a persistent pool. In both, workers that are all
waiting are a deadlock, reported with what each waits for.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd import kernels
from spmd.errors import DeadlockError, MismatchError, message
from spmd.transport.base import Call, Comm, Group, Handle, Outcome, Ready, Transport, mismatch
from spmd.transport.blas import blas_threads, share_of_cores

__all__ = ["LocalTransport"]


class Stopped(BaseException):
    """Ends a worker whose fellows have failed."""


class Meeting:
    """One collective of one group: who has come, with what, and what came of it."""

    __slots__ = ("calls", "done", "error", "group", "missing", "payloads", "result", "waiters")

    def __init__(self, group: Group):
        self.group = group
        self.calls: list[Call | None] = [None] * group.size
        self.payloads: list[Any] = [None] * group.size
        self.missing = group.size
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
        self.take = take
        self.value: Any = None

    def wait(self) -> Any:
        if self.meeting is not None:
            meeting, self.meeting = self.meeting, None
            if not meeting.done:
                self.comm.waiting = meeting
                self.comm.run.wait(meeting)
                self.comm.waiting = None
            if meeting.error is not None:
                raise meeting.error
            self.value = self.take(meeting)
        return self.value


class Run:
    """One execution of all workers. Schedulers say how a worker waits and how it is woken."""

    def __init__(self, size: int, describe: Callable[[int], str]):
        self.size = size
        self.describe = describe
        self.open: dict[Any, Meeting] = {}
        self.comms = [LocalComm(self, w) for w in range(size)]
        self.results: dict[int, Any] = {}
        self.errors: list[tuple[int, int, BaseException]] = []
        self.finished: set[int] = set()
        self.stopping = False
        self.switches = 0

    def wait(self, meeting: Meeting) -> None:
        raise NotImplementedError

    def wake(self, meeting: Meeting) -> None:
        raise NotImplementedError

    def enter(self, comm: LocalComm, group: Group, call: Call, payload: Any) -> tuple[Meeting, bool]:
        """Leave a call and its payload in the group's meeting; whether this worker is the last to come."""
        count = comm.counts.get(group.key, 0)
        comm.counts[group.key] = count + 1
        comm.steps += 1
        key = (group.key, count)
        meeting = self.open.get(key)
        if meeting is None:
            meeting = self.open[key] = Meeting(group)
        place = group.members.index(comm.worker) if meeting.group.axes != group.axes else group.index
        meeting.calls[place] = call
        meeting.payloads[place] = payload
        meeting.missing -= 1
        if meeting.missing:
            return meeting, False
        del self.open[key]
        return meeting, True

    def complete(self, meeting: Meeting, finish: Callable[[list[Any]], Any] | None) -> None:
        """Verify that all called alike, make the shared result, let everyone go on."""
        calls = meeting.calls
        first = calls[0]
        assert first is not None
        key = first.key
        for place, call in enumerate(calls):
            if call is None or call.key != key:
                meeting.error = self._mismatch(meeting, place)
                break
        else:
            try:
                meeting.result = finish(meeting.payloads) if finish is not None else None
            except Exception as error:
                meeting.error = error
        meeting.calls = []
        meeting.done = True

    def _mismatch(self, meeting: Meeting, place: int) -> MismatchError:
        a, b = meeting.calls[0], meeting.calls[place]
        members = meeting.group.members
        sides = [
            (self.describe(members[k]), str(call), call.source if call is not None else "unknown source")
            for k, call in ((0, a), (place, b))
        ]
        return MismatchError(mismatch(sides[0], sides[1]))

    def fail(self, worker: int, error: BaseException) -> None:
        if not isinstance(error, Stopped):
            self.errors.append((self.comms[worker].steps, worker, error))

    def deadlock(self) -> DeadlockError:
        """What each worker waits for, and who has left."""
        lines = []
        for comm in self.comms:
            who = self.describe(comm.worker)
            meeting = comm.waiting
            if meeting is None:
                lines.append(f"          {who} has left the map")
                continue
            place = meeting.group.members.index(comm.worker)
            call = meeting.calls[place]
            absent = [self.describe(m) for m, c in zip(meeting.group.members, meeting.calls, strict=True) if c is None]
            lines.append(f"          {who} waits in {call} for {', '.join(absent)}")
            lines.append(f"            at {call.source if call is not None else 'unknown source'}")
        return DeadlockError(
            message(
                "a collective",
                got="workers that wait for others that will never come\n" + "\n".join(lines),
                need="every worker of a group to start the same collectives in the same order",
                mend="let all workers take the same path: no branch on a worker's own data around a collective",
            )
        )

    def outcome(self, seconds: float) -> Outcome:
        """The results, or the first error: first in the order of collectives, then of workers."""
        if not self.errors:
            return Outcome(self.results, seconds, self.switches)
        urgent = [e for e in self.errors if not isinstance(e[2], Exception)]
        ordered = urgent or sorted(self.errors, key=lambda e: e[:2])
        _, worker, error = ordered[0]
        if not getattr(error, "spmd_noted", False) and not isinstance(error, MismatchError):
            error.add_note(f"raised by {self.describe(worker)}")
            for _, other, also in ordered[1:4]:
                if type(also) is not type(error) or str(also) != str(error):
                    error.add_note(f"{self.describe(other)} raised {type(also).__name__}: {also}")
        try:
            raise error
        finally:
            del error, ordered, urgent
            self.errors.clear()


class LockstepRun(Run):
    """Workers as greenlets of the calling thread; each runs until it has to wait."""

    def __init__(self, size: int, describe: Callable[[int], str]):
        super().__init__(size, describe)
        self.ready: deque[Any] = deque()
        self.hub: Any = None

    def execute(self, body: Callable[[Comm], Any]) -> Outcome:
        from greenlet import getcurrent, greenlet

        self.hub = getcurrent()
        self.current = getcurrent
        greenlets = []
        for comm in self.comms:
            g = greenlet(self._main)
            g.gr_context = contextvars.copy_context()
            greenlets.append(g)
        started = time.perf_counter()
        try:
            for comm, g in zip(self.comms, greenlets, strict=True):
                g.switch(comm, body)
                while self.ready:
                    self.ready.popleft().switch()
            if len(self.finished) < self.size:
                if not self.errors:
                    self.errors.append((0, 0, self.deadlock()))
                self._stop(greenlets, Stopped)
        except BaseException:
            self._stop(greenlets, Stopped)
            raise
        return self.outcome(time.perf_counter() - started)

    def _stop(self, greenlets, how) -> None:
        self.stopping = True
        for g in greenlets:
            if g and not g.dead:
                g.throw(how)

    def _main(self, comm: LocalComm, body: Callable[[Comm], Any]) -> None:
        try:
            self.results[comm.worker] = body(comm)
        except Exception as error:
            self.fail(comm.worker, error)
        except Stopped:
            pass
        self.finished.add(comm.worker)

    def post(self, comm: LocalComm, group: Group, call: Call, payload: Any, finish) -> Meeting:
        if self.stopping:
            raise Stopped
        meeting, last = self.enter(comm, group, call, payload)
        if last:
            self.complete(meeting, finish)
            self.ready.extend(meeting.waiters)
            meeting.waiters = []
        return meeting

    def wait(self, meeting: Meeting) -> None:
        self.switches += 1
        meeting.waiters.append(self.current())
        while not meeting.done:
            (self.ready.popleft() if self.ready else self.hub).switch()


class ThreadRun(Run):
    """Workers in threads of a persistent pool; worker 0 runs in the caller's thread."""

    def __init__(self, size: int, describe: Callable[[int], str]):
        super().__init__(size, describe)
        self.lock = threading.Lock()
        self.running = size
        self.over = threading.Lock()
        self.over.acquire()
        self.parked: set[Any] = set()

    def execute(self, body: Callable[[Comm], Any]) -> Outcome:
        started = time.perf_counter()
        for comm in self.comms[1:]:
            context = contextvars.copy_context()
            _pool.submit(lambda comm=comm, context=context: context.run(self._main, comm, body))
        contextvars.copy_context().run(self._main, self.comms[0], body)
        while True:
            try:
                if self.size > 1:
                    self.over.acquire()
                break
            except KeyboardInterrupt as interrupt:
                self.fail(0, interrupt)
                with self.lock:
                    self._stop()
        return self.outcome(time.perf_counter() - started)

    def _main(self, comm: LocalComm, body: Callable[[Comm], Any]) -> None:
        try:
            self.results[comm.worker] = body(comm)
        except BaseException as error:
            self.fail(comm.worker, error)
            if not isinstance(error, Exception | Stopped):
                with self.lock:
                    self._stop()
        with self.lock:
            self.finished.add(comm.worker)
            self._pause()
            if len(self.finished) == self.size and self.size > 1:
                self.over.release()

    def _pause(self) -> None:
        """One worker fewer is running; when the last one pauses, those that wait do so in vain. Needs the lock."""
        self.running -= 1
        if self.running == 0 and len(self.finished) < self.size and not self.stopping:
            if not self.errors:
                self.errors.append((0, 0, self.deadlock()))
            self._stop()

    def _stop(self) -> None:
        """Wake every waiting worker, to end. Needs the lock."""
        self.stopping = True
        self.running += len(self.parked)
        for signal in self.parked:
            signal.release()
        self.parked.clear()

    def post(self, comm: LocalComm, group: Group, call: Call, payload: Any, finish) -> Meeting:
        with self.lock:
            if self.stopping:
                raise Stopped
            meeting, last = self.enter(comm, group, call, payload)
        if last:
            self.complete(meeting, finish)
            with self.lock:
                self._wake(meeting)
        return meeting

    def _wake(self, meeting: Meeting) -> None:
        for signal in meeting.waiters:
            if signal in self.parked:
                self.parked.discard(signal)
                self.running += 1
                signal.release()
        meeting.waiters = []

    def wait(self, meeting: Meeting) -> None:
        signal = threading.Lock()
        signal.acquire()
        with self.lock:
            if meeting.done:
                return
            if self.stopping:
                raise Stopped
            self.switches += 1
            meeting.waiters.append(signal)
            self.parked.add(signal)
            self._pause()
        try:
            signal.acquire()
        except BaseException:
            with self.lock:
                if signal in self.parked:
                    self.parked.discard(signal)
                    self.running += 1
            raise
        if not meeting.done:
            raise Stopped


class _Pool:
    """Threads that stay: each waits for a task, runs it, and lies down again."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[_Thread] = []

    def submit(self, task: Callable[[], None]) -> None:
        with self.lock:
            thread = self.idle.pop() if self.idle else None
        if thread is None:
            thread = _Thread(self)
            thread.start()
        thread.task = task
        thread.signal.release()


class _Thread(threading.Thread):
    def __init__(self, pool: _Pool):
        super().__init__(name="spmd-worker", daemon=True)
        self.pool = pool
        self.task: Callable[[], None] | None = None
        self.signal = threading.Lock()
        self.signal.acquire()

    def run(self) -> None:
        while True:
            self.signal.acquire()
            task, self.task = self.task, None
            if task is not None:
                task()
            del task
            with self.pool.lock:
                self.pool.idle.append(self)


_pool = _Pool()


class LocalComm(Comm):
    """A virtual worker's view: every verb is a meeting."""

    def __init__(self, run: Run, worker: int):
        self.run: Any = run
        self.worker = worker
        self.counts: dict[Any, int] = {}
        self.steps = 0
        self.waiting: Meeting | None = None

    def _meet(self, group: Group, call: Call, payload: Any, take: Callable[[Meeting], Any], finish=None) -> Handle:
        if group.size == 1:
            alone = Meeting(group)
            alone.payloads = [payload]
            alone.result = finish(alone.payloads) if finish is not None else None
            return Ready(take(alone))
        return Waiting(self, self.run.post(self, group, call, payload, finish), take)

    def _all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        return self._meet(group, call, x, _result, lambda xs: _sealed(kernels.of(xs[0]).combine(xs, how)))

    def _all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray]) -> Handle:
        def finish(all_xs):
            return [_sealed(kernels.of(one[0]).combine(one)) for one in zip(*all_xs, strict=True)]

        return self._meet(group, call, xs, _result, finish)

    def _reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        def take(m: Meeting):
            mine = [p[group.index] for p in m.payloads]
            return _sealed(kernels.of(mine[0]).combine(mine))

        return self._meet(group, call, parts, take)

    def _all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle:
        return self._meet(group, call, x, lambda m: m.payloads)

    def _all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        return self._meet(group, call, parts, lambda m: [p[group.index] for p in m.payloads])

    def _broadcast(self, group: Group, call: Call, x: np.ndarray | None, root: int) -> Handle:
        return self._meet(group, call, x, lambda m: m.payloads[root])

    def _reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        def take(m: Meeting):
            return _sealed(kernels.of(x).combine(m.payloads)) if group.index == root else None

        return self._meet(group, call, x, take)

    def _exchange(self, group: Group, call: Call, sends: Mapping[int, np.ndarray]) -> Handle:
        def take(m: Meeting):
            return {k: p[group.index] for k, p in enumerate(m.payloads) if group.index in p}

        return self._meet(group, call, sends, take)


def _result(m: Meeting):
    return m.result


def _sealed(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


class LocalTransport(Transport):
    """n virtual workers in this process."""

    name = "local"

    def __init__(self, size: int):
        self.size = size
        self.local = range(size)

    def run(self, body: Callable[[Comm], Any], scheduler: str, describe: Callable[[int], str]) -> Outcome:
        with blas_threads(share_of_cores(self.size)):
            execution = LockstepRun(self.size, describe) if scheduler == "lockstep" else ThreadRun(self.size, describe)
            return execution.execute(body)

    def share(self, local: dict[int, Any]) -> dict[int, Any]:
        return local
