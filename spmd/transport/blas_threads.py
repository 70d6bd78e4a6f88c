"""One limit on the BLAS threads of the process: the same share of the cores for every worker, in every transport.

A matrix product gives other bits with another number of threads, so the number must not depend on the transport. The
limit is process-wide: while several maps run, the smallest request holds, and the last map to end restores the numbers
from before. It never raises what the user has set.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection
from typing import Any

__all__ = ["blas_threads", "core_numbers", "share_of_cores", "usable_cores"]


def core_numbers() -> Collection[int]:
    """The cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def usable_cores() -> int:
    """How many cores this process may run on."""
    return len(core_numbers())


def share_of_cores(workers: int, cores: int | None = None) -> int:
    """BLAS threads per worker where `workers` share a host's cores: at least one."""
    return max(1, (usable_cores() if cores is None else cores) // workers)


class _LimitedLibrary:
    """A BLAS library, its number of threads before all requests, and now."""

    __slots__ = ("before", "library", "now")

    def __init__(self, library: Any):
        self.library = library
        self.before: int = library.num_threads
        self.now: int | None = self.before


class _Limit:
    """The requested numbers of threads, and the libraries that are limited meanwhile."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # A signal handler may call a map.
        self.requests: dict[object, int] = {}
        self.libraries: list[_LimitedLibrary] = []
        self.loaded: list[Any] = []
        self.modules = -1

    def enter(self, who: object, n: int) -> None:
        with self.lock:
            if not self.requests:
                libraries = [_LimitedLibrary(x) for x in self._find_loaded()]
                # In one step: a signal handler that ran in between would lift its own limit.
                self.libraries, self.requests[who] = libraries, n
            elif self.modules != len(sys.modules):
                limited = {x.library.filepath for x in self.libraries}
                self.libraries += [_LimitedLibrary(x) for x in self._find_loaded() if x.filepath not in limited]
            self.requests[who] = n
            self._apply()

    def leave(self, who: object) -> None:
        """May be called again after an interrupt."""
        with self.lock:
            self.requests[who] = sys.maxsize  # no limit, but present: a map in a signal handler keeps `before`
            self._apply()
            del self.requests[who]
            if not self.requests:
                self.libraries = []  # the user may set other numbers now

    def _apply(self) -> None:
        n = min(self.requests.values(), default=sys.maxsize)
        for limited in self.libraries:
            threads = min(n, limited.before)
            if limited.now != threads or n == sys.maxsize:  # a body may have changed it
                limited.now = None  # as long as an interrupt may come between
                _set(limited.library, threads)
                limited.now = threads

    def _find_loaded(self) -> list[Any]:
        """The loaded BLAS libraries; searched anew when modules, which may bring one, have been imported."""
        if self.modules != len(sys.modules):
            from threadpoolctl import ThreadpoolController

            self.loaded = ThreadpoolController().select(user_api="blas").lib_controllers
            self.modules = len(sys.modules)
        return self.loaded


def _set(library: Any, n: int) -> None:
    """Let a library use n threads. Since release 3.8 threadpoolctl allows that only to the thread that did so first,
    but any thread may be the last to leave a map. Its internal setter has no such check, and takes a fifth of the time.
    """
    at_once = getattr(library, "_real_set_num_threads", None)
    if at_once is not None:
        at_once(n)
        return
    free = getattr(library, "clear_controlling_thread", lambda **_: None)
    free(force=True)
    library.set_num_threads(n)
    free(force=True)


_limit = _Limit()


def _forget() -> None:
    """In a forked child, where the maps that asked do not run."""
    global _limit
    for limited in _limit.libraries if _limit.requests else ():
        _set(limited.library, limited.before)
    _limit = _Limit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class blas_threads:
    """At most n BLAS threads while the block runs.

    Entering and leaving may be repeated. An interrupt at the very start of leaving skips it; `with limit, limit:`
    leaves a second time, which does nothing otherwise.
    """

    __slots__ = ("entered", "limit", "n")

    def __init__(self, n: int):
        self.n = n
        self.entered = False

    def __enter__(self) -> None:
        if self.entered:
            return
        self.limit, self.entered = _limit, True
        try:
            self.limit.enter(self, self.n)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self.entered:
            self.limit.leave(self)
            self.entered = False
