"""How the blocks of an array lie on a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.array import PartitionedArray
from spmd.errors import SpecError, describe
from spmd.layout import Layout, Spec
from spmd.layout_picture import BlockGrids, format_workers
from spmd.mesh import Mesh, current_mesh
from spmd.plot.canvas import font_that_fits, new_axes, pixels_per_unit
from spmd.representations.colours import colour_of, ink
from spmd.representations.layouts import mesh_grids
from spmd.representations.panels import LINE, Panel, panels
from spmd.tracebacks import api_boundary

__all__ = ["layout"]

_DPI = 100.0
_GAP = 24.0


@api_boundary
def layout(
    what: Any,
    shape: int | Sequence[int] | None = None,
    mesh: Mesh | None = None,
    *,
    title: str | None = None,
    ax: Any = None,
) -> Any:
    """Draw the blocks of an array, each in the colour of its first worker with the numbers of its workers.

    what: a global array, a `Layout`, a mesh; or a spec, with the shape of an array. mesh: for a spec; by default that
    of `with mesh:`. title: above the picture; by default the shape and the spec. ax: the Axes to draw on; by default
    those of a new figure. Blocks are to scale; empty ones are narrow and dashed. With more than two split dimensions
    there is a picture for each block of the first ones. A number that would not fit into its block is left out.
    Returns the Axes. Cost: nothing is read or sent; any process may call it alone.
    Raises SpecError for other things, ImportError without Matplotlib: `pip install "spmd[plot]"`.

        >>> ax = spmd.plot.layout(P("x", "y"), shape=(7, 5), mesh=spmd.Mesh(x=2, y=3))
        >>> [text.get_text() for text in ax.texts][:6]
        ['0', '1', '2', '3', '4', '5']
    """
    where = "spmd.plot.layout"
    grids, named = _grids_of(where, what, shape, mesh)
    drawn = [*panels(grids)]
    places, width, height = _places(drawn)
    ax = new_axes(where, ax, max(2.5, width / _DPI), max(2.0, height / _DPI + 0.4))
    ax.set_xlim(0, width)
    ax.set_ylim(height, 0)
    ax.set_aspect("equal")
    ax.set_axis_off()
    ax.set_title(named if title is None else title, fontsize="medium", parse_math=False)
    scale = pixels_per_unit(ax)
    for panel, (x, y) in zip(drawn, places, strict=True):
        _draw(ax, panel, x, y, scale)
    return ax


def _grids_of(where: str, what: Any, shape: Any, mesh: Mesh | None) -> tuple[BlockGrids, str]:
    """The blocks to draw, and the title."""
    if isinstance(what, Mesh):
        return mesh_grids(what.axes), repr(what)
    if isinstance(what, PartitionedArray):
        what = what.layout
    if isinstance(what, Spec) and not isinstance(what, Layout):
        mesh = mesh or current_mesh()
        if shape is None or mesh is None:
            raise SpecError.at(
                where,
                argument="what",
                got=f"{what} without {'a shape' if shape is None else 'a mesh'}",
                need="the shape of the array and the mesh, to lay it out",
                mend=f"spmd.plot.layout({what}, shape=(8, 6), mesh=mesh)",
            )
        lengths = (shape,) if isinstance(shape, int) else tuple(shape)
        what.check(mesh.axes, where, "what", len(lengths))
        what = mesh.layout(lengths, what, where)
    if not isinstance(what, Layout):
        raise SpecError.at(
            where,
            argument="what",
            got=describe(what),
            need="a global array, a layout, a mesh, or a spec with a shape",
            mend="spmd.plot.layout(spmd.put(x, spec)) draws an array that is split so",
        )
    return what.block_grids, f"{what.shape}  {what.lies}"


def _places(drawn: Sequence[Panel]) -> tuple[list[tuple[float, float]], float, float]:
    """Where each panel goes, in rows that make about a square, and the width and height of all."""
    wide, high = max(p.width for p in drawn) + _GAP, max(p.height for p in drawn) + _GAP
    columns = max(1, min(len(drawn), round((len(drawn) * high / wide) ** 0.5 * 1.3)))
    places = [(k % columns * wide, k // columns * high) for k in range(len(drawn))]
    return places, wide * columns, high * -(-len(drawn) // columns)


def _draw(ax: Any, panel: Panel, x: float, y: float, scale: tuple[float, float]) -> None:
    from matplotlib.patches import Rectangle

    letters = max(len(format_workers(block.workers)) for block in panel.rectangles)
    for block in panel.rectangles:
        fill = "none" if block.empty else colour_of(block.workers[0])
        corner = x + block.x, y + block.y
        style = "--" if block.empty else "-"
        edge: dict[str, Any] = {"edgecolor": "0.35", "linewidth": 0.8, "linestyle": style}
        ax.add_patch(Rectangle(corner, block.width, block.height, facecolor=fill, **edge))
        text = format_workers(block.workers)
        size = None if block.empty else font_that_fits(ax, letters, block.width, block.height, scale)
        if size is not None:
            middle = corner[0] + block.width / 2, corner[1] + block.height / 2
            ax.text(*middle, text, ha="center", va="center", color=ink(fill), fontsize=size)
    left, top = panel.rectangles[0].x, panel.rectangles[0].y
    points = LINE * 0.75 * scale[0] * 72.0 / ax.figure.dpi
    texts: dict[str, Any] = {"fontsize": max(4.0, min(9.0, points)), "parse_math": False}
    ax.text(x + left, y + panel.bottom + 3, panel.across, va="top", **texts)
    ax.text(x + panel.right + 4, y + top, panel.down, va="top", rotation=270, **texts)
    if panel.caption:
        ax.text(x + left, y + top - 3, panel.caption, va="bottom", **texts)
