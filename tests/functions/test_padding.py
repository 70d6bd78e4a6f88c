"""`functions.pad` on arrays that lie anyhow, against np.pad of the whole."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from functions.layer_cases import FRONTENDS, check_layer, integers, random_layout, random_mesh
from spmd import P, functions
from spmd.layout import Layout

MODES = {"constant": "constant", "reflect": "reflect", "symmetric": "symmetric", "edge": "edge", "wrap": "wrap"}
TORCHS = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def whole(x: np.ndarray, widths, mode: str, value: float = 0) -> np.ndarray:
    x = x[tuple(slice(max(0, -a), n - max(0, -b)) for n, (a, b) in zip(x.shape, widths, strict=True))]
    options = {"constant_values": value} if mode == "constant" else {}
    return np.pad(x, [(max(0, a), max(0, b)) for a, b in widths], mode, **options)


def adjoint(g: np.ndarray, shape: tuple[int, ...], widths, mode: str) -> np.ndarray:
    index = whole(np.arange(1, np.prod(shape, dtype=int) + 1).reshape(shape), widths, mode)
    return np.bincount(index.ravel(), g.ravel(), np.prod(shape, dtype=int) + 1)[1:].reshape(shape)


def random_widths(rng: np.random.Generator, shape: tuple[int, ...], mode: str) -> tuple[tuple[int, int], ...]:
    widths = []
    for n in shape:
        low = int(rng.integers(-n, 2 * n + 3))
        high = int(rng.integers(-(n + min(low, 0)), 2 * n + 3))
        left = n + min(low, 0) + min(high, 0)
        if rng.random() < 0.3:
            low = high = 0
        if left == 0 and mode != "constant":
            low, high = min(low, 0), min(high, 0)
        widths.append((low, high))
    return tuple(widths)


def check(seed: int, torch: bool) -> None:
    rng = np.random.default_rng(seed)
    mesh = random_mesh(rng)
    x = integers(rng, rng.integers(0, 7, rng.integers(1, 4)).tolist())
    mode = str(rng.choice([*MODES]))
    value = float(rng.integers(-2, 3))
    widths = random_widths(rng, x.shape, mode)
    y = whole(x, widths, mode, value)
    g = integers(rng, y.shape)
    spec = random_layout(rng, x.shape, mesh)
    lies = spec if isinstance(spec, Layout) else mesh.layout(x.shape, spec)
    cuts = [cut if pair == (0, 0) else None for cut, pair in zip(lies.cuts, widths, strict=True)]
    out_spec = random_layout(rng, y.shape, mesh) if rng.random() < 0.4 else None
    if out_spec is not None:
        out = out_spec if isinstance(out_spec, Layout) else mesh.layout(y.shape, out_spec)
    elif lies.spec is not None:
        out = Layout(y.shape, lies.spec, mesh.axes, cuts)
    else:
        out = Layout.grid(y.shape, [len(c) for c in lies.cuts], mesh.axes, lies.workers, cuts)

    def fun(x):
        return functions.pad(x, widths, mode, value, spec=spec, out_spec=out_spec)

    def in_global(x):
        return functions.pad(x, widths, mode, value, out_spec=out_spec)

    expected = y, (adjoint(g, x.shape, widths, mode),)
    check_layer(fun, expected, (x,), (spec,), out, mesh, g, in_global=in_global, torch=torch)
    np.testing.assert_array_equal(functions.pad(x, widths, mode, value), y)


@FRONTENDS
@pytest.mark.parametrize("seed", range(25))
def test_any_layouts(seed, torch):
    check(seed, torch)


@pytest.mark.full
@FRONTENDS
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_many_layouts(seed, torch):
    check(seed, torch)


@pytest.mark.torch
@pytest.mark.parametrize("mode", TORCHS)
def test_images_are_torchs(mode):
    import torch

    from spmd.bridge import torch as spt

    x = np.random.default_rng(0).standard_normal((2, 3, 5, 4))
    theirs = torch.nn.functional.pad(torch.tensor(x), (1, 3, 2, 0), TORCHS[mode])
    for name in (mode, TORCHS[mode]):
        for mine in (
            functions.pad(x, ((0, 0), (0, 0), (2, 0), (1, 3)), name),
            functions.pad(x, {-2: (2, 0), 3: (1, 3)}, name),
        ):
            np.testing.assert_array_equal(mine, theirs)
        tensors = spt.functions.pad(torch.tensor(x), {2: (2, 0), 3: (1, 3)}, name)
        np.testing.assert_array_equal(tensors, theirs)


def test_values_and_ways_to_write_widths():
    x = np.arange(6.0).reshape(2, 3)
    for widths in (1, ((1, 1),), ((1, 1), 1), [[1, 1], [1, 1]], np.ones((2, 2), int), {0: 1, 1: (1, 1)}):
        np.testing.assert_array_equal(functions.pad(x, widths, value=7), np.pad(x, 1, constant_values=7))
    np.testing.assert_array_equal(functions.pad(x[0], (1, 2)), np.pad(x[0], (1, 2)))
    assert functions.pad(x.astype("f4"), 1, value=0.5).dtype == np.float32
    assert functions.pad(np.float64(3).reshape(()), ()).shape == ()
    mesh = spmd.Mesh(x=2)
    zeros = [functions.pad(spmd.put(x, P("x"), mesh), {1: 1}, value=v).numpy()[0, 0] for v in (0.0, -0.0)]
    assert np.signbit(zeros).tolist() == [False, True]


def test_what_is_cut_off_moves_nothing():
    """Blocks are cropped where they lie; they are balanced again by one exchange."""
    mesh, x = spmd.Mesh(x=3), np.arange(9.0)
    lies = Layout((6,), P("x"), mesh.axes, [(1, 3, 2)])
    body = lambda x: functions.pad(x, ((-2, -1),), spec=P("x"), shape=(9,), out_spec=lies)
    np.testing.assert_array_equal(mesh.map(body, in_specs=P("x"), out_specs=lies)(x).numpy(), x[2:-1])
