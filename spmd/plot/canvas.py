"""What the pictures share: new axes, texts that fit, legends beside the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.errors import message

__all__ = ["apart", "font_that_fits", "legend_beside", "matplotlib_of", "new_axes", "pixels_per_unit", "size_in_points"]

_LARGEST, _SMALLEST = 10.0, 4.0
"""Sizes of fonts in points. A text that does not fit by the smallest is left out."""


def matplotlib_of(where: str) -> Any:
    """The package matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            message(
                where,
                got="no package matplotlib",
                need="the package matplotlib, which draws",
                mend='pip install "spmd[plot]"',
            )
        ) from error
    return matplotlib


def new_axes(where: str, ax: Any, width: float, height: float) -> Any:
    """ax, or the Axes of a new figure of this size in inches, which notebooks and `plt.show` display."""
    matplotlib_of(where)
    if ax is not None:
        return ax
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def pixels_per_unit(ax: Any) -> tuple[float, float]:
    """How many pixels one unit of the data has, across and down, as the figure now is."""
    ax.figure.figure.draw_without_rendering()  # of the whole figure: the layout and the aspect are settled here
    (x0, y0), (x1, y1) = ax.transData.transform([(0.0, 0.0), (1.0, 1.0)])
    return abs(x1 - x0), abs(y1 - y0)


def size_in_points(ax: Any) -> tuple[float, float]:
    """The width and height of the axes."""
    ax.apply_aspect()
    box = ax.get_window_extent()
    return box.width * 72.0 / ax.figure.dpi, box.height * 72.0 / ax.figure.dpi


def font_that_fits(ax: Any, letters: int, width: float, height: float, scale: tuple[float, float]) -> float | None:
    """The size in points by which so many letters fit into width × height units; None if no readable one does."""
    points = 72.0 / ax.figure.dpi
    across = width * scale[0] * points * 0.9 / (0.62 * letters)
    down = height * scale[1] * points * 0.85 / 1.2
    size = min(across, down, _LARGEST)
    return size if size >= _SMALLEST else None


def legend_beside(ax: Any, handles: Sequence[Any], title: str = "") -> None:
    """A legend on the right of the axes, so that it hides no data."""
    if handles:
        legend = ax.legend(
            handles=handles,
            title=title or None,
            loc="upper left",
            bbox_to_anchor=(1.01, 1.0),
            borderaxespad=0.0,
            frameon=False,
            fontsize="small",
            title_fontsize="small",
        )
        for text in legend.get_texts():
            text.set_parse_math(False)


def apart(places: Sequence[float], lengths: Sequence[float]) -> list[int]:
    """Which labels to write, so that none touches the one before: those at ascending places, of these lengths."""
    kept: list[int] = []
    for k, (place, length) in enumerate(zip(places, lengths, strict=True)):
        if not kept or place - places[kept[-1]] >= (length + lengths[kept[-1]]) / 2:
            kept.append(k)
    return kept
