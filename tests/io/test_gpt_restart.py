"""The run of examples/torch_gpt.py that is killed, and goes on on another mesh with the losses of one worker."""

from __future__ import annotations

import random
import re
import shutil
import sys
from pathlib import Path

import pytest
from gpt_options import mesh_options, model_options, words
from launch import PROGRAMS, ROOT, TORCHRUN, launch, mpiexec, run_python

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.host("tensors of these tests lie on the host")]

GPT = ROOT / "examples" / "torch_gpt.py"
KILLED = PROGRAMS / "killed_gpt.py"
STEPS, EVERY, KILLED_IN = 9, 2, 7
OPTIONS = (
    *("--steps", str(STEPS), "--every", str(EVERY), "--batch", "5", "--sample", "0"),
    *("--context", "7", "--width", "12", "--heads", "3", "--layers", "1"),
)
PATH = str(ROOT / "tests")  # of `loaded`, which the killed program imports
MPI = [pytest.mark.mpi, pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")]
MPIEXEC = pytest.param(sys.executable, id="mpiexec", marks=MPI)


def goes_on(folder: Path, *mesh: str) -> int:
    """Go on to the end beside a whole run of one worker, whose losses are the same. The step after which it goes on."""
    ended = run_python(GPT, *OPTIONS, "--checkpoints", folder, "--check", *mesh, timeout=120)
    assert ended.returncode == 0, str(ended)
    apart = [float(n) for n in re.findall(r"at most (\S+) apart", ended.stdout)]
    assert len(apart) == 2
    assert max(apart) < 1e-9, str(ended)
    assert f"losses of {STEPS} steps" in ended.stdout
    (step,) = re.findall(r"goes on after step (\d+)", ended.stdout)
    return int(step)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """The checkpoints of a run on two by two virtual workers that was killed."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    mesh = ("--data", "2", "--model", "2", "--sequence", "--shard")
    ended = run_python(KILLED, "0", str(KILLED_IN), *OPTIONS, "--checkpoints", folder, *mesh, PYTHONPATH=PATH)
    assert ended.returncode == -9, str(ended)
    assert "not killed" not in ended.stdout
    return folder


@pytest.mark.parametrize(
    "mesh",
    [
        ("--data", "3", "--model", "1"),
        ("--data", "1", "--model", "1", "--stage", "3"),
        pytest.param(("--data", "1", "--model", "1"), marks=pytest.mark.full),
        pytest.param(("--data", "1", "--model", "4"), marks=pytest.mark.full),
        pytest.param(("--data", "3", "--model", "2", "--shard"), marks=pytest.mark.full),
        pytest.param(("--data", "2", "--model", "2"), marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_a_killed_run_goes_on_on_another_mesh(killed, mesh, tmp_path):
    shutil.copytree(killed, tmp_path / "run")
    assert 0 < goes_on(tmp_path / "run", *mesh) < KILLED_IN


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_a_killed_run_goes_on_with_other_options(seed, tmp_path):
    """Any stages, experts along any axis, and anything else that goes together."""
    draw = random.Random(seed)
    model = model_options(draw) | {"experts": draw.choice([0, 3])}
    options = (*OPTIONS, *words(model), "--balance", "0", "--checkpoints", tmp_path / "run")
    ended = run_python(KILLED, "0", str(KILLED_IN), *options, *mesh_options(draw, model), PYTHONPATH=PATH)
    assert ended.returncode == -9, str(ended)
    assert 0 < goes_on(tmp_path / "run", *words(model), "--balance", "0", *mesh_options(draw, model)) < KILLED_IN


@pytest.mark.parametrize("python", [MPIEXEC, pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.full)])
def test_a_job_ends_with_a_killed_worker_and_goes_on_on_fewer(python, tmp_path):
    folder = tmp_path / "run"
    words = ("2", str(KILLED_IN), *OPTIONS, "--checkpoints", str(folder))
    ended = launch(KILLED, *words, n=4, python=python, timeout=120, PYTHONPATH=PATH)
    assert ended.returncode not in (0, None), str(ended)  # the launcher has ended all
    assert "not killed" not in ended.stdout
    assert 0 < goes_on(folder, "--data", "3", "--model", "1") < KILLED_IN
