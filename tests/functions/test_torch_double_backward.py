"""Gradients of gradients of layers on tensors, split anyhow, against torch's layers on one worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import spmd
from functions.layer_cases import random_mesh
from functions.torch_layers import LAYERS, Lies, TorchLayer

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:reduction. .mean")]


def close(actual: Any, wanted: Any) -> None:
    np.testing.assert_allclose(actual.numpy(force=True), wanted.numpy(force=True), rtol=1e-9, atol=1e-10)


def derivatives(fun, tensors, chosen, g, directions):
    """The value, the gradients for the cotangent g, and the gradients of these along directions, by g too."""
    import torch

    y = fun(*tensors)
    wrt = [tensors[k] for k in chosen]
    first = torch.autograd.grad(y, wrt, g, create_graph=True)
    along = sum((a * d).sum() for a, d in zip(first, directions, strict=True))
    second = torch.autograd.grad(along, [*wrt, g], allow_unused=True)
    zeros = [torch.zeros_like(a) if b is None else b for a, b in zip([*wrt, g], second, strict=True)]
    return [y, *first, *zeros]


def check(layer: TorchLayer, rng: np.random.Generator, mesh: spmd.Mesh, track: bool) -> None:
    import torch

    from spmd.bridge.torch import map as torch_map

    arrays = layer.draw(rng)
    lies: Lies = layer.place(rng, arrays, mesh)
    chosen = layer.differentiated(arrays)
    make = lambda a, k: torch.tensor(a, requires_grad=k in chosen)
    tensors = [make(a, k) for k, a in enumerate(arrays)]
    g = torch.tensor(rng.standard_normal(layer.theirs(*tensors).shape), requires_grad=True)
    directions = [torch.tensor(rng.standard_normal(arrays[k].shape)) for k in chosen]
    wanted = derivatives(layer.theirs, tensors, chosen, g, directions)
    mapped = torch_map(
        lambda *blocks: layer.ours(*blocks, **lies.options), tuple(lies.specs), lies.out, mesh=mesh, check=track
    )
    found = derivatives(mapped, tensors, chosen, g, directions)
    for a, b in zip(found, wanted, strict=True):
        close(a, b)


@pytest.mark.parametrize("name", LAYERS)
def test_any_layouts(name):
    rng = np.random.default_rng([0, len(name)])
    check(LAYERS[name], rng, random_mesh(rng, 4), bool(rng.integers(2)))


@pytest.mark.full
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_many_layouts(name, seed):
    rng = np.random.default_rng([seed, len(name)])
    check(LAYERS[name], rng, random_mesh(rng), bool(rng.integers(2)))
