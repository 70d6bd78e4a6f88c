"""The sizes of mesh axes and a worker's index along them, for bodies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from spmd.mesh import WORKER, current_mesh, here
from spmd.state import state_of
from spmd.tracebacks import api_boundary
from spmd.transport.processes.job import job_world

__all__ = ["axis_index", "axis_size", "is_main", "worker_index"]


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
def axis_index(axis_name: str | Sequence[str]):
    """This worker's index along an axis (along several: major to minor), as an array that varies over it."""
    worker = here("spmd.axis_index")
    names = worker.mesh.names(axis_name, "spmd.axis_index")
    index = np.int64(worker.group(names).index)
    return worker.carrying(index, state_of(names))


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
