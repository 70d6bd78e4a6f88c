"""`functions.max_pool`, `avg_pool` and `adaptive_max_pool` on arrays that lie anyhow, against serial references."""

from __future__ import annotations

from functools import partial
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


def adaptive_reference(x: np.ndarray, sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The maxima of adaptive windows, and their flat indices."""
    space = x.shape[2:]
    top, index = np.zeros((*x.shape[:2], *sizes)), np.zeros((*x.shape[:2], *sizes), int)
    places = np.arange(np.prod(space, dtype=int)).reshape(space)
    for at in np.ndindex(*sizes):
        box = tuple(slice(o * n // m, -(-(o + 1) * n // m)) for o, n, m in zip(at, space, sizes, strict=True))
        part = x[(slice(None), slice(None), *box)].reshape(*x.shape[:2], places[box].size)
        chosen = part.argmax(-1)
        top[(..., *at)] = np.take_along_axis(part, chosen[..., None], -1)[..., 0]
        index[(..., *at)] = places[box].ravel()[chosen]
    return top, index


def check_adaptive_max(seed: int, torch: bool) -> None:
    rng = np.random.default_rng(seed)
    mesh, dims = random_mesh(rng), int(rng.integers(1, 4))
    x = integers(rng, (*rng.integers(0, 4, 2).tolist(), *rng.integers(1, (10, 8, 5)[dims - 1], dims).tolist()))
    sizes = [None if rng.random() < 0.2 else int(rng.integers(0, 7)) for _ in range(dims)]
    results = tuple(n if m is None else m for m, n in zip(sizes, x.shape[2:], strict=True))
    top, index = adaptive_reference(x, results)
    g = integers(rng, top.shape)
    spec = random_layout(rng, x.shape, mesh)
    out_spec = random_layout(rng, top.shape, mesh) if rng.random() < 0.5 else None
    out = laid(out_spec, natural_layout(spec, x, mesh, top.shape), mesh)
    gradient = np.zeros((*x.shape[:2], int(np.prod(x.shape[2:]))))
    for at in np.ndindex(*top.shape):
        gradient[(*at[:2], index[at])] += g[at]

    def fun(x, indices=False):
        return functions.adaptive_max_pool(x, sizes, indices, spec=spec, out_spec=out_spec)

    def in_global(x):
        return functions.adaptive_max_pool(x, sizes, out_spec=out_spec)

    expected = top, (gradient.reshape(x.shape),)
    check_layer(fun, expected, (x,), (spec,), out, mesh, g, in_global=in_global, torch=torch)
    run = spmd.map(lambda x: fun(x, True), in_specs=spec, out_specs=(out, out), mesh=mesh)
    for found, wanted in zip(run(x), (top, index), strict=True):
        np.testing.assert_array_equal(np.asarray(found), wanted)


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
@pytest.mark.parametrize("check", [check_max, check_mean, check_adaptive_max])
@pytest.mark.parametrize("seed", range(15))
def test_any_layouts(seed, check, torch):
    check(seed, torch)


@pytest.mark.full
@FRONTENDS
@pytest.mark.parametrize("check", [check_max, check_mean, check_adaptive_max])
@pytest.mark.parametrize("seed", range(1000, 1500))
def test_many_layouts(seed, check, torch):
    check(seed, torch)


# Tables of other libraries: workers along each dimension, shape, window, stride, padding, dilation

TABLE = {
    "stride 1": ((1, 1, 2, 2), (1, 5, 10, 10), (3, 3), (1, 1), (1, 1), (1, 1)),
    "stride 2": ((1, 1, 2, 2), (1, 5, 10, 10), (5, 5), (2, 2), (2, 2), (1, 1)),
    "uneven": ((1, 1, 2, 2), (1, 5, 5, 5), (3, 3), (2, 2), (1, 1), (1, 1)),
    "a stride past the block": ((1, 1, 2, 2), (1, 5, 6, 10), (5, 5), (4, 4), (2, 2), (1, 1)),
    "little padding": ((1, 1, 2, 2), (1, 5, 10, 8), (5, 5), (1, 1), (1, 1), (1, 1)),
    "an even window": ((1, 1, 2, 2), (1, 5, 8, 8), (4, 4), (1, 1), (1, 1), (1, 1)),
    "3d": ((1, 1, 2, 1, 2), (1, 3, 5, 5, 6), (5, 5, 5), (2, 2, 1), (2, 2, 2), (1, 1, 1)),
    "1d": ((1, 1, 4), (1, 3, 15), (3,), (1,), (1,), (1,)),
    "dilation": ((1, 1, 2, 2), (1, 3, 10, 10), (5, 5), (1, 1), (1, 1), (2, 2)),
    "16 workers": ((1, 1, 4, 4), (1, 3, 10, 10), (5, 5), (2, 2), (2, 2), (1, 1)),
    "18 workers": ((1, 1, 3, 3, 2), (1, 2, 20, 17, 15), (5, 4, 3), (3, 1, 2), (1, 1, 1), (3, 3, 1)),
    "a network for images": ((1, 1, 1, 4), (2, 3, 30, 30), (7, 7), (2, 2), (3, 3), (1, 1)),
    "batch 0": ((1, 1, 2, 2), (0, 5, 10, 10), (3, 3), (1, 1), (1, 1), (1, 1)),
    "batch and channels": ((2, 2, 1, 2), (3, 5, 7, 9), (2, 2), (2, 2), (0, 0), (1, 1)),
    "shorter than the mesh": ((1, 1, 8), (2, 3, 5), (2,), (2,), (1,), (1,)),
}


@pytest.mark.torch
@pytest.mark.parametrize("on_some", [False, True], ids=["spec", "grid"])
@pytest.mark.parametrize("ceil_mode", [False, True], ids=["floor", "ceil"])
@pytest.mark.parametrize("name", TABLE)
def test_tensors_in_blocks_are_torchs(name, ceil_mode, on_some):
    import torch

    from spmd.bridge import torch as spt

    parts, shape, window, stride, padding, dilation = TABLE[name]
    names = "abcde"[: len(parts)]
    if on_some:
        mesh = spmd.Mesh(w=int(np.prod(parts)) + 1)
        spec = Layout.grid(shape, parts, mesh.axes, range(mesh.size - 1, 0, -1))
    else:
        mesh, spec = spmd.Mesh(**dict(zip(names, parts, strict=True))), P(*names)
    x = torch.tensor(np.random.default_rng(0).standard_normal(shape), requires_grad=True)
    dims = len(shape) - 2
    taps = {"stride": stride, "padding": padding, "ceil_mode": ceil_mode}
    layers = {"max_pool": {"dilation": dilation}}
    if set(dilation) == {1}:
        layers["avg_pool"] = {"count_include_pad": ceil_mode}
    for layer, more in layers.items():
        expected = getattr(torch.nn.functional, f"{layer}{dims}d")(x, window, **taps, **more)
        g = torch.tensor(np.random.default_rng(1).standard_normal(expected.shape))
        (gradient,) = torch.autograd.grad(expected, x, g)
        blocks = spec if not on_some else natural_layout(spec, x, mesh, tuple(expected.shape))

        body = partial(getattr(spt.functions, layer), window=window, **taps, **more, spec=spec)
        y = spt.map(body, in_specs=spec, out_specs=blocks, mesh=mesh)(x)
        close(y.detach(), expected.detach())
        close(torch.autograd.grad(y, x, g)[0], gradient)


@pytest.mark.torch
def test_whole_tensors_are_torchs():
    """With all options that torch has, in single precision, and to second order."""
    import torch

    from spmd.bridge.torch import functions as ours

    theirs = torch.nn.functional
    rng = np.random.default_rng(0)
    for space in ((9,), (7, 10), (5, 6, 7)):
        dims = len(space)
        x = torch.tensor(rng.standard_normal((2, 3, *space)).astype("f4"))
        for window, stride, padding, ceil in ((2, 2, 0, True), (3, 2, 1, True), (3, 3, 1, False), (2, 3, 1, True)):
            taps = {"stride": stride, "padding": padding, "ceil_mode": ceil}
            top, index = getattr(theirs, f"max_pool{dims}d")(x, window, **taps, return_indices=True)
            for mine, them in zip(ours.max_pool(x, window, **taps, return_indices=True), (top, index), strict=True):
                assert torch.equal(mine, them)
            for count, divisor in ((True, None), (False, None), (True, 5)):
                options = {"count_include_pad": count, "divisor_override": divisor}
                mean = ours.avg_pool(x, window, **taps, **options)
                if dims == 1:
                    del options["divisor_override"]
                if dims == 1 and divisor is not None:
                    expected = theirs.avg_pool2d(
                        x[:, :, None], (1, window), (1, stride), (0, padding), ceil, True, divisor
                    )
                    expected = expected[:, :, 0]
                else:
                    expected = getattr(theirs, f"avg_pool{dims}d")(x, window, **taps, **options)
                torch.testing.assert_close(mean, expected)
    x = torch.tensor(rng.standard_normal((1, 2, 5, 4)), requires_grad=True)
    for fun in (ours.max_pool, ours.avg_pool):
        assert torch.autograd.gradgradcheck(lambda x, fun=fun: fun(x, 2, 1, ((1, 0), (0, 1)), 2) ** 2, x)
    z = torch.complex(x.detach(), x.detach().flip(-1))
    torch.testing.assert_close(ours.avg_pool(z, 2).imag, ours.avg_pool(x.detach().flip(-1), 2))


def test_second_derivatives_on_blocks():
    rng = np.random.default_rng(0)
    mesh = spmd.Mesh(x=3)
    x, v = rng.standard_normal((2, 2, 1, 7, 5))
    spec = P(None, None, "x")
    for fun in (functions.max_pool, functions.avg_pool):

        def product(x, v, where=None, fun=fun):
            """Second derivatives times v, of the sum over all workers."""
            first = spmd.grad(lambda x: np.sum(np.sin(fun(x, 3, 2, 1, spec=where))))
            return spmd.grad(lambda x: np.sum(v * first(x)))(x)

        body = lambda x, v, product=product: product(x, v, spec)
        actual = mesh.map(body, in_specs=(spec, spec), out_specs=spec)(x, v)
        close(actual.numpy(), product(x, v))


def test_blocks_of_batch_and_channels_exchange_nothing():
    mesh, x = spmd.Mesh(b=2, c=2), np.random.default_rng(0).standard_normal((3, 3, 6))
    spec = P("b", "c")
    with spmd.ledger() as log:
        body = lambda x: functions.avg_pool(functions.max_pool(x, 3, 1, spec=spec), 2, spec=spec)
        y = mesh.map(body, in_specs=spec, out_specs=spec)(x)
    assert not log.operators
    close(y.numpy(), functions.avg_pool(functions.max_pool(x, 3, 1), 2))
