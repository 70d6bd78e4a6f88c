"""Pullbacks in two parts: the cotangents of some arguments first, those of the rest later, each rule once."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.autodiff import custom_vjp, tree
from spmd.autodiff.split_pullback import split_pullback_of

RNG = np.random.default_rng(0)
X, W, B, C = (RNG.normal(size=s) for s in ((5, 3), (3, 4), (4,), (4, 4)))
FUNCTIONS = {
    "two layers": lambda x, w: np.tanh(np.tanh(x @ w["w"] + w["b"]) @ w["c"]),
    "a parameter that is computed first": lambda x, w: np.sin(x) @ (np.tanh(w["w"]) * w["b"]) + np.exp(w["b"]),
    "one that is used twice": lambda x, w: (x @ w["w"]) * w["b"] @ w["c"] + w["b"] @ w["c"],
    "several results": lambda x, w: {"y": x @ w["w"], "z": [np.sum(w["b"] * x[0, 0]), np.sum(w["c"])]},
    "branches": lambda x, w: np.concatenate([x @ w["w"], np.where(x[:, :1] > 0, w["b"], w["b"] ** 2)]),
    "the value not at all": lambda x, w: w["w"] @ w["c"],
    "the parameters not at all": lambda x, w: np.cumsum(x, 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("with_value", [True, False])
def test_both_parts_are_what_one_sweep_gives(name, with_value):
    f, w = FUNCTIONS[name], {"w": W, "b": B, "c": C}
    first, fun = ((X,), f) if with_value else ((), lambda w: f(X, w))
    y, pull = split_pullback_of(fun, first, (w,))
    want, back = spmd.vjp(fun, *first, w)
    g = tree.map(lambda leaf: np.random.default_rng(1).normal(size=np.shape(leaf)), want)
    early, later = pull(g)
    found = [y, *early, *later()]
    for a, b in zip(tree.leaves([want, *back(g)]), tree.leaves(found), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-13, atol=1e-13)


def test_each_rule_runs_once_and_those_of_the_rest_run_later():
    """Products of matrices are counted by what a function of the user's sees."""
    runs = []

    @custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    y, pull = split_pullback_of(lambda x, w: np.tanh(x @ w) * counted(w, runs), (X,), (W,))
    (of_x,), later = pull(np.ones_like(y))
    assert runs == []
    (of_w,) = later()
    assert runs == ["rule"]
    want = spmd.vjp(lambda x, w: np.tanh(x @ w) * (2 * np.sum(w)), X, W)[1](np.ones_like(y))
    np.testing.assert_allclose(of_x, want[0])
    np.testing.assert_allclose(of_w, want[1])


def counted(w, runs):
    @custom_vjp
    def double(w):
        return 2 * np.sum(w)

    def back(kept, g):
        runs.append("rule")
        return (2 * g * np.ones_like(kept),)

    double.defvjp(lambda w: (2 * np.sum(w), w), back)
    return double(w)


def test_in_a_body_that_communicates(scheduler):
    def body(x, w):
        x, w = spmd.varying(x, "x"), spmd.varying(w, "x")
        f = lambda x, w: spmd.psum(np.tanh(x @ w), "x") @ w.T
        y, pull = split_pullback_of(f, (x,), (w,))
        g = spmd.varying(np.ones(np.shape(y)), "x")
        (of_x,), later = pull(g)
        want = spmd.vjp(f, x, w)[1](g)
        for a, b in zip((of_x, *later()), want, strict=True):
            np.testing.assert_allclose(spmd.block(a), spmd.block(b), rtol=1e-13)

    spmd.map(body, (P("x"), P()), None, mesh=spmd.Mesh(x=3, scheduler=scheduler))(RNG.normal(size=(6, 3)), W)
