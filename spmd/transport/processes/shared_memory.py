"""Memory that the processes of one host can read of each other: large blocks go from process to process in one copy.

MPI lets the kernel copy between processes, which looks up every page of both blocks each time. Here a process takes the
memory of its large arrays from a file without a name, which the others map. Whoever knows where a block lies copies it
from there, adds it up, or puts it in its place, without a copy in between.

The file is twice as large as the machine's memory; only what is used exists, never more than `pool` may keep for
later. Without huge pages the pages of a file cost up to nine times as much to make as NumPy's (600 us a MB in place of
70 on a virtual machine with a Zen 5), and as little to use again. Other arrays lie in NumPy's memory, and are sent.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import secrets
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from threading import Lock, local
from typing import Any

import numpy as np

from spmd.kernels.memory import pool

__all__ = ["SharedMemory", "shared_memory", "window"]

_NAME = "spmd-shared-memory"
_PRIVATELY = 0x02 | 0x10 | 0x4000
"""What Linux calls MAP_PRIVATE, MAP_FIXED and MAP_NORESERVE."""
_ANONYMOUS = 0x20
"""MAP_ANONYMOUS."""


class _Piece(pool.Storage):
    """A part of the shared memory, which is freed with the last array in it."""

    __slots__ = ("at", "era", "owner")

    def __del__(self):
        owner = getattr(self, "owner", None)  # views have none
        if owner is not None:
            owner.give(self)


class SharedMemory:
    """The memory of this process that others of its host can read.

    file: its number, by which others find it; token: what they find at its beginning. start: its address. end: nothing
    behind it was ever used. left: free places before that, by their bytes; freed: free places that are not yet in
    `left`. used: the bytes of pieces in use, and of those in `freed`. era: the number of forks so far: what was in use
    before a fork is not used again while a child lives that may look at it.
    """

    def __init__(self):
        self.nbytes = 2 * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        self.file = os.memfd_create(_NAME)
        try:
            os.ftruncate(self.file, self.nbytes)
            self.memory = mmap.mmap(self.file, self.nbytes)
            self.remove = partial(self.memory.madvise, mmap.MADV_REMOVE)
            self.remove(mmap.PAGESIZE, mmap.PAGESIZE)  # raises where it is not supported
        except BaseException:
            os.close(self.file)
            raise
        for advice in ("MADV_DONTDUMP", "MADV_HUGEPAGE"):
            with suppress(OSError, AttributeError):
                self.memory.madvise(getattr(mmap, advice))
        self.start = np.frombuffer(self.memory, np.uint8).ctypes.data
        self.token = self.memory[:8] = secrets.token_bytes(8)
        self.end = 2 * mmap.PAGESIZE
        self.left: dict[int, list[int]] = {}
        self.freed: deque[tuple[int, int]] = deque()  # by pieces that die, which may be at any moment
        self.used = 0
        self.lock = Lock()
        self.era = 0
        self.forks: dict[int, int] = {}
        self.forking = local()
        self.held: deque[tuple[int, int, int]] = deque()

    def serve(self) -> None:
        """Take large arrays from here from now on; what was taken before is not used again."""
        pool.set_source(partial(self.take))

    def take(self, nbytes: int) -> _Piece | None:
        """Memory for a large array; None where there is none."""
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self.held:
            self._look_at_children()
        if nbytes > pool.source_limit() or not self.lock.acquire(blocking=False):
            return None
        try:
            at = self._place_for(nbytes)
        finally:
            self.lock.release()
        if at is None:
            return None
        piece = _Piece(nbytes, np.uint8, self.memory, at)
        piece.owner, piece.at, piece.era = self, at, self.era
        return piece

    def _place_for(self, nbytes: int) -> int | None:
        """Reserve so many bytes: their place."""
        self._collect_freed()
        limit = pool.source_limit() - nbytes
        if self.used > limit:
            pool.release_old(self.used - limit)
            self._collect_freed()
            if self.used > limit:
                return None
        at = self._unused(nbytes)
        if at is None:
            return None
        try:
            # A write without memory for the page would end the process by SIGBUS.
            os.posix_fallocate(self.file, at, nbytes)
        except OSError:
            self.left.setdefault(nbytes, []).append(at)
            return None
        self.used += nbytes
        return at

    def _unused(self, nbytes: int) -> int | None:
        """A free place of so many bytes, no longer listed as free."""
        places = self.left.get(nbytes)
        if not places and self.end + nbytes > self.nbytes:
            self._merge(nbytes)
            places = self.left.get(nbytes)
        if places:
            return places.pop()
        if self.end + nbytes > self.nbytes:
            return None
        self.end += nbytes
        return self.end - nbytes

    def _collect_freed(self) -> None:
        """List what was freed as free."""
        while self.freed:
            at, nbytes = self.freed.popleft()
            self.left.setdefault(nbytes, []).append(at)
            self.used -= nbytes

    def _merge(self, nbytes: int) -> None:
        """Merge adjacent free places, and split one that is larger than needed."""
        runs: list[list[int]] = []
        for at, length in sorted((at, length) for length, places in self.left.items() for at in places):
            if runs and sum(runs[-1]) == at:
                runs[-1][1] += length
            else:
                runs.append([at, length])
        if runs and sum(runs[-1]) == self.end:
            self.end = runs.pop()[0]
        self.left = {}
        for at, length in runs:
            if length > nbytes and nbytes not in self.left:
                self.left[nbytes] = [at]
                at, length = at + nbytes, length - nbytes
            self.left.setdefault(length, []).append(at)

    def give(self, piece: _Piece) -> None:
        """Nobody uses a piece any more: return its pages to the system."""
        if piece.era == self.era:
            self._free(piece.at, piece.nbytes)
        elif _shared_memory is self:  # and in no child
            self.held.append((piece.era, piece.at, piece.nbytes))
            self._look_at_children()

    def _free(self, at: int, nbytes: int) -> None:
        try:  # noqa: SIM105  (when the program ends, what other modules gave may be gone)
            self.remove(at, nbytes)
        except OSError:  # of memory that is locked
            pass
        self.freed.append((at, nbytes))

    def close(self) -> None:
        """The program ends: what others still read stays, until the last of them unmaps it."""
        self.remove = _nothing

    def place(self, x: np.ndarray) -> int | None:
        """The offset of the first entry of an array; None if the array lies elsewhere."""
        if x.base is None:
            return None
        at = pool.address(x) - self.start
        return at if 0 <= at < self.nbytes else None

    def before_a_fork(self) -> None:
        self.serve()
        reader = writer = -1
        with suppress(OSError):  # then the end of this child is never noticed
            reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # The reader sees the end of the pipe when all children have ended.
        self.forking.pipe = reader, writer
        self.forks[self.era] = reader
        self.era += 1

    def in_the_parent(self) -> None:
        writer = self.forking.pipe[1]
        if writer >= 0:
            os.close(writer)

    def in_a_child(self) -> None:
        """Map the memory privately: a child sees what its parent has, and writes for itself alone."""
        self.era += 1
        for reader in self.forks.values():
            if reader >= 0:
                os.close(reader)
        mmap_at = _mmap()
        reserved = mmap_at(self.start, self.nbytes, 0, _PRIVATELY | _ANONYMOUS, -1, 0)
        private = mmap_at(self.start, self.end, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATELY, self.file, 0)
        if not reserved == private == self.start:
            os.write(2, b"spmd: a child of os.fork cannot have the memory of its parent's arrays to itself\n")
            os._exit(1)

    def _look_at_children(self) -> None:
        """Free what was held for children that have ended."""
        if not self.lock.acquire(blocking=False):
            return  # another time
        try:
            for era, reader in [(era, reader) for era, reader in self.forks.items() if reader >= 0]:
                with suppress(BlockingIOError):
                    os.read(reader, 1)
                    os.close(reader)
                    del self.forks[era]
            latest = max(self.forks, default=-1)
            for _ in range(len(self.held)):
                era, at, nbytes = self.held.popleft()
                if era > latest:
                    self._free(at, nbytes)
                else:
                    self.held.append((era, at, nbytes))
        finally:
            self.lock.release()


def _nothing(at: int, nbytes: int) -> None:
    pass


def _mmap() -> Any:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_size_t
    call.argtypes = [ctypes.c_size_t, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    return call


_shared_memory: SharedMemory | None = None
_asked = False


def shared_memory() -> SharedMemory | None:
    """This process's shared memory, from which large arrays are taken from the first call on; None where the system has
    none, and in a child of os.fork, which is no process of the job."""
    global _shared_memory, _asked
    if not _asked:
        _asked = True
        with suppress(OSError, AttributeError, ValueError):
            _shared_memory = SharedMemory()
            atexit.register(_shared_memory.close)
            _shared_memory.serve()
    return _shared_memory


def _before_a_fork() -> None:
    if _shared_memory is not None:
        _shared_memory.before_a_fork()


def _in_the_parent() -> None:
    if _shared_memory is not None:
        _shared_memory.in_the_parent()


def _in_a_child() -> None:
    global _shared_memory, _asked
    if _shared_memory is not None:
        _shared_memory.in_a_child()
    _shared_memory, _asked = None, True


os.register_at_fork(before=_before_a_fork, after_in_parent=_in_the_parent, after_in_child=_in_a_child)


_windows: weakref.WeakValueDictionary[tuple[int, int], mmap.mmap] = weakref.WeakValueDictionary()


def window(pid: int, file: int) -> mmap.mmap:
    """The shared memory of another process of this host, for reading. Raises OSError or ValueError where there is
    none."""
    path = f"/proc/{pid}/fd/{file}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise FileNotFoundError(path)
    opened = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(opened)
        window_ = _windows.get((status.st_dev, status.st_ino))
        if window_ is None:
            window_ = _windows[status.st_dev, status.st_ino] = mmap.mmap(opened, 0, prot=mmap.PROT_READ)
        return window_
    finally:
        os.close(opened)
