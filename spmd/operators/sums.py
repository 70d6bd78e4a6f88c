"""The sum over workers and its adjoint, which moves nothing: the pair of data parallelism."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from spmd.autodiff.tape import Future, Node
from spmd.autodiff.tracer import Array
from spmd.mesh import here
from spmd.operators.base import Collective, Operator
from spmd.operators.gradient_buckets import COLLECTED, DeferredSums
from spmd.operators.memo import interned
from spmd.state import INVARIANT
from spmd.transport.call import Group, Shape
from spmd.transport.plan import Forward, Plan, Reduce, to_all

__all__ = ["Sum", "Vary", "reduce_to_all", "unmoved"]


def unmoved(
    op: Collective,
    group: Group,
    shape: Shape,
    dtype: np.dtype,
    part: Any = ...,
    fill: Shape | None = None,
    counted: bool = False,
) -> Plan:
    """The plan of an operator that moves nothing: the result is a part of this worker's block, or zeros of shape `fill`
    if that is given. counted: see `Plan`."""
    me = group.index
    parts = tuple(part if k == me and fill is None else None for k in range(group.size))
    combine = Forward(me if fill is None else None, fill or ())
    return Plan("none", group, shape, dtype, parts, combine, lambda _: op, counted=counted)


class Vary(Operator):
    """I -> V: one value becomes a copy per worker. Moves nothing; its adjoint is `Sum`.

    Broadcasting along the hidden dimension of an axis, from length 1 to n.
    """

    function: ClassVar[str] = "pvary"
    source: ClassVar[str] = INVARIANT

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        return unmoved(self, group, shape, dtype)

    @property
    def H(self) -> Operator:
        return interned(Sum, self.axes)

    def defer(self, sweep_state: dict, g: Any, leaf: Node) -> Future | None:
        if type(g) is Array:
            return None
        collected = COLLECTED.get()
        if collected is not None and leaf in collected.leaves:
            return collected.add(self.axes, g, leaf)
        sums = sweep_state.get(DeferredSums)
        if sums is None:
            sums = sweep_state[DeferredSums] = DeferredSums(here("spmd.psum"))
        return sums.add(self.axes, g, leaf.place)


def reduce_to_all(op: Collective, group: Group, shape: Shape, dtype: np.dtype, how: str = "sum") -> Plan:
    """The plan by which all members get the sum (max, min) of the blocks."""
    return Plan("all_reduce", group, shape, dtype, to_all(group), Reduce(how), lambda _: op)


class Sum(Operator):
    """V -> I: the sum over the workers, known to all. One all-reduce; its adjoint is `Vary`, which moves nothing."""

    function: ClassVar[str] = "psum"
    target: ClassVar[str] = INVARIANT
    adds: ClassVar[bool] = True
    same_shape: ClassVar[bool] = True

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        return reduce_to_all(self, group, shape, dtype)

    @property
    def H(self) -> Operator:
        return interned(Vary, self.axes)
