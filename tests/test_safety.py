"""Nothing is cut off from its gradient, shared with a writer, summed or kept alive in silence."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import optree
import pytest

import spmd
from spmd import P
from spmd.errors import ClosureError, DifferentiationError, DtypeError, TransportError

X = np.arange(1.0, 7.0)


@pytest.fixture(params=["lockstep", "threads"])
def mesh(request):
    return spmd.Mesh(x=3, scheduler=request.param)


# Gradients


def test_a_closure_over_an_inner_trace_is_an_error_whatever_is_traced_outside():
    def inner(v, w):
        f = spmd.custom_vjp(lambda a: a * v)
        f.defvjp(lambda a: (a * v, v), lambda v, g: (g * v,))
        return f(w)

    def outer(w):
        return spmd.grad(lambda v: inner(v, w))(np.array(2.0)) * w

    with pytest.raises(ClosureError, match="pass the array as an argument"):
        spmd.value_and_grad(outer)(np.array(3.0))


def test_checkpoint_below_an_inner_trace():
    def outer(w):
        return spmd.grad(lambda v: spmd.checkpoint(lambda a, b: a * b)(w, v))(np.array(2.0)) * w

    value, grad = spmd.value_and_grad(outer)(np.array(3.0))
    assert (float(value), float(grad)) == (9.0, 6.0)


@pytest.mark.parametrize("index", [[0, 0], ([1, 1, 0],), np.array([2, 0, 2])])
def test_set_at_repeated_places_follows_the_last_writer(index):
    n = np.zeros(3)[index].size
    weights, v = np.array([5.0, 7.0, 11.0]), np.arange(1.0, n + 1)

    def f(v):
        return np.sum(spmd.at(np.zeros(3))[index].set(v) * weights)

    steps = [(f(v + h) - f(v - h)) / 2 for h in np.eye(n)]
    assert np.array_equal(spmd.grad(f)(v), steps)


@pytest.mark.parametrize("update", ["set", "add"])
def test_an_integer_array_takes_no_floating_update(update):
    with pytest.raises(DtypeError, match="int64 can hold"):
        spmd.grad(lambda v: np.sum(getattr(spmd.at(np.zeros(3, int))[0], update)(v)) * 1.0)(2.5)
    assert getattr(spmd.at(np.zeros(3))[0], update)(2).dtype == float


def test_a_pullback_gives_arrays_of_its_own():
    cotangent = np.ones(6)
    _, pull = spmd.vjp(lambda a: a, X)
    pull(cotangent)[0][:] = 5
    first, second = spmd.grad(lambda a, b: np.sum(a + b), (0, 1))(X, X)
    first[:] = 9
    assert np.array_equal(cotangent, np.ones(6))
    assert np.array_equal(second, np.ones(6))


def test_the_gradient_of_a_rooted_scalar_is_the_roots(mesh):
    for root in range(3):

        def body(x, root=root):
            return spmd.grad(lambda x: spmd.sum_reduce(np.sum(x * x), "x", root))(x)

        assert np.array_equal(spmd.map(body, P("x"), P("x"), mesh=mesh)(X).numpy(), 2 * X)


# Tangents and Jacobians in bodies


def test_a_tangent_is_not_summed(mesh):
    def body(w, x):
        return spmd.jvp(lambda w: 2.0 * w, (w,), (x[0],))[1]

    with pytest.raises(DifferentiationError, match="varies over no other axes"):
        spmd.map(body, (P(), P("x")), P(), mesh=mesh)(1.0, X)

    def own(w, x):
        return spmd.jvp(lambda w: 2.0 * w, (spmd.pvary(w, "x"),), (x[0],))[1][None]

    assert np.array_equal(spmd.map(own, (P(), P("x")), P("x"), mesh=mesh)(1.0, X).numpy(), 2 * X[::2])


@pytest.mark.parametrize("jacobian", [spmd.jacrev, spmd.jacfwd, spmd.hessian])
def test_a_jacobian_in_a_body_does_not_mix_workers(mesh, jacobian):
    with pytest.raises(DifferentiationError, match="outside of the map"):
        spmd.map(lambda x: jacobian(lambda x: spmd.psum(np.sum(x) ** 2, "x"))(x), P("x"), P("x"), mesh=mesh)(X)

    def own(x):
        return jacobian(lambda x: np.sum(x**3))(x)

    found = spmd.map(own, P("x"), P("x"), mesh=mesh)(X).numpy()
    blocks = X.reshape(3, 2)
    want = np.concatenate([np.diag(6 * b) for b in blocks]) if jacobian is spmd.hessian else 3 * X**2
    assert np.allclose(found, want)


def test_a_hessian_of_invariants_counts_every_worker_once(mesh):
    def body(w, x):
        return spmd.hessian(lambda w: spmd.psum(np.sum(x) * np.sum(w * w), "x"))(w)

    found = spmd.map(body, (P(), P("x")), P(), mesh=mesh)(np.ones(2), X).numpy()
    assert np.array_equal(found, 2 * X.sum() * np.eye(2))


# Sharing


def test_a_bare_array_of_a_body_is_not_shared_with_its_writer(mesh):
    def body(y):
        mine = np.full(2, float(spmd.worker_index("x")))
        moved = spmd.shift(spmd.pvary(mine, "x"), "x", 1)
        mine += 100
        return moved + 0 * y

    assert np.array_equal(spmd.map(body, P("x"), P("x"), mesh=mesh)(X).numpy(), [2, 2, 0, 0, 1, 1])
    closed = np.ones(2)
    spmd.map(lambda y: spmd.pvary(closed, "x") + y, P("x"), P("x"), mesh=mesh)(X)
    assert closed.flags.writeable


@pytest.mark.parametrize("check", [True, False])
def test_a_result_does_not_follow_its_owner_through_a_view(mesh, check):
    owned = np.arange(2.0)
    result = spmd.map(lambda y: np.broadcast_to(owned, (2,)), P("x"), P(), mesh=mesh, check=check)(X)
    owned[:] = 7
    assert np.array_equal(result.numpy(), [0, 1])


def test_a_map_does_not_outlive_its_last_user(mesh):
    def make():
        def body(x):
            return np.sin(x)

        f = spmd.map(body, P("x"), P("x"), mesh=mesh)
        spmd.hvp(lambda x: np.sum(f(x)), (X,), (X,))
        return weakref.ref(body)

    body = make()
    gc.collect()
    assert body() is None


# Engines


def test_waiting_inside_optree_is_refused_where_it_would_abort():
    def body(x):
        return optree.tree_map(lambda a: spmd.psum(a, "x"), {"a": x, "b": 2 * x})

    with pytest.raises(TransportError, match=r"spmd\.tree\.map"):
        spmd.map(body, P("x"), P(), mesh=spmd.Mesh(x=3, scheduler="lockstep"))(X)

    def mended(x):
        return spmd.tree.map(lambda a: spmd.psum(a, "x"), {"a": x, "b": 2 * x})

    found = spmd.map(mended, P("x"), P(), mesh=spmd.Mesh(x=3, scheduler="lockstep"))(X)
    assert np.array_equal(found["b"].numpy(), [18, 24])
