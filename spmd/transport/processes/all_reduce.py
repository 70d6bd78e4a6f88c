"""Sums over processes: taken here, in the order of the members, because the libraries only advise an order, if that."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod

import numpy as np

from spmd import kernels
from spmd.device import joined, put
from spmd.kernels.memory import nontemporal
from spmd.layout import block_sizes, offsets
from spmd.transport.call import Call, Group
from spmd.transport.handles import Done, Handle, Mapped, read_only
from spmd.transport.processes.announce import Announcing, read_only_room
from spmd.transport.processes.channel import bytes_of, pieces

__all__ = ["AllReducing"]

_APART = 1 << 18
"""Bytes from which a block of several is sent by itself, from where it lies; smaller ones are sent together."""
_SMALL = 1 << 15
"""Bytes up to which an all-reduce sends whole blocks to everyone: one message time in place of two."""


def _overwrite(to: np.ndarray, x: np.ndarray) -> None:
    """Copy x into memory that another process has read. Between cores that share no cache each line of it has to be
    asked back first, which takes up to 18 times as long as the copy; but not for lines that are written past the
    caches. Numba, which does that, is not imported for it."""
    if not ("numba" in sys.modules and nontemporal.possible(to.nbytes) and nontemporal.copy(to, x)):
        put(to, x)


class AllReducing(Announcing):
    """A process as it adds up blocks with others."""

    def _all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        if group.size == 1:
            return Done(read_only(x))
        return self._agreed_sum(group, call, x, how)

    def _agreed_sum(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        if self.transport.checks:
            most = self.inline_limit(call, x)
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
            return Done(read_only(kernels.of(x).combine(blocks, how)))
        room, sizes = self.room(x.nbytes, call, x), block_sizes(x.size, n)
        rooms = pieces(room, [size * x.itemsize for size in sizes])
        mine, start = rooms[me].view(x.dtype), sum(sizes[:me])
        kernels.of(x).combine([b.reshape(-1)[start : start + sizes[me]] for b in blocks], how, mine)
        most = self.inline_limit(call, x)
        heard, along = self._tell(group, call.of(mine.shape, same_shape=False), mine.shape, mine, most)
        self.number -= 1  # It is no collective of its own, and others make their sum in one meeting.
        receives = self._read(group, heard, x.dtype, [(size,) for size in sizes], rooms, most)
        sends = {} if along else {k: rooms[me] for k in range(n) if k != me}
        total = room.view(x.dtype).reshape(x.shape)
        if not sends and not receives:
            return Done(read_only_room(room, total))
        return self._pending(self._messages(group, sends, receives), (sends, room), lambda: read_only_room(room, total))

    def _reduce_blocks(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        """The sum of blocks whose shapes are known to be equal."""
        channel, n = self.transport.channel(group.members), group.size
        send = bytes_of(x)
        if n == 2:  # Whole blocks are as many bytes as chunks there and back, and one message time.
            other = 1 - group.index
            theirs = self.room(x.nbytes, call, x)

            def of_two() -> np.ndarray:
                came = theirs.view(x.dtype).reshape(x.shape)
                return read_only_room(theirs, kernels.of(x).combine([x, came] if other else [came, x], how, came))

            self.ready()
            return self._pending(channel.exchange({other: send}, {other: theirs}), (send, theirs), of_two)
        if x.nbytes <= _SMALL:
            blocks = self.room(n * x.nbytes, call, x).reshape(n, x.nbytes)

            def small() -> np.ndarray:
                return read_only(kernels.of(x).combine([b.view(x.dtype).reshape(x.shape) for b in blocks], how))

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
            return read_only_room(out, out.view(x.dtype).reshape(x.shape))

        self.ready()
        requests = channel.exchange({k: parts[k] for k in others}, dict(zip(others, chunks, strict=True)))
        return self._pending(requests, (send, chunks), large)

    def _all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray], spare: Sequence[bool]) -> Handle:
        """None is written over but what others can read: the rest is sent."""
        if group.size == 1 or not xs:
            return Done([read_only(x) for x in xs])
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
                borrowed = call.borrowed or not x.flags.c_contiguous
                place = None if mail is None else mail.offer(x, borrowed)
                if arena is not None and place is not None:
                    free = spare[j] and x.flags.writeable and not borrowed and x.nbytes > _SMALL
                    mine[j] = 2 * place[0] + (free and arena.place(x) == place[0])
            kept = [] if mail is None else mail.next[before:]
            if mine.nbytes <= self.inline_limit(call, xs):
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
                return Done(read_only(x))
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
