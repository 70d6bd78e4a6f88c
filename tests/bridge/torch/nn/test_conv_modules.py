"""Convolutions of `spt.nn` are those of torch on the whole, and so are their gradients, however anything lies."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from bridge.torch.nn.module_cases import Case, check_module, table  # noqa: E402
from spmd import Grid, Layout, P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402

pytestmark = pytest.mark.torch

X2, X3, X4, XY = {"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 2}


def conv(dims, args, shape, spec, lies, axes, out=None, *, name="Conv", options=None, **specs):
    """A case. args: (in_channels, out_channels, kernel_size, ...). lies: how the result lies; out: the out_spec."""
    names = "in_channels", "out_channels", "kernel_size", "stride", "padding"
    specs = {"spec": spec, **specs, **({} if out is None else {"out_spec": out})}
    made = dict(zip(names, args, strict=False)) | (options or {})
    return Case(f"{name}{dims}d", made, specs, [shape], [P() if spec is None else spec], lies, axes)


def on_grid(grid, shape, axes):
    return grid.layout(shape, axes)


def grids(dims, args, shape, grid, result, out_grid, axes, *, name="Conv", options=None, **specs):
    """A case of grids of workers. result: the shape of the result."""
    spec = {"spec": grid, "out_spec": out_grid, **specs}
    case = conv(dims, args, shape, None, on_grid(out_grid, result, axes), axes, name=name, options=options)
    return case._replace(specs=spec, in_specs=[on_grid(grid, shape, axes)])


ROWS, BOTH = P(None, None, "x"), P(None, None, "x", "y")


@table(
    # Space
    conv(2, (3, 5, 3), (2, 3, 9, 8), ROWS, ROWS, X3),
    conv(2, (3, 4, 3, 2, 1), (2, 3, 9, 7), BOTH, BOTH, XY, in_size=(9, 7)),
    conv(1, (2, 3, 4, 1, 2), (2, 2, 17), P(None, None, ("x", "y")), P(None, None, ("x", "y")), XY),
    conv(
        1, (4, 6, 3, 1, 2), (2, 4, 11), ROWS, ROWS, X4, options={"dilation": 2, "padding_mode": "circular"}, in_size=11
    ),
    conv(
        3,
        (2, 4, (3, 1, 2), 1, (1, 0, 1)),
        (2, 2, 5, 3, 6),
        P(None, None, "x", None, "y"),
        P(None, None, "x", None, "y"),
        XY,
        options={"padding_mode": "reflect"},
    ),
    conv(2, (2, 2, 3, 3, 2), (1, 2, 10, 8), ROWS, ROWS, X3, options={"padding_mode": "replicate"}),
    conv(2, (2, 3, 3, 2), (2, 2, 6, 5), ROWS, ROWS, X4),  # fewer results than workers
    conv(1, (2, 3, 3, 1, 1), (2, 2, 3), ROWS, ROWS, X4),  # fewer entries than workers
    conv(2, (2, 3, 3, 1, 1), (2, 2, 4, 5), ROWS, ROWS, {"x": 1}),
    # Channels
    conv(
        2,
        (5, 7, (4, 2), 1, "same"),
        (2, 5, 8, 7),
        P(None, "x"),
        P(None, "y"),
        XY,
        P(None, "y"),
        options={"dilation": 2},
    ),
    conv(2, (5, 4, 3, 1, 1), (3, 5, 4, 4), P("x", "y"), P("x"), XY, P("x")),
    conv(2, (5, 3, 3), (3, 5, 4, 4), P(None, None, None, "y"), P(None, "x", None, "y"), XY, P(None, "x", None, "y")),
    conv(
        1,
        (3, 4, 2),
        (2, 3, 7),
        P(None, "x", "y"),
        P(None, None, "y"),
        XY,
        P(None, None, "y"),
        options={"bias": False},
        in_size=7,
    ),
    conv(1, (2, 3, 2), (2, 2, 7), ROWS, P(None, "y"), XY, P(None, "y")),
    conv(1, (4, 6, 3), (2, 4, 7), P(None, "x"), P(None, "x"), X3, P(None, "x")),
    conv(1, (4, 6, 3), (3, 4, 7), P("x", "y"), P("y", "x"), XY, P("y", "x"), in_size=7),
    conv(2, (2, 3, 3), (2, 2, 5, 5), P(None, "x"), P(), X4, P()),
    conv(1, (2, 3, 2), (2, 2, 5), P(), P(None, "x"), X4, P(None, "x")),
    conv(2, (3, 5, 3), (2, 3, 6, 5), None, P(None, "x"), X3, w_spec=P("x")),
    conv(2, (4, 5, 3), (2, 4, 6, 5), P(None, None, "y"), P(None, "x", "y"), XY, w_spec=P("x"), in_size=(6, 5)),
    conv(1, (5, 4, 3), (2, 5, 6), P(None, "x"), P(), X3, w_spec=P(None, "x")),
    conv(1, (2, 4, 3), (3, 2, 6), P("x"), P("x"), X2, w_spec=P("x"), in_size=6, out=P("x")),
    conv(
        1,
        (3, 5, 2),
        (2, 3, 7),
        ROWS,
        P(None, None, "x"),
        X2,
        out=P(None, None, "x"),
        w_spec=Layout((5, 3, 2), P("x"), X2, [(1, 4), None, None]),
    ),
    # Batch
    conv(2, (2, 3, 2), (3, 2, 4, 5), P("x"), P("x"), X4),
    conv(
        2,
        (3, 5, 3, 1, 1),
        (3, 3, 7, 5),
        P("x", "y", "z"),
        P("x", None, "z"),
        {"x": 2, "y": 2, "z": 2},
        P("x", None, "z"),
        in_size=(7, 5),
    ),
    # Groups
    conv(2, (8, 12, 3), (2, 8, 5, 6), P(None, "x", "y"), P(None, "x", "y"), XY, options={"groups": 4}, in_size=(5, 6)),
    conv(1, (6, 9, 3), (2, 6, 9), ROWS, ROWS, X4, options={"groups": 3}),
    conv(1, (6, 3, 3), (2, 6, 9), P(None, "x"), P(None, "x"), X2, P(None, "x"), options={"groups": 3}),
    conv(1, (4, 4, 2), (2, 4, 6), P(None, "x"), P(), X3, P(), options={"groups": 2}),
    # Without a batch
    conv(1, (3, 5, 3), (3, 7), P(None, "x"), P(None, "x"), X3, P(None, "x"), in_size=7),
    conv(2, (3, 5, 3, 1, 1), (3, 7, 4), None, P(), X2),
    grids(2, (3, 5, 3), (3, 7, 4), Grid((2, 1), [2, 0]), (5, 5, 2), Grid((1, 2), [1, 2]), X3),
    # Grids of workers
    grids(
        2,
        (3, 5, 3, 1, 1),
        (2, 3, 7, 4),
        Grid((1, 1, 2, 1), [2, 0]),
        (2, 5, 7, 4),
        Grid((1, 2, 1, 1), [1, 3]),
        XY,
        w_spec=Grid((2, 1, 1, 1), [1, 3]),
    ),
    grids(1, (4, 3, 2), (2, 4, 7), Grid((1, 3, 1)), (2, 3, 6), Grid((2, 1, 1), [1, 0]), X3),
)
def test_convolutions(case):
    check_module(case)


@table(
    conv(1, (3, 5, 3, 2), (2, 3, 6), ROWS, ROWS, X3, name="ConvTranspose"),
    conv(
        2,
        (3, 4, 3, 2, 1),
        (2, 3, 5, 4),
        BOTH,
        BOTH,
        XY,
        name="ConvTranspose",
        options={"output_padding": 1},
        in_size=(5, 4),
    ),
    conv(
        3,
        (2, 3, 2, (2, 1, 1)),
        (2, 2, 3, 4, 2),
        P(None, None, None, "x"),
        P(None, None, None, "x"),
        X3,
        name="ConvTranspose",
        options={"dilation": (1, 2, 1)},
    ),
    conv(2, (3, 5, 2, 2), (2, 3, 4, 3), P(None, "x"), P(None, "y"), XY, P(None, "y"), name="ConvTranspose"),
    conv(1, (4, 5, 2, 2), (3, 4, 5), P("x"), P("x", "y"), XY, P("x", "y"), name="ConvTranspose", in_size=5),
    conv(
        1,
        (4, 6, 3, 2),
        (2, 4, 5),
        P(None, "x"),
        P(None, "x"),
        X2,
        name="ConvTranspose",
        options={"groups": 2, "bias": False},
    ),
    conv(1, (3, 2, 3), (3, 7), P(None, "x"), P(None, "x"), X3, P(None, "x"), name="ConvTranspose"),
    grids(
        1,
        (4, 3, 2, 2),
        (2, 4, 5),
        Grid((1, 1, 2), [2, 0]),
        (2, 3, 10),
        Grid((1, 3, 1)),
        X3,
        name="ConvTranspose",
        w_spec=Grid((1, 3, 1)),
    ),
)
def test_transposed_convolutions(case):
    check_module(case)


@pytest.mark.parametrize("output_size", [(9,), (2, 3, 10)])
def test_the_lengths_of_a_result_choose_the_output_padding(output_size):
    whole, x = nn.ConvTranspose1d(4, 3, 3, stride=2, padding=1), torch.randn(2, 4, 5)
    layer = lambda x: spt.nn.ConvTranspose1d.from_torch(whole, spec=ROWS)(x, output_size)
    y = spt.map(layer, ROWS, ROWS, mesh=spmd.Mesh(x=3))(x)
    torch.testing.assert_close(y, whole(x, output_size))


def lazily(name, options, specs, shape, axes):
    """What a lazy layer, and torch's, gives for an input with rows on x, and the state of it afterwards."""
    x = torch.randn(shape)
    torch.manual_seed(1)
    whole = getattr(nn, name)(**options)
    expected = whole(x)

    def body(x):
        layer = getattr(spt.nn, name)(**options, **specs)
        assert isinstance(layer.weight, nn.UninitializedParameter)
        y = layer(x)
        assert type(layer) is getattr(spt.nn, name.removeprefix("Lazy"))
        assert repr(layer.to_torch()) == repr(whole)
        return y, layer.state_dict()

    torch.manual_seed(1)
    y, state = spt.map(body, specs["spec"], (specs.get("out_spec", ROWS), None), mesh=spmd.Mesh(**axes))(x)
    torch.testing.assert_close(y, expected)
    assert state.keys() == whole.state_dict().keys()
    assert all(torch.equal(state[k], v) for k, v in whole.state_dict().items())


LAZY = {
    "space": ("LazyConv2d", {"out_channels": 5, "kernel_size": 3}, {"spec": ROWS}, (2, 3, 9, 5), X3),
    "channels": (
        "LazyConv1d",
        {"out_channels": 4, "kernel_size": 2, "bias": False},
        {"spec": P(None, "x"), "out_spec": P(None, "y")},
        (2, 5, 6),
        XY,
    ),
    "groups": ("LazyConv1d", {"out_channels": 4, "kernel_size": 2, "groups": 2}, {"spec": ROWS}, (2, 4, 6), X3),
    "no batch": ("LazyConv2d", {"out_channels": 2, "kernel_size": 2}, {"spec": P(None, "x")}, (3, 6, 4), X2),
    "transposed": (
        "LazyConvTranspose3d",
        {"out_channels": 2, "kernel_size": 2, "stride": 2},
        {"spec": ROWS},
        (2, 3, 4, 2, 2),
        X3,
    ),
}


@pytest.mark.parametrize("case", LAZY)
def test_lazy_layers_learn_the_channels(case):
    name, options, specs, *rest = LAZY[case]
    lazily(name, options, {"out_spec": specs["spec"], **specs} if case == "no batch" else specs, *rest)
