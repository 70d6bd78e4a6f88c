"""Collectives whose blocks go with the headers, from the second call of the same line on.

Such a collective is complete when the headers have been exchanged. If all blocks have the same shapes as before, only
their contents change: their receivers, their places and the way they are combined are cached. The bytes sent are the
same as without this cache.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from spmd.kernels.memory.pool import address
from spmd.transport.call import Call, Shape
from spmd.transport.plan import Make, Plan, RunPlan, part_of
from spmd.transport.processes.announce import HeaderComm
from spmd.transport.processes.headers import INLINE_LIMIT, Headers, call_name, numbered, pack_header

__all__ = ["RepeatedPlan"]

_TABLES_MAX = 4
"""The most cached tables: a channel alternates between up to three headers."""


class _Part(NamedTuple):
    """The message to one member: its row, the header, the piece that follows, and the bytes of that piece.

    piece: the index of a part of the block; for a part in shared memory its offset from the start of the block; None if
    nothing follows.
    """

    row: int
    header: bytes
    piece: Any
    nbytes: int


class _IncomingTable(NamedTuple):
    """The blocks that some incoming headers hold.

    expected: per other member, views of the words for the name and for the shape, and the bytes expected there. blocks:
    per member, a view of its block in the headers. shared_blocks: member, window, shape, strides and place of each
    block in shared memory. make: computes the result from the blocks. bound: the bound operator.
    """

    expected: list[tuple[memoryview, memoryview, bytes]]
    blocks: list[np.ndarray | None]
    shared_blocks: list[tuple[int, Any, Shape, Shape, memoryview]]
    make: Make
    bound: Any


class RepeatedPlan:
    """A collective whose blocks go with the headers, for blocks of one shape.

    large: whether some parts are read from shared memory.
    """

    __slots__ = (
        *("call", "dtype", "group", "incoming_tables", "large", "name", "outgoing_tables", "own_part", "parts", "plan"),
        "shapes",
    )

    def __init__(self, call: Call, plan: Plan, x: np.ndarray):
        self.call, self.plan, self.group, self.dtype = call, plan, plan.group, x.dtype
        self.name = call_name(call)
        group = plan.group
        parts = [part_of(x, part) for part in plan.parts]
        self.shapes = [None if part is None else part.shape for part in parts]
        self.own_part = plan.parts[group.index]
        self.parts = [
            self._part(row, x, part, plan.parts[k])
            for k, (row, part) in enumerate(zip(group.rows, parts, strict=True))
            if k != group.index
        ]
        self.large = any(type(part.piece) is int for part in self.parts)
        self.outgoing_tables: dict[Headers, list[tuple[memoryview, memoryview, bytes, Any]]] = {}
        self.incoming_tables: dict[Headers, _IncomingTable] = {}

    def _part(self, row: int, x: np.ndarray, part: np.ndarray | None, piece: Any) -> _Part:
        op = self.call.op
        if part is None:
            return _Part(row, pack_header(op, None, False), None, 0)
        if part.nbytes <= INLINE_LIMIT:
            return _Part(row, pack_header(op, part.shape, False), piece, part.nbytes)
        return _Part(row, pack_header(op, part.shape, False, part.strides), address(part) - address(x), 8)

    def __call__(self, comm: HeaderComm, x: np.ndarray, general_run: RunPlan) -> tuple[Any, Any]:
        """The new block, and the bound operator. general_run: runs the plan if blocks of others have changed shape."""
        transport, call, group = comm.transport, self.call, self.group
        channel = transport.channels.get(group.ordered)
        if channel is None:
            return general_run(comm, x)
        begin = 0
        if self.large:
            mailbox = channel.mailbox
            begin = None if mailbox is None else mailbox.place(x)
            if begin is None:
                copy = None if mailbox is None else mailbox.placed_copy(x)
                if copy is None:
                    return general_run(comm, x)
                begin, x = copy
        comm.number += 1
        name = numbered(self.name, transport.runs, comm.number, comm.line)
        outgoing = channel.outgoing
        for words, place, header, piece in self.outgoing_tables.get(outgoing) or self._places(outgoing):
            words[0] = name
            if piece is ...:
                place[:] = header + x.tobytes()
            elif piece is None:
                place[:] = header
            elif type(piece) is int:
                place[:] = header + (begin + piece).to_bytes(8, "little")
            else:
                place[:] = header + x[piece].tobytes()
        transport.swap(channel, call)
        incoming = channel.incoming
        table = self.incoming_tables.get(incoming)
        if table is not None:
            for words, place, header in table.expected:
                if words[0] != name or place != header:
                    table = None
                    break
        if table is None:
            comm.agree(group, call, channel, name)
            table = self._read_table(incoming)
            if table is None:
                try:
                    comm.early = incoming
                    return general_run(comm, x)
                finally:
                    comm.early = None
        transport.last_call = call
        _, header_blocks, shared_blocks, make, bound = table
        blocks: list[Any] = header_blocks.copy()
        for k, window, shape, strides, place in shared_blocks:
            blocks[k] = np.ndarray(shape, self.dtype, window, place[0], strides)
        own = self.own_part
        if own is ...:
            blocks[group.index] = x
        elif own is not None:
            blocks[group.index] = x[own]
        return make(x, blocks), bound

    def _places(self, outgoing: Headers) -> list[tuple[memoryview, memoryview, bytes, Any]]:
        """Per member: views of the outgoing headers for the name and the rest, the header, and the piece after it."""
        if len(self.outgoing_tables) >= _TABLES_MAX:
            self.outgoing_tables.clear()
        places = self.outgoing_tables[outgoing] = [
            (outgoing.words[row], outgoing.bytes[row][8 : 8 + len(header) + nbytes], header, piece)
            for row, header, piece, nbytes in self.parts
        ]
        return places

    def _read_table(self, incoming: Headers) -> _IncomingTable | None:
        """The table of these headers; None if not all blocks have come with them."""
        group, expected, blocks, shared_blocks = self.group, [], [], []
        shapes: list[Shape | None] = [
            self.shapes[k] if k == group.index else incoming.shape(row) for k, row in enumerate(group.rows)
        ]
        for k, (row, shape) in enumerate(zip(group.rows, shapes, strict=True)):
            block = None
            if k != group.index:
                n = len(shape or ())
                if shape is not None and incoming.is_shared(row):
                    strides = tuple(incoming.signed[row][2 + n : 2 + 2 * n])
                    shared_blocks.append(
                        (k, incoming.windows[row], shape, strides, incoming.words[row][2 + 2 * n : 3 + 2 * n])
                    )
                    n *= 2
                elif shape is not None:
                    if prod(shape) * self.dtype.itemsize > INLINE_LIMIT:
                        return None
                    block = incoming.block_view(row, shape, self.dtype)
                place = incoming.bytes[row][8 : 16 + 8 * n]
                expected.append((incoming.words[row], place, bytes(place)))
            blocks.append(block)
        if len(self.incoming_tables) >= _TABLES_MAX:
            self.incoming_tables.clear()
        make, _, bound = self.plan.complete_repeated(shapes)
        table = self.incoming_tables[incoming] = _IncomingTable(expected, blocks, shared_blocks, make, bound)
        return table
