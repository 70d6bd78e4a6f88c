"""Blocks that go along with headers, from the second time on: a line that has called the same before.

What goes along with the headers, in them or in an arena, is over when all have told each other what they call. But for
the blocks themselves all is then as it was the last time, if the others bring blocks of the same shapes again: what
goes to whom, where the blocks lie that come, and what makes the result of them. On the wire nothing differs from the
long way.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from spmd.kernels.memory.pool import address
from spmd.transport.call import Call, Shape
from spmd.transport.plan import Make, Plan, RunPlan, part_of
from spmd.transport.processes.base import Participant
from spmd.transport.processes.headers import INLINE_LIMIT, Headers, name_of, stamped, told

__all__ = ["RepeatedPlan"]

_TABLES = 4
"""Headers that are known: a channel has up to three sides. Those of channels that are no more are forgotten."""


class _Part(NamedTuple):
    """What goes to a member: its row, its header, what goes along in it and how many bytes that has.

    piece: the index of a part of the block; or, if that is read where it lies, how far from the beginning of the block
    it begins; or None, if nothing goes along.
    """

    row: int
    header: bytes
    piece: Any
    nbytes: int


class _Heard(NamedTuple):
    """What came into some headers: for each other member where it is named what it calls, where it is said what comes,
    and what; the blocks of all members, where they lie in headers, and how those of arenas are found; what makes the
    result of them, and the bound operator."""

    said: list[tuple[memoryview, memoryview, bytes]]
    blocks: list[np.ndarray | None]
    placed: list[tuple[int, Any, Shape, Shape, memoryview]]
    make: Make
    bound: Any


class RepeatedPlan:
    """A collective of a group whose blocks go along with the headers, as often as it is called with such a block.

    large: whether some are to be read where they lie. nbytes: of the longest header.
    """

    __slots__ = ("call", "dtype", "group", "heard", "large", "mine", "name", "nbytes", "out", "parts", "plan", "shapes")

    def __init__(self, call: Call, plan: Plan, x: np.ndarray):
        self.call, self.plan, self.group, self.dtype = call, plan, plan.group, x.dtype
        self.name = name_of(call, 0, 0)
        group = plan.group
        parts = [part_of(x, part) for part in plan.parts]
        self.shapes = [None if part is None else part.shape for part in parts]
        self.mine = plan.parts[group.index]
        self.parts = [
            self._part(row, x, part, plan.parts[k])
            for k, (row, part) in enumerate(zip(group.rows, parts, strict=True))
            if k != group.index
        ]
        self.large = any(type(part.piece) is int for part in self.parts)
        self.nbytes = max(8 + len(part.header) + part.nbytes for part in self.parts)
        self.out: dict[Headers, list[tuple[memoryview, memoryview, bytes, Any]]] = {}
        self.heard: dict[Headers, _Heard] = {}

    def _part(self, row: int, x: np.ndarray, part: np.ndarray | None, piece: Any) -> _Part:
        op = self.call.op
        if part is None:
            return _Part(row, told(op, None, False), None, 0)
        if part.nbytes <= INLINE_LIMIT:
            return _Part(row, told(op, part.shape, False), piece, part.nbytes)
        return _Part(row, told(op, part.shape, False, part.strides), address(part) - address(x), 8)

    def __call__(self, comm: Participant, x: np.ndarray, long: RunPlan) -> tuple[Any, Any]:
        """The new block, and the bound operator. long: how it goes by the verbs, with what was heard, where others
        bring other blocks."""
        transport, call, group = comm.transport, self.call, self.group
        channel = transport.channels.get(group.ordered)
        if channel is None:
            return long(comm, x)
        begin = 0
        if self.large:
            begin = None if channel.mail is None else channel.mail.place(x)
            if begin is None:
                return long(comm, x)
        comm.number += 1
        name = stamped(self.name, transport.runs, comm.number)
        said = channel.said
        for words, place, header, piece in self.out.get(said) or self._places(said):
            words[0] = name
            if piece is ...:
                place[:] = header + x.tobytes()
            elif piece is None:
                place[:] = header
            elif type(piece) is int:
                place[:] = header + (begin + piece).to_bytes(8, "little")
            else:
                place[:] = header + x[piece].tobytes()
        transport.swap(channel, self.nbytes, call)
        heard = channel.heard
        known = self.heard.get(heard)
        if known is not None:
            for words, place, header in known.said:
                if words[0] != name or place != header:
                    known = None
                    break
        if known is None:
            comm.agree(group, call, channel, name)
            known = self._learn(heard)
            if known is None:
                try:
                    comm.early = heard
                    return long(comm, x)
                finally:
                    comm.early = None
        transport.last = call
        _, those, placed, make, bound = known
        blocks: list[Any] = those.copy()
        for k, window, shape, strides, place in placed:
            blocks[k] = np.ndarray(shape, self.dtype, window, place[0], strides)
        mine = self.mine
        if mine is ...:
            blocks[group.index] = x
        elif mine is not None:
            blocks[group.index] = x[mine]
        return make(x, blocks), bound

    def _places(self, said: Headers) -> list[tuple[memoryview, memoryview, bytes, Any]]:
        """Where to write, in headers that go out, and what; and what goes along."""
        if len(self.out) >= _TABLES:
            self.out.clear()
        found = self.out[said] = [
            (said.words[row], said.bytes[row][8 : 8 + len(header) + nbytes], header, piece)
            for row, header, piece, nbytes in self.parts
        ]
        return found

    def _learn(self, heard: Headers) -> _Heard | None:
        """What is to be known of headers that came. None where not all that comes has come with them."""
        group, said, blocks, placed = self.group, [], [], []
        shapes: list[Shape | None] = [
            self.shapes[k] if k == group.index else heard.shape(row) for k, row in enumerate(group.rows)
        ]
        for k, (row, shape) in enumerate(zip(group.rows, shapes, strict=True)):
            block = None
            if k != group.index:
                n = len(shape or ())
                if shape is not None and heard.placed(row):
                    strides = tuple(heard.signed[row][2 + n : 2 + 2 * n])
                    placed.append((k, heard.windows[row], shape, strides, heard.words[row][2 + 2 * n : 3 + 2 * n]))
                    n *= 2
                elif shape is not None:
                    if prod(shape) * self.dtype.itemsize > INLINE_LIMIT:
                        return None
                    block = heard.there(row, shape, self.dtype)
                place = heard.bytes[row][8 : 16 + 8 * n]
                said.append((heard.words[row], place, bytes(place)))
            blocks.append(block)
        if len(self.heard) >= _TABLES:
            self.heard.clear()
        make, _, bound = self.plan.complete_repeated(shapes)
        found = self.heard[heard] = _Heard(said, blocks, placed, make, bound)
        return found
