"""Softmax of rows, and its parts where rows are split over workers, on one block of NumPy or CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff.registry import primitive
from spmd.autodiff.tracer import value_of
from spmd.autodiff.transforms import stop_gradient
from spmd.functions.arguments import cast, require_varying
from spmd.kernels.cpu.chunks import accurate
from spmd.operators.reduce import AxisName, pmax, psum

__all__ = [
    "accurate_copy",
    "exp_from",
    "exp_sums",
    "log_softmax",
    "log_softmax_rows",
    "logsumexp_over",
    "logsumexp_rows",
    "one_hot",
    "row_max",
    "scaled_exp",
    "softmax",
    "softmax_rows",
    "softmax_rows_vjp",
    "top",
]


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


def softmax(x: Any, axis: int) -> Any:
    """Softmax along an axis, counted from the first."""
    return _along(softmax_rows, x, axis)


def log_softmax(x: Any, axis: int) -> Any:
    """The logarithm of `softmax`."""
    return _along(log_softmax_rows, x, axis)


def _along(rows: Any, x: Any, axis: int) -> Any:
    if axis == x.ndim - 1:
        return rows(x)
    return np.moveaxis(rows(np.moveaxis(x, axis, -1)), -1, axis)


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


def exp_from(x: Any, top: Any) -> Any:
    """exp(x - top), by row."""
    return scaled_exp(np.ones_like(top), x, top)


@primitive("logsumexp", lambda g, ans, x: scaled_exp(g, x, ans))
def logsumexp_rows(x):
    return kernels.of(x).logsumexp(x)


def row_max(x):
    """The largest entry of each row; -inf for empty rows."""
    return np.max(x, axis=-1) if x.shape[-1] else np.full_like(x, -np.inf, shape=x.shape[:-1])


def top(x: Any) -> Any:
    """The largest entry of each row, as a constant."""
    return row_max(stop_gradient(x))


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
