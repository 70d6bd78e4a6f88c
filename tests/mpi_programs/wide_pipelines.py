"""Pipelines of arrays whose messages are too long for a packet, in each schedule, with and without collectives in
stages: as on one worker. Arguments: the stages and workers along `model`, as in "4x1,2x2", and the schedules."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import spmd
from spmd import P

WIDTH, SAMPLES = 160, 80
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(2, SAMPLES, WIDTH))


def stage(w: Any, h: Any) -> Any:
    return np.tanh(h @ w)


def split_stage(w: Any, h: Any) -> Any:
    """Rows of the matrix on each worker along `model`."""
    return np.tanh(spmd.psum(spmd.pslice(h, "model", axis=1, tiled=True) @ w, "model"))


def mean_square(h: Any, y: Any) -> Any:
    return np.mean((h - y) ** 2)


def check(axes: dict[str, int], schedule: str, virtual: int, microbatches: int) -> None:
    count = axes["stage"] * virtual
    weights = [rng.normal(size=(WIDTH, WIDTH)) / 10 for _ in range(count)]

    def output(weights: list[Any]) -> Any:
        h = X
        for w in weights:
            h = stage(w, h)
        return h

    def whole(weights: list[Any]) -> Any:
        return mean_square(output(weights), Y)

    split = "model" in axes
    step = spmd.training.pipeline(
        [split_stage if split else stage] * count,
        "stage",
        microbatches=microbatches,
        schedule=schedule,  # type: ignore[arg-type]
        loss=mean_square,
    )
    with spmd.Mesh(**axes):
        specs = spmd.training.stage_specs(weights, "stage", [P("model")] * count if split else None)

        def body(weights: list[Any]) -> tuple[Any, Any, Any]:
            value, grads = step.value_and_grad(weights, X, Y)
            return value, grads.params, step(weights, X)

        run = spmd.map(body, (specs,), (P(), specs, P()))
        for _ in range(2):
            value, grads, y = run(spmd.put(weights, specs))
        assert np.allclose(y, output(weights), rtol=0, atol=1e-12), (axes, schedule)
        expected_value, expected = spmd.value_and_grad(whole)(weights)
        assert np.allclose(float(value), expected_value, rtol=0, atol=1e-12)
        for found, want in zip(grads, expected, strict=True):
            assert np.allclose(found.numpy(), want, rtol=0, atol=1e-12), (axes, schedule)


if __name__ == "__main__":
    for text in sys.argv[1].split(","):
        stages, model = map(int, text.split("x"))
        axes = {"stage": stages} | ({"model": model} if model > 1 else {})
        for schedule in sys.argv[2:]:
            check(axes, schedule, 2 if schedule == "interleaved" else 1, 7)
        check(axes, "gpipe", 1, SAMPLES)  # more than go ahead
        check(axes, "interleaved", 3, 4)
    if spmd.is_main():
        print("as on one worker")
