"""The examples run, and what they print is right."""

from __future__ import annotations

import functools
import re
import subprocess

import pytest
from launch import ROOT, launch, mpiexec, run_python

by_itself = functools.cache(run_python)
"""A program that ran without a launcher: several tests look at how it ended."""

AFFINE = ROOT / "examples" / "affine.py"


def figures(text: str) -> dict[str, float]:
    """What affine.py reports."""
    found = re.search(r"loss ([\d.]+) at first, ([\d.e+-]+) after 100 steps", text)
    return {
        "first": float(found[1]),
        "last": float(found[2]),
        "error": float(re.search(r"largest error of the fit ([\d.e+-]+)", text)[1]),
        "apart": float(re.search(r"one worker: ([\d.e+-]+) apart", text)[1]),
    }


def right(ended: subprocess.CompletedProcess) -> dict[str, float]:
    assert ended.returncode == 0, str(ended)
    found = figures(ended.stdout)
    assert found["last"] < 1e-8 < 1 < found["first"]
    assert found["error"] < 1e-3
    assert found["apart"] < 1e-12
    return found


def test_an_affine_layer_on_unequal_partitions():
    ended = by_itself(AFFINE)
    right(ended)
    assert ended.stdout.count("nothing") == 2


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_the_same_under_mpiexec():
    assert right(launch(AFFINE, n=12, timeout=120)) == right(by_itself(AFFINE))


WAVE = ROOT / "examples" / "wave.py"
SHORT = ("--points", "12", "--steps", "2", "--times", "40")


def wave(ended: subprocess.CompletedProcess) -> list[str]:
    """The lines of wave.py that say no times."""
    assert ended.returncode == 0, str(ended)
    return [re.sub(r"  +[\d.]+ s$", "", line) for line in ended.stdout.splitlines()]


@pytest.mark.parametrize("mesh", ["3,2", "1,1"])
def test_the_gradient_of_a_wave_is_the_adjoint_by_hand(mesh, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    plot = tmp_path / "wave.png"
    lines = wave(run_python(WAVE, *SHORT, "--mesh", mesh, "--picture", str(plot), timeout=120))
    assert float(re.search(r"by hand: ([\d.e+-]+) apart", lines[2])[1]) < 1e-12
    assert float(re.search(r"misfit ([\d.e+-]+) of the start", "\n".join(lines))[1]) < 1
    messages = int(re.search(r"takes (\d+) messages", lines[3])[1])
    assert messages == 0 if mesh == "1,1" else messages > 0
    assert plot.stat().st_size > 10_000


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_a_wave_under_mpiexec_takes_the_same_steps():
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    ours, theirs = wave(launch(WAVE, *SHORT, n=4, timeout=120)), wave(run_python(WAVE, *SHORT, timeout=120))
    assert ours[:3] + ours[4:] == theirs[:3] + theirs[4:]  # the fourth counts messages: here the gradient is assembled


ADJOINT = ROOT / "examples" / "adjoint_test.py"


def located(ended: subprocess.CompletedProcess) -> str:
    assert ended.returncode == 0, str(ended)
    first, mended, tape, rows = ended.stdout.strip().split("\n\n")
    assert [row.split()[-1] for row in rows.splitlines()] == ["verdict", "value", "adjoint", "adjoint"]
    assert "NOT adjoint" in first
    assert "from y[0] (worker 1 (line=1)) to x[0] (worker 0 (line=0)): 0, needed -1" in first
    assert "Mesh(line=2)" in first  # the smallest mesh that shows it
    for right in (mended, tape):
        assert ": adjoint (exact" in right
    return ended.stdout


def test_a_planted_bug_in_an_adjoint_is_located():
    located(run_python(ADJOINT))


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_a_planted_bug_is_found_under_mpiexec_too():
    ended = launch(ADJOINT, n=3)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("NOT adjoint") == 1
    assert ended.stdout.count(": adjoint (exact") == 2


RECORDED = ROOT / "examples" / "recorded_step.py"


def losses(ended: subprocess.CompletedProcess) -> list[str]:
    """The losses that recorded_step.py prints: by a body and by global arrays, each without spmd.jit and with it."""
    assert ended.returncode == 0, str(ended)
    found = re.findall(r"loss (\S+) ", ended.stdout)
    assert len(found) == 4
    return found


@pytest.mark.parametrize("mesh", [("3", "2"), ("1", "1")])
def test_recorded_steps_give_the_losses_of_others(mesh):
    found = losses(run_python(RECORDED, "--steps", "40", "--data", mesh[0], "--model", mesh[1], timeout=120))
    assert len(set(found)) == 1
    assert float(found[0]) < 0.8


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_recorded_steps_under_mpiexec():
    ended = launch(RECORDED, "--steps", "6", n=4, timeout=120)
    assert losses(ended) == losses(run_python(RECORDED, "--steps", "6", timeout=120))


WATER = ROOT / "examples" / "shallow_water.py"
BRIEF = ("--points", "9", "--steps", "12", "--iterations", "3")


def water(ended: subprocess.CompletedProcess) -> str:
    """What shallow_water.py prints."""
    assert ended.returncode == 0, str(ended)
    assert float(re.search(r"of few: (\S+) apart", ended.stdout)[1]) < 1e-13
    first, last = map(float, re.search(r"misfit (\S+) at first, (\S+) after", ended.stdout).groups())
    assert last < 0.7 * first
    return ended.stdout


@pytest.mark.parametrize("mesh", ["3,2", "1,1"])
def test_water_falls_into_the_shape_that_was_recorded(mesh):
    water(run_python(WATER, *BRIEF, "--mesh", mesh, timeout=120))


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_water_under_mpiexec():
    assert water(launch(WATER, *BRIEF, n=4, timeout=120)) == water(run_python(WATER, *BRIEF, timeout=120))


TRANSFORMER = ROOT / "examples" / "transformer.py"
TINY = ("--steps", "4", "--every", "1", "--batch", "5", "--context", "12", "--features", "12", "--heads", "3")


def written(ended: subprocess.CompletedProcess) -> tuple[list[str], str]:
    """The losses and the text of transformer.py."""
    assert ended.returncode == 0, str(ended)
    found = re.findall(r"loss (\S+) ", ended.stdout)
    assert len(found) == 4
    assert float(found[-1]) < float(found[0])
    return found, ended.stdout.partition("\n\n")[2]


def tiny(data: int, model: int) -> tuple[str, ...]:
    return (*TINY, "--sample", "3", "--data", str(data), "--model", str(model))


@pytest.mark.parametrize(("data", "model"), [(3, 2), (1, 4)])
def test_a_transformer_writes_the_same_on_any_mesh(data, model):
    """The batch and the heads need not be divisible; some workers have no heads."""
    one = written(by_itself(TRANSFORMER, *tiny(1, 1), timeout=120))
    assert written(run_python(TRANSFORMER, *tiny(data, model), timeout=120)) == one


OPERATOR = ROOT / "examples" / "fno.py"
SMALL = ("--points", "9", "--samples", "12", "--batch", "6", "--epochs", "3", "--width", "5", "--modes", "4")


def operator(ended: subprocess.CompletedProcess) -> list[float]:
    """The losses that fno.py prints, and the error against the solver."""
    assert ended.returncode == 0, str(ended)
    found = [float(n) for n in re.findall(r"(?:loss|solver) ([\d.]+)", ended.stdout)]
    assert len(found) == 3
    assert found[1] < 0.95 * found[0]
    return found


@pytest.mark.parametrize("mesh", [(1, 3, 1), (2, 2, 2)])
def test_a_fourier_neural_operator_learns_the_same_on_any_mesh(mesh, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    sides = [str(n) for pair in zip(("--data", "--model", "--space"), mesh, strict=True) for n in pair]
    picture = tmp_path / "fno.png"
    ours = operator(run_python(OPERATOR, *SMALL, *sides, "--picture", str(picture), timeout=120))
    assert ours == pytest.approx(operator(by_itself(OPERATOR, *SMALL)), rel=1e-8)
    assert picture.stat().st_size > 10_000


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_a_transformer_under_mpiexec():
    one = written(by_itself(TRANSFORMER, *tiny(1, 1), timeout=120))
    assert written(launch(TRANSFORMER, *tiny(2, 2), n=4, timeout=120)) == one


def test_a_fourier_neural_operator_under_mpiexec():
    pytest.importorskip("scipy")
    ours = operator(launch(OPERATOR, *SMALL, n=4, timeout=120))
    assert ours == pytest.approx(operator(by_itself(OPERATOR, *SMALL)), rel=1e-8)
