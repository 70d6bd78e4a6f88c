"""A layer on blocks against the same layer on one worker: values and gradients, in every way that it can be called."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import Layout, P

FRONTENDS = pytest.mark.parametrize(
    "torch", [pytest.param(False, id="numpy"), pytest.param(True, id="torch", marks=pytest.mark.torch)]
)
"""A test with an argument `torch`: whether tensors are checked too."""


def integers(rng: np.random.Generator, shape: Sequence[int], dtype: Any = float) -> np.ndarray:
    """Small integers, whose products and sums are exact."""
    a = rng.integers(-3, 4, tuple(shape))
    return (a + 1j * rng.integers(-3, 4, tuple(shape)) if np.dtype(dtype).kind == "c" else a).astype(dtype)


def random_cuts(rng: np.random.Generator, n: int, parts: int) -> tuple[int, ...]:
    """n entries in blocks of any lengths, zeros among them."""
    ends = sorted(rng.integers(0, n + 1, parts - 1).tolist())
    return tuple(b - a for a, b in itertools.pairwise([0, *ends, n]))


def random_mesh(rng: np.random.Generator, most: int = 8) -> spmd.Mesh:
    """A mesh of one to three axes and at most 8 workers."""
    while True:
        sides = rng.integers(1, 5, rng.integers(1, 4)).tolist()
        if np.prod(sides) <= most:
            return spmd.Mesh(**dict(zip("xyz", sides, strict=False)))


def random_layout(
    rng: np.random.Generator, shape: Sequence[int], mesh: spmd.Mesh, whole: Sequence[int] = (), kind: str | None = None
) -> P | Layout:
    """A spec, an uneven layout by a spec ("uneven"), or a layout on some of the workers ("grid") of an array.

    whole: dimensions that are not split.
    """
    ndim = len(shape)
    free = [d for d in range(ndim) if d not in whole]
    kind = kind or rng.choice(["spec", "spec", "uneven", "grid"])
    if kind == "grid":
        counts = [1] * ndim
        for d in rng.permutation(free):
            counts[d] = int(rng.integers(1, max(2, mesh.size // int(np.prod(counts)) + 1)))
        total = int(np.prod(counts))
        workers = rng.permutation(mesh.size)[:total].tolist()
        cuts = [random_cuts(rng, n, c) if rng.random() < 0.5 else None for n, c in zip(shape, counts, strict=True)]
        return Layout.grid(shape, counts, mesh.axes, workers, cuts)
    names: list[list[str]] = [[] for _ in range(ndim)]
    for axis in mesh.axes:
        place = rng.choice([-1, *free])
        if place >= 0:
            names[place].append(axis)
    spec = P(*(tuple(n) or None for n in names))
    if kind == "spec":
        return spec
    parts = [int(np.prod([mesh.axes[a] for a in n], dtype=int)) for n in names]
    return Layout(shape, spec, mesh.axes, [random_cuts(rng, n, p) for n, p in zip(shape, parts, strict=True)])


def check_layer(
    fun: Callable[..., Any],
    expected: tuple[np.ndarray, Sequence[np.ndarray]],
    args: Sequence[np.ndarray],
    specs: Sequence[P | Layout],
    out: P | Layout,
    mesh: spmd.Mesh,
    g: np.ndarray,
    *,
    compare: Callable[[Any, Any], None] = np.testing.assert_array_equal,
    in_global: Callable[..., Any] | None = None,
    torch: bool = False,
) -> None:
    """fun(*blocks) in a body gives blocks of `expected`, laid out by `out`; its cotangents for g are those expected.

    A cotangent that is None is not compared. With states and without, on both schedulers; on small meshes under
    `spmd.jit` too. in_global: the layer of global arrays, outside of bodies. torch: fun takes tensors too.
    """
    value, cotangents = expected
    for scheduler, check in (("lockstep", True), ("threads", False)):
        on = spmd.Mesh(**mesh.axes, scheduler=scheduler)
        placed = [spmd.put(a, s, on) for a, s in zip(args, specs, strict=True)]
        mapped = on.map(fun, in_specs=tuple(specs), out_specs=out, check=check)
        result, pullback = spmd.vjp(mapped, *placed)
        compare(result.numpy(), value)
        for a, b in zip(pullback(spmd.put(g, out, on)), cotangents, strict=True):
            if b is not None:
                compare(a.numpy(), b)
    if mesh.size <= 3:
        check_recorded(fun, expected, args, specs, out, mesh, g, compare)
    if in_global is not None:
        placed = [spmd.put(a, s, mesh) for a, s in zip(args, specs, strict=True)]
        result, pullback = spmd.vjp(in_global, *placed)
        compare(result.numpy(), value)
        for a, b in zip(pullback(spmd.put(g, result.layout, mesh)), cotangents, strict=True):
            if b is not None:
                compare(a.numpy(), b)
    if torch:
        check_tensors(fun, expected, args, specs, out, mesh, g, compare)


def check_recorded(fun, expected, args, specs, out, mesh, g, compare) -> None:
    """The same in a body that is recorded, with other values than those it is run again with."""
    chosen = [k for k, b in enumerate(expected[1]) if b is not None]

    def both(g, *blocks):
        def layer(*some):
            given = dict(zip(chosen, some, strict=True))
            return fun(*(given.get(k, block) for k, block in enumerate(blocks)))

        y, pullback = spmd.vjp(layer, *(blocks[k] for k in chosen))
        return y, *pullback(g)

    run = spmd.jit(spmd.map(both, (out, *specs), (out, *(specs[k] for k in chosen)), mesh=mesh))
    others = [np.flip(a).copy() if k in chosen else a for k, a in enumerate(args)]
    run(np.flip(g).copy(), *others)
    y, *results = run(g, *args)
    compare(y.numpy(), expected[0])
    for k, result in zip(chosen, results, strict=True):
        compare(result.numpy(), expected[1][k])


def check_tensors(fun, expected, args, specs, out, mesh, g, compare) -> None:
    """The same on tensors, by torch's own backward pass."""
    import torch

    from spmd.bridge import torch as spt

    for check in (True, False):
        tensors = [torch.tensor(a, requires_grad=a.dtype.kind in "fc") for a in args]
        result = spt.map(fun, in_specs=tuple(specs), out_specs=out, mesh=mesh, check=check)(*tensors)
        compare(result.detach().numpy(), expected[0])
        result.backward(torch.tensor(g))
        for tensor, b in zip(tensors, expected[1], strict=True):
            if tensor.requires_grad:
                compare(tensor.grad.numpy(), b)
