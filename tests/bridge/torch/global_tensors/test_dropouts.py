"""Dropout of global tensors: other entries at each call, the same on any mesh, in layers that exchange data too."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import spmd  # noqa: E402
import spmd.bridge.torch as spt  # noqa: E402
from spmd import P  # noqa: E402

CALLS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "of channels": lambda x: F.dropout1d(x, 0.5),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
}


def twice(call, x, n):
    def body(x):
        split = spt.put(x, P("m"))
        return call(split).whole(), call(split).whole()

    torch.manual_seed(3)
    with spmd.Mesh(m=n):
        return spt.map(body, P(), P())(x)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_call_drops_others_and_each_mesh_the_same(call):
    x = torch.rand(7, 5, 6, dtype=torch.float64) + 0.5
    first, second = twice(call, x, 2)
    assert not torch.equal(first, second)
    for n in (3, 8):
        for a, b in zip(twice(call, x, n), (first, second), strict=True):
            assert torch.allclose(a, b, atol=1e-12)


def test_a_layer_of_a_transformer_trains_with_dropout():
    torch.manual_seed(0)
    whole = nn.TransformerEncoderLayer(6, 3, 8, dropout=0.3, batch_first=True, dtype=torch.float64)
    plan = {"self_attn": spt.heads("m"), "linear1": spt.column("m"), "linear2": spt.row("m")}
    x = torch.randn(2, 4, 6, dtype=torch.float64)

    def body(x):
        layer = spt.parallelize(nn.TransformerEncoderLayer(6, 3, 8, dropout=0.3, batch_first=True).double(), plan)
        layer.load_state_dict(whole.state_dict())
        first, second = layer(x), layer(x)
        (first.square().sum() + second.sum()).backward()
        return first, second, spt.block(layer.norm1.weight.grad)

    found = []
    for n in (2, 3):
        torch.manual_seed(5)
        with spmd.Mesh(m=n):
            found.append(spt.map(body, P(), P())(x))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-10)
    assert not torch.equal(found[0][0], found[0][1])
