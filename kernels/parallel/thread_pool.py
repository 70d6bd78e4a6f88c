"""A pool of threads, which run workers and helpers. Each waits for a task, runs it, and returns to the pool.

A signal handler may raise between any two steps of the main thread, and may itself run a map. So the pool has no lock,
and moves threads by single calls into C, in which no handler runs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from itertools import islice
from operator import methodcaller
from typing import Any

__all__ = ["Pool", "Stopped", "Thread", "pool"]


class Stopped(BaseException):
    """Ends a task from outside; it is not reported."""


@cache
def _cores() -> int:
    """The cores of this machine; to ask takes 6 to 14 us."""
    return os.cpu_count() or 1


class Pool:
    """idle: the threads that wait for a task. helpers: those that `spare` gave, while they run one."""

    def __init__(self) -> None:
        self.idle: list[Thread] = []
        self.helpers: set[Thread] = set()

    @property
    def helping(self) -> int:
        """The number of helpers."""
        return len(self.helpers)

    def take(self, n: int) -> list[Thread]:
        """n threads that wait for a task; new ones are started where too few are idle."""
        taken: list[Thread] = []
        try:
            self._fill(taken, n)
        except BaseException:
            self.give(taken)
            raise
        return taken

    def spare(self, n: int) -> list[Thread]:
        """At most n helpers: as many as can be started, and in all about as many as there are cores. The threads of
        workers that wait are not counted: they need no core."""
        taken: list[Thread] = []
        try:
            with suppress(RuntimeError):  # no more threads can start: the caller does the rest
                self._fill(taken, min(n, _cores() - self.helping))
            self.helpers.update(taken)
        except BaseException:
            self.give(taken)
            raise
        return taken

    def _fill(self, taken: list[Thread], n: int) -> None:
        """Fill a list up to n threads."""
        with suppress(IndexError):  # no more idle ones
            taken.extend(islice(iter(self.idle.pop, None), max(0, n)))
        while len(taken) < n:
            taken.append(self._started())

    def _started(self) -> Thread:
        thread = Thread(self)
        try:
            thread.start()
        except BaseException:
            thread.begin(_nothing, _nothing)  # if it runs after all, it comes to the pool
            raise
        return thread

    def give(self, threads: Collection[Thread]) -> None:
        """Return threads without a task to the pool."""
        self.idle.extend(threads)
        self.helpers.difference_update(threads)

    def forget(self) -> None:
        """In a forked child: the threads are the parent's."""
        self.__init__()


def _nothing() -> None:
    pass


_release = methodcaller("release")


class Thread(threading.Thread):
    """A thread of a pool. Its tasks raise nothing but `Stopped`."""

    def __init__(self, pool: Pool):
        super().__init__(name="spmd", daemon=True)
        self.pool = pool
        self.task: Callable[[], Any] | None = None
        self.after: Callable[[], Any] | None = None
        self.signal = threading.Lock()
        self.signal.acquire()

    def begin(self, task: Callable[[], Any], after: Callable[[], Any], begun: list[None] | None = None) -> None:
        """Run task, return to the pool, then run after, which may rely on this thread being idle.

        begun: a list that gets an entry at the same moment: after an interrupt it tells whether the task has begun.
        """
        self.task, self.after = task, after
        if begun is None:
            begun = []
        begun.extend(map(_release, (self.signal,)))

    def run(self) -> None:
        while True:
            self.signal.acquire()
            task, after, self.task, self.after = self.task, self.after, None, None
            assert task is not None
            assert after is not None
            with suppress(Stopped):  # an interrupt that came after the work was done
                task()
            del task
            self.pool.give([self])
            after()
            del after


pool = Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.forget)
