"""Differentiable functions over the kernels: for blocks in a body, and outside."""

from __future__ import annotations

import numpy as np

from spmd import kernels
from spmd.autodiff.primitive import primitive
from spmd.autodiff.tracer import value_of
from spmd.errors import describe, message

__all__ = ["log_softmax", "relu", "softmax_cross_entropy"]


def relu(x):
    """max(x, 0), entry by entry. Derivative: 1 where x > 0, else 0."""
    return np.where(x > 0, x, np.zeros((), x.dtype))


@primitive("log_softmax", lambda g, ans, _x: g - np.exp(ans) * np.sum(g, axis=-1, keepdims=True))
def _log_softmax(x):
    return kernels.of(x).log_softmax(x)


def log_softmax(x):
    """x - log(sum(exp(x))) along the last axis, without overflow. x: (..., classes), floating.

    Adjoint of its derivative: g - softmax(x) * sum(g).
    """
    return _log_softmax(x)


def softmax_cross_entropy(logits, labels):
    """-log softmax(logits)[label], for each row.

    logits: (..., classes), floating. labels: (...), integers from 0 to classes - 1. Gives (...).
    Gradient: softmax(logits) - onehot(label). Raises ValueError for labels out of range or of another shape.
    """
    classes, found = logits.shape[-1], np.asarray(value_of(labels))
    if found.dtype.kind not in "iu" or found.shape != logits.shape[:-1]:
        raise ValueError(
            message(
                "spmd.softmax_cross_entropy",
                argument="labels",
                got=f"{describe(labels)} for logits of shape {list(logits.shape)}",
                need=f"integers of shape {list(logits.shape[:-1])}",
                mend="give one class number per row: onehot.argmax(-1) of onehot rows",
            )
        )
    if found.size and (found.min() < 0 or found.max() >= classes):
        raise ValueError(
            message(
                "spmd.softmax_cross_entropy",
                argument="labels",
                got=f"labels from {found.min()} to {found.max()}",
                need=f"classes from 0 to {classes - 1}",
                mend="leave out rows without a class, or count from 0",
            )
        )
    return -np.squeeze(np.take_along_axis(log_softmax(logits), np.expand_dims(labels, -1), axis=-1), axis=-1)
