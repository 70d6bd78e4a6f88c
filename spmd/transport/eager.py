"""Small blocks between processes, from the second time on: a line that has called the same before.

What goes along with the headers is over when all have told each other what they call. But for the blocks themselves all
is then as it was the last time, if the others bring blocks of the same shapes again: what goes to whom, where in the
headers the blocks lie that come, and what makes the result of them. On the wire nothing differs from the long way.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spmd.transport.base import Call, Eager, Shape, Way
from spmd.transport.headers import RIDES, Headers, name_of, told

if TYPE_CHECKING:
    from spmd.transport.verbs import ProcessComm

__all__ = ["Repeated"]

_TABLES = 4
"""Headers that are known: a channel has up to three sides. Those of channels that are no more are forgotten."""


class _Heard(NamedTuple):
    """What came into some headers: for each other member where that is said, and what; the blocks of all members, where
    they lie; and what makes the result of them."""

    said: list[tuple[memoryview, bytes]]
    blocks: list[np.ndarray | None]
    make: Callable[[np.ndarray, list[Any]], np.ndarray]


class Repeated:
    """A collective of a group whose blocks go along with the headers, as often as it is called with such a block."""

    __slots__ = ("call", "dtype", "group", "heard", "mine", "nbytes", "out", "parts", "shapes", "way")

    def __init__(self, call: Call, way: Eager, x: np.ndarray):
        self.call, self.way, self.group, self.dtype = call, way, way.group, x.dtype
        group = way.group
        parts = [None if piece is None else x[piece] for piece in way.parts]
        self.shapes = [None if part is None else part.shape for part in parts]
        self.mine = way.parts[group.index]
        sizes = [0 if part is None else part.nbytes for part in parts]
        self.parts = [
            (row, told(call.op, self.shapes[k], False), way.parts[k], sizes[k])
            for k, row in enumerate(group.rows)
            if k != group.index
        ]
        self.nbytes = max(8 + len(header) + nbytes for _, header, _, nbytes in self.parts)
        self.out: dict[Headers, list[tuple[memoryview, memoryview, bytes, Any]]] = {}
        self.heard: dict[Headers, _Heard] = {}

    def __call__(self, comm: ProcessComm, x: np.ndarray, long: Way) -> np.ndarray:
        """The new block. long: how it goes by the verbs, with what was heard, where others bring other blocks."""
        transport = comm.transport
        channel = transport.channels.get(self.group.ordered)
        if channel is None:
            return long(comm, x)
        comm.number += 1
        name = name_of(self.call, transport.runs, comm.number)
        said = channel.said
        for words, place, header, piece in self.out.get(said) or self._places(said):
            words[0] = name
            if piece is None:
                place[:] = header
            else:
                place[:] = header + (x if piece is ... else x[piece]).tobytes()
        heard = comm.swap(self.group, self.call, channel, name, self.nbytes)
        known = self.heard.get(heard)
        if known is not None:
            for place, header in known.said:
                if place != header:
                    known = None
                    break
        if known is None:
            known = self._learn(heard)
            if known is None:
                try:
                    comm.early = heard
                    return long(comm, x)
                finally:
                    comm.early = None
        blocks = known.blocks.copy()
        if self.mine is not None:
            blocks[self.group.index] = x if self.mine is ... else x[self.mine]
        return known.make(x, blocks)

    def _places(self, said: Headers) -> list[tuple[memoryview, memoryview, bytes, Any]]:
        """Where to write, in headers that go out, and what; and the index of the part that goes along."""
        if len(self.out) >= _TABLES:
            self.out.clear()
        found = self.out[said] = [
            (said.words[row], said.bytes[row][8 : 8 + len(header) + nbytes], header, piece)
            for row, header, piece, nbytes in self.parts
        ]
        return found

    def _learn(self, heard: Headers) -> _Heard | None:
        """What is to be known of headers that came. None where not all that comes has come with them."""
        group, said, blocks = self.group, [], []
        shapes: list[Shape | None] = [
            self.shapes[k] if k == group.index else heard.shape(row) for k, row in enumerate(group.rows)
        ]
        for k, (row, shape) in enumerate(zip(group.rows, shapes, strict=True)):
            block = None
            if k != group.index:
                if shape is not None:
                    if prod(shape) * self.dtype.itemsize > RIDES:
                        return None
                    block = heard.there(row, shape, self.dtype)
                place = heard.bytes[row][8 : 16 + 8 * len(shape or ())]
                said.append((place, bytes(place)))
            blocks.append(block)
        if len(self.heard) >= _TABLES:
            self.heard.clear()
        found = self.heard[heard] = _Heard(said, blocks, self.way.maker(tuple(shapes)))
        return found
