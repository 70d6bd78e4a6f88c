"""What `spmd.debug` finds, and what it leaves alone."""

from __future__ import annotations

import json
import re
from contextlib import suppress

import numpy as np
import pytest
from launch import PROGRAMS, each_mpi, launch
from mpi_programs import debugging

import spmd
from spmd import P
from spmd.errors import MeshError, MutationError, NonFiniteError, ReplicaError


def pulled(f, x, change):
    """The gradient of f at x, where `change` is called between the forward run and the backward sweep."""
    _, pull = spmd.vjp(f, x)
    change()
    return pull(1.0)[0]


def add_one(a):
    a += 1


@pytest.fixture
def x():
    return np.arange(1.0, 5)


def test_a_changed_argument_is_found(x):
    with spmd.debug(mutation=True), pytest.raises(MutationError) as error:
        pulled(lambda x: np.sum(x * x), x, lambda: add_one(x))
    text = str(error.value)
    assert re.match(r"np\.multiply, recorded at .*test_debug\.py:\d+ in <lambda>", text)
    assert "a = a + 1 in place of a += 1" in text


def test_a_changed_constant_is_found(x):
    c = np.ones(4)
    with spmd.debug(mutation=True), pytest.raises(MutationError, match=r"np\.multiply"):
        pulled(lambda x: np.sum(x * c), x, lambda: add_one(c))


def test_a_change_through_a_view_is_found(x):
    c = np.ones((4, 4))
    with spmd.debug(mutation=True), pytest.raises(MutationError, match=r"np\.matmul"):
        pulled(lambda x: np.sum(c.T[:, ::-1] @ x), x, lambda: add_one(c[0]))


def test_an_index_that_changes_is_found(x):
    i = np.array([0, 1])
    with spmd.debug(mutation=True), pytest.raises(MutationError, match=r"x\[i\]"):
        pulled(lambda x: np.sum(x[i]), x, lambda: add_one(i))


def test_what_checkpoint_and_custom_vjp_keep_is_watched(x):
    f = spmd.custom_vjp(lambda x: np.sum(x**2))
    f.defvjp(lambda x: (np.sum(x**2), x), lambda x, g: (2 * x * g,))
    for g in (f, spmd.checkpoint(lambda x: np.sum(np.sin(x)))):
        with spmd.debug(mutation=True), pytest.raises(MutationError):
            pulled(g, x, lambda: add_one(x))


@pytest.mark.host("a constant of the host is copied to a device when the tape keeps it")
def test_it_is_found_in_the_bodies_of_a_map(x, scheduler):
    c = np.ones(4)

    def body(x):
        return spmd.psum(np.sum(x * c[: len(x)]), "x")

    with spmd.Mesh(x=2, scheduler=scheduler):
        f = spmd.map(body, in_specs=P("x"), out_specs=P())
        with spmd.debug(mutation=True):
            value, pull = spmd.vjp(f, x)
            pull(np.ones_like(value))
            add_one(c)
            with pytest.raises(MutationError, match=r"np\.multiply, recorded at .* in body"):
                pull(np.ones_like(value))


def test_what_is_right_passes(x):
    with spmd.debug(mutation=True):
        c = np.ones(4)

        def f(x):
            y = np.tanh(x) * c
            return np.sum(y[::2] @ np.ones((2, 2))) + np.sum(spmd.checkpoint(np.sin)(y))

        gradient = spmd.grad(f)(x)
        spmd.check_grads(f, (x,), order=2)
        result = x + 1
        result += 1  # no tape has kept it
    np.testing.assert_array_equal(gradient, spmd.grad(f)(x))


def test_it_is_off_outside_of_the_block_and_after_an_error(x):
    with pytest.raises(ZeroDivisionError), spmd.debug(mutation=True):
        raise ZeroDivisionError
    wrong = pulled(lambda x: np.sum(x * x), x, lambda: add_one(x))
    assert wrong.tolist() == [4, 6, 8, 10]
    with spmd.debug(mutation=True), spmd.debug(mutation=False):
        pulled(lambda x: np.sum(x * x), x, lambda: add_one(x))


def test_it_decorates(x):
    @spmd.debug(mutation=True)
    def run():
        return pulled(lambda x: np.sum(x * x), x, lambda: add_one(x))

    for _ in range(2):
        with pytest.raises(MutationError):
            run()


# NaNs and infinities


@pytest.fixture
def quiet():
    with np.errstate(all="ignore"):
        yield


def here(f, words: str):
    with pytest.raises(NonFiniteError, match=words) as raised:
        f()
    return str(raised.value)


def test_the_first_nan_of_a_body_is_found(scheduler, quiet):
    def body(x):
        y = np.log(x - 1)  # of 0 at worker 1
        return spmd.psum(np.sum(y * 0), "x")

    with spmd.Mesh(x=3, scheduler=scheduler):
        f = spmd.map(body, P("x"), P())
        x = np.array([3.0, 2, 5, 1, 4, 2])
        with spmd.debug(nans=True), pytest.raises(NonFiniteError) as raised:
            f(x)
        text = str(raised.value)
        assert re.match(r"np\.log at .*test_debug\.py:\d+ in body\n  got:    -inf at \(1,\)", text)
        assert "raised by worker 1 (x=1)" in raised.value.__notes__[0]
        with spmd.debug(nans="nan"):  # then 0 * inf
            assert here(lambda: f(x), "nan at").startswith("np.multiply at")
        assert np.isnan(float(f(x)))
        with spmd.debug(nans=True):
            assert np.isfinite(float(f(x + 1)))


def test_the_first_nan_of_a_gradient_is_found(quiet):
    with spmd.debug(nans=True):
        text = here(lambda: spmd.grad(lambda x: np.sum(np.sqrt(x)))(np.array([1.0, 0.0])), r"inf at \(1,\)")
        assert re.match(r"the gradient of np\.sqrt, recorded at .*test_debug\.py:\d+ in <lambda>", text)
        with spmd.Mesh(x=2):
            f = spmd.map(lambda x: spmd.psum(np.sum(np.sqrt(x)), "x"), P("x"), P())
            here(lambda: spmd.grad(f)(np.array([1.0, 0.0])), r"the gradient of np\.sqrt, recorded at")
        here(lambda: spmd.grad(lambda x: np.sum(x / x))(np.zeros(2)), r"np\.divide at .* in <lambda>")
        assert spmd.grad(lambda x: np.sum(x**3))(np.ones(2)).tolist() == [3, 3]


def test_nans_that_come_in_are_those_of_an_argument():
    with spmd.Mesh(x=2), spmd.debug(nans=True):
        here(lambda: spmd.map(lambda x: x, P("x"), P("x"))(np.array([1.0, np.nan])), "^an argument\n")


@pytest.mark.parametrize("inside", [True, False])
def test_derivatives_of_derivatives_are_looked_at(scheduler, quiet, inside):
    """Their cotangents are traced themselves, and outside of a map they lie on a mesh."""
    x = np.array([1.0, 4.0, 9.0, 4.0])
    with spmd.Mesh(x=2, scheduler=scheduler):
        loss = lambda x: spmd.psum(np.sum(x**1.5), "x")
        slope = lambda f, x: np.sum(spmd.grad(f)(x) ** 2)
        if inside:
            f = spmd.map(lambda x: spmd.grad(lambda x: spmd.psum(slope(loss, x), "x"))(x), P("x"), P("x"))
        else:
            mapped = spmd.map(loss, P("x"), P())
            f = lambda x: spmd.grad(lambda x: slope(mapped, x))(spmd.put(x, P("x")))
        with spmd.debug(nans=True, replicas=True, mutation=True):
            np.testing.assert_allclose(f(x).numpy(), 2.25)
            here(lambda: f(x - 4.0), "nan at")


def test_the_index_of_a_nan_is_that_in_the_global_array(quiet):
    with spmd.Mesh(x=3), spmd.debug(nans=True):
        x = spmd.put(np.array([3.0, 2, 5, 1, 0, 0, 2]), P("x"))
        text = here(lambda: spmd.grad(lambda x: np.sum(np.log(x)))(x), "^np.log at")
        assert "-inf at (4,) of PartitionedArray float64[7]" in text
        assert "2 of 7 entries" in text


def test_what_np_empty_leaves_in_an_array_is_no_result():
    def body(x):
        np.full(x.shape, np.nan)  # whose memory comes next
        return np.empty_like(x).at[:].set(x)

    with spmd.Mesh(x=2), spmd.debug(nans=True):
        for _ in range(20):
            spmd.map(body, P("x"), P("x"))(np.ones(200))


@each_mpi
def test_every_process_learns_of_a_nan_in_a_global_array(python):
    ended = launch(PROGRAMS / "debugging.py", python=python, n=2, timeout=120)
    assert ended.returncode == 0, str(ended)
    with spmd.Mesh(x=2, transport="local"):
        assert json.loads(ended.stdout) == debugging.found()


def test_making_arrays_costs_nothing_once_nobody_looks(quiet):
    make = spmd.Array.__init__
    with spmd.debug(nans=True):
        assert spmd.Array.__init__ is not make
        with suppress(ValueError), spmd.debug(replicas=True):
            raise ValueError
        assert spmd.Array.__init__ is not make
    assert spmd.Array.__init__ is make
    with pytest.raises(MeshError, match="argument nans"), spmd.debug(nans="inf"):
        pass


# Replicas


def test_the_first_array_that_differs_between_workers_is_found(scheduler):
    def body(x):
        y = x + 1e-9 * spmd.worker_index("x") * np.array([0, 0, 1.0])
        return spmd.psum(np.sum(spmd.pvary(y, "x")), "x")

    with spmd.Mesh(x=3, y=2, scheduler=scheduler):
        f = spmd.map(body, P(), P())
        f(np.ones(3))  # nothing else would tell
        with spmd.debug(replicas=True), pytest.raises(ReplicaError) as raised:
            f(np.ones(3))
        text = str(raised.value)
        assert re.match(r"np\.add at .*test_debug\.py:\d+ in body", text)
        assert "with 1.0 at (2,) on worker 0 (x=0, y=0), and on worker 2 (x=1, y=0) with 1.000000001 at (2,)" in text
        assert "1 of 3 entries differ" in text


def test_replicas_that_agree_are_left_alone(scheduler):
    def body(w, x):
        def loss(w):
            once = spmd.at_root(lambda v: v * v, spmd.keep(w, "x", 1), axis_name="x", root=1)
            return spmd.psum(np.sum(np.tanh(w * x)), "x") + np.sum(spmd.replicate(once, "x", 1)) * np.nan**0

        held = spmd.keep(w, "x", 2)
        return spmd.grad(loss)(w) * spmd.inner(held, held)

    with spmd.Mesh(x=3, y=2, scheduler=scheduler):  # the root's value is one along y
        f = spmd.map(body, (P(), P("x")), P())
        w, x = np.ones(2), np.arange(6.0).reshape(3, 2)
        expected = f(w, x).numpy()
        with spmd.debug(replicas=True, nans=True, mutation=True):
            np.testing.assert_array_equal(f(w, x).numpy(), expected)
