"""The collectives of workers that are processes, in headers and messages: the same whichever library moves the bytes.

Every collective begins with headers (`announce.py`). Small blocks travel in them, large ones are read in shared memory
if they lie there; what neither can be done with goes as a message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from spmd import kernels
from spmd.device import Adjoining, copied, put
from spmd.kernels.cpu.moves import places
from spmd.transport.call import Call, Group, Shape
from spmd.transport.handles import Done, Handle, Mapped, read_only
from spmd.transport.plan import PlaceBoxes, Plan
from spmd.transport.processes.all_reduce import AllReducing
from spmd.transport.processes.announce import read_only_room
from spmd.transport.processes.channel import bytes_of, pieces
from spmd.transport.processes.headers import INLINE_LIMIT, MAX_NDIM, Headers
from spmd.transport.processes.run_plan import RepeatedPlan

__all__ = ["ProcessComm"]


def _split(buffer: np.ndarray, shapes: Sequence[Shape], dtype) -> list[np.ndarray]:
    """The blocks of these shapes that lie one after the other in a buffer of bytes."""
    whole = buffer.view(dtype)
    parts = pieces(whole, [prod(s) for s in shapes])
    blocks = [part.reshape(s) for part, s in zip(parts, shapes, strict=True)]
    return Adjoining(blocks, whole) if type(buffer) is np.ndarray else blocks


class ProcessComm(AllReducing):
    """This process's view."""

    def repeated_plan(self, call: Call, plan: Plan, x: np.ndarray) -> RepeatedPlan | None:
        group, me = plan.group, plan.group.index
        if (
            plan.assumed_lengths is not None
            or not plan.repeats
            or not self.transport.checks
            or x.ndim > MAX_NDIM
            or self.inline_limit(call, x) < INLINE_LIMIT
        ):
            return None
        channel = self.transport.channels.get(group.ordered)
        if channel is None:
            return None
        large = [
            p for p in (x[i] for k, i in enumerate(plan.parts) if i is not None and k != me) if p.nbytes > INLINE_LIMIT
        ]
        readable = channel.mail is not None and channel.mail.arena is not None
        # What is read where it lies is to be there: parts that are put together for it are not.
        served = not large or (readable and all(np.may_share_memory(p, x) for p in large))
        return RepeatedPlan(call, plan, x) if served else None

    def _reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        if group.size == 1:
            return Done(read_only(parts[0]))
        mine = parts[group.index]

        def finish(xs: list[np.ndarray]) -> np.ndarray:
            xs[group.index] = mine
            # Of two, into what came: of more it would keep what came of all. What came in a header is not for that.
            into: Any = xs[1 - group.index] if len(xs) == 2 and mine.nbytes > INLINE_LIMIT else None
            total = kernels.of(mine).combine(xs, into=into)
            return read_only(total) if into is None else read_only_room(into.base, total)

        if self.transport.checks:
            most = self.inline_limit(call, parts)
            heard, apart = self._tell_each(group, call, parts.__getitem__, most)
            coming = [mine.shape] * group.size
            if not apart and self._all_here(heard, group, [mine.nbytes] * group.size, most):
                blocks = heard.beside(mine, group.rows, group.index, coming)
                return Done(read_only(kernels.of(mine).combine(blocks)))
            coming = [s or () for s in self._shapes_in(heard, group, mine.shape)]
            return Mapped(self._swapped(group, call, parts, coming, heard, most, apart), finish)
        return Mapped(self._swapped(group, call, parts, [mine.shape] * group.size), finish)

    def _all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle:
        if group.size == 1:
            return Done([read_only(x)])
        heard, along, here, shapes = self._told_of(group, call, x)
        if here:
            mine = read_only(copied(x) if call.borrowed else x)
            return Done(heard.inline_blocks(mine, group.rows, group.index, shapes))
        return self._gathered(group, call, x, shapes, heard, along)

    def _told_of(self, group: Group, call: Call, x: np.ndarray) -> tuple[Headers, bool, bool, list[Shape]]:
        """Tell all members of a block: the headers that came, whether the block went along, whether all did, and the
        shapes of all."""
        most = self.inline_limit(call, x)
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
        receive, most = self.room(sum(counts), call, x), self.inline_limit(call, x)
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
        return self._pending(requests, (send, receive), lambda: _split(read_only(receive), shapes, x.dtype))

    def _all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        if group.size == 1:
            return Done([read_only(p) for p in parts])
        heard, apart, here, coming = self._told_parts(group, call, parts)
        if here:
            return Done(heard.inline_blocks(read_only(parts[group.index]), group.rows, group.index, coming))
        return self._swapped(group, call, parts, coming, heard, self.inline_limit(call, parts), apart, True)

    def _told_parts(
        self, group: Group, call: Call, parts: Sequence[np.ndarray]
    ) -> tuple[Headers, Collection[int], bool, list[Shape]]:
        """Tell each member of its part: the headers that came, for whom parts did not go along, whether all did, those
        that come too, and the shapes of what comes."""
        most = self.inline_limit(call, parts)
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
            return self._pending(requests, (sends, receive), lambda: _split(read_only(receive), shapes, dtype))
        return self._pending(requests, (sends, receive), lambda: [*_split(receive, shapes, dtype)])

    def _broadcast(self, group: Group, call: Call, x: np.ndarray | None, root: int) -> Handle:
        if group.size == 1:
            return Done(read_only(x))
        most, dtype = self.inline_limit(call, x), np.dtype(call.dtype)
        heard, along = self._tell(group, call, None if x is None else x.shape, x, most)
        if along and x is not None:
            return Done(read_only(copied(x) if call.borrowed else x))
        shape = (heard.shape(group.rows[root]) if x is None else x.shape) or ()
        size = prod(shape) * dtype.itemsize
        if x is None and heard.came(group.rows[root], size, most):
            return Done(heard.inline_block(group.rows[root], shape, dtype))
        room = bytes_of(x) if x is not None else self.room(size, call, x)
        self.ready()
        requests = self.transport.channel(group.members).broadcast(room, root)
        if x is not None:
            return self._pending(requests, room, lambda: read_only(x))
        return self._pending(requests, room, lambda: read_only_room(room, room.view(dtype).reshape(shape)))

    def _reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        if group.size == 1:
            return Done(read_only(x))
        n, at_root, rows, most = group.size, group.index == root, group.rows, self.inline_limit(call, x)
        apart: Collection[int] = () if at_root else (root,)
        heard: Headers | None = None
        if self.transport.checks:
            heard, apart = self._tell_each(group, call, lambda k: x if k == root else None, most)
            if at_root and self._all_here(heard, group, [x.nbytes] * n, most):
                return Done(read_only(kernels.of(x).combine(heard.beside(x, rows, root, (x.shape,) * n))))
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
            return read_only(total) if into is None else read_only_room(into.base, total)

        return self._pending(requests, (send, theirs), finish)

    def _exchange(
        self,
        group: Group,
        call: Call,
        sends: Mapping[int, np.ndarray],
        into: Mapping[int, np.ndarray] = MappingProxyType({}),
    ) -> Handle:
        """into[k]: where what member k sends is put, if it is of that shape; a message only if it is contiguous."""
        me, most, found = group.index, self.inline_limit(call, sends), {}
        if group.size == 1:
            return Done({k: read_only(x) for k, x in sends.items()})
        heard, apart = self._tell_each(group, call, sends.get, most)
        sent = {k: bytes_of(sends[k]) for k in apart}
        dtype, received = np.dtype(call.dtype), {}
        for k, row in enumerate(group.rows):
            if k == me:
                if k in sends:
                    found[k] = read_only(sends[k])
                continue
            shape = heard.shape(row)
            if shape is None:
                continue
            nbytes, place = prod(shape) * dtype.itemsize, into.get(k)
            if place is not None and place.shape != shape:
                place = None
            if heard.came(row, nbytes, most):
                if place is None:
                    found[k] = heard.inline_block(row, shape, dtype)
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
                read_only_room(room, found[k])
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
                most = self.inline_limit(call, parts)
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
        if len(combine.boxes) < 2 or nbytes <= self.inline_limit(call, sends):
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
            return plan.with_bound(read_only_room(room, out))

        return Mapped(handle, finish)
