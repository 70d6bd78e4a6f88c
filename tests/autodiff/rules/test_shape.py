"""Shapes, joins, padding and picked entries: against finite differences, and with NumPy's values for all options."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from rules import Table, complex_, distinct, of, one, pair, signed

from spmd.autodiff import grad, stop_gradient, tree, vjp
from spmd.autodiff.check import check_grads, check_vjp
from spmd.autodiff.tracer import Array
from spmd.errors import DifferentiationError, DtypeError

TABLE = Table()
row = TABLE.row
both = (signed, complex_)


def same(f, *args):
    """f has the same result, shape and dtype traced and bare, and a right derivative."""
    value, _ = vjp(f, *args)
    for got, expected in zip(tree.leaves(value), tree.leaves(f(*args)), strict=True):
        assert np.shape(got) == np.shape(expected)
        assert np.result_type(got) == np.result_type(expected)
        np.testing.assert_allclose(got, expected, rtol=1e-5 if got.dtype == "f4" else 1e-12)
    check_vjp(f, args)


def refuses(error, match, f, *args):
    with pytest.raises(error, match=match):
        vjp(f, *args)


def unlike_zero(rng, shape):
    """Numbers far from the point where np.modf and np.frexp jump."""
    return rng.choice([1.2, -2.7, 0.3, 5.5], shape) + rng.uniform(-0.1, 0.1, shape)


def counts(rng, shape):
    return rng.uniform(1, 3, shape)


# Entry by entry
row("ldexp", lambda x: np.ldexp(x, 3) * np.ldexp(x, np.array([1, -2, 0])), signed, of("3", "23", "."))
row("frexp", lambda x: np.frexp(x)[0] ** 2, unlike_zero, one)
row("heaviside", lambda x, h: x * np.heaviside(x, h) + np.heaviside(np.array([0.0, 1, -1]), h), both[:1] * 2, of("3 ."))
row("nextafter", lambda x, y: np.nextafter(x, y) * x, (signed, signed), pair)
row("i0", lambda x: np.i0(3 * x), signed, of("3", "22"))
row("angle-degrees", lambda z: np.angle(z, deg=True), complex_, one)
row("nan_to_num-complex", lambda z: np.nan_to_num(z) ** 2, complex_, one)
row("real_if_close", lambda z: np.real_if_close(z) * 2, complex_, of("3"))
for d in both:
    row(f"float_power-{d.__name__}", lambda x: np.float_power(x, 3), d, one)

# Picked and placed entries
for d in both:
    k = d.__name__
    row(f"insert-{k}", lambda x, v: np.insert(x, [0, 2, -1], v) ** 2, (d, d), of("3 3", "22 3", "3 ."))
    row(f"insert-axis-{k}", lambda x, v: np.insert(x, 1, v, axis=-1) ** 2, (d, d), of("23 2", "23 .", "02 ."))
    row(f"insert-row-{k}", lambda x, v: np.insert(x, slice(0, 2), v, axis=0) ** 2, (d, d), of("23 3", "23 21", "32 22"))
    row(f"delete-{k}", lambda x: np.delete(x, [0, -1], 0) ** 2 + np.delete(x, 1)[0], d, of("4", "32"))
    row(f"choose-{k}", lambda x, y: np.choose([0, 1, 1], [x, y]) * x, (d, d), of("3 3", ". 3", "23 1"))
    row(f"put-at-{k}", lambda x, y: x.at[1].set(y) if isinstance(x, Array) else put(x, y), (d, d), of("3 .", "32 2"))
    row(f"apply_along_axis-{k}", lambda x: np.apply_along_axis(np.outer, 1, x, [1.0, 2]), d, of("23", "123"))
    row(f"apply_along_axis-sum-{k}", lambda x: np.apply_along_axis(np.sum, -2, x) ** 2, d, of("23", "232"))
    row(f"apply_over_axes-{k}", lambda x: np.apply_over_axes(np.sum, x, (0, -1)) ** 2, d, of("23", "232"))
    row(f"ix_-{k}", lambda x, y: np.multiply(*np.ix_(x, y)), (d, d), of("3 2", "0 2"))
    row(f"resize-{k}", lambda x: np.resize(x, (2, 4)) ** 2 + np.resize(x, 2)[0], d, of("3", "23", "."))
    row(f"trim_zeros-{k}", lambda x: np.trim_zeros(np.pad(x, (2, 1))) ** 2, d, of("3", "1"))
    row(
        f"windows-{k}",
        lambda x: np.lib.stride_tricks.sliding_window_view(x, 2, 0) ** 2,
        d,
        of("4", "32"),
    )
    row(f"diagflat-{k}", lambda x: np.diagflat(x, -1) ** 2, d, of("3", "22", ".", "0"))
    row(f"tri-{k}", lambda x: np.tril(x, -1) + np.triu(x) ** 2, d, of("3", "223", "02"))
row(
    "piecewise",
    lambda x: np.piecewise(x, [x < -0.5, x > 0.5], [lambda t: t**3, 2.0, lambda t: -t * x[..., :1].sum()]),
    distinct,
    of("5", "23", "0"),
)
row("compress", lambda x: np.compress([True, False, True], x, -1) * np.compress([0, 1], x)[0], signed, of("3", "23"))
row("extract", lambda x: np.extract(x > 0, x) ** 2, distinct, of("23", "4"))

# Joins
row("linalg.cross", lambda x, y: np.linalg.cross(x, y, axis=0) ** 2, (signed, complex_), of("3 3", "32 32"))
row("vstack-dtype", lambda x, y: np.vstack([x, y], dtype=complex) ** 2, both[:1] * 2, of("3 23"))
row("concatenate-one", lambda x: np.concatenate(x) * np.stack(x, 1).ravel() * np.hstack(x), signed, of("23"))

# Padding
PADS = {
    "constant": [{}, {"constant_values": ((1.0, 2), (3, 4))}, {"constant_values": (5, 6)}],
    "edge": [{}],
    "linear_ramp": [{}, {"end_values": ((1.0, 2), (3, 4))}, {"end_values": 2}],
    "maximum": [{}, {"stat_length": 2}, {"stat_length": ((1, 2), (3, 9))}],
    "minimum": [{}, {"stat_length": 2}, {"stat_length": (1, 2)}],
    "mean": [{}, {"stat_length": 2}, {"stat_length": ((1, 2), (3, 9))}],
    "median": [{}, {"stat_length": 2}],
    "reflect": [{}, {"reflect_type": "odd"}],
    "symmetric": [{}, {"reflect_type": "odd"}],
    "wrap": [{}],
}
for mode, options in PADS.items():
    for k, option in enumerate(options):
        for d in both if mode not in ("maximum", "minimum", "median") else (distinct,):
            f = lambda x, m=mode, o=option: np.pad(x, ((1, 0), (2, 3)), m, **o)
            row(f"pad-{mode}-{k}-{d.__name__}", f, d, of("34", "11") if d is not distinct else of("34", "13"))
for d in both:
    k = d.__name__
    row(
        f"pad-value-{k}",
        lambda x, v: np.pad(x, ((1, 0), (2, 3)), constant_values=v[0]) * np.pad(x, ((1, 0), (3, 2)), constant_values=v),
        (d, d),
        of("23 2", "02 2"),
    )
    row(f"pad-ends-{k}", lambda x, v: np.pad(x, (1, 2), "linear_ramp", end_values=v) ** 2, (d, d), of("3 .", "23 2"))


def put(x, y):
    x = x.copy()
    x[1] = y
    return x


TestRows = TABLE.tests()


# Values are NumPy's, whatever the options


BY_AXIS = [{1: (2, 0)}, {-2: 3}] if np.lib.NumpyVersion(np.__version__) >= "2.3.0" else []


@pytest.mark.parametrize("mode", PADS)
def test_pad_has_numpys_values(mode):
    rng = np.random.default_rng(0)
    for shape in ((3, 4), (1, 3), (2, 1)):
        x = distinct(rng, shape)
        for widths, option in itertools.product(
            (0, 1, (0, 7), ((9, 4), (0, 11)), ((9, 1), (2, 14)), *BY_AXIS), PADS[mode]
        ):
            if mode in ("maximum", "minimum", "median"):
                # Padded copies tie in later axes, where maximum shares: its values are compared alone.
                f = lambda x, w=widths, o=option: np.pad(x, w, mode, **o)
                np.testing.assert_allclose(vjp(f, x)[0], f(x))
                continue
            for y in (x, x * 1j, x.astype("f4")):
                f = lambda x, w=widths, o=option: np.pad(x, w, mode, **o)
                np.testing.assert_allclose(vjp(f, y)[0], f(y), rtol=1e-5 if y.dtype == "f4" else 1e-12)
                assert vjp(f, y)[0].dtype == y.dtype
    with pytest.raises(ValueError, match=f"takes .* for the mode '{mode}', and has wrong"):
        grad(lambda x: np.pad(x, 1, mode, wrong=1)[0])(np.ones(2))


def test_pad_of_nothing():
    assert vjp(lambda x: np.pad(x, ((0, 0), (1, 1)), "edge"), np.ones((0, 2)))[0].shape == (0, 4)
    refuses(ValueError, "can't extend empty axis 0", lambda x: np.pad(x, 1, "edge"), np.ones((0, 2)))
    assert grad(lambda x: np.pad(x, 1) * 3.0)(2.0) == 3
    value = vjp(lambda x: np.pad(x, 1, "empty"), np.ones(2))[0]
    assert value[1:3].tolist() == [1, 1]


def test_pad_refuses_what_it_cannot_follow():
    refuses(DifferentiationError, "mode(.|\n)*a function", lambda x: np.pad(x, 1, lambda *a: None), np.ones(2))
    refuses(ValueError, "no mode 'other'", lambda x: np.pad(x, 1, "other"), np.ones(2))


INSERTIONS = [
    (1, 9.0, None),
    (-1, [9.0, 8.0], None),
    ([1], [9.0, 8.0], None),
    ([2, 0, 2], [9.0, 8.0, 7.0], None),
    (slice(None, None, 2), 5, None),
    (np.array([True, False, True]), 5, 0),
    ([], np.ones((0, 2)), 0),
    (0, [1.0, 2.0], 0),
    (0, [[1.0, 2.0], [3, 4]], 0),
    (1, [1.0, 2, 3], 1),
    (1, [[1.0], [2], [3]], 1),
    ([1], [[1.0], [2], [3]], 1),
    ([0, 1], [[1.0], [2], [3]], -1),
    ([0, 2], 4.0, 1),
]


def test_insert_has_numpys_values():
    x = np.arange(6.0).reshape(3, 2)
    for obj, values, axis in INSERTIONS:
        same(lambda x, o=obj, v=values, a=axis: np.insert(x, o, v, a), x)
        if np.ndim(values):
            same(lambda x, v, o=obj, a=axis: np.insert(x, o, v, a), x, np.array(values))
    same(lambda v: np.insert(x, 1, v), 2.0)
    refuses(IndexError, "out of bounds", lambda x: np.insert(x, 9, 1.0), x)
    refuses(DtypeError, r"complex128 for an array of float64(.|\n)*arr\.astype", lambda x: np.insert(x, 0, 1j), x)
    refuses(DtypeError, "float64 for an array of int64", lambda v: np.insert(np.arange(3), 0, v), 1.5)


def test_picking_has_numpys_values():
    x = np.arange(12.0).reshape(3, 4) + 0.5
    mask = np.array([True, False, True])
    for f in (
        lambda x: np.delete(x, 1),
        lambda x: np.delete(x, -1, 1),
        lambda x: np.delete(x, slice(0, 3, 2), -1),
        lambda x: np.delete(x, mask, 0),
        lambda x: np.delete(x, [], 0),
        lambda x: np.delete(x, [0, 0, 2], axis=0),
        lambda x: np.take(x, (0, 5)),
        lambda x: np.take(x, [[-1, 2]], 1),
        lambda x: np.take(x, np.array([7, -9]), 0, mode="clip"),
        lambda x: np.take(x, [7, -9], -1, mode="wrap"),
        lambda x: np.take(x, 2, 1),
        lambda x: np.take_along_axis(x, np.array([3, 1, 3]), None),
        lambda x: np.take_along_axis(x, np.array([[3], [1], [3]]), 1),
        lambda x: np.take_along_axis(x[:1], np.array([[3], [1], [3]]), -1),
        lambda x: np.compress(mask, x, 0),
        lambda x: np.compress([0, 1], x, 1),
        lambda x: np.compress([0, 1, 1], x),
        lambda x: np.extract(x % 2 < 1, x),
        lambda x: np.extract([1, 0, 1], x),
        lambda x: np.choose([0, 1, 2, 0], x),
        lambda x: np.choose([5, -4, 2, 1], x, mode="wrap"),
        lambda x: np.choose(np.array([5, -4, 2, 1]), [x, 3.0, 2 * x], mode="clip"),
        lambda x: np.select([x < 2, x < 5], [x**2, 3.0], -x),
        lambda x: np.select([mask[:, None], True], [1, x]),
        lambda x: np.diag(x, 1),
        lambda x: np.diag(x[0], -2),
        lambda x: np.diag(x, 9),
        lambda x: np.diagonal(x, -1, 1, 0),
        lambda x: np.tril(x[0], 1),
        lambda x: x[np.tril_indices_from(x[:, :3])] * x[np.triu_indices_from(x[:, :3])],
        lambda x: x[np.diag_indices_from(x[:, :3])],
        lambda x: x[np.ix_(mask, [2, 0])],
        lambda x: np.ix_(x[0], mask, x[1]),
        lambda x: np.roll(x, 5) + np.roll(x, (1, -1), 1) + np.roll(x, 3, (0, 1)) + np.roll(x, [1, 2], [1, 0]),
        lambda x: np.roll(x, (1, 2)),
        lambda x: np.rot90(x, 5) + np.rot90(x, -3, (0, 1)) + np.rot90(x, 1, (-2, -1)),
        lambda x: [np.rollaxis(x[None], a, s) for a in range(-3, 3) for s in range(-3, 4)],
        lambda x: np.trim_zeros(np.pad(x[0], 3), "b"),
        lambda x: np.trim_zeros(np.pad(x[0], 3), "F"),
        lambda x: np.trim_zeros(x[0] * 0),
        lambda x: np.trim_zeros(x[0, :0]),
        lambda x: np.resize(x, (5, 7)),
        lambda x: np.resize(x, 0),
        lambda x: np.resize(x[:0], (2, 3)),
        lambda x: np.array_split(x, 5, -1),
        lambda x: np.split(x, [-1]),
        lambda x: np.piecewise(x[0], x[0] > 3, [lambda t: t**2, 4]),
        lambda x: np.piecewise(x, [x > 3, x <= 3], [lambda t, a, b=1: a * t**2 + b, 1], 2.0, b=5),
        lambda x: np.piecewise(x[0, 0], [x[0, 0] > 3], [1.0, np.sqrt]),
        lambda x: np.apply_along_axis(lambda r: np.stack([r, r[::-1]]), 0, x),
        lambda x: np.apply_along_axis(np.diag, -1, x[None]),
        lambda x: np.apply_along_axis(np.max, 1, x),
        lambda x: np.apply_over_axes(np.mean, x, 1),
        lambda x: np.lib.stride_tricks.sliding_window_view(x, (2, 3)),
        lambda x: np.lib.stride_tricks.sliding_window_view(x, (2, 2), (1, 1)),
        lambda x: np.lib.stride_tricks.sliding_window_view(x, 3, axis=-1),
    ):
        same(f, x)


def test_picking_says_what_it_needs():
    x = np.ones((2, 3))
    for error, match, f in [
        (ValueError, "2 choices", lambda x: np.choose([0, 2, 0], x)),
        (ValueError, "one or two dimensions", lambda x: np.diag(x[None])),
        (TypeError, "boolean", lambda x: np.select([[1, 0, 1]], [x])),
        (ValueError, "as many choices", lambda x: np.select([x > 0], [x, x])),
        (ValueError, "1 conditions and 3 functions", lambda x: np.piecewise(x, [x > 0], [1, 2, 3])),
        (ValueError, "a section or more", lambda x: np.array_split(x, 0)),
        (ValueError, "needs a row", lambda x: np.apply_along_axis(np.sum, 0, x[:, :0])),
        (ValueError, "keeps or removes", lambda x: np.apply_over_axes(lambda a, axis: a[0, 0], x, 0)),
        (ValueError, "not negative", lambda x: np.resize(x, (-1, 2))),
        (ValueError, "windows that fit", lambda x: np.lib.stride_tricks.sliding_window_view(x, 3, 0)),
        (ValueError, "'xy' or 'ij'", lambda x: np.meshgrid(x[0], indexing="yx")),
        (TypeError, "cannot cast", lambda x: np.concatenate([x, x], dtype="f4", casting="safe")),
        (TypeError, "cannot cast", lambda x: np.hstack([x, 1j * x], dtype="f4")),
        (ValueError, "needs sequences", lambda x: np.ix_(x, [0])),
        (ValueError, "'f', 'b' or both", lambda x: np.trim_zeros(x, "g")),
    ]:
        refuses(error, match, f, x)


if np.lib.NumpyVersion(np.__version__) >= "2.2.0":

    def test_trim_zeros_of_several_dimensions():
        x = np.arange(1.0, 7).reshape(2, 3)
        for trim, axis in itertools.product(("fb", "f", "b"), (None, 0, -1, (0, 1))):
            same(lambda x, t=trim, a=axis: np.trim_zeros(np.pad(x, ((1, 2), (3, 0))), t, a), x)


# Conventions


def test_parts_of_a_number():
    x = np.array([0.0, -3.0, np.inf, 1e-310, 0.5])
    for got, expected in zip(vjp(np.frexp, x)[0], np.frexp(x), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert grad(lambda x: np.frexp(x)[0])(3.0) == 0.25
    assert grad(lambda h: np.sum(np.heaviside(np.array([-1.0, 0, 2]), h)))(0.5) == 1
    assert grad(lambda x: np.heaviside(x, 0.5))(0.0) == 0


def test_i0_to_any_order_and_size():
    import scipy.special

    x = np.array([-20.0, -1.0, 0.0, 1e-9, 3.0, 200.0])
    first = grad(lambda x: np.sum(np.i0(x)))
    second = grad(lambda x: np.sum(first(x)))
    np.testing.assert_allclose(first(x), scipy.special.i1(x), rtol=1e-13)
    np.testing.assert_allclose(second(x), scipy.special.ivp(0, x, 2), rtol=1e-13)
    assert grad(lambda x: np.sum(np.i0(x)))(np.zeros((0, 2))).shape == (0, 2)


def test_nan_to_num_of_parts():
    z = np.array([complex(np.nan, 1), complex(1, np.inf), 1 + 1j])
    g = grad(lambda z: np.sum(np.real(np.nan_to_num(z)) + 2 * np.imag(np.nan_to_num(z))))(z)
    np.testing.assert_array_equal(g, [-2j, 1, 1 - 2j])
    x = np.array([np.nan, np.inf, -np.inf, 2.0])
    value, pull = vjp(lambda x: np.nan_to_num(x, True, 1.0, 2.0, 3.0), x)
    assert value.tolist() == [1, 2, 3, 2]
    assert pull(np.ones(4))[0].tolist() == [0, 0, 0, 1]


def test_real_if_close():
    z = np.array([1 + 1e-14j, 2.0])
    assert vjp(np.real_if_close, z)[0].dtype == float
    assert grad(lambda z: np.sum(np.real_if_close(z)))(z).tolist() == [1, 1]
    assert vjp(lambda z: np.real_if_close(z, tol=1e-20), z)[0].dtype == complex
    assert grad(np.real_if_close)(2.0) == 1


def test_functions_of_piecewise_keep_their_own_gradients():
    x = np.array([-1.0, 2.0, 3.0])
    f = lambda x, a: np.sum(np.piecewise(x, [x < 0, x > 2.5], [lambda t: a * t, a, 7.0]))
    gx, ga = grad(f, (0, 1))(x, 5.0)
    assert gx.tolist() == [5, 0, 0]
    assert ga == 0


def test_choices_of_mixed_dtype_promote():
    x = np.ones(3, "f4")
    for f in (
        lambda x: np.choose([0, 1, 0], [x, 2.0]),
        lambda x: np.choose([0, 1, 0], [x, np.arange(3)]),
        lambda x: np.select([x > 0], [x], 2.0),
        lambda x: np.select([x > 0], [1j * x], 2),
        lambda x: np.select([x > 0], [x], np.float64(1)),
    ):
        assert vjp(f, x)[0].dtype == f(x).dtype


def test_what_is_told_without_the_entries():
    x = np.array([[1.5, 2, 3]], "f4")
    seen = {}

    def f(x):
        for g in (
            np.shape,
            np.ndim,
            np.size,
            lambda x: np.size(x, 1),
            lambda x: np.size(x, (0, 1)) if np.lib.NumpyVersion(np.__version__) >= "2.4.0" else 0,
            np.iscomplexobj,
            np.isrealobj,
            lambda x: np.result_type(x, "i2", 1.0),
            lambda x: np.can_cast(x, "f8"),
            lambda x: np.common_type(x, np.arange(2)),
            lambda x: np.min_scalar_type(x[0, 0]),
            lambda x: np.shares_memory(x, np.ones(2)),
            lambda x: np.may_share_memory(np.ones(2), x),
            lambda x: np.einsum_path("ij,kj", x, x)[0],
            np.isscalar,
            np.iterable,
            lambda x: np.iterable(x[0, 0]),
            np.array_repr,
            np.array_str,
            lambda x: np.array2string(x, precision=1, separator=","),
            lambda x: np.array_repr(x[0, 0], precision=3),
            lambda x: np.isin(x, [2, 3]),
            lambda x: np.tril_indices_from(x, 1),
        ):
            seen[g] = g(x), g(np.array([[1.5, 2, 3]], "f4"))
        return np.sum(x)

    grad(f)(x)
    for got, expected in seen.values():
        assert type(got) is type(expected) or isinstance(got, np.bool)
        assert repr(got) == repr(expected)


def test_linear_functions_keep_nothing():
    from spmd.autodiff.tape import recording
    from spmd.autodiff.transform_arguments import lift

    x = np.ones((3, 3))
    with recording() as tape:
        y = lift(tape, x, "", str)
        for f in (
            lambda y: np.pad(y, 1),
            lambda y: np.pad(y, 1, "mean"),
            lambda y: np.insert(y, 1, y[0], 0),
            lambda y: np.resize(y, 20),
            lambda y: np.ldexp(y, 2),
            lambda y: np.gradient(y),
            lambda y: np.ediff1d(y),
        ):
            f(y)
        arrays = [a for node in tape.nodes[1:] for a in node.args if isinstance(a, np.ndarray)]
    assert not [a for a in arrays if a.dtype.kind == "f"]


def test_second_derivatives_of_composites_with_options():
    x = distinct(np.random.default_rng(0), (3, 4))
    check_grads(lambda x: np.pad(x**2, (5, 6), "reflect", reflect_type="odd") ** 2, (x,))
    check_grads(lambda x: np.pad(x**2, (2, 3), "maximum", stat_length=2) * 2, (x[0],))
    check_grads(lambda x: np.sum(np.apply_along_axis(lambda r: r * np.sum(r**2), 0, x)), (x,))


def test_poly1d_of_a_traced_array():
    f = lambda c: np.poly1d(c)(2.0) + np.poly1d(c).deriv()(1.0)
    check_grads(f, (np.array([1.0, 2, 3]),))


def test_classes_that_would_cut_off_raise():
    x = np.ones(3)
    from spmd.errors import TracedConversionError

    for f in (
        lambda x: np.vectorize(lambda t: t * 2)(x),
        np.asmatrix,
        np.ndenumerate,
        np.ma.array,
        np.float64,
        lambda x: np.broadcast(x, 2.0),
        lambda x: np.nditer(x),
        lambda x: np.r_[x, x],
        lambda x: np.c_[x, x],
        lambda x: np.mgrid[0 : x[0] : 1],
    ):
        with pytest.raises((TracedConversionError, TypeError)):
            grad(lambda x, f=f: f(x))(x)
    assert isinstance(stop_gradient(x), np.ndarray)


# In a body: x varies over the workers, v is the same on all; some values are differentiated, some only have a state.

BODIES = {
    "pad": lambda x, v: (
        sum(np.pad(x, 2, m).sum() for m in "edge mean linear_ramp maximum wrap median".split())
        + np.pad(x, 1, constant_values=v[0]).sum()
        + np.pad(v, 3, "reflect", reflect_type="odd").sum()
    ),
    "insert": lambda x, v: np.insert(x, [1, 2, 3], v).sum() + np.insert(v, 1, x[0]).sum() + np.delete(x, [1]).sum(),
    "choose": lambda x, v: np.choose([0, 1, 0], [x[:3], v]).sum() + np.choose(v.astype(int) % 2, [x[0], 3.0]).sum(),
    "piecewise": lambda x, v: (
        np.piecewise(x, [x > 1], [lambda t: t * v[0], 2.0]).sum()
        + np.piecewise(v, [x[:3] > 1], [lambda t: t * v[0], 2.0]).sum()
    ),
    "apply": lambda x, v: (
        np.apply_along_axis(lambda r: r * v[0], 0, np.stack([x, x])).sum()
        + np.apply_over_axes(lambda a, i: np.sum(a * v[0], i), np.outer(v, v), (0, 1)).sum()
    ),
    "select": lambda x, v: np.select([x[:3] > 1], [v * x[0]], x[0]).sum() + np.multiply(*np.ix_(x, v)).sum(),
    "pick": lambda x, v: (
        np.take(v, np.argsort(x[:3])).sum()
        + np.compress(x[:3] > 1, v).sum() * np.extract(x[:3] > 1, v).sum()
        + np.sum(np.tril(np.outer(x, v)))
    ),
    "change": lambda x, v: np.resize(v, 5).sum() + np.trim_zeros(x).sum() + x[np.isin(x, v)].sum(),
    "entries": lambda x, v: np.frexp(x)[0].sum() + np.i0(v).sum() + np.heaviside(x, v[0]).sum(),
    "convolve": lambda x, v: np.convolve(x, v).sum() * np.correlate(v, x, "same")[0],
    "interp": lambda x, v: np.interp(x, [0.0, 1, 2], v).sum() + np.interp(v, [0.0, 1, 2], x[:3], period=v[0]).sum(),
    "gradient": lambda x, v: np.gradient(x, v[0]).sum() + np.gradient(v, np.sort(x[:3])).sum(),
    "unwrap": lambda x, v: np.unwrap(x * 4, period=v[0] + 5).sum() + np.ediff1d(v, x).sum(),
    "polynomials": lambda x, v: (
        np.polyval(v, x).sum()
        + np.polymul(v, x).sum()
        + np.polydiv(x, v)[0].sum()
        + np.poly(x).sum()
        + np.abs(np.sum(np.roots(v) ** 2))
        + np.vander(v).sum()
    ),
    "polyfit": lambda x, v: np.polyfit(np.arange(3.0) + v, x[:3], 1).sum(),
    "spaces": lambda x, v: (
        np.linspace(x[0], v, 3).sum() + np.geomspace(v[0], x[:2], 3).sum() + np.logspace(0, v[0], 3).sum()
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_in_a_body(name):
    import spmd

    f, mesh = BODIES[name], spmd.Mesh(a=2)
    rng = np.random.default_rng(0)
    x, v = rng.uniform(0.5, 2, 8), rng.uniform(1, 2, 3)

    def alone(x, v):
        return f(x[:4], v) + f(x[4:], v)

    body = lambda x, v: spmd.psum(f(x, v) + 0 * x[0], "a")
    whole = spmd.map(body, mesh=mesh, in_specs=(spmd.P("a"), spmd.P()), out_specs=spmd.P())
    # Outside of bodies NumPy does not ask all arguments: `np.pad(bare, 1, constant_values=traced)` is an error.
    expected, wanted = alone(x, v), grad(alone, (0, 1))(x, v)
    np.testing.assert_allclose(float(whole(x, v)), expected)
    for argnums in ((0,), (1,), (0, 1)):
        value, gs = spmd.value_and_grad(whole, argnums)(x, v)
        np.testing.assert_allclose(float(value), expected)
        for k, g in zip(argnums, gs, strict=True):
            np.testing.assert_allclose(g.numpy() if hasattr(g, "numpy") else g, wanted[k], atol=1e-12)
