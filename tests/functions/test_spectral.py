"""`functions.spectral_conv` on arrays that lie anyhow, against the layer of the whole by NumPy."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import spmd
from functions.layer_cases import FRONTENDS, check_layer, check_tensors, random_layout, random_mesh
from spmd import P, functions
from spmd.functions.spectral import _plan
from spmd.layout import Layout

close = partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11)


def lowest(n: int, m: int) -> list[int]:
    """Where the m lowest frequencies of n points stand."""
    return [*range((m + 1) // 2), *range(n - m // 2, n)]


def reference(x, w):
    """The layer with all modes at once, in plain NumPy."""
    dims, modes = tuple(range(2, x.ndim)), w.shape[2:]
    places = [lowest(n, m) for n, m in zip(x.shape[2:-1], modes[:-1], strict=True)]
    where = np.ix_(*places, range(modes[-1]))
    where = (slice(None), slice(None), *where)
    f = np.fft.rfftn(x, axes=dims)
    full = np.fft.rfftn(0 * x[:, :1], axes=dims) + np.zeros((1, w.shape[1], *[1] * len(dims)))
    full = spmd.at(full)[where].set(np.einsum("ni...,io...->no...", f[where], w))
    return np.fft.irfftn(full, x.shape[2:], axes=dims)


def layout_by(mesh: spmd.Mesh, spec: P | Layout, shape: tuple[int, ...]) -> Layout:
    return spec if isinstance(spec, Layout) else mesh.layout(shape, spec)


def check(seed: int, torch: bool) -> None:
    rng = np.random.default_rng(seed)
    mesh = random_mesh(rng)
    space = tuple(int(n) for n in rng.integers(2, 7, rng.integers(1, 4)))
    modes = tuple(int(rng.integers(1, n + 1)) for n in (*space[:-1], space[-1] // 2 + 1))
    batch, inputs, outputs = (int(n) for n in rng.integers((0, 1, 1), (4, 5, 5)))
    x = rng.standard_normal((batch, inputs, *space))
    w = rng.standard_normal((inputs, outputs, *modes)) + 1j * rng.standard_normal((inputs, outputs, *modes))
    g = rng.standard_normal((batch, outputs, *space))
    spec = random_layout(rng, x.shape, mesh)
    w_spec = random_layout(rng, w.shape, mesh) if rng.random() < 0.7 else P()
    out_spec = random_layout(rng, g.shape, mesh) if rng.random() < 0.5 else None
    out = _plan(layout_by(mesh, spec, x.shape), layout_by(mesh, w_spec, w.shape), None, out_spec).out
    value, pull = spmd.vjp(reference, x, w)
    close(functions.spectral_conv(x, w, modes), value)

    def fun(x, w):
        return functions.spectral_conv(x, w, modes, spec=spec, w_spec=w_spec, out_spec=out_spec)

    def in_global(x, w):
        return functions.spectral_conv(x, w, modes, out_spec=out_spec)

    cotangents = pull(g)
    expected = value, cotangents
    check_layer(fun, expected, (x, w), (spec, w_spec), out, mesh, g, compare=close, in_global=in_global)
    if torch:
        by_torch = value, (cotangents[0], np.conj(cotangents[1]))
        check_tensors(fun, by_torch, (x, w), (spec, w_spec), out, mesh, g, close)


@FRONTENDS
@pytest.mark.parametrize("seed", range(30))
def test_any_layouts(seed, torch):
    check(seed, torch)


@pytest.mark.full
@FRONTENDS
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_many_layouts(seed, torch):
    check(seed, torch)
