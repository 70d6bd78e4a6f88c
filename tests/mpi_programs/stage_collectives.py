"""Pipelines whose stages use collectives along other axes, each in another number, and for each microbatch another one:
losses, gradients and results are those of one worker. Arguments: seeds, from and to; on how many processes;
and "apart" for processes that see nothing of each other."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import spmd
from spmd import P, functions
from spmd.training.pipelines.schedules import SCHEDULES

WIDTH, INNER, EXPERTS = 3, 6, 4
ALONG = ("model", "expert")


def plain(w: Any, h: Any, on_mesh: bool) -> Any:
    return np.tanh(h @ w["w"])


def split(w: Any, h: Any, on_mesh: bool) -> Any:
    """A layer whose inner width lies split."""
    inner = np.tanh(h @ w["up"]) @ w["down"]
    return h + (spmd.psum(inner, "model") if on_mesh else inner)


def repeated(w: Any, h: Any, on_mesh: bool) -> Any:
    """So many layers as the length of the microbatch says."""
    for _ in range(len(h) % 3):
        h = np.sin(split(w, h, on_mesh))
    return h * 1.0


def mixed(w: Any, h: Any, on_mesh: bool) -> Any:
    rows = lambda own, x: np.tanh(x @ own)
    return h + functions.experts(h, h @ w["gate"], rows, "expert" if on_mesh else None, k=2, params=w["experts"])


def called(w: Any, h: Any, on_mesh: bool) -> Any:
    """A layer that the last worker along `model` computes, and others ask for."""
    if not on_mesh:
        return np.tanh(h @ w["w"])
    last = spmd.axis_size("model") - 1
    future = spmd.remote(lambda h, w: np.tanh(h @ w), at=last, axis_name="model")(h, w["w"])
    return spmd.replicate(future.result(), "model", last)


def averaged(w: Any, h: Any, on_mesh: bool) -> Any:
    """A mean over all workers of a stage of what they all have."""
    scale = w["scale"]
    return h * (spmd.pmean(spmd.pvary(scale, "model"), "model") if on_mesh else scale)


KINDS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (plain, split, repeated, mixed, called, averaged)}
SPLIT = {"up": P(None, "model"), "down": P("model"), "experts": P("expert")}


def params_of(kind: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    layer = {"up": (WIDTH, INNER), "down": (INNER, WIDTH)}
    shapes = {
        "mixed": {"gate": (WIDTH, EXPERTS), "experts": (EXPERTS, WIDTH, WIDTH)},
        "averaged": {"scale": (WIDTH,)},
        "split": layer,
        "repeated": layer,
    }.get(kind, {"w": (WIDTH, WIDTH)})
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Case:
    """kinds: of the stages. n: samples, which lie over `data` and `expert`."""

    axes: dict[str, int]
    kinds: list[str]
    n: int
    schedule: str
    microbatches: int
    seed: int

    def data(self) -> tuple[list[Any], np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        params = [params_of(kind, rng) for kind in self.kinds]
        return params, *rng.normal(size=(2, self.n, WIDTH))


def drawn(seed: int, workers: int | None = None) -> Case:
    """A case. workers: of its mesh; None: two to eight."""
    rng = np.random.default_rng(seed)
    while True:
        axes = {name: int(rng.integers(1, 4)) for name in ("stage", "data", *ALONG)}
        if axes["stage"] > 1 and math.prod(axes.values()) in ([workers] if workers else range(2, 9)):
            break
    schedule = str(rng.choice([*SCHEDULES]))
    stages = axes["stage"] * (int(rng.integers(1, 4)) if schedule == "interleaved" else 1)
    names = [str(name) for name in rng.permutation([*axes])]
    kinds = [str(kind) for kind in rng.choice([*KINDS], stages)]
    n, microbatches = int(rng.integers(1, 20)), int(rng.integers(1, 7))
    if "repeated" in kinds:  # All workers of a stage make the same collectives, so they have as many samples.
        n = math.ceil(n / (axes["data"] * axes["expert"])) * axes["data"] * axes["expert"]
    return Case({name: axes[name] for name in names}, kinds, n, schedule, microbatches, seed)


def by_one_worker(case: Case) -> Any:
    """The loss, its gradients in parameters and samples, and the result.

    The stages work on the samples of each worker and microbatch by themselves: lengths decide what `repeated` does.
    """
    params, x, y = case.data()
    parts = case.axes["data"] * case.axes["expert"]

    def result(params: Any, x: Any) -> Any:
        pieces = []
        for own in np.array_split(np.arange(case.n), parts):
            for rows in np.array_split(own, case.microbatches):
                h = x[rows]
                for kind, w in zip(case.kinds, params, strict=True):
                    h = KINDS[kind](w, h, False)
                pieces.append(h)
        return np.concatenate(pieces)

    value, grads = spmd.value_and_grad(lambda w, x: np.sum((result(w, x) - y) ** 2), (0, 1))(params, x)
    return value, *grads, result(params, x)


def in_a_pipeline(case: Case, twice: bool = True, **options: Any) -> Any:
    """The same on the mesh. twice: two steps in one map, of which the second counts."""
    params, x, y = case.data()
    mesh, over = spmd.Mesh(**case.axes, **options), ("data", "expert")
    stages = [lambda w, h, f=KINDS[kind]: f(w, h, True) for kind in case.kinds]
    with mesh:
        along = [{name: SPLIT.get(name, P()) for name in own} for own in params]
        specs = spmd.training.stage_specs(params, "stage", along)
        step = spmd.training.pipeline(
            stages,
            microbatches=case.microbatches,
            schedule=case.schedule,
            loss=lambda h, y: np.sum((h - y) ** 2),
            reduction="sum",
        )

        def body(params: Any, x: Any, y: Any) -> Any:
            for _ in range(1 + twice):
                value, grads = step.value_and_grad(params, x, y, of_input=True)
            of_x = spmd.replicate(grads.x, "stage")
            return spmd.psum(value, over), grads.params, of_x, step(params, x)

        f = spmd.map(body, (specs, P(over), P(over)), (P(), specs, P(over), P(over)))
        return spmd.tree.map(lambda a: a.numpy() if hasattr(a, "numpy") else a, f(params, x, y))


def check(case: Case, **options: Any) -> None:
    """Raise unless the pipeline does what one worker does."""
    for a, b in zip(
        spmd.tree.leaves(in_a_pipeline(case, **options)), spmd.tree.leaves(by_one_worker(case)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


if __name__ == "__main__":
    first, last, workers = map(int, sys.argv[1:4])
    if "apart" in sys.argv:
        import other_hosts  # noqa: F401
    for seed in range(first, last):
        check(drawn(seed, workers))
    if spmd.is_main():
        print("as one worker")
