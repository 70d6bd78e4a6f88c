"""Whole states of layers: on other meshes, in other forms, in torch; copied, not shared."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from bridge.torch.nn.linear_layers import F64, column, general, row  # noqa: E402
from spmd import Grid, P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError, MeshError  # noqa: E402

pytestmark = pytest.mark.torch


class Net(nn.Module):
    """Sharded and replicated parameters, and a buffer, nested."""

    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.norm = nn.LayerNorm(4, dtype=F64)
        self.body = nn.Sequential(first, nn.Tanh(), second)
        self.register_buffer("steps", torch.tensor(3))


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    net = Net(nn.Linear(4, 9, dtype=F64), nn.Linear(9, 4, dtype=F64))
    with torch.no_grad():
        for p in net.parameters():
            p.normal_()
    return net.state_dict()


def test_a_checkpoint_reloads_on_another_mesh_in_other_forms_and_in_nn_linear():
    whole = checkpoint(0)
    saved = {}
    makers = {
        4: lambda: Net(column("x", 4, 9, dtype=F64, sequence=0), row("x", 9, 4, dtype=F64)),
        3: lambda: Net(
            general(Grid((2,)), Grid((2,), (2, 1)), Grid((2, 1), (0, 2)), 4, 9, dtype=F64),
            column("x", 9, 4, dtype=F64),
        ),
        1: lambda: Net(nn.Linear(4, 9, dtype=F64), row("x", 9, 4, dtype=F64)),
    }
    given = whole
    for n, make in makers.items():
        result = {}

        def main(make=make, given=given, result=result):
            net = make()
            assert str(net.load_state_dict(given)) == "<All keys matched successfully>"
            result[spmd.worker_index("x")] = net.state_dict(), sum(held(p) for p in net.parameters())

        spt.map(main, (), None, mesh=spmd.Mesh(x=n))()
        saved[n] = result
        for state, _ in result.values():
            assert list(state) == list(whole)
            assert all(torch.equal(a, b) for a, b in zip(state.values(), whole.values(), strict=True))
            assert all(type(a) is torch.Tensor and not a.requires_grad for a in state.values())
        given = result[n - 1][0]
    total = sum(v.numel() for v in whole.values()) - 1
    assert max(size for _, size in saved[4].values()) < 0.5 * total
    Net(nn.Linear(4, 9, dtype=F64), nn.Linear(9, 4, dtype=F64)).load_state_dict(given)


def held(p: torch.Tensor) -> int:
    """How many entries of a parameter a worker holds."""
    return p.block().numel() if isinstance(p, spt.Parameter) else p.numel()


def test_what_is_loaded_is_copied_and_what_is_saved_is_not_shared():
    whole = nn.Linear(4, 5).state_dict()
    kept = copy.deepcopy(whole)

    def main():
        for assign in (False, True):
            layer = column("x", 4, 5)
            layer.load_state_dict(whole, assign=assign)
            with torch.no_grad():
                layer.weight.add_(1)
                layer.state_dict()["weight"].zero_()
            assert torch.equal(layer.state_dict()["weight"], kept["weight"] + 1)
            # What is assigned keeps nothing of the whole alive.
            block = layer.weight.block()
            assert block.untyped_storage().nbytes() == block.numel() * 4

    spt.map(main, (), None, mesh=spmd.Mesh(x=2))()
    assert all(torch.equal(whole[k], kept[k]) for k in kept)


def test_a_state_dict_outside_of_a_body_says_where_to_ask():
    layers = {}

    def main():
        layers[spmd.worker_index("x")] = column("x", 4, 5)

    spt.map(main, (), None, mesh=spmd.Mesh(x=2))()
    with pytest.raises(MeshError, match="call state_dict\\(\\) in the body"):
        layers[0].state_dict()
    whole = nn.Linear(4, 5)
    layers[1].load_state_dict(whole.state_dict())  # which nobody else is needed for
    assert torch.equal(layers[1].weight.block(), whole.weight[3:])
    with pytest.raises(MeshError, match="outside of any body"):
        column("x", 4, 5)


def test_conversions_between_forms_and_back():
    torch.manual_seed(0)
    linear = nn.Linear(6, 5, dtype=F64).eval()
    linear.bias.requires_grad_(False)
    x = torch.randn(3, 6, dtype=F64)
    result = {}

    def main():
        column = spt.nn.Linear.from_torch(linear, w_spec=P("x"), out_spec=P())
        row = spt.nn.Linear.from_torch(column, w_spec=P(None, "x"), out_spec=P("x"))
        general = spt.nn.Linear.from_torch(row, spec=Grid((3,)), out_spec=Grid((1,)), w_spec=Grid((1, 3)))
        back = general.to_torch()
        for m in (column, row, general, back):
            assert m.weight.requires_grad
            assert not m.bias.requires_grad
            assert not m.training
        column.weight.data.zero_()
        result[spmd.worker_index("x")] = back
        with pytest.raises(LayoutError, match="argument module"):
            spt.nn.Linear.from_torch(nn.Conv2d(1, 1, 1), w_spec=P(None, "x"))

    spt.map(main, (), None, mesh=spmd.Mesh(x=3))()
    for back in result.values():
        assert type(back) is nn.Linear
        assert torch.equal(back.weight, linear.weight)
        assert torch.equal(back.bias, linear.bias)
        assert torch.equal(back(x), linear(x))
