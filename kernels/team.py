"""Threads that help one thread while all others wait for what it makes: a sum of large blocks, their join.

    with team.of(cores):          # whoever knows that so many cores have nothing else to do
        kernel(...)               # may split its work: team.parts(nbytes), team.run(tasks)

Outside of that a kernel works by itself, because as many threads as there are cores compute already.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["LEAST", "of", "parts", "run"]

_PART = 1 << 20
"""Bytes of a result that pay for a helper, who is there 50 us later."""
LEAST = 2 * _PART
"""Bytes of what is worth splitting."""

_here = threading.local()


class of:
    """Within the block the work of this thread may be split over so many cores."""

    __slots__ = ("before", "cores")

    def __init__(self, cores: int):
        self.cores = cores

    def __enter__(self) -> None:
        self.before = getattr(_here, "cores", 1)
        _here.cores = self.cores

    def __exit__(self, *_: object) -> None:
        _here.cores = self.before


def parts(nbytes: int) -> int:
    """Into how many parts to split what makes so many bytes: 1 where nobody helps."""
    return max(1, min(getattr(_here, "cores", 1), nbytes // _PART))


def run(tasks: Sequence[Callable[[], object]]) -> None:
    """Run all tasks, the first in this thread. Raises the first error, when all have ended."""
    first, *others = tasks
    under_way = [_helpers().submit(task) for task in others]
    try:
        first()
    finally:
        errors = [task.exception() for task in under_way]
    for error in errors:
        if error is not None:
            raise error


_pool: Any = None


def _helpers() -> Any:
    global _pool
    if _pool is None:
        from concurrent.futures import ThreadPoolExecutor

        _pool = ThreadPoolExecutor(os.cpu_count(), "spmd-helper")
    return _pool


def _forget() -> None:
    """In a forked child: the threads have stayed with the parent."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
