"""`functions.max_pool` and `avg_pool` on arrays that lie anyhow, against the reference kernels on the whole."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import spmd
from functions.layer_cases import FRONTENDS, check_layer, integers, random_layout, random_mesh
from spmd import P, functions
from spmd.functions.window_arguments import paddings
from spmd.kernels import reference
from spmd.kernels.windows import windows
from spmd.layout import Layout


class Pooling(NamedTuple):
    """The arguments of a pooling."""

    window: tuple[int, ...]
    stride: tuple[int, ...] | None
    padding: Any
    dilation: tuple[int, ...]
    ceil_mode: bool

    def resolved(self, space: tuple[int, ...]) -> tuple:
        """The window as kernels take it."""
        stride = self.stride or self.window
        return (
            self.window,
            stride,
            paddings("test", self.padding, space, self.window, stride, self.dilation),
            self.dilation,
        )


def random_pooling(rng: np.random.Generator, dims: int) -> Pooling:
    window, stride, dilation = (tuple(rng.integers(1, most, dims).tolist()) for most in (4, 4, 3))
    padding: Any = tuple(map(tuple, rng.integers(0, 3, (dims, 2)).tolist()))
    if rng.random() < 0.2:
        padding = rng.choice(["SAME", "SAME_LOWER", "VALID"])
    if rng.random() < 0.5:
        dilation = (1,) * dims
    return Pooling(window, None if rng.random() < 0.3 else stride, padding, dilation, bool(rng.random() < 0.4))


def random_array(rng: np.random.Generator) -> np.ndarray:
    dims = int(rng.integers(1, 4))
    return integers(rng, (*rng.integers(0, 4, 2).tolist(), *rng.integers(0, (10, 8, 5)[dims - 1], dims).tolist()))


def laid(how: P | Layout | None, natural: Layout, mesh: spmd.Mesh) -> Layout:
    return natural if how is None else how if isinstance(how, Layout) else mesh.layout(natural.shape, how)


def natural_layout(spec: P | Layout, x: np.ndarray, mesh: spmd.Mesh, shape: tuple[int, ...]) -> Layout:
    """The layout of x, with balanced blocks of space."""
    given = spec if isinstance(spec, Layout) else mesh.layout(x.shape, spec)
    cuts = [*given.cuts[:2], *[None] * (x.ndim - 2)]
    if given.spec is not None:
        return Layout(shape, given.spec, mesh.axes, cuts)
    return Layout.grid(shape, [len(c) for c in given.cuts], mesh.axes, given.workers, cuts)


def check_max(seed: int, torch: bool) -> None:
    rng = np.random.default_rng(seed)
    mesh, x = random_mesh(rng), random_array(rng)
    options = random_pooling(rng, x.ndim - 2)
    resolved = options.resolved(x.shape[2:])
    top, index = reference.max_pool(x, *resolved, options.ceil_mode)
    g = integers(rng, top.shape)
    spec = random_layout(rng, x.shape, mesh)
    out_spec = random_layout(rng, top.shape, mesh) if rng.random() < 0.5 else None
    out = laid(out_spec, natural_layout(spec, x, mesh, top.shape), mesh)

    def fun(x):
        return functions.max_pool(x, *options, spec=spec, out_spec=out_spec)

    def in_global(x):
        return functions.max_pool(x, *options, out_spec=out_spec)

    expected = top, (reference.max_pool_vjp(g, index, x.shape[2:], *resolved),)
    check_layer(fun, expected, (x,), (spec,), out, mesh, g, in_global=in_global, torch=torch)
    both = lambda x: functions.max_pool(x, *options, return_indices=True, spec=spec, out_spec=out_spec)
    library, data = spmd, x
    if torch:
        from torch import tensor

        from spmd.bridge import torch as library

        data = tensor(x)
    values, indices = library.map(both, in_specs=spec, out_specs=(out, out), mesh=mesh)(data)
    np.testing.assert_array_equal(np.asarray(values), top)
    np.testing.assert_array_equal(np.asarray(indices), index)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)


def check_mean(seed: int, torch: bool) -> None:
    rng = np.random.default_rng(seed)
    mesh, x = random_mesh(rng), random_array(rng)
    options = random_pooling(rng, x.ndim - 2)
    count = bool(rng.random() < 0.5)
    divisor = int(rng.integers(1, 9)) if rng.random() < 0.3 else None
    resolved = options.resolved(x.shape[2:])
    value = reference.avg_pool(x, *resolved, options.ceil_mode, count)
    factor = np.ones(())
    if divisor is not None:
        for w in windows(x.shape[2:], *resolved, options.ceil_mode):
            factor = factor[..., None] * w.counts(count) / (divisor if factor.ndim == 0 else 1)
    g = integers(rng, value.shape)
    spec = random_layout(rng, x.shape, mesh)
    out_spec = random_layout(rng, value.shape, mesh) if rng.random() < 0.5 else None
    out = laid(out_spec, natural_layout(spec, x, mesh, value.shape), mesh)

    def fun(x):
        return functions.avg_pool(x, *options, count, divisor, spec=spec, out_spec=out_spec)

    def in_global(x):
        return functions.avg_pool(x, *options, count, divisor, out_spec=out_spec)

    gradient = reference.avg_pool_vjp(g * factor, x.shape[2:], *resolved, options.ceil_mode, count)
    expected = value * factor, (gradient,)
    check_layer(fun, expected, (x,), (spec,), out, mesh, g, in_global=in_global, torch=torch, compare=close)


@FRONTENDS
@pytest.mark.parametrize("check", [check_max, check_mean])
@pytest.mark.parametrize("seed", range(15))
def test_any_layouts(seed, check, torch):
    check(seed, torch)


@pytest.mark.full
@FRONTENDS
@pytest.mark.parametrize("check", [check_max, check_mean])
@pytest.mark.parametrize("seed", range(1000, 1500))
def test_many_layouts(seed, check, torch):
    check(seed, torch)
