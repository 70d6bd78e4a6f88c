"""Jacobians and Hessians: their trees, complex numbers, integers, and what they refuse."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from spmd.autodiff import grad, hessian, hvp, jacfwd, jacrev, jvp, tree
from spmd.errors import DifferentiationError

X = np.array([0.5, -1.0, 2.0])
Z = X + 1j * X[::-1]
P = {"a": X, "b": [np.array(2.0), np.arange(6.0).reshape(2, 3)]}

both = pytest.mark.parametrize("jacobian", [jacrev, jacfwd])


def differences(f, args, h=1e-6):
    """The Jacobian of every result leaf by every argument leaf, by central differences: [result][argument]."""
    leaves, treedef = tree.flatten(args)
    found = []
    for k, x in enumerate(leaves):
        columns = []
        for index in np.ndindex(np.shape(x)):
            ends = []
            for s in (1, -1):
                moved = np.array(x, float)
                moved[index] += s * h
                ends.append(tree.leaves(f(*tree.unflatten(treedef, [*leaves[:k], moved, *leaves[k + 1 :]]))))
            columns.append([(o - u) / (2 * h) for o, u in zip(*ends, strict=True)])
        outs = [np.stack([c[i] for c in columns], -1) for i in range(len(columns[0]))]
        found.append([o.reshape(o.shape[:-1] + np.shape(x)) for o in outs])
    return [[f[i] for f in found] for i in range(len(found[0]))]


def mixed(p, y):
    return {"u": np.sin(p["a"]) * y, "v": (np.sum(p["b"][1] @ p["a"]) * p["b"][0],)}


@both
@pytest.mark.parametrize("argnums", [0, 1, -1, (0, 1), [1, 0], (1,), np.int64(1)], ids=str)
def test_the_tree_of_the_result_times_that_of_the_argument(jacobian, argnums):
    found = jacobian(mixed, argnums)(P, X)
    numbers = [argnums] if hasattr(argnums, "__index__") else argnums
    args = (P, X)
    chosen = tuple(args[n] for n in numbers)

    def part(*xs):
        full = list(args)
        for n, x in zip(numbers, xs, strict=True):
            full[n] = x
        return mixed(*full)

    expected = differences(part, chosen)
    assert set(found) == {"u", "v"}
    assert type(found["v"]) is tuple
    for got, want in ((found["u"], expected[0]), (found["v"][0], expected[1])):
        trees = (got,) if hasattr(argnums, "__index__") else got
        assert tree.structure(trees) == tree.structure(chosen)
        for g, w in zip(tree.leaves(trees), want, strict=True):
            assert g.shape == w.shape
            np.testing.assert_allclose(g, w, atol=1e-8)


@both
def test_no_results_no_arguments_and_aux(jacobian):
    assert jacobian(lambda x: x[:0])(X).shape == (0, 3)
    assert jacobian(lambda x: x * 2)(np.zeros(0)).shape == (0, 0)
    assert jacobian(lambda x: x * 2)(np.zeros((2, 0), "f4")).dtype == "f4"
    found, aux = jacobian(lambda x: (x**2, {"twice": 2 * x}), has_aux=True)(X)
    np.testing.assert_allclose(found, np.diag(2 * X))
    np.testing.assert_array_equal(aux["twice"], 2 * X)
    assert jacobian(lambda x: x * 3.0)(2.0) == 3
    np.testing.assert_array_equal(jacobian(lambda x: X)(X), np.zeros((3, 3)))


@both
def test_keyword_arguments_methods_and_partials(jacobian):
    class Model:
        power = 2

        def __call__(self, x, scale=1.0):
            return scale * x**self.power

        def twice(self, x):
            return 2 * self(x)

    np.testing.assert_allclose(jacobian(Model())(X, scale=3.0), np.diag(6 * X))
    np.testing.assert_allclose(jacobian(Model().twice)(X), np.diag(4 * X))
    np.testing.assert_allclose(jacobian(functools.partial(Model(), scale=2.0))(X), np.diag(4 * X))
    np.testing.assert_allclose(jacobian(np.square)(X), np.diag(2 * X))


def test_hessians_of_trees():
    def f(p, y):
        return np.sum(np.sin(p["a"]) * y**2) * p["b"] ** 2

    p = {"a": X, "b": np.array(2.0)}
    found = hessian(f, (0, 1))(p, X)
    np.testing.assert_allclose(found[0]["a"][0]["a"], np.diag(-np.sin(X) * X**2 * 4))
    np.testing.assert_allclose(found[0]["a"][0]["b"], np.cos(X) * X**2 * 4)
    np.testing.assert_allclose(found[0]["b"][0]["b"], np.sum(np.sin(X) * X**2) * 2)
    np.testing.assert_allclose(found[0]["b"][1], np.sin(X) * 2 * X * 4)
    np.testing.assert_allclose(found[1][0]["b"], np.sin(X) * 2 * X * 4)
    np.testing.assert_allclose(found[1][1], np.diag(np.sin(X) * 2 * 4))
    np.testing.assert_allclose(found[0]["a"][1], np.diag(np.cos(X) * 2 * X * 4))
    vectors, aux = hessian(lambda x: (x**3, {"k": x}), has_aux=True)(X)
    np.testing.assert_allclose(np.einsum("iii->i", vectors), 6 * X)
    assert np.count_nonzero(vectors) == 3
    np.testing.assert_array_equal(aux["k"], X)


def test_jacobians_of_jacobians():
    def f(x):
        return np.sin(x) * np.sum(x * x)

    expected = differences(lambda x: jacrev(f)(x), (X,))[0][0]
    for outer in (jacfwd, jacrev):
        for inner in (jacfwd, jacrev):
            np.testing.assert_allclose(outer(inner(f))(X), expected, atol=1e-8)


# Complex numbers, as in JAX


def test_a_complex_function_of_real_arguments():
    def f(x):
        return np.exp(1j * x) * x

    expected = np.diag(np.exp(1j * X) * (1 + 1j * X))
    np.testing.assert_allclose(jacfwd(f)(X), expected)
    with pytest.raises(DifferentiationError, match=r"jacrev of f: result(.|\n)*a real result(.|\n)*holomorphic=True"):
        jacrev(f)(X)


def test_a_real_function_of_complex_arguments():
    f = lambda z: np.abs(z) ** 2
    np.testing.assert_allclose(jacrev(f)(Z), np.diag(2 * np.conj(Z)))
    with pytest.raises(DifferentiationError, match=r"jacfwd of <lambda>(.|\n)*real arguments(.|\n)*spmd\.jvp"):
        jacfwd(f)(Z)


@both
def test_holomorphic_functions(jacobian):
    np.testing.assert_allclose(jacobian(lambda z: z**3, holomorphic=True)(Z), np.diag(3 * Z**2))
    np.testing.assert_allclose(hessian(lambda z: np.sum(z**3), holomorphic=True)(Z), np.diag(6 * Z), atol=1e-15)
    with pytest.raises(DifferentiationError, match="complex arguments, as holomorphic=True says"):
        jacobian(lambda z: z * 1j, holomorphic=True)(X)
    with pytest.raises(DifferentiationError, match="complex result, as holomorphic=True says"):
        jacobian(lambda z: z.real, holomorphic=True)(Z)


def test_hvp_of_a_function_of_complex_arguments():
    f = lambda z: np.sum(np.abs(z) ** 4 * np.real(z))
    v = Z[::-1] * (1 + 2j)
    h = 1e-6
    expected = (grad(f)(Z + h * v) - grad(f)(Z - h * v)) / (2 * h)
    np.testing.assert_allclose(hvp(f, (Z,), (v,))[0], expected, rtol=1e-7)
    np.testing.assert_allclose(jvp(grad(f), (Z,), (v,))[1], expected, rtol=1e-7)


# Integers, and what is refused


def test_integers():
    n = np.arange(3)
    found = jacrev(lambda x, n: x * n, (0, 1), allow_int=True)(X, n)
    np.testing.assert_array_equal(found[0], np.diag(n))
    np.testing.assert_array_equal(found[1], np.zeros((3, 3)))
    assert found[1].dtype == n.dtype
    for jacobian in (jacrev, jacfwd):
        with pytest.raises(DifferentiationError, match="floating arguments"):
            jacobian(lambda x, n: x * n, (0, 1))(X, n)
    with pytest.raises(DifferentiationError, match="integers have no derivative"):
        jacrev(lambda x: (x, n))(X)
    found = jacfwd(lambda x: (x, n))(X)[1]
    assert found.dtype == n.dtype
    assert not found.any()


@both
def test_argnums_are_checked(jacobian):
    for argnums in (2, -3, (0, 0), (0, -2), 0.5, "x"):
        with pytest.raises(DifferentiationError, match="argument argnums"):
            jacobian(lambda x, y: x * y, argnums)(X, X)


def test_tangents_of_hvp_are_checked():
    with pytest.raises(DifferentiationError, match=r"hvp of <lambda>: argument tangents(.|\n)*primal's shape"):
        hvp(lambda x: np.sum(x**2), (X,), (np.ones(2),))
    with pytest.raises(DifferentiationError, match="structure"):
        hvp(lambda x: np.sum(x**2), (X,), (X, X))
