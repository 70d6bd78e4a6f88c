"""Pooling: the kernels against their references, and the functions over them."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import placed
from kernel_cases import FLOATING, NUMBERS, Family

import spmd
from spmd import P
from spmd.errors import SpecError
from spmd.functions import avg_pool, max_pool
from spmd.kernels import reference
from spmd.kernels.windows import output_length

family = Family("pooling")


def geometry(draw):
    """The spatial shape, and the window: (window, stride, padding, dilation), and ceil_mode."""
    d = draw.integer(1, 3)
    side = (40, 9, 5)[d - 1] if not draw.small else 4
    shape = tuple(draw.integer(0, side) for _ in range(d))
    most = (7, 4, 3)[d - 1]
    window, stride = (tuple(draw.integer(1, most) for _ in range(d)) for _ in range(2))
    if draw.choose(True, False):
        window = stride = (2,) * d
    padding = tuple((draw.integer(0, 2), draw.integer(0, 2)) for _ in range(d))
    return shape, (window, stride, padding, tuple(draw.integer(1, 2) for _ in range(d))), draw.choose(False, True)


def batch(draw):
    return draw.integer(0, 3), draw.integer(1, 2)


def outputs(shape, window, ceil_mode):
    return tuple(output_length(*each, ceil_mode) for each in zip(shape, *window, strict=True))


def entries(draw, shape):
    """With ties, and some entries that are no numbers or have no bounds."""
    x = draw.array(shape)
    kind = draw.choose("plain", "ties", "odd")
    if kind == "ties":
        return np.round(x.astype(np.float64)).astype(x.dtype)
    if kind == "odd":
        odd = draw.rng.choice([np.nan, -np.inf, np.inf], shape).astype(x.dtype)
        return np.where(draw.rng.random(shape) < 0.4, odd, x)
    return x


def winners(draw):
    shape, window, ceil_mode = geometry(draw)
    return entries(draw, (*batch(draw), *shape)), *window, ceil_mode


def gathered(draw):
    x, *window = winners(draw)
    return draw.array(x.shape), reference.max_pool(x.astype(np.float64), *window)[1].astype(np.int32)


def scattered(draw):
    x, *window, ceil_mode = winners(draw)
    index = reference.max_pool(x.astype(np.float64), *window, ceil_mode)[1].astype(np.int32)
    return draw.array(index.shape), index, x.shape[2:], *window


def means(draw):
    shape, window, ceil_mode = geometry(draw)
    return draw.array((*batch(draw), *shape)), *window, ceil_mode, draw.choose(True, False)


def shared(draw):
    shape, window, ceil_mode = geometry(draw)
    g = draw.array((*batch(draw), *outputs(shape, window, ceil_mode)))
    return g, shape, *window, ceil_mode, draw.choose(True, False)


EVERY = (*FLOATING, *NUMBERS[2:])
family.case("max_pool", winners, ulps=0)
family.case("max_pool_gather", gathered, ulps=0)
family.case("max_pool_vjp", scattered, scale=12)
family.case("avg_pool", means, dtypes=EVERY, scale=3)
family.case("avg_pool_vjp", shared, dtypes=EVERY, scale=12)

TestKernels = family.tests()


# Functions


WINDOWS = [
    # spatial shape, window, stride, padding, dilation, ceil_mode
    ((9,), 2, None, 0, 1, False),
    ((9,), 3, 2, 1, 1, True),
    ((8, 7), (2, 3), (2, 1), (1, 1), 1, False),
    ((8, 7), 3, 2, 1, 1, True),
    ((9, 10), (3, 2), (1, 3), (1, 0), (2, 1), True),
    ((5, 6, 7), 2, None, 1, 1, True),
    ((5, 6, 7), (3, 1, 2), (2, 1, 1), 0, (1, 2, 3), False),
]


@pytest.mark.torch
@pytest.mark.parametrize("case", WINDOWS)
def test_max_pool_is_torchs(case):
    import torch

    shape, *options = case
    x = np.round(np.random.default_rng(0).normal(size=(2, 3, *shape)), 1)  # with ties
    their = torch.tensor(x, requires_grad=True)
    fun = getattr(torch.nn.functional, f"max_pool{len(shape)}d")
    top, index = fun(their, *options, return_indices=True)
    actual, at = max_pool(x, *options, return_indices=True)
    np.testing.assert_array_equal(actual, top.detach())
    np.testing.assert_array_equal(at, index)
    top.square().sum().backward()
    np.testing.assert_allclose(spmd.grad(lambda x: np.sum(max_pool(x, *options) ** 2))(x), their.grad)


@pytest.mark.torch
@pytest.mark.parametrize("count_include_pad", [True, False])
@pytest.mark.parametrize("case", [case for case in WINDOWS if case[4] == 1])
def test_avg_pool_is_torchs(case, count_include_pad):
    import torch

    shape, window, stride, padding, _, ceil_mode = case
    x = np.random.default_rng(0).normal(size=(2, 3, *shape))
    their = torch.tensor(x, requires_grad=True)
    fun = getattr(torch.nn.functional, f"avg_pool{len(shape)}d")
    mean = fun(their, window, stride, padding, ceil_mode, count_include_pad)

    def ours(x):
        return avg_pool(x, window, stride, padding, 1, ceil_mode, count_include_pad)

    np.testing.assert_allclose(ours(x), mean.detach())
    mean.square().sum().backward()
    np.testing.assert_allclose(spmd.grad(lambda x: np.sum(ours(x) ** 2))(x), their.grad)


def test_the_first_of_equals_wins_and_a_number_that_is_none():
    x = np.array([1.0, 1, 0, np.nan, np.nan, 5, -np.inf, -np.inf]).reshape(1, 1, 8)
    top, index = max_pool(x, 2, padding=(1,), return_indices=True)
    assert index.ravel().tolist() == [0, 1, 3, 5, 7]
    np.testing.assert_array_equal(top.ravel(), [1, 1, np.nan, 5, -np.inf])
    assert spmd.grad(lambda x: np.sum(max_pool(x, 2)))(x).ravel().tolist() == [1, 0, 0, 1, 1, 0, 1, 0]


def test_windows_of_padding_alone():
    x = np.ones((1, 1, 2))
    top, index = max_pool(x, 1, 1, 1, return_indices=True)
    assert top.ravel().tolist() == [-np.inf, 1, 1, -np.inf]
    assert index.ravel().tolist() == [-1, 0, 1, -1]
    assert avg_pool(x, 1, 1, 1, count_include_pad=False).ravel().tolist() == [0, 1, 1, 0]
    assert spmd.grad(lambda x: np.sum(avg_pool(x, 1, 1, 1)))(x).ravel().tolist() == [1, 1]


def test_words_for_padding():
    x = np.random.default_rng(0).normal(size=(1, 2, 7, 8))
    assert max_pool(x, 3, 2, "SAME").shape == (1, 2, 4, 4)
    np.testing.assert_array_equal(max_pool(x, 3, 2, "same"), max_pool(x, 3, 2, ((1, 1), (0, 1))))
    np.testing.assert_array_equal(avg_pool(x, 3, 2, "SAME_LOWER"), avg_pool(x, 3, 2, ((1, 1), (1, 0))))
    np.testing.assert_array_equal(avg_pool(x, 3, 2, "VALID"), avg_pool(x, 3, 2))


@pytest.mark.parametrize("case", WINDOWS[1::2])
def test_derivatives_to_second_order(case):
    shape, *options = case
    x = np.random.default_rng(0).normal(size=(2, 1, *shape))
    for f in (lambda x: max_pool(x, *options) ** 2, lambda x: avg_pool(x, *options, False) ** 2):
        spmd.check_grads(f, (x,), modes=("fwd", "rev"))
    spmd.check_grads(lambda z: avg_pool(z, *options), (x + 2j * x,))
    assert spmd.grad(lambda x: np.sum(max_pool(x, *options) ** 2))(x.astype("f4")).dtype == np.float32


PLANS = [
    # rows, window, stride, padding, dilation, ceil_mode
    (13, (3, 2), (2, 1), ((1, 1), (0, 1)), (1, 1), False),
    (13, (2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1), True),
    (11, (3, 3), (3, 2), ((1, 1), (1, 0)), (2, 1), True),
    (2, (2, 1), (1, 1), ((1, 1), (0, 0)), (1, 1), False),
]


@pytest.mark.parametrize("pool", [max_pool, avg_pool])
@pytest.mark.parametrize("plan", PLANS)
def test_blocks_with_the_planned_halo_pool_as_the_whole(pool, plan, scheduler):
    rows, window, stride, padding, dilation, ceil_mode = plan
    mesh = spmd.Mesh(rows=4, scheduler=scheduler)
    spec = P(None, None, "rows")
    x = np.random.default_rng(rows).normal(size=(2, 3, rows, 7))
    lies = mesh.layout(x.shape, spec)
    one = (1, 1)
    whole = [*one, *stride], [0, 0, *padding], [*one, *dilation]
    kernel = (None, None, *window)
    plan = spmd.plan_windows(lies, kernel, stride=whole[0], padding=whole[1], dilation=whole[2], ceil=ceil_mode)
    halos, pads = plan.halos, [dim.pads for dim in plan.dims[2:]]

    def local(x):
        # The exchange fetches entries; padding is told to the pooling, for it never wins, and may not count. In ceil
        # mode the planner's padding reaches further than what was asked for.
        x = spmd.halo_exchange(x, spec, halos, "none", sizes=lies.cuts)
        k = spmd.worker_index("rows")
        around = (
            (low, min(high, asked)) for (low, high), (_, asked) in zip((pads[0][k], pads[1][0]), padding, strict=True)
        )
        return pool(x, window, stride, tuple(around), dilation, ceil_mode)

    def serial(x):
        return pool(x, window, stride, padding, dilation, ceil_mode)

    actual = mesh.map(local, in_specs=spec, out_specs=spec)(x)
    assert actual.layout == plan.target
    np.testing.assert_allclose(actual.numpy(), serial(placed(x)), rtol=1e-14)
    energy = mesh.map(lambda x: spmd.sum(np.sin(local(x)), "rows"), in_specs=spec, out_specs=P())
    gradient = spmd.grad(energy)(x)
    np.testing.assert_allclose(np.asarray(gradient), spmd.grad(lambda x: np.sum(np.sin(serial(x))))(x), rtol=1e-12)


def product(x, v):
    """Second derivatives times v."""
    return spmd.grad(lambda x: np.sum(v * spmd.grad(lambda x: np.sum(np.sin(max_pool(x, 2))))(x)))(x)


def test_second_order_in_a_body_on_uneven_blocks(scheduler):
    rng = np.random.default_rng(0)
    for n in (7, 3):  # with empty blocks, too
        x, v = rng.normal(size=(2, n, 2, 4, 6))
        mesh = spmd.Mesh(data=4, scheduler=scheduler)
        actual = mesh.map(product, in_specs=(P("data"), P("data")), out_specs=P("data"))(x, v)
        np.testing.assert_allclose(actual.numpy(), product(x, v))


def test_what_does_not_fit_is_told():
    x = np.zeros((1, 1, 4, 4))
    for call, words in (
        (lambda: max_pool(x, 0), "argument window.*got: +0.*at least 1"),
        (lambda: max_pool(x, (2, 2, 2)), "argument window.*2 spatial dimensions"),
        (lambda: max_pool(x, 2, stride=True), "argument stride.*got: +True"),
        (lambda: avg_pool(x, 2, dilation=1.5), "argument dilation"),
        (lambda: avg_pool(x, 2, padding=-1), "argument padding.*at least 0"),
        (lambda: avg_pool(x, 2, padding="full"), 'argument padding.*"SAME" or "VALID"'),
        (lambda: avg_pool(x, 2, padding=(1, (2, 3, 4))), r"argument padding.*padding=\(\(0, 1\), \(0, 1\)\)"),
        (lambda: avg_pool(x[0, 0], 2), r"argument x.*\(N, C, \*spatial\).*x\[None, None\]"),
        (lambda: max_pool(x.astype(int), 2), "argument x.*floating.*astype"),
    ):
        with pytest.raises(SpecError, match=f"(?s){words}"):
            call()
