"""Workers that are processes: what is the same whichever library moves the bytes between them.

Every collective begins with a header (`headers.py`): a small message in which each member says to each what it calls,
and the shape of what it is going to send. It is one and the same movement for all verbs, so that workers that disagree
learn it there, before any data moves; and receivers learn the sizes of what comes. Sums are taken here, in the order of
the members, because the libraries only advise an order, if that.

A process that waits looks at the others every tenth of a second (`Board`): workers that wait for each other in
different groups, and such that wait for one that has left, learn it too. SPMD_CHECK=0 leaves out what can be left out:
the headers of sums, whose shapes are equal by contract, and the looking.

An engine is a `Channel`, which moves bytes among some processes, and a `ProcessTransport`, which makes channels and
waits: `mpi.py` is that of mpi4py, `torch.py` that of torch.distributed.
"""

from __future__ import annotations

import contextvars
import json
import secrets
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from spmd import kernels
from spmd.device import contiguous, copied, joined, put
from spmd.errors import MismatchError, class_name
from spmd.kernels import buffers
from spmd.kernels.cpu.moves import places
from spmd.layout import block_sizes, offsets
from spmd.transport.base import (
    Boxes,
    Call,
    Comm,
    Eager,
    Group,
    Handle,
    Join,
    Outcome,
    Ready,
    Shape,
    Then,
    Transport,
    mismatch,
    raised_by,
    sealed,
)
from spmd.transport.blas import blas_threads, core_numbers, share_of_cores
from spmd.transport.board import Board, machine
from spmd.transport.detect import end_the_job_on_error
from spmd.transport.eager import Repeated
from spmd.transport.headers import MAX_NDIM, RIDES, Headers, digest, name_of, told
from spmd.transport.mailbox import MEMBERS, Mailbox, create, ordered_stores
from spmd.transport.patience import Patience, checks_are_on, let_others, like, time_limit

__all__ = ["Channel", "ProcessComm", "ProcessTransport", "pieces", "start"]

_APART = 1 << 18
"""Bytes from which a block of several is sent by itself, from where it lies; smaller ones are sent together."""
_SMALL = 1 << 15
"""Bytes up to which an all-reduce sends whole blocks to everyone: one message time in place of two."""


_HOST = np.dtype([("name", "i8"), ("cores", "u1", 4096)])
"""What a process tells of its host: a number for its name, and the cores that it may use."""


def _bytes(x: np.ndarray) -> np.ndarray:
    return contiguous(x).reshape(-1).view(np.uint8)


def _closed(room: np.ndarray, block: np.ndarray) -> np.ndarray:
    """A block that lies in a room, as one that nobody writes to, by neither name."""
    sealed(room)
    return sealed(block)


def _split(buffer: np.ndarray, shapes: Sequence[Shape], dtype) -> list[np.ndarray]:
    """The blocks of these shapes that lie one after the other in a buffer of bytes."""
    parts = pieces(buffer, [prod(s) * dtype.itemsize for s in shapes])
    return [part.view(dtype).reshape(s) for part, s in zip(parts, shapes, strict=True)]


def pieces(buffer: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """What lies one after the other in a buffer of bytes."""
    return [buffer[a:b] for a, b in pairwise(offsets(sizes))]


class Channel(ABC):
    """Some processes in an order, among which bytes move.

    Each method starts a movement and returns its requests: a list, which the transport's `arrive` waits for. Buffers
    are C-contiguous arrays of bytes, and sizes are in bytes; nobody may touch the buffers before all has arrived.

    me: the place of this process; others: those of all others. said: the headers that go out next; heard: those that
    came last. mail: where headers go without a message, if they do. meeting: the number of the group on the board, and
    its ranks.
    """

    __slots__ = ("heard", "mail", "me", "meeting", "others", "said")

    def __init__(self, me: int, size: int):
        self.me = me
        self.others = [k for k in range(size) if k != me]
        self.said, self.heard = Headers.of(size), Headers.of(size)
        self.mail: Mailbox | None = None
        self.meeting: tuple[int, Shape] = 0, ()

    @abstractmethod
    def swap(self, nbytes: int) -> list[Any]:
        """The headers in `said`, of at most so many bytes, go to the others, whose come into `heard`."""

    @abstractmethod
    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray]) -> list[Any]:
        """sends[k] goes to member k, receives[k] takes what member k sends here. None of them is this process."""

    def all_gather(self, send: np.ndarray, receive: np.ndarray, sizes: Sequence[int]) -> list[Any]:
        """What each member sends goes to everyone; receive takes the pieces, of these sizes, one after the other."""
        rooms = pieces(receive, sizes)
        requests = self.exchange(dict.fromkeys(self.others, send), {k: rooms[k] for k in self.others})
        rooms[self.me][...] = send  # while the others are under way
        return requests

    def broadcast(self, buffer: np.ndarray, root: int) -> list[Any]:
        """The root's buffer goes into that of all others."""
        if self.me != root:
            return self.exchange({}, {root: buffer})
        return self.exchange(dict.fromkeys(self.others, buffer), {})

    def gather(self, send: np.ndarray, rows: np.ndarray | None, root: int) -> list[Any]:
        """What each member sends, of one size, comes into its row at the root; rows is None elsewhere."""
        if rows is None:
            return self.exchange({root: send}, {})
        requests = self.exchange({}, {k: rows[k] for k in self.others})
        rows[root] = send
        return requests


class Pending:
    """Requests under way, and what is to be done when they have arrived. Their buffers live until then."""

    __slots__ = ("buffers", "call", "finish", "requests", "transport", "value")

    def __init__(self, transport: ProcessTransport, requests: list[Any], buffers: Any, finish: Callable[[], Any]):
        self.requests: list[Any] | None = requests
        self.buffers = buffers
        self.finish = finish
        self.transport = transport
        self.call = transport.last
        self.value: Any = None
        transport.flying.add(self)

    def wait(self) -> Any:
        if self.requests is not None:
            self.transport.arrive(self.requests, self.call)
            self.transport.flying.discard(self)
            self.requests = self.buffers = None
            self.value = self.finish()
            del self.finish
        return self.value


class _End(Call):
    """The side of a worker that has left the map, where others still call."""

    __slots__ = ("last",)

    def __init__(self, x: np.ndarray, last: Call | None):
        super().__init__("the end of the map", (), x.dtype, x.shape)
        self.last = last

    def __str__(self) -> str:
        return self.op

    @property
    def source(self) -> str:
        return f"after {self.last} {self.last.source}" if self.last is not None else "without any call before"


class _Shaped(NamedTuple):
    """A block of which only the shape is told."""

    shape: Shape
    nbytes: int = 0


class ProcessComm(Comm):
    """This process's view.

    early: the headers that have come for the verb that is about to be called.
    """

    def __init__(self, transport: ProcessTransport):
        self.transport = transport
        self.worker = transport.local[0]
        self.early: Headers | None = None

    def repeated(self, call: Call, way: Eager, x: np.ndarray) -> Repeated | None:
        most = self.most_riding(call, x)
        if way.group.size == 1 or not self.transport.checks or x.ndim > MAX_NDIM:
            return None
        rides = all(
            piece is None or x[piece].nbytes <= most for k, piece in enumerate(way.parts) if k != way.group.index
        )
        return Repeated(way.group, call, way, x) if rides else None

    def room(self, nbytes: int, call: Call, like: Any) -> Any:
        """Memory for what comes to a collective to which this worker brings `like`."""
        return buffers.empty(nbytes, np.uint8)

    def ready(self) -> None:
        """What is to be sent has been computed."""

    def most_riding(self, call: Call, like: Any) -> int:
        """Bytes up to which blocks travel in the header, of a collective to which this worker brings `like`."""
        return RIDES

    def _pending(self, requests: list[Any], buffers: Any, finish: Callable[[], Any]) -> Pending:
        return Pending(self.transport, requests, buffers, finish)

    def meet(self, group: Group, call: Call, shapes: Iterable[Shape | None]) -> list[Shape | None]:
        """Tell every member what is called and the shape of what comes for it (None: nothing), and learn theirs.

        Raises MismatchError on all members where they call different things.
        """
        mine = list(shapes)
        blocks = [None if shape is None else _Shaped(shape) for shape in mine]
        return self._shapes_in(self._tell_each(group, call, blocks.__getitem__, -1), group, mine[group.index])

    def _shapes_in(self, heard: Headers, group: Group, mine: Shape | None) -> list[Shape | None]:
        """The shapes of what comes from each member, where this one keeps one of shape `mine`."""
        me = group.index
        return [mine if k == me else heard.shape(row) for k, row in enumerate(group.rows)]

    def _begin(self, group: Group, call: Call) -> tuple[Channel, int, bool]:
        """The channel of a group; the first word of its headers, what is called; and whether the block is
        differentiated."""
        transport = self.transport
        self.number += 1
        channel = transport.channels.get(group.ordered) or transport.channel(group.ordered, call)
        return channel, name_of(call, transport.runs, self.number), call.asks is not None and call.asks[0]

    def _tell(self, group: Group, call: Call, shape: Shape | None, rider: np.ndarray | None = None) -> Headers:
        """Tell all members what is called, and what comes, the same to everyone; and hear theirs.

        rider: a block of at most RIDES bytes, that goes along.
        """
        early, self.early = self.early, None
        if early is not None:
            return early
        channel, name, asks = self._begin(group, call)
        header = told(call.op, shape, asks)
        if rider is not None:
            header += rider.tobytes()
        said, end = channel.said, 8 + len(header)
        for row in channel.others:
            said.words[row][0] = name
            said.bytes[row][8:end] = header
        return self.swap(group, call, channel, name, end)

    def _tell_each(self, group: Group, call: Call, part: Callable[[int], Any], most: int) -> Headers:
        """Tell each member what is called, and the shape of what comes for it; and hear theirs.

        part(k): what comes for member k, None if nothing does; it goes along if it has at most so many bytes.
        """
        early, self.early = self.early, None
        if early is not None:
            return early
        channel, name, asks = self._begin(group, call)
        said, me, longest = channel.said, channel.me, 0
        for k, row in enumerate(group.rows):
            if row == me:
                continue
            x = part(k)
            header = told(call.op, None if x is None else x.shape, asks)
            if x is not None and x.nbytes <= most:
                header += x.tobytes()
            end = 8 + len(header)
            said.words[row][0] = name
            said.bytes[row][8:end] = header
            if end > longest:
                longest = end
        return self.swap(group, call, channel, name, longest)

    def swap(self, group: Group, call: Call, channel: Channel, name: int, nbytes: int) -> Headers:
        """Send the headers that were written, and give those that come: they are read before the next call."""
        transport = self.transport
        transport.swap(channel, nbytes, call)
        heard = channel.heard
        for row in channel.others:
            if heard.words[row][0] != name:
                names = [name if row == channel.me else heard.words[row][0] for row in group.rows]
                error = self._mismatch(group, call, names)
                transport.fail(error)
                raise error
        transport.last = call
        if call.asks is not None:
            call.asks[0] = call.asks[0] or any(map(heard.asks, channel.others))
        return heard

    def _mismatch(self, group: Group, call: Call, names: Sequence[int]) -> MismatchError:
        """What to raise: the members, who all know by now that they disagree, tell each other their calls and lines."""
        channel = self.transport.channel(group.ordered, call)
        mine = np.array([str(call).encode()[:400], call.source.encode()[-400:], str(self.number).encode()], "S400")
        texts = np.empty((group.size, 3), "S400")
        sizes = [mine.nbytes] * group.size
        self.transport.wait_for(channel.all_gather(mine.view(np.uint8), texts.reshape(-1).view(np.uint8), sizes))
        me = group.index
        other = me if names[me] != names[0] else next(k for k, name in enumerate(names) if name != names[0])
        first, second = (
            (self.transport.describe(group.members[k]), text.decode(errors="replace"), line.decode(), int(number))
            for k in (0, other)
            for text, line, number in [texts[group.rows[k]].tolist()]
        )
        error = mismatch(first, second)
        error.ranks = tuple(self.transport.ranks[m] for m in group.members if self._is_here(m))  # type: ignore[attr-defined]
        return error

    def _is_here(self, member: int) -> bool:
        board = self.transport.board
        return board is not None and board.here(self.transport.ranks[member])

    def _agree(self, group: Group, call: Call, x: np.ndarray) -> None:
        """Meet for the check alone: where all bring one shape, nobody has to learn any."""
        if self.transport.checks:
            self._tell(group, call, x.shape)

    def _shapes(self, group: Group, call: Call) -> Handle:
        if group.size == 1:
            return Ready([call.shape])
        return Ready(self._shapes_in(self._tell(group, call, call.shape), group, call.shape))

    def _all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        if group.size == 1:
            return Ready(sealed(x))
        return self._agreed_sum(group, call, x, how)

    def _agreed_sum(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        if self.transport.checks and x.nbytes <= self.most_riding(call, x):
            blocks = self._tell(group, call, x.shape, x).beside(x, group.rows, group.index, (x.shape,) * group.size)
            return Ready(sealed(kernels.of(x).combine(blocks, how)))
        self._agree(group, call, x)
        return self._reduce_blocks(group, call, x, how)

    def _reduce_blocks(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        """The sum of blocks whose shapes are known to be equal."""
        channel, n = self.transport.channel(group.members), group.size
        send = _bytes(x)
        if n == 2:  # Whole blocks are as many bytes as chunks there and back, and one message time.
            other = 1 - group.index
            theirs = self.room(x.nbytes, call, x)

            def of_two() -> np.ndarray:
                came = theirs.view(x.dtype).reshape(x.shape)
                return _closed(theirs, kernels.of(x).combine([x, came] if other else [came, x], how, came))

            self.ready()
            return self._pending(channel.exchange({other: send}, {other: theirs}), (send, theirs), of_two)
        if x.nbytes <= _SMALL:
            blocks = self.room(n * x.nbytes, call, x).reshape(n, x.nbytes)

            def small() -> np.ndarray:
                return sealed(kernels.of(x).combine([b.view(x.dtype).reshape(x.shape) for b in blocks], how))

            self.ready()
            return self._pending(channel.all_gather(send, blocks.reshape(-1), [x.nbytes] * n), (send, blocks), small)
        sizes, me = [k * x.itemsize for k in block_sizes(x.size, n)], group.index
        parts, others = pieces(send, sizes), [k for k in range(n) if k != me]
        chunks = self.room((n - 1) * sizes[me], call, x).reshape(n - 1, sizes[me])

        def large() -> np.ndarray:
            everyones = [c.view(x.dtype) for c in (*chunks[:me], parts[me], *chunks[me:])]
            mine = kernels.of(x).combine(everyones, how)
            out, send = self.room(x.nbytes, call, x), _bytes(mine)
            self.ready()
            self.transport.arrive(channel.all_gather(send, out, sizes), call, (send, out))
            return _closed(out, out.view(x.dtype).reshape(x.shape))

        self.ready()
        requests = channel.exchange({k: parts[k] for k in others}, dict(zip(others, chunks, strict=True)))
        return self._pending(requests, (send, chunks), large)

    def _all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray]) -> Handle:
        if group.size == 1 or not xs:
            return Ready([sealed(x) for x in xs])
        small = [k for k, x in enumerate(xs) if x.nbytes < _APART]
        if len(small) < len(xs):
            self._agree(group, call, xs[0])
        apart = {k: self._reduce_blocks(group, call, x, "sum") for k, x in enumerate(xs) if x.nbytes >= _APART}
        handle: Handle = Ready(None)
        if small:
            packed = joined([xs[k].reshape(-1) for k in small], 0)
            handle = (self._reduce_blocks if apart else self._agreed_sum)(group, call, packed, "sum")
        shapes = [x.shape for x in xs]
        at = offsets([prod(shapes[k]) for k in small])
        del xs  # what is packed is not kept

        def unpack(total: np.ndarray) -> list[np.ndarray]:
            found = {k: sent.wait() for k, sent in apart.items()}
            for j, k in enumerate(small):
                found[k] = total[at[j] : at[j + 1]].reshape(shapes[k])
            apart.clear()
            return [found[k] for k in range(len(shapes))]

        return Then(handle, unpack)

    def _reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        if group.size == 1:
            return Ready(sealed(parts[0]))
        mine = parts[group.index]

        def finish(xs: list[np.ndarray]) -> np.ndarray:
            xs[group.index] = mine
            # Of two, into what came: of more it would keep what came of all. What came in a header is not for that.
            into: Any = xs[1 - group.index] if len(xs) == 2 and mine.nbytes > RIDES else None
            total = kernels.of(mine).combine(xs, into=into)
            return sealed(total) if into is None else _closed(into.base, total)

        if self.transport.checks:
            most = self.most_riding(call, parts)
            if max([p.nbytes for p in parts]) <= most:
                heard = self._tell_each(group, call, parts.__getitem__, most)
                blocks = heard.beside(mine, group.rows, group.index, (mine.shape,) * group.size)
                return Ready(sealed(kernels.of(mine).combine(blocks)))
            return Then(self._agreed_swap(group, call, parts, own=False), finish)
        return Then(self._swapped(group, call, parts, [mine.shape] * group.size), finish)

    def _all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle:
        if group.size == 1:
            return Ready([sealed(x)])
        most, heard, shapes, counts = self._told_of(group, call, x)
        if max(counts) <= most:
            mine = sealed(copied(x) if call.lent else x)
            return Ready(heard.riders(mine, group.rows, group.index, shapes))
        return self._gathered(group, call, x, shapes, counts)

    def _all_gather_as(self, group: Group, call: Call, x: np.ndarray, join: Join) -> Handle:
        """Small blocks are joined from where they came."""
        if group.size == 1 or type(x) is not np.ndarray:
            return super()._all_gather_as(group, call, x, join)
        most, heard, shapes, counts = self._told_of(group, call, x)
        if max(counts) <= most:
            return Ready(join(heard.beside(x, group.rows, group.index, shapes), True))
        return Then(self._gathered(group, call, x, shapes, counts), join)

    def _told_of(self, group: Group, call: Call, x: np.ndarray) -> tuple[int, Headers, list[Shape], list[int]]:
        """Tell all members of a block; up to how many bytes blocks ride, the headers that came, and the shapes and
        bytes of all blocks."""
        most = self.most_riding(call, x)
        heard = self._tell(group, call, x.shape, x if x.nbytes <= most else None)
        shapes = [s or () for s in self._shapes_in(heard, group, x.shape)]
        return most, heard, shapes, [prod(s) * x.itemsize for s in shapes]

    def _gathered(
        self, group: Group, call: Call, x: np.ndarray, shapes: Sequence[Shape], counts: Sequence[int]
    ) -> Handle:
        """An all-gather of blocks whose shapes are known."""
        send = _bytes(x)
        receive = self.room(sum(counts), call, x)
        self.ready()
        requests = self.transport.channel(group.members).all_gather(send, receive, counts)
        return self._pending(requests, (send, receive), lambda: _split(sealed(receive), shapes, x.dtype))

    def _all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        if group.size == 1:
            return Ready([sealed(p) for p in parts])
        return self._agreed_swap(group, call, parts, own=True)

    def _all_to_all_as(self, group: Group, call: Call, parts: Sequence[np.ndarray], join: Join) -> Handle:
        """Small parts are joined from where they came."""
        most = self.most_riding(call, parts)
        if group.size == 1 or type(parts[0]) is not np.ndarray:
            return super()._all_to_all_as(group, call, parts, join)
        heard, coming = self._told_parts(group, call, parts, most)
        largest = max(max(map(prod, coming)) * parts[0].itemsize, max([p.nbytes for p in parts]))
        if largest <= most:
            return Ready(join(heard.beside(parts[group.index], group.rows, group.index, coming), True))
        return Then(self._swapped(group, call, parts, coming, heard, most, True), join)

    def _told_parts(
        self, group: Group, call: Call, parts: Sequence[np.ndarray], most: int
    ) -> tuple[Headers, list[Shape]]:
        """Tell each member of its part; the headers that came, and the shapes of what comes."""
        heard = self._tell_each(group, call, parts.__getitem__, most)
        return heard, [s or () for s in self._shapes_in(heard, group, parts[group.index].shape)]

    def _agreed_swap(self, group: Group, call: Call, parts: Sequence[np.ndarray], own: bool) -> Handle:
        """An all-to-all. own: whether the own part belongs to the result."""
        most = self.most_riding(call, parts)
        heard, coming = self._told_parts(group, call, parts, most)
        return self._swapped(group, call, parts, coming, heard, most, own)

    def _swapped(
        self,
        group: Group,
        call: Call,
        parts: Sequence[np.ndarray],
        shapes: Sequence[Shape],
        heard: Headers | None = None,
        most: int = -1,
        own: bool = False,
    ) -> Handle:
        """An all-to-all of parts when it is known what comes: of these shapes, in the headers up to so many bytes.
        own: whether the own part belongs to the result. Where it does not, who asked may write over what came as a
        message."""
        dtype, me = parts[0].dtype, group.index
        coming = [prod(s) * dtype.itemsize for s in shapes]
        if heard is not None and max(coming) <= most and max([p.nbytes for p in parts]) <= most:
            return Ready(heard.riders(sealed(parts[me]), group.rows, me, shapes))
        others = [k for k in range(group.size) if k != me]
        if not own:
            coming[me] = 0
            shapes = [(0,) if k == me else s for k, s in enumerate(shapes)]
        receive = self.room(sum(coming), call, parts)
        rooms = pieces(receive, coming)
        sends, receives = {}, {}
        for k in others:
            if parts[k].nbytes > most:
                sends[k] = _bytes(parts[k])
            if coming[k] > most:
                receives[k] = rooms[k]
            else:
                assert heard is not None
                rooms[k][...] = _bytes(heard.there(group.rows[k], shapes[k], dtype))
        self.ready()
        requests = self._messages(group, sends, receives)
        if own:  # while the others are under way
            rooms[me].view(dtype).reshape(parts[me].shape)[...] = parts[me]
        return self._pending(
            requests, (sends, receive), lambda: _split(sealed(receive) if own else receive, shapes, dtype)
        )

    def _messages(self, group: Group, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray]) -> list[Any]:
        """Blocks to some members, and from some, by the channel of the headers: it is there already, and so needs no
        member that has nothing to send."""
        rows = group.rows
        there, here = ({rows[k]: x for k, x in moved.items()} for moved in (sends, receives))
        return self.transport.channel(group.ordered).exchange(there, here)

    def _broadcast(self, group: Group, call: Call, x: np.ndarray | None, root: int) -> Handle:
        if group.size == 1:
            return Ready(sealed(x))
        most, dtype = self.most_riding(call, x), np.dtype(call.dtype)
        rides = x is not None and x.nbytes <= most
        heard = self._tell(group, call, None if x is None else x.shape, x if rides else None)
        if rides:
            return Ready(sealed(copied(x) if call.lent else x))
        shape = (heard.shape(group.rows[root]) if x is None else x.shape) or ()
        size = prod(shape) * dtype.itemsize
        if x is None and size <= most:
            return Ready(heard.rider(group.rows[root], shape, dtype))
        room = _bytes(x) if x is not None else self.room(size, call, x)
        self.ready()
        requests = self.transport.channel(group.members).broadcast(room, root)
        if x is not None:
            return self._pending(requests, room, lambda: sealed(x))
        return self._pending(requests, room, lambda: _closed(room, room.view(dtype).reshape(shape)))

    def _reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        if group.size == 1:
            return Ready(sealed(x))
        n, at_root = group.size, group.index == root
        if self.transport.checks:
            most = self.most_riding(call, x)
            heard = self._tell_each(group, call, lambda k: x if k == root else None, most)
            if x.nbytes <= most:
                blocks = heard.beside(x, group.rows, root, (x.shape,) * n) if at_root else None
                return Ready(None if blocks is None else sealed(kernels.of(x).combine(blocks)))
        send, blocks = _bytes(x), self.room(n * x.nbytes, call, x).reshape(n, x.nbytes) if at_root else None
        self.ready()
        requests = self.transport.channel(group.members).gather(send, blocks, root)

        def finish() -> np.ndarray | None:
            if blocks is None:
                return None
            return sealed(kernels.of(x).combine([b.view(x.dtype).reshape(x.shape) for b in blocks]))

        return self._pending(requests, (send, blocks), finish)

    def _exchange(
        self,
        group: Group,
        call: Call,
        sends: Mapping[int, np.ndarray],
        into: Mapping[int, np.ndarray] = MappingProxyType({}),
    ) -> Handle:
        """into[k]: contiguous memory where what member k sends is put, if it is of that shape and comes by itself."""
        me, most, found = group.index, self.most_riding(call, sends), {}
        if group.size == 1:
            return Ready({k: sealed(x) for k, x in sends.items()})
        heard = self._tell_each(group, call, sends.get, most)
        sent = {k: _bytes(x) for k, x in sends.items() if x.nbytes > most and k != me}
        dtype, received = np.dtype(call.dtype), {}
        for k, row in enumerate(group.rows):
            if k == me:
                if k in sends:
                    found[k] = sealed(sends[k])
                continue
            shape = heard.shape(row)
            if shape is None:
                continue
            nbytes = prod(shape) * dtype.itemsize
            if nbytes <= most:
                found[k] = heard.rider(row, shape, dtype)
            elif k in into and into[k].shape == shape:
                found[k], received[k] = into[k], _bytes(into[k])
            else:
                received[k] = self.room(nbytes, call, sends)
                found[k] = received[k].view(dtype).reshape(shape)
        if not sent and not received:
            return Ready(found)
        self.ready()
        requests = self._messages(group, sent, received)

        def finish() -> dict[int, np.ndarray]:
            for k, room in received.items():
                _closed(room, found[k])
            return found

        return self._pending(requests, (sent, received), finish)

    def _exchange_boxes(self, group: Group, call: Call, sends: Mapping[int, np.ndarray], boxes: Boxes) -> Handle:
        """What comes for contiguous boxes is received where it is to lie; the own part is copied meanwhile."""
        me, dtype = group.index, np.dtype(call.dtype)
        nbytes = prod(boxes.shape) * dtype.itemsize
        large = len(boxes.of) > 1 and nbytes > self.most_riding(call, sends) and type(boxes.like) is np.ndarray
        found, everything, apart = places(boxes.shape, tuple(boxes.of.values())) if large else ([], False, False)
        if not apart or boxes.adds:
            return super()._exchange_boxes(group, call, sends, boxes)
        room = self.room(nbytes, call, boxes.like)
        out = room.view(dtype).reshape(boxes.shape)
        if not everything:
            out.fill(0)
        views = {k: out[place] for k, place in zip(boxes.of, found, strict=True)}
        into = {k: view for k, view in views.items() if k != me and view.flags.c_contiguous}
        handle = self._exchange(group, call, {k: x for k, x in sends.items() if k != me}, into)
        if me in views:
            put(views[me], sends[me])

        def finish(received: dict[int, np.ndarray]) -> np.ndarray:
            for k, view in views.items():
                if k != me and received[k] is not view:
                    put(view, received[k])
            return _closed(room, out)

        return Then(handle, finish)


def start(of: str) -> Call:
    """What waits in the making of a map, and not in a collective."""
    return Call(of, (), np.dtype(bool), (), frame=sys._getframe())


class ProcessTransport(Transport):
    """Processes of a job, one worker each. Making it sends nothing.

    worker: this one. ranks: for each worker the rank of its process in the job. board: that of the job, or None where
    nothing is watched.
    """

    comm_type: type[ProcessComm] = ProcessComm
    places: Any = None
    """Where blocks lie on GPUs, if they do."""

    def __init__(self, worker: int, ranks: Shape, board: Callable[[], Board | None]):
        self.size = len(ranks)
        self.local = (worker,)
        self.everyone = Group((), (), tuple(range(self.size)), worker)
        self.describe: Callable[[int], str] = lambda worker: f"worker {worker}"
        self.ranks = ranks
        self.flying: set[Pending] = set()
        self.lost: list[Any] = []
        """Requests that nobody will wait for any more, and their buffers."""
        self.last: Call | None = None
        self.lock = threading.RLock()
        self.runs = 0
        self.comm = self.comm_type(self)
        self.failed = 0
        self.number = self._number_of("before the first map")
        self.broken = 0
        self.time_limit = time_limit()
        self.checks = checks_are_on()
        self.board = board() if self.checks and self.size > 1 else None
        self._threads: int | None = None
        self.channels: dict[Shape, Channel] = {}
        end_the_job_on_error()

    # What an engine does

    @abstractmethod
    def open(self, members: Shape) -> Channel:
        """The channel of some workers, in this order. All of them are here, or about to come."""

    @abstractmethod
    def greet(self, others: Sequence[int], number: int, call: Call) -> None:
        """Wait until these ranks come to the same meeting, of the group of this number: the board does not know those
        of other hosts."""

    @abstractmethod
    def wait_for(self, requests: list[Any]) -> None:
        """Wait for requests and look at nobody."""

    @abstractmethod
    def watch(self, requests: list[Any], call: Call | None) -> None:
        """Wait for requests, and look at the others meanwhile. Raises what was seen there (`Patience`)."""

    @staticmethod
    def has_come(requests: list[Any]) -> bool:
        """Whether requests have arrived within a moment, where that can be asked."""
        return not requests

    def progress(self) -> None:
        """Whatever is under way goes on, where an engine moves it only while it is called."""

    def connect(self) -> None:
        """All are about to run a map: an engine may make here what needs them all."""

    def leave(self, code: Any) -> None:
        """This worker leaves the program with sys.exit(code) while the others are in a map."""

    # What is the same for all

    def threads(self) -> int:
        """The BLAS threads of every worker: this host's usable cores over its workers, agreed by all."""
        if self._threads is None:
            self._threads = self._share_of_cores(start("the first map"))
        return self._threads

    def _share_of_cores(self, call: Call) -> int:
        channel = self.channel(self.everyone.members, call)
        self._gather(self.everyone.members, call)
        mine = np.zeros((), _HOST)
        mine["name"] = digest(machine())
        mine["cores"][list(core_numbers())] = 1
        all_of_them = np.empty(self.size, _HOST)
        sizes = [_HOST.itemsize] * self.size
        self.wait_for(channel.all_gather(_bytes(mine), all_of_them.view(np.uint8), sizes))
        shares = []
        for name in np.unique(all_of_them["name"]):
            here = all_of_them[all_of_them["name"] == name]
            cores = here["cores"].any(axis=0)  # A launcher may have bound each process to cores of its own.
            shares.append(share_of_cores(len(here), int(cores.sum())))
        return min(shares)

    def channel(self, members: Shape, call: Call | None = None) -> Any:
        """The channel of some workers, in this order, made when they first meet: in a call, or the last one."""
        found = self.channels.get(members)
        if found is None:
            self._gather(tuple(sorted(members)), call or self.last)
            found = self.open(members)
            found.meeting = self._group(members)
            if members == tuple(sorted(members)) and self._share_memory(members):
                self._open_mailbox(found, call or self.last)
            self.channels[members] = found
        return found

    def _share_memory(self, members: Shape) -> bool:
        """Whether headers of some workers, who are all here, may go through memory of their host: alike on all."""
        board = self.board
        if board is None or not 1 < len(members) <= MEMBERS or not ordered_stores():
            return False
        return all(board.here(self.ranks[m]) for m in members)

    def _open_mailbox(self, channel: Channel, call: Call | None) -> None:
        """Make a mailbox for a channel of headers, if all its members can. The first one makes a file, and takes it
        away again when all have it: it is there for a moment, and memory lasts as long as somebody has it."""
        assert self.board is not None
        size, first = len(channel.others) + 1, channel.me == 0
        path, mail = self.board.path, None
        name = secrets.token_bytes(8) if first else bytes(8)
        if first:
            path = path.with_name(f"{path.name}-{name.hex()}")
            try:
                create(path, size)
            except OSError:
                name = bytes(8)
        name = self._everyones(channel, name, call)[0]
        if any(name):
            path = self.board.path.with_name(f"{self.board.path.name}-{name.hex()}")
            with suppress(OSError, ValueError):
                mail = Mailbox(path, channel.me, size)
        have = self._everyones(channel, bytes([mail is not None]) * 8, call)
        if first:
            path.unlink(missing_ok=True)
        if mail is not None and all(map(any, have)):
            channel.mail, channel.said = mail, mail.said

    def _everyones(self, channel: Channel, mine: bytes, call: Call | None) -> list[bytes]:
        """Eight bytes of each member, by messages."""
        rows = np.empty((len(channel.others) + 1, 8), np.uint8)
        send = np.frombuffer(mine, np.uint8)
        self.arrive(channel.all_gather(send, rows.reshape(-1), [8] * len(rows)), call, (send, rows))
        return [row.tobytes() for row in rows]

    def _group(self, members: Shape) -> tuple[int, Shape]:
        """The number of the group of some workers, alike in all processes until a map fails, and their ranks."""
        ranks = tuple(self.ranks[m] for m in members)
        return digest("group", self.failed, tuple(sorted(ranks))) or 1, ranks

    def swap(self, channel: Channel, nbytes: int, call: Call) -> None:
        """Headers go to all members of a channel, and come from them: a meeting."""
        board, mail = self.board, channel.mail
        if board is None:
            self.wait_for(channel.swap(nbytes))
            return
        if self.broken == self.number:
            raise self._failed_before()
        board.come(*channel.meeting, call)
        try:
            if mail is not None:
                if self.flying:
                    self.progress()
                come = mail.swap(let_others)
                channel.said, channel.heard = mail.said, mail.heard
                if come:
                    return
                board.wait(self.number)
                Patience(self, call).until(mail.has_come, self.progress)
            else:
                requests = channel.swap(nbytes)
                if self.has_come(requests):
                    return
                board.wait(self.number)
                self.watch(requests, call)
        except BaseException as error:
            self._give_up(error, channel)
            raise
        board.go_on()

    def _failed_before(self) -> Exception:
        """The error that the map has failed with, where the body caught it: the others end the map with it."""
        assert self.board is not None
        return like(*self.board.broken(self.number, self.ranks) or (self.board.rank, "", ""))

    def _gather(self, members: Shape, call: Call | None) -> None:
        """Wait until all of these workers are here, before something is made that needs them all."""
        if self.board is None or call is None:
            return
        if self.broken == self.number:
            raise self._failed_before()
        number, ranks = self._group(members)
        self.board.come(number, ranks, call)
        self.board.wait(self.number)
        rank = self.board.rank
        if self.board.whole:
            try:
                Patience(self, call).until(lambda: not self.board.missing(rank))  # type: ignore[union-attr]
            except BaseException as error:
                if self.board.withdraw() or not isinstance(error, Exception):
                    self.fail(error)
                    raise
        else:
            try:
                self.greet([r for r in ranks if r != rank], number, call)
            except BaseException as error:
                self.fail(error)
                raise
        self.board.go_on()

    def fail(self, error: BaseException) -> None:
        """A map has failed here. Others that wait in it learn so, and fail alike; then all meet on new channels, for on
        the old ones something may be under way that will never end."""
        if self.board is not None:
            self.board.go_on()
        if self.board is not None and self.broken != self.number:
            self.broken = self.number
            self.failed += 1
            self.channels.clear()
            who = getattr(error, "peer", None) or self.describe(self.local[0])
            origin = getattr(error, "origin", self.board.rank)
            self.board.fail(self.number, origin, who, f"{class_name(error)}: {error}")

    def arrive(self, requests: list[Any], call: Call | None, buffers: Any = None) -> None:
        """Wait for requests; buffers are what they read and write."""
        if self.board is None:
            self.wait_for(requests)
            return
        try:
            if self.has_come(requests):
                return
            self.watch(requests, call)
        except BaseException as error:
            self._give_up(error, (requests, buffers))
            raise
        self.board.go_on()

    def _give_up(self, error: BaseException, waited: Any) -> None:
        """A wait ends with an error. What was waited for may come yet, and is written to."""
        self.lost.append(waited)
        self.fail(error)

    def run(self, body: Callable[[Comm], Any], scheduler: str, describe: Callable[[int], str]) -> Outcome:
        with self.lock:  # Of several threads one runs its map; should others come first elsewhere, it is a mismatch.
            return self._run(body, describe)

    def _run(self, body: Callable[[Comm], Any], describe: Callable[[int], str]) -> Outcome:
        self.describe = describe
        self.runs += 1
        self.number = self._number_of("a map")
        self.comm = self.comm_type(self)
        worker = self.local[0]
        started = time.perf_counter()
        threads = self.threads()
        self.connect()
        with blas_threads(threads):
            try:
                result = contextvars.copy_context().run(body, self.comm)
            except SystemExit as end:
                self.leave(end.code)
                raise
            except BaseException as error:
                if isinstance(error, Exception) and not isinstance(error, MismatchError) and not hasattr(error, "peer"):
                    raised_by(error, describe(worker))
                self.fail(error)
                raise
            finally:
                if self.broken == self.number:
                    self._end_of_map()
        return Outcome({worker: result}, time.perf_counter() - started, 0)

    def _end_of_map(self) -> None:
        """A map that has failed is over: what follows has another number, and its error is not of that."""
        self.number = self._number_of("after a map")

    def _number_of(self, stage: str) -> int:
        """What tells this stage of the job from all others, alike in every process. On boards, 0 stands for none."""
        return digest(stage, type(self).__name__, self.ranks, self.runs, self.failed) or 1

    def share(self, local: dict[int, Any]) -> dict[int, Any]:
        (value,) = local.values()
        said = json.dumps(value).encode()
        send = np.frombuffer(said, np.uint8)
        with self.lock:
            try:
                handle = self.comm._all_gather(self.everyone, _End(send, self.last), send)  # no part of the ledger
                blocks = handle.wait()
            finally:
                if self.broken == self.number:
                    self._end_of_map()
            self.last = None
        texts = [block.tobytes() for block in blocks]
        return {k: value if text == said else json.loads(text) for k, text in enumerate(texts)}  # most say the same
