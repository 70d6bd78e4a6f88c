"""Blocks with their neighbours' edges around them, and the adjoint, which adds them back.

`halo_plan` says of every block of a dimension which entries of which blocks it gets, and where. The operators carry
plans out, dimension after dimension, so that corners come along with the edges: a worker exchanges messages with those
only that lie on its own lines through the grid of blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import prod
from operator import index
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from spmd.device import COPIED, copied, empty, put, zeros
from spmd.errors import LayoutError, MeshError, SpecError, describe, message
from spmd.kernels.cpu.moves import joiner
from spmd.kernels.memory import pool
from spmd.layout import P, block_sizes
from spmd.mesh import WORKER, Worker, here
from spmd.operators.base import Launched, Operator, bounded, operate
from spmd.operators.halo_plan import (
    BOUNDARIES,
    HaloPlan,
    Message,
    Pair,
    Piece,
    halo_plan,
    lengths_before,
    near_size,
    trimmed,
)
from spmd.spellings import closest
from spmd.tracebacks import shorten
from spmd.transport.base import Comm
from spmd.transport.call import Call, Group, Shape
from spmd.transport.handles import Steps, sealed
from spmd.transport.plan import Eager, Make

Kind = TypeVar("Kind", bound="_Halo")

__all__ = [
    "HaloAccumulate",
    "HaloExchange",
    "Steps",
    "along",
    "balanced",
    "checked_spec",
    "halo_accumulate",
    "halo_exchange",
    "lengths_met",
]

# Moving blocks


def along(d: int, start: int, stop: int | None) -> tuple[slice, ...]:
    """The entries start:stop of dimension d."""
    return (*(slice(None),) * d, slice(start, stop))


Place = tuple[Any, Any, bool]
"""Where a piece stands in the result, which entries it has, both as indices, and whether it is flipped."""


def _places(pieces: Iterable[Piece], d: int) -> tuple[Place, ...]:
    return tuple((along(d, p.at, p.at + p.length), along(d, p.start, p.stop), p.flipped) for p in pieces)


def _length(index: slice) -> int:
    return index.stop - index.start


def _fill(out: Any, block: Any, places: Iterable[Place], d: int) -> None:
    """Put the pieces of a block, or of a message, where they stand."""
    for to, of, flipped in places:
        out[to] = np.flip(block[of], d) if flipped else block[of]


def _add(out: Any, g: Any, pieces: Sequence[Piece], d: int) -> None:
    """The adjoint of `_fill`: add to a block, or to a message, what stands at the places of its pieces."""
    for p in pieces:
        part = g[along(d, p.at, p.at + p.length)]
        if p.repeat > 1:
            part = np.sum(part, axis=d, keepdims=True, dtype=g.dtype)
        out[along(d, p.start, p.stop)] += np.flip(part, d) if p.flipped else part


def _whole(pieces: Sequence[Piece], length: int) -> Piece | None:
    """A piece that is all there is to be given, as it is."""
    return next((p for p in pieces if p[1:3] == (0, length) and p.length == length and not p.flipped), None)


def _crops(pieces: Sequence[Piece], length: int) -> bool:
    """Whether the sum of these pieces is one of them, a part of what it is taken from."""
    return len(pieces) == 1 and _whole(pieces, length) is not None


def _sum(g: Any, pieces: Sequence[Piece], length: int, d: int, fresh: bool = False) -> Any:
    """What stands at the places of the pieces, added up to a block or a message of this length. fresh: never a view."""
    first = _whole(pieces, length)
    if first is None:
        out = zeros((*g.shape[:d], length, *g.shape[d + 1 :]), g)
    else:
        out = g[along(d, first.at, first.at + length)]
        if not fresh and _crops(pieces, length):
            return out
        out = copied(out)
    _add(out, g, [p for p in pieces if p is not first], d)
    return out


def _in_order(m: Message) -> list[Piece] | None:
    """The pieces one after the other as they stand in the message, if they fill it, each entry by one of them."""
    pieces = sorted(m.pieces, key=lambda p: p.start)
    ends = [0, *(p.stop for p in pieces)]
    plain = all(p.start == end and not p.flipped and p.repeat == 1 for p, end in zip(pieces, ends, strict=False))
    return pieces if plain and ends[-1] == m.length else None


def _returned(g: Any, m: Message, d: int) -> Any:
    """What a block with its halo gives back of a message."""
    pieces = _in_order(m)
    if pieces is None:
        return _sum(g, m.pieces, m.length, d)
    return _part(g, [along(d, p.at, p.at + p.length) for p in pieces], d)


def _one_index(ranges: Sequence[tuple[int, int]], d: int) -> tuple[Any, ...]:
    """Ranges of a dimension, one after the other, as one index: a slice if it is one range."""
    if len(ranges) == 1:
        return along(d, *ranges[0])
    return (*(slice(None),) * d, np.concatenate([np.arange(start, stop) for start, stop in ranges]))


def _part(block: Any, ranges: Sequence[Any], d: int) -> Any:
    """Ranges of a block, by their indices, one after the other; a single one is a view: who gets it copies it to its
    place at once."""
    parts = [block[of] for of in ranges]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=d, dtype=block.dtype)


def _add_ranges(out: Any, m: Message, part: Any, d: int) -> None:
    """Add what came back of a message to what the block gave to it."""
    at = 0
    for start, stop in m.ranges:
        out[along(d, start, stop)] += part[along(d, at, at + stop - start)]
        at += stop - start


class Dimension(NamedTuple):
    """One dimension as a worker sees it: the workers along it, the widths of all their blocks, the boundary."""

    line: Group
    pairs: tuple[Pair, ...]
    boundary: str

    @property
    def alone(self) -> bool:
        """Whether the worker needs nobody else here, nor anybody else this one: halos reach nowhere, or trim."""
        return self.line.size == 1 or all(low <= 0 and high <= 0 for low, high in self.pairs)

    @property
    def own(self) -> Pair:
        return self.pairs[self.line.index]


@lru_cache(maxsize=1024)
def _dimensions(
    spec: P,
    widths: tuple[tuple[Pair, ...], ...],
    boundary: str | tuple[str, ...],
    axes: tuple[str, ...],
    sides: Shape,
    members: Shape,
    place: int,
    ndim: int,
) -> tuple[Dimension, ...]:
    """The dimensions of the block of the worker at `place` of a group."""
    found = []
    for d in range(ndim):
        line = _line(axes, sides, members, place, spec.dims[d] if d < len(spec) else ())
        pairs = widths[d] if d < len(widths) else ((0, 0),)
        end = boundary if isinstance(boundary, str) else boundary[d] if d < len(boundary) else "none"
        found.append(Dimension(line, pairs * line.size if len(pairs) == 1 else pairs, end))
    return tuple(found)


def _line(axes: tuple[str, ...], sides: Shape, members: Shape, place: int, names: tuple[str, ...]) -> Group:
    """Of a group along `axes` those that differ from the one at `place` along `names` only."""
    strides, stride = {}, 1
    for name, n in zip(reversed(axes), reversed(sides), strict=True):
        strides[name] = (stride, n)
        stride *= n
    own = [place // strides[n][0] % strides[n][1] for n in names]
    places = [place - sum(k * strides[n][0] for k, n in zip(own, names, strict=True))]
    at = 0
    for k, n in zip(own, names, strict=True):
        places = [p + j * strides[n][0] for p in places for j in range(strides[n][1])]
        at = at * strides[n][1] + k
    return Group(names, tuple(strides[n][1] for n in names), tuple(members[p] for p in places), at)


class Stage(NamedTuple):
    """The plan of a dimension, which of its blocks is this worker's, and the workers that it is for."""

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


def _stages(
    dimensions: Sequence[Dimension], block: Shape, sizes: Sequence[tuple[int, ...] | None], nothing: bool = False
) -> list[Stage]:
    """The plans for a block of this shape. sizes: the lengths of all blocks of a dimension, where they matter. nothing:
    whether an array of length 0 may be continued in any way, as zeros."""
    stages = []
    for dim, n, known in zip(dimensions, block, sizes, strict=True):
        lengths, pairs, k = ((n,), (dim.own,), 0) if dim.alone else (known, dim.pairs, dim.line.index)
        assert lengths is not None
        boundary = "zero" if nothing and not sum(lengths) and dim.boundary != "none" else dim.boundary
        stages.append(Stage(dim.line, halo_plan(lengths, pairs, boundary), k))
    return stages


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

    def _dimensions(self, group: Group, ndim: int) -> tuple[Dimension, ...]:
        return _dimensions(
            self.spec, self.widths, self.boundary, group.axes, group.dims, group.members, group.index, ndim
        )

    def _given(self, d: int) -> tuple[int, ...] | None:
        """The lengths of the blocks of a dimension, if known."""
        return self.sizes[d] if self.sizes is not None and d < len(self.sizes) else None

    def _like(self, kind: type[Kind], **changes: Any) -> Kind:
        """This operator, or its adjoint, with other sizes: what was checked once need not be checked again."""
        other = object.__new__(kind)
        other.__dict__.update({f.name: getattr(self, f.name) for f in fields(self)}, **changes)
        return other

    def _learnt(self, comm: Comm, dimensions: Sequence[Dimension], call: Call):
        """For each dimension the lengths of the blocks there are, where they matter and are not known."""
        unknown = [d for d, dim in enumerate(dimensions) if not dim.alone and self._given(d) is None]
        handles = [comm.shapes(dimensions[d].line, call) for d in unknown]
        found: dict[int, tuple[int, ...]] = {}
        for d, handle in zip(unknown, handles, strict=True):
            found[d] = tuple(shape[d] for shape in (yield handle))
        return found

    def check(self, group: Group, x: np.ndarray) -> None:
        if (group, x.shape) not in self._checked:
            self._check(group, x)
            bounded(self._checked)[group, x.shape] = True

    @cached_property
    def _checked(self) -> dict[Any, bool]:
        """The groups and shapes of blocks that were found to be right."""
        return {}

    def _check(self, group: Group, x: np.ndarray) -> None:
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
                        got=f"{count} entr{'y' if count == 1 else 'ies'} for a block of shape {list(x.shape)}",
                        need=f"at most {x.ndim}, one per dimension",
                        mend="((low, high),) gives the two sides of one dimension"
                        if argument == "widths"
                        else "leave out dimensions that the block does not have",
                    )
                )
        for d, dim in enumerate(self._dimensions(group, x.ndim)):
            for argument, found in {"widths": dim.pairs, "sizes": self._given(d)}.items():
                if found is not None and len(found) != dim.line.size:
                    raise self._miscounted(argument, d, found, dim.line.size)

    def _miscounted(self, argument: str, d: int, found: tuple, blocks: int) -> LayoutError:
        return LayoutError(
            message(
                f"spmd.{self.function}",
                argument=f"{argument}, dimension {d}",
                got=f"{len(found)} entries: {found}",
                need=f"{blocks}, one per block",
                mend="one (low, high) for all blocks" if argument == "widths" else "None where they are to be learnt",
            )
        )

    def _supposed(self, d: int, dim: Dimension, n: int) -> tuple[int, ...] | None:
        """The lengths of the blocks of a dimension; if they are not known, n for this one and enough for others."""
        known = self._given(d)
        if known is not None or dim.alone:
            return known
        enough = n + sum(abs(w) for pair in dim.pairs for w in pair) + 1
        return tuple(n if k == dim.line.index else enough for k in range(dim.line.size))

    def _agree(self, part: Shape, block: Shape, d: int, m: Message, line: Group, s: int) -> None:
        if part != (*block[:d], m.length, *block[d + 1 :]):
            raise LayoutError(
                message(
                    f"spmd.{self.function}",
                    argument="x",
                    got=f"blocks of shapes {list(block)} (member {line.index}) and {list(part)} "
                    f"(a part, of member {s}) along {' and '.join(map(repr, line.axes))}",
                    need=f"blocks that differ in dimension {d} only",
                    mend="let the spec say what splits the array",
                )
            )

    def _cost(self, stages: Sequence[Stage], block: Shape, x: np.ndarray, forward: bool) -> tuple[int, int]:
        """The messages and bytes that this worker sends."""
        count = nbytes = 0
        shape = list(block)
        for d, stage in enumerate(stages):
            for m in (stage.plan.sends if forward else stage.plan.takes)[stage.k].values():
                count += 1
                nbytes += int(np.prod([*shape[:d], m.length, *shape[d + 1 :]], dtype=np.int64)) * x.itemsize
            shape[d] = stage.length
        return count, nbytes


class _Step(NamedTuple):
    """The exchange along one dimension. length: of the result in it. moves: whether anything does. sends: what goes to
    whom, as indices. gaps: where zeros stand; own: what stands there of the block itself; takes: of what comes from
    others. window: what of the result is filled when it is over."""

    d: int
    line: Group
    length: int
    moves: bool
    sends: tuple[tuple[int, tuple[Any, ...]], ...]
    gaps: tuple[Any, ...]
    own: tuple[Place, ...]
    takes: tuple[tuple[int, Message, tuple[Place, ...]], ...]
    window: tuple[slice, ...] | None


class _Way(NamedTuple):
    """How the exchange goes for a block of some shape. bound: the operator with the sizes it met. shape: of the result,
    and window: where the block stands in it, None where it is not all there. ahead: how many entries of the result come
    before those of the block, where these come one after the other, and nothing else is sent; else None."""

    bound: HaloExchange
    shape: Shape
    window: tuple[slice, ...] | None
    ahead: int | None
    steps: tuple[_Step, ...]

    def placed(self, x: Any, lent: bool) -> tuple[Any, Any]:
        """Room for the result, in which the block has its place, and the result: around the block where it lies, if
        there is room and nobody writes to it."""
        if self.ahead is not None and not lent and type(x) is np.ndarray:
            found = pool.around(x, self.ahead * x.itemsize, self.shape)
            if found is not None:
                return found
        room = empty(self.shape, x)
        put(room[self.window], x)
        return room, room

    def has_room(self, x: np.ndarray) -> bool:
        """Whether the result finds room around a block that lies as this one."""
        return self.ahead is not None and pool.has_room(x, self.ahead * x.itemsize, prod(self.shape) * x.itemsize)


def _ahead(shape: Shape, window: tuple[slice, ...] | None, steps: Sequence[_Step]) -> int | None:
    """That of a way, for a block of a shape. None where there is more than one step: what a later one sends is of the
    room, which is another result's as soon as nobody has this one."""
    if window is None or len(steps) != 1 or prod(shape[: steps[0].d]) != 1:
        return None
    d = steps[0].d
    return window[d].start * prod(shape[d + 1 :])


class HaloExchange(_Halo):
    """V -> V: the block with its neighbours' edges around it. Its adjoint is `HaloAccumulate`."""

    function: ClassVar[str] = "halo_exchange"

    def _check(self, group: Group, x: np.ndarray) -> None:
        super()._check(group, x)
        for d, dim in enumerate(self._dimensions(group, x.ndim)):
            n, k, given = x.shape[d], dim.line.index, self._given(d)
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
            if n + sum(dim.own) < 0:
                raise trimmed(self.function, k, n, dim.own)

    def launch(self, comm: Comm, group: Group, x: np.ndarray, call: Call) -> Launched:
        return Steps(self.steps(comm, group, x, call)), lambda found: found

    def steps(self, comm: Comm, group: Group, x: np.ndarray, call: Call, nothing: bool = False):
        """The exchange, dimension by dimension. nothing: whether an array of length 0 may be continued, as zeros."""
        way, received = self._ways.get((group, x.shape, nothing)), None
        if way is None:
            found = yield from self._at_once(comm, group, x, call, nothing)
            way, received = found or ((yield from self._way(comm, group, x.shape, call, nothing)), None)
        if not way.steps:
            return x, way.bound

        # The result is made once, and the block put where it stands in it, while the first messages are under way if
        # nobody writes to the block; each stage then fills a little more. A block that is trimmed may still owe others
        # what it loses, so there every stage makes an array of its own.
        def placed() -> tuple[Any, Any, Any]:
            room, whole = way.placed(x, call.lent)
            return room, whole, room[way.window]

        room, whole, block = placed() if call.lent and way.window is not None else (None, None, x)
        for d, line, length, moves, to, gaps, own, takes, window in way.steps:
            handle = None
            if moves and received is None:
                handle = comm.exchange(line, call, {t: _part(block, ranges, d) for t, ranges in to})
            if room is None and way.window is not None:
                room, whole, block = placed()
            if room is not None:
                out = room[window]
            else:
                out = empty((*block.shape[:d], length, *block.shape[d + 1 :]), x)
            for gap in gaps:
                out[gap] = 0
            _fill(out, block, own, d)
            came: Any = received if handle is None else (yield handle)
            for s, m, places in takes:
                self._agree(came[s].shape, block.shape, d, m, line, s)
                _fill(out, came[s], places, d)
            block = out
        return sealed(block if whole is None else whole), way.bound

    def eager(self, group: Group, x: np.ndarray) -> Eager | None:
        """Where halos are of one dimension, whose step therefore fills all of the result."""
        key = group, x.shape, False
        way = self._ways.get(key) or self._learnt_ways.get(key)
        if way is None or way.window is None or len(way.steps) != 1:
            return None
        (step,), window = way.steps, way.window
        d, line = step.d, step.line
        if not step.moves:
            return None

        shape, dtype = way.shape, x.dtype
        few = prod(shape) * x.itemsize <= COPIED
        pieces = [(None, *place) for place in step.own]
        pieces += [(s, *place) for s, _, places in step.takes for place in places]
        at_once: Any = None
        nothing: list[np.ndarray] = []
        if few and all(_length(of[d]) == _length(to[d]) for _, to, of, _ in pieces):  # of "edge" one entry is repeated
            at_once = joiner(shape, dtype, [window, *step.gaps, *(to for _, to, _, _ in pieces)])
            nothing = [np.zeros(shape, dtype)[gap] for gap in step.gaps]

        def come(x: np.ndarray, blocks: list[Any]) -> Iterator[np.ndarray]:
            for s, _, of, flipped in pieces:
                part = (x if s is None else blocks[s])[of]
                yield np.flip(part, d) if flipped else part

        def maker(shapes: tuple[Shape, ...]) -> tuple[Make, Operator]:
            for s, m, _ in step.takes:
                self._agree(shapes[s], x_shape, d, m, line, s)
            return made if at_once is None else joined, way.bound

        def joined(x: np.ndarray, blocks: list[Any]) -> np.ndarray:
            return at_once([x, *nothing, *come(x, blocks)])

        def made(x: np.ndarray, blocks: list[Any]) -> np.ndarray:
            if few:
                room = whole = np.empty(shape, dtype)
                room[window] = x
            else:
                room, whole = way.placed(x, False)
            for gap in step.gaps:
                room[gap] = 0
            for (_, to, _, _), part in zip(pieces, come(x, blocks), strict=True):
                room[to] = part
            return sealed(whole)

        x_shape = x.shape
        to = {t: _one_index([(of[d].start, of[d].stop) for of in ranges], d) for t, ranges in step.sends}
        parts = [to.get(k) for k in range(line.size)]
        supposed = None if key in self._ways else (d, way.bound.sizes[d])
        return Eager(line, parts, maker, supposed=supposed, slight=not few and way.has_room(x), apart=True)

    @cached_property
    def _ways(self) -> dict[Any, _Way]:
        """What is known of earlier blocks, by group, shape and whether nothing may be continued."""
        return {}

    @cached_property
    def _learnt_ways(self) -> dict[Any, _Way]:
        """How it went the last time, where another time others may come with other blocks."""
        return {}

    def _only_unknown(self, group: Group, ndim: int) -> int | None:
        """The dimension that alone is continued, if its lengths are to be learnt."""
        dimensions = self._dimensions(group, ndim)
        reached = [d for d, dim in enumerate(dimensions) if any(map(any, dim.pairs))]
        if len(reached) != 1 or dimensions[reached[0]].alone or self._given(reached[0]) is not None:
            return None
        return reached[0]

    def _at_once(self, comm: Comm, group: Group, x: np.ndarray, call: Call, nothing: bool):
        """The way, and what comes, where the lengths of one dimension can be learnt in the meeting in which it is
        exchanged; else None."""
        d = self._only_unknown(group, x.ndim)
        if d is None:
            return None

        def way_of(shapes: Sequence[Shape]) -> _Way:
            lengths, key = tuple(shape[d] for shape in shapes), (group, x.shape, nothing)
            way = self._learnt_ways.get(key)
            if way is None or way.bound.sizes[d] != lengths:
                sizes = tuple(lengths if e == d else self._given(e) for e in range(x.ndim))
                way = bounded(self._learnt_ways)[key] = self._way_with(group, x.shape, nothing, sizes)
            return way

        def sends(shapes: Sequence[Shape]) -> dict[int, Any] | None:
            steps = way_of(shapes).steps
            if not any(step.moves for step in steps):
                return None
            return {t: _part(x, ranges, d) for step in steps for t, ranges in step.sends}

        handle = comm.exchange_learnt(self._dimensions(group, x.ndim)[d].line, call, sends)
        if handle is None:
            return None
        shapes, received = yield handle
        return way_of(shapes), received

    def _way(self, comm: Comm, group: Group, shape: Shape, call: Call, nothing: bool):
        learnt = yield from self._learnt(comm, self._dimensions(group, len(shape)), call)
        sizes = tuple(learnt.get(d, self._given(d)) for d in range(len(shape)))
        way = self._way_with(group, shape, nothing, sizes)
        if not learnt:
            bounded(self._ways)[group, shape, nothing] = way
        return way

    def _way_with(self, group: Group, shape: Shape, nothing: bool, sizes: tuple[Any, ...]) -> _Way:
        dimensions = self._dimensions(group, len(shape))
        stages = _stages(dimensions, shape, sizes, nothing)
        places = [stage.place for stage in stages]
        lengths = tuple(stage.length for stage in stages)
        steps = []
        begin = window = None
        if all(at is not None for at in places):
            window = [slice(at, at + n) for at, n in zip(places, shape, strict=True) if at is not None]
            begin = tuple(window)
        for d, stage in enumerate(stages):
            if stage.idle:
                continue
            line, plan, k = stage
            own = plan.own(k)
            if window is not None:
                window[d] = slice(0, lengths[d])
                own = tuple(p for p in own if (p.at, p.length) != (places[d], plan.sizes[k]) or p.flipped)
            steps.append(
                _Step(
                    d,
                    line,
                    plan.lengths[k],
                    bool(plan.moves),
                    sends=tuple((t, tuple(along(d, *r) for r in m.ranges)) for t, m in plan.sends[k].items()),
                    gaps=tuple(along(d, start, stop) for start, stop in plan.gaps[k]),
                    own=_places(own, d),
                    takes=tuple((s, m, _places(m.pieces, d)) for s, m in plan.takes[k].items()),
                    window=None if window is None else tuple(window),
                )
            )
        bound = self._like(type(self), sizes=sizes, block=shape)
        return _Way(bound, lengths, begin, _ahead(shape, begin, steps), tuple(steps))

    @cached_property
    def _turned(self) -> HaloAccumulate:
        return self._like(HaloAccumulate)

    @property
    def H(self) -> Operator:
        return self._turned

    def cost(self, group: Group, x: np.ndarray) -> tuple[int, int]:
        """Exact where sizes are known, or where halos end within the next block."""
        return self.cost_of(group, x)

    def cost_of(self, group: Group, x: np.ndarray, nothing: bool = False) -> tuple[int, int]:
        """That of `steps`."""
        dimensions = self._dimensions(group, x.ndim)
        sizes = [self._supposed(d, dim, x.shape[d]) for d, dim in enumerate(dimensions)]
        return self._cost(_stages(dimensions, x.shape, sizes, nothing), x.shape, x, True)


class HaloAccumulate(_Halo):
    """V -> V: what a block with a halo holds of other blocks is added to them. Its adjoint is `HaloExchange`."""

    function: ClassVar[str] = "halo_accumulate"
    adds: ClassVar[bool] = True

    def launch(self, comm: Comm, group: Group, x: np.ndarray, call: Call) -> Launched:
        return Steps(self._accumulate(comm, group, x, call)), lambda found: found

    def _accumulate(self, comm: Comm, group: Group, x: np.ndarray, call: Call):
        known = self._known.get((group, x.shape))
        if known is None:
            known = yield from self._learn(comm, group, x.shape, call)
        stages, bound = known
        # What dimensions only crop is a view, until something is added to it or the result is made of it.
        g, mine = x, False
        for d in reversed(range(x.ndim)):
            line, plan, k = stages[d]
            if stages[d].idle:
                continue
            sends = {s: _returned(g, m, d) for s, m in plan.takes[k].items()}
            handle = comm.exchange(line, call, sends) if plan.moves else None
            own, adds = plan.own(k), bool(plan.sends[k])
            out = _sum(g, own, plan.sizes[k], d, fresh=adds and not mine)
            mine = mine or adds or not _crops(own, plan.sizes[k])
            received = {} if handle is None else (yield handle)
            for t, m in plan.sends[k].items():  # in the order of the workers
                self._agree(received[t].shape, out.shape, d, m, line, t)
                _add_ranges(out, m, received[t], d)
            g = out
        return sealed(g if g is x or (mine and g.flags.c_contiguous) else copied(g)), bound

    def eager(self, group: Group, x: np.ndarray) -> Eager | None:
        """Where halos are of one dimension, and nothing is to be added up for a neighbour."""
        stages, bound = self._known.get((group, x.shape), ((), None))
        moving = [(d, stage) for d, stage in enumerate(stages) if not stage.idle]
        if len(moving) != 1:
            return None
        ((d, stage),) = moving
        (line, plan, k), parts = stage, {}
        for s, m in plan.takes[k].items():
            pieces = _in_order(m)
            if pieces is None:
                return None
            parts[s] = _one_index([(p.at, p.at + p.length) for p in pieces], d)
        if not plan.moves:
            return None
        size, own, sends = plan.sizes[k], plan.own(k), plan.sends[k]
        block = (*x.shape[:d], size, *x.shape[d + 1 :])

        def maker(shapes: tuple[Shape, ...]) -> tuple[Make, Operator | None]:
            for t, m in sends.items():
                self._agree(shapes[t], block, d, m, line, t)
            return made, bound

        def made(g: np.ndarray, blocks: list[Any]) -> np.ndarray:
            out = _sum(g, own, size, d, fresh=True)
            for t, m in sends.items():
                _add_ranges(out, m, blocks[t], d)
            return sealed(out)

        return Eager(line, [parts.get(s) for s in range(line.size)], maker, apart=True)

    @cached_property
    def _known(self) -> dict[Any, tuple[list[Stage], HaloAccumulate]]:
        """What is known of earlier blocks, by group and shape."""
        return {}

    def _learn(self, comm: Comm, group: Group, shape: Shape, call: Call):
        dimensions = self._dimensions(group, len(shape))
        learnt = yield from self._learnt(comm, dimensions, call)
        block, sizes = self._without(dimensions, shape, learnt)
        stages = _stages(dimensions, block, sizes)
        need = tuple(stage.length for stage in stages)
        if shape != need:
            raise LayoutError(
                message(
                    f"spmd.{self.function}",
                    argument="x",
                    got=f"a block of shape {list(shape)}",
                    need=f"shape {list(need)}, that of a block of shape {list(block)} with its halo",
                    mend="give the spec, widths, boundary and sizes of the exchange",
                )
            )
        found = stages, self._like(type(self), sizes=sizes, block=block)
        if not learnt:
            bounded(self._known)[group, shape] = found
        return found

    def _without(self, dimensions: Sequence[Dimension], shape: Shape, learnt: dict[int, tuple[int, ...]]):
        """The shape of the block without its halo, and the lengths of all where they matter."""
        block, sizes = [], []
        for d, dim in enumerate(dimensions):
            known = self._given(d)
            if known is None and not dim.alone:
                known = lengths_before(learnt[d], dim.pairs, dim.boundary, dim.line.dims)
            sizes.append(known)
            if self.block is not None:
                block.append(self.block[d])
            elif known is not None:
                block.append(known[dim.line.index])
            else:
                block.append(lengths_before((shape[d],), (dim.own,), dim.boundary, ())[0])
        return tuple(block), tuple(sizes)

    @cached_property
    def _turned(self) -> HaloExchange:
        return self._like(HaloExchange)

    @property
    def H(self) -> Operator:
        return self._turned

    def cost(self, group: Group, x: np.ndarray) -> tuple[int, int]:
        """Exact where sizes are known, or where halos end within the next block."""
        dimensions, sizes = self._dimensions(group, x.ndim), []
        for d, dim in enumerate(dimensions):
            n = near_size(x.shape[d], dim.own, dim.boundary, dim.line.index, dim.line.size)
            sizes.append(self._supposed(d, dim, max(n, 0)))
        block, _ = replace(self, sizes=sizes)._without(dimensions, x.shape, {})
        return self._cost(_stages(dimensions, block, sizes), block, x, False)


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


_SYMMETRIC = ', which is the same for widths of 1; "reflect" mirrors too, and does not repeat the last entry'


def _boundaries(where: str, boundary: Any, count: int) -> str | tuple[str, ...]:
    """One boundary, or one for each dimension that has widths."""
    each = tuple(boundary) if isinstance(boundary, Sequence) and not isinstance(boundary, str) else (boundary,)
    for b in each:
        if b not in BOUNDARIES:
            raise LayoutError(
                message(
                    where,
                    argument="boundary",
                    got=repr(b),
                    need=f"one of {', '.join(BOUNDARIES)}, or one for each dimension",
                    mend=f'write "{closest(b, BOUNDARIES)}"' + _SYMMETRIC * (b == "symmetric"),
                )
            )
    if isinstance(boundary, str):
        return boundary
    if len(each) < count:
        raise LayoutError(
            message(
                where,
                argument="boundary",
                got=f"{each}, of {len(each)} entries, for {count} dimension{'s' * (count != 1)} with widths",
                need="one for all, or one for each",
                mend='"none" for dimensions that end where the array ends',
            )
        )
    return each


def _operator(kind: type[_Halo], spec: P, widths: Any, boundary: Any, shape: Any, sizes: Any) -> _Halo:
    try:
        sides = (WORKER.get() or here(f"spmd.{kind.function}")).mesh.sides
    except MeshError as error:
        shorten(error)
        raise
    try:
        return _made(kind, spec, widths, boundary, shape, sizes, sides)
    except TypeError:  # lists
        pass
    try:
        return _made(kind, spec, *map(_hashable, (widths, boundary, shape, sizes)), sides)
    except (TypeError, LayoutError):  # which shows what was written
        return _made.__wrapped__(kind, spec, widths, boundary, shape, sizes, sides)


def _hashable(given: Any) -> Any:
    """Lists as tuples, at every depth: both say the same."""
    return tuple(map(_hashable, given)) if isinstance(given, list | tuple) else given


@lru_cache(maxsize=1024, typed=True)
def _made(
    kind: type[_Halo],
    spec: P,
    widths: Any,
    boundary: Any,
    shape: Any,
    sizes: Any,
    of_mesh: tuple[tuple[str, int], ...],
) -> _Halo:
    where, axes = f"spmd.{kind.function}", dict(of_mesh)
    checked_spec(where, spec, axes)
    if shape is not None and sizes is not None:
        raise LayoutError(
            message(
                where,
                argument="shape",
                got=f"{shape!r}, and sizes",
                need="the shape of the whole array in balanced blocks, or else the sizes of the blocks",
                mend="leave one of them out, or both",
            )
        )
    sizes = sizes if shape is None else balanced(where, spec, shape, axes)
    return kind(spec.axes, spec, widths, boundary, sizes)


def checked_spec(where: str, spec: Any, axes: Mapping[str, int], ndim: int | None = None, space: int = 0) -> None:
    """Raise where that is no spec on these axes of a mesh, for an array of ndim dimensions. space: the dimension that
    is split first, most often."""
    if not isinstance(spec, P):
        example = ", ".join(["None"] * space + ['"x"'])
        raise SpecError(
            message(
                where,
                argument="spec",
                got=describe(spec),
                need="a spec, which says what axes split what dimensions",
                mend=f"P({example}) where axis x splits dimension {space}",
            )
        )
    spec.check(axes, where, "spec", ndim)


def balanced(where: str, spec: P, shape: Any, axes: Mapping[str, int]) -> list[tuple[int, ...]]:
    """For each dimension the lengths of the balanced blocks of an array of this shape. axes: those of the mesh."""
    whole = [-1 if n is None else n for n in map(_int, shape)] if isinstance(shape, Iterable) else [-1]
    if len(whole) < len(spec.trimmed) or min(whole, default=0) < 0:
        raise LayoutError(
            message(
                where,
                argument="shape",
                got=f"{shape!r} for {spec}",
                need="the shape of the whole array, whose blocks are balanced",
                mend="leave it out: the lengths of the blocks are learnt",
            )
        )
    parts = [[axes[n] for n in (spec.dims[d] if d < len(spec) else ())] for d in range(len(whole))]
    return [block_sizes(n, p) for n, p in zip(whole, parts, strict=True)]


def lengths_met(
    op: str, worker: Worker, names: Sequence[tuple[str, ...]], shape: Shape, dtype: np.dtype
) -> tuple[tuple[int, ...], ...]:
    """The lengths of all workers' blocks in each dimension of one of this shape. names: the axes that split each. A
    meeting for each dimension that several workers share; no bytes."""
    found = []
    for d, axes in enumerate(names):
        group = worker.group(axes)
        call = Call(op, axes, np.dtype(dtype), tuple(shape))
        shapes = [shape] if group.size == 1 else worker.comm.shapes(group, call).wait()
        found.append(tuple(s[d] for s in shapes))
    return tuple(found)


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
    Either saves the meetings in which workers learn the lengths; virtual workers learn those of one dimension, if no
    other is continued, when they exchange edges.

    Forward (V -> V): y = X[start - low : stop + high] in each dimension, of the array X continued at its ends. Corners
    are right. Adjoint: `halo_accumulate`.
    Cost: in each dimension one message to each worker whose halo reaches into this block, two where it ends within the
    next blocks. The block is copied, but where halos are along the first dimension (or those before have length 1), and
    the block is all of an array of 64 KB or more that spmd made, on the host: then the result is made around it in its
    memory, for one result at a time and halos of up to a 64th of it on each side. Either way it is read-only.
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
