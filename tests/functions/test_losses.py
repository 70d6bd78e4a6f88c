"""Losses of arrays that lie anyhow, against torch's on one worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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
    check_layer(block, expected, args, specs, out, mesh, g, compare=close, in_global=fun, torch=True)


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
