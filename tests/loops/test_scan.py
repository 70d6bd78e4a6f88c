"""`scan` and `fori_loop` by cases: signatures, lengths, order, numbers, states, layouts, keys; and what is refused."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest
from conftest import placed

import spmd
from loops.random_loops import plain_scan
from spmd import P
from spmd.device import to_host
from spmd.errors import LayoutError
from spmd.layout import Layout

X = np.random.default_rng(0).normal(size=(5, 3))
W = np.array([0.5, -1.0, 2.0])


def half(n: int) -> int:
    return n // 2 + 1


CHECKPOINTS = [None, 1, 2, 3, "sqrt", 5, 100, half]


def same(got, want) -> None:
    """The same trees with the same bits."""
    assert spmd.tree.structure(got) == spmd.tree.structure(want)
    for a, b in zip(spmd.tree.leaves(got), spmd.tree.leaves(want), strict=True):
        a, b = (to_host(x.numpy() if hasattr(x, "numpy") else x) for x in (a, b))
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def step(c, x):
    c = np.tanh(c * x + 0.1)
    return c, {"all": c * 2, "sum": np.sum(c)}


def test_the_signatures_are_those_of_jax():
    given = [p.name for p in inspect.signature(spmd.scan).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert given == ["f", "init", "xs", "length", "reverse"]
    assert [*inspect.signature(spmd.fori_loop).parameters][:4] == ["lower", "upper", "body_fun", "init_val"]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda c: getattr(c, "__name__", str(c)))
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_values_and_gradients(n, reverse, checkpoint):
    def value(scan, w, x):
        carry, ys = scan(step, w, x[:n], None, reverse, checkpoint=checkpoint)
        return np.sum(carry) + np.sum(ys["all"] ** 2) + np.sum(np.cos(ys["sum"]))

    same(spmd.scan(step, W, X[:n], None, reverse, checkpoint=checkpoint), plain_scan(step, W, X[:n], None, reverse))
    by = {scan: lambda w, x, scan=scan: value(scan, w, x) for scan in (spmd.scan, plain_scan)}
    same(*(spmd.value_and_grad(f, (0, 1))(W, X) for f in by.values()))
    spmd.check_grads(by[spmd.scan], (W, X), order=2)
    for of, at in itertools.product((spmd.hessian, spmd.jacrev), ((W, X),)):
        got, want = (of(f)(*at) for f in by.values())
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("checkpoint", [None, 2])
def test_no_steps(checkpoint):
    carry, ys = spmd.scan(step, W, X[:0], checkpoint=checkpoint)
    same((carry, ys), (W, {"all": np.zeros((0, 3)), "sum": np.zeros(0)}))
    assert spmd.scan(lambda c, _: (c, None), W, length=0)[1] is None
    loss = lambda w, x: np.sum(spmd.scan(step, w, x, checkpoint=checkpoint)[0] ** 2)
    same(spmd.grad(loss, (0, 1))(W, X[:0]), (2 * W, np.zeros((0, 3))))
    assert spmd.fori_loop(3, 3, lambda i, u: u + 1, 2.0) == 2.0
    assert spmd.fori_loop(5, 3, lambda i, u: u + 1, 2.0) == 2.0


def test_no_steps_on_meshes(scheduler):
    with spmd.Mesh(x=3, scheduler=scheduler):
        w = spmd.put(W, P("x"))
        carry, ys = spmd.scan(step, w, spmd.put(X[:0], P(None, "x")))
        assert carry is w
        assert ys["all"].shape == (0, 3)

        def body(w):
            carry, ys = spmd.scan(step, w, length=0, xs=np.zeros((0, 1)))
            return carry + spmd.psum(np.sum(ys["all"]), "x")

        same(spmd.map(body, P("x"), P("x"))(W).numpy(), W)


def test_xs_may_be_none_and_y_may_be_none():
    seen = []
    carry, ys = spmd.scan(lambda c, x: (c + 1, seen.append(x)), 0, length=4)
    assert (carry, ys, seen) == (4, None, [None] * 4)
    carry, ys = spmd.scan(lambda c, x: (None, {"a": x, "b": ()}), None, np.arange(3))
    assert carry is None
    same(ys, {"a": np.arange(3), "b": ()})


def test_what_a_step_sees():
    """Slices as arrays of NumPy; the numbers of fori_loop as integers without dimensions."""
    seen = []
    spmd.scan(lambda c, x: (c, seen.append((x["a"].shape, x["b"].dtype))), 0.0, {"a": X, "b": np.arange(5)})
    assert seen == [((3,), np.int64)] * 5
    numbers = []
    spmd.fori_loop(-1, 3, lambda i, u: (numbers.append(i), u)[1], 0.0)
    assert numbers == [-1, 0, 1, 2]
    assert all(np.shape(i) == () and i.dtype.kind == "i" for i in numbers)
    assert spmd.fori_loop(np.int32(0), np.array(3), lambda i, u: u + i, 0) == 3


@pytest.mark.parametrize("checkpoint", [None, 2])
def test_a_fori_loop_is_a_loop(checkpoint):
    def loop(run, w):
        body = lambda i, u: {"u": np.sin(u["u"] * w) + i, "n": u["n"] + 1}
        out = run(body, {"u": np.cos(w), "n": 0})
        return np.sum(out["u"]) + out["n"]

    def plain(body, u):
        for i in range(2, 7):
            u = body(np.asarray(i), u)
        return u

    ours = lambda body, u: spmd.fori_loop(2, 7, body, u, checkpoint=checkpoint)
    same(*(spmd.value_and_grad(lambda w, run=run: loop(run, w))(W) for run in (ours, plain)))


def test_numbers_take_the_dtype_that_they_meet():
    """A Python number as initial value, and as result of a step."""
    xs = X.astype(np.float32)
    carry, ys = spmd.scan(lambda c, x: (c + x, c * 2.0), 0.0, xs[:, 0])
    assert (carry.dtype, ys.shape) == (np.float32, (5,))
    carry, _ = spmd.scan(lambda c, x: (1.5, None), np.float32(0), xs)
    assert carry.dtype == np.float32
    g = spmd.grad(lambda s: spmd.scan(lambda c, x: (c * x, None), s, xs[:, 0], checkpoint=2)[0])(2.0)
    np.testing.assert_allclose(g, np.prod(xs[:, 0]), rtol=1e-5)
    assert spmd.fori_loop(0, 3, lambda i, u: not u, True) is False


def test_constants_of_a_body_in_the_carry():
    """An array from outside has the state of what is equal on all workers."""
    with spmd.Mesh(x=2):
        run = lambda spec, step: spmd.map(lambda x: spmd.scan(step, x, length=2)[0], spec, spec)
        for jit in (lambda f: f, spmd.jit):
            same(jit(run(P(), lambda c, _: (np.ones(3), None)))(W).numpy(), np.ones(3))
            with pytest.raises(LayoutError, match="one state throughout the loop"):
                jit(run(P("x"), lambda c, _: (np.ones((2, 3)), None)))(X[:4])


def test_the_carry_as_y_and_arrays_used_twice():
    def value(scan, w, **options):
        (a, b), ys = scan(lambda c, x: ((c[1] * w, c[0] + x), (c, c, w, x, c[0])), (np.cos(w), np.sin(w)), X, **options)
        return sum(np.sum(np.cos(k + 1.0) * y**2) for k, y in enumerate([a, b, *spmd.tree.leaves(ys)]))

    want = spmd.value_and_grad(lambda w: value(plain_scan, w))(W)
    for checkpoint in CHECKPOINTS:
        same(spmd.value_and_grad(lambda w, c=checkpoint: value(spmd.scan, w, checkpoint=c))(W), want)


def test_a_step_that_returns_the_same_array_in_two_places():
    """Where three cotangents meet in it, they may be added in another order."""

    def value(scan, w, **options):
        (a, b), ys = scan(lambda c, x: ((y := np.sin(c[0] + c[1] * x), y), (y, y, y)), (w, w), X, **options)
        return sum(np.sum(np.cos(k + 1.0) * y**2) for k, y in enumerate([a, b, *ys]))

    want = spmd.grad(lambda w: value(plain_scan, w))(W)
    for checkpoint in CHECKPOINTS:
        got = spmd.grad(lambda w, c=checkpoint: value(spmd.scan, w, checkpoint=c))(W)
        np.testing.assert_allclose(got, want, rtol=1e-13)


@pytest.mark.parametrize("checkpoint", [None, 1, "sqrt"])
def test_every_way_to_differentiate(checkpoint):
    f = lambda scan: lambda w: scan(step, w, X, checkpoint=checkpoint)[1]["all"]
    ours, plain = f(spmd.scan), f(plain_scan)
    v = np.cos(X)
    same(spmd.vjp(ours, W)[1](v), spmd.vjp(plain, W)[1](v))
    same(spmd.jvp(ours, (W,), (W,)), spmd.jvp(plain, (W,), (W,)))
    for of in (spmd.jacrev, spmd.jacfwd):
        np.testing.assert_allclose(of(ours)(W), of(plain)(W), rtol=1e-12)
    pull = spmd.vjp(ours, W)[1]
    same(pull(v), pull(v))  # it may be called again
    cubed = lambda f: spmd.grad(lambda s: spmd.grad(lambda s: spmd.grad(lambda s: np.sum(f(s * W)))(s))(s))(0.7)
    np.testing.assert_allclose(cubed(ours), cubed(plain), rtol=1e-10)


def test_within_a_checkpointed_function_and_around_one():
    inside = lambda scan: lambda w, x: np.sum(spmd.checkpoint(lambda w, x: scan(step, w, x)[0])(w, x) ** 2)
    block = spmd.checkpoint(lambda c, x: step(c, x))
    around = lambda scan: lambda w, x: np.sum(scan(lambda c, x: block(c, x), w, x)[0] ** 2)
    for f in (inside, around):
        for k in (None, 2):
            ours = f(lambda *args, k=k: spmd.scan(*args, checkpoint=k))
            same(spmd.value_and_grad(ours, (0, 1))(W, X), spmd.value_and_grad(f(plain_scan), (0, 1))(W, X))
            np.testing.assert_allclose(spmd.hessian(ours)(W, X), spmd.hessian(f(plain_scan))(W, X), rtol=1e-11)


# Meshes


def keyed(key, w):
    """A carry with a random key, and noise."""

    def f(carry, x):
        key, w = carry
        key, new = spmd.random.split(key)
        w = np.tanh(w + 0.1 * spmd.random.normal(new, (3,)) * x)
        return (key, w), w

    return f, (key, w)


@pytest.mark.parametrize("checkpoint", [None, 1, 2])
def test_random_keys_in_the_carry(checkpoint):
    key = spmd.random.key(7)

    def value(scan, w):
        f, init = keyed(key, w)
        (last, w), ys = scan(f, init, X, checkpoint=checkpoint)
        return np.sum(w) + np.sum(ys**2), last

    ours, plain = (spmd.value_and_grad(lambda w, s=s: value(s, w), has_aux=True)(W) for s in (spmd.scan, plain_scan))
    same(ours, plain)
    with spmd.Mesh(x=3):
        run = lambda scan: spmd.map(lambda key, w: value(scan, w)[0], (P(), P()), P())
        same(*(spmd.value_and_grad(run(scan), 1)(key, W) for scan in (spmd.scan, plain_scan)))


def halo_step(u, x):
    wide = spmd.halo_exchange(u, P("x"), 1, "zero")
    u = np.tanh(u + 0.2 * (wide[2:] - 2 * u + wide[:-2]) + x)
    return u, spmd.psum(np.sum(u * u), "x")


@pytest.mark.parametrize("checkpoint", [None, 1, 3, "sqrt"])
@pytest.mark.parametrize(("workers", "points"), [(1, 5), (3, 7), (4, 3), (8, 5)])
def test_a_halo_and_a_sum_in_each_step(scheduler, workers, points, checkpoint):
    u, xs = np.linspace(-1, 1, points), np.cos(np.arange(6 * points)).reshape(6, points)
    with spmd.Mesh(x=workers, scheduler=scheduler):
        run = lambda scan: spmd.map(
            lambda u, xs: (lambda last, energies: spmd.sum(last**2, "x") + np.sum(energies))(
                *scan(halo_step, u, xs, checkpoint=checkpoint)
            ),
            (P("x"), P(None, "x")),
            P(),
        )
        same(*(spmd.value_and_grad(run(scan), (0, 1))(u, xs) for scan in (spmd.scan, plain_scan)))
        spmd.check_grads(run(spmd.scan), (u, xs))


def test_states_of_results(scheduler):
    """The last carry has the state of the first one; the ys that of their steps."""

    def body(x):
        varied = spmd.pvary(np.zeros(3), "x")
        (total, mine), ys = spmd.scan(lambda c, r: ((c[0] + 1.0, c[1] + r), (spmd.psum(r, "x"), r)), (0.0, varied), x)
        return np.asarray([float(total)]) if False else total, mine[None], *ys

    with spmd.Mesh(x=2, scheduler=scheduler):
        specs = P(), P("x"), P(), P("x")
        total, mine, sums, rows = spmd.map(body, P("x"), specs)(X[:4])
        assert float(total) == 2
        np.testing.assert_allclose(mine.numpy(), [X[:2].sum(0), X[2:4].sum(0)])
        np.testing.assert_allclose(sums.numpy(), X[:2] + X[2:4])
        np.testing.assert_array_equal(rows.numpy(), X[:4])


def test_values_that_one_worker_holds_are_refused():
    with spmd.Mesh(x=2), pytest.raises(spmd.errors.DifferentiationError, match=r"(?s)argument init.*spmd\.replicate"):
        spmd.map(lambda x: spmd.scan(lambda c, _: (c, None), spmd.gather(x, "x"), length=2)[0], P("x"), P("x"))(W)


AXES = {"x": 2, "y": 2}
LAYOUTS = [
    *(P(), P("x"), P(None, "x"), P("x", "y"), P(("x", "y"))),
    Layout((5, 3), P("x", "y"), AXES, ((1, 4), (0, 3))),
    Layout.grid((5, 3), (3, 1), AXES),
]


@pytest.mark.parametrize("spec", LAYOUTS, ids=str)
@pytest.mark.parametrize("checkpoint", [None, 2])
def test_global_arrays_in_every_layout(scheduler, spec, checkpoint):
    """Of xs, too; what is split along the steps is made whole along them."""

    def value(scan, w, x):
        carry, ys = scan(step, w, x, checkpoint=checkpoint)
        return (carry**2).sum() + (ys["all"] ** 2).sum() + ys["sum"].sum()

    with spmd.Mesh(**AXES, scheduler=scheduler):
        x, w = spmd.put(X, spec), spmd.put(W, P("y"))
        got = spmd.value_and_grad(lambda w, x: value(spmd.scan, w, x), (0, 1))(w, x)
        assert got[1][1].layout == x.layout
        assert got[1][0].layout == w.layout
        rows = [*x.layout.spec][1:] if x.layout.spec else [()]
        whole = spmd.reshard(x, P(None, *(names or None for names in rows)))
        want = spmd.value_and_grad(lambda w, x: value(plain_scan, w, x), (0, 1))(w, whole)
        for a, b in zip(spmd.tree.leaves(got), spmd.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-13)


def test_sums_that_are_not_reduced_yet():
    """A step may return them where the carry is reduced."""
    with spmd.Mesh(x=2):
        a, u = spmd.put(np.cos(np.arange(20.0)).reshape(5, 4), P("x")), spmd.put(np.ones(4), P())
        f = lambda c, _: ((a * c).sum(0), None)
        assert f(u, None)[0].layout.unreduced == {"x"}
        loss = lambda scan: lambda u: (scan(f, u, length=3)[0] ** 2).sum()
        np.testing.assert_allclose(spmd.scan(f, u, length=3)[0].numpy(), a.numpy().sum(0) ** 3)
        reduced = lambda c, _: (spmd.reshard(f(c, None)[0], P()), None)
        for checkpoint in (None, 1):
            ours = lambda *args, k=checkpoint, **options: spmd.scan(*args, **options, checkpoint=k)
            plain = spmd.grad(loss(lambda f, *args, **options: plain_scan(reduced, *args, **options)))
            np.testing.assert_allclose(spmd.grad(loss(ours))(u).numpy(), plain(u).numpy(), rtol=1e-13)


def test_arrays_of_a_device_stay_there():
    u, xs = placed(W), placed(X)
    carry, ys = spmd.scan(step, u, xs)
    assert type(carry) is type(u)
    assert type(ys["all"]) is type(u)
    same((carry, ys), plain_scan(step, u, xs))


def test_a_carry_whose_layout_changes_may_be_resharded():
    with spmd.Mesh(x=2):
        u = spmd.put(X, P("x"))
        turned = lambda c, _: (spmd.reshard(np.tanh(c), P(None, "x")), None)
        with pytest.raises(LayoutError, match="one layout throughout the loop"):
            spmd.scan(turned, u, length=2)
        back = lambda c, _: (spmd.reshard(turned(c, None)[0], P("x")), None)
        same(spmd.scan(back, u, length=2)[0].numpy(), np.tanh(np.tanh(X)))
