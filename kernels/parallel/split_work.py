"""Threads that help one thread while all others wait for it: with a sum of large blocks, a join, a copy.

    with team.of(cores):          # whoever knows that the cores, so many, have nothing else to do
        kernel(...)               # may split its work: team.copy(pairs), or team.parts, team.spans and team.run

Outside of that a kernel works by itself, because as many threads as there are cores compute already.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from spmd.kernels.memory import nontemporal
from spmd.kernels.parallel.thread_pool import pool

__all__ = ["LEAST", "copy", "each", "flat", "for_all", "of", "part", "parts", "plain", "run", "spans"]

_CALL = 36e-6, 160e-6
"""Seconds that a call of a helper and its end are taken to last, at least and at most: one that was measured in a bad
moment is not to keep 64 MB from being split."""
_PAYS = 2.5
"""How often that is in the seconds of a thread that pay for a helper: two threads copy less than twice as much."""
_PART = 1 << 20
"""The least `part`, whatever is measured."""
LEAST = 2 * _PART
"""Bytes below which nothing is split on any machine."""

_here = threading.local()


class of:
    """Within the block the work of this thread may be split over cores() cores, which is asked when there is work.

    seconds: for how long it was split, or done for all (`for_all`). `with crew, crew:` leaves the block a second time,
    for an interrupt may come at the very beginning of leaving it.
    """

    __slots__ = ("before", "cores", "seconds")

    def __init__(self, cores: Callable[[], int]):
        self.cores = cores
        self.seconds = 0.0

    def __enter__(self) -> of:
        now: of | None = getattr(_here, "team", None)
        if now is not self:
            self.before = now
            _here.team = self
        return self

    def __exit__(self, *_: object) -> None:
        if getattr(_here, "team", None) is not self.before:
            _here.team = self.before
            if self.before is not None:
                self.before.seconds += self.seconds


def for_all(make: Callable[[], Any], share: float) -> Any:
    """What a function gives that one thread calls for all who wait for it: split or not, the cores of those can do
    nothing else. share: how many of all workers that are. What is not split counts for as much, for others could do
    the like at the same time."""
    team = getattr(_here, "team", None)
    if team is None:
        return make()
    started, before = time.perf_counter(), team.seconds
    try:
        return make()
    finally:
        alone = time.perf_counter() - started - (team.seconds - before)
        team.seconds += alone * share


@lru_cache(maxsize=1)
def part() -> int:
    """The bytes that a thread copies in the time that pays for a helper, 1 MB at least. Measured once, in a few
    milliseconds: from machine to machine a copy differs by a factor of four, and so does a call, for a core that lies
    idle may have to be woken. What is copied is in the caches, as blocks mostly are that have just been made."""
    x, y = np.ones(_PART, np.uint8), np.zeros(_PART, np.uint8)
    copies = [_seconds(lambda: np.copyto(y, x)) for _ in range(5)]
    _, *calls = [_seconds(lambda: run([_nothing, _nothing])) for _ in range(6)]  # one starts a thread
    call = min(max(sorted(calls)[2], _CALL[0]), _CALL[1])
    return max(_PART, int(_PART * _PAYS * call / min(copies)))


def _nothing() -> None:
    pass


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def parts(nbytes: int, cores: int | None = None) -> int:
    """Into how many parts to split what copies so many bytes, or takes as long: 1 where nobody helps. cores: of the
    team, where that is known, for the system takes 5 us to tell."""
    team = getattr(_here, "team", None) if nbytes >= LEAST else None
    if team is None:
        return 1
    most = team.cores() if cores is None else cores
    return 1 if most < 2 else max(1, min(most, nbytes // part()))


def plain(nbytes: int) -> bool:
    """Whether a copy of so many bytes is one for NumPy alone: nobody helps this thread, and it goes through the caches.
    To ask here spares who copies some MB a few microseconds of finding that out with cold caches."""
    return nbytes < LEAST or (getattr(_here, "team", None) is None and not nontemporal.large(nbytes))


def spans(shape: tuple[int, ...], n: int) -> list[tuple[Any, ...]]:
    """The indices of at most n parts of an array of this shape, cut along its outermost dimension that has a length:
    parts of what is contiguous are contiguous."""
    d = next((d for d, length in enumerate(shape) if length != 1), None)
    if d is None or n == 1:
        return [(...,)]
    before, length = (slice(None),) * d, shape[d]
    n = max(1, min(n, length))
    return [(*before, slice(length * k // n, length * (k + 1) // n)) for k in range(n)]


def flat(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Arrays of one shape as views of one dimension, which can be cut anywhere, if they are all C-contiguous."""
    return [a.reshape(-1) for a in arrays] if all(a.flags.c_contiguous for a in arrays) else arrays


def copy(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copy arrays into others of their shapes that do not overlap: of (to, of) pairs. Everybody has a part of each."""
    nbytes = sum([to.nbytes for to, _ in pairs])
    n, past = parts(nbytes), nontemporal.pays(nbytes, len(pairs))
    if n == 1:
        _copy(pairs, past)
        return
    shares: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(n)]
    for pair in pairs:
        to, x = flat(pair)
        for share, span in zip(shares, spans(to.shape, n), strict=False):
            share.append((to[span], x[span]))
    run([partial(_copy, share, past) for share in shares if share])


def _copy(pairs: Sequence[tuple[np.ndarray, np.ndarray]], past: bool) -> None:
    for to, x in pairs:
        if not (past and nontemporal.copy(to, x)):
            np.copyto(to, x)


def each(makes: Sequence[Callable[[], Any]], sizes: Sequence[int]) -> list[Any]:
    """What each of several functions gives: arrays of so many bytes. Whichever is sooner: everybody calls some of them,
    in one go, or all help with one after the other."""
    with nontemporal.together(sum(sizes)):
        shares = _shares(sizes)
        if len(shares) < 2:
            return [make() for make in makes]
        made: list[Any] = [None] * len(makes)

        def some(share: Sequence[int]) -> None:
            for k in share:
                made[k] = makes[k]()

        alone = of(lambda: 1)
        with alone, alone:
            run([partial(some, share) for share in shares])
        return made


def _shares(sizes: Sequence[int]) -> list[list[int]]:
    """Who is to make which of several arrays of so many bytes. None where all help with one after the other."""
    team = getattr(_here, "team", None) if sum(sizes) >= LEAST else None
    cores = 1 if team is None else team.cores()
    n = min(parts(sum(sizes), cores), len(sizes))
    if n < 2:
        return []
    shares: list[list[int]] = [[] for _ in range(n)]
    loads = [0] * n
    for k in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        idlest = loads.index(min(loads))
        shares[idlest].append(k)
        loads[idlest] += sizes[k]
    way = part() / 2  # of a helper
    split = [parts(size, cores) for size in sizes]
    together = sum(size / k + (way if k > 1 else 0) for size, k in zip(sizes, split, strict=True))
    return [] if together < max(loads) + way else shares


def run(tasks: Sequence[Callable[[], object]]) -> None:
    """Run all tasks: in this thread, and as many as there are helpers for in those. Raises the first error, when all
    have ended."""
    started = time.perf_counter()
    errors = _done([_Task(task) for task in tasks])
    team = getattr(_here, "team", None)
    if team is not None:
        team.seconds += time.perf_counter() - started
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # They know this frame.


def _done(tasks: Sequence[_Task]) -> list[BaseException]:
    """Run all tasks; their errors."""
    helpers = pool.spare(len(tasks) - 1)
    begun: list[None] = []
    try:
        for task, helper in zip(tasks[1:], helpers, strict=False):
            helper.begin(task, task.over.release, begun)
        for task in (tasks[0], *tasks[1 + len(begun) :]):
            task()
        _wait(tasks[1 : 1 + len(begun)])
    except BaseException:  # An interrupt. Who catches it finds nobody at work, unless it comes twice.
        pool.give(helpers[len(begun) :])
        _wait(tasks[1 : 1 + len(begun)])
        raise
    errors = [error for task in tasks for error in task.errors]
    for task in tasks:
        task.errors.clear()  # They know it.
    return errors


def _wait(tasks: Sequence[_Task]) -> None:
    for task in tasks:
        with task.over:
            pass


class _Task:
    """What a thread is to do, in the caller's context, and the error it made. over: free when it has ended."""

    __slots__ = ("context", "errors", "over", "work")

    def __init__(self, work: Callable[[], object]):
        self.work = work
        self.context = contextvars.copy_context()
        self.errors: list[BaseException] = []
        self.over = threading.Lock()
        self.over.acquire()

    def __call__(self) -> None:
        try:
            self.context.run(self.work)
        except BaseException as error:
            self.errors.append(error)
