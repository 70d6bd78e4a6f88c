"""From one layout to another: repartition, and its adjoint, which adds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np

from spmd.autodiff.signatures import Tree
from spmd.errors import LayoutError, MeshError, describe
from spmd.layout import Box, Layout
from spmd.mesh import WORKER, here
from spmd.operators.apply import operate
from spmd.operators.base import Operator
from spmd.operators.memo import interned, memoised
from spmd.operators.sums import unmoved
from spmd.plan import Move, plan
from spmd.spec import unreduced_error
from spmd.state import INVARIANT, VARYING, State, state_of
from spmd.tracebacks import shorten
from spmd.transport.call import Group, Shape
from spmd.transport.plan import PlaceBoxes, Plan

__all__ = ["Accumulate", "Repartition", "accumulate", "repartition"]


def within(box: Box, origin: Sequence[int]) -> Box:
    """Where a box of the global array lies in a block that begins at `origin`."""
    return tuple((start - o, stop - o) for (start, stop), o in zip(box, origin, strict=True))


def indexed(box: Box) -> tuple[Any, ...]:
    """The index of a box of a block, which gives a view."""
    return (*(slice(start, stop) for start, stop in box), ...)


@dataclass(frozen=True)
class _Relayout(Operator):
    """Blocks of `src` turned into those of `dst`: whoever holds part of what another needs sends it, once."""

    src: Layout
    dst: Layout

    same_shape: ClassVar[bool | None] = None

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        return self.src, self.dst

    def __post_init__(self):
        # The order of the axes numbers the workers: another one would give blocks to the wrong ones.
        if not self.axes == tuple(self.src.axes) == tuple(self.dst.axes):
            raise LayoutError.at(
                f"spmd.{self.function}",
                argument="axes",
                got=f"{self.axes}, with a source over {self.src.axes} and a target over {self.dst.axes}",
                need="the axes of both layouts, in one order, which numbers the workers",
                mend=f"{type(self).__name__}(tuple(src.axes), src, dst), with layouts of equal axes",
            )

        # What adds counts booleans, and refuses an Invariant array, of which it would count the copies.
        object.__setattr__(self, "adds", self.src.copies == "varying" and self.src.has_copies)

    def takes(self, axis: str) -> str:
        return VARYING if axis in self.src.varying else INVARIANT

    @memoised
    def out_state(self, state: State) -> State:
        return state_of((state.varying - set(self.axes)) | (self.dst.varying & set(self.axes)))

    @property
    def moves(self) -> tuple[Move, ...]:
        return plan(self.src, self.dst)

    def check(self, group: Group, x: np.ndarray) -> None:
        self._fits(group, x.shape)

    @memoised
    def _fits(self, group: Group, shape: Shape) -> bool:
        """True for a block of this shape. Raises where it cannot be that of this worker."""
        if group.dims != tuple(self.src.axes.values()):
            raise LayoutError.at(
                f"spmd.{self.function}",
                argument="src",
                got=f"{self.src}, over the axes {self.src.axes}",
                need=f"layouts over axes of the mesh, {dict(zip(group.axes, group.dims, strict=True))}",
                mend="mesh.layout(shape, spec), or spmd.Layout.grid(shape, grid, mesh.axes, workers)",
            )
        need = self.src.block_shape(group.index)
        if shape != need:
            raise LayoutError.at(
                f"spmd.{self.function}",
                argument="x",
                got=f"a block of shape {list(shape)} on {self.src.describe(group.index)}",
                need=f"shape {list(need)}, as {self.src} says",
                mend="pass the layout that the block has as src"
                + (", or np.zeros(0) cut to it on workers without a block" if 0 in need else ""),
            )
        return True

    @cached_property
    def _stays(self) -> bool:
        """Whether nothing moves."""
        return self.src == self.dst and not self.adds

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        if self._stays:
            return unmoved(self, group, shape, dtype)
        me = group.index
        at, origin = ([start for start, _ in layout.boxes[me]] for layout in self.layouts)
        sends = {m.target: indexed(within(m.box, at)) for m in self.moves if m.source == me}
        boxes = {m.source: within(m.box, origin) for m in self.moves if m.target == me}
        parts = [sends.get(k) for k in range(group.size)]
        combine = PlaceBoxes(self.dst.block_shape(me), boxes, self.adds)
        return Plan("exchange", group, shape, dtype, parts, combine, lambda _: self)


class Repartition(_Relayout):
    """Layout -> layout: every worker gets the box that `dst` gives it, from whoever holds it in `src`.

    It copies. Its adjoint is `Accumulate` from dst to src.
    """

    function: ClassVar[str] = "repartition"

    @property
    def H(self) -> Operator:
        return interned(Accumulate, self.axes, self.dst, self.src)


class Accumulate(_Relayout):
    """Layout -> layout: copies that vary in `src` are added, of invariant ones one is taken.

    Its adjoint is `Repartition` from dst to src.
    """

    function: ClassVar[str] = "accumulate"

    @property
    def H(self) -> Operator:
        return interned(Repartition, self.axes, self.dst, self.src)


def _operator(kind: type[_Relayout], src: Layout, dst: Layout) -> _Relayout:
    try:
        sides = (WORKER.get() or here(f"spmd.{kind.function}")).mesh.sides
    except MeshError as error:
        shorten(error)
        raise
    try:
        return _made(kind, src, dst, sides)
    except TypeError:  # no layouts
        return _made.__wrapped__(kind, src, dst, sides)


@lru_cache(maxsize=1024)
def _made(kind: type[_Relayout], src: Layout, dst: Layout, sides: tuple[tuple[str, int], ...]) -> _Relayout:
    """The operator from one layout to the other, checked: only what it adds may have varying copies."""
    where, argument = f"spmd.{kind.function}", "dst" if kind is Accumulate else "src"
    axes, copying = dict(sides), src if argument == "src" else dst
    for name, layout in (("src", src), ("dst", dst)):
        if not isinstance(layout, Layout) or any(axes.get(n) != size for n, size in layout.axes.items()):
            raise LayoutError.at(
                where,
                argument=name,
                got=describe(layout),
                need=f"a Layout over axes of the mesh, {dict(axes)}",
                mend="mesh.layout(shape, spec), or spmd.Layout.grid(shape, grid, axes, workers)",
            )
        if layout.unreduced:
            raise unreduced_error(where, name, layout)
        if layout.spec is None and layout.copies == "invariant" and layout.has_copies:
            raise LayoutError.at(
                where,
                argument=name,
                got=f"{layout}, whose copies are one value on workers that no axis tells apart",
                need="copies that vary, or that lie along axes of a spec",
                mend='copies="varying", or a spec that leaves the axis of the copies out',
            )
    if src.shape != dst.shape or [*src.axes.items()] != [*dst.axes.items()]:
        raise LayoutError.at(
            where,
            argument="dst",
            got=f"{dst}",
            need=f"the shape {src.shape} and the axes {src.axes} of src, in this order, which numbers the workers",
            mend="lay the same array out twice, over the same axes",
        )
    if copying.copies == "varying" and copying.has_copies:
        raise LayoutError.at(
            where,
            argument=argument,
            got=f"{copying}, of which several workers hold a value each for one block",
            need="one value for each block",
            mend="spmd.accumulate(x, src, dst) adds such copies" if argument == "src" else "repartition to it",
        )
    return interned(kind, tuple(src.axes), src, dst)


def repartition(x: Tree, src: Layout, dst: Layout) -> Tree:
    """A distributed array in another layout.

    x: this worker's block as src lays the array out, or a pytree of such blocks; of shape (0, 0, ...) where it has
    none. src, dst: layouts of one shape over the same axes, the same on all workers: `mesh.layout(shape, spec)`, or
    any grid on any workers, `spmd.Layout.grid(...)`. Several workers may hold a block of dst.

    Forward: y = x[box of dst]. Adjoint: `accumulate` from dst to src. Cost: only overlaps that are not already there
    move, each from one worker, a message per pair; nothing where the layouts are equal.
    States: Varying along the axes that split a layout or hold its varying copies, Invariant along the others.
    Raises LayoutError where the layouts do not fit each other or the block, or src has varying copies.

        >>> with spmd.Mesh(x=2) as mesh:
        ...     rows, columns = mesh.layout((2, 4), P("x")), mesh.layout((2, 4), P(None, "x"))
        ...     f = spmd.map(lambda x: spmd.repartition(x, rows, columns), rows, columns)
        ...     f(np.arange(8.0).reshape(2, 4))
        PartitionedArray([[0., 1., 2., 3.],
                          [4., 5., 6., 7.]], dtype=float64, spec=P(None, 'x'))
    """
    return operate(_operator(Repartition, src, dst), x, sys._getframe(1))


def accumulate(x: Tree, src: Layout, dst: Layout) -> Tree:
    """A distributed array in another layout, where the varying copies of src are added.

    Arguments as for `repartition`; dst has no varying copies. Forward: y = Σ x over the copies, [box of dst]; of
    invariant copies one is taken. Where copies are added booleans are counted. Adjoint: `repartition` from dst to src.
    Cost: a message per pair of workers that share something. Raises StateError for an Invariant array whose copies
    would be added, LayoutError as `repartition`.

        >>> with spmd.Mesh(x=2) as mesh:
        ...     src = spmd.Layout((3,), P(), mesh.axes, copies="varying")
        ...     dst = spmd.Layout.grid((3,), (1,), mesh.axes, workers=[1])
        ...     f = spmd.map(lambda x: spmd.accumulate(x, src, dst), P("x"), dst)
        ...     [block.tolist() for block in f(np.arange(6.0)).blocks.values()]
        [[], [3.0, 5.0, 7.0]]
    """
    return operate(_operator(Accumulate, src, dst), x, sys._getframe(1))
