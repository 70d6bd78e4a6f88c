"""Gradients of minibatches in parts are those of the whole, with the messages of one sweep."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P, optim
from spmd.training import accumulate
from training import sharded_cases as cases


def whole_loss(samples):
    """A mean over all samples and a penalty: its cotangents are sums that are owed, and values of all workers."""
    x, y = cases.data_of(samples)

    def loss(p):
        return cases.squares(p, x, y) / samples + 0.1 * sum(np.sum(a**2) for a in spmd.tree.leaves(p))

    return spmd.value_and_grad(loss)(cases.params_of())


def body_loss(kind, model):
    def loss(p, x, y):
        errors = cases.squares(p, x, y, model)
        count = max(x.shape[0], 1)
        if kind == "own":
            return errors / count
        penalty = 0.1 * sum(np.sum(a**2) for a in spmd.tree.leaves(p)) if kind == "penalised" else 0.0
        n = spmd.psum(x.shape[0], "data")
        return spmd.psum(errors, "data") / np.maximum(n, 1) + penalty

    return loss


@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 2}, {"data": 3}, {"data": 2, "model": 2}], ids=str)
@pytest.mark.parametrize(("samples", "parts"), [(11, 3), (8, 4), (4, 3), (12, 1)])
@pytest.mark.parametrize("jit", [False, True])
def test_the_whole_minibatch(axes, samples, parts, jit, scheduler):
    if jit and scheduler == "threads":
        pytest.skip("recorded steps are the same on both schedulers")
    model = None

    def step(params, x, y):
        return accumulate(body_loss("penalised", model), parts)(params, x, y)

    with spmd.Mesh(**axes, scheduler=scheduler):
        mapped = spmd.map(step, in_specs=(P(), P("data"), P("data")), out_specs=P())
        found = (spmd.jit(mapped) if jit else mapped)(cases.params_of(), *cases.data_of(samples))
    cases.assert_close(found, whole_loss(samples))


@pytest.mark.parametrize("kind", ["mean", "own", "penalised"])
@pytest.mark.parametrize("contributions", [False, True])
def test_it_gives_what_value_and_grad_gives(kind, contributions, scheduler):
    loss = body_loss(kind, "model")
    axes = {"data": 2, "model": 2}
    specs = cases.param_specs(axes)
    if kind == "penalised":  # the penalty of split weights is no sum over workers
        loss = lambda p, x, y: body_loss("mean", "model")(p, x, y) + 0.1 * np.sum(p["second"][1] ** 2)

    def step(params, x, y):
        at = spmd.pvary(params, "data") if contributions else params
        found = accumulate(loss, 3, axis_name=named)(at, x, y), spmd.value_and_grad(loss)(at, x, y)
        return [spmd.tree.map(lambda a: np.reshape(a, (1, *a.shape)), (v, g)) for v, g in found]

    named = {"own": (), "penalised": "data"}.get(kind) if contributions else None
    own = "data" if kind == "own" or contributions else None
    of_values = P(own if kind == "own" or (kind == "penalised" and contributions) else None)
    of_grads = spmd.tree.map(lambda s: P("data" if contributions else None, *s.dims), specs)
    with spmd.Mesh(**axes, scheduler=scheduler):
        parts, whole = spmd.map(step, in_specs=(specs, P("data"), P("data")), out_specs=[(of_values, of_grads)] * 2)(
            cases.params_of(), *cases.data_of()
        )
    cases.assert_close(parts, whole)


def test_gradients_are_summed_once():
    """Of two dtypes: a message for each."""
    params = {"a": np.ones((3, 2)), "b": np.ones(2), "c": np.ones(2, np.float32)}

    def step(params, x):
        return accumulate(lambda p, x: np.sum((x @ p["a"] + p["b"] + p["c"]) ** 2), 4, reduction="sum")(params, x)[1]

    with spmd.Mesh(data=3), spmd.ledger() as log:
        spmd.map(step, in_specs=(P(), P("data")), out_specs=P())(params, np.ones((24, 3)))
    assert log.messages == 2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("samples", [1, 5, 7])
@pytest.mark.parametrize("jit", [False, True])
def test_parts_without_samples_anywhere_are_left_out(samples, jit, scheduler):
    """Their mean is 0 / 0. Some workers have fewer parts of samples than others; gradients come in one message."""
    x = np.random.default_rng(samples).standard_normal((samples, 3))
    calls = []

    def loss(w, x):
        calls.append(x.shape[0])
        return spmd.mean((x @ w) ** 2, "data")

    with spmd.Mesh(data=4, scheduler=scheduler):
        step = spmd.map(lambda w, x: accumulate(loss, 3)(w, x), in_specs=(P(), P("data")), out_specs=P())
        step = spmd.jit(step) if jit else step
        for w in (np.ones(3), np.arange(3.0)):
            expected = spmd.value_and_grad(lambda w: np.mean((x @ w) ** 2))(w)
            cases.assert_close(step(w, spmd.put(x, P("data"))), expected)
    parts = -(-samples // 4)
    assert len(calls) % (4 * parts) == 0
    assert sum(calls) == samples * len(calls) // (4 * parts)


def test_counts_are_summed_again_where_only_some_axes_split_the_mean():
    x = np.random.default_rng(3).standard_normal((7, 5, 2))

    def step(w, x):  # a mean over `data`, of each of the workers along `model` its own
        return accumulate(lambda w, x: spmd.mean((x @ w) ** 2, "data"), 2)(w, x)[1]

    with spmd.Mesh(data=2, model=2):
        found = spmd.map(step, in_specs=(P(), P("data", "model")), out_specs=P())(np.ones(2), x)

    def serial(w):
        return np.mean((x[:, :3] @ w) ** 2) + np.mean((x[:, 3:] @ w) ** 2)

    cases.assert_close(found, spmd.grad(serial)(np.ones(2)))


def test_with_shard_ten_steps_are_those_of_one_worker():
    plain, samples = optim.adamw(0.05), 11
    optimizer = optim.shard(optim.clipped(plain, 0.5), "data")

    def step(params, state, x, y):
        loss = accumulate(lambda p, x, y: cases.squares(p, x, y) / samples, 2, reduction="sum")
        value, grads = loss(spmd.pvary(params, "data"), x, y)
        return (spmd.psum(value, "data"), *optimizer.update(grads, state, params))

    losses = []
    with spmd.Mesh(data=3):
        params = spmd.put(cases.params_of(), P())
        state, specs = optimizer.init(params), optimizer.specs(params)
        step = spmd.map(step, in_specs=(P(), specs, P("data"), P("data")), out_specs=(P(), P(), specs))
        for _ in range(cases.STEPS):
            value, params, state = step(params, state, *cases.data_of())
            losses.append(float(value))
    cases.assert_close((losses, params, state), cases.serial(optim.clipped(plain, 0.5)))


def test_one_worker_and_more_that_is_returned():
    def loss(p, batch, scale, mask):
        assert mask is None
        return np.mean((p * batch["x"]) ** 2) * scale, len(batch["x"])

    (value, counts), grad = accumulate(loss, 4, has_aux=True)(np.asarray(2.0), {"x": np.arange(6.0)}, 3.0, None)
    assert counts == [2, 2, 1, 1]
    np.testing.assert_allclose((value, grad), (3 * 4 * 55 / 6, 3 * 2 * 2 * 55 / 6))
    (_, counts), _ = accumulate(loss, 9, has_aux=True)(np.asarray(2.0), {"x": np.arange(2.0)}, 3.0, None)
    assert counts == [1, 1]


def test_it_is_differentiated():
    """By the parameters, a second time, in a body."""
    x, y = cases.data_of()

    def norm(gradient):
        return sum(np.sum(g**2) for g in spmd.tree.leaves(gradient))

    expected = spmd.grad(lambda p: norm(spmd.grad(lambda q: cases.squares(q, x, y) / 11)(p)))(cases.params_of())

    def body(p, x, y):
        loss = accumulate(lambda q, x, y: spmd.psum(cases.squares(q, x, y), "data") / 11, 2, reduction="sum")
        return norm(loss(p, x, y)[1])

    with spmd.Mesh(data=2):
        second = spmd.map(body, in_specs=(P(), P("data"), P("data")), out_specs=P())
        cases.assert_close(spmd.grad(second)(cases.params_of(), x, y), expected, 1e-9)
