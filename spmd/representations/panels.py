"""Where the blocks of an array lie in a picture: rectangles to scale, in pixels, y downwards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from spmd.layout_picture import BlockGrids, format_workers
from spmd.representations.numbers import size_text

__all__ = ["LETTER", "LINE", "MARGIN", "Panel", "Rectangle", "panels", "tooltip"]

_LONGEST, _SHORTEST, _MOST = 240.0, 48.0, 640.0
"""The length of the longest side of a picture in pixels; the least of the others; and the most of a side that is made
longer for the sake of its many blocks, each of which gets _BLOCK."""
_BLOCK, _EMPTY, MARGIN, LETTER, LINE = 20.0, 8.0, 20.0, 7.0, 14.0


@dataclass(frozen=True)
class Rectangle:
    """One block. position: its index in each dimension. x, y: of its upper left corner."""

    position: tuple[int, ...]
    workers: tuple[int, ...]
    empty: bool
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Panel:
    """The blocks at one place of the outer split dimensions. caption: the place; "" if there is only one.

    across, down: the lengths of the shown dimensions, and the axes that split them. right, bottom: where the blocks
    end; width, height: of all, with margins and texts.
    """

    caption: str
    across: str
    down: str
    right: float
    bottom: float
    rectangles: tuple[Rectangle, ...]

    @property
    def width(self) -> float:
        return MARGIN + max(self.right, LETTER * max(len(self.across), len(self.caption)))

    @property
    def height(self) -> float:
        return MARGIN + max(self.bottom, LETTER * len(self.down))


def panels(grids: BlockGrids) -> Iterator[Panel]:
    """A panel for each block of the outer split dimensions."""
    down, across = _sides(grids)
    tops, lefts = _edges(grids, down, across)
    texts = [_length(grids, d) for d in (down, across)]
    for caption, place in grids.slabs():
        rectangles = []
        for (i, (y, bottom)), (j, (x, right)) in itertools.product(enumerate(tops), enumerate(lefts)):
            position = grids.position(place, i, j)
            workers, empty = grids.holders[position], 0 in grids.shape(position)
            rectangles.append(Rectangle(position, workers, empty, x, y, right - x, bottom - y))
        yield Panel(caption, texts[1], texts[0], lefts[-1][1], tops[-1][1], tuple(rectangles))


def _sides(grids: BlockGrids) -> tuple[int | None, int | None]:
    """The dimensions that run down and across: those that are split, then the last ones that are whole."""
    down, across = grids.inner
    whole = [d for d in range(len(grids.cuts)) if d not in (*grids.outer, down, across)]
    if across is None and whole:
        across = whole.pop()
    if down is None and whole:
        down = whole.pop()
    return down, across


Edge = tuple[float, float]
"""Where a row or a column of blocks starts and stops."""


def _edges(grids: BlockGrids, down: int | None, across: int | None) -> tuple[list[Edge], list[Edge]]:
    """Where the rows and columns of blocks start and stop. Lengths are to scale within a dimension, and between two of
    them as far as the shorter one can still be seen. Empty blocks have a width too."""
    lengths = [sum(grids.cuts[d]) if d is not None else 0 for d in (down, across)]
    longest = max(1, *lengths)
    edges = []
    for d, n in zip((down, across), lengths, strict=True):
        cut = grids.cuts[d] if d is not None else (1,)
        side = max(_LONGEST * n / longest, _SHORTEST, min(_MOST, _BLOCK * len(cut)))
        sizes = [side * size / max(1, sum(cut)) if size else _EMPTY for size in cut]
        edges.append([*itertools.pairwise(itertools.accumulate(sizes, initial=MARGIN))])
    return edges[0], edges[1]


def _length(grids: BlockGrids, d: int | None) -> str:
    """The length of a dimension, and the axes that split it."""
    if d is None:
        return ""
    names = () if grids.dims is None else grids.dims[d]
    return f"{sum(grids.cuts[d])}" + (f" over {', '.join(names)}" if names else "")


def tooltip(grids: BlockGrids, position: tuple[int, ...], itemsize: int | None) -> str:
    """What a block is: all of its workers, their coordinates, its indices, and its bytes.

    itemsize: bytes of an entry; None if they are not known, 0 for blocks that are workers of a mesh.
    """
    workers, shape = grids.holders[position], grids.shape(position)
    labels = [grids.labels(d)[k] for d, k in enumerate(position)]
    coordinates = ", ".join(first for first, _ in labels if first)
    text = f"worker{'s' * (len(workers) > 1)} {format_workers(workers, len(workers))}"
    text += f" ({coordinates})" if coordinates else ""
    if itemsize == 0:
        return text
    text += f": [{', '.join(indices for _, indices in labels)}], shape {shape}"
    if itemsize is not None:
        text += f", {size_text(math.prod(shape) * itemsize)}"
    return text + (", empty" if 0 in shape else "")
