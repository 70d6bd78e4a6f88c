"""Optimisers around optimisers: clipping, groups, averages and mixed precision, alone and within `shard`."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import spmd
from spmd import P, optim
from spmd.errors import SpecError, StateError
from training import sharded_cases as cases

WRAPPED = {
    "clipped": optim.clipped(optim.adam(0.05), 0.3),
    "groups": optim.groups(
        {
            "first.*": optim.adam(0.02),
            "*.1": optim.frozen(),
            "[os]*": optim.clipped(optim.sgd(0.05, 0.9), 0.2),
            "*": optim.sgd(0.01),
        }
    ),
    "ema": optim.ema(optim.sgd(0.05), 0.9),
    "mixed": optim.mixed_precision(optim.clipped(optim.ema(optim.adamw(0.05), 0.5), 1.0), scale=None),
}


@pytest.mark.parametrize("axes", [{"data": 3}, {"data": 2, "model": 2}, {"data": 2, "replica": 2}], ids=str)
@pytest.mark.parametrize("name", WRAPPED)
def test_ten_steps_are_those_of_one_worker(name, axes, scheduler):
    optimizer = optim.shard(WRAPPED[name], cases.batch_axes(axes)[:1])
    found = cases.trained(optimizer, spmd.Mesh(**axes, scheduler=scheduler), jit=scheduler == "threads")
    cases.assert_close(found, cases.serial(WRAPPED[name]))


@pytest.mark.parametrize("name", WRAPPED)
def test_states_of_sharded_runs_load_into_any_run(name, tmp_path):
    optimizer = optim.shard(WRAPPED[name], "data")
    _, params, state = cases.trained(optimizer, spmd.Mesh(data=3), 3)
    spmd.save(tmp_path / "checkpoint", (params, state))
    with spmd.Mesh(model=2, data=2) as mesh:
        params = spmd.put(cases.params_of(), cases.param_specs(mesh.axes))
        params, state = spmd.load(tmp_path / "checkpoint", like=(params, optimizer.init(params)))
    losses, *rest = cases.trained(optimizer, mesh, 7, params, state)
    expected = cases.serial(WRAPPED[name])
    cases.assert_close((losses, *rest), (expected[0][3:], *expected[1:]))
    plain = spmd.load(tmp_path / "checkpoint", like=(cases.params_of(), WRAPPED[name].init(cases.params_of())))
    cases.assert_close(cases.serial(WRAPPED[name], 7, *plain), (expected[0][3:], *expected[1:]))


@pytest.mark.parametrize("name", WRAPPED)
def test_global_arrays_are_given_away_or_kept(name):
    x, y = cases.data_of()
    for donate in (False, True):
        with spmd.Mesh(data=3):
            params, optimizer = spmd.put(cases.params_of(), P()), optim.shard(WRAPPED[name], "data")
            state = optimizer.init(params)
            for _ in range(cases.STEPS):
                grads = spmd.grad(lambda p: cases.squares(p, x, y) / 11)(params)
                params, state = optimizer.update(grads, state, params, donate=donate)
        cases.assert_close((params, state), cases.serial(WRAPPED[name])[1:])


def test_clipping_needs_the_sum():
    optimizer = optim.clipped(optim.sgd(0.1), 1.0)

    def step(w, x):
        return optimizer.update({"w": x}, optimizer.init({"w": w}), {"w": w})[0]["w"]

    with spmd.Mesh(data=2), pytest.raises(StateError, match=r"argument grads\['w'\][^$]*summed over 'data'[^$]*shard"):
        spmd.map(step, in_specs=(P(), P("data")), out_specs=P())(np.ones(2), np.ones(4))


def test_groups_go_by_the_first_pattern_that_fits():
    optimizer = optim.groups({"a.0": optim.sgd(1.0), "a*": optim.sgd(2.0), "?": optim.frozen()})
    params = {"a": [np.zeros(1), np.zeros(1), None], "b": np.zeros(1)}
    new, state = optimizer.update(
        {"a": [np.ones(1), np.ones(1), None], "b": np.ones(1)}, optimizer.init(params), params
    )
    assert [x.tolist() for x in spmd.tree.leaves(new)] == [[-1.0], [-2.0], [0.0]]
    assert [int(each.steps) for each in state[:2]] == [1, 1]
    assert state[2] == ()
    with pytest.raises(SpecError, match=r"'weight', which fits none of 'a.0', 'a\*', '\?'"):
        optimizer.init({"weight": np.ones(1)})
    assert optimizer.specs(P("x"))[0] == optim.SGDState(P(), None)
    specs = optim.groups({"a": optim.adam(), "*": optim.frozen()}).specs({"a": P("x"), "b": P()}, {"a": 0.0, "b": 0.0})
    assert specs == (optim.AdamState(P(), {"a": P("x"), "b": None}, {"a": P("x"), "b": None}), ())


def test_patterns_that_look_like_names_of_states_are_saved(tmp_path):
    optimizer = optim.groups({"*.mean": optim.frozen(), "*": optim.adam(0.5)})
    params = {"norm": {"mean": np.ones(3), "scale": np.ones(3)}}
    state = optimizer.update(params, optimizer.init(params), params)[1]
    spmd.save(tmp_path / "checkpoint", state)
    cases.assert_close(spmd.load(tmp_path / "checkpoint", like=optimizer.init(params)), state)


@pytest.mark.parametrize("sharded", [False, True])
def test_frozen_parameters_are_not_given_away(sharded):
    """Those of mixed precision are their own masters; numbers lie in the state as they lie in the parameters."""
    optimizer = optim.mixed_precision(optim.groups({"frozen*": optim.frozen(), "*": optim.sgd(0.5)}), scale=1.0)
    optimizer = optim.shard(optimizer, "data") if sharded else optimizer
    with spmd.Mesh(data=2):
        params = spmd.put({"frozen": np.ones(3), "frozen number": np.ones(()), "w": np.ones(3)}, P())
        grads, state = spmd.tree.map(np.zeros_like, params), optimizer.init(params)
        for _ in range(3):
            before = params
            params, state = optimizer.update(grads, state, params, donate=True)
            with pytest.raises(spmd.errors.DonatedError):
                before["w"].numpy()
        for x in spmd.tree.leaves((params, state.masters)):
            np.testing.assert_array_equal(x.numpy(), np.ones(x.shape))


def test_a_frozen_group_outside_of_shard_sends_nothing():
    optimizer = optim.groups({"w": optim.shard(optim.sgd(0.5, 0.9), "data"), "*": optim.frozen()})
    params = {"w": np.ones(4), "v": np.ones(4)}

    def step(params, state, x):
        grads = spmd.grad(lambda p: np.sum((p["w"] + p["v"]) * x))(spmd.pvary(params, "data"))
        return optimizer.update(grads, state, params)

    with spmd.Mesh(data=2), spmd.ledger() as log:
        state, specs = optimizer.init(params), optimizer.specs(P(), params)
        params, _ = spmd.map(step, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))(
            params, state, np.ones((2, 4))
        )
    np.testing.assert_array_equal(params["w"].numpy(), np.zeros(4))
    np.testing.assert_array_equal(params["v"].numpy(), np.ones(4))
    assert log.messages == 2


# Mixed precision


def scaled_serial(steps, scale, growth, backoff, interval):
    """The scales after steps that are finite or not, by torch's rule."""
    scales, tracker = [], 0
    for finite in steps:
        tracker = tracker + 1 if finite else 0
        if not finite:
            scale *= backoff
        elif tracker == interval:
            scale, tracker = scale * growth, 0
        scales.append(scale)
    return scales


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_all_workers_skip_when_one_overflows(dtype, jit):
    """Only worker 2 overflows, in an entry of the gradient that only worker 0 gets a part of."""
    rule = {"growth": 4.0, "backoff": 0.25, "interval": 2}
    plain = optim.mixed_precision(optim.adam(0.1), scale=8.0, **rule)
    optimizer = optim.shard(plain, "data")
    finite = [True, True, False, True, True, True, False, False, True]
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((5, 2)).astype(dtype), "b": np.ones((), dtype)}
    x = rng.integers(-2, 3, (len(finite), 3, 5, 2)).astype(dtype)

    def step(params, state, x, overflow):
        def loss(p):
            return np.sum(p["w"] * x[0]) * state.scale.astype(dtype) + np.sum(p["b"] * overflow[0])

        return optimizer.update(spmd.grad(loss)(spmd.pvary(params, "data")), state, params)

    kept, scales, updates = [], [], []
    with spmd.Mesh(data=3):
        state, specs = optimizer.init(params), optimizer.specs(P(), params)
        step = spmd.map(step, in_specs=(P(), specs, P("data"), P("data")), out_specs=(P(), specs))
        step = spmd.jit(step) if jit else step
        for k, good in enumerate(finite):
            overflow = np.zeros(3, dtype)
            overflow[2] = 0 if good else np.inf
            params, state = step(params, state, x[k], overflow)
            kept.append(params["w"].numpy())
            scales.append(float(state.scale))
            updates.append(int(state.state.steps))
    assert scales == scaled_serial(finite, 8.0, **rule)
    assert updates == np.cumsum(finite).tolist()
    masters = rng_params = {"w": np.asarray(np.random.default_rng(0).standard_normal((5, 2)).astype(dtype), np.float32)}
    inner = optim.adam(0.1)
    inner_state = inner.init(masters)
    for k, good in enumerate(finite):
        if good:
            grads = {"w": x[k].astype(np.float32).sum(0)}
            masters, inner_state = inner.update(grads, inner_state, masters)
        np.testing.assert_array_equal(kept[k], masters["w"].astype(dtype))
    assert rng_params["w"].shape == (5, 2)


def test_masters_take_steps_that_parameters_are_too_short_for():
    optimizer, params = optim.mixed_precision(optim.sgd(1e-3), scale=None), np.ones(1, ml_dtypes.bfloat16)
    state = optimizer.init(params)
    for _ in range(10):
        params, state = optimizer.update(np.ones(1, ml_dtypes.bfloat16), state, params)
    np.testing.assert_allclose(state.masters, [0.99], rtol=1e-6)
    assert params.dtype == ml_dtypes.bfloat16
    assert abs(float(params[0]) - 0.99) < 4e-3
    assert float(state.scale) == 1


def test_a_scale_does_not_grow_to_infinity():
    optimizer = optim.mixed_precision(optim.sgd(0.1), scale=3e38, interval=1)
    state = optimizer.init(np.ones(1, np.float32))
    with np.errstate(over="ignore"):
        _, state = optimizer.update(np.zeros(1, np.float32), state, np.ones(1, np.float32))
    assert np.float32(state.scale) == np.float32(3e38)


# Schedules


def test_schedules_are_those_of_torch():
    torch = pytest.importorskip("torch")
    schedulers = torch.optim.lr_scheduler
    for ours, theirs in (
        (optim.step_decay(0.3, 4, 0.5), lambda o: schedulers.StepLR(o, 4, 0.5)),
        (optim.one_cycle(0.3, 20), lambda o: schedulers.OneCycleLR(o, 0.3, total_steps=20)),
        (
            optim.one_cycle(0.3, 15, 0.4, 10.0, 100.0),
            lambda o: schedulers.OneCycleLR(
                o, 0.3, total_steps=15, pct_start=0.4, div_factor=10.0, final_div_factor=100.0
            ),
        ),
        (optim.cosine(0.3, 9, 0.1), lambda o: schedulers.CosineAnnealingLR(o, 9, 0.1)),
        (optim.linear(0.3, 9, 0.03), lambda o: schedulers.LinearLR(o, 1.0, 0.1, 9)),
        (optim.constant(0.3, 4), lambda o: schedulers.LinearLR(o, 0.2, 1.0, 4)),
    ):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
        scheduler = theirs(optimizer)
        for t in range(10):
            assert ours(t) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), t
            optimizer.step()
            scheduler.step()


def test_schedules_begin_and_end():
    rate = optim.one_cycle(1.0, 10, rise=0.0)
    assert rate(0) > rate(1) > rate(9)
    assert optim.one_cycle(1.0, 10)(99) == pytest.approx(1 / 25 / 1e4)
    assert [optim.step_decay(1.0, 2, 0.5, warmup=1)(t) for t in range(4)] == [0.5, 1.0, 1.0, 0.5]
    for bad in (lambda: optim.one_cycle(1.0, 1), lambda: optim.step_decay(1.0, 0), lambda: optim.constant(-1.0)):
        with pytest.raises(ValueError, match="needed: a number, at least"):
            bad()
