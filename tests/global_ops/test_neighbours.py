"""Functions along a split dimension that send little: differences, joined arrays, flips, norms."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P

A = np.random.default_rng(0).normal(size=(9, 4))
CUTS = [None, [4, 0, 5], [0, 0, 9], [1, 1, 7]]
FUNCTIONS = {
    "diff": lambda x: np.diff(x, axis=0),
    "diff 3": lambda x: np.diff(x, 3, axis=0),
    "diff of all": lambda x: np.diff(x, 9, axis=0),
    "diff of more": lambda x: np.diff(x, 11, axis=0),
    "diff whole": lambda x: np.diff(x),
    "diff prepend": lambda x: np.diff(x, axis=0, prepend=2.0, append=x[:2]),
    "concatenate": lambda x: np.concatenate([x, x[:5]]),
    "append": lambda x: np.append(x, x[:2], axis=0),
    "append flat": lambda x: np.append(x, [1.0, 2.0]),
    "flip": np.flip,
    "norm": np.linalg.norm,
    "norm 0": lambda x: np.linalg.norm(x, axis=0),
    "norm 1": lambda x: np.linalg.norm(x, axis=1, keepdims=True),
    "norm complex": lambda x: np.linalg.norm(x * (1 + 2j), axis=0),
    "norm float32": lambda x: np.linalg.norm(x.astype("f4"), axis=0).astype(float),
}


def put(a, cuts):
    return spmd.put(a, P("x") if cuts is None else spmd.Layout(a.shape, P("x"), {"x": 3}, [cuts, None]))


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_derivatives(name, cuts):
    f = FUNCTIONS[name]
    number = lambda x: np.sum(np.sin(f(x)))
    slope = lambda x: np.sum(spmd.grad(number)(x) ** 2)
    with spmd.Mesh(x=3):
        u = put(A, cuts)
        have, want = f(u).numpy(), f(A)
        assert (have.dtype, have.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(have, want, rtol=1e-6)
        np.testing.assert_allclose(spmd.grad(number)(u).numpy(), spmd.grad(number)(A), rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(spmd.grad(slope)(u).numpy(), spmd.grad(slope)(A), rtol=1e-4, atol=1e-8)


def test_differences_of_truth():
    with spmd.Mesh(x=3):
        assert np.array_equal(np.diff(put(A > 0, None), axis=0).numpy(), np.diff(A > 0, axis=0))


def test_a_difference_moves_the_entries_that_follow_a_block():
    with spmd.Mesh(x=3):
        u = put(A, None)
        with spmd.ledger() as log:
            assert np.diff(u, 2, axis=0).layout.cuts[0] == (3, 3, 1)
        assert sum(record.bytes for record in log.workers.values()) == 2 * 2 * 4 * 8


@pytest.mark.parametrize("name", ["concatenate", "flip", "append", "diff prepend"])
def test_nothing_is_gathered(name, monkeypatch):
    monkeypatch.setenv("SPMD_GATHER_LIMIT", "0")
    with spmd.Mesh(x=3):
        for cuts in CUTS:
            assert np.array_equal(FUNCTIONS[name](put(A, cuts)).numpy(), FUNCTIONS[name](A))


GATHERED = {
    "x[i]": lambda m: m[np.array([0, 1]), np.array([1, 2])],
    "x.at[i]": lambda m: spmd.at(m)[np.array([0, 1])].set(0.0),
    "np.unique": np.unique,
    "np.searchsorted": lambda m: np.searchsorted(m[:, 0], [0.5]),
    "np.flip": lambda m: np.flip(m[:, 0]),
    "np.linalg.inv": np.linalg.inv,
    "np.linalg.eigh": np.linalg.eigh,
    "np.diagonal": np.diagonal,
}


@pytest.mark.parametrize("name", GATHERED)
def test_what_is_gathered_is_little(name, monkeypatch):
    m = A[:4] @ A[:4].T + np.eye(4)
    with spmd.Mesh(x=3):
        u = put(m, [1, 0, 3])
        for have, want in zip(GATHERED[name](u), GATHERED[name](m), strict=True):
            np.testing.assert_allclose(have.numpy(), want, rtol=1e-9, atol=1e-12)
        monkeypatch.setenv("SPMD_GATHER_LIMIT", "0")
        with pytest.raises(spmd.errors.LayoutError) as caught:
            GATHERED[name](u)
        assert str(caught.value).startswith(f"{name}\n  got:    PartitionedArray float64[4")
        assert "SPMD_GATHER_LIMIT=1 in the environment" in str(caught.value)


def test_a_norm_takes_the_sum_of_an_unreduced_array_once():
    with spmd.Mesh(x=3):
        total = put(A, None).sum(axis=0)
        with spmd.ledger() as log:
            np.testing.assert_allclose(total / np.linalg.norm(total), A.sum(0) / np.linalg.norm(A.sum(0)))
        assert log.operators["Sum"] == 1
        assert log.verbs["all_reduce"] == 1
