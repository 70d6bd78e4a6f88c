"""What processes tell each other before data moves: a header from each member of a group to each other one.

A header is at most a kilobyte, of words of eight bytes: what is called, 1 + the rank of what comes (0: nothing), its
lengths; and a small block itself, which then needs no message of its own. It is written as bytes into memory that the
engine sends again and again, for at this size every array that is made counts.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from spmd.errors import TransportError, message
from spmd.transport.base import Call, Shape

__all__ = ["ASKS", "RIDES", "ROOM", "Headers", "digest", "name_of", "told"]

ROOM = 1024
"""Bytes of a header, at most."""
_MAX_NDIM = 32
RIDES = ROOM - 8 * (2 + _MAX_NDIM)
"""Bytes up to which a block travels in the header itself."""
ASKS = 256
"""Added to the rank where the block is differentiated: see `Call.asks`."""

_STEPS = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
"""What the number of a map, and of a collective in it, adds to a call's: odd, with bits in all places."""
_WORD = (1 << 64) - 1


@lru_cache(maxsize=4096)
def digest(*key: object) -> int:
    """A call's key as a number that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little", signed=True)


def name_of(call: Call, run: int, number: int) -> bytes:
    """The first word: what is called. run, number: in which map, and as which collective in it."""
    name = call.number
    if name is None:
        op, axes, detail, dtype, shape = call.key
        name = call.number = digest(op, axes, detail, np.dtype(dtype).str, shape)
    return ((name + run * _STEPS[0] + number * _STEPS[1]) & _WORD).to_bytes(8, sys.byteorder)


@lru_cache(maxsize=4096)
def told(op: str, shape: Shape | None, asks: bool) -> bytes:
    """The words on what comes: its rank and shape. None: nothing comes."""
    if shape is not None and len(shape) > _MAX_NDIM:
        raise TransportError(
            message(
                op,
                got=f"an array of {len(shape)} dimensions",
                need=f"at most {_MAX_NDIM} between processes",
                mend="reshape it for the collective",
            )
        )
    words = (0,) if shape is None else (1 + len(shape), *shape)
    return np.array([words[0] + ASKS * asks, *words[1:]], np.uint64).tobytes()


class Headers:
    """The headers of one side, those that go out or those that come in: row k is that to member k, or from it."""

    __slots__ = ("array", "bytes", "words")

    def __init__(self, size: int):
        self.array = np.zeros((size, ROOM // 8), np.uint64)
        # Views of memory are read and written in a third of the time that arrays take.
        self.words = [row.data for row in self.array]
        self.bytes = [row.view(np.uint8).data for row in self.array]

    def asks(self, k: int) -> bool:
        """Whether the block of member k is differentiated."""
        return self.words[k][1] >= ASKS

    def shape(self, k: int) -> Shape | None:
        """The shape of what comes from member k."""
        words = self.words[k]
        rank = words[1] % ASKS
        return tuple(words[2 : 1 + rank]) if rank else None

    def beside(self, x: np.ndarray, rows: Sequence[int], me: int) -> list[np.ndarray]:
        """The blocks of all members, of the shape and dtype of this one's, which is x: member k has row rows[k]. They
        are read where they came, before the next headers do."""
        shape, dtype, came = x.shape, x.dtype, self.bytes
        start = 16 + 8 * len(shape)
        return [x if k == me else np.ndarray(shape, dtype, came[row], start) for k, row in enumerate(rows)]

    def riders(
        self, x: np.ndarray, rows: Sequence[int], me: int, shapes: Sequence[Shape], sizes: Sequence[int]
    ) -> list[np.ndarray]:
        """The blocks of all members, of the dtype of this one's, which is x: sizes are in bytes."""
        dtype = x.dtype
        return [x if k == me else self.rider(row, shapes[k], dtype, sizes[k]) for k, row in enumerate(rows)]

    def rider(self, k: int, shape: Shape, dtype: np.dtype, nbytes: int) -> np.ndarray:
        """The block that came in the header of member k, read-only; nobody else has it."""
        start = 16 + 8 * len(shape)
        return np.ndarray(shape, dtype, self.bytes[k][start : start + nbytes].tobytes())
