"""Combining blocks with halos, and the adjoint, which adds halos back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from spmd.device import COPIED, copied, empty, put, zeros
from spmd.errors import LayoutError
from spmd.kernels.cpu.moves import joiner
from spmd.kernels.memory import pool
from spmd.operators.halo_geometry import Message, Piece, along, whole_piece
from spmd.transport.call import Group, Shape
from spmd.transport.handles import read_only
from spmd.transport.plan import Combine, Make, Plan, Plans

Place = tuple[Any, Any, bool]
"""A piece: its index in the result, its index in the block or message, and whether it is flipped."""


def piece_places(pieces: Iterable[Piece], d: int) -> tuple[Place, ...]:
    return tuple((along(d, p.at, p.at + p.length), along(d, p.start, p.stop), p.flipped) for p in pieces)


def _length(index: slice) -> int:
    return index.stop - index.start


def _fill(out: Any, block: Any, places: Iterable[Place], d: int) -> None:
    """Copy the pieces of a block, or of a message, to their places."""
    for to, of, flipped in places:
        out[to] = np.flip(block[of], d) if flipped else block[of]


def _add(out: Any, g: Any, pieces: Sequence[Piece], d: int) -> None:
    """The adjoint of `_fill`: add the entries at the places of the pieces to a block, or to a message."""
    for p in pieces:
        part = g[along(d, p.at, p.at + p.length)]
        if p.repeat > 1:
            part = np.sum(part, axis=d, keepdims=True, dtype=g.dtype)
        out[along(d, p.start, p.stop)] += np.flip(part, d) if p.flipped else part


def crops(pieces: Sequence[Piece], length: int) -> bool:
    """Whether the sum of these pieces is a slice of the array that they are taken from."""
    return len(pieces) == 1 and whole_piece(pieces, length) is not None


def _sum(g: Any, pieces: Sequence[Piece], length: int, d: int, fresh: bool = False) -> Any:
    """The sum of the entries at the places of the pieces: a block or message of this length. fresh: never a view."""
    first = whole_piece(pieces, length)
    if first is None:
        out = zeros((*g.shape[:d], length, *g.shape[d + 1 :]), g)
    else:
        out = g[along(d, first.at, first.at + length)]
        if not fresh and crops(pieces, length):
            return out
        out = copied(out)
    _add(out, g, [p for p in pieces if p is not first], d)
    return out


def _in_order(m: Message) -> list[Piece] | None:
    """The pieces in the order of the message, if they fill it without overlap, flips or repeats; else None."""
    pieces = sorted(m.pieces, key=lambda p: p.start)
    ends = [0, *(p.stop for p in pieces)]
    plain = all(p.start == end and not p.flipped and p.repeat == 1 for p, end in zip(pieces, ends, strict=False))
    return pieces if plain and ends[-1] == m.length else None


def returning(m: Message, d: int) -> Any:
    """The part of a block with its halo that goes back for a message: an index, or a function that sums entries."""
    pieces = _in_order(m)
    if pieces is None:
        return lambda g: _sum(g, m.pieces, m.length, d)
    return one_index([(p.at, p.at + p.length) for p in pieces], d)


def one_index(ranges: Sequence[tuple[int, int]], d: int) -> tuple[Any, ...]:
    """Ranges of a dimension, one after the other, as one index: a slice if there is one range."""
    if len(ranges) == 1:
        return along(d, *ranges[0])
    return (*(slice(None),) * d, np.concatenate([np.arange(start, stop) for start, stop in ranges]))


def add_ranges(out: Any, m: Message, part: Any, d: int) -> None:
    """Add the part that came back for a message to the entries that the block sent in it."""
    at = 0
    for start, stop in m.ranges:
        out[along(d, start, stop)] += part[along(d, at, at + stop - start)]
        at += stop - start


class ResultBuffer(NamedTuple):
    """The buffer of the result of an exchange.

    shape: of the result; window: the index of the block in it. ahead: the number of entries of the result before the
    block, if the block is contiguous in it and only the halo has to be written; else None.
    """

    shape: Shape
    window: tuple[slice, ...]
    ahead: int | None

    def place(self, x: Any, borrowed: bool) -> tuple[Any, Any]:
        """A buffer that holds the block at its place, and the result. It extends the block in its own memory, if there
        is room and nobody writes to the block."""
        if type(x) is np.ndarray and prod(self.shape) * x.itemsize <= COPIED:
            buffer = np.empty(self.shape, x.dtype)
            buffer[self.window] = x
            return buffer, buffer
        if self.ahead is not None and not borrowed and type(x) is np.ndarray:
            pooled = pool.extended(x, self.ahead * x.itemsize, self.shape)
            if pooled is not None:
                return pooled
        buffer = empty(self.shape, x)
        put(buffer[self.window], x)
        return buffer, buffer

    def is_around(self, x: np.ndarray) -> bool:
        """Whether the memory around such a block has room for the result."""
        nbytes = prod(self.shape) * x.itemsize
        return nbytes > COPIED and self.ahead is not None and pool.has_room(x, self.ahead * x.itemsize, nbytes)


def entries_ahead(shape: Shape, window: Sequence[slice], moving: Sequence[int]) -> int | None:
    """`ResultBuffer.ahead` for a block that is extended along the dimensions `moving`. None for several dimensions: the
    later ones send parts of the buffer, which another result may reuse."""
    if len(moving) != 1 or prod(shape[: moving[0]]) != 1:
        return None
    d = moving[0]
    return window[d].start * prod(shape[d + 1 :])


def agree_along(function: str, part: Shape, block: Shape, d: int, m: Message, line: Group, s: int) -> None:
    if part != (*block[:d], m.length, *block[d + 1 :]):
        raise LayoutError.at(
            f"spmd.{function}",
            argument="x",
            got=f"blocks of shapes {list(block)} (member {line.index}) and {list(part)} "
            f"(a part, of member {s}) along {' and '.join(map(repr, line.axes))}",
            need=f"blocks that differ in dimension {d} only",
            mend="let the spec say what splits the array",
        )


@dataclass(frozen=True)
class FillHalo(Combine):
    """A block, with its neighbours' entries along one dimension around it.

    function: named by errors. d: the dimension; length: of the result along it. gaps: places of zeros. own: places of
    the block's own pieces. received: the messages of others, by source, with the places of their pieces. buffer: for
    the result of all dimensions; window: its part that this dimension fills. Both are None if the result does not have
    the whole block: then each dimension creates a new array.
    """

    function: str
    d: int
    length: int
    gaps: tuple[Any, ...]
    own: tuple[Place, ...]
    received: tuple[tuple[int, Message, tuple[Place, ...]], ...]
    buffer: ResultBuffer | None
    window: tuple[slice, ...] | None
    in_place: bool = False
    parallel: ClassVar[bool] = True

    def sources(self, plan: Plan) -> Collection[int]:
        return tuple(s for s, _, _ in self.received)

    def complete(self, plan: Plan, shapes: Sequence[Any]) -> tuple[Make, Shape]:
        for s, m, _ in self.received:
            agree_along(self.function, shapes[s], plan.shape, self.d, m, plan.group, s)
        shape = (*plan.shape[: self.d], self.length, *plan.shape[self.d + 1 :])

        def make(x: Any, blocks: Sequence[Any], fresh: bool = True, begun: Any = None) -> Any:
            out, whole = begun or self.begin(plan, x)
            for s, _, places in self.received:
                _fill(out, blocks[s], places, self.d)
            return read_only(whole)

        return make, shape

    def begin(self, plan: Plan, x: Any, borrowed: bool = False) -> Any:
        """The array to fill and the result, with the entries of the block in place."""
        if self.buffer is None:
            out = whole = empty((*x.shape[: self.d], self.length, *x.shape[self.d + 1 :]), x)
        else:
            buffer, whole = self.buffer.place(x, borrowed)
            out = buffer[self.window]
        self.fill(out, x)
        return out, whole

    def fill(self, out: Any, x: Any) -> None:
        """Fill in zeros and the block's own entries."""
        for gap in self.gaps:
            out[gap] = 0
        _fill(out, x, self.own, self.d)

    def quick(self, plan: Plan, shapes: Sequence[Any]) -> Make | None:
        d, buffer = self.d, self.buffer
        if buffer is None or prod(buffer.shape) * plan.dtype.itemsize > COPIED:
            return None
        pieces = [(None, *place) for place in self.own]
        pieces += [(s, *place) for s, _, places in self.received for place in places]
        if any(_length(of[d]) != _length(to[d]) for _, to, of, _ in pieces):  # of "edge" one entry is repeated
            return None
        at_once = joiner(buffer.shape, plan.dtype, [buffer.window, *self.gaps, *(to for _, to, _, _ in pieces)])
        if at_once is None:
            return None
        zeros_there = [np.zeros(buffer.shape, plan.dtype)[gap] for gap in self.gaps]

        def parts(x: Any, blocks: Sequence[Any]) -> Iterator[np.ndarray]:
            for s, _, of, flipped in pieces:
                part = (x if s is None else blocks[s])[of]
                yield np.flip(part, d) if flipped else part

        return lambda x, blocks: at_once([x, *zeros_there, *parts(x, blocks)])

    def __str__(self) -> str:
        sources = ", ".join(str(s) for s, _, _ in self.received)
        return f"length {self.length} in dimension {self.d}: the block" + f", and parts from {sources}" * bool(sources)


@dataclass(frozen=True, eq=False)
class HaloPlans(Plans):
    """The plans of an exchange, one per dimension along which the block is extended. buffer: see `FillHalo`."""

    buffer: ResultBuffer | None


@dataclass(frozen=True)
class AddHalo(Combine):
    """A block with a halo along one dimension, without that halo: the sum of its own pieces and of the parts that come
    back.

    function: named by errors. d: the dimension; size: of the block along it. own: the block's own pieces.
    sent_messages: by member, the messages that the exchange sent, whose cotangents come back.
    """

    function: str
    d: int
    size: int
    own: tuple[Piece, ...]
    sent_messages: Mapping[int, Message]
    parallel: ClassVar[bool] = True

    def sources(self, plan: Plan) -> Collection[int]:
        return tuple(self.sent_messages)

    def complete(self, plan: Plan, shapes: Sequence[Any]) -> tuple[Make, Shape]:
        block = (*plan.shape[: self.d], self.size, *plan.shape[self.d + 1 :])
        for t, m in self.sent_messages.items():
            agree_along(self.function, shapes[t], block, self.d, m, plan.group, t)

        def make(g: Any, blocks: Sequence[Any], fresh: bool = True, begun: Any = None) -> Any:
            out = self.begin(plan, g) if begun is None else begun
            for t, m in self.sent_messages.items():  # in the order of the workers
                add_ranges(out, m, blocks[t], self.d)
            return read_only(out)

        return make, block

    def begin(self, plan: Plan, x: Any, borrowed: bool = False) -> Any:
        return self.sum_own(x, True)

    def sum_own(self, g: Any, fresh: bool) -> Any:
        """The sum of the block's own pieces. fresh: never a view."""
        return _sum(g, self.own, self.size, self.d, fresh)

    def __str__(self) -> str:
        sources = ", ".join(map(str, self.sent_messages))
        return f"length {self.size} in dimension {self.d}: the block" + f", parts from {sources} added" * bool(sources)
