"""A pool of memory for large results: fresh pages cost more than the arithmetic that fills them.

`empty` is `np.empty`, but a large array lies in a slab, which a later array of that size takes when the last view of
the earlier one is gone. Idle slabs are bounded. Some slabs of moderate size stay in a cache, where a reference count
shows that they are free: that takes a third of the time of returning them.

A slab has margins before and behind its array, of a 64th of the array's length. So a larger array that has rows more at
its ends can be made around it without a copy (`extended`).

Slabs may come from a source other than NumPy, such as memory that processes share (`set_source`). Half of the idle
memory may then be the source's. A source that has no more than that in use may keep all of it idle.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from sys import getrefcount
from typing import Any

import numpy as np

from spmd.settings import setting

__all__ = ["POOL_MIN", "ExtendedBase", "PooledBase", "Storage"]
__all__ += ["address", "empty", "empty_like", "extended", "has_room", "idle", "out_min", "release", "release_old"]
__all__ += ["set_source", "source_limit", "zeros"]

POOL_MIN = 1 << 16
"""Bytes from which arrays lie in slabs. Copies from slab to slab are between addresses that differ by multiples of a
line. Whole pages from the allocator lie a few bytes beyond pages: between them an EPYC (Zen 3, glibc 2.36) takes 15
times as long to copy 256 KB, and no longer for 1 MB."""
_OUT_MIN = 1 << 20
"""Bytes from which it pays to give NumPy an `out` array from here."""

_ALIGNMENT = 64
_GRAIN = 1 << 14
"""The bytes of a slab are a multiple of this; for large arrays, of about a 12th of them. So a block with its halo and
one without have slabs of one size, and take turns. Untouched pages are no memory."""
_MARGIN_SHIFT = 6
"""The margin before an array has the slab's length shifted by this; the one behind it about as much."""


def _idle_limit() -> int:
    """The bytes that may be idle: a sixteenth of the machine's memory, or SPMD_BUFFERS megabytes."""
    with suppress(ValueError):  # `spmd.Mesh` says what is wrong with the setting
        megabytes = setting("SPMD_BUFFERS")
        if megabytes is not None:
            return megabytes << 20
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 16


class Storage(np.ndarray):
    """The bytes of a slab. A class of its own, so that NumPy does not collapse the `base` of views of a PooledBase."""

    __slots__ = ()


class PooledBase(np.ndarray):
    """The `base` of an array from `empty`: it returns the slab when the array and all its views are gone, unless it
    is `cached`: then the cache holds one more reference to it."""

    __slots__ = ("cached", "slab")

    def __del__(self):
        try:
            slab = self.slab
        except AttributeError:  # a view of it
            return
        if _free is not None:  # as it is when the program ends
            (_source_free if slab.sourced else _free).give(slab)


class ExtendedBase(np.ndarray):
    """The `base` of an array made around another one. It refers to that one, so the reference count shows that it is in
    use, and it returns the margins when the larger array and all its views are gone.

    start: the address of the first entry of the larger array.
    """

    __slots__ = ("inner", "slab", "start")

    def __del__(self):
        with suppress(AttributeError):  # a view of it
            self.slab.margins.append(None)


Source = Callable[[int], Storage | None]
"""Gives storage of so many bytes, or None where it has none; when the storage is gone they are the source's again."""

_source: Source | None = None


class Slab:
    """Storage, from a source or else NumPy's. source: the source in use then, whether or not it gave the storage.

    offset: where arrays begin in the storage; start: their address. margins: has an entry while the margins are free.
    released: when it became idle last, as a growing number.
    """

    __slots__ = ("margins", "nbytes", "offset", "released", "source", "sourced", "start", "storage")

    def __init__(self, nbytes: int, storage: Storage | None = None):
        self.source = _source
        self.sourced = storage is not None
        self.storage = Storage(nbytes, np.uint8) if storage is None else storage
        self.nbytes = nbytes
        self.released = 0
        address = self.storage.ctypes.data
        self.offset = -address % _ALIGNMENT + (nbytes >> _MARGIN_SHIFT & -_ALIGNMENT)
        self.start = address + self.offset
        self.margins: list[None] = [None]  # of several threads that pop the entry, one gets it

    def base(self) -> PooledBase:
        base = self.storage.view(PooledBase)
        base.slab, base.cached = self, 0
        return base


_LAST = (-1,)
"""`map(self.token.pop, _LAST)` takes the token of a free list. Nobody waits for it: an array may die at any moment, in
the garbage collector or a signal handler, also while this very thread has the token. Where another has it, the list is
not used. Single calls into C take and return it: a signal handler may raise between them, but not within, so it is
never lost."""


class _FreeList:
    """Idle slabs by size, the latest on top. limit: of their bytes; beyond it the oldest go first. released: a count
    over all lists."""

    released = 0

    def __init__(self, limit: int):
        self.limit = limit
        self.nbytes = 0
        self.sizes: dict[int, list[Slab]] = {}
        self.token = [None]

    def take(self, nbytes: int) -> Slab | None:
        if not self.sizes.get(nbytes):
            return None
        token: list[None] = []
        try:
            token.extend(map(self.token.pop, _LAST))
            slab = self.sizes[nbytes].pop()
            self.nbytes = max(0, self.nbytes - nbytes)
            return slab
        except LookupError:  # another has the token, or took the last slab
            return None
        finally:
            self.token.extend(token)

    def give(self, slab: Slab) -> None:
        nbytes = slab.nbytes
        if nbytes > self.limit or slab.source is not _source:
            return
        token: list[None] = []
        try:
            token.extend(map(self.token.pop, _LAST))
            slab.released = _FreeList.released = _FreeList.released + 1
            slabs = self.sizes.get(nbytes)
            if slabs is None:
                slabs = self.sizes[nbytes] = []
            slabs.append(slab)
            self.nbytes += nbytes
            while self.nbytes > self.limit and self._drop_oldest(_FreeList.released):
                pass
        except IndexError:
            pass
        finally:
            self.token.extend(token)

    def release_old(self, nbytes: int, age: int) -> None:
        """Drop slabs of so many bytes, of those after which at least `age` others were released."""
        token: list[None] = []
        try:
            token.extend(map(self.token.pop, _LAST))
            while nbytes > 0 and (size := self._drop_oldest(_FreeList.released - age)):
                nbytes -= size
        except IndexError:
            pass
        finally:
            self.token.extend(token)

    def _drop_oldest(self, until: int) -> int:
        """Drop the slab released first, if it was released by then; return its bytes."""
        self.sizes = {size: slabs for size, slabs in self.sizes.items() if slabs}
        oldest = min(self.sizes.values(), key=lambda slabs: slabs[0].released, default=None)
        if oldest is None:
            self.nbytes = 0  # it is more after an interrupt between taking a slab and counting it
            return 0
        if oldest[0].released > until:
            return 0
        size = oldest.pop(0).nbytes
        self.nbytes -= size
        return size

    def clear(self) -> None:
        self.sizes, self.nbytes = {}, 0


_IDLE_LIMIT = _idle_limit()
_free, _source_free = _FreeList(_IDLE_LIMIT), _FreeList(0)
_SOURCE_AGE = 256
"""After so many other releases a source's slab is dropped for one of another size. A program that repeats itself keeps
its slabs, if they are not very many, and one whose sizes change gets new ones soon."""


class _BaseCache:
    """Bases that stay here while arrays in them come and go, by the size of the slab: the one given last on the right.

    limit: of their bytes, used ones included; where it is reached the cache is emptied.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.nbytes = 0
        self.sizes: dict[int, deque[PooledBase]] = {}
        self.token = [None]

    def take(self, nbytes: int) -> PooledBase | None:
        """A base that no array has. A base that one thread has taken out is not seen by another."""
        bases = self.sizes.get(nbytes)
        if bases is None:
            return None
        last = None
        try:
            for _ in range(_LOOKUPS_MAX):
                last = bases[-1]
                base = bases.pop()
                if getrefcount(base) == _UNUSED_COUNT + (base is last):
                    bases.append(base)
                    return base
                bases.appendleft(base)
        except IndexError:
            pass
        except BaseException:  # An interrupt. A base that is marked `cached` has to be here.
            if last is not None and not any(base is last for base in [*bases]):
                bases.append(last)
            raise
        return None

    def add(self, base: PooledBase, nbytes: int) -> None:
        """Cache the base of a new array, if it is small and there are not enough of its size."""
        if nbytes > min(_CACHED_MAX, self.limit):
            return
        token: list[None] = []
        try:
            token.extend(map(self.token.pop, _LAST))
            if len(self.sizes.get(nbytes, ())) < _CACHED_PER_SIZE:
                if self.nbytes + nbytes > self.limit:
                    self.clear()
                self.nbytes += nbytes
                base.cached = 1
                self.sizes.setdefault(nbytes, deque()).append(base)
        except IndexError:
            pass
        finally:
            self.token.extend(token)

    def clear(self) -> None:
        sizes, self.sizes, self.nbytes = self.sizes, {}, 0
        for bases in sizes.values():
            while bases:
                bases.pop().cached = 0

    def idle(self) -> int:
        """The bytes of bases that no array has."""
        total = 0
        for nbytes, bases in list(self.sizes.items()):
            for base in list(bases):
                # Three more references: of the deque, of its copy, and `base`.
                total += nbytes * (getrefcount(base) == _UNUSED_COUNT + 2)
        return total


_cache = _BaseCache(min(1 << 27, _IDLE_LIMIT // 4))
_CACHED_MAX = 2 << 20
"""Bytes up to which slabs are cached: for larger arrays it makes no difference."""
_CACHED_PER_SIZE = 8
_LOOKUPS_MAX = 4
"""How many bases of a size are looked at: first those given last, which are in the processor's caches. Used ones go to
the end."""


def _count_unused() -> int:
    bases = deque([Storage(0, np.uint8)])
    base = bases.pop()
    return getrefcount(base)


_UNUSED_COUNT = _count_unused()
"""The reference count of a base that was taken out of the cache, and that no array has."""


def set_source(source: Source | None) -> None:
    """Take memory from this source from now on; None: from NumPy. Memory taken before is not reused."""
    global _source
    _source = source
    release()
    _source_free.limit = 0 if source is None else _IDLE_LIMIT // 2
    _free.limit = _IDLE_LIMIT - _source_free.limit


def source_limit() -> int:
    """The bytes of the source that may be idle: all that it has in use, if it gives no more."""
    return _source_free.limit


def release_old(nbytes: int) -> None:
    """Give so many bytes back to the source, if slabs of so many were idle for long."""
    _source_free.release_old(nbytes, _SOURCE_AGE)


def _reset_after_fork() -> None:
    """In a child: another thread of the parent may hold a token, and idle memory of the source is the parent's."""
    global _source
    _source = None
    _cache.clear()
    _cache.token = [None]
    _free.__init__(_IDLE_LIMIT)
    _source_free.__init__(0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def address(x: np.ndarray) -> int:
    """The address of the first entry of an array."""
    base = x.base
    if type(base) is PooledBase:  # x is a whole array: its views have x as their base
        return base.slab.start
    if type(base) is ExtendedBase:
        return base.start
    return x.__array_interface__["data"][0]


def empty(shape: int | tuple[int, ...], dtype: Any = float) -> np.ndarray:
    """A C-contiguous array with arbitrary entries. Large arrays are aligned to 64 bytes, and have margins."""
    if type(shape) is not tuple:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if not isinstance(dtype, np.dtype):
        dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < POOL_MIN or dtype.hasobject or not _free.limit:
        return np.empty(shape, dtype)
    grain = _GRAIN if nbytes < _OUT_MIN else 1 << nbytes.bit_length() - 4
    # The margins are shares of the slab, which is longer than the array: hence the second term.
    margins = (nbytes >> _MARGIN_SHIFT - 1) + (nbytes >> 2 * _MARGIN_SHIFT - 2)
    size = -(-(nbytes + margins + 2 * _ALIGNMENT) // grain) * grain
    base = _cache.take(size)
    if base is None:
        base = (_source_free.take(size) or _new_slab(size)).base()
        _cache.add(base, size)
    return np.ndarray(shape, dtype, base, base.slab.offset)


def _new_slab(nbytes: int) -> Slab:
    """A slab of the source, else an idle one of NumPy's memory, else a new one."""
    storage = None if _source is None else _source(nbytes)
    return (None if storage is not None else _free.take(nbytes)) or Slab(nbytes, storage)


def has_room(x: np.ndarray, before: int, nbytes: int) -> bool:
    """Whether x is a whole array in a slab, which has room for so many bytes that begin so many before x."""
    return _whole_with_room(x, before, nbytes) is not None


def extended(x: np.ndarray, before: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray] | None:
    """A C-contiguous array of a shape in whose memory x lies, `before` bytes behind its beginning; without a copy.

    It comes twice: writable, to be filled around x, where entries are arbitrary; and read-only, to be kept. x becomes
    read-only, and its reference count shows that it is in use. Do not write to x while the larger array exists.

    None where x, which is C-contiguous, lies elsewhere, has no room around it, or has another array around it.
    """
    inner = _whole_with_room(x, before, math.prod(shape) * x.itemsize)
    if inner is None:
        return None
    base: Any = inner.base
    slab: Slab = base.slab
    try:
        slab.margins.pop()
    except IndexError:
        return None
    outer_base = slab.storage.view(ExtendedBase)
    outer_base.slab, outer_base.inner, outer_base.start = slab, inner, slab.start - before
    outer_base.setflags(write=False)
    x.setflags(write=False)
    offset = slab.offset - before
    return np.ndarray(shape, x.dtype, base, offset), np.ndarray(shape, x.dtype, outer_base, offset)


def _whole_with_room(x: np.ndarray, before: int, nbytes: int) -> np.ndarray | None:
    """The array from `empty` that x is, maybe in another shape, if it has that room; else None."""
    whole: Any = x if type(x.base) is PooledBase else x.base
    if type(whole) is not np.ndarray or type(whole.base) is not PooledBase or whole.nbytes != x.nbytes:
        return None
    slab = whole.base.slab
    return whole if before <= slab.offset and slab.offset - before + nbytes <= slab.nbytes else None


def empty_like(x: np.ndarray, dtype: Any = None) -> np.ndarray:
    """`empty` of the shape of x, and of its dtype unless another one is given. Always C-contiguous."""
    if dtype is None and x.nbytes < POOL_MIN:
        return np.empty(x.shape, x.dtype)
    return empty(x.shape, x.dtype if dtype is None else dtype)


def zeros(shape: int | tuple[int, ...], dtype: Any = float) -> np.ndarray:
    """`empty`, filled with zeros."""
    x = empty(shape, dtype)
    if x.dtype.type is np.void:  # raw bytes, which are filled with bytes only
        x[...] = np.zeros((), x.dtype)
    else:
        x.fill(0)
    return x


def out_min() -> int:
    """The bytes from which to give NumPy an `out` array from here. Memory of a source is wanted for every slab."""
    return _OUT_MIN if _source is None else POOL_MIN


def idle() -> int:
    """The bytes that are idle."""
    return _free.nbytes + _source_free.nbytes + _cache.idle()


def release() -> None:
    """Give idle memory back to the system."""
    _cache.clear()
    _source_free.clear()
    _free.clear()
