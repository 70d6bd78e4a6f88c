"""`spmd.debug.print` says which worker prints, in the order of the workers; `spmd.progress` shows how far a loop is."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from launch import PROGRAMS, each_mpi, launch
from mpi_programs import printing

import spmd
from spmd import P, progress_bars


@pytest.mark.parametrize("axes", [{}, {"x": 1}, {"x": 2}, {"a": 3, "b": 2}, {"a": 2, "b": 2, "c": 2}])
def test_workers_print_in_their_order(axes, scheduler, capsys):
    values = np.random.default_rng(len(axes)).normal(size=(7, 2))
    mesh = spmd.Mesh(**axes, scheduler=scheduler)
    spec = P(*list(axes)[:1])

    def body(x):
        spmd.debug.print("block", x.shape, x[:1].sum())
        spmd.debug.print("and", "on", sep="-", end=";\n")

    spmd.map(body, spec, None, mesh=mesh)(values)
    layout = mesh.layout(values.shape, spec)
    marks = [
        f"[{','.join(f'{n}={k}' for n, k in mesh.coordinates(w).items()) or 'worker 0'}]" for w in range(mesh.size)
    ]
    blocks = [values[layout.slices(w)] for w in range(mesh.size)]
    wanted = [f"{m} block {b.shape} {b[:1].sum()}" for m, b in zip(marks, blocks, strict=True)]
    assert capsys.readouterr().out.splitlines() == [*wanted, *(f"{m} and-on;" for m in marks)]


def test_lines_below_the_first_are_indented(scheduler, capsys):
    with spmd.Mesh(x=2, scheduler=scheduler):
        spmd.map(lambda x: spmd.debug.print(x), P("x"), None)(np.arange(8.0).reshape(4, 2))
    assert capsys.readouterr().out == "[x=0] [[0. 1.]\n       [2. 3.]]\n[x=1] [[4. 5.]\n       [6. 7.]]\n"


def test_some_workers_print_by_themselves(scheduler, capsys):
    with spmd.Mesh(a=2, b=3, scheduler=scheduler):

        def body():
            if spmd.worker_index(("a", "b")) == 4:
                spmd.debug.print("alone", only=4)
            spmd.debug.print("row", only={"a": 1})

        with spmd.ledger() as log:
            spmd.map(body, (), None)()
    assert sorted(capsys.readouterr().out.splitlines()) == ["[a=1,b=0] row", "[a=1,b=1] alone", *_rows(1, 2)]
    assert log.messages == 0


def _rows(*columns: int) -> list[str]:
    return [f"[a=1,b={b}] row" for b in columns]


def test_traced_values_are_printed_and_have_their_gradient(scheduler, capsys):
    with spmd.Mesh(x=2, scheduler=scheduler):

        def body(x):
            y = np.sum(x**2)
            spmd.debug.print(x, y)
            return spmd.psum(y, "x")

        slope = spmd.grad(lambda x: spmd.map(body, P("x"), P())(x))(np.arange(4.0))
    np.testing.assert_array_equal(slope, 2 * np.arange(4.0))
    assert capsys.readouterr().out == "[x=0] [0. 1.] 1.0\n[x=1] [2. 3.] 13.0\n"


def test_a_jitted_map_prints_at_each_call(scheduler, capsys):
    with spmd.Mesh(x=2, scheduler=scheduler):

        def body(x):
            spmd.debug.print(x, x.sum())
            return spmd.psum(x, "x")

        f = spmd.jit(spmd.map(body, P("x"), P()))
        for k in range(3):
            np.testing.assert_array_equal(f(np.arange(2.0) + k).numpy(), [1 + 2 * k])
            assert capsys.readouterr().out == f"[x=0] [{k}.] {k}.0\n[x=1] [{k + 1}.] {k + 1}.0\n"


def test_what_else_is_printed(scheduler, capsys):
    target = io.StringIO()
    with spmd.Mesh(x=2, scheduler=scheduler):
        spmd.map(lambda: spmd.debug.print({"a": 1}, "ü\n", None, file=target), (), None)()
        spmd.map(lambda: spmd.at_root(lambda: spmd.debug.print("root"), axis_name="x", root=1), (), None)()
    assert target.getvalue() == "[x=0] {'a': 1} ü\n       None\n[x=1] {'a': 1} ü\n       None\n"
    assert capsys.readouterr().out == "[x=1] root\n"
    spmd.debug.print("outside", 3)
    assert capsys.readouterr().out == "outside 3\n"


@pytest.mark.torch
def test_tensors_are_printed_without_their_history(capsys):
    torch = pytest.importorskip("torch")
    spt = pytest.importorskip("spmd.bridge.torch")
    with spmd.Mesh(x=2):

        def body(x):
            spmd.debug.print(x * 2)
            return x

        spt.map(body, P("x"), P("x"))(torch.arange(4.0, requires_grad=True))
    assert capsys.readouterr().out == (
        "[x=0] tensor([0., 2.], state=Varying(x))\n[x=1] tensor([4., 6.], state=Varying(x))\n"
    )


@each_mpi
@pytest.mark.mpi
def test_processes_print_in_their_order(python):
    ended = launch(PROGRAMS / "printing.py", python=python, n=3, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.splitlines() == printing.LINES


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch, with_tqdm: bool, **options) -> str:
    """What standard error gets of a loop over 4 items on a terminal."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    if not with_tqdm:
        monkeypatch.setattr(progress_bars, "find_spec", lambda name: None)
    monkeypatch.setattr(progress_bars, "_INTERVAL", 0.0)
    items = options.pop("items", range(4))
    assert [*spmd.progress(items, **options)] == [0, 1, 2, 3]
    return sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_progress_is_shown_on_a_terminal(monkeypatch):
    lines = shown(monkeypatch, False, label="steps").split("\r")[1:]
    assert [line.split(",")[0] for line in lines] == [f"steps: {k}/4 {k / 4:4.0%}" for k in (1, 2, 3, 4, 4)]
    assert lines[-1].endswith("\n")
    assert " left" in lines[0]
    assert " left" not in lines[-1]


def test_progress_of_items_whose_number_is_unknown(monkeypatch):
    lines = shown(monkeypatch, False, items=iter(range(4))).split("\r")
    assert lines[1].startswith("1, ")
    assert "1/8" in shown(monkeypatch, False, items=iter(range(4)), total=8)


def test_progress_by_tqdm(monkeypatch):
    pytest.importorskip("tqdm")
    assert "steps: 100%" in shown(monkeypatch, True, label="steps")


def test_progress_is_shown_nowhere_else(monkeypatch, scheduler):
    items = range(3)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert spmd.progress(items) is items
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress_bars, "find_spec", lambda name: None)
    with spmd.Mesh(x=3, scheduler=scheduler):
        quiet = {}
        spmd.map(lambda: quiet.update({spmd.worker_index("x"): spmd.progress(items) is items}), (), None)()
    assert quiet == {0: False, 1: True, 2: True}
    monkeypatch.setattr(sys, "stderr", None)
    assert spmd.progress(items) is items
