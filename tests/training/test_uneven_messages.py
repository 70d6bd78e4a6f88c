"""Where a model is split unevenly, workers whose blocks differ in size send equally many messages."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P, optim
from spmd.training import gathered, shard_specs
from spmd.training.units import _PACKED_MAX
from spmd.transport.algorithms.choice import SEPARATE_MIN
from training.sharded_cases import assert_close

WIDTH = 90


BUCKET = 1 << 15


@pytest.mark.parametrize(
    ("how", "limit"), [("gathered", _PACKED_MAX), ("shard", SEPARATE_MIN), ("sums of gradients", BUCKET)]
)
def test_blocks_on_both_sides_of_the_size_of_large_arrays(how, limit, scheduler, monkeypatch):
    monkeypatch.setattr("spmd.operators.gradient_buckets._BUCKET_NBYTES", BUCKET)
    rows = limit // (WIDTH * 8)
    rng = np.random.default_rng(0)
    params = [
        {"up": rng.standard_normal((WIDTH, 2 * rows + 1)) / 9, "b": rng.standard_normal(2 * rows + 1)},
        {"down": rng.standard_normal((2 * rows + 1, WIDTH)) / 9},
    ]
    whole = [{"up": P(None, "model"), "b": P("model")}, {"down": P("model")}]
    x = rng.standard_normal((3, WIDTH))

    def layer(w, x):
        return np.tanh(x @ w["up"] + w["b"]) if "up" in w else x @ w["down"]

    def serial(params):
        y = x
        for w in params:
            y = layer(w, y)
        return np.mean(y**2)

    plain = optim.adam(1e-3, eps=1e-6)
    state, losses = plain.init(params), []
    expected = params
    for _ in range(2):
        value, grads = spmd.value_and_grad(serial)(expected)
        expected, state = plain.update(grads, state, expected)
        losses.append(value)

    with spmd.Mesh(data=2, model=2, scheduler=scheduler):
        specs = shard_specs(params, "data", whole) if how == "gathered" else whole
        optimizer = optim.shard(plain, "data") if how == "shard" else plain
        state_specs = optimizer.specs(specs, params)

        def loss(params, x):
            for w in gathered(params, specs, "data") if how == "gathered" else params:
                x = layer(w, x)
            return spmd.mean(spmd.psum(x, "model") ** 2, "data")

        def step(params, state, x):
            at = spmd.pvary(params, "data") if how == "shard" else params
            value, grads = spmd.value_and_grad(loss)(at, x)
            return (value, *optimizer.update(grads, state, params))

        step = spmd.map(step, (specs, state_specs, P("data")), (P(), specs, state_specs))
        own, own_state = spmd.put(params, specs), optimizer.init(spmd.put(params, specs))
        own_losses = []
        for _ in range(2):
            value, own, own_state = step(own, own_state, x)
            own_losses.append(value)
    assert_close((own_losses, own, own_state), (losses, expected, state))
