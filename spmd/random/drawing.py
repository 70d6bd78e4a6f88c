"""Draw the blocks of a random array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from spmd import kernels
from spmd.array import PartitionedArray, relayout
from spmd.errors import SpecError, describe
from spmd.layout import Spec
from spmd.mesh import WORKER, Mesh
from spmd.operators.varying import varying
from spmd.placement import mesh_for, placed
from spmd.random.arguments import NO_SHAPE, Shape, checked_shape, key_words, varying_axes
from spmd.transport.handles import read_only

SPLIT_STREAM, FOLD_STREAM = 1, 2
"""The streams of a key for `split` and `fold_in`; numbers come from stream 0."""


class Place(NamedTuple):
    """Which part of a whole array is drawn: shape is that of the whole; without a spec it is all of it."""

    shape: tuple[int, ...]
    spec: Any = None
    mesh: Mesh | None = None


def place_of(where: str, shape: Shape, spec: Any, mesh: Mesh | None, like: Any) -> Place:
    """What the arguments of a random function say, checked. Without a shape it is that of `like`, else ()."""
    lengths = getattr(like, "shape", ()) if shape is NO_SHAPE and like is not None else checked_shape(where, shape)
    return Place(lengths, *placed(where, lengths, spec, mesh, like))


def draw(
    where: str,
    key: Any,
    kernel: str,
    dtype: Any,
    place: Place,
    *options: Any,
    transform: Callable[[Any], Any] = lambda x: x,
) -> Any:
    """The numbers of a kernel: the whole array, this worker's block of it, or the blocks of this process."""
    words, (shape, spec, mesh) = key_words(where, key), place
    worker = WORKER.get()
    if spec is not None and not isinstance(spec, Spec):
        raise SpecError.at(
            where, argument="spec", got=describe(spec), need="a P, or a Layout", mend='spec=P("x", None)'
        )
    if worker is not None:
        mesh = worker.mesh
    else:
        mesh = None if spec is None else mesh_for(mesh, where)
    places = None if mesh is None else mesh.places

    def numbers_in(box: Any, w: int) -> Any:
        """The numbers of a box, on the device of a worker."""
        if places is None:
            return transform(getattr(kernels.of(words), kernel)(words, shape, box, dtype, *options))
        with places.at(w):
            moved = places.moved(words, w)
            return transform(getattr(kernels.of(moved), kernel)(moved, shape, box, dtype, *options))

    if mesh is None or spec is None:
        whole = tuple((0, n) for n in shape)
        return with_state(numbers_in(whole, 0 if worker is None else worker.index), varying_axes(key))
    spec.check(mesh.axes, where, "spec", len(shape), unreduced=worker is None)
    target = mesh.layout(shape, spec, where)
    layout = target.reduced

    def block(w: int) -> Any:
        if not shape and layout.positions(w) is None:  # a scalar that another worker holds
            return numbers_in((), w).reshape(1)[:0]
        return numbers_in(layout.boxes[w], w)

    if worker is not None:
        return with_state(block(worker.index), layout.varying | varying_axes(key))
    return relayout(PartitionedArray(mesh.shared(layout, lambda w: read_only(block(w))), layout, mesh), target)


def with_state(x: Any, axes: frozenset[str]) -> Any:
    """A result of a body with its state; outside of bodies unchanged."""
    worker = WORKER.get()
    if worker is None or not worker.tracked:
        return x
    return varying(read_only(x), tuple(n for n in worker.mesh.axes if n in axes))
