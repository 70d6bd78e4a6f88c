"""`spt.nn.Softmax` and its kin are torch's, however the input lies."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from bridge.torch.nn.module_cases import Case, check_module, table  # noqa: E402
from spmd import Grid, Layout, P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402

pytestmark = pytest.mark.torch

AXES = {"data": 2, "model": 2}
NAMES = ["Softmax", "LogSoftmax", "Softmin"]
SHAPE = (3, 5, 2)
SPECS = [P(None, "model"), P("data", ("model",)), P(None, ("data", "model")), P("data", None, "model")]


def case(name, spec, shape=SHAPE, lies=None, **options):
    lies = lies or spec
    return Case(name, options, {"spec": spec}, [shape], [lies], lies, AXES)


@table(
    *(case(name, spec, dim=1) for name, spec in itertools.product(NAMES, SPECS)),
    *(case(name, P("model"), (3,), dim=0) for name in NAMES),
    *(case(name, P(), (), dim=-1) for name in NAMES),
    *(
        case(name, Grid((1, 3, 1), workers=[2, 0, 3]), lies=Layout.grid(SHAPE, (1, 3, 1), AXES, [2, 0, 3]), dim=-2)
        for name in NAMES
    ),
    *(case("Softmax2d", spec, (2, 5, 3, 2)) for spec in SPECS),
    case("Softmax2d", P("data", "model"), (5, 3, 2)),
)
def test_softmax(case):
    check_module(case)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 4, 2), (1, 4, 2, 2)], ids=str)
def test_without_a_dimension_torch_s_is_taken(name, shape):
    x = torch.randn(shape)
    with pytest.warns(UserWarning, match="dim"):
        expected = getattr(nn, name)()(x)
    spec = P(*[None] * (0 if len(shape) in (1, 3) else 1), "x")
    with pytest.warns(UserWarning, match=f"spt.nn.{name}: dim=None is deprecated"):
        found = spt.map(getattr(spt.nn, name)(spec=spec), spec, spec, mesh=spmd.Mesh(x=2))(x)
    torch.testing.assert_close(found, expected)
