"""Packed weights, as checkpoints see them: partitioned tensors whose rows are several arrays, one after another, as
those of queries, keys and values, each of which lies split.
"""

from __future__ import annotations

from functools import lru_cache

from spmd.box_layout import BoxLayout
from spmd.bridge.torch.partitioned.tensor import PartitionedTensor
from spmd.layout import Box, Layout

__all__ = ["is_packed", "piece_box", "piece_layouts"]


def piece_layouts(x: PartitionedTensor) -> list[Layout]:
    """How the entries of a tensor lie in the shape that it has: its layout. Of packed weights, whose rows are several
    arrays that are split each, a layout for the first of these that each worker has, one for the second, and so on. Of
    other views nothing."""
    layout, shape = x.block_layout, tuple(x.shape)
    if not is_packed(x):
        return [layout]
    count, rows, *rest = (*layout.shape, 0)[: len(shape) + 1]
    if shape != (count * rows, *rest):
        return []
    return [_piece_layout(layout, shape, k) for k in range(max(layout.cuts[0]))]


def is_packed(x: PartitionedTensor) -> bool:
    return tuple(x.shape) != x.block_layout.shape


@lru_cache(maxsize=1024)
def _piece_layout(layout: Layout, shape: tuple[int, ...], k: int) -> Layout:
    """How the arrays lie that are the k-th that a worker has: nothing on a worker that has fewer."""
    nothing = ((0, 0),) * len(shape)
    held = [(box, range(*box[0])) for box in layout.boxes]
    rows = layout.shape[1]
    boxes = [piece_box(box, rows, pieces[k]) if k < len(pieces) else nothing for box, pieces in held]
    return BoxLayout(shape, boxes, layout.axes)


def piece_box(box: Box, rows: int, piece: int) -> Box:
    """The box of one piece, of so many rows, in the array that has all pieces one after another."""
    _, (start, stop), *rest = box
    return ((piece * rows + start, piece * rows + stop), *rest)
