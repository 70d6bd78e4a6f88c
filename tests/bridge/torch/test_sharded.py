"""Modules of users with parameters in blocks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd import Layout, P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError  # noqa: E402

F64 = torch.float64

pytestmark = pytest.mark.torch


class Scale(spt.ShardedModule):
    def __init__(self, features: int, value: Any):
        super().__init__()
        self.register_shard("scale", value, P("x"), (features,), dtype=F64)
        self.register_buffer("seen", torch.zeros(2))
        self.offset = nn.Parameter(torch.zeros((), dtype=F64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.shard("scale") + self.offset


@pytest.mark.parametrize("check", [True, False])
def test_a_module_says_which_of_its_parameters_are_blocks(check):
    torch.manual_seed(2)
    whole = torch.empty(7, dtype=F64).normal_()
    x = torch.arange(7.0, dtype=F64)
    result = {}

    def main():
        k = spmd.worker_index("x")
        net = nn.Sequential(Scale(7, nn.init.normal_))
        layout = net[0].shard_layout("scale")
        mine = spt.varying(x[layout.slices(k)], "x")
        y = net(mine).square().sum()
        (spt.psum(y, "x") if check else y).backward()
        state = net.state_dict()
        net.load_state_dict({k: v + 1 for k, v in state.items()})
        result[k] = state, net[0].scale.detach().block(), net[0].scale.grad.block(), net[0].gathered("scale")

    torch.manual_seed(2)
    spt.map(main, (), None, mesh=spmd.Mesh(x=3), check=check)()
    layout = Layout((7,), P("x"), {"x": 3})
    for k, (state, scale, g, gathered) in result.items():
        assert {name: v.shape for name, v in state.items()} == {"0.scale": (7,), "0.offset": (), "0.seen": (2,)}
        assert torch.equal(state["0.scale"], whole)
        assert torch.equal(scale, whole[layout.slices(k)] + 1)
        assert torch.equal(gathered, whole + 1)
        assert torch.equal(g, (2 * whole * x * x)[layout.slices(k)])


def test_a_typed_body_beside_one_that_is_compiled(monkeypatch):
    """That some thread compiles is a flag of the process; what this one does, it must find out otherwise."""
    x = torch.arange(1.0, 8, dtype=F64)
    result = {}

    def main():
        k = spmd.worker_index("x")
        net = Scale(7, nn.init.ones_)
        to = spt.nn.AllSumReduce("x")
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
        loss = to((net(x[net.shard_layout("scale").slices(k)].clone()) ** 2).sum())
        loss.backward()
        result[k] = loss.item(), net.offset.grad.item()

    assert torch.compiler._is_compiling_flag is False  # what this test sets is still there
    spt.map(main, (), None, mesh=spmd.Mesh(x=2))()
    value = (x**2).sum().item()
    assert result == {0: (value, 2 * x.sum().item()), 1: (value, 2 * x.sum().item())}


def test_errors_of_register_shard():
    def main(kind):
        module = spt.ShardedModule()
        if kind == "shape":
            module.register_shard("w", nn.init.ones_, P("x"))
        elif kind == "layout":
            module.register_shard("w", torch.ones(3), Layout((4,), P("x"), {"x": 2}))
        elif kind == "number":
            module.register_shard("w", torch.ones(()), P())

    for kind, words in {
        "shape": "argument shape",
        "layout": r"shape \[3\]",
        "number": "numbers are replicated",
    }.items():
        with pytest.raises(LayoutError, match=words):
            spt.map(main, None, None, mesh=spmd.Mesh(x=2))(kind)
