"""Reductions with all their options, order statistics, sums that skip NaN, covariances, methods of ufuncs."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from rules import Table, complex_, distinct, full, of, one, positive, signed

from spmd.autodiff import grad, jacrev, tree, value_and_grad, vjp
from spmd.autodiff.dispatch import load_families
from spmd.autodiff.primitive import constants, handlers, in_place, refusals
from spmd.autodiff.tracer import Array, value_of
from spmd.errors import DifferentiationError

# Where nothing is left NumPy warns; what we do then is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:(Mean of empty|Degrees of freedom|All-NaN)")
TABLE = Table()
row = TABLE.row
both = (signed, complex_)
nan = np.nan


def mask(x):
    """Selects some entries of each array, none of some slices."""
    return np.reshape(np.arange(x.size) % 3 != 1, x.shape) & (np.arange(x.shape[-1]) != 2)


def holes(x):
    """x with NaN in some places, in all of some slices."""
    return np.where(mask(x), x, nan)


def apart(x):
    """x with entries that are far from each other, so that no standard deviation comes near to zero."""
    return x + 3.0 * np.reshape(np.arange(x.size), x.shape)


# reductions
for k, o in enumerate([{}, {"axis": 0}, {"axis": (-1, 0)}, {"axis": -1, "keepdims": True}]):
    for f in (np.sum, np.prod, np.max, np.min):
        for domain in (distinct, complex_) if f in (np.sum, np.prod) else (distinct,):
            g = lambda x, f=f, o=o: f(x, where=mask(x), initial=0.2, **o)
            row(f"{f.__name__}-options-{k}-{domain.__name__}", g, domain, of("23", "232", "04"))
    for f, domain in itertools.product((np.mean, np.var, np.std), both):
        g = lambda x, f=f, o=o: f(apart(x), where=mask(x) | (np.arange(x.shape[-1]) != 0), **o)
        row(f"{f.__name__}-where-{k}-{domain.__name__}", g, domain, of("23", "242"))
    for f, domain in itertools.product((np.var, np.std), both):
        g = lambda x, m, f=f, o=o: f(x, mean=m, ddof=1, **o) + f(x, mean=1.0, correction=0, **o)
        row(f"{f.__name__}-mean-{k}-{domain.__name__}", g, (domain, domain), of("23 3", "242 ."))
    for f in (np.nansum, np.nanprod, np.nanmax, np.nanmin, np.nanmean, np.nanvar, np.nanstd, np.nanmedian):
        if f is np.nanmax or f is np.nanmin:
            g = lambda x, f=f, o=o: f(holes(x), initial=0.2, **o)
        else:
            g = lambda x, f=f, o=o: np.nan_to_num(f(holes(x), **o))
        row(f"{f.__name__}-{k}", g, distinct, of("23", "243"))
    row(f"median-{k}", lambda x, o=o: np.median(x, **o), distinct, of("23", "242", "51"))
    row(f"quantile-{k}", lambda x, o=o: np.quantile(x, [0.3, 0.9], **o), distinct, of("23", "242", "51"))
    row(f"nanquantile-{k}", lambda x, o=o: np.nan_to_num(np.nanquantile(holes(x), 0.4, **o)), distinct, of("25", "242"))
    row(f"average-{k}", lambda x, o=o: np.average(x, returned=True, **o)[0], signed, of("23", "242"))

row("sum-0d", lambda x: np.sum(x, 0) * np.prod(x, axis=-1) * np.max(x, 0, keepdims=True), signed, of("."))
row("cumulative-0d", lambda x: np.cumsum(x, 0) * np.cumprod(x, 0) * np.cumulative_sum(x), signed, of("."))
row("cumsum-dtype", lambda x: np.cumsum(x, 0, "c16") * np.cumprod(x, axis=-1, dtype="c16"), signed, of("23", "02"))
row("cumulative-dtype", lambda x: np.cumulative_prod(x, dtype="c16", include_initial=True) * 1j, signed, of("3", "0"))
row(
    "nanvar-options",
    lambda x: np.nan_to_num(np.nanvar(holes(x), 0, mean=0.3, ddof=1, where=x > -9)),
    distinct,
    of("44"),
)
row("nanstd-complex", lambda x: np.nan_to_num(np.nanstd(holes(x * x), 0, correction=1)), complex_, of("74"))
row("nancumsum", lambda x: np.nancumsum(holes(x), 0) * np.nancumprod(holes(x), -1), signed, full)
row("nancumsum-flat", lambda x: np.nancumsum(holes(x)) * np.nancumprod(holes(x), dtype="c16"), signed, full)
row("average-weights", lambda x, w: np.average(x, (2, 0), w, keepdims=True), (signed, positive), of("234 42"))
row("average-weights-only", lambda w: np.average(np.arange(6).reshape(2, 3), -1, w), positive, of("3"))
row("average-returned", lambda x, w: np.average(x, 1, w, True), (complex_, positive), of("23 3", "23 23"))

# order
row("sort-complex", lambda x: np.sort(x, 0) * np.sort(x, None, stable=True)[:1], complex_, of("32", "5"))
row("sort_complex", np.sort_complex, distinct, of("32", "0"))
row("partition", lambda x: np.partition(x, 1) * np.partition(x, [0, -1], 0), distinct, of("33", "52"))
row("partition-flat", lambda x: np.partition(x, 2, None) ** 2, distinct, of("33", "5"))
METHODS = (
    "inverted_cdf averaged_inverted_cdf closest_observation interpolated_inverted_cdf hazen weibull linear "
    "median_unbiased normal_unbiased lower higher midpoint nearest"
).split()
SMOOTH = "interpolated_inverted_cdf hazen weibull linear median_unbiased normal_unbiased".split()
for m in METHODS:
    row(
        f"quantile-{m}",
        lambda x, m=m: (
            np.quantile(x, 0.41, method=m) * np.percentile(x, [[8, 46], [64, 93]], 0, method=m)[..., :1]
            + np.nanpercentile(holes(x), 37, -1, method=m)[0]
        ),
        distinct,
        of("54"),
    )
for m in SMOOTH:
    row(
        f"quantile-q-{m}",
        lambda x, q, m=m: np.quantile(x, q, 0, method=m) + np.nanpercentile(holes(x), 100 * q, 0, method=m),
        (distinct, lambda rng, shape: rng.choice([0.31, 0.57, 0.83], shape)),
        of("52 .", "4 3"),
    )
row(
    "quantile-weights",
    lambda x, w: (
        np.quantile(x, [0.2, 0.7], 0, weights=w[:, 0], method="inverted_cdf") * np.sum(w)
        + np.nanquantile(holes(x), 0.5, (0, 1), weights=w, method="inverted_cdf")
    ),
    (distinct, positive),
    of("43 43"),
)

# differences
row("diff-options", lambda x: np.diff(x, 2, 0, 1.0, x[:1]) * np.diff(x, 0, axis=0)[:1], signed, of("32", "4"))
row("diff-ends", lambda x: np.diff([1, 3, 2], 2, prepend=x, append=x[0]), signed, of("3"))
row(
    "trapezoid-options",
    lambda y, x, h: np.trapezoid(y, x, axis=1) * np.trapezoid(y, x[0], axis=-1).sum() + np.trapezoid(y, dx=h, axis=0),
    (signed, signed, positive),
    of("33 33 ."),
)
row("trapezoid-x", lambda x: np.trapezoid([1, 2, 4], x) * np.trapezoid([1, 2.0], dx=x[0]), signed, of("3"))

# covariance
samples = lambda rng, shape: rng.normal(size=shape)
for domain in (samples, complex_):
    name = domain.__name__
    row(f"cov-{name}", lambda x: np.cov(x) * 2, domain, of("24", "4"))
    row(f"cov-y-{name}", lambda x, y: np.cov(x, y, bias=True, dtype="c16"), (domain, samples), of("24 34", "5 5"))
    row(
        f"cov-weights-{name}",
        lambda x, w: np.cov(x, fweights=[1, 2, 1, 3], aweights=w) + np.cov(x, aweights=w, rowvar=True, ddof=0),
        (domain, positive),
        of("24 4"),
    )
    row(f"cov-columns-{name}", lambda x, y: np.cov(x, y, False, ddof=0), (domain, domain), of("42 43", "42 14"))
    row(f"corrcoef-{name}", lambda x, y: np.corrcoef(x, y) ** 2, (domain, samples), of("24 24", "5 15"))
row("corrcoef-columns", lambda x: np.corrcoef(x, rowvar=False), samples, of("52"))
row("corrcoef-scalar", lambda x: np.corrcoef(x) * x, samples, of("5"))

# histograms: the entries lie clear of inner edges
entries = lambda rng, shape: np.array([0, 4, 0.5, 1.5, 1.7, 2.5, 3.5]) + rng.uniform(-0.05, 0.05, 7)
KEYS = [0, 3, 1, 1, 0, 5, 1]
row("histogram", lambda x: np.histogram(x, 4, density=True), entries, of("7"))
row("histogram-edges", lambda x: np.histogram_bin_edges(x, "sturges") * np.histogram(x, 4)[1], entries, of("7"))
row("histogram-range", lambda x: np.histogram(x, 4, (np.min(x) - 0.1, 5), density=True), entries, of("7"))
row("histogram-weights", lambda x, w: np.histogram(x, 4, None, True, w), (entries, positive), of("7 7"))
row("histogram-complex", lambda w: np.histogram(KEYS, [-0.5, 0.5, 2, 9], weights=w)[0] ** 2, complex_, of("7"))
row("histogram-bins", lambda b: np.histogram([1, 3, 3.5, 7], b, density=True), lambda r, s: np.array([0, 2, 8.0]), one)
row(
    "histogram2d",
    lambda x, w: np.histogram2d(x, x[::-1], (4, [-1, 1.0, 2, 5]), density=True, weights=w),
    (entries, positive),
    of("7 7"),
)
row("histogramdd", lambda x: np.histogramdd([x, x * x + 1], 2, [None, (-1, 40)], True), entries, of("7"))
row("histogramdd-1", lambda x, w: np.histogramdd(x, 4, weights=w * w), (entries, signed), of("7 7"))
row("bincount", lambda w: np.bincount(KEYS, w * w) * np.bincount(KEYS, minlength=6, weights=w), signed, of("7"))

# methods of ufuncs
for k, o in enumerate([{}, {"axis": -1}, {"keepdims": True}, {"axis": None}]):
    for u in (np.add, np.multiply, np.maximum, np.minimum, np.fmax, np.fmin, np.logaddexp, np.logaddexp2, np.hypot):
        g = lambda x, u=u, o=o: u.reduce(x, **o) * u.reduce(x, initial=0.2, where=mask(x), dtype="f8", **o)
        row(f"{u.__name__}.reduce-{k}", g, distinct, of("54", "322", "11"))
    for u in (np.subtract, np.divide, np.float_power, np.copysign):
        o = {"axis": 1} if o == {"axis": None} else o
        g = lambda x, u=u, o=o: u.reduce(x, **o) + u.reduce(x, initial=1.2, where=mask(x), **o)
        row(f"{u.__name__}.reduce-{k}", g, positive, of("34", "31", "32"))
# Along a dimension that is contiguous NumPy's own are wrong for these two: see test_folds_go_in_order.
for u in (np.power, np.arctan2):
    g = lambda x, u=u: u.reduce(x) + u.reduce(x, initial=1.2, where=mask(x), keepdims=True)
    row(f"{u.__name__}.reduce", g, positive, of("34", "432"))
    row(f"{u.__name__}.accumulate", lambda x, u=u: u.accumulate(x) * u.accumulate(x, axis=-1), positive, of("53"))
ACCUMULATED = "add multiply maximum minimum fmax fmin logaddexp logaddexp2 hypot subtract divide copysign".split()
for u in (getattr(np, name) for name in ACCUMULATED):
    domain = positive if u is np.divide else distinct
    row(f"{u.__name__}.accumulate", lambda x, u=u: u.accumulate(x) * u.accumulate(x, axis=-1), domain, of("53", "04"))
    row(
        f"{u.__name__}.reduceat",
        lambda x, u=u: u.reduceat(x, [2, 0, 1, 1, 0]).sum(0) * u.reduceat(x, [0, 2], axis=-1)[0, :1],
        domain,
        of("34"),
    )
row("subtract.reduce-complex", lambda x: np.subtract.reduce(x) * np.divide.reduce(x), complex_, of("32", "4"))
row("add.reduceat-nothing", lambda x: np.add.reduceat(x, np.zeros(0, int)).sum(0) * x, signed, of("3", "32"))
row(
    "outer-options",
    lambda x: np.multiply.outer(x, [1, 2], dtype="c16")[..., 0] + np.divmod.outer(x, 3.0)[1],
    signed,
    one,
)
row(
    "outer-array",
    lambda x, y: np.hypot.outer(np.array([[0.5, 2]]), x) * np.arctan2.outer(x, y).sum(),
    both[:1] * 2,
    of("2 3"),
)

TestRows = TABLE.tests()


# Values are those of NumPy.


def same(f, *args, ulps=100):
    """f gives what it gives for bare arrays, and raises what it raises: also where it is differentiated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = tree.leaves(f(*args))
        except Exception as error:
            with pytest.raises(type(error)):
                vjp(f, *args)
            return
        got = [value_of(y) for y in tree.leaves(vjp(f, *args)[0])]
    assert len(got) == len(expected)
    for y, z in zip(got, map(np.asarray, expected), strict=True):
        assert (y.dtype, y.shape) == (z.dtype, z.shape)
        tolerance = ulps * np.finfo(z.dtype).eps if z.dtype.kind in "fc" else 0
        np.testing.assert_allclose(y, z, rtol=tolerance, atol=tolerance)


AXES = [None, 0, -1, (0, 1), (-1, 0), ()]
X = np.random.default_rng(0).normal(size=(3, 4, 2))
GAPS = np.where((np.arange(24).reshape(X.shape) % 5 == 1) | (np.arange(4) == 2)[:, None], nan, X)
HERE = np.random.default_rng(1).random(X.shape) > 0.4


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c16"])
@pytest.mark.parametrize("name", "sum prod max min mean var std median".split())
@pytest.mark.parametrize("skip", ["", "nan"])
def test_reductions_have_the_values_of_numpy(name, dtype, skip):
    f = getattr(np, skip + name)
    options = {"sum prod max min": [{}, {"where": HERE, "initial": 0.5}, {"where": HERE}, {"initial": 0.5}]}.get(
        next((key for key in ("sum prod max min",) if name in key), ""), [{}]
    )
    if name in ("mean", "var", "std"):
        options = [{}, {"where": HERE}, {"dtype": "c16"}]
    if name in ("var", "std"):
        options = [*options, {"ddof": 1}, {"correction": 2, "where": HERE}, {"mean": 0.25}, {"mean": 0.25, "ddof": 1}]
    for axis, keepdims, o in itertools.product(AXES, (False, True), options):
        for x in (X, GAPS):
            same(lambda x, o=o, k=keepdims, a=axis: f(x, axis=a, keepdims=k, **o), x.astype(dtype))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("f", [np.quantile, np.nanquantile])
def test_quantiles_have_the_values_of_numpy(f, method):
    for axis, keepdims, q in itertools.product(AXES, (False, True), (0.3, 0, 1.0, [0.1, 0.9], np.array([0, 1]))):
        for x in (X, GAPS, X.astype("f4")):
            same(lambda x, a=axis, k=keepdims, q=q: f(x, q, a, method=method, keepdims=k), x)
    same(lambda x: f(x, 0.5, method=method), np.array(2.0))
    same(lambda x: f(x, 0.5, axis=0, method=method), X[:0])
    same(lambda x: f(x, 1.5, method=method), X)
    same(lambda x: f(x, 0.5, weights=np.ones(X.shape), method=method), X)


def test_quantiles_of_weighted_entries_have_the_values_of_numpy():
    weights = np.random.default_rng(2).random(X.shape).round(1)
    for axis, q, x in itertools.product([None, 0, (0, 2)], [0, 0.3, 1.0, [0.1, 0.9]], [X, GAPS]):
        for f in (np.quantile, np.nanquantile):
            same(lambda x, a=axis, q=q, f=f: f(x, q, a, weights=weights, method="inverted_cdf"), x)
    same(lambda x: np.quantile(x, 0.4, (2, 0), weights=weights[:, 0, :].T, method="inverted_cdf"), X)
    same(lambda x: np.quantile(x, 0.4, 0, weights=-weights, method="inverted_cdf"), X)
    with pytest.raises(TypeError, match="real numbers"):
        vjp(lambda x: np.quantile(x, 0.5), X + 1j)


def test_other_statistics_have_the_values_of_numpy():
    weights = np.abs(X) + 1
    for axis, returned, keepdims in itertools.product([None, 0, (0, 1), (2, 0)], (False, True), (False, True)):
        same(lambda x, a=axis, r=returned, k=keepdims: np.average(x, a, None, r, keepdims=k), X)
        same(lambda x, a=axis, r=returned, k=keepdims: np.average(x, a, weights, r, keepdims=k), X.astype("f4"))
    same(lambda x: np.average(x, weights=np.ones(3)), X)
    same(lambda x: np.average(x, 0, weights=np.ones(4)), X)
    same(lambda x: np.average(x, 0, weights=np.zeros(3)), X)
    for n, axis in itertools.product((-1, 0, 1, 3), (0, -1)):
        same(lambda x, n=n, a=axis: np.diff(x, n, a, 1.0, np.ones_like(X)), X)
    for axis, kind in itertools.product((None, 0, -1), ("stable", "heapsort", None)):
        same(lambda x, a=axis, k=kind: np.sort(x, a, k), GAPS)
        same(lambda x, a=axis: np.partition(x, [0, 2] if a != -1 else 1, a), GAPS)
    for include, axis in itertools.product((False, True), (None, 1)):
        same(lambda x, i=include, a=axis: np.cumulative_sum(x, axis=a, include_initial=i), X)
        same(lambda x, i=include: np.cumulative_prod(x, include_initial=i, dtype="c8"), X[0, 0].astype("f4"))
    for rowvar, bias, ddof in itertools.product((False, True), (False, True), (None, 0, 1)):
        for fweights, aweights in itertools.product((None, np.array([1, 2, 3, 1])), (None, np.array([0.5, 1, 2, 1]))):
            for x, y in ((X[..., 0], None), (X[..., 0], X[:2, :, 1] * 1j), (X[0, :, 0], X[1, :, 0])):
                x, y = (x, y) if rowvar else (x.T, None if y is None else y.T)
                same(lambda x, o=(rowvar, bias, ddof, fweights, aweights), y=y: np.cov(x, y, *o), x.astype("f4"))
                same(lambda x, y=y, r=rowvar: np.corrcoef(x, y, r), x)
    for bad in ([1.5] * 4, [-1] * 4, [1] * 5, [[1] * 4]):
        same(lambda x, w=bad: np.cov(x, fweights=w), X[..., 0])
        same(lambda x, w=bad: np.cov(x, aweights=w), X[..., 0])
    same(lambda x: np.cov(x, ddof=1.5), X[..., 0])
    same(lambda x: np.cov(x), X)


@pytest.mark.parametrize("density", [None, True])
def test_histograms_have_the_values_of_numpy(density):
    x, w = np.random.default_rng(3).normal(size=(2, 60))
    w = w * w
    for bins, bounds in itertools.product([7, "auto", [-1.0, 0, 0.5, 2]], [None, (-1, 1.5)]):
        same(lambda x, o=(bins, bounds, density): np.histogram(x, *o), x.reshape(6, 10))
        same(lambda x, o=(bins, bounds): np.histogram_bin_edges(x, *o), x.astype("f4"))
        same(lambda x, w, o=(bins, bounds, density): np.histogram(x, *o, w), x, w)
        same(lambda w, o=(bins, bounds, density): np.histogram(x, *o, w * 1j), w)
    for bins, bounds in itertools.product([3, (2, 4), [[-1, 0, 2], 3]], [None, [None, (-1, 1)]]):
        same(lambda x, o=(bins, bounds, density): np.histogramdd(x, *o), x.reshape(30, 2).astype("f4"))
        same(lambda x, w, o=(bins, None, density): np.histogram2d(x, w, *o, w * w), x, w)
    same(lambda x: np.histogram2d(x, x, [-1, 0, 1, 2], density=density), x)
    same(lambda w: np.histogram(np.arange(8), 7, (0, 7), density, w), w[:8])
    for bad in ({"bins": 0}, {"bins": [2, 1]}, {"range": (1, 0)}, {"range": (0, np.inf)}, {"weights": w[:3]}):
        same(lambda x, o=bad: np.histogram(x, **o), x)
    for few in (x[:0], x[:1], x * nan):
        same(lambda x: np.histogram(x, density=density), few)
    for keys in (np.arange(60) % 7, np.zeros(60, int), np.arange(3)):
        same(lambda w, i=keys: np.bincount(i, w, 9), w.astype("f4"))
    same(lambda w: np.bincount([], w), w[:0])


UFUNCS = sorted(
    {u for u in vars(np).values() if isinstance(u, np.ufunc) and u.nin == 2 and u.nout == 1 and u.signature is None},
    key=lambda u: u.__name__,
)


@pytest.mark.parametrize("u", [u for u in UFUNCS if u is not np.ldexp], ids=lambda u: u.__name__)
def test_methods_of_ufuncs_have_the_values_of_numpy(u):
    # Along a dimension that is contiguous NumPy's own power and arctan2 are wrong: see test_folds_go_in_order.
    right = u not in (np.arctan2, np.power)
    axes = [0, 1, (0,), (0, 1), None] + [-1, ()] * right
    positive = np.abs(X) + 0.25
    for axis, keepdims in itertools.product(axes, (False, True)):
        for o in ({}, {"initial": 1.5}, {"initial": 1.5, "where": HERE}, {"where": HERE}, {"initial": None}):
            same(lambda x, a=axis, k=keepdims, o=o: u.reduce(x, axis=a, keepdims=k, **o), positive)
    for x in (positive[:0], GAPS, positive.astype("f4"), np.array(2.0)):
        same(lambda x: u.reduce(x), x)
        same(lambda x: u.reduce(x, initial=2.0, keepdims=True), x)
        same(lambda x: u.accumulate(x), x)
        same(lambda x: u.accumulate(x, -1, dtype="f8"), x)
    for axis in (0, 1, (1,), None):
        same(lambda x, a=axis: u.accumulate(x, axis=a), positive)
        for indices in ([2, 0, 1], [0, 0], [5], [-1]) if right else ():
            same(lambda x, a=axis, i=indices: u.reduceat(x, i, axis=a), positive[:, :, ::-1])
    same(lambda x: u.outer(x, [1.0, 2.0]), X)
    same(lambda x: u.outer(np.ones((1, 2)), x), X)
    with pytest.raises(DifferentiationError, match=rf"np\.{u.__name__}\.at(.|\n)*spmd\.at\(x\)\[i\]"):
        vjp(lambda x: u.at(x, 0, 1.0), X)


def test_every_method_of_every_ufunc_is_known():
    load_families()
    for u in UFUNCS:
        if u in constants or u in handlers:
            for method in ("reduce", "accumulate", "reduceat", "outer"):
                assert sum((u, method) in known for known in (constants, handlers, refusals)) == 1
                assert ((u, method) in constants) == (u in constants)
        assert (u, "at") in refusals
        assert (u, "at") in in_place
    for f in (np.sin.reduce, np.matmul.accumulate, np.divmod.reduce):
        with pytest.raises((DifferentiationError, RuntimeError, ValueError)):
            vjp(f, X)


def test_folds_go_in_order():
    x = np.random.default_rng(4).uniform(0.5, 2, (5, 3))
    for u in (np.power, np.arctan2):
        once = u(u(x[:, 0], x[:, 1]), x[:, 2])
        for f in (lambda x, u=u: u.reduce(x, axis=-1), lambda x, u=u: u.reduceat(x, [0], axis=-1)[:, 0]):
            np.testing.assert_array_equal(value_of(vjp(f, x)[0]), once)


# Conventions


def test_entries_that_tie():
    x = np.array([1.0, 3, 3, 0])
    for f in (np.max, np.nanmax, np.maximum.reduce, np.fmax.reduce):
        assert grad(f)(x).tolist() == [0, 0.5, 0.5, 0]
        np.testing.assert_allclose(grad(lambda x, f=f: f(x, initial=3.0))(x), [0, 1 / 3, 1 / 3, 0])
        assert grad(lambda x, f=f: f(x, initial=9.0))(x).tolist() == [0, 0, 0, 0]
        assert grad(lambda x, f=f: f(x, initial=0.0, where=[True, True, False, True]))(x).tolist() == [0, 1, 0, 0]
    # Sorting is stable, so that the first of equal entries is the first of them in order, for quantiles as well.
    y = np.array([2.0, 1, 2, 2])
    assert jacrev(np.sort)(y).argmax(1).tolist() == [1, 0, 2, 3]
    assert jacrev(lambda y: np.partition(y, 2))(y).sum(0).tolist() == [1, 1, 1, 1]
    assert grad(np.median)(y).tolist() == [0.5, 0, 0.5, 0]
    # A running extreme is the entry that came first.
    assert jacrev(np.maximum.accumulate)(np.array([1.0, 1, 2, 2, 0])).argmax(1).tolist() == [0, 0, 2, 2, 2]
    assert grad(lambda x: np.sum(np.fmin.accumulate(x)))(np.array([nan, 1, nan, 1, 0])).tolist() == [1, 3, 0, 0, 1]


@pytest.mark.filterwarnings("error")
def test_nan_entries_have_no_cotangent():
    x = np.array([[nan, 2.0, -1.0, 0.5], [1, nan, 3.0, -2.0]])
    there = ~np.isnan(x)
    for f in (np.nansum, np.nanprod, np.nanmean, np.nanvar, np.nanstd, np.nanmax, np.nanmin, np.nanmedian):
        for axis in (None, 0, 1):
            g = grad(lambda x, f=f, a=axis: np.sum(f(x, axis=a) ** 2))(x)
            assert np.all(np.isfinite(g))
            assert not np.any(g[~there])
            second = grad(lambda x, f=f, a=axis: np.sum(grad(lambda x: np.sum(f(x, axis=a) ** 3))(x) ** 2))(x)
            assert np.all(np.isfinite(second))
            assert not np.any(second[~there])
    for f in (np.nancumsum, np.nancumprod, lambda x: np.nanquantile(x, [0.2, 0.7], 0)):
        g = grad(lambda x, f=f: np.sum(f(x) ** 2))(x)
        assert np.all(np.isfinite(g))
        assert not np.any(g[~there])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_everywhere():
    x = np.full((2, 3), nan)
    x[0] = [1, 2, 3]
    for f in (np.nanmean, np.nanvar, np.nanstd, np.nanmax, np.nanmedian, lambda x, axis: np.nanquantile(x, 0.3, axis)):
        value, g = value_and_grad(lambda x, f=f: np.sum(np.nan_to_num(f(x, axis=1))))(x)
        assert np.isfinite(value)
        assert np.all(np.isfinite(g))
        assert not np.any(g[1])
        assert np.isnan(value_of(vjp(lambda x, f=f: f(x, axis=1), x)[0])).tolist() == [False, True]


@pytest.mark.filterwarnings("error")
def test_logarithms_of_sums_of_exponentials_neither_overflow_nor_underflow():
    x = np.array([1000.0, 1000, -np.inf, -1000])
    for u, more in ((np.logaddexp, np.log(2)), (np.logaddexp2, 1.0)):
        for f in (u.reduce, lambda x, u=u: u.accumulate(x)[-1], lambda x, u=u: u.reduceat(x, [0])[0]):
            value, g = value_and_grad(f)(x)
            np.testing.assert_allclose(value, 1000 + more, rtol=1e-15)
            np.testing.assert_allclose(g, [0.5, 0.5, 0, 0], rtol=1e-12)
        nothing = np.full(3, -np.inf)
        value, g = value_and_grad(lambda x, u=u: u.reduce(x, where=[True, False, True]))(nothing)
        assert value == -np.inf
        assert g.tolist() == [0, 0, 0]
        assert value_and_grad(u.reduce)(np.zeros(0))[0] == -np.inf
    assert grad(np.hypot.reduce)(np.zeros(3)).tolist() == [0, 0, 0]
    np.testing.assert_allclose(grad(np.hypot.reduce)(np.array([3e200, 4e200])), [0.6, 0.8])


@pytest.mark.filterwarnings("error")
def test_where_the_formula_would_divide_by_zero():
    zero = np.zeros(4)
    spot = np.array([True, False, False, False])
    for f in (np.std, np.nanstd, lambda x: np.std(x, mean=0.0), lambda x: np.std(x, where=spot)):
        assert grad(f)(zero).tolist() == [0, 0, 0, 0]
    assert grad(lambda x: np.prod(x, where=~spot, initial=2))(np.array([0, 0, 3.0, 5])).tolist() == [0, 30, 0, 0]
    assert grad(lambda x: np.cumprod(x)[-1])(np.array([2, 0, 3.0])).tolist() == [0, 6, 0]
    line = np.array([[1.0, 2, 3], [2, 4, 6]])
    np.testing.assert_allclose(grad(lambda x: np.sum(np.corrcoef(x)))(line), 0, atol=1e-15)


def test_half_precision():
    # More entries than the largest number of half precision.
    value, g = value_and_grad(np.mean)(np.ones(70_000, "f2"))
    assert value == 1
    np.testing.assert_allclose(g, np.float16(1 / 70_000))
    x = np.full(5000, 9, "f2")
    x[1::2] = 11
    for f, slope in ((np.var, 2 / 5000), (np.std, 1 / 5000)):
        value, g = value_and_grad(f)(x)
        assert value.dtype == g.dtype == "f2"
        assert value == f(x)
        np.testing.assert_allclose(g[:2], [-slope, slope], rtol=1e-2)


def test_what_jumps_is_constant():
    x, w = np.array([0.1, 0.4, 0.35, 0.8]), np.array([1.0, 2, 1, 1])
    assert not isinstance(vjp(lambda x: np.histogram(x, 2, (0, 1))[0] * 1.0 + 0 * x[:2], x)[1], Array)
    for f in (
        lambda x: np.histogram(x, 3, (0, 1))[0],
        lambda x: np.histogram2d(x, x, 2)[0],
        lambda x: np.digitize(x, [0, 0.5]),
        lambda x: np.searchsorted(x, 0.2),
        lambda x: np.argpartition(x, 1),
        lambda x: np.nanargmax(x) + np.nanargmin(x),
        lambda x: np.count_nonzero(x),
        lambda x: np.logical_and.reduce(x),
        lambda x: np.greater.outer(x, x),
        lambda x: np.floor_divide.accumulate(x),
    ):
        seen = []
        grad(lambda x, f=f, seen=seen: np.sum(x) + (seen.append(f(x)) or 0))(x)
        assert not isinstance(seen[0], Array)
        np.testing.assert_array_equal(seen[0], f(x))
    q = 0.4
    assert grad(lambda q: np.quantile(x, q, method="nearest") + q)(q) == 1
    assert grad(lambda w: np.quantile(x, q, weights=w, method="inverted_cdf") + np.sum(w))(w).tolist() == [1, 1, 1, 1]
    np.testing.assert_allclose(grad(lambda q: np.quantile(x, q))(q), 3 * (0.4 - 0.35))
    assert grad(lambda q: np.quantile(x, q, method="hazen"))(0.01) == 0


def test_options_are_given_on():
    x = np.arange(6.0).reshape(2, 3)
    assert grad(lambda x: np.add.reduce(x)[0])(x).tolist() == [[1, 0, 0], [1, 0, 0]]
    assert value_of(vjp(lambda x: np.maximum.reduce(x, dtype="f4"), x)[0]).dtype == "f4"
    with pytest.raises(ValueError, match="not reorderable"):
        grad(lambda x: np.subtract.reduce(x, axis=None))(x)
    with pytest.raises(ValueError, match=r"where mask.*needs an initial"):
        grad(lambda x: np.divide.reduce(x, where=x > 0).sum())(x)
    with pytest.raises(DifferentiationError, match="passed by keyword"):
        grad(lambda x: np.max(x, initial=x[0, 0]))(x)
    with pytest.raises(Exception, match="out"):
        grad(lambda x: np.add.reduce(x, out=np.zeros(3)).sum())(x)
