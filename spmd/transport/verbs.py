"""The verbs of workers that are processes, in headers and messages: the same whichever library moves the bytes.

Every collective begins with a header (`headers.py`): a small message in which each member says to each what it calls,
and the shape of what it is going to send. It is one and the same movement for all verbs, so that workers that disagree
learn it there, before any data moves; and receivers learn the sizes of what comes. Small blocks travel in the header
itself. Sums are taken here, in the order of the members, because the libraries only advise an order, if that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spmd import kernels
from spmd.device import Adjoining, copied, joined, put
from spmd.errors import MismatchError
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
    Ready,
    Shape,
    Then,
    mismatch,
    sealed,
)
from spmd.transport.channel import Channel, bytes_of, pieces
from spmd.transport.eager import Repeated
from spmd.transport.headers import MAX_NDIM, RIDES, Headers, name_of, told

if TYPE_CHECKING:
    from spmd.transport.processes import ProcessTransport

__all__ = ["Pending", "ProcessComm"]

_APART = 1 << 18
"""Bytes from which a block of several is sent by itself, from where it lies; smaller ones are sent together."""
_SMALL = 1 << 15
"""Bytes up to which an all-reduce sends whole blocks to everyone: one message time in place of two."""


def _closed(room: np.ndarray, block: np.ndarray) -> np.ndarray:
    """A block that lies in a room, as one that nobody writes to, by neither name."""
    sealed(room)
    return sealed(block)


def _split(buffer: np.ndarray, shapes: Sequence[Shape], dtype) -> list[np.ndarray]:
    """The blocks of these shapes that lie one after the other in a buffer of bytes."""
    whole = buffer.view(dtype)
    parts = pieces(whole, [prod(s) for s in shapes])
    blocks = [part.reshape(s) for part, s in zip(parts, shapes, strict=True)]
    return Adjoining(blocks, whole) if type(buffer) is np.ndarray else blocks


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
        return Repeated(call, way, x) if rides else None

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
        send = bytes_of(x)
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
            out, send = self.room(x.nbytes, call, x), bytes_of(mine)
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
        send = bytes_of(x)
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
                sends[k] = bytes_of(parts[k])
            if coming[k] > most:
                receives[k] = rooms[k]
            else:
                assert heard is not None
                rooms[k][...] = bytes_of(heard.there(group.rows[k], shapes[k], dtype))
        self.ready()
        requests = self._messages(group, sends, receives)
        if own:  # while the others are under way
            rooms[me].view(dtype).reshape(parts[me].shape)[...] = parts[me]
        if own:
            return self._pending(requests, (sends, receive), lambda: _split(sealed(receive), shapes, dtype))
        return self._pending(requests, (sends, receive), lambda: [*_split(receive, shapes, dtype)])

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
        room = bytes_of(x) if x is not None else self.room(size, call, x)
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
        send, blocks = bytes_of(x), self.room(n * x.nbytes, call, x).reshape(n, x.nbytes) if at_root else None
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
        sent = {k: bytes_of(x) for k, x in sends.items() if x.nbytes > most and k != me}
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
                found[k], received[k] = into[k], bytes_of(into[k])
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
