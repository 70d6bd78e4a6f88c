"""Convolution, interpolation, finite differences, polynomials: against finite differences, and against NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from rules import Table, complex_, of, one, positive, signed

from spmd.autodiff import grad, tree, vjp
from spmd.autodiff.check import check_grads, check_vjp
from spmd.errors import TracedConversionError

TABLE = Table()
row = TABLE.row
both = (signed, complex_)


def knots(rng, shape):
    """Increasing numbers, further apart than a step."""
    return np.cumsum(rng.uniform(0.5, 1, shape)) - 2


def between(rng, shape):
    """Numbers inside and outside of most knots."""
    return rng.uniform(-3, 3, shape)


def leaps(rng, shape):
    """A series whose steps are clear of half a turn, be a turn 2 or 2π/3."""
    return np.cumsum(rng.choice([-0.4, 0.3, 2.3, -2.2], shape)) + rng.uniform(0, 0.1)


def monic(p):
    return np.append(np.ones_like(p[:1]), p)


def same(f, *args, slope=True):
    """f has the same result, shape and dtype traced and bare, and a right derivative."""
    value, _ = vjp(f, *args)
    for got, expected in zip(tree.leaves(value), tree.leaves(f(*args)), strict=True):
        assert np.shape(got) == np.shape(expected)
        assert np.result_type(got) == np.result_type(expected)
        close = 1e3 * max((np.finfo(a.dtype).eps for a in (got, *args) if hasattr(a, "dtype")), default=1e-15)
        np.testing.assert_allclose(got, expected, rtol=close, atol=close)
    if slope and all(np.isfinite(y).all() for y in tree.leaves(value)):
        check_vjp(f, args)


for mode, d in itertools.product(("full", "same", "valid"), both):
    for name in ("convolve", "correlate"):
        f = getattr(np, name)
        row(f"{name}-{mode}-{d.__name__}", lambda a, v, f=f, m=mode: f(a, v, m), (d, d), of("4 2", "2 4", "3 3"))
row("convolve-number", np.convolve, (signed, signed), of(". 5", "3 ."))
row("correlate-mixed", lambda a, v: np.correlate(a, v) * np.convolve(v, a, 1)[:2], (signed, complex_), of("3 2"))
for d in both:
    row(f"interp-{d.__name__}", lambda x, xp, fp: np.interp(x, xp, fp), (between, knots, d), of("23 4 4", ". 3 3"))
    row(
        f"interp-sides-{d.__name__}",
        lambda x, fp, left: np.interp(x, [0, 0.5, 2], fp, left.astype(np.result_type(fp, float))[()], 3),
        (between, d, d),
        of("6 3 ."),
    )
row("interp-one", lambda x, fp: np.interp(x, [0.1], fp), (signed, signed), of("4 1"))
row("interp-x", lambda x: np.interp(x, np.arange(-2.0, 3), [0, 1, 0, 3, 1]), lambda rng, s: inner_knots(rng, s), one)
row(
    "interp-period",
    lambda x, xp, fp, period: np.interp(x, xp, fp, 7.0, period=period),
    (between, knots, signed, lambda rng, s: rng.uniform(5, 6, s)),
    of("5 4 4 ."),
)
for d in both:
    row(f"gradient-{d.__name__}", lambda f: np.gradient(f, 0.5, edge_order=2), d, of("33", "4"))
    row(f"gradient-axis-{d.__name__}", lambda f: np.gradient(f, axis=-1), d, of("23", "2", "02"))
row(
    "gradient-spaced",
    lambda f, h, x: np.gradient(f, h, x, axis=(1, 0)),
    (signed, positive, knots),
    of("32 . 3"),
)
row("gradient-coordinates", lambda f, x: np.gradient(f, x, edge_order=2), (signed, knots), of("4 4"))
row("unwrap", lambda p: np.unwrap(p * 3) + np.unwrap(p, 1.0, 0, period=2.0), leaps, of("5", "1"))
row("unwrap-period", lambda p, t: np.unwrap(p, period=t), (leaps, lambda rng, s: rng.uniform(1.9, 2.1, s)), of("5 ."))
row("ediff1d", lambda x, a, b: np.ediff1d(x, a, b), (signed,) * 3, of("23 2 .", "4 0 2", "0 1 1"))

# polynomials
for d in both:
    k = d.__name__
    row(f"polyval-{k}", lambda p, x: np.polyval(p, x), (d, d), of("3 .", "3 23", "0 2", "1 0"))
    row(f"polyadd-polysub-{k}", lambda p, q: np.polyadd(p, q) * np.polysub(q, p), (d, d), of("3 2", "1 3", ". 2"))
    row(f"polymul-{k}", lambda p, q: np.polymul(p, q), (d, d), of("3 2", "1 3"))
    row(f"polydiv-{k}", lambda p, q: np.polydiv(p, monic(q)), (d, d), of("4 1", "3 2", "2 2"))
    row(f"polyder-{k}", lambda p: np.polyder(p) * np.polyder(p, 2)[:1], d, of("3", "5"))
    row(f"polyint-{k}", lambda p, c: np.polyint(p, 2, c) * np.polyint(p, k=c[0])[0], (d, d), of("3 2", "1 1"))
    row(f"poly-{k}", np.poly, d, of("3", "1"))
    row(f"vander-{k}", lambda x: np.vander(x) + np.vander(x, 3, increasing=True), d, of("3"))
row("roots", lambda p: np.sum(np.roots(p) ** 3), complex_, of("4", "2"))
row("roots-real", lambda p: np.abs(np.sum(np.roots(p) ** 2)), signed, of("4"))
row("polyval-list", lambda x: np.polyval([1.0, 2.0, 3.0], x) + np.polymul([1.0, 2], x)[0], signed, of("3"))
row("polyfit", lambda x, y: np.polyfit(x, y, 2), (knots, signed), of("5 5", "4 42"))
row("polyfit-weights", lambda y, w: np.polyfit(np.arange(5.0), y, 1, w=w), (signed, positive), of("5 5", "52 5"))

# numbers at even distances
for d in both:
    k = d.__name__
    row(f"linspace-{k}", lambda a, b: np.linspace(a, b, 4, axis=-1), (d, d), of(". .", "3 23"))
    row(f"linspace-step-{k}", lambda a, b: np.linspace(a, b, 3, False, True), (d, d), of(". .", "0 0"))
row("logspace", lambda a, b, c: np.logspace(a, b, 3, base=c, axis=-1), (signed, signed, positive), of(". . .", "2 . 2"))
row("logspace-ten", lambda a: np.logspace(a, 1, 4, endpoint=False), signed, of(".", "2"))
row("geomspace", lambda a, b: np.geomspace(a, b, 4, axis=-1), (positive, positive), of(". .", "2 2"))
row("geomspace-negative", lambda a: np.geomspace(-a, -2, 4), positive, of("."))
row("geomspace-complex", lambda a, b: np.geomspace(a, b, 4), (complex_, complex_), of(". ."))


def inner_knots(rng, shape):
    return np.floor(rng.uniform(-3, 4, shape)) + rng.uniform(0.1, 0.9, shape)


TestRows = TABLE.tests()


# Values are NumPy's, whatever the options


def test_convolutions_have_numpys_values():
    rng = np.random.default_rng(0)
    for m, n, mode in itertools.product(range(1, 6), range(1, 6), ("full", "same", "valid", 0, 1, 2)):
        a, v = rng.normal(size=m) + 1j * rng.normal(size=m), rng.normal(size=n) + 1j * rng.normal(size=n)
        for f in (np.convolve, np.correlate):
            for x, y in ((a, v), (a.real, v), (a, v.real), (a.real, v.real)):
                same(lambda x, y, f=f, mode=mode: f(x, y, mode), x, y)
                expected = f(x, y.tolist(), mode)
                np.testing.assert_allclose(vjp(lambda x, f=f, y=y, mode=mode: f(x, y.tolist(), mode), x)[0], expected)
    with pytest.raises(ValueError, match="empty"):
        grad(lambda x: np.convolve(x, [])[0])(np.ones(2))


def test_interp_has_numpys_values():
    rng = np.random.default_rng(0)
    xp, fp = np.array([0.0, 1.0, 2.5, 4.0]), rng.normal(size=4)
    x = np.array([-1, 0, 0.5, 1, 2.5, 3, 4, 5, -np.inf, np.inf, np.nan])
    for values, sides in itertools.product((fp, fp * 1j), ((None, None), (7.0, None), (None, np.float64(3)))):
        got = vjp(lambda fp, sides=sides: np.interp(x, xp, fp, *sides), values)[0]
        np.testing.assert_allclose(got, np.interp(x, xp, values, *sides))
    shuffled = [2.5, -4.0, 7.0, 1.0]
    for period in (3.0, -3, 10):
        same(lambda fp, period=period: np.interp(x[:8], shuffled, fp, period=period), fp)
    assert vjp(lambda x: np.interp(x, xp, fp), np.float32(0.5))[0].dtype == np.interp(np.float32(0.5), xp, fp).dtype
    for bad in (([], []), ([1.0, 2.0], [1.0])):
        with pytest.raises(ValueError, match=r"np\.interp needs two sequences"):
            grad(lambda x, bad=bad: np.interp(x, *bad))(1.0)


def test_interp_at_its_ends():
    """At a knot the slope is that of the interval after it, at the last one of that before it, as in JAX."""
    f = lambda x: np.interp(x, [0.0, 1.0, 3.0], [0.0, 2.0, 1.0])
    assert [grad(f)(x) for x in (-1.0, 0.0, 1.0, 3.0, 4.0)] == [0, 2, -0.5, -0.5, 0]
    ends = lambda fp: np.sum(np.interp(np.array([-1.0, 0, 3, 4, np.inf]), [0.0, 1.0, 3.0], fp))
    assert grad(ends)(np.ones(3)).tolist() == [2, 0, 3]


@pytest.mark.parametrize("edge_order", [1, 2])
def test_gradient_has_numpys_values(edge_order):
    rng = np.random.default_rng(0)
    f = rng.normal(size=(4, 5))
    x, y = np.sort(rng.normal(size=4)), np.arange(5.0)
    for args, axis in [
        ((), None),
        ((), 0),
        ((), (-1,)),
        ((), (1, 0)),
        ((2.0,), None),
        ((2, 0.5), None),
        ((x, y), None),
        ((x, 3.0), None),
        ((y, x), (1, 0)),
        (([0, 1, 3, 4],), 0),
        ((np.arange(5),), 1),
    ]:
        same(lambda f, args=args, axis=axis: np.gradient(f, *args, axis=axis, edge_order=edge_order), f)
    # NumPy takes evenly spaced coordinates for one number; each keeps its own derivative here.
    check_grads(lambda f, y: np.gradient(f, y, axis=1, edge_order=edge_order), (f, y))
    same(lambda h: np.gradient([1, 2, 4, 7], h, edge_order=edge_order), 0.5)
    same(lambda f: np.gradient(f, np.float64(2), edge_order=edge_order), f[0].astype("f4"))


def test_gradient_says_what_it_needs():
    x = np.ones((2, 3))
    for args, options, error in [
        ((1.0, 1.0, 1.0), {}, TypeError),
        ((np.ones(3), 1.0), {}, ValueError),
        ((), {"edge_order": 2}, ValueError),
        ((), {"edge_order": 3}, ValueError),
    ]:
        with pytest.raises(error, match=r"np\.gradient needs"):
            grad(lambda x, args=args, options=options: np.gradient(x, *args, **options)[0].sum())(x)


def test_unwrap_has_numpys_values():
    rng = np.random.default_rng(0)
    p = rng.uniform(-9, 9, (3, 7))
    for options in ({}, {"axis": 0}, {"discont": 4.0}, {"period": 3.0}, {"period": 3.0, "discont": 2.5, "axis": 0}):
        same(lambda p, options=options: np.unwrap(p, **options), p)


def test_ediff1d_casts_as_numpy_does():
    x = np.arange(3.0, dtype="f4")
    same(lambda x: np.ediff1d(x, 9.0, [1, 2]), x)
    with pytest.raises(TypeError, match="to_end that float32 can hold"):
        grad(lambda x: np.ediff1d(x, 1j)[0])(x)


def test_polynomials_have_numpys_values():
    rng = np.random.default_rng(0)
    p, q = rng.normal(size=4), rng.normal(size=2)
    zeros = np.array([0.0, 0.0, 1.0, 2.0])
    for f in (
        lambda p: np.polymul(zeros, p),
        lambda p: np.polymul([0, 0], p),
        lambda p: np.polydiv(np.convolve(p, [1, 2]), [1, 2]),
        lambda p: np.polydiv(p, [2]),
        lambda p: np.polydiv(p, [0.25, 1]),
        lambda p: np.polydiv([0.25, 1, 3, 0], p[:2]),
        lambda p: np.polydiv([1.0, 2.0], p),
        lambda p: np.polyadd(p, 3.0),
        lambda p: np.polysub([1, 2, 3, 4, 5], p),
        lambda p: np.polyder(p, 0),
        lambda p: np.polyder(p, 6),
        lambda p: np.polyint(p),
        lambda p: np.polyint(p, 0),
        lambda p: np.polyint(p, 3, [1, 2, 3]),
        lambda p: np.polyint(p, 2, k=4.0),
        lambda p: np.polyval(p, 2.0),
        lambda p: np.polyval(p, [[1, 2], [3, 4]]),
        lambda p: np.poly([1, 2]) * p[0],
        lambda p: np.vander(p, 0),
        lambda p: np.vander(p, 1),
    ):
        same(f, p)
        same(f, p.astype("f4"), slope=False)
    p1, q1 = np.poly1d(p), np.poly1d(q)
    for f in (np.polyadd, np.polysub, np.polymul):
        got = vjp(lambda q, f=f: f(p1, q).coeffs, q)[0]
        np.testing.assert_allclose(got, f(p1, q1).coeffs)
    np.testing.assert_allclose(
        vjp(lambda p: np.poly1d(p)(2.0) * (np.poly1d(p) ** 2)(1.0), p)[0], p1(2.0) * p1(1.0) ** 2
    )
    np.testing.assert_allclose(vjp(lambda p: np.polyval(p, q1).coeffs, p)[0], np.polyval(p, q1).coeffs)
    for f in (lambda p: np.polyder(p, -1), lambda p: np.polyint(p, -1), lambda p: np.polyint(p, 2, [])):
        with pytest.raises(ValueError, match=r"np\.poly\w+ needs"):
            grad(lambda p, f=f: f(p)[0])(p)
    with pytest.raises(TracedConversionError):
        grad(lambda a: np.polyval([a, 1.0], 2.0))(1.0)


def test_roots():
    for p in ([0, 0, 1, -3, 2, 0], [2.0, 1.0], [3.0], [0, 0], [1, 2, 5.0]):
        p = np.array(p, float)
        np.testing.assert_allclose(vjp(np.roots, p)[0], np.roots(p))
    # (x - 1)(x - 3): dr/dc = -1 / p'(r)
    jacobian = vjp(np.roots, np.array([1.0, -4.0, 3.0]))[1]
    np.testing.assert_allclose(jacobian(np.array([1.0, 0]))[0], [-4.5, -1.5, -0.5])
    # A double root has no derivative; the single one beside it does.
    with np.errstate(all="ignore"):
        _, pull = vjp(np.roots, np.array([1.0, -1, 0, 0]))
        np.testing.assert_allclose(pull(np.array([1.0, 0, 0]))[0], [-1, -1, -1, -1])
        assert not np.isfinite(pull(np.array([0.0, 1, 0]))[0]).all()


def test_poly_of_conjugate_pairs_is_real():
    z = np.array([1 + 2j, 1 - 2j])
    same(np.poly, np.array([1.0, 2]))
    value, _ = vjp(np.poly, z)
    assert value.dtype == float
    np.testing.assert_allclose(value, np.poly(z))
    assert grad(lambda z: np.poly(z) + 0 * np.sum(z))(np.ones(0)).shape == (0,)
    assert vjp(np.poly, np.ones(2, "f2"))[0].dtype == np.poly(np.ones(2, "f2")).dtype


def test_linspace_has_numpys_values():
    a, b = np.array([1.0, 2.0]), np.array([[3.0], [4.0], [5.0]])
    for num, endpoint, axis, retstep in itertools.product((0, 1, 2, 5), (True, False), (0, -1), (True, False)):
        same(lambda a, b, n=num, o=(endpoint, retstep, None, axis): np.linspace(a, b, n, *o), a, b)
        if not retstep:
            same(lambda a, b, n=num, e=endpoint, x=axis: np.geomspace(a, b, n, e, axis=x), a, b)
            same(lambda a, b, n=num, e=endpoint, x=axis: np.logspace(a, b, n, e, axis=x), a, b)
            same(lambda a, b, n=num, e=endpoint, x=axis: np.logspace(a, b, n, e, 2, axis=x), a, b)
            same(lambda a, b, n=num, e=endpoint, x=axis: np.logspace(a, 1, n, e, b, axis=x), a, b)
    for f in (np.linspace, np.geomspace, np.logspace):
        for dtype in (None, "f4", "c16"):
            same(lambda a, f=f, dtype=dtype: f(a, 3.0, 4, dtype=dtype), a)
            same(lambda a, f=f, dtype=dtype: f(a, 3, 4, dtype=dtype), a.astype("f4"))
        same(lambda a, f=f: f(a, 2, 4), 1.0)
    assert vjp(lambda a: np.linspace(a, 5, 3, dtype=int), 0.5)[0].tolist() == np.linspace(0.5, 5, 3, dtype=int).tolist()
    np.testing.assert_allclose(vjp(lambda a: np.geomspace(a, -3.0, 4), -1.0)[0], np.geomspace(-1.0, -3.0, 4))
    with pytest.raises(ValueError, match="zero"):
        grad(lambda a: np.geomspace(a, 0.0)[0])(1.0)
    with pytest.raises(ValueError, match="non-negative"):
        grad(lambda a: np.linspace(a, 1.0, -1)[0])(1.0)


@pytest.mark.parametrize("cov", [True, "unscaled"])
@pytest.mark.parametrize("columns", [(), (2,)])
def test_the_covariance_of_a_fit(cov, columns):
    rng = np.random.default_rng(0)
    x, y = np.arange(6.0), rng.normal(size=(6, *columns))
    f = lambda x, y, w: np.polyfit(x, y, 2, cov=cov, w=w)
    w = rng.uniform(1, 2, 6)
    for got, want in zip(vjp(f, x, y, w)[0], f(x, y, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9)
    check_grads(f, (x, y, w), rtol=1e-6)


def test_the_last_of_a_geometric_series_is_what_was_given():
    y = vjp(lambda a: np.geomspace(a, 7.7, 13), 0.3)[0]
    assert y[-1] == 7.7
