"""A worker that raises inside a stage that is a module: all raise its error, and a pipeline works afterwards."""

from __future__ import annotations

import itertools
import threading

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.training.pipelines.schedules import SCHEDULES  # noqa: E402

pytestmark = pytest.mark.torch


class Own(Exception):
    """An error of this module."""


class Stage(nn.Module):
    """A layer whose third action of a kind fails."""

    def __init__(self, weight, where: str):
        super().__init__()
        self.weight, self.where, self.times = nn.Parameter(weight.clone()), where, itertools.count()

    def act(self, g=None):
        if next(self.times) == 2:
            raise Own("in the stage")
        return g

    def forward(self, x):
        if self.where == "forward":
            self.act()
        w = self.weight
        if self.where in ("backward", "weight"):
            x, w = x * 1.0, w * 1.0
            hooked = x if self.where == "backward" else w
            if hooked.requires_grad:
                hooked.register_hook(self.act)
        return torch.tanh(x @ w)


def step(where: str, schedule: str, place: int, mesh: spmd.Mesh) -> float:
    """The loss of a step with three workers. where: "" for a healthy one."""
    generator = torch.Generator().manual_seed(0)
    n = 6 if schedule == "interleaved" else 3
    x, *weights = (torch.randn(9, 3, generator=generator), *(torch.randn(3, 3, generator=generator) for _ in range(n)))
    times = itertools.count()

    def loss(y):
        if where == "loss" and next(times) == 2:
            raise Own("in the stage")
        return (y**2).mean()

    def body(x):
        stages = [Stage(w, where if k == place else "") for k, w in enumerate(weights)]
        pipeline = spt.pipeline(stages, "stage", microbatches=4, schedule=schedule, loss=loss)
        return pipeline.backward(x)

    return float(spt.map(body, in_specs=P(), out_specs=P(), mesh=mesh)(x))


@pytest.mark.parametrize("where", ["forward", "backward", "weight", "loss"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_error_of_the_stage_is_raised_and_nothing_stays(schedule, where):
    mesh = spmd.Mesh(stage=3, transport="local")
    place = (5 if schedule == "interleaved" else 2) if where == "loss" else 1
    wanted = step("", schedule, place, mesh)
    threads = threading.active_count()
    for _ in range(2):
        with pytest.raises(Own, match="in the stage") as caught:
            step(where, schedule, place, mesh)
        notes = "\n".join(caught.value.__notes__)
        assert f"raised by worker {place % 3} (stage={place % 3})" in notes
        assert f"of stage {place} of the pipeline, for microbatch 2" in notes
        assert step("", schedule, place, mesh) == wanted
    assert threading.active_count() <= threads
