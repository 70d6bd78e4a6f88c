"""Memory for large results, used again: fresh pages cost more than the arithmetic that fills them.

`empty` is `np.empty`, but a large array lies in a piece of memory that an earlier one has left. When the last view of
an array is gone its piece lies idle for the next one of that size. What lies idle is bounded.

The pieces may come from somewhere else than from NumPy: from memory that processes share, say (`take_from`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np

__all__ = ["LARGE", "Lease", "Piece"]
__all__ += ["address", "empty", "empty_like", "idle", "least", "release", "take_from", "zeros"]

LARGE = 1 << 20
"""Bytes from which an array's memory is used again: smaller ones the allocator serves as well."""

_ALIGNED = 64
_GRAINS = 1 << 14, 1 << 16
"""What the bytes of a piece are a multiple of: of smaller arrays, and of large ones."""


def _bound() -> int:
    """The bytes that may lie idle: a sixteenth of the machine's memory, or SPMD_BUFFERS megabytes."""
    given = os.environ.get("SPMD_BUFFERS", "")
    if given.isdecimal():
        return int(given) << 20
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 16


class Piece(np.ndarray):
    """Bytes that arrays lie in. Of its own class, so that NumPy does not take it for the base of what is a view of a
    lease."""

    __slots__ = ()


class Lease(np.ndarray):
    """What an array made by `empty` lies in; when the array and all its views are gone, the memory comes back."""

    __slots__ = ("memory",)

    def __del__(self):
        memory = getattr(self, "memory", None)  # Views of it have none.
        if memory is not None and _idle is not None:  # as it is when the program ends
            _idle.give(memory)


Source = Callable[[int], Piece | None]
"""Gives so many bytes of memory, or None where it has none to give; they are its again when the piece is gone."""

_source: Source | None = None
_least = LARGE


class Memory:
    """A piece of memory. source: who gave it. at: where in it arrays begin, and start: the address of that. given: when
    it was left, as a growing number."""

    __slots__ = ("at", "given", "nbytes", "piece", "source", "start")

    def __init__(self, nbytes: int):
        self.source = _source
        found = None if _source is None else _source(nbytes)
        self.piece = Piece(nbytes, np.uint8) if found is None else found
        self.nbytes = nbytes
        self.given = 0
        begin = self.piece.ctypes.data
        self.at = -begin % _ALIGNED
        self.start = begin + self.at

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array in it, which is leased."""
        lease = self.piece.view(Lease)
        lease.memory = self
        return np.ndarray(shape, dtype, lease, self.at)


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
        if nbytes > self.bound or piece.source is not _source or not self.lock.acquire(blocking=False):
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


def take_from(source: Source | None, least: int = LARGE) -> None:
    """Take memory from there from now on, for arrays of at least so many bytes; None: from NumPy. What was taken before
    is not used again."""
    global _least, _source
    _least, _source = least, source
    _idle.clear()


def _begin_again() -> None:
    """A lock that another thread held stays closed in a child; what lies idle there is the parent's."""
    global _least, _source
    _least, _source = LARGE, None
    _idle.__init__(_idle.bound)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


def address(x: np.ndarray) -> int:
    """Where the first entry of an array lies."""
    lease = x.base
    if type(lease) is Lease:  # all of it: what is a view of it has another base
        return lease.memory.start
    return x.__array_interface__["data"][0]


def empty(shape: int | tuple[int, ...], dtype: Any = float) -> np.ndarray:
    """A C-contiguous array whose entries are arbitrary. Large arrays are aligned to 64 bytes."""
    if type(shape) is not tuple:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if not isinstance(dtype, np.dtype):
        dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _least or dtype.hasobject or not _idle.bound:
        return np.empty(shape, dtype)
    grain = _GRAINS[nbytes >= LARGE]
    size = -(-(nbytes + _ALIGNED) // grain) * grain
    memory = _idle.take(size)
    return (Memory(size) if memory is None else memory).array(shape, dtype)


def empty_like(x: np.ndarray, dtype: Any = None) -> np.ndarray:
    """`empty` of the shape of x, and of its dtype where none is given. Always C-contiguous."""
    if dtype is None and x.nbytes < _least:
        return np.empty(x.shape, x.dtype)
    return empty(x.shape, x.dtype if dtype is None else dtype)


def zeros(shape: int | tuple[int, ...], dtype: Any = float) -> np.ndarray:
    """`empty`, filled with zeros."""
    x = empty(shape, dtype)
    x.fill(0)
    return x


def least() -> int:
    """The bytes from which an array's memory is used again, wherever it is from."""
    return _least


def idle() -> int:
    """The bytes that lie idle."""
    return _idle.nbytes


def release() -> None:
    """Give the memory that lies idle back to the system."""
    _idle.clear()
