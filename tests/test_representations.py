"""Reports: HTML, rich and text have the same content; names are escaped; nothing is read or sent."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.representations import terminal
from spmd.representations.numbers import size_text
from spmd.representations.tables import Report, Table
from spmd.testing import AdjointReport, Fault

MESH = {"x": 2, "y": 3}


def failed_report() -> AdjointReport:
    mesh = spmd.Mesh(x=2)
    doubled = spmd.custom_vjp(lambda x: 2.0 * x)
    doubled.defvjp(lambda x: (2.0 * x, None), lambda kept, g: (3.0 * g,))
    return spmd.check_adjoint(doubled, (5,), in_specs=P("x"), out_specs=P("x"), mesh=mesh, raises=False)


def counted(mesh):
    with spmd.ledger() as log:
        spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P(), mesh=mesh)(np.arange(4.0))
    return log


def objects(folder) -> dict[str, object]:
    """One of each kind that has a report."""
    mesh = spmd.Mesh(**MESH, transport="local")
    x = spmd.put(np.arange(35.0).reshape(7, 5), P("x", "y"), mesh)
    spmd.save(folder / "saved", {"w": x, "rate": 0.5, "<name>": np.ones(3)}, metadata={"epoch": 2})
    return {
        "array": x,
        "layout": spmd.Layout((10, 9), P("x", "y"), MESH, [(10, 0), (2, 0, 7)]),
        "mesh": mesh,
        "Fourier plan": spmd.fft.plan((12, 10, 8), P("x"), real=True, mesh=spmd.Mesh(x=2)),
        "window": spmd.plan_window(10, 3, padding=1, inputs=3),
        "windows": spmd.plan_windows(spmd.Layout((9, 7), P("x"), {"x": 2}), 3),
        "checkpoint": spmd.io.inspect(folder / "saved"),
        "ledger": counted(mesh),
        "adjoint": spmd.check_adjoint(lambda x: 2.0 * x, (5,), in_specs=P("x"), out_specs=P("x"), mesh=mesh),
        "not adjoint": failed_report(),
    }


KINDS = [
    "array",
    "layout",
    "mesh",
    "Fourier plan",
    "window",
    "windows",
    "checkpoint",
    "ledger",
    "adjoint",
    "not adjoint",
]


def text_of(thing) -> str:
    return thing.summary() if hasattr(thing, "summary") else str(thing)


def words(text: str) -> set[str]:
    """The words and numbers of a text."""
    return set(re.findall(r"[\w.<>\"'*+-]+", text))


def rich_text(thing, width: int = 400) -> str:
    console = pytest.importorskip("rich.console")
    out = io.StringIO()
    console.Console(file=out, width=width).print(thing)
    return out.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_text_html_and_rich_say_the_same(kind, tmp_path):
    thing = objects(tmp_path)[kind]
    page = ElementTree.fromstring(thing._repr_html_())
    for svg in [*page.iter("{http://www.w3.org/2000/svg}svg")]:
        svg.clear()  # drawn by other means as text
    cells = " ".join(page.itertext())
    told = words(text_of(thing)) | words("one F sends 0 message messages bytes declared")
    missing = words(" ".join(f" {t} " for t in page.itertext())) - told
    assert {w for w in missing if not w.isdigit()} <= {"fault"}, missing
    assert words(cells)
    shown = words(rich_text(thing))
    table = {w for row in page.iter("tr") for t in row.itertext() for w in words(t)}
    assert table
    assert table <= shown, table - shown


def test_all_that_the_text_of_a_plan_says_stands_in_its_html(tmp_path):
    made = objects(tmp_path)
    for kind in ("Fourier plan", "window", "windows", "checkpoint", "ledger", "not adjoint"):
        page = ElementTree.fromstring(made[kind]._repr_html_())
        assert words(str(made[kind])) <= words(" ".join(page.itertext())) | {"error"}, kind


def test_a_report_of_an_adjoint_tells_the_fault_in_each_form():
    report = failed_report()
    assert not report
    page = ElementTree.fromstring(report._repr_html_())
    rows = {row.findtext("th"): row.findtext("td") for row in page.iter("tr")}
    assert "NOT adjoint" in page.findtext("p", "")
    assert rows["reproduce"] == (report if report.smallest is None else report.smallest).reproduce
    assert any(name.startswith("F* is not F^H in ") for name in rows)
    assert "NOT adjoint" in rich_text(report)
    lines = str(report).splitlines()
    assert lines[1] == f"  <F x, y>  = {rows['<F x, y>']}"
    assert lines[2] == f"  <x, F* y> = {rows['<x, F* y>']}"
    assert any(line.startswith("    from y") for line in lines)


def test_a_fault_is_escaped():
    report = AdjointReport("<f>", ((3,),), "Mesh(x=2)", "exact", 1, faults=[Fault("value", "<script>")])
    assert "<script" not in report._repr_html_()
    assert "  <script>" in str(report).splitlines()
    assert "<script>" in rich_text(report)


def test_html_sets_no_colour_of_text_and_no_background(tmp_path):
    for kind, thing in objects(tmp_path).items():
        html = re.sub(r"<svg.*?</svg>", "", thing._repr_html_())
        assert not re.search(r"color|background", html), kind
        for text in re.findall(r"<text [^>]*>", thing._repr_html_()):
            assert 'fill="currentColor"' in text or 'text-anchor="middle"' in text  # a number on a block


def test_markup_of_rich_is_plain_text():
    table = Table([("[bold]", "[/red]")], ("name", "[x]"), title="[link]")
    assert all(
        t in rich_text(Report("[blue]", [table, "[b]"])) for t in ("[bold]", "[/red]", "[link]", "[blue]", "[b]")
    )


def test_a_short_row_goes_over_the_columns_that_are_left():
    table = Table(
        [("a", "1", "2"), ("a longer name",), ("bb", "a text over two")], ("name", "one", "two"), right=(1, 2)
    )
    assert table.text().splitlines() == ["name  one  two", "a       1    2", "a longer name", "bb    a text over two"]
    page = ElementTree.fromstring(table.html())
    spans = [[int(cell.get("colspan", 1)) for cell in row] for row in page.iter("tr")]
    assert spans == [[1, 1, 1], [1, 1, 1], [3], [1, 2]]
    assert [cell.get("scope") for cell in page.iter("th")] == ["col"] * 3


@pytest.mark.parametrize("width", [20, 24, 40])
def test_a_table_of_a_width_cuts_the_widest_columns_in_front(width):
    rows = [("encoder.layers.0.weight", "12,345"), ("b", "6"), ("x" * 60,)]
    lines = Table(rows, ("name", "bytes"), right=(1,), width=width, ruled=True).text().splitlines()
    assert max(map(len, lines)) == width
    assert lines[1] == "-" * width
    assert lines[2].endswith("0.weight  12,345"[-width + 1 :])
    assert lines[4] == "…" + "x" * (width - 1)


def test_a_table_without_rows():
    assert Table([]).text() == ""
    assert Table([], ("a", "b")).text() == "a  b"
    ElementTree.fromstring(Table([]).html())
    rich_text(Table([]))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        *((0, "0 B"), (640, "640 B"), (1023, "1023 B"), (1024, "1 KiB"), (6000, "5.86 KiB"), (1 << 20, "1 MiB")),
        *((1010 << 10, "1010 KiB"), (5 << 40, "5 TiB"), (3000 << 40, "3000 TiB")),
    ],
)
def test_sizes(nbytes, text):
    assert size_text(nbytes) == text


def test_to_show_an_array_sends_nothing(monkeypatch):
    x = spmd.put(np.ones((4, 3)), P("x"), spmd.Mesh(x=2, transport="local"))
    forms = [lambda: x._repr_html_(), x.summary, lambda: rich_text(x)]
    before = [form() for form in forms]
    x.blocks = dict.fromkeys(x.blocks)
    monkeypatch.setattr(type(x.mesh.transport), "share", None)
    monkeypatch.setattr(type(x.mesh.transport), "run", None)
    assert [form() for form in forms] == before


def test_a_report_is_shown_by_rich_on_terminals_only(monkeypatch, capsys):
    table = Table([("spmd", "1")], ("name", "number"))
    terminal.show(table)
    assert capsys.readouterr().out == table.text() + "\n"
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    terminal.show(table)
    assert "─" in capsys.readouterr().out
    monkeypatch.setattr(terminal, "find_spec", lambda name: None)
    terminal.show(table)
    assert capsys.readouterr().out == table.text() + "\n"
