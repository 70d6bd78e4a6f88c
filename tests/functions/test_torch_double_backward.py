"""Gradients of gradients of layers on tensors, split anyhow, against torch's layers on one worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import spmd
from functions.layer_cases import random_mesh
from functions.torch_layers import LAYERS, Lies, TorchLayer, axes_of

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:reduction. .mean")]

Total = Callable[[Any, int | None], Any]


def close(actual: Any, wanted: Any) -> None:
    np.testing.assert_allclose(actual.numpy(force=True), wanted.numpy(force=True), rtol=1e-9, atol=1e-10)


def derivatives(fun, tensors, chosen: Sequence[int], g, directions, total: Total) -> list[Any]:
    """The value, the gradients for the cotangent g, and those of their inner product with directions, by g too.

    total(x, k): the sum of an array that lies as operand k, as the result for None.
    """
    import torch

    wrt = [tensors[k] for k in chosen]
    y = fun(*tensors)
    first = torch.autograd.grad(total(y * g, None), wrt, create_graph=True, allow_unused=True)
    first = [torch.zeros_like(x) + 0 * g.sum() if a is None else a for a, x in zip(first, wrt, strict=True)]
    along = sum(total(a * d, k) for a, d, k in zip(first, directions, chosen, strict=True))
    by = [*wrt, g] if g.requires_grad else wrt
    second = torch.autograd.grad(along, by, allow_unused=True) if along.requires_grad else [None] * len(by)
    return [y, *first, *(torch.zeros_like(a) if b is None else b for a, b in zip(by, second, strict=True))]


def plain_total(x: Any, _k: int | None) -> Any:
    return x.sum()


def in_body(layer: TorchLayer, lies: Lies, chosen: Sequence[int], mesh: spmd.Mesh, track: bool, by_g: bool):
    """`derivatives` inside of a body."""
    from spmd.bridge import torch as spt

    specs = [lies.specs[k] for k in chosen]

    def total(x: Any, k: int | None) -> Any:
        names = axes_of(lies.out if k is None else lies.specs[k])
        return spt.psum(x.sum(), names) if names else x.sum()

    def body(g, blocks, directions):
        g = g.detach().requires_grad_(by_g)
        blocks = [b.detach().requires_grad_(k in chosen) for k, b in enumerate(blocks)]
        layered = lambda *each: layer.ours(*each, **lies.options)
        return tuple(a.detach() for a in derivatives(layered, blocks, chosen, g, directions, total))

    out = (lies.out, *specs, *specs, *([lies.out] if by_g else []))
    return spt.map(body, (lies.out, list(lies.specs), specs), out, mesh=mesh, check=track)


def check(layer: TorchLayer, rng: np.random.Generator, mesh: spmd.Mesh) -> None:
    import torch

    from spmd.bridge import torch as spt

    arrays = layer.draw(rng)
    lies = layer.place(rng, arrays, mesh)
    track, by_g, inside = (bool(n) for n in rng.integers(0, 2, 3))
    chosen = layer.differentiated(arrays)
    if rng.random() < 0.4:
        chosen = sorted(rng.choice(chosen, rng.integers(1, len(chosen) + 1), replace=False).tolist())
    tensors = [torch.tensor(a, requires_grad=k in chosen) for k, a in enumerate(arrays)]
    g = torch.tensor(rng.standard_normal(layer.theirs(*tensors).shape), requires_grad=by_g)
    directions = [torch.tensor(rng.standard_normal(arrays[k].shape)) for k in chosen]
    wanted = derivatives(layer.theirs, tensors, chosen, g, directions, plain_total)
    if inside:
        found = in_body(layer, lies, chosen, mesh, track, by_g)(g.detach(), [t.detach() for t in tensors], directions)
    else:
        layered = lambda *blocks: layer.ours(*blocks, **lies.options)
        mapped = spt.map(layered, tuple(lies.specs), lies.out, mesh=mesh, check=track)
        found = derivatives(mapped, tensors, chosen, g, directions, plain_total)
    for a, b in zip(found, wanted, strict=True):
        close(a, b)


@pytest.mark.parametrize("name", LAYERS)
def test_any_layouts(name):
    rng = np.random.default_rng([0, len(name)])
    check(LAYERS[name], rng, random_mesh(rng, 4))


@pytest.mark.full
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_many_layouts(name, seed):
    rng = np.random.default_rng([seed, len(name)])
    check(LAYERS[name], rng, random_mesh(rng))
