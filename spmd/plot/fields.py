"""The values of an array, with its split drawn over them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.errors import DtypeError, LayoutError, describe
from spmd.layout import Layout, offsets
from spmd.layout_picture import format_workers
from spmd.plot.canvas import apart, new_axes, size_in_points
from spmd.representations.colours import colour_of
from spmd.tracebacks import api_boundary

__all__ = ["field"]

_WHERE = "spmd.plot.field"


@api_boundary
def field(
    array: Any,
    at: int | Sequence[int] | None = None,
    *,
    title: str | None = None,
    cmap: str = "cividis",
    vmin: float | None = None,
    vmax: float | None = None,
    aspect: str | float = "auto",
    ax: Any = None,
) -> Any:
    """Draw the values of an array of one dimension as a line, of two as an image, and where it is split.

    array: a global array, or one of NumPy, which has no split. at: with more than two dimensions, the index in each of
    the first ones, of which the picture shows the slice; by default the middle. title: by default the shape, the spec
    and the index. cmap: of Matplotlib; the default is read alike by people who cannot tell red from green. vmin,
    vmax: the values at the ends of the colours, or of the axis of a line; by default the least and the greatest of the
    array. Give both to pictures that are compared. aspect: of an image: "auto" fills the Axes, "equal" makes entries
    square, a number is the height of an entry over its width. ax: the Axes to draw on; by default of a new figure.
    Above and beside the picture stand the workers of each block, lines lie between blocks. Returns the Axes.
    Collective: all processes call it, and each gets the picture. Cost: the array, or the slice, to each process.
    Raises LayoutError for an array without dimensions, DtypeError for complex values and for what are no numbers,
    ImportError without Matplotlib: `pip install "spmd[plot]"`.

        >>> u = spmd.put(np.arange(12.0).reshape(4, 3), P("x"), spmd.Mesh(x=2))
        >>> ax = spmd.plot.field(u)
        >>> [line.get_ydata()[0] for line in ax.lines]  # between rows 1 and 2
        [1.5]
    """
    array = array if isinstance(array, PartitionedArray) else np.asarray(array)
    _check(array)
    index = _index(array.shape[:-2], at) if array.ndim > 2 else ()
    part = array[index] if index else array
    layout = part.layout if isinstance(part, PartitionedArray) else None
    values = part.numpy() if isinstance(part, PartitionedArray) else part
    values = values.astype(np.uint8) if values.dtype == bool else values
    ax = new_axes(_WHERE, ax, 6.0, 3.5 if values.ndim == 1 else 4.5)
    if values.ndim == 1:
        _line(ax, values, layout)
        ax.set_ylim(vmin, vmax)
    else:
        _image(ax, values, layout, {"cmap": cmap, "vmin": vmin, "vmax": vmax, "aspect": aspect}, array.ndim)
    _number_axes(ax, values)
    # Matplotlib raises the title above the workers; a small pad keeps it within a figure of the usual margins.
    ax.set_title(_title(array, index) if title is None else title, fontsize="medium", pad=4, parse_math=False)
    return ax


def _check(array: Any) -> None:
    if array.ndim == 0:
        raise LayoutError.at(
            _WHERE,
            argument="array",
            got=describe(array),
            need="an array of at least one dimension",
            mend="print(x): it is one number",
        )
    if np.dtype(array.dtype).kind not in "fiub":
        mend = "np.abs(x), np.real(x) or np.imag(x)" if np.dtype(array.dtype).kind == "c" else "x.astype(float)"
        raise DtypeError.at(_WHERE, argument="array", got=describe(array), need="real numbers", mend=mend)


def _index(lengths: tuple[int, ...], at: int | Sequence[int] | None) -> tuple[int, ...]:
    """The index of the slice that is shown."""
    given = () if at is None else (at,) if isinstance(at, int | np.integer) else tuple(at)
    index = tuple(n // 2 for n in lengths) if at is None else tuple(map(operator.index, given))
    if len(index) != len(lengths) or not all(-n <= i < n for i, n in zip(index, lengths, strict=True)):
        raise LayoutError.at(
            _WHERE,
            argument="at",
            got=repr(at) if at is not None else f"an array whose first dimensions have the lengths {lengths}",
            need=f"an index in each of the first dimensions, which have the lengths {lengths}",
            mend=f"at={tuple(n // 2 for n in lengths)}" if all(lengths) else "draw an array that is not empty",
        )
    return tuple(i % n for i, n in zip(index, lengths, strict=True))


def _title(array: Any, index: tuple[int, ...]) -> str:
    how = f"  {array.layout.lies}" if isinstance(array, PartitionedArray) else ""
    shown = f"\nslice [{', '.join([*map(str, index), ':', ':'])}]" if index else ""
    return f"{array.shape}{how}{shown}"


def _line(ax: Any, values: np.ndarray, layout: Layout | None) -> None:
    ax.plot(np.arange(len(values)), values, color="black", linewidth=1.2)
    ax.set_xlabel("index")
    ax.set_xlim(-0.5, max(1, len(values)) - 0.5)
    if layout is None:
        return
    at = offsets(layout.cuts[0])
    for k, (start, stop) in enumerate(itertools.pairwise(at)):
        if start < stop:
            ax.axvspan(start - 0.5, stop - 0.5, color=colour_of(_workers(layout, 0, k)[0]), alpha=0.25, linewidth=0)
    for edge in _inner(at):
        ax.axvline(edge - 0.5, color="0.35", linewidth=0.8, linestyle="--")
    _name_blocks(ax, layout, 0, "x")


def _number_axes(ax: Any, values: np.ndarray) -> None:
    """Whole numbers at the axes of indices; none for a dimension without entries."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    axes = [ax.xaxis] if values.ndim == 1 else [ax.yaxis, ax.xaxis]
    for axis, n in zip(axes, values.shape, strict=True):
        axis.set_major_locator(MaxNLocator(nbins=9, integer=True) if n else NullLocator())
    if not values.size:
        ax.text(0.5, 0.5, "no entries", transform=ax.transAxes, ha="center", va="center")


def _image(ax: Any, values: np.ndarray, layout: Layout | None, how: dict[str, Any], ndim: int) -> None:
    """how: keywords of `imshow`."""
    rows, columns = values.shape
    if values.size:
        image = ax.imshow(values, interpolation="nearest", **how)
        ax.figure.colorbar(image, ax=ax, pad=_room_for_workers(ax, layout))
    ax.set_xlim(-0.5, max(1, columns) - 0.5)
    ax.set_ylim(max(1, rows) - 0.5, -0.5)
    ax.set_xlabel(f"index in dimension {ndim - 1}")
    ax.set_ylabel(f"index in dimension {ndim - 2}")
    if layout is None:
        return
    from matplotlib import patheffects

    # A white line with a black rim can be seen on every colour.
    rim = [patheffects.withStroke(linewidth=2.4, foreground="black")]
    for edge in _inner(offsets(layout.cuts[0])):
        ax.axhline(edge - 0.5, color="white", linewidth=1.2, path_effects=rim)
    for edge in _inner(offsets(layout.cuts[1])):
        ax.axvline(edge - 0.5, color="white", linewidth=1.2, path_effects=rim)
    _name_blocks(ax, layout, 1, "x")
    _name_blocks(ax, layout, 0, "y")


def _room_for_workers(ax: Any, layout: Layout | None) -> float:
    """The room between an image and its colours, as a fraction of the width of the axes."""
    if layout is None or len(layout.cuts[0]) == 1:
        return 0.03
    letters = max(len(format_workers(_workers(layout, 0, k), 2)) for k in range(len(layout.cuts[0])))
    return min(0.4, (22 + 4.5 * letters) / size_in_points(ax)[0])


def _inner(at: Sequence[int]) -> list[int]:
    """Where one block ends and another begins."""
    return sorted({i for i in at if 0 < i < at[-1]})


def _workers(layout: Layout, d: int, k: int) -> list[int]:
    """The workers that hold block k of a dimension."""
    return sorted(w for place, workers in layout.holders.items() if place[d] == k for w in workers)


def _name_blocks(ax: Any, layout: Layout, d: int, side: str) -> None:
    """Name the workers of each block that has entries, above the picture or on its right."""
    at = offsets(layout.cuts[d])
    shown = [(k, start, stop) for k, (start, stop) in enumerate(itertools.pairwise(at)) if start < stop]
    if len(layout.cuts[d]) == 1 or not shown:
        return
    names = [format_workers(_workers(layout, d, k), 2) for k, _, _ in shown]
    middles = [(start + stop - 1) / 2 for _, start, stop in shown]
    # The room of a label in entries: letters are about 4.5 points wide and 9 high.
    points = size_in_points(ax)[side == "y"] / max(1, at[-1])
    kept = apart(middles, [(4.5 * len(name) + 9 if side == "x" else 9) / points for name in names])
    scale = ax.secondary_xaxis("top") if side == "x" else ax.secondary_yaxis("right")
    axis = scale.xaxis if side == "x" else scale.yaxis
    axis.set_ticks([middles[k] for k in kept], [names[k] for k in kept], fontsize="x-small")
    axis.set_tick_params(length=2)
    (scale.set_xlabel if side == "x" else scale.set_ylabel)("workers", fontsize="x-small")
