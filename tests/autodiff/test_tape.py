"""The backward sweep adds cotangents in place where nobody else holds them, and into nothing else."""

from __future__ import annotations

import functools
import itertools
import operator
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import ROOT, run_python

import spmd
from spmd.autodiff import array_methods, backward, indexing
from spmd.errors import StateError

UNARY = {
    "itself": lambda x: x,
    "tanh": np.tanh,
    "minus": lambda x: -x,
    "twice": lambda x: 2.0 * x,
    "square": lambda x: x * x,
    "cube": lambda x: x * x * x,
    "power": lambda x: x**2,
    "reverse": lambda x: x[::-1],
    "rotate": lambda x: np.roll(x, 1, axis=0),
    "transpose": lambda x: x.T,
    "repeat": lambda x: x[np.array([0, 2, 2])],
    "some": lambda x: np.where(x > 0, x, 0.0),
    "set": lambda x: spmd.at(x)[1].set(0.5),
    "change": lambda x: spmd.at(x)[1:].add(x[0]),
    "difference": lambda x: x[[1, 2, 0]] - 2 * x + x[[2, 0, 1]],
    "reshape": lambda x: np.reshape(np.ravel(x), (3, 3)),
}
BINARY = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "matmul": lambda x, y: x @ y,
    "maximum": np.maximum,
    "rows": lambda x, y: np.concatenate([x[:1], y[1:]]),
}


@st.composite
def programs(draw):
    """Steps that use earlier values again, so that cotangents meet in many ways."""
    steps: list[tuple] = []
    for count in range(1, draw(st.integers(2, 10))):
        pick = st.integers(max(0, count - 3), count - 1)
        if draw(st.booleans()):
            steps.append((UNARY[draw(st.sampled_from(sorted(UNARY)))], draw(pick)))
        else:
            steps.append((BINARY[draw(st.sampled_from(sorted(BINARY)))], draw(pick), draw(pick)))
    return steps


def run(steps, x):
    values = [x]
    for f, *operands in steps:
        values.append(np.tanh(0.3 * f(*[values[k] for k in operands])))
    return values[-1], sum(values)


@given(programs(), st.integers(0, 99))
@settings(max_examples=120)
def test_sums_in_place_are_sums(steps, seed):
    rng = np.random.default_rng(seed)
    x, *gs = rng.normal(size=(3, 3, 3))
    before = [x.copy(), *(g.copy() for g in gs)]
    found = []
    large = backward.INPLACE_MIN
    try:
        for backward.INPLACE_MIN in (1 << 60, -1, -1):
            out, pull = spmd.vjp(lambda x: run(steps, x), x)
            kept = [o.copy() for o in out]
            found += [pull(tuple(gs))[0], pull(tuple(gs))[0], spmd.grad(lambda x: np.sum(run(steps, x)[1] * gs[1]))(x)]
            for have, want in zip([x, *gs, *out], [*before, *kept], strict=True):
                np.testing.assert_array_equal(have, want)
    finally:
        backward.INPLACE_MIN = large
    for k in range(3):
        np.testing.assert_allclose(found[3 + k], found[k], rtol=1e-13, atol=1e-13)
        np.testing.assert_array_equal(found[6 + k], found[3 + k])


def test_slices_of_a_large_array_are_summed_into_one():
    """A loop over rows takes time and memory of the rows, not of their square."""
    n = 500
    x = np.random.default_rng(0).normal(size=(n, 40))
    made = []

    def counting(g, shape, index, scattered=indexing._scattered):
        made.append(shape)
        return scattered(g, shape, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spmd.autodiff.indexing._scattered", counting)
        gradient = spmd.grad(lambda x: sum(np.sum(x[i] * x[i - 1]) for i in range(1, n)))(x)
    want = np.zeros_like(x)
    want[1:] += x[:-1]
    want[:-1] += x[1:]
    np.testing.assert_allclose(gradient, want)
    assert len(made) == 1


def test_an_array_that_a_rule_keeps_is_not_written_into():
    keep = np.ones((100, 100))

    @spmd.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, g: (keep,))
    x = np.zeros((100, 100))
    gradient = spmd.grad(lambda x: np.sum(f(x)) + np.sum(f(x) * 2.0) + np.sum(x[1:]) + np.sum(x * 3.0))(x)
    assert np.all(keep == 1)
    assert gradient[0, 0] == 5
    assert gradient[1, 0] == 6


# Operators write into temporaries

C = np.array([0.5, -1.0, 2.0])
HELD: dict = {}


def keep(x):
    HELD["x"] = x
    return x


EXPRESSIONS = {
    "a sum of products": lambda x: x * C + x,
    "on both sides": lambda x: x * C - x * 2.0 + (C - x) * (x + 1.0) / (x * x + 1.0),
    "numbers": lambda x: 1.0 - (2.0 * x + 1.0) / 3.0,
    "a variable used again": lambda x: (lambda y: (y + 1.0) * y - y)(x * C),
    "a named expression": lambda x: (y := x * C) + 1.0 + y,
    "an entry of a list": lambda x: (lambda ys: ys[0] + 1.0 + ys[0])([x * C]),
    "an attribute": lambda x: keep(x * C) + 1.0 + HELD["x"],
    "kept by the tape": lambda x: (np.exp(x) + 1.0) * np.tanh(x * C) - np.sqrt(x * x + 1.0) * 2.0,
    "a factor of what is differentiated": lambda x: (x + 1.0) * (x - 1.0) / (x + 3.0),
    "a view": lambda x: (x * C)[::-1] + 1.0,
    "what the view is of": lambda x: (lambda y: y[::-1] + (y + 1.0))(x * C),
    "broadcasting": lambda x: (x + 1.0)[None] * np.ones((2, 1)) + (x * C),
    "another dtype": lambda x: (x * C) + (1 + 0j) * np.ones(3),
    "sum": lambda x: sum([x * C, x, x * 2.0]) + sum(x * k for k in (1.0, 2.0)),
    "reduce": lambda x: functools.reduce(lambda a, b: a + b * a, [x * C, x, x * 2.0]),
    "reduce an operator": lambda x: functools.reduce(operator.add, [x * C, x, x * 2.0]),
    "accumulate": lambda x: sum(itertools.accumulate([x * C, x + 0.0, x * 2.0])),
    "map": lambda x: sum(map(operator.mul, [x * C, x + 1.0], [x - 1.0, x * C])),
    "a conditional": lambda x: (x * C if np.sum(C) > 0 else x) + 1.0,
    "a generator": lambda x: sum(y + 1.0 for y in (x * k for k in (1.0, 2.0))),
    "a function": lambda x: (lambda y: y * C)(x) + (lambda y: y)(x) + 1.0,
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_operators_on_temporaries(name, monkeypatch):
    f, x = EXPRESSIONS[name], np.array([0.3, -0.7, 1.1])
    plain = f(x)
    want, before = spmd.jacrev(lambda x: np.real(f(x)))(x), x.copy()
    monkeypatch.setattr(backward, "INPLACE_MIN", -1)
    y, _ = spmd.vjp(f, x)
    np.testing.assert_array_equal(y, plain)
    np.testing.assert_array_equal(spmd.jacrev(lambda x: np.real(f(x)))(x), want)
    np.testing.assert_allclose(spmd.hvp(lambda x: np.sum(np.real(f(x))), (x,), (C,))[0], hvp_of(f, x, C))
    with spmd.Mesh(w=2):
        np.testing.assert_array_equal(spmd.map(f, in_specs=spmd.P(), out_specs=spmd.P())(x).numpy(), plain)
    for a, b in ((x, before), (C, np.array([0.5, -1.0, 2.0]))):
        np.testing.assert_array_equal(a, b)


def hvp_of(f, x, v):
    """By the gradient, where no operator writes into anything."""
    large, backward.INPLACE_MIN = backward.INPLACE_MIN, 1 << 60
    try:
        return spmd.grad(lambda x: np.sum(spmd.grad(lambda x: np.sum(np.real(f(x))))(x) * v))(x)
    finally:
        backward.INPLACE_MIN = large


def test_a_temporary_is_written_into():
    if not array_methods._TEMPORARY:
        pytest.skip("this Python does not tell temporaries from variables")
    x, sizes = np.ones(20_000), []

    def f(x):
        y = x + 1.0 - 2.0 + 3.0 - 4.0  # one array, not four
        sizes.append(tracemalloc.get_traced_memory()[1] / x.nbytes)
        return np.sum(y)

    tracemalloc.start()
    try:
        assert spmd.grad(f)(x).tolist() == [1.0] * 20_000
    finally:
        tracemalloc.stop()
    assert sizes[0] < 1.5


def test_a_temporary_that_is_used_again_says_so():
    """Only code in C can hold one without Python knowing: an array of objects."""
    if not array_methods._TEMPORARY:
        pytest.skip("this Python does not tell temporaries from variables")

    def f(x):
        held = np.empty(1, object)
        held[0] = x * 1.0
        held + 1.0
        return np.sum((held + 1.0)[0])

    with pytest.raises(StateError, match="assign it to a variable"):
        spmd.grad(f)(np.ones(20_000))


@pytest.mark.full
@pytest.mark.parametrize(
    "files", ["test_rules.py test_rules_linalg.py", "test_sampler.py test_states.py test_custom.py"]
)
def test_in_place_at_every_size(files):
    """Other tests, with all that is done in place for large arrays done for small ones."""
    tests = [str(ROOT / "tests" / name) for name in files.split()]
    ended = run_python("-m", "pytest", "-q", "-p", "in_place", *tests, timeout=1200, PYTHONPATH=str(ROOT / "tests"))
    assert ended.returncode == 0, str(ended)
