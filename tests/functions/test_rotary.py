"""`functions.rope` on arrays that lie anyhow, against rotations of complex numbers."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import spmd
from functions.layer_cases import FRONTENDS, check_layer, random_layout, random_mesh
from spmd import Layout, P, functions
from spmd.errors import LayoutError, SpecError
from spmd.functions.rotary import _of_positions

close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)


def turned(x, positions, base, interleaved, sign=1):
    half = x.shape[-1] // 2
    low, high = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    angles = positions[..., None] * base ** (-np.arange(half) * 2 / max(1, x.shape[-1]))
    z = (low + 1j * high) * np.exp(sign * 1j * angles)
    parts = [z.real, z.imag]
    return np.stack(parts, -1).reshape(x.shape) if interleaved else np.concatenate(parts, -1)


def check(seed: int, torch: bool) -> None:
    rng = np.random.default_rng(seed)
    mesh = random_mesh(rng)
    x = rng.normal(size=(*rng.integers(0, 4, rng.integers(0, 3)), rng.integers(0, 9), 2 * rng.integers(0, 4)))
    g, base, interleaved = rng.normal(size=x.shape), float(rng.choice([100, 10000])), bool(rng.random() < 0.5)
    given = rng.random() < 0.5
    positions = rng.integers(0, 50, x.shape[:-1]) if given else np.arange(x.shape[-2])
    whole = [x.ndim - 1] if given else []
    spec = random_layout(rng, x.shape, mesh, whole=whole)
    lies = spec if isinstance(spec, Layout) else mesh.layout(x.shape, spec)
    options = {"base": base, "interleaved": interleaved}
    args, specs = [x], [spec]
    if given:
        args.append(positions)
        specs.append(_of_positions(lies))

    def fun(*args):
        return functions.rope(*args, spec=spec, **options)

    value = turned(x, positions, base, interleaved)
    cotangents = [turned(g, positions, base, interleaved, -1), *[None] * given]

    def in_global(*args):
        return functions.rope(*args, **options)

    expected = value, cotangents
    check_layer(fun, expected, args, specs, spec, mesh, g, compare=close, in_global=in_global, torch=torch)


@FRONTENDS
@pytest.mark.parametrize("seed", range(25))
def test_any_layouts(seed, torch):
    check(seed, torch)


@pytest.mark.full
@FRONTENDS
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_many_layouts(seed, torch):
    check(seed, torch)


@FRONTENDS
def test_on_one_worker(torch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 5, 6)).astype(np.float32)
    give = (lambda a: a) if not torch else __import__("torch").tensor
    for at in (None, rng.integers(0, 9, (2, 1, 5)), rng.integers(0, 9, 5)):
        y = np.asarray(functions.rope(give(x), None if at is None else give(at)))
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, turned(x, np.arange(5) if at is None else at, 1e4, False), rtol=1e-5, atol=1e-6)


def test_scores_depend_on_distances():
    """Products of turned entries depend on how far apart they are."""
    q, k = np.random.default_rng(1).normal(size=(2, 1, 8))
    at = np.arange(6)
    s = functions.rope(np.repeat(q, 6, 0), at) @ functions.rope(np.repeat(k, 6, 0), at).T
    for n in range(-5, 6):
        close(np.diagonal(s, n), np.diagonal(s, n)[0])


def test_errors():
    x = np.ones((3, 4))
    for args, error, argument in [
        ((x[:, :3],), LayoutError, "x"),
        ((x[0],), SpecError, "x"),
        ((x.astype(int),), SpecError, "x"),
        ((x, np.arange(4)), SpecError, "positions"),
        ((x, np.ones(3)), SpecError, "positions"),
    ]:
        with pytest.raises(error, match=rf"spmd\.functions\.rope: argument {argument}"):
            functions.rope(*args)
    with pytest.raises(SpecError, match=r"rope: argument base"):
        functions.rope(x, base=0)
    with pytest.raises(SpecError, match="a global array has its layout"):
        functions.rope(spmd.put(x, P("x"), spmd.Mesh(x=2)), spec=P("x"))
