"""The network of examples/torch_lenet.py, stopped after an epoch and continued on other meshes and processes: in
float64 the losses are those of a run on that mesh that was not stopped."""

from __future__ import annotations

import json
import sys
from functools import cache

import pytest
from launch import PROGRAMS, TORCHRUN, launch, mpiexec

torch = pytest.importorskip("torch")

from mpi_programs import torch_saving  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.host("tensors of these tests lie on the host")]

PROGRAM = PROGRAMS / "torch_saving.py"
MPI = [pytest.mark.mpi, pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")]


def uninterrupted(rows: int, channels: int) -> list[float]:
    return torch_saving.run(None, 3, rows, channels)


def same(losses: list[float], expected: list[float]) -> None:
    assert losses == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_run_that_is_stopped_is_that_of_the_example(monkeypatch):
    """But for the learning rate, which the example does not change."""
    monkeypatch.setattr(torch.optim.lr_scheduler, "ExponentialLR", lambda o, _: torch.optim.lr_scheduler.StepLR(o, 99))
    outer = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        whole, (x, labels, _, _) = torch_saving.lenet.lenet(), torch_saving.lenet.load_data(torch.float64, 0)
        expected = torch_saving.lenet.train(whole, x, labels, torch_saving.ARGS)
    finally:
        torch.set_default_dtype(outer)
    same(uninterrupted(1, 2), expected)


@cache
def _expected(rows: int, channels: int) -> tuple[float, ...]:
    return tuple(uninterrupted(rows, channels))


def test_it_goes_on_on_other_meshes_of_this_process(tmp_path):
    before = torch_saving.run(str(tmp_path), 1, 2, 2)
    for mesh in ((3, 1), (1, 1)):
        more = torch_saving.run(str(tmp_path), 2, *mesh, loads=True)
        same(before + more, list(_expected(*mesh)))
    assert abs(before[0] - _expected(1, 1)[0]) < 1e-12
    assert len({*before, *more}) == 6


def under(python, n: int, action: str, folder, epochs: int, rows: int, channels: int) -> list[float]:
    words = (action, str(folder), *map(str, (epochs, rows, channels)))
    ended = launch(PROGRAM, *words, n=n, python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    return json.loads(ended.stdout.splitlines()[-1])


def other_launchers(*first):
    """The cases of a test: the first one in the ordinary run, all with -m full."""
    cases = {
        "mpiexec 2": (sys.executable, 2, 2, 1),
        "mpiexec 4": (sys.executable, 4, 1, 4),
        "torchrun 2": (TORCHRUN, 2, 1, 2),
    }
    marks = {name: [*(MPI if "mpi" in name else []), *([] if name in first else [pytest.mark.full])] for name in cases}
    values = [pytest.param(*case, marks=marks[name], id=name) for name, case in cases.items()]
    return pytest.mark.parametrize(("python", "n", "rows", "channels"), values)


@other_launchers("mpiexec 2")
def test_processes_go_on_where_virtual_workers_stopped(python, n, rows, channels, tmp_path):
    before = torch_saving.run(str(tmp_path), 1, 3, 1)
    same(before + under(python, n, "load", tmp_path, 2, rows, channels), list(_expected(rows, channels)))


@other_launchers()
def test_virtual_workers_go_on_where_processes_stopped(python, n, rows, channels, tmp_path):
    before = under(python, n, "save", tmp_path, 1, rows, channels)
    same(before + torch_saving.run(str(tmp_path), 2, 1, 3, loads=True), list(_expected(1, 3)))
