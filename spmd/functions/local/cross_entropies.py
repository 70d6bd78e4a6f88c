"""Cross-entropies row by row, on one block of NumPy or CuPy. The classes are in the last dimension."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff.registry import primitive
from spmd.autodiff.tracer import value_of
from spmd.functions.arguments import cast, is_traced
from spmd.functions.embeddings import rows_at
from spmd.functions.local.softmaxes import (
    accurate_copy,
    exp_sums,
    log_softmax_rows,
    logsumexp_over,
    one_hot,
    softmax_rows,
    softmax_rows_vjp,
)
from spmd.kernels.cpu.chunks import accurate

__all__ = ["chosen", "class_sums", "log_total", "of_classes", "of_distributions", "row_weights", "weights_at"]

class_sums, weights_at = exp_sums, rows_at


# If the gradient will be needed, the forward kernel also computes softmax - target, and keeps it in `saved`.


class _SavedGradient:
    """The gradient that the forward kernel has computed."""

    __slots__ = ("value",)

    def __init__(self):
        self.value: Any = None


def _zero_ignored(h, labels, ignore: int | None):
    return h if ignore is None else np.where(np.expand_dims(labels != ignore, -1), h, np.zeros_like(h))


@primitive(
    "cross_entropy_gradient",
    lambda h, _ans, x, labels, *, smoothing, ignore, saved: softmax_rows_vjp(
        _zero_ignored(h, labels, ignore), softmax_rows(x)
    ),
    None,
)
def _gradient(x, labels, *, smoothing: float, ignore: int | None, saved: _SavedGradient):
    """softmax(x) - target."""
    if saved.value is None:
        return kernels.of(x).cross_entropy_and_gradient(x, labels, smoothing, ignore)[1]
    return saved.value


@primitive(
    "cross_entropy",
    lambda g, _ans, x, labels, *, smoothing, ignore, saved: (
        np.expand_dims(g, -1) * _gradient(x, labels, smoothing=smoothing, ignore=ignore, saved=saved)
    ),
    None,
)
def _cross_entropy(x, labels, *, smoothing: float, ignore: int | None, saved: _SavedGradient | None):
    if saved is None:
        return kernels.of(x).cross_entropy(x, labels, smoothing, ignore)
    loss, saved.value = kernels.of(x).cross_entropy_and_gradient(x, labels, smoothing, ignore)
    return loss


@primitive(
    "soft_cross_entropy_gradient",
    lambda h, _ans, x, t, *, saved: np.sum(t, axis=-1, keepdims=True) * softmax_rows_vjp(h, softmax_rows(x)),
    lambda h, _ans, x, _t, *, saved: np.sum(h * softmax_rows(x), axis=-1, keepdims=True) - h,
)
def _soft_gradient(x, t, *, saved: _SavedGradient):
    """sum(t) * softmax(x) - t."""
    return kernels.of(x).soft_cross_entropy_and_gradient(x, t)[1] if saved.value is None else saved.value


@primitive(
    "soft_cross_entropy",
    lambda g, _ans, x, t, *, saved: np.expand_dims(g, -1) * _soft_gradient(x, t, saved=saved),
    lambda g, _ans, x, _t, *, saved: -np.expand_dims(g, -1) * log_softmax_rows(x),
)
def _soft_cross_entropy(x, t, *, saved: _SavedGradient | None):
    if saved is None:
        return kernels.of(x).soft_cross_entropy(x, t)
    loss, saved.value = kernels.of(x).soft_cross_entropy_and_gradient(x, t)
    return loss


def _weights_of(weight, labels, ignore: int | None):
    """The weight of the class of each row: 0 for ignored rows, NaN for labels out of range on a GPU."""
    ids = cast(labels, np.int64)
    if kernels.on_device(value_of(ids)):
        ids = np.where(ids < 0, -2, ids)
    return rows_at(weight, ids if ignore is None else np.where(labels == ignore, -1, ids))


def _weighted_cross_entropy(logits, labels, smoothing: float, ignore: int | None, weight):
    """The losses with class weights, and the weight of each row in their mean."""
    row_weights = _weights_of(weight, labels, ignore)
    saved = _SavedGradient() if is_traced(logits) else None
    if not smoothing:
        loss = _cross_entropy(logits, labels, smoothing=0.0, ignore=ignore, saved=saved)
        return cast(loss * row_weights, loss.dtype), row_weights
    # With different weights smoothing adds up all logits, so the targets are needed as an array.
    x = accurate_copy(logits)
    column, zero = np.expand_dims(row_weights, -1), np.zeros_like(row_weights, shape=())
    share = 0 * column + smoothing / x.shape[-1]  # NaN where the weight is
    if ignore is not None:
        share = np.where(np.expand_dims(labels == ignore, -1), zero, share)
    t = share * weight + np.where(one_hot(labels, x.shape[-1]), (1 - smoothing) * column, zero)
    return cast(_soft_cross_entropy(x, cast(t, x.dtype), saved=saved), logits.dtype), row_weights


def of_classes(x: Any, labels: Any, weight: Any, ignore: int | None, smoothing: float) -> tuple[Any, Any]:
    """The loss of each row, and its weight in a mean; None: 1. Labels are in range, or ignored."""
    if weight is not None:
        return _weighted_cross_entropy(x, labels, smoothing, ignore, weight)
    saved = _SavedGradient() if is_traced(x) else None
    loss = _cross_entropy(x, labels, smoothing=smoothing, ignore=ignore, saved=saved)
    return loss, row_weights(labels, None, ignore, loss)


def of_distributions(x: Any, t: Any) -> Any:
    """-sum(t * log_softmax(x)) of each row."""
    return _soft_cross_entropy(x, cast(t, x.dtype), saved=_SavedGradient() if is_traced(x) else None)


def row_weights(labels: Any, weight: Any, ignore: int | None, like: Any) -> Any:
    """The weight of each row in a mean; None: 1."""
    if weight is not None:
        return _weights_of(weight, labels, ignore)
    return None if ignore is None else (labels != ignore).astype(accurate(like.dtype))


def log_total(x: Any, names: tuple[str, ...], where: str) -> Any:
    """log(sum(exp(x))) of rows that are split over workers."""
    return logsumexp_over(x, names, where)[1]


def chosen(x: Any, labels: Any) -> Any:
    """x[label] of each row; 0 where the label is none of these classes."""
    n = x.shape[-1]
    if not n:
        return np.sum(x, axis=-1)
    own = (labels >= 0) & (labels < n)
    column = np.expand_dims(np.where(own, labels, np.zeros_like(labels)), -1)
    entries = np.take_along_axis(x, column, axis=-1)[..., 0]
    return np.where(own, entries, np.zeros_like(entries))
