"""Windows on integers alone: what blocks need against the taps counted one by one, and local against serial results."""

from __future__ import annotations

import functools
import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from test_readme import ROOT, blocks, run

import spmd
from spmd import window as module
from spmd import window_nd
from spmd.errors import LayoutError
from spmd.layout import Layout, P, block_sizes
from spmd.window import Taps, Window, plan_needs, plan_transposed, plan_window
from spmd.window_nd import Windows, plan_windows

# Oracles: one output after the other, on the whole array


def taps_of(o: int, kernel: int, stride: int, dilation: int, low: int) -> list[int]:
    """The input indices that output o reads; outside of the array they are padding."""
    return [o * stride - low + j * dilation for j in range(kernel)]


def same(n: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """Padding for ⌈n / stride⌉ outputs: entries are added in turn, at the high end first, until the last one fits."""
    low = high = 0
    while n and n + low + high < (math.ceil(n / stride) - 1) * stride + (kernel - 1) * dilation + 1:
        low, high = (low, high + 1) if low == high else (low + 1, high)
    return low, high


def serial(x: np.ndarray, weights: np.ndarray, stride: int, dilation: int, pad: tuple[int, int]) -> list:
    """The window over x with zeros around it; negative padding crops."""
    low, high = pad
    padded = np.concatenate([np.zeros(max(low, 0), int), x, np.zeros(max(high, 0), int)])
    padded = padded[max(-low, 0) : max(len(padded) - max(-high, 0), 0)]
    found, start = [], 0
    while start + (len(weights) - 1) * dilation < len(padded):
        found.append(sum(w * padded[start + j * dilation] for j, w in enumerate(weights)))
        start += stride
    return found


def around(x: np.ndarray, start: int, stop: int) -> np.ndarray:
    """x[start:stop] with zeros where x has no entries."""
    return np.array([x[i] if 0 <= i < len(x) else 0 for i in range(start, stop)], x.dtype)


def haloed(x: np.ndarray, w: Window, k: int, widths) -> np.ndarray:
    """Block k with its widths: what a halo exchange with zeros around the array gives."""
    (a, b), (low, high) = w.input_bounds[k], widths[k]
    return around(x, a - low, b + high)


# By hand


def test_windows_of_three_and_six_workers():
    assert plan_window(11, 5, padding=2, inputs=3).halos == ((0, 2), (2, 2), (2, 0))
    assert plan_window(11, 5, padding=2, inputs=3).widths == ((2, 2), (2, 2), (2, 2))
    assert plan_window(11, 5, padding=2, inputs=3).pads == ((2, 0), (0, 0), (0, 2))
    halos = ((0, 0), (0, 0), (0, 1), (-1, 2), (-2, 1), (-1, 0))
    assert plan_window(20, 2, stride=2, inputs=6).halos == halos
    assert plan_window(20, 2, stride=2, inputs=6).widths == halos


@pytest.mark.parametrize(
    ("n", "kernel", "more", "outputs", "needs"),
    [
        (10, 3, {}, (4, 4), ((0, 6), (4, 10))),
        (10, 1, {}, (5, 5), ((0, 5), (5, 10))),
        (10, 3, {"dilation": 2}, (3, 3), ((0, 7), (3, 10))),
        (10, 2, {"stride": 3}, (2, 1), ((0, 5), (6, 8))),
        (10, 3, {"padding": (2, 0)}, (5, 5), ((-2, 5), (3, 10))),
        (10, 3, {"padding": "same"}, (5, 5), ((-1, 6), (4, 11))),
        (10, 4, {"padding": "same"}, (5, 5), ((-1, 7), (4, 12))),
        (10, 4, {"padding": "SAME_LOWER"}, (5, 5), ((-2, 6), (3, 11))),
        (10, 3, {"padding": "same", "stride": 2}, (3, 2), ((0, 7), (6, 11))),
        (10, 3, {"padding": "valid", "outputs": (0, 8)}, (0, 8), ((0, 0), (0, 10))),
        (10, 3, {"inputs": (10, 0)}, (4, 4), ((0, 6), (4, 10))),
        (10, 3, {"padding": -2}, (2, 2), ((2, 6), (4, 8))),
        (10, 2, {"padding": 4, "outputs": (2, 15)}, (2, 15), ((-4, -1), (-2, 14))),
        (2, 5, {}, (0, 0), ((0, 0), (1, 1))),
        (0, 2, {}, (0, 0), ((0, 0), (0, 0))),
        (0, 2, {"padding": 1}, (1, 0), ((-1, 1), (0, 0))),
    ],
)
def test_what_two_blocks_need(n, kernel, more, outputs, needs):
    w = plan_window(n, kernel, **{"inputs": 2} | more)
    assert (w.outputs, w.needs) == (outputs, needs)
    assert (w.length, w.output_length) == (n, sum(outputs))


# n, kernel, stride, padding, dilation and the lengths, as computed by torch.nn.functional.max_pool1d with ceil_mode.
@pytest.mark.parametrize(
    ("n", "kernel", "stride", "padding", "dilation", "length"),
    [
        (10, 3, 2, 0, 1, 5),
        (11, 3, 2, 0, 1, 5),
        (10, 2, 3, 0, 1, 4),
        (10, 2, 3, 1, 1, 4),
        (5, 2, 2, 1, 1, 3),
        (6, 2, 2, 1, 1, 4),
        (6, 4, 5, 2, 1, 2),
        (7, 2, 4, 1, 1, 2),
        (8, 3, 4, 1, 2, 3),
        (3, 4, 2, 0, 1, 1),
        (1, 2, 7, 1, 1, 1),
    ],
)
def test_pooling_that_keeps_what_is_left_over(n, kernel, stride, padding, dilation, length):
    w = plan_window(n, kernel, stride=stride, padding=padding, dilation=dilation, ceil=True, inputs=3)
    assert w.output_length == length
    assert w.taps is not None
    assert w.taps.fit(n) == (w.taps, length)


def test_a_window_without_outputs_keeps_its_padding():
    assert plan_window(2, 9, padding=1, ceil=True).taps == Taps(9, low=1, high=1)


def test_a_worker_without_outputs_trims_all_it_has():
    w = plan_window(9, 4, stride=3, inputs=5, outputs=(1, 0, 0, 1, 0))
    assert w.halos == w.widths == ((0, 2), (0, -2), (0, -2), (3, -1), (0, -1))
    assert w.needs[1] == (2, 2)


def test_a_worker_without_inputs_gets_all_it_needs():
    w = plan_window(6, 3, padding=1, inputs=(3, 0, 3), outputs=(2, 2, 2))
    assert w.needs == ((-1, 3), (1, 5), (3, 7))
    assert w.widths == ((1, 0), (2, 2), (0, 1))
    assert w.halos == ((0, 0), (2, 2), (0, 0))


def test_a_stencil_is_a_window():
    w = plan_window(12, 2 + 1 + 1, padding=(2, 1), inputs=3)
    assert w.outputs == w.inputs
    assert w.widths == ((2, 1),) * 3
    assert w.halos == ((0, 1), (2, 1), (2, 0))


# Drawn windows


def cut(total: int, parts: int, marks: list[float] | None) -> tuple[int, ...]:
    """Balanced blocks, or cuts at some fractions of the total; equal marks make blocks of length 0."""
    if marks is None:
        return block_sizes(total, parts)
    at = [0, *sorted(round(m * total) for m in marks[: parts - 1]), total]
    return tuple(b - a for a, b in itertools.pairwise(at))


def marks(parts: int):
    # Few values, so that several cuts often coincide.
    return st.none() | st.lists(st.sampled_from([k / 12 for k in range(13)]), min_size=parts - 1, max_size=parts - 1)


@st.composite
def cases(draw):
    n, parts = draw(st.integers(0, 40)), draw(st.integers(1, 12))
    most = {"kernel": 6, "stride": 5, "dilation": 3}
    geometry = {name: draw(st.integers(1, top)) for name, top in most.items()}
    pads = st.integers(-3, 8)
    padding = draw(st.sampled_from(["same", "valid"]) | pads | st.tuples(pads, pads))
    return n, parts, geometry, padding, draw(marks(parts)), draw(marks(parts)), draw(st.integers(0, 2**32))


def check_window(case) -> None:
    n, parts, geometry, padding, cuts, output_cuts, seed = case
    kernel, stride, dilation = geometry["kernel"], geometry["stride"], geometry["dilation"]
    words = {"same": same(n, kernel, stride, dilation), "valid": (0, 0)}
    pad = words[padding] if isinstance(padding, str) else (padding, padding) if isinstance(padding, int) else padding
    rng = np.random.default_rng(seed)
    x, weights = rng.integers(-9, 10, n), rng.integers(-9, 10, kernel)
    whole = serial(x, weights, stride, dilation, pad)
    sizes = cut(n, parts, cuts)
    outputs = None if output_cuts is None else cut(len(whole), parts, output_cuts)
    w = plan_window(n, **geometry, padding=padding, inputs=sizes, outputs=outputs)

    assert w.inputs == sizes
    assert w.outputs == (block_sizes(len(whole), parts) if outputs is None else outputs)
    if padding == "same":
        assert len(whole) == math.ceil(n / stride)
    results = []
    for k, (first, end) in enumerate(w.output_bounds):
        reads = [i for o in range(first, end) for i in taps_of(o, kernel, stride, dilation, pad[0])]
        start, stop = w.needs[k]
        if not reads:
            assert start == stop == w.input_bounds[k][0]
            assert w.widths[k] == w.halos[k] == (0, -sizes[k])
        else:
            assert (start, stop) == (min(reads), max(reads) + 1)
        block = haloed(x, w, k, w.widths)
        results.append(serial(block, weights, stride, dilation, (0, 0)))
        assert len(results[-1]) == w.outputs[k]
        # Padded by zeros, what is there without them is the same block.
        real = haloed(x, w, k, w.halos)
        assert min(w.pads[k]) >= 0
        assert len(real) == len([i for i in range(start, stop) if 0 <= i < n])
        assert np.array_equal(np.pad(real, w.pads[k]), block)
    assert list(itertools.chain(*results)) == whole


EDGES = [
    (11, 3, {"kernel": 5, "stride": 1, "dilation": 1}, 2, None, None, 0),
    (5, 12, {"kernel": 2, "stride": 1, "dilation": 3}, (8, 0), [0.5] * 11, [0.0] * 11, 1),
    (0, 2, {"kernel": 3, "stride": 2, "dilation": 1}, "same", None, None, 2),
]


def sampled(test, count: int, **how):
    for edge in EDGES:
        test = example(edge)(test)
    return settings(max_examples=count, report_multiple_bugs=False, **how)(given(cases())(test))


def test_local_windows_on_haloed_blocks_are_the_serial_one():
    sampled(check_window, 250)()


@pytest.mark.full
def test_many_local_windows_on_haloed_blocks():
    sampled(check_window, 20_000)()


def check_ceil(n, kernel, stride, dilation, low, high):
    """One more output than fit exactly where entries are left over and it starts before the high padding."""
    w = plan_window(n, kernel, stride=stride, dilation=dilation, padding=(low, high), ceil=True, inputs=3)
    full = len(serial(np.zeros(n), np.ones(kernel), stride, dilation, (low, high)))
    last = [0] if not full else taps_of(full - 1, kernel, stride, dilation, low)
    left = full and last[-1] + 1 < n + high  # something is behind the last output
    extent = (kernel - 1) * dilation + 1
    if not full:
        left = extent - stride < n + low + high
    assert w.output_length == full + bool(left and full * stride < n + low)
    assert max(w.needs)[1] <= max(n + high, n + low + extent)


@settings(max_examples=300)
@given(
    n=st.integers(0, 20),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 6),
    dilation=st.integers(1, 3),
    low=st.integers(0, 4),
    high=st.integers(0, 4),
)
def test_ceil_adds_one_output_at_most(n, kernel, stride, dilation, low, high):
    check_ceil(n, kernel, stride, dilation, low, high)


# Transposed


def spread(y: np.ndarray, weights: np.ndarray, stride: int, dilation: int) -> np.ndarray:
    """Each entry of y times the weights, added at its place: the transposed convolution without padding."""
    found = np.zeros((len(y) - 1) * stride + (len(weights) - 1) * dilation + 1 if len(y) else 0, int)
    for o, value in enumerate(y):
        for j, w in enumerate(weights):
            found[o * stride + j * dilation] += w * value
    return found


@settings(max_examples=150)
@given(case=cases(), more=st.integers(0, 4))
def test_transposed_blocks_added_where_they_belong_are_the_serial_one(case, more):
    n, parts, geometry, padding, cuts, output_cuts, seed = case
    kernel, stride, dilation = geometry["kernel"], geometry["stride"], geometry["dilation"]
    more = 0 if padding == "same" else more % stride
    words = {"same": same(n * stride, kernel, stride, dilation), "valid": (0, 0)}
    low, high = words[padding] if isinstance(padding, str) else np.broadcast_to(padding, 2).tolist()
    rng = np.random.default_rng(seed)
    y, weights = rng.integers(-9, 10, n), rng.integers(-9, 10, kernel)

    full = spread(y, weights, stride, dilation)
    length = n * stride if padding == "same" else max(0, len(full) - low - high + more) if n else 0
    whole = np.array([full[i + low] if 0 <= i + low < len(full) else 0 for i in range(length)], int)

    outputs = None if output_cuts is None else cut(length, parts, output_cuts)
    w = plan_transposed(
        n, **geometry, padding=padding, output_padding=more, inputs=cut(n, parts, cuts), outputs=outputs
    )
    assert w.length == length
    assert w.outputs == cut(n, parts, cuts)
    total = np.zeros(length, int)
    for k, (first, end) in enumerate(w.output_bounds):
        part = spread(y[first:end], weights, stride, dilation)
        start, stop = w.needs[k]
        (a, b), (before, after) = w.input_bounds[k], w.widths[k]
        assert len(part) == stop - start == b - a + before + after
        for i, value in zip(range(start, stop), part, strict=True):
            if 0 <= i < length:
                total[i] += value
    assert np.array_equal(total, whole)


def test_transposed_lengths_by_hand():
    assert plan_transposed(5, 3, stride=2).length == 11
    assert plan_transposed(5, 3, stride=2, padding=1, output_padding=1).length == 10
    assert plan_transposed(5, 3, stride=2, padding="same").length == 10
    assert plan_transposed(5, 2, stride=3, padding="same").length == 15
    assert plan_transposed(0, 3, stride=2).length == 0
    assert plan_transposed(4, 3, stride=2, inputs=3).halos == ((0, 2), (-1, 1), (0, 0))


# Any map


def corners(n: int, m: int):
    """The two inputs between which output o lies where both arrays span one interval; at the ends only one."""

    def needs(o: int) -> tuple[int, int]:
        left = ((2 * o + 1) * n - m) // (2 * m)
        return max(left, 0), min(left + 2, n)

    return needs


def interpolate(x: np.ndarray, at: np.ndarray) -> np.ndarray:
    return np.interp(at, np.arange(len(x)), x)


@settings(max_examples=150)
@given(n=st.integers(1, 40), m=st.integers(0, 60), parts=st.integers(1, 12), data=st.data(), seed=st.integers(0, 2**32))
def test_interpolation_between_any_lengths(n, m, parts, data, seed):
    sizes = cut(n, parts, data.draw(marks(parts)))
    outputs = cut(m, parts, data.draw(marks(parts)))
    needs = corners(n, m)
    w = plan_needs(n, m, needs, inputs=sizes, outputs=outputs)
    x = np.random.default_rng(seed).normal(size=n)
    at = (np.arange(m) + 0.5) * n / m - 0.5 if m else np.zeros(0)
    assert w.taps is None
    assert w.halos == w.widths
    for k, (first, end) in enumerate(w.output_bounds):
        reads = [i for o in range(first, end) for i in range(*needs(o))]
        start, stop = w.needs[k]
        assert (start, stop) == ((min(reads), max(reads) + 1) if reads else (w.input_bounds[k][0],) * 2)
        if reads:
            local = interpolate(haloed(x, w, k, w.widths), at[first:end] - start)
            assert np.allclose(local, interpolate(x, at)[first:end], rtol=0, atol=1e-12)


def test_outputs_that_read_nothing():
    # Every third output reads one entry, the others none.
    needs = lambda o: (-(-o // 3), o // 3 + 1)
    w = plan_needs(4, 10, needs, inputs=(1, 1, 1, 1), outputs=(3, 2, 2, 3))
    assert w.needs == ((0, 1), (1, 2), (2, 3), (3, 4))
    w = plan_needs(4, 10, needs, inputs=4, outputs=(1, 2, 3, 4))
    assert w.needs == ((0, 1), (1, 1), (1, 2), (2, 4))
    assert w.widths == ((0, 0), (0, -1), (1, -1), (1, 0))
    w = plan_needs(4, 10, needs, inputs=(0, 0, 3, 1), outputs=(1, 2, 3, 4))
    assert w.needs == ((0, 1), (0, 0), (1, 2), (2, 4))


def test_a_window_is_one_such_map():
    taps = Taps(3, 2, 2, 1, 4)
    direct = plan_window(17, 3, stride=2, dilation=2, padding=(1, 4), inputs=4)
    mapped = plan_needs(17, direct.output_length, lambda o: (2 * o - 1, 2 * o + 4), inputs=4)
    assert direct.needs == mapped.needs
    assert direct.taps == taps
    assert taps.extent == 5


# Several dimensions

MESH = {"x": 3, "y": 2}


@settings(max_examples=100)
@given(data=st.data())
def test_boxes_of_several_dimensions(data):
    shape = data.draw(st.tuples(*[st.integers(0, 12)] * 3))
    spec = data.draw(st.sampled_from([P("x", "y"), P(("y", "x"), None, None), P(None, "y", "x"), P()]))
    kernel = data.draw(st.tuples(*[st.none() | st.integers(1, 3)] * 3))
    stride = data.draw(st.integers(1, 3) | st.tuples(*[st.integers(1, 3)] * 3))
    padding = data.draw(st.integers(0, 2) | st.just("same") | st.just((1, (2, 0), "same")))
    kind = data.draw(st.sampled_from(["spec", "grid"]))
    source = Layout(shape, spec, MESH)
    if kind == "grid":
        source = Layout.grid(shape, (2, 1, 2), MESH, (5, 3, 0, 2))
    plan = plan_windows(source, kernel, stride=stride, padding=padding)

    assert plan.source == source
    assert plan.target.axes == source.axes
    assert plan.target.copies == source.copies
    for d, w in enumerate(plan.dims):
        if kernel[d] is None:
            expected = plan_window(shape[d], 1, inputs=source.cuts[d], outputs=source.cuts[d])
        else:
            s, p = (a if not isinstance(a, tuple) else a[d] for a in (stride, padding))
            cuts = plan.target.cuts[d]
            expected = plan_window(shape[d], kernel[d], stride=s, padding=p, inputs=source.cuts[d], outputs=cuts)
        assert w == expected
        assert plan.widths[d] == w.widths
        assert plan.halos[d] == w.halos
        assert plan.pads[d] == w.pads
    for worker in range(source.size):
        place = source.positions(worker)
        assert plan.target.positions(worker) == place
        box = None if place is None else tuple(w.needs[k] for w, k in zip(plan.dims, place, strict=True))
        assert plan.needs(worker) == box
    if all(k is not None for k in kernel):
        assert plan.target.balanced


def test_images_with_channels_and_a_layout_of_the_output_as_asked():
    source = Layout((8, 3, 11, 9), P("y", None, "x"), MESH, [(3, 5), None, (4, 4, 3), None])
    plan = plan_windows(source, (None, None, 5, 3), padding=(0, 0, 2, 1))
    assert plan.target == source
    assert plan.halos[2] == ((0, 2), (2, 2), (2, 0))
    assert plan.widths[3] == ((1, 1),)
    assert plan.widths[:2] == (((0, 0), (0, 0)), ((0, 0),))

    target = Layout((8, 3, 11, 9), P("y", None, "x"), MESH, [(3, 5), None, (1, 9, 1), None])
    asked = plan_windows(source, [None, None, 5, 3], padding=[None, None, [2, 2], 1], target=target)
    assert asked.target == target
    assert asked.halos[2] == ((0, -1), (4, 3), (0, 0))
    assert asked == plan_windows(source, (None, None, 5, 3), padding=(0, 0, 2, 1), target=[None, None, (1, 9, 1), None])
    assert asked != plan
    varying = Layout(source.shape, source.spec, MESH, copies="varying")
    assert plan_windows(varying, (None, None, 5, 3)).target.copies == "varying"
    given = plan_windows(
        source, (None, 3, 5, 3), stride=(None, None, 2, None), padding=(2, None, 2, 1), dilation=[None] * 4
    )
    assert [w.taps for w in given.dims] == [Taps(1), Taps(3), Taps(5, 2, 1, 2, 2), Taps(3, 1, 1, 1, 1)]


# On workers: the halos are exchanged


def convolve(x, weights, stride: int, dilation: int):
    """A window in NumPy that the tape can follow: one slice for each tap."""
    count = max(0, (x.shape[0] - (len(weights) - 1) * dilation - 1) // stride + 1)
    return sum(w * x[j * dilation : j * dilation + count * stride : stride] for j, w in enumerate(weights))


MODES = {"zero": "constant", "periodic": "wrap", "reflect": "reflect", "edge": "edge"}


def check_on_workers(case, boundary: str) -> None:
    n, parts, geometry, padding, cuts, output_cuts, seed = case
    kernel, stride, dilation = geometry["kernel"], geometry["stride"], geometry["dilation"]
    count = plan_window(n, **geometry, padding=padding).output_length
    target = None if output_cuts is None else [cut(count, parts, output_cuts)]
    mesh = spmd.Mesh(x=parts)
    even, source = mesh.layout((n,), P("x")), Layout((n,), P("x"), mesh.axes, [cut(n, parts, cuts)])
    plan = plan_windows(source, **geometry, padding=[padding], target=target)
    (w,) = plan.dims
    rng = np.random.default_rng(seed)
    x, y, weights = (rng.integers(-9, 10, length).astype(float) for length in (n, count, kernel))

    def body(x, weights):
        # A map hands out balanced blocks.
        x = spmd.repartition(x, even, source)
        around = spmd.halo_exchange(x, P("x"), plan.widths, boundary, sizes=source.cuts)
        return convolve(around, weights, stride, dilation)

    def whole(x, weights):
        assert w.taps is not None
        low, high = w.taps.low, w.taps.high
        x = np.pad(x, (max(low, 0), max(high, 0)), MODES[boundary])
        return convolve(x[max(-low, 0) : max(x.shape[0] - max(-high, 0), 0)], weights, stride, dilation)

    def inner(x, weights, y):
        return spmd.sum(body(x, weights) * spmd.repartition(y, mesh.layout((count,), P("x")), plan.target), "x")

    result = spmd.map(body, in_specs=(P("x"), P()), out_specs=P("x"), mesh=mesh)(x, weights)
    assert tuple(b.shape[0] for b in result.blocks.values()) == w.outputs
    assert np.array_equal(result.numpy(), whole(x, weights))
    product = spmd.map(inner, in_specs=(P("x"), P(), P("x")), out_specs=P(), mesh=mesh)
    found = spmd.grad(product, argnums=(0, 1))(x, weights, y)
    # Of the serial map, entry by entry.
    by_x = [np.dot(whole(e, weights), y) for e in np.eye(n)]
    by_weights = [np.dot(whole(x, e), y) for e in np.eye(kernel)]
    assert np.array_equal(found[0], by_x)
    assert np.array_equal(found[1], by_weights)


@settings(max_examples=30)
@given(case=cases(), boundary=st.sampled_from(sorted(MODES)))
def test_windows_and_their_gradients_on_workers(case, boundary):
    check_on_workers(case if case[0] else (5, *case[1:]), boundary)


@pytest.mark.full
@settings(max_examples=1000)
@given(case=cases(), boundary=st.sampled_from(sorted(MODES)))
def test_many_windows_and_their_gradients_on_workers(case, boundary):
    check_on_workers(case if case[0] else (5, *case[1:]), boundary)


def test_a_transposed_convolution_on_workers():
    plan = plan_transposed(7, 4, stride=3, padding=1, output_padding=2, inputs=4, outputs=(3, 0, 15, 4))
    rng = np.random.default_rng(0)
    y, weights = rng.integers(-9, 10, 7), rng.integers(-9, 10, 4)
    mesh = spmd.Mesh(x=4)

    def body(y):
        part = spmd.varying(spread(spmd.block(y), weights, 3, 1), "x")
        return spmd.halo_accumulate(part, P("x"), [plan.widths], "zero", sizes=[plan.inputs])

    found = spmd.map(body, in_specs=P("x"), out_specs=P("x"), mesh=mesh)(y)
    assert [b.shape[0] for b in found.blocks.values()] == [3, 0, 15, 4]
    assert np.array_equal(found.numpy(), np.append(spread(y, weights, 3, 1), [0, 0])[1:-1])


def test_pooling_images_on_a_grid_of_workers():
    mesh = spmd.Mesh(data=2, x=3, y=2)
    x = np.random.default_rng(0).normal(size=(3, 2, 13, 10))
    layout = Layout(x.shape, P("data", None, "x", "y"), mesh.axes)
    plan = plan_windows(layout, (None, None, 3, 2), stride=(1, 1, 2, 3), padding=(0, 0, 1, 0))

    def pool(x, rows, columns):
        views = [x[:, :, i : i + 2 * rows : 2, j : j + 3 * columns : 3] for i in range(3) for j in range(2)]
        return functools.reduce(np.maximum, views)

    def body(x):
        around = spmd.halo_exchange(x, layout.spec, plan.widths, "zero", sizes=layout.cuts)
        rows, columns = ((around.shape[2] - 3) // 2 + 1, (around.shape[3] - 2) // 3 + 1)
        return pool(around, rows, columns)

    found = spmd.map(body, in_specs=layout.spec, out_specs=layout.spec, mesh=mesh)(x)
    assert found.layout == plan.target
    assert np.array_equal(found.numpy(), pool(np.pad(x, ((0, 0), (0, 0), (1, 1), (0, 0))), 7, 3))


@settings(max_examples=30)
@given(case=cases())
def test_without_a_boundary_the_halos_are_what_comes(case):
    n, parts, geometry, padding, _, output_cuts, _ = case
    count = plan_window(n, **geometry, padding=padding).output_length
    outputs = None if output_cuts is None else cut(count, parts, output_cuts)
    w = plan_window(n, **geometry, padding=padding, inputs=parts, outputs=outputs)
    body = lambda x: spmd.halo_exchange(x, P("x"), [w.widths])
    found = spmd.map(body, in_specs=P("x"), out_specs=P("x"), mesh=spmd.Mesh(x=parts))(np.arange(n))
    for k, b in found.blocks.items():
        np.testing.assert_array_equal(b, haloed(np.arange(n), w, k, w.halos))


# Pictures


def test_the_table_of_a_window():
    lines = [
        "20 -> 5, kernel 4, stride 4, padding (1, 1)",
        "block  input  output  needs     halo  padding",
        "    0   0:10     0:2   -1:7  (0, -3)   (1, 0)",
        "    1  10:20     2:5   7:19  (3, -1)",
        "    2      -       -      -   (0, 0)",
    ]
    w = plan_window(20, 4, stride=4, padding=1, inputs=(10, 10, 0), outputs=(2, 3, 0))
    assert str(w) == "\n".join(lines)
    plan = plan_windows(Layout((20,), P("x"), {"x": 3}, [(10, 10, 0)]), 4, stride=4, padding=1, target=[(2, 3, 0)])
    assert str(plan) == "\n".join(["(20,) -> (5,)", f"dimension 0: {lines[0]}", *lines[1:]])
    assert str(plan_needs(2, 2, lambda o: (o, o + 1))).splitlines()[0] == "2 -> 2"
    assert str(Taps(3, dilation=2)) == "kernel 3, dilation 2"


def test_the_tables_of_the_page_are_printed():
    page = ROOT / "docs" / "how_to" / "window.md"
    _, printed = run(page)
    tables = [block.text for block in blocks(page) if block.language == "text"]
    assert len(tables) >= 3
    assert [text for text in printed if text.startswith(tuple("0123456789"))] == tables


# Errors


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: plan_window(10, 0),
            ["plan_window: argument kernel", "got:    0", "at least 1", "mend:   1 reads one"],
        ),
        (lambda: plan_window(10, 2.5), ["argument kernel", "2.5", "an integer"]),
        (lambda: plan_window(10, True), ["argument kernel", "True"]),
        (lambda: plan_window(-1, 2), ["argument n", "at least 0"]),
        (lambda: plan_window(10, 2, stride=0), ["argument stride", "plan_transposed"]),
        (lambda: plan_window(10, 2, dilation=0), ["argument dilation"]),
        (lambda: plan_window(10, 2, padding="full"), ["argument padding", "'full'", '"same_lower"']),
        (lambda: plan_window(10, 2, padding=(1, 2, 3)), ["argument padding", "(1, 2, 3)", "(low, high)"]),
        (lambda: plan_window(10, 2, padding=0.5), ["argument padding", "0.5"]),
        (lambda: plan_window(10, 2, inputs=0), ["argument inputs", "at least 1"]),
        (lambda: plan_window(10, 2, inputs=(4, 5)), ["argument inputs", "add to 9", "length of the input, 10"]),
        (lambda: plan_window(10, 2, inputs=(11, -1)), ["argument inputs", "-1"]),
        (lambda: plan_window(10, 2, inputs=()), ["argument inputs", "block sizes ()"]),
        (lambda: plan_window(10, 2, inputs=2, outputs=(5, 5)), ["argument outputs", "length of the output, 9"]),
        (lambda: plan_window(10, 2, inputs=2, outputs=(3, 3, 3)), ["2 blocks of the input and 3 of the output"]),
        (lambda: plan_transposed(5, 3, stride=2, output_padding=2), ["plan_transposed", "output_padding", "stride 2"]),
        (
            lambda: plan_needs(5, 3, lambda o: (5 - o, 6)),
            ["plan_needs", "(3, 6) for output 2 after (5, 6) for output 0"],
        ),
        (lambda: plan_needs(5, 3, lambda o: (0, 4 - o)), ["argument needs", "after (0, 4)", "turn the input round"]),
        (
            lambda: plan_transposed(5, 3, stride=2, padding="same", output_padding=1),
            ["1, with padding 'same'", "numbers"],
        ),
        (lambda: plan_needs(5, 3, lambda o: (o / 2, 4)), ["plan_needs: argument needs", "0.0", "//"]),
        (lambda: plan_needs(5, 3, lambda o: (2, 1)), ["argument needs", "(2, 1) for output 0\n", "start <= stop"]),
        (
            lambda: plan_windows(Layout((5, 5), P("x"), MESH), (3,)),
            ["plan_windows: argument kernel", "1 entries: (3,)"],
        ),
        (lambda: plan_windows(Layout((5, 5), P("x"), MESH), (3, 0)), ["plan_windows, dimension 1: argument kernel"]),
        (
            lambda: plan_windows(Layout((5,), P("x"), MESH), 3, target=[(2, 2, 2)]),
            ["cuts, dimension 0", "that add to 3"],
        ),
        (
            lambda: plan_windows(Layout((5,), P("x"), MESH), 3, target=Layout((5,), P("x"), MESH)),
            ["argument target", "shape (5,)", "the output, (3,)", "plan.target.shape"],
        ),
        (
            lambda: plan_windows(Layout((5,), P("x"), MESH), 3, target=Layout((3,), P("y"), MESH)),
            ["argument target", "P('y')", "repartition"],
        ),
        (
            lambda: plan_windows(Layout((5,), P("x"), {"x": 3}), 3, target=Layout((3,), P("x"), {"y": 2, "x": 3})),
            ["argument target", "{'y': 2, 'x': 3}"],
        ),
        (
            lambda: plan_windows(
                Layout((9,), P(("x", "y")), {"x": 2, "y": 3}), 3, target=Layout((7,), P(("y", "x")), {"y": 3, "x": 2})
            ),
            ["argument target", "the same grid of the same workers"],
        ),
        (lambda: plan_windows((8, 9), 3), ["plan_windows: argument source", "(8, 9)", "mesh.layout"]),
        (lambda: plan_needs(5, 3, lambda o: o), ["argument needs", "0 for output 0", "(i, i + 1)"]),
        (lambda: plan_needs(5, 3, lambda o: (o, o, o)), ["argument needs", "(0, 0, 0) for output 0"]),
        (lambda: plan_window(0, 2, inputs=()), ["argument inputs", "block sizes ()"]),
    ],
)
def test_errors_say_what_to_do(call, words):
    with pytest.raises(LayoutError) as caught:
        call()
    for part in ("got:", "needed:", "mend:", *words):
        assert part in str(caught.value)


def test_numpy_integers_and_arrays_of_sizes():
    w = plan_window(np.int64(11), np.int32(5), padding=np.int64(2), inputs=np.array([4, 4, 3]))
    assert w == plan_window(11, 5, padding=2, inputs=3)
    assert hash(w) == hash(plan_window(11, 5, padding=2, inputs=3))
    source = Layout((11,), P("x"), {"x": 3})
    assert plan_windows(source, np.array([5]), padding=2).dims == (w,)


def test_a_plan_is_kept():
    source = Layout((11,), P("x"), {"x": 3})
    assert plan_windows(source, 5, padding=2) is plan_windows(source, 5, padding=2)
    with pytest.raises(LayoutError):
        plan_windows(source, 5.0, padding=2)  # type: ignore[arg-type]


def test_the_names_are_spmd_s():
    for name in ("plan_needs", "plan_transposed", "plan_window", "plan_windows"):
        assert getattr(spmd, name) is globals()[name]
        assert name in spmd.__all__
    assert isinstance(plan_windows(Layout((4,), P(), {}), 1), Windows)


# The test can fail


def faulty(name: str):
    """A wrong version of a property or method of the plan."""
    right = {"widths": Window.widths.func, "halos": Window.halos.func, "pads": Window.pads.func}.get(name)
    match name:
        case "widths":
            return Window, "widths", property(lambda self: tuple((a + (a > 0), b) for a, b in right(self)))
        case "halos":
            return Window, "halos", property(lambda self: tuple((max(a, 0), b) for a, b in right(self)))
        case "pads":
            return Window, "pads", property(lambda self: tuple((b, a) for a, b in right(self)))
        case "extent":
            return Taps, "extent", property(lambda self: self.kernel * self.dilation)
        case "start":
            right = Taps.__call__
            return Taps, "__call__", lambda self, o: (right(self, o)[0] - (o == 3), right(self, o)[1])
        case "stop":
            right = Taps.__call__
            return Taps, "__call__", lambda self, o: (right(self, o)[0], right(self, o)[1] + (o == 3))
        case "count":
            right = Taps.fit
            return Taps, "fit", lambda self, n, ceil=False: (self, max(0, right(self, n, ceil)[1] - (n == 17)))
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["widths", "halos", "pads", "extent", "start", "stop", "count"])
def test_planted_faults_are_seen(name, monkeypatch):
    kind, attribute, wrong = faulty(name)
    monkeypatch.setattr(kind, attribute, wrong)
    with pytest.raises((AssertionError, LayoutError)):
        sampled(check_window, 300, phases=[Phase.explicit, Phase.generate])()


def test_a_faulty_word_is_seen(monkeypatch):
    right = module.checked_taps

    def wrong(where, n, kernel, stride, padding, dilation):
        taps = right(where, n, kernel, stride, padding, dilation)
        return taps._replace(low=taps.high, high=taps.low) if padding == "same" else taps

    monkeypatch.setattr(module, "checked_taps", wrong)
    monkeypatch.setattr(window_nd, "checked_taps", wrong)
    with pytest.raises((AssertionError, LayoutError)):
        sampled(check_window, 300, phases=[Phase.explicit, Phase.generate])()


def test_table_columns_are_aligned():
    text = str(plan_window(1000, 7, stride=3, padding=3, inputs=12))
    columns = [[m.end() for m in re.finditer(r"\S(?=  |$)", line)] for line in text.splitlines()[1:]]
    assert all(c[:4] == columns[0][:4] for c in columns)
