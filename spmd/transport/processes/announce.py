"""The headers with which a collective of processes that share memory begins.

Each member sends every other member a header: its call, and the shape of the block that it will send. All collectives
exchange headers in the same way, so workers that disagree detect it before any data moves, and receivers know the sizes
of the blocks to come. Small blocks are sent in the header. Large blocks in shared memory (`shared_memory.py`) stay
there: the header has their place, and the receiver reads them before the next header. Groups that share no memory
exchange no headers: see `message_comm.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple, Protocol

import numpy as np

from spmd.device import put
from spmd.errors import MismatchError, caller
from spmd.kernels.memory import pool
from spmd.transport.base import Comm
from spmd.transport.call import Call, Group, Shape, Side, mismatch
from spmd.transport.processes.channel import Channel
from spmd.transport.processes.headers import INLINE_LIMIT, Headers, call_name, line_number, pack_header
from spmd.transport.processes.status_board import StatusBoard

__all__ = ["HeaderComm", "Pending", "ProcessGroup"]

_SIDE_NBYTES = 1 << 14
"""Bytes of the description of a call that a process sends to the others after a mismatch."""


class ProcessGroup(Protocol):
    """The part of `ProcessTransport` that the modules below it use.

    local: the worker of this process. ranks: the processes' numbers in the job, by worker. channels: the open ones, by
    their members in order. runs, stage: number the maps, and the stages of the job. last_call: the latest. pending:
    the messages under way. everyone: all workers. groups: those that meet by messages.
    """

    ranks: tuple[int, ...]
    channels: dict[tuple[int, ...], Channel]
    checks: bool
    runs: int
    failed: int
    stage: int
    last_call: Any
    pending: set[Any]
    abandoned: list[Any]
    everyone: Group
    groups: Any
    status_board: StatusBoard | None
    time_limit: float
    describe: Callable[[int], str]

    @property
    def local(self) -> Sequence[int]: ...

    def channel(self, members: tuple[int, ...], call: Call | None = None) -> Channel: ...

    def swap(self, channel: Channel, call: Call) -> None: ...

    def number_of(self, members: tuple[int, ...]) -> tuple[int, tuple[int, ...]]: ...

    def raise_earlier_failure(self) -> None: ...

    def complete_soon(self, requests: Any) -> bool: ...

    def arrive(
        self,
        requests: Any,
        call: Call | None,
        buffers: Any = None,
        ranks: tuple[int, ...] = (),
        place: tuple[int, int] | None = None,
    ) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class Pending:
    """Requests under way, and the function to call when they are complete. Keeps their buffers alive until then."""

    __slots__ = ("buffers", "call", "finish", "requests", "transport", "value")

    def __init__(self, transport: ProcessGroup, requests: list[Any], buffers: Any, finish: Callable[[], Any]):
        self.requests: list[Any] | None = requests
        self.buffers = buffers
        self.finish = finish
        self.transport = transport
        self.call = transport.last_call
        self.value: Any = None
        transport.pending.add(self)

    def wait(self) -> Any:
        if self.requests is not None:
            self.transport.arrive(self.requests, self.call)
            self.transport.pending.discard(self)
            self.requests = self.buffers = None
            self.value = self.finish()
            del self.finish
        return self.value


class _Shaped(NamedTuple):
    """The shape of a block, which is sent without the block."""

    shape: Shape
    nbytes: int = 0


class HeaderComm(Comm):
    """The exchange of headers by a process.

    early: headers of the next collective that have arrived already. messages: the collectives by messages. line: the
    number of the line from which all members run; 0: they may run from several.
    """

    messages: Any
    line: int = 0

    def __init__(self, transport: ProcessGroup):
        self.transport = transport
        self.worker = transport.local[0]
        self.early: Headers | None = None

    def from_one_line(self, frame: FrameType) -> None:
        user = caller(frame)
        self.line = 0 if user is None else line_number(user.f_code, user.f_lasti)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the seconds in which this worker waits for others, in `waited`: for headers and packets. The data that
        follow them move."""
        own = {"swap": self._timed_method("swap", True), "arrive": self._timed_method("arrive", False)}
        attributes = vars(self.transport)
        attributes.update(own)
        try:
            yield
        finally:
            for name, method in own.items():
                if attributes.get(name) is method:  # a child of os.fork has others
                    del attributes[name]

    def _timed_method(self, name: str, always: bool) -> Callable[..., Any]:
        """A method of the transport that counts its seconds as waiting: always, or where it is told the ranks that
        have to come."""
        method = getattr(self.transport, name)

        def timed(*args: Any) -> Any:
            if not always and len(args) < 4:
                return method(*args)
            start = perf_counter()
            try:
                return method(*args)
            finally:
                self.waited += perf_counter() - start

        return timed

    def begin_messages(self, group: Group, call: Call) -> Any:
        """The messages of the next collective; None if the group shares memory."""
        groups = self.transport.groups
        calls = groups.calls_of(group, call)
        if calls is None:
            return None
        self.number += 1
        return groups.begin(self, group, call, calls)

    def agree(self, group: Group, call: Call, channel: Channel, name: int) -> None:
        """Raise MismatchError, on all members, if a received header names another call than this process's."""
        words = channel.incoming.words
        for row in channel.others:
            if words[row][0] != name:
                names = [name if row == channel.me else words[row][0] for row in group.rows]
                error = self._mismatch(group, call, names)
                self.transport.fail(error)
                raise error
        self.transport.last_call = call

    def _mismatch(self, group: Group, call: Call, names: Sequence[int]) -> MismatchError:
        """The error. All members know that they disagree, and exchange their calls and source lines."""
        channel = self.transport.channel(group.ordered, call)
        own = np.array([Side.of("", call, self.number, self.line).packed(_SIDE_NBYTES)], f"S{_SIDE_NBYTES}")
        texts = np.empty(group.size, own.dtype)
        sizes = [own.nbytes] * group.size
        requests = channel.all_gather(own.view(np.uint8), texts.view(np.uint8), sizes)
        self.transport.arrive(requests, call, (own, texts))
        me = group.index
        other = me if names[me] != names[0] else next(k for k, name in enumerate(names) if name != names[0])
        first, second = (
            Side.unpacked(self.transport.describe(group.members[k]), texts[group.rows[k]].item()) for k in (0, other)
        )
        error = mismatch(first, second)
        status_board, ranks = self.transport.status_board, [self.transport.ranks[m] for m in group.members]
        local = () if status_board is None else tuple(filter(status_board.is_local, ranks))
        error.ranks = local  # type: ignore[attr-defined]
        return error

    def empty_buffer(self, nbytes: int, call: Call, x: Any) -> Any:
        """Memory for the blocks that this worker receives in a collective to which it contributes x."""
        return pool.empty(nbytes, np.uint8)

    def synchronize(self) -> None:
        """Wait until the blocks to send are computed."""

    def inline_limit(self, call: Call, x: Any) -> int:
        """The most bytes of a block that is sent in the header, in a collective to which this worker contributes x."""
        return INLINE_LIMIT

    def _pending(self, requests: list[Any], buffers: Any, finish: Callable[[], Any]) -> Pending:
        return Pending(self.transport, requests, buffers, finish)

    def _meet(self, group: Group, call: Call, shapes: Iterable[Shape | None]) -> list[Shape | None]:
        """As `ProcessComm.meet`."""
        blocks = [None if shape is None else _Shaped(shape) for shape in shapes]
        own, (incoming, _) = blocks[group.index], self._send_headers(group, call, blocks.__getitem__, -1)
        return self._shapes_in(incoming, group, None if own is None else own.shape)

    def _shapes_in(self, incoming: Headers, group: Group, own_shape: Shape | None) -> list[Shape | None]:
        """Per member: the shape of the block that it sends to this worker. own_shape: that of its own block."""
        me = group.index
        return [own_shape if k == me else incoming.shape(row) for k, row in enumerate(group.rows)]

    def _all_inline(self, incoming: Headers, group: Group, sizes: Sequence[int], limit: int) -> bool:
        """Whether the blocks of all other members, of these sizes, came with their headers."""
        me = group.index
        return all(k == me or incoming.is_inline(row, sizes[k], limit) for k, row in enumerate(group.rows))

    def _begin(self, group: Group, call: Call) -> tuple[Channel, int, bool]:
        """The channel of a group, the name of the call, and whether the block is differentiated."""
        transport = self.transport
        self.number += 1
        channel = transport.channels.get(group.ordered) or transport.channel(group.ordered, call)
        name = call_name(call, transport.runs, self.number, self.line)
        return channel, name, call.needs_grad is not None and call.needs_grad[0]

    def _words(self, channel: Channel, call: Call, x: Any, limit: int, needs_grad: bool) -> tuple[bytes, bool]:
        """The header for the receiver of a block, and whether the block goes with it: inside, or in shared memory."""
        if x is None:
            return pack_header(call.op, None, needs_grad), True
        header = pack_header(call.op, x.shape, needs_grad)
        if x.nbytes <= limit:
            return header + x.tobytes(), True
        place = None if channel.mailbox is None or limit < 0 else channel.mailbox.offer(x, call.borrowed)
        if place is None:
            return header, False
        at, strides = place
        return pack_header(call.op, x.shape, needs_grad, strides) + at.to_bytes(8, "little"), True

    def _send_header(
        self, group: Group, call: Call, shape: Shape | None, x: Any = None, limit: int = -1
    ) -> tuple[Headers, bool]:
        """Send all members one header, and receive theirs.

        x: the block; it goes with the header if it has at most `limit` bytes, or lies in shared memory. The second
        result says whether it does.
        """
        early, self.early = self.early, None
        if early is not None:
            return early, True
        channel, name, needs_grad = self._begin(group, call)
        header, inline = (
            (pack_header(call.op, shape, needs_grad), False)
            if x is None
            else self._words(channel, call, x, limit, needs_grad)
        )
        outgoing, end = channel.outgoing, 8 + len(header)
        for row in channel.others:
            outgoing.words[row][0] = name
            outgoing.bytes[row][8:end] = header
        return self.swap(group, call, channel, name), inline

    def _send_headers(
        self, group: Group, call: Call, part: Callable[[int], Any], limit: int
    ) -> tuple[Headers, Collection[int]]:
        """Send each member a header of its own, and receive theirs.

        part(k): the block that member k will receive, or None. It goes with the header as in `_send_header`. The second
        result lists the members whose blocks do not.
        """
        early, self.early = self.early, None
        if early is not None:
            return early, ()
        channel, name, needs_grad = self._begin(group, call)
        outgoing, me, remaining = channel.outgoing, channel.me, []
        for k, row in enumerate(group.rows):
            if row == me:
                continue
            header, inline = self._words(channel, call, part(k), limit, needs_grad)
            if not inline:
                remaining.append(k)
            end = 8 + len(header)
            outgoing.words[row][0] = name
            outgoing.bytes[row][8:end] = header
        return self.swap(group, call, channel, name), remaining

    def swap(self, group: Group, call: Call, channel: Channel, name: int) -> Headers:
        """Send the outgoing headers, and receive those of the others, which are valid until the next call."""
        self.transport.swap(channel, call)
        self.agree(group, call, channel, name)
        incoming = channel.incoming
        if call.needs_grad is not None:
            call.needs_grad[0] = call.needs_grad[0] or any(map(incoming.needs_grad, channel.others))
        return incoming

    def _read(
        self,
        group: Group,
        incoming: Headers,
        dtype: np.dtype,
        shapes: Sequence[Shape],
        buffers: Sequence[np.ndarray],
        limit: int,
    ) -> dict[int, np.ndarray]:
        """Copy the blocks that came with the headers into the buffers of their members. Returns the other buffers."""
        rest = {}
        for k, row in enumerate(group.rows):
            if k == group.index:
                continue
            if incoming.is_inline(row, buffers[k].nbytes, limit):
                put(buffers[k].view(dtype).reshape(shapes[k]), incoming.block_view(row, shapes[k], dtype))
            else:
                rest[k] = buffers[k]
        return rest

    def _messages(self, group: Group, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray]) -> list[Any]:
        """Exchange blocks over the channel of the headers. It is open: members without messages need not call this."""
        rows = group.rows
        by_row = ({rows[k]: x for k, x in blocks.items()} for blocks in (sends, receives))
        return self.transport.channel(group.ordered).exchange(*by_row)
