"""`functions.experts` and its losses, against all experts on all tokens on one worker."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import PROGRAMS, each_mpi, launch

import spmd
from functions.expert_cases import Case, applied, check_arrays, close, random_case
from spmd import P, functions
from spmd.autodiff import tree
from spmd.errors import JitError
from spmd.functions.expert_routes import best_experts

SCHEDULERS = st.sampled_from(["lockstep", "threads"])


def check(seed: int, scheduler: str, stacked: bool) -> None:
    case = random_case(seed)
    check_arrays(case, spmd.Mesh(**case.axes, transport="local", scheduler=scheduler), stacked)


@given(st.integers(0, 10**6), SCHEDULERS, st.booleans())
@settings(max_examples=60)
def test_they_are_the_dense_computation(seed, scheduler, stacked):
    check(seed, scheduler, stacked)


@pytest.mark.full
@given(st.integers(0, 10**6), SCHEDULERS, st.booleans())
@settings(max_examples=1000)
def test_they_are_the_dense_computation_in_many_cases(seed, scheduler, stacked):
    check(seed, scheduler, stacked)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_functions_alone_are_differentiated_where_some_workers_have_none(scheduler, n):
    """Neither tokens nor scores are; experts lie on the first two workers."""
    rng = np.random.default_rng(n)
    x, gate = rng.normal(size=(11, 3)), rng.normal(size=(11, 2))
    w, mesh = rng.normal(size=(2, 3, 3)), spmd.Mesh(e=n, transport="local", scheduler=scheduler)

    def loss(w, x, gate, own, names):
        fns = [lambda rows, w=w[i]: np.tanh(rows @ w) for i in own]
        return np.sum(functions.experts(x, gate, fns, names) ** 2)

    def body(x, gate):
        k = spmd.worker_index("e")
        own = spmd.varying(w[k : k + 1] if k < 2 else w[:0], "e")
        return spmd.grad(loss)(own, x, gate, range(len(own)), "e")

    found = spmd.map(body, in_specs=P("e"), out_specs=P("e"), mesh=mesh)(x, gate)
    close(found.numpy(), spmd.grad(loss)(w, x, gate, range(2), None))


def test_ties_and_scores_that_are_no_numbers():
    """Of equal scores the lowest index, NaN last; by sorting each row."""
    rng = np.random.default_rng(0)
    for k in (1, 2, 4):
        scores = rng.choice([-np.inf, -1.0, 0.0, np.inf, np.nan], (200, 4))
        key = lambda row: lambda e: (-np.inf if np.isnan(row[e]) else row[e], -e)
        wanted = [sorted(range(4), key=key(row), reverse=True)[:k] for row in scores]
        np.testing.assert_array_equal(best_experts(scores, k), wanted)


@pytest.mark.parametrize("axes", [{"e": 4}, {"data": 2, "e": 2}], ids=str)
def test_two_exchanges_there_and_back(axes):
    """And an all-gather of the numbers of rows: 2 + experts, for each worker."""
    case = random_case(0)
    names, experts, rows = tuple(axes), 4, 5
    rng = np.random.default_rng(0)
    x, gate = rng.normal(size=(4 * rows, 3)), rng.normal(size=(4 * rows, experts))
    w = [np.stack([case.weights[0][i]] * experts) for i in (0, 1)]

    def body(x, gate, w):
        return functions.experts(x, gate, applied, "e", params=w)

    mapped = spmd.map(body, in_specs=(P(names), P(names), P("e")), out_specs=P(names), mesh=spmd.Mesh(**axes))
    with spmd.ledger() as there:
        _, pullback = spmd.vjp(mapped, x, gate, w)
    with spmd.ledger() as back:
        pullback(rng.normal(size=(4 * rows, w[1].shape[2])))
    assert there.operators == {"RaggedAllToAll": 2} | ({"Vary": 2} if len(axes) > 1 else {})
    assert there.verbs == {"all_gather": 1, "exchange": 2}
    assert back.operators == {"RaggedAllToAll": 2} | ({"Sum": 2} if len(axes) > 1 else {})
    assert back.verbs["exchange"] == 2
    assert back.verbs["all_gather"] == 0


def test_all_experts_on_one_worker_need_no_mesh():
    case = Case(**{**vars(random_case(3, [{"e": 1}])), "token_axes": None})
    run = lambda x, gate, w: functions.experts(x, gate, applied, params=w, **case.options)
    args = case.xs[0], case.gates[0], case.stacked(0)
    (y,), (dx, dgate, dw) = case.expected()
    close(run(*args), y)
    grads = spmd.grad(lambda *args: np.sum(run(*args) * case.gs[0]), (0, 1, 2))(*args)
    close(grads[0], dx[0])
    close(grads[1], dgate[0])
    for i in (0, 1):
        close(grads[2][i], np.stack([w[i] for w in dw]))


def test_gradients_of_gradients(scheduler):
    """A Hessian times a vector is that of the dense computation."""
    rng = np.random.default_rng(1)
    x, gate = rng.normal(size=(5, 3)), rng.normal(size=(5, 3))
    w = [rng.normal(size=(3, 3, 2)), rng.normal(size=(3, 2, 3))]
    run = lambda name: lambda x, gate, w: functions.experts(x, gate, applied, name, params=w)

    def product(f):
        loss = lambda *args: np.sum(f(*args) ** 2)
        inner = lambda gs, args: np.sum(gs[0] * args[0]) + np.sum(gs[1] * args[1]) + np.sum(gs[2][0] * args[2][0])
        return spmd.grad(lambda *args: inner(spmd.grad(loss, (0, 1, 2))(*args), args), (0, 1, 2))(x, gate, w)

    mesh = spmd.Mesh(e=2, transport="local", scheduler=scheduler)
    got = product(mesh.map(run("e"), in_specs=P("e"), out_specs=P("e")))
    for a, b in zip(tree.leaves(got), tree.leaves(product(run(None))), strict=True):
        close(a, b)


def test_short_numbers_keep_the_dtype_of_tokens():
    x, gate = np.ones((4, 2), np.float32), np.zeros((4, 2))
    body = lambda x, gate: functions.experts(x, gate, [lambda rows: rows * np.float64(2)], "e")
    y = spmd.map(body, in_specs=P("e"), out_specs=P("e"), mesh=spmd.Mesh(e=2))(x, gate)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y.numpy(), 2 * x)


# The losses


def balance(gate: np.ndarray, k: int) -> float:
    p = np.exp(gate) / np.exp(gate).sum(1, keepdims=True)
    chosen = np.zeros_like(gate)
    for row, mark in zip(gate, chosen, strict=True):
        mark[sorted(range(len(row)), key=lambda e: (-row[e], e))[:k]] = 1 / k
    return gate.shape[1] * float(chosen.mean(0) @ p.mean(0))


@pytest.mark.parametrize("axes", [{"e": 1}, {"e": 3}, {"e": 8}, {"data": 2, "e": 2}], ids=str)
def test_losses_are_of_all_tokens_of_all_workers(axes, scheduler):
    rng, names = np.random.default_rng(0), tuple(axes)
    gate = rng.normal(size=(7, 4)).round(1)
    mesh = spmd.Mesh(**axes, transport="local", scheduler=scheduler)
    for k in (1, 2, 4):
        loss = mesh.map(lambda g, k=k: functions.load_balance_loss(g, names, k), in_specs=P(names), out_specs=P())
        close(loss(gate).item(), balance(gate, k))
        alone = lambda g, k=k: functions.load_balance_loss(g, k=k)
        close(spmd.grad(loss)(gate), spmd.grad(alone)(gate))
    loss = mesh.map(lambda g: functions.router_z_loss(g, names), in_specs=P(names), out_specs=P())
    close(loss(gate).item(), np.mean(np.log(np.exp(gate).sum(1)) ** 2))
    close(spmd.grad(loss)(gate), spmd.grad(functions.router_z_loss)(gate))


def test_a_gradient_descends_to_balance():
    """From scores that send all tokens to one expert."""
    rng = np.random.default_rng(0)
    gate = 0.1 * rng.normal(size=(64, 4)) + [1.0, 0.0, 0.0, 0.0]
    for _ in range(50):
        gate = gate - 20 * spmd.grad(lambda g: functions.load_balance_loss(g, k=1))(gate)
    assert np.bincount(gate.argmax(1), minlength=4).max() < 40


def test_recording_is_refused():
    """Where tokens go differs from call to call."""
    for body in (
        lambda g: functions.experts(g, g, [lambda h: h], "e", k=1),
        lambda g: functions.experts(g, g, [lambda h: h] * 2),
        lambda g: functions.load_balance_loss(g, "e"),
    ):
        mapped = spmd.jit(spmd.map(body, in_specs=P("e"), out_specs=P("e"), mesh=spmd.Mesh(e=2)))
        with pytest.raises(JitError, match="depends on their values"):
            mapped(np.ones((2, 2)))


@each_mpi
def test_processes(python):
    ended = launch(PROGRAMS / "experts.py", "8", "4", python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("are the dense computation") == 4, str(ended)
