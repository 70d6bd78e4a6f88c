"""Lazy layers: the first input or a loaded state gives the lengths; what was changed before stays."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd import Grid, P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError  # noqa: E402

pytestmark = pytest.mark.torch

MESH = spmd.Mesh(model=3)
SPECS = [
    {"w_spec": P("model")},
    {"w_spec": P(None, "model")},
    {"spec": P(None, "model"), "w_spec": P("model"), "out_spec": P()},
    {"spec": Grid((1, 2), workers=[2, 0]), "w_spec": Grid((2, 1)), "out_spec": Grid((1, 1), workers=[1])},
]


@pytest.mark.parametrize("specs", SPECS, ids=str)
def test_the_first_input_gives_the_length_of_the_whole(specs):
    x, n = torch.randn(4, 7), {}
    spec = specs.get("spec") or (P(None, "model") if specs["w_spec"] == P(None, "model") else P())
    torch.manual_seed(1)
    expected = nn.Linear(7, 5, dtype=torch.float64)
    lies = spec.layout(x.shape, MESH.axes) if isinstance(spec, Grid) else spec

    def body(block):
        layer = copy.deepcopy(spt.nn.LazyLinear(5, **specs)).double().eval()
        layer.bias.requires_grad = False
        with pytest.raises(LayoutError, match="uninitialised"):
            layer.to_torch()
        layer(block.double())
        assert type(layer) is spt.nn.Linear
        assert (layer.in_features, layer.training, layer.bias.requires_grad) == (7, False, False)
        n[spmd.worker_index("model")] = {k: spt.block(v).clone() for k, v in spt.state_dict(layer).items()}

    torch.manual_seed(1)
    spt.map(body, lies, None, mesh=MESH)(x)
    for state in n.values():
        assert all(v.dtype is torch.float64 for v in state.values())
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=0)


def test_a_state_that_is_loaded_gives_the_length_too():
    whole = nn.Linear(7, 5)

    def body():
        net = nn.Sequential(spt.nn.LazyLinear(5, w_spec=P("model")))
        assert str(net.load_state_dict(nn.Sequential(whole).state_dict())) == "<All keys matched successfully>"
        assert isinstance(net[0].weight, spt.PartitionedTensor)
        x = torch.arange(14.0).reshape(2, 7)
        y = spt.all_gather(net(x), "model", axis=-1, tiled=True, to="invariant")
        torch.testing.assert_close(spt.block(y), whole(x))

    spt.map(body, (), None, mesh=MESH)()
