"""A stencil over an array in blocks: the same weighted sum of neighbours everywhere, whoever holds them.

It is the halo exchange followed by the kernel. Of a large block it makes no copy, as a halo around it would: the inside
is computed from the block, while only slabs along its faces get a halo, and are computed again. A small block gets the
halo itself, which takes fewer calls; the last exchange and the kernel are then one plan (`SumNeighbours`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from operator import index
from typing import Any, ClassVar, cast

import numpy as np

from spmd import kernels
from spmd.autodiff.signatures import Tree
from spmd.autodiff.tracer import Array
from spmd.device import contiguous
from spmd.errors import LayoutError, SpecError, describe
from spmd.kernels.windows import reach
from spmd.layout import P
from spmd.mesh import here
from spmd.operators.apply import operate
from spmd.operators.base import Operator
from spmd.operators.halo import HaloExchange
from spmd.operators.halo_arguments import checked_spec
from spmd.operators.halo_combine import FillHalo
from spmd.operators.halo_geometry import BOUNDARIES as EVERY
from spmd.operators.halo_geometry import along
from spmd.operators.memo import bounded, interned, rebound
from spmd.operators.stencil_combine import SumNeighbours
from spmd.spellings import closest
from spmd.transport.base import Comm
from spmd.transport.call import Call, Group
from spmd.transport.handles import Chained, Done, Handle, read_only
from spmd.transport.plan import NeedsLengths, Plan, Plans

__all__ = ["Stencil", "checked_offsets", "stencil"]

Offsets = tuple[tuple[int, ...], ...]

_SMALL = 1 << 18
"""Bytes of both slabs of a dimension up to which they are computed at once, with what is made of both and not read: a
call takes longer."""

_SMALL_BLOCK = 1 << 15
"""Entries of a block up to which it is copied to get its halo: that takes less time than the calls for slabs."""

_WHOLE = P()


@dataclass(frozen=True)
class Stencil(Operator):
    """V -> V: y[i] = sum over k of weights[k] * x[i + offsets[k]], of an array that goes on with zeros or periodically.

    spec: the axes that split each dimension; `axes` are its axes. offsets: an int per dimension each. weights: a real
    number for each. boundary: "zero" or "periodic", for all dimensions or one for each. learnt: of each exchange of
    halos the lengths of the blocks or slabs, as far as they matter, once met.

    Its adjoint is the stencil of the negated offsets.
    """

    spec: P = _WHOLE
    offsets: Offsets = ()
    weights: tuple[float, ...] = ()
    boundary: str | tuple[str, ...] = "zero"
    learnt: tuple[Any, ...] | None = None

    function: ClassVar[str] = "stencil"
    private: ClassVar[tuple[str, ...]] = ("learnt",)

    def _boundaries(self, ndim: int) -> tuple[str, ...]:
        return (self.boundary,) * ndim if isinstance(self.boundary, str) else self.boundary

    def check(self, group: Group, x: np.ndarray) -> None:
        where, dims = f"spmd.{self.function}", len(self.offsets[0])
        if dims != x.ndim:
            raise LayoutError.at(
                where,
                argument="offsets",
                got=f"offsets of {dims} ints for a block of shape {list(x.shape)}",
                need=f"{x.ndim} ints each, one for each dimension",
                mend="0 in the dimensions along which a stencil does not reach",
            )
        if any(o[d] for o in self.offsets for d in range(dims - 3)):
            raise LayoutError.at(
                where,
                argument="offsets",
                got=f"{self.offsets} for a block of {dims} dimensions",
                need="offsets that reach along the last three dimensions at most",
                mend="np.moveaxis the dimensions along which they do not reach to the front",
            )
        if x.dtype.kind not in "fc" and not all(float(w).is_integer() for w in self.weights):
            raise LayoutError.at(
                where,
                argument="x",
                got=f"{describe(x)}, and weights {self.weights}",
                need="floating-point numbers, or weights that are integers",
                mend="x.astype(float)",
            )

    @cached_property
    def _reach(self) -> tuple[tuple[int, int], ...]:
        return reach(self.offsets)

    @cached_property
    def _exchanges(self) -> dict[Group, list[tuple[int, HaloExchange]]]:
        """What `_begin` has given for each group."""
        return {}

    def _begin(self, group: Group) -> list[tuple[int, HaloExchange]]:
        """The dimensions at whose ends the block does not know what comes, and the exchange along each."""
        exchanges = self._exchanges.get(group)
        if exchanges is None:
            exchanges = bounded(self._exchanges)[group] = self._halos(group)
        return exchanges

    def _halos(self, group: Group) -> list[tuple[int, HaloExchange]]:
        widths, sides = self._reach, dict(zip(group.axes, group.dims, strict=True))
        ends = self._boundaries(len(widths))
        split = [any(sides[a] > 1 for a in axes) for axes in self.spec.dims] + [False] * len(widths)
        open_ = [d for d, w in enumerate(widths) if any(w) and (split[d] or ends[d] == "periodic")]
        open_.sort(key=split.__getitem__)  # the last exchange is one with others: see `SumNeighbours.together`
        exchanges = []
        for d, learnt in zip(open_, self.learnt or (None,) * len(open_), strict=True):
            along_d = tuple(w if e == d else (0, 0) for e, w in enumerate(widths))
            exchanges.append((d, HaloExchange(self.axes, self.spec, along_d, ends, learnt=learnt)))
        return exchanges

    def start(self, comm: Comm, group: Group, x: Any, call: Call) -> Handle:
        """Each exchange sends the edges of the block with the halos of the earlier ones, whether the block or slabs get
        a halo. So each worker chooses for itself: by the number of entries, so that the adjoint makes the same choice.
        """
        exchanges = self._begin(group)
        if not exchanges:
            return Done((read_only(self._sums(x, self._reach)), rebound(self, learnt=())))
        if x.size > _SMALL_BLOCK:
            return Chained(self._apply_to_slabs(comm, group, x, call))
        return self.go_on(comm, group, x, call, ())

    def go_on(self, comm: Comm, group: Group, x: Any, call: Call, bounds: Sequence[Any]) -> Handle:
        *earlier, (_, last) = self._begin(group)[len(bounds) :]
        if earlier:
            return Chained(self._in_turn(comm, group, x, call, bounds))
        learnt = [bound.learnt for bound in bounds]
        return self._exchange(comm, group, last, x, call, partial(self._summed, group, learnt))

    def _in_turn(self, comm: Comm, group: Group, x: np.ndarray, call: Call, bounds: Sequence[Any]):
        for _, halo in self._begin(group)[len(bounds) : -1]:
            x, bound = yield self._exchange(comm, group, halo, x, call)
            bounds = *bounds, bound
        return (yield self.go_on(comm, group, x, call, bounds))

    def _exchange(
        self,
        comm: Comm,
        group: Group,
        halo: HaloExchange,
        x: np.ndarray,
        call: Call,
        then: Callable[[Plan], Plan] = lambda plan: plan,
    ) -> Handle:
        """Exchange the halo of a block. then: what changes the plan."""
        halo.check(group, x)
        call = call if call.shape == x.shape else call.of(x.shape)
        only = halo.only_plan(group, x, nothing=True)
        if isinstance(only, NeedsLengths):
            return comm.run(only._replace(plan=lambda lengths: then(only.plan(lengths))), call, x)
        assert only is not None
        return comm.run(then(only), call, x)

    def _summed(self, group: Group, learnt: Sequence[Any], plan: Plan) -> Plan:
        """The plan of the last exchange with the stencil after it. learnt: by the exchanges before."""
        halo, earlier = cast(FillHalo, plan.combine), [d for d, _ in self._begin(group)][:-1]
        combine = SumNeighbours(
            halo,
            periodic=self._boundaries(len(plan.shape))[halo.d] == "periodic",
            reach=self._reach[halo.d],
            shape=tuple(n - sum(self._reach[d]) if d in earlier else n for d, n in enumerate(plan.shape)),
            sums=partial(self._sums, padding=self._padding(group)),
        )
        bound = rebound(self, learnt=(*learnt, plan.bind(()).learnt))
        return replace(plan, combine=combine, bind=lambda _: bound)

    def _sums(self, x: Any, padding: Sequence[tuple[int, int]], loose: Sequence[int] = ()) -> Any:
        """The kernel. padding, loose: for each dimension the zeros around x, and those where sums with zeros may be
        anything."""
        lead = max(0, x.ndim - 3)  # dimensions that no offset reaches along
        offsets, loose = [o[lead:] for o in self.offsets], [d - lead for d in loose]
        return kernels.of(x).stencil(x, offsets, self.weights, padding[lead:], loose)

    def _padding(self, group: Group) -> list[tuple[int, int]]:
        """The zeros around a block that has got its halos."""
        open_ = [d for d, _ in self._begin(group)]
        return [(0, 0) if d in open_ else ends for d, ends in enumerate(self._reach)]

    def out_shape(self, group: Group, shapes: Sequence[tuple[int, ...]], dtype: np.dtype) -> tuple[int, ...]:
        return shapes[group.index]

    def repeatable_plan(self, group: Group, x: np.ndarray) -> Plan | Plans | None:
        exchanges = self._begin(group)
        if x.size > _SMALL_BLOCK or not exchanges:
            return None
        steps, shape, learnt = [], [*x.shape], []
        for d, halo in exchanges:
            plan = halo.cached_plan(group, tuple(shape), x.dtype, nothing=True)
            if plan is None:
                return None
            steps.append(plan)
            learnt.append(plan.bind(()).learnt)
            shape[d] += sum(self._reach[d])
        steps[-1] = self._summed(group, learnt[:-1], steps[-1])
        return steps[0] if len(steps) == 1 else Plans(tuple(steps), self, x.shape)

    def _apply_to_slabs(self, comm: Comm, group: Group, x: np.ndarray, call: Call):
        """The inside of the block is computed from the block, entries near its faces from slabs with their halos."""
        exchanges, learnt = self._begin(group), []
        slabs: dict[int, Any] = {}
        halos: dict[int, tuple[Any, Any]] = {}
        y: Any = None
        for d, halo in exchanges:
            (low, high), thick = self._reach[d], sum(self._reach[d])
            slab = _ends(x, d, thick, thick)
            for e, (before, after) in halos.items():
                slab = _joined(e, _ends(before, d, thick, thick), slab, _ends(after, d, thick, thick))
            handle = self._exchange(comm, group, halo, contiguous(slab), call)
            if y is None:  # where a dimension goes on elsewhere, its ends are of the slabs
                y = self._sums(x, self._reach, [d for d, _ in exchanges])
            slab, bound = yield handle
            learnt.append(bound.learnt)
            slabs[d], halos[d] = slab, (slab[along(d, 0, low)], slab[along(d, slab.shape[d] - high, None)])
        bound = rebound(self, learnt=tuple(learnt))
        for d, slab in slabs.items():
            (low, high), thick = self._reach[d], sum(self._reach[d])
            del halos[d]  # the slab has those of the exchanges before
            for e, (before, after) in halos.items():
                ends = [_ends(halo, d, low + thick, high + thick) for halo in (before, after)]
                slab = _joined(e, ends[0], slab, ends[1])
            if 2 * thick >= x.shape[d]:
                return read_only(self._sums(slab, self._padding(group))), bound
            self._sum_faces(y, slab, d, self._padding(group))
        return read_only(y), bound

    def _sum_faces(self, y: Any, slab: Any, d: int, padding: Sequence[tuple[int, int]]) -> None:
        """Compute the entries of the result near its faces along d from both of these with their halos."""
        (low, high), of_low, of_high, length = self._reach[d], slab, slab, slab.shape[d]
        if slab.nbytes > _SMALL:
            of_low, of_high = slab[along(d, 0, 2 * low + high)], slab[along(d, length - 2 * high - low, None)]
        at_low = self._sums(of_low, padding)
        at_high = at_low if of_high is of_low else self._sums(of_high, padding)
        y[along(d, 0, low)] = at_low[along(d, 0, low)]
        y[along(d, y.shape[d] - high, None)] = at_high[along(d, at_high.shape[d] - high, None)]

    @property
    def H(self) -> Operator:
        return rebound(self, offsets=tuple(tuple(-i for i in o) for o in self.offsets))

    def plan(self, group: Group, shape: tuple[int, ...], dtype: np.dtype) -> Plans:
        """The exchanges of the edges of the block, one dimension after the other."""
        steps, block = [], [*shape]
        for d, halo in self._begin(group):
            slab = block.copy()
            if prod(shape) > _SMALL_BLOCK:
                slab[d] = min(shape[d], 2 * sum(self._reach[d]))
            steps += halo.plan(group, tuple(slab), dtype, nothing=True).steps
            block[d] += sum(self._reach[d])
        return Plans(tuple(steps), self, shape)


def _ends(x: Any, d: int, low: int, high: int) -> Any:
    """The first and the last entries along a dimension, in one array; all of x if it has no others."""
    n = x.shape[d]
    return x if low + high >= n else _joined(d, x[along(d, 0, low)], x[along(d, n - high, None)])


def _joined(d: int, *parts: Any) -> Any:
    return np.concatenate(parts, axis=d, dtype=parts[0].dtype)


def _is_number(w: Any) -> bool:
    """Whether w is an array of one real number."""
    return not isinstance(w, Array) and getattr(w, "shape", None) == () and w.dtype.kind in "iuf"


BOUNDARIES = ("zero", "periodic")


def stencil(
    x: Tree, spec: P, offsets: Sequence[Sequence[int]], weights: Sequence[float], boundary: str | Sequence[str] = "zero"
) -> Tree:
    """y[i] = sum over k of weights[k] * X[i + offsets[k]]: this worker's block of a stencil applied to the whole array.

    x: the block, or a pytree of blocks. spec: the axes that split each dimension of the array. offsets: an int per
    dimension each, (0, 1) for the next entry along the last of two; 0 in all but the last three dimensions. weights: a
    real number for each offset. boundary: what stands beyond the ends of the array, "zero" or "periodic", for all
    dimensions or for each.

    Forward (V -> V): as above, with blocks of the same shapes. Adjoint: the stencil of the negated offsets.
    Each entry adds up its terms in one order, whichever worker has it.
    Cost: that of `halo_exchange`, one dimension after the other. Only a small block is copied, as it would be there.
    For other boundaries, weights that are differentiated or that vary from place to place: `spmd.halo_exchange` first,
    then `spmd.functions.stencil` or arithmetic on slices.
    Raises LayoutError and SpecError where the arguments do not fit.

        >>> with spmd.Mesh(x=2):
        ...     f = spmd.map(lambda u: spmd.stencil(u, P("x"), [(-1,), (0,), (1,)], [1.0, -2.0, 1.0]), P("x"), P("x"))
        ...     f(np.array([0.0, 0.0, 1.0, 0.0, 0.0]))
        PartitionedArray([ 0.,  1., -2.,  1.,  0.], dtype=float64, spec=P('x'))
    """
    where = "spmd.stencil"
    mesh = here(where).mesh
    checked_spec(where, spec, mesh.axes)
    table = checked_offsets(where, offsets)
    several = isinstance(weights, Iterable) and not isinstance(weights, Array | str)
    given: tuple[Any, ...] = tuple(weights) if several else (None,)
    if not all(isinstance(w, int | float | np.integer | np.floating) or _is_number(w) for w in given):
        raise SpecError.at(
            where,
            argument="weights",
            got=describe(weights),
            need="a real number for each offset, not differentiated: they belong to the operator",
            mend="h = spmd.halo_exchange(x, spec, widths, boundary); spmd.functions.stencil(h, offsets, weights)",
        )
    factors = tuple(float(w) for w in given)
    if len(factors) != len(table):
        raise LayoutError.at(
            where,
            argument="weights",
            got=f"{len(factors)} for {len(table)} offsets",
            need="one for each offset",
            mend=f"weights={(1.0,) * len(table)}",
        )
    each = tuple(boundary) if isinstance(boundary, Sequence) and not isinstance(boundary, str) else (boundary,)
    wrong = next((b for b in each if b not in BOUNDARIES), None)
    if wrong is not None or (not isinstance(boundary, str) and len(each) != len(table[0])):
        raise LayoutError.at(
            where,
            argument="boundary",
            got=repr(boundary),
            need=f'"zero" or "periodic", for all dimensions or for each of the {len(table[0])}',
            mend=_other_boundary(wrong),
        )
    op = interned(Stencil, spec.axes, spec, table, factors, boundary if isinstance(boundary, str) else each)
    return operate(op, x, sys._getframe(1))


def _other_boundary(wrong: Any) -> str:
    meant = closest(wrong, EVERY)
    if meant in BOUNDARIES:
        return f'write "{meant}"'
    return f'spmd.halo_exchange(x, spec, widths, "{meant}") before, then spmd.functions.stencil'


def checked_offsets(where: str, offsets: Any) -> Offsets:
    """Offsets as tuples of ints, at least one, all of one length."""
    try:
        table = tuple(tuple(index(i) for i in o) for o in offsets)
    except TypeError:
        table = ()
    if not table or len({len(o) for o in table}) != 1 or not table[0]:
        raise LayoutError.at(
            where,
            argument="offsets",
            got=repr(offsets),
            need="a sequence of offsets, each an int for every dimension",
            mend="offsets=((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)), the five points of a Laplacian",
        )
    return table
