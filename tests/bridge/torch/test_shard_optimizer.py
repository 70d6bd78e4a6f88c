"""Sharded training in torch: ten steps with split states, gradients and parameters are those of one worker."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

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


def check(program: Program, path: Any = None) -> None:
    expected = train(program)
    for result in train_on_mesh(program, path):
        assert_same(result, expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer(optimizer):
    check(Program(optimizer=optimizer, axes={"data": 3}, shard="states" if optimizer == "sgd" else "gradients"))


SEARCH = pytest.mark.full
SHARDS = [pytest.param("none", marks=SEARCH), pytest.param("states", marks=SEARCH), "gradients", "parameters"]


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


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(k, marks=SEARCH) for k in range(8, 200))])
def test_combinations(seed, tmp_path):
    check(drawn_program(seed), tmp_path)


@pytest.mark.parametrize("shard", ["none", "gradients"])
def test_buckets_of_layers_whose_blocks_differ_in_size(shard):
    """All workers send equally many buckets."""
    check(Program(axes={"model": 4, "data": 2}, by="layers", shard=shard, bucket_bytes=300, steps=2))


@pytest.mark.parametrize("model", ["text", "image"])
def test_checkpoints_of_global_tensors_within_units(model):
    check(Program(model=model, axes={"data": 2, "model": 2}, shard="parameters", recompute="not reentrant", steps=2))


PROGRAM = ROOT / "tests" / "mpi_programs" / "torch_sharded_training.py"
MPI = [pytest.mark.mpi, pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")]


@pytest.mark.parametrize("seeds", [("1", "3"), pytest.param(("3", "40"), marks=SEARCH)], ids="-".join)
@pytest.mark.parametrize(
    "python", [pytest.param(sys.executable, id="mpiexec", marks=MPI), pytest.param(TORCHRUN, id="torchrun")]
)
def test_the_same_in_processes(python, seeds, tmp_path):
    ended = launch(PROGRAM, str(tmp_path), *seeds, n=4, python=python, timeout=500)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("a process is through") == 4, str(ended)
