"""Convolution: the kernels against their references, and the functions over them against PyTorch and serial results."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import FEW, FLOATING, NUMBERS, Family

import spmd
from spmd import P, functions
from spmd.errors import SpecError
from spmd.kernels import cpu, jit
from spmd.kernels.cpu import correlation
from spmd.kernels.windows import output_length

family = Family("convolution")


def geometry(draw):
    """Shapes of x and w, and the options, such that the padded input is at least as long as the window."""
    dims = draw.integer(1, 3)
    groups = draw.choose(1, 1, 2, 3)
    kernel, stride, dilation, padding, shape = [], [], [], [], []
    for _ in range(dims):
        k, d = draw.integer(1, 3), draw.integer(1, 2)
        low, high = draw.integer(-1, 2), draw.integer(-1, 2)
        kernel.append(k)
        dilation.append(d)
        stride.append(draw.integer(1, 3))
        padding.append((low, high))
        shape.append(draw.integer(1, 3 if draw.small else (90 if dims == 1 else 9)))
    n, c, o = draw.integer(0, 2), groups * draw.integer(1, 3), groups * draw.choose(1, 2, 5, 9)
    options = (tuple(stride), tuple(padding), tuple(dilation))
    return n, c, o, tuple(shape), tuple(kernel), options, groups


def outputs(shape, kernel, options):
    return tuple(map(output_length, shape, kernel, *options))


def conv(draw):
    n, c, o, shape, kernel, options, groups = geometry(draw)
    return draw.array((n, c, *shape)), draw.array((o, c // groups, *kernel)), *options, groups


def conv_input_adjoint(draw):
    n, c, o, shape, kernel, options, groups = geometry(draw)
    g = draw.array((n, o, *outputs(shape, kernel, options)))
    return g, draw.array((o, c // groups, *kernel)), shape, *options, groups


def conv_weight_adjoint(draw):
    n, c, o, shape, kernel, options, groups = geometry(draw)
    g = draw.array((n, o, *outputs(shape, kernel, options)))
    return g, draw.array((n, c, *shape)), kernel, *options, groups


def im2col(draw):
    n, c, _, shape, kernel, options, _ = geometry(draw)
    return draw.array((n, c, *shape)), kernel, *options


def col2im(draw):
    n, c, _, shape, kernel, options, _ = geometry(draw)
    return draw.array((n, c, *kernel, *outputs(shape, kernel, options))), shape, kernel, *options


# Up to 9 * 3 terms of size 9, or as many as there are places.
family.case("conv", conv, dtypes=(*FLOATING, "complex128"), ulps=16, scale=99)
family.case("conv_input_adjoint", conv_input_adjoint, dtypes=(*FLOATING, "complex128"), ulps=16, scale=99)
family.case("conv_weight_adjoint", conv_weight_adjoint, dtypes=(*FLOATING, "complex128"), ulps=16, scale=99)
family.case("im2col", im2col, dtypes=(*FLOATING, *NUMBERS[2:]), ulps=0)
family.case("col2im", col2im, dtypes=(*FLOATING, "complex128"), ulps=8, scale=9)

TestKernels = family.tests()


# The functions


def options_of(draw):
    dims, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    ints = lambda least, most: tuple(draw(st.integers(least, most)) for _ in range(dims))
    shapes = draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 3))
    return shapes, ints(3, 6), ints(1, 3), ints(1, 3), ints(0, 2), ints(1, 2), groups


@pytest.mark.torch
@FEW
@given(data=st.data())
def test_equals_torch(data):
    import torch

    (n, c, o), shape, kernel, stride, padding, dilation, groups = options_of(data.draw)
    if min(map(output_length, shape, kernel, stride, [(p, p) for p in padding], dilation)) < 1:
        return  # which torch refuses
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x, w, b = (rng.normal(size=s) for s in ((n, c, *shape), (o, c // groups, *kernel), o))
    there = getattr(torch.nn.functional, f"conv{len(shape)}d")
    y = there(*map(torch.tensor, (x, w, b)), stride, padding, dilation, groups).numpy()
    np.testing.assert_allclose(functions.conv(x, w, b, stride, padding, dilation, groups), y, atol=1e-12)
    more = tuple(data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    back, b = getattr(torch.nn.functional, f"conv_transpose{len(shape)}d"), rng.normal(size=c)
    expected = back(*map(torch.tensor, (y, w, b)), stride, padding, more, groups, dilation).numpy()
    actual = functions.conv_transpose(y, w, b, stride, padding, more, groups, dilation)
    np.testing.assert_allclose(actual, expected, atol=1e-10)


@FEW
@given(data=st.data())
def test_gradients_to_second_order(data):
    (n, c, o), shape, kernel, stride, padding, dilation, groups = options_of(data.draw)
    rng = np.random.default_rng(0)
    x, w, b = (rng.normal(size=s) for s in ((n, c, *shape), (o, c // groups, *kernel), o))
    spmd.check_grads(lambda x, w, b: functions.conv(x, w, b, stride, padding, dilation, groups), (x, w, b))
    g = rng.normal(size=functions.conv(x, w, b, stride, padding, dilation, groups).shape)
    if 0 not in g.shape:
        spmd.check_grads(lambda g, w: functions.conv_transpose(g, w, None, stride, 0, 0, groups, dilation), (g, w))


@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_strides_may_be_longer_than_kernels_and_arrays(engine):
    # Only what the taps read is dealt out: the residues of these strides are more than memory holds.
    x, w = np.arange(100.0).reshape(1, 1, 10, 10), np.ones((1, 1, 1, 2))
    options = (10**6, 10**6), ((0, 0), (0, 0)), (1, 1), 1
    with jit.off() if engine == "numpy" else contextlib.nullcontext():
        y = cpu.conv(x[:, :, 3:, 4:], w, *options)
        back = cpu.conv_input_adjoint(y, w, (10, 10), *options)
        weights = cpu.conv_weight_adjoint(y, x[:, :, 3:, 4:], (1, 2), *options)
    assert y.tolist() == [[[[34.0 + 35.0]]]]
    assert back[0, 0, 0, :2].tolist() == [69.0, 69.0] == [back.sum() / 2] * 2
    assert weights.tolist() == [[[[69.0 * 34, 69.0 * 35]]]]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_entries_that_are_no_numbers_reach_the_weights_that_met_them_alone(engine):
    rng = np.random.default_rng(0)
    g, x = rng.normal(size=(2, 3, 5, 38)), rng.normal(size=(2, 2, 7, 40))
    x[0, 1, :, -1], x[1, 1, -1] = np.nan, np.inf  # the last column, the last row
    with jit.off() if engine == "numpy" else contextlib.nullcontext():
        actual = cpu.conv_weight_adjoint(g, x, (3, 3), (1, 1), ((0, 0), (0, 0)), (1, 1), 1)
    bad = np.zeros((3, 2, 3, 3), bool)
    bad[:, 1, :, 2] = bad[:, 1, 2] = True
    np.testing.assert_array_equal(np.isfinite(actual), ~bad)


CUT = {
    # shape, kernel, stride, padding, dilation
    "wide rows": ((9, 150), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    "rows that fill vectors": ((9, 128), (3, 3), (1, 1), ((0, 0), (1, 1)), (1, 1)),
    "rows a little longer than vectors": ((11, 35), (2, 5), (1, 1), ((1, 0), (2, 2)), (2, 1)),
    "short rows": ((40, 7), (3, 2), (1, 1), ((2, 1), (0, 1)), (1, 3)),
    "strides": ((23, 101), (3, 4), (2, 3), ((1, 2), (3, 0)), (1, 2)),
    "cropped": ((12, 90), (3, 3), (1, 1), ((-2, -1), (-1, 1)), (1, 1)),
    "one dimension": ((3001,), (7,), (1,), ((3, 3),), (1,)),
    "three dimensions": ((6, 5, 70), (3, 1, 3), (1, 1, 1), ((1, 1), (0, 0), (1, 1)), (1, 1, 1)),
}


@pytest.mark.parametrize("part", [1, 2000, 1 << 30])
@pytest.mark.parametrize("channels", [(1, 3, 10, 1), (2, 4, 6, 2), (3, 3, 3, 3), (2, 2, 8, 1)], ids=str)
@pytest.mark.parametrize("case", CUT)
def test_however_the_work_is_cut(monkeypatch, case, channels, part):
    """By examples, groups and rows; entries around the arrays, which do not belong to them, are no numbers."""
    monkeypatch.setattr(correlation, "_PART_BYTES", part)
    shape, kernel, *options = CUT[case]
    n, c, o, groups = channels
    rng = np.random.default_rng(0)

    def within(dtype, *lengths):
        around = np.full((*lengths[:-1], lengths[-1] + 40), np.nan, dtype)
        x = around[..., 20 : 20 + lengths[-1]]
        x[...] = rng.integers(-9, 10, lengths)
        return x

    for dtype in ("float32", "float64"):
        x, w = within(dtype, n, c, *shape), within(dtype, o, c // groups, *kernel)
        g = within(dtype, n, o, *outputs(shape, kernel, options))
        compute = lambda x=x, w=w, g=g: (
            cpu.conv(x, w, *options, groups),
            cpu.conv_input_adjoint(g, w, shape, *options, groups),
            cpu.conv_weight_adjoint(g, x, kernel, *options, groups),
            cpu.conv_weight_adjoint(np.ascontiguousarray(g), x, kernel, *options, groups),
        )
        actual = compute()
        with jit.off():
            monkeypatch.setattr(correlation, "_PART_BYTES", 1 << 30)
            expected = compute()
            monkeypatch.setattr(correlation, "_PART_BYTES", part)
        for y, z in zip(actual, expected, strict=True):  # sums of small integers: exact
            np.testing.assert_array_equal(y, z)


@pytest.mark.parametrize("padding", ["SAME", "VALID", 1, (2, 0), ((1, 0), (0, 2))])
def test_paddings_are_those_of_a_padded_array(padding):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3, 6, 7)), rng.normal(size=(4, 3, 3, 2))
    pairs = {"SAME": ((1, 1), (0, 1)), "VALID": ((0, 0),) * 2, 1: ((1, 1),) * 2, (2, 0): ((2, 2), (0, 0))}
    wide = np.pad(x, ((0, 0), (0, 0), *pairs.get(padding, padding)))
    np.testing.assert_allclose(functions.conv(x, w, padding=padding), functions.conv(wide, w), atol=1e-12)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_over_blocks_with_halos(scheduler, workers, stride):
    """What docs/how_to/window.md says of windows, with this convolution: 11 rows on up to five workers."""
    rng = np.random.default_rng(workers)
    x, w, b = rng.normal(size=(2, 3, 11, 8)), rng.normal(size=(4, 3, 3, 3)), rng.normal(size=4)
    g = rng.normal(size=functions.conv(x, w, b, stride, 1).shape)
    mesh, spec = spmd.Mesh(x=workers, scheduler=scheduler), P(None, None, "x")
    window = spmd.plan_window(11, kernel=3, stride=stride, padding=1, inputs=workers)

    def local(x, w, b, g):
        h = spmd.halo_exchange(
            x, spec, widths=(0, 0, window.widths), boundary=("none", "none", "zero"), sizes=(None, None, window.inputs)
        )
        y = functions.conv(h, w, b, stride, padding=(0, 1))
        return spmd.psum(np.sum(y * g), "x")

    loss = mesh.map(local, in_specs=(spec, P(), P(), spec), out_specs=P())
    value, grads = spmd.value_and_grad(loss, (0, 1, 2))(x, w, b, g)
    serial = lambda x, w, b: np.sum(functions.conv(x, w, b, stride, 1) * g)
    expected, exact = spmd.value_and_grad(serial, (0, 1, 2))(x, w, b)
    np.testing.assert_allclose(float(value), expected, rtol=1e-12)
    for actual, of_all in zip(grads, exact, strict=True):
        np.testing.assert_allclose(np.asarray(actual), of_all, atol=1e-11)


x, w = np.ones((2, 4, 6, 6)), np.ones((3, 4, 3, 3))
ERRORS = {
    "w of other channels": (lambda: functions.conv(x, w[:, :2]), "groups=2"),
    "w of other dimensions": (lambda: functions.conv(x, w[..., 0]), "2 dimensions"),
    "no batch": (lambda: functions.conv(x[0, 0], w), r"x\[np.newaxis\]"),
    "integers": (lambda: functions.conv(x.astype(int), w), r"x.astype\(float\)"),
    "groups": (lambda: functions.conv(x, w[:, :2], groups=2), "a divisor"),
    "stride": (lambda: functions.conv(x, w, stride=0), "argument stride"),
    "padding": (lambda: functions.conv(x, w, padding="EQUAL"), "argument padding"),
    "bias": (lambda: functions.conv(x, w, np.ones(4)), r"shape \[3\]"),
    "filters": (lambda: functions.conv_transpose(x, w), r"w of shape \[4, 4, 3, 3\]"),
    "output padding": (lambda: functions.conv_transpose(x[:, :3], w, output_padding=1), "less than the stride"),
    "words": (lambda: functions.conv_transpose(x[:, :3], w, padding="SAME"), "padding=0"),
    "cropped away": (lambda: functions.conv_transpose(x[:, :3], w, padding=9), "smaller padding"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_is_needed(case):
    call, words = ERRORS[case]
    with pytest.raises(SpecError, match=words):
        call()


def test_paddings_may_be_lists():
    x, w = np.ones((1, 2, 5, 5)), np.ones((2, 2, 3, 3))
    for stride in (1, 2):
        ends = [[1, 1], [0, 2]]
        y = cpu.conv(x, w, (stride,) * 2, ends, (1, 1), 1)
        assert np.array_equal(y, cpu.conv(x, w, (stride,) * 2, tuple(map(tuple, ends)), (1, 1), 1))
        assert cpu.conv_input_adjoint(y, w, (5, 5), (stride,) * 2, ends, (1, 1), 1).shape == x.shape
        assert cpu.conv_weight_adjoint(y, x, (3, 3), (stride,) * 2, ends, (1, 1), 1).shape == w.shape
