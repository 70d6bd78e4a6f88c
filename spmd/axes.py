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
    """The number of workers along an axis, or along several together. A plain int.

    Raises MeshError outside of bodies, and for an axis that the mesh does not have.

        >>> with spmd.Mesh(x=2, y=3):
        ...     spmd.map(lambda: (spmd.axis_size("y"), spmd.axis_size(("x", "y"))), (), None)()
        (3, 6)
    """
    worker = here("spmd.axis_size")
    return math.prod(worker.mesh.axes[n] for n in worker.mesh.names(axis_name, "spmd.axis_size"))


@api_boundary
def worker_index(axis_name: str | Sequence[str]) -> int:
    """This worker's index along an axis, as a plain int. All branches on it must call the same collectives.

    Raises MeshError outside of bodies, and for an axis that the mesh does not have.

        >>> with spmd.Mesh(x=3):
        ...     spmd.map(lambda: spmd.varying([spmd.worker_index("x") ** 2], "x"), (), P("x"))()
        PartitionedArray([0, 1, 4], dtype=int64, spec=P('x'))
    """
    worker = here("spmd.worker_index")
    return worker.group(worker.mesh.names(axis_name, "spmd.worker_index")).index


@api_boundary
def axis_index(axis_name: str | Sequence[str]) -> Any:
    """This worker's index along an axis (along several: major to minor), as an array that varies over it.

    Raises MeshError outside of bodies, and for an axis that the mesh does not have.

        >>> with spmd.Mesh(x=3):
        ...     spmd.map(lambda x: x + 10 * spmd.axis_index("x"), P("x"), P("x"))(np.arange(5))
        PartitionedArray([ 0,  1, 12, 13, 24], dtype=int64, spec=P('x'))
    """
    worker = here("spmd.axis_index")
    names = worker.mesh.names(axis_name, "spmd.axis_index")
    index = np.int64(worker.group(names).index)
    return worker.carrying(index, state_of(names))


@api_boundary
def block_slices(shape: int | Sequence[int], spec: Spec) -> tuple[slice, ...]:
    """Where this worker's block lies in an array of this shape, as plain numbers: `layout.slices` of this worker.

    shape: of the whole array. spec: how it is split: a P for balanced blocks, or a `Layout`. No data moves. Workers get
    different numbers, as by `worker_index`: declare what is made of them by `spmd.varying`, or use `block_indices`.

    Outside of bodies: `x.layout.slices(worker)`. Raises SpecError or LayoutError for a spec that does not fit.

        >>> records = np.arange(100, 110)
        >>> def read(n):
        ...     (rows,) = spmd.block_slices(n, P("data"))
        ...     return spmd.varying(records[rows], "data")
        >>> with spmd.Mesh(data=3):
        ...     spmd.map(read, None, P("data"))(10)
        PartitionedArray([100, 101, 102, 103, 104, 105, 106, 107, 108, 109], dtype=int64, spec=P('data'))
    """
    return _own_slices("spmd.block_slices", shape, spec)[1]


@api_boundary
def block_indices(shape: int | Sequence[int], spec: Spec) -> tuple[Any, ...]:
    """The indices in an array of this shape of the entries of this worker's block: an array for each dimension.

    shape, spec: as for `block_slices`. The arrays are int64 and broadcast to the block; each varies over the axes that
    split its dimension. As `np.indices(shape, sparse=True)`, of one block of it.

    Raises SpecError or LayoutError for a spec that does not fit.

        >>> def poisson_rows(u):
        ...     i, j = spmd.block_indices((4, 4), P("rows"))
        ...     return np.where(i == j, 2, 0) - (abs(i - j) == 1)
        >>> with spmd.Mesh(rows=2):
        ...     spmd.map(poisson_rows, P("rows"), P("rows"))(np.zeros(4)).numpy()
        array([[ 2, -1,  0,  0],
               [-1,  2, -1,  0],
               [ 0, -1,  2, -1],
               [ 0,  0, -1,  2]])
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
    """Whether this is the first process, or inside a body the first worker: the one that should print.

    >>> spmd.is_main()
    True
    >>> with spmd.Mesh(x=2):
    ...     spmd.map(lambda: print("once") if spmd.is_main() else None, (), None)()
    once
    """
    worker = WORKER.get()
    if worker is not None:
        return worker.index == 0
    mesh = current_mesh()
    if mesh is not None and mesh.comm is not None:
        return mesh.comm.Get_rank() == 0
    world = job_world()
    return world is None or world.rank == 0
