"""Losses of arrays that lie anyhow, against torch's on one worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import DEVICE

import spmd
from functions.layer_cases import check_layer, random_layout, random_mesh
from spmd import Layout, P, functions

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:reduction. .mean")]


def normal(rng, shape):
    return rng.standard_normal(shape)


def probabilities(rng, shape):
    return rng.uniform(0.01, 0.99, shape)


def positive(rng, shape):
    return rng.uniform(0.1, 3, shape)


# The names of a loss and of its options, and how x and target are drawn. weight: the weights that it takes.
LOSSES: dict[str, tuple[str, dict[str, Any], Any, Any, str]] = {
    "l1": ("l1_loss", {}, normal, normal, "entries"),
    "mse": ("mse_loss", {}, normal, normal, "entries"),
    "huber": ("huber_loss", {"delta": 0.7}, normal, normal, "entries"),
    "smooth": ("smooth_l1_loss", {"beta": 0.7}, normal, normal, ""),
    "smooth of 0": ("smooth_l1_loss", {"beta": 0.0}, normal, normal, ""),
    "binary": ("binary_cross_entropy", {}, probabilities, probabilities, "broadcast"),
    "logits": ("binary_cross_entropy_with_logits", {}, normal, probabilities, "broadcast"),
    "positive": ("binary_cross_entropy_with_logits", {}, normal, probabilities, "pos_weight"),
    "kl": ("kl_div", {}, normal, positive, ""),
    "kl of logarithms": ("kl_div", {"log_target": True}, normal, normal, ""),
    "poisson": ("poisson_nll_loss", {}, normal, positive, ""),
    "poisson of means": ("poisson_nll_loss", {"log_input": False, "full": True}, positive, positive, ""),
}


def close(actual: Any, wanted: Any) -> None:
    np.testing.assert_allclose(actual, wanted, rtol=1e-12, atol=1e-12)


def reference(name, options, reduction, weights, x, target, g):
    import torch

    loss = getattr(torch.nn.functional, name)
    both = [torch.tensor(a, requires_grad=True) for a in (x, target)]
    weights = {k: torch.tensor(w) for k, w in weights.items()}
    y = loss(*both, reduction=reduction, **options, **weights)
    g = torch.tensor(g).reshape(y.shape)
    grads = torch.autograd.grad(y, both, g) if x.size else [torch.zeros_like(a) for a in both]
    return y.detach().numpy(), [h.numpy() for h in grads]


def last_dims(spec: P | Layout, shape: tuple[int, ...], count: int, mesh: spmd.Mesh) -> P | Layout | None:
    """The layout of an array that lies as the last dimensions of another; None for a grid."""
    if isinstance(spec, Layout) and spec.spec is None:
        return None
    layout = spec if isinstance(spec, Layout) else mesh.layout(shape, spec)
    first = len(shape) - count
    names = [tuple(n) or None for n in layout.spec.dims[first:]]
    return Layout(shape[first:], P(*names), mesh.axes, layout.cuts[first:])


def check(seed: int, kind: str, reduction: str) -> None:
    name, options, draw_x, draw_target, takes = LOSSES[kind]
    rng = np.random.default_rng([seed, len(kind)])
    mesh = random_mesh(rng)
    shape = tuple(rng.integers(0 if rng.random() < 0.1 else 1, 6, rng.integers(1, 4)).tolist())
    x, target = draw_x(rng, shape), draw_target(rng, shape)
    spec = random_layout(rng, shape, mesh)
    weights, lies = {}, []
    if takes == "entries" and rng.random() < 0.5:
        weights, lies = {"weight": positive(rng, shape)}, [spec]
    elif takes in ("broadcast", "pos_weight"):
        count = int(rng.integers(1, len(shape) + 1))
        lies = [last_dims(spec, shape, count, mesh)]
        if lies != [None]:
            weights = {"pos_weight" if takes == "pos_weight" else "weight": positive(rng, shape[len(shape) - count :])}
    g = rng.standard_normal(shape if reduction == "none" else ())
    expected = reference(name, options, reduction, weights, x, target, g)
    loss = getattr(functions, name)

    def fun(x, target, *w, **more):
        given = dict(zip(weights, w, strict=True))
        return loss(x, target, reduction=reduction, **options, **given, **more)

    def block(*args):
        return fun(*args, spec=spec)

    args = (x, target, *weights.values())
    specs = (spec, spec, *(lies if weights else ()))
    out = spec if reduction == "none" else P()

    if weights:
        placed = [spmd.put(a, s, mesh) for a, s in zip(args, specs, strict=True)]
        close(mesh.map(block, in_specs=specs, out_specs=out)(*placed).numpy(), expected[0])
        result, pullback = spmd.vjp(fun, *placed)
        close(result.numpy(), expected[0])
        for a, b in zip(pullback(spmd.put(g, result.layout, mesh))[:2], expected[1], strict=True):
            close(a.numpy(), b)
        return
    check_layer(block, expected, args, specs, out, mesh, g, compare=close, in_global=fun, torch=DEVICE == "cpu")


REDUCTIONS = ["none", "sum", "mean"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", LOSSES)
def test_any_layouts(kind, reduction):
    check(0, kind, reduction)


@pytest.mark.full
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("seed", range(1000, 1025))
def test_many_layouts(seed, kind, reduction):
    check(seed, kind, reduction)


# Grids and shapes of DistDL's tests of losses.
GRIDS = [
    ((4,), (11,)),
    ((1, 4), (7, 17)),
    ((2, 2), (7, 7)),
    ((1, 2, 4), (5, 7, 11)),
    ((2, 2, 2), (5, 7, 11)),
    ((1, 4, 2, 2), (9, 5, 7, 11)),
    ((2, 4, 2, 1), (9, 5, 7, 11)),
]


@pytest.mark.parametrize(("grid", "shape"), GRIDS, ids=str)
@pytest.mark.parametrize("kind", ["l1", "mse", "poisson", "binary", "logits", "kl"])
def test_on_some_of_the_workers(kind, grid, shape):
    name, options, *_, takes = LOSSES[kind]
    rng, size = np.random.default_rng(len(shape)), int(np.prod(grid))
    x, target = rng.uniform(0.01, 0.99, (2, *shape))
    mesh = spmd.Mesh(w=size + 1, scheduler="lockstep")
    layout = Layout.grid(shape, grid, mesh.axes, range(1, size + 1))
    placed = spmd.put((x, target), layout, mesh)
    weights = {"weight": rng.uniform(0.1, 3)} if takes == "broadcast" else {}
    weights = {k: np.array([w]) for k, w in weights.items()}
    for reduction in ("none", "sum", "mean", *(["batchmean"] if kind == "kl" else [])):
        g = rng.standard_normal(shape if reduction == "none" else ())
        out = layout if reduction == "none" else P()
        expected = reference(name, options, reduction, weights, x, target, g)

        def fun(x, target, reduction=reduction, **more):
            return getattr(functions, name)(x, target, reduction=reduction, **options, **weights, **more)

        mapped = mesh.map(lambda x, t, fun=fun: fun(x, t, spec=layout), in_specs=(layout, layout), out_specs=out)
        for f in (mapped, fun):
            y, pullback = spmd.vjp(f, *placed)
            close(y.numpy(), expected[0])
            for a, b in zip(pullback(spmd.put(g, y.layout, mesh)), expected[1], strict=True):
                close(a.numpy(), b)


@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b"), P(("b", "a"))], ids=str)
def test_the_mean_of_a_batch_counts_it_once(spec):
    import torch

    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((5, 3)), rng.uniform(0.1, 1, (5, 3))
    wanted = torch.nn.functional.kl_div(torch.tensor(x), torch.tensor(target), reduction="batchmean").item()
    mesh = spmd.Mesh(a=2, b=3)
    body = lambda x, t: functions.kl_div(x, t, reduction="batchmean", spec=spec)
    close(float(mesh.map(body, in_specs=spec, out_specs=P())(x, target)), wanted)
    close(float(functions.kl_div(*spmd.put((x, target), spec, mesh), reduction="batchmean")), wanted)


@pytest.mark.parametrize("check", [True, False])
def test_weights(check):
    """The gradients of weights, which lie as the last dimensions, from all workers."""
    rng, mesh = np.random.default_rng(0), spmd.Mesh(a=2, b=2, scheduler="lockstep")
    x, target = rng.standard_normal((5, 3)), rng.uniform(0.1, 1, (5, 3))
    spec = P("a", "b")

    def loss(x, t, w, p, **more):
        return functions.binary_cross_entropy_with_logits(x, t, weight=w, pos_weight=p, reduction="sum", **more)

    for w_shape, w_spec in (((3,), P("b")), ((5, 3), spec), ((), P())):
        w, p = rng.uniform(0.5, 2, w_shape), rng.uniform(0.5, 2, 3)
        mapped = mesh.map(
            lambda *a: loss(*a, spec=spec), in_specs=(spec, spec, w_spec, P("b")), out_specs=P(), check=check
        )
        wanted = spmd.grad(loss, (0, 1, 2, 3))(x, target, w, p)
        for a, b in zip(spmd.grad(mapped, (0, 1, 2, 3))(x, target, w, p), wanted, strict=True):
            close(np.asarray(a), b)
        placed = [spmd.put(a, s, mesh) for a, s in zip((x, target, w, p), (spec, spec, w_spec, P()), strict=True)]
        for a, b in zip(spmd.grad(loss, (0, 1, 2, 3))(*placed), wanted, strict=True):
            close(np.asarray(a), b)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["l1", "mse", "huber"])
def test_weights_of_entries(kind, reduction):
    name, options, *_ = LOSSES[kind]
    rng, mesh, spec = np.random.default_rng(0), spmd.Mesh(a=2, b=2, scheduler="lockstep"), P("a", "b")
    x, target = rng.standard_normal((2, 5, 3))
    w, g = rng.uniform(0.1, 3, (5, 3)), rng.standard_normal((5, 3) if reduction == "none" else ())
    expected = reference(name, options, reduction, {"weight": w}, x, target, g)
    body = lambda x, t, w: getattr(functions, name)(x, t, weight=w, reduction=reduction, spec=spec, **options)
    mapped = mesh.map(body, in_specs=(spec, spec, spec), out_specs=spec if reduction == "none" else P())
    y, pullback = spmd.vjp(mapped, *spmd.put((x, target, w), spec, mesh))
    close(y.numpy(), expected[0])
    for a, b in zip(pullback(spmd.put(g, y.layout, mesh))[:2], expected[1], strict=True):
        close(a.numpy(), b)


@pytest.mark.parametrize("kind", LOSSES)
def test_derivatives_to_second_order(kind):
    name, options, draw_x, draw_target, _ = LOSSES[kind]
    rng, mesh = np.random.default_rng(0), spmd.Mesh(a=2, scheduler="lockstep")
    x, target = draw_x(rng, (3, 2)), draw_target(rng, (3, 2))
    body = lambda x, t: getattr(functions, name)(x, t, spec=P("a"), **options)
    mapped = mesh.map(body, in_specs=(P("a"), P("a")), out_specs=P())
    spmd.check_grads(mapped, (x, target), order=2, modes=("rev",))


def test_ends_of_probabilities_are_those_of_torch():
    x, target = np.array([0.0, 0.0, 1.0, 1.0, 0.5]), np.array([0.0, 1.0, 0.0, 1.0, 0.3])
    expected = reference("binary_cross_entropy", {}, "none", {}, x, target, np.ones(5))
    y, pullback = spmd.vjp(lambda x: functions.binary_cross_entropy(x, target, reduction="none"), x)
    close(y, expected[0])
    np.testing.assert_allclose(pullback(np.ones(5))[0], expected[1][0], rtol=1e-8)  # torch's 1e-12 is one of float32


@pytest.mark.host("tensors of the host")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tensors", [True, False])
def test_short_numbers(dtype, tensors):
    """The sum of 70000 squares is beyond float16; their mean is not."""
    import torch

    from spmd.bridge import torch as spt

    x, target = np.full((2, 70_000), [[3.0], [1.0]], dtype)
    mesh, body = spmd.Mesh(m=3), lambda x, t: functions.mse_loss(x, t, spec=P("m"))
    if tensors:
        y = spt.map(body, in_specs=P("m"), out_specs=P(), mesh=mesh)(torch.tensor(x), torch.tensor(target)).numpy()
    else:
        y = mesh.map(body, in_specs=P("m"), out_specs=P())(x, target).numpy()
    assert y.dtype == dtype
    assert y == 4


@pytest.mark.parametrize("name", ["l1_loss", "cross_entropy", "nll_loss"])
def test_the_mean_of_nothing_is_nan(name):
    mesh, loss = spmd.Mesh(m=2), getattr(functions, name)
    x, target = np.zeros((0, 3)), np.zeros((0, 3)) if name == "l1_loss" else np.zeros(0, int)
    mean = mesh.map(lambda x, t: loss(x, t, spec=P("m")), in_specs=P("m"), out_specs=P())
    assert np.isnan(mean(x, target).numpy())
    assert np.isnan(loss(x, target))
    assert loss(x, target, reduction="sum") == 0


def test_a_mean_costs_one_sum():
    mesh, x = spmd.Mesh(m=2, k=2, scheduler="lockstep"), np.arange(12.0).reshape(4, 3)
    body = lambda x, t: functions.mse_loss(x, t, weight=t, spec=P("m", "k"))
    with spmd.ledger() as log:
        spmd.value_and_grad(mesh.map(body, in_specs=(P("m", "k"), P("m", "k")), out_specs=P()))(x, x + 1)
    assert log.verbs == {"all_reduce": 1}
