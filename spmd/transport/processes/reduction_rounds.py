"""A reduction by messages: the rounds of a schedule, run on blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd import kernels
from spmd.device import put
from spmd.kernels.cpu.chunks import accurate
from spmd.layout import offsets
from spmd.transport.algorithms.schedule import Round, Schedule, Span
from spmd.transport.processes.channel import bytes_of
from spmd.transport.processes.running import Running, Steps

__all__ = ["Reduction"]


class Reduction:
    """The state of a reduction in one member.

    like: an array of the blocks' dtype, where they lie. sizes: the entries of the chunks. part: gives the entries of a
    span of chunks of the own block. how: "sum", "max" or "min". empty: memory for what comes, as bytes.

    Partial sums of short floating-point numbers have longer ones, and are rounded once, at the end.
    """

    def __init__(
        self,
        run: Running,
        like: Any,
        sizes: Sequence[int],
        part: Callable[[Span], Any],
        how: str,
        empty: Callable[[int], Any],
    ):
        self.run, self.like, self.part, self.how, self.empty = run, like, part, how, empty
        self.ends = offsets(sizes)
        self.dtype, self.wide = like.dtype, accurate(like.dtype)
        self.partial: Any = None
        self.held: Span = (0, len(sizes))
        """The chunks whose partial sum is here; that of the own block where `partial` is None."""
        self.total: Any = None
        self.total_span: Span = (0, 0)

    def steps(self, schedule: Schedule, result: Span | None, synchronize: Callable[[], None]) -> Steps:
        """Run a schedule. result: the chunks whose total is wanted here, if any: it is returned as a flat array."""
        for step in schedule.rounds:
            outgoing = [(transfer.peer, self._outgoing(step, transfer.items)) for transfer in step.sends]
            if outgoing:
                synchronize()
            for peer, x in outgoing:
                self.run.send(peer, b"", x)
            yield
            if step.carries == "total" and step.receives and self.total is None and result is not None:
                self._begin_total(result)
            self._receive(step)
        if result is None:
            return None
        return self.total if self.total is not None else self._rounded(result)

    def _outgoing(self, step: Round, span: Span) -> Any:
        if step.carries == "block":
            return self.part(span)
        if step.carries == "partial":
            return self._sum_so_far(span)
        return self._rounded(span) if self.total is None else self._of_total(span)

    def _widened(self, x: Any) -> Any:
        return x if self.wide is self.dtype else x.astype(self.wide)

    def _sum_so_far(self, span: Span) -> Any:
        """The partial sum of some of the chunks that are held."""
        if self.partial is None:
            return self._widened(self.part(span))
        begin = self.ends[self.held[0]]
        return self.partial[self.ends[span[0]] - begin : self.ends[span[1]] - begin]

    def _rounded(self, span: Span) -> Any:
        """The total of some of the chunks that are held."""
        total = self._sum_so_far(span)
        return total if total.dtype == self.dtype else total.astype(self.dtype)

    def _of_total(self, span: Span) -> Any:
        begin = self.ends[self.total_span[0]]
        return self.total[self.ends[span[0]] - begin : self.ends[span[1]] - begin]

    def _begin_total(self, span: Span) -> None:
        """Memory for the totals of these chunks; those that are held already are put there."""
        size = self.ends[span[1]] - self.ends[span[0]]
        self.total, self.total_span = self.empty(size * self.dtype.itemsize).view(self.dtype), span
        if self.partial is not None and span[0] <= self.held[0] and self.held[1] <= span[1]:
            put(self._of_total(self.held), self._rounded(self.held))

    def _receive(self, step: Round) -> None:
        run, coming = self.run, []
        dtype = self.wide if step.carries == "partial" else self.dtype
        for transfer in step.receives:
            span = transfer.items
            if step.carries == "total":
                place = self._of_total(span)
            else:
                size = self.ends[span[1]] - self.ends[span[0]]
                place = self.empty(size * dtype.itemsize).view(dtype)
            arrived = run.take(transfer.peer, lambda _, place=place: bytes_of(place))
            coming.append((transfer, place, arrived))
        run.finish_receives()
        come = {}
        for transfer, place, arrived in coming:
            if not arrived.placed:
                received = arrived.data.view(dtype)
                if step.carries == "total":
                    put(place, received)
                place = received
            come[transfer.peer] = place
        if step.carries != "total" and coming:
            self._merge(step, step.receives[0].items, come)

    def _merge(self, step: Round, span: Span, come: dict[int, Any]) -> None:
        """Add what came to the partial sum of a span of chunks."""
        own = self._sum_so_far(span)
        if step.merge == "all":
            me = self.run.group.index
            blocks = [own if k == me else self._widened(come[k]) for k in step.of]
        else:
            (other,) = map(self._widened, come.values())
            blocks = [other, own] if step.merge == "before" else [own, other]
        into = next((b for b in blocks if b is not own and type(b) is np.ndarray and b.flags.writeable), None)
        self.partial, self.held = kernels.of(self.like).combine(blocks, self.how, into), span
