"""Pictures of layouts: right boxes, right workers, right ranges, in the space there is."""

from __future__ import annotations

import math
import re

import pytest

from spmd.layout import Layout, P
from spmd.layout_picture import side_by_side

MESH = {"data": 2, "model": 2}


def text(picture: str) -> str:
    """A picture as it is written in a test: without the lines around it."""
    return picture.strip("\n")


def test_rows():
    assert Layout((5, 8), P("data"), MESH).picture("w") == text(
        """
w (5, 8)  P('data')
       ┌──────────────┐
data=0 │ workers 0, 1 │
   0:3 │    (3, 8)    │
       ├──────────────┤
data=1 │ workers 2, 3 │
   3:5 │    (2, 8)    │
       └──────────────┘
"""
    )


def test_columns():
    assert Layout((3, 4, 9), P(None, None, "model"), MESH).picture() == text(
        """
(3, 4, 9)  P(None, None, 'model')
    model=0        model=1
      0:5            5:9
┌──────────────┬──────────────┐
│ workers 0, 2 │ workers 1, 3 │
│  (3, 4, 5)   │  (3, 4, 4)   │
└──────────────┴──────────────┘
"""
    )


def test_grid_in_ascii():
    assert Layout((1, 8), P("model", "data"), MESH).picture("a", ascii=True) == text(
        """
a (1, 8)  P('model', 'data')
             data=0         data=1
              0:4            4:8
        +--------------+--------------+
model=0 |   worker 0   |   worker 2   |
    0:1 |    (1, 4)    |    (1, 4)    |
        +--------------+--------------+
model=1 |   worker 1   |   worker 3   |
    1:1 | empty (0, 4) | empty (0, 4) |
        +--------------+--------------+
"""
    )


@pytest.mark.parametrize("axes", [MESH, {"x": 1}, {}])
def test_one_number(axes):
    workers = {4: "workers 0-3", 1: "worker 0"}[math.prod(axes.values())]
    lines = Layout((), P(), axes).picture("loss").splitlines()
    assert lines[0] == "loss ()  P()"
    assert [line.strip("│ ") for line in lines[2:4]] == [workers, "()"]
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("shape", "spec", "axes", "cuts"),
    [
        ((10,), P(("x", "y")), {"x": 2, "y": 3}, None),
        ((3,), P("x"), {"x": 5, "y": 2}, None),
        ((7, 4, 5, 3), P("x", None, "y", "z"), {"x": 2, "y": 3, "z": 2}, None),
        ((6, 7, 8, 9), P("w", "x", "y", "z"), {"w": 2, "x": 2, "y": 2, "z": 2}, None),
        ((7, 4, 5), P(None, "y"), {"x": 2, "y": 3, "z": 2}, None),
        ((10, 9), P("x", "y"), {"y": 2, "x": 2}, [(10, 0), (2, 7)]),
        ((40, 40), P("x", "y"), {"x": 8, "y": 16}, None),
        ((0, 2), P("x"), {"x": 2}, None),
    ],
)
@pytest.mark.parametrize("width", [44, 80, 1000])
def test_every_block_is_there_once(shape, spec, axes, cuts, width):
    layout = Layout(shape, spec, axes, cuts)
    picture = layout.picture(width=width)
    lines = picture.splitlines()[1:]
    assert max(map(len, lines)) <= width
    cells = [re.findall(r"[^│]+(?=│)", line[line.index("│") + 1 :]) for line in lines if "│" in line]
    pairs = [pair for who, what in zip(cells[::2], cells[1::2], strict=True) for pair in zip(who, what, strict=True)]
    shown = sorted((re.sub(r"workers?", "", who).strip(), what.strip()) for who, what in pairs)
    held: dict[tuple, list[int]] = {}
    for w in range(layout.size):
        held.setdefault(layout.positions(w), []).append(w)
    assert len(shown) == len(held) == math.prod(len(c) for c in layout.cuts)
    for group in held.values():
        what = str(layout.block_shape(group[0]))
        assert sum(numbers(who) == group and what in shape for who, shape in shown) == 1
    for d, names in enumerate(layout.spec.dims):
        for w in range(layout.size) if names else ():
            start, stop = layout.boxes[w][d]
            assert f"{start}:{stop}" in picture


def numbers(who: str) -> list[int]:
    """0-2, 5 as the numbers it stands for."""
    ranges = [[int(n) for n in part.split("-")] for part in who.split(", ")]
    return [w for r in ranges for w in range(r[0], r[-1] + 1)]


def test_copies_that_vary_are_told_from_those_of_one_value():
    axes = {"x": 3}
    for layout, says in (
        (Layout((5,), P(), axes), "(5,)  P()"),
        (Layout((5,), P(), axes, copies="varying"), "(5,)  P(), copies vary"),
        (Layout((5,), P("x"), axes, copies="varying"), "(5,)  P('x')"),
        (Layout.grid((5,), (1, 3), axes), "(5,)  grid (1,), copies vary"),
        (Layout.grid((5,), (1, 3), axes, copies="invariant"), "(5,)  grid (1,)"),
    ):
        assert layout.picture().splitlines()[0] == says


def test_many_groups_of_workers_are_shortened():
    picture = Layout((4,), P("y"), {"x": 32, "y": 2}).picture()
    assert "workers 0, 2, ..., 62" in picture
    assert "workers 1, 3, ..., 63" in picture


def test_beside():
    left, right = "ab\nc", "d\nef\ng"
    assert side_by_side([left, right], width=7) == "ab   d\nc    ef\n     g"
    assert side_by_side([left, right], width=6) == "ab\nc\n\nd\nef\ng"
    assert side_by_side([]) == ""
