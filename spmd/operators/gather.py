"""Operators that join the blocks of workers, or split one: all-gather, reduce-scatter, collect, slice."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from spmd.autodiff.signatures import Tree
from spmd.errors import StateError
from spmd.operators.apply import operate
from spmd.operators.base import Operator
from spmd.operators.memo import interned, memoised, rebound
from spmd.operators.reduce import AxisName, _names
from spmd.operators.splitting import agree, check_length, given_sizes, normal_axis, split_ways
from spmd.operators.sums import unmoved
from spmd.spellings import closest
from spmd.state import INVARIANT
from spmd.transport.call import Group, Shape
from spmd.transport.plan import Concatenate, Plan, Reduce, to_all

__all__ = ["AllGather", "Collect", "ReduceScatter", "Slice", "all_gather", "pslice", "psum_scatter"]


@dataclass(frozen=True)
class _Along(Operator):
    """An operator that joins or splits along a dimension of the blocks.

    tiled: blocks are joined along dimension `axis` as it is; else they are stacked along a new one, a worker each.
    sizes: the length of each member's piece (None: balanced, or as they come).
    """

    axis: int = 0
    tiled: bool = False
    sizes: tuple[int, ...] | None = None

    @cached_property
    def detail(self) -> str:
        return f"axis={self.axis}, tiled={self.tiled}"


class _Join(_Along):
    """Blocks joined on every worker."""

    def check(self, group: Group, x: np.ndarray) -> None:
        axis = self._along(x.ndim)
        if self.tiled:
            check_length(self, group, x, axis, self.sizes)

    def _along(self, ndim: int) -> int:
        """The dimension of the result along which blocks of so many dimensions lie."""
        return normal_axis(self.function, "axis", self.axis, ndim if self.tiled else ndim + 1)

    @memoised
    def bind(self, shapes: tuple[Shape, ...]) -> _Join:
        """This operator with the sizes of the blocks it met."""
        axis = self._along(len(shapes[0]))
        agree(self.function, shapes, axis if self.tiled else None)
        return rebound(self, axis=axis, sizes=tuple(s[axis] for s in shapes) if self.tiled else self.sizes)

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        combine = Concatenate(self._along(len(shape)), self.tiled)
        return Plan("all_gather", group, shape, dtype, to_all(group), combine, self.bind)


class _Split(_Along):
    """A block split over the workers."""

    @memoised
    def split(self, group: Group, shape: Shape) -> tuple[Sequence[Any], _Split]:
        """Of a block of this shape: the index of each member's piece, and this operator with their sizes."""
        argument = "scatter_dimension" if self.function == "psum_scatter" else "axis"
        axis, indices, sizes = split_ways(self, argument, self.axis, group, shape, self.tiled, self.sizes)
        return indices, rebound(self, axis=axis, sizes=sizes)

    def check(self, group: Group, x: np.ndarray) -> None:
        self.split(group, x.shape)


class AllGather(_Join):
    """V -> V: every worker gets all blocks, joined. Its adjoint is `ReduceScatter`: each takes the sum of its part."""

    function: ClassVar[str] = "all_gather"

    @property
    def H(self) -> Operator:
        return interned(ReduceScatter, self.axes, self.axis, self.tiled, self.sizes)


class ReduceScatter(_Split):
    """V -> V: the sum of all workers' blocks, split over them. Its adjoint is `AllGather`."""

    function: ClassVar[str] = "psum_scatter"
    adds: ClassVar[bool] = True
    same_shape: ClassVar[bool] = True

    @cached_property
    def detail(self) -> str:
        return f"{super().detail}, sizes={self.sizes}"

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        indices, bound = self.split(group, shape)
        return Plan("reduce_scatter", group, shape, dtype, indices, Reduce(), lambda _: bound)

    @property
    def H(self) -> Operator:
        return interned(AllGather, self.axes, self.axis, self.tiled, self.sizes)


class Collect(_Join):
    """V -> I: all blocks, joined, one value known to all. Its adjoint is `Slice`, which moves nothing."""

    function: ClassVar[str] = "all_gather"
    target: ClassVar[str] = INVARIANT

    @cached_property
    def detail(self) -> str:
        return f"{super().detail}, to='invariant'"

    @property
    def H(self) -> Operator:
        return interned(Slice, self.axes, self.axis, self.tiled, self.sizes)


class Slice(_Split):
    """I -> V: each worker takes its part of one value. Moves nothing; its adjoint is `Collect`."""

    function: ClassVar[str] = "pslice"
    source: ClassVar[str] = INVARIANT

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        indices, bound = self.split(group, shape)
        return unmoved(bound, group, shape, dtype, indices[group.index])

    @property
    def H(self) -> Operator:
        return interned(Collect, self.axes, self.axis, self.tiled, self.sizes)


def all_gather(x: Tree, axis_name: AxisName, *, axis: int = 0, tiled: bool = False, to: str = "varying") -> Tree:
    """The blocks of all workers along axis_name, on every one of them.

    x: the block, or a pytree of blocks. tiled=False stacks equal blocks along a new dimension `axis`: (n, *x.shape);
    tiled=True joins them along the dimension that is there, and they may be uneven there.
    to: "varying", or "invariant" ("invarying"): then the result is known to be one value.

    Forward: y = [x_0; x_1; ...]. Adjoint: of V -> V `psum_scatter`; of V -> I `pslice`, which moves nothing. Choose
    "invariant" where every worker goes on to compute the same with it. Cost: one all-gather. Raises LayoutError where
    blocks differ in other dimensions. As `jax.lax.all_gather`.

        >>> with spmd.Mesh(x=2), spmd.ledger() as log:
        ...     f = spmd.map(lambda x: spmd.all_gather(x, "x", tiled=True, to="invariant") * 2, P("x"), P())
        ...     spmd.grad(lambda x: np.sum(f(x)))(np.arange(3.0))
        array([2., 2., 2.])
        >>> log.messages
        1
    """
    names = _names(axis_name, "all_gather")
    kinds = {"varying": AllGather, "invariant": Collect, "invarying": Collect}
    if to not in kinds:
        raise StateError.at(
            "spmd.all_gather",
            argument="to",
            got=repr(to),
            need='"varying" or "invariant"',
            mend='to="varying", or leave it out'
            if closest(to, kinds, "invariant") == "varying"
            else 'to="invariant" for a result that counts as one value',
        )
    return operate(interned(kinds[to], names, axis, tiled), x, sys._getframe(1))


def psum_scatter(
    x: Tree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    sizes: Sequence[int] | None = None,
) -> Tree:
    """The sum of x over the workers along axis_name, split over them: each gets its part.

    x: varies over every named axis, of one shape on all workers. tiled=False: dimension scatter_dimension has one
    entry per worker, and goes away; tiled=True: it is split into blocks, balanced or of the given sizes.

    Forward: y_k = (x_0 + x_1 + ...)[part k]. Adjoint: `all_gather`. Cost: one reduce-scatter, half of a `psum`. Raises
    LayoutError for a length or sizes that do not fit, StateError for an Invariant array. As `jax.lax.psum_scatter`, and
    of any length.

        >>> with spmd.Mesh(x=2):
        ...     f = spmd.map(lambda x: spmd.psum_scatter(x, "x", tiled=True), P("x"), P("x"))
        ...     f(np.arange(6.0))
        PartitionedArray([3., 5., 7.], dtype=float64, spec=P('x'))
    """
    names = _names(axis_name, "psum_scatter")
    given = given_sizes("psum_scatter", sizes, tiled)
    return operate(interned(ReduceScatter, names, scatter_dimension, tiled, given), x, sys._getframe(1))


def pslice(
    x: Tree, axis_name: AxisName, *, axis: int = 0, tiled: bool = False, sizes: Sequence[int] | None = None
) -> Tree:
    """This worker's part of a value that all workers along axis_name have.

    x: Invariant along the named axes. tiled=False: dimension `axis` has one entry per worker, and goes away;
    tiled=True: it is split into blocks, balanced or of the given sizes.

    Forward (I -> V): y_k = x[part k]; nothing moves. Adjoint (V -> I): `all_gather(..., to="invariant")`. Raises
    StateError for an array that varies, LayoutError for a length or sizes that do not fit.

        >>> with spmd.Mesh(x=2), spmd.ledger() as log:
        ...     x = spmd.map(lambda x: spmd.pslice(x, "x", tiled=True), P(), P("x"))(np.arange(3.0))
        >>> x, log.messages
        (PartitionedArray([0., 1., 2.], dtype=float64, spec=P('x')), 0)
    """
    names = _names(axis_name, "pslice")
    given = given_sizes("pslice", sizes, tiled)
    return operate(interned(Slice, names, axis, tiled, given), x, sys._getframe(1))
