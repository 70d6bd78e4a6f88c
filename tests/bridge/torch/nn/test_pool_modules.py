"""Poolings, paddings and upsamplings of `spt.nn` are those of torch on the whole, and so are their gradients."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from bridge.torch.nn.module_cases import Case, check_module, table  # noqa: E402
from spmd import Grid, P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402

pytestmark = pytest.mark.torch

X2, X3, X4, XY = {"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 2}
ROWS, BOTH = P(None, None, "x"), P(None, None, "x", "y")


def layer(name, options, shape, spec, axes, *, out=None, in_size=None):
    """A case whose result lies as the input, or as out says."""
    specs = {"spec": spec, "out_spec": out, "in_size": in_size}
    return Case(name, options, specs, [shape], [spec], spec if out is None else out, axes)


def on_grid(name, options, shape, grid, result, axes, out=None):
    """A case on a grid of workers. result: the shape of the result."""
    out_layout = (out or grid).layout(result, axes)
    return Case(name, options, {"spec": grid, "out_spec": out}, [shape], [grid.layout(shape, axes)], out_layout, axes)


@table(
    layer("MaxPool2d", {"kernel_size": 2}, (2, 3, 9, 8), P(None, "y", "x"), XY),
    layer("MaxPool2d", {"kernel_size": 3, "stride": 2, "padding": 1}, (2, 3, 7, 8), BOTH, XY, in_size=(7, 8)),
    layer(
        "MaxPool1d",
        {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2},
        (2, 3, 11),
        P("y", None, "x"),
        {"x": 3, "y": 1},
    ),
    layer("MaxPool2d", {"kernel_size": 2, "stride": 3, "ceil_mode": True}, (2, 1, 10, 8), ROWS, X3, in_size=(10, 8)),
    layer(
        "MaxPool3d",
        {"kernel_size": (2, 1, 3), "stride": 2, "padding": (1, 0, 1)},
        (1, 2, 5, 3, 6),
        P(None, None, "x", None, "y"),
        XY,
    ),
    layer("MaxPool1d", {"kernel_size": 2}, (2, 3, 5), ROWS, X4),  # more workers than results
    layer("MaxPool2d", {"kernel_size": 2}, (2, 3, 8, 3), P("x", None, "y"), XY, out=P("y", None, "x")),
    layer("MaxPool2d", {"kernel_size": (3, 2)}, (3, 7, 4), P(None, "x"), X2),  # no batch
    on_grid("MaxPool2d", {"kernel_size": 2}, (2, 3, 7, 4), Grid((1, 2, 1), [3, 1]), (2, 3, 3, 2), XY),
    on_grid("MaxPool1d", {"kernel_size": 2}, (3, 7), Grid((1, 2), [2, 0]), (3, 3), X3, Grid((3, 1))),  # no batch
    layer("AvgPool2d", {"kernel_size": 2}, (2, 3, 9, 8), ROWS, X4, in_size=(9, 8)),
    layer("AvgPool2d", {"kernel_size": 3, "stride": 2, "padding": 1}, (2, 3, 7, 8), BOTH, XY),
    layer(
        "AvgPool2d",
        {"kernel_size": (3, 4), "stride": 2, "padding": (1, 2), "count_include_pad": False},
        (2, 3, 7, 8),
        BOTH,
        XY,
    ),
    layer("AvgPool1d", {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}, (2, 3, 10), ROWS, X3),
    layer(
        "AvgPool2d", {"kernel_size": 2, "stride": 1, "divisor_override": 3}, (2, 1, 5, 5), P(None, None, None, "x"), X3
    ),
    layer("AvgPool3d", {"kernel_size": 2, "stride": 1, "padding": 1}, (2, 1, 3, 4, 5), BOTH, XY),
    layer("AvgPool2d", {"kernel_size": 2}, (2, 2, 5, 4), P(None, "x"), X4),  # more workers than channels
    layer("AvgPool1d", {"kernel_size": 2}, (3, 7), P("x", "y"), XY, in_size=7),  # no batch
    layer("AdaptiveAvgPool2d", {"output_size": 1}, (2, 3, 7, 5), ROWS, X3, out=P()),
    layer("AdaptiveAvgPool2d", {"output_size": (None, 3)}, (2, 3, 7, 5), BOTH, XY, in_size=(7, 5)),
    layer("AdaptiveAvgPool1d", {"output_size": 4}, (3, 2, 9), P("y", None, "x"), XY),
    layer("AdaptiveAvgPool3d", {"output_size": (2, 1, 3)}, (2, 7, 3, 4), P(None, "x"), X2),  # no batch
    layer("AdaptiveMaxPool2d", {"output_size": (3, None)}, (2, 3, 7, 5), BOTH, XY, in_size=(7, 5)),
    layer("AdaptiveMaxPool1d", {"output_size": 4}, (3, 2, 9), P("y", None, "x"), XY),
    layer("AdaptiveMaxPool3d", {"output_size": 2}, (2, 7, 3, 4), P(None, "x"), X3),  # no batch
    on_grid("AdaptiveMaxPool2d", {"output_size": (3, 2)}, (2, 3, 7, 4), Grid((1, 2, 1), [3, 1]), (2, 3, 3, 2), XY),
)
def test_poolings(case):
    check_module(case)


@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (nn.MaxPool2d(3, 2, 1, return_indices=True), (3, 2, 9, 8)),
        (nn.MaxPool2d(2, return_indices=True), (3, 2, 9, 8)),
        (nn.AdaptiveMaxPool2d((4, 3), return_indices=True), (3, 2, 9, 8)),
    ],
    ids=["padded", "plain", "adaptive"],
)
def test_indices_are_those_of_the_whole(pool, shape):
    x, rows = torch.randn(shape), P("x", None, "y")
    ours = getattr(spt.nn, type(pool).__name__)
    run = spt.map(lambda x: ours.from_torch(pool, spec=rows)(x), rows, (rows, rows), mesh=spmd.Mesh(**XY))
    for a, b in zip(run(x), pool(x), strict=True):
        assert torch.equal(a, b)


@table(
    layer("ZeroPad2d", {"padding": (1, 2, 3, 0)}, (2, 3, 5, 4), ROWS, X3),
    layer("ConstantPad1d", {"padding": 2, "value": -1.5}, (2, 3, 5), P("y", None, "x"), XY, in_size=5),
    layer("ConstantPad3d", {"padding": (0, 1, -1, 2, 1, -2), "value": 2.0}, (1, 2, 6, 3, 4), ROWS, X2),
    layer("ZeroPad1d", {"padding": (2, 1)}, (2, 5), P("x", "y"), XY, in_size=5),  # no batch
    layer("ZeroPad2d", {"padding": 1}, (7, 5), P("x"), X3, in_size=(7, 5)),  # no channels
    layer("ReflectionPad2d", {"padding": 2}, (2, 3, 5, 4), BOTH, XY, in_size=(5, 4)),
    layer("ReflectionPad1d", {"padding": (0, 3)}, (2, 7), P(None, "x"), X4),
    layer("ReplicationPad3d", {"padding": 1}, (1, 2, 3, 5, 4), P(None, None, None, "x"), X3),
    layer("CircularPad2d", {"padding": (1, 0, 2, 3)}, (2, 3, 5, 4), ROWS, X3),
    layer("CircularPad1d", {"padding": 2}, (2, 3, 6), P(), X2, out=ROWS),
    on_grid("CircularPad2d", {"padding": 1}, (2, 3, 5, 4), Grid((1, 2, 1), [2, 0]), (2, 3, 7, 6), X3),
)
def test_paddings(case):
    check_module(case)


@table(
    layer("Upsample", {"scale_factor": 2}, (2, 3, 5, 4), ROWS, X3),
    layer("Upsample", {"size": (7, 9), "mode": "bilinear"}, (2, 3, 5, 4), BOTH, XY, in_size=(5, 4)),
    layer(
        "Upsample",
        {"scale_factor": 1.5, "mode": "bilinear", "align_corners": True},
        (2, 3, 5, 4),
        P("y", None, "x"),
        XY,
    ),
    layer("Upsample", {"scale_factor": (2, 1.5), "mode": "bicubic"}, (2, 1, 6, 4), ROWS, X3),
    layer("Upsample", {"size": 7, "mode": "linear"}, (2, 3, 5), P("y", None, "x"), XY),
    layer("Upsample", {"scale_factor": 2, "mode": "trilinear"}, (1, 2, 3, 2, 4), ROWS, X2, in_size=(3, 2, 4)),
    layer("Upsample", {"scale_factor": 1.7, "mode": "nearest-exact"}, (2, 3, 5, 4), ROWS, X4),
    layer(
        "Upsample", {"scale_factor": 1.7, "recompute_scale_factor": True, "mode": "bilinear"}, (2, 3, 5, 4), ROWS, X2
    ),
    layer("Upsample", {"size": (3, 3), "mode": "area"}, (2, 3, 5, 4), ROWS, X2),
    layer("Upsample", {"scale_factor": 0.5, "mode": "bilinear"}, (2, 3, 7, 8), ROWS, X3, out=P(None, None, None, "x")),
    layer("UpsamplingNearest2d", {"scale_factor": 2}, (2, 3, 5, 5), ROWS, X3, in_size=5),
    layer("UpsamplingBilinear2d", {"size": (8, 5)}, (2, 3, 5, 4), BOTH, XY),
    on_grid(
        "Upsample", {"scale_factor": 2, "mode": "bilinear"}, (2, 3, 5, 4), Grid((1, 2, 1), [2, 0]), (2, 3, 10, 8), X3
    ),
)
def test_upsamplings(case):
    check_module(case)


def test_pixels_shuffle_on_blocks_of_rows():
    """`nn.PixelShuffle` of torch on whole channels."""
    x = torch.randn(2, 8, 5, 3)
    y = spt.map(nn.PixelShuffle(2), ROWS, ROWS, mesh=spmd.Mesh(x=3))(x)
    assert torch.equal(y, nn.PixelShuffle(2)(x))
