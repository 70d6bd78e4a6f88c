"""Collectives of groups that do not share memory: by messages, in about log2 n rounds, or between neighbours only.

The algorithms are schedules (`transport.algorithms`), chosen by what all members know alike. Where blocks may differ in
size from member to member, what describes them goes by the algorithm for small blocks, and small blocks with it; then
all know which blocks are large, and these go directly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from spmd.device import Adjoining, contiguous, copied, joined, put
from spmd.kernels.cpu.chunks import accurate
from spmd.layout import block_sizes, offsets
from spmd.transport.algorithms import choice, phases, reductions
from spmd.transport.algorithms.neighbours import Near, NearLengths
from spmd.transport.algorithms.schedule import Schedule, Span, others
from spmd.transport.call import Pair, Shape
from spmd.transport.handles import Handle, read_only, sealed
from spmd.transport.processes.channel import bytes_of, pieces
from spmd.transport.processes.headers import WORD, pack_header, unpack_shape
from spmd.transport.processes.reduction_rounds import Reduction
from spmd.transport.processes.running import Arrived, Running, Steps

__all__ = ["Messages", "split"]

_DIRECT = 1 << 12
"""Added to the rank in what describes a block: it is large, and goes from its owner to its receivers directly."""


def split(buffer: np.ndarray, shapes: Sequence[Shape], dtype) -> list[np.ndarray]:
    """The consecutive blocks of these shapes in a buffer of bytes."""
    whole = buffer.view(dtype)
    parts = pieces(whole, [prod(s) for s in shapes])
    blocks = [part.reshape(s) for part, s in zip(parts, shapes, strict=True)]
    return Adjoining(blocks, whole) if type(buffer) is np.ndarray else blocks


class _Item(NamedTuple):
    """A block on its way. head: what describes it. data: its bytes; None where they go directly. shape: None where
    nothing comes."""

    head: bytes
    data: Any
    shape: Shape | None

    @classmethod
    def of(cls, op: str, shape: Shape | None, data: Any) -> _Item:
        head = pack_header(op, shape, False)
        if data is None and shape is not None:
            head = (int.from_bytes(head[:8], "little") + _DIRECT).to_bytes(8, "little") + head[8:]
        return cls(head, data, shape)


def _packed(items: Mapping[Any, _Item], keys: Any) -> tuple[bytes, Any]:
    """Head and data of the message with these items."""
    parts = [items[key] for key in keys]
    data = [part.data for part in parts if part.data is not None and len(part.data)]
    head = parts[0].head if len(parts) == 1 else b"".join([part.head for part in parts])
    return head, b"" if not data else data[0] if len(data) == 1 else b"".join(data)


def _unpack(items: dict[Any, _Item], keys: Any, arrived: Arrived, itemsize: int) -> None:
    """Take the items of a message out of it."""
    words, data, at, begin = np.frombuffer(arrived.head, np.int64).tolist(), arrived.data, 0, 0
    for key in keys:
        rank = words[at] % _DIRECT
        shape = tuple(words[at + 1 : at + rank]) if rank else None
        direct = words[at] >= _DIRECT
        end = at + max(rank, 1)
        nbytes = 0 if shape is None or direct else prod(shape) * itemsize
        items[key] = _Item(arrived.head[8 * at : 8 * end], None if direct else data[begin : begin + nbytes], shape)
        at, begin = end, begin + nbytes


class Messages:
    """The collectives of one process by messages. Each method is given a `Running`, which is fresh."""

    def __init__(self, comm: Any):
        self.comm = comm

    def _empty(self, run: Running, like: Any) -> Callable[[int], Any]:
        return lambda nbytes: self.comm.empty_buffer(nbytes, run.call, like)

    def _item(self, run: Running, x: Any) -> _Item:
        """A block: a large one goes directly."""
        limit = min(choice.INLINE_MAX, self.comm.message_limit(run.call, x))
        return _Item.of(run.call.op, x.shape, bytes_of(x) if x.nbytes <= limit else None)

    # Reductions.

    def all_reduce(self, run: Running, x: Any, how: str) -> Handle:
        n, me, per_host = run.group.size, run.group.index, self.comm.members_per_host(run.group)
        schedule = phases.all_reduce(n, me, x.nbytes, per_host, accurate(x.dtype) != x.dtype)
        return self._reduce_flat(run, schedule, x, how, (0, schedule.chunks))

    def reduce(self, run: Running, x: Any, root: int) -> Handle:
        n, me = run.group.size, run.group.index
        schedule = phases.reduce(n, me, root, x.nbytes, accurate(x.dtype) != x.dtype)
        return self._reduce_flat(run, schedule, x, "sum", (0, schedule.chunks) if me == root else None, False)

    def _reduce_flat(
        self, run: Running, schedule: Schedule, x: Any, how: str, result: Span | None, all_hear: bool = True
    ) -> Handle:
        """all_hear: whether each member hears of all others in it."""
        flat, sizes = bytes_of(x).view(x.dtype), block_sizes(x.size, schedule.chunks)
        ends = offsets(sizes)
        state = Reduction(run, x, sizes, lambda span: flat[ends[span[0]] : ends[span[1]]], how, self._empty(run, x))

        def steps() -> Steps:
            total = yield from state.steps(schedule, result, self.comm.synchronize)
            if not all_hear:
                self._agree_on_gradients(run)
            if total is None:
                return None
            return sealed(total.reshape(x.shape))

        return run.start(steps())

    def reduce_scatter(self, run: Running, parts: Sequence[Any]) -> Handle:
        n, me = run.group.size, run.group.index
        own = parts[me]
        schedule = phases.reduce_scatter(n, me, sum(p.nbytes for p in parts), accurate(own.dtype) != own.dtype)
        order = reductions.packed_order(n) if schedule.algorithm == "halving" else range(n)
        flat = [bytes_of(parts[k]).view(parts[k].dtype) for k in order]
        place = order.index(me)

        def part(span: Span) -> Any:
            return flat[span[0]] if span[1] - span[0] == 1 else joined(flat[span[0] : span[1]], 0)

        state = Reduction(run, own, [x.size for x in flat], part, "sum", self._empty(run, own))

        def steps() -> Steps:
            total = yield from state.steps(schedule, (place, place + 1), self.comm.synchronize)
            return sealed(total.reshape(own.shape))

        return run.start(steps())

    # Movements.

    def _route(self, run: Running, schedule: Schedule, items: dict[Any, _Item], itemsize: int) -> Steps:
        """Move items as the schedule says."""
        for step in schedule.rounds:
            for transfer in step.sends:
                run.send(transfer.peer, *_packed(items, transfer.items))
            yield
            for transfer in step.receives:
                arrived = run.take(transfer.peer)
                run.finish_receives()
                _unpack(items, transfer.items, arrived, itemsize)

    def _move(self, run: Running, sends: Mapping[int, Any], receives: Mapping[int, Any]) -> None:
        """Send large blocks to members directly, and receive them into bytes."""
        self.comm.synchronize()
        for k, x in sends.items():
            run.send(k, b"", x)
        coming = {k: run.take(k, lambda _, place=place: place) for k, place in receives.items()}
        run.finish_receives()
        for k, arrived in coming.items():
            if not arrived.placed:
                put(receives[k], arrived.data)

    def _route_large(
        self, run: Running, schedule: Schedule, items: Mapping[Any, _Item], places: Mapping[Any, Any]
    ) -> None:
        """Move the items that are known to be large as the schedule says, one at a time. places: the bytes of those
        that are here, and memory for those that come."""
        for step in schedule.rounds:
            sends, receives = (
                {t.peer: places[key] for t in transfers for key in t.items if items[key].data is None}
                for transfers in (step.sends, step.receives)
            )
            if sends or receives:
                self._move(run, sends, receives)

    def _collected(
        self, run: Running, items: Mapping[Any, _Item], keys: Sequence[Any], own: Any, like: Any
    ) -> tuple[list[np.ndarray], dict[Any, Any]]:
        """Memory for what comes from each member, one after the other, with what has come by now. keys: of the items
        that are wanted, by member. own: in place of this member's. like: what this member contributes. Gives the
        blocks, and the bytes of each item."""
        me, dtype = run.group.index, own.dtype
        shapes = [items[key].shape or () for key in keys]
        counts = [prod(s) * dtype.itemsize for s in shapes]
        buffer = self.comm.empty_buffer(sum(counts), run.call, like)
        places = dict(zip(keys, pieces(buffer, counts), strict=True))
        put(places[keys[me]].view(dtype).reshape(own.shape), own)
        for k in others(len(keys), me):
            if items[keys[k]].data is not None:
                put(places[keys[k]], items[keys[k]].data)
        return split(sealed(buffer), shapes, dtype), places

    def _agree_on_gradients(self, run: Running) -> None:
        """Let all members know whether any one's block is differentiated, where they have not all heard of each
        other."""
        if run.call.needs_grad is None or type(run.group) is Pair:
            return
        for step in phases.agreement(run.group.size, run.group.index).rounds:
            for transfer in step.sends:
                run.send(transfer.peer, b"", b"")
            for transfer in step.receives:
                run.take(transfer.peer)

    def all_gather(self, run: Running, x: Any) -> Handle:
        """The blocks of all members, as a list."""
        n, me, dtype = run.group.size, run.group.index, x.dtype
        items = {me: self._item(run, x)}
        schedule, per_host = phases.all_gather(n, me), self.comm.members_per_host(run.group)

        def steps() -> Steps:
            yield from self._route(run, schedule, items, dtype.itemsize)
            blocks, places = self._collected(run, items, range(n), x, x)
            self._route_large(run, phases.all_gather_large(n, me, per_host), items, places)
            return blocks

        return run.start(steps())

    def gather(self, run: Running, x: Any, root: int) -> Handle:
        """The blocks of all members, as a list, at the root; None elsewhere."""
        n, me, dtype = run.group.size, run.group.index, x.dtype
        items = {me: self._item(run, x)}
        schedule = phases.gather(n, me, root)

        def steps() -> Steps:
            yield from self._route(run, schedule, items, dtype.itemsize)
            blocks, places = None, {me: bytes_of(x)}
            if me == root:
                blocks, places = self._collected(run, items, range(n), x, x)
            self._route_large(run, phases.gather_large(n, me, root), items, places)
            self._agree_on_gradients(run)
            return blocks

        return run.start(steps())

    def scatter(self, run: Running, parts: Sequence[Any] | None, root: int) -> Handle:
        """parts[me], of what the root brings; others bring None."""
        n, me, dtype = run.group.size, run.group.index, np.dtype(run.call.dtype)
        items = {} if parts is None else {k: self._item(run, part) for k, part in enumerate(parts)}
        schedule = phases.scatter(n, me, root)

        def steps() -> Steps:
            yield from self._route(run, schedule, items, dtype.itemsize)
            shape, buffer = items[me].shape or (), items[me].data
            if parts is not None:
                places = {k: bytes_of(part) for k, part in enumerate(parts)}
            else:
                if buffer is None:
                    buffer = self.comm.empty_buffer(prod(shape) * dtype.itemsize, run.call, None)
                places = {me: buffer}
            self._route_large(run, phases.scatter_large(n, me, root), items, places)
            self._agree_on_gradients(run)
            return sealed(buffer.view(dtype).reshape(shape)) if parts is None else read_only(parts[me])

        return run.start(steps())

    def shapes(self, run: Running, shape: Shape) -> Handle:
        """The shapes of all members' blocks."""
        n, me = run.group.size, run.group.index
        items = {me: _Item.of(run.call.op, shape, None)}

        def steps() -> Steps:
            yield from self._route(run, phases.shapes(n, me), items, 0)
            return [items[k].shape for k in range(n)]

        return run.start(steps())

    def lengths(self, run: Running, shape: Shape, near: Near) -> Handle:
        """The lengths of near blocks in one dimension, hop by hop."""
        known = NearLengths(run.group.size, run.group.index, shape[near.dim], near)

        def steps() -> Steps:
            while known.sends or known.sources:
                for member, length in known.sends.items():
                    run.send(member, length.to_bytes(8, "little"), b"")
                yield
                known.take({k: int.from_bytes(run.take(k).head, "little") for k in known.sources})
            return known.lengths

        return run.start(steps())

    def meet(self, run: Running, shapes: Sequence[Shape | None]) -> Handle:
        """The shapes of what comes from each member, of those that go to each."""
        n, me = run.group.size, run.group.index
        items = {(me, k): _Item.of(run.call.op, shape, None) for k, shape in enumerate(shapes)}

        def steps() -> Steps:
            yield from self._route(run, phases.meet(n, me), items, 0)
            return [items[k, me].shape for k in range(n)]

        return run.start(steps())

    def all_to_all(self, run: Running, parts: Sequence[Any]) -> Handle:
        """What each member sends here, as a list."""
        n, me, dtype = run.group.size, run.group.index, parts[0].dtype
        items = {(me, k): self._item(run, part) for k, part in enumerate(parts)}
        schedule = phases.all_to_all(n, me)

        def steps() -> Steps:
            yield from self._route(run, schedule, items, dtype.itemsize)
            blocks, places = self._collected(run, items, [(k, me) for k in range(n)], parts[me], parts)
            places |= {(me, k): bytes_of(parts[k]) for k in others(n, me)}
            self._route_large(run, phases.all_to_all_large(n, me), items, places)
            return blocks

        return run.start(steps())

    def broadcast(self, run: Running, x: Any, root: int) -> Handle:
        """The block of the root."""
        n, me, dtype = run.group.size, run.group.index, np.dtype(run.call.dtype)
        items = {}
        if x is not None:
            small = x.nbytes <= min(choice.TREE_MAX, self.comm.message_limit(run.call, x))
            items[0] = _Item.of(run.call.op, x.shape, bytes_of(x) if small else None)
        schedule = phases.broadcast(n, me, root)

        def steps() -> Steps:
            yield from self._route(run, schedule, items, dtype.itemsize)
            item = items[0]
            shape = item.shape or ()
            nbytes = prod(shape) * dtype.itemsize
            buffer = item.data
            if buffer is None:
                buffer = bytes_of(x) if x is not None else self.comm.empty_buffer(nbytes, run.call, x)
                self._spread(run, buffer, root)
            self._agree_on_gradients(run)
            if x is not None:
                return read_only(copied(x) if run.call.borrowed else x)
            return sealed(buffer.view(dtype).reshape(shape))

        return run.start(steps())

    def _spread(self, run: Running, buffer: Any, root: int) -> None:
        """Send a large block from the root to all: chunks by a tree, then all chunks around."""
        n, me = run.group.size, run.group.index
        schedule = phases.spread(n, me, root)
        ends = offsets(block_sizes(buffer.nbytes, schedule.chunks))

        def place(items: Any) -> Any:
            """The bytes of some chunks, which stand in the order of the members from the root on."""
            first = next(iter(items))
            begin = (first - root) % n if schedule.chunks > 1 else 0
            return buffer[ends[begin] : ends[begin + len(items)]]

        for step in schedule.rounds:
            sends = {transfer.peer: place(transfer.items) for transfer in step.sends}
            self._move(run, sends, {transfer.peer: place(transfer.items) for transfer in step.receives})

    def exchange(
        self,
        run: Running,
        sends: Mapping[int, Any],
        sources: Collection[int],
        into: Mapping[int, np.ndarray] = MappingProxyType({}),
    ) -> Handle:
        """What the sources send, by member. into[k]: where to put what member k sends, if it is of that shape; a
        message only if it is contiguous."""
        me, dtype = run.group.index, np.dtype(run.call.dtype)
        like = sends

        def steps() -> Steps:
            outgoing = {k: contiguous(x) for k, x in sends.items() if k != me}
            self.comm.synchronize()
            for k, x in outgoing.items():
                run.send(k, pack_header(run.call.op, x.shape, False), x)
            yield
            blocks, coming = dict.fromkeys(sorted(sources)), []
            for k in blocks:
                if k == me:
                    blocks[k] = read_only(sends[k])
                    continue
                arrived = run.take(k, lambda arriving, k=k: self._place(run, arriving, into.get(k), dtype, like))
                coming.append((k, arrived))
            run.finish_receives()
            for k, arrived in coming:
                shape = unpack_shape(arrived.head)
                place = into.get(k)
                block = arrived.data.view(dtype).reshape(shape)
                if place is None or place.shape != shape:
                    blocks[k] = sealed(block)
                    continue
                if not np.may_share_memory(place, block):
                    put(place, block)
                blocks[k] = place
            self._agree_on_gradients(run)
            return blocks

        handle = run.start(steps())
        if type(run.group) is Pair and run.group.sends and not run.sending:
            handle.wait()
        return handle

    def _place(self, run: Running, arriving: Any, place: Any, dtype: np.dtype, like: Any) -> Any:
        """Memory for the data of a message that has begun to come."""
        shape = unpack_shape(arriving.head)
        if place is not None and place.shape == shape and place.flags.c_contiguous:
            return bytes_of(place)
        return self.comm.empty_buffer(arriving.nbytes, run.call, like)

    def agree(self, run: Running, own: str, number: int) -> Handle:
        """The texts of all members, [[how many members on end have it, text], ...], and the sum of their numbers,
        modulo 2**64. Equal texts are sent once."""
        schedule = phases.agreement(run.group.size, run.group.index)

        def steps() -> Steps:
            runs, total = [[1, own]], number
            for step in schedule.rounds:
                for transfer in step.sends:
                    run.send(transfer.peer, b"", json.dumps([total, runs]).encode())
                yield
                for transfer in step.receives:
                    arrived = run.take(transfer.peer)
                    run.finish_receives()
                    other, come = json.loads(arrived.data.tobytes())
                    if step.carries == "total":
                        runs, total = come, other
                    else:
                        runs = _on_end(come, runs) if step.merge == "before" else _on_end(runs, come)
                        total = total + other & WORD
            return runs, total

        return run.start(steps())


def _on_end(first: list[Any], second: list[Any]) -> list[Any]:
    """The texts of some members, and then those of others."""
    if first[-1][1] == second[0][1]:
        return [*first[:-1], [first[-1][0] + second[0][0], first[-1][1]], *second[1:]]
    return first + second
