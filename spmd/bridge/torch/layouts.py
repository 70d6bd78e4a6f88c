"""Layouts of tensors of any shape, computed from the shapes of all blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from spmd.bridge.torch.interop import array_dtype
from spmd.bridge.torch.worker_context import refuse_lockstep
from spmd.errors import LayoutError, describe
from spmd.grid import Grid, layout_of_shapes
from spmd.layout import Layout, P
from spmd.mesh import Worker
from spmd.transport.call import Call

__all__ = [
    "LayoutLike",
    "broadcast_grid",
    "common_axes",
    "gather_shapes",
    "grid_of",
    "layout_for",
    "resolve_layout",
]


Shape = tuple[int, ...]


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
            mend="spt.nn.Repartition to blocks that fit, before or after; no copies in the smaller one",
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
                mend="spt.nn.Repartition to blocks that fit, before or after",
            )
    return tuple(n for n in large.axes if n not in small.varying)
