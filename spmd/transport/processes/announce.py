"""How the members of a group tell each other what they call: the headers with which every collective begins.

Each member says to each what it calls, and the shape of what it is going to send. It is one and the same movement for
all collectives, so that workers that disagree learn it there, before any data moves; and receivers learn the sizes of
what comes. Small blocks travel in the header itself. Large ones that lie in shared memory (`shared_memory.py`) stay
there: the header says where, and whoever they are for reads them at once, before the next header.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd.device import put
from spmd.kernels.memory import pool
from spmd.transport.call import Call, Group, Shape
from spmd.transport.handles import Done, Handle, read_only
from spmd.transport.processes.base import Connections, Participant
from spmd.transport.processes.channel import Channel
from spmd.transport.processes.headers import INLINE_LIMIT, Headers, name_of, told

__all__ = ["Announcing", "Pending", "read_only_room"]


def read_only_room(room: np.ndarray, block: np.ndarray) -> np.ndarray:
    """A block that lies in a room, as one that nobody writes to, by neither name."""
    read_only(room)
    return read_only(block)


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


class _Shaped(NamedTuple):
    """A block of which only the shape is told."""

    shape: Shape
    nbytes: int = 0


class Announcing(Participant):
    """A process as it tells others what it calls, and hears what they call."""

    def room(self, nbytes: int, call: Call, like: Any) -> Any:
        """Memory for what comes to a collective to which this worker brings `like`."""
        return pool.empty(nbytes, np.uint8)

    def ready(self) -> None:
        """What is to be sent has been computed."""

    def inline_limit(self, call: Call, like: Any) -> int:
        """Bytes up to which blocks travel in the header, of a collective to which this worker brings `like`."""
        return INLINE_LIMIT

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
        return channel, name_of(call, transport.runs, self.number), call.needs_grad is not None and call.needs_grad[0]

    def _words(self, channel: Channel, call: Call, x: Any, most: int, needs_grad: bool) -> tuple[bytes, bool]:
        """What is told to whom a block is for, and whether that is all: it has at most so many bytes, or others can
        read it where it lies."""
        if x is None:
            return told(call.op, None, needs_grad), True
        header = told(call.op, x.shape, needs_grad)
        if x.nbytes <= most:
            return header + x.tobytes(), True
        place = None if channel.mail is None or most < 0 else channel.mail.offer(x, call.borrowed)
        if place is None:
            return header, False
        at, strides = place
        return told(call.op, x.shape, needs_grad, strides) + at.to_bytes(8, "little"), True

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
        channel, name, needs_grad = self._begin(group, call)
        header, along = (
            (told(call.op, shape, needs_grad), False) if x is None else self._words(channel, call, x, most, needs_grad)
        )
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
        channel, name, needs_grad = self._begin(group, call)
        said, me, longest, apart = channel.said, channel.me, 0, []
        for k, row in enumerate(group.rows):
            if row == me:
                continue
            header, along = self._words(channel, call, part(k), most, needs_grad)
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
        if call.needs_grad is not None:
            call.needs_grad[0] = call.needs_grad[0] or any(map(heard.needs_grad, channel.others))
        return heard

    def _agree(self, group: Group, call: Call, x: np.ndarray) -> None:
        """Meet for the check alone: where all bring one shape, nobody has to learn any."""
        if self.transport.checks:
            self._tell(group, call, x.shape)

    def _shapes(self, group: Group, call: Call) -> Handle:
        if group.size == 1:
            return Done([call.shape])
        return Done(self._shapes_in(self._tell(group, call, call.shape)[0], group, call.shape))

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

    def _messages(self, group: Group, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray]) -> list[Any]:
        """Blocks to some members, and from some, by the channel of the headers: it is there already, and so needs no
        member that has nothing to send."""
        rows = group.rows
        there, here = ({rows[k]: x for k, x in moved.items()} for moved in (sends, receives))
        return self.transport.channel(group.ordered).exchange(there, here)
