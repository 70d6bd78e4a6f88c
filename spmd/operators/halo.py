"""Blocks with their neighbours' edges around them, and the adjoint, which adds them back.

A halo is planned in integers, one dimension at a time: `halo_plan` says of every block of a dimension which entries of
which blocks it gets, and where. The operators carry plans out, dimension after dimension, so that corners come along
with the edges: a worker exchanges messages with those only that lie on its own lines through the grid of blocks.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import index
from typing import Any, ClassVar, NamedTuple

import numpy as np

from spmd.errors import LayoutError, SpecError, describe, message, nearest
from spmd.layout import P, block_sizes, offsets
from spmd.mesh import here
from spmd.operators.base import Launched, Operator, Shape, operate, sealed
from spmd.transport.base import Call, Comm, Group, Handle, gather_cost

__all__ = ["HaloAccumulate", "HaloExchange", "HaloPlan", "Piece", "halo_accumulate", "halo_exchange", "halo_plan"]

Pair = tuple[int, int]
BOUNDARIES = ("none", "zero", "periodic", "reflect", "edge")


# The plan of one dimension: integers only


class Piece(NamedTuple):
    """Entries start:stop of block `source`, which stand at place `at` of the result: from the last to the first where
    flipped; a single entry may stand there `repeat` times."""

    source: int
    start: int
    stop: int
    at: int
    flipped: bool = False
    repeat: int = 1

    @property
    def length(self) -> int:
        return (self.stop - self.start) * self.repeat


class Message(NamedTuple):
    """What one block gives to another: ranges of its entries, each once and one after the other, and where the pieces
    stand that are taken from them. Of a block's own pieces start and stop count within the block, else within the
    message."""

    ranges: tuple[Pair, ...]
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class HaloPlan:
    """What every block of a dimension gets from the others.

    sizes: the lengths of the blocks; lengths: those of the results. pieces: for each result what it is put together
    of, in the order of their places; what they leave out is zero.
    """

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    @cached_property
    def messages(self) -> dict[Pair, Message]:
        """By source and target; those of a block to itself are its own pieces."""
        found: dict[Pair, list[Piece]] = {}
        for target, pieces in enumerate(self.pieces):
            for p in pieces:
                found.setdefault((p.source, target), []).append(p)
        return {
            (s, t): Message(((0, self.sizes[s]),), tuple(pieces)) if s == t else _packed(pieces)
            for (s, t), pieces in sorted(found.items())
        }

    @cached_property
    def sends(self) -> tuple[dict[int, Message], ...]:
        """For each block its messages to others, by target."""
        return tuple({t: m for (s, t), m in self.messages.items() if s == k != t} for k in range(len(self.sizes)))

    @cached_property
    def takes(self) -> tuple[dict[int, Message], ...]:
        """For each block the messages that come for it, by source."""
        return tuple({s: m for (s, t), m in self.messages.items() if t == k != s} for k in range(len(self.sizes)))

    @cached_property
    def moves(self) -> bool:
        """Whether any block gets something from another."""
        return any(self.sends)

    def own(self, k: int) -> tuple[Piece, ...]:
        """The pieces that block k gives to itself."""
        message = self.messages.get((k, k))
        return message.pieces if message else ()

    def keeps(self, k: int) -> bool:
        """Whether the result of block k is the block itself."""
        return self.lengths[k] == self.sizes[k] and all(p[:4] == (k, 0, self.sizes[k], 0) for p in self.pieces[k])


def _packed(pieces: list[Piece]) -> Message:
    """The message that holds what these pieces need of a block, each entry once."""
    ranges: list[list[int]] = []
    for start, stop in sorted((p.start, p.stop) for p in pieces):
        if ranges and start <= ranges[-1][1]:
            ranges[-1][1] = max(ranges[-1][1], stop)
        else:
            ranges.append([start, stop])
    at = offsets([stop - start for start, stop in ranges])

    def shifted(p: Piece) -> Piece:
        k = next(k for k, (start, stop) in enumerate(ranges) if start <= p.start and p.stop <= stop)
        return p._replace(start=p.start - ranges[k][0] + at[k], stop=p.stop - ranges[k][0] + at[k])

    return Message(tuple((start, stop) for start, stop in ranges), tuple(map(shifted, pieces)))


class _Run(NamedTuple):
    """Entries start:stop of the whole dimension, and where they stand: as in `Piece`."""

    start: int
    stop: int
    at: int
    flipped: bool = False
    repeat: int = 1


@lru_cache(maxsize=1024)
def halo_plan(sizes: tuple[int, ...], widths: tuple[Pair, ...], boundary: str) -> HaloPlan:
    """The plan of one dimension.

    sizes: the lengths of its blocks. widths: (low, high) of each block, how far its result reaches below and above
    the block; a negative width trims. boundary: what stands beyond the ends of the array: see `halo_exchange`.

    The result of a block at [start, stop) is the box [start - low, stop + high) of the array, continued at its ends.
    Raises LayoutError where more is trimmed than is there, and where an array without entries is to be continued.
    """
    at, n = offsets(sizes), sum(sizes)
    lengths, found = [], []
    for k, (low, high) in enumerate(widths):
        start, stop = at[k] - low, at[k + 1] + high
        if stop < start:
            raise _trimmed("halo_plan", k, sizes[k], (low, high))
        if boundary == "none":
            start, stop = (min(max(end, 0), n) for end in (start, stop))
        lengths.append(stop - start)
        runs = _runs(start, stop, n, boundary)
        found.append(tuple(piece for run in runs for piece in _owned(run, at)))
    return HaloPlan(sizes, tuple(lengths), tuple(found))


def _runs(start: int, stop: int, n: int, boundary: str) -> Iterator[_Run]:
    """What stands at start:stop of an array of length n that is continued at its ends."""
    if 0 <= start <= stop <= n or boundary in ("none", "zero"):
        a, b = max(start, 0), min(stop, n)
        if a < b:
            yield _Run(a, b, a - start)
        return
    if start == stop:
        return
    if n == 0:
        raise LayoutError(
            message(
                "spmd.halo_exchange",
                argument="boundary",
                got=f'"{boundary}" for an array of length 0',
                need="an entry at least, to be repeated beyond the ends",
                mend='boundary="zero"',
            )
        )
    if boundary == "edge" or (boundary == "reflect" and n == 1):  # a single entry is its own mirror image
        if start < 0:
            yield _Run(0, 1, 0, False, min(stop, 0) - start)
        a, b = max(start, 0), min(stop, n)
        if a < b:
            yield _Run(a, b, a - start)
        a = max(start, n)
        if a < stop:
            yield _Run(n - 1, n, a - start, False, stop - a)
        return
    period = n if boundary == "periodic" else 2 * (n - 1)
    for base in range(start // period * period, stop, period):
        a, b = max(start, base), min(stop, base + n)
        if a < b:
            yield _Run(a - base, b - base, a - start)
        a, b = max(start, base + n), min(stop, base + period)  # the way back, which leaves out the ends
        if a < b:
            mirror = base + 2 * n - 1
            yield _Run(mirror - b, mirror - a, a - start, True)


def _owned(run: _Run, at: Sequence[int]) -> list[Piece]:
    """A run cut at the ends of the blocks, which begin at `at`; in the order of their places."""
    pieces = []
    k = bisect_right(at, run.start) - 1
    while k < len(at) - 1 and at[k] < run.stop:
        start, stop = max(run.start, at[k]), min(run.stop, at[k + 1])
        if start < stop:
            place = run.at + (run.stop - stop if run.flipped else start - run.start)
            pieces.append(Piece(k, start - at[k], stop - at[k], place, run.flipped, run.repeat))
        k += 1
    return pieces[::-1] if run.flipped else pieces


def _before(lengths: tuple[int, ...], widths: tuple[Pair, ...], boundary: str, parts: Sequence[int]) -> tuple[int, ...]:
    """The sizes of the blocks whose results have these lengths. With "none" they do not say it all: balanced blocks
    are tried first, then such as halos do not reach across."""
    if boundary != "none":
        return tuple(n - low - high for n, (low, high) in zip(lengths, widths, strict=True))
    total, ends = sum(lengths), range(len(lengths))
    added = sum(max(w, 0) for pair in widths for w in pair)
    cut = sum(max(-w, 0) for pair in widths for w in pair)
    guesses: Iterator[tuple[int, ...]] = (block_sizes(n, parts) for n in range(max(total - added, 0), total + cut + 1))
    near = tuple(_near(lengths[k], widths[k], k == 0, k == ends[-1]) for k in ends)
    for sizes in (*guesses, near):
        fit = min(sizes) >= 0 and all(n + low + high >= 0 for n, (low, high) in zip(sizes, widths, strict=True))
        if fit and halo_plan(sizes, widths, boundary).lengths == lengths:
            return sizes
    raise LayoutError(
        message(
            "spmd.halo_accumulate",
            argument="x",
            got=f"blocks of lengths {lengths}",
            need=f"lengths that blocks have after a halo of {widths}",
            mend="give the sizes of the blocks without halo: sizes=, or shape= for balanced ones",
        )
    )


def _near(length: int, widths: Pair, first: bool, last: bool) -> int:
    """The size of a block without its halo, where halos end within the next block."""
    low, high = widths
    return length - (min(low, 0) if first else low) - (min(high, 0) if last else high)


def _trimmed(where: str, block: int, size: int, widths: Pair) -> LayoutError:
    return LayoutError(
        message(
            f"spmd.{where}",
            argument="widths",
            got=f"{widths} for block {block}, of length {size}",
            need="widths that leave a length of zero at least: low + high + the block's length",
            mend="trim less; give each block its own widths, [(low, high), ...], where one pair does not suit all",
        )
    )


# Moving blocks


def _along(d: int, start: int, stop: int) -> tuple[slice, ...]:
    """The entries start:stop of dimension d."""
    return (*(slice(None),) * d, slice(start, stop))


def _fill(out: Any, block: Any, pieces: Sequence[Piece], d: int) -> None:
    """Put the pieces of a block, or of a message, where they stand."""
    for p in pieces:
        part = block[_along(d, p.start, p.stop)]
        out[_along(d, p.at, p.at + p.length)] = np.flip(part, d) if p.flipped else part


def _add(out: Any, g: Any, pieces: Sequence[Piece], d: int) -> None:
    """The adjoint of `_fill`: add to a block, or to a message, what stands at the places of its pieces."""
    for p in pieces:
        part = g[_along(d, p.at, p.at + p.length)]
        if p.repeat > 1:
            part = np.sum(part, axis=d, keepdims=True, dtype=g.dtype)
        out[_along(d, p.start, p.stop)] += np.flip(part, d) if p.flipped else part


def _whole(pieces: Sequence[Piece], length: int) -> Piece | None:
    """A piece that is all there is to be given, as it is."""
    return next((p for p in pieces if p[1:3] == (0, length) and p.length == length and not p.flipped), None)


def _sum(g: Any, pieces: Sequence[Piece], length: int, d: int) -> Any:
    """What stands at the places of the pieces, added up to a block or a message of this length."""
    first = _whole(pieces, length)
    if first is None:
        out = np.zeros_like(g, shape=(*g.shape[:d], length, *g.shape[d + 1 :]), order="C")
    else:
        out = g[_along(d, first.at, first.at + length)]
        if len(pieces) == 1:
            return out
        out = np.array(out, order="C")
    _add(out, g, [p for p in pieces if p is not first], d)
    return out


def _part(block: Any, ranges: Sequence[Pair], d: int) -> Any:
    """Ranges of a block, one after the other; a single one is a view: who gets it copies it to its place at once."""
    parts = [block[_along(d, start, stop)] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=d)


class Steps:
    """A collective of several steps: a generator that starts each and is given what comes of it."""

    __slots__ = ("handle", "steps", "value")

    def __init__(self, steps: Generator[Handle, Any, Any]):
        self.steps = steps
        self.handle: Handle | None = None
        self.value: Any = None
        self._go_on(None)

    def _go_on(self, arrived: Any) -> None:
        try:
            self.handle = self.steps.send(arrived)
        except StopIteration as end:
            self.handle, self.value = None, end.value

    def wait(self) -> Any:
        while self.handle is not None:
            self._go_on(self.handle.wait())
        return self.value


class Stage(NamedTuple):
    """One dimension: the workers along it, its plan, and which of the plan's blocks is this worker's."""

    line: Group
    plan: HaloPlan
    k: int

    @property
    def idle(self) -> bool:
        """Whether all blocks stay as they are."""
        return not self.plan.moves and self.plan.keeps(self.k)

    @property
    def length(self) -> int:
        return self.plan.lengths[self.k]

    @property
    def place(self) -> int | None:
        """Where the block stands in its result; None if it is not all there."""
        size = self.plan.sizes[self.k]
        if size == 0:
            return 0
        whole = _whole(self.plan.own(self.k), size)
        return whole.at if whole else None

    @property
    def full(self) -> bool:
        """Whether pieces fill the whole result."""
        return sum(p.length for p in self.plan.pieces[self.k]) == self.length


@lru_cache(maxsize=4096)
def _line(axes: tuple[str, ...], dims: Shape, members: Shape, place: int, names: tuple[str, ...]) -> Group:
    """Of a group along `axes` those that differ from the one at `place` along `names` only."""
    strides, stride = {}, 1
    for name, n in zip(reversed(axes), reversed(dims), strict=True):
        strides[name] = (stride, n)
        stride *= n
    own = [place // strides[n][0] % strides[n][1] for n in names]
    places = [place - sum(k * strides[n][0] for k, n in zip(own, names, strict=True))]
    at = 0
    for k, n in zip(own, names, strict=True):
        places = [p + j * strides[n][0] for p in places for j in range(strides[n][1])]
        at = at * strides[n][1] + k
    return Group(names, tuple(strides[n][1] for n in names), tuple(members[p] for p in places), at)


_WHOLE = P()


@dataclass(frozen=True)
class _Halo(Operator):
    """What the two directions share.

    spec: the axes that split each dimension; `axes` are its axes. widths: for each dimension (low, high) of each
    block, or one pair for all. boundary: one for all dimensions, or one for each. sizes: for each dimension the lengths
    of its blocks without halo (None: they are learnt). block: the shape of this worker's block without halo, once met.
    """

    spec: P = _WHOLE
    widths: Any = ()
    boundary: str | Sequence[str] = "none"
    sizes: Any = None
    block: Shape | None = None

    private: ClassVar[tuple[str, ...]] = ("block",)

    def __post_init__(self):
        where = f"spmd.{self.function}"
        if not isinstance(self.spec, P) or self.spec.axes != self.axes:
            raise SpecError(
                message(
                    where,
                    argument="spec",
                    got=describe(self.spec),
                    need=f"a spec whose axes are {self.axes}",
                    mend='P("x") splits dimension 0 over axis x: HaloExchange(("x",), P("x"), 1)',
                )
            )
        widths = _widths(where, self.spec, self.widths)
        object.__setattr__(self, "widths", widths)
        object.__setattr__(self, "boundary", _boundaries(where, self.boundary, len(widths)))
        if self.sizes is not None:
            object.__setattr__(self, "sizes", _sizes(where, self.sizes))

    def _pairs(self, d: int, count: int) -> tuple[Pair, ...]:
        """The widths of all blocks of a dimension."""
        if d >= len(self.widths):
            return ((0, 0),) * count
        pairs = self.widths[d]
        return pairs * count if len(pairs) == 1 else pairs

    def _boundary(self, d: int) -> str:
        if isinstance(self.boundary, str):
            return self.boundary
        return self.boundary[d] if d < len(self.boundary) else "none"

    def _lines(self, group: Group, ndim: int) -> list[Group]:
        """For each dimension the workers along it; this one alone where nobody needs anything of another."""
        lines = []
        for d in range(ndim):
            names = self.spec.dims[d] if d < len(self.spec) else ()
            line = _line(group.axes, group.dims, group.members, group.index, names)
            reaches = any(w > 0 for pair in self._pairs(d, line.size) for w in pair)
            lines.append(line if reaches else _line(group.axes, group.dims, group.members, group.index, ()))
        return lines

    def _place(self, group: Group, d: int) -> int:
        """Which block of a dimension is this worker's."""
        names = self.spec.dims[d] if d < len(self.spec) else ()
        return _line(group.axes, group.dims, group.members, group.index, names).index

    def _stages(self, group: Group, block: Shape, sizes: Sequence[tuple[int, ...] | None]) -> list[Stage]:
        stages = []
        for d, line in enumerate(self._lines(group, len(block))):
            place, known = self._place(group, d), sizes[d]
            if line.size > 1:
                assert known is not None
                plan = halo_plan(known, self._pairs(d, line.size), self._boundary(d))
                stages.append(Stage(line, plan, place))
            else:
                own = self._pairs(d, place + 1)[place]
                stages.append(Stage(line, halo_plan((block[d],), (own,), self._boundary(d)), 0))
        return stages

    def _given(self, d: int) -> tuple[int, ...] | None:
        """The lengths of the blocks of a dimension, if known."""
        return self.sizes[d] if self.sizes is not None and d < len(self.sizes) else None

    def _learnt(self, comm: Comm, group: Group, x: np.ndarray, call: Call):
        """For each dimension the lengths of the blocks there are, where they matter and are not known: gathered."""
        lines = self._lines(group, x.ndim)
        unknown = [d for d, line in enumerate(lines) if line.size > 1 and self._given(d) is None]
        handles = [comm.all_gather(lines[d], call, np.array([x.shape[d]])) for d in unknown]
        found: dict[int, tuple[int, ...]] = {}
        for d, handle in zip(unknown, handles, strict=True):
            found[d] = tuple(int(n[0]) for n in (yield handle))
        return found

    def check(self, group: Group, x: np.ndarray) -> None:
        where = f"spmd.{self.function}"
        entries = {
            "spec": len(self.spec.trimmed),
            "widths": len(self.widths),
            "boundary": 0 if isinstance(self.boundary, str) else len(self.boundary),
            "sizes": len(self.sizes or ()),
        }
        for argument, count in entries.items():
            if count > x.ndim:
                raise LayoutError(
                    message(
                        where,
                        argument=argument,
                        got=f"{count} entries for a block of shape {list(x.shape)}",
                        need=f"at most {x.ndim}, one per dimension",
                        mend="((low, high),) gives the two sides of one dimension"
                        if argument == "widths"
                        else "leave out dimensions that the block does not have",
                    )
                )
        for d in range(x.ndim):
            self._check_dimension(group, d)

    def _check_dimension(self, group: Group, d: int) -> None:
        names = self.spec.dims[d] if d < len(self.spec) else ()
        line = _line(group.axes, group.dims, group.members, group.index, names)
        given = {"widths": self.widths[d] if d < len(self.widths) else ((0, 0),), "sizes": self._given(d)}
        for argument, found in given.items():
            if found is None or len(found) == line.size or (argument == "widths" and len(found) == 1):
                continue
            raise LayoutError(
                message(
                    f"spmd.{self.function}",
                    argument=f"{argument}, dimension {d}",
                    got=f"{len(found)} entries: {found}",
                    need=f"{line.size}, one per block",
                    mend="one (low, high) for all blocks"
                    if argument == "widths"
                    else "None where they are to be learnt",
                )
            )

    def _at(self, group: Group, shape: Shape) -> Iterator[tuple[Group, int]]:
        return zip(self._lines(group, len(shape)), shape, strict=True)

    def _supposed(self, group: Group, d: int, line: Group, n: int) -> tuple[int, ...] | None:
        """The lengths of the blocks of a dimension; if they are not known, n for this one and enough for others."""
        known = self._given(d)
        if known is not None or line.size == 1:
            return known
        enough = n + sum(abs(w) for pair in self._pairs(d, line.size) for w in pair) + 1
        return tuple(n if k == line.index else enough for k in range(line.size))

    def _agree(self, part: np.ndarray, block: np.ndarray, d: int, m: Message, line: Group, s: int) -> None:
        if part.shape != (*block.shape[:d], m.length, *block.shape[d + 1 :]):
            raise LayoutError(
                message(
                    f"spmd.{self.function}",
                    argument="x",
                    got=f"blocks of shapes {list(block.shape)} (member {line.index}) and {list(part.shape)} "
                    f"(a part, of member {s}) along {' and '.join(map(repr, line.axes))}",
                    need=f"blocks that differ in dimension {d} only",
                    mend="let the spec say what splits the array",
                )
            )

    def _cost(self, group: Group, block: Shape, sizes, x: np.ndarray, forward: bool) -> tuple[int, int]:
        """The messages and bytes of this worker: the lengths it tells, and the halos."""
        count = nbytes = 0
        shape = list(block)
        for d, stage in enumerate(self._stages(group, block, sizes)):
            if stage.line.size > 1 and self._given(d) is None:
                told = gather_cost(stage.line, np.zeros(1, np.int64))
                count, nbytes = count + told[0], nbytes + told[1]
            for m in (stage.plan.sends if forward else stage.plan.takes)[stage.k].values():
                count += 1
                nbytes += int(np.prod([*shape[:d], m.length, *shape[d + 1 :]], dtype=np.int64)) * x.itemsize
            shape[d] = stage.length
        return count, nbytes


class HaloExchange(_Halo):
    """V -> V: the block with its neighbours' edges around it. Its adjoint is `HaloAccumulate`."""

    function: ClassVar[str] = "halo_exchange"

    def check(self, group: Group, x: np.ndarray) -> None:
        super().check(group, x)
        for d, n in enumerate(x.shape):
            k, given = self._place(group, d), self._given(d)
            if given is not None and given[k] != n:
                raise LayoutError(
                    message(
                        f"spmd.{self.function}",
                        argument="x",
                        got=f"a block of length {n} in dimension {d}",
                        need=f"length {given[k]}, as sizes={given} or shape says",
                        mend="leave sizes and shape out: they are learnt",
                    )
                )
            low, high = self._pairs(d, k + 1)[k]
            if n + low + high < 0:
                raise _trimmed(self.function, k, n, (low, high))

    def launch(self, comm: Comm, group: Group, x: np.ndarray, call: Call) -> Launched:
        return Steps(self._exchange(comm, group, x, call)), lambda found: found

    def _exchange(self, comm: Comm, group: Group, x: np.ndarray, call: Call):
        learnt = yield from self._learnt(comm, group, x, call)
        sizes = tuple(learnt.get(d, self._given(d)) for d in range(x.ndim))
        bound = replace(self, sizes=sizes, block=x.shape)
        stages = self._stages(group, x.shape, sizes)
        if all(stage.idle for stage in stages):
            return x, bound
        # The result is made once, and the block put where it stands in it; each stage then fills a little more. A
        # block that is trimmed may still owe others what it loses, so there every stage makes an array of its own.
        places = [stage.place for stage in stages]
        shape = tuple(stage.length for stage in stages)
        make = np.empty_like if all(stage.full for stage in stages) else np.zeros_like
        room, window = None, []
        if all(at is not None for at in places):
            room = make(x, shape=shape, order="C")
            window = [slice(at, at + n) for at, n in zip(places, x.shape, strict=True) if at is not None]
            room[tuple(window)] = x
            block = room[tuple(window)]
        else:
            block = x
        for d, (line, plan, k) in enumerate(stages):
            if stages[d].idle:
                continue
            sends = {t: _part(block, m.ranges, d) for t, m in plan.sends[k].items()}
            handle = comm.exchange(line, call, sends) if plan.moves else None
            own = plan.own(k)
            if room is not None:
                window[d] = slice(0, shape[d])
                out = room[tuple(window)]
                own = [p for p in own if (p.at, p.length) != (places[d], plan.sizes[k]) or p.flipped]
            else:
                out = make(x, shape=(*block.shape[:d], shape[d], *block.shape[d + 1 :]), order="C")
            _fill(out, block, own, d)
            received = {} if handle is None else (yield handle)
            for s, m in plan.takes[k].items():
                self._agree(received[s], block, d, m, line, s)
                _fill(out, received[s], m.pieces, d)
            block = out
        return sealed(block if room is None else room), bound

    @property
    def H(self) -> Operator:
        return HaloAccumulate(self.axes, self.spec, self.widths, self.boundary, self.sizes, self.block)

    def cost(self, group: Group, x: np.ndarray) -> tuple[int, int]:
        """Exact where sizes are known, or where halos end within the next block."""
        sizes = [self._supposed(group, d, line, n) for d, (line, n) in enumerate(self._at(group, x.shape))]
        return self._cost(group, x.shape, sizes, x, True)


class HaloAccumulate(_Halo):
    """V -> V: what a block with a halo holds of other blocks is added to them. Its adjoint is `HaloExchange`."""

    function: ClassVar[str] = "halo_accumulate"
    adds: ClassVar[bool] = True

    def launch(self, comm: Comm, group: Group, x: np.ndarray, call: Call) -> Launched:
        return Steps(self._accumulate(comm, group, x, call)), lambda found: found

    def _accumulate(self, comm: Comm, group: Group, x: np.ndarray, call: Call):
        learnt = yield from self._learnt(comm, group, x, call)
        block, sizes = self._without(group, x.shape, learnt)
        stages = self._stages(group, block, sizes)
        need = tuple(stage.length for stage in stages)
        if x.shape != need:
            raise LayoutError(
                message(
                    f"spmd.{self.function}",
                    argument="x",
                    got=f"a block of shape {list(x.shape)}",
                    need=f"shape {list(need)}, that of a block of shape {list(block)} with its halo",
                    mend="give the spec, widths, boundary and sizes of the exchange",
                )
            )
        bound = replace(self, sizes=sizes, block=block)
        g = x
        for d in reversed(range(x.ndim)):
            line, plan, k = stages[d]
            if stages[d].idle:
                continue
            sends = {s: _sum(g, m.pieces, m.length, d) for s, m in plan.takes[k].items()}
            handle = comm.exchange(line, call, sends) if plan.moves else None
            out = _sum(g, plan.own(k), plan.sizes[k], d)
            if not out.flags.owndata or out is x:
                out = np.array(out, order="C")
            received = {} if handle is None else (yield handle)
            for t, m in plan.sends[k].items():  # in the order of the workers
                self._agree(received[t], out, d, m, line, t)
                at = 0
                for start, stop in m.ranges:
                    out[_along(d, start, stop)] += received[t][_along(d, at, at + stop - start)]
                    at += stop - start
            g = out
        return sealed(g), bound

    def _without(self, group: Group, shape: Shape, learnt: dict[int, tuple[int, ...]]):
        """The shape of the block without its halo, and the lengths of all where they matter."""
        block, sizes = [], []
        for d, line in enumerate(self._lines(group, len(shape))):
            place, known = self._place(group, d), self._given(d)
            if line.size > 1 and known is None:
                known = _before(learnt[d], self._pairs(d, line.size), self._boundary(d), line.dims)
            sizes.append(known)
            if self.block is not None:
                block.append(self.block[d])
            elif known is not None:
                block.append(known[place])
            else:
                own = self._pairs(d, place + 1)[place]
                block.append(_before((shape[d],), (own,), self._boundary(d), ())[0])
        return tuple(block), tuple(sizes)

    @property
    def H(self) -> Operator:
        return HaloExchange(self.axes, self.spec, self.widths, self.boundary, self.sizes, self.block)

    def cost(self, group: Group, x: np.ndarray) -> tuple[int, int]:
        """Exact where sizes are known, or where halos end within the next block."""
        sizes = []
        for d, (line, length) in enumerate(self._at(group, x.shape)):
            place, none = self._place(group, d), self._boundary(d) == "none"
            own = self._pairs(d, line.size)[place] if line.size > 1 else (0, 0)
            n = _near(length, own, none and place == 0, none and place == line.size - 1)
            sizes.append(self._supposed(group, d, line, max(n, 0)))
        block, _ = replace(self, sizes=sizes)._without(group, x.shape, {})
        return self._cost(group, block, sizes, x, False)


# The functions that users write


def _int(n: Any) -> int | None:
    try:
        return index(n)
    except TypeError:
        return None


def _widths(where: str, spec: P, widths: Any) -> tuple[tuple[Pair, ...], ...]:
    """For each dimension one pair (low, high), or one per block."""
    one = _int(widths)
    if one is not None:
        return tuple(((one, one),) if names else ((0, 0),) for names in spec.trimmed)

    def pair(given: Any) -> Pair:
        low, high = given
        return index(low), index(high)

    def entry(given: Any) -> tuple[Pair, ...]:
        one = _int(given)
        if one is not None:
            return ((one, one),)
        return (pair(given),) if len(given) == 2 and _int(given[0]) is not None else tuple(map(pair, given))

    try:
        found = tuple(entry(given) for given in widths)
        if all(found) and len(found) >= len(spec.trimmed):
            return found
        got = f"{widths!r}, of {len(found)} entries, for {spec}"
    except (TypeError, ValueError):
        got = repr(widths)
    raise LayoutError(
        message(
            where,
            argument="widths",
            got=got,
            need="an int, or one entry per dimension: an int, (low, high), or a list of one (low, high) per block",
            mend="widths=(1, (2, 0)): one entry on both sides of dimension 0, two below dimension 1",
        )
    ) from None


def _sizes(where: str, sizes: Any) -> tuple[tuple[int, ...] | None, ...]:
    """For each dimension the lengths of its blocks, or None."""
    try:
        found = tuple(None if s is None else tuple(map(index, s)) for s in sizes)
        if all(n >= 0 for s in found for n in s or ()):
            return found
    except TypeError:
        pass
    raise LayoutError(
        message(
            where,
            argument="sizes",
            got=repr(sizes),
            need="for each dimension the lengths of its blocks, or None",
            mend="sizes=[(3, 2, 0), None]: dimension 0 lies in blocks of 3, 2 and 0",
        )
    )


def _boundaries(where: str, boundary: Any, count: int) -> str | tuple[str, ...]:
    """One boundary, or one for each dimension that has widths."""
    each = (boundary,) if isinstance(boundary, str) else tuple(boundary)
    for b in each:
        if b not in BOUNDARIES:
            close = nearest(str(b), BOUNDARIES, 1)
            raise LayoutError(
                message(
                    where,
                    argument="boundary",
                    got=repr(b),
                    need=f"one of {', '.join(BOUNDARIES)}, or one for each dimension",
                    mend=f'write "{(close or ["none"])[0]}"',
                )
            )
    if isinstance(boundary, str):
        return boundary
    if len(each) < count:
        raise LayoutError(
            message(
                where,
                argument="boundary",
                got=f"{each}, of {len(each)} entries, for {count} dimensions with widths",
                need="one for all, or one for each",
                mend='"none" for dimensions that end where the array ends',
            )
        )
    return each


def _operator(kind: type[_Halo], spec: P, widths: Any, boundary: Any, shape: Any, sizes: Any) -> _Halo:
    where = f"spmd.{kind.function}"
    mesh = here(where).mesh
    if not isinstance(spec, P):
        raise SpecError(
            message(
                where,
                argument="spec",
                got=describe(spec),
                need="a spec, which says what axes split what dimensions",
                mend='P("x") where axis x splits dimension 0',
            )
        )
    spec.check(mesh.axes, where, "spec")
    if shape is not None:
        if sizes is not None or len(tuple(shape)) < len(spec.trimmed):
            raise LayoutError(
                message(
                    where,
                    argument="shape",
                    got=f"{tuple(shape)}, and sizes" if sizes is not None else f"{tuple(shape)} for {spec}",
                    need="the shape of the whole array in balanced blocks, or else the sizes of the blocks",
                    mend="leave one of them out, or both",
                )
            )
        parts = [[mesh.axes[n] for n in (spec.dims[d] if d < len(spec) else ())] for d in range(len(shape))]
        sizes = [block_sizes(index(n), p) for n, p in zip(shape, parts, strict=True)]
    return kind(spec.axes, spec, widths, boundary, sizes)


def halo_exchange(
    x,
    spec: P,
    widths: int | Sequence[Any],
    boundary: str | Sequence[str] = "none",
    *,
    shape: Sequence[int] | None = None,
    sizes: Sequence[Sequence[int] | None] | None = None,
):
    """This worker's block of an array with its neighbours' edges around it.

    x: the block, or a pytree of blocks. spec: the axes that split each dimension of the array.
    widths: for each dimension an int, a pair (low, high), or a list of one (low, high) per block; an int alone is for
    every dimension that is split. A halo may be wider than the neighbours' blocks; a negative width trims the block.
    boundary: what stands beyond the ends of the array, for all dimensions or for each: "none" (nothing: blocks at the
    ends are smaller), "zero", "periodic", "reflect" or "edge" (as `np.pad` with "wrap", "reflect" and "edge").
    Dimensions that are not split have boundaries too.
    shape: of the whole array, if its blocks are balanced; sizes: for each dimension the lengths of its blocks, or None.
    Either saves telling lengths.

    Forward (V -> V): y = X[start - low : stop + high] in each dimension, of the array X continued at its ends. Corners
    are right. Adjoint: `halo_accumulate`.
    Cost: in each dimension one message to each worker whose halo reaches into this block, two where it ends within the
    next blocks; where neither shape nor sizes is given also an all-gather of one int along each dimension with a halo.
    Raises LayoutError where more is trimmed than there is, where widths, boundary or sizes do not fit the block, and
    where an array of length 0 is to be continued; SpecError for an unknown axis.
    """
    return operate(_operator(HaloExchange, spec, widths, boundary, shape, sizes), x, sys._getframe(1))


def halo_accumulate(
    x,
    spec: P,
    widths: int | Sequence[Any],
    boundary: str | Sequence[str] = "none",
    *,
    shape: Sequence[int] | None = None,
    sizes: Sequence[Sequence[int] | None] | None = None,
):
    """A block with a halo, without it: what it holds of other blocks, or of this one beyond the ends, is added there.

    x: the block with its halo, or a pytree of them. shape, sizes: those of the array and its blocks without halos;
    where neither is given blocks count as balanced if the lengths of their halos with boundary "none" leave it open.

    Forward (V -> V): y = the sum of all entries of all workers that are copies of the block's, in a fixed order: the
    block's own first, then worker by worker. Adjoint: `halo_exchange`, which see for the arguments, cost and errors.
    """
    return operate(_operator(HaloAccumulate, spec, widths, boundary, shape, sizes), x, sys._getframe(1))
