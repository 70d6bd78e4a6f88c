"""Draw how the blocks of an array lie on a mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from spmd.errors import prints

__all__ = ["BlockGrids", "format_workers", "side_by_side"]

Lines = tuple[str, ...]

_BOX_CHARACTERS = "┌┬┐├┼┤└┴┘─│"


class BlockGrids:
    """The blocks of a layout as grids of cells: `columns` belong to one split dimension, `rows` to the one before.

    cuts: the sizes of the blocks in each dimension. dims: the mesh axes that split each dimension; None for a grid of
    chosen workers. axes: the sizes of the mesh axes. holders: the workers that hold each block.
    """

    def __init__(
        self,
        cuts: Sequence[Sequence[int]],
        dims: Sequence[tuple[str, ...]] | None,
        axes: Mapping[str, int],
        holders: Mapping[tuple[int, ...], tuple[int, ...]],
    ):
        self.cuts, self.dims, self.axes, self.holders = cuts, dims, axes, holders
        split = [d for d, cut in enumerate(cuts) if (len(cut) > 1 if dims is None else dims[d])]
        # A single split dimension runs downwards, as the rows of a matrix do, unless it is the last.
        across = split.pop() if split and (len(split) > 1 or split[-1] == len(cuts) - 1) else None
        down = split.pop() if split else None
        self.outer, self.inner = split, (down, across)
        self.rows, self.columns = self.labels(down), self.labels(across)

    def draw(self, title: str, *, ascii: bool | None, width: int) -> str:
        """The grids as text, below a title; workers that hold nothing come last."""
        ascii = not prints(_BOX_CHARACTERS) if ascii is None else ascii
        lines = [title]
        for caption, place in self.slabs():
            cells = [[self._cell(place, i, j) for j in range(len(self.columns))] for i in range(len(self.rows))]
            lines += [caption] if caption else []
            lines += _draw_boxes(cells, self.rows, self.columns, "+++++++++-|" if ascii else _BOX_CHARACTERS, width)
        if self.idle:
            lines.append(f"worker{'s' * (len(self.idle) > 1)} {format_workers(self.idle)}: nothing")
        return "\n".join(lines)

    @property
    def idle(self) -> list[int]:
        """The workers that hold nothing."""
        holding = set(itertools.chain(*self.holders.values()))
        return [w for w in range(math.prod(self.axes.values())) if w not in holding]

    def labels(self, d: int | None) -> list[Lines]:
        """For each block of a dimension, the coordinates of its workers and its indices; one empty label for None."""
        if d is None:
            return [()]
        ranges = [f"{start}:{stop}" for start, stop in itertools.pairwise((0, *itertools.accumulate(self.cuts[d])))]
        if self.dims is None:
            return [(f"{d}: block {k}", text) for k, text in enumerate(ranges)]
        names = self.dims[d]
        places = itertools.product(*(range(self.axes[n]) for n in names))
        return [
            (", ".join(f"{n}={i}" for n, i in zip(names, place, strict=True)), text)
            for place, text in zip(places, ranges, strict=True)
        ]

    def slabs(self) -> Iterator[tuple[str, dict[int, int]]]:
        """Each grid, with its caption: one for each block of the outer split dimensions, by its index in them."""
        for outer in itertools.product(*(enumerate(self.labels(d)) for d in self.outer)):
            place = {d: k for d, (k, _) in zip(self.outer, outer, strict=True)}
            caption = [f"dimension {d}: {' '.join(label)}" for d, (_, label) in zip(self.outer, outer, strict=True)]
            yield ", ".join(caption), place

    def position(self, place: dict[int, int], i: int, j: int) -> tuple[int, ...]:
        """The index in each dimension of the block in row i and column j of the grid at a place."""
        place = place | {d: k for d, k in zip(self.inner, (i, j), strict=True) if d is not None}
        return tuple(place.get(d, 0) for d in range(len(self.cuts)))

    def shape(self, position: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a block."""
        return tuple(cut[k] for cut, k in zip(self.cuts, position, strict=True))

    def _cell(self, place: dict[int, int], i: int, j: int) -> Lines:
        position = self.position(place, i, j)
        workers, shape = self.holders[position], self.shape(position)
        text = f"worker{'s' * (len(workers) > 1)} {format_workers(workers)}"
        return text, f"empty {shape}" if 0 in shape else str(shape)


def format_workers(workers: Sequence[int], groups_shown: int = 4) -> str:
    """Worker numbers as text: `0-3, 8, 10`. Of more groups than are shown the first two and the last, if shorter."""
    groups = [[w for _, w in g] for _, g in itertools.groupby(enumerate(workers), lambda kw: kw[1] - kw[0])]
    texts = [f"{g[0]}-{g[-1]}" if len(g) > 2 else ", ".join(map(str, g)) for g in groups]
    full, short = ", ".join(texts), ", ".join([*texts[:2], "...", *texts[-1:]])
    return full if len(texts) <= groups_shown or len(full) <= len(short) else short


def _draw_boxes(cells: list[list[Lines]], rows: list[Lines], columns: list[Lines], marks: str, width: int) -> list[str]:
    """Draw cells as adjoining boxes, the labels of rows on the left, those of columns above."""
    top, middle, bottom, (dash, bar) = marks[0:3], marks[3:6], marks[6:9], marks[9:]
    left = max(len(t) for label in rows for t in label) + 1 if rows[0] else 0
    size = max(len(t) for texts in (*itertools.chain(*cells), *columns) for t in texts) + 2
    fit = max(1, (width - left - 1) // (size + 1))
    lines = []
    for start in range(0, len(columns), fit):
        part = columns[start : start + fit]

        def rule(ends: str, n: int = len(part)) -> str:
            return " " * left + ends[0] + ends[1].join([dash * size] * n) + ends[2]

        lines += [" " * (left + 1) + " ".join(t.center(size) for t in texts) for texts in zip(*part, strict=True)]
        for k, (label, row) in enumerate(zip(rows, cells, strict=True)):
            lines.append(rule(middle if k else top))
            for t, texts in zip(label or ("", ""), zip(*row[start : start + fit], strict=True), strict=True):
                lines.append(t.rjust(left - 1).ljust(left) + bar + bar.join(x.center(size) for x in texts) + bar)
        lines.append(rule(bottom))
    return [line.rstrip() for line in lines]


def side_by_side(pictures: Sequence[str], width: int = 100) -> str:
    """Put texts of several lines next to each other: as many as fit, the rest below."""
    shelves: list[list[list[str]]] = [[]]
    for lines in (p.splitlines() for p in pictures):
        wide = max(map(len, lines))
        if shelves[-1] and sum(len(b[0]) + 3 for b in shelves[-1]) + wide > width:
            shelves.append([])
        shelves[-1].append([line.ljust(wide) for line in lines])
    texts = []
    for shelf in shelves:
        blank = [" " * len(block[0]) for block in shelf]
        rows = itertools.zip_longest(*shelf)
        texts.append("\n".join("   ".join(t or b for t, b in zip(row, blank, strict=True)).rstrip() for row in rows))
    return "\n\n".join(texts)
