"""Bodies at random of sums and elementwise operations, to compare recorded programs with bodies that run each time.

All numbers are small integers, so that sums and gradients are exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

import spmd
from spmd import P

__all__ = ["Job", "bits", "job"]

SHAPES = ((), (3,), (16,), (2, 5), (0, 4), (40, 30))
"""Shapes of blocks. The last one has more bytes than sums that are packed may have."""
DEPTH = 12


class Job(NamedTuple):
    """A map of one number and three arrays, which gives a vector and a number, and sets of arguments for it."""

    mapped: Any
    arguments: list[tuple[Any, ...]]
    text: str


class _Body:
    """What a body does, drawn beforehand. steps: (operation, numbers of values, axes or None, a number)."""

    def __init__(self, rng: np.random.Generator, axes: tuple[str, ...], alike: bool):
        self.axes = axes
        self.shapes = [SHAPES[k] for k in rng.integers(0, len(SHAPES), 3)]
        names = [(a,) for a in axes] + [axes] * 3
        kinds = ["psum"] * 6 + ["tree", "pmean", "pmax", "gather", "add", "multiply", "clip", "half", "write"]
        kinds += ["psum" if alike else "some"] * 3
        draws = rng.integers(0, 1000, (DEPTH, 4)).tolist()
        self.steps = [
            (kinds[rng.integers(len(kinds))], (i, j), names[rng.integers(len(names))], k) for i, j, k, _ in draws
        ]

    def __call__(self, s: Any, *xs: Any) -> tuple[Any, Any]:
        weight = 1 + spmd.axis_index(self.axes)
        values = [x * s for x in xs]
        for kind, (i, j), axes, k in self.steps:
            x = values[i % len(values)]
            alike = [y for y in values if y.shape == x.shape and y.dtype == x.dtype]
            values += _applied(kind, x, alike[j % len(alike)], values, axes, k, weight)
        vector = np.concatenate([spmd.psum((v * _as(weight, v)).sum(), self.axes).reshape(1) for v in values])
        return vector, (vector * np.arange(1.0, 1 + vector.size)).sum()


def _as(weight: Any, x: Any) -> Any:
    """The number of the worker in the dtype of x. What it is multiplied with is Varying along all axes."""
    return weight.astype(x.dtype)


def _applied(kind: str, x: Any, y: Any, values: list[Any], axes: tuple[str, ...], k: int, weight: Any) -> list[Any]:
    """The new values of a step."""
    varying = x * _as(weight, x)
    small = np.clip(varying, -9, 9)
    if kind == "psum":
        return [spmd.psum(small, axes)]
    if kind == "tree":
        pair = spmd.psum({"a": small, "b": (np.clip(y * _as(weight, y), -5, 5), small + 1)}, axes)
        return [pair["a"], pair["b"][0] - pair["b"][1]]
    if kind == "pmean":
        return [spmd.pmean(small * 840, axes)]
    if kind == "pmax":
        return [spmd.pmax(small, axes)]
    if kind == "gather":
        return [spmd.all_gather(small.reshape(1, *x.shape), axes[0]).sum(0)]
    if kind == "some":  # a sum that depends on another one on some workers only
        last = values[-1]
        depends = spmd.worker_index(axes[0]) % 2 == k % 2
        return [spmd.psum(np.clip(small + last.sum().astype(x.dtype), -9, 9) if depends else small, axes)]
    if kind == "half":
        return [spmd.psum(small.astype(np.float32), axes).astype(x.dtype)]
    if kind == "write":
        return [(small + 1).at[...].add(y)]
    return [
        x + y if kind == "add" else np.clip(x, -4, 4) * (k % 3 - 1) if kind == "multiply" else np.clip(y, -3, k % 5)
    ]


def job(seed: int, axes: Mapping[str, int], alike: bool, **options: Any) -> Job:
    """A random body on a mesh of these axes. alike: whether what depends on what is the same on all workers, as
    derivatives need it. options: of the mesh."""
    rng, mesh = np.random.default_rng(seed), spmd.Mesh(**axes, **options)
    body = _Body(rng, tuple(axes), alike)
    n = int(np.prod([*axes.values()]))
    specs = [P(tuple(axes)) for _ in body.shapes]

    def rows(s: Any, *xs: Any) -> tuple[Any, Any]:
        return body(s, *(x[0] for x in xs))

    mapped = mesh.map(rows, (P(), *specs), (P(), P()))
    arguments = [
        (
            float(k),
            *(spmd.put(rng.integers(-4, 5, (n, *shape)).astype(np.float64), specs[0], mesh) for shape in body.shapes),
        )
        for k in (1, 2, 3)
    ]
    return Job(mapped, arguments, f"seed {seed} on {axes}: {body.shapes}, {body.steps}")


def bits(tree: Any) -> list[tuple[Any, ...]]:
    """Shape, dtype and bytes of each leaf."""
    leaves = [np.asarray(x.numpy() if hasattr(x, "numpy") else x) for x in spmd.tree.leaves(tree)]
    return [(x.shape, x.dtype, np.ascontiguousarray(x).tobytes()) for x in leaves]


def loss(mapped: Any) -> Callable[..., Any]:
    """The number that a map of a job gives, as a function to differentiate."""
    return lambda *args: mapped(*args)[1]
