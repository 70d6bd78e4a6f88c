"""The collectives of workers that are processes, for any engine.

Processes of one host share memory: their collectives begin with headers (`announce.py`), small blocks are sent in them,
and large ones are read where they lie, or go as messages. Groups on several hosts, or of many processes, exchange
messages only (`message_comm.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf, prod
from types import MappingProxyType
from typing import Any

import numpy as np

from spmd import kernels
from spmd.device import copied, put
from spmd.kernels.cpu.moves import places
from spmd.transport.algorithms.neighbours import Near
from spmd.transport.call import Call, Group, Shape
from spmd.transport.handles import Done, Handle, Mapped, read_only, sealed
from spmd.transport.plan import PlaceBoxes, Plan
from spmd.transport.processes.all_reduce import AllReduceComm
from spmd.transport.processes.announce import ProcessGroup
from spmd.transport.processes.channel import bytes_of, pieces
from spmd.transport.processes.headers import INLINE_LIMIT, MAX_NDIM, WORD, Headers
from spmd.transport.processes.message_comm import Messages, split
from spmd.transport.processes.repeat_messages import repeated_messages
from spmd.transport.processes.run_plan import RepeatedPlan

__all__ = ["ProcessComm"]


class ProcessComm(AllReduceComm):
    """The `Comm` of a process."""

    def __init__(self, transport: ProcessGroup):
        super().__init__(transport)
        self.messages = Messages(self)

    def message_limit(self, call: Call, x: Any) -> float:
        """The most bytes of a block that may go by way of other members."""
        return inf

    def members_per_host(self, group: Group) -> int:
        return self.transport.groups.members_per_host(group)

    def share(self, group: Group, call: Call, own: str, number: int = 0) -> tuple[list[str], int]:
        """A text of each member, and the sum of their numbers, modulo 2**64. Not counted by the ledger."""
        if group.size == 1:
            return [own], 0
        run = self.begin_messages(group, call)
        if run is None:
            send = np.frombuffer((number & WORD).to_bytes(8, "little") + own.encode(), np.uint8)
            brought = [b.tobytes() for b in self._all_gather(group, call.of(send.shape), send).wait()]
            total = sum(int.from_bytes(b[:8], "little") for b in brought)
            return [b[8:].decode() for b in brought], total & WORD
        texts, total = self.messages.agree(run, own, number).wait()
        return [text for count, text in texts for _ in range(count)], total

    def meet(self, group: Group, call: Call, shapes: Sequence[Shape | None]) -> list[Shape | None]:
        """Send each member the shape of the block that it will receive (None: nothing). Returns the shapes that this
        worker will receive.

        Raises MismatchError on all members if their calls differ.
        """
        if group.size == 1:
            return [*shapes]
        run = self.begin_messages(group, call)
        return self._meet(group, call, shapes) if run is None else self.messages.meet(run, shapes).wait()

    def _shapes(self, group: Group, call: Call) -> Handle:
        if group.size == 1:
            return Done([call.shape])
        run = self.begin_messages(group, call)
        if run is not None:
            return self.messages.shapes(run, call.shape)
        return Done(self._shapes_in(self._send_header(group, call, call.shape)[0], group, call.shape))

    def _lengths(self, group: Group, call: Call, near: Near) -> Handle:
        if group.size == 1:
            return Done((call.shape[near.dim],))
        run = self.begin_messages(group, call)
        if run is not None:
            return self.messages.lengths(run, call.shape, near)
        shapes = self._shapes_in(self._send_header(group, call, call.shape)[0], group, call.shape)
        return Done(tuple((shape or ())[near.dim] for shape in shapes))

    def repeated_plan(self, call: Call, plan: Plan, x: np.ndarray) -> Any:
        group, me = plan.group, plan.group.index
        if x.ndim > MAX_NDIM or self.inline_limit(call, x) < INLINE_LIMIT:
            return None
        if self.transport.groups.known_calls(group) is not None:
            return repeated_messages(call, plan, x)
        channel = self.transport.channels.get(group.ordered)
        if channel is None or channel.mailbox is None or plan.assumed_lengths is not None or not plan.repeats:
            return None
        large = [
            p for p in (x[i] for k, i in enumerate(plan.parts) if i is not None and k != me) if p.nbytes > INLINE_LIMIT
        ]
        readable = channel.mailbox.shared_memory is not None
        # Parts that are copied together do not lie in shared memory.
        served = not large or (readable and all(np.may_share_memory(p, x) for p in large))
        return RepeatedPlan(call, plan, x) if served else None

    def _reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        if group.size == 1:
            return Done(read_only(parts[0]))
        run = self.begin_messages(group, call)
        if run is not None:
            return self.messages.reduce_scatter(run, parts)
        own_part = parts[group.index]

        def finish(xs: list[np.ndarray]) -> np.ndarray:
            xs[group.index] = own_part
            # Reuse the buffer of one part, but not one that holds several parts, nor a header.
            into: Any = xs[1 - group.index] if len(xs) == 2 and own_part.nbytes > INLINE_LIMIT else None
            return sealed(kernels.of(own_part).combine(xs, into=into))

        limit = self.inline_limit(call, parts)
        incoming, remaining = self._send_headers(group, call, parts.__getitem__, limit)
        coming = [own_part.shape] * group.size
        if not remaining and self._all_inline(incoming, group, [own_part.nbytes] * group.size, limit):
            blocks = incoming.block_views(own_part, group.rows, group.index, coming)
            return Done(read_only(kernels.of(own_part).combine(blocks)))
        coming = [s or () for s in self._shapes_in(incoming, group, own_part.shape)]
        return Mapped(self._finish_all_to_all(group, call, parts, coming, incoming, limit, remaining), finish)

    def _all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle:
        if group.size == 1:
            return Done([read_only(x)])
        run = self.begin_messages(group, call)
        if run is not None:
            return self.messages.all_gather(run, x)
        incoming, inline, all_inline, shapes = self._announce_block(group, call, x)
        if all_inline:
            own_block = read_only(copied(x) if call.borrowed else x)
            return Done(incoming.inline_blocks(own_block, group.rows, group.index, shapes))
        return self._finish_all_gather(group, call, x, shapes, incoming, inline)

    def _announce_block(self, group: Group, call: Call, x: np.ndarray) -> tuple[Headers, bool, bool, list[Shape]]:
        """Send all members this block's header. Returns the incoming headers, whether the block went with its header,
        whether the blocks of all members did, and their shapes."""
        limit = self.inline_limit(call, x)
        incoming, inline = self._send_header(group, call, x.shape, x, limit)
        shapes = [s or () for s in self._shapes_in(incoming, group, x.shape)]
        all_inline = inline and self._all_inline(incoming, group, [prod(s) * x.itemsize for s in shapes], limit)
        return incoming, inline, all_inline, shapes

    def _finish_all_gather(
        self, group: Group, call: Call, x: np.ndarray, shapes: Sequence[Shape], incoming: Headers, inline: bool
    ) -> Handle:
        """The rest of an all-gather in which not all blocks came with the headers. inline: whether this worker's block
        went with its header."""
        counts = [prod(s) * x.itemsize for s in shapes]
        receive, limit = self.empty_buffer(sum(counts), call, x), self.inline_limit(call, x)
        send, me = bytes_of(x), group.index
        if inline or any(incoming.is_inline(row, counts[k], limit) for k, row in enumerate(group.rows) if k != me):
            buffers = pieces(receive, counts)
            put(buffers[me], send)
            rest = self._read(group, incoming, x.dtype, shapes, buffers, limit)
            sends = {} if inline else {k: send for k in range(group.size) if k != me}
            self.synchronize()
            requests = self._messages(group, sends, rest)
        else:
            self.synchronize()
            requests = self.transport.channel(group.members).all_gather(send, receive, counts)
        return self._pending(requests, (send, receive), lambda: split(read_only(receive), shapes, x.dtype))

    def _all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        if group.size == 1:
            return Done([read_only(p) for p in parts])
        run = self.begin_messages(group, call)
        if run is not None:
            return self.messages.all_to_all(run, parts)
        incoming, remaining, all_inline, coming = self._announce_parts(group, call, parts)
        if all_inline:
            return Done(incoming.inline_blocks(read_only(parts[group.index]), group.rows, group.index, coming))
        return self._finish_all_to_all(
            group, call, parts, coming, incoming, self.inline_limit(call, parts), remaining, True
        )

    def _announce_parts(
        self, group: Group, call: Call, parts: Sequence[np.ndarray]
    ) -> tuple[Headers, Collection[int], bool, list[Shape]]:
        """Send each member the header of its part. Returns the incoming headers, the members whose parts did not
        go with their headers, whether all parts did in both directions, and the shapes of the incoming parts."""
        limit = self.inline_limit(call, parts)
        incoming, remaining = self._send_headers(group, call, parts.__getitem__, limit)
        coming = [s or () for s in self._shapes_in(incoming, group, parts[group.index].shape)]
        sizes = [prod(s) * parts[0].itemsize for s in coming]
        return incoming, remaining, not remaining and self._all_inline(incoming, group, sizes, limit), coming

    def _finish_all_to_all(
        self,
        group: Group,
        call: Call,
        parts: Sequence[np.ndarray],
        shapes: Sequence[Shape],
        incoming: Headers,
        limit: int,
        remaining: Collection[int],
        own: bool = False,
    ) -> Handle:
        """The rest of an all-to-all. shapes: of the incoming parts. remaining: the members whose parts did not go with
        their headers. own: whether the result contains this worker's part; if not, the caller may overwrite
        the result."""
        dtype, me = parts[0].dtype, group.index
        coming = [prod(s) * dtype.itemsize for s in shapes]
        if not own:
            coming[me] = 0
            shapes = [(0,) if k == me else s for k, s in enumerate(shapes)]
        receive = self.empty_buffer(sum(coming), call, parts)
        buffers = pieces(receive, coming)
        sends = {k: bytes_of(parts[k]) for k in remaining}
        receives = self._read(group, incoming, dtype, shapes, buffers, limit)
        self.synchronize()
        requests = self._messages(group, sends, receives)
        if own:  # while the others are under way
            put(buffers[me].view(dtype).reshape(parts[me].shape), parts[me])
            return self._pending(requests, (sends, receive), lambda: split(read_only(receive), shapes, dtype))
        return self._pending(requests, (sends, receive), lambda: [*split(receive, shapes, dtype)])

    def _broadcast(self, group: Group, call: Call, x: np.ndarray | None, root: int) -> Handle:
        if group.size == 1:
            return Done(read_only(x))
        run = self.begin_messages(group, call)
        if run is not None:
            return self.messages.broadcast(run, x, root)
        limit, dtype = self.inline_limit(call, x), np.dtype(call.dtype)
        incoming, inline = self._send_header(group, call, None if x is None else x.shape, x, limit)
        if inline and x is not None:
            return Done(read_only(copied(x) if call.borrowed else x))
        shape = (incoming.shape(group.rows[root]) if x is None else x.shape) or ()
        size = prod(shape) * dtype.itemsize
        if x is None and incoming.is_inline(group.rows[root], size, limit):
            return Done(incoming.inline_block(group.rows[root], shape, dtype))
        buffer = bytes_of(x) if x is not None else self.empty_buffer(size, call, x)
        self.synchronize()
        requests = self.transport.channel(group.members).broadcast(buffer, root)
        if x is not None:
            return self._pending(requests, buffer, lambda: read_only(x))
        return self._pending(requests, buffer, lambda: sealed(buffer.view(dtype).reshape(shape)))

    def _reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        if group.size == 1:
            return Done(read_only(x))
        run = self.begin_messages(group, call)
        if run is not None:
            return self.messages.reduce(run, x, root)
        n, at_root, rows, limit = group.size, group.index == root, group.rows, self.inline_limit(call, x)
        incoming, remaining = self._send_headers(group, call, lambda k: x if k == root else None, limit)
        if at_root and self._all_inline(incoming, group, [x.nbytes] * n, limit):
            return Done(read_only(kernels.of(x).combine(incoming.block_views(x, rows, root, (x.shape,) * n))))
        if not at_root and not remaining:
            return Done(None)
        others = self.empty_buffer((n - 1) * x.nbytes, call, x).reshape(n - 1, x.nbytes) if at_root else None
        receives: Mapping[int, np.ndarray] = {}
        if others is not None:
            buffers = [*others[:root], bytes_of(x), *others[root:]]
            receives = self._read(group, incoming, x.dtype, [x.shape] * n, buffers, limit)
        send = bytes_of(x)
        self.synchronize()
        requests = self._messages(group, dict.fromkeys(remaining, send), receives)

        def finish() -> np.ndarray | None:
            if others is None:
                return None
            blocks = [b.view(x.dtype).reshape(x.shape) for b in others]
            # as in a reduce-scatter
            into: Any = blocks[0] if n == 2 else None
            return sealed(kernels.of(x).combine([*blocks[:root], x, *blocks[root:]], into=into))

        return self._pending(requests, (send, others), finish)

    def _gather(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        run = self.begin_messages(group, call) if group.size > 1 else None
        return super()._gather(group, call, x, root) if run is None else self.messages.gather(run, x, root)

    def _scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray] | None, root: int) -> Handle:
        run = self.begin_messages(group, call) if group.size > 1 else None
        return super()._scatter(group, call, parts, root) if run is None else self.messages.scatter(run, parts, root)

    def _exchange(
        self,
        group: Group,
        call: Call,
        sends: Mapping[int, np.ndarray],
        sources: Collection[int],
        into: Mapping[int, np.ndarray] = MappingProxyType({}),
    ) -> Handle:
        """into[k]: where to put what member k sends, if it is of that shape; a message only if it is contiguous."""
        me, limit, blocks = group.index, self.inline_limit(call, sends), {}
        if group.size == 1:
            return Done({k: read_only(x) for k, x in sends.items()})
        run = self.begin_messages(group, call)
        if run is not None:
            return self.messages.exchange(run, sends, sources, into)
        incoming, remaining = self._send_headers(group, call, sends.get, limit)
        sent = {k: bytes_of(sends[k]) for k in remaining}
        dtype, received = np.dtype(call.dtype), {}
        for k, row in enumerate(group.rows):
            if k == me:
                if k in sends:
                    blocks[k] = read_only(sends[k])
                continue
            shape = incoming.shape(row)
            if shape is None:
                continue
            nbytes, place = prod(shape) * dtype.itemsize, into.get(k)
            if place is not None and place.shape != shape:
                place = None
            if incoming.is_inline(row, nbytes, limit):
                if place is None:
                    blocks[k] = incoming.inline_block(row, shape, dtype)
                else:
                    put(place, incoming.block_view(row, shape, dtype))
                    blocks[k] = place
            elif place is not None and place.flags.c_contiguous:
                blocks[k], received[k] = place, bytes_of(place)
            else:
                received[k] = self.empty_buffer(nbytes, call, sends)
                blocks[k] = received[k].view(dtype).reshape(shape)
        if not sent and not received:
            return Done(blocks)
        self.synchronize()
        requests = self._messages(group, sent, received)

        def finish() -> dict[int, np.ndarray]:
            for k in received:
                sealed(blocks[k])
            return blocks

        return self._pending(requests, (sent, received), finish)

    def _run(self, plan: Plan, call: Call, x: np.ndarray) -> Handle:
        """Blocks that came with the headers are combined without a copy."""
        group, kind = plan.group, plan.kind
        if group.size > 1 and type(x) is np.ndarray:
            by_messages = self.transport.groups.calls_of(group, call) is not None
            if kind == "all_gather" and not by_messages:
                incoming, inline, all_inline, shapes = self._announce_block(group, call, x)
                if all_inline:
                    return Done(plan.finish(x, incoming.block_views(x, group.rows, group.index, shapes), True))
                handle = self._finish_all_gather(group, call, x, shapes, incoming, inline)
                return Mapped(handle, lambda blocks: plan.finish(None, blocks))
            if kind == "all_to_all" and not by_messages:
                parts = [*plan.sends(x).values()]
                incoming, remaining, all_inline, coming = self._announce_parts(group, call, parts)
                if all_inline:
                    return Done(
                        plan.finish(x, incoming.block_views(parts[group.index], group.rows, group.index, coming), True)
                    )
                limit = self.inline_limit(call, parts)
                handle = self._finish_all_to_all(group, call, parts, coming, incoming, limit, remaining, True)
                return Mapped(handle, lambda blocks: plan.finish(None, blocks))
            if type(plan.combine) is PlaceBoxes and not plan.combine.adds:
                handle = self._receive_in_place(plan, plan.combine, call, x)
                if handle is not None:
                    return handle
        return super()._run(plan, call, x)

    def _receive_in_place(self, plan: Plan, combine: PlaceBoxes, call: Call, x: np.ndarray) -> Handle | None:
        """Receive parts for contiguous boxes directly in the result, and copy this worker's part meanwhile. None if the
        result is small, or boxes overlap."""
        group, me, dtype, sends = plan.group, plan.group.index, plan.dtype, plan.sends(x)
        nbytes = prod(combine.out) * dtype.itemsize
        if len(combine.boxes) < 2 or nbytes <= self.inline_limit(call, sends):
            return None
        indices, everything, disjoint = places(combine.out, tuple(combine.boxes.values()))
        if not disjoint:
            return None
        buffer = self.empty_buffer(nbytes, call, x)
        out = buffer.view(dtype).reshape(combine.out)
        if not everything:
            out.fill(0)
        views = {k: out[place] for k, place in zip(combine.boxes, indices, strict=True)}
        into = {k: view for k, view in views.items() if k != me}
        others = {k: part for k, part in sends.items() if k != me}
        handle = self._exchange(group, call, others, [k for k in views if k != me], into)
        if me in views:
            put(views[me], sends[me])

        def finish(received: dict[int, np.ndarray]) -> tuple[np.ndarray, Any]:
            for k, view in views.items():
                if k != me and received[k] is not view:
                    put(view, received[k])
            return plan.with_bound(sealed(out))

        return Mapped(handle, finish)
