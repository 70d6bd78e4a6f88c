"""Programs that are stopped or killed, and go on on another mesh, have the losses of those that were not stopped."""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path

import pytest
from launch import ROOT, Ended, launch, mpiexec, run_python

DIGITS = ROOT / "examples" / "digits.py"
OPTIONS = ("--full-precision", "--hidden", "24", "--batch", "200", "--optimizer", "adam")
EPOCHS = 5


def losses(ended: Ended) -> dict[int, float]:
    """The losses that digits.py prints, by epoch."""
    assert ended.returncode == 0, str(ended)
    found = re.findall(r"^epoch +(\d+)/\d+  loss ([\d.e-]+)", ended.stdout, re.MULTILINE)
    return {int(epoch): float(loss) for epoch, loss in found}


@functools.cache
def digits(data: int, model: int, epochs: int, *more: str) -> dict[int, float]:
    mesh = ("--data", str(data), "--model", str(model), "--epochs", str(epochs))
    return losses(run_python(DIGITS, *OPTIONS, *mesh, *more))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """The checkpoints of a run that was stopped after epoch 3 on two by two workers."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    assert [*digits(2, 2, 3, "--checkpoints", str(folder))] == [1, 2, 3]
    return folder


@pytest.mark.parametrize("mesh", [(3, 1), (1, 1), (2, 2)])
def test_digits_go_on_on_another_mesh(stopped, tmp_path, mesh):
    shutil.copytree(stopped, tmp_path / "run")
    more = digits(*mesh, EPOCHS, "--checkpoints", str(tmp_path / "run"))
    whole = digits(*mesh, EPOCHS)
    assert [*more] == [4, 5]
    assert more == pytest.approx({epoch: whole[epoch] for epoch in more}, rel=1e-12)


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_digits_go_on_under_mpiexec(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    more = losses(launch(DIGITS, *OPTIONS, "--epochs", str(EPOCHS), "--checkpoints", str(tmp_path / "run"), n=4))
    whole = digits(2, 2, EPOCHS)
    assert more == {epoch: whole[epoch] for epoch in (4, 5)}  # on the same mesh to the last bit


def test_a_run_that_kills_itself_goes_on():
    ended = run_python(ROOT / "examples" / "restart.py", timeout=120)
    assert ended.returncode == 0, str(ended)
    killed = re.findall(r"killed in step (\d+)", ended.stdout)
    assert [*map(int, killed)] == [12, 31, 44]
    starts = [int(n) for n in re.findall(r"from step (\d+) on", ended.stdout)]
    assert starts[0] == starts[4] == 0
    assert all(0 < start <= int(at) for start, at in zip(starts[1:4], killed, strict=True)), ended.stdout
    last, whole = re.findall(r"step 60, loss ([\d.]+)", ended.stdout)
    assert float(last) == pytest.approx(float(whole), rel=1e-10)
    assert "optimizer.mean.w1" in ended.stdout
