"""What notebooks show of layouts, arrays and meshes: well-formed, to scale, every block once, every worker named."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

import spmd
from spmd import Layout, P
from spmd.representations.colours import COLOURS, ink

SVG = "{http://www.w3.org/2000/svg}"
XY, XYZ = {"x": 2, "y": 3}, {"x": 2, "y": 3, "z": 2}

LAYOUTS = {
    "rows": Layout((7, 5), P("x"), XY),
    "columns": Layout((7, 5), P(None, "y"), XY),
    "both": Layout((7, 5), P("x", "y"), XY),
    "one dimension over two axes": Layout((100,), P(("x", "y")), XY),
    "uneven": Layout((10, 9), P("x", "y"), XY, [(3, 7), (2, 1, 6)]),
    "empty blocks": Layout((10, 9), P("x", "y"), XY, [(10, 0), (2, 0, 7)]),
    "no entries": Layout((0, 3), P("x"), XY),
    "fewer rows than workers": Layout((3, 4), P(("y", "x")), XY),
    "copies": Layout((4, 4), P(), XY),
    "copies that vary": Layout((4, 4), P("y"), XY, copies="varying"),
    "one number": Layout((), P(), XY),
    "one worker": Layout((3, 2), P(), {}),
    "slabs": Layout((7, 4, 5, 3), P("x", None, "y", "z"), XYZ),
    "slabs of slabs": Layout((6, 7, 8, 9), P("w", "x", "y", "z"), {"w": 2, "x": 2, "y": 2, "z": 2}),
    "middle of three": Layout((7, 4, 5), P(None, "y"), XYZ),
    "grid": Layout.grid((8, 9), (2, 2), {"x": 8}, [1, 3, 6, 7]),
    "grid of numbers": Layout.grid((), (), {"x": 3}, [2]),
    "many": Layout((40, 40), P("x", "y"), {"x": 8, "y": 16}),
    "long": Layout((1_000_000, 3), P("x"), {"x": 16}),
}


def parsed(html: str) -> ElementTree.Element:
    """The elements of a page. Names of HTML entities are errors here: XML has few of them."""
    return ElementTree.fromstring(html)


def pictures(page: ElementTree.Element) -> list[ElementTree.Element]:
    return list(page.iter(SVG + "svg"))


def blocks(svg: ElementTree.Element) -> list[tuple[str, dict[str, str], tuple[float, ...]]]:
    """For each block its tooltip, its attributes, and x, y, width and height."""
    found = []
    for group in svg.iter(SVG + "g"):
        title, rect = group.find(SVG + "title"), group.find(SVG + "rect")
        assert title is not None
        assert rect is not None
        box = tuple(float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        found.append((title.text or "", rect.attrib, box))
    return found


def table(page: ElementTree.Element) -> dict[str, str]:
    rows = page.iter("tr")
    return {row.findtext("th", ""): row.findtext("td", "") for row in rows}


def numbers(text: str) -> list[int]:
    """0-2, 5 as the numbers it stands for."""
    ranges = [[int(n) for n in part.split("-")] for part in text.split(", ")]
    return [w for r in ranges for w in range(r[0], r[-1] + 1)]


def workers_of(tooltip: str) -> tuple[int, ...]:
    return tuple(numbers(re.match(r"workers? ([\d\-, ]*\d)", tooltip)[1]))  # type: ignore[index]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_block_is_there_once_with_its_workers(name):
    layout = LAYOUTS[name]
    shown = [block for svg in pictures(parsed(layout._repr_html_())) for block in blocks(svg)]
    assert len(shown) == math.prod(len(cut) for cut in layout.cuts) == len(layout.holders)
    assert sorted(workers_of(tooltip) for tooltip, _, _ in shown) == sorted(layout.holders.values())
    for tooltip, attributes, (_, _, width, height) in shown:
        first, *_ = workers = workers_of(tooltip)
        indices = ", ".join(f"{start}:{stop}" for start, stop in layout.boxes[first])
        assert f"[{indices}], shape {layout.block_shape(first)}" in tooltip
        assert tooltip.startswith("workers " if len(workers) > 1 else "worker ")
        for d, names in enumerate(layout.spec.dims if layout.spec is not None else ()):
            for n in names:
                assert f"{n}={layout.coordinates(first)[n]}" in tooltip, d
        empty = 0 in layout.block_shape(first)
        assert tooltip.endswith("empty") == empty
        assert attributes["fill"] == ("none" if empty else COLOURS[first % len(COLOURS)])
        assert min(width, height) > 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_are_to_scale_and_fill_their_picture(name):
    layout = LAYOUTS[name]
    for svg in pictures(parsed(layout._repr_html_())):
        shown = [(layout.block_shape(workers_of(tooltip)[0]), box) for tooltip, _, box in blocks(svg)]
        for (_, (x, y, width, height)), (_, (x2, y2, width2, height2)) in itertools.combinations(shown, 2):
            apart = x + width <= x2 + 0.02 or x2 + width2 <= x + 0.02
            assert apart or y + height <= y2 + 0.02 or y2 + height2 <= y + 0.02, "blocks overlap"
        full = [(math.prod(shape), width * height) for shape, (_, _, width, height) in shown if 0 not in shape]
        for entries, area in full:
            assert area / sum(a for _, a in full) == pytest.approx(entries / sum(n for n, _ in full), rel=0.02)
        right = max(x + width for _, (x, _, width, _) in shown)
        bottom = max(y + height for _, (_, y, _, height) in shown)
        left, top = (min(box[k] for _, box in shown) for k in (0, 1))
        everything = sum(width * height for _, (_, _, width, height) in shown)
        assert everything == pytest.approx((right - left) * (bottom - top), rel=0.01)
        for side, end in (("width", right), ("height", bottom)):
            assert 0 < end < float(svg.attrib[side]) < 2000


def test_the_picture_says_what_it_shows():
    for layout in LAYOUTS.values():
        page = parsed(layout._repr_html_())
        slabs = pictures(page)
        for svg in slabs:
            label = svg.attrib["aria-label"]
            assert svg.attrib["role"] == "img"
            assert svg.findtext(SVG + "title") == label
            assert f"shape {layout.shape}" in label
            assert f"on {layout.size} worker" in label
        assert len({svg.attrib["aria-label"] for svg in slabs}) == len(slabs)
    svg = pictures(parsed(LAYOUTS["both"]._repr_html_()))[0]
    texts = [element.text for element in svg.iter(SVG + "text")]
    assert texts == ["0", "1", "2", "3", "4", "5", "5 over y", "7 over x"]


def test_workers_without_entries_are_named():
    assert table(parsed(LAYOUTS["grid"]._repr_html_()))["workers"] == "8, of which 0, 2, 4, 5 hold no entries"
    assert table(parsed(LAYOUTS["empty blocks"]._repr_html_()))["workers"] == "6, of which 1, 3-5 hold no entries"
    assert table(parsed(LAYOUTS["both"]._repr_html_()))["workers"] == "6"


def test_the_table_of_an_array():
    with spmd.Mesh(x=2, y=3, transport="local") as mesh:
        x = spmd.put(np.zeros((300, 5), np.float32), P("x"))
        assert table(parsed(x._repr_html_())) == {
            "shape": "(300, 5)",
            "spec": "P('x')",
            "dtype": "float32",
            "mesh": "Mesh(x=2, y=3), transport local, device cpu",
            "this process": "6 of 6 workers",
            "bytes": "5.86 KiB",
            "bytes per worker": "at most 2.93 KiB, of all 17.6 KiB",
            "workers": "6",
        }
        (svg,) = pictures(parsed(x._repr_html_()))
        assert [tooltip for tooltip, _, _ in blocks(svg)] == [
            "workers 0-2 (x=0): [0:150, 0:5], shape (150, 5), 2.93 KiB",
            "workers 3-5 (x=1): [150:300, 0:5], shape (150, 5), 2.93 KiB",
        ]
        grid = Layout.grid((4,), (2,), mesh.axes, [1, 4])
        assert table(parsed(spmd.put(np.ones(4), grid)._repr_html_()))["layout"] == "grid (2,)"


def test_an_array_shows_no_data_and_needs_none(monkeypatch):
    x = spmd.put(np.ones((4, 3)), P("x"), spmd.Mesh(x=2, transport="local"))
    before = x._repr_html_()
    x.blocks = dict.fromkeys(x.blocks)  # no block can be read
    monkeypatch.setattr(type(x.mesh.transport), "share", None)
    monkeypatch.setattr(type(x.mesh.transport), "run", None)
    assert x._repr_html_() == before


def test_an_array_that_was_given_away():
    with spmd.Mesh(x=2):
        optimizer = spmd.optim.sgd(0.1)
        w = spmd.put(np.ones(4), P("x"))
        optimizer.update(w, optimizer.init(w), w, donate=True)
        assert "given away" in w._repr_html_()
        parsed(w._repr_html_())


def test_a_mesh():
    mesh = spmd.Mesh(data=2, model=3)
    page = parsed(mesh._repr_html_())
    assert table(page) == {
        "axes": "data: 2, model: 3",
        "transport": "to be chosen at first use",
        "device": "cpu",
        "workers": "6",
    }
    assert mesh._transport is None, "to show a mesh chose its transport"
    (svg,) = pictures(page)
    assert [tooltip for tooltip, _, _ in blocks(svg)] == [
        f"worker {w} (data={w // 3}, model={w % 3})" for w in range(6)
    ]
    assert mesh.local_workers
    assert table(parsed(mesh._repr_html_()))["transport"] == "local"
    for sides in ({}, {"x": 1}, {"a": 2, "b": 3, "c": 2, "d": 2}):
        mesh = spmd.Mesh(**sides)
        shown = [tooltip for svg in pictures(parsed(mesh._repr_html_())) for tooltip, _, _ in blocks(svg)]
        assert [re.match(r"worker \d+", tooltip)[0] for tooltip in shown] == [f"worker {w}" for w in range(mesh.size)]  # type: ignore[index]


def test_names_of_axes_are_escaped():
    name = '<script>alert("x")</script>&\''
    axes = {name: 2}
    mesh = spmd.make_mesh((2,), (name,), transport="local")
    for html in (
        Layout((4, 3), P(name), axes)._repr_html_(),
        mesh._repr_html_(),
        spmd.zeros((4, 3), spec=P(name), mesh=mesh)._repr_html_(),
        Layout((4,), P(name), axes).report("<b>", [("<i>", "&amp;")]).html(),
    ):
        assert "<script" not in html
        assert "<b>" not in html
        assert "<i>" not in html
        assert any(name in text for text in parsed(html).itertext())


@pytest.mark.parametrize("colour", COLOURS)
def test_numbers_can_be_read_on_each_colour(colour):
    def luminance(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted((luminance(colour), luminance(ink(colour))))
    assert (light + 0.05) / (dark + 0.05) >= 4.5
