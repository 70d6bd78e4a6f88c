"""Layouts of tensors of any shape: `Grid`, and layouts computed from the shapes of all blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any

import numpy as np
import torch

from spmd.bridge.torch.interop import array_dtype
from spmd.bridge.torch.worker_context import refuse_lockstep
from spmd.errors import LayoutError, describe
from spmd.layout import Layout, P
from spmd.mesh import Worker
from spmd.transport.call import Call

__all__ = [
    "Grid",
    "LayoutLike",
    "broadcast_grid",
    "common_axes",
    "gather_shapes",
    "grid_of",
    "layout_for",
    "layout_of_shapes",
    "resolve_layout",
]


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """A Cartesian grid of workers, for arrays of any shape: `Layout.grid` before the shape is known.

    dims: the number of blocks in each of the last dimensions of the array; dimensions before these are whole.
    workers: the numbers of the workers that hold the blocks, last dimension fastest; by default the first prod(dims).
    The others hold blocks of shape (0, 0, ...).
    copies: the number of workers, adjacent in `workers`, that hold each block, each with its own value.
    axes: the axes of the mesh that number the workers; all of them by default. There is a grid at each index along
    the other axes.

    DistDL's partition: `Grid((2, 2), workers=[4, 5, 6, 7])`.
    Raises LayoutError for arguments that are not numbers, and in a call for an array of fewer dimensions.
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
            raise LayoutError.at(
                "spt.Grid",
                got=f"dims={self.dims!r}, workers={self.workers!r}, copies={self.copies!r}",
                need="a number of blocks, 1 or more, for each dimension, and the numbers of their workers",
                mend="Grid((2, 3), workers=[0, 1, 2, 4, 5, 6])",
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
            raise LayoutError.at(
                "spt.Grid",
                argument="dims",
                got=f"{self.dims} for an array of shape {list(shape)}",
                need=f"at most {len(shape)} numbers of blocks, one for each dimension",
                mend="leave out the first dimensions; copies= counts copies of each block",
            )
        whole = (1,) * (len(shape) - len(self.dims))
        return Layout.grid(shape, (*whole, *self.dims, self.copies), axes, self.workers)


LayoutLike = Layout | P | Grid
"""The layout of the tensors of a module: a layout, or, for tensors of any shape, a spec or a grid."""


def checked_layout(where: str, argument: str, spec: Any) -> LayoutLike:
    if isinstance(spec, Layout | P | Grid):
        return spec
    raise LayoutError.at(
        where,
        argument=argument,
        got=describe(spec),
        need="a Layout, or a spec or a Grid, which serve tensors of any shape",
        mend='spt.P("x"), spt.Grid((2, 2)), mesh.layout(shape, spec) or spt.Layout.grid(shape, grid, mesh.axes)',
    )


def common_axes(where: str, worker: Worker, *specs: LayoutLike) -> dict[str, int]:
    """The axes that number the workers of some layouts: those of a layout or a grid, or those that specs name.

    The other axes of the mesh take no part: tensors move within one index along them, whatever their state there.
    """
    mesh = worker.mesh
    fixed, named = {}, set()
    for spec in specs:
        if isinstance(spec, P):
            spec.check(mesh.axes, where, "spec")
            named |= spec.varying
        else:
            axes = tuple(spec.axes if spec.axes is not None else mesh.axes)
            fixed.setdefault(mesh.names(axes, where), spec)
    chosen = next(iter(fixed), tuple(n for n in mesh.axes if n in named))
    if len(fixed) > 1 or named - set(chosen):
        raise LayoutError.at(
            where,
            got=" and ".join(map(repr, specs)),
            need="layouts over the same axes of the mesh, in one order, which numbers the workers",
            mend=f"axes={chosen} for grids; specs that name no other axes than {list(chosen)}",
        )
    return {n: mesh.axes[n] for n in chosen}


def gather_shapes(where: str, x: Any, axes: Sequence[str], worker: Worker) -> tuple[Shape, ...]:
    """The shapes of the blocks of all workers along some axes. Collective; sends no bytes."""
    group = worker.group(tuple(axes))
    if group.size == 1:
        return (tuple(x.shape),)
    tensor = isinstance(x, torch.Tensor)
    if tensor:
        refuse_lockstep(worker)
    call = Call(where, group.axes, array_dtype(x.dtype) if tensor else x.dtype, tuple(x.shape), same_shape=None)
    return tuple(tuple(s) for s in worker.comm.shapes(group, call).wait())


@lru_cache(maxsize=1024)
def layout_of_shapes(
    where: str, shapes: tuple[Shape, ...], spec: P | Grid, axes: tuple[tuple[str, int], ...]
) -> Layout:
    """The layout in which the workers along some axes hold blocks of these shapes."""
    if isinstance(spec, P):
        return Layout.of_blocks(shapes, spec, dict(axes), where)
    first = spec.members[0]
    grid_layout = spec.layout((0,) * len(shapes[first] if first < len(shapes) else spec.dims), dict(axes))
    return layout_of_blocks(where, shapes, grid_layout)


def layout_of_blocks(where: str, shapes: tuple[Shape, ...], grid_layout: Layout) -> Layout:
    """A layout on the grid of `grid_layout`, in blocks of these shapes."""
    assert grid_layout.workers is not None
    ndim = len(grid_layout.shape)
    cuts: list[list[int | None]] = [[None] * len(c) for c in grid_layout.cuts]
    seen: dict[tuple[int, int], int] = {}
    for w, shape in enumerate(shapes):
        place = grid_layout.positions(w)
        if (len(shape) != ndim and (ndim or place is not None)) or (place is None and any(shape)):
            raise LayoutError.at(
                where,
                argument="x",
                got=f"a block of shape {list(shape)} on {grid_layout.describe(w)}",
                need=f"one of shape {[0] * ndim}: the grid gives it nothing"
                if place is None
                else f"one of {ndim} dimensions, as on {grid_layout.describe(grid_layout.workers[0])}",
                mend=f"torch.zeros({[0] * ndim}) on workers without a block",
            )
        for d, k in enumerate(place or ()):
            other = seen.setdefault((d, k), w)
            if cuts[d][k] not in (None, shape[d]):
                raise LayoutError.at(
                    where,
                    argument="x",
                    got=f"a block of shape {list(shapes[other])} on {grid_layout.describe(other)}, and one of "
                    f"shape {list(shape)} on {grid_layout.describe(w)}",
                    need=f"blocks that lie on a grid: equal lengths in dimension {d}",
                    mend="make the lengths agree, or give another grid",
                )
            cuts[d][k] = shape[d]
    sizes = [[k or 0 for k in c] for c in cuts]
    return _regridded(grid_layout, [sum(c) for c in sizes], sizes)


def _regridded(grid: Layout, shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> Layout:
    """Another array on the same grid of the same workers."""
    assert grid.workers is not None
    counts = [len(c) for c in grid.cuts]
    copies = len(grid.workers) // math.prod(counts)
    return Layout.grid(shape, (*counts, copies), grid.axes, grid.workers, cuts, copies=grid.copies)


def resolve_layout(where: str, x: Any, spec: LayoutLike, axes: dict[str, int], worker: Worker) -> Layout:
    """The layout of a tensor: the given one, or one computed from the shapes of all blocks (collective)."""
    if isinstance(spec, Layout):
        return spec
    return layout_of_shapes(where, gather_shapes(where, x, tuple(axes), worker), spec, tuple(axes.items()))


def layout_for(shape: Shape, spec: LayoutLike, axes: dict[str, int]) -> Layout:
    """The layout of an array of this shape. A spec or a grid stands for balanced blocks."""
    if isinstance(spec, Layout):
        return spec
    return _balanced(shape, spec, tuple(axes.items()))


@lru_cache(maxsize=1024)
def _balanced(shape: Shape, spec: P | Grid, axes: tuple[tuple[str, int], ...]) -> Layout:
    return Layout(shape, spec, dict(axes)) if isinstance(spec, P) else spec.layout(shape, dict(axes))


def grid_of(layout: Layout) -> Grid:
    """The grid on which a layout lies."""
    workers = layout.workers
    if workers is None:
        workers = tuple(w for _, holders in sorted(layout.holders.items()) for w in holders)
    counts = tuple(len(c) for c in layout.cuts)
    return Grid(counts, workers, len(workers) // max(1, math.prod(counts)), tuple(layout.axes))


@lru_cache(maxsize=1024)
def broadcast_grid(where: str, small: Grid, large: Grid, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Blocks of a small grid on the workers of a large one, by the rules of broadcasting.

    Grids are aligned at their last dimensions. Where the small one has one block and the large one more, each of those
    holds a copy. Gives the grid, copies last, and its workers, as `Layout.grid` takes them.
    """
    n = max(ndim, len(small.dims), len(large.dims))
    a, b = ((1,) * (n - len(g.dims)) + g.dims for g in (small, large))
    if small.copies > 1 or len(small.dims) > ndim or any(p not in (1, q) for p, q in zip(a, b, strict=True)):
        raise LayoutError.at(
            where,
            got=f"{small} and {large}, for a tensor of {ndim} dimensions",
            need="grids that broadcast: in each dimension, counted from the last, one block or as many",
            mend="spt.Repartition to blocks that fit, before or after; no copies in the smaller one",
        )
    members = np.array(large.members).reshape(*b, large.copies)
    unbroadcast = [d for d in range(n) if a[d] == b[d]]
    order = [*unbroadcast, *(d for d in range(n) if d not in unbroadcast), n]
    return (*a[n - ndim :], members.size // math.prod(a)), tuple(members.transpose(order).ravel().tolist())


def copied_layout(where: str, layout: Layout, large: Grid) -> Layout:
    """A layout with a copy of its blocks on all workers of a larger grid."""
    counts, workers = broadcast_grid(where, grid_of(layout), large, len(layout.shape))
    return Layout.grid(layout.shape, counts, layout.axes, workers, layout.cuts)


def added_axes(where: str, small: P, large: P) -> tuple[str, ...]:
    """The axes along which blocks laid out by one spec are copied to those of a larger one."""
    for d, names in enumerate(small.trimmed):
        if names and (d >= len(large.dims) or large.dims[d] != names):
            raise LayoutError.at(
                where,
                got=f"{small} and {large}",
                need=f"specs that broadcast: dimension {d} split over {names} in both, or whole in the smaller one",
                mend="spt.Repartition to blocks that fit, before or after",
            )
    return tuple(n for n in large.axes if n not in small.varying)
