"""Pipelines along with data, tensor and expert parallelism, clipping, accumulation, split states and restarts, drawn
together: ten steps are those of one worker."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import spmd
from spmd import P, optim
from spmd.training.pipelines.schedules import SCHEDULES
from training.sharded_cases import assert_close

STEPS = 10
EXPERTS = 3


def dense(params: Any, x: Any, shared: Any) -> Any:
    return {**x, "h": np.tanh(x["h"] @ params["w"] + params["b"])}


def wide(params: Any, x: Any, shared: Any, axis: str | None = None) -> Any:
    """Two products; along `axis` the inner width lies split."""
    inner = np.tanh(x["h"] @ params["up"]) @ params["down"]
    return {**x, "h": x["h"] + (spmd.psum(inner, axis) if axis else inner)}


def recomputed(params: Any, x: Any, shared: Any) -> Any:
    """A layer that is computed again in backward, of which others take a constant and nobody the input."""
    h = spmd.checkpoint(lambda w, h: np.tanh(h @ w))(params["w"], x["h"])
    return {"h": h, "scale": 1.5, "positive": x["positive"], "before": x["h"]}


def mixture(params: Any, x: Any, shared: Any, axis: str | None = None) -> Any:
    scores = x["h"] @ params["gate"]
    rows = lambda w, h: np.tanh(h @ w)
    return {**x, "h": x["h"] + spmd.functions.experts(x["h"], scores, rows, axis, k=2, params=params["experts"])}


def first(params: Any, x: Any, shared: Any) -> Any:
    h = x * shared["scale"]
    return dense(params, {"h": h, "positive": np.sum(h, 1, keepdims=True) > 0, "scale": np.ones(1)}, shared)


def last(params: Any, x: Any, shared: Any) -> Any:
    return (x["h"] @ params["w"]) * shared["scale"] * x["scale"] + x["positive"]


def unchanged(params: Any, x: Any, shared: Any) -> Any:
    return x


KINDS: dict[str, Callable[..., Any]] = {
    "dense": dense,
    "wide": wide,
    "recomputed": recomputed,
    "mixture": mixture,
    "unchanged": unchanged,
    "first": first,
    "last": last,
}
SPLIT = {"up": P(None, "model"), "down": P("model"), "experts": P("expert")}


@dataclass(frozen=True)
class Part:
    """A mesh, and what runs on it. mean: whether the loss is a mean over the samples of all workers, in one part."""

    axes: dict[str, int]
    schedule: str
    microbatches: int
    parts: int
    sharded: bool
    mean: bool


@dataclass(frozen=True)
class Case:
    """kinds: of the stages. n: samples in a batch. runs: the first steps, and those after a restart."""

    kinds: tuple[str, ...]
    widths: tuple[int, ...]
    n: int
    optimizer: Any
    runs: tuple[Part, ...]


def drawn(seed: int, workers: int | None = None) -> Case:
    """A case. workers: of each of its meshes; None: at most eight."""
    rng = np.random.default_rng(seed)
    stages = int(rng.choice([2, 3, 4, 4, 6]))
    kinds = ["first", *rng.choice([*KINDS][:5], stages - 2).tolist(), "last"]
    widths = [3, *rng.integers(2, 6, stages - 1).tolist(), 3]
    for k, kind in enumerate(kinds):
        if kind in ("wide", "mixture", "unchanged"):
            widths[k + 1] = widths[k]
    rate = [0.02, optim.cosine(0.02, STEPS, warmup=2)][rng.integers(2)]
    optimizer = [optim.sgd(rate, 0.9), optim.adamw(rate)][rng.integers(2)]
    if rng.integers(2):
        optimizer = optim.clipped(optimizer, 0.3)
    runs = tuple(_drawn_run(rng, stages, workers) for _ in range(1 + rng.integers(2)))
    return Case(tuple(kinds), tuple(widths), int(rng.integers(1, 14)), optimizer, runs)


def _drawn_run(rng: Any, stages: int, workers: int | None) -> Part:
    while True:
        own = int(rng.choice([k for k in (1, 2, 3, 4) if stages % k == 0]))
        axes = {"stage": own, **{name: int(rng.integers(1, 4)) for name in ("data", "model", "expert")}}
        if math.prod(axes.values()) in ([workers] if workers else range(2, 9)):
            break
    mean = bool(rng.integers(2))
    names = ["interleaved"] if own < stages else [*SCHEDULES]
    return Part(
        {str(name): axes[name] for name in rng.permutation([*axes])},
        str(rng.choice(names)),
        int(rng.integers(1, 7)),
        1 if mean else int(rng.integers(1, 3)),
        bool(rng.integers(2)),
        mean,
    )


def params_of(case: Case) -> Any:
    """The parameters of all stages, and what they share."""
    rng = np.random.default_rng(0)
    found = []
    for kind, (a, b) in zip(case.kinds, pairwise(case.widths), strict=True):
        shapes = {
            "wide": {"up": (a, 5), "down": (5, a)},
            "mixture": {"gate": (a, EXPERTS), "experts": (EXPERTS, a, a)},
            "last": {"w": (a, b)},
            "recomputed": {"w": (a, b)},
            "unchanged": {},
        }.get(kind, {"w": (a, b), "b": (b,)})
        found.append({name: rng.normal(size=shape) / 2 for name, shape in shapes.items()})
    return {"stages": found, "shared": {"scale": rng.normal(size=3)}}


def batch(case: Case, step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([1, step])
    return rng.normal(size=(case.n, 3)), rng.normal(size=(case.n, 3))


def by_one_worker(case: Case) -> Any:
    """The losses, the parameters and the state."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        for kind, own in zip(case.kinds, params["stages"], strict=True):
            x = KINDS[kind](own, x, params["shared"])
        return np.sum((x - y) ** 2) / case.n

    params = params_of(case)
    state, losses = case.optimizer.init(params), []
    for k in range(STEPS):
        value, grads = spmd.value_and_grad(loss)(params, *batch(case, k))
        params, state = case.optimizer.update(grads, state, params)
        losses.append(float(value))
    assert max(losses) < 1e3, "a case that diverges shows nothing"
    return losses, params, state


def stages_of(case: Case) -> list[Callable[..., Any]]:
    def with_axis(f: Callable[..., Any], axis: str) -> Callable[..., Any]:
        return lambda params, x, shared: f(params, x, shared, axis)

    axes = {"wide": "model", "mixture": "expert"}
    return [with_axis(KINDS[kind], axes[kind]) if kind in axes else KINDS[kind] for kind in case.kinds]


def step_of(case: Case, run: Part, optimizer: Any, specs: Any, state_specs: Any) -> Callable[..., Any]:
    """A step: (params, state, x, y) -> (loss, params, state). Samples lie over `data` and `expert`."""
    split = ("data", "expert")
    mean = lambda h, y: spmd.mean(np.sum((h - y) ** 2, 1), split)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        pipeline = spmd.training.pipeline(
            stages_of(case),
            microbatches=run.microbatches,
            schedule=run.schedule,
            loss=mean if run.mean else lambda h, y: np.sum((h - y) ** 2) / case.n,
            reduction="mean" if run.mean else "sum",
        )
        total: Any = None
        for k in range(run.parts):
            part = slice(k * len(x) // run.parts, (k + 1) * len(x) // run.parts)
            value, grads = pipeline.value_and_grad(params["stages"], x[part], y[part], shared=params["shared"])
            found = (value, {"stages": grads.params, "shared": grads.shared})
            total = found if total is None else spmd.tree.map(lambda a, b: a + b, total, found)
        value, grads = total
        return (value if run.mean else spmd.psum(value, split), *optimizer.update(grads, state, params))

    return spmd.map(step, in_specs=(specs, state_specs, P(split), P(split)), out_specs=(P(), specs, state_specs))


def trained(case: Case, folder: Path, **options: Any) -> Any:
    """The same on the meshes, with a restart between them."""
    losses: list[float] = []
    ends = [STEPS * (k + 1) // len(case.runs) for k in range(len(case.runs))]
    for run, end in zip(case.runs, ends, strict=True):
        optimizer = optim.shard(case.optimizer, "data") if run.sharded else case.optimizer
        with spmd.Mesh(**run.axes, **options):
            params = params_of(case)
            along = [{name: SPLIT.get(name, P()) for name in own} for own in params["stages"]]
            specs = {"stages": spmd.training.stage_specs(params["stages"], "stage", along), "shared": P()}
            params = spmd.put(params, specs)
            state, state_specs = optimizer.init(params), optimizer.specs(params)
            if losses:
                params, state = spmd.load(folder / "run", like=(params, state))
            step = step_of(case, run, optimizer, specs, state_specs)
            for k in range(len(losses), end):
                value, params, state = step(params, state, *batch(case, k))
                losses.append(float(value))
            if end < STEPS:
                spmd.save(folder / "run", (params, state))
            found = spmd.tree.map(lambda x: x.numpy() if isinstance(x, spmd.PartitionedArray) else x, (params, state))
    return losses, *found


def run(seed: int, folder: Path, workers: int | None = None, **options: Any) -> None:
    """Raise unless the steps are those of one worker."""
    case = drawn(seed, workers)
    assert_close(trained(case, folder, **options), by_one_worker(case))
