"""Branches: `spmd.cond` and `spmd.while_loop`, by Python and recorded; workers go one way or differ."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from loops.random_recorded import bits
from spmd import P
from spmd.errors import ClosureError, LayoutError, StateError

RNG = np.random.default_rng(1)
AXES = [{"x": 1, "y": 1}, {"x": 3, "y": 1}, {"x": 2, "y": 2}]


def arguments(mesh: spmd.Mesh, rows: int = 5) -> tuple:
    u, w, s = RNG.normal(size=(rows, 3)), RNG.normal(size=(3, 3)), RNG.normal(size=3)
    return spmd.put(u, P("x"), mesh), spmd.put(w, P(), mesh), spmd.put(s, P(), mesh)


def same(f, cases) -> None:
    """Programs have the value and the gradients of Python, bit for bit."""
    run = spmd.value_and_grad(f, (0, 1, 2))
    for once in (spmd.jit(run), spmd.value_and_grad(spmd.jit(f), (0, 1, 2))):
        for a in cases:
            assert bits(once(*a)) == bits(run(*a))


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_all_workers_go_one_way(axes, scheduler):
    """What a function closes over gets its cotangent too; that of the one that does not run is zero."""
    mesh = spmd.Mesh(**axes, scheduler=scheduler)

    def body(u, w, s):
        one = spmd.cond(s[0] > 0, lambda a, b: np.tanh(a @ w) * b, lambda a, b: (a + u) * b * b, u, s)
        return spmd.psum(((one * u) ** 2).sum(), "x") + (s * s).sum() + (w * w).sum()

    def whole(u, w, s):
        one = spmd.cond(s[0] > 0, lambda a, b: np.tanh(a @ w) * b, lambda a, b: (a + u) * b * b, u, s)
        return ((one * u) ** 2).sum() + (s * s).sum() + (w * w).sum()

    cases = [arguments(mesh) for _ in range(2)]
    cases += [(u, w, -s) for u, w, s in cases]
    same(mesh.map(body, (P("x"), P(), P()), P()), cases)
    same(whole, cases)


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_workers_go_different_ways(axes, scheduler):
    """Cotangents of the operands meet on all workers; collectives along other axes than those of pred run."""
    mesh = spmd.Mesh(**axes, scheduler=scheduler)

    def body(u, w, s):
        first = spmd.axis_index("x") == 0
        one = spmd.cond(
            first,
            lambda a, w, b: np.tanh(a @ w) * spmd.psum(spmd.pvary(b, "y"), "y"),
            lambda a, w, b: a * b * b,
            *(u, w, s),
        )
        return spmd.psum((one**2).sum() + (u * w[0]).sum(), "x") + (s * s).sum()

    cases = [arguments(mesh, rows) for rows in (5, 1)]
    f = mesh.map(body, (P("x"), P(), P()), P())
    same(f, cases)
    for u, w, s in cases:
        k = u.blocks[0].shape[0]

        def plain(u, w, s, k=k, axes=axes):
            front = np.tanh(u[:k] @ w) * (axes["y"] * s)
            back = u[k:] * s * s
            return (front**2).sum() + (back**2).sum() + (u * w[0]).sum() + (s * s).sum()

        wanted = spmd.value_and_grad(plain, (0, 1, 2))(u.numpy(), w.numpy(), s.numpy())
        found = spmd.value_and_grad(f, (0, 1, 2))(u, w, s)
        for one, other in zip(spmd.tree.leaves(found), spmd.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(np.asarray(one), other, rtol=1e-10, atol=1e-12)


def test_second_derivatives_where_workers_differ():
    mesh = spmd.Mesh(x=2)

    def body(s):
        first = spmd.axis_index("x") == 0
        one = spmd.cond(first, lambda b: np.sin(b), lambda b: b**3, s)
        return spmd.psum(one.sum(), "x")

    f = mesh.map(body, P(), P())
    s = RNG.normal(size=3)
    found = spmd.grad(lambda s: (spmd.grad(f)(s) ** 2).sum())(s)
    wanted = 2 * (np.cos(s) + 3 * s**2) * (-np.sin(s) + 6 * s)
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-12)


def test_what_not_all_workers_may_do_is_refused(scheduler):
    mesh = spmd.Mesh(x=2, scheduler=scheduler)

    def with_sum(u, w):
        return spmd.cond(spmd.axis_index("x") == 0, lambda u: spmd.psum(u, "x") + 0 * u, lambda u: u, u)

    def closing_over(u, w):
        one = spmd.cond(spmd.axis_index("x") == 0, lambda u: u @ w, lambda u: u, u)
        return spmd.psum(one.sum(), "x")

    u, w = RNG.normal(size=(4, 3)), RNG.normal(size=(3, 3))
    for wrap in (lambda f: f, spmd.jit):
        with pytest.raises(StateError, match="that some workers along 'x' do not run"):
            wrap(mesh.map(with_sum, (P("x"), P()), P("x")))(u, w)
        with pytest.raises(ClosureError, match="besides its operands"):
            spmd.grad(wrap(mesh.map(closing_over, (P("x"), P()), P())), 1)(u, w)


def test_functions_that_give_different_forms_are_refused():
    mesh = spmd.Mesh(x=2)
    u = spmd.put(RNG.normal(size=(4, 3)), P("x"), mesh)
    with pytest.raises(LayoutError, match="the result of false_fun"):
        spmd.jit(lambda u: spmd.cond(u.sum() > 0, lambda u: u, lambda u: u[:2], u))(u)
    for two in (u[:2], u.astype("f4")):
        with pytest.raises(LayoutError, match=r"the result of false_fun\['a'\]\[1\]\n"):
            spmd.jit(lambda u, two=two: spmd.cond(u.sum() > 0, lambda: {"a": (u, u)}, lambda: {"a": (u, two)}))(u)
    with pytest.raises(LayoutError, match=r"the result of false_fun\n.*the tree \[\*\]"):
        spmd.jit(lambda u: spmd.cond(u.sum() > 0, lambda: (u, u), lambda: [u]))(u)
    with pytest.raises(LayoutError, match="argument pred"):
        spmd.cond(np.ones(3) > 0, lambda x: x, lambda x: x, u)


def test_what_is_not_chosen_does_not_run():
    """A computation of one function stays within it, even if it does not depend on the operands."""
    mesh = spmd.Mesh(x=2)
    a, singular = np.eye(3), np.zeros((3, 3))
    f = spmd.jit(lambda m, ok, u: spmd.cond(ok, lambda u: u @ np.linalg.inv(m), lambda u: u * 2, u))
    u = spmd.put(RNG.normal(size=(4, 3)), P("x"), mesh)
    assert bits(f(spmd.put(a, P(), mesh), spmd.put(np.True_, P(), mesh), u)) == bits(u @ a)
    assert bits(f(spmd.put(singular, P(), mesh), spmd.put(np.False_, P(), mesh), u)) == bits(u * 2)


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_while_loops(axes):
    mesh = spmd.Mesh(**axes)

    def body(u, w, s):
        going = lambda c: (spmd.pmax(np.abs(c["u"]).max(initial=0.0), "x") > 0.1) & (c["n"] < 40)
        step = lambda c: {"u": 0.5 * np.tanh(c["u"] @ w), "n": c["n"] + 1}
        c = spmd.while_loop(going, step, {"u": u, "n": 0})
        return c["u"], spmd.pmax(spmd.pvary(c["n"] + np.asarray(0), "x"), "x")

    f = mesh.map(body, (P("x"), P(), P()), (P("x"), P()))
    once = spmd.jit(f)
    for scale in (1.0, 30.0, 0.0):
        u, w, s = arguments(mesh)
        assert bits(once(u * scale, w, s)) == bits(f(u * scale, w, s))


@pytest.mark.parametrize("positive", [True, False])
def test_numbers_take_the_widest_kind_of_both_functions(positive):
    """And the dtype of an array that holds them."""
    mesh, whole = spmd.Mesh(x=2), np.arange(1, 4)

    def f(u, numbers):
        return spmd.cond(u.sum() > 0, lambda: numbers[0], lambda: numbers[1]) * whole

    u = spmd.put(np.full(4, 1.0 if positive else -1.0), P("x"), mesh)
    for numbers in ((1, 0.5), (0.5, 1), (2, 0.5j), (np.float32(0.5), 3), (3, np.int8(2)), (True, 2.5)):
        found = spmd.jit(lambda u, numbers=numbers: f(u, numbers))(u)
        np.testing.assert_array_equal(found, numbers[not positive] * whole)
    for numbers in ((np.int64(1), 0.5), (0.5, np.int64(1)), (np.float32(0.5), 1j), (np.True_, 2)):
        with pytest.raises(LayoutError, match="the result of false_fun"):
            spmd.jit(lambda u, numbers=numbers: f(u, numbers))(u)
