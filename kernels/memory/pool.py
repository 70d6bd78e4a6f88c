"""Memory for large results, used again: fresh pages cost more than the arithmetic that fills them.

`empty` is `np.empty`, but a large array lies in a piece of memory that an earlier one has left. When the last view of
an array is gone its piece lies idle for the next one of that size. What lies idle is bounded. Of middling sizes some
pieces stay at hand: to find one that nobody has any more takes a third of the time that it takes to give one back.

A piece goes on before and behind the array that lies in it, for a 64th of its length. So what an array is a part of,
with some rows more at its ends, can be made around it, and the array itself is not copied (`around`).

The pieces may come from somewhere else than from NumPy: from memory that processes share, say (`take_from`). Half of
what may lie idle is then of there, and who gives it has no more in use than that: so all of it may be kept for later.
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

__all__ = ["LARGE", "LEAST", "Lease", "Margin", "Piece"]
__all__ += ["address", "around", "empty", "empty_like", "has_room", "idle", "least", "let_go", "most_of_source"]
__all__ += ["release", "take_from", "zeros"]

LARGE = 1 << 20
"""Bytes from which it pays to make room for what NumPy would make a new array for."""

_ALIGNED = 64
LEAST = 1 << 16
"""Bytes from which arrays lie in such memory. What is copied from one to another of its kind is a multiple of a line
apart. By the allocator's, blocks of whole pages lie a few bytes beyond whole pages apart, and to copy 256 KB so takes
an EPYC (Zen 3, glibc 2.36) 15 times as long; 1 MB it copies as fast."""
_GRAIN = 1 << 14
"""What the bytes of a piece are a multiple of, at least: of large arrays about a 24th of them, so that a block with its
halo and one without lie in pieces of one size, and take turns. Pages that nobody has touched are no memory."""
_MARGIN = 6
"""How often the length of a piece is halved for that of the margin before the array, and about so of that behind."""


def _bound() -> int:
    """The bytes that may lie idle: a sixteenth of the machine's memory, or SPMD_BUFFERS megabytes."""
    with suppress(ValueError):  # What is wrong with it `spmd.Mesh` says.
        given = setting("SPMD_BUFFERS")
        if given is not None:
            return given << 20
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 16


class Piece(np.ndarray):
    """Bytes that arrays lie in. Of its own class, so that NumPy does not take it for the base of what is a view of a
    lease."""

    __slots__ = ()


class Lease(np.ndarray):
    """What an array made by `empty` lies in; when the array and all its views are gone, the memory comes back. Or it
    stays `at_hand`, which is one more reference to it."""

    __slots__ = ("at_hand", "memory")

    def __del__(self):
        try:
            memory = self.memory
        except AttributeError:  # Views of it have none.
            return
        if _idle is not None:  # as it is when the program ends
            (_of_source if memory.sourced else _idle).give(memory)


class Margin(np.ndarray):
    """What a larger array lies in that was made around another one: it holds that one, so that nobody takes it to have
    no other names, and gives the margins back when the larger array and all its views are gone.

    start: the address of the first entry of the larger array.
    """

    __slots__ = ("memory", "of", "start")

    def __del__(self):
        with suppress(AttributeError):  # Views of it have none.
            self.memory.margins.append(None)


Source = Callable[[int], Piece | None]
"""Gives so many bytes of memory, or None where it has none to give; they are its again when the piece is gone."""

_source: Source | None = None


class Memory:
    """A piece of memory: one that a source gave, else NumPy's. source: who it was, or would have been. at: where in it
    arrays begin, and start: the address of that. margins: has an entry as long as nobody uses what lies around the
    array. given: when it was left, as a growing number."""

    __slots__ = ("at", "given", "margins", "nbytes", "piece", "source", "sourced", "start")

    def __init__(self, nbytes: int, found: Piece | None = None):
        self.source = _source
        self.sourced = found is not None
        self.piece = Piece(nbytes, np.uint8) if found is None else found
        self.nbytes = nbytes
        self.given = 0
        begin = self.piece.ctypes.data
        self.at = -begin % _ALIGNED + (nbytes >> _MARGIN & -_ALIGNED)
        self.start = begin + self.at
        self.margins: list[None] = [None]  # Of several threads that take it out, one gets it.

    def lease(self) -> Lease:
        lease = self.piece.view(Lease)
        lease.memory, lease.at_hand = self, 0
        return lease


_LAST = (-1,)
"""What `pop` is called with to take the turn, below. Nobody waits for a turn: an array may die at any moment, by the
garbage collector's hand or in the handler of a signal, also while this very thread has it. Whoever finds that another
has the turn does without. It is taken and given back by single calls into C, between which a handler may raise, but not
in them: so it is never lost."""


class _Idle:
    """The pieces of memory that nobody uses, by size, the latest on top. bound: their bytes, at most; the ones that
    have lain longest go first. given: how many were left so far, here and in others."""

    given = 0

    def __init__(self, bound: int):
        self.bound = bound
        self.nbytes = 0
        self.sizes: dict[int, list[Memory]] = {}
        self.turn = [None]

    def take(self, nbytes: int) -> Memory | None:
        if not self.sizes.get(nbytes):
            return None
        mine: list[None] = []
        try:
            mine.extend(map(self.turn.pop, _LAST))
            piece = self.sizes[nbytes].pop()
            self.nbytes = max(0, self.nbytes - nbytes)
            return piece
        except LookupError:  # Another has the turn, or has taken the last piece.
            return None
        finally:
            self.turn.extend(mine)

    def give(self, piece: Memory) -> None:
        nbytes = piece.nbytes
        if nbytes > self.bound or piece.source is not _source:
            return
        mine: list[None] = []
        try:
            mine.extend(map(self.turn.pop, _LAST))
            piece.given = _Idle.given = _Idle.given + 1
            pieces = self.sizes.get(nbytes)
            if pieces is None:
                pieces = self.sizes[nbytes] = []
            pieces.append(piece)
            self.nbytes += nbytes
            while self.nbytes > self.bound and self._pop(_Idle.given):
                pass
        except IndexError:
            pass
        finally:
            self.turn.extend(mine)

    def let_go(self, nbytes: int, age: int) -> None:
        """Give so many bytes up, if so many are of pieces after which as many others as `age` were left."""
        mine: list[None] = []
        try:
            mine.extend(map(self.turn.pop, _LAST))
            while nbytes > 0 and (size := self._pop(_Idle.given - age)):
                nbytes -= size
        except IndexError:
            pass
        finally:
            self.turn.extend(mine)

    def _pop(self, until: int) -> int:
        """Give up the piece that has lain longest, if it was left by then: its bytes."""
        self.sizes = {size: pieces for size, pieces in self.sizes.items() if pieces}
        oldest = min(self.sizes.values(), key=lambda pieces: pieces[0].given, default=None)
        if oldest is None:
            self.nbytes = 0  # It is more where an interrupt has come between taking a piece and counting it.
            return 0
        if oldest[0].given > until:
            return 0
        size = oldest.pop(0).nbytes
        self.nbytes -= size
        return size

    def clear(self) -> None:
        self.sizes, self.nbytes = {}, 0


_BOUND = _bound()
_idle, _of_source = _Idle(_BOUND), _Idle(0)
_AGE = 256
"""After so many others were left a piece of a source is given up for one of another size. What a program makes again
and again comes before that, if it is not very much; and it has new sizes when it has made them so often."""


class _AtHand:
    """Leases that stay here while arrays come and go in them, by the size of their memory: the one that was given the
    latest on the right. bound: how many bytes they have in all, with those that are in use; where it is reached all are
    let go of."""

    def __init__(self, bound: int):
        self.bound = bound
        self.nbytes = 0
        self.sizes: dict[int, deque[Lease]] = {}
        self.turn = [None]

    def take(self, nbytes: int) -> Lease | None:
        """One that nobody has. Several threads may look at once: what one has taken out no other can see."""
        leases = self.sizes.get(nbytes)
        if leases is None:
            return None
        last = None
        try:
            for _ in range(_TRIES):
                last = leases[-1]
                lease = leases.pop()
                if getrefcount(lease) == _FREE + (lease is last):
                    leases.append(lease)
                    return lease
                leases.appendleft(lease)
        except IndexError:
            pass
        except BaseException:  # An interrupt. What has the mark `at_hand` has to be here.
            if last is not None and not any(lease is last for lease in [*leases]):
                leases.append(last)
            raise
        return None

    def add(self, lease: Lease, nbytes: int) -> None:
        """Keep one at hand that was made for an array of now, if it is small and there are not enough of its size."""
        if nbytes > min(_AT_HAND, self.bound):
            return
        mine: list[None] = []
        try:
            mine.extend(map(self.turn.pop, _LAST))
            if len(self.sizes.get(nbytes, ())) < _MOST_AT_HAND:
                if self.nbytes + nbytes > self.bound:
                    self.let_go()
                self.nbytes += nbytes
                lease.at_hand = 1
                self.sizes.setdefault(nbytes, deque()).append(lease)
        except IndexError:
            pass
        finally:
            self.turn.extend(mine)

    def let_go(self) -> None:
        sizes, self.sizes, self.nbytes = self.sizes, {}, 0
        for leases in sizes.values():
            while leases:
                leases.pop().at_hand = 0

    def idle(self) -> int:
        """The bytes of those that nobody has."""
        found = 0
        for nbytes, leases in list(self.sizes.items()):
            for lease in list(leases):
                # Three more know it: the deque, its copy, and the name here.
                found += nbytes * (getrefcount(lease) == _FREE + 2)
        return found


_at_hand = _AtHand(min(1 << 27, _BOUND // 4))
_AT_HAND = 2 << 20
"""Bytes of a piece that may stay at hand, at most: for larger arrays it makes no difference."""
_MOST_AT_HAND = 8
"""Pieces of a size that stay at hand, at most."""
_TRIES = 4
"""How many of them are looked at. Those that were given the latest are tried first, for they are in the caches, and are
put behind all others if they are still in use."""


def _count_free() -> int:
    leases = deque([Piece(0, np.uint8)])
    lease = leases.pop()
    return getrefcount(lease)


_FREE = _count_free()
"""The reference count of a lease that has been taken out to be looked at, and that no array has."""


def take_from(source: Source | None) -> None:
    """Take memory from there from now on; None: from NumPy. What was taken before is not used again."""
    global _source
    _source = source
    release()
    _of_source.bound = 0 if source is None else _BOUND // 2
    _idle.bound = _BOUND - _of_source.bound


def most_of_source() -> int:
    """The bytes that may lie idle of a source's pieces: all that it has in use, if it gives no more."""
    return _of_source.bound


def let_go(nbytes: int) -> None:
    """Give so many bytes back to the source, if pieces of so many have lain idle for long."""
    _of_source.let_go(nbytes, _AGE)


def _begin_again() -> None:
    """A lock that another thread held stays closed in a child; what lies idle there is the parent's."""
    global _source
    _source = None
    _at_hand.let_go()
    _at_hand.turn = [None]
    _idle.__init__(_BOUND)
    _of_source.__init__(0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


def address(x: np.ndarray) -> int:
    """Where the first entry of an array lies."""
    lease = x.base
    if type(lease) is Lease:  # all of it: what is a view of it has another base
        return lease.memory.start
    if type(lease) is Margin:
        return lease.start
    return x.__array_interface__["data"][0]


def empty(shape: int | tuple[int, ...], dtype: Any = float) -> np.ndarray:
    """A C-contiguous array whose entries are arbitrary. Large arrays are aligned to 64 bytes, and have margins."""
    if type(shape) is not tuple:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if not isinstance(dtype, np.dtype):
        dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LEAST or dtype.hasobject or not _idle.bound:
        return np.empty(shape, dtype)
    grain = _GRAIN if nbytes < LARGE else 1 << nbytes.bit_length() - 5
    # The margins are those of the piece, which is longer: hence the second term.
    both = (nbytes >> _MARGIN - 1) + (nbytes >> 2 * _MARGIN - 2)
    size = -(-(nbytes + both + 2 * _ALIGNED) // grain) * grain
    lease = _at_hand.take(size)
    if lease is None:
        lease = (_of_source.take(size) or _another(size)).lease()
        _at_hand.add(lease, size)
    return np.ndarray(shape, dtype, lease, lease.memory.at)


def _another(nbytes: int) -> Memory:
    found = None if _source is None else _source(nbytes)
    return (None if found is not None else _idle.take(nbytes)) or Memory(nbytes, found)


def has_room(x: np.ndarray, before: int, nbytes: int) -> bool:
    """Whether x is all of an array in such memory, and so many bytes find room there that begin so many before it."""
    return _with_room(x, before, nbytes) is not None


def around(x: np.ndarray, before: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray] | None:
    """A C-contiguous array of a shape, in whose memory x lies, `before` bytes behind its beginning. It comes twice: to
    be filled around x, where entries are arbitrary; and read-only, to be kept. x is read-only from now on. Nobody is to
    write to it while the other is there; whoever asks whether x has other names finds that it has.

    None where x, which is C-contiguous, lies elsewhere, there is no room, or another array is there around it.
    """
    of = _with_room(x, before, math.prod(shape) * x.itemsize)
    if of is None:
        return None
    lease: Any = of.base
    memory: Memory = lease.memory
    try:
        memory.margins.pop()
    except IndexError:
        return None
    margin = memory.piece.view(Margin)
    margin.memory, margin.of, margin.start = memory, of, memory.start - before
    margin.setflags(write=False)
    x.setflags(write=False)
    at = memory.at - before
    return np.ndarray(shape, x.dtype, lease, at), np.ndarray(shape, x.dtype, margin, at)


def _with_room(x: np.ndarray, before: int, nbytes: int) -> np.ndarray | None:
    """The array that x is all of, maybe in another shape, if it has that room; else None."""
    whole: Any = x if type(x.base) is Lease else x.base
    if type(whole) is not np.ndarray or type(whole.base) is not Lease or whole.nbytes != x.nbytes:
        return None
    memory = whole.base.memory
    return whole if before <= memory.at and memory.at - before + nbytes <= memory.nbytes else None


def empty_like(x: np.ndarray, dtype: Any = None) -> np.ndarray:
    """`empty` of the shape of x, and of its dtype where none is given. Always C-contiguous."""
    if dtype is None and x.nbytes < LEAST:
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


def least() -> int:
    """The bytes from which it pays to make room for what NumPy would make a new array for. Where the memory comes from
    somewhere else, it is wanted for all that can lie in it."""
    return LARGE if _source is None else LEAST


def idle() -> int:
    """The bytes that lie idle."""
    return _idle.nbytes + _of_source.nbytes + _at_hand.idle()


def release() -> None:
    """Give the memory that lies idle back to the system."""
    _at_hand.let_go()
    _of_source.clear()
    _idle.clear()
