"""`functions.linear` on arrays that lie anyhow, against the product of the whole."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import spmd
from functions.layer_cases import FRONTENDS, check_layer, integers, random_layout, random_mesh
from spmd import P, functions
from spmd.errors import SpecError, StateError
from spmd.functions.products import _plan, rows_of
from spmd.layout import Layout


def reference(x, w, bias, g):
    rows = g.reshape(-1, g.shape[-1])
    return x @ w.T + bias, (g @ w, rows.T @ x.reshape(-1, x.shape[-1]), rows.sum(0))


def layout_by(mesh: spmd.Mesh, spec: P | Layout, shape: tuple[int, ...]) -> Layout:
    return spec if isinstance(spec, Layout) else mesh.layout(shape, spec)


def check(seed: int, torch: bool) -> None:
    rng = np.random.default_rng(seed)
    mesh = random_mesh(rng)
    batch = tuple(rng.integers(0, 5, rng.integers(0, 3)).tolist())
    x = integers(rng, (*batch, rng.integers(1, 8)))
    w = integers(rng, (rng.integers(1, 8), x.shape[-1]))
    bias, g = integers(rng, w.shape[:1]), integers(rng, (*batch, w.shape[0]))
    spec, w_spec = random_layout(rng, x.shape, mesh), random_layout(rng, w.shape, mesh)
    out_spec = random_layout(rng, g.shape, mesh) if rng.random() < 0.6 else None
    layouts = layout_by(mesh, spec, x.shape), layout_by(mesh, w_spec, w.shape)
    bias_layout = rows_of(layouts[1])
    out = _plan(*layouts, bias_layout, out_spec).out

    def fun(x, w, b):
        return functions.linear(x, w, b, spec=spec, w_spec=w_spec, out_spec=out_spec)

    def in_global(x, w, b):
        return functions.linear(x, w, b, out_spec=out_spec)

    expected = reference(x, w, bias, g)
    specs = spec, w_spec, bias_layout
    check_layer(fun, expected, (x, w, bias), specs, out, mesh, g, in_global=in_global, torch=torch)


@FRONTENDS
@pytest.mark.parametrize("seed", range(25))
def test_any_layouts(seed, torch):
    check(seed, torch)


@pytest.mark.full
@FRONTENDS
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_many_layouts(seed, torch):
    check(seed, torch)


def test_errors():
    x, w = np.ones((3, 4)), np.ones((5, 4))
    for args, argument in [((x, w.T), "w"), ((x, w, np.ones(4)), "bias"), ((x, w[0]), "w"), ((3, w), "x")]:
        with pytest.raises(SpecError, match=rf"spmd\.functions\.linear: argument {argument}"):
            functions.linear(*args)
    placed = spmd.put(x, P("x"), spmd.Mesh(x=2))
    with pytest.raises(SpecError, match="a global array has its layout"):
        functions.linear(placed, w, spec=P("x"))


@pytest.mark.parametrize(
    ("spec", "w_spec", "out_spec", "forward", "backward"),
    [
        (P("m"), P(), None, {}, {"Sum": 1}),
        (P(), P("m"), None, {}, {"Sum": 1}),
        (P(None, None, "m"), P(None, "m"), None, {"Sum": 1}, {}),
        (P(None, "m"), P("m"), None, {"AllGather": 1}, {"ReduceScatter": 1}),
        (P(None, None, "m"), P(None, "m"), P(None, "m"), {"ReduceScatter": 1}, {"AllGather": 1}),
        (P("d", None, "m"), P(None, "m"), None, {"Sum": 1}, {"Sum": 1}),
        (P("d"), P("m"), None, {}, {"Sum": 2}),
    ],
)
def test_no_more_operators_than_by_hand(spec, w_spec, out_spec, forward, backward):
    """Uneven blocks too: lengths are not exchanged."""
    rng = np.random.default_rng(0)
    x, w = integers(rng, (5, 7, 9)), integers(rng, (11, 9))

    def layer(x, w):
        return functions.linear(x, w, spec=spec, w_spec=w_spec, out_spec=out_spec)

    def forward_only(x, w):
        layer(x, w)

    def both(x, w):
        y, pullback = spmd.vjp(layer, x, w)
        pullback(y)

    applied = []
    for body in (forward_only, both):
        with spmd.Mesh(d=2, m=3) as mesh, spmd.ledger() as log:
            mesh.map(body, in_specs=(spec, w_spec), out_specs=None)(x, w)
        applied.append(Counter({name: n for name, n in log.operators.items() if name != "Vary"}))
    assert applied[0] == forward
    assert applied[1] - applied[0] == backward


@pytest.mark.torch
@pytest.mark.parametrize("check", [True, False], ids=["states", "plain"])
@pytest.mark.parametrize("spec", [P(None, "m"), P("m")], ids=str)
def test_cotangents_of_what_is_gathered_are_summed_once(spec, check):
    """The layer is differentiated in the body, where an all-gather and copies for other operands would both sum."""
    import torch

    from spmd.bridge import torch as spt

    rng = np.random.default_rng(0)
    x, w = (torch.tensor(integers(rng, shape)) for shape in ((5, 7), (11, 7)))

    def body(x, w):
        x = x.detach().requires_grad_()
        spt.functions.linear(x, w, spec=spec, w_spec=P("m")).sum().backward()
        return spt.varying(x.grad, "m")

    with spmd.Mesh(m=3):
        grad = spt.map(body, in_specs=(spec, P("m")), out_specs=spec, check=check)(x, w)
    np.testing.assert_array_equal(grad.numpy(), np.ones((5, 11)) @ w.numpy())


LAYERS = {
    "linear": lambda x: functions.linear(x, np.ones((2, 4)), spec=P("x")),
    "conv": lambda x: functions.conv(x[None, None], np.ones((1, 1, 3, 3)), padding=1, spec=P(None, None, "x")),
    "max_pool": lambda x: functions.max_pool(x[None, None], 2, spec=P(None, None, "x")),
    "pad": lambda x: functions.pad(x, 1, spec=P("x")),
    "resize": lambda x: functions.resize(x[None, None], size=(5, 5), spec=P(None, None, "x")),
    "batch_norm": lambda x: functions.batch_norm(x, spec=P("x")),
    "mse_loss": lambda x: functions.mse_loss(x, x, spec=P("x")),
    "attention": lambda x: functions.attention(x[None], x[None], x[None], spec=P(None, "x")),
    "rope": lambda x: functions.rope(x, spec=P("x")),
    "fftn": lambda x: spmd.fft.fftn(x, spec=P("x")),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_spec_that_splits_one_value_is_an_error(name, scheduler):
    """An array that all workers have is no block; equal blocks are declared to vary. Of bare data nothing is known."""
    x = np.arange(16.0).reshape(4, 4)
    with spmd.Mesh(x=2, scheduler=scheduler):
        with pytest.raises(StateError, match=r"the same on all workers along 'x'[^|]*\n.*\n.*leave 'x' out of"):
            spmd.map(lambda x: (LAYERS[name](x), None)[1], in_specs=P(), out_specs=None)(x)
        spmd.map(lambda x: (LAYERS[name](spmd.pvary(x, "x")), None)[1], in_specs=P(), out_specs=None)(x)


# Partitions and shapes of DistDL's tests of its linear layers: of x, and of the whole x; y has other features.
PARTITIONS = [
    ((1, 1), (2, 2), 4),
    ((1, 4), (1, 12), 16),
    ((1, 1, 4), (1, 8, 12), 16),
    ((2, 1, 4), (2, 4, 12), 16),
    ((1, 1, 1, 4), (1, 2, 4, 12), 16),
    ((1, 2, 1, 2), (2, 2, 4, 12), 16),
    ((2, 1, 1, 2), (2, 2, 4, 12), 16),
    ((2, 2, 1, 2), (2, 2, 4, 12), 16),
]


@FRONTENDS
@pytest.mark.parametrize("way", ["gather", "scatter", "zero"])
@pytest.mark.parametrize(("grid", "shape", "out"), PARTITIONS, ids=lambda n: str(n).replace(" ", ""))
def test_distdl_partitions(grid, shape, out, way, torch):
    """x is split as the grid says, and y too: by rows of the weights, or by columns and a reduce-scatter; the weights
    may be split over the workers of the batch besides."""
    rng = np.random.default_rng(0)
    mesh = spmd.Mesh(**{f"d{k}": n for k, n in enumerate(grid)})
    *batch, last = mesh.axes
    spec = P(*batch, last)
    w_spec = {"gather": P(last), "scatter": P(None, last), "zero": P(last, batch[0])}[way]
    x, w, bias = integers(rng, shape), integers(rng, (out, shape[-1])), integers(rng, (out,))
    g = integers(rng, (*shape[:-1], out))

    def fun(x, w, b):
        return functions.linear(x, w, b, spec=spec, w_spec=w_spec, out_spec=spec)

    specs = spec, w_spec, rows_of(mesh.layout(w.shape, w_spec))
    check_layer(fun, reference(x, w, bias, g), (x, w, bias), specs, spec, mesh, g, torch=torch)


@FRONTENDS
def test_distdl_grids(torch):
    """Of its general layer: x on four workers, y on three others, the weights on twelve."""
    rng = np.random.default_rng(0)
    mesh = spmd.Mesh(w=12)
    x, w, bias, g = integers(rng, (1, 12)), integers(rng, (6, 12)), integers(rng, (6,)), integers(rng, (1, 6))
    spec = Layout.grid(x.shape, (1, 4), mesh.axes, range(4, 8))
    w_spec = Layout.grid(w.shape, (3, 4), mesh.axes)
    out = Layout.grid(g.shape, (1, 3), mesh.axes)

    def fun(x, w, b):
        return functions.linear(x, w, b, spec=spec, w_spec=w_spec, out_spec=out)

    check_layer(fun, reference(x, w, bias, g), (x, w, bias), (spec, w_spec, rows_of(w_spec)), out, mesh, g, torch=torch)
