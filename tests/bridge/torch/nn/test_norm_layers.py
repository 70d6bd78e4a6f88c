"""Norms of `spt.nn` against those of torch, whatever is split; running statistics on any mesh."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import spmd
from bridge.torch.nn.module_cases import Case, check_module, double_precision, table
from spmd import Grid, Layout, P
from spmd.bridge import torch as spt
from spmd.errors import StateError

pytestmark = pytest.mark.torch

TWO = {"model": 2}
THREE = {"model": 3}
FOUR = {"data": 2, "model": 2}


def grid(shape, dims, workers, axes):
    return Layout.grid(shape, dims, axes, workers)


def case(name, options, specs, shape, axes, lies=None):
    """Of one array that comes and goes as `specs["spec"]` says, or as `lies`."""
    lies = lies or specs.get("spec") or P()
    return Case(name, options, specs, [shape], [lies], lies, axes)


@table(
    case("LayerNorm", {"normalized_shape": 6}, {}, (3, 6), TWO),
    case("LayerNorm", {"normalized_shape": 5, "bias": False}, {"spec": P("data", "model")}, (3, 1, 5), FOUR),
    case("LayerNorm", {"normalized_shape": (4, 5), "eps": 0.1}, {"spec": P(None, "model", "data")}, (3, 4, 5), FOUR),
    case(
        "LayerNorm",
        {"normalized_shape": (4, 5)},
        {"spec": P("data", None, "model"), "w_spec": P(None, "model")},
        (1, 4, 5),
        FOUR,
    ),
    case("LayerNorm", {"normalized_shape": 2, "elementwise_affine": False}, {"spec": P(None, "model")}, (4, 2), THREE),
    case("LayerNorm", {"normalized_shape": 7}, {"spec": P(None, "model"), "w_spec": P("model")}, (4, 7), THREE),
    case(
        "LayerNorm",
        {"normalized_shape": (4, 5)},
        {"spec": Grid((2, 1, 2), workers=[3, 0, 1, 2])},
        (3, 4, 5),
        FOUR,
        grid((3, 4, 5), (2, 1, 2), [3, 0, 1, 2], FOUR),
    ),
    case("RMSNorm", {"normalized_shape": 7}, {"spec": P("model")}, (2, 7), THREE),
    case("RMSNorm", {"normalized_shape": (2, 7), "eps": 1e-3}, {"spec": P(None, None, "model")}, (2, 2, 7), THREE),
    case("RMSNorm", {"normalized_shape": 7}, {"spec": P("data", "model"), "w_spec": P("model")}, (3, 7), FOUR),
    case("GroupNorm", {"num_groups": 2, "num_channels": 6}, {}, (2, 6, 3), TWO),
    case("GroupNorm", {"num_groups": 2, "num_channels": 6}, {"spec": P("data", None, "model")}, (1, 6, 3, 2), FOUR),
    case("GroupNorm", {"num_groups": 2, "num_channels": 6, "bias": False}, {"spec": P(None, "model")}, (3, 6), TWO),
    case("GroupNorm", {"num_groups": 2, "num_channels": 4}, {"spec": P(None, "model")}, (3, 4, 5), THREE),
    case(
        "GroupNorm", {"num_groups": 3, "num_channels": 6, "affine": False}, {"spec": P("model", "data")}, (3, 6), FOUR
    ),
    case(
        "GroupNorm",
        {"num_groups": 2, "num_channels": 6},
        {"spec": Grid((1, 2, 1), workers=[2, 1])},
        (3, 6, 5),
        THREE,
        grid((3, 6, 5), (1, 2, 1), [2, 1], THREE),
    ),
    case("InstanceNorm1d", {"num_features": 4}, {"spec": P("model")}, (2, 4, 5), THREE),
    case("InstanceNorm1d", {"num_features": 4, "affine": True}, {"spec": P(None, "model", "data")}, (2, 4, 5), FOUR),
    case("InstanceNorm1d", {"num_features": 3, "affine": True}, {}, (3, 4), TWO),
    case(
        "InstanceNorm1d",
        {"num_features": 3, "affine": True},
        {"spec": P(None, None, "model")},
        (3, 4),
        TWO,
        P(None, "model"),
    ),
    case("InstanceNorm2d", {"num_features": 3}, {"spec": P(None, None, "model")}, (2, 3, 4, 5), THREE),
    case(
        "InstanceNorm3d",
        {"num_features": 2, "affine": True},
        {"spec": P("data", None, None, "model")},
        (2, 2, 2, 3, 2),
        FOUR,
    ),
    case("BatchNorm1d", {"num_features": 4}, {}, (5, 4), TWO),
    case("BatchNorm1d", {"num_features": 4}, {"spec": P("model")}, (2, 4), THREE),
    case("BatchNorm1d", {"num_features": 4, "affine": False}, {"spec": P("data", "model")}, (3, 4, 2), FOUR),
    case("BatchNorm1d", {"num_features": 5, "bias": False}, {"spec": P(None, "model")}, (3, 5), THREE),
    case("BatchNorm1d", {"num_features": 5}, {"spec": P("data"), "w_spec": P("model")}, (3, 5), FOUR),
    case(
        "BatchNorm2d",
        {"num_features": 3, "track_running_stats": False},
        {"spec": P("data", None, "model")},
        (3, 3, 2, 2),
        FOUR,
    ),
    case("BatchNorm3d", {"num_features": 3}, {"spec": P(None, None, "model", None, "data")}, (1, 3, 4, 2, 3), FOUR),
    case("SyncBatchNorm", {"num_features": 3}, {"spec": P("data", "model")}, (3, 3, 4), FOUR),
    case(
        "BatchNorm1d",
        {"num_features": 5},
        {"spec": Grid((2, 2), workers=[3, 0, 1, 2])},
        (3, 5),
        FOUR,
        grid((3, 5), (2, 2), [3, 0, 1, 2], FOUR),
    ),
)
def test_norms(case):
    check_module(case)


@pytest.mark.parametrize("train", [True, False])
def test_norms_in_eval(train):
    options = {"num_features": 4, "track_running_stats": True}
    check_module(case("BatchNorm1d", options, {"spec": P("data", "model")}, (3, 4), FOUR), train=train)
    check_module(case("InstanceNorm1d", options, {"spec": P("data", "model")}, (3, 4, 2), FOUR), train=train)


def trained(module, batches):
    """Running statistics after some batches, and what the module gives in eval."""
    for x in batches:
        module(x)
    y = module.eval()(batches[0])
    return y, spt.state_dict(module)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("name", "options", "shape", "specs", "lies"),
    [
        ("BatchNorm1d", {}, (5, 3), {"spec": P("data", "model")}, None),
        ("BatchNorm1d", {"momentum": None}, (5, 3), {"spec": P("data")}, None),
        ("BatchNorm2d", {"momentum": 0.3, "affine": False}, (1, 3, 4, 5), {"spec": P("data", None, "model")}, None),
        ("BatchNorm1d", {}, (4, 3, 3), {"spec": P("data"), "w_spec": P("model")}, None),
        ("BatchNorm1d", {}, (5, 3), {"spec": Grid((2, 2), workers=[1, 3, 0, 2])}, [1, 3, 0, 2]),
        ("BatchNorm1d", {"track_running_stats": False}, (5, 3), {"spec": P("data")}, None),
        ("InstanceNorm1d", {"track_running_stats": True}, (5, 3, 4), {"spec": P("data", "model")}, None),
        ("InstanceNorm1d", {"track_running_stats": True}, (1, 3, 4), {"spec": P("data", None, "model")}, None),
        ("InstanceNorm2d", {"track_running_stats": True, "affine": True, "momentum": 0.4}, (3, 3, 4, 2), {}, None),
        (
            "InstanceNorm1d",
            {"track_running_stats": True},
            (3, 3, 4),
            {"spec": Grid((2, 2, 1), workers=[1, 3, 0, 2])},
            [1, 3, 0, 2],
        ),
    ],
)
def test_running_statistics(name, options, shape, specs, lies, check):
    rng, options = np.random.default_rng(7), {"num_features": 3, **options}
    batches = [torch.tensor(rng.standard_normal(shape) * (k + 1) + k) for k in range(3)]
    mesh = spmd.Mesh(**FOUR)
    spec = specs.get("spec") or P()
    lies = spec if lies is None else Layout.grid(shape, spec.dims, mesh.axes, lies)
    with double_precision():
        expected, state = trained(getattr(nn, name)(**options), batches)
        body = lambda *xs: trained(getattr(spt.nn, name)(**options, **specs), xs)
        y, found = spt.map(body, lies, (lies, None), mesh=mesh, check=check)(*batches)
    torch.testing.assert_close(y.detach(), expected.detach(), rtol=1e-10, atol=1e-10)
    assert list(found) == list(state)
    for key, value in state.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize("spec", [P("data", "model"), P(None, ("model", "data")), None])
def test_lazy(spec, loads):
    x = torch.tensor(np.random.default_rng(1).standard_normal((5, 3)))
    whole = nn.BatchNorm1d(3, dtype=torch.float64)
    whole.weight.data = torch.arange(3.0, dtype=torch.float64)
    wanted = trained(whole if loads else nn.BatchNorm1d(3, dtype=torch.float64), [x])
    state = nn.BatchNorm1d(3, dtype=torch.float64).state_dict() | {"weight": whole.weight.data}

    def body(x):
        layer = spt.nn.LazyBatchNorm1d(spec=spec, dtype=torch.float64)
        if loads:
            layer.load_state_dict(state)
        y, found = trained(layer, [x])
        assert type(layer) is spt.nn.BatchNorm1d
        assert type(layer.to_torch()) is nn.BatchNorm1d
        return y, found

    lies = spec or P()
    y, found = spt.map(body, lies, (lies, None), mesh=spmd.Mesh(**FOUR))(x)
    torch.testing.assert_close(y.detach(), wanted[0].detach())
    torch.testing.assert_close(found, wanted[1])


def test_converted_batch_norms():
    net = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.BatchNorm1d(3), nn.GELU())).double()
    x = torch.tensor(np.random.default_rng(1).standard_normal((5, 4)))
    wanted = net(x)

    def body(x):
        ours = spt.nn.SyncBatchNorm.convert_sync_batchnorm(net, spec=P("model"))
        assert type(ours[1][0]) is spt.nn.SyncBatchNorm
        return ours(x)

    net[1][0].reset_running_stats()
    y = spt.map(body, P("model"), P("model"), mesh=spmd.Mesh(**THREE))(x)
    torch.testing.assert_close(y.detach(), wanted.detach())


NORMS_OF_SAMPLES = {
    "BatchNorm1d": (lambda: spt.nn.BatchNorm1d(3), (6, 3)),
    "BatchNorm2d": (lambda: spt.nn.BatchNorm2d(3), (6, 3, 2, 2)),
    "BatchNorm3d": (lambda: spt.nn.BatchNorm3d(3), (6, 3, 2, 2, 1)),
    "SyncBatchNorm": (lambda: spt.nn.SyncBatchNorm(3), (6, 3, 2)),
    "LazyBatchNorm2d": (lambda: spt.nn.LazyBatchNorm2d(), (6, 3, 2, 2)),
    "InstanceNorm2d": (lambda: spt.nn.InstanceNorm2d(3, track_running_stats=True), (6, 3, 2, 2)),
}


@pytest.mark.parametrize("name", NORMS_OF_SAMPLES)
def test_running_statistics_of_blocks_need_a_spec(name: str) -> None:
    make, shape = NORMS_OF_SAMPLES[name]
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    run = lambda body: spt.map(body, P("x"), P("x"), mesh=spmd.Mesh(x=3))(x)
    with pytest.raises(StateError, match=rf"spt\.nn\.{name.removeprefix('Lazy')}\(\.\.\., spec=P\(\.\.\.\)\)"):
        run(lambda b: make()(b))
    if "Lazy" not in name:
        assert run(lambda b: make().eval()(b)).shape == x.shape
    whole = spt.map(lambda: make()(x), (), P(), mesh=spmd.Mesh(x=3))()  # the same on all workers
    assert whole.shape == x.shape
