"""Optimisers whose states lie split take the steps of one worker, and a worker holds its share of the states."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from launch import PROGRAMS, each_mpi, launch

import spmd
from spmd import P, optim
from training import sharded_cases as cases

OPTIMIZERS = {
    "sgd": optim.sgd(0.05),
    "momentum": optim.sgd(0.02, 0.9, nesterov=True),
    "adamw": optim.adamw(lambda t: 0.05 / (1 + t)),
}


@cache
def serial(name):
    return cases.serial(OPTIMIZERS[name])


def sharded(name, axes):
    return optim.shard(OPTIMIZERS[name], cases.batch_axes(axes)[:1] if "replica" in axes else cases.batch_axes(axes))


@pytest.mark.parametrize("axes", cases.MESHES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_are_those_of_one_worker(name, axes, scheduler):
    mesh = spmd.Mesh(**axes, scheduler=scheduler)
    cases.assert_close(cases.trained(sharded(name, axes), mesh), serial(name))


@pytest.mark.parametrize("axes", [{"data": 3}, {"data": 2, "model": 2}], ids=str)
def test_gradients_that_are_summed_and_recorded_steps_give_the_same(axes, scheduler):
    mesh = spmd.Mesh(**axes, scheduler=scheduler)
    for options in ({"summed": True}, {"jit": True}):
        cases.assert_close(cases.trained(sharded("adamw", axes), mesh, **options), serial("adamw"))


@pytest.mark.parametrize("axes", [{"data": 3}, {"data": 2, "model": 2}, {"model": 2, "data": 2}], ids=str)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("jit", [False, True])
def test_global_arrays_are_stepped_outside_of_bodies(axes, donate, jit):
    """Of gradients in their parts, as copies and as sums that are owed."""
    x, y = cases.data_of()
    optimizer, specs = sharded("adamw", axes), cases.param_specs(axes)

    def step(params, state, x, y):
        loss, grads = spmd.value_and_grad(lambda p: cases.squares(p, x, y) / len(x))(params)
        return loss, *optimizer.update(grads, state, params, donate=donate)

    step = spmd.jit(step) if jit else step
    losses = []
    with spmd.Mesh(**axes):
        params = spmd.put(cases.params_of(), specs)
        state, batch = optimizer.init(params), spmd.put((x, y), P("data"))
        for _ in range(cases.STEPS):
            loss, params, state = step(params, state, *batch)
            losses.append(float(loss))
        assert state.mean["first"]["w"].spec == optimizer.specs(params).mean["first"]["w"]
        assert spmd.tree.map(lambda p: p.spec, params) == specs
    cases.assert_close((losses, params, state), serial("adamw"))


def test_what_is_given_away_is_gone_and_nothing_else():
    optimizer = optim.shard(optim.adam(), "data")
    with spmd.Mesh(data=2):
        params = spmd.put({"w": np.ones((4, 3))}, P())
        state = optimizer.init(params)
        grads = spmd.put({"w": np.ones((4, 3))}, P())
        new, _ = optimizer.update(grads, state, params, donate=True)
        for gone in (params["w"], state.mean["w"]):
            with pytest.raises(spmd.errors.DonatedError):
                gone.numpy()
        assert grads["w"].numpy().sum() == 12
        assert new["w"].numpy().shape == (4, 3)


def test_messages_are_one_of_each_kind_for_each_dtype():
    optimizer = optim.shard(optim.adam(), "data")
    params = {
        "w": [np.ones((5, 3)), np.ones(7), np.ones((2, 2))],
        "short": [np.ones(3, np.float32), np.ones((3, 3), np.float32)],
        "scale": [np.ones(()), np.ones(())],
        "large": np.ones((1 << 15, 3)),
    }

    def step(params, state):
        grads = spmd.tree.map(lambda p: p * (1 + spmd.axis_index("data").astype(p.dtype)), params)
        return optimizer.update(grads, state, params)

    with spmd.Mesh(data=3), spmd.ledger() as log:
        state, specs = optimizer.init(params), optimizer.specs(P(), params)
        log_before = log.messages
        spmd.map(step, in_specs=(P(), specs), out_specs=(P(), specs))(params, state)
    assert log_before == 0
    counted = {}
    for row in log.rows():
        counted[row.operator] = counted.get(row.operator, 0) + row.times
    assert {k: counted[k] for k in ("ReduceScatter", "Collect", "Sum")} == {"ReduceScatter": 3, "Collect": 3, "Sum": 1}


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "model": 2}], ids=str)
def test_a_worker_holds_its_share_of_the_states(axes):
    """K numbers of state a parameter, over the workers that share it: Rajbhandari et al. (2020), section 5.1."""
    shapes = {"w": (384, 130), "b": (130,), "u": (130, 37)}
    specs = {"w": P(None, "model"), "b": P("model"), "u": P("model")} if "model" in axes else P()
    count = sum(map(math.prod, shapes.values()))
    with spmd.Mesh(**axes) as mesh:
        params = spmd.put({k: np.ones(s) for k, s in shapes.items()}, specs)
        state = optim.shard(optim.adam(), "data").init(params)
        held = [sum(x.blocks[w].nbytes for x in spmd.tree.leaves(state[1:])) for w in range(mesh.size)]
        whole = sum(x.blocks[0].nbytes for x in spmd.tree.leaves(optim.adam().init(params)[1:]))
    expected = 2 * 8 * count / mesh.size
    assert max(held) <= 1.02 * expected
    assert sum(held) == 2 * 8 * count
    assert whole >= 0.98 * axes["data"] * expected


@pytest.mark.parametrize("before", [None, {"data": 2}, {"data": 2, "model": 2}], ids=str)
def test_a_run_goes_on_on_another_mesh(before, tmp_path):
    """From a run of one worker without shard too; and its checkpoint goes on there."""
    if before is None:
        _, params, state = cases.serial(OPTIMIZERS["adamw"], 4)
    else:
        _, params, state = cases.trained(sharded("adamw", before), spmd.Mesh(**before), 4)
    with spmd.Mesh(data=1):
        spmd.save(tmp_path / "checkpoint", (params, state))
    loaded = spmd.load(tmp_path / "checkpoint")
    for axes in ({"data": 3}, {"model": 2, "data": 2}):
        mesh = spmd.Mesh(**axes)
        optimizer = sharded("adamw", axes)
        with mesh:
            params = spmd.put(cases.params_of(), cases.param_specs(axes))
            like = params, optimizer.init(params)
            params, state = spmd.load(tmp_path / "checkpoint", like=like)
        losses, *rest = cases.trained(optimizer, mesh, 6, params, state)
        cases.assert_close((losses, *rest), (serial("adamw")[0][4:], *serial("adamw")[1:]))
    host = spmd.tree.map(lambda x: x.numpy() if isinstance(x, spmd.PartitionedArray) else x, loaded)
    cases.assert_close(cases.serial(OPTIMIZERS["adamw"], 6, *host)[1:], serial("adamw")[1:])


def test_training_is_differentiated():
    """The loss after two steps by the first parameters, and by the learning rate, as of one worker."""
    x, y = cases.data_of()

    def last_loss(optimizer, step, params, state):
        for _ in range(2):
            params, state = step(params, state, x, y)[1:]
        return sum(np.sum(p**2) for p in spmd.tree.leaves(params))

    def after(rate, params):
        optimizer = optim.sgd(rate, 0.9)
        _, params, _ = cases.serial(optimizer, 2, params)
        return sum(np.sum(p**2) for p in spmd.tree.leaves(params))

    expected = spmd.grad(after, 1)(0.05, cases.params_of())
    optimizer, axes = optim.shard(optim.sgd(0.05, 0.9), "data"), {"data": 3}
    with spmd.Mesh(**axes):
        params = cases.params_of()
        state = optimizer.init(params)
        step = cases.step_of(optimizer, axes, optimizer.specs(P(), params))
        found = spmd.grad(lambda p: last_loss(optimizer, step, p, state))(params)
    cases.assert_close(found, expected, 1e-9)


@each_mpi
def test_processes_take_the_steps_of_one_worker(python, tmp_path):
    ended = launch(PROGRAMS / "sharded_states.py", str(tmp_path / "checkpoint"), n=4, python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.split() == ["alike"]


def test_gradients_of_other_shapes_are_refused():
    optimizer = optim.shard(optim.sgd(0.1), "data")
    with spmd.Mesh(data=2):
        for update in (optimizer.update, spmd.map(optimizer.update, in_specs=P(), out_specs=P())):
            with pytest.raises(ValueError, match="argument grads"):
                update(np.ones(3), optim.SGDState(np.asarray(0), None), np.ones((3, 2)))
