"""A stencil over an array in blocks: the same weighted sum of neighbours everywhere, whoever holds them.

It is the halo exchange followed by the kernel, without the copy of the block that a halo around it would take: the
inside of the block is computed from the block, while only slabs along its faces get a halo, and are computed again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import index
from typing import Any, ClassVar, cast

import numpy as np

from spmd import kernels
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
from spmd.transport.handles import Chained, Handle, read_only
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
    halos the lengths of its slabs, as far as they matter, once met. Its adjoint is the stencil of the negated offsets.
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

    def _slabs(self, group: Group, ndim: int) -> list[int]:
        """The dimensions at whose ends the block does not know what comes."""
        ends = self._boundaries(ndim)
        reached = [low + high > 0 for low, high in self._reach]
        sides = dict(zip(group.axes, group.dims, strict=True))
        split = [d < len(self.spec) and any(sides[a] > 1 for a in self.spec.dims[d]) for d in range(ndim)]
        return [d for d in range(ndim) if reached[d] and (split[d] or ends[d] == "periodic")]

    @cached_property
    def _reach(self) -> tuple[tuple[int, int], ...]:
        return reach(self.offsets)

    @cached_property
    def _exchanges(self) -> dict[Group, list[tuple[int, HaloExchange]]]:
        """For each group the dimensions with slabs, and the exchange for those of each."""
        return {}

    def _begin(self, group: Group) -> list[tuple[int, HaloExchange]]:
        exchanges = self._exchanges.get(group)
        if exchanges is None:
            ndim = len(self.offsets[0])
            open_ = self._slabs(group, ndim)
            exchanges = bounded(self._exchanges)[group] = list(zip(open_, self._halos(ndim, open_), strict=True))
        return exchanges

    def _halos(self, ndim: int, open_: Sequence[int]) -> list[HaloExchange]:
        """The exchange for the slabs of each of these dimensions."""
        widths = tuple(w if d in open_ else (0, 0) for d, w in enumerate(self._reach))
        ends, learnt = self._boundaries(ndim), self.learnt or (None,) * len(open_)
        return [HaloExchange(self.axes, self.spec, widths, ends, learnt=lengths) for lengths in learnt]

    def _slab(self, shape: tuple[int, ...], d: int) -> tuple[int, ...]:
        """The shape of both faces of a block together; a short block is its own faces."""
        return (*shape[:d], min(shape[d], 2 * sum(self._reach[d])), *shape[d + 1 :])

    def start(self, comm: Comm, group: Group, x: Any, call: Call) -> Handle:
        halo = self._halo_of_small(group, x)
        if halo is None:
            return Chained(self._apply(comm, group, x, call))
        halo.check(group, x)
        only = halo.only_plan(group, x, nothing=True)
        if isinstance(only, NeedsLengths):
            return comm.run(only._replace(plan=lambda lengths: self._summed(only.plan(lengths))), call, x)
        assert only is not None
        return comm.run(self._summed(only), call, x)

    def _halo_of_small(self, group: Group, x: np.ndarray) -> HaloExchange | None:
        """The exchange of the halo of the block itself, if that takes less time than those of slabs.

        It sends what that of the slabs sends, so each worker chooses for itself; by the number of entries, so that the
        adjoint chooses alike.
        """
        exchanges = self._begin(group)
        return exchanges[0][1] if len(exchanges) == 1 and x.size <= _SMALL_BLOCK else None

    def _summed(self, plan: Plan) -> Plan:
        """The plan of a halo exchange with the stencil after it."""
        halo, ndim = cast(FillHalo, plan.combine), len(plan.shape)
        lead = max(0, ndim - 3)  # dimensions that no offset reaches along
        padding = tuple((0, 0) if d == halo.d else ends for d, ends in enumerate(self._reach))
        periodic = self._boundaries(ndim)[halo.d] == "periodic"
        offsets = tuple(o[lead:] for o in self.offsets)
        combine = SumNeighbours(halo, periodic, offsets, self.weights, padding[lead:], self._reach[halo.d])
        bound = rebound(self, learnt=(plan.bind(()).learnt,))
        return replace(plan, combine=combine, bind=lambda _: bound)

    def out_shape(self, group: Group, shapes: Sequence[tuple[int, ...]], dtype: np.dtype) -> tuple[int, ...]:
        return shapes[group.index]

    def repeatable_plan(self, group: Group, x: np.ndarray) -> Plan | None:
        halo = self._halo_of_small(group, x)
        plan = None if halo is None else halo.cached_plan(group, x, nothing=True)
        return None if plan is None else self._summed(plan)

    def _apply(self, comm: Comm, group: Group, x: np.ndarray, call: Call):
        ends, exchanges = self._reach, self._begin(group)
        open_ = [d for d, _ in exchanges]
        begun, learnt = [], []
        for d, halo in exchanges:
            length = self._slab(x.shape, d)[d]
            faces = x
            if length < x.shape[d]:
                low, high = (x[along(d, *span)] for span in ((0, length // 2), (x.shape[d] - length // 2, None)))
                faces = np.concatenate((low, high), axis=d, dtype=x.dtype)
            faces = contiguous(faces)
            halo.check(group, faces)
            slabs = Chained(halo.steps(comm, group, faces, call.of(faces.shape), nothing=True))
            begun.append((d, length < x.shape[d], slabs))
        lead = max(0, x.ndim - 3)  # dimensions that no offset reaches along

        def stencil(x: Any, padding: Sequence[tuple[int, int]], loose: Sequence[int] = ()) -> Any:
            return kernels.of(x).stencil(x, [o[lead:] for o in self.offsets], self.weights, padding[lead:], loose)

        # Where a dimension goes on elsewhere, its ends are of the slabs.
        y = stencil(x, ends, [d - lead for d in open_])
        closed = [(0, 0) if d in open_ else ends[d] for d in range(x.ndim)]
        for d, cut, slabs in begun:
            faces, halo = yield slabs
            learnt.append(halo.learnt)
            low, high = ends[d]
            if not cut:
                y = stencil(faces, closed)
                continue
            of_low, of_high, length = faces, faces, faces.shape[d]
            if faces.nbytes > _SMALL:
                of_low, of_high = faces[along(d, 0, 2 * low + high)], faces[along(d, length - 2 * high - low, None)]
            at_low = stencil(of_low, closed)
            at_high = at_low if of_high is of_low else stencil(of_high, closed)
            y[along(d, 0, low)] = at_low[along(d, 0, low)]
            y[along(d, y.shape[d] - high, None)] = at_high[along(d, at_high.shape[d] - high, None)]
        return read_only(y), rebound(self, learnt=tuple(learnt))

    @property
    def H(self) -> Operator:
        return rebound(self, offsets=tuple(tuple(-i for i in o) for o in self.offsets))

    def plan(self, group: Group, shape: tuple[int, ...], dtype: np.dtype) -> Plans:
        """The halos of the slabs: for every dimension that is split those of its faces, in all of them. One dimension's
        are those of the block."""
        open_, steps = self._slabs(group, len(shape)), []
        for d, halo in zip(open_, self._halos(len(shape), open_), strict=True):
            steps += halo.plan(group, self._slab(shape, d), dtype, nothing=True).steps
        return Plans(tuple(steps), self, shape)


def _is_number(w: Any) -> bool:
    """Whether w is an array of one real number."""
    return not isinstance(w, Array) and getattr(w, "shape", None) == () and w.dtype.kind in "iuf"


BOUNDARIES = ("zero", "periodic")


def stencil(
    x, spec: P, offsets: Sequence[Sequence[int]], weights: Sequence[float], boundary: str | Sequence[str] = "zero"
):
    """y[i] = sum over k of weights[k] * X[i + offsets[k]]: this worker's block of a stencil applied to the whole array.

    x: the block, or a pytree of blocks. spec: the axes that split each dimension of the array. offsets: an int per
    dimension each, (0, 1) for the next entry along the last of two; 0 in all but the last three dimensions. weights: a
    real number for each offset. boundary: what stands beyond the ends of the array, "zero" or "periodic", for all
    dimensions or for each.

    Forward (V -> V): as above, with blocks of the same shapes. Adjoint: the stencil of the negated offsets.
    Each entry adds up its terms in one order, whichever worker has it.
    Cost: for each dimension that is split, the halo exchange of two slabs as thick as the offsets reach, which have
    halos in the other dimensions too. The block itself is not copied, as it would be by `halo_exchange`.
    For other boundaries, weights that are differentiated or that vary from place to place: `spmd.halo_exchange` first,
    then `spmd.functions.stencil` or arithmetic on slices.
    Raises LayoutError and SpecError where the arguments do not fit.
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
