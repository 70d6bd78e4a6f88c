"""The backward sweep adds cotangents in place where nobody else holds them, and into nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd
from spmd.autodiff import indexing, tape

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
    large = tape._LARGE
    try:
        for tape._LARGE in (1 << 60, -1, -1):
            out, pull = spmd.vjp(lambda x: run(steps, x), x)
            kept = [o.copy() for o in out]
            found += [pull(tuple(gs))[0], pull(tuple(gs))[0], spmd.grad(lambda x: np.sum(run(steps, x)[1] * gs[1]))(x)]
            for have, want in zip([x, *gs, *out], [*before, *kept], strict=True):
                np.testing.assert_array_equal(have, want)
    finally:
        tape._LARGE = large
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
