"""Optimisers follow their formulas, entry by entry, on every kind of array, and keep dtype and layout."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle

import numpy as np
import optree
import pytest
from launch import PROGRAMS, each_mpi, launch

import spmd
from spmd import P
from spmd.errors import DonatedError
from spmd.kernels import jit
from spmd.optim import AdamState, SGDState, adam, adamw, sgd

OPTIMIZERS = {
    "sgd": sgd(0.1),
    "momentum": sgd(0.1, momentum=0.9),
    "nesterov": sgd(0.1, momentum=0.9, nesterov=True),
    "schedule": sgd(lambda t: 0.1 / (1 + t), momentum=0.5),
    "adam": adam(0.02, b1=0.8, b2=0.95, eps=1e-7),
    "adamw": adamw(0.02, weight_decay=0.1),
}


def sgd_serial(p, gs, rate, momentum=0.0, nesterov=False):
    """One number after the steps along gs, in plain Python."""
    v = 0.0
    for t, g in enumerate(gs):
        v = momentum * v + g
        p -= rate(t) * (momentum * v + g if nesterov else v)
    return p


def adam_serial(p, gs, rate, b1=0.9, b2=0.999, eps=1e-8, decay=0.0):
    m = s = 0.0
    for t, g in enumerate(gs, 1):
        m = b1 * m + (1 - b1) * g
        s = b2 * s + (1 - b2) * g**2
        p -= rate * (m / (1 - b1**t) / (math.sqrt(s / (1 - b2**t)) + eps) + decay * p)
    return p


SERIAL = {
    "sgd": lambda p, gs: sgd_serial(p, gs, lambda t: 0.1),
    "momentum": lambda p, gs: sgd_serial(p, gs, lambda t: 0.1, 0.9),
    "nesterov": lambda p, gs: sgd_serial(p, gs, lambda t: 0.1, 0.9, True),
    "schedule": lambda p, gs: sgd_serial(p, gs, lambda t: 0.1 / (1 + t), 0.5),
    "adam": lambda p, gs: adam_serial(p, gs, 0.02, 0.8, 0.95, 1e-7),
    "adamw": lambda p, gs: adam_serial(p, gs, 0.02, decay=0.1),
}


def tree(rng, dtype=np.float64):
    """Parameters of several ranks, in nested containers."""
    return {"w": rng.normal(size=(5, 3)).astype(dtype), "rest": [rng.normal(size=4).astype(dtype), (dtype(0.5),)]}


def trained(optimizer, params, grads):
    state = optimizer.init(params)
    for g in grads:
        params, state = optimizer.update(g, state, params)
    return params, state


def assert_same(left, right):
    """Two trees of arrays are equal to the last bit."""
    assert optree.tree_structure(left) == optree.tree_structure(right)
    for a, b in zip(optree.tree_leaves(left), optree.tree_leaves(right), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_formula(name):
    rng = np.random.default_rng(0)
    params, grads = tree(rng), [tree(rng) for _ in range(5)]
    after, state = trained(OPTIMIZERS[name], params, grads)
    assert state.steps == 5
    columns = [optree.tree_leaves(t) for t in (params, after, *grads)]
    for p, q, *gs in zip(*columns, strict=True):
        wanted = [SERIAL[name](*entry) for entry in zip(np.ravel(p), zip(*map(np.ravel, gs), strict=True), strict=True)]
        np.testing.assert_allclose(np.ravel(q), wanted, rtol=1e-14)


def test_adam_goes_by_its_rate_along_a_constant_gradient():
    g = np.array([3.0, -0.01, 1e3])
    after, _ = trained(adam(0.1, eps=0.0), np.zeros(3), [g] * 7)
    np.testing.assert_allclose(after, -0.7 * np.sign(g), rtol=1e-13)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtypes_are_kept(name, dtype):
    rng = np.random.default_rng(1)
    params = tree(rng, dtype)
    # Gradients and options of more precision do not widen the parameters, or the state.
    after, state = trained(OPTIMIZERS[name], params, [tree(rng) for _ in range(2)])
    assert {x.dtype for x in optree.tree_leaves(after)} == {np.dtype(dtype)}
    assert {x.dtype for x in optree.tree_leaves(tuple(state)[1:])} <= {np.dtype(dtype)}


def test_options_of_more_precision_do_not_widen(monkeypatch):
    g = np.random.default_rng(0).normal(size=9).astype(np.float32)
    for make in (lambda n: sgd(n(0.1), momentum=n(0.9))), (lambda n: adam(n(0.1), b1=n(0.9))), (lambda n: sgd(n(0.1))):
        run = lambda n, make=make: trained(make(n), np.ones(9, np.float32), [g] * 2)
        after, _ = run(np.float64)
        assert after.dtype == np.float32
        assert_same(run(np.float64), run(float))
        assert_same(run(np.float64), formulas(monkeypatch, lambda run=run: run(np.float64)))


def test_nothing_is_overwritten():
    params = np.ones(3)
    optimizer = sgd(0.1, momentum=0.9)
    state = optimizer.init(params)
    optimizer.update(np.ones(3), state, params)
    np.testing.assert_array_equal(params, np.ones(3))
    np.testing.assert_array_equal(state.velocity, np.zeros(3))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_partitioned_arrays_stay_as_they_lie(name):
    rng = np.random.default_rng(2)
    params, grads = {"w": rng.normal(size=(5, 3)), "b": rng.normal(size=3)}, []
    specs = {"w": P("x", "y"), "b": P("y")}
    grads = [{k: rng.normal(size=v.shape) for k, v in params.items()} for _ in range(3)]
    with spmd.Mesh(x=2, y=2, transport="local"):
        laid = [{k: spmd.put(v, specs[k]) for k, v in t.items()} for t in (params, *grads)]
        with spmd.ledger() as log:
            after, state = trained(OPTIMIZERS[name], laid[0], laid[1:])
        assert not log.verbs
    for k, w in after.items():
        assert w.layout == laid[0][k].layout
    wanted, serial_state = trained(OPTIMIZERS[name], params, grads)
    assert_same(after, wanted)
    assert_same(state, serial_state)


def test_update_in_a_body():
    rng = np.random.default_rng(3)
    p, g = rng.normal(size=7), rng.normal(size=7)
    for optimizer, spec in (sgd(0.1, 0.9), SGDState(None, P("x"))), (adam(), AdamState(None, P("x"), P("x"))):
        update = spmd.map(optimizer.update, in_specs=(P("x"), spec, P("x")), out_specs=(P("x"), spec))
        state = optimizer.init(p)
        with spmd.Mesh(x=3, transport="local"):
            once = update(g, state, p)
            twice = update(g, once[1], once[0])
        assert_same(twice, trained(optimizer, p, [g, g]))


def test_training_is_differentiable():
    # Steps along the gradient of x^2/2 multiply x by 1 - rate: a closed form to differentiate.
    def after(rate, x):
        optimizer = sgd(rate)
        state = optimizer.init(x)
        for _ in range(4):
            x, state = optimizer.update(spmd.grad(lambda x: (x * x).sum() / 2)(x), state, x)
        return x.sum()

    x = np.array([1.0, -3.0, 5.0])
    by_rate, by_x = spmd.grad(after, argnums=(0, 1))(np.float64(0.1), x)
    np.testing.assert_allclose(by_rate, -4 * 0.9**3 * x.sum(), rtol=1e-13)
    np.testing.assert_allclose(by_x, np.full(3, 0.9**4), rtol=1e-13)


def test_trees_must_agree():
    for optimizer in sgd(0.1), sgd(0.1, 0.9), adam():
        params = {"w": np.ones(2)}
        with pytest.raises(ValueError, match="w"):
            optimizer.update({"v": np.ones(2)}, optimizer.init(params), params)


@pytest.mark.parametrize(
    ("p", "g", "words"),
    [
        (np.ones(2), np.ones((3, 2)), "argument grads"),
        (np.ones((3, 2)), np.ones(2), "the parameter's shape"),
        (np.ones(2, int), np.ones(2), "argument params"),
        (np.ones(2, complex), np.ones(2, complex), "argument params"),
        (np.ones(2), np.ones(2, complex), "argument grads"),
        (1.0, 1.0, r"np.asarray\(x, float\)"),
    ],
)
def test_arrays_must_fit(p, g, words):
    for optimizer in sgd(0.1), adam(0.1):
        with pytest.raises(ValueError, match=words):
            optimizer.update(g, optimizer.init(p), p)


def formulas(monkeypatch, f):
    """What f gives where no step is fused."""
    with monkeypatch.context() as patch:
        patch.setattr(spmd.optim.optimizers._Step, "_kernel_applies", lambda *args: False)
        return f()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_one_pass_has_the_bits_of_the_formulas(monkeypatch, name, dtype):
    rng = np.random.default_rng(4)
    params, grads = tree(rng, dtype), [tree(rng, dtype) for _ in range(3)]
    run = lambda: trained(OPTIMIZERS[name], params, grads)
    assert_same(run(), formulas(monkeypatch, run))
    seen = []
    fits = spmd.optim.optimizers._Step._kernel_applies
    monkeypatch.setattr(
        spmd.optim.optimizers._Step, "_kernel_applies", lambda *args: seen.append(fits(*args)) or seen[-1]
    )
    run()
    assert sum(seen) == 6  # the number without dimensions is for the formulas


def test_one_pass_in_bodies_keeps_the_states(monkeypatch):
    optimizer = adamw(0.02)

    def body(p, g, w):
        state = optimizer.init((p, w))
        (p, w), state = optimizer.update((g, np.ones_like(w)), state, (p, w))
        assert p.state.varying == state.mean[0].state.varying == {"x"}
        assert w.state.varying == state.square[1].state.varying == set()
        q, _ = optimizer.update(g, optimizer.init(w), w)  # of an Invariant parameter and a Varying gradient
        assert q.state.varying == {"x"}
        return p, w, q

    rng = np.random.default_rng(5)
    p, g = rng.normal(size=(2, 9))
    with spmd.Mesh(x=3, transport="local"):
        run = lambda: spmd.map(body, (P("x"), P("x"), P()), (P("x"), P(), P("x")))(p, g, np.ones(3))
        assert_same(run(), formulas(monkeypatch, run))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_short_parameters_have_state_in_float32(name):
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else np.float16
    p, g = np.ones(50, dtype), np.full(50, 1e-4, dtype)
    for optimizer in adam(0.1), sgd(0.5, momentum=0.9):
        after, state = trained(optimizer, p, [g] * 3)
        assert after.dtype == dtype
        assert state[1].dtype == np.float32
        assert not np.isnan(after.astype(float)).any()
    after, state = trained(adam(0.1), p, [g] * 3)
    np.testing.assert_allclose(after.astype(float), 0.7, rtol=0.02)  # the squares, 1e-8, are kept
    with spmd.Mesh(x=2, transport="local"):
        laid, _ = trained(adam(0.1), spmd.put(p, P("x")), [spmd.put(g, P("x"))] * 3)
        np.testing.assert_array_equal(laid.numpy(), after)


def test_short_gradients_of_other_parameters_are_widened_first():
    g = np.array([300.0, 1e-4], np.float16)  # whose squares float16 does not hold
    for optimizer in adam(0.1), sgd(0.5, momentum=0.9), sgd(0.5):
        for p in np.ones(2, np.float32), np.ones((), np.float16):
            there = g if p.shape else g[:1].reshape(())
            after, _ = trained(optimizer, p, [there] * 2)
            wanted, _ = trained(optimizer, p.astype(float), [there.astype(float)] * 2)
            np.testing.assert_allclose(after, wanted, rtol=1e-3 if p.dtype == np.float16 else 1e-5)


def test_second_order_through_fused_and_unfused_steps():
    def after(p, g):
        optimizer = adamw(0.1)
        state = optimizer.init(p)
        for _ in range(2):
            p, state = optimizer.update(g, state, p)
        return p

    rng = np.random.default_rng(6)
    p, g = rng.normal(size=4), rng.normal(size=4)
    spmd.check_grads(after, (p, g), order=2)
    np.testing.assert_array_equal(spmd.vjp(after, p, g)[0], after(p, g))


# Parameters and state that are given away


def where(x):
    """Where the memory of an array or of its blocks begins."""
    blocks = x.blocks.values() if isinstance(x, spmd.PartitionedArray) else [x]
    return [b.ctypes.data for b in blocks]


def steps(optimizer, params, grads, **options):
    state = optimizer.init(params)
    for g in grads:
        params, state = optimizer.update(g, state, params, **options)
    return params, state


LAYOUTS = {
    "copies": ((2, 2), (P(), P(), P())),
    "split": ((3, 1), (P("x"), P(None, "x"), P("x"))),  # uneven blocks, and empty ones
    "both": ((2, 2), (P("x"), P("y"), P(("x", "y")))),
}


@pytest.mark.parametrize(("layout", "compiled"), [("copies", True), ("split", True), ("both", True), ("split", False)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_given_away_takes_the_results(name, dtype, layout, compiled):
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    (x, y), specs = LAYOUTS[layout]
    rng, shapes = np.random.default_rng(6), ((2, 3), (5, 7), (150_000,))
    draw = lambda: [rng.normal(size=s).astype(dtype) for s in shapes]
    params, grads = draw(), [draw() for _ in range(3)]
    with spmd.Mesh(x=x, y=y, transport="local"), contextlib.nullcontext() if compiled else jit.off():
        laid = lambda arrays: [spmd.put(a, s) for a, s in zip(arrays, specs, strict=True)]
        kept = laid(params)
        wanted = steps(OPTIMIZERS[name], kept, [laid(g) for g in grads])
        given = laid(params)
        state = OPTIMIZERS[name].init(given)
        arrays = [*given, *(a for part in state[1:] for a in part or ())]
        places = [where(a) for a in arrays]
        after = given
        for g in grads:
            after, state = OPTIMIZERS[name].update(laid(g), state, after, donate=True)
        assert [where(a) for a in (*after, *(a for part in state[1:] for a in part or ()))] == places
        assert_same((after, state), wanted)
        assert all(not b.flags.writeable for a in after for b in a.blocks.values())
        assert_same(kept, params)
        for a in arrays:
            assert "given away" in repr(a)
            assert "given away" in str(a)
            for use in (a.numpy, lambda a=a: a + 1, lambda a=a: spmd.map(np.sin, specs[0], specs[0])(a)):
                with pytest.raises(DonatedError, match="given away"):
                    use()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bare_arrays_stay_as_they_are(name):
    rng = np.random.default_rng(7)
    params, grads = tree(rng), [tree(rng) for _ in range(3)]
    before = optree.tree_map(np.array, params)
    wanted = steps(OPTIMIZERS[name], params, grads)
    assert_same(steps(OPTIMIZERS[name], params, grads, donate=True), wanted)
    assert_same(params, before)


@pytest.mark.parametrize("optimizer", [sgd(0.1), adam(0.1)])
def test_what_somebody_else_has_is_not_written_over(optimizer):
    rng, n = np.random.default_rng(8), 40_000
    p, g = rng.normal(size=(2, n))
    wanted, _ = steps(optimizer, p, [g])
    with spmd.Mesh(x=2, transport="local"):
        for spec in P(), P("x"):
            gradient = spmd.put(g, spec)
            take = {
                "an array of the same blocks": lambda x: np.reshape(x, (n, 1)),
                "the whole": lambda x: x.numpy(),
                "a block": lambda x: x.blocks[1],
                "a view of a block": lambda x: x.blocks[1][3:],
                "a buffer": lambda x: np.frombuffer(memoryview(x.blocks[1])),
                "a pullback": lambda x, spec=spec: spmd.vjp(spmd.map(lambda x: x * x, spec, spec), x)[1],
            }
            for name, of in take.items():
                x = spmd.put(p, spec)
                other = of(x)
                seen = None if callable(other) else np.array(other)
                after, _ = optimizer.update(gradient, optimizer.init(x), x, donate=True)
                np.testing.assert_array_equal(after, wanted)
                if seen is not None:
                    np.testing.assert_array_equal(other, seen, err_msg=name)
                else:
                    (back,) = other(spmd.put(np.ones(n), spec))
                    np.testing.assert_array_equal(back, 2 * p)


@pytest.mark.parametrize("optimizer", [sgd(0.1), sgd(0.1, 0.9), adam(0.1)])
def test_arrays_that_share_their_memory_step_each_by_itself(optimizer):
    rng = np.random.default_rng(9)
    a, g, h = rng.normal(size=(3, 6, 6))
    wanted, _ = steps(optimizer, [a, a], [[g, h]])
    own, _ = steps(optimizer, [a], [[a]])
    for lay in (np.array, lambda x: spmd.put(x, P("x"), spmd.Mesh(x=2, transport="local"))):
        same, g1, h1 = lay(a), lay(g), lay(h)
        assert_same(steps(optimizer, [same, same], [[g1, h1]], donate=True)[0], wanted)
        p = lay(a)
        assert_same(steps(optimizer, [p], [[p]], donate=True)[0], own)


def test_an_update_that_fails_takes_nothing():
    mesh, elsewhere = (spmd.Mesh(x=n, transport="local") for n in (2, 3))
    lay = lambda x, mesh=mesh: spmd.put(x, P("x"), mesh)
    gone = lay(np.ones(6))
    sgd(0.1).update(lay(np.ones(6)), SGDState(0, None), gone, donate=True)
    for optimizer in sgd(0.1), sgd(0.1, 0.9), adam():
        params = [lay(np.ones(4)), lay(np.ones(6))]
        grads = [lay(np.ones(4)), lay(np.ones(6))]
        state = optimizer.init(params)
        wrong = [lay(np.ones(5)), lay(np.ones(6, complex)), lay(np.ones(6), elsewhere), gone]
        tries = [((grads[0], g), state, params) for g in wrong]
        tries.append((grads, state, [params[0], gone]))
        if optimizer.init(params)[1] is not None:
            for bad in lay(np.ones(7)), gone:
                part = [state[1][0], bad]
                tries.append((grads, state._replace(**{type(state)._fields[-1]: part}), params))
        for g, s, p in tries:
            with pytest.raises((ValueError, DonatedError, TypeError)) as raised:
                optimizer.update([*g], s, p, donate=True)
            assert not isinstance(raised.value, DonatedError) or "argument " in str(raised.value)
        assert_same(params, [np.ones(4), np.ones(6)])
        assert_same(state, optimizer.init([np.ones(4), np.ones(6)]))


def test_copies_of_what_is_given_away_keep_their_blocks():
    optimizer = sgd(0.5)
    with spmd.Mesh(x=2, transport="local"):
        for spec in P(), P("x"):
            w, g = spmd.put(np.ones(4), spec), spmd.put(np.ones(4), spec)
            shallow, deep = copy.copy(w), copy.deepcopy(w)
            optimizer.update({"a": g, "b": g}, SGDState(0, None), {"a": w, "b": deep}, donate=True)
            np.testing.assert_array_equal(shallow, np.ones(4))
            other = copy.copy(shallow)
            new, _ = optimizer.update({"a": g, "b": g}, SGDState(0, None), {"a": shallow, "b": other}, donate=True)
            assert_same(new, {"a": np.full(4, 0.5), "b": np.full(4, 0.5)})
            with pytest.raises(DonatedError):
                pickle.dumps(w)


def test_what_is_differentiated_is_not_given_away():
    with spmd.Mesh(x=2, transport="local"):
        p, g = spmd.put(np.arange(4.0), P("x")), spmd.put(np.ones(4), P("x"))
        for optimizer in sgd(0.1, 0.9), adam(0.1):
            state = optimizer.init(p)

            def after(g, donate, optimizer=optimizer, state=state):
                new, _ = optimizer.update(g, state, p, donate=donate)
                return spmd.map(lambda x: spmd.psum(np.sum(x * x), "x"), P("x"), P())(new)

            assert_same(spmd.grad(after)(g, True), spmd.grad(after)(g, False))

            def beside(x, donate, optimizer=optimizer, state=state):  # what a tape has as a constant
                y = x * p
                optimizer.update(spmd.put(np.ones(4), P("x")), state, p, donate=donate)
                return spmd.map(lambda y: spmd.psum(np.sum(y), "x"), P("x"), P())(y)

            assert_same(spmd.grad(beside)(g, True), spmd.grad(beside)(g, False))
            np.testing.assert_array_equal(p, np.arange(4.0))
        by_rate = spmd.grad(
            lambda rate: sgd(rate).update(np.ones(3), sgd(0.1).init(None), np.zeros(3), donate=True)[0].sum()
        )
        assert by_rate(np.float64(0.1)) == -3
        # In a body.
        step = spmd.map(lambda p, g: sgd(0.1).update(g, SGDState(0, None), p, donate=True)[0], P("x"), P("x"))
        np.testing.assert_allclose(step(p, g), np.arange(4.0) - 0.1)
        np.testing.assert_array_equal(p, np.arange(4.0))


@each_mpi
@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.full), 3])
def test_processes_train_alike_whether_parameters_are_given_away(python, processes):
    ended = launch(PROGRAMS / "training.py", str(processes), n=processes, python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.split() == ["alike"]


def test_clipping():
    grads = {"w": np.array([[3.0, 0.0]]), "b": np.array([4.0], np.float32)}
    clipped = spmd.optim.clip_by_global_norm(grads, 1.0)
    np.testing.assert_allclose(clipped["w"], [[0.6, 0.0]])
    np.testing.assert_allclose(clipped["b"], [0.8], rtol=1e-6)
    assert clipped["b"].dtype == np.float32
    assert_same(spmd.optim.clip_by_global_norm(grads, 6.0), grads)
    assert_same(spmd.optim.clip_by_global_norm({"w": np.zeros(2)}, 1.0), {"w": np.zeros(2)})
    spmd.check_grads(lambda g: spmd.optim.clip_by_global_norm(g, 1.0), (np.array([3.0, 4.0]),), order=2)
    np.testing.assert_array_equal(spmd.grad(lambda g: spmd.optim.clip_by_global_norm(g, 1.0).sum())(np.zeros(2)), 1)
    # Norms whose squares are not numbers of the dtype; an infinite one clips nothing.
    for dtype in np.float32, np.float64:
        g = {"w": np.array([3.0, 4.0], dtype)}
        for most in np.inf, 1e30, np.finfo(dtype).max:
            assert_same(spmd.optim.clip_by_global_norm(g, most), g)
        np.testing.assert_allclose(spmd.optim.clip_by_global_norm(g, 1e-15)["w"], [6e-16, 8e-16], rtol=1e-6)
        zero = {"w": np.zeros(2, dtype)}
        assert_same(spmd.optim.clip_by_global_norm(zero, 1e-30), zero)
    with pytest.raises(ValueError, match="max_norm"):
        spmd.optim.clip_by_global_norm(grads, 0.0)
    with spmd.Mesh(x=2, transport="local"):
        split = (spmd.put(grads["w"], P(None, "x")), spmd.put(grads["b"], P()))
        outside = spmd.optim.clip_by_global_norm(split, 1.0)
        inside = spmd.map(lambda g: spmd.optim.clip_by_global_norm(g, 1.0), ((P(None, "x"), P()),), (P(None, "x"), P()))
        for made in outside, inside(split):
            np.testing.assert_allclose(made[0].numpy(), [[0.6, 0.0]])
            np.testing.assert_allclose(made[1].numpy(), [0.8], rtol=1e-6)


HUGE_OR_TINY = [("float32", 1e30, 1.0), ("float32", 3e38, 1e30), ("float32", 1e-30, 1e-31), ("float64", 1e-200, 1e-201)]


@pytest.mark.parametrize(("dtype", "size", "most"), [*HUGE_OR_TINY, ("float64", 1e200, 1e190), ("bfloat16", 1e30, 1.0)])
@pytest.mark.parametrize("rows", [5, 1])  # uneven blocks, and empty ones
def test_clipping_of_norms_whose_squares_are_no_numbers_of_the_dtype(dtype, size, most, rows, scheduler):
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    rng = np.random.default_rng(rows)
    grads = [(rng.uniform(-0.3, 0.3, shape) * size).astype(kind) for shape in ((rows, 4), (3,))]
    exact = [g.astype(np.longdouble) for g in grads]
    norm = np.sqrt(sum(np.sum(np.square(g / np.longdouble(size))) for g in exact)) * np.longdouble(size)
    assert norm > most
    spec = (P("x"), P())
    mesh = spmd.Mesh(x=3, transport="local", scheduler=scheduler)
    inside = spmd.map(lambda *g: spmd.optim.clip_by_global_norm(g, most), spec, spec, mesh=mesh)
    laid = [spmd.put(g, s, mesh) for g, s in zip(grads, spec, strict=True)]
    with np.errstate(over="raise"):
        results = (spmd.optim.clip_by_global_norm(g, most) for g in (grads, laid))
        for made in (*results, inside(*grads)):
            for got, g in zip(made, exact, strict=True):
                got = np.asarray(got)
                assert got.dtype == kind
                rtol = {"bfloat16": 5e-3, "float32": 2e-7, "float64": 1e-15}[dtype]
                np.testing.assert_allclose(got.astype(np.longdouble), g * (most / norm), rtol=rtol)
            # Below the bound nothing changes.
            assert_same(spmd.optim.clip_by_global_norm(tuple(made), 2 * most), tuple(made))


def test_schedules():
    cosine, linear = spmd.optim.cosine(2.0, 4, end=1.0, warmup=3), spmd.optim.linear(2.0, 4)
    np.testing.assert_allclose([cosine(t) for t in range(3)], [0.5, 1.0, 1.5])
    np.testing.assert_allclose([cosine(t) for t in (3, 5, 7, 99)], [2.0, 1.5, 1.0, 1.0])
    np.testing.assert_allclose([linear(t) for t in range(6)], [2.0, 1.5, 1.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize(
    ("make", "argument", "bad"),
    [
        (lambda n: sgd(n), "learning_rate", (-1, np.nan, np.inf, "a", None, True, 1j, np.array(-1.0))),
        (lambda n: sgd(0.1, n), "momentum", (-1, np.nan, np.inf, "a", None)),
        (lambda n: adam(n), "learning_rate", (-1, np.nan, "a")),
        (lambda n: adam(b1=n), "b1", (1, 1.0, np.float32(1), -0.1, 2, np.nan, "a", None)),
        (lambda n: adam(b2=n), "b2", (1, 1.0, -0.1, 2, np.nan, None)),
        (lambda n: adam(eps=n), "eps", (-1e-8, np.nan, np.inf)),
        (lambda n: adamw(weight_decay=n), "weight_decay", (-1, np.inf, np.nan)),
        (lambda n: spmd.optim.cosine(n, 3), "rate", (-1, np.nan, "a")),
        (lambda n: spmd.optim.cosine(1.0, n), "steps", (0, np.nan, "a", None)),
        (lambda n: spmd.optim.linear(1.0, 3, n), "end", (-1, np.inf, 1j)),
        (lambda n: spmd.optim.linear(1.0, 3, warmup=n), "warmup", (-1, np.nan, "a")),
        (
            lambda n: spmd.optim.clip_by_global_norm(np.ones(2), n),
            "max_norm",
            (0, -1, np.nan, "a", None, 1j, np.ones(3)),
        ),
    ],
)
def test_numbers_out_of_range_are_an_error(make, argument, bad):
    for n in bad:
        with pytest.raises(
            ValueError, match=rf"spmd\.optim\.\w+: argument {argument}\n  got: .*\n  needed: a .*\n  mend: "
        ):
            make(n)


def test_a_schedule_is_asked_for_numbers_too():
    for bad in -1.0, None, np.nan:
        optimizer = sgd(lambda t, bad=bad: bad if t == 1 else 0.1)
        p, state = optimizer.update(np.ones(2), optimizer.init(np.ones(2)), np.ones(2))
        with pytest.raises(ValueError, match=r"argument learning_rate, of 1 updates done"):
            optimizer.update(np.ones(2), state, p)
