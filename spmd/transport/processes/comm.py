"""The verbs of workers that are processes, in headers and messages: the same whichever library moves the bytes.

Every collective begins with a header (`headers.py`): a small message in which each member says to each what it calls,
and the shape of what it is going to send. It is one and the same movement for all verbs, so that workers that disagree
learn it there, before any data moves; and receivers learn the sizes of what comes. Small blocks travel in the header
itself. Large ones that lie in an arena (`arena.py`) stay there: the header says where, and whoever they are for reads
them at once, before the next header. What neither can be done with goes as a message. Sums are taken here, in the order
of the members, because the libraries only advise an order, if that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from spmd import kernels
from spmd.device import Adjoining, copied, joined, put
from spmd.kernels.cpu.moves import places
from spmd.kernels.memory import nontemporal, pool
from spmd.layout import block_sizes, offsets
from spmd.transport.call import Call, Group, Shape
from spmd.transport.handles import Done, Handle, Mapped, sealed
from spmd.transport.plan import PlaceBoxes, Plan
from spmd.transport.processes.base import Connections, Participant
from spmd.transport.processes.channel import Channel, bytes_of, pieces
from spmd.transport.processes.headers import MAX_NDIM, RIDES, Headers, name_of, told
from spmd.transport.processes.run_plan import Repeated

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

    def __init__(self, transport: Connections, requests: list[Any], buffers: Any, finish: Callable[[], Any]):
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


def _overwrite(to: np.ndarray, x: np.ndarray) -> None:
    """Copy x into memory that another process has read. Between cores that share no cache each line of it has to be
    asked back first, which takes up to 18 times as long as the copy; but not for lines that are written past the
    caches. Numba, which does that, is not imported for it."""
    if not ("numba" in sys.modules and nontemporal.possible(to.nbytes) and nontemporal.copy(to, x)):
        put(to, x)


class _Shaped(NamedTuple):
    """A block of which only the shape is told."""

    shape: Shape
    nbytes: int = 0


class ProcessComm(Participant):
    """This process's view."""

    def repeated(self, call: Call, plan: Plan, x: np.ndarray) -> Repeated | None:
        group, me = plan.group, plan.group.index
        if (
            plan.assumed_lengths is not None
            or not plan.repeats
            or not plan.reduces_at_once
            or group.size == 1
            or not self.transport.checks
            or x.ndim > MAX_NDIM
            or self.most_riding(call, x) < RIDES
        ):
            return None
        channel = self.transport.channels.get(group.ordered)
        if channel is None:
            return None
        large = [p for p in (x[i] for k, i in enumerate(plan.parts) if i is not None and k != me) if p.nbytes > RIDES]
        readable = channel.mail is not None and channel.mail.arena is not None
        # What is read where it lies is to be there: parts that are put together for it are not.
        served = not large or (readable and all(np.may_share_memory(p, x) for p in large))
        return Repeated(call, plan, x) if served else None

    def room(self, nbytes: int, call: Call, like: Any) -> Any:
        """Memory for what comes to a collective to which this worker brings `like`."""
        return pool.empty(nbytes, np.uint8)

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
        return self._shapes_in(self._tell_each(group, call, blocks.__getitem__, -1)[0], group, mine[group.index])

    def _shapes_in(self, heard: Headers, group: Group, mine: Shape | None) -> list[Shape | None]:
        """The shapes of what comes from each member, where this one keeps one of shape `mine`."""
        me = group.index
        return [mine if k == me else heard.shape(row) for k, row in enumerate(group.rows)]

    def _all_here(self, heard: Headers, group: Group, sizes: Sequence[int], most: int) -> bool:
        """Whether what comes from all other members, of so many bytes, came along with the headers."""
        me = group.index
        return all(k == me or heard.came(row, sizes[k], most) for k, row in enumerate(group.rows))

    def _begin(self, group: Group, call: Call) -> tuple[Channel, int, bool]:
        """The channel of a group; the first word of its headers, what is called; and whether the block is
        differentiated."""
        transport = self.transport
        self.number += 1
        channel = transport.channels.get(group.ordered) or transport.channel(group.ordered, call)
        return channel, name_of(call, transport.runs, self.number), call.asks is not None and call.asks[0]

    def _words(self, channel: Channel, call: Call, x: Any, most: int, asks: bool) -> tuple[bytes, bool]:
        """What is told to whom a block is for, and whether that is all: it has at most so many bytes, or others can
        read it where it lies."""
        if x is None:
            return told(call.op, None, asks), True
        header = told(call.op, x.shape, asks)
        if x.nbytes <= most:
            return header + x.tobytes(), True
        place = None if channel.mail is None or most < 0 else channel.mail.offer(x, call.lent)
        if place is None:
            return header, False
        at, strides = place
        return told(call.op, x.shape, asks, strides) + at.to_bytes(8, "little"), True

    def _tell(
        self, group: Group, call: Call, shape: Shape | None, x: Any = None, most: int = -1
    ) -> tuple[Headers, bool]:
        """Tell all members what is called, and what comes, the same to everyone; and hear theirs.

        x: the block that comes, which goes along if it has at most so many bytes, or others can read it: whether it
        does.
        """
        early, self.early = self.early, None
        if early is not None:
            return early, True
        channel, name, asks = self._begin(group, call)
        header, along = (told(call.op, shape, asks), False) if x is None else self._words(channel, call, x, most, asks)
        said, end = channel.said, 8 + len(header)
        for row in channel.others:
            said.words[row][0] = name
            said.bytes[row][8:end] = header
        return self.swap(group, call, channel, name, end), along

    def _tell_each(
        self, group: Group, call: Call, part: Callable[[int], Any], most: int
    ) -> tuple[Headers, Collection[int]]:
        """Tell each member what is called, and the shape of what comes for it; and hear theirs.

        part(k): what comes for member k, None if nothing does; it goes along if it has at most so many bytes, or others
        can read it. Gives also those for whom it does not.
        """
        early, self.early = self.early, None
        if early is not None:
            return early, ()
        channel, name, asks = self._begin(group, call)
        said, me, longest, apart = channel.said, channel.me, 0, []
        for k, row in enumerate(group.rows):
            if row == me:
                continue
            header, along = self._words(channel, call, part(k), most, asks)
            if not along:
                apart.append(k)
            end = 8 + len(header)
            said.words[row][0] = name
            said.bytes[row][8:end] = header
            if end > longest:
                longest = end
        return self.swap(group, call, channel, name, longest), apart

    def swap(self, group: Group, call: Call, channel: Channel, name: int, nbytes: int) -> Headers:
        """Send the headers that were written, and give those that come: they are read before the next call."""
        self.transport.swap(channel, nbytes, call)
        self.agree(group, call, channel, name)
        heard = channel.heard
        if call.asks is not None:
            call.asks[0] = call.asks[0] or any(map(heard.asks, channel.others))
        return heard

    def _agree(self, group: Group, call: Call, x: np.ndarray) -> None:
        """Meet for the check alone: where all bring one shape, nobody has to learn any."""
        if self.transport.checks:
            self._tell(group, call, x.shape)

    def _shapes(self, group: Group, call: Call) -> Handle:
        if group.size == 1:
            return Done([call.shape])
        return Done(self._shapes_in(self._tell(group, call, call.shape)[0], group, call.shape))

    def _all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        if group.size == 1:
            return Done(sealed(x))
        return self._agreed_sum(group, call, x, how)

    def _agreed_sum(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        if self.transport.checks:
            most = self.most_riding(call, x)
            heard, along = self._tell(group, call, x.shape, x, most)
            if along and self._all_here(heard, group, [x.nbytes] * group.size, most):
                return self._sum_of(group, call, heard.beside(x, group.rows, group.index, [x.shape] * group.size), how)
        return self._reduce_blocks(group, call, x, how)

    def _sum_of(self, group: Group, call: Call, blocks: Sequence[np.ndarray], how: str) -> Handle:
        """The sum of the blocks of all members, which can be read here. Of more than two everyone takes a part of it,
        and reads the others' parts, all as messages would come."""
        n, me = group.size, group.index
        x = blocks[me]
        if n == 2 or x.nbytes <= _SMALL:
            return Done(sealed(kernels.of(x).combine(blocks, how)))
        room, sizes = self.room(x.nbytes, call, x), block_sizes(x.size, n)
        rooms = pieces(room, [size * x.itemsize for size in sizes])
        mine, start = rooms[me].view(x.dtype), sum(sizes[:me])
        kernels.of(x).combine([b.reshape(-1)[start : start + sizes[me]] for b in blocks], how, mine)
        most = self.most_riding(call, x)
        heard, along = self._tell(group, call.of(mine.shape, alike=False), mine.shape, mine, most)
        self.number -= 1  # It is no collective of its own, and others make their sum in one meeting.
        receives = self._read(group, heard, x.dtype, [(size,) for size in sizes], rooms, most)
        sends = {} if along else {k: rooms[me] for k in range(n) if k != me}
        total = room.view(x.dtype).reshape(x.shape)
        if not sends and not receives:
            return Done(_closed(room, total))
        return self._pending(self._messages(group, sends, receives), (sends, room), lambda: _closed(room, total))

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

    def _all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray], spare: Sequence[bool]) -> Handle:
        """None is written over but what others can read: the rest is sent."""
        if group.size == 1 or not xs:
            return Done([sealed(x) for x in xs])
        small = [k for k, x in enumerate(xs) if x.nbytes < _APART]
        large = [k for k, x in enumerate(xs) if x.nbytes >= _APART]
        blocks = [xs[k] for k in large]
        if small:
            blocks.append(joined([xs[k].reshape(-1) for k in small], 0))
        # Small ones may lie side by side as they are.
        free = [spare[k] for k in large] + [all(spare[k] for k in small)] * bool(small)
        handles = self._sums(group, call, blocks, free) if large else [self._agreed_sum(group, call, blocks[0], "sum")]
        apart = dict(zip(large, handles, strict=False))
        handle: Handle = handles[-1] if small else Done(None)
        shapes = [x.shape for x in xs]
        at = offsets([prod(shapes[k]) for k in small])
        del xs, blocks, handles  # what is packed is not kept

        def unpack(total: np.ndarray) -> list[np.ndarray]:
            found = {k: sent.wait() for k, sent in apart.items()}
            for j, k in enumerate(small):
                found[k] = total[at[j] : at[j + 1]].reshape(shapes[k])
            apart.clear()
            return [found[k] for k in range(len(shapes))]

        return Mapped(handle, unpack)

    def _sums(self, group: Group, call: Call, xs: Sequence[np.ndarray], spare: Sequence[bool]) -> list[Handle]:
        """The sums of several blocks whose shapes are known to be equal, each by itself."""
        me, windows, kept = group.index, (), []
        places: list[list[int]] = []
        """Where the blocks of each member lie in its arena, -1 for one that lies elsewhere."""
        over: list[bool] = [False] * len(xs)
        """Whether a sum is written over the blocks: nobody else has any of them."""
        mail = arena = None
        if self.transport.checks:
            mail = self.transport.channel(group.ordered, call).mail
            arena, before = (None, 0) if mail is None else (mail.arena, len(mail.next))
            mine = np.full(len(xs), -1)
            for j, x in enumerate(xs):
                lent = call.lent or not x.flags.c_contiguous
                place = None if mail is None else mail.offer(x, lent)
                if arena is not None and place is not None:
                    free = spare[j] and x.flags.writeable and not lent and x.nbytes > _SMALL
                    mine[j] = 2 * place[0] + (free and arena.place(x) == place[0])
            kept = [] if mail is None else mail.next[before:]
            if mine.nbytes <= self.most_riding(call, xs):
                heard, _ = self._tell(group, call, mine.shape, mine, mine.nbytes)
                windows = heard.windows
                all_told = [b.tolist() for b in heard.beside(mine, group.rows, me, [mine.shape] * group.size)]
                places = [[found >> 1 for found in of] for of in all_told]
                over = [
                    min(founds) >= 0 and all(found & 1 for found in founds) for founds in zip(*all_told, strict=True)
                ]
            else:
                self._agree(group, call, xs[0])

        def blocks_of(j: int) -> list[np.ndarray]:
            x = xs[j]
            return [
                x if k == me else np.ndarray(x.shape, x.dtype, windows[row], places[k][j])
                for k, row in enumerate(group.rows)
            ]

        def sum_of(j: int, x: np.ndarray) -> Handle:
            if over[j]:
                return Done(sealed(x))
            if not places or min(where[j] for where in places) < 0:
                return self._reduce_blocks(group, call, x, "sum")
            if mail is not None and group.size > 2:
                mail.keep(kept)  # Before it is read, others may tell each other of parts of sums before it.
            return self._sum_of(group, call, blocks_of(j), "sum")

        if mail is not None and any(over):
            mail.keep(kept)
            self._sum_over(group, call, [blocks_of(j) for j, alone in enumerate(over) if alone])
        return [sum_of(j, x) for j, x in enumerate(xs)]

    def _sum_over(self, group: Group, call: Call, sums: Sequence[Sequence[np.ndarray]]) -> None:
        """Write sums over this member's blocks. Each is given by the blocks of all members, which can be read here.

        Everyone makes a part of each, over that part of its own block, which nobody else reads; and when all have done
        so reads the others' parts.
        """
        n, me = group.size, group.index
        flat = [[b.reshape(-1) for b in blocks] for blocks in sums]
        cuts = [offsets(block_sizes(blocks[me].size, n)) for blocks in flat]
        for blocks, at in zip(flat, cuts, strict=True):
            parts = [b[at[me] : at[me + 1]] for b in blocks]
            if me < 2:
                kernels.of(parts[me]).combine(parts, into=parts[me])
            else:  # It is still to be added when the first of them already stand there.
                parts[me][...] = kernels.of(parts[me]).combine(parts)
        self._tell(group, call, sums[0][me].shape)
        self.number -= 1  # It is no collective of its own, and others make their sums in one meeting.
        for blocks, at in zip(flat, cuts, strict=True):
            for k, block in enumerate(blocks):
                if k != me:
                    _overwrite(blocks[me][at[k] : at[k + 1]], block[at[k] : at[k + 1]])

    def _reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        if group.size == 1:
            return Done(sealed(parts[0]))
        mine = parts[group.index]

        def finish(xs: list[np.ndarray]) -> np.ndarray:
            xs[group.index] = mine
            # Of two, into what came: of more it would keep what came of all. What came in a header is not for that.
            into: Any = xs[1 - group.index] if len(xs) == 2 and mine.nbytes > RIDES else None
            total = kernels.of(mine).combine(xs, into=into)
            return sealed(total) if into is None else _closed(into.base, total)

        if self.transport.checks:
            most = self.most_riding(call, parts)
            heard, apart = self._tell_each(group, call, parts.__getitem__, most)
            coming = [mine.shape] * group.size
            if not apart and self._all_here(heard, group, [mine.nbytes] * group.size, most):
                blocks = heard.beside(mine, group.rows, group.index, coming)
                return Done(sealed(kernels.of(mine).combine(blocks)))
            coming = [s or () for s in self._shapes_in(heard, group, mine.shape)]
            return Mapped(self._swapped(group, call, parts, coming, heard, most, apart), finish)
        return Mapped(self._swapped(group, call, parts, [mine.shape] * group.size), finish)

    def _all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle:
        if group.size == 1:
            return Done([sealed(x)])
        heard, along, here, shapes = self._told_of(group, call, x)
        if here:
            mine = sealed(copied(x) if call.lent else x)
            return Done(heard.riders(mine, group.rows, group.index, shapes))
        return self._gathered(group, call, x, shapes, heard, along)

    def _told_of(self, group: Group, call: Call, x: np.ndarray) -> tuple[Headers, bool, bool, list[Shape]]:
        """Tell all members of a block: the headers that came, whether the block went along, whether all did, and the
        shapes of all."""
        most = self.most_riding(call, x)
        heard, along = self._tell(group, call, x.shape, x, most)
        shapes = [s or () for s in self._shapes_in(heard, group, x.shape)]
        here = along and self._all_here(heard, group, [prod(s) * x.itemsize for s in shapes], most)
        return heard, along, here, shapes

    def _gathered(
        self, group: Group, call: Call, x: np.ndarray, shapes: Sequence[Shape], heard: Headers, along: bool
    ) -> Handle:
        """An all-gather of blocks whose shapes are known, not all of which came along with the headers. along: whether
        this one went along."""
        counts = [prod(s) * x.itemsize for s in shapes]
        receive, most = self.room(sum(counts), call, x), self.most_riding(call, x)
        send, me = bytes_of(x), group.index
        if along or any(heard.came(row, counts[k], most) for k, row in enumerate(group.rows) if k != me):
            rooms = pieces(receive, counts)
            put(rooms[me], send)
            rest = self._read(group, heard, x.dtype, shapes, rooms, most)
            sends = {} if along else {k: send for k in range(group.size) if k != me}
            self.ready()
            requests = self._messages(group, sends, rest)
        else:
            self.ready()
            requests = self.transport.channel(group.members).all_gather(send, receive, counts)
        return self._pending(requests, (send, receive), lambda: _split(sealed(receive), shapes, x.dtype))

    def _read(
        self,
        group: Group,
        heard: Headers,
        dtype: np.dtype,
        shapes: Sequence[Shape],
        rooms: Sequence[np.ndarray],
        most: int,
    ) -> dict[int, np.ndarray]:
        """Copy what came along with the headers into rooms of bytes, one for each member; the rooms of the rest."""
        rest = {}
        for k, row in enumerate(group.rows):
            if k == group.index:
                continue
            if heard.came(row, rooms[k].nbytes, most):
                put(rooms[k].view(dtype).reshape(shapes[k]), heard.there(row, shapes[k], dtype))
            else:
                rest[k] = rooms[k]
        return rest

    def _all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        if group.size == 1:
            return Done([sealed(p) for p in parts])
        heard, apart, here, coming = self._told_parts(group, call, parts)
        if here:
            return Done(heard.riders(sealed(parts[group.index]), group.rows, group.index, coming))
        return self._swapped(group, call, parts, coming, heard, self.most_riding(call, parts), apart, True)

    def _told_parts(
        self, group: Group, call: Call, parts: Sequence[np.ndarray]
    ) -> tuple[Headers, Collection[int], bool, list[Shape]]:
        """Tell each member of its part: the headers that came, for whom parts did not go along, whether all did, those
        that come too, and the shapes of what comes."""
        most = self.most_riding(call, parts)
        heard, apart = self._tell_each(group, call, parts.__getitem__, most)
        coming = [s or () for s in self._shapes_in(heard, group, parts[group.index].shape)]
        sizes = [prod(s) * parts[0].itemsize for s in coming]
        return heard, apart, not apart and self._all_here(heard, group, sizes, most), coming

    def _swapped(
        self,
        group: Group,
        call: Call,
        parts: Sequence[np.ndarray],
        shapes: Sequence[Shape],
        heard: Headers | None = None,
        most: int = -1,
        apart: Collection[int] | None = None,
        own: bool = False,
    ) -> Handle:
        """An all-to-all of parts when it is known what comes: of these shapes, along with the headers if there are any.
        apart: for whom parts did not go along, None for all. own: whether the own part belongs to the result. Where it
        does not, who asked may write over what came."""
        dtype, me = parts[0].dtype, group.index
        coming = [prod(s) * dtype.itemsize for s in shapes]
        others = [k for k in range(group.size) if k != me]
        if not own:
            coming[me] = 0
            shapes = [(0,) if k == me else s for k, s in enumerate(shapes)]
        receive = self.room(sum(coming), call, parts)
        rooms = pieces(receive, coming)
        sends = {k: bytes_of(parts[k]) for k in (others if apart is None else apart)}
        if heard is None:
            receives = {k: rooms[k] for k in others}
        else:
            receives = self._read(group, heard, dtype, shapes, rooms, most)
        self.ready()
        requests = self._messages(group, sends, receives)
        if own:  # while the others are under way
            put(rooms[me].view(dtype).reshape(parts[me].shape), parts[me])
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
            return Done(sealed(x))
        most, dtype = self.most_riding(call, x), np.dtype(call.dtype)
        heard, along = self._tell(group, call, None if x is None else x.shape, x, most)
        if along and x is not None:
            return Done(sealed(copied(x) if call.lent else x))
        shape = (heard.shape(group.rows[root]) if x is None else x.shape) or ()
        size = prod(shape) * dtype.itemsize
        if x is None and heard.came(group.rows[root], size, most):
            return Done(heard.rider(group.rows[root], shape, dtype))
        room = bytes_of(x) if x is not None else self.room(size, call, x)
        self.ready()
        requests = self.transport.channel(group.members).broadcast(room, root)
        if x is not None:
            return self._pending(requests, room, lambda: sealed(x))
        return self._pending(requests, room, lambda: _closed(room, room.view(dtype).reshape(shape)))

    def _reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        if group.size == 1:
            return Done(sealed(x))
        n, at_root, rows, most = group.size, group.index == root, group.rows, self.most_riding(call, x)
        apart: Collection[int] = () if at_root else (root,)
        heard: Headers | None = None
        if self.transport.checks:
            heard, apart = self._tell_each(group, call, lambda k: x if k == root else None, most)
            if at_root and self._all_here(heard, group, [x.nbytes] * n, most):
                return Done(sealed(kernels.of(x).combine(heard.beside(x, rows, root, (x.shape,) * n))))
            if not at_root and not apart:
                return Done(None)
        theirs = self.room((n - 1) * x.nbytes, call, x).reshape(n - 1, x.nbytes) if at_root else None
        receives: Mapping[int, np.ndarray] = {}
        if theirs is not None:
            rooms = [*theirs[:root], bytes_of(x), *theirs[root:]]
            rest = {k: rooms[k] for k in range(n) if k != root}
            receives = rest if heard is None else self._read(group, heard, x.dtype, [x.shape] * n, rooms, most)
        send = bytes_of(x)
        self.ready()
        requests = self._messages(group, dict.fromkeys(apart, send), receives)

        def finish() -> np.ndarray | None:
            if theirs is None:
                return None
            blocks = [b.view(x.dtype).reshape(x.shape) for b in theirs]
            # Of two, into what came, as in a reduce-scatter.
            into: Any = blocks[0] if n == 2 else None
            total = kernels.of(x).combine([*blocks[:root], x, *blocks[root:]], into=into)
            return sealed(total) if into is None else _closed(into.base, total)

        return self._pending(requests, (send, theirs), finish)

    def _exchange(
        self,
        group: Group,
        call: Call,
        sends: Mapping[int, np.ndarray],
        into: Mapping[int, np.ndarray] = MappingProxyType({}),
    ) -> Handle:
        """into[k]: where what member k sends is put, if it is of that shape; a message only if it is contiguous."""
        me, most, found = group.index, self.most_riding(call, sends), {}
        if group.size == 1:
            return Done({k: sealed(x) for k, x in sends.items()})
        heard, apart = self._tell_each(group, call, sends.get, most)
        sent = {k: bytes_of(sends[k]) for k in apart}
        dtype, received = np.dtype(call.dtype), {}
        for k, row in enumerate(group.rows):
            if k == me:
                if k in sends:
                    found[k] = sealed(sends[k])
                continue
            shape = heard.shape(row)
            if shape is None:
                continue
            nbytes, place = prod(shape) * dtype.itemsize, into.get(k)
            if place is not None and place.shape != shape:
                place = None
            if heard.came(row, nbytes, most):
                if place is None:
                    found[k] = heard.rider(row, shape, dtype)
                else:
                    put(place, heard.there(row, shape, dtype))
                    found[k] = place
            elif place is not None and place.flags.c_contiguous:
                found[k], received[k] = place, bytes_of(place)
            else:
                received[k] = self.room(nbytes, call, sends)
                found[k] = received[k].view(dtype).reshape(shape)
        if not sent and not received:
            return Done(found)
        self.ready()
        requests = self._messages(group, sent, received)

        def finish() -> dict[int, np.ndarray]:
            for k, room in received.items():
                _closed(room, found[k])
            return found

        return self._pending(requests, (sent, received), finish)

    def _run(self, plan: Plan, call: Call, x: np.ndarray) -> Handle:
        """What came along with the headers is combined from where it lies."""
        group, kind = plan.group, plan.kind
        if group.size > 1 and type(x) is np.ndarray:
            if kind == "all_gather":
                heard, along, here, shapes = self._told_of(group, call, x)
                if here:
                    return Done(plan.finish(x, heard.beside(x, group.rows, group.index, shapes), True))
                handle = self._gathered(group, call, x, shapes, heard, along)
                return Mapped(handle, lambda blocks: plan.finish(None, blocks))
            if kind == "all_to_all":
                parts = [*plan.sends(x).values()]
                heard, apart, here, coming = self._told_parts(group, call, parts)
                if here:
                    return Done(plan.finish(x, heard.beside(parts[group.index], group.rows, group.index, coming), True))
                most = self.most_riding(call, parts)
                handle = self._swapped(group, call, parts, coming, heard, most, apart, True)
                return Mapped(handle, lambda blocks: plan.finish(None, blocks))
            if type(plan.combine) is PlaceBoxes and not plan.combine.adds:
                handle = self._received_in_place(plan, plan.combine, call, x)
                if handle is not None:
                    return handle
        return super()._run(plan, call, x)

    def _received_in_place(self, plan: Plan, combine: PlaceBoxes, call: Call, x: np.ndarray) -> Handle | None:
        """What comes for contiguous boxes is received where it is to lie; the own part is copied meanwhile. None where
        that does not pay, or boxes overlap."""
        group, me, dtype, sends = plan.group, plan.group.index, plan.dtype, plan.sends(x)
        nbytes = prod(combine.out) * dtype.itemsize
        if len(combine.boxes) < 2 or nbytes <= self.most_riding(call, sends):
            return None
        found, everything, apart = places(combine.out, tuple(combine.boxes.values()))
        if not apart:
            return None
        room = self.room(nbytes, call, x)
        out = room.view(dtype).reshape(combine.out)
        if not everything:
            out.fill(0)
        views = {k: out[place] for k, place in zip(combine.boxes, found, strict=True)}
        into = {k: view for k, view in views.items() if k != me}
        handle = self._exchange(group, call, {k: part for k, part in sends.items() if k != me}, into)
        if me in views:
            put(views[me], sends[me])

        def finish(received: dict[int, np.ndarray]) -> tuple[np.ndarray, Any]:
            for k, view in views.items():
                if k != me and received[k] is not view:
                    put(view, received[k])
            return plan.with_bound(_closed(room, out))

        return Mapped(handle, finish)
