"""Threads that help one thread while all others wait for it: with a sum of large blocks, a join, a copy.

    with team.of(cores):          # whoever knows that the cores, so many, have nothing else to do
        kernel(...)               # may split its work: team.copy(pairs), team.spans(x, nbytes), team.run(tasks)

Outside of that a kernel works by itself, because as many threads as there are cores compute already.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from spmd.kernels.threads import pool

__all__ = ["LEAST", "copy", "of", "parts", "run", "spans"]

_PART = 1 << 20
"""Bytes of a result that pay for a helper, who is there 35 us later."""
LEAST = 2 * _PART
"""Bytes of what is worth splitting."""

_here = threading.local()


class of:
    """Within the block the work of this thread may be split over cores() cores, which is asked when there is work.

    seconds: how long it was.
    """

    __slots__ = ("before", "cores", "seconds")

    def __init__(self, cores: Callable[[], int]):
        self.cores = cores
        self.seconds = 0.0

    def __enter__(self) -> of:
        self.before: of | None = getattr(_here, "team", None)
        _here.team = self
        return self

    def __exit__(self, *_: object) -> None:
        _here.team = self.before
        if self.before is not None:
            self.before.seconds += self.seconds


def parts(nbytes: int) -> int:
    """Into how many parts to split what makes so many bytes: 1 where nobody helps."""
    team = getattr(_here, "team", None) if nbytes >= LEAST else None
    return 1 if team is None else max(1, min(team.cores(), nbytes // _PART))


def spans(shape: tuple[int, ...], n: int) -> list[tuple[Any, ...]]:
    """The indices of at most n parts of an array of this shape, cut along its outermost dimension that has a length:
    parts of what is contiguous are contiguous."""
    d = next((d for d, length in enumerate(shape) if length != 1), None)
    if d is None or n == 1:
        return [(...,)]
    before, length = (slice(None),) * d, shape[d]
    n = max(1, min(n, length))
    return [(*before, slice(length * k // n, length * (k + 1) // n)) for k in range(n)]


def copy(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copy arrays into others of their shapes that do not overlap: of (to, of) pairs. Everybody has a part of each."""
    n = parts(sum([to.nbytes for to, _ in pairs]))
    if n == 1:
        _copy(pairs)
        return
    shares: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(n)]
    for to, x in pairs:
        for share, span in zip(shares, spans(to.shape, n), strict=False):
            share.append((to[span], x[span]))
    run([partial(_copy, share) for share in shares if share])


def _copy(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for to, x in pairs:
        np.copyto(to, x)


def run(tasks: Sequence[Callable[[], object]]) -> None:
    """Run all tasks, the first in this thread. Raises the first error, when all have ended."""
    started = time.perf_counter()
    first, *others = [_Task(task) for task in tasks]
    for task, thread in zip(others, pool.take(len(others)), strict=True):
        thread.begin(task, task.over.release)
    first()
    for task in others:
        task.over.acquire()
    team = getattr(_here, "team", None)
    if team is not None:
        team.seconds += time.perf_counter() - started
    for task in (first, *others):
        if task.error is not None:
            raise task.error


class _Task:
    """What a thread is to do, and the error it made."""

    __slots__ = ("error", "over", "work")

    def __init__(self, work: Callable[[], object]):
        self.work = work
        self.error: BaseException | None = None
        self.over = threading.Lock()
        self.over.acquire()

    def __call__(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error
