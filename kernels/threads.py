"""Threads that stay: each waits for a task, runs it, and lies down again. Workers run in them, and those that help."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any

__all__ = ["Pool", "Stopped", "Thread", "pool"]


class Stopped(BaseException):
    """Ends a task from outside; nobody is told."""


@cache
def _cores() -> int:
    """Those of this machine: to ask takes 6 to 14 us."""
    return os.cpu_count() or 1


class Pool:
    """The threads that wait for a task. helping: how many others are at work for `spare`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[Thread] = []
        self.helping = 0

    def take(self, n: int) -> list[Thread]:
        """n threads that wait for a task: idle ones, and new ones if need be."""
        taken = self._waiting(n)
        try:
            while len(taken) < n:
                taken.append(self._started())
        except BaseException:
            self.give(taken)
            raise
        return taken

    def spare(self, n: int) -> list[Thread]:
        """At most n threads that wait for a task, to help: as many as can be started, and never more of them at once
        than there are cores. Workers that wait have a thread each, and need no core."""
        with self.lock:
            n = max(0, min(n, _cores() - self.helping))
            self.helping += n
        taken = self._waiting(n)
        try:
            while len(taken) < n:
                taken.append(self._started())
        except RuntimeError:  # No more threads: whoever asks does the rest himself.
            with self.lock:
                self.helping -= n - len(taken)
        except BaseException:
            with self.lock:
                self.helping -= n
                self.idle.extend(taken)
            raise
        for thread in taken:
            thread.helps = True
        return taken

    def _waiting(self, n: int) -> list[Thread]:
        with self.lock:
            return [self.idle.pop() for _ in range(min(n, len(self.idle)))]

    def _started(self) -> Thread:
        thread = Thread(self)
        thread.start()
        return thread

    def give(self, threads: Iterable[Thread]) -> None:
        """Threads that have no task any more, to be taken again."""
        with self.lock:
            for thread in threads:
                self.helping -= thread.helps
                thread.helps = False
                self.idle.append(thread)

    def forget(self) -> None:
        """In a forked child: the threads have stayed with the parent."""
        self.lock = threading.Lock()
        self.idle = []
        self.helping = 0


class Thread(threading.Thread):
    """A thread of a pool. Its tasks keep their errors to themselves. helps: it was taken to help."""

    def __init__(self, pool: Pool):
        super().__init__(name="spmd", daemon=True)
        self.pool = pool
        self.helps = False
        self.task: Callable[[], Any] | None = None
        self.after: Callable[[], Any] | None = None
        self.signal = threading.Lock()
        self.signal.acquire()

    def begin(self, task: Callable[[], Any], after: Callable[[], Any]) -> None:
        """Run task, lie down, then run after: whoever learns of the end may count on this thread."""
        self.task, self.after = task, after
        self.signal.release()

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
