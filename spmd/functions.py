"""Differentiable functions over the kernels: for blocks in a body, and outside."""

from __future__ import annotations

import numpy as np

from spmd import kernels
from spmd.autodiff.primitive import primitive
from spmd.autodiff.tracer import Array, bare

__all__ = ["log_softmax", "relu", "softmax_cross_entropy"]


def relu(x):
    """max(x, 0), entry by entry. Derivative: 1 where x > 0, else 0."""
    return np.where(x > 0, x, np.zeros((), x.dtype))


def log_softmax(x):
    """x - log(sum(exp(x))) along the last axis. x: (..., classes). Adjoint: g - softmax(x) sum(g)."""
    return _log_softmax(x)


@primitive("log_softmax", lambda g, ans, _x: g - np.exp(ans) * np.sum(g, axis=-1, keepdims=True))
def _log_softmax(x):
    return kernels.of(x).log_softmax(x)


def softmax_cross_entropy(logits, labels):
    """-log softmax(logits)[label] for each row: (rows, classes) and integer (rows,) give (rows,).

    Value and gradient, softmax(logits) - onehot(labels), come from one pass.
    """
    labels = bare(labels) if type(labels) is not Array or labels.state is None else labels
    onehot = np.equal(np.expand_dims(labels, -1), np.arange(logits.shape[-1])).astype(logits.dtype)
    return -np.sum(log_softmax(logits) * onehot, axis=-1)
