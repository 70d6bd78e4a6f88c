"""Rules of reductions, running sums and sorting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from spmd.autodiff.dispatch import by_numpy
from spmd.autodiff.primitive import composite, constant
from spmd.autodiff.registry import primitive, rule
from spmd.autodiff.rules.elementwise import nonzero
from spmd.autodiff.rules.shape import along
from spmd.autodiff.staging.recorder import checked
from spmd.autodiff.tracer import value_of

absent: Any = np._NoValue
"""The default of options that NumPy tells apart from every value."""


def passed_options(**options) -> dict[str, Any]:
    """The options that the caller passes."""
    return {name: value for name, value in options.items() if value is not absent}


def expand(g, like, axis, keepdims):
    """A reduced cotangent spread over the entries it was reduced from: the transpose of a sum."""
    if axis is not None and not keepdims and np.ndim(like):
        g = np.expand_dims(g, axis)
    shape = np.shape(like)
    if type(g) is np.ndarray and g.ndim == 0 and math.prod(shape) < _SMALL:
        out = np.empty(shape, g.dtype)
        out.fill(g)
        return out
    return np.broadcast_to(g, shape)


_SMALL = 4096
"""Below this many entries, filling an array is faster than a broadcast view."""


def masked_to_zero(x, where):
    """The entries of x that `where` selects, zero for the others."""
    return x if where is True else np.where(where, x, 0)


def count(g, like, axis=None, keepdims=False, where=True) -> Any:
    """How many entries were reduced to one: a number, or one for each result if there is a mask."""
    if where is True:
        return np.size(like) // max(g.size, 1)
    mask = np.broadcast_to(where, np.shape(like))
    return np.sum(mask, axis, keepdims=keepdims, dtype=np.result_type(g.dtype, np.float32))


def largest(x, axis=None, keepdims=False):
    """As np.max; zero where there is nothing."""
    return np.max(x, axis, keepdims=keepdims) if x.size else np.sum(x, axis, keepdims=keepdims)


def conj(x):
    """The conjugate of x; x if it is real."""
    return np.conj(x) if np.iscomplexobj(x) else x


def square(x):
    """|x|²."""
    return np.real(x * np.conj(x)) if np.iscomplexobj(x) else x * x


def array(x) -> Any:
    """x as an array, if it is a number or a list."""
    return x if hasattr(x, "dtype") else np.asarray(x)


def axes_to_front(x, axis):
    """x with the dimensions `axis` (None for all) as one, the first; the dimensions, and the shape with keepdims."""
    axes = tuple(range(x.ndim)) if axis is None else normalize_axis_tuple(axis, x.ndim)
    moved = np.moveaxis(x, axes, tuple(range(len(axes))))
    flat = np.reshape(moved, (math.prod(moved.shape[: len(axes)]), *moved.shape[len(axes) :]))
    return flat, axes, tuple(1 if i in axes else n for i, n in enumerate(x.shape))


def back(flat, axes, shape):
    """The inverse of `axes_to_front`, for an array of `shape`."""
    moved = [shape[i] for i in axes] + list(flat.shape[1:])
    return np.moveaxis(np.reshape(flat, moved), tuple(range(len(axes))), axes)


# Sums and moments. Deviations of half precision are taken from a mean in single precision.


def wide(x):
    """The dtype in which deviations of the entries of x are taken: None for their own."""
    return np.float32 if getattr(x, "dtype", None) == np.float16 else None


def _sum(g, _ans, _x, axis=None, dtype=None, out=None, keepdims=False, initial=0, where=True):
    return masked_to_zero(expand(g, _x, axis, keepdims), where)


def _mean(g, _ans, _x, axis=None, dtype=None, out=None, keepdims=False, *, where=True):
    n = count(g, _x, axis, keepdims, where)
    return masked_to_zero(expand(g * (1 / (n + (n == 0))), _x, axis, keepdims), where)


def _spread(g, x, axis, keepdims, free, where):
    """The cotangent of a variance: 2 (x - mean) / (n - free)."""
    n = count(g, x, axis, keepdims, where) - free
    scale = np.where(n > 0, 2 / nonzero(n), math.nan) if where is not True else 2 / n if n > 0 else math.nan
    mask = {} if where is True else {"where": where}  # an option that CuPy's has not
    deviation = x - np.mean(x, axis=axis, keepdims=True, dtype=wide(x), **mask)
    return masked_to_zero(expand(g.astype(wide(g) or g.dtype) * scale, x, axis, keepdims) * conj(deviation), where)


def _freedom(ddof, correction):
    """How many of the observations a variance leaves out of its divisor."""
    return ddof if correction is absent else correction


rule(np.sum, _sum)
rule(np.mean, _mean)
_var = primitive(
    "np.var",
    lambda g, _ans, x, axis=None, dtype=None, ddof=0, keepdims=False, where=True, correction=absent: _spread(
        g, x, axis, keepdims, _freedom(ddof, correction), where
    ),
)(np.var)
# At zero the derivative of a standard deviation is taken as zero.
_std = primitive(
    "np.std",
    lambda g, ans, x, axis=None, dtype=None, ddof=0, keepdims=False, where=True, correction=absent: _spread(
        g / nonzero(2 * ans), x, axis, keepdims, _freedom(ddof, correction), where
    ),
)(np.std)


def root(variance):
    """The square root, with zero derivative at zero."""
    return np.sqrt(nonzero(variance)) * (variance != 0)


def about(deviation, axis, dtype, free, keepdims, where):
    """The mean of squared deviations from a mean that was given."""
    total = np.sum(square(deviation), axis, dtype, keepdims=keepdims, where=where)
    n = np.maximum(count(total, deviation, axis, keepdims, where) - free, 0)
    return (total / n).astype(dtype or np.real(deviation).dtype)


def _moment(prim, finish):
    def moment(
        a,
        axis=None,
        dtype=None,
        out=None,
        ddof=0,
        keepdims=False,
        *,
        where: Any = True,
        mean=absent,
        correction=absent,
    ):
        options = (
            passed_options(correction=correction)
            if where is True
            else passed_options(correction=correction, where=where)
        )
        if mean is absent:
            return prim(a, axis=axis, dtype=dtype, ddof=ddof, keepdims=keepdims, **options)
        free = _freedom(ddof, correction)
        options = {"axis": axis, "dtype": dtype, "keepdims": keepdims, "where": where, "mean": mean}
        return by_numpy(
            prim.primitive.fun,
            lambda a, **_: finish(about(a - mean, axis, dtype, free, keepdims, where)),
            a,
            **options,
            **passed_options(correction=correction),
            **({"ddof": ddof} if correction is absent else {}),
        )

    return moment


composite(np.var)(_moment(_var, lambda variance: variance))
composite(np.std)(_moment(_std, root))


def weights_for(weights, a, axis) -> Any:
    """Weights with the dimensions of a: those of its shape, or of its shape along `axis`."""
    weights = array(weights)
    if weights.shape == a.shape:
        return weights
    if axis is None:
        raise TypeError(f"weights of shape {weights.shape} for {a.shape} need an axis to say where they lie")
    axes = normalize_axis_tuple(axis, a.ndim)
    if weights.shape != tuple(a.shape[i] for i in axes):
        raise ValueError(f"weights of shape {weights.shape} do not fit axis {axis} of the shape {a.shape}")
    ordered = np.transpose(weights, np.argsort(axes))
    return np.reshape(ordered, [n if i in axes else 1 for i, n in enumerate(a.shape)])


def _check_total(total) -> None:
    if np.any(total == 0):
        raise ZeroDivisionError("Weights sum to zero, can't be normalized")


@composite(np.average)
def average(a, axis: Any = None, weights=None, returned=False, *, keepdims=False):
    a = array(a)
    if weights is None:
        mean = np.mean(a, axis, keepdims=keepdims)
        return (mean, np.full_like(mean, a.size / mean.size)) if returned else mean
    weights = weights_for(weights, a, axis)
    dtype = np.result_type(a.dtype, weights.dtype, *["f8"] * (a.dtype.kind in "biu"))
    total = np.sum(weights, axis, dtype, keepdims=keepdims)
    checked(_check_total, value_of(total))
    mean = np.sum(np.multiply(a, weights, dtype=dtype), axis, keepdims=keepdims) / total
    return (mean, np.broadcast_to(total, mean.shape)) if returned else mean


# Extremes: entries that tie share the derivative, and `initial` takes its share as one of them.


def extremum_rule(g, ans, x, axis=None, out=None, keepdims=False, initial=absent, where=True):
    there = (x == expand(ans, x, axis, keepdims)) & where
    ties = np.sum(there, axis=axis, dtype=np.result_type(g.dtype, np.float32), keepdims=keepdims)
    if initial is not absent and initial is not None:
        ties = ties + (ans == initial)
    return expand(g / nonzero(ties), x, axis, keepdims) * there


for _f in (np.max, np.amax, np.min, np.amin):
    rule(_f, extremum_rule)

# Products: no division, so that they hold where entries are zero.


def _shift(x, n):
    """x moved n places towards the front of the first dimension, zeros behind."""
    return np.concatenate([x[n:], np.zeros_like(x[:n])])


def _before(x):
    """The product of all entries before each, along the first dimension."""
    return np.cumprod(np.concatenate([np.ones_like(x[:1]), x[:-1]]), 0)


def _prod(g, _ans, x, axis=None, dtype=None, out=None, keepdims=False, initial=1, where=True):
    factors = array(x) if where is True else np.where(where, x, 1)
    column, axes, _ = axes_to_front(factors, axis if factors.ndim else None)
    others = _before(column) * np.flip(_before(np.flip(column, 0)), 0)
    g = expand(g if initial is None else g * initial, x, axis, keepdims)
    return masked_to_zero(g * back(others, axes, np.shape(x)), where)


def _cumprod(g, _ans, x, axis: Any = None, dtype=None, out=None):
    """Entry i of x is a factor of all results from i on: before_i (g_i + x_{i+1} (g_{i+1} + x_{i+2} (...))).

    The inner sum r_i = g_i + x_{i+1} r_{i+1} is taken by doubling: after step s it reaches s entries ahead.
    """
    flat = axis is None or np.ndim(x) == 0
    axis = 0 if axis is None else axis
    column = np.ravel(x) if flat else np.moveaxis(x, axis, 0)
    total, factor = g if flat else np.moveaxis(g, axis, 0), _shift(column, 1)
    step = 1
    while step < len(column):
        total, factor = total + factor * _shift(total, step), factor * _shift(factor, step)
        step *= 2
    pulled = _before(column) * total
    return np.reshape(pulled, np.shape(x)) if flat else np.moveaxis(pulled, 0, axis)


rule(np.prod, _prod)
rule(np.cumprod, _cumprod)

# Running sums and order


def _sums_from(g, axis):
    """The running sum from the end: the transpose of a running sum."""
    return np.flip(np.cumsum(np.flip(g, axis), axis), axis)


rule(np.cumsum, lambda g, _ans, _x, axis=None, dtype=None, out=None: np.reshape(_sums_from(g, axis), _x.shape))


def _ranks(x, axis):
    """The place of each entry in the sorted order; entries that tie keep theirs."""
    return np.argsort(np.argsort(x, axis, kind="stable"), axis)


def _unsorted(g, x, axis):
    return np.reshape(np.take_along_axis(g, _ranks(x, axis), axis), np.shape(x))


rule(np.sort, lambda g, _ans, x, axis=-1, kind=None, order=None, *, stable=None: _unsorted(g, x, axis))
# NumPy's partition and argpartition need not agree on the order within the parts: the values tell it.
rule(
    np.partition,
    lambda g, ans, x, kth, axis=-1, kind="introselect", order=None: _unsorted(
        np.take_along_axis(g, np.argsort(ans, axis, kind="stable"), axis), x, axis
    ),
)


@composite(np.sort_complex)
def sort_complex(a):
    ordered = np.sort(a)
    return ordered if np.iscomplexobj(a) else ordered.astype(np.result_type(a.dtype, np.complex128))


# Differences and integrals


def _slices(a, axis):
    """a without its first and without its last entry along a dimension."""
    return a[along(axis, a.ndim, slice(1, None))], a[along(axis, a.ndim, slice(None, -1))]


@composite(np.diff)
def diff(a, n=1, axis=-1, prepend=absent, append=absent):
    a = array(a)
    if n < 0:
        raise ValueError(f"np.diff needs an n of 0 or more, and got {n!r}")
    if n == 0:
        return a
    (axis,) = normalize_axis_tuple(axis, a.ndim)
    one = (*a.shape[:axis], 1, *a.shape[axis + 1 :])
    ends = [x if x is absent or np.ndim(x) else np.broadcast_to(x, one) for x in (prepend, append)]
    a = np.concatenate([x for x in (ends[0], a, ends[1]) if x is not absent], axis)
    for _ in range(n):
        after, before = _slices(a, axis)
        a = after - before
    return a


@composite(np.trapezoid)
def trapezoid(y, x=None, dx=1.0, axis=-1):
    y = array(y)
    if x is None:
        widths = dx
    elif np.ndim(x) == 1:
        widths = np.reshape(np.diff(x), [-1 if i == axis % y.ndim else 1 for i in range(y.ndim)])
    else:
        widths = np.diff(x, axis=axis)
    after, before = _slices(y, axis)
    return np.sum(widths * (after + before) / 2.0, axis)


@composite(np.ptp)
def ptp(a, axis=None, out=None, keepdims=False):
    return np.max(a, axis, keepdims=keepdims) - np.min(a, axis, keepdims=keepdims)


def _headed(running, first, axis, include_initial):
    """A running sum or product, with its first value in front if asked for."""
    if not include_initial:
        return running
    axis = 0 if axis is None else axis
    head = np.full_like(
        running, first, shape=[1 if i == axis % running.ndim else n for i, n in enumerate(running.shape)]
    )
    return np.concatenate([head, running], axis)


def _line(x, axis):
    """What a running sum goes along: an axis must be named where there are several."""
    if axis is None and np.ndim(x) > 1:
        raise ValueError(f"an array of {np.ndim(x)} dimensions needs an axis to sum along")
    return np.atleast_1d(x)


if hasattr(np, "cumulative_sum"):

    @composite(np.cumulative_sum)
    def cumulative_sum(x, /, *, axis=None, dtype=None, out=None, include_initial=False):
        return _headed(np.cumsum(_line(x, axis), axis, dtype=dtype), 0, axis, include_initial)

    @composite(np.cumulative_prod)
    def cumulative_prod(x, /, *, axis=None, dtype=None, out=None, include_initial=False):
        return _headed(np.cumprod(_line(x, axis), axis, dtype=dtype), 1, axis, include_initial)


# Constants

constant(np.all, np.any, np.count_nonzero)
constant(np.argmax, np.argmin, np.argsort, np.argwhere, np.flatnonzero, np.lexsort, np.nonzero, np.searchsorted)
