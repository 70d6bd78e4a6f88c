"""Stencils: the kernels against their references, and the function over them."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import numpy as np
import pytest
from conftest import placed
from kernel_cases import FLOATING, NUMBERS, Family

import spmd
from spmd import P, functions
from spmd.errors import LayoutError, SpecError
from spmd.kernels import cpu, jit, reference
from spmd.kernels.cpu import neighbours
from spmd.kernels.windows import reach, stencil_adjoint_padding
from spmd.operators import stencil as operator
from spmd.operators.stencil import Stencil

family = Family("stencils")


def geometry(draw):
    dims = draw.integer(1, 3)
    offsets = tuple(tuple(draw.integer(-2, 2) for _ in range(dims)) for _ in range(draw.integer(1, 6)))
    padding = tuple((draw.integer(0, 2), draw.integer(0, 2)) for _ in range(dims))
    shape = (*(draw.integer(0, 7) for _ in range(dims - 1)), draw.integer(0, 7 if draw.small else 150))
    return (*draw.shape(0, 1, side=3), *shape), offsets, padding


def stencil(draw):
    shape, offsets, padding = geometry(draw)
    weights = [float(w) for w in draw.rng.choice([-1.0, 0.5, 0.5, 2.0], len(offsets))]
    return draw.array(shape), offsets, weights, padding


def stencil_weights(draw):
    shape, offsets, padding = geometry(draw)
    dims = len(padding)
    lead, n = shape[: len(shape) - dims], shape[len(shape) - dims :]
    around = zip(n, padding, reach(offsets), strict=True)
    m = (max(0, k + before + after - low - high) for k, (before, after), (low, high) in around)
    return draw.array((*lead, *m)), draw.array(shape), offsets, padding


family.case("stencil", stencil, dtypes=(*FLOATING, *NUMBERS[2:]), scale=9)


def of_products(g, *_):
    """What 32 units in the last place are allowed of. Sums of up to thousands of products, each up to 9, in another
    order than the reference's. A long leading dimension gives more rows than that: they are added up one after the
    other, each time with a rounding of half a unit of what there is, always the same way where all are alike."""
    rows = g.size // max(1, g.shape[-1])
    return 999 if rows <= 150 else (1 + rows / 64) * max(999, 9 * math.sqrt(g.size))


family.case("stencil_weights", stencil_weights, dtypes=(*FLOATING, "complex128"), ulps=32, scale=of_products)

TestKernels = family.tests()


def test_the_adjoint_is_the_stencil_of_the_negated_offsets():
    rng = np.random.default_rng(0)
    for _ in range(50):
        dims = rng.integers(1, 4)
        offsets = [tuple(o) for o in rng.integers(-2, 3, (4, dims)).tolist()]
        padding = [tuple(p) for p in rng.integers(0, 3, (dims, 2)).tolist()]
        x = rng.integers(-4, 5, tuple(rng.integers(5, 9, dims))).astype(float)
        y = cpu.stencil(x, offsets, [1, 2, 3, 4], padding)
        g = rng.integers(-4, 5, y.shape).astype(float)
        back = cpu.stencil(
            g, [[-i for i in o] for o in offsets], [1, 2, 3, 4], stencil_adjoint_padding(offsets, padding)
        )
        assert back.shape == x.shape
        assert np.sum(y * g) == np.sum(x * back)


@pytest.fixture(params=[40, 200, 1 << 19])
def piece(request, monkeypatch):
    """Bytes of the pieces in which NumPy alone makes sums."""
    monkeypatch.setattr(neighbours, "_PIECE", request.param)
    neighbours._plan.cache_clear()
    yield request.param
    neighbours._plan.cache_clear()


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_rows_that_are_read_as_one_give_nothing_to_each_other(dims, piece):
    """Results of the shape of x, in pieces that end anywhere. What lies at the ends of rows would overflow together."""
    rng = np.random.default_rng(piece)
    n = (2, 6, 5, 7)[-dims - 1 :]
    offsets = [tuple(o) for o in rng.integers(-1, 2, (5, dims)).tolist()] + [(-1,) * dims, (1,) * dims]
    weights = [0.5, 0.25, 0.5, 1.0, 0.25, 2.0, 0.5]
    x = rng.integers(-9, 10, n).astype(float)
    with jit.off():
        y = cpu.stencil(x, offsets, weights, [(1, 1)] * dims)
    assert y.shape == x.shape
    assert np.array_equal(y, reference.stencil(x, offsets, weights, [(1, 1)] * dims))
    x[..., 1:-1], x[..., :1], x[..., -1:] = 0, 1e308, 1e308
    across = [(0,) * (dims - 1) + (k,) for k in (-1, 0, 1)]
    with jit.off(), np.errstate(all="raise"):
        y = cpu.stencil(x, across, [1.0, 1.0, 1.0], [(0, 0)] * (dims - 1) + [(1, 1)])
    assert np.array_equal(y[..., 1:-1], x[..., :-2] + x[..., 2:])


CROSS = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
WEIGHTS = (-4.0, 1.0, 2.0, 3.0, 0.5)
ALIKE = (-4.0, *(1.1,) * 4)
SQUARE = tuple(np.ndindex(3, 3))
CUT = {
    "five points": (CROSS, ALIKE),
    "seven points": ((*((0, *o) for o in CROSS), (1, 0, 0), (-1, 0, 0)), (0.3, *(1.1,) * 6)),
    "a square": (SQUARE, (0.7,) * 9),
    "corners and edges": (tuple((a - 1, b - 1) for a, b in SQUARE), (1.1, 0.3, 1.1, 0.3, 0.7, 0.3, 1.1, 0.3, 1.1)),
    "the same places twice": ((*CROSS, *CROSS), (0.3,) * 10),
    "two of two": (((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)), (*(0.3,) * 4, *(1.1,) * 4)),
    "a line": (((-3,), (-1,), (0,), (1,), (3,)), (0.3, 0.3, 1.0, 0.3, 0.3)),
}


@pytest.mark.parametrize("case", CUT)
@pytest.mark.parametrize("dtype", [np.float64, np.complex64])
def test_no_entry_depends_on_where_the_array_is_cut(case, dtype, piece):
    """By NumPy alone, which adds up once what two pairs of entries of one weight have in common."""
    offsets, weights = CUT[case]
    rng, ends = np.random.default_rng(piece), reach(offsets)
    x = rng.normal(size=(2, *(6, 9, 11)[-len(ends) :])).astype(dtype)
    with jit.off():
        whole = cpu.stencil(x, offsets, weights, ends)
        np.testing.assert_allclose(whole, reference.stencil(x, offsets, weights, ends), rtol=1e-5, atol=1e-5)
        wide = np.pad(x, ((0, 0), *ends))
        for _ in range(20):
            box = [sorted(rng.choice(n + 1, 2, replace=False).tolist()) for n in x.shape[1:]]
            reads = [slice(lo, hi + low + high) for (lo, hi), (low, high) in zip(box, ends, strict=True)]
            part = cpu.stencil(wide[(slice(None), *reads)], offsets, weights, [(0, 0)] * len(ends))
            of = (slice(None), *(slice(lo, hi) for lo, hi in box))
            assert part.tobytes() == whole[of].tobytes()


@pytest.mark.parametrize("offsets", [CROSS, ((0, 0), (-2, 1), (1, 0)), ((3, 3), (3, 4))])
def test_loose_ends_are_those_alone_that_see_padding(offsets):
    x, ends = np.random.default_rng(0).normal(size=(3, 8, 9)), reach(offsets)
    for loose in [(0,), (1,), (0, 1)]:
        for case in jit.off(), nullcontext():
            with case:
                y = cpu.stencil(x, offsets, [0.3] * len(offsets), ends, loose)
                full = cpu.stencil(x, offsets, [0.3] * len(offsets), ends)
            crop = [ends[d] if d in loose else (0, 0) for d in range(2)]
            of = (slice(None), *(slice(low, n - high) for n, (low, high) in zip(x.shape[1:], crop, strict=True)))
            assert y.shape == full.shape
            assert full[of].size
            assert np.array_equal(y[of], full[of])


def test_what_slabs_make_is_not_made_in_the_block(monkeypatch):
    """By NumPy alone, of a block its rows' ends, and of its two slabs theirs: not the block's first and last rows.

    Small blocks have no slabs."""
    shapes, side_sums = [], neighbours._side_sums
    monkeypatch.setattr(neighbours, "_side_sums", lambda out, *rest: shapes.append(out.shape) or side_sums(out, *rest))
    x = np.random.default_rng(0).normal(size=(600, 120))
    body = lambda x: spmd.stencil(x, P("x"), CROSS, WEIGHTS)
    with jit.off():
        y = spmd.Mesh(x=2, scheduler="lockstep").map(body, in_specs=P("x"), out_specs=P("x"))(x).numpy()
    np.testing.assert_allclose(y, reference.stencil(x, CROSS, WEIGHTS, ((1, 1), (1, 1))), rtol=1e-12, atol=1e-12)
    assert sorted(shapes) == [(1, 1, 4, 120)] * 2 + [(1, 1, 300, 120)] * 2


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("examples", [1, 2])
def test_rows_of_layers_that_lie_elsewhere_in_the_result(layers, examples):
    """Columns are as many as before, rows are not: only of a single layer and example they follow each other alike."""
    x, offsets = np.random.default_rng(0).normal(size=(examples, layers + 1, 7, 6)), ((0, 0, 0), (1, 1, 1), (0, -1, -1))
    around = ((0, 0), (0, 0), (1, 1))
    with jit.off():
        y = cpu.stencil(x, offsets, (1.0, 2.0, 0.5), around)
    assert y.shape == (examples, layers, 5, 6)
    np.testing.assert_allclose(y, reference.stencil(x, offsets, (1.0, 2.0, 0.5), around), rtol=1e-12, atol=1e-12)


def test_pieces_are_all_of_a_box_and_as_large_as_they_may_be():
    for box, most in itertools.product(
        [[(0, 3), (1, 5), (2, 9), (1, 8)], [(0, 1)] * 4, [(0, 9), (0, 1), (3, 4), (0, 5)]], [1, 7, 30, 200, 999]
    ):
        count = np.zeros([hi for _, hi in box], int)
        sizes = []
        for piece in neighbours._pieces(box, most):
            count[tuple(slice(lo, hi) for lo, hi in piece)] += 1
            sizes.append(math.prod(hi - lo for lo, hi in piece))
        inside = tuple(slice(lo, hi) for lo, hi in box)
        assert (count[inside] == 1).all()
        assert count.sum() == count[inside].size
        row = box[-1][1] - box[-1][0]
        assert sizes[0] == max(sizes) <= max(most, row)
        assert len(sizes) == 1 or 4 * sizes[0] > min(most, 2 * row)


def test_weights_that_are_alike_are_told_by_their_values():
    """Not by their bytes, of which some of a long double are arbitrary; and no weights have a plan of their own."""
    offsets, x = ((0,), (2,), (-3,), (3,), (1,)), np.random.default_rng(0).normal(size=200)
    with jit.off():
        many = [cpu.stencil(x.astype("g"), offsets, (0.1, 1.1, 1.1, 0.3, 1.1), ((3, 3),)) for _ in range(20)]
        before = neighbours._plan.cache_info().currsize
        for w in np.random.default_rng(1).normal(size=(20, 2)):
            given = (w[0], w[1], w[1], 0.0, -0.0)
            y = cpu.stencil(x, offsets, given, ((3, 3),))
            np.testing.assert_allclose(y, reference.stencil(x, offsets, given, ((3, 3),)), rtol=1e-12, atol=1e-12)
    assert all(np.array_equal(y, many[0]) for y in many)
    assert neighbours._plan.cache_info().currsize == before + 1


@pytest.mark.parametrize("dtype", [">f8", ">f4", ">c8", ">i4"])
def test_numbers_in_another_order_of_bytes(dtype):
    x = np.random.default_rng(0).integers(-9, 10, (6, 7)).astype(dtype)
    want = reference.stencil(x.astype(np.complex128), CROSS, (-4, 3, 3, 3, 3), ((1, 1), (1, 1)))
    for loops in jit.off(), nullcontext():
        with loops:
            actual = cpu.stencil(x, CROSS, (-4, 3, 3, 3, 3), ((1, 1), (1, 1)))
        np.testing.assert_array_equal(actual, want.astype(actual.dtype) if np.iscomplexobj(actual) else want.real)


def test_short_numbers_tell_nothing_of_what_is_nobodys(scheduler):
    """In the middle between two slabs that are made at once there is an overflow of float16, and nowhere else."""
    x = np.repeat([6e4, 0.0, 0.0, -6e4, -6e4, 0.0, 0.0, 6e4], 16)[:, None] * np.ones(8)
    x, offsets, weights = x.astype(np.float16), ((1, 0), (-1, 0)), (1.0, -1.0)
    body = lambda x: spmd.stencil(x, P("x"), offsets, weights, "periodic")
    with np.errstate(all="raise"):
        y = spmd.Mesh(x=2, scheduler=scheduler).map(body, in_specs=P("x"), out_specs=P("x"))(x).numpy()
    wide = np.concatenate([x[-1:], x, x[:1]]).astype(np.float32)
    np.testing.assert_array_equal(y, (wide[2:] - wide[:-2]).astype(np.float16))


def test_pairs_are_those_of_one_distance_that_are_near():
    line = [(0, 0, k) for k in (-1, 1)]
    cross = [(0, 1, 0), (0, -1, 0), *line]
    firsts, apart, singles = neighbours._paired([(1, 0, 0), (-1, 0, 0), *cross])
    assert (len(firsts), apart[0]) == (2, 0)
    assert singles == ((1, 0, 0), (-1, 0, 0))
    assert neighbours._paired(line) == ((), (0, 0, 0), tuple(line))
    assert neighbours._paired(cross[:1] * 4) == ((), (0, 0, 0), tuple(cross[:1] * 4))
    rng = np.random.default_rng(0)
    for _ in range(200):
        places = [tuple(p) for p in rng.integers(-2, 3, (rng.integers(1, 9), 3)).tolist()]
        firsts, apart, singles = neighbours._paired(places)
        assert sorted([*firsts, *(neighbours._plus(a, apart) for a in firsts), *singles]) == sorted(places)


# The functions


def five_points(x, w):
    """The same with slices, of what lies inside."""
    mid, up, down = x[1:-1, 1:-1], x[2:, 1:-1], x[:-2, 1:-1]
    return w[0] * mid + w[1] * up + w[2] * down + w[3] * x[1:-1, 2:] + w[4] * x[1:-1, :-2]


def test_equals_slices_with_gradients_to_second_order():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(6, 5)), rng.normal(size=5)
    np.testing.assert_allclose(functions.stencil(x, CROSS, w), five_points(x, w), rtol=1e-14)
    same = functions.stencil(x, CROSS, w, "SAME")
    np.testing.assert_allclose(same, five_points(np.pad(x, 1), w), rtol=1e-14)
    spmd.check_grads(lambda x, w: functions.stencil(x, CROSS, w), (x, w))
    spmd.check_grads(lambda x, w: functions.stencil(x, CROSS, w, ((1, 0), (0, 1))), (x, w))
    spmd.check_grads(lambda x, w: functions.stencil(x, [(1,), (-1,)], w, "SAME"), (x, w[:2]))


@pytest.mark.parametrize(
    ("dtype", "weight", "wanted"),
    [
        (np.float32, np.array([0.1, 1]), np.float64),
        (np.float32, [0.1, 1], np.float32),
        (np.float64, np.array([1, 2], np.float32), np.float64),
        (np.float64, np.array([1, 2j]), np.complex128),
        (np.float32, [1, 2j], np.complex64),
        (np.complex64, np.array([1, 2], np.float32), np.complex64),
    ],
)
def test_dtypes_are_those_of_products(dtype, weight, wanted):
    x = np.random.default_rng(0).normal(size=9).astype(dtype)
    y = functions.stencil(x, [(0,), (1,)], weight)
    assert y.dtype == wanted
    expected = weight[0] * x[:-1].astype(wanted) + weight[1] * x[1:].astype(wanted)
    np.testing.assert_allclose(y, expected, rtol=1e-5 if y.real.itemsize == 4 else 1e-14, atol=1e-6)
    if isinstance(weight, np.ndarray):
        gx, gw = spmd.grad(lambda x, w: np.real(functions.stencil(x, [(0,), (1,)], w).sum()), (0, 1))(x, weight)
        assert (gx.dtype, gw.dtype) == (x.dtype, weight.dtype)


def test_dimensions_that_are_not_reached_may_lead(scheduler):
    x = np.random.default_rng(0).normal(size=(3, 2, 7, 6))
    offsets = [(0, 0, *o) for o in CROSS]
    want = functions.stencil(placed(x), CROSS, WEIGHTS, "SAME")
    mesh = spmd.Mesh(x=2, y=2, scheduler=scheduler)
    for spec in P("x"), P(None, None, "x", "y"), P("y", None, None, "x"):
        run = mesh.map(lambda x, spec=spec: spmd.stencil(x, spec, offsets, WEIGHTS), in_specs=spec, out_specs=spec)
        np.testing.assert_array_equal(run(x).numpy(), want)


@pytest.mark.parametrize("axes", [{"x": 1}, {"x": 2}, {"x": 3, "y": 2}, {"x": 7}])
@pytest.mark.parametrize("boundary", ["zero", "periodic", ("zero", "periodic")])
@pytest.mark.parametrize("weights", [WEIGHTS, ALIKE])
@pytest.mark.parametrize("large", [False, True])
def test_over_blocks_it_is_that_of_the_whole_array_to_the_bit(scheduler, axes, boundary, weights, large, monkeypatch):
    """By NumPy alone and, where it is installed, with numba. Both slabs of a dimension at once, or large ones apart."""
    monkeypatch.setattr(operator, "_SMALL", 0 if large else operator._SMALL)
    for loops in jit.off(), nullcontext():
        with loops:
            over_blocks(scheduler, axes, boundary, weights)


def over_blocks(scheduler, axes, boundary, weights):
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=(2, 17, 9))
    spec = P(*axes)
    modes = {"zero": "constant", "periodic": "wrap"}
    wide = x
    for d, b in enumerate((boundary,) * 2 if isinstance(boundary, str) else boundary):
        wide = np.pad(wide, [(1, 1) if e == d else (0, 0) for e in range(2)], modes[b])

    def local(x, g):
        y = spmd.stencil(x, spec, CROSS, weights, boundary)
        return y, spmd.psum(np.sum(y * g), tuple(axes))

    mesh = spmd.Mesh(scheduler=scheduler, **axes)
    run = mesh.map(local, in_specs=(spec, spec), out_specs=(spec, P()))
    y, _ = run(x, g)
    np.testing.assert_array_equal(y.numpy(), functions.stencil(placed(wide), CROSS, weights))
    grad = spmd.grad(lambda x: run(x, g)[1])(x)
    pad = lambda x: np.pad(x, 1) if boundary == "zero" else padded(x, boundary)
    exact = spmd.grad(lambda x: np.sum(functions.stencil(pad(x), CROSS, weights) * g))(x)
    np.testing.assert_allclose(np.asarray(grad), exact, rtol=1e-12, atol=1e-12)


def padded(x, boundary):
    """Periodic ends by slices, which have derivatives; zeros in dimension 0 where only the other one is periodic."""
    x = np.concatenate([x[-1:], x, x[:1]]) if boundary == "periodic" else np.pad(x, ((1, 1), (0, 0)))
    return np.concatenate([x[:, -1:], x, x[:, :1]], axis=1)


@pytest.mark.parametrize("shape", [(0, 9), (9, 0), (0, 0)])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("y", "x")], ids=str)
@pytest.mark.parametrize("boundary", ["zero", "periodic", ("zero", "periodic"), ("periodic", "zero")])
def test_of_an_array_without_entries(scheduler, shape, spec, boundary):
    mesh = spmd.Mesh(x=3, y=2, scheduler=scheduler)
    run = mesh.map(lambda x: spmd.stencil(x, spec, CROSS, WEIGHTS, boundary), in_specs=spec, out_specs=spec)
    y, pull = spmd.vjp(run, np.zeros(shape))
    assert y.shape == pull(y)[0].shape == shape
    op = Stencil(spec.axes, spec, CROSS, WEIGHTS, boundary)
    assert spmd.check_adjoint(op, shape, mesh=mesh, in_specs=spec)


def test_a_chain_differentiates_twice_in_a_body(scheduler):
    x = np.random.default_rng(0).normal(size=(11, 4))

    def local(x):
        for _ in range(3):
            x = x + 0.1 * spmd.stencil(np.sin(x), P("x"), CROSS, WEIGHTS)
        return spmd.psum(np.sum(x**2), "x")

    def serial(x):
        for _ in range(3):
            x = x + 0.1 * functions.stencil(np.sin(x), CROSS, WEIGHTS, "SAME")
        return np.sum(x**2)

    loss = spmd.Mesh(x=3, scheduler=scheduler).map(local, in_specs=P("x"), out_specs=P())
    v = np.cos(x)
    actual = np.asarray(spmd.hvp(loss, (x,), (v,)))
    np.testing.assert_allclose(actual, spmd.hvp(serial, (x,), (v,)), rtol=1e-10, atol=1e-10)


ERRORS = {
    "no offsets": (lambda x: spmd.stencil(x, P("x"), (), ()), "five points"),
    "other dimensions": (lambda x: spmd.stencil(x, P("x"), ((1,),), (1,)), "2 ints each"),
    "weights": (lambda x: spmd.stencil(x, P("x"), CROSS, (1, 2)), "one for each offset"),
    "an array of weights": (lambda x: spmd.stencil(x, P("x"), CROSS[:1], [x[0, 0]]), "spmd.functions.stencil"),
    "boundary": (lambda x: spmd.stencil(x, P("x"), CROSS, WEIGHTS, "reflect"), "spmd.halo_exchange"),
    "no boundary": (lambda x: spmd.stencil(x, P("x"), CROSS, WEIGHTS, 3), "argument boundary"),
    "one weight": (lambda x: spmd.stencil(x, P("x"), CROSS[:1], 2.0), "argument weights"),
    "words": (lambda x: spmd.stencil(x, P("x"), CROSS[:1], ["a"]), "argument weights"),
    "complex weights": (lambda x: spmd.stencil(x, P("x"), CROSS[:1], [1j]), "argument weights"),
    "no number": (lambda x: spmd.stencil(x.astype(int), P("x"), CROSS[:1], [np.nan]), r"astype\(float\)"),
    "four dimensions": (lambda x: spmd.stencil(x[None, None], P(None, None, "x"), [(1, 0, 0, 0)], [1]), "last three"),
    "spec": (lambda x: spmd.stencil(x, "x", CROSS, WEIGHTS), r'P\("x"\)'),
    "integers": (lambda x: spmd.stencil(x.astype(int), P("x"), CROSS, WEIGHTS), r"astype\(float\)"),
    "local: weights": (lambda x: functions.stencil(x, CROSS, x), "vary from place to place"),
    "local: offsets": (lambda x: functions.stencil(x[0], CROSS, WEIGHTS), "not more than x has dimensions"),
    "local: padding": (lambda x: functions.stencil(x, CROSS, WEIGHTS, -1), "argument padding"),
    "local: integers": (lambda x: functions.stencil(x.astype(int), CROSS, WEIGHTS), r"astype\(float\)"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_is_needed(case):
    call, words = ERRORS[case]
    body = spmd.Mesh(x=2).map(call, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises((LayoutError, SpecError), match=words):
        body(np.ones((5, 4)))
