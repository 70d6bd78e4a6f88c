"""Layouts whose blocks are any boxes, which may overlap: what each worker needs of an array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmd.layout import Box, Layout

__all__ = ["BoxLayout"]


class BoxLayout(Layout):
    """Which box of a global array each worker needs. Boxes may overlap; each is a value of its own worker.

    shape: the global shape. needs: for each worker (start, stop) in every dimension, within the array; start = stop for
    nothing. axes: the names and sizes of the mesh axes. It is a target of `Repartition` and a source of `Accumulate`,
    which adds what workers hold of an entry.
    """

    __slots__ = ()

    def __init__(self, shape: Sequence[int], needs: Sequence[Box], axes: Mapping[str, int]):
        self.shape, self.axes, self.spec, self.copies = tuple(shape), dict(axes), None, "varying"
        self.workers = tuple(w for w, box in enumerate(needs) if all(start < stop for start, stop in box))
        self.boxes, self.cuts = tuple(needs), ()
        self.balanced, self.has_copies = False, True
        self._key = self.shape, self.boxes, tuple(self.axes.items())
        self._places = {w: (w,) for w in self.workers}

    def __repr__(self) -> str:
        return f"BoxLayout({self.shape}, {list(self.boxes)}, {self.axes})"
