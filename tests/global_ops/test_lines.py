"""Functions of lines and of matrices work where these are whole: no worker gathers an array of other dimensions too."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from global_cases import bare, outcome

import spmd
from spmd import P

_draw = np.random.default_rng(2)
STACK = _draw.normal(size=(5, 4, 4))
TABLE = _draw.normal(size=(7, 6))
INDICES = np.argsort(_draw.normal(size=(7, 6)), axis=-1)
FUNCTIONS = {
    "linalg.matmul": (STACK, lambda x: np.linalg.matmul(x, x)),
    "linalg.matrix_transpose": (STACK, lambda x: np.linalg.matrix_transpose(x)),
    "linalg.diagonal": (STACK, lambda x: np.linalg.diagonal(x, offset=1)),
    "linalg.trace": (STACK, lambda x: np.linalg.trace(x, offset=-1)),
    "diagonal": (STACK, lambda x: np.diagonal(x, 1, 0, 2)),
    "trace": (STACK, lambda x: np.trace(x, axis1=2, axis2=1)),
    "linalg.matrix_norm": (STACK, lambda x: np.linalg.matrix_norm(x, ord="nuc", keepdims=True)),
    "linalg.solve": (STACK, lambda x: np.linalg.solve(x, np.cos(x)[..., :3])),
    "tril": (STACK, lambda x: np.tril(x, -1)),
    "triu": (TABLE, lambda x: np.triu(x, 2)),
    "broadcast_arrays": (TABLE, lambda x: np.broadcast_arrays(x, x[:1])[1]),
    "meshgrid": (TABLE, lambda x: np.meshgrid(x[:, 0], x[0], indexing="ij")[0]),
    "meshgrid sparse": (TABLE, lambda x: np.meshgrid(x[:, 0], x[0], sparse=True)[0]),
    "take": (TABLE, lambda x: np.take(x, [3, 0, -1], axis=-1)),
    "take of all": (TABLE, lambda x: np.take(x, [[3, 0], [-1, 8]])),
    "take_along_axis": (TABLE, lambda x: np.take_along_axis(x, INDICES[:, :2], axis=1)),
    "take_along_axis of a sort": (TABLE, lambda x: np.take_along_axis(x, np.argsort(x, axis=0), axis=0)),
    "fftn": (TABLE, lambda x: np.abs(np.fft.fftn(x, norm="ortho"))),
    "fft2": (STACK, lambda x: np.real(np.fft.fft2(x, s=(3, 5)))),
    "ifftn": (STACK, lambda x: np.imag(np.fft.ifftn(x, axes=(0, 2)))),
    "rfftn": (STACK, lambda x: np.real(np.fft.rfftn(x, s=(-1, 6), axes=(1, 0)))),
    "irfftn": (STACK, lambda x: np.fft.irfftn(x * (1 + 2j))),
    "irfft2": (STACK, lambda x: np.fft.irfft2(x, s=(4, 7))),
    "fftshift": (TABLE, lambda x: np.fft.fftshift(x)),
    "ifftshift": (TABLE, lambda x: np.fft.ifftshift(x, axes=(1, -2))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("sides", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}])
def test_values_and_gradients(name, sides):
    a, function = FUNCTIONS[name]
    number = lambda x: (function(x) ** 3).sum()
    want, slope = function(a), spmd.grad(number)(a)
    with spmd.Mesh(**sides) as mesh:
        n = len(a) // 2
        lengths = [n + 1, *[0] * (sides["x"] - 2), len(a) - n - 1]
        parts = np.split(a, np.cumsum(lengths)[:-1])
        blocks = [parts[k // (mesh.size // sides["x"])] for k in range(mesh.size)]
        for x in (
            spmd.put(a, P("x")),
            spmd.put(a, P(*sides)),
            spmd.put(a, P(None, "x")),
            spmd.from_blocks(blocks, P("x")),
        ):
            np.testing.assert_allclose(bare(function(x)), want, rtol=1e-12, atol=1e-12)
            gradient = spmd.grad(number)(x)
            assert gradient.layout == x.layout
            np.testing.assert_allclose(bare(gradient), slope, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "take of all"])
def test_arrays_that_may_not_be_gathered(name, monkeypatch):
    monkeypatch.setenv("SPMD_GATHER_LIMIT", "0")
    a, function = FUNCTIONS[name]
    with spmd.Mesh(x=2, y=2):
        np.testing.assert_allclose(bare(function(spmd.put(a, P("x", "y")))), function(a), rtol=1e-12, atol=1e-12)


def test_indices_of_a_global_array():
    with spmd.Mesh(x=3):
        x, k = spmd.put(TABLE, P("x")), spmd.put(np.array([[5, 0], [-1, 2]]), P(None, "x"))
        np.testing.assert_array_equal(np.take(x, k, axis=1).numpy(), TABLE[:, k.numpy()])
        assert np.take(x, k, axis=1).spec == P("x", None, None)
        with pytest.raises(IndexError):
            np.take(x, k + 4, axis=1)


def test_dtypes_of_results_that_are_named():
    wrong = []
    for kind, dtype in itertools.product(("?", "i1", "u8", "f4", "c8"), ("u1", "i2", "f4", "c16")):
        a = np.full((4, 3), 2).astype(kind)
        for name, options in itertools.product(("sum", "prod", "mean", "var", "std"), ({}, {"axis": 0})):
            of = lambda x: getattr(np, name)(x, dtype=np.dtype(dtype), **options)  # noqa: B023
            want, expected = outcome(of, a)
            with spmd.Mesh(x=3):
                have, error = outcome(lambda: bare(of(spmd.put(a, P("x")))))  # noqa: B023
            if (error is None) != (expected is None):
                wrong.append(f"{name} of {kind} in {dtype}: {error!r}, NumPy: {expected!r}")
            elif error is None and (have.dtype != want.dtype or not np.array_equal(have, want)):
                wrong.append(f"{name} of {kind} in {dtype}: {have!r}, not {want!r}")
    assert not wrong, "\n".join(wrong)


def test_a_dimension_that_is_not_there():
    with spmd.Mesh(x=2):
        x = spmd.put(TABLE, P("x"))
        with pytest.raises(IndexError, match="from -3 to 2"):
            np.expand_dims(x, 3)
