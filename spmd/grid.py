"""Layouts of arrays of any shape on a grid of workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index

from spmd.errors import LayoutError
from spmd.layout import Layout, P

__all__ = ["Grid", "layout_of_blocks", "layout_of_shapes"]

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

        >>> grid = spmd.Grid((2,), workers=[1, 3])
        >>> layout = grid.layout((5,), {"x": 4})
        >>> [layout.block_shape(worker) for worker in range(4)]
        [(0,), (3,), (0,), (2,)]
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
                "spmd.Grid",
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
                "spmd.Grid",
                argument="dims",
                got=f"{self.dims} for an array of shape {list(shape)}",
                need=f"at most {len(shape)} numbers of blocks, one for each dimension",
                mend="leave out the first dimensions; copies= counts copies of each block",
            )
        whole = (1,) * (len(shape) - len(self.dims))
        return Layout.grid(shape, (*whole, *self.dims, self.copies), axes, self.workers)


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
                mend=f"zeros of shape {[0] * ndim} on workers without a block",
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
