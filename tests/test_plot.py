"""Pictures: every block and track is drawn once, labels do not collide, legends stand beside the data."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import spmd
from spmd import Layout, P
from spmd.layout_picture import format_workers
from spmd.ledger import Ledger
from spmd.plot.canvas import pixels_per_unit
from spmd.representations.colours import COLOURS

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")
XY = {"x": 2, "y": 3}

LAYOUTS = {
    "one worker": Layout((3, 2), P(), {}),
    "both": Layout((7, 5), P("x", "y"), XY),
    "columns": Layout((7, 5), P(None, "y"), XY),
    "empty blocks": Layout((10, 9), P("x", "y"), XY, [(10, 0), (2, 0, 7)]),
    "no entries": Layout((0, 3), P("x"), XY),
    "one number": Layout((), P(), XY),
    "slabs": Layout((7, 4, 5, 3), P("x", None, "y", "z"), {**XY, "z": 2}),
    "grid": Layout.grid((8, 9), (2, 2), {"x": 8}, [1, 3, 6, 7]),
    "64 in a row": Layout((64,), P("x"), {"x": 64}),
    "64": Layout((40, 64), P("x", "y"), {"x": 8, "y": 8}),
    "long": Layout((1_000_000, 3), P("x"), {"x": 16}),
}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def boxes(ax, texts) -> list:
    """Where texts are, in pixels."""
    ax.figure.draw_without_rendering()
    return [t.get_window_extent() for t in texts if t.get_text() and t.get_visible()]


def collide(found) -> bool:
    return any(
        a.x0 < b.x1 - 1 and b.x0 < a.x1 - 1 and a.y0 < b.y1 - 1 and b.y0 < a.y1 - 1
        for a, b in itertools.combinations(found, 2)
    )


def shown_ticks(ax) -> list:
    """The labels at ticks within the limits."""
    ax.figure.draw_without_rendering()
    found = []
    for a in (ax, *ax.child_axes):
        for axis in (a.xaxis, a.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high and t.label1.get_visible()]
            found += [t.label2 for t in axis.get_major_ticks() if low <= t.get_loc() <= high and t.label2.get_visible()]
    return [label for label in found if label.get_text()]


# layout


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_block_is_drawn_once_in_the_colour_of_its_first_worker(name):
    layout = LAYOUTS[name]
    ax = spmd.plot.layout(layout)
    full = [p for p in ax.patches if p.get_linestyle() == "-"]
    holders = dict(layout.holders)
    empty = [place for place in holders if 0 in layout.block_shape(holders[place][0])]
    assert len(ax.patches) == len(holders)
    assert len(full) == len(holders) - len(empty)
    wanted = sorted(COLOURS[w[0] % len(COLOURS)] for place, w in holders.items() if place not in empty)
    assert sorted(matplotlib.colors.to_hex(p.get_facecolor()).upper() for p in full) == wanted
    texts = {t.get_text() for t in ax.texts}
    assert {format_workers(w) for place, w in holders.items() if place not in empty} <= texts
    assert ax.get_title() == f"{layout.shape}  {layout.lies}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_texts_of_a_layout_do_not_collide_and_numbers_stay_in_their_blocks(name):
    ax = spmd.plot.layout(LAYOUTS[name])
    assert not collide(boxes(ax, [*ax.texts, ax.title]))
    patches = [p.get_window_extent() for p in ax.patches]
    for text in ax.texts:
        if re.fullmatch(r"[\d, \-]+", text.get_text()) and text.get_ha() == "center":
            box = text.get_window_extent()
            assert any(p.x0 <= box.x0 and box.x1 <= p.x1 and p.y0 <= box.y0 and box.y1 <= p.y1 for p in patches)
    for box in boxes(ax, [*ax.texts, ax.title]):
        assert box.x0 >= 0
        assert box.x1 <= ax.figure.bbox.x1 + 1, "a text is cut off"


def test_blocks_of_a_layout_are_to_scale():
    ax = spmd.plot.layout(LAYOUTS["both"])
    areas = [p.get_width() * p.get_height() for p in ax.patches]
    sizes = [math.prod(LAYOUTS["both"].block_shape(w)) for w in range(6)]
    np.testing.assert_allclose(np.divide(areas, sum(areas)), np.divide(sizes, sum(sizes)))


def test_what_a_layout_is_drawn_of():
    mesh = spmd.Mesh(**XY)
    x = spmd.put(np.zeros((7, 5)), P("x", "y"), mesh)
    texts = [[t.get_text() for t in spmd.plot.layout(LAYOUTS["both"]).texts]]
    texts.append([t.get_text() for t in spmd.plot.layout(x).texts])
    texts.append([t.get_text() for t in spmd.plot.layout(P("x", "y"), (7, 5), mesh).texts])
    with mesh:
        texts.append([t.get_text() for t in spmd.plot.layout(P("x", "y"), (7, 5)).texts])
    assert all(t == texts[0] for t in texts)
    assert [t.get_text() for t in spmd.plot.layout(mesh).texts] == [*"012345", "3 over y", "2 over x"]
    assert spmd.plot.layout(P("x"), 4, mesh).get_title() == "(4,)  P('x')"


def test_a_layout_on_axes_that_are_given():
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(6, 2.5))
    assert spmd.plot.layout(LAYOUTS["both"], ax=left, title="left") is left
    assert spmd.plot.layout(LAYOUTS["64"], ax=right) is right
    assert left.get_title() == "left"
    assert len(figure.axes) == 2
    assert not collide(boxes(right, right.texts))


def test_names_of_axes_are_no_formulas():
    mesh = spmd.make_mesh((2,), ("$\\frac$",))
    x = spmd.put(np.ones((4, 3)), P("$\\frac$"), mesh)
    for ax in (spmd.plot.layout(x), spmd.plot.field(x)):
        ax.figure.draw_without_rendering()


# field


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_a_line_shows_its_values_and_where_it_is_split(n):
    rng = np.random.default_rng(n)
    values = rng.normal(size=100)
    x = spmd.put(values, P("x"), spmd.Mesh(x=n))
    ax = spmd.plot.field(x)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), values)
    edges = [line.get_xdata()[0] for line in ax.lines[1:]]
    assert edges == [i - 0.5 for i in np.cumsum(x.layout.cuts[0])[:-1]]
    assert not collide(boxes(ax, shown_ticks(ax)))
    names = [t.get_text() for t in ax.child_axes[0].xaxis.get_ticklabels()] if n > 1 else []
    assert names[:1] == ["0"] * (n > 1)
    if n <= 8:
        assert names == [str(w) for w in range(n)] * (n > 1)


@pytest.mark.parametrize(
    ("axes", "cuts"),
    [
        ({"x": 2, "y": 3}, None),
        ({"x": 8, "y": 8}, None),
        ({"x": 64, "y": 1}, None),
        ({"x": 1, "y": 64}, None),
        ({"x": 2, "y": 3}, [(40, 0), (20, 0, 40)]),
        ({"x": 3, "y": 2}, [(0, 0, 40), (1, 59)]),
    ],
)
def test_an_image_shows_its_values_and_where_it_is_split(axes, cuts):
    values = np.random.default_rng(1).normal(size=(40, 60))
    layout = Layout((40, 60), P("x", "y"), axes, cuts)
    ax = spmd.plot.field(spmd.put(values, layout, spmd.Mesh(**axes)))
    np.testing.assert_array_equal(ax.images[0].get_array(), values)
    rows = sorted(line.get_ydata()[0] for line in ax.lines if line.get_ydata()[0] == line.get_ydata()[1])
    columns = sorted(line.get_xdata()[0] for line in ax.lines if line.get_xdata()[0] == line.get_xdata()[1])
    for edges, cut in ((rows, layout.cuts[0]), (columns, layout.cuts[1])):
        assert edges == sorted({i - 0.5 for i in np.cumsum(cut) if 0 < i < sum(cut)})
    assert not collide(boxes(ax, [*shown_ticks(ax), ax.title, ax.xaxis.label, ax.yaxis.label]))


def test_pictures_that_are_compared_share_their_colours_and_their_aspect():
    mesh = spmd.Mesh(x=2, y=3)
    found = [spmd.put(factor * np.arange(48.0).reshape(6, 8), P("x", "y"), mesh) for factor in (1, 2)]
    for x, ax in zip(found, pyplot.subplots(1, 2, figsize=(9, 5))[1], strict=True):
        spmd.plot.field(x, vmin=-1, vmax=50, aspect="equal", ax=ax)
        assert ax.images[0].get_clim() == (-1, 50)
        assert not collide(boxes(ax, [*shown_ticks(ax), ax.title]))
        across, down = pixels_per_unit(ax)
        assert across == pytest.approx(down)
    line = spmd.plot.field(found[0][0], vmax=50)
    assert line.get_ylim()[1] == 50
    assert line.get_ylim()[0] < 0, "the lower end is that of the values"


@pytest.mark.parametrize("size", [(6.4, 4.8), (10, 5)])
@pytest.mark.parametrize("spec", [P("x"), P(None, "y"), P("x", "y")], ids=str)
def test_a_title_is_within_a_figure_of_the_usual_margins(size, spec):
    figure, (ax, _) = pyplot.subplots(1, 2, figsize=size)
    spmd.plot.field(spmd.put(np.ones((30, 23)), spec, spmd.Mesh(x=2, y=3)), ax=ax)
    (title,) = boxes(ax, [ax.title])
    assert title.y1 <= figure.bbox.y1
    assert not collide([title, *boxes(ax, [label for a in ax.child_axes for label in (a.xaxis.label, a.yaxis.label)])])
    colours = figure.axes[-1].get_window_extent()
    assert all(box.x1 < colours.x0 for a in ax.child_axes for box in boxes(ax, [a.yaxis.label]))


def test_workers_are_abbreviated_where_that_is_shorter():
    assert format_workers([0, 2, 4], 2) == "0, 2, 4"
    assert format_workers([0, 20, 40, 60], 2) == "0, 20, 40, 60"
    assert format_workers([0, 20, 400, 402, 600], 2) == "0, 20, ..., 600"
    assert format_workers(range(0, 20, 2), 2) == "0, 2, ..., 18"
    assert format_workers([0, 1, 2, 5], 1) == "0-2, 5"


def test_slices_of_more_dimensions():
    values = np.random.default_rng(2).normal(size=(5, 4, 6, 7))
    x = spmd.put(values, P("z", None, "x"), spmd.Mesh(z=2, x=3))
    ax = spmd.plot.field(x)
    np.testing.assert_array_equal(ax.images[0].get_array(), values[2, 2])
    assert ax.get_title().endswith("slice [2, 2, :, :]")
    np.testing.assert_array_equal(spmd.plot.field(x, at=(-1, 3)).images[0].get_array(), values[-1, 3])
    ax = spmd.plot.field(values[0], at=1)
    np.testing.assert_array_equal(ax.images[0].get_array(), values[0, 1])
    assert not ax.child_axes, "an array of NumPy is not split"


def test_fields_without_entries_and_of_truth_values():
    for shape in [(0,), (0, 4), (4, 0), (0, 0)]:
        ax = spmd.plot.field(spmd.put(np.ones(shape), P("x"), spmd.Mesh(x=2)))
        assert [t.get_text() for t in ax.texts] == ["no entries"]
        ax.figure.draw_without_rendering()
    ax = spmd.plot.field(spmd.put(np.eye(4) > 0, P("x"), spmd.Mesh(x=2)))
    np.testing.assert_array_equal(ax.images[0].get_array(), np.eye(4))


# ledger


def counted(lines: int = 1) -> Ledger:
    """A ledger of a map that sums and gathers, and of its gradient."""
    namespace = {"spmd": spmd, "np": np}
    source = "def body(x, w):\n    y = spmd.all_gather(x @ w, 'x', tiled=True)\n"
    source += "    y = y + spmd.psum(y[:1], 'x').sum()\n" * lines + "    return spmd.psum(np.sum(y**2), 'x')\n"
    exec(source, namespace)
    f = spmd.map(namespace["body"], (P("x"), P()), P())
    with spmd.Mesh(x=4), spmd.ledger() as log:
        spmd.grad(lambda w: f(np.ones((7, 3)), w))(np.ones((3, 3)))
    return log


def test_a_ledger_has_a_bar_for_each_line_that_sends():
    log = counted()
    ax = spmd.plot.ledger(log)
    rows = [row for row in log.rows() if row.bytes]
    assert sorted(p.get_width() for p in ax.patches) == sorted(row.bytes for row in rows)
    assert {p.get_hatch() for p in ax.patches} == {None, "////"}
    wanted = {f"{row.line.rpartition('/')[2]}\n{row.operator} over x" for row in rows}
    assert {t.get_text() for t in ax.get_yticklabels()} == wanted
    assert f" in {log.messages} messages" in ax.get_title()
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["forward", "backward"]


@pytest.mark.parametrize("lines", [1, 6, 40])
def test_texts_of_a_ledger_do_not_collide(lines):
    ax = spmd.plot.ledger(counted(lines))
    assert not collide(boxes(ax, [*shown_ticks(ax), *ax.texts, ax.title]))
    frame = ax.get_window_extent()
    assert all(box.x1 <= frame.x1 for box in boxes(ax, ax.texts))
    assert ax.get_legend().get_window_extent().x0 >= frame.x1


def test_a_ledger_of_many_lines_sums_the_rest():
    log = counted(40)
    ax = spmd.plot.ledger(log, most=5)
    assert len(ax.get_yticks()) == 5
    assert ax.get_yticklabels()[-1].get_text().endswith(" others")
    assert sum(p.get_width() for p in ax.patches) == log.bytes


def test_a_ledger_of_nothing():
    with spmd.ledger() as log:
        pass
    ax = spmd.plot.ledger(log)
    assert [t.get_text() for t in ax.texts] == ["nothing is sent"]
    ax.figure.draw_without_rendering()


# timeline


def events(workers: int, calls: int = 12) -> list[dict]:
    """A trace as spmd.profile writes it."""
    rng = np.random.default_rng(workers)
    found: list[dict] = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "process 0, host"}}]
    for w in range(workers):
        place = {"pid": 0, "tid": w + 1}
        found.append({"ph": "M", "name": "thread_name", **place, "args": {"name": f"worker {w} (x={w})"}})
        found.append({"ph": "X", "cat": "map", "name": "step", **place, "ts": 10.0, "dur": 9e3, "args": {"wait_us": 3}})
        start = 100.0
        for k in range(calls):
            length = float(rng.uniform(100, 600))
            name = ("spmd.psum", "spmd.shift", "spmd.halo_exchange")[k % 3]
            args = {"wait_us": length * float(rng.uniform()), "bytes": 8}
            found.append(
                {"ph": "X", "cat": "collective", "name": name, **place, "ts": start, "dur": length, "args": args}
            )
            start += length + 10
        found.append({"ph": "C", "name": "memory", **place, "ts": start, "args": {"bytes": 3}})
    return found


@pytest.mark.parametrize("workers", [1, 3, 8, 64])
def test_a_timeline_has_a_row_for_each_worker(workers):
    trace = events(workers)
    ax = spmd.plot.timeline({"traceEvents": trace}, title="steps")
    bars = [path.get_extents() for c in ax.collections if c.get_hatch() is None for path in c.get_paths()]
    spans = [e for e in trace if e["ph"] == "X"]
    assert len(bars) == len(spans)
    first = min(e["ts"] for e in spans)
    wanted = sorted((e["tid"] - 1, round((e["ts"] - first) / 1e3, 6), round(e["dur"] / 1e3, 6)) for e in spans)
    found = sorted((round((b.y0 + b.y1) / 2), round(b.x0, 6), round(b.x1 - b.x0, 6)) for b in bars)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    waits = sum(p.get_extents().width for c in ax.collections if c.get_hatch() for p in c.get_paths())
    assert waits == pytest.approx(sum(e["args"]["wait_us"] for e in spans if e["cat"] == "collective") / 1e3)
    labels = shown_ticks(ax)
    assert "worker 0 (x=0)" in [t.get_text() for t in labels]
    assert not collide(boxes(ax, [*labels, ax.title, ax.xaxis.label]))
    legend = ax.get_legend()
    names = [t.get_text() for t in legend.get_texts()]
    assert sorted(names) == ["maps and steps", "spmd.halo_exchange", "spmd.psum", "spmd.shift", "waiting"]
    assert legend.get_window_extent().x0 >= ax.get_window_extent().x1, "the legend hides data"


def test_what_a_timeline_is_drawn_of(tmp_path):
    trace = events(2)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": trace}))
    sources = [path, str(path), trace, {"traceEvents": trace}, SimpleNamespace(path=path)]
    counts = [sum(len(c.get_paths()) for c in spmd.plot.timeline(source).collections) for source in sources]
    assert len(set(counts)) == 1
    figure, own = pyplot.subplots()
    assert spmd.plot.timeline(path, ax=own) is own
    assert figure.axes == [own]


def test_small_functions_share_a_colour_and_equal_tracks_of_processes_are_told_apart():
    trace = events(2)
    trace += [
        {**e, "pid": 1, **({"args": {"name": "process 1, b"}} if e["name"] == "process_name" else {})} for e in trace
    ]
    place = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 1, "args": {}}
    trace += [{**place, "name": f"kernel{k}", "ts": 20.0 * k, "dur": 1.0} for k in range(9)]
    ax = spmd.plot.timeline(trace)
    assert "others" in [t.get_text() for t in ax.get_legend().get_texts()]
    names = [t.get_text() for t in shown_ticks(ax) if "worker" in t.get_text()]
    assert names == ["worker 0 (x=0)", "worker 1 (x=1)", "process 1: worker 0 (x=0)", "process 1: worker 1 (x=1)"]


def test_a_trace_without_spans():
    ax = spmd.plot.timeline([])
    ax.figure.draw_without_rendering()
    assert ax.get_legend() is None


# pipeline


@pytest.mark.parametrize(("workers", "virtual"), [(1, 1), (4, 1), (3, 2)])
def test_a_pipeline_has_a_box_for_each_action(tmp_path, workers, virtual):
    """At its times, in the row of its worker, with the number of the microbatch."""
    name = "zero_bubble" if virtual == 1 else "interleaved"
    stages = [lambda w, x: w * x] * (workers * virtual)
    step = spmd.training.pipeline(stages, microbatches=3, schedule=name, loss=np.mean)
    f = spmd.map(lambda x: step.value_and_grad([2.0] * len(stages), x)[0], P(), P())
    path = tmp_path / "trace.json"
    with spmd.Mesh(stage=workers), spmd.profile(path):
        f(np.ones(6))
    ax = spmd.plot.pipeline(path)
    actions = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "stage"]
    first, end = min(e["ts"] for e in actions), max(e["ts"] + e["dur"] for e in actions)
    wanted = sorted((e["tid"] - 1, (e["ts"] - first) / 1e3, e["dur"] / 1e3) for e in actions)
    boxes_of = [(round(p.get_y() + p.get_height() / 2), p.get_x(), p.get_width()) for p in ax.patches]
    np.testing.assert_allclose(sorted(boxes_of), wanted, atol=1e-6)
    assert len(actions) == 3 * len(stages) * (3 if virtual == 1 else 2)
    assert {t.get_text() for t in ax.texts} <= {"0", "1", "2"}
    idle = 1 - sum(e["dur"] for e in actions) / (end - first) / workers
    assert ax.get_title() == f"idle for {idle:.0%} of the time"
    names = [t.get_text() for t in ax.get_legend().get_texts()]
    assert names == ["forward", "backward", "gradients of weights"][: 3 if virtual == 1 else 2]
    colours = {p.get_facecolor() for p in ax.patches}
    assert len(colours) == len(names) * virtual
    own = pyplot.subplots()[1]
    assert spmd.plot.pipeline(path, title="a", ax=own) is own
    assert own.get_title() == "a"
    spmd.plot.timeline(path).figure.draw_without_rendering()


def test_a_box_of_a_pipeline_bears_its_number_where_it_fits():
    span = {"ph": "X", "cat": "stage", "name": "forward of stage 0", "pid": 0, "tid": 1}
    args = {"action": "forward", "stage": 0}
    times = [(0, 1), (1, 1000), (2000, 500)]
    trace = [
        {**span, "ts": start, "dur": length, "args": {**args, "microbatch": k}}
        for k, (start, length) in enumerate(times)
    ]
    ax = spmd.plot.pipeline(trace)
    assert [t.get_text() for t in ax.texts] == ["1", "2"]
    assert not collide(boxes(ax, ax.texts))


# without Matplotlib


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (lambda: spmd.plot.layout(LAYOUTS["both"]), lambda: spmd.plot.field(np.ones(3))):
        with pytest.raises(ImportError, match=r'(?s)got: +no package matplotlib.*pip install "spmd\[plot\]"'):
            draw()
