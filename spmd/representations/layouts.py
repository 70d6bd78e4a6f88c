"""Reports of layouts, arrays and meshes: a table, and the blocks as an SVG picture or a drawing of characters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from spmd.layout_picture import BlockGrids, format_workers
from spmd.representations.colours import colour_of, ink
from spmd.representations.numbers import count_text, size_text
from spmd.representations.panels import LETTER, LINE, MARGIN, Panel, Rectangle, panels, tooltip
from spmd.representations.tables import Report, Table

__all__ = ["BlocksPicture", "layout_report", "mesh_grids", "mesh_report"]


@dataclass(frozen=True)
class BlocksPicture:
    """The blocks of a layout. label: what the picture shows, for readers that cannot see it. itemsize: bytes of an
    entry, for the texts of the blocks; None if they are not known, 0 for blocks that are workers of a mesh."""

    grids: BlockGrids
    label: str
    itemsize: int | None

    def text(self, width: int = 100) -> str:
        """The blocks as boxes of characters."""
        return self.grids.draw("", ascii=None, width=width).lstrip("\n")

    def html(self) -> str:
        """The blocks as SVG, to scale and coloured by worker; what a block is stands in its tooltip."""
        pictures = "".join(self._svg(panel) for panel in panels(self.grids))
        return f'<div style="display: flex; flex-wrap: wrap; gap: 1em">{pictures}</div>'

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        yield Text(self.text(options.max_width), no_wrap=True)

    def _svg(self, panel: Panel) -> str:
        text = escape(f"{self.label}; {panel.caption}" if panel.caption else self.label)
        size = f"{panel.width:.2f}", f"{panel.height:.2f}"
        turn = f' transform="rotate(90 {panel.right + 6:.2f} {MARGIN:.2f})"'
        return "".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{text}" '
                f'width="{size[0]}" height="{size[1]}" viewBox="0 0 {size[0]} {size[1]}" '
                f'font-family="sans-serif" font-size="11"><title>{text}</title>',
                *map(self._block, panel.rectangles),
                _text(MARGIN, panel.bottom + LINE, panel.across),
                _text(panel.right + 6, MARGIN, panel.down, more=turn),
                _text(MARGIN, LINE, panel.caption),
                "</svg>",
            ]
        )

    def _block(self, block: Rectangle) -> str:
        """A rectangle in the colour of its first worker, with the numbers of its workers and a tooltip."""
        fill, dashed = ("none", ' stroke-dasharray="3 2"') if block.empty else (colour_of(block.workers[0]), "")
        rectangle = (
            f'<rect x="{block.x:.2f}" y="{block.y:.2f}" width="{block.width:.2f}" height="{block.height:.2f}" '
            f'fill="{fill}" stroke="currentColor"{dashed}/>'
        )
        numbers, text = format_workers(block.workers), ""
        if len(numbers) * LETTER <= block.width - 2 and block.height >= LINE and not block.empty:
            middle = block.x + block.width / 2, block.y + block.height / 2 + 4
            text = _text(*middle, numbers, ink(fill), ' text-anchor="middle"')
        return f"<g><title>{escape(tooltip(self.grids, block.position, self.itemsize))}</title>{rectangle}{text}</g>"


def mesh_grids(axes: Mapping[str, int]) -> BlockGrids:
    """The workers of a mesh as blocks."""
    workers = itertools.product(*(range(n) for n in axes.values()))
    holders = {place: (w,) for w, place in enumerate(workers)}
    return BlockGrids([(1,) * n for n in axes.values()], [(name,) for name in axes], axes, holders)


def mesh_report(title: str, axes: Mapping[str, int], transport: str | None, device: str) -> Report:
    """A table beside a picture of the workers of a mesh. transport: its name; None if none is chosen yet."""
    grids = mesh_grids(axes)
    facts = [
        ("axes", ", ".join(f"{name}: {n}" for name, n in axes.items()) or "none"),
        ("transport", transport or "to be chosen at first use"),
        ("device", device),
        ("workers", str(len(grids.holders))),
    ]
    return Report("Mesh", [Table(facts), BlocksPicture(grids, f"The workers of {title}", 0)])


def layout_report(
    title: str, how: str, rows: Sequence[tuple[str, str]], grids: BlockGrids, itemsize: int | None
) -> Report:
    """A table beside a picture of the blocks of an array.

    how: its spec, or its grid. rows: more of the table. itemsize: bytes of an entry, if known.
    """
    shape = tuple(map(sum, grids.cuts))
    sizes = {place: math.prod(grids.shape(place)) for place in grids.holders}
    whole, total = sum(sizes.values()), sum(n * len(grids.holders[place]) for place, n in sizes.items())
    workers, unit = math.prod(grids.axes.values()), "entries" if itemsize is None else "bytes"
    shown = str if itemsize is None else lambda n: size_text(n * itemsize)
    empty = sorted([*grids.idle, *(w for place, n in sizes.items() if not n for w in grids.holders[place])])
    idle = f", of which {format_workers(empty)} hold no entries" if empty else ""
    facts = [
        (unit, shown(whole)),
        (f"{unit} per worker", f"at most {shown(max(sizes.values()))}, of all {shown(total)}"),
        ("workers", f"{workers}{idle}"),
    ]
    label = f"Blocks of an array of shape {shape}, {how}, on {count_text(workers, 'worker')}{idle}"
    kind = "spec" if grids.dims is not None else "layout"
    table = Table([("shape", str(shape)), (kind, how), *rows, *facts])
    return Report(title, [table, BlocksPicture(grids, label, itemsize)])


def _text(x: float, y: float, text: str, fill: str = "currentColor", more: str = "") -> str:
    return text and f'<text x="{x:.2f}" y="{y:.2f}" fill="{fill}"{more}>{escape(text)}</text>'
