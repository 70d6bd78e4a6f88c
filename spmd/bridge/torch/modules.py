"""Movements of data as modules without parameters, with DistDL's names.

A module says between which layouts, or along which axis, its tensors move; forward is the operator, and backward its
exact adjoint. Layouts may be given without a shape, as specs or grids. Then the shape is that of the tensor which
comes: the workers meet at each call to learn all blocks, without a byte, since one that sees its own block alone
cannot tell whether another's has changed. What is made of the shapes is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

import spmd
from spmd.bridge.torch.compiled import compilable, token_of
from spmd.bridge.torch.function import no_lockstep
from spmd.bridge.torch.memory import array_dtype
from spmd.errors import LayoutError, describe, message
from spmd.layout import Layout, P
from spmd.mesh import Worker, here
from spmd.tracebacks import api_boundary
from spmd.transport.call import Call
from spmd.window import Window
from spmd.window_nd import Windows, plan_windows

__all__ = [
    "AllGather",
    "AllSumReduce",
    "Broadcast",
    "Grid",
    "HaloExchange",
    "Lies",
    "ReduceScatter",
    "Repartition",
    "SumReduce",
    "common_axes",
    "grid_of",
    "learnt",
    "met",
    "of_shape",
    "resolved",
    "spread",
]

Shape = tuple[int, ...]


# Layouts of any shape


@dataclass(frozen=True)
class Grid:
    """A Cartesian grid of workers, for arrays of any shape: `Layout.grid` before the shape is known.

    dims: the number of blocks in each of the last dimensions of the array; dimensions before these are whole.
    workers: who holds the blocks, by number, last dimension fastest; the first prod(dims) by default. The others hold
    nothing: blocks of shape (0, 0, ...).
    copies: so many workers, next to each other in `workers`, hold each block, a value each.
    axes: the axes of the mesh that number the workers; all of the mesh by default. Along its other axes there is such
    a grid at each place.

    DistDL's partition: `Grid((2, 2), workers=[4, 5, 6, 7])`.
    Raises LayoutError for numbers that are none, and, when an array comes, for one of fewer dimensions.
    """

    dims: tuple[int, ...]
    workers: tuple[int, ...] | None = None
    copies: int = 1
    axes: tuple[str, ...] | None = None

    def __post_init__(self):
        axes = (self.axes,) if isinstance(self.axes, str) else self.axes
        try:
            dims = tuple(map(index, self.dims))
            workers = None if self.workers is None else tuple(map(index, self.workers))
            fits = min((*dims, index(self.copies))) >= 1
        except TypeError:
            dims, workers, fits = (), None, False
        if not fits:
            raise LayoutError(
                message(
                    "spt.Grid",
                    got=f"dims={self.dims!r}, workers={self.workers!r}, copies={self.copies!r}",
                    need="a number of blocks, 1 or more, for each dimension, and the numbers of their workers",
                    mend="Grid((2, 3), workers=[0, 1, 2, 4, 5, 6])",
                )
            )
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "workers", workers)
        object.__setattr__(self, "axes", None if axes is None else tuple(axes))

    def __repr__(self) -> str:
        more = "" if self.workers is None else f", workers={list(self.workers)}"
        more += "" if self.copies == 1 else f", copies={self.copies}"
        return f"Grid({self.dims}{more}{'' if self.axes is None else f', axes={self.axes}'})"

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the workers that hold something."""
        return tuple(range(math.prod(self.dims) * self.copies)) if self.workers is None else self.workers

    def layout(self, shape: Sequence[int], axes: dict[str, int]) -> Layout:
        """An array of this shape on the grid, in balanced blocks. axes: those that number the workers."""
        if len(shape) < len(self.dims):
            raise LayoutError(
                message(
                    "spt.Grid",
                    argument="dims",
                    got=f"{self.dims} for an array of shape {list(shape)}",
                    need=f"at most {len(shape)} numbers of blocks, one for each dimension",
                    mend="leave dimensions out at the front; copies= counts copies of each block",
                )
            )
        whole = (1,) * (len(shape) - len(self.dims))
        return Layout.grid(shape, (*whole, *self.dims, self.copies), axes, self.workers)


Lies = Layout | P | Grid
"""How the tensors of a module lie: a layout; or a spec or a grid, for tensors of any shape."""


def _checked(where: str, argument: str, lies: Any) -> Lies:
    if isinstance(lies, Layout | P | Grid):
        return lies
    raise LayoutError(
        message(
            where,
            argument=argument,
            got=describe(lies),
            need="a Layout, or a spec or a Grid, which serve tensors of any shape",
            mend='spt.P("x"), spt.Grid((2, 2)), mesh.layout(shape, spec) or spt.Layout.grid(shape, grid, mesh.axes)',
        )
    )


def common_axes(where: str, worker: Worker, *all_lies: Lies) -> dict[str, int]:
    """The axes that number the workers of some layouts: those that a layout or a grid says, or specs name.

    Along the other axes of the mesh each place moves its tensors by itself, whatever their state there.
    """
    mesh = worker.mesh
    fixed, named = {}, set()
    for lies in all_lies:
        if isinstance(lies, P):
            lies.check(mesh.axes, where, "spec")
            named |= lies.varying
        else:
            axes = tuple(lies.axes if lies.axes is not None else mesh.axes)
            fixed.setdefault(mesh.names(axes, where), lies)
    chosen = next(iter(fixed), tuple(n for n in mesh.axes if n in named))
    if len(fixed) > 1 or named - set(chosen):
        raise LayoutError(
            message(
                where,
                got=" and ".join(map(repr, all_lies)),
                need="layouts over the same axes of the mesh, in one order, which numbers the workers",
                mend=f"axes={chosen} for grids; specs that name no other axes than {list(chosen)}",
            )
        )
    return {n: mesh.axes[n] for n in chosen}


def met(where: str, x: Any, axes: Sequence[str], worker: Worker) -> tuple[Shape, ...]:
    """The shapes of the blocks of all workers along some axes. A meeting; no bytes."""
    group = worker.group(tuple(axes))
    if group.size == 1:
        return (tuple(x.shape),)
    tensor = isinstance(x, torch.Tensor)
    if tensor:
        no_lockstep(worker)
    call = Call(where, group.axes, array_dtype(x.dtype) if tensor else x.dtype, tuple(x.shape), alike=None)
    return tuple(tuple(s) for s in worker.comm.shapes(group, call).wait())


@lru_cache(maxsize=1024)
def learnt(where: str, shapes: tuple[Shape, ...], lies: P | Grid, axes: tuple[tuple[str, int], ...]) -> Layout:
    """The layout in which the workers along some axes hold blocks of these shapes."""
    if isinstance(lies, P):
        return Layout.of_blocks(shapes, lies, dict(axes), where)
    first = lies.members[0]
    probe = lies.layout((0,) * len(shapes[first] if first < len(shapes) else lies.dims), dict(axes))
    return _filled(where, shapes, probe)


def _filled(where: str, shapes: tuple[Shape, ...], probe: Layout) -> Layout:
    """A layout on the grid of `probe`, in blocks of these shapes."""
    assert probe.workers is not None
    ndim = len(probe.shape)
    cuts: list[list[int | None]] = [[None] * len(c) for c in probe.cuts]
    seen: dict[tuple[int, int], int] = {}
    for w, shape in enumerate(shapes):
        place = probe.positions(w)
        if (len(shape) != ndim and (ndim or place is not None)) or (place is None and any(shape)):
            raise LayoutError(
                message(
                    where,
                    argument="x",
                    got=f"a block of shape {list(shape)} on {probe.describe(w)}",
                    need=f"one of shape {[0] * ndim}: the grid gives it nothing"
                    if place is None
                    else f"one of {ndim} dimensions, as on {probe.describe(probe.workers[0])}",
                    mend=f"torch.zeros({[0] * ndim}) on workers without a block",
                )
            )
        for d, k in enumerate(place or ()):
            other = seen.setdefault((d, k), w)
            if cuts[d][k] not in (None, shape[d]):
                raise LayoutError(
                    message(
                        where,
                        argument="x",
                        got=f"a block of shape {list(shapes[other])} on {probe.describe(other)}, and one of shape "
                        f"{list(shape)} on {probe.describe(w)}",
                        need=f"blocks that lie on a grid: equal lengths in dimension {d}",
                        mend="make the lengths agree, or give another grid",
                    )
                )
            cuts[d][k] = shape[d]
    sizes = [[k or 0 for k in c] for c in cuts]
    return _regridded(probe, [sum(c) for c in sizes], sizes)


def _regridded(grid: Layout, shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> Layout:
    """Another array on the same grid of the same workers."""
    assert grid.workers is not None
    counts = [len(c) for c in grid.cuts]
    copies = len(grid.workers) // math.prod(counts)
    return Layout.grid(shape, (*counts, copies), grid.axes, grid.workers, cuts, copies=grid.copies)


def resolved(where: str, x: Any, lies: Lies, axes: dict[str, int], worker: Worker) -> Layout:
    """The layout of a tensor that comes: as it is given, or learnt from all blocks."""
    if isinstance(lies, Layout):
        return lies
    return learnt(where, met(where, x, tuple(axes), worker), lies, tuple(axes.items()))


def of_shape(shape: Shape, lies: Lies, axes: dict[str, int]) -> Layout:
    """The layout of an array of this shape: balanced, where only spec or grid are given."""
    if isinstance(lies, Layout):
        return lies
    return _balanced(shape, lies, tuple(axes.items()))


@lru_cache(maxsize=1024)
def _balanced(shape: Shape, lies: P | Grid, axes: tuple[tuple[str, int], ...]) -> Layout:
    return Layout(shape, lies, dict(axes)) if isinstance(lies, P) else lies.layout(shape, dict(axes))


def grid_of(layout: Layout) -> Grid:
    """The grid on which a layout lies."""
    workers = layout.workers
    if workers is None:
        workers = tuple(w for _, holders in sorted(layout.holders.items()) for w in holders)
    counts = tuple(len(c) for c in layout.cuts)
    return Grid(counts, workers, len(workers) // max(1, math.prod(counts)), tuple(layout.axes))


@lru_cache(maxsize=1024)
def spread(where: str, small: Grid, large: Grid, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Blocks of a small grid on the workers of a large one, by the rules of broadcasting.

    Grids are aligned at their last dimensions. Where the small one has one block and the large one more, each of those
    holds a copy. Gives the grid, copies last, and its workers, as `Layout.grid` takes them.
    """
    n = max(ndim, len(small.dims), len(large.dims))
    a, b = ((1,) * (n - len(g.dims)) + g.dims for g in (small, large))
    if small.copies > 1 or len(small.dims) > ndim or any(p not in (1, q) for p, q in zip(a, b, strict=True)):
        raise LayoutError(
            message(
                where,
                got=f"{small} and {large}, for a tensor of {ndim} dimensions",
                need="grids that broadcast: in each dimension, counted from the last, one block or as many",
                mend="spt.Repartition to blocks that fit, before or after; no copies in the smaller one",
            )
        )
    held = np.array(large.members).reshape(*b, large.copies)
    own = [d for d in range(n) if a[d] == b[d]]
    order = [*own, *(d for d in range(n) if d not in own), n]
    return (*a[n - ndim :], held.size // math.prod(a)), tuple(held.transpose(order).ravel().tolist())


def _copied(where: str, layout: Layout, large: Grid) -> Layout:
    """A layout with a copy of its blocks on all workers of a larger grid."""
    counts, workers = spread(where, grid_of(layout), large, len(layout.shape))
    return Layout.grid(layout.shape, counts, layout.axes, workers, layout.cuts)


def _added_axes(where: str, small: P, large: P) -> tuple[str, ...]:
    """The axes along which blocks laid out by one spec are copied to those of a larger one."""
    for d, names in enumerate(small.trimmed):
        if names and (d >= len(large.dims) or large.dims[d] != names):
            raise LayoutError(
                message(
                    where,
                    got=f"{small} and {large}",
                    need=f"specs that broadcast: dimension {d} split over {names} in both, or whole in the smaller one",
                    mend="spt.Repartition to blocks that fit, before or after",
                )
            )
    return tuple(n for n in large.axes if n not in small.varying)


# Modules


_psum, _pvary = compilable(spmd.psum), compilable(spmd.pvary)


class _Movement(nn.Module):
    """A module without parameters that moves data. Its arguments are those it was made with."""

    where: ClassVar[str]

    def __init__(self, **given: Any):
        super().__init__()
        self._given = given
        for name, value in given.items():
            setattr(self, "becomes" if name == "to" else name, value)  # nn.Module has a method of this name
        self._declare()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._declare()

    def _declare(self) -> None:
        """Give it the name by which compiled functions know it."""
        layouts = [getattr(self, name) for name in ("src", "dst") if isinstance(getattr(self, name, None), Layout)]
        fixed = tuple(layouts) if len(layouts) == 2 else None
        self._token = token_of(self._moved, f"{self.where}({self.extra_repr()})", fixed)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._given.items())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            return torch.ops.spmd.apply(x, self._token)[0]
        return self._moved(x)

    def _moved(self, x: Any) -> Any:
        raise NotImplementedError


class _Relayout(_Movement):
    """From one layout to another."""

    src: Lies
    dst: Lies

    @api_boundary
    def __init__(self, src: Lies, dst: Lies):
        super().__init__(src=_checked(self.where, "src", src), dst=_checked(self.where, "dst", dst))

    def extra_repr(self) -> str:
        return f"{self.src!r}, {self.dst!r}"


class Repartition(_Relayout):
    """From one layout to another: each worker gets its box of the target, from whoever holds it in the source.

    src, dst: layouts, or specs or grids, for tensors of any shape. A spec or grid as src stands for the blocks that
    come, balanced or not, and as dst for balanced ones; beside a `Layout` it stands for balanced blocks of its shape.
    x: this worker's block in src; of shape (0, 0, ...) where it has none.

    Forward: `spt.repartition`. Gradient: `spt.accumulate` from dst to src: copies in dst are added.
    Cost: a message to each worker that lacks something; without any Layout one meeting more, of no bytes.
    Raises LayoutError where layouts and blocks do not fit. DistDL's `DistributedTranspose`.
    """

    where = "spt.Repartition"

    def _moved(self, x: Any) -> Any:
        worker = here(self.where)
        axes = common_axes(self.where, worker, self.src, self.dst)
        if isinstance(self.dst, Layout):
            src = of_shape(self.dst.shape, self.src, axes)
        else:
            src = resolved(self.where, x, self.src, axes, worker)
        return spmd.repartition(x, src, of_shape(src.shape, self.dst, axes))


class Broadcast(_Relayout):
    """Blocks copied from one partition to a larger one, by the rules of broadcasting; cotangents come back summed.

    src, dst: two grids: aligned at their last dimensions, where src has one block and dst more, each of those gets a
    copy; `Broadcast(Grid((1, 3)), Grid((4, 3)))` gives block j to all workers (i, j). Or two specs: dst names the axes
    of src and more, along which x comes Invariant, and leaves as a value on each worker; nothing moves. Or two
    layouts: dst is the one with the copies, which vary. src may be a Layout beside a Grid.
    x: this worker's block of src; of shape (0, 0, ...) where it has none.

    Forward: y on each worker of dst = its block of src. Gradient: `SumReduce` from dst to src.
    Cost: a message to each worker that lacks its block; for grids one meeting more, of no bytes.
    Raises LayoutError where the partitions do not broadcast. DistDL's `Broadcast(P_in, P_out)`.
    """

    where = "spt.Broadcast"

    def _moved(self, x: Any) -> Any:
        worker = here(self.where)
        src, dst = self.src, self.dst
        axes = common_axes(self.where, worker, src, dst)
        if isinstance(src, P) and isinstance(dst, P):
            return spmd.pvary(x, _added_axes(self.where, src, dst))
        if isinstance(dst, Grid) and not isinstance(src, P):
            src = resolved(self.where, x, src, axes, worker)
            return spmd.repartition(x, src, _copied(self.where, src, dst))
        if not isinstance(dst, Layout):
            raise _unlike(self.where, src, dst)
        return spmd.repartition(x, of_shape(dst.shape, src, axes), dst)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.src, P) and isinstance(self.dst, P) and not _added_axes(self.where, self.src, self.dst):
            return x
        return super().forward(x)


class SumReduce(_Relayout):
    """Blocks of a partition summed to those of a smaller one: the adjoint of `Broadcast` from dst to src.

    src, dst: two grids: aligned at their last dimensions, where dst has one block and src more, those are the summands;
    `SumReduce(Grid((4, 3)), Grid((4, 1)))` sums the blocks of each row of workers, which are of one shape. Or two
    specs: src names the axes of dst and more, over which is summed, and the sum is known along them: a `psum`. Or two
    layouts: src is the one with copies that vary. dst may be a Layout beside a Grid.
    x: this worker's summand; of shape (0, 0, ...) where it has none.

    Forward: y on each worker of dst = the sum, in the order of the workers; (0, 0, ...) on the others. Gradient:
    `Broadcast` from dst to src.
    Cost: a message from each worker that has a summand; for grids one meeting more, of no bytes; of specs one
    all-reduce, and nothing backward.
    Raises LayoutError where the partitions do not broadcast, StateError for an Invariant x. DistDL's `SumReduce`.
    """

    where = "spt.SumReduce"

    def _moved(self, x: Any) -> Any:
        worker = here(self.where)
        src, dst = self.src, self.dst
        axes = common_axes(self.where, worker, src, dst)
        if isinstance(src, P) and isinstance(dst, P):
            return spmd.psum(x, _added_axes(self.where, dst, src))
        if isinstance(src, Grid) and isinstance(dst, Layout):
            return spmd.accumulate(x, _copied(self.where, dst, src), dst)
        if isinstance(src, Grid) and isinstance(dst, Grid):
            shapes = met(self.where, x, tuple(axes), worker)
            parts, dst = _summands(self.where, shapes, src, dst, tuple(axes.items()))
            return spmd.accumulate(x, parts, dst)
        if not isinstance(src, Layout):
            raise _unlike(self.where, src, dst)
        return spmd.accumulate(x, src, of_shape(src.shape, dst, axes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.src, P) and isinstance(self.dst, P) and not _added_axes(self.where, self.dst, self.src):
            return x
        return super().forward(x)


@lru_cache(maxsize=1024)
def _summands(
    where: str, shapes: tuple[Shape, ...], large: Grid, small: Grid, axes: tuple[tuple[str, int], ...]
) -> tuple[Layout, Layout]:
    """The layouts of summands of these shapes, and of their sums."""
    first = large.members[0]
    ndim = len(shapes[first]) if first < len(shapes) else len(large.dims)
    counts, workers = spread(where, small, large, ndim)
    parts = _filled(where, shapes, Layout.grid((0,) * ndim, counts, dict(axes), workers))
    return parts, Layout.grid(parts.shape, counts[:-1], dict(axes), small.workers, parts.cuts)


def _unlike(where: str, src: Lies, dst: Lies) -> LayoutError:
    return LayoutError(
        message(
            where,
            got=f"{src!r} and {dst!r}",
            need="two grids, two specs, or two layouts of one shape",
            mend="spt.Grid for both; mesh.layout(shape, spec) says how a spec lays out an array of this shape",
        )
    )


class AllSumReduce(_Movement):
    """The sum over the workers along an axis, on all of them.

    axis_name: an axis of the mesh, or a tuple. x: a value per worker, of one shape.
    to: "invariant": the result is one value, known to all, and so is its cotangent, which nobody need sum: `spt.psum`.
    "varying": a copy for each worker to use by itself; cotangents are summed as well, so that it is its own adjoint,
    as DistDL's. With tensors that carry their state the first becomes the second where its use asks for that.

    Forward: y = x_0 + x_1 + ... Gradient: "invariant": the cotangent, to each; "varying": the sum of the cotangents.
    Cost: one all-reduce forward; backward none, or one. Raises StateError for an Invariant x.
    """

    where = "spt.AllSumReduce"
    axis_name: str | tuple[str, ...]
    becomes: str

    @api_boundary
    def __init__(self, axis_name: str | Sequence[str], to: str = "invariant"):
        super().__init__(axis_name=_frozen(axis_name), to=_choice(self.where, to))

    def _moved(self, x: Any) -> Any:
        return spmd.psum(x, self.axis_name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = super().forward(x)
        return _pvary(total, self.axis_name) if self.becomes == "varying" else total


class AllGather(_Movement):
    """The blocks of all workers along an axis, joined on each of them.

    axis_name: an axis of the mesh, or a tuple. axis: the dimension of the tensors that is joined; blocks may be uneven
    there. tiled=False stacks equal blocks along a new dimension. to: "varying" or "invariant", as for `spt.all_gather`.

    Forward: y = [x_0; x_1; ...]. Gradient: "varying": the sum over the workers of what is this block's (the adjoint is
    `ReduceScatter`); "invariant": this block's part of the one cotangent.
    Cost: one all-gather; backward one reduce-scatter, or nothing. Raises LayoutError for blocks that do not join.
    """

    where = "spt.AllGather"
    axis_name: str | tuple[str, ...]
    axis: int
    tiled: bool
    becomes: str

    @api_boundary
    def __init__(self, axis_name: str | Sequence[str], axis: int = 0, *, tiled: bool = True, to: str = "varying"):
        super().__init__(axis_name=_frozen(axis_name), axis=axis, tiled=tiled, to=_choice(self.where, to))

    def _moved(self, x: Any) -> Any:
        return spmd.all_gather(x, self.axis_name, axis=self.axis, tiled=self.tiled, to=self.becomes)


class ReduceScatter(_Movement):
    """The sum over the workers along an axis, split over them.

    axis_name: an axis of the mesh, or a tuple. axis: the dimension that is split. sizes: the lengths of the pieces;
    balanced by default. tiled=False: the dimension has one entry per worker, and goes away. x: of one shape everywhere.

    Forward: y_k = (x_0 + x_1 + ...)[part k]. Gradient: the cotangents of all, joined (`AllGather`).
    Cost: one reduce-scatter; backward one all-gather. Raises StateError for an Invariant x, LayoutError for sizes that
    do not fit.
    """

    where = "spt.ReduceScatter"
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
        given = None if sizes is None else tuple(sizes)
        super().__init__(axis_name=_frozen(axis_name), axis=axis, tiled=tiled, sizes=given)

    def _moved(self, x: Any) -> Any:
        return spmd.psum_scatter(x, self.axis_name, scatter_dimension=self.axis, tiled=self.tiled, sizes=self.sizes)


class HaloExchange(_Movement):
    """This worker's block with its neighbours' edges around it.

    spec: the axes that split each dimension of the tensor: `P(None, None, "rows", "columns")` for images.
    widths, boundary, shape, sizes: as for `spt.halo_exchange`. A `Window` may stand for the widths of a dimension, and
    `Windows` for all widths and sizes. `HaloExchange.of_window` finds the widths for a kernel, and any sizes.

    Forward: the block, continued. Gradient: what others' halos hold of this block is added to it
    (`spt.halo_accumulate`). Cost and errors: as for `spt.halo_exchange`. DistDL's `HaloExchange`.
    """

    where = "spt.HaloExchange"
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
        """What a kernel needs around each block, so that on it the kernel without padding gives this worker's outputs.

        spec: the axes that split each dimension. kernel, stride, padding, dilation, ceil: one for all dimensions of
        the tensor, or a tuple of one for each; kernel None where nothing slides, as over samples and channels:
        `of_window(P(None, None, "rows"), (None, None, 5, 5), padding=2)`, before `nn.Conv2d(..., 5, padding=0)`.
        outputs: for each dimension the lengths of the blocks of the result; None: balanced.
        boundary: what the padding holds.
        The lengths of all blocks are learnt at each call; blocks without outputs come out empty. See docs/window.md.
        """
        self = cls.__new__(cls)
        window = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
        given = {k: _frozen(v) for k, v in window.items()} | {"ceil": ceil, "outputs": _frozen(outputs)}
        _Movement.__init__(self, spec=spec, boundary=_frozen(boundary), **given)
        return self

    def plan(self, source: Layout) -> Windows:
        """What each block needs and gives, where the tensor lies as `source`; `.target` is the layout of the result."""
        return plan_windows(
            source,
            self.kernel,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            ceil=self.ceil,
            target=self.outputs,
        )

    def _moved(self, x: Any) -> Any:
        if "kernel" not in self._given:
            return spmd.halo_exchange(x, self.spec, self.widths, self.boundary, shape=self.shape, sizes=self.sizes)
        worker = here(self.where)
        axes = common_axes(self.where, worker, self.spec)
        source = resolved(self.where, x, self.spec, axes, worker)
        return spmd.halo_exchange(x, self.spec, self.plan(source).widths, self.boundary, sizes=source.cuts)


def _frozen(x: Any) -> Any:
    """Lists as tuples, so that arguments stay as they were given."""
    return tuple(map(_frozen, x)) if isinstance(x, list | tuple) else x


def _choice(where: str, to: str) -> str:
    if to in ("varying", "invariant"):
        return to
    raise LayoutError(
        message(
            where, argument="to", got=repr(to), need='"varying" or "invariant"', mend='leave it out, or "invariant"'
        )
    )
