"""Threads that stay: each waits for a task, runs it, and lies down again. Workers run in them, and those that help.

A signal's handler may raise between any two steps of the main thread, and may itself run a map. So the pool has no
lock, and moves threads by single calls into C, in which no handler runs.
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
    """Ends a task from outside; nobody is told."""


@cache
def _cores() -> int:
    """Those of this machine: to ask takes 6 to 14 us."""
    return os.cpu_count() or 1


class Pool:
    """The threads that wait for a task. helpers: those that are at work for `spare`."""

    def __init__(self) -> None:
        self.idle: list[Thread] = []
        self.helpers: set[Thread] = set()

    @property
    def helping(self) -> int:
        """How many threads are at work for `spare`."""
        return len(self.helpers)

    def take(self, n: int) -> list[Thread]:
        """n threads that wait for a task: idle ones, and new ones if need be."""
        taken: list[Thread] = []
        try:
            self._fill(taken, n)
        except BaseException:
            self.give(taken)
            raise
        return taken

    def spare(self, n: int) -> list[Thread]:
        """At most n threads that wait for a task, to help: as many as can be started, and about as many of them at once
        as there are cores. Workers that wait have a thread each, and need no core."""
        taken: list[Thread] = []
        try:
            with suppress(RuntimeError):  # No more threads: whoever asks does the rest himself.
                self._fill(taken, min(n, _cores() - self.helping))
            self.helpers.update(taken)
        except BaseException:
            self.give(taken)
            raise
        return taken

    def _fill(self, taken: list[Thread], n: int) -> None:
        """Put threads into a list until it has n."""
        with suppress(IndexError):  # There are no more idle ones.
            taken.extend(islice(iter(self.idle.pop, None), max(0, n)))
        while len(taken) < n:
            taken.append(self._started())

    def _started(self) -> Thread:
        thread = Thread(self)
        try:
            thread.start()
        except BaseException:
            thread.begin(_nothing, _nothing)  # If it runs all the same it comes to the pool by itself.
            raise
        return thread

    def give(self, threads: Collection[Thread]) -> None:
        """Threads that have no task any more, to be taken again."""
        self.idle.extend(threads)
        self.helpers.difference_update(threads)

    def forget(self) -> None:
        """In a forked child: the threads have stayed with the parent."""
        self.__init__()


def _nothing() -> None:
    pass


_release = methodcaller("release")


class Thread(threading.Thread):
    """A thread of a pool. Its tasks keep their errors to themselves."""

    def __init__(self, pool: Pool):
        super().__init__(name="spmd", daemon=True)
        self.pool = pool
        self.task: Callable[[], Any] | None = None
        self.after: Callable[[], Any] | None = None
        self.signal = threading.Lock()
        self.signal.acquire()

    def begin(self, task: Callable[[], Any], after: Callable[[], Any], begun: list[None] | None = None) -> None:
        """Run task, lie down, then run after: whoever learns of the end may count on this thread.

        begun: gets an entry in the same moment, so that it tells whoever is interrupted here whether it has begun.
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
            with suppress(Stopped):  # An interrupt that came when the work was done.
                task()
            del task
            self.pool.give([self])
            after()
            del after


pool = Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.forget)
