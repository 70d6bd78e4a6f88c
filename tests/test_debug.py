"""What `spmd.debug` finds, and what it leaves alone."""

from __future__ import annotations

import re

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.errors import MutationError


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
