"""Softmax and kin, and the cross-entropy of classes."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff.primitive import primitive
from spmd.autodiff.tracer import value_of
from spmd.errors import describe, message
from spmd.functions.arguments import along, floating

__all__ = ["log_softmax", "softmax", "softmax_cross_entropy"]


def _itself(h, _ans, _g, y) -> Any:
    """As a map of g it is symmetric."""
    return _softmax_vjp(h, y)


@primitive(
    "softmax_vjp",
    _itself,
    lambda h, _ans, g, y: h * (g - np.sum(g * y, axis=-1, keepdims=True)) - g * np.sum(h * y, axis=-1, keepdims=True),
)
def _softmax_vjp(g, y):
    return kernels.of(y).softmax_vjp(g, y)


@primitive("softmax", lambda g, ans, _x: _softmax_vjp(g, ans))
def _softmax(x):
    return kernels.of(x).softmax(x)


def softmax(x, axis: int = -1):
    """exp(x) / sum(exp(x)) along an axis, without overflow. x: floating, of any shape with dimensions.

    Derivative's adjoint: y * (g - sum(g * y)).
    """
    x = floating("spmd.functions.softmax", "x", x)
    return along(_softmax, x, axis, "spmd.functions.softmax")


@primitive(
    "log_softmax_vjp",
    lambda h, _ans, _g, y: h - np.sum(np.exp(y) * h, axis=-1, keepdims=True),
    lambda h, _ans, g, y: -h * np.exp(y) * np.sum(g, axis=-1, keepdims=True),
)
def _log_softmax_vjp(g, y):
    return kernels.of(y).log_softmax_vjp(g, y)


@primitive("log_softmax", lambda g, ans, _x: _log_softmax_vjp(g, ans))
def _log_softmax(x):
    return kernels.of(x).log_softmax(x)


def log_softmax(x, axis: int = -1):
    """x - log(sum(exp(x))) along an axis, without overflow. x: floating, of any shape with dimensions.

    Derivative's adjoint: g - softmax(x) * sum(g).
    """
    x = floating("spmd.functions.log_softmax", "x", x)
    return along(_log_softmax, x, axis, "spmd.functions.log_softmax")


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
