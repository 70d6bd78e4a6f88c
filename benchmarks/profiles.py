"""What a profile costs: steps of training of examples/digits.py, with `spmd.profile` and without.

The network, the batch of 64 rows and the optimiser are those of the example; the mesh is data=2, model=1 or 2. Virtual
workers share one thread, so each step has the events of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.contest import ONE_THREAD, Builders, Case, Section, repeated

PROFILES = Section("profiles", "a step of training, recorded in a profile and not", 1e-9)

WIDTHS, BATCH = (64, 128, 64, 128, 10), 64


def training(axes: dict[str, int], transport: str, profiled: bool, jitted: bool = False) -> Case:
    """Steps of training of a perceptron whose layers are split over `model`, and whose batch is split over `data`."""
    import spmd
    from spmd import P

    rng = np.random.default_rng(0)
    layers = [(rng.normal(0, 0.1, (n, m)), np.zeros(m)) for n, m in pairwise(WIDTHS)]
    x, labels = rng.normal(size=(BATCH, WIDTHS[0])), rng.integers(0, WIDTHS[-1], BATCH)
    specs = [(P(None, "model"), P("model")), (P("model", None), P())] * 2

    def loss(params: Any, x: Any, labels: Any) -> Any:
        for k, ((w1, b1), (w2, b2)) in enumerate(zip(params[::2], params[1::2], strict=True)):
            x = spmd.relu(x) if k else x
            x = spmd.psum(spmd.relu(x @ w1 + b1) @ w2, "model") + b2
        return spmd.mean(spmd.softmax_cross_entropy(x, labels), "data")

    mesh = spmd.make_mesh(tuple(axes.values()), tuple(axes), transport=transport)
    mapped = mesh.map(loss, in_specs=(specs, P("data"), P("data")), out_specs=P())
    gradient = spmd.value_and_grad(spmd.jit(mapped) if jitted else mapped)
    optimizer = spmd.optim.sgd(0.05, momentum=0.9)
    params = spmd.put(layers, specs, mesh)
    state = optimizer.init(params)

    def step() -> Any:
        nonlocal params, state
        value, grads = gradient(params, x, labels)
        params, state = optimizer.update(grads, state, params)
        return value

    told = [float(step()) for _ in range(3)]
    run = repeated(step)

    def timed(count: int) -> float:
        with spmd.profile() if profiled else nullcontext():
            return run(count)

    return Case(timed, lambda: [np.array(told)])


def works(case: Callable[..., Case]) -> Builders:
    return {
        "data=2, model=2": partial(case, {"data": 2, "model": 2}, "local"),
        "data=2, model=2, jitted": partial(case, {"data": 2, "model": 2}, "local", jitted=True),
    }


@PROFILES.contestant("spmd", env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return works(partial(training, profiled=True))


@PROFILES.contestant("spmd, no profile", env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return works(partial(training, profiled=False))


@PROFILES.contestant("spmd, mpi", launcher="mpiexec", processes=2, env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return {"data=2, two processes": partial(training, {"data": 2, "model": 1}, "mpi", True)}


@PROFILES.contestant("spmd, mpi, no profile", launcher="mpiexec", processes=2, env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return {"data=2, two processes": partial(training, {"data": 2, "model": 1}, "mpi", False)}
