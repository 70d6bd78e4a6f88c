"""Blocks with their neighbours' edges around them, and the adjoint, which adds the edges back.

`halo_pieces` gives, for each block along a dimension, the entries that it gets, their blocks and their places. Lengths
of blocks that are not given are learnt, as far as they matter (`transport/algorithms/neighbours.py`). The operators run
one plan per dimension. Each exchange starts from the block with the halos of the earlier dimensions, so corners come
along with the edges: a worker sends messages only to workers on its own lines through the grid of blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from spmd.autodiff.signatures import Tree
from spmd.device import copied, empty
from spmd.errors import LayoutError, MeshError
from spmd.layout import P
from spmd.mesh import WORKER, here
from spmd.operators.apply import operate
from spmd.operators.base import Operator
from spmd.operators.halo_arguments import as_tuples, balanced, checked_spec
from spmd.operators.halo_base import Halo, lengths_learnt
from spmd.operators.halo_combine import (
    AddHalo,
    FillHalo,
    HaloPlans,
    ResultBuffer,
    add_ranges,
    crops,
    entries_ahead,
    one_index,
    piece_places,
    returning,
)
from spmd.operators.halo_geometry import Dimension, Stage, along, lengths_before, near_size, stages_of, trimmed
from spmd.operators.memo import bounded, memoised
from spmd.tracebacks import shorten
from spmd.transport.base import Comm
from spmd.transport.call import Call, Group, Shape
from spmd.transport.handles import Chained, Handle, read_only
from spmd.transport.plan import NeedsLengths, Plan, Plans

__all__ = ["HaloAccumulate", "HaloExchange", "halo_accumulate", "halo_exchange"]


class HaloExchange(Halo):
    """V -> V: the block with its neighbours' edges around it. Its adjoint is `HaloAccumulate`."""

    function: ClassVar[str] = "halo_exchange"

    def _check(self, group: Group, x: np.ndarray) -> None:
        super()._check(group, x)
        for d, dim in enumerate(self._dimensions(group, x.ndim)):
            n, k, known = x.shape[d], dim.line.index, self._known(d)
            if known is not None and known[k] != n:
                says = "the block had that it is bound to" if self._given(d) is None else f"sizes={known} or shape says"
                raise LayoutError.at(
                    f"spmd.{self.function}",
                    argument="x",
                    got=f"a block of length {n} in dimension {d}",
                    need=f"length {known[k]}, as {says}",
                    mend="leave sizes and shape out: they are learnt",
                )
            if n + sum(dim.own) < 0:
                raise trimmed(self.function, k, n, dim.own)

    def plan(self, group: Group, shape: Shape, dtype: np.dtype, nothing: bool = False) -> HaloPlans:
        """One plan per dimension along which the block is extended. Lengths of other blocks that are not known yet are
        assumed to be so large that no halo reaches across a block. nothing: whether an array of length 0 may be
        continued, with zeros."""
        dimensions = self._dimensions(group, len(shape))
        sizes = tuple(self._assumed_lengths(d, dim, shape[d]) for d, dim in enumerate(dimensions))
        return self._plans_with(group, shape, dtype, nothing, sizes)

    def start(self, comm: Comm, group: Group, x: Any, call: Call) -> Handle:
        return Chained(self.steps(comm, group, x, call))

    def steps(self, comm: Comm, group: Group, x: np.ndarray, call: Call, nothing: bool = False):
        """The exchange, dimension by dimension. nothing: whether an array of length 0 may be continued, with zeros."""
        only = self.only_plan(group, x, nothing)
        if only is not None:
            return (yield comm.run(only, call, x))
        plans = yield from self._learn(comm, group, x, call, nothing)

        # One buffer holds the result. The block is copied to its place there once: before the first messages if the
        # caller may write to it, else while they are under way. Each dimension then fills its part of the halo. It is
        # exchanged from the block with the earlier halos, so corners come along.
        extended, result, buffer = x, x, None
        if call.borrowed and plans.buffer is not None and plans.steps:
            buffer, result = plans.buffer.place(x, True)
            extended = buffer[plans.buffer.window]
        for plan in plans.steps:
            combine: Any = plan.combine
            handle = (
                comm.exchange(plan.group, call, plan.sends(extended), plan.sources) if plan.kind != "none" else None
            )
            if buffer is None and plans.buffer is not None:
                buffer, result = plans.buffer.place(x, False)
            if buffer is None:
                out = empty((*extended.shape[: combine.d], combine.length, *extended.shape[combine.d + 1 :]), x)
                result = out
            else:
                out = buffer[combine.window]
            combine.fill(out, extended)
            received = {} if handle is None else (yield handle)
            blocks = [received.get(k) for k in range(plan.group.size)]
            begun = (out, result if plan is plans.steps[-1] else out)
            extended, _ = plan.finish(extended, blocks, begun=begun)
        return extended, plans.bound

    def only_plan(self, group: Group, x: np.ndarray, nothing: bool = False) -> Plan | NeedsLengths | None:
        """The plan of an exchange that takes one, or what gives it once lengths are learnt; else None."""
        unknown, extends_one = self._unknown(group, x.ndim), self._extends_one(group, x.ndim)
        if unknown and extends_one:
            line, near = unknown[0]
            return NeedsLengths(line, near, partial(self._learnt_plan, group, x.shape, x.dtype, nothing, near.dim))
        plans = None if unknown else self._known_plans(group, x, nothing)
        return plans.steps[0] if plans is not None and len(plans.steps) == 1 else None

    def _known_plans(self, group: Group, x: np.ndarray, nothing: bool) -> HaloPlans:
        """The plans where no length is to be learnt."""
        key = group, x.shape, x.dtype, nothing
        plans = self._plans.get(key)
        if plans is None:
            plans = bounded(self._plans)[key] = self._plans_for(group, x.shape, x.dtype, {}, nothing)
        return plans

    def repeatable_plan(self, group: Group, x: np.ndarray) -> Plan | None:
        """The plan, if the block is extended along one dimension only: it fills all of the result."""
        plan = self.cached_plan(group, x.shape, x.dtype)
        if plan is None:
            return None
        combine: Any = plan.combine
        return replace(plan, combine=replace(combine, in_place=combine.buffer.is_around(x)))

    def cached_plan(self, group: Group, shape: Shape, dtype: np.dtype, nothing: bool = False) -> Plan | None:
        """The only plan of an earlier exchange of such a block, if it fills all of the result."""
        key = group, shape, dtype, nothing
        cached = self._plans.get(key)
        plans = cached
        if plans is None and self._extends_one(group, len(shape)):
            plans = self._cached_learnt_plans.get(key)
        if plans is None or plans.buffer is None or len(plans.steps) != 1:
            return None
        (plan,) = plans.steps
        combine: Any = plan.combine
        assumed = None if cached is not None else (combine.d, plans.bound.learnt[combine.d])
        return replace(plan, assumed_lengths=assumed)

    @cached_property
    def _plans(self) -> dict[Any, HaloPlans]:
        """Plans for earlier blocks, by group, shape, dtype and `nothing`."""
        return {}

    @cached_property
    def _cached_learnt_plans(self) -> dict[Any, HaloPlans]:
        """The latest plans with learnt lengths. The next call asks again: other blocks may have new lengths."""
        return {}

    @memoised
    def _extends_one(self, group: Group, ndim: int) -> bool:
        """Whether the block is extended or trimmed along one dimension only."""
        return sum(any(map(any, dim.pairs)) for dim in self._dimensions(group, ndim)) == 1

    def _learnt_plan(
        self, group: Group, shape: Shape, dtype: np.dtype, nothing: bool, d: int, lengths: tuple[int, ...]
    ) -> Plan:
        """The plan if only dimension d is extended, and the blocks along it have these lengths."""
        return self._learnt_plans(group, shape, dtype, {d: lengths}, nothing).steps[0]

    def _learnt_plans(
        self, group: Group, shape: Shape, dtype: np.dtype, lengths: dict[int, tuple[int, ...]], nothing: bool
    ) -> HaloPlans:
        """`_plans_for`, with those of the call before if blocks have the same lengths again."""
        key = group, shape, dtype, nothing
        plans = self._cached_learnt_plans.get(key)
        if plans is None or any(plans.bound.learnt[d] != lengths[d] for d in lengths):
            plans = self._plans_for(group, shape, dtype, lengths, nothing)
            bounded(self._cached_learnt_plans)[key] = plans
        return plans

    def _learn(self, comm: Comm, group: Group, x: np.ndarray, call: Call, nothing: bool):
        lengths = yield from lengths_learnt(comm, self._unknown(group, x.ndim), call)
        if lengths:
            return self._learnt_plans(group, x.shape, x.dtype, lengths, nothing)
        return self._known_plans(group, x, nothing)

    def _plans_for(
        self,
        group: Group,
        shape: Shape,
        dtype: np.dtype,
        lengths: dict[int, tuple[int, ...]],
        nothing: bool = False,
    ) -> HaloPlans:
        sizes = tuple(lengths.get(d, self._known(d)) for d in range(len(shape)))
        return self._plans_with(group, shape, dtype, nothing, sizes)

    def _plans_with(
        self, group: Group, shape: Shape, dtype: np.dtype, nothing: bool, sizes: tuple[Any, ...]
    ) -> HaloPlans:
        given, learnt = self._split(sizes)
        stages = stages_of(self._dimensions(group, len(shape)), shape, given, learnt, nothing)
        places, lengths = [stage.place for stage in stages], tuple(stage.length for stage in stages)
        moving = [d for d, stage in enumerate(stages) if not stage.idle]
        bound = self._like(type(self), block=shape, learnt=learnt)
        window, buffer = [slice(at, at + n) for at, n in zip(places, shape, strict=True) if at is not None], None
        if len(window) == len(shape):
            buffer = ResultBuffer(lengths, tuple(window), entries_ahead(shape, window, moving))
        steps, block = [], list(shape)
        for d in moving:
            line, pieces, k, _ = stages[d]
            own = pieces.own(k)
            if buffer is not None:
                window[d] = slice(0, lengths[d])
                own = tuple(p for p in own if (p.at, p.length) != (places[d], pieces.sizes[k]) or p.flipped)
            combine = FillHalo(
                self.function,
                d,
                lengths[d],
                gaps=tuple(along(d, start, stop) for start, stop in pieces.gaps(k)),
                own=piece_places(own, d),
                received=tuple((s, m, piece_places(m.pieces, d)) for s, m in pieces.incoming(k).items()),
                buffer=buffer,
                window=None if buffer is None else tuple(window),
            )
            sends = {t: one_index(m.ranges, d) for t, m in pieces.outgoing(k).items()}
            parts: list[Any] = [None] * line.size
            for t, index in sends.items():
                parts[t] = index
            kind = "exchange" if stages[d].moves else "none"
            steps.append(Plan(kind, line, tuple(block), dtype, parts, combine, lambda _: bound))
            block[d] = lengths[d]
        return HaloPlans(tuple(steps), bound, tuple(block), buffer)

    @cached_property
    def _adjoint(self) -> HaloAccumulate:
        return self._like(HaloAccumulate)

    @property
    def H(self) -> Operator:
        return self._adjoint


class HaloAccumulate(Halo):
    """V -> V: the entries of a halo are added to the blocks that they come from. Its adjoint is `HaloExchange`."""

    function: ClassVar[str] = "halo_accumulate"
    adds: ClassVar[bool] = True

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plans:
        """One plan per dimension along which the block has a halo, the last one first. Lengths of other blocks that are
        not known yet are assumed to be so large that no halo reaches across a block."""
        dimensions, sizes = self._dimensions(group, len(shape)), []
        for d, dim in enumerate(dimensions):
            n = near_size(shape[d], dim.own, dim.boundary, dim.line.index, dim.line.size)
            sizes.append(self._assumed_lengths(d, dim, max(n, 0)))
        given, learnt = self._split(sizes)
        block, _ = self._like(type(self), learnt=learnt)._cropped(dimensions, shape, {})
        return self._plans_with(stages_of(dimensions, block, given, learnt), shape, dtype, self)

    def start(self, comm: Comm, group: Group, x: Any, call: Call) -> Handle:
        return Chained(self._accumulate(comm, group, x, call))

    def _accumulate(self, comm: Comm, group: Group, x: np.ndarray, call: Call):
        plans = self._cached_plans.get((group, x.shape, x.dtype))
        if plans is None:
            plans = yield from self._learn(comm, group, x, call)
        if len(plans.steps) == 1:
            return (yield comm.run(plans.steps[0], call, x))
        # Cropping gives a view; it is copied before anything is added to it, or at the end.
        g, owned = x, False
        for plan in plans.steps:
            combine: Any = plan.combine
            handle = comm.exchange(plan.group, call, plan.sends(g), plan.sources) if plan.kind != "none" else None
            adds = bool(combine.sent_messages)
            out = combine.sum_own(g, adds and not owned)
            owned = owned or adds or not crops(combine.own, combine.size)
            received = {} if handle is None else (yield handle)
            plan.complete([received[k].shape if k in received else None for k in range(plan.group.size)])
            for t, m in combine.sent_messages.items():  # in the order of the workers
                add_ranges(out, m, received[t], combine.d)
            g = out
        return read_only(g if g is x or (owned and g.flags.c_contiguous) else copied(g)), plans.bound

    def repeatable_plan(self, group: Group, x: np.ndarray) -> Plan | None:
        """The plan, if the block has a halo along one dimension only."""
        plans = self._cached_plans.get((group, x.shape, x.dtype))
        return plans.steps[0] if plans is not None and len(plans.steps) == 1 else None

    @cached_property
    def _cached_plans(self) -> dict[Any, Plans]:
        """The plans for earlier blocks, by group, shape and dtype."""
        return {}

    def _learn(self, comm: Comm, group: Group, x: np.ndarray, call: Call):
        # By the lengths of blocks with halos, those of blocks without are told if all are known.
        lengths = {}
        for line, near in self._unknown(group, x.ndim):
            lengths[near.dim] = tuple(shape[near.dim] for shape in (yield comm.shapes(line, call)))
        plans = self._plans_for(group, x.shape, x.dtype, lengths)
        if not lengths:
            bounded(self._cached_plans)[group, x.shape, x.dtype] = plans
        return plans

    def _plans_for(self, group: Group, shape: Shape, dtype: np.dtype, lengths: dict[int, tuple[int, ...]]) -> Plans:
        dimensions = self._dimensions(group, len(shape))
        block, sizes = self._cropped(dimensions, shape, lengths)
        given, learnt = self._split(sizes)
        stages = stages_of(dimensions, block, given, learnt)
        need = tuple(stage.length for stage in stages)
        if shape != need:
            raise LayoutError.at(
                f"spmd.{self.function}",
                argument="x",
                got=f"a block of shape {list(shape)}",
                need=f"shape {list(need)}, that of a block of shape {list(block)} with its halo",
                mend="give the spec, widths, boundary and sizes of the exchange",
            )
        return self._plans_with(stages, shape, dtype, self._like(type(self), block=block, learnt=learnt))

    def _plans_with(self, stages: Sequence[Stage], shape: Shape, dtype: np.dtype, bound: Operator) -> Plans:
        steps, block = [], list(shape)
        for d in reversed(range(len(shape))):
            if stages[d].idle:
                continue
            line, pieces, k, _ = stages[d]
            incoming = pieces.incoming(k)
            parts = [returning(incoming[s], d) if s in incoming else None for s in range(line.size)]
            combine = AddHalo(self.function, d, pieces.sizes[k], pieces.own(k), pieces.outgoing(k))
            kind = "exchange" if stages[d].moves else "none"
            steps.append(Plan(kind, line, tuple(block), dtype, parts, combine, lambda _: bound))
            block[d] = pieces.sizes[k]
        return Plans(tuple(steps), bound, tuple(block))

    def _cropped(self, dimensions: Sequence[Dimension], shape: Shape, lengths: dict[int, tuple[int, ...]]):
        """The shape of the block without its halo, and per dimension the lengths of all blocks, where they matter."""
        block, sizes = [], []
        for d, dim in enumerate(dimensions):
            sizes_along = self._known(d)
            if sizes_along is None and not dim.alone:
                sizes_along = lengths_before(lengths[d], dim.pairs, dim.boundary, dim.line.dims)
            sizes.append(sizes_along)
            if self.block is not None:
                block.append(self.block[d])
            elif sizes_along is not None:
                block.append(sizes_along[dim.line.index])
            else:
                block.append(lengths_before((shape[d],), (dim.own,), dim.boundary, ())[0])
        return tuple(block), tuple(sizes)

    @cached_property
    def _adjoint(self) -> HaloExchange:
        return self._like(HaloExchange)

    @property
    def H(self) -> Operator:
        return self._adjoint


def _operator(kind: type[Halo], spec: P, widths: Any, boundary: Any, shape: Any, sizes: Any) -> Halo:
    try:
        sides = (WORKER.get() or here(f"spmd.{kind.function}")).mesh.sides
    except MeshError as error:
        shorten(error)
        raise
    try:
        return _checked_operator(kind, spec, widths, boundary, shape, sizes, sides)
    except TypeError:  # lists
        pass
    try:
        return _checked_operator(kind, spec, *map(as_tuples, (widths, boundary, shape, sizes)), sides)
    except (TypeError, LayoutError):  # whose error shows the arguments as they were given
        return _checked_operator.__wrapped__(kind, spec, widths, boundary, shape, sizes, sides)


@lru_cache(maxsize=1024, typed=True)
def _checked_operator(
    kind: type[Halo],
    spec: P,
    widths: Any,
    boundary: Any,
    shape: Any,
    sizes: Any,
    mesh_sides: tuple[tuple[str, int], ...],
) -> Halo:
    where, axes = f"spmd.{kind.function}", dict(mesh_sides)
    checked_spec(where, spec, axes)
    if shape is not None and sizes is not None:
        raise LayoutError.at(
            where,
            argument="shape",
            got=f"{shape!r}, and sizes",
            need="the shape of the whole array in balanced blocks, or else the sizes of the blocks",
            mend="leave one of them out, or both",
        )
    sizes = sizes if shape is None else balanced(where, spec, shape, axes)
    return kind(spec.axes, spec, widths, boundary, sizes)


def halo_exchange(
    x: Tree,
    spec: P,
    widths: int | Sequence[Any],
    boundary: str | Sequence[str] = "none",
    *,
    shape: Sequence[int] | None = None,
    sizes: Sequence[Sequence[int] | None] | None = None,
) -> Tree:
    """This worker's block of an array with its neighbours' edges around it.

    x: the block, or a pytree of blocks. spec: the axes that split each dimension of the array.
    widths: for each dimension an int, a pair (low, high), or a list of one (low, high) per block; an int alone is for
    every dimension that is split. A halo may be wider than the neighbours' blocks; a negative width trims the block.
    boundary: what stands beyond the ends of the array, for all dimensions or for each: "none" (nothing: blocks at the
    ends are smaller), "zero", "periodic", "reflect" or "edge" (as `np.pad` with "wrap", "reflect" and "edge").
    Dimensions that are not split have boundaries too.
    shape: of the whole array, if its blocks are balanced; sizes: for each dimension the lengths of its blocks, or None.
    Without them workers learn the lengths of near blocks in each call.

    Forward (V -> V): y = X[start - low : stop + high] in each dimension, of the array X continued at its ends. Corners
    are right. Adjoint: `halo_accumulate`.
    Cost: in each dimension one message to each worker whose halo reaches into this block; two where halos end within
    the next blocks. To learn lengths, neighbours send each other one small message more, and further ones past blocks
    that are shorter than the widest halo ("reflect": and two entries). Processes that share memory learn the lengths
    along a line in one meeting instead, virtual workers together with the edges, if one dimension only is extended. The
    block is copied, except if the result can extend it in its own memory, so that only the halo is written. That needs
    halos along one dimension only, with lengths of 1 before it; a block that is all of an array of 64 KB or more that
    spmd created on the host; and halos of at most a 64th of it on each side. One result at a time extends a block. The
    result is always read-only.
    Raises LayoutError if widths trim more than the block has, if widths, boundary or sizes do not fit the block, or if
    an array of length 0 is to be continued; SpecError for an unknown axis.

        >>> def laplacian(u):
        ...     u = spmd.halo_exchange(u, P("x"), 1, "periodic")
        ...     return u[2:] - 2 * u[1:-1] + u[:-2]
        >>> with spmd.Mesh(x=2):
        ...     spmd.map(laplacian, P("x"), P("x"))(np.array([0.0, 0.0, 1.0, 0.0, 0.0]))
        PartitionedArray([ 0.,  1., -2.,  1.,  0.], dtype=float64, spec=P('x'))
    """
    return operate(_operator(HaloExchange, spec, widths, boundary, shape, sizes), x, sys._getframe(1))


def halo_accumulate(
    x: Tree,
    spec: P,
    widths: int | Sequence[Any],
    boundary: str | Sequence[str] = "none",
    *,
    shape: Sequence[int] | None = None,
    sizes: Sequence[Sequence[int] | None] | None = None,
) -> Tree:
    """A block with a halo, without it: each entry of the halo is added to the entry of which it is a copy.

    x: the block with its halo, or a pytree of them. shape, sizes: those of the array and its blocks without halos. If
    neither is given and boundary "none" leaves the sizes open, blocks count as balanced.

    Forward (V -> V): y = the sum of all entries of all workers that are copies of the block's, in a fixed order: the
    block's own first, then worker by worker. Adjoint: `halo_exchange`, which see for the arguments, cost and errors.

        >>> with spmd.Mesh(x=2):
        ...     halos = spmd.map(lambda x: spmd.halo_exchange(x, P("x"), 1), P("x"), P("x"))(np.arange(4.0))
        ...     halos
        ...     spmd.map(lambda x: spmd.halo_accumulate(x, P("x"), 1), P("x"), P("x"))(halos)
        PartitionedArray([0., 1., 2., 1., 2., 3.], dtype=float64, spec=P('x'))
        PartitionedArray([0., 2., 4., 3.], dtype=float64, spec=P('x'))
    """
    return operate(_operator(HaloAccumulate, spec, widths, boundary, shape, sizes), x, sys._getframe(1))
