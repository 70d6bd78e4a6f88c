"""Blocks with their neighbours' edges around them, and the adjoint, which adds them back.

`halo_plan` says of every block of a dimension which entries of which blocks it gets, and where. The operators carry
plans out, dimension after dimension, so that corners come along with the edges: a worker exchanges messages with those
only that lie on its own lines through the grid of blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial
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
from spmd.operators.base import Operator, bounded, operate, unmoved
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
from spmd.transport.handles import Chained, Handle, sealed
from spmd.transport.plan import Combine, Make, NeedsShapes, Plan, Plans

Kind = TypeVar("Kind", bound="_Halo")

__all__ = [
    "HaloAccumulate",
    "HaloExchange",
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


def _returning(m: Message, d: int) -> Any:
    """The part of a block with its halo that goes back for a message: an index, where nothing is to be added up."""
    pieces = _in_order(m)
    if pieces is None:
        return lambda g: _sum(g, m.pieces, m.length, d)
    return _one_index([(p.at, p.at + p.length) for p in pieces], d)


def _one_index(ranges: Sequence[tuple[int, int]], d: int) -> tuple[Any, ...]:
    """Ranges of a dimension, one after the other, as one index: a slice if it is one range."""
    if len(ranges) == 1:
        return along(d, *ranges[0])
    return (*(slice(None),) * d, np.concatenate([np.arange(start, stop) for start, stop in ranges]))


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


class _Room(NamedTuple):
    """Where the result of an exchange lies. shape: of the result; window: where the block stands in it. ahead: how many
    entries of the result come before those of the block, where these come one after the other, and nothing else is
    sent; else None."""

    shape: Shape
    window: tuple[slice, ...]
    ahead: int | None

    def place(self, x: Any, borrowed: bool) -> tuple[Any, Any]:
        """Room for the result, in which the block has its place, and the result: around the block where it lies, if
        there is room and nobody writes to it."""
        if type(x) is np.ndarray and prod(self.shape) * x.itemsize <= COPIED:
            room = np.empty(self.shape, x.dtype)
            room[self.window] = x
            return room, room
        if self.ahead is not None and not borrowed and type(x) is np.ndarray:
            found = pool.around(x, self.ahead * x.itemsize, self.shape)
            if found is not None:
                return found
        room = empty(self.shape, x)
        put(room[self.window], x)
        return room, room

    def is_around(self, x: np.ndarray) -> bool:
        """Whether the result finds room around a block that lies as this one."""
        nbytes = prod(self.shape) * x.itemsize
        return nbytes > COPIED and self.ahead is not None and pool.has_room(x, self.ahead * x.itemsize, nbytes)


def _ahead(shape: Shape, window: Sequence[slice], moving: Sequence[int]) -> int | None:
    """That of the room for the result of a block that goes on in the dimensions `moving`. None for several: what the
    later ones send is of the room, which is another result's as soon as nobody has this one."""
    if len(moving) != 1 or prod(shape[: moving[0]]) != 1:
        return None
    d = moving[0]
    return window[d].start * prod(shape[d + 1 :])


@dataclass(frozen=True)
class FillHalo(Combine):
    """A block, with what comes from its neighbours along one dimension around it.

    op: the exchange. d: the dimension; length: of the result in it. gaps: where zeros stand. own: what stands there of
    the block itself; takes: of what comes from others. room: where the result of all dimensions lies, and window: what
    of it is filled then; None where the block is not all there, and so each dimension makes an array of its own.
    """

    op: HaloExchange
    d: int
    length: int
    gaps: tuple[Any, ...]
    own: tuple[Place, ...]
    takes: tuple[tuple[int, Message, tuple[Place, ...]], ...]
    room: _Room | None
    window: tuple[slice, ...] | None
    in_place: bool = False
    parallel: ClassVar[bool] = True

    def complete(self, plan: Plan, shapes: Sequence[Any]) -> tuple[Make, Shape]:
        for s, m, _ in self.takes:
            self.op._agree(shapes[s], plan.shape, self.d, m, plan.group, s)
        shape = (*plan.shape[: self.d], self.length, *plan.shape[self.d + 1 :])

        def make(x: Any, blocks: Sequence[Any], fresh: bool = True, begun: Any = None) -> Any:
            out, whole = begun or self.begin(plan, x)
            for s, _, places in self.takes:
                _fill(out, blocks[s], places, self.d)
            return sealed(whole)

        return make, shape

    def begin(self, plan: Plan, x: Any, borrowed: bool = False) -> Any:
        """What is filled now, and the result, with what the block has of it."""
        if self.room is None:
            out = whole = empty((*x.shape[: self.d], self.length, *x.shape[self.d + 1 :]), x)
        else:
            room, whole = self.room.place(x, borrowed)
            out = room[self.window]
        self.fill(out, x)
        return out, whole

    def fill(self, out: Any, x: Any) -> None:
        """Put there what comes from nobody else."""
        for gap in self.gaps:
            out[gap] = 0
        _fill(out, x, self.own, self.d)

    def quick(self, plan: Plan, shapes: Sequence[Any]) -> Make | None:
        d, room = self.d, self.room
        if room is None or prod(room.shape) * plan.dtype.itemsize > COPIED:
            return None
        pieces = [(None, *place) for place in self.own]
        pieces += [(s, *place) for s, _, places in self.takes for place in places]
        if any(_length(of[d]) != _length(to[d]) for _, to, of, _ in pieces):  # of "edge" one entry is repeated
            return None
        at_once = joiner(room.shape, plan.dtype, [room.window, *self.gaps, *(to for _, to, _, _ in pieces)])
        if at_once is None:
            return None
        zeros_there = [np.zeros(room.shape, plan.dtype)[gap] for gap in self.gaps]

        def parts(x: Any, blocks: Sequence[Any]) -> Iterator[np.ndarray]:
            for s, _, of, flipped in pieces:
                part = (x if s is None else blocks[s])[of]
                yield np.flip(part, d) if flipped else part

        return lambda x, blocks: at_once([x, *zeros_there, *parts(x, blocks)])

    def __str__(self) -> str:
        sources = ", ".join(str(s) for s, _, _ in self.takes)
        return f"length {self.length} in dimension {self.d}: the block" + f", and parts from {sources}" * bool(sources)


@dataclass(frozen=True, eq=False)
class HaloPlans(Plans):
    """The plans of an exchange, one for each dimension in which the block goes on. room: see `FillHalo`."""

    room: _Room | None


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

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> HaloPlans:
        """One plan for each dimension in which the block goes on. Where lengths are to be learnt, it is that for this
        block's length, and others that halos do not reach across."""
        return self.plans(group, shape, dtype)

    def plans(self, group: Group, shape: Shape, dtype: np.dtype, nothing: bool = False) -> HaloPlans:
        """`plan`. nothing: whether an array of length 0 may be continued, as zeros."""
        dimensions = self._dimensions(group, len(shape))
        sizes = tuple(self._supposed(d, dim, shape[d]) for d, dim in enumerate(dimensions))
        return self._plans_with(group, shape, dtype, nothing, sizes)

    def start(self, comm: Comm, group: Group, x: Any, call: Call) -> Handle:
        return Chained(self.steps(comm, group, x, call))

    def steps(self, comm: Comm, group: Group, x: np.ndarray, call: Call, nothing: bool = False):
        """The exchange, dimension by dimension. nothing: whether an array of length 0 may be continued, as zeros."""
        plans = self._plans.get((group, x.shape, x.dtype, nothing))
        if plans is None:
            d = self._only_unknown(group, x.ndim)
            if d is not None:
                line = self._dimensions(group, x.ndim)[d].line
                needs = NeedsShapes(line, partial(self._learnt_plan, group, x.shape, x.dtype, nothing, d))
                return (yield comm.run(needs, call, x))
            plans = yield from self._learn(comm, group, x, call, nothing)
        if len(plans.steps) == 1:
            return (yield comm.run(plans.steps[0], call, x))

        # The result is made once, and the block put where it stands in it, while the first messages are under way if
        # nobody writes to the block; each dimension then fills a little more.
        block, result, room = x, x, None
        if call.lent and plans.room is not None and plans.steps:
            room, result = plans.room.place(x, True)
            block = room[plans.room.window]
        for plan in plans.steps:
            combine: Any = plan.combine
            handle = comm.exchange(plan.group, call, plan.sends(block)) if plan.kind != "none" else None
            if room is None and plans.room is not None:
                room, result = plans.room.place(x, False)
            if room is None:
                out = empty((*block.shape[: combine.d], combine.length, *block.shape[combine.d + 1 :]), x)
                result = out
            else:
                out = room[combine.window]
            combine.fill(out, block)
            came = {} if handle is None else (yield handle)
            blocks = [came.get(k) for k in range(plan.group.size)]
            block, _ = plan.finish(block, blocks, begun=(out, result if plan is plans.steps[-1] else out))
        return block, plans.bound

    def repeatable_plan(self, group: Group, x: np.ndarray) -> Plan | None:
        """Where halos are of one dimension, whose plan therefore fills all of the result."""
        key = group, x.shape, x.dtype, False
        known = self._plans.get(key)
        plans = known or self._learnt_plans.get(key)
        if plans is None or plans.room is None or len(plans.steps) != 1:
            return None
        (plan,) = plans.steps
        combine: Any = plan.combine
        assumed = None if known is not None else (combine.d, plans.bound.sizes[combine.d])
        in_place = plans.room.is_around(x)
        return replace(plan, combine=replace(combine, in_place=in_place), assumed_lengths=assumed)

    @cached_property
    def _plans(self) -> dict[Any, HaloPlans]:
        """Those of earlier blocks, by group, shape, dtype and whether nothing may be continued."""
        return {}

    @cached_property
    def _learnt_plans(self) -> dict[Any, HaloPlans]:
        """The latest ones, where another time others may come with other blocks."""
        return {}

    def _only_unknown(self, group: Group, ndim: int) -> int | None:
        """The dimension that alone is continued, if its lengths are to be learnt."""
        dimensions = self._dimensions(group, ndim)
        reached = [d for d, dim in enumerate(dimensions) if any(map(any, dim.pairs))]
        if len(reached) != 1 or dimensions[reached[0]].alone or self._given(reached[0]) is not None:
            return None
        return reached[0]

    def _learnt_plan(
        self, group: Group, shape: Shape, dtype: np.dtype, nothing: bool, d: int, shapes: Sequence[Shape]
    ) -> Plan:
        """The plan where dimension d alone goes on, and the blocks of its line have these shapes."""
        lengths, key = tuple(s[d] for s in shapes), (group, shape, dtype, nothing)
        plans = self._learnt_plans.get(key)
        if plans is None or plans.bound.sizes[d] != lengths:
            sizes = tuple(lengths if e == d else self._given(e) for e in range(len(shape)))
            plans = bounded(self._learnt_plans)[key] = self._plans_with(group, shape, dtype, nothing, sizes)
        return plans.steps[0] if plans.steps else unmoved(plans.bound, group, shape, dtype)

    def _learn(self, comm: Comm, group: Group, x: np.ndarray, call: Call, nothing: bool):
        learnt = yield from self._learnt(comm, self._dimensions(group, x.ndim), call)
        sizes = tuple(learnt.get(d, self._given(d)) for d in range(x.ndim))
        plans = self._plans_with(group, x.shape, x.dtype, nothing, sizes)
        if not learnt:
            bounded(self._plans)[group, x.shape, x.dtype, nothing] = plans
        return plans

    def _plans_with(
        self, group: Group, shape: Shape, dtype: np.dtype, nothing: bool, sizes: tuple[Any, ...]
    ) -> HaloPlans:
        stages = _stages(self._dimensions(group, len(shape)), shape, sizes, nothing)
        places, lengths = [stage.place for stage in stages], tuple(stage.length for stage in stages)
        moving = [d for d, stage in enumerate(stages) if not stage.idle]
        bound = self._like(type(self), sizes=sizes, block=shape)
        window, room = [slice(at, at + n) for at, n in zip(places, shape, strict=True) if at is not None], None
        if len(window) == len(shape):
            room = _Room(lengths, tuple(window), _ahead(shape, window, moving))
        steps, block = [], list(shape)
        for d in moving:
            line, plan, k = stages[d]
            own = plan.own(k)
            if room is not None:
                window[d] = slice(0, lengths[d])
                own = tuple(p for p in own if (p.at, p.length) != (places[d], plan.sizes[k]) or p.flipped)
            combine = FillHalo(
                self,
                d,
                lengths[d],
                gaps=tuple(along(d, start, stop) for start, stop in plan.gaps[k]),
                own=_places(own, d),
                takes=tuple((s, m, _places(m.pieces, d)) for s, m in plan.takes[k].items()),
                room=room,
                window=None if room is None else tuple(window),
            )
            sends = {t: _one_index(m.ranges, d) for t, m in plan.sends[k].items()}
            parts = [sends.get(j) for j in range(line.size)]
            kind = "exchange" if plan.moves else "none"
            steps.append(Plan(kind, line, tuple(block), dtype, parts, combine, lambda _: bound))
            block[d] = lengths[d]
        return HaloPlans(tuple(steps), bound, room)

    @cached_property
    def _turned(self) -> HaloAccumulate:
        return self._like(HaloAccumulate)

    @property
    def H(self) -> Operator:
        return self._turned


@dataclass(frozen=True)
class AddHalo(Combine):
    """A block with a halo along one dimension, without it: what it holds of the block is added up, and what comes back
    from others is added to it.

    op: the operator. d: the dimension; size: of the block in it. own: the pieces of the block itself. sends: what it
    has given to others, by member, which comes back.
    """

    op: HaloAccumulate
    d: int
    size: int
    own: tuple[Piece, ...]
    sends: Mapping[int, Message]
    parallel: ClassVar[bool] = True

    def complete(self, plan: Plan, shapes: Sequence[Any]) -> tuple[Make, Shape]:
        block = (*plan.shape[: self.d], self.size, *plan.shape[self.d + 1 :])
        for t, m in self.sends.items():
            self.op._agree(shapes[t], block, self.d, m, plan.group, t)

        def make(g: Any, blocks: Sequence[Any], fresh: bool = True, begun: Any = None) -> Any:
            out = self.begin(plan, g) if begun is None else begun
            for t, m in self.sends.items():  # in the order of the workers
                _add_ranges(out, m, blocks[t], self.d)
            return sealed(out)

        return make, block

    def begin(self, plan: Plan, x: Any, borrowed: bool = False) -> Any:
        return self.sum_own(x, True)

    def sum_own(self, g: Any, fresh: bool) -> Any:
        """What the block itself holds. fresh: never a view."""
        return _sum(g, self.own, self.size, self.d, fresh)

    def __str__(self) -> str:
        sources = ", ".join(map(str, self.sends))
        return f"length {self.size} in dimension {self.d}: the block" + f", parts from {sources} added" * bool(sources)


class HaloAccumulate(_Halo):
    """V -> V: what a block with a halo holds of other blocks is added to them. Its adjoint is `HaloExchange`."""

    function: ClassVar[str] = "halo_accumulate"
    adds: ClassVar[bool] = True

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plans:
        """One plan for each dimension in which the block goes on, the last one first. Where lengths are to be learnt,
        it is that for this block's length, and others that halos do not reach across."""
        dimensions, sizes = self._dimensions(group, len(shape)), []
        for d, dim in enumerate(dimensions):
            n = near_size(shape[d], dim.own, dim.boundary, dim.line.index, dim.line.size)
            sizes.append(self._supposed(d, dim, max(n, 0)))
        block, _ = replace(self, sizes=sizes)._without(dimensions, shape, {})
        return self._plans_with(_stages(dimensions, block, sizes), shape, dtype, self)

    def start(self, comm: Comm, group: Group, x: Any, call: Call) -> Handle:
        return Chained(self._accumulate(comm, group, x, call))

    def _accumulate(self, comm: Comm, group: Group, x: np.ndarray, call: Call):
        plans = self._known.get((group, x.shape, x.dtype))
        if plans is None:
            plans = yield from self._learn(comm, group, x, call)
        if len(plans.steps) == 1:
            return (yield comm.run(plans.steps[0], call, x))
        # What dimensions only crop is a view, until something is added to it or the result is made of it.
        g, mine = x, False
        for plan in plans.steps:
            combine: Any = plan.combine
            handle = comm.exchange(plan.group, call, plan.sends(g)) if plan.kind != "none" else None
            adds = bool(combine.sends)
            out = combine.sum_own(g, adds and not mine)
            mine = mine or adds or not _crops(combine.own, combine.size)
            came = {} if handle is None else (yield handle)
            plan.complete([came[k].shape if k in came else None for k in range(plan.group.size)])
            for t, m in combine.sends.items():  # in the order of the workers
                _add_ranges(out, m, came[t], combine.d)
            g = out
        return sealed(g if g is x or (mine and g.flags.c_contiguous) else copied(g)), plans.bound

    def repeatable_plan(self, group: Group, x: np.ndarray) -> Plan | None:
        """Where halos are of one dimension."""
        plans = self._known.get((group, x.shape, x.dtype))
        return plans.steps[0] if plans is not None and len(plans.steps) == 1 else None

    @cached_property
    def _known(self) -> dict[Any, Plans]:
        """The plans for earlier blocks, by group, shape and dtype."""
        return {}

    def _learn(self, comm: Comm, group: Group, x: np.ndarray, call: Call):
        dimensions, shape = self._dimensions(group, x.ndim), x.shape
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
        plans = self._plans_with(stages, shape, x.dtype, self._like(type(self), sizes=sizes, block=block))
        if not learnt:
            bounded(self._known)[group, shape, x.dtype] = plans
        return plans

    def _plans_with(self, stages: Sequence[Stage], shape: Shape, dtype: np.dtype, bound: Operator) -> Plans:
        steps, block = [], list(shape)
        for d in reversed(range(len(shape))):
            (line, plan, k), stage = stages[d], stages[d]
            if stage.idle:
                continue
            parts = [_returning(plan.takes[k][s], d) if s in plan.takes[k] else None for s in range(line.size)]
            combine = AddHalo(self, d, plan.sizes[k], plan.own(k), plan.sends[k])
            kind = "exchange" if plan.moves else "none"
            steps.append(Plan(kind, line, tuple(block), dtype, parts, combine, lambda _: bound))
            block[d] = plan.sizes[k]
        return Plans(tuple(steps), bound)

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
