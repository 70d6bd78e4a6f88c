"""Virtual workers in threads of a persistent pool."""

from __future__ import annotations

import contextvars
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from spmd.errors import TransportError
from spmd.kernels.parallel import split_work
from spmd.kernels.parallel.thread_pool import Stopped, Thread, pool
from spmd.transport.base import Comm
from spmd.transport.blas_threads import usable_cores
from spmd.transport.call import Call, Group
from spmd.transport.handles import Outcome
from spmd.transport.local.rendezvous import Participant, Rendezvous, RepeatedRendezvous, Run


class ThreadRun(Run):
    """Workers in threads of a persistent pool. The caller's thread only waits, so an interrupt reaches it there.

    running: the number of workers that neither wait nor have left. parked: the locks of those that wait. inside: the
    threads of those in the body.
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
        """In the first worker's thread: start the others, then work."""
        with self.lock:
            begun, self.begun = self.begun, True
        if begun:
            return  # Interrupted before.
        first, *others = self.comms
        for comm, thread in zip(others, threads[1:], strict=True):
            thread.begin(partial(self._work_in, context.copy(), comm, body), self._leave)
        self._work_in(context, first, body)

    def _work_in(self, context: contextvars.Context, comm: Participant, body: Callable[[Comm], Any]) -> None:
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
        """End all workers, wherever they are, and wait for that; a second interrupt abandons them."""
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
        """Wait until all workers have left, in rounds: a wait misses a signal that comes just before it."""
        while not self.over.acquire(timeout=0.5):
            pass

    def stop(self) -> None:
        super().stop()
        self._release(self.parked)

    def enter(self, comm: Participant, group: Group, call: Call, payload: Any) -> tuple[Rendezvous, bool]:
        with self.lock:
            return super().enter(comm, group, call, payload)

    def make(self, group: Group, nbytes: int, make: Callable[[], Any]) -> Any:
        """The whole group waits for it, so its share of the cores helps."""
        if nbytes < split_work.SPLIT_MIN:
            return make()
        scope = split_work.SplitScope(lambda: usable_cores() * group.size // self.size)
        with scope, scope:
            return make()

    def wake(self, rendezvous: Any) -> None:
        with self.lock:
            self._release(rendezvous.waiters)
            rendezvous.waiters = []

    def _release(self, signals: Iterable[Any]) -> None:
        for signal in list(signals):
            if signal in self.parked:
                self.parked.remove(signal)
                self.running += 1
                signal.release()

    def wait(self, rendezvous: Rendezvous | RepeatedRendezvous, comm: Participant) -> None:
        if os.getpid() != self.process:
            raise _forked()
        signal = threading.Lock()
        signal.acquire()
        try:
            with self.lock:
                if rendezvous.done:
                    return
                if self.limit < 0:
                    raise Stopped
                self.switches += 1
                rendezvous.waiters.append(signal)
                self.parked.add(signal)
                self.running -= 1
                if self.running == 0:
                    self.stalled()
            signal.acquire()
        finally:
            with self.lock:
                self._release([signal])
        if not rendezvous.done:
            raise Stopped


def _forked() -> TransportError:
    return TransportError.at(
        "a collective",
        got="a process that was forked inside a body: the other workers' threads stayed behind",
        need="the process that called the map",
        mend="fork outside of bodies, or start the process by multiprocessing's spawn",
    )
