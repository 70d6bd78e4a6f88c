"""spt.shard_optimizer: ten steps with split states and gradients are those of one worker."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from launch import ROOT, TORCHRUN, launch, mpiexec

torch = pytest.importorskip("torch")

from torch_training_cases import (  # noqa: E402
    OPTIMIZERS,
    SCHEDULES,
    Program,
    assert_same,
    drawn_program,
    train,
    train_on_mesh,
)

pytestmark = pytest.mark.host("a body makes its tensors on the host")


def check(program: Program) -> None:
    expected = train(program, None)
    for result in train_on_mesh(program):
        assert_same(result, expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer(optimizer):
    check(Program(optimizer=optimizer, axes={"data": 3}, shard="states" if optimizer == "sgd" else "gradients"))


SEARCH = pytest.mark.full
SHARDS = [pytest.param("none", marks=SEARCH), pytest.param("states", marks=SEARCH), "gradients"]


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize(
    "axes", [{"data": 1}, {"data": 2}, {"data": 8}, {"data": 2, "model": 2}, {"model": 2, "data": 3}]
)
def test_each_mesh(axes, shard):
    check(Program(axes=axes, shard=shard, clip=0.5))
    if "model" in axes:
        check(Program(axes=axes, shard=shard, clip=0.5, by="layers"))


ALONE = {
    "accumulation": {"microbatches": 3},
    "clipping": {"clip": 0.05},
    "groups": {"groups": True},
    "frozen": {"frozen": True},
    "unused": {"unused": True},
    "reentrant": {"recompute": "reentrant"},
    "recompute": {"recompute": "not reentrant"},
    "ema": {"ema": True},
    **{name: {"schedule": name} for name in SCHEDULES},
}


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize(
    "axes", [{"data": 3}, pytest.param({"data": 2, "model": 2}, marks=SEARCH)], ids=["data", "data-model"]
)
@pytest.mark.parametrize("technique", ALONE)
def test_each_technique(technique, axes, shard):
    check(replace(Program(axes=axes, shard=shard, optimizer="adamw"), **ALONE[technique]))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(k, marks=SEARCH) for k in range(3, 40))])
def test_combinations(seed):
    check(drawn_program(seed))


PROGRAM = ROOT / "tests" / "mpi_programs" / "torch_sharded_training.py"
MPI = [pytest.mark.mpi, pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")]


@pytest.mark.parametrize(
    "python", [pytest.param(sys.executable, id="mpiexec", marks=MPI), pytest.param(TORCHRUN, id="torchrun")]
)
def test_the_same_in_processes(python):
    ended = launch(PROGRAM, n=4, python=python, timeout=240)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("a process is through") == 4, str(ended)
