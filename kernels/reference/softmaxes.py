"""Softmax and related functions along the last axis. x: (..., n), floating."""

from __future__ import annotations

import numpy as np


def softmax(x):
    """exp(x) / sum(exp(x)). The largest entry is subtracted first, so that nothing overflows."""
    e = np.exp(x - np.max(x, axis=-1, keepdims=True, initial=-np.inf))
    return e / np.sum(e, axis=-1, keepdims=True)


def softmax_vjp(g, y):
    """The cotangent of x, given that of y = softmax(x). Symmetric: as a map of g it is its own adjoint."""
    return y * (g - np.sum(g * y, axis=-1, keepdims=True))


def log_softmax(x):
    """x - log(sum(exp(x)))."""
    shifted = x - np.max(x, axis=-1, keepdims=True, initial=-np.inf)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def log_softmax_vjp(g, y):
    """The cotangent of x, given that of y = log_softmax(x)."""
    return g - np.exp(y) * np.sum(g, axis=-1, keepdims=True)


def logsumexp(x):
    """log(sum(exp(x))), (...). A row with an inf gives inf; a row of -inf only, or an empty one, gives -inf."""
    top = np.max(x, axis=-1, initial=-np.inf)
    shift = np.where(np.isinf(top), 0, top)
    with np.errstate(divide="ignore"):
        return shift + np.log(np.sum(np.exp(x - shift[..., None]), axis=-1))


def scaled_exp(g, x, y):
    """g * exp(x - y), where g and y, (...), have a number for each row, and y is not smaller than the row's entries.

    The cotangent of x, given that of y = logsumexp(x): zero where y is -inf. As a map of g its adjoint is
    h -> sum(h * exp(x - y)).
    """
    return g[..., None] * np.exp(x - np.where(y == -np.inf, 0, y)[..., None])


def exp_sums(x, top, labels):
    """sum(exp(x - top)), x[label] and sum(x) of each row, along a new first axis: (3, ...).

    top: (...), not smaller than the row's entries; -inf stands for 0. labels: (...), integers; one outside 0 to n - 1
    gives 0. The part of a cross-entropy that a worker with some of the classes computes.
    """
    inside = (labels >= 0) & (labels < x.shape[-1])
    chosen = np.sum(np.where(inside[..., None] & (np.arange(x.shape[-1]) == labels[..., None]), x, 0), axis=-1)
    sums = np.sum(np.exp(x - np.where(top == -np.inf, 0, top)[..., None]), axis=-1)
    return np.stack([sums, chosen, np.sum(x, axis=-1)])


def cross_entropy(x, labels, smoothing=0.0, ignore=None):
    """-sum(t * log_softmax(x)) with t = (1 - smoothing) * onehot(label) + smoothing / n; 0 where the label is `ignore`.

    labels: (...), integers from 0 to n - 1, or `ignore`. Gives (...).
    """
    return cross_entropy_and_gradient(x, labels, smoothing, ignore)[0]


def cross_entropy_and_gradient(x, labels, smoothing=0.0, ignore=None):
    """`cross_entropy`, and its derivative softmax(x) - t, which is 0 where the label is `ignore`."""
    y, onehot = log_softmax(x), np.arange(x.shape[-1]) == labels[..., None]
    loss = -(1 - smoothing) * np.sum(np.where(onehot, y, 0), axis=-1)
    loss = loss - (smoothing * np.mean(y, axis=-1) if smoothing else 0)
    d = np.exp(y) - (1 - smoothing) * onehot - smoothing / x.shape[-1]
    counted = np.not_equal(labels, np.nan if ignore is None else ignore)
    return np.where(counted, loss, 0), np.where(counted[..., None], d, 0)


def soft_cross_entropy(x, t):
    """-sum(t * log_softmax(x)), where an entry of t that is 0 adds nothing. t: as x. Gives (...)."""
    return soft_cross_entropy_and_gradient(x, t)[0]


def soft_cross_entropy_and_gradient(x, t):
    """`soft_cross_entropy`, and its derivative with respect to x, sum(t) * softmax(x) - t."""
    y = log_softmax(x)
    loss = -np.sum(t * np.where(t == 0, 0, y), axis=-1)
    return loss, np.exp(y) * np.sum(t, axis=-1, keepdims=True) - t
