"""Softmax and kin, along the last axis. x: (..., n), floating."""

from __future__ import annotations

import numpy as np

__all__ = ["log_softmax", "log_softmax_vjp", "softmax", "softmax_vjp"]


def softmax(x):
    """exp(x) / sum(exp(x)). The largest entry is taken away first, so that nothing overflows."""
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
