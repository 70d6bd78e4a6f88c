"""spt.shard_optimizer: ten steps with split states and gradients are those of one worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

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


@pytest.mark.parametrize("shard", ["none", "states", "gradients"])
@pytest.mark.parametrize(
    "axes", [{"data": 1}, {"data": 2}, {"data": 4}, {"data": 8}, {"data": 2, "model": 2}, {"model": 2, "data": 3}]
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


@pytest.mark.parametrize("axes", [{"data": 3}, {"data": 2, "model": 2}], ids=["data", "data-model"])
@pytest.mark.parametrize("technique", ALONE)
def test_each_technique(technique, axes):
    for shard in ("none", "gradients"):
        check(replace(Program(axes=axes, shard=shard, optimizer="adamw"), **ALONE[technique]))


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(k, marks=pytest.mark.full) for k in range(5, 40))])
def test_combinations(seed):
    check(drawn_program(seed))
