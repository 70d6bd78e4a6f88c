"""Draw the blocks of a random array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd import kernels
from spmd.array import PartitionedArray
from spmd.errors import SpecError, describe
from spmd.layout import Layout, Spec
from spmd.mesh import WORKER, Mesh
from spmd.operators.varying import varying
from spmd.placement import mesh_for
from spmd.random.arguments import key_words, varying_axes
from spmd.transport.handles import read_only

SPLITS, FOLDS = 1, 2
"""The streams of a key for `split` and `fold_in`; numbers come from stream 0."""


def draw_whole(where: str, key: Any, kernel: str, shape: tuple[int, ...], dtype: Any, *more: Any) -> Any:
    """The whole array that a kernel draws."""
    return draw(where, key, kernel, shape, dtype, None, None, *more)


def draw(
    where: str,
    key: Any,
    kernel: str,
    shape: tuple[int, ...],
    dtype: Any,
    spec: Any,
    mesh: Mesh | None,
    *more: Any,
    then: Callable[[Any], Any] = lambda x: x,
) -> Any:
    """The numbers of a kernel: the whole array, this worker's block of it, or the blocks of this process."""
    words = key_words(where, key)
    worker = WORKER.get()

    def make(box: Any, on: Mesh | None, w: int) -> Any:
        """The numbers of a box, on the device of a worker."""
        if on is None or on.places is None:
            return then(getattr(kernels.of(words), kernel)(words, shape, box, dtype, *more))
        with on.places.at(w):
            moved = on.places.moved(words, w)
            return then(getattr(kernels.of(moved), kernel)(moved, shape, box, dtype, *more))

    if spec is None:
        whole = tuple((0, n) for n in shape)
        numbers = make(whole, worker.mesh, worker.index) if worker is not None else make(whole, None, 0)
        return with_state(numbers, varying_axes(key))
    if not isinstance(spec, Spec):
        raise SpecError.at(
            where, argument="spec", got=describe(spec), need="a P, or a Layout", mend='spec=P("x", None)'
        )
    on = worker.mesh if worker is not None else mesh_for(mesh, where)
    spec.check(on.axes, where, "spec", len(shape))
    layout = on.layout(shape, spec, where)
    if worker is not None:
        return with_state(_block(make, layout, on, worker.index), layout.varying | varying_axes(key))
    return PartitionedArray(on.shared(layout, lambda w: read_only(_block(make, layout, on, w))), layout, on)


def _block(make: Callable[[Any, Mesh, int], Any], layout: Layout, on: Mesh, worker: int) -> Any:
    if not layout.shape and layout.positions(worker) is None:  # a scalar that another worker holds
        return make((), on, worker).reshape(1)[:0]
    return make(layout.boxes[worker], on, worker)


def with_state(x: Any, axes: frozenset[str]) -> Any:
    """A result of a body with its state; outside of bodies unchanged."""
    worker = WORKER.get()
    if worker is None or not worker.tracked:
        return x
    return varying(read_only(x), tuple(n for n in worker.mesh.axes if n in axes))
