"""Helper threads for one thread while all others wait for it: they share a sum of large blocks, a join, or a copy.

    with SplitScope(cores):       # the caller knows that cores() cores are idle
        kernel(...)               # may split its work: by `copy`, or by `part_count`, `spans` and `run`

Outside of a scope a kernel uses its own thread alone: there are as many busy threads as cores.
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

__all__ = ["SPLIT_MIN", "SplitScope", "call_each", "call_for_all", "copy", "flattened", "is_plain_copy"]
__all__ += ["part_bytes", "part_count", "run", "spans"]

_CALL_MIN, _CALL_MAX = 36e-6, 160e-6
"""Bounds of the seconds that a helper's call takes: a bad measurement must not keep 64 MB from being split."""
_CALLS_PER_PART = 2.5
"""A helper pays from a part that takes this many calls to copy: two threads copy less than twice as much as one."""
_PART_MIN = 1 << 20
"""The smallest `part_bytes`, whatever is measured."""
SPLIT_MIN = 2 * _PART_MIN
"""Bytes below which no machine splits work."""

_local = threading.local()


class SplitScope:
    """Within the block this thread may split its work over cores() cores. seconds: how long work was split here, or
    done for all (`call_for_all`). Use `with scope, scope:`: an interrupt may come at the beginning of `__exit__`."""

    __slots__ = ("cores", "outer", "seconds")

    def __init__(self, cores: Callable[[], int]):
        self.cores = cores
        self.seconds = 0.0

    def __enter__(self) -> SplitScope:
        current = getattr(_local, "scope", None)
        if current is not self:
            self.outer = current
            _local.scope = self
        return self

    def __exit__(self, *_: object) -> None:
        if getattr(_local, "scope", None) is not self.outer:
            _local.scope = self.outer
            if self.outer is not None:
                self.outer.seconds += self.seconds


def _scope() -> SplitScope | None:
    return getattr(_local, "scope", None)


def call_for_all(function: Callable[[], Any], share: float) -> Any:
    """The result of a function that one thread calls for all workers that wait. The time counts as split, for their
    cores can do nothing else. share: their share of all workers, by which time counts that was not split: the others
    may do the same meanwhile."""
    scope = _scope()
    if scope is None:
        return function()
    start, split_before = time.perf_counter(), scope.seconds
    try:
        return function()
    finally:
        unsplit = time.perf_counter() - start - (scope.seconds - split_before)
        scope.seconds += unsplit * share


@lru_cache(maxsize=1)
def part_bytes() -> int:
    """The bytes from which a helper pays, at least 1 MB. Measured once, in a few milliseconds: machines differ by a
    factor of four in copies, and in calls, which may have to wake an idle core. Copies are of cached data, as blocks
    mostly are."""
    x, y = np.ones(_PART_MIN, np.uint8), np.zeros(_PART_MIN, np.uint8)
    copies = [_seconds(lambda: np.copyto(y, x)) for _ in range(5)]
    _, *calls = [_seconds(lambda: run([_nothing, _nothing])) for _ in range(6)]  # the first one starts a thread
    call = min(max(sorted(calls)[2], _CALL_MIN), _CALL_MAX)
    return max(_PART_MIN, int(_PART_MIN * _CALLS_PER_PART * call / min(copies)))


def _nothing() -> None:
    pass


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def part_count(nbytes: int, cores: int | None = None) -> int:
    """The number of parts for work that takes as long as a copy of so many bytes; 1 where there are no helpers. cores:
    those of the scope, if the caller knows them: to ask the system takes 5 us."""
    scope = _scope() if nbytes >= SPLIT_MIN else None
    if scope is None:
        return 1
    if cores is None:
        cores = scope.cores()
    return 1 if cores < 2 else max(1, min(cores, nbytes // part_bytes()))


def is_plain_copy(nbytes: int) -> bool:
    """Whether NumPy alone copies so many bytes: there are no helpers, and the copy goes through the caches. To ask
    first spares a call of `copy`, which takes some microseconds."""
    return nbytes < SPLIT_MIN or (_scope() is None and not nontemporal.large(nbytes))


def spans(shape: tuple[int, ...], n: int) -> list[tuple[Any, ...]]:
    """The indices of at most n parts of an array of this shape, cut along its first dimension that is longer than 1:
    parts of a contiguous array are contiguous."""
    d = next((d for d, length in enumerate(shape) if length != 1), None)
    if d is None or n == 1:
        return [(...,)]
    before, length = (slice(None),) * d, shape[d]
    n = max(1, min(n, length))
    return [(*before, slice(length * k // n, length * (k + 1) // n)) for k in range(n)]


def flattened(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Arrays of one shape as views of one dimension, which can be cut anywhere, if all are C-contiguous."""
    return [a.reshape(-1) for a in arrays] if all(a.flags.c_contiguous for a in arrays) else arrays


def copy(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copy arrays: pairs of (target, source), of one shape, without overlap. Each helper copies a part of each pair."""
    nbytes = sum([target.nbytes for target, _ in pairs])
    n, past_caches = part_count(nbytes), nontemporal.pays(nbytes, len(pairs))
    if n == 1:
        _copy(pairs, past_caches)
        return
    shares: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(n)]
    for pair in pairs:
        target, source = flattened(pair)
        for share, span in zip(shares, spans(target.shape, n), strict=False):
            share.append((target[span], source[span]))
    run([partial(_copy, share, past_caches) for share in shares if share])


def _copy(pairs: Sequence[tuple[np.ndarray, np.ndarray]], past_caches: bool) -> None:
    for target, source in pairs:
        if not (past_caches and nontemporal.copy(target, source)):
            np.copyto(target, source)


def call_each(functions: Sequence[Callable[[], Any]], sizes: Sequence[int]) -> list[Any]:
    """The results of several functions, arrays of so many bytes. Either each thread calls some of them, or all threads
    help with one after the other, whichever is estimated to be faster."""
    with nontemporal.together(sum(sizes)):
        shares = _shares(sizes)
        if len(shares) < 2:
            return [function() for function in functions]
        results: list[Any] = [None] * len(functions)

        def call(share: Sequence[int]) -> None:
            for k in share:
                results[k] = functions[k]()

        unsplit = SplitScope(lambda: 1)
        with unsplit, unsplit:
            run([partial(call, share) for share in shares])
        return results


def _shares(sizes: Sequence[int]) -> list[list[int]]:
    """Which thread makes which of several arrays of so many bytes; [] where all threads help with each in turn."""
    scope = _scope() if sum(sizes) >= SPLIT_MIN else None
    cores = 1 if scope is None else scope.cores()
    n = min(part_count(sum(sizes), cores), len(sizes))
    if n < 2:
        return []
    shares: list[list[int]] = [[] for _ in range(n)]
    loads = [0] * n
    for k in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        least_loaded = loads.index(min(loads))
        shares[least_loaded].append(k)
        loads[least_loaded] += sizes[k]
    call = part_bytes() / 2  # what a helper's call costs, in bytes
    counts = [part_count(size, cores) for size in sizes]
    in_turn = sum(size / count + (call if count > 1 else 0) for size, count in zip(sizes, counts, strict=True))
    return [] if in_turn < max(loads) + call else shares


def run(tasks: Sequence[Callable[[], object]]) -> None:
    """Run all tasks, the first in this thread and the others in helpers, or in this thread where there are too few.
    Raises the first error when all tasks have ended."""
    start = time.perf_counter()
    errors = _run([_WorkItem(task) for task in tasks])
    scope = _scope()
    if scope is not None:
        scope.seconds += time.perf_counter() - start
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # they refer to this frame


def _run(items: Sequence[_WorkItem]) -> list[BaseException]:
    """Run all work items; return their errors."""
    helpers = pool.spare(len(items) - 1)
    begun: list[None] = []
    try:
        for item, helper in zip(items[1:], helpers, strict=False):
            helper.begin(item, item.running.release, begun)
        for item in (items[0], *items[1 + len(begun) :]):
            item()
        _wait(items[1 : 1 + len(begun)])
    except BaseException:  # An interrupt. Who catches it finds no helper at work, unless another one comes.
        pool.give(helpers[len(begun) :])
        _wait(items[1 : 1 + len(begun)])
        raise
    errors = [error for item in items for error in item.errors]
    for item in items:
        item.errors.clear()  # they refer to the item
    return errors


def _wait(items: Sequence[_WorkItem]) -> None:
    for item in items:
        with item.running:
            pass


class _WorkItem:
    """A task, the caller's context, in which it runs, and the error it raised. running: a lock, released at its end."""

    __slots__ = ("context", "errors", "running", "task")

    def __init__(self, task: Callable[[], object]):
        self.task = task
        self.context = contextvars.copy_context()
        self.errors: list[BaseException] = []
        self.running = threading.Lock()
        self.running.acquire()

    def __call__(self) -> None:
        try:
            self.context.run(self.task)
        except BaseException as error:
            self.errors.append(error)
