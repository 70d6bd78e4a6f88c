"""Sharded states, accumulation, clipping, averages, groups, mixed precision and model parallelism, drawn together."""

from __future__ import annotations

import numpy as np

import spmd
from spmd import P, optim
from spmd.training import accumulate
from training import sharded_cases as cases

AXES = [{"data": 4}, {"data": 2, "model": 2}, {"data": 2, "replica": 2}, {"model": 2, "data": 4}, {"data": 3}]


def drawn(seed):
    """Axes, samples, an optimiser of one worker, and how the gradient is taken."""
    rng = np.random.default_rng(seed)
    rate = [2e-3, optim.one_cycle(5e-3, 10), optim.cosine(5e-3, 6, warmup=2), optim.step_decay(5e-3, 3)][
        rng.integers(4)
    ]
    plain = [optim.sgd(rate), optim.sgd(rate, 0.9), optim.adamw(rate)][rng.integers(3)]
    wrappers = {
        "clipped": lambda o: optim.clipped(o, 0.5),
        "ema": lambda o: optim.ema(o, 0.8),
        "groups": lambda o: optim.groups({"first.*": o, "scale": optim.frozen(), "*": optim.sgd(1e-3, 0.5)}),
        "mixed": lambda o: optim.mixed_precision(o, scale=4.0, growth=2.0, interval=3),
    }
    for name in rng.permutation([*wrappers])[: rng.integers(len(wrappers) + 1)]:
        plain = wrappers[name](plain)
    options = {
        "parts": int(rng.integers(1, 5)),
        "contributions": bool(rng.integers(2)),
        "mean": bool(rng.integers(2)),
        "jit": bool(rng.integers(2)),
        "axis": ("data",) if rng.integers(2) else None,
        "sharded": bool(rng.integers(4)),
    }
    return AXES[rng.integers(len(AXES))], int(rng.integers(1, 14)), plain, options


def scale_of(state):
    """The scale of the loss, wherever the state of mixed precision lies."""
    while state and not hasattr(state, "scale"):
        state = state["first.*"] if isinstance(state, dict) else getattr(state, "state", None)
    return state.scale if state else 1.0


def serial(plain, samples):
    x, y = cases.data_of(samples)
    params = cases.params_of()
    state, losses = plain.init(params), []
    for _ in range(cases.STEPS):
        scale = scale_of(state)
        loss, grads = spmd.value_and_grad(lambda p, s=scale: s * cases.squares(p, x, y) / samples)(params)
        params, state = plain.update(grads, state, params)
        losses.append(loss / scale)
    return losses, params, state


def run(seed, **mesh_options):
    """Ten steps on the mesh that is drawn are those of one worker."""
    axes, samples, plain, options = drawn(seed)
    batch, specs = cases.batch_axes(axes), cases.param_specs(axes)
    model = "model" if "model" in axes else None
    own = options["contributions"] and options["sharded"]
    optimizer = optim.shard(plain, options["axis"] or batch) if options["sharded"] else plain

    def step(params, state, x, y):
        scale = scale_of(state)

        def loss(p, x, y):
            errors = cases.squares(p, x, y, model) * scale
            if options["mean"]:
                return spmd.psum(errors, batch) / np.maximum(spmd.psum(x.shape[0], batch), 1)
            return errors / samples

        reduction = {"reduction": "mean"} if options["mean"] else {"reduction": "sum"}
        taken = accumulate(loss, options["parts"], **reduction)
        value, grads = taken(spmd.pvary(params, batch) if own else params, x, y)
        value = value if options["mean"] else spmd.psum(value, batch)
        return (value / scale, *optimizer.update(grads, state, params))

    with spmd.Mesh(**axes, **mesh_options):
        params = spmd.put(cases.params_of(), specs)
        state, state_specs = optimizer.init(params), optimizer.specs(params)
        step = spmd.map(step, in_specs=(specs, state_specs, P(batch), P(batch)), out_specs=(P(), specs, state_specs))
        step, losses = spmd.jit(step) if options["jit"] else step, []
        for _ in range(cases.STEPS):
            value, params, state = step(params, state, *cases.data_of(samples))
            losses.append(float(value))
    cases.assert_close((losses, params, state), serial(plain, samples))
