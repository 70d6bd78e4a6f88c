"""Rooted values, and the operators between one worker's value and everyone's."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.tracer import Array
from spmd.errors import LayoutError, describe
from spmd.frontends import frontend
from spmd.kernels import on_device
from spmd.layout import Layout
from spmd.mesh import here
from spmd.operators.apply import operate
from spmd.operators.base import Operator, each_leaf
from spmd.operators.blocks import owned_block
from spmd.operators.elsewhere import Rooted, dtype_of, rooted
from spmd.operators.memo import interned, rebound
from spmd.operators.reduce import AxisName, _names
from spmd.operators.splitting import agree, check_length, cuts, given_sizes, normal_axis, split_at
from spmd.operators.sums import unmoved
from spmd.state import INVARIANT, ROOTED, State, state_of
from spmd.transport.call import Call, Group, Shape
from spmd.transport.plan import Concatenate, Forward, Plan, Reduce

__all__ = [
    "Broadcast",
    "Enroot",
    "Gather",
    "Keep",
    "Replicate",
    "Rooted",
    "Scatter",
    "SumReduce",
    "Unroot",
    "broadcast",
    "gather",
    "keep",
    "laid_out",
    "replicate",
    "scatter",
    "sum_reduce",
]


@dataclass(frozen=True)
class _AtRoot(Operator):
    """An operator to or from the worker at place `root` along the axes."""

    root: int = 0
    same_shape: ClassVar[bool | None] = None

    def out_state(self, state: State) -> State:
        return state_of(state.varying - set(self.axes)) if self.target == ROOTED else super().out_state(state)

    def check(self, group: Group, x: np.ndarray) -> None:
        self.check_root(group)

    def check_root(self, group: Group) -> None:
        """Raise where there is no such place along the axes."""
        if not isinstance(self.root, int | np.integer) or not 0 <= self.root < group.size:
            raise LayoutError.at(
                f"spmd.{self.function}",
                argument="root",
                got=repr(self.root),
                need=f"a place along {' and '.join(map(repr, group.axes))}, from 0 to {group.size - 1}",
                mend="root=0",
            )


_NOTHING = (0,)
"""The shape of the block of a Rooted value where it is not held."""


class _KeepAtRoot(_AtRoot):
    """The root keeps its block, and the others have an empty one. Moves nothing."""

    target: ClassVar[str] = ROOTED

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        return unmoved(self, group, shape, dtype, fill=None if group.index == self.root else _NOTHING)


class _FromRoot(_AtRoot):
    source: ClassVar[str] = ROOTED

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        parts = [... if group.index == self.root else None] * group.size
        return Plan("broadcast", group, shape, dtype, parts, Forward(self.root), lambda _: self, self.root)


class Broadcast(_FromRoot):
    """Rooted -> V: the root's value, on every worker as its own. Its adjoint is `SumReduce`."""

    function: ClassVar[str] = "broadcast"

    @property
    def H(self) -> Operator:
        return interned(SumReduce, self.axes, self.root)


class Replicate(_FromRoot):
    """Rooted -> I: the root's value becomes one value known to all. Its adjoint is `Keep`, which moves nothing."""

    function: ClassVar[str] = "replicate"
    target: ClassVar[str] = INVARIANT

    @property
    def H(self) -> Operator:
        return interned(Keep, self.axes, self.root)


class SumReduce(_AtRoot):
    """V -> Rooted: the sum over the workers, at the root. Its adjoint is `Broadcast`."""

    function: ClassVar[str] = "sum_reduce"
    target: ClassVar[str] = ROOTED
    adds: ClassVar[bool] = True
    same_shape: ClassVar[bool | None] = True

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        parts = [... if k == self.root else None for k in range(group.size)]
        combine = Reduce() if group.index == self.root else Forward(None, _NOTHING)
        return Plan("reduce", group, shape, dtype, parts, combine, lambda _: self, self.root)

    @property
    def H(self) -> Operator:
        return interned(Broadcast, self.axes, self.root)


class Keep(_KeepAtRoot):
    """I -> Rooted: the root keeps the value, the others drop it. Moves nothing; its adjoint is `Replicate`."""

    function: ClassVar[str] = "keep"
    source: ClassVar[str] = INVARIANT

    @property
    def H(self) -> Operator:
        return interned(Replicate, self.axes, self.root)


@dataclass(frozen=True)
class Unroot(_AtRoot):
    """Rooted -> V: the root's value, of `ndim` dimensions, as its block, and empty blocks elsewhere. Moves nothing.

    So a Rooted value leaves a map. Its adjoint is `Enroot`.
    """

    ndim: int = 1
    function: ClassVar[str] = "map"
    source: ClassVar[str] = ROOTED

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        fill = None if group.index == self.root else (0,) * max(1, self.ndim)
        return unmoved(self, group, shape, dtype, fill=fill)

    @property
    def H(self) -> Operator:
        return interned(Enroot, self.axes, self.root, self.ndim)


@dataclass(frozen=True)
class Enroot(_KeepAtRoot):
    """V -> Rooted: the root's block as a value, where the others have empty blocks. Moves nothing.

    Its adjoint is `Unroot`.
    """

    ndim: int = 1
    function: ClassVar[str] = "map"

    def check(self, group: Group, x: np.ndarray) -> None:
        super().check(group, x)
        if group.index != self.root and x.size:
            raise LayoutError.at(
                "Enroot",
                argument="x",
                got=f"a block of shape {list(x.shape)} at place {group.index}",
                need=f"empty blocks but at the root, place {self.root}: others would be lost",
                mend="SumReduce adds blocks at the root, Gather joins them there",
            )

    @property
    def H(self) -> Operator:
        return interned(Unroot, self.axes, self.root, self.ndim)


def laid_out(x: Rooted, layout: Layout, where: str, argument: str) -> Any:
    """A Rooted value as the blocks of a layout which gives all of it to its root, to leave a map."""
    worker = here(where)
    mesh = worker.mesh
    state = getattr(x.block, "state", None)
    places = [mesh.coordinates(w) for workers in layout.holders.values() for w in workers]
    dims = [mesh.axes[n] for n in x.axes]
    root = dict(zip(x.axes, np.unravel_index(x.root, dims), strict=True))
    others = [n for n in mesh.axes if n not in x.axes]
    single = [n for n in others if len({p[n] for p in places}) == 1]
    fits = all(p[n] == k for p in places for n, k in root.items())
    if state is not None:  # along the other axes a value each leaves from each worker, one value from one
        fits = fits and all((n in single) != (n in state.varying) for n in others if mesh.axes[n] > 1)
    if not fits:
        holders = [w for w in range(mesh.size) if all(mesh.coordinates(w)[n] == k for n, k in root.items())]
        raise LayoutError.at(
            where,
            argument=argument,
            got=f"{describe(x)}, by {layout}",
            need=f"a layout that gives all of it to {' or '.join(map(mesh.describe, holders))}",
            mend=f"spmd.Layout.grid({x.shape}, {(1,) * len(x.shape)}, mesh.axes, workers=[{holders[0]}])",
        )
    block, axes, at = x.block, x.axes, x.root
    fixed = tuple(n for n in single if state is None or n not in state.varying)
    if fixed:
        place = int(np.ravel_multi_index([places[0][n] for n in fixed], [mesh.axes[n] for n in fixed]))
        block = operate(Keep(fixed, place), block)
        axes, at = axes + fixed, at * math.prod(mesh.axes[n] for n in fixed) + place
    return operate(Unroot(axes, at, len(x.shape)), block)


@dataclass(frozen=True)
class _InPieces(_AtRoot):
    """An operator between the root's value and the pieces of it along dimension `axis`, one per worker.

    sizes: the lengths of the pieces (None: balanced, or as they come). Only the root needs them.
    """

    axis: int = 0
    sizes: tuple[int, ...] | None = None
    private: ClassVar[tuple[str, ...]] = ("sizes",)


class Scatter(_InPieces):
    """Rooted -> V: the root's value split over the workers. Its adjoint is `Gather`."""

    function: ClassVar[str] = "scatter"
    source: ClassVar[str] = ROOTED

    def check(self, group: Group, x: np.ndarray) -> None:
        super().check(group, x)
        self._split(group, x.shape)

    def _split(self, group: Group, shape: Shape) -> tuple[int, ...] | None:
        """The lengths of the workers' pieces, which the root knows."""
        if group.index != self.root:
            return self.sizes
        return split_at(self, group, shape, normal_axis(self.function, "axis", self.axis, len(shape)), self.sizes)

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        sizes, parts = self._split(group, shape), [None] * group.size
        if sizes is not None and group.index == self.root:
            parts = cuts(normal_axis(self.function, "axis", self.axis, len(shape)), sizes)

        def bind(shapes: Sequence[Any]) -> Operator:
            axis = normal_axis(self.function, "axis", self.axis, len(shapes[self.root]))
            return rebound(self, axis=axis, sizes=sizes)

        return Plan("scatter", group, shape, dtype, parts, Forward(self.root), bind, self.root)

    @property
    def H(self) -> Operator:
        return interned(Gather, self.axes, self.root, self.axis, self.sizes)


class Gather(_InPieces):
    """V -> Rooted: the workers' blocks joined at the root. Its adjoint is `Scatter`."""

    function: ClassVar[str] = "gather"
    target: ClassVar[str] = ROOTED
    same_shape: ClassVar[bool | None] = False

    def check(self, group: Group, x: np.ndarray) -> None:
        super().check(group, x)
        axis = normal_axis(self.function, "axis", self.axis, x.ndim)
        check_length(self, group, x, axis, self.sizes)

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        axis = normal_axis(self.function, "axis", self.axis, len(shape))
        at_root = group.index == self.root
        parts = [... if k == self.root else None for k in range(group.size)]

        def bind(shapes: Sequence[Any]) -> Operator:
            if not at_root:
                return rebound(self, axis=axis)
            agree(self.function, shapes, axis)
            return rebound(self, axis=axis, sizes=tuple(s[axis] for s in shapes))

        combine = Concatenate(axis, True) if at_root else Forward(None, _NOTHING)
        return Plan("gather", group, shape, dtype, parts, combine, bind, self.root)

    @property
    def H(self) -> Operator:
        return interned(Scatter, self.axes, self.root, self.axis, self.sizes)


def _to_root(op: _AtRoot, x):
    frame = sys._getframe(2)

    def one(leaf, at) -> Rooted:
        block = operate(at(op), leaf, frame)
        return Rooted(block, tuple(np.shape(leaf)), dtype_of(block), op.axes, op.root)

    return each_leaf(one, x)


def _from_root(kind: type[_FromRoot], x, axis_name: AxisName, root: int):
    where, frame = kind.function, sys._getframe(2)
    names = _names(axis_name, where)
    op = interned(kind, names, root)
    if type(x) is Rooted:
        return operate(op, rooted(x, names, root, where).block, frame)
    return each_leaf(lambda leaf, at: operate(at(op), rooted(leaf, names, root, where).block, frame), x)


def sum_reduce(x: Any, axis_name: AxisName, root: int = 0) -> Any:
    """The sum of x over the workers along axis_name, at the one at place `root`.

    x: varies over every named axis, of one shape on all workers.
    Forward (V -> Rooted): y_root = x_0 + x_1 + .... Adjoint: `broadcast`. Cost: one reduce.

        >>> with spmd.Mesh(x=2):
        ...     spmd.map(lambda x: spmd.replicate(spmd.sum_reduce(x, "x"), "x"), P("x"), P())(np.arange(4.0))
        PartitionedArray([2., 4.], dtype=float64, spec=P(None))
    """
    return _to_root(interned(SumReduce, _names(axis_name, "sum_reduce"), root), x)


def keep(x: Any, axis_name: AxisName, root: int = 0) -> Any:
    """One value that all workers along axis_name have, kept by the one at place `root`.

    Forward (I -> Rooted): y_root = x; nothing moves, and bare data of others are dropped. Adjoint: `replicate`. Raises
    StateError for an array that varies.

        >>> with spmd.Mesh(x=2):
        ...     spmd.map(lambda x: repr(spmd.keep(x, "x")), P(), None)(np.ones(3))
        '<Rooted(0 along x) value float64[3]>'
    """
    return _to_root(interned(Keep, _names(axis_name, "keep"), root), x)


def broadcast(x: Any, axis_name: AxisName, root: int = 0) -> Any:
    """The root's value, on every worker along axis_name as its own.

    Forward (Rooted -> V): y_k = x_root. Adjoint: `sum_reduce`. Cost: one broadcast. Raises StateError for other values.

        >>> with spmd.Mesh(x=2):
        ...     spmd.map(lambda x: spmd.broadcast(spmd.sum_reduce(x, "x"), "x"), P("x"), P("x"))(np.arange(4.0))
        PartitionedArray([2., 4., 2., 4.], dtype=float64, spec=P('x'))
    """
    return _from_root(Broadcast, x, axis_name, root)


def replicate(x: Any, axis_name: AxisName, root: int = 0) -> Any:
    """The root's value as one value that all workers along axis_name have.

    Forward (Rooted -> I): y = x_root. Adjoint: `keep`, which moves nothing. Cost: one broadcast.

        >>> with spmd.Mesh(x=2):
        ...     spmd.map(lambda x: spmd.replicate(spmd.gather(x, "x"), "x"), P("x"), P())(np.arange(3.0))
        PartitionedArray([0., 1., 2.], dtype=float64, spec=P(None))
    """
    return _from_root(Replicate, x, axis_name, root)


def scatter(x: Any, axis_name: AxisName, *, axis: int = 0, root: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """The root's value split along dimension `axis` over the workers along axis_name.

    x: a Rooted value, or a pytree of them. sizes: the lengths of the pieces, one per worker; None: balanced.
    Forward (Rooted -> V): y_k = x_root[piece k]. Adjoint: `gather`, which gives back the value as it was.
    Cost: a message to each worker, down a tree; one more from the root for each large piece.
    Raises LayoutError where the sizes do not add to the length, on all workers.

        >>> with spmd.Mesh(x=2):
        ...     spmd.map(lambda x: spmd.scatter(spmd.keep(x, "x"), "x", sizes=[1, 3]), P(), P("x"))(np.arange(4.0))
        PartitionedArray([0., 1., 2., 3.], dtype=float64, spec=P('x'), blocks of ((1, 3),))
    """
    names, frame = _names(axis_name, "scatter"), sys._getframe(1)
    group, given = here("spmd.scatter").group(names), given_sizes("scatter", sizes)

    def one(leaf, at):
        shape = rooted(leaf, names, root, "scatter").shape
        along = normal_axis("scatter", "axis", axis, len(shape))
        cut = split_at(Scatter(names), group, shape, along, given)
        return operate(at(interned(Scatter, names, root, along, cut)), leaf.block, frame)

    return each_leaf(one, x)


def gather(x: Any, axis_name: AxisName, *, axis: int = 0, root: int = 0) -> Any:
    """The blocks of the workers along axis_name, joined along dimension `axis` at the one at place `root`.

    x: the block, or a pytree of blocks; they may be uneven in that dimension, or empty.
    Forward (V -> Rooted): y_root = [x_0; x_1; ...]. Adjoint: `scatter` into pieces as they came.
    Cost: one message from each other worker, up a tree, and one more of a large block; and, because all know the shape
    of a Rooted value, one all-gather of the blocks' shapes, 8 bytes per dimension.
    Raises LayoutError where blocks differ elsewhere, on all workers.

        >>> at_one = spmd.Layout.grid((5,), (1,), {"x": 3}, workers=[1])
        >>> f = spmd.map(lambda x: spmd.gather(x, "x", root=1), P("x"), at_one, mesh=spmd.Mesh(x=3))
        >>> [block.tolist() for block in f(np.arange(5)).blocks.values()]
        [[], [0, 1, 2, 3, 4], []]
    """
    names, frame = _names(axis_name, "gather"), sys._getframe(1)
    worker = here("spmd.gather")
    group = worker.group(names)
    leaves, treedef = tree.flatten(x)
    for leaf in leaves:
        is_known = isinstance(leaf, Array | np.ndarray | np.generic | int | float | complex)
        if not is_known and frontend(leaf) is None and not on_device(leaf):
            owned_block(leaf, Gather(names, root))  # an error that says what to pass
    shapes = [np.shape(leaf) for leaf in leaves]
    along = [normal_axis("gather", "axis", axis, len(s)) for s in shapes]
    Gather(names, root).check_root(group)
    lengths = np.array([n for s in shapes for n in s], np.int64)
    whole, detail = tree.leaf_positions(treedef)[-1], "the shapes of the blocks"
    call = Call("gather", names, lengths.dtype, lengths.shape, detail=detail, same_shape=True, frame=frame, leaf=whole)
    gathered = [b.tolist() for b in worker.comm.all_gather(group, call, lengths).wait()]
    handles, at = [], 0
    for k, (leaf, shape, d) in enumerate(zip(leaves, shapes, along, strict=True)):
        member_shapes = [tuple(numbers[at : at + len(shape)]) for numbers in gathered]
        at += len(shape)
        agree("gather", member_shapes, d)
        cut = tuple(s[d] for s in member_shapes)
        block = operate(interned(Gather, names, root, d, cut).over(treedef)[k], leaf, frame)
        whole = (*shape[:d], sum(cut), *shape[d + 1 :])
        handles.append(Rooted(block, whole, dtype_of(block), names, root))
    return tree.unflatten(treedef, handles)
