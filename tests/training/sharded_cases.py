"""A small model whose weights may be split over `model`, trained for ten steps on one worker and on a mesh."""

from __future__ import annotations

from typing import Any

import numpy as np

import spmd
from spmd import P

STEPS = 10
MESHES = [
    {"data": 1},
    {"data": 2},
    {"data": 3},
    {"data": 4},
    {"data": 2, "model": 2},
    {"model": 2, "data": 2},
    {"data": 2, "replica": 2},
    {"data": 3, "model": 2},
]


def params_of(seed: int = 0, dtype: Any = np.float64) -> dict[str, Any]:
    """Uneven shapes, an array without dimensions, one without entries and one of a single entry."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return np.asarray(rng.standard_normal(shape), dtype)

    return {
        "first": {"w": normal(5, 7), "b": normal(7)},
        "second": [normal(7, 3), normal(3)],
        "scale": normal(),
        "empty": normal(0, 2),
        "one": normal(1, 1),
    }


def param_specs(axes) -> dict[str, Any]:
    model = "model" if "model" in axes else None
    return {
        "first": {"w": P(None, model), "b": P(model)},
        "second": [P(model), P()],
        "scale": P(),
        "empty": P(),
        "one": P(),
    }


def data_of(samples: int = 11, dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.standard_normal((samples, 5)).astype(dtype), rng.standard_normal((samples, 3)).astype(dtype)


def squares(params, x, y, model: str | None = None):
    """The sum of squared errors of these samples. model: the axis that splits the hidden units."""
    h = np.tanh(x @ params["first"]["w"] + params["first"]["b"]) @ params["second"][0]
    h = spmd.psum(h, model) if model else h
    out = (h + params["second"][1]) * params["scale"] + params["one"] + np.sum(params["empty"])
    return np.sum((out - y) ** 2)


def serial(optimizer, steps: int = STEPS, params: Any = None, state: Any = None, samples: int = 11):
    """Losses, parameters and state of one worker."""
    x, y = data_of(samples)
    params = params_of() if params is None else params
    state = optimizer.init(params) if state is None else state
    losses = []
    for _ in range(steps):
        loss, grads = spmd.value_and_grad(lambda p: squares(p, x, y) / samples)(params)
        params, state = optimizer.update(grads, state, params)
        losses.append(loss)
    return losses, params, state


def batch_axes(axes) -> tuple[str, ...]:
    return tuple(n for n in axes if n != "model")


def step_of(optimizer, axes, state_specs, samples: int = 11, summed: bool = False, **options):
    """The mapped step: (params, state, x, y) -> (loss, params, state). summed: gradients at Invariant parameters."""
    batch, specs = batch_axes(axes), param_specs(axes)
    model = "model" if "model" in axes else None

    def step(params, state, x, y):
        at = params if summed else spmd.pvary(params, batch)
        loss, grads = spmd.value_and_grad(lambda p: squares(p, x, y, model) / samples)(at)
        return (spmd.psum(loss, batch), *optimizer.update(grads, state, params))

    split = P(batch)
    return spmd.map(step, in_specs=(specs, state_specs, split, split), out_specs=(P(), specs, state_specs), **options)


def trained(optimizer, mesh, steps: int = STEPS, params: Any = None, state: Any = None, jit: bool = False, **options):
    """Losses, parameters and state of a mesh."""
    params = params_of() if params is None else params
    specs = param_specs(mesh.axes)
    losses = []
    with mesh:
        params = spmd.put(params, specs)
        state_specs = optimizer.specs(params)
        state = optimizer.init(params) if state is None else state
        step = step_of(optimizer, mesh.axes, state_specs, **options)
        step = spmd.jit(step) if jit else step
        for _ in range(steps):
            loss, params, state = step(params, state, *data_of())
            losses.append(float(loss))
    return losses, params, state


def assert_close(left, right, tolerance: float = 1e-10):
    """Two trees of arrays agree."""
    left, right = spmd.tree.leaves(left), spmd.tree.leaves(right)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        a, b = (x.numpy() if isinstance(x, spmd.PartitionedArray) else np.asarray(x) for x in (a, b))
        assert a.dtype == b.dtype or a.dtype.kind == "f"
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
