"""`functions.resize` on whole arrays against torch, and on arrays that lie anyhow against the whole."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from launch import PROGRAMS, each_mpi, launch
from mpi_programs import resampling

import spmd
from functions.layer_cases import FRONTENDS, check_layer, integers, random_layout, random_mesh
from spmd import P, functions
from spmd.kernels.taps import RESIZE_METHODS
from spmd.layout import Layout

# Whole arrays

MODES = {
    "nearest": ("nearest",) * 3,
    "nearest-exact": ("nearest-exact",) * 3,
    "area": ("area",) * 3,
    "linear": ("linear", "bilinear", "trilinear"),
    "cubic": (None, "bicubic", None),
}
SCALES = [1, 2, 0.5, 1.5, 1.02, 0.31, 2.37, 1.73, (1.5, 0.71, 2)]
"""Without those by which outputs lie between two entries but for rounding: there torch's nearest ones differ, by the
number of dimensions and from their own derivatives."""


def theirs(x, method: str, options: dict[str, Any], align_corners: bool, antialias: bool):
    import torch

    mode = MODES[method][x.ndim - 3]
    more = {"align_corners": align_corners, "antialias": antialias} if method in ("linear", "cubic") else {}
    return torch.nn.functional.interpolate(x, mode=mode, **options, **more)


def cases(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    dims = len(shape) - 2
    sizes = [{"size": size} for size in (1, 5, 24, (7, 2, 9)[:dims])]
    scales = [{"scale_factor": s[:dims] if isinstance(s, tuple) else s} for s in SCALES]
    return [*sizes, *scales, *({**s, "recompute_scale_factor": True} for s in scales)]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("method", "shape"),
    [(m, s) for m in RESIZE_METHODS for s in [(2, 3, 17), (2, 1, 13, 17), (1, 2, 5, 7, 6)] if MODES[m][len(s) - 3]],
)
def test_whole_arrays_are_torchs(method, shape):
    import torch

    from spmd.bridge import torch as spt

    x = np.random.default_rng(0).standard_normal(shape)
    for options in cases(shape):
        for corners, antialias in ((False, False), (True, False), (False, True)):
            if (corners or antialias) and method not in ("linear", "cubic"):
                continue
            if antialias and len(shape) != 4:
                continue
            if (method in ("nearest", "cubic") or antialias) and options == {"scale_factor": 1.02}:
                continue  # where the length stays, torch copies in one direction and moves in the other
            data = torch.tensor(x, requires_grad=True)
            expected = theirs(data, method, options, corners, antialias)
            g = np.random.default_rng(1).standard_normal(expected.shape)
            (gradient,) = torch.autograd.grad(expected, data, torch.tensor(g))
            cubic = -0.5 if antialias else -0.75
            more = {"method": method, "align_corners": corners, "antialias": antialias, "cubic": cubic}
            fun = lambda x, options=options, more=more: functions.resize(x, **options, **more)
            value, pullback = spmd.vjp(fun, x)
            np.testing.assert_allclose(value, expected.detach(), atol=2e-14, rtol=1e-13)
            np.testing.assert_allclose(pullback(g)[0], gradient, atol=2e-13, rtol=1e-13)
            ours = spt.functions.resize(data, **options, **more)
            np.testing.assert_allclose(ours.detach(), expected.detach(), atol=2e-14, rtol=1e-13)
            np.testing.assert_allclose(torch.autograd.grad(ours, data, torch.tensor(g))[0], gradient, atol=2e-13)
            single = theirs(data.detach().float(), method, {"size": expected.shape[2:]}, corners, antialias)
            ours = spt.functions.resize(data.detach().float(), size=expected.shape[2:], **more)
            np.testing.assert_allclose(ours, single, atol=1e-5, rtol=1e-5)


@pytest.mark.torch
def test_tensors_of_half_precision_and_complex_ones():
    import torch

    from spmd.bridge.torch import functions

    x = torch.randn(1, 2, 8, 7, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        y = functions.resize(x.to(dtype), scale_factor=2, method="cubic")
        assert y.dtype == dtype
        wide = functions.resize(x.to(dtype).double(), scale_factor=2, method="cubic")
        torch.testing.assert_close(y.double(), wide, atol=2e-2, rtol=1e-2)
    z = functions.resize(torch.complex(x, x.flip(-1)), size=(5, 9))
    torch.testing.assert_close(z.imag, functions.resize(x.flip(-1), size=(5, 9)))
    torch.autograd.gradgradcheck(lambda x: functions.resize(x, size=(3, 9)) ** 2, x.requires_grad_())


# Blocks


def random_options(rng: np.random.Generator, x: np.ndarray) -> dict[str, Any]:
    method = str(rng.choice(RESIZE_METHODS))
    options: dict[str, Any] = {"method": method, "cubic": float(rng.choice([-0.5, -0.75]))}
    if method in ("linear", "cubic"):
        options[str(rng.choice(["align_corners", "antialias"]))] = bool(rng.random() < 0.5)
    longer = lambda n: int(rng.integers(0, 12)) if n else 0
    kind = rng.choice(["shape", "size", "scale_factor"]) if x.ndim > 2 else "shape"
    if kind == "shape":
        return {**options, "shape": tuple(longer(n) if rng.random() < 0.7 else n for n in x.shape)}
    if kind == "size":
        return {**options, "size": tuple(longer(n) for n in x.shape[2:])}
    scales = rng.choice([0.3, 0.5, 0.9, 1, 1.1, 1.5, 2, 2.3], x.ndim - 2).tolist()
    return {**options, "scale_factor": scales, "recompute_scale_factor": bool(rng.random() < 0.3)}


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def check(seed: int, torch: bool) -> None:
    rng = np.random.default_rng(seed)
    mesh = random_mesh(rng)
    x = integers(rng, rng.integers(0, 9, rng.integers(1, 5)).tolist())
    options = random_options(rng, x)
    value, pullback = spmd.vjp(lambda x: functions.resize(x, **options), x)
    g = integers(rng, value.shape)
    spec = random_layout(rng, x.shape, mesh)
    lies = spec if isinstance(spec, Layout) else mesh.layout(x.shape, spec)
    stays = [n == m for n, m in zip(x.shape, value.shape, strict=True)]
    if "scale_factor" in options:  # taps move, even where the length stays
        stays[2:] = [False] * (x.ndim - 2)
    out_spec = random_layout(rng, value.shape, mesh) if rng.random() < 0.6 or not all(stays) else None
    out = out_spec or lies
    if out_spec is None and not isinstance(out, P):
        out = lies

    def fun(x):
        return functions.resize(x, **options, spec=spec, out_spec=out_spec)

    def in_global(x):
        return functions.resize(x, **options, out_spec=out_spec)

    expected = value, pullback(g)
    check_layer(fun, expected, (x,), (spec,), out, mesh, g, compare=close, in_global=in_global, torch=torch)


@FRONTENDS
@pytest.mark.parametrize("seed", range(25))
def test_any_layouts(seed, torch):
    check(seed, torch)


@pytest.mark.full
@FRONTENDS
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_many_layouts(seed, torch):
    check(seed, torch)


# The table of another library, for scale factors and for the sizes that they give

PARTITIONS = {
    "1d": ((1, 1, 5), (3, 4, 17)),
    "2d": ((1, 1, 3, 4), (3, 4, 13, 17)),
    "3d": ((1, 1, 2, 3, 3), (3, 4, 7, 13, 17)),
    "batch 0": ((1, 1, 2, 2), (0, 2, 5, 4)),
    "batch and channels": ((2, 2, 1, 2), (3, 3, 5, 4)),
    "shorter than the mesh": ((1, 1, 8), (1, 2, 3)),
}


@pytest.mark.torch
@pytest.mark.parametrize("on_some", [False, True], ids=["spec", "grid"])
@pytest.mark.parametrize("by", ["size", "scale_factor"])
@pytest.mark.parametrize("scale", [1, 2, 1.5, 0.5])
@pytest.mark.parametrize("name", PARTITIONS)
def test_tensors_in_blocks_are_torchs(name, scale, by, on_some):
    import torch

    from spmd.bridge import torch as spt

    parts, shape = PARTITIONS[name]
    size = tuple(int(n * scale) for n in shape[2:])
    options = {"size": size} if by == "size" else {"scale_factor": scale}
    if on_some:
        mesh = spmd.Mesh(w=int(np.prod(parts)) + 1)
        spec = Layout.grid(shape, parts, mesh.axes, range(mesh.size - 1, 0, -1))
        out = Layout.grid((*shape[:2], *size), parts, mesh.axes, range(mesh.size - 1, 0, -1))
    else:
        names = "abcde"[: len(parts)]
        mesh, spec = spmd.Mesh(**dict(zip(names, parts, strict=True))), P(*names)
        out = spec
    x = torch.tensor(np.random.default_rng(0).standard_normal(shape), requires_grad=True)
    for method, corners in (("nearest", False), ("linear", True), ("linear", False)):
        expected = theirs(x, method, options, corners, False)
        g = torch.tensor(np.random.default_rng(1).standard_normal(expected.shape))
        (gradient,) = torch.autograd.grad(expected, x, g)
        body = partial(spt.functions.resize, method=method, align_corners=corners, **options, spec=spec)
        y = spt.map(body, in_specs=spec, out_specs=out, mesh=mesh)(x)
        close(y.detach(), expected.detach())
        close(torch.autograd.grad(y, x, g)[0], gradient)


# Under mpiexec


@each_mpi
def test_processes_give_the_bits_of_virtual_workers(python):
    ended = launch(PROGRAMS / "resampling.py", python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert json.loads(ended.stdout) == resampling.results(transport="local", scheduler="threads")
