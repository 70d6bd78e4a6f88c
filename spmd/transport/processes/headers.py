"""What processes tell each other before data moves: a header from each member of a group to each other one.

A header is at most a kilobyte, of words of eight bytes: what is called, 1 + the rank of what comes (0: nothing), its
lengths; and a small block itself, or where a large one lies in the sender's arena. Neither then needs a message of its
own. It is written as bytes into memory that the engine sends again and again, for at this size every array that is made
counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from spmd.autodiff.dtypes import dtype_name
from spmd.device import owned
from spmd.errors import TransportError
from spmd.transport.call import Call, Shape
from spmd.transport.handles import read_only

__all__ = ["INLINE_LIMIT", "MAX_NDIM", "ROOM", "Headers", "digest", "name_of", "stamped", "told"]

ROOM = 1024
"""Bytes of a header, at most."""
MAX_NDIM = 32
"""Dimensions of a block between processes, at most."""
INLINE_LIMIT = ROOM - 8 * (2 + MAX_NDIM)
"""Bytes up to which a block travels in the header itself."""
_VIEWS = 64
"""Views of blocks in the headers of a member that are kept."""
ASKS = 256
"""Added to the rank where the block is differentiated: see `Call.needs_grad`."""
PLACED = 512
"""Added to the rank where the block is read from the sender's arena. Then its strides follow, and where it begins."""

_WORD = (1 << 64) - 1
"""The largest word."""


@lru_cache(maxsize=4096)
def digest(*key: object) -> int:
    """A call's key as a number that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little", signed=True)


def name_of(call: Call, run: int, number: int) -> int:
    """The first word: what is called. run, number: in which map, and as which collective in it."""
    name = call.number
    if name is None:
        op, axes, detail, dtype, shape, leaf = call.key
        name = call.number = digest(op, axes, detail, dtype_name(np.dtype(dtype)), shape, leaf)
    return stamped(name, run, number)


def stamped(name: int, run: int, number: int) -> int:
    """The name of a call, in a map and as one of its collectives: calls' names differ by far more."""
    return name + (run << 32) + number & _WORD


@lru_cache(maxsize=4096)
def told(op: str, shape: Shape | None, needs_grad: bool, strides: Shape = ()) -> bytes:
    """The words on what comes: its rank and shape, and its strides if it is read where it lies. None: nothing comes."""
    if shape is not None and len(shape) > MAX_NDIM:
        raise TransportError.at(
            op,
            got=f"an array of {len(shape)} dimensions",
            need=f"at most {MAX_NDIM} between processes",
            mend="reshape it for the collective",
        )
    words = (0,) if shape is None else (1 + len(shape), *shape, *strides)
    return np.array([words[0] + ASKS * needs_grad + PLACED * bool(strides), *words[1:]], np.int64).tobytes()


class Headers:
    """The headers of one side, those that go out or those that come in: row k is that to member k, or from it.

    array: of ROOM bytes for each, in words. windows: the arenas of the others, if blocks may lie there.
    """

    __slots__ = ("array", "bytes", "signed", "views", "windows", "words")

    def __init__(self, array: np.ndarray, windows: Sequence[Any] = ()):
        self.array, self.windows = array, windows
        # Views of memory are read and written in a third of the time that arrays take.
        self.words = [row.data for row in array]
        self.bytes = [row.view(np.uint8).data for row in array]
        self.signed = [row.view(np.int64).data for row in array]
        self.views: list[dict[Any, np.ndarray]] = [{} for _ in array]

    @classmethod
    def of(cls, size: int) -> Headers:
        """Headers to, or from, so many members, in memory of their own."""
        return cls(np.zeros((size, ROOM // 8), np.uint64))

    def needs_grad(self, k: int) -> bool:
        """Whether the block of member k is differentiated."""
        return bool(self.words[k][1] & ASKS)

    def placed(self, k: int) -> bool:
        """Whether the block of member k is to be read where it lies."""
        return self.words[k][1] >= PLACED

    def came(self, k: int, nbytes: int, most: int) -> bool:
        """Whether the block of member k, of so many bytes, came along: those of at most so many do, and such as are to
        be read where they lie."""
        return nbytes <= most or self.placed(k)

    def shape(self, k: int) -> Shape | None:
        """The shape of what comes from member k."""
        words = self.words[k]
        rank = words[1] % ASKS
        return tuple(words[2 : 1 + rank]) if rank else None

    def there(self, k: int, shape: Shape, dtype: np.dtype) -> np.ndarray:
        """The block that came along with the header of member k, where it lies: to be read before the next header comes
        there."""
        if self.placed(k):
            n, words = len(shape), self.signed[k]
            return np.ndarray(shape, dtype, self.windows[k], words[2 + 2 * n], tuple(words[2 + n : 2 + 2 * n]))
        views = self.views[k]
        found = views.get((shape, dtype))
        if found is None:
            if len(views) >= _VIEWS:
                views.clear()
            found = np.ndarray(shape, dtype, self.bytes[k], 16 + 8 * len(shape))
            views[shape, dtype] = found
        return found

    def inline_block(self, k: int, shape: Shape, dtype: np.dtype) -> np.ndarray:
        """The block that came along with the header of member k, in memory of its own."""
        return read_only(owned(self.there(k, shape, dtype)))

    def beside(self, x: np.ndarray, rows: Sequence[int], me: int, shapes: Sequence[Shape]) -> list[np.ndarray]:
        """The blocks of all members where they lie, of these shapes, and of the dtype of this one's, which is x. Member
        k has row rows[k]."""
        dtype = x.dtype
        return [x if k == me else self.there(row, shapes[k], dtype) for k, row in enumerate(rows)]

    def inline_blocks(self, x: np.ndarray, rows: Sequence[int], me: int, shapes: Sequence[Shape]) -> list[np.ndarray]:
        """The same, in memory of their own."""
        dtype = x.dtype
        return [x if k == me else self.inline_block(row, shapes[k], dtype) for k, row in enumerate(rows)]
