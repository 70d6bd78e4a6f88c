"""Units by patterns, and modules on the device meta, whose parameters are made as blocks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from data_parallel_cases import on_workers, randn, share  # noqa: E402
from torch import nn  # noqa: E402

import spmd  # noqa: E402
from bridge.torch.sharding.sharded_models import Block, Net  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.host("a body makes its tensors on the host")]


@pytest.mark.parametrize(
    ("unit", "count"),
    [("blocks.*", 5), ("*", 6), (["blocks.*", "blocks.*.up"], 9), ("up", 5), ("blocks.[01]", 3), (nn.Linear, 11)],
    ids=str,
)
def test_a_pattern_takes_the_outermost_modules(unit, count):
    """One reduce-scatter for each unit, and one for what is left, if anything."""

    def main(worker):
        net = spt.shard_parameters(Net().double(), "data", unit=unit)
        with spmd.ledger() as log:
            net(share(randn(6, 5), worker, 3)).sum().backward()
        return log.operators["ReduceScatter"]

    assert on_workers(3, main) == [count] * 3


class Scale(nn.Module):
    """A module with a buffer, and without a method that draws."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
        self.scale = nn.Parameter(torch.ones(7))
        self.register_buffer("shift", torch.ones(7))

    def forward(self, x):
        return self.inner(x) * self.scale + self.shift


def fill(module):
    if isinstance(module, Scale):
        nn.init.uniform_(module.scale)
        module.shift.fill_(2.0)
    else:
        module.reset_parameters()


def make_blocks():
    return nn.Sequential(nn.Linear(5, 7), Attending(), nn.LSTM(7, 3, batch_first=True))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(7, 1, batch_first=True)
        self.table = nn.Embedding(9, 7, padding_idx=0)

    def forward(self, x):
        return self.attention(x, x, x)[0] + self.table.weight.mean()


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize(("make", "init"), [(make_blocks, "broadcast"), (Scale, fill)], ids=["reset", "init"])
def test_modules_on_meta_have_the_values_of_one_worker(make, init, n):
    def expected():
        torch.manual_seed(7)
        with torch.device("meta"):
            net = make()
        modules = [m for m in net.modules() if any(True for _ in (*m.parameters(False), *m.buffers(False)))]
        net.to_empty(device="cpu")
        with torch.no_grad():
            for m in modules:
                if callable(init):
                    init(m)
                else:
                    (m.reset_parameters if hasattr(m, "reset_parameters") else m._reset_parameters)()
        return net.state_dict()

    def main():
        with torch.device("meta"):
            net = make()
        net = spt.shard_parameters(net, "data", init=init, unit=(Attending, nn.LSTM, nn.BatchNorm1d))
        for p in net.parameters():
            assert p.device.type == "cpu"
            assert p.requires_grad
        net(torch.ones(2, 5) if make is Scale else torch.ones(2, 1, 5))
        return spt.state_dict(net)

    expected = expected()
    torch.manual_seed(7)
    found = spt.map(main, (), None, mesh=spmd.Mesh(data=n))()
    assert list(found) == list(expected)
    for name, value in expected.items():
        if "running" not in name and "num_batches" not in name:  # the forward has changed them
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_a_plan_of_a_module_on_meta():
    plan = {"up": spt.column("model"), "down": spt.row("model")}

    def values(mesh, axes):
        def main():
            with torch.device("meta"):
                net = Block()
            net = spt.parallelize(net, plan if "model" in axes else {})
            return spt.state_dict(spt.shard_parameters(net, "data", init=reset))

        torch.manual_seed(3)
        return spt.map(main, (), None, mesh=mesh)()

    def reset(module):
        module.reset_parameters() if hasattr(module, "reset_parameters") else nn.init.ones_(module.scale)

    one, split = values(spmd.Mesh(data=1), ("data",)), values(spmd.Mesh(data=2, model=2), ("data", "model"))
    for name, value in one.items():
        torch.testing.assert_close(split[name], value, rtol=0, atol=0)


def test_it_trains():
    def main(x):
        with torch.device("meta"):
            net = make_blocks()
        net = spt.shard_parameters(net, "data")
        optimizer = torch.optim.AdamW(net.parameters())
        loss = spt.mean(net(x)[0], "data")
        loss.backward()
        optimizer.step()
        return loss

    spt.map(main, P("data"), P(), mesh=spmd.Mesh(data=2))(torch.ones(4, 2, 5))
