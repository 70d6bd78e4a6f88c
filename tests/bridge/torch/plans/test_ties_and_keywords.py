"""Parameters that modules inside and outside a plan share, and blocks as keyword arguments."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import StateError  # noqa: E402

pytestmark = pytest.mark.torch


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).tanh())


@pytest.mark.parametrize("style", [spt.column("model"), spt.row("model")], ids=["column", "row"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_modules_outside_the_plan_keep_their_ties(name, style):
    torch.manual_seed(0)
    net, x = Tied().double(), torch.randn(5, 6, dtype=torch.float64)

    def main():
        split = spt.parallelize(net, {name: style})
        assert split.a.weight is split.b.weight
        y = split(spt.put(x, P("data")))
        y.square().sum().backward()
        return y.whole(), split.a.weight.grad.whole(), spt.state_dict(split)

    y, grad, state = spt.map(main, (), None, mesh=spmd.Mesh(data=2, model=2))()
    whole = copy.deepcopy(net)
    expected = whole(x)
    expected.square().sum().backward()
    assert torch.allclose(y, expected)
    assert torch.allclose(grad, whole.a.weight.grad)
    assert list(state) == list(net.state_dict())


def test_blocks_by_keyword_raise():
    def main(block):
        with pytest.raises(StateError, match="parallelized module"):
            spt.parallelize(nn.Linear(4, 4), {})(input=block)

    spt.map(main, P("data"), None, mesh=spmd.Mesh(data=2))(torch.randn(8, 4))
