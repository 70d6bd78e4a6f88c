"""Blocks that users bring, of any library, as arrays of the mesh."""

from __future__ import annotations

import numpy as np

from spmd.autodiff.admission import admit
from spmd.autodiff.allocation import writable
from spmd.autodiff.staging.recorder import is_slot
from spmd.device import copied, home
from spmd.errors import StateError, describe
from spmd.kernels import on_device
from spmd.mesh import WORKER
from spmd.operators.base import Collective
from spmd.transport.handles import read_only

__all__ = ["bare_block", "owned_block"]


def owned_block(x, op: Collective) -> np.ndarray:
    """A block that nobody else writes to, on the device of the mesh."""
    block = bare_block(x, op)
    shared = x if isinstance(x, np.ndarray | np.generic) else block
    return read_only(copied(block)) if writable(shared) and not on_device(block) else block


def bare_block(x, op: Collective) -> np.ndarray:
    """A block of an array of any library, on the device of the mesh: on the same memory if it is there."""
    if is_slot(x):
        return x
    worker = WORKER.get()
    places = None if worker is None else worker.mesh.places
    where, need = f"spmd.{op.function}", "an array of numbers, a number, or a pytree of them"
    # Only the class is asked: global arrays and Rooted values are declared further up.
    mend = {
        "PartitionedArray": "pass it to the map as an argument, with a spec in in_specs",
        "Rooted": "spmd.replicate(x, axis_name) makes it Invariant, spmd.broadcast(x, axis_name) Varying",
    }.get(type(x).__name__)
    if mend is not None:
        raise StateError.at(where, argument="x", got=describe(x), need=need, mend=mend)
    if not on_device(x):
        x = np.asarray(admit(x, where, need=need))
    if worker is None or places is None:
        return home(where, "x", x, "cpu")
    return places.own(x, worker.index)
