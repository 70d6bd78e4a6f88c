"""Memory for large results, used again: fresh pages cost more than the arithmetic that fills them.

`empty` is `np.empty`, but a large array lies in a piece of memory that an earlier one has left. When the last view of
an array is gone its piece lies idle for the next one of that size. What lies idle is bounded.
"""

from __future__ import annotations

import math
import os
from threading import Lock
from typing import Any

import numpy as np

__all__ = ["LARGE", "Lease", "empty", "empty_like", "idle", "release", "zeros"]

LARGE = 1 << 20
"""Bytes from which an array's memory is used again: smaller ones the allocator serves as well."""

_ALIGNED = 64
_GRAIN = 1 << 16


def _bound() -> int:
    """The bytes that may lie idle: a sixteenth of the machine's memory, or SPMD_BUFFERS megabytes."""
    given = os.environ.get("SPMD_BUFFERS", "")
    if given.isdecimal():
        return int(given) << 20
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 16


class Lease:
    """What an array made by `empty` lies in; when the array and all its views are gone, the memory comes back."""

    __slots__ = ("__array_interface__", "memory")

    def __init__(self, memory: Memory, shape: tuple[int, ...], dtype: np.dtype):
        self.memory = memory
        self.__array_interface__ = memory.interface(shape, dtype)

    def __del__(self):
        _idle.give(self.memory)


class Memory:
    """A piece of memory, and the address in it from which it is used. given: when it was left, as a growing number."""

    __slots__ = ("bytes", "given", "last", "nbytes", "start")

    def __init__(self, nbytes: int):
        self.bytes = np.empty(nbytes, np.uint8)
        self.nbytes = nbytes
        self.given = 0
        at = self.bytes.ctypes.data
        self.start = at + -at % _ALIGNED
        self.last: tuple[Any, Any, dict[str, Any]] = None, None, {}

    def interface(self, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
        """An array in it, in the form that NumPy asks for. The next one is often of the same kind."""
        if self.last[0] != shape or self.last[1] is not dtype:
            made = {"version": 3, "shape": shape, "typestr": dtype.str, "data": (self.start, False)}
            self.last = shape, dtype, made
        return self.last[2]


class _Idle:
    """The pieces of memory that nobody uses, by size, the latest on top; the ones that have lain longest go first."""

    def __init__(self, bound: int):
        self.bound = bound
        self.nbytes = 0
        self.given = 0
        self.sizes: dict[int, list[Memory]] = {}
        self.lock = Lock()

    def take(self, nbytes: int) -> Memory | None:
        # An array that dies while the lock is held, by the garbage collector's hand, calls `give`: it must not wait.
        if not self.sizes.get(nbytes) or not self.lock.acquire(blocking=False):
            return None
        try:
            pieces = self.sizes.get(nbytes)
            if not pieces:
                return None
            self.nbytes -= nbytes
            return pieces.pop()
        finally:
            self.lock.release()

    def give(self, piece: Memory) -> None:
        nbytes = piece.nbytes
        if nbytes > self.bound or not self.lock.acquire(blocking=False):
            return
        try:
            self.given = piece.given = self.given + 1
            pieces = self.sizes.get(nbytes)
            if pieces is None:
                pieces = self.sizes[nbytes] = []
            pieces.append(piece)
            self.nbytes += nbytes
            while self.nbytes > self.bound:
                self.sizes = {size: pieces for size, pieces in self.sizes.items() if pieces}
                oldest = min(self.sizes.values(), key=lambda pieces: pieces[0].given)
                self.nbytes -= oldest.pop(0).nbytes
        finally:
            self.lock.release()

    def clear(self) -> None:
        with self.lock:
            self.sizes.clear()
            self.nbytes = 0


_idle = _Idle(_bound())
if hasattr(os, "register_at_fork"):
    # A lock that another thread held stays closed in a child; what lies idle there is the parent's, copied on write.
    os.register_at_fork(after_in_child=lambda: _idle.__init__(_idle.bound))


def empty(shape: int | tuple[int, ...], dtype: Any = float) -> np.ndarray:
    """A C-contiguous array whose entries are arbitrary. Arrays of at least LARGE bytes are aligned to 64 bytes."""
    if type(shape) is not tuple:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if not isinstance(dtype, np.dtype):
        dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    # A dtype that is not NumPy's own, bfloat16 say, has no string that tells it: its bits are leased, and viewed.
    if nbytes < LARGE or dtype.hasobject or not _idle.bound:
        return np.empty(shape, dtype)
    size = -(-(nbytes + _ALIGNED) // _GRAIN) * _GRAIN
    memory = _idle.take(size)
    if memory is None:
        memory = Memory(size)
    if dtype.isbuiltin == 1:
        return np.asarray(Lease(memory, shape, dtype))
    return np.asarray(Lease(memory, (nbytes,), np.dtype(np.uint8))).view(dtype).reshape(shape)


def empty_like(x: np.ndarray, dtype: Any = None) -> np.ndarray:
    """`empty` of the shape of x, and of its dtype where none is given. Always C-contiguous."""
    if dtype is None and x.nbytes < LARGE:
        return np.empty(x.shape, x.dtype)
    return empty(x.shape, x.dtype if dtype is None else dtype)


def zeros(shape: int | tuple[int, ...], dtype: Any = float) -> np.ndarray:
    """`empty`, filled with zeros."""
    x = empty(shape, dtype)
    x.fill(0)
    return x


def idle() -> int:
    """The bytes that lie idle."""
    return _idle.nbytes


def release() -> None:
    """Give the memory that lies idle back to the system."""
    _idle.clear()
