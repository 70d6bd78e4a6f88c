"""The inner product that knows the states, and its norm."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.array import PartitionedArray, owned_on, relayout
from spmd.autodiff import tree
from spmd.autodiff.tracer import Array
from spmd.device import on_device, to_host
from spmd.errors import (
    StateError,
    message,
)
from spmd.frontends import Frontend, frontend
from spmd.mesh import WORKER, Worker
from spmd.operators.base import operate
from spmd.operators.reduce import Sum
from spmd.operators.root import Rooted
from spmd.placing import put
from spmd.state import REPLICAS, state_of
from spmd.tracebacks import api_boundary
from spmd.transport.base import Call

__all__ = ["inner", "norm"]


@api_boundary
def inner(x, y):
    """<x, y> = sum(conj(x) * y) over the entries of the global arrays: Invariant values counted once, Varying ones
    summed over the workers, Rooted ones counted at the root. x, y: arrays, or pytrees of one structure.

    In a body the result is Invariant and differentiable; outside it is a number.
    """
    xs, ys = tree.leaves(x), tree.leaves(y)
    if len(xs) != len(ys):
        raise StateError(
            message(
                "spmd.inner",
                argument="y",
                got=f"{len(ys)} arrays for {len(xs)}",
                need="pytrees of one structure",
                mend="pair every array with its counterpart",
            )
        )
    total = 0.0
    by_state: dict[Any, Any] = {}
    for a, b in zip(xs, ys, strict=True):
        if WORKER.get() is None:
            total = total + _inner_outside(a, b)
            continue
        key, value = _inner_here(a, b)
        by_state[key] = by_state[key] + value if key in by_state else value
    for axes, value in by_state.items():
        total = total + (operate(Sum(axes), value) if axes else value)
    return total


def _inner_here(a, b) -> tuple[tuple[str, ...], Any]:
    """This worker's share of an inner product, and the axes to sum it over."""
    worker = WORKER.get()
    assert worker is not None
    axes = tuple(worker.mesh.axes)
    other = frontend(a.block if type(a) is Rooted else a)
    if other is not None:
        return _inner_of_others(a, b, axes, other, worker)
    if type(a) is Rooted and type(b) is Rooted and (a.axes, a.root) == (b.axes, b.root):
        token = REPLICAS.set(False)  # the others sum over nothing
        try:
            held = np.sum(np.conj(a.block) * b.block)
        finally:
            REPLICAS.reset(token)
        state = getattr(held, "state", None)
        root = state_of(a.axes)
        share = Array(held.value, state | root, held.tape, held.node) if state is not None else held
        return tuple(n for n in axes if n in (state | root).varying) if state is not None else axes, share
    value = np.sum(np.conj(a) * b)
    if type(value) is Array:
        return tuple(n for n in axes if n in value.state.varying), value
    return (() if worker.tracked else axes), value


def _inner_of_others(a, b, axes: tuple[str, ...], other: Frontend, worker: Worker) -> tuple[tuple[str, ...], Any]:
    """The same for arrays of another library."""
    if type(a) is Rooted and a.is_held_as(b):
        x, y, rooted = a.block, b.block, state_of(a.axes)
    else:
        x, y, rooted = a, b, state_of(())
    products = x.conj() * y
    held = other.total(products, tuple(range(products.ndim)))
    if not worker.tracked:
        return axes, held
    state = other.state(held) | rooted
    return tuple(n for n in axes if n in state.varying), other.carrying(held, state, True)


def _inner_outside(a, b):
    if type(a) is not PartitionedArray:
        a, b = (a, b) if type(b) is not PartitionedArray else (put(a, b.spec, b.mesh), b)
    if type(a) is not PartitionedArray:
        return to_host(np.vdot(a, b))[()]
    if type(b) is not PartitionedArray:
        b = put(b, a.spec, a.mesh)
    b = relayout(b, a.layout)
    axes = tuple(a.mesh.axes)

    def body(worker: Worker):
        w, given = worker.index, worker.comm.given
        mine: Any = np.vdot(given(a.blocks[w]), given(b.blocks[w])) if a.layout.owners[w] == w else 0
        # On a device the other owners bring a number of the device too.
        dtype = np.result_type(a.dtype, b.dtype)
        part = mine.astype(dtype) if on_device(mine) else owned_on(worker.mesh, np.asarray(mine, dtype), w)
        call = Call("inner", axes, part.dtype, part.shape, alike=True)
        return worker.comm.all_reduce(worker.group(axes), call, part).wait()

    return to_host(next(iter(a.mesh.run(body).results.values())))[()]


@api_boundary
def norm(x):
    """The 2-norm that belongs to `inner`: sqrt(<x, x>), real."""
    square: Any = inner(x, x)
    return np.sqrt(np.real(square)) if frontend(square) is None else square.real.sqrt()
