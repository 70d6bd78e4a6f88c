"""Rules of reductions, running sums and sorting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spmd.autodiff.primitive import composite, constant, rule
from spmd.autodiff.rules.elementwise import nonzero
from spmd.autodiff.rules.shape import along


def expand(g, like, axis, keepdims):
    """A reduced cotangent spread over the entries it was reduced from: the transpose of a sum."""
    if axis is not None and not keepdims:
        g = np.expand_dims(g, axis)
    return np.broadcast_to(g, np.shape(like))


def count(g, like) -> int:
    """How many entries were reduced to one (one where none were, so that it divides)."""
    return max(np.size(like) // max(g.size, 1), 1)


def conj(x):
    """The conjugate; a real x itself."""
    return np.conj(x) if np.iscomplexobj(x) else x


# Sums and moments


def _sum(g, _ans, _x, axis=None, dtype=None, out=None, keepdims=False, initial=0, where=True):
    g = expand(g, _x, axis, keepdims)
    return g if where is True else np.where(where, g, 0)


def _spread(g, x, axis, keepdims, ddof):
    """The cotangent of a variance: 2 (x - mean) / (n - ddof)."""
    n = count(g, x) - ddof
    deviation = conj(x - np.mean(x, axis=axis, keepdims=True))
    return expand(g * (2 / n if n > 0 else math.nan), x, axis, keepdims) * deviation


rule(np.sum, _sum)
rule(
    np.mean,
    lambda g, _ans, _x, axis=None, dtype=None, out=None, keepdims=False: expand(g / count(g, _x), _x, axis, keepdims),
)
rule(
    np.var,
    lambda g, _ans, x, axis=None, dtype=None, out=None, ddof=0, keepdims=False, *, correction=0: _spread(
        g, x, axis, keepdims, ddof or correction
    ),
)
# At zero the derivative of a standard deviation is taken as zero.
rule(
    np.std,
    lambda g, ans, x, axis=None, dtype=None, out=None, ddof=0, keepdims=False, *, correction=0: _spread(
        g / nonzero(2 * ans), x, axis, keepdims, ddof or correction
    ),
)


@composite(np.average)
def average(a, axis: Any = None, weights=None, returned=False, *, keepdims=False):
    if weights is None:
        weights = np.ones_like(a)
    elif np.shape(weights) != np.shape(a):
        weights = np.moveaxis(np.broadcast_to(weights, np.moveaxis(a, axis, -1).shape), -1, axis)
    total = np.sum(weights, axis, keepdims=keepdims)
    mean = np.sum(a * weights, axis, keepdims=keepdims) / total
    return (mean, total) if returned else mean


# Extremes: entries that tie share the derivative.


def _share(g, ans, x, axis=None, out=None, keepdims=False):
    there = x == expand(ans, x, axis, keepdims)
    ties = np.sum(there, axis=axis, dtype=g.dtype, keepdims=keepdims)
    return expand(g / ties, x, axis, keepdims) * there


for _f in (np.max, np.amax, np.min, np.amin):
    rule(_f, _share)

# Products: no division, so that they hold where entries are zero.


def _shift(x, n):
    """x moved n places towards the front of the first dimension, zeros behind."""
    return np.concatenate([x[n:], np.zeros_like(x[:n])])


def _before(x):
    """The product of all entries before each, along the first dimension."""
    return np.cumprod(np.concatenate([np.ones_like(x[:1]), x[:-1]]), 0)


def _prod(g, _ans, x, axis=None, dtype=None, out=None, keepdims=False):
    ndim = np.ndim(x)
    axes = tuple(range(ndim)) if axis is None else tuple(a % ndim for a in np.atleast_1d(axis).tolist())
    front = np.moveaxis(x, axes, tuple(range(len(axes))))
    column = np.reshape(front, (math.prod(front.shape[: len(axes)]), *front.shape[len(axes) :]))
    others = _before(column) * np.flip(_before(np.flip(column, 0)), 0)
    return expand(g, x, axis, keepdims) * np.moveaxis(np.reshape(others, front.shape), tuple(range(len(axes))), axes)


def _cumprod(g, _ans, x, axis=None):
    """Entry i of x is a factor of all results from i on: before_i (g_i + x_{i+1} (g_{i+1} + x_{i+2} (...))).

    The inner sum r_i = g_i + x_{i+1} r_{i+1} is taken by doubling: after step s it reaches s entries ahead.
    """
    column = np.ravel(x) if axis is None else np.moveaxis(x, axis, 0)
    total, factor = g if axis is None else np.moveaxis(g, axis, 0), _shift(column, 1)
    step = 1
    while step < len(column):
        total, factor = total + factor * _shift(total, step), factor * _shift(factor, step)
        step *= 2
    pulled = _before(column) * total
    return np.reshape(pulled, np.shape(x)) if axis is None else np.moveaxis(pulled, 0, axis)


rule(np.prod, _prod)
rule(np.cumprod, _cumprod)

# Running sums and order


def _sums_from(g, axis):
    """The running sum from the end: the transpose of a running sum."""
    return np.flip(np.cumsum(np.flip(g, axis), axis), axis)


rule(np.cumsum, lambda g, _ans, _x, axis=None, dtype=None, out=None: np.reshape(_sums_from(g, axis), _x.shape))


def _ranks(x, axis):
    """The place of each entry in the sorted order."""
    return np.argsort(np.argsort(x, axis, kind="stable"), axis)


rule(
    np.sort,
    lambda g, _ans, x, axis=-1: np.reshape(np.take_along_axis(g, _ranks(x, axis), axis), np.shape(x)),
)


# Differences and integrals


def _slices(a, axis):
    """a without its first and without its last entry along a dimension."""
    return a[along(axis, a.ndim, slice(1, None))], a[along(axis, a.ndim, slice(None, -1))]


@composite(np.diff)
def diff(a, n=1, axis=-1, prepend=None, append=None):
    ends = [
        x if x is None or np.ndim(x) else np.broadcast_to(x, a[along(axis, a.ndim, slice(0, 1))].shape)
        for x in (prepend, append)
    ]
    a = np.concatenate([x for x in (ends[0], a, ends[1]) if x is not None], axis)
    for _ in range(n):
        after, before = _slices(a, axis)
        a = after - before
    return a


@composite(np.trapezoid)
def trapezoid(y, x=None, dx=1.0, axis=-1):
    after, before = _slices(np.moveaxis(y, axis, -1), -1)
    widths = dx if x is None else np.diff(x if np.ndim(x) == 1 else np.moveaxis(x, axis, -1))
    return np.sum(widths * (after + before) / 2, -1)


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


if hasattr(np, "cumulative_sum"):

    @composite(np.cumulative_sum)
    def cumulative_sum(x, /, *, axis=None, dtype=None, out=None, include_initial=False):
        return _headed(np.cumsum(x, axis, dtype=dtype), 0, axis, include_initial)

    @composite(np.cumulative_prod)
    def cumulative_prod(x, /, *, axis=None, dtype=None, out=None, include_initial=False):
        return _headed(np.cumprod(x, axis, dtype=dtype), 1, axis, include_initial)


# Constants

constant(np.all, np.any, np.count_nonzero)
constant(np.argmax, np.argmin, np.argsort, np.argwhere, np.flatnonzero, np.lexsort, np.nonzero, np.searchsorted)
