"""Transforms are adjoint to their derivatives, and these are the transposed matrices."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.layout import Layout

MESH = spmd.Mesh(x=3, y=2)
SPLITS = {
    "slabs": P("x"),
    "columns": P("x", "y"),
    "uneven": Layout((5, 4, 6), P("x"), MESH.axes, [(3, 0, 2), None, None]),
    "some workers": Layout.grid((5, 4, 6), (2, 1, 2), MESH.axes, [4, 0, 3, 1]),
}
CALLS = {
    "fftn": ({}, complex),
    "ifftn": ({"s": (6, 3), "axes": (0, 2)}, complex),
    "rfftn": ({"norm": "ortho"}, float),
    "irfftn": ({"axes": (1, 2, 0)}, complex),
    "irfft2": ({"s": (4, 7)}, complex),
    "hfft": ({"axis": 0}, complex),
    "ihfft": ({"axis": 0, "n": 7}, float),
    "rfft": ({"axis": 0, "padding": 1.25}, float),
    "fft2": ({"axes": (0, 1), "padding": (1.25, 1.5), "s": (4, 3)}, complex),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", CALLS)
def test_dot_test(name, split):
    options, dtype = CALLS[name]
    spec = SPLITS[split]
    body = lambda x: getattr(spmd.fft, name)(x, **options, spec=spec)
    spmd.check_adjoint(body, (5, 4, 6), mesh=MESH, in_specs=spec, dtype=dtype, trials=1)


@pytest.mark.parametrize("split", ["slabs", "some workers"])
@pytest.mark.parametrize("n", [4, 5, None])
@pytest.mark.parametrize("name", ["fft", "rfft", "irfft", "hfft", "ihfft"])
def test_the_adjoint_is_the_transposed_matrix(name, n, split):
    """The cotangent of x is the sum over k of g[k] times the derivative of y[k], by columns that NumPy gives. Of a real
    x it is the real part of that; of a real y, in the real and in the imaginary part of x."""
    is_complex, length = name not in ("rfft", "ihfft"), 6
    rng = np.random.default_rng(0)
    x = rng.standard_normal((length, 2)) + (1j * rng.standard_normal((length, 2)) if is_complex else 0)
    function = lambda x: getattr(np.fft, name)(x, n, 0)
    y = function(x)
    g = rng.standard_normal(y.shape) + (1j * rng.standard_normal(y.shape) if y.dtype.kind == "c" else 0)
    matrix = function(np.eye(length)).T  # entry j, k: what unit j gives in k
    want = matrix @ g
    if name in ("irfft", "hfft"):
        want = want - 1j * (function(1j * np.eye(length)).T @ g)
    elif not is_complex:
        want = want.real
    spec = P("x") if split == "slabs" else Layout.grid(x.shape, (3, 1), MESH.axes, [5, 0, 2])
    body = MESH.map(lambda x: getattr(spmd.fft, name)(x, n, 0, spec=spec, out_spec=P()), spec, P())
    (have,) = spmd.vjp(body, x)[1](g)
    np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-12)
