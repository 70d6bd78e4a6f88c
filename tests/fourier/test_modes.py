"""Padded transforms against sums over waves, frequencies and shifts against NumPy, and mistakes."""

from __future__ import annotations

import numpy as np
import pytest
from functions.layer_cases import FRONTENDS, check_layer, integers, random_layout, random_mesh

import spmd
from spmd import P
from spmd.errors import LayoutError, MeshError


def waves(points: int, fine: int) -> np.ndarray:
    """The waves of a grid of so many points, at the points of a finer grid: a column for each mode. That of the highest
    frequency of an even number is a cosine."""
    k, j = np.fft.fftfreq(points, 1 / points), np.arange(fine)[:, None]
    matrix = np.exp(2j * np.pi * j * k / fine)
    if points % 2 == 0 and fine > points:
        matrix[:, points // 2] = matrix[:, points // 2].real
    return matrix


NORMS = {None: 1, "ortho": 0.5, "forward": 0}


@pytest.mark.parametrize(("points", "fine"), [(4, 6), (5, 7), (6, 9), (7, 10), (2, 3), (1, 1)])
@pytest.mark.parametrize("norm", NORMS)
def test_padded_modes_are_the_function_on_a_finer_grid(points, fine, norm):
    rng = np.random.default_rng(points)
    f = rng.standard_normal((3, points)) + 1j * rng.standard_normal((3, points))
    u = spmd.fft.ifft(f, axis=1, norm=norm, padding=1.5)
    np.testing.assert_allclose(u, f @ waves(points, fine).T / points ** NORMS[norm], atol=1e-12)
    np.testing.assert_allclose(spmd.fft.fft(u, axis=1, norm=norm, padding=1.5), f, atol=1e-12)
    v = rng.standard_normal((3, fine))
    g = spmd.fft.fft(v, axis=1, norm=norm, padding=1.5)
    matrix = np.conj(waves(points, fine))
    if points % 2 == 0 and fine > points:
        matrix[:, points // 2] *= 2
    np.testing.assert_allclose(g, v @ matrix * (points ** NORMS[norm] / fine), atol=1e-12)
    half = spmd.fft.rfft(v, axis=1, norm=norm, padding=1.5)
    np.testing.assert_allclose(half, g[:, : points // 2 + 1], atol=1e-12)
    again = spmd.fft.irfft(half, points, 1, norm, padding=1.5)
    np.testing.assert_allclose(again, spmd.fft.ifft(g, axis=1, norm=norm, padding=1.5).real, atol=1e-12)


def test_a_padded_product_has_no_aliasing_errors():
    """The product of two waves of frequency 2 on five points is one of frequency 4, which they do not have."""
    f = np.zeros((5, 5))
    f[2, 0] = 5.0 * 5.0
    u = spmd.fft.ifftn(f, padding=1.5)
    assert u.shape == (7, 7)
    np.testing.assert_allclose(spmd.fft.fftn(u * u, padding=1.5), 0, atol=1e-12)
    assert abs(np.fft.fftn(np.fft.ifftn(f) ** 2)).max() > 1


@pytest.mark.parametrize("padding", [1.5, (2, 1), 1])
def test_derivatives_of_padded_transforms(padding):
    x = np.random.default_rng(0).standard_normal((6, 6))
    spmd.check_grads(lambda x: spmd.fft.rfftn(x, padding=padding), (x,))
    spmd.check_grads(lambda x: spmd.fft.irfftn(x + 1j * x**2, padding=padding), (x,))
    spmd.check_grads(lambda x: spmd.fft.fftn(x * (1 + 2j), padding=padding), (x,))


@pytest.mark.parametrize("dtype", ["f4", "c8", "f8", "i4"])
@pytest.mark.parametrize("name", ["fftn", "rfft", "irfft", "hfft"])
def test_dtypes(dtype, name):
    x, mesh = np.ones((4, 6)).astype(dtype), spmd.Mesh(x=2)
    if name == "rfft" and dtype == "c8":
        return
    want = getattr(np.fft, name)(x).dtype
    for y in (
        getattr(spmd.fft, name)(x),
        getattr(spmd.fft, name)(spmd.put(x, P(None, "x"), mesh)),
        getattr(spmd.fft, name)(spmd.put(x[:, :4], P("x"), spmd.Mesh(x=8))),
    ):
        assert y.dtype == want


@pytest.mark.parametrize("scipy", [True, False])
def test_without_scipy(scipy, monkeypatch):
    if not scipy:
        monkeypatch.setattr("spmd.fourier.local._scipys", dict)
    x = np.random.default_rng(0).standard_normal((6, 5))
    np.testing.assert_allclose(spmd.fft.rfftn(x, (3, 8), (0, 1)), np.fft.rfftn(x, (3, 8), (0, 1)), atol=1e-12)
    np.testing.assert_allclose(spmd.grad(lambda x: np.sum(abs(spmd.fft.fft2(x)) ** 2))(x), 2 * 30 * x, atol=1e-9)


@pytest.mark.parametrize("n", [1, 6, 7])
@pytest.mark.parametrize("half", [False, True])
def test_frequencies(n, half):
    name = "rfftfreq" if half else "fftfreq"
    whole, mesh = getattr(np.fft, name)(n, 0.3), spmd.Mesh(x=2, y=2)
    np.testing.assert_allclose(getattr(spmd.fft, name)(n, 0.3), whole)
    for spec in (P("x"), P(("x", "y")), spmd.Layout.grid(whole.shape, (2,), mesh.axes, [3, 1])):
        body = mesh.map(lambda spec=spec: getattr(spmd.fft, name)(n, 0.3, spec=spec), (), spec)
        np.testing.assert_allclose(body().numpy(), whole)
        with mesh:
            np.testing.assert_allclose(getattr(spmd.fft, name)(n, 0.3, spec=spec).numpy(), whole)


@FRONTENDS
@pytest.mark.parametrize("seed", range(15))
def test_shifts(seed, torch):
    rng = np.random.default_rng(seed)
    mesh = random_mesh(rng)
    shape = tuple(int(n) for n in rng.integers(0, 8, rng.integers(1, 4)))
    name = ("fftshift", "ifftshift")[seed % 2]
    axes = (
        None if rng.random() < 0.3 else tuple(rng.permutation(len(shape))[: rng.integers(1, len(shape) + 1)].tolist())
    )
    x, g = integers(rng, shape), integers(rng, shape)
    spec = random_layout(rng, shape, mesh)
    out_spec = random_layout(rng, shape, mesh) if rng.random() < 0.4 else None
    function, back = getattr(spmd.fft, name), getattr(np.fft, ("ifftshift", "fftshift")[seed % 2])
    expected = getattr(np.fft, name)(x, axes), (back(g, axes),)

    def fun(x):
        return function(x, axes, spec=spec, out_spec=out_spec)

    def in_global(x):
        return function(x, axes, out_spec=out_spec)

    check_layer(fun, expected, (x,), (spec,), out_spec or spec, mesh, g, in_global=in_global, torch=torch)


@pytest.mark.torch
def test_tensors_that_nothing_splits():
    import torch

    x = torch.randn(3, 0, 4)
    assert spmd.fft.rfft(x).shape == (3, 0, 3)
    assert spmd.fft.irfft(x * 1j).shape == (3, 0, 6)
    y = torch.randn(3, 6)
    assert torch.allclose(spmd.fft.fftn(y), torch.fft.fftn(y))


def test_a_plan_without_a_mesh():
    with pytest.raises(MeshError, match="the mesh whose axes the spec names"):
        spmd.fft.plan((4, 4), P("x"))


def test_an_array_of_one_dimension_that_is_too_large_to_be_gathered(monkeypatch):
    monkeypatch.setenv("SPMD_GATHER_LIMIT", "0")
    x = spmd.put(np.ones(8), P("x"), spmd.Mesh(x=2))
    for function in (spmd.fft.fft, np.fft.fft):
        with pytest.raises(LayoutError, match=r"np\.reshape\(x, \(m, n\)\) and two transforms"):
            function(x)
