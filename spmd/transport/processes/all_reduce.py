"""All-reduces over processes. Blocks are combined here, by the tree of `kernels.pairwise`: MPI and gloo guarantee no
order."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod

import numpy as np

from spmd import kernels
from spmd.device import joined, put
from spmd.kernels.memory import nontemporal
from spmd.layout import block_sizes, offsets
from spmd.transport.algorithms.choice import SEPARATE_MIN
from spmd.transport.call import Call, Group
from spmd.transport.handles import Done, Handle, Mapped, read_only, sealed
from spmd.transport.processes.announce import HeaderComm
from spmd.transport.processes.channel import bytes_of, pieces

__all__ = ["AllReduceComm"]

_WHOLE_MAX = 1 << 15
"""Bytes up to which an all-reduce sends whole blocks to everyone: one message time instead of two."""


def _overwrite(to: np.ndarray, x: np.ndarray) -> None:
    """Copy x into memory that another process has read.

    Between cores that share no cache, each cache line must first be fetched back, which takes up to 18 times as long as
    the copy. Nontemporal stores avoid that. They are used only where Numba is imported already.
    """
    if not ("numba" in sys.modules and nontemporal.possible(to.nbytes) and nontemporal.copy(to, x)):
        put(to, x)


class AllReduceComm(HeaderComm):
    """All-reduces of a process."""

    def _all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        if group.size == 1:
            return Done(read_only(x))
        run = self.begin_messages(group, call)
        if run is not None:
            return self.messages.all_reduce(run, x, how)
        return self._announce_and_reduce(group, call, x, how)

    def _announce_and_reduce(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        """Exchange headers, which carry small blocks, and combine the blocks of all members."""
        limit = self.inline_limit(call, x)
        incoming, inline = self._send_header(group, call, x.shape, x, limit)
        if inline and self._all_inline(incoming, group, [x.nbytes] * group.size, limit):
            return self._reduce_readable(
                group, call, incoming.block_views(x, group.rows, group.index, [x.shape] * group.size), how
            )
        return self._reduce_by_messages(group, call, x, how)

    def _reduce_readable(self, group: Group, call: Call, blocks: Sequence[np.ndarray], how: str) -> Handle:
        """Combine the blocks of all members, all readable here. Of more than two members, each combines one part and
        reads the other parts."""
        n, me = group.size, group.index
        x = blocks[me]
        if n == 2 or x.nbytes <= _WHOLE_MAX:
            return Done(read_only(kernels.of(x).combine(blocks, how)))
        buffer, sizes = self.empty_buffer(x.nbytes, call, x), block_sizes(x.size, n)
        buffers = pieces(buffer, [size * x.itemsize for size in sizes])
        own_sum, start = buffers[me].view(x.dtype), sum(sizes[:me])
        kernels.of(x).combine([b.reshape(-1)[start : start + sizes[me]] for b in blocks], how, own_sum)
        limit = self.inline_limit(call, x)
        incoming, inline = self._send_header(
            group, call.of(own_sum.shape, same_shape=False), own_sum.shape, own_sum, limit
        )
        self.number -= 1  # an internal step of this collective
        receives = self._read(group, incoming, x.dtype, [(size,) for size in sizes], buffers, limit)
        sends = {} if inline else {k: buffers[me] for k in range(n) if k != me}
        total = buffer.view(x.dtype).reshape(x.shape)
        if not sends and not receives:
            return Done(sealed(total))
        return self._pending(self._messages(group, sends, receives), (sends, buffer), lambda: sealed(total))

    def _reduce_by_messages(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        """Combine blocks of equal shapes, sent as messages."""
        channel, n = self.transport.channel(group.members), group.size
        send = bytes_of(x)
        if n == 2:  # Whole blocks are as many bytes as two chunks, in one message time.
            other = 1 - group.index
            receive = self.empty_buffer(x.nbytes, call, x)

            def combine_two() -> np.ndarray:
                received = receive.view(x.dtype).reshape(x.shape)
                blocks = [x, received] if other else [received, x]
                return sealed(kernels.of(x).combine(blocks, how, received))

            self.synchronize()
            return self._pending(channel.exchange({other: send}, {other: receive}), (send, receive), combine_two)
        if x.nbytes <= _WHOLE_MAX:
            blocks = self.empty_buffer(n * x.nbytes, call, x).reshape(n, x.nbytes)

            def combine_blocks() -> np.ndarray:
                return read_only(kernels.of(x).combine([b.view(x.dtype).reshape(x.shape) for b in blocks], how))

            self.synchronize()
            return self._pending(
                channel.all_gather(send, blocks.reshape(-1), [x.nbytes] * n), (send, blocks), combine_blocks
            )
        sizes, me = [size * x.itemsize for size in block_sizes(x.size, n)], group.index
        parts, others = pieces(send, sizes), [k for k in range(n) if k != me]
        chunks = self.empty_buffer((n - 1) * sizes[me], call, x).reshape(n - 1, sizes[me])

        def combine_chunks() -> np.ndarray:
            members_chunks = [c.view(x.dtype) for c in (*chunks[:me], parts[me], *chunks[me:])]
            own_sum = kernels.of(x).combine(members_chunks, how)
            out, send = self.empty_buffer(x.nbytes, call, x), bytes_of(own_sum)
            self.synchronize()
            self.transport.arrive(channel.all_gather(send, out, sizes), call, (send, out))
            return sealed(out.view(x.dtype).reshape(x.shape))

        self.synchronize()
        requests = channel.exchange({k: parts[k] for k in others}, dict(zip(others, chunks, strict=True)))
        return self._pending(requests, (send, chunks), combine_chunks)

    def _all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray], spare: Sequence[bool]) -> Handle:
        """The sum of each block over the members. Small blocks are packed and summed as one. A sum overwrites the
        blocks only where all members hold theirs in shared memory and all are spare."""
        if group.size == 1 or not xs:
            return Done([read_only(x) for x in xs])
        by_messages = self.transport.groups.calls_of(group, call) is not None
        small = [k for k, x in enumerate(xs) if x.nbytes < SEPARATE_MIN]
        large = [k for k, x in enumerate(xs) if x.nbytes >= SEPARATE_MIN]
        blocks = [xs[k] for k in large]
        if small:
            blocks.append(joined([xs[k].reshape(-1) for k in small], 0))
        free = [spare[k] for k in large] + [all(spare[k] for k in small)] * bool(small)
        if by_messages or not large:
            handles = [self._all_reduce(group, call, block, "sum") for block in blocks]
        else:
            handles = self._sum_each(group, call, blocks, free)
        large_handles = dict(zip(large, handles, strict=False))
        handle: Handle = handles[-1] if small else Done(None)
        shapes = [x.shape for x in xs]
        ends = offsets([prod(shapes[k]) for k in small])
        del xs, blocks, handles  # free the blocks that were packed

        def unpack(total: np.ndarray) -> list[np.ndarray]:
            sums = {k: handle.wait() for k, handle in large_handles.items()}
            for j, k in enumerate(small):
                sums[k] = total[ends[j] : ends[j + 1]].reshape(shapes[k])
            large_handles.clear()
            return [sums[k] for k in range(len(shapes))]

        return Mapped(handle, unpack)

    def _sum_each(self, group: Group, call: Call, xs: Sequence[np.ndarray], spare: Sequence[bool]) -> list[Handle]:
        """The sum of each block over the members: read in place if all are in shared memory, else by messages."""
        me, windows, offered = group.index, (), []
        places: list[list[int]] = []
        """Per member: the offsets of its blocks in its shared memory, -1 for a block that is elsewhere."""
        in_place: list[bool] = [False] * len(xs)
        """Per block: whether the sum overwrites it, because it is spare on every member."""
        mailbox = self.transport.channel(group.ordered, call).mailbox
        shared_memory, before = (None, 0) if mailbox is None else (mailbox.shared_memory, len(mailbox.next))
        offers = np.full(len(xs), -1)
        for j, x in enumerate(xs):
            borrowed = call.borrowed or not x.flags.c_contiguous
            place = None if mailbox is None else mailbox.offer(x, borrowed)
            if shared_memory is not None and place is not None:
                free = spare[j] and x.flags.writeable and not borrowed and x.nbytes > _WHOLE_MAX
                offers[j] = 2 * place[0] + (free and shared_memory.place(x) == place[0])
        offered = [] if mailbox is None else mailbox.next[before:]
        if offers.nbytes <= self.inline_limit(call, xs):
            incoming, _ = self._send_header(group, call, offers.shape, offers, offers.nbytes)
            windows = incoming.windows
            all_offers = [b.tolist() for b in incoming.block_views(offers, group.rows, me, [offers.shape] * group.size)]
            places = [[offer >> 1 for offer in offers_of_member] for offers_of_member in all_offers]
            in_place = [
                min(offers_of_block) >= 0 and all(offer & 1 for offer in offers_of_block)
                for offers_of_block in zip(*all_offers, strict=True)
            ]
        else:
            self._send_header(group, call, xs[0].shape)

        def blocks_of(j: int) -> list[np.ndarray]:
            x = xs[j]
            return [
                x if k == me else np.ndarray(x.shape, x.dtype, windows[row], places[k][j])
                for k, row in enumerate(group.rows)
            ]

        def sum_of(j: int, x: np.ndarray) -> Handle:
            if in_place[j]:
                return Done(read_only(x))
            if not places or min(places_of_member[j] for places_of_member in places) < 0:
                return self._reduce_by_messages(group, call, x, "sum")
            if mailbox is not None and group.size > 2:
                # Others may exchange headers for parts of earlier sums before they read these blocks.
                mailbox.keep(offered)
            return self._reduce_readable(group, call, blocks_of(j), "sum")

        if mailbox is not None and any(in_place):
            mailbox.keep(offered)
            self._sum_in_place(group, call, [blocks_of(j) for j, overwrites in enumerate(in_place) if overwrites])
        return [sum_of(j, x) for j, x in enumerate(xs)]

    def _sum_in_place(self, group: Group, call: Call, sums: Sequence[Sequence[np.ndarray]]) -> None:
        """Overwrite this member's blocks with their sums. sums: per sum, the blocks of all members, all readable here.

        Each member adds one part of each sum and writes it into that part of its own block, which no other member
        reads. When all have done so, it copies the other parts.
        """
        n, me = group.size, group.index
        flat = [[b.reshape(-1) for b in blocks] for blocks in sums]
        cuts = [offsets(block_sizes(blocks[me].size, n)) for blocks in flat]
        for blocks, at in zip(flat, cuts, strict=True):
            parts = [b[at[me] : at[me + 1]] for b in blocks]
            kernels.of(parts[me]).combine(parts, into=parts[me])
        self._send_header(group, call, sums[0][me].shape)
        self.number -= 1  # an internal step of this collective
        for blocks, at in zip(flat, cuts, strict=True):
            for k, block in enumerate(blocks):
                if k != me:
                    _overwrite(blocks[me][at[k] : at[k + 1]], block[at[k] : at[k + 1]])
