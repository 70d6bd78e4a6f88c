"""Softmax, log-softmax and logsumexp, also along an axis that is split over workers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff.registry import primitive
from spmd.autodiff.tracer import value_of
from spmd.autodiff.transforms import stop_gradient
from spmd.errors import SpecError, describe
from spmd.functions.arguments import apply_along, as_floating, cast, normalized_axes, require_varying
from spmd.kernels.cpu.chunks import accurate
from spmd.operators.reduce import AxisName, pmax, psum
from spmd.tracebacks import api_boundary

__all__ = ["log_softmax", "logsumexp", "softmax"]


def _symmetric(h, _ans, _g, y) -> Any:
    """The rule in g: the map is linear and symmetric."""
    return softmax_rows_vjp(h, y)


@primitive(
    "softmax_vjp",
    _symmetric,
    lambda h, _ans, g, y: h * (g - np.sum(g * y, axis=-1, keepdims=True)) - g * np.sum(h * y, axis=-1, keepdims=True),
)
def softmax_rows_vjp(g, y):
    return kernels.of(y).softmax_vjp(g, y)


@primitive("softmax", lambda g, ans, _x: softmax_rows_vjp(g, ans))
def softmax_rows(x):
    return kernels.of(x).softmax(x)


@api_boundary
def softmax(x, axis: int = -1, *, axis_name: AxisName | None = None):
    """exp(x) / sum(exp(x)) along an axis, without overflow. x: floating, of any shape with dimensions.

    axis_name: the axes of the mesh that split this axis; two all-reduces then give the maxima and sums of whole rows.
    Derivative's adjoint: y * (g - sum(g * y)). Raises StateError for an x that does not vary over axis_name.
    """
    x = as_floating("spmd.functions.softmax", "x", x)
    if axis_name is None:
        return apply_along(softmax_rows, x, axis, "spmd.functions.softmax")

    def rows(x):
        wide, total = logsumexp_over(x, axis_name, "spmd.functions.softmax")
        return cast(scaled_exp(np.ones_like(total), wide, total), x.dtype)

    return apply_along(rows, x, axis, "spmd.functions.softmax")


@primitive(
    "log_softmax_vjp",
    lambda h, _ans, _g, y: h - np.sum(np.exp(y) * h, axis=-1, keepdims=True),
    lambda h, _ans, g, y: -h * np.exp(y) * np.sum(g, axis=-1, keepdims=True),
)
def _log_softmax_vjp(g, y):
    return kernels.of(y).log_softmax_vjp(g, y)


@primitive("log_softmax", lambda g, ans, _x: _log_softmax_vjp(g, ans))
def log_softmax_rows(x):
    return kernels.of(x).log_softmax(x)


@api_boundary
def log_softmax(x, axis: int = -1, *, axis_name: AxisName | None = None):
    """x - log(sum(exp(x))) along an axis, without overflow. x: floating, of any shape with dimensions.

    axis_name: as for `softmax`, errors too. Derivative's adjoint: g - softmax(x) * sum(g).
    """
    x = as_floating("spmd.functions.log_softmax", "x", x)
    if axis_name is None:
        return apply_along(log_softmax_rows, x, axis, "spmd.functions.log_softmax")

    def rows(x):
        wide, total = logsumexp_over(x, axis_name, "spmd.functions.log_softmax")
        return cast(wide - np.expand_dims(total, -1), x.dtype)

    return apply_along(rows, x, axis, "spmd.functions.log_softmax")


def _scaled_exp_g(h, _ans, _g, x, y) -> Any:
    return np.sum(h * scaled_exp(np.ones_like(y), x, y), axis=-1)


@primitive(
    "scaled_exp",
    _scaled_exp_g,
    lambda h, ans, _g, _x, _y: h * ans,
    lambda h, ans, _g, _x, _y: -np.sum(h * ans, axis=-1),
)
def scaled_exp(g, x, y):
    """g * exp(x - y), by row."""
    return kernels.of(x).scaled_exp(g, x, y)


@primitive("logsumexp", lambda g, ans, x: scaled_exp(g, x, ans))
def _logsumexp(x):
    return kernels.of(x).logsumexp(x)


@api_boundary
def logsumexp(
    x, axis: int | Sequence[int] | None = None, b=None, keepdims: bool = False, *, axis_name: AxisName | None = None
):
    """log(sum(b * exp(x))) over some axes (None: all), without overflow. As `jax.nn.logsumexp`.

    x: floating. b: weights, which broadcast to the shape of x; the sum must not be negative. axis_name: the axes of the
    mesh that split these axes of x; then the sum is over the workers too, by two small all-reduces, and the result is
    Invariant there. Where every entry is -inf the result is -inf, and the gradient 0.
    Derivative's adjoint: g * b * exp(x - y). Raises StateError for an x that does not vary over axis_name.
    """
    where = "spmd.functions.logsumexp"
    x = as_floating(where, "x", x)
    axes = normalized_axes(where, x, axis)
    rest_shape = tuple(n for i, n in enumerate(x.shape) if i not in axes)
    last_axes = tuple(range(x.ndim - len(axes), x.ndim))
    count = prod(x.shape[a] for a in axes)

    def as_rows(a):
        return np.reshape(np.moveaxis(a, axes, last_axes), (*rest_shape, count))

    if b is not None:
        b = as_floating(where, "b", b)
        if len(b.shape) > x.ndim or any(n not in (1, m) for n, m in zip(b.shape[::-1], x.shape[::-1], strict=False)):
            need = f"a shape that broadcasts to {list(x.shape)}"
            raise SpecError.at(where, argument="b", got=describe(b), need=need, mend="reshape it")
        b = as_rows(np.broadcast_to(b, x.shape))
    x = as_rows(x)
    if b is not None:
        y = _weighted_logsumexp(x, b, axis_name, where)
    else:
        y = _logsumexp(x) if axis_name is None else cast(logsumexp_over(x, axis_name, where)[1], x.dtype)
    return np.expand_dims(y, axes) if keepdims else y


def row_max(x):
    """The largest entry of each row; -inf for empty rows."""
    return np.max(x, axis=-1) if x.shape[-1] else np.full_like(x, -np.inf, shape=x.shape[:-1])


def _weighted_logsumexp(x, b, axis_name: AxisName | None, where: str):
    """log(sum(b * exp(x))) along the last axis. Entries of weight 0 do not count, even if they are NaN."""
    x = np.where(b == 0, np.zeros_like(x) - np.inf, x)
    top = row_max(stop_gradient(x))
    if axis_name is not None:
        require_varying(where, x, axis_name)
        top = pmax(top, axis_name)
    top = np.where(np.isinf(top), np.zeros_like(top), top)
    total = np.sum(b * np.exp(x - np.expand_dims(top, -1)), axis=-1)
    return top + np.log(total if axis_name is None else psum(total, axis_name))


# Classes that are spread over workers


def accurate_copy(x):
    return cast(x, accurate(x.dtype))


def logsumexp_over(x, axis_name: AxisName, where: str):
    """x, in float32 if it is shorter, and log(sum(exp(x))) over the last axis and over workers."""
    names, x = require_varying(where, x, axis_name), accurate_copy(x)
    top = pmax(row_max(stop_gradient(x)), names)
    no_labels = np.zeros_like(value_of(top), dtype=np.int64) - 1
    with np.errstate(divide="ignore"):
        total = np.log(psum(exp_sums(x, top, no_labels)[0], names))
    return x, np.where(np.isinf(top), top, total + np.where(np.isinf(top), np.zeros_like(top), top))


@primitive(
    "exp_sums",
    lambda g, _ans, x, top, labels: (
        scaled_exp(g[0], x, top)
        + np.where(one_hot(labels, x.shape[-1]), np.expand_dims(g[1], -1), np.zeros_like(g[1], shape=()))
        + np.expand_dims(g[2], -1)
    ),
    None,
    None,
)
def exp_sums(x, top, labels):
    """sum(exp(x - top)), x[label], sum(x): by row, along a new first axis."""
    return kernels.of(x).exp_sums(x, top, labels)


def one_hot(labels, n: int):
    labels = value_of(labels)
    labels = np.asarray(labels) if isinstance(labels, np.generic) else labels
    return np.expand_dims(labels, -1) == np.arange(n, like=labels)
