"""The functions that take arrays as sets: NumPy's values, and the derivatives of the entries that are taken."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from rules import Table, distinct, full, of, spread

import spmd
from spmd import P
from spmd.autodiff import grad, vjp

TABLE = Table()
row = TABLE.row

row("unique", np.unique, distinct, full)
row("unique-axis", lambda x: np.unique(x, axis=-1), distinct, full)
row("unique-index", lambda x: np.unique(x, True, True, True)[0], distinct, full)
row("unique_values", np.unique_values, distinct, full)
for f in (np.unique_all, np.unique_counts, np.unique_inverse):
    row(f.__name__, lambda x, f=f: f(x)[0], distinct, full)
two = of("3 4", "23 2", "22 12", "0 3", "3 .")
row("union1d", np.union1d, (distinct, spread), two)
row("setdiff1d", np.setdiff1d, (distinct, spread), two)
row("setdiff1d-unique", lambda x, y: np.setdiff1d(x, y, True), (distinct, spread), two)
row("setxor1d", np.setxor1d, (distinct, spread), two)
row("setxor1d-unique", lambda x, y: np.setxor1d(x, y, assume_unique=True), (distinct, spread), of("3 4", "2 0"))

TestRows = TABLE.tests()

TIES = np.array([[2.0, 1, 2], [0, 1, 5]])
NANS = np.array([np.nan, 1, np.nan, 1, -np.inf])


def same(f, *args):
    """f gives the same where its arguments are differentiated."""
    got, expected = vjp(f, *args)[0], f(*args)
    assert type(got) is type(expected)
    for a, b in zip(got, expected, strict=True) if isinstance(expected, tuple) else [(got, expected)]:
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "x", [TIES, NANS, NANS * (1 + 1j), np.array(3.0), np.zeros((0, 2)), TIES.astype("f4")], ids=str
)
def test_values_of_numpy(x):
    for options in itertools.product([False, True], repeat=3):
        same(lambda x, o=options: np.unique(x, *o), x)
        same(lambda x, o=options: np.unique(x, *o, equal_nan=False), x)
        if x.ndim and x.size:
            for axis in range(x.ndim):
                same(lambda x, o=options, axis=axis: np.unique(x, *o, axis=axis), x)
    for f in (np.unique_values, np.unique_all, np.unique_counts, np.unique_inverse):
        same(f, x)
    y = np.array([1.0, 7, np.nan])
    for f in (np.union1d, np.setdiff1d, np.setxor1d):
        same(f, x, y)
        same(lambda x, f=f: f(x, y), x)
        same(lambda x, f=f: f([1.0, 3.0], x), x)


@pytest.mark.skipif("sorted" not in str(__import__("inspect").signature(np.unique)), reason="NumPy has no such option")
def test_unsorted():
    same(lambda x: np.unique(x, sorted=False), TIES * (1 + 1j))
    same(lambda x: np.unique(x, sorted=False, return_counts=True), TIES)


def test_the_first_of_equal_entries_stands_for_all():
    """As in JAX."""
    weights = np.array([1.0, 10, 100, 1000])
    np.testing.assert_array_equal(grad(lambda x: np.unique(x) @ weights)(TIES), [[100, 10, 0], [1, 0, 1000]])
    np.testing.assert_array_equal(
        grad(lambda x: np.unique(x, axis=0)[0] @ weights[:3])(np.array([[1.0, 2, 3], [1, 2, 3]])),
        [[1, 10, 100], [0] * 3],
    )
    g, h = grad(lambda x, y: np.sum(np.union1d(x, y)), (0, 1))(np.array([1.0, 2]), np.array([2.0, 3]))
    assert (g.tolist(), h.tolist()) == ([1, 1], [0, 1])
    g, h = grad(lambda x, y: np.sum(np.setxor1d(x, y)), (0, 1))(np.array([1.0, 2]), np.array([2.0, 3]))
    assert (g.tolist(), h.tolist()) == ([1, 0], [0, 1])


def test_in_bodies():
    x = np.array([1.0, 1, 2, 3])

    def body(x):
        values, counts = np.unique(x, return_counts=True)
        assert values.state is counts.state is x.state
        return spmd.psum(np.sum(values**2 * counts), "d")

    with spmd.Mesh(d=2):
        mapped = spmd.map(body, P("d"), P())
        assert float(mapped(x)) == 15
        np.testing.assert_array_equal(np.asarray(grad(mapped)(x)), [4, 0, 4, 6])
