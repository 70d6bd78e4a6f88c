"""Layers on tensors under torch's autocast: dtypes, values and gradients as of torch's layers on one worker."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import spmd
from functions.layer_cases import random_mesh
from functions.torch_layers import LAYERS, TorchLayer

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:reduction. .mean")]


def distance(a: Any, b: Any) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def check_close(ours: Any, theirs: Any, exact: Any) -> None:
    """Ours has the dtype of theirs, and its error is of the size of theirs."""
    assert ours.dtype == theirs.dtype, (ours.dtype, theirs.dtype)
    scale = float(exact.abs().max()) if exact.numel() else 0.0
    assert distance(ours, exact) <= 4 * distance(theirs, exact) + 1e-2 * scale + 1e-5


def check(layer: TorchLayer, rng: np.random.Generator, mesh: spmd.Mesh) -> None:
    import torch

    from spmd.bridge import torch as spt

    arrays = layer.draw(rng)
    lies = layer.place(rng, arrays, mesh)
    track, inside, backward_too, again, narrow = (bool(n) for n in rng.integers(0, 2, 5))
    chosen = layer.differentiated(arrays)

    def run(fun: Any, dtype: Any, autocast: bool) -> list[Any]:
        """The value, the gradients, and the gradients of their sum of squares."""
        tensors = [torch.tensor(a) for a in arrays]
        tensors = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
        if narrow and dtype is torch.float32:
            tensors[0] = tensors[0].to(torch.bfloat16)
        tensors = [t.requires_grad_(k in chosen) for k, t in enumerate(tensors)]
        context = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext()
        wrt = [tensors[k] for k in chosen]
        with context:
            y = fun(*tensors)
        with context if backward_too else nullcontext():
            cotangent = torch.tensor(g).to(y.dtype)
            first = torch.autograd.grad(y, wrt, cotangent, create_graph=again)
            second = []
            if again:
                squares = sum((a.double() ** 2).sum() for a in first)
                second = (
                    torch.autograd.grad(squares, wrt, allow_unused=True) if squares.requires_grad else [None] * len(wrt)
                )
                second = [torch.zeros_like(a) if b is None else b for a, b in zip(wrt, second, strict=True)]
        return [y.detach(), *(a.detach() for a in (*first, *second))]

    def layered(*blocks: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16) if inside else nullcontext():
            return layer.ours(*blocks, **lies.options)

    g = rng.standard_normal(tuple(layer.theirs(*map(torch.tensor, arrays)).shape))
    exact = run(layer.theirs, torch.float64, False)
    theirs = run(layer.theirs, torch.float32, True)
    ours = run(spt.map(layered, tuple(lies.specs), lies.out, mesh=mesh, check=track), torch.float32, not inside)
    if layer is LAYERS["pad, reflect"]:  # on the CPU torch widens it
        theirs[0] = theirs[0].to(ours[0].dtype)
    for each in zip(ours, theirs, exact, strict=True):
        check_close(*each)


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
