"""Show layouts, arrays and meshes in notebooks: a table, and the blocks as an SVG picture. Nothing is read or sent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from spmd.layout_picture import BlockGrids, format_workers

__all__ = ["COLOURS", "layout_page", "mesh_page"]

COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
"""Of worker w: entry w mod 7. Colours that are told apart with all common kinds of colour blindness: Okabe and Ito,
Color Universal Design (2008), https://jfly.uni-koeln.de/color; without black."""

_LONGEST, _SHORTEST, _MOST = 240.0, 48.0, 640.0
"""The length of the longest side of a picture in pixels; the least of the others; and the most of a side that is made
longer for the sake of its many blocks, each of which gets _BLOCK."""
_BLOCK, _EMPTY, _MARGIN, _LETTER, _LINE = 20.0, 8.0, 20.0, 7.0, 14.0


def _page(heading: str, rows: Sequence[tuple[str, str]], grids: BlockGrids, label: str, itemsize: int | None) -> str:
    """A table beside a picture of the blocks of a layout, as HTML.

    rows: names and texts of the table. label: what the picture shows, for readers that cannot see it. itemsize: bytes
    of an entry, for the texts of the blocks; None if they are not known, 0 for blocks that are workers of a mesh.
    """
    cells = "".join(
        f'<tr><th scope="row" style="text-align: left">{escape(name)}</th>'
        f'<td style="text-align: left">{escape(text)}</td></tr>'
        for name, text in rows
    )
    caption = f'<caption style="text-align: left; font-weight: bold">{escape(heading)}</caption>'
    return (
        '<div style="display: flex; flex-wrap: wrap; gap: 1.5em; align-items: flex-start">'
        f"<table>{caption}<tbody>{cells}</tbody></table>"
        f'<div style="display: flex; flex-wrap: wrap; gap: 1em">{"".join(_pictures(grids, label, itemsize))}</div>'
        "</div>"
    )


def mesh_page(title: str, axes: Mapping[str, int], rows: Sequence[tuple[str, str]]) -> str:
    """A table beside a picture of the workers of a mesh, as HTML."""
    workers = itertools.product(*(range(n) for n in axes.values()))
    holders = {place: (w,) for w, place in enumerate(workers)}
    grids = BlockGrids([(1,) * n for n in axes.values()], [(name,) for name in axes], axes, holders)
    shown = [("axes", ", ".join(f"{name}: {n}" for name, n in axes.items()) or "none"), *rows]
    return _page("Mesh", [*shown, ("workers", str(len(holders)))], grids, f"The workers of {title}", 0)


def _size(n: int) -> str:
    """A number of bytes as text: `640 B`, `1.9 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            break
        n = n / 1024  # type: ignore[assignment]
    return f"{n:.3g} {unit}" if n < 1000 else f"{n:.0f} {unit}"


def layout_page(title: str, how: str, rows: Sequence[tuple[str, str]], grids: BlockGrids, itemsize: int | None) -> str:
    """A table beside a picture of the blocks of an array, as HTML.

    how: its spec, or its grid. rows: more of the table. itemsize: bytes of an entry, if known.
    """
    shape = tuple(map(sum, grids.cuts))
    sizes = {place: math.prod(grids.shape(place)) for place in grids.holders}
    whole, total = sum(sizes.values()), sum(n * len(grids.holders[place]) for place, n in sizes.items())
    workers, unit = math.prod(grids.axes.values()), "entries" if itemsize is None else "bytes"
    shown = str if itemsize is None else lambda n: _size(n * itemsize)
    empty = sorted([*grids.idle, *(w for place, n in sizes.items() if not n for w in grids.holders[place])])
    idle = f", of which {format_workers(empty)} hold no entries" if empty else ""
    facts = [
        (unit, shown(whole)),
        (f"{unit} per worker", f"at most {shown(max(sizes.values()))}, of all {shown(total)}"),
        ("workers", f"{workers}{idle}"),
    ]
    label = f"Blocks of an array of shape {shape}, {how}, on {workers} worker{'s' * (workers != 1)}{idle}"
    kind = "spec" if grids.dims is not None else "layout"
    return _page(title, [("shape", str(shape)), (kind, how), *rows, *facts], grids, label, itemsize)


def _pictures(grids: BlockGrids, label: str, itemsize: int | None) -> Iterator[str]:
    """A picture for each block of the outer split dimensions."""
    down, across = _sides(grids)
    tops, lefts = _edges(grids, down, across)
    right, bottom = lefts[-1][1], tops[-1][1]
    texts = [_length(grids, d) for d in (down, across)]
    for caption, place in grids.slabs():
        width = _MARGIN + max(right, _LETTER * max(map(len, (texts[1], caption))))
        height = _MARGIN + max(bottom, _LETTER * len(texts[0]))
        text = f"{label}; {caption}" if caption else label
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(text)}" '
            f'width="{width:.2f}" height="{height:.2f}" viewBox="0 0 {width:.2f} {height:.2f}" '
            f'font-family="sans-serif" font-size="11"><title>{escape(text)}</title>'
        ]
        for (i, rows), (j, columns) in itertools.product(enumerate(tops), enumerate(lefts)):
            parts.append(_block(grids, grids.position(place, i, j), rows, columns, itemsize))
        turn = f' transform="rotate(90 {right + 6:.2f} {_MARGIN:.2f})"'
        parts += [_text(_MARGIN, bottom + _LINE, texts[1]), _text(right + 6, _MARGIN, texts[0], more=turn)]
        parts.append(_text(_MARGIN, _LINE, caption))
        yield "".join([*parts, "</svg>"])


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
        edges.append([*itertools.pairwise(itertools.accumulate(sizes, initial=_MARGIN))])
    return edges[0], edges[1]


def _block(grids: BlockGrids, position: tuple[int, ...], rows: Edge, columns: Edge, itemsize: int | None) -> str:
    """One block: a rectangle in the colour of its first worker, with the numbers of its workers and a tooltip."""
    workers, shape = grids.holders[position], grids.shape(position)
    (y, bottom), (x, right) = rows, columns
    width, height = right - x, bottom - y
    fill, dashed = COLOURS[workers[0] % len(COLOURS)], ""
    if 0 in shape:
        fill, dashed = "none", ' stroke-dasharray="3 2"'
    rectangle = (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}" '
        f'stroke="currentColor"{dashed}/>'
    )
    numbers = format_workers(workers)
    fits = len(numbers) * _LETTER <= width - 2 and height >= _LINE and 0 not in shape
    text = _text(x + width / 2, y + height / 2 + 4, numbers, _ink(fill), ' text-anchor="middle"') if fits else ""
    return f"<g><title>{escape(_tooltip(grids, position, itemsize))}</title>{rectangle}{text}</g>"


def _tooltip(grids: BlockGrids, position: tuple[int, ...], itemsize: int | None) -> str:
    """What a block is: all of its workers, their coordinates, its indices, and its bytes."""
    workers, shape = grids.holders[position], grids.shape(position)
    labels = [grids.labels(d)[k] for d, k in enumerate(position)]
    coordinates = ", ".join(first for first, _ in labels if first)
    text = f"worker{'s' * (len(workers) > 1)} {format_workers(workers, len(workers))}"
    text += f" ({coordinates})" if coordinates else ""
    if itemsize == 0:
        return text
    text += f": [{', '.join(indices for _, indices in labels)}], shape {shape}"
    if itemsize is not None:
        text += f", {_size(math.prod(shape) * itemsize)}"
    return text + (", empty" if 0 in shape else "")


def _length(grids: BlockGrids, d: int | None) -> str:
    """The length of a dimension, and the axes that split it."""
    if d is None:
        return ""
    names = () if grids.dims is None else grids.dims[d]
    return f"{sum(grids.cuts[d])}" + (f" over {', '.join(names)}" if names else "")


def _text(x: float, y: float, text: str, fill: str = "currentColor", more: str = "") -> str:
    return text and f'<text x="{x:.2f}" y="{y:.2f}" fill="{fill}"{more}>{escape(text)}</text>'


def _ink(fill: str) -> str:
    """Black or white, whichever is easier to read on a colour: by their contrast in WCAG 2."""
    parts = [int(fill[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#FFFFFF"
