"""`spmd.fft` against NumPy on the whole array: values and cotangents, of every layout."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from functions.layer_cases import FRONTENDS, check_layer, check_tensors, random_layout, random_mesh

import spmd
from spmd import P
from spmd.fourier.lines import lines_of
from spmd.fourier.plan import fourier_plan
from spmd.layout import Layout

SINGLE = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
SEVERAL = ("fftn", "ifftn", "rfftn", "irfftn", "fft2", "ifft2", "rfft2", "irfft2")
close = partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11)


def layout_by(mesh: spmd.Mesh, spec: P | Layout, shape: tuple[int, ...]) -> Layout:
    return spec if isinstance(spec, Layout) else mesh.layout(shape, spec)


def normal(rng: np.random.Generator, shape: tuple[int, ...], is_complex: bool) -> np.ndarray:
    a = rng.standard_normal(shape)
    return a + 1j * rng.standard_normal(shape) if is_complex else a


def random_call(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[str, tuple, dict]:
    """A function, its arguments, and those of them that NumPy does not have."""
    ndim, norm = len(shape), rng.choice([None, "ortho", "forward"])
    norm = None if norm is None else str(norm)
    if rng.random() < 0.4 or ndim == 1:
        length = None if rng.random() < 0.5 else int(rng.integers(1, 8))
        return str(rng.choice(SINGLE)), (length, int(rng.integers(-ndim, ndim)), norm), {}
    name = str(rng.choice(SEVERAL))
    count = 2 if name.endswith("2") else int(rng.integers(1, ndim + 1))
    axes = tuple(rng.permutation(ndim)[:count].tolist())
    if rng.random() < 0.3:
        ratio = tuple(float(rng.choice([1, 1.5, 2])) for _ in axes)
        if name[0] == "i":
            return name, (None, axes, norm), {"padding": ratio}
    lengths = None if rng.random() < 0.5 else tuple(int(n) for n in rng.integers(1, 8, count))
    return name, (lengths, axes, norm), {}


def check(seed: int, torch: bool) -> None:
    rng = np.random.default_rng(seed)
    mesh = random_mesh(rng)
    shape = tuple(int(n) for n in rng.integers(2, 7, rng.integers(1, 5)))
    name, args, more = random_call(rng, shape)
    dims = args[1] if isinstance(args[1], tuple) else (args[1] % len(shape),)
    shape = tuple(n if d in dims or rng.random() < 0.9 else 0 for d, n in enumerate(shape))
    x = normal(rng, shape, name[:2] not in ("rf", "ih"))
    spec = random_layout(rng, shape, mesh)
    function = getattr(spmd.fft, name)
    value, pull = spmd.vjp(lambda x: function(x, *args, **more), x)
    if not more:
        close(value, getattr(np.fft, name)(x, *args))
    g = normal(rng, value.shape, value.dtype.kind == "c")
    out_spec = random_layout(rng, value.shape, mesh) if rng.random() < 0.5 else None
    out = out_spec
    if out is None:
        lengths = args[0] if args[0] is None or isinstance(args[0], tuple) else (args[0],)
        lines = lines_of("test", name.rstrip("2n"), shape, lengths, dims, more.get("padding"))
        out = fourier_plan(layout_by(mesh, spec, shape), lines).out

    def fun(x):
        return function(x, *args, **more, spec=spec, out_spec=out_spec)

    def in_global(x):
        return function(x, *args, **more, out_spec=out_spec)

    expected = value, pull(g)
    check_layer(fun, expected, (x,), (spec,), out, mesh, g, compare=close, in_global=in_global)
    if torch:
        conjugated = tuple(np.conj(c) for c in pull(np.conj(g)))
        check_tensors(fun, (value, conjugated), (x,), (spec,), out, mesh, g, close)


@FRONTENDS
@pytest.mark.parametrize("seed", range(40))
def test_any_layouts(seed, torch):
    check(seed, torch)


@pytest.mark.full
@FRONTENDS
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_many_layouts(seed, torch):
    check(seed, torch)
