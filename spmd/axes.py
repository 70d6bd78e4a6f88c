"""The sizes of mesh axes, a worker's index along them, and where its blocks lie, for bodies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.errors import SpecError, describe
from spmd.layout import Layout, Spec
from spmd.layout_arguments import checked_integers
from spmd.mesh import WORKER, current_mesh, here
from spmd.state import state_of
from spmd.tracebacks import api_boundary
from spmd.transport.processes.job import job_world

__all__ = ["axis_index", "axis_size", "block_indices", "block_slices", "is_main", "worker_index"]


@api_boundary
def axis_size(axis_name: str | Sequence[str]) -> int:
    """The number of workers along an axis, or along several together. A plain int."""
    worker = here("spmd.axis_size")
    return math.prod(worker.mesh.axes[n] for n in worker.mesh.names(axis_name, "spmd.axis_size"))


@api_boundary
def worker_index(axis_name: str | Sequence[str]) -> int:
    """This worker's index along an axis, as a plain int. All branches on it must call the same collectives."""
    worker = here("spmd.worker_index")
    return worker.group(worker.mesh.names(axis_name, "spmd.worker_index")).index


@api_boundary
def axis_index(axis_name: str | Sequence[str]) -> Any:
    """This worker's index along an axis (along several: major to minor), as an array that varies over it."""
    worker = here("spmd.axis_index")
    names = worker.mesh.names(axis_name, "spmd.axis_index")
    index = np.int64(worker.group(names).index)
    return worker.carrying(index, state_of(names))


@api_boundary
def block_slices(shape: int | Sequence[int], spec: Spec) -> tuple[slice, ...]:
    """Where this worker's block lies in an array of this shape, as plain numbers: `layout.slices` of this worker.

    shape: of the whole array. spec: how it is split: a P for balanced blocks, or a `Layout`. No data moves. Workers get
    different numbers, as by `worker_index`: declare what is made of them by `spmd.varying`, or use `block_indices`.

        def read(n):
            (rows,) = spmd.block_slices(n, P("data"))  # slice(4, 7) on worker 1 of 3, for n = 10
            return spmd.varying(records[rows], "data")

    Outside of bodies: `x.layout.slices(worker)`. Raises SpecError or LayoutError for a spec that does not fit.
    """
    return _own_slices("spmd.block_slices", shape, spec)[1]


@api_boundary
def block_indices(shape: int | Sequence[int], spec: Spec) -> tuple[Any, ...]:
    """The indices in an array of this shape of the entries of this worker's block: an array for each dimension.

    shape, spec: as for `block_slices`. The arrays are int64 and broadcast to the block; each varies over the axes that
    split its dimension. As `np.indices(shape, sparse=True)`, of one block of it.

        def poisson_matrix(a):  # a block of rows of an array of shape (100, 100)
            i, j = spmd.block_indices((100, 100), P("rows"))
            return np.where(i == j, 2.0, 0.0) - (abs(i - j) == 1)

    Raises SpecError or LayoutError for a spec that does not fit.
    """
    worker = here("spmd.block_indices")
    layout, slices = _own_slices("spmd.block_indices", shape, spec)
    lengths = tuple(s.stop - s.start for s in slices)
    indices = []
    for d, (place, s) in enumerate(zip(np.indices(lengths, sparse=True), slices, strict=True)):
        axes = tuple(worker.mesh.axes) if layout.spec is None else layout.spec.dims[d]
        indices.append(worker.carrying(place + np.int64(s.start), state_of(axes)))
    return tuple(indices)


def _own_slices(where: str, shape: int | Sequence[int], spec: Spec) -> tuple[Layout, tuple[slice, ...]]:
    """The layout of an array of this shape, and where the block of this worker lies in it."""
    worker = here(where)
    lengths = checked_integers(where, "shape", [shape] if np.ndim(shape) == 0 else shape, 0, "the shape of the whole")
    if not isinstance(spec, Spec):
        raise SpecError.at(where, argument="spec", got=describe(spec), need="a P, or a Layout", mend='P("x", None)')
    spec.check(worker.mesh.axes, where, "spec", len(lengths))
    layout = worker.mesh.layout(lengths, spec, where)
    return layout, layout.slices(worker.index)


def is_main() -> bool:
    """Whether this is the first process, or inside a body the first worker: the one that should print."""
    worker = WORKER.get()
    if worker is not None:
        return worker.index == 0
    mesh = current_mesh()
    if mesh is not None and mesh.comm is not None:
        return mesh.comm.Get_rank() == 0
    world = job_world()
    return world is None or world.rank == 0
