"""Which block of a layout this worker holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from spmd.bridge.torch.layouts import LayoutLike, common_axes, layout_for
from spmd.bridge.torch.rng import is_drawing
from spmd.bridge.torch.worker_context import WorkerContext, context_of
from spmd.errors import LayoutError, MeshError, StateError
from spmd.layout import Layout
from spmd.mesh import WORKER, Worker

MEND = "p.block() is this worker's part, and p.whole() is the whole, on every worker (collective)"


class Placement:
    """The layout of the whole, this worker's number in it, and the worker's context or None."""

    __slots__ = ("context", "index", "layout")

    def __init__(self, layout: Layout, index: int, context: WorkerContext | None):
        self.layout = layout
        self.index = index
        self.context = context

    def __reduce__(self) -> Any:
        return Placement, (self.layout, self.index, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.index == other.index and self.layout == other.layout

    def __hash__(self) -> int:
        return hash((self.index, self.layout))

    def __deepcopy__(self, memo: Any) -> Placement:
        return self  # immutable

    def derived(self, layout: Layout) -> Placement:
        """The placement of this worker in another layout over the same axes."""
        return self if layout is self.layout else Placement(layout, self.index, self.context)

    @property
    def slices(self) -> tuple[slice, ...]:
        """This worker's part of the whole."""
        return self.layout.slices(self.index)


def check_worker(placement: Placement, worker: Worker | None) -> None:
    """Raise if another worker holds the block."""
    layout = placement.layout
    if worker is None or placement.context is not None and placement.context.worker is worker:
        return
    if worker.group(tuple(layout.axes)).index != placement.index:
        raise LayoutError.at(
            "a partitioned tensor",
            got=f"the block of {layout.describe(placement.index)} on {worker.mesh.describe(worker.index)}",
            need="the worker that it was made on",
            mend="spt.state_dict(module) gives whole tensors, which load_state_dict takes on any worker",
        )


def worker_of(placement: Placement, what: str) -> Worker:
    """The worker that holds the block, for a collective. Raises outside of bodies and inside `spt.drawing`."""
    worker = WORKER.get()
    if worker is None and placement.context is not None:
        worker = placement.context.worker  # in a thread of torch
    if worker is None:
        raise MeshError.at(
            what,
            got="a call outside of any body",
            need=f"all workers, which hold a block each of {list(placement.layout.shape)}",
            mend="call state_dict() in the body, on every worker; it gives each the whole, as p.whole() does",
        )
    if is_drawing():
        raise StateError.at(
            what,
            got="a call inside of spt.drawing(), where workers take turns",
            need="all workers at once",
            mend="call it before or after",
        )
    check_worker(placement, worker)
    return worker


def layout_of(where: str, shape: tuple[int, ...], spec: LayoutLike, worker: Worker) -> Layout:
    """The layout of a whole of this shape. Raises LayoutError where none fits."""
    layout = layout_for(shape, spec, common_axes(where, worker, spec))
    varying = layout.has_copies and (layout.spec is None or layout.copies == "varying")
    if layout.shape == shape and shape and not varying:
        return layout
    raise LayoutError.at(
        where,
        argument="spec",
        got=f"{layout} for a parameter of shape {list(shape)}",
        need="each block on one worker"
        if varying
        else f"a layout of shape {list(shape)}"
        if shape
        else "a parameter of one dimension or more",
        mend="a grid without copies"
        if varying
        else "a spec or a Grid serves any shape"
        if shape
        else "nn.Parameter: numbers are replicated",
    )


def own_placement(layout: Layout, worker: Worker) -> Placement:
    """The placement of this worker's block in a layout."""
    return Placement(layout, worker.group(tuple(layout.axes)).index, context_of(worker))


def unpacked_shape(where: str, whole: Any, unpacked: Sequence[int]) -> tuple[int, ...]:
    """The shape in which a layout splits a whole, checked."""
    shape = tuple(unpacked)
    if math.prod(shape) != whole.numel():
        raise LayoutError.at(
            where,
            argument="unpacked",
            got=f"{list(shape)} for a whole of shape {list(whole.shape)}",
            need=f"a shape of {whole.numel()} entries, whose dimensions join to that of the whole",
            mend="(3, n, n) for weights of shape (3 n, n)",
        )
    return shape
