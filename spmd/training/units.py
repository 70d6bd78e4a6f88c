"""Units of parameters whose blocks are gathered together, and the backward sweep that gathers them again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from math import prod
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff.dropping import drop_arrays
from spmd.autodiff.tape import Arriving, Tape
from spmd.autodiff.tracer import Array
from spmd.device import contiguous
from spmd.kernels.parallel.thread_pool import Stopped
from spmd.mesh import Worker, here
from spmd.operators.apply import launch
from spmd.operators.base import Operator, move, named
from spmd.operators.gather import AllGather, ReduceScatter
from spmd.transport.call import Place, Shape, place_of

__all__ = ["WHERE", "Part", "Reductions", "Unit", "drop", "drop_earlier"]

WHERE = "training.gathered"
_PACKED_MAX = 1 << 16
"""Bytes of a whole array up to which it is sent together with others: the latency of its own message costs more than
the copies."""


class Part(NamedTuple):
    """A block that is gathered. dim: the dimension along which the blocks of all members are joined. shapes: of the
    members' blocks. member: which one is here. uneven: whether workers along other axes may have other sizes."""

    block: np.ndarray
    dim: int
    shapes: tuple[Shape, ...]
    member: int
    uneven: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """The members' lengths along the dimension."""
        return tuple(shape[self.dim] for shape in self.shapes)

    @property
    def is_small(self) -> bool:
        """Whether it is sent together with others. All workers decide alike, along all axes."""
        if self.uneven:
            return self.block.ndim < 2
        return sum(map(prod, self.shapes)) * self.block.itemsize <= _PACKED_MAX

    def gather(self, axes: tuple[str, ...]) -> Operator:
        """The operator that gathers it."""
        return named(WHERE, AllGather, axes, self.dim, True, self.lengths)

    def slices(self, whole: Any) -> list[Any]:
        """The members' blocks of a whole array."""
        ends = [0, *accumulate(self.lengths)]
        before = (slice(None),) * self.dim
        return [whole[(*before, slice(*pair))] for pair in pairwise(ends)]


class Unit:
    """Blocks that are gathered together. Large ones are gathered in place, small ones packed, by dtype.

    place: the user's line. ahead: how many units are fetched ahead. wholes: the gathered arrays, while they are here.
    packs: the small parts, by dtype.
    """

    __slots__ = ("_finishes", "ahead", "axes", "packs", "parts", "place", "single", "wholes")

    def __init__(self, axes: tuple[str, ...], parts: Sequence[Part], ahead: int):
        self.axes, self.parts, self.ahead = axes, parts, ahead
        self.place: Place | None = None
        self.wholes: list[np.ndarray] | None = None
        self._finishes: list[Callable[[], Any]] | None = None
        by_dtype: dict[np.dtype, list[int]] = {}
        for k, part in enumerate(parts):
            if type(part.block) is np.ndarray and part.is_small:
                by_dtype.setdefault(part.block.dtype, []).append(k)
        self.packs = [numbers for numbers in by_dtype.values() if len(numbers) > 1]
        packed = {k for numbers in self.packs for k in numbers}
        self.single = [k for k in range(len(parts)) if k not in packed]

    def again(self) -> Unit:
        """The same unit, for a backward sweep."""
        other = Unit(self.axes, self.parts, self.ahead)
        other.place = self.place
        return other

    def start(self, worker: Worker, frame: FrameType | None = None) -> None:
        """Start to gather, unless that has been done. frame: from where, in the forward pass."""
        if self.wholes is not None or self._finishes is not None:
            return
        if frame is not None:
            self.place = place_of(frame)
        blocks = [(self.parts[k].gather(self.axes), self.parts[k].block) for k in self.single]
        for numbers in self.packs:
            packed = np.concatenate([self.parts[k].block.reshape(-1) for k in numbers])
            blocks.append((named(WHERE, AllGather, self.axes, 0, True), packed))
        with _recorded_at(worker, None if frame is not None else self.place):
            self._finishes = [launch(op, block, worker, frame) for op, block in blocks]

    def wait(self) -> list[np.ndarray]:
        """The gathered arrays."""
        if self.wholes is None:
            assert self._finishes is not None
            arrived = [finish()[0] for finish in self._finishes]
            self._finishes = None
            wholes: list[Any] = [None] * len(self.parts)
            for k, whole in zip(self.single, arrived, strict=False):
                wholes[k] = whole
            for numbers, packed in zip(self.packs, arrived[len(self.single) :], strict=True):
                self._unpack(numbers, packed, wholes)
            self.wholes = wholes
        return self.wholes

    def _unpack(self, numbers: Sequence[int], packed: np.ndarray, wholes: list[Any]) -> None:
        """Put the arrays of a pack, which has one member's blocks after the other's, in their places."""
        parts = [self.parts[k] for k in numbers]
        sizes = [prod(part.shapes[member]) for member in range(len(parts[0].shapes)) for part in parts]
        pieces = [packed[slice(*pair)] for pair in pairwise([0, *accumulate(sizes)])]
        for k, part in enumerate(parts):
            blocks = [piece.reshape(shape) for piece, shape in zip(pieces[k :: len(parts)], part.shapes, strict=True)]
            whole = contiguous(np.concatenate(blocks, part.dim))
            whole.flags.writeable = False
            wholes[numbers[k]] = whole

    def forget(self) -> None:
        """Give up the gathered arrays, and wait for those that are under way: others take part in that."""
        if self._finishes is not None:
            self.wait()
        self.wholes = None

    def pulled(self, gs: Sequence[Any], reductions: Reductions) -> list[Any]:
        """The cotangents of the blocks of those of the whole arrays, None where there is none: sums over the workers,
        which are under way."""
        if any(type(g) is Array for g in gs):  # they are differentiated themselves
            return [None if g is None else self._moved(part, g) for part, g in zip(self.parts, gs, strict=True)]
        worker, sends, takes = here(f"spmd.{WHERE}"), [], {}
        for k in self.single:
            if gs[k] is not None:
                part = self.parts[k]
                takes[k] = len(sends), _whole_block
                sends.append((_reduce_scatter(self.axes, part.dim, part.lengths), gs[k]))
        for numbers in self.packs:
            present = [k for k in numbers if gs[k] is not None]
            if present:
                takes.update({k: (len(sends), take) for k, take in self._packed(present)})
                sends.append(self._pack(present, gs))
        with _recorded_at(worker, self.place):
            sums = reductions.start(worker, sends)
        return [_arriving(sums, *takes[k]) if k in takes else None for k in range(len(gs))]

    def _moved(self, part: Part, g: Any) -> Any:
        with _recorded_at(here(f"spmd.{WHERE}"), self.place):
            return move(part.gather(self.axes).back, g)  # type: ignore[attr-defined]

    def _pack(self, numbers: Sequence[int], gs: Sequence[Any]) -> tuple[Operator, np.ndarray]:
        """The cotangents of some small arrays in one, one member's blocks after the other's, and what adds them up."""
        by_part = [self.parts[k].slices(gs[k]) for k in numbers]
        members = [*zip(*by_part, strict=True)]
        packed = np.concatenate([block.reshape(-1) for blocks in members for block in blocks])
        sizes = tuple(sum(block.size for block in blocks) for blocks in members)
        return _reduce_scatter(self.axes, 0, sizes), packed

    def _packed(self, numbers: Sequence[int]) -> list[tuple[int, Callable[[Any], Any]]]:
        """For each of some small arrays what takes its sum out of the sum of a pack."""
        shapes = [self.parts[k].shapes[self.parts[k].member] for k in numbers]
        ends = [0, *accumulate(map(prod, shapes))]
        return [
            (k, lambda packed, span=slice(*span), shape=shape: packed[span].reshape(shape))
            for k, span, shape in zip(numbers, pairwise(ends), shapes, strict=True)
        ]


def _whole_block(block: Any) -> Any:
    return block


def _arriving(sums: _Sums, number: int, take: Callable[[Any], Any]) -> Arriving:
    """What `take` takes out of one of the sums, when that has arrived."""
    return Arriving(lambda: take(sums.blocks()[number]))


def _reduce_scatter(axes: tuple[str, ...], dim: int, sizes: tuple[int, ...]) -> Operator:
    return named("psum_scatter", ReduceScatter, axes, dim, True, sizes, forward=WHERE)


@contextmanager
def _recorded_at(worker: Worker, place: Place | None):
    """Within the block, in a backward sweep, observers see collectives at the line of the forward call."""
    before, worker.recorded_at = worker.recorded_at, place if place is not None else worker.recorded_at
    try:
        yield
    finally:
        worker.recorded_at = before


class _Sums:
    """Sums over the workers that are under way."""

    __slots__ = ("_blocks", "_finishes")

    def __init__(self, finishes: list[Callable[[], Any]]):
        self._finishes: list[Callable[[], Any]] | None = finishes
        self._blocks: list[Any] = []

    def blocks(self) -> list[Any]:
        """This worker's parts of the sums."""
        if self._finishes is not None:
            self._blocks, self._finishes = [finish()[0] for finish in self._finishes], None
        return self._blocks


class Reductions:
    """The sums of a loop's units that are under way: of so many units as are fetched ahead, because whole gradients are
    alive for so long."""

    def __init__(self, ahead: int):
        self.ahead = ahead
        self.under_way: deque[_Sums] = deque()

    def start(self, worker: Worker, sends: Sequence[tuple[Operator, Any]]) -> _Sums:
        """Start the sums of a unit."""
        while self.under_way and len(self.under_way) >= self.ahead:
            self.under_way.popleft().blocks()
        sums = _Sums([launch(op, g, worker, None) for op, g in sends])
        if self.ahead:
            self.under_way.append(sums)
        else:
            sums.blocks()
        return sums


class _DroppedUnits:
    """The units whose gathered arrays a tape has dropped, in the order of their use: what makes them again.

    alive: the numbers of those whose arrays are here, or under way.
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.alive: list[int] = []
        self.current: int | None = None

    def fetch(self, number: int) -> Sequence[np.ndarray]:
        """The gathered arrays of a unit. The units before it, which the sweep comes to next, are fetched ahead."""
        unit = self.units[number]
        if number != self.current:
            worker = here(f"spmd.{WHERE}")
            near = range(number, max(number - unit.ahead, 0) - 1, -1)
            self.forget(near)
            self.current = number
            unit.start(worker)
            unit.wait()
            for k in near:
                self.units[k].start(worker)
            self.alive = [*near]
        return unit.wait()

    def forget(self, but: Sequence[int] = ()) -> None:
        """Give up the arrays of all units, but of some."""
        for k in self.alive:
            if k not in but:
                self.units[k].forget()
        self.alive = [k for k in self.alive if k in but]
        self.current = None

    def swept(self) -> None:
        """A backward sweep has ended."""
        self.forget()


class _Source:
    """What makes the arrays of one unit again."""

    __slots__ = ("number", "units")

    def __init__(self, units: _DroppedUnits, number: int):
        self.units, self.number = units, number

    def arrays(self) -> Sequence[np.ndarray]:
        """The gathered arrays."""
        return self.units.fetch(self.number)


def drop(unit: Unit, marks: Sequence[tuple[Tape, int]], last: bool) -> None:
    """Drop the gathered arrays of a unit from what tapes have recorded from their marks on, and give them up.

    last: of the last unit of a loop, which the backward sweep comes to first, the arrays stay until that has passed.
    """
    wholes = unit.wait()
    for tape, start in marks:
        units = tape.dropped if isinstance(tape.dropped, _DroppedUnits) else _DroppedUnits()
        number = len(units.units)
        if drop_arrays(tape, tape.nodes[start:], wholes, _Source(units, number)):
            units.units.append(unit.again())
            tape.dropped = units
            if last:
                units.units[number].wholes = wholes
                units.alive.append(number)
    unit.wholes = None


def drop_earlier(tapes: Sequence[Tape]) -> None:
    """Give up what the last units of earlier loops have kept."""
    for tape in tapes:
        if isinstance(tape.dropped, _DroppedUnits):
            tape.dropped.forget()


def drain(units: Sequence[Unit]) -> None:
    """Wait for what is under way, where nobody needs it any more: others take part in it."""
    for unit in units:
        try:
            unit.forget()
        except (Exception, Stopped):  # the next collective of this worker raises it again
            return
