"""Dropout layers drop the same entries on any mesh, as often as they say, and whole channels."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd import Grid, P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402

pytestmark = pytest.mark.torch

CHANNELS = P("x", "y", "z")
SATURATION = -1.7580993408473766


def dropped(name, shape, rate, axes, spec, layer_spec=None, **options):
    """The whole result for ones, and the gradient."""
    mesh = spmd.Mesh(**axes)
    layer = getattr(spt.nn, name)(rate, **options, spec=layer_spec or spec)
    lies = spec.layout(shape, mesh.axes) if isinstance(spec, Grid) else spec
    x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(5)
    y = spt.map(layer, lies, lies, mesh=mesh)(x)
    y.sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize(
    ("name", "shape", "together"),
    [
        ("Dropout", (6, 5, 7), ()),
        ("Dropout1d", (6, 5, 7), (2,)),
        ("Dropout1d", (6, 5), (1,)),
        ("Dropout2d", (6, 5, 3, 7), (2, 3)),
        ("Dropout3d", (6, 5, 3, 7), (1, 2, 3)),
        ("Dropout3d", (6, 5, 3, 2, 2), (2, 3, 4)),
        ("AlphaDropout", (6, 5, 7), ()),
        ("FeatureAlphaDropout", (6, 5, 7), (2,)),
    ],
    ids=lambda v: str(v).replace(" ", ""),
)
def test_entries_are_the_same_on_any_mesh(name, shape, together):
    torch.manual_seed(5)
    spec = P(*CHANNELS.dims[: min(len(shape), 3)])
    one = dropped(name, shape, 0.4, {"x": 1, "y": 1, "z": 1}, spec)
    values, first = one[0].unique(), one[0].amax(together, keepdim=True) if together else one[0]
    assert len(values) == 2
    assert torch.equal(one[0], first.expand(shape))  # channels as a whole
    kept = one[0] == values[-1]
    assert 0.3 < kept.double().mean() < 0.9
    if "Alpha" in name:
        scale = 1 / math.sqrt(0.6 * (1 + 0.4 * SATURATION**2))
        expected = [scale * (SATURATION - 0.4 * SATURATION), scale * (1 - 0.4 * SATURATION)]
    else:
        scale = 1 / 0.6
        expected = [0, scale]
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(one[1], kept.double() * scale)
    for axes in ({"x": 2, "y": 1, "z": 1}, {"x": 1, "y": 2, "z": 3}, {"x": 4, "y": 2, "z": 1}):
        other = dropped(name, shape, 0.4, axes, spec)
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    grid = Grid((2, 1, 2, *[1] * (len(shape) - 3))[: len(shape)], workers=[3, 1, 4, 0][: 4 if len(shape) > 2 else 2])
    assert torch.equal(one[0], dropped(name, shape, 0.4, {"x": 5, "y": 1, "z": 1}, grid)[0])


def test_rates_of_torch():
    x = torch.randn(4, 3)
    for name in ("Dropout", "AlphaDropout"):
        layer = getattr(spt.nn, name)(1.0)
        result = spt.map(layer, P(), P(), mesh=spmd.Mesh(x=2))(x)
        assert torch.equal(result, torch.zeros(4, 3))
        assert torch.equal(result, getattr(nn, name)(1.0)(x))
        with pytest.raises(ValueError, match="probability"):
            getattr(spt.nn, name)(1.5)
