"""Movements of data as modules without parameters, with DistDL's names.

A module has the layouts between which, or the axis along which, its tensors move. Forward is the operator, and backward
its exact adjoint. Layouts may be given without a shape, as specs or grids. Then the workers exchange the shapes of
their blocks at each call, because no worker can know whether the block of another has changed. Layouts are computed
once for each set of shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import nn

import spmd
from spmd.bridge.torch.compiled import compilable, token_of, traced
from spmd.bridge.torch.layouts import (
    LayoutLike,
    Shape,
    added_axes,
    broadcast_grid,
    checked_layout,
    common_axes,
    copied_layout,
    gather_shapes,
    layout_for,
    resolve_layout,
)
from spmd.errors import LayoutError
from spmd.grid import Grid, layout_of_blocks
from spmd.layout import Layout, P
from spmd.mesh import here
from spmd.tracebacks import api_boundary
from spmd.window import Window
from spmd.window_nd import Windows, plan_windows

__all__ = ["AllGather", "AllSumReduce", "Broadcast", "HaloExchange", "ReduceScatter", "Repartition", "SumReduce"]


_psum, _pvary = compilable(spmd.psum), compilable(spmd.pvary)


class _Movement(nn.Module):
    """A module without parameters that moves data."""

    where: ClassVar[str]

    def __init__(self, **options: Any):
        super().__init__()
        self._options = options
        for name, value in options.items():
            setattr(self, "becomes" if name == "to" else name, value)  # nn.Module has a method `to`
        self._register_token()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._register_token()

    def _register_token(self) -> None:
        """Register the token by which compiled graphs refer to this module."""
        layouts = [getattr(self, name) for name in ("src", "dst") if isinstance(getattr(self, name, None), Layout)]
        fixed = tuple(layouts) if len(layouts) == 2 else None
        self._token = token_of(self._move, f"{self.where}({self.extra_repr()})", fixed)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._options.items())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            return traced(x, self._token)
        return self._move(x)

    def _move(self, x: Any) -> Any:
        raise NotImplementedError


class _Relayout(_Movement):
    """From one layout to another."""

    src: LayoutLike
    dst: LayoutLike

    @api_boundary
    def __init__(self, src: LayoutLike, dst: LayoutLike):
        super().__init__(src=checked_layout(self.where, "src", src), dst=checked_layout(self.where, "dst", dst))

    def extra_repr(self) -> str:
        return f"{self.src!r}, {self.dst!r}"


class Repartition(_Relayout):
    """From one layout to another: each worker gets its box of the target from the workers that hold it in the source.

    src, dst: layouts; or specs or grids, for tensors of any shape. A spec or grid as src stands for the blocks of x,
    balanced or not, and as dst for balanced blocks. If the other is a `Layout`, it stands for balanced blocks of that
    shape.
    x: this worker's block in src; of shape (0, 0, ...) where it has none.

    Forward: `spt.repartition`. Gradient: `spt.accumulate` from dst to src: copies in dst are added.
    Cost: a message to each worker that lacks something; without any Layout also an exchange of shapes.
    Raises LayoutError where layouts and blocks do not fit. DistDL's `DistributedTranspose`.
    """

    where = "spt.nn.Repartition"

    def _move(self, x: Any) -> Any:
        worker = here(self.where)
        axes = common_axes(self.where, worker, self.src, self.dst)
        if isinstance(self.dst, Layout):
            src = layout_for(self.dst.shape, self.src, axes)
        else:
            src = resolve_layout(self.where, x, self.src, axes, worker)
        return spmd.repartition(x, src, layout_for(src.shape, self.dst, axes))


class Broadcast(_Relayout):
    """Blocks copied from one partition to a larger one, by the rules of broadcasting; cotangents come back summed.

    src, dst: two grids, aligned at their last dimensions: where src has one block and dst more, each of those gets a
    copy. `Broadcast(Grid((1, 3)), Grid((4, 3)))` gives block j to all workers (i, j). Or two specs: dst names the axes
    of src and more; along these x is Invariant, and the result is Varying; nothing moves. Or two layouts: dst has
    copies, which vary. src may be a Layout if dst is a Grid.
    x: this worker's block of src; of shape (0, 0, ...) where it has none.

    Forward: y on each worker of dst = its block of src. Gradient: `SumReduce` from dst to src.
    Cost: a message to each worker that lacks its block; for grids also an exchange of shapes.
    Raises LayoutError where the partitions do not broadcast. DistDL's `Broadcast(P_in, P_out)`.
    """

    where = "spt.nn.Broadcast"

    def _move(self, x: Any) -> Any:
        worker = here(self.where)
        src, dst = self.src, self.dst
        axes = common_axes(self.where, worker, src, dst)
        if isinstance(src, P) and isinstance(dst, P):
            return spmd.pvary(x, added_axes(self.where, src, dst))
        if isinstance(dst, Grid) and not isinstance(src, P):
            src = resolve_layout(self.where, x, src, axes, worker)
            return spmd.repartition(x, src, copied_layout(self.where, src, dst))
        if not isinstance(dst, Layout):
            raise _mixed_layouts(self.where, src, dst)
        return spmd.repartition(x, layout_for(dst.shape, src, axes), dst)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.src, P) and isinstance(self.dst, P) and not added_axes(self.where, self.src, self.dst):
            return x
        return super().forward(x)


class SumReduce(_Relayout):
    """Blocks of a partition summed to those of a smaller one: the adjoint of `Broadcast` from dst to src.

    src, dst: two grids, aligned at their last dimensions: where dst has one block and src more, those are summed.
    `SumReduce(Grid((4, 3)), Grid((4, 1)))` sums the blocks of each row of workers, which are of one shape. Or two
    specs: src names the axes of dst and more; along these the result is the `psum`. Or two layouts: src has copies,
    which vary. dst may be a Layout if src is a Grid.
    x: this worker's summand; of shape (0, 0, ...) where it has none.

    Forward: y on each worker of dst = the sum, in the order of the workers; (0, 0, ...) on the others. Gradient:
    `Broadcast` from dst to src.
    Cost: a message from each worker that has a summand; for grids also an exchange of shapes; for specs one
    all-reduce, and nothing backward.
    Raises LayoutError where the partitions do not broadcast, StateError for an Invariant x. DistDL's `SumReduce`.
    """

    where = "spt.nn.SumReduce"

    def _move(self, x: Any) -> Any:
        worker = here(self.where)
        src, dst = self.src, self.dst
        axes = common_axes(self.where, worker, src, dst)
        if isinstance(src, P) and isinstance(dst, P):
            return spmd.psum(x, added_axes(self.where, dst, src))
        if isinstance(src, Grid) and isinstance(dst, Layout):
            return spmd.accumulate(x, copied_layout(self.where, dst, src), dst)
        if isinstance(src, Grid) and isinstance(dst, Grid):
            shapes = gather_shapes(self.where, x, tuple(axes), worker)
            summands, total = _summand_layouts(self.where, shapes, src, dst, tuple(axes.items()))
            return spmd.accumulate(x, summands, total)
        if not isinstance(src, Layout):
            raise _mixed_layouts(self.where, src, dst)
        return spmd.accumulate(x, src, layout_for(src.shape, dst, axes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.src, P) and isinstance(self.dst, P) and not added_axes(self.where, self.dst, self.src):
            return x
        return super().forward(x)


@lru_cache(maxsize=1024)
def _summand_layouts(
    where: str, shapes: tuple[Shape, ...], large: Grid, small: Grid, axes: tuple[tuple[str, int], ...]
) -> tuple[Layout, Layout]:
    """The layouts of summands of these shapes and of their sums."""
    first = large.members[0]
    ndim = len(shapes[first]) if first < len(shapes) else len(large.dims)
    counts, workers = broadcast_grid(where, small, large, ndim)
    summands = layout_of_blocks(where, shapes, Layout.grid((0,) * ndim, counts, dict(axes), workers))
    return summands, Layout.grid(summands.shape, counts[:-1], dict(axes), small.workers, summands.cuts)


def _mixed_layouts(where: str, src: LayoutLike, dst: LayoutLike) -> LayoutError:
    return LayoutError.at(
        where,
        got=f"{src!r} and {dst!r}",
        need="two grids, two specs, or two layouts of one shape",
        mend="spt.Grid for both; mesh.layout(shape, spec) is the layout of a spec for an array of this shape",
    )


class AllSumReduce(_Movement):
    """The sum over the workers along an axis, on all of them.

    axis_name: an axis of the mesh, or a tuple. x: a value per worker, of one shape.
    to: "invariant": the result and its cotangent are one value on all workers. No cotangents are summed: `spt.psum`.
    "varying": each worker has a copy of its own, and cotangents are summed, so the module is its own adjoint, as
    DistDL's. Where states are tracked, an Invariant result becomes Varying when it meets Varying tensors.

    Forward: y = x_0 + x_1 + ... Gradient: "invariant": the cotangent, to each; "varying": the sum of the cotangents.
    Cost: one all-reduce forward; backward none, or one. Raises StateError for an Invariant x.
    """

    where = "spt.nn.AllSumReduce"
    axis_name: str | tuple[str, ...]
    becomes: str

    @api_boundary
    def __init__(self, axis_name: str | Sequence[str], to: str = "invariant"):
        super().__init__(axis_name=_frozen(axis_name), to=_choice(self.where, to))

    def _move(self, x: Any) -> Any:
        return spmd.psum(x, self.axis_name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = super().forward(x)
        return _pvary(total, self.axis_name) if self.becomes == "varying" else total


class AllGather(_Movement):
    """The blocks of all workers along an axis, concatenated on each of them.

    axis_name: an axis of the mesh, or a tuple. axis: the dimension of the tensors that is joined; blocks may be uneven
    there. tiled=False stacks equal blocks along a new dimension. to: "varying" or "invariant", as for `spt.all_gather`.

    Forward: y = [x_0; x_1; ...]. Gradient: "varying": the sum over the workers of this block's part of their cotangents
    (`ReduceScatter`); "invariant": this block's part of the one cotangent.
    Cost: one all-gather; backward one reduce-scatter, or nothing. Raises LayoutError for blocks that do not join.
    """

    where = "spt.nn.AllGather"
    axis_name: str | tuple[str, ...]
    axis: int
    tiled: bool
    becomes: str

    @api_boundary
    def __init__(self, axis_name: str | Sequence[str], axis: int = 0, *, tiled: bool = True, to: str = "varying"):
        super().__init__(axis_name=_frozen(axis_name), axis=axis, tiled=tiled, to=_choice(self.where, to))

    def _move(self, x: Any) -> Any:
        return spmd.all_gather(x, self.axis_name, axis=self.axis, tiled=self.tiled, to=self.becomes)


class ReduceScatter(_Movement):
    """The sum over the workers along an axis, split over them.

    axis_name: an axis of the mesh, or a tuple. axis: the dimension that is split. sizes: the lengths of the pieces;
    balanced by default. tiled=False: the dimension has one entry per worker, and goes away. x: of one shape everywhere.

    Forward: y_k = (x_0 + x_1 + ...)[part k]. Gradient: the cotangents of all, joined (`AllGather`).
    Cost: one reduce-scatter; backward one all-gather. Raises StateError for an Invariant x, LayoutError for sizes that
    do not fit.
    """

    where = "spt.nn.ReduceScatter"
    axis_name: str | tuple[str, ...]
    axis: int
    tiled: bool
    sizes: tuple[int, ...] | None

    @api_boundary
    def __init__(
        self,
        axis_name: str | Sequence[str],
        axis: int = 0,
        *,
        tiled: bool = True,
        sizes: Sequence[int] | None = None,
    ):
        sizes = None if sizes is None else tuple(sizes)
        super().__init__(axis_name=_frozen(axis_name), axis=axis, tiled=tiled, sizes=sizes)

    def _move(self, x: Any) -> Any:
        return spmd.psum_scatter(x, self.axis_name, scatter_dimension=self.axis, tiled=self.tiled, sizes=self.sizes)


class HaloExchange(_Movement):
    """This worker's block with its neighbours' edges around it.

    spec: the axes that split each dimension of the tensor: `P(None, None, "rows", "columns")` for images.
    widths, boundary, shape, sizes: as for `spt.halo_exchange`. A `Window` may stand for the widths of a dimension, and
    `Windows` for all widths and sizes. `HaloExchange.of_window` computes the widths for a kernel.

    Forward: the block with its halos. Gradient: the cotangents of other workers' halos are added to the entries of this
    block (`spt.halo_accumulate`). Cost and errors: as for `spt.halo_exchange`. DistDL's `HaloExchange`.
    """

    where = "spt.nn.HaloExchange"
    spec: P
    widths: Any
    boundary: Any
    shape: Any
    sizes: Any
    kernel: Any
    stride: Any
    padding: Any
    dilation: Any
    ceil: bool
    outputs: Any

    @api_boundary
    def __init__(
        self,
        spec: P,
        widths: Any,
        boundary: str | Sequence[str] = "none",
        *,
        shape: Sequence[int] | None = None,
        sizes: Sequence[Sequence[int] | None] | None = None,
    ):
        if isinstance(widths, Windows):
            sizes = widths.source.cuts if sizes is None and shape is None else sizes
            widths = widths.widths
        elif isinstance(widths, Sequence):
            widths = tuple(w.widths if isinstance(w, Window) else _frozen(w) for w in widths)
        super().__init__(
            spec=spec, widths=widths, boundary=_frozen(boundary), shape=_frozen(shape), sizes=_frozen(sizes)
        )

    @classmethod
    def of_window(
        cls,
        spec: P,
        kernel: int | Sequence[int | None],
        *,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        ceil: bool = False,
        outputs: Sequence[Sequence[int] | None] | None = None,
        boundary: str | Sequence[str] = "zero",
    ) -> HaloExchange:
        """Halos with which a kernel without padding computes this worker's block of the result.

        spec: the axes that split each dimension. kernel, stride, padding, dilation, ceil: one value for all dimensions
        of the tensor, or a tuple. kernel None where nothing slides, as over samples and channels:
        `of_window(P(None, None, "rows"), (None, None, 5, 5), padding=2)`, before `nn.Conv2d(..., 5, padding=0)`.
        outputs: for each dimension the lengths of the blocks of the result; None: balanced.
        boundary: what the padding holds.
        Each call exchanges the lengths of all blocks. A block without outputs becomes empty. See docs/how_to/window.md.
        """
        self = cls.__new__(cls)
        window = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "ceil": ceil}
        options = {name: _frozen(value) for name, value in window.items()} | {"outputs": _frozen(outputs)}
        _Movement.__init__(self, spec=spec, boundary=_frozen(boundary), **options)
        return self

    def plan(self, source: Layout) -> Windows:
        """The windows of all blocks of a tensor with the layout `source`; `.target` is the layout of the result."""
        return plan_windows(
            source,
            self.kernel,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            ceil=self.ceil,
            target=self.outputs,
        )

    def _move(self, x: Any) -> Any:
        if "kernel" not in self._options:
            return spmd.halo_exchange(x, self.spec, self.widths, self.boundary, shape=self.shape, sizes=self.sizes)
        worker = here(self.where)
        axes = common_axes(self.where, worker, self.spec)
        source = resolve_layout(self.where, x, self.spec, axes, worker)
        return spmd.halo_exchange(x, self.spec, self.plan(source).widths, self.boundary, sizes=source.cuts)


def _frozen(x: Any) -> Any:
    """Lists as tuples, which a caller cannot change."""
    return tuple(map(_frozen, x)) if isinstance(x, list | tuple) else x


def _choice(where: str, to: str) -> str:
    if to in ("varying", "invariant"):
        return to
    raise LayoutError.at(
        where, argument="to", got=repr(to), need='"varying" or "invariant"', mend='leave it out, or "invariant"'
    )
