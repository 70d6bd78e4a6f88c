"""Functions of global arrays have NumPy's values, dtypes, shapes and gradients, on every mesh and in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from global_cases import EVERY, MESHES, SHAPES, SPECS, bare, outcome

import spmd
from spmd import P


def layouts(shapes, meshes) -> Iterator[tuple[np.ndarray, Any, spmd.Mesh, str]]:
    for k, shape in enumerate(SHAPES):
        a = np.random.default_rng(k).random(shape)
        for axes in meshes if shape in shapes else ():
            for spec in SPECS:
                if len(spec.dims) <= len(shape):
                    yield a, spec, spmd.Mesh(**axes), f"{shape} by {spec} on {axes}"


def compare_values(function: Callable, shapes, meshes) -> list[str]:
    wrong = []
    for a, spec, mesh, at in layouts(shapes, meshes):
        want, expected = outcome(function, a)
        with mesh:
            have, error = outcome(lambda: bare(function(spmd.put(a, spec))))  # noqa: B023
        if (error is None) != (expected is None):
            wrong.append(f"{at}: {error!r}, NumPy: {expected!r}")
        elif error is None:
            want = np.asarray(want)
            if have.shape != want.shape or have.dtype != want.dtype:
                wrong.append(f"{at}: {have.dtype}{have.shape}, not {want.dtype}{want.shape}")
            elif not np.allclose(have, want, rtol=1e-12, atol=1e-12, equal_nan=True):
                wrong.append(f"{at}: {have} is not {want}")
    return wrong


def weighed(function: Callable) -> Callable:
    """A number that depends on every entry of a function's result."""

    def number(x):
        y = function(x)
        if np.dtype(getattr(y, "dtype", bool)).kind not in "fc":
            return np.sum(x * x)
        weights = np.cos(np.arange(int(np.prod(y.shape)), dtype=float)).reshape(y.shape)
        return np.sum(np.real(y) * weights * np.real(y))

    return number


def compare_gradients(function: Callable, shapes, meshes, order: int = 1) -> list[str]:
    """Against the gradients of the same function of bare arrays."""
    wrong, number = [], weighed(function)
    for a, spec, mesh, at in layouts(shapes, meshes):
        gradient = spmd.grad(number)
        if order == 2:
            v = np.sin(np.arange(a.size, dtype=float)).reshape(a.shape)
            gradient = spmd.grad(lambda x, v=v: np.sum(spmd.grad(number)(x) * v))
        want, expected = outcome(gradient, a)
        if expected is not None:
            continue
        with mesh:
            x = spmd.put(a, spec)
            have, error = outcome(gradient, x)
        if error is not None:
            wrong.append(f"{at}: {error!r}")
        elif have.layout != x.layout:
            wrong.append(f"{at}: a gradient in {have.layout}")
        elif not np.allclose(bare(have), want, rtol=1e-9, atol=1e-9, equal_nan=True):
            wrong.append(f"{at}: {have} is not {want}")
    return wrong


def report(wrong: list[str]) -> None:
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:12])


@pytest.mark.parametrize("name", EVERY)
def test_values(name):
    report(compare_values(EVERY[name], [(7,), (6, 5), (0, 3)], MESHES[2:]))


@pytest.mark.parametrize("name", EVERY)
def test_gradients(name):
    report(compare_gradients(EVERY[name], [(6, 5)], MESHES[3:]))


@pytest.mark.full
@pytest.mark.parametrize("name", EVERY)
def test_values_on_all_meshes(name):
    report(compare_values(EVERY[name], SHAPES, MESHES))


@pytest.mark.full
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", EVERY)
def test_gradients_on_all_meshes(name, order):
    report(compare_gradients(EVERY[name], SHAPES, MESHES, order))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", "complex64", "complex128"])
@pytest.mark.parametrize("spec", [P("x"), P("y", "x"), P(None, ("x", "y"))])
def test_dtypes_are_numpys(dtype, spec):
    a = (np.random.default_rng(0).random((5, 4)) * 9 - 4).astype(dtype)
    functions = "sum prod mean max min any all std var argmax count_nonzero cumsum sort transpose ravel flip".split()
    with spmd.Mesh(x=2, y=2):
        for name in functions:
            want, expected = outcome(getattr(np, name), a)
            have, error = outcome(getattr(np, name), spmd.put(a, spec))
            assert (error is None) == (expected is None), (name, error, expected)
            if error is None:
                assert have.dtype == np.asarray(want).dtype, name
                tolerance = 1e-2 if dtype == "float16" else 1e-5
                np.testing.assert_allclose(bare(have), want, rtol=tolerance, err_msg=name)


def test_uneven_blocks_and_arrays_on_some_workers():
    a = np.random.default_rng(1).random((6, 4))
    with spmd.Mesh(x=3) as mesh:
        uneven = spmd.from_blocks([a[:1], a[1:1], a[1:]], P("x"))
        grid = spmd.put(a, spmd.Layout.grid(a.shape, (2, 1), mesh.axes, [2, 0]))
        for x in uneven, grid, x_of_both(uneven, grid):
            scale = 2 if x is not uneven and x is not grid else 1
            for name, function in EVERY.items():
                want, expected = outcome(function, scale * a)
                have, error = outcome(lambda: bare(function(x)))  # noqa: B023
                assert (error is None) == (expected is None), (name, error)
                if error is None:
                    np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-12, err_msg=name)


def x_of_both(x, y):
    """A sum of operands that lie differently."""
    return x + y


def test_zeros_keep_their_sign_and_nans_stay():
    a = np.array([0.0, -0.0, np.nan, 1.0])
    with spmd.Mesh(x=3):
        x = spmd.put(a, P("x"))
        assert np.signbit([float(x[k]) for k in (0, 1)]).tolist() == [False, True]
        assert np.argmax(x) == 2
        assert np.isnan(x.max())
        assert np.isnan(float(x[2]))


def test_large_arrays_are_not_gathered(monkeypatch):
    monkeypatch.setenv("SPMD_GATHER_LIMIT", "1")
    with spmd.Mesh(x=2):
        x = spmd.put(np.zeros(300_000), P("x"))
        with pytest.raises(spmd.errors.LayoutError, match=r"np\.sort\n.*\n  needed: arrays of at most 1 MiB"):
            np.sort(x)
        assert np.sort(x.reshape(3, -1), axis=0).shape == (3, 100_000)  # of other dimensions there is one


def test_iteration_and_membership():
    a = np.arange(6.0).reshape(3, 2)
    with spmd.Mesh(x=2):
        x = spmd.put(a, P("x"))
        np.testing.assert_equal([row.numpy() for row in x], a)
        assert 5.0 in x
        assert 6.0 not in x
        with pytest.raises(IndexError):
            x[3]
        with pytest.raises(IndexError):
            x[0, 0, 0]
        with pytest.raises(TypeError):
            list(x[0, 0])
