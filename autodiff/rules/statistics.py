"""Rules of order statistics, of sums that skip NaN, of covariances, and of the methods of ufuncs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from spmd.autodiff import cupy_fallback, devices
from spmd.autodiff.apply import compute
from spmd.autodiff.dtypes import is_foreign
from spmd.autodiff.indexing import scatter_add
from spmd.autodiff.primitive import (
    Method,
    composite,
    constant,
    constants,
    handlers,
    method_rules,
    name_of,
    passives,
    refusals,
    refused,
)
from spmd.autodiff.registry import primitive, rule
from spmd.autodiff.rules.reduce import (
    absent,
    array,
    axes_to_front,
    extremum_rule,
    masked_to_zero,
    passed_options,
    root,
    square,
    weights_for,
)
from spmd.autodiff.rules.shape import along
from spmd.autodiff.staging.recorder import checked
from spmd.autodiff.tracer import find, value_of


def without_derivative(fun, *args):
    """fun(*args) without a derivative, for piecewise constant functions."""
    return compute(fun, args, {}) if find(args, []) else fun(*args)


# Order statistics: sort, then take. Entries that tie are in stable order.


def _take(ordered, position, n):
    return np.take_along_axis(ordered, np.clip(position, 0, np.maximum(n - 1, 0)).astype(np.intp), 0)


def _sorted_entries(a, axis, skip):
    """The entries of a in order along the first dimension, how many of them count, and which results are NaN."""
    column, _, keep = axes_to_front(a, axis)
    ordered = np.sort(column, 0)
    nan = np.isnan(ordered)
    n = np.sum(~nan if skip else np.ones_like(nan), 0, keepdims=True)
    return (np.where(nan, 0, ordered), n, n == 0, keep) if skip else (ordered, n, nan[-1:], keep)


def _median(a, axis, keepdims, skip):
    a = array(a)
    ordered, n, bad, keep = _sorted_entries(a, axis, skip)
    shape = keep if keepdims else ordered.shape[1:]
    if len(ordered) == 0:
        return np.reshape(np.mean(ordered, 0), shape)
    middle = np.mean(_take(ordered, np.concatenate([(n - 1) // 2, n // 2]), n), 0)
    return np.reshape(np.where(bad[0], _nan(middle), middle), shape)


def _nan(x):
    """A NaN that does not change the dtype of x; a dtype of another library, such as bfloat16, needs its own."""
    return x.dtype.type(np.nan) if is_foreign(x.dtype) else np.nan


@composite(np.median, by_numpy=True)
def median(a, axis=None, out=None, overwrite_input=False, keepdims=False):
    return _median(a, axis, keepdims, skip=False)


@composite(np.nanmedian, by_numpy=True)
def nanmedian(a, axis=None, out=None, overwrite_input=False, keepdims=False):
    return _median(a, axis, keepdims, skip=True)


_CONTINUOUS = {
    "interpolated_inverted_cdf": (0, 1),
    "hazen": (0.5, 0.5),
    "weibull": (0, 0),
    "median_unbiased": (1 / 3, 1 / 3),
    "normal_unbiased": (3 / 8, 3 / 8),
}
"""The methods that interpolate, by their parameters alpha and beta (Hyndman and Fan, 1996)."""


def _position(q, n, method):
    """The positions of the quantiles q among n sorted entries, from 0; integers if nothing is interpolated."""
    q, n = devices.beside(q, value_of(n)), devices.beside(n, value_of(q))
    n = n if q.dtype.kind in "biu" else n.astype(q.dtype)
    if method == "linear":
        return (n - 1) * q
    if method in _CONTINUOUS:
        alpha, beta = _CONTINUOUS[method]
        return n * q + (alpha + q * (1 - alpha - beta)) - 1.0
    return without_derivative(_jump_position, q, n, method)


def _jump_position(q, n, method):
    """The position of a quantile without interpolation: NumPy's quantile of the numbers 0, 1, ..."""
    position = np.zeros_like(q, shape=np.broadcast_shapes(q.shape, n.shape), dtype=float)
    for m in np.unique(n).tolist():
        if m:
            numpy_result = cupy_fallback.run(np.quantile, np.arange(float(m), like=q), np.ravel(q), method=method)
            position = np.where(np.equal(n, m), np.reshape(numpy_result, q.shape), position)
    between = method in ("averaged_inverted_cdf", "midpoint")
    return position.astype(np.result_type(q.dtype, np.float16) if between else np.intp)


def _weighted_position(q, weights, method):
    """The position of a quantile among sorted entries with weights."""
    numbers = np.arange(float(len(weights)), like=weights)
    numbers = np.broadcast_to(np.reshape(numbers, (-1,) + (1,) * (weights.ndim - 1)), weights.shape)
    return cupy_fallback.run(np.quantile, numbers, np.ravel(q), axis=0, method=method, weights=weights).astype(np.intp)


def _check_q(q) -> None:
    if not np.all((q >= 0) & (q <= 1)):
        raise ValueError("quantiles need a q from 0 to 1")


def _quantile(a, q, axis, method, keepdims, weights, skip):
    a, weak = array(a), type(value_of(q)) in (int, float)
    if a.dtype.kind == "c":
        raise TypeError(f"quantiles need real numbers, and got {a.dtype}")
    q = q if hasattr(q, "dtype") else np.asarray(q, like=np.ravel(a))
    checked(_check_q, value_of(q))
    if skip and a.size == 0:
        return np.nanmean(a, axis, keepdims=keepdims)
    ordered, n, bad, keep = _sorted_entries(a, axis, skip)
    rows = np.reshape(q, (-1,) + (1,) * (ordered.ndim - 1))
    if weights is None:
        position = _position(rows, n, method)
    else:
        column = axes_to_front(a, axis)[0]
        weights = axes_to_front(np.broadcast_to(weights_for(weights, a, axis), a.shape), axis)[0]
        ordered_weights = np.take_along_axis(np.broadcast_to(weights, column.shape), np.argsort(column, 0), 0)
        if skip:
            ordered_weights = np.where(np.isnan(np.sort(column, 0)), n == 0, ordered_weights)
        position = without_derivative(_weighted_position, rows, ordered_weights, method)
    if position.dtype.kind in "iu":
        result = _take(ordered, position, n)
    else:
        low = np.floor(position)
        part = (position - low).astype(a.dtype) if weak and not is_foreign(a.dtype) else position - low
        below, above = _take(ordered, low, n), _take(ordered, low + 1, n)
        gap = above - below
        result = np.where(part >= 0.5, above - gap * (1 - part), below + gap * part)
    result = np.where(bad, _nan(result), result)
    if is_foreign(a.dtype):
        result = result.astype(np.quantile(np.ones(1, a.dtype), 0.5 if weak else value_of(q)).dtype)
    return np.reshape(result, (*q.shape, *(keep if keepdims else ordered.shape[1:])))


def _quantiles(skip: bool):
    def quantile(
        a,
        q,
        axis=None,
        out=None,
        overwrite_input=False,
        method="linear",
        keepdims=False,
        *,
        weights=None,
        interpolation=None,
    ):
        """Piecewise constant in the weights; differentiable in q where the method interpolates, constant else."""
        return _quantile(a, q, axis, interpolation or method, keepdims, weights, skip)

    return quantile


_plain_quantile, _nan_quantile = _quantiles(skip=False), _quantiles(skip=True)
composite(np.quantile, by_numpy=True)(_plain_quantile)
composite(np.nanquantile, by_numpy=True)(_nan_quantile)


def _hundredth(q):
    return q / 100 if type(q) in (int, float) else np.true_divide(q, 100)


@composite(np.percentile, by_numpy=True)
def percentile(a, q, *args, **options):
    return _plain_quantile(a, _hundredth(q), *args, **options)


@composite(np.nanpercentile, by_numpy=True)
def nanpercentile(a, q, *args, **options):
    return _nan_quantile(a, _hundredth(q), *args, **options)


# Sums that skip NaN: the cotangent of a NaN is zero.


def _filled(a, value):
    return np.where(np.isnan(a), value, a)


for _skipping, _plain, _neutral in (
    (np.nansum, np.sum, 0),
    (np.nanprod, np.prod, 1),
    (np.nancumsum, np.cumsum, 0),
    (np.nancumprod, np.cumprod, 1),
):
    composite(_skipping)(
        lambda a, *args, plain=_plain, neutral=_neutral, **options: plain(_filled(a, neutral), *args, **options)
    )

rule(np.nanmax, extremum_rule)
rule(np.nanmin, extremum_rule)


def _divided(total, n):
    """A sum over a number of entries, NaN where there are none."""
    return (total / np.where(n > 0, n, np.nan)).astype(total.dtype)


@composite(np.nanmean, by_numpy=True)
def nanmean(a, axis=None, dtype=None, out=None, keepdims=False, *, where: Any = True):
    where = devices.beside(where, value_of(a))
    n = np.sum(~np.isnan(a) & where, axis, keepdims=keepdims)
    return _divided(np.sum(masked_to_zero(_filled(a, 0), where), axis, dtype, keepdims=keepdims), n)


@composite(np.nanvar, by_numpy=True)
def nanvar(
    a, axis=None, dtype=None, out=None, ddof=0, keepdims=False, *, where: Any = True, mean=absent, correction=absent
):
    mask, filled = ~np.isnan(a) & devices.beside(where, value_of(a)), _filled(a, 0)
    if mean is absent:
        n = np.sum(mask, axis, keepdims=True)
        # Without any entry the result is NaN by its own count below.
        mean = np.sum(masked_to_zero(filled, mask), axis, dtype, keepdims=True) / np.maximum(n, 1)
    deviation = np.where(mask, filled - mean, 0).astype(filled.dtype)
    n = np.sum(mask, axis, keepdims=keepdims) - (ddof if correction is absent else correction)
    return _divided(np.sum(square(deviation), axis, dtype, keepdims=keepdims), n)


@composite(np.nanstd, by_numpy=True)
def nanstd(a, *args, **options):
    return root(nanvar(a, *args, **options))


constant(np.argpartition, np.nanargmax, np.nanargmin)


# Covariance


def _checked_weights(weights, n, name):
    """Weights of n observations, checked as NumPy does."""
    weights = array(weights).astype(float)
    if weights.ndim > 1:
        raise RuntimeError(f"np.cov needs {name} of one dimension, and got the shape {weights.shape}")
    if weights.shape[0] != n:
        raise RuntimeError(f"np.cov needs {n} {name}, one per observation, and got {weights.shape[0]}")
    checked(_check_weights, value_of(weights), name)
    return weights


def _check_weights(weights, name) -> None:
    if np.any(weights < 0):
        raise ValueError(f"np.cov needs {name} of 0 or more")
    if name == "fweights" and np.any(weights != np.around(weights)):
        raise TypeError("np.cov needs fweights that are whole numbers")


def _as_rows(m, rowvar, dtype, name):
    """Variables as rows."""
    if m.ndim > 2:
        raise ValueError(f"np.cov needs {name} of two dimensions at most, and got the shape {m.shape}")
    rows = np.atleast_2d(m).astype(dtype)
    return rows if rowvar or m.ndim < 2 else rows.T


@composite(np.cov, by_numpy=True)
def cov(m, y=None, rowvar=True, bias=False, ddof=None, fweights=None, aweights=None, *, dtype=None):
    if ddof is not None and ddof != int(ddof):
        raise ValueError(f"np.cov needs a ddof that is a whole number, and got {ddof}")
    parts = [array(part) for part in (m, y) if part is not None]
    dtype = dtype or np.result_type(*[part.dtype for part in parts], np.float64)
    x = _as_rows(parts[0], rowvar, dtype, "m")
    if x.shape[0] == 0:
        return np.zeros_like(x, shape=(0, 0))
    if y is not None:
        single = np.atleast_2d(parts[1]).shape[0] == 1
        x = np.concatenate([x, _as_rows(parts[1], rowvar or single, dtype, "y")])
    ddof = (0 if bias else 1) if ddof is None else ddof
    n: Any = x.shape[1]
    named = ((fweights, "fweights"), (aweights, "aweights"))
    weights = [_checked_weights(w, n, name) for w, name in named if w is not None]
    if not weights:
        factor, deviation = n - ddof, x - np.mean(x, 1, keepdims=True)
        scaled = deviation
    else:
        weight = functools.reduce(np.multiply, weights)
        total = np.sum(weight)
        factor = total - (ddof * (np.sum(weight * weights[-1]) / total) if aweights is not None else ddof)
        deviation = x - np.average(x, 1, weight)[:, None]
        scaled = deviation * weight
    if value_of(factor) <= 0:
        factor = 0.0
    product = deviation @ (np.conj(scaled.T) if np.iscomplexobj(x) else scaled.T)
    # NumPy divides by a float64 scalar, which does not promote the dtype.
    return np.squeeze(product * array(np.true_divide(1, factor)).astype(product.real.dtype))


@composite(np.corrcoef, by_numpy=True)
def corrcoef(x, y=None, rowvar=True, *, dtype=None):
    c = cov(x, y, rowvar, dtype=dtype)
    if c.ndim == 0:
        return c / c
    deviation = np.sqrt(np.real(np.diagonal(c)))
    c = c / deviation[:, None] / deviation[None, :]
    clipped = np.clip(np.real(c), -1, 1)
    return clipped + 1j * np.clip(np.imag(c), -1, 1) if np.iscomplexobj(c) else clipped


# Histograms: the bin of an entry is constant; the edges and the weights have derivatives.


@primitive(
    "edges",
    lambda g, _ans, _low, _high, n, dtype: np.sum(g * (1 - _ramp(g, n))),
    lambda g, _ans, _low, _high, n, dtype: np.sum(g * _ramp(g, n)),
)
def _even_edges(low, high, n, dtype):
    return np.linspace(low, high, n + 1, dtype=dtype)


def _ramp(g, n):
    """The numbers 0, 1/n, ..., 1."""
    return (np.cumsum(np.ones_like(g)) - 1) / n


def _edges(a, bins, range, dtype):
    """The edges of bins: their number from NumPy, their range from the smallest and largest entry."""
    if np.ndim(bins) == 1:
        return devices.beside(array(bins), value_of(a))
    count = without_derivative(np.histogram_bin_edges, a, bins, range).shape[0] - 1
    low, high = range if range is not None else (np.min(a), np.max(a)) if np.size(a) else (0, 1)
    if value_of(low) == value_of(high):
        low, high = low - 0.5, high + 0.5
    return devices.beside(_even_edges(low, high, count, dtype), value_of(a))


@composite(np.histogram_bin_edges, by_numpy=True)
def histogram_bin_edges(a, bins: Any = 10, range=None, weights=None):
    numpy_result = without_derivative(np.histogram_bin_edges, a, bins, range, weights)
    return _edges(array(a), bins, range, numpy_result.dtype)


def _bins(columns, edges):
    """The number of the bin that each sample falls into, in the order of a flat array; one past the end outside."""
    places = [np.searchsorted(e, x, "right") - 1 - (x == e[-1]) for x, e in zip(columns, edges, strict=True)]
    sizes = [len(e) - 1 for e in edges]
    inside = functools.reduce(np.logical_and, [(p >= 0) & (p < n) for p, n in zip(places, sizes, strict=True)])
    flat = np.zeros_like(places[0])
    for p, n in zip(places, sizes, strict=True):
        flat = flat * n + p
    return np.where(inside, flat, int(np.prod(sizes)))


def _weighted_counts(columns, edges, weights):
    """The sum of the weights in each bin."""
    sizes = tuple(e.shape[0] - 1 for e in edges)
    count = int(np.prod(sizes))
    exact = weights.astype(np.result_type(weights.dtype, np.float64))
    return np.reshape(scatter_add(exact, (count + 1,), without_derivative(_bins, columns, edges))[:count], sizes)


def _traced(tree) -> bool:
    return any(a.tape is not None for a in find(tree, []))


@composite(np.histogram, by_numpy=True)
def histogram(a, bins: Any = 10, range=None, density=None, weights: Any = None):
    """Constant in a except for edges that depend on a; linear in the weights."""
    edges = np.histogram_bin_edges(a, bins, range, weights)
    if _traced(weights):
        if np.shape(weights) != np.shape(a):
            raise ValueError(f"np.histogram needs weights of the shape {np.shape(a)}, and got {np.shape(weights)}")
        n = _weighted_counts([np.ravel(array(a))], [edges], np.ravel(weights)).astype(weights.dtype)
    else:
        exact_bins = edges if find(edges, []) else bins
        n = without_derivative(lambda *args: np.histogram(*args)[0], a, exact_bins, range, None, weights)
    return (n / np.diff(edges).astype(float) / np.sum(n) if density else n), edges


@composite(np.histogramdd, by_numpy=True)
def histogramdd(sample, bins: Any = 10, range=None, density=None, weights=None):
    if not hasattr(sample, "dtype") or sample.ndim != 2:
        sample = np.atleast_2d(sample if hasattr(sample, "dtype") else np.stack([array(x) for x in sample])).T
    columns = [sample[:, i] for i in np.arange(sample.shape[1])]
    if not hasattr(bins, "__len__"):
        bins = [bins] * len(columns)
    if len(bins) != len(columns):
        raise ValueError(f"np.histogramdd needs bins for {len(columns)} dimensions, and got them for {len(bins)}")
    ranges = [None] * len(columns) if range is None else range
    if len(ranges) != len(columns):
        raise ValueError(f"np.histogramdd needs {len(columns)} ranges, and got {len(ranges)}")
    edges = [_edges(x, b, r, None) for x, b, r in zip(columns, bins, ranges, strict=True)]
    if _traced(weights):
        n = _weighted_counts(columns, edges, weights)
    else:
        n = without_derivative(lambda x, e, w: np.histogramdd(x, e, weights=w)[0], sample, edges, weights)
    if density:
        total = np.sum(n)
        for i, e in enumerate(edges):
            n = n / np.reshape(np.diff(e), [-1 if i == k else 1 for k, _ in enumerate(edges)])
        n = n / total
    return n, edges


@composite(np.histogram2d, by_numpy=True)
def histogram2d(x, y, bins: Any = 10, range=None, density=None, weights=None):
    if len(x) != len(y):
        raise ValueError(f"np.histogram2d needs as many y as x, and got {len(y)} for {len(x)}")
    if hasattr(bins, "__len__") and len(bins) not in (1, 2):
        bins = [bins, bins]
    n, edges = np.histogramdd(np.stack([array(x), array(y)], 1), bins, range, density, weights)
    return n, edges[0], edges[1]


@composite(np.bincount)
def bincount(x, /, weights: Any = None, minlength=0):
    if np.size(x) == 0:
        return without_derivative(np.bincount, x, weights, minlength)
    size = without_derivative(np.bincount, x, None, minlength).shape[0]
    if np.shape(weights) != np.shape(x):
        raise ValueError(f"np.bincount needs a weight per entry of x, and got {np.shape(weights)} for {np.shape(x)}")
    if weights.dtype.kind == "c":
        raise TypeError("np.bincount needs real weights, and got complex ones; count np.real and np.imag of them")
    return scatter_add(weights.astype(float), (size,), array(x).astype(np.intp))


constant(np.digitize)


# Methods of ufuncs. Each of reduce, accumulate, reduceat and outer has the signature of NumPy's; `at` writes.


def _cast(ufunc, x, dtype):
    """The entries in the dtype that the ufunc gives them."""
    x = array(x)
    dtype = np.dtype(dtype or x.dtype)
    dtype = ufunc.resolve_dtypes((dtype, dtype, None))[2]
    return x if x.dtype == dtype else x.astype(dtype)


def _axis_of(ufunc, method, x, axis) -> int:
    """The one dimension that accumulate and reduceat go along."""
    if x.ndim == 0:
        raise TypeError(f"cannot {method} on a scalar")
    axes = tuple(range(x.ndim)) if axis is None else normalize_axis_tuple(axis, x.ndim)
    if len(axes) != 1:
        raise ValueError(f"{method} does not allow multiple axes")
    return axes[0]


def _reduce_by(ufunc, function):
    """`reduce` by a reduction that NumPy has as a function."""

    def reduce(array, axis=0, dtype=None, out=None, keepdims=False, initial=absent, where: Any = True):
        options = passed_options(initial=initial) if where is True else passed_options(initial=initial, where=where)
        return function(_cast(ufunc, array, dtype), axis, keepdims=keepdims, **options)

    return reduce


def _extreme_reduce(ufunc):
    """`reduce` of fmax and fmin, which skip NaN."""
    name = f"np.{ufunc.__name__}.reduce"
    return primitive(name, extremum_rule)(
        lambda x, axis, keepdims, **options: ufunc.reduce(x, axis, keepdims=keepdims, **options)
    )


def _no_identity(ufunc) -> Exception:
    return ValueError(
        f"reduction operation {ufunc.__name__} has no identity to start with: "
        "a where mask, or an array without entries, needs an initial"
    )


def _reduce_by_halves(ufunc):
    """`reduce` of an associative ufunc by halves: log n steps, each as stable as the ufunc."""

    def reduce(array, axis=0, dtype=None, out=None, keepdims=False, initial=absent, where: Any = True):
        x = _cast(ufunc, array, dtype)
        x = x if where is True else np.where(where, x, ufunc.identity)
        column, _, keep = axes_to_front(x, axis if x.ndim else None)
        if initial is not None:
            first = ufunc.identity if initial is absent else initial
            column = np.concatenate([np.full_like(column, first, shape=(1, *column.shape[1:])), column])
        elif where is not True or len(column) == 0:
            raise _no_identity(ufunc)
        while len(column) > 1:
            half = len(column) // 2
            column = np.concatenate([ufunc(column[:half], column[half : 2 * half]), column[2 * half :]])
        return np.reshape(column[0], keep if keepdims else column.shape[1:])

    return reduce


def _reduce_in_order(ufunc):
    """`reduce` of any ufunc: entry by entry."""

    def reduce(array, axis=0, dtype=None, out=None, keepdims=False, initial=absent, where: Any = True):
        x = _cast(ufunc, array, dtype)
        column, axes, keep = axes_to_front(x, axis if x.ndim else None)
        if len(axes) > 1:
            raise ValueError(
                f"reduction operation {ufunc.__name__} is not reorderable, so at most one axis may be specified"
            )
        rows, total = list(range(len(column))), initial
        if initial is absent or initial is None:
            if where is not True or not rows:
                raise _no_identity(ufunc)
            total = column[rows.pop(0)]
        elif not rows:
            total = np.full_like(column, initial, shape=column.shape[1:])
        mask = None if where is True else axes_to_front(np.broadcast_to(where, x.shape), axis if x.ndim else None)[0]
        for i in rows:
            following = ufunc(total, column[i])
            total = following if mask is None else np.where(mask[i], following, total)
        return np.reshape(total, keep if keepdims else column.shape[1:])

    return reduce


def _accumulate_by(ufunc, along_column):
    """`accumulate` by a function of the array with the dimension in front."""

    def accumulate(array, axis=0, dtype=None, out=None):
        x = _cast(ufunc, array, dtype)
        axis = _axis_of(ufunc, "accumulate", x, axis)
        return np.moveaxis(along_column(np.moveaxis(x, axis, 0)), 0, axis) if x.size else x

    return accumulate


def _accumulate_in_order(ufunc, column):
    totals = [column[0]]
    for i in range(1, len(column)):
        totals.append(ufunc(totals[-1], column[i]))
    return np.stack(totals)


def _accumulate_by_doubling(ufunc, column):
    """The running result of an associative ufunc: after step s each entry has what the s before it have."""
    step = 1
    while step < len(column):
        column = np.concatenate([column[:step], ufunc(column[:-step], column[step:])])
        step *= 2
    return column


def _running_extreme(ufunc):
    """The running extreme: the cotangent goes to the entry that attains it, the first of those that tie."""

    def pull(g, ans, _x):
        rank = np.reshape(np.arange(len(ans)), (-1,) + (1,) * (ans.ndim - 1))
        new = np.concatenate([np.ones_like(ans[:1], dtype=bool), ans[1:] != ans[:-1]])
        first = np.maximum.accumulate(np.where(new, rank, 0))
        width = ans.size // len(ans)
        flat = first * width + np.reshape(np.arange(width), ans.shape[1:])
        return np.reshape(scatter_add(np.ravel(g), (ans.size,), np.ravel(flat)), ans.shape)

    return primitive(f"np.{ufunc.__name__}.accumulate", pull)(ufunc.accumulate)


def _parts(indices, n, name):
    """Where the parts of a reduceat start and stop."""
    starts = np.asarray(devices.to_host(value_of(indices))).tolist()
    for i in starts:
        if not 0 <= i < n:
            raise IndexError(f"index {i} out-of-bounds in {name}.reduceat [0, {n})")
    return [(i, max(j, i + 1)) for i, j in itertools.pairwise([*starts, n])]


def _sums_at(g, _ans, _x, indices, axis):
    """Each entry gets the cotangents of the parts that contain it."""
    parts = _parts(indices, _x.shape[axis], "add")
    entries = np.concatenate([np.arange(i, j) for i, j in parts] or [np.arange(0)])
    numbers = np.repeat(np.arange(len(parts)), [j - i for i, j in parts])
    return scatter_add(np.take(g, numbers, axis), _x.shape, along(axis, len(_x.shape), entries))


_add_at = primitive("np.add.reduceat", _sums_at)(np.add.reduceat)


def _reduceat_by_parts(ufunc):
    """`reduceat` by a reduce of each part."""

    def reduceat(array, indices, axis=0, dtype=None, out=None):
        x = _cast(ufunc, array, dtype)
        axis = _axis_of(ufunc, "reduceat", x, axis)
        if ufunc is np.add:
            return _add_at(x, indices, axis)
        parts = [x[along(axis, x.ndim, slice(i, j))] for i, j in _parts(indices, x.shape[axis], ufunc.__name__)]
        if not parts:
            return x[along(axis, x.ndim, slice(0, 0))]
        return np.concatenate([ufunc.reduce(part, axis=axis, keepdims=True, initial=None) for part in parts], axis)

    return reduceat


def _outer(ufunc):
    def outer(x, y, /, **options):
        x, y = array(x), array(y)
        return ufunc(np.reshape(x, x.shape + (1,) * y.ndim), y, **options)

    return outer


_REORDERED = (np.logaddexp, np.logaddexp2, np.hypot)
"""The ufuncs that are reduced in another order than NumPy's; NumPy gives their values. The others follow NumPy's order.
NumPy's own reduce of np.power and np.arctan2 is wrong where its loops use AVX512."""

_REDUCE = {
    np.add: _reduce_by(np.add, np.sum),
    np.multiply: _reduce_by(np.multiply, np.prod),
    np.maximum: _reduce_by(np.maximum, np.max),
    np.minimum: _reduce_by(np.minimum, np.min),
    np.fmax: _reduce_by(np.fmax, _extreme_reduce(np.fmax)),
    np.fmin: _reduce_by(np.fmin, _extreme_reduce(np.fmin)),
    **{ufunc: _reduce_by_halves(ufunc) for ufunc in _REORDERED},
}

_ACCUMULATE = {
    np.add: functools.partial(np.cumsum, axis=0),
    np.multiply: functools.partial(np.cumprod, axis=0),
    **{ufunc: _running_extreme(ufunc) for ufunc in (np.maximum, np.minimum, np.fmax, np.fmin)},
    **{ufunc: functools.partial(_accumulate_by_doubling, ufunc) for ufunc in _REORDERED},
}


_AT_METHODS = {
    np.add: "add(v)",
    np.subtract: "subtract(v)",
    np.multiply: "multiply(v)",
    np.divide: "divide(v)",
    np.power: "power(v)",
    np.minimum: "min(v)",
    np.maximum: "max(v)",
}


def declare(ufunc) -> None:
    """Declare the methods of a ufunc: what derivative they have follows from the ufunc's own.

    Methods that NumPy does not have for a ufunc are not declared.
    """
    if ufunc.signature is not None:
        return
    if ufunc.nout == 1 and ufunc not in passives:
        apply = f"apply({name_of(ufunc)})"
        update = apply if ufunc.nin == 1 else _AT_METHODS.get(ufunc) or f"set({name_of(ufunc)}(x[i], v))"
        refused(Method((ufunc, "at")), instead=f"x = spmd.at(x)[i].{update}", writes=True)
    if ufunc.nin != 2:
        return
    methods: dict[str, Callable] = {"outer": _outer(ufunc)}
    if ufunc.nout == 1:
        methods["reduce"] = _REDUCE.get(ufunc) or _reduce_in_order(ufunc)
        accumulate = _ACCUMULATE.get(ufunc) or functools.partial(_accumulate_in_order, ufunc)
        methods["accumulate"] = _accumulate_by(ufunc, accumulate)
        methods["reduceat"] = _reduceat_by_parts(ufunc)
    for method, fun in methods.items():
        if ufunc in constants:
            constant(Method((ufunc, method)))
        elif ufunc in refusals:
            refused(Method((ufunc, method)), instead=refusals[ufunc])
        elif ufunc in handlers:
            composite(Method((ufunc, method)), by_numpy=ufunc in _REORDERED and method != "outer")(fun)


method_rules.append(declare)
for _ufunc in tuple(vars(np).values()):  # other threads may import more of NumPy meanwhile
    if isinstance(_ufunc, np.ufunc):
        declare(_ufunc)
