"""Layers under `spmd.jvp`, gradients of gradients, `jit`, `checkpoint`, `cond` and `scan`, against torch's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
from functions.layer_cases import random_mesh
from functions.torch_layers import LAYERS, TorchLayer, axes_of

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:reduction. .mean")]


def scanned(fun: Callable[..., Any]) -> Callable[..., Any]:
    def run(*blocks):
        return spmd.scan(lambda total, _: (total, fun(*blocks)), 0.0, np.arange(2.0))[1][1]

    return run


WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "plain": lambda fun: fun,
    "checkpoint": spmd.checkpoint,
    "cond": lambda fun: lambda *blocks: spmd.cond(True, fun, lambda *some: 2 * fun(*some), *blocks),
    "scan": scanned,
}


def wanted(layer: TorchLayer, arrays, g, directions) -> list[np.ndarray]:
    """The value, its derivative along directions, the cotangents of g, and the gradients of the derivative times g."""
    import torch

    chosen = layer.differentiated(arrays)
    tensors = [torch.tensor(a, requires_grad=k in chosen) for k, a in enumerate(arrays)]
    wrt, g = [tensors[k] for k in chosen], torch.tensor(g, requires_grad=True)
    y = layer.theirs(*tensors)
    first = torch.autograd.grad((y * g).sum(), wrt, create_graph=True)
    along = sum((a * torch.tensor(d)).sum() for a, d in zip(first, directions, strict=True))
    *second, tangent = torch.autograd.grad(along, [*wrt, g], allow_unused=True)
    second = [torch.zeros_like(a) if b is None else b for a, b in zip(wrt, second, strict=True)]
    return [a.numpy(force=True) for a in (y, tangent, *first, *second)]


def check(layer: TorchLayer, rng: np.random.Generator, mesh: spmd.Mesh) -> None:
    arrays = layer.draw(rng)
    lies = layer.place(rng, arrays, mesh)
    chosen = layer.differentiated(arrays)
    specs = [lies.specs[k] for k in chosen]
    linear, recorded = (bool(n) for n in rng.integers(0, 2, 2))
    wrap = WRAPPERS[rng.choice([*WRAPPERS])]
    g = np.asarray(rng.standard_normal(tuple(layer.theirs(*map(_tensor, arrays)).shape)))
    directions = [rng.standard_normal(arrays[k].shape) for k in chosen]

    def body(g, blocks, directions):
        def fun(*some):
            given = dict(zip(chosen, some, strict=True))
            return wrap(lambda *each: layer.ours(*each, **lies.options))(
                *(given.get(k, b) for k, b in enumerate(blocks))
            )

        some = [blocks[k] for k in chosen]
        if linear:
            y, derivative = spmd.linearize(fun, *some)
            tangent = derivative(*directions)
        else:
            y, tangent = spmd.jvp(fun, tuple(some), tuple(directions))

        def along(*some):
            return total(spmd.jvp(fun, some, tuple(directions))[1] * g, lies.out)

        first = spmd.vjp(fun, *some)[1](g)
        second = spmd.grad(along, argnums=tuple(range(len(some))))(*some)
        return y, tangent, *first, *second

    out = (lies.out, lies.out, *specs, *specs)
    mapped = mesh.map(body, in_specs=(lies.out, list(lies.specs), specs), out_specs=out)
    mapped = spmd.jit(mapped) if recorded else mapped
    if recorded:
        mapped(-g, [np.flip(a).copy() if k in chosen else a for k, a in enumerate(arrays)], directions)
    found = mapped(g, arrays, directions)
    for a, b in zip(found, wanted(layer, arrays, g, directions), strict=True):
        np.testing.assert_allclose(np.asarray(a.numpy()), b, rtol=1e-9, atol=1e-9)


def total(x: Any, lies: Any) -> Any:
    """The sum of a whole array, of which x is a block."""
    names = axes_of(lies)
    return spmd.psum(np.sum(x), names) if names else np.sum(x)


def _tensor(a: np.ndarray) -> Any:
    import torch

    return torch.tensor(a)


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
