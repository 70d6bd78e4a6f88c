"""spt.split_stages: cuts by parameters, by trials, and stages that run as the model does."""

from __future__ import annotations

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import SpecError  # noqa: E402

pytestmark = pytest.mark.host("a body makes its tensors on the host")


def names(stages: list[nn.Sequential]) -> list[list[str]]:
    return [[*stage._modules] for stage in stages]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    widths = [3, 40, 40, 5, 5, 5]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers).double()


def test_costs():
    net = model()
    assert names(spt.split_stages(net, 2)) == [list("0123"), list("456789")]
    assert names(spt.split_stages(net, 3)) == [list("01"), list("23"), list("456789")]
    x = torch.ones(4, 3, dtype=torch.float64)
    assert names(spt.split_stages(net, 3, cost="flops", sample=x)) == [list("01"), list("23"), list("456789")]
    assert names(spt.split_stages([net[0], net[1], net[2]], 2, cost=[0, 0, 7])) == [["0", "1"], ["2"]]
    assert names(spt.split_stages(net, 2, cost=lambda m: isinstance(m, nn.Tanh))) == [list("0123456"), list("789")]


def test_trials_leave_the_model_as_it_was():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    spt.split_stages(net, 2, cost="seconds", sample=torch.randn(5, 3))
    assert all(p.grad is None for p in net.parameters())
    assert not net[1].running_mean.any()
    assert net[1].num_batches_tracked == 0


def test_stages_by_seconds_are_the_same_on_all_workers_and_run_as_the_model():
    x = torch.ones(4, 3, dtype=torch.float64)

    def body(x):
        stages = spt.split_stages(model(), 3, cost="seconds", sample=x)
        cuts.append(names(stages))
        return spt.pipeline(stages, "stage", microbatches=2)(x)

    cuts: list = []
    y = spt.map(body, P(), P(), mesh=spmd.Mesh(stage=3))(x)
    assert cuts[0] == cuts[1] == cuts[2]
    torch.testing.assert_close(y, model()(x).detach(), rtol=0, atol=1e-14)


def test_mistakes():
    with pytest.raises(SpecError, match=r"(?s)argument module.*an nn.Sequential"):
        spt.split_stages(nn.Linear(2, 2), 2)
    with pytest.raises(SpecError, match=r"(?s)argument cost.*'time'"):
        spt.split_stages(model(), 2, cost="time")
    with pytest.raises(SpecError, match=r"(?s)argument sample"):
        spt.split_stages(model(), 2, cost="flops")
