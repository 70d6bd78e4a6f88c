"""One limit for the process on the threads of BLAS: the same share of the cores for every worker, in every transport.

A product of matrices gives other bits on another number of threads, so the number must not depend on the transport.
The limit is process-wide; those who want it are counted, and the last one to go restores what was before.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["blas_threads", "share_of_cores", "usable_cores"]

_lock = threading.Lock()
_users = 0
_restore: Any = None
_controller: tuple[Any, Any] | None = None
_BRINGS_ITS_OWN = ("scipy.linalg", "torch", "sklearn")


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(workers: int) -> int:
    """BLAS threads per worker where `workers` share this host: at least one."""
    return max(1, usable_cores() // workers)


def _libraries() -> Any:
    """The loaded BLAS libraries; found anew when a module that brings its own has been imported."""
    global _controller
    loaded = tuple(name in sys.modules for name in _BRINGS_ITS_OWN)
    if _controller is None or _controller[0] != loaded:
        from threadpoolctl import ThreadpoolController

        _controller = loaded, ThreadpoolController().select(user_api="blas")
    return _controller[1]


@contextmanager
def blas_threads(n: int) -> Iterator[None]:
    """At most n BLAS threads while anyone is inside; the first to enter decides."""
    global _users, _restore
    with _lock:
        if _users == 0:
            libraries = _libraries()
            if any(lib.num_threads > n for lib in libraries.lib_controllers):
                _restore = libraries.limit(limits=n)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _restore is not None:
                _restore.restore_original_limits()
                _restore = None
