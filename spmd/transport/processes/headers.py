"""Headers: what processes send each other before data moves, one from each member of a group to each other.

A header has at most `HEADER_NBYTES` bytes, in words of eight: the name of the call, 1 + the rank of what comes (0:
nothing), its lengths; then a small block itself, or the place of a large one in the sender's shared memory. Neither
then needs a message of its own. Headers are written as bytes into memory that is sent again and again, because at this
size creating an array costs too much.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from types import CodeType
from typing import Any

import numpy as np

from spmd.autodiff.dtypes import dtype_name
from spmd.device import owned
from spmd.errors import TransportError
from spmd.transport.call import Call, Shape
from spmd.transport.handles import read_only

__all__ = [
    "HEADER_NBYTES",
    "INLINE_LIMIT",
    "MAX_NDIM",
    "WORD",
    "Headers",
    "call_name",
    "digest",
    "line_number",
    "numbered",
    "pack_header",
    "unpack_shape",
]

HEADER_NBYTES = 1024
"""Bytes of a header, at most."""
MAX_NDIM = 32
"""Dimensions of a block between processes, at most."""
INLINE_LIMIT = HEADER_NBYTES - 8 * (2 + MAX_NDIM)
"""Bytes up to which a block travels in the header itself."""
_VIEWS_MAX = 64
"""Cached views of blocks in the headers of a member, at most."""
NEEDS_GRAD = 256
"""Added to the rank where the block is differentiated: see `Call.needs_grad`."""
SHARED = 512
"""Added to the rank where the block is in the sender's shared memory. Then its strides follow, and its offset."""

WORD = (1 << 64) - 1
"""The largest word."""


@lru_cache(maxsize=4096)
def digest(*key: object) -> int:
    """A call's key as a number that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little", signed=True)


def call_name(call: Call, run: int = 0, number: int = 0, line: int = 0) -> int:
    """The first word of a header: the digest of a call, made unique by the map, the number of the collective in it, and
    the line from which all run the map, if they must."""
    name = call.digest
    if name is None:
        op, axes, detail, dtype, shape, leaf = call.key
        name = call.digest = digest(op, axes, detail, dtype_name(np.dtype(dtype)), shape, leaf)
    return numbered(name, run, number, line)


def numbered(name: int, run: int, number: int, line: int) -> int:
    """A digest combined with the numbers of a map and of a collective in it, which are small beside the distances of
    digests, and of a line."""
    return name + (run << 32) + number + line & WORD


@lru_cache(maxsize=4096)
def line_number(code: CodeType, instruction: int) -> int:
    """A number of the place in its source file of an instruction, the same in every process. The name of the file is
    left out: in notebooks each process has another."""
    place = next(islice(code.co_positions(), instruction // 2, None))
    return digest(code.co_qualname, place)


@lru_cache(maxsize=4096)
def pack_header(op: str, shape: Shape | None, needs_grad: bool, strides: Shape = ()) -> bytes:
    """The words on what comes: its rank and shape, and its strides if it lies in shared memory. shape None: nothing
    comes."""
    if shape is not None and len(shape) > MAX_NDIM:
        raise TransportError.at(
            op,
            got=f"an array of {len(shape)} dimensions",
            need=f"at most {MAX_NDIM} between processes",
            mend="reshape it for the collective",
        )
    words = (0,) if shape is None else (1 + len(shape), *shape, *strides)
    return np.array([words[0] + NEEDS_GRAD * needs_grad + SHARED * bool(strides), *words[1:]], np.int64).tobytes()


def unpack_shape(header: bytes) -> Shape:
    """The shape of which `pack_header` tells, for a block that comes and is not shared."""
    return tuple(np.frombuffer(header, np.int64)[1:].tolist())


class Headers:
    """The headers of one direction, outgoing or incoming: row k is that to member k, or from it.

    array: HEADER_NBYTES for each, in words. windows: the shared memories of the others, if blocks may lie there.
    """

    __slots__ = ("array", "bytes", "signed", "views", "windows", "words")

    def __init__(self, array: np.ndarray, windows: Sequence[Any] = ()):
        self.array, self.windows = array, windows
        # Memoryviews take a third of the time of arrays.
        self.words = [row.data for row in array]
        self.bytes = [row.view(np.uint8).data for row in array]
        self.signed = [row.view(np.int64).data for row in array]
        self.views: list[dict[Any, np.ndarray]] = [{} for _ in array]

    @classmethod
    def of(cls, size: int) -> Headers:
        """Headers for `size` members, in memory of their own."""
        return cls(np.zeros((size, HEADER_NBYTES // 8), np.uint64))

    def needs_grad(self, k: int) -> bool:
        """Whether the block of member k is differentiated."""
        return bool(self.words[k][1] & NEEDS_GRAD)

    def is_shared(self, k: int) -> bool:
        """Whether the block of member k lies in shared memory."""
        return self.words[k][1] >= SHARED

    def is_inline(self, k: int, nbytes: int, limit: int) -> bool:
        """Whether the block of member k came with its header: it has at most `limit` bytes, or lies in shared
        memory."""
        return nbytes <= limit or self.is_shared(k)

    def shape(self, k: int) -> Shape | None:
        """The shape of what comes from member k."""
        words = self.words[k]
        rank = words[1] % NEEDS_GRAD
        return tuple(words[2 : 1 + rank]) if rank else None

    def block_view(self, k: int, shape: Shape, dtype: np.dtype) -> np.ndarray:
        """A view of the block that came with the header of member k: valid until the next header arrives."""
        if self.is_shared(k):
            n, words = len(shape), self.signed[k]
            return np.ndarray(shape, dtype, self.windows[k], words[2 + 2 * n], tuple(words[2 + n : 2 + 2 * n]))
        views = self.views[k]
        view = views.get((shape, dtype))
        if view is None:
            if len(views) >= _VIEWS_MAX:
                views.clear()
            view = np.ndarray(shape, dtype, self.bytes[k], 16 + 8 * len(shape))
            views[shape, dtype] = view
        return view

    def inline_block(self, k: int, shape: Shape, dtype: np.dtype) -> np.ndarray:
        """A copy of the block that came with the header of member k."""
        return read_only(owned(self.block_view(k, shape, dtype)))

    def block_views(self, x: np.ndarray, rows: Sequence[int], me: int, shapes: Sequence[Shape]) -> list[np.ndarray]:
        """The blocks of all members, of these shapes: this one's, x, and views of the others. Member k has row
        rows[k]."""
        dtype = x.dtype
        return [x if k == me else self.block_view(row, shapes[k], dtype) for k, row in enumerate(rows)]

    def inline_blocks(self, x: np.ndarray, rows: Sequence[int], me: int, shapes: Sequence[Shape]) -> list[np.ndarray]:
        """As `block_views`, with copies."""
        dtype = x.dtype
        return [x if k == me else self.inline_block(row, shapes[k], dtype) for k, row in enumerate(rows)]
