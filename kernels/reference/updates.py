"""Optimiser steps: new parameters and new state, from parameters p, gradient g and state, all of one shape.

State is float32 where p and g have a short dtype. over: the results are written over p and the state, which must be
C-contiguous and share no memory.
"""

from __future__ import annotations

import numpy as np


def sgd(p, g, v, rate, momentum, nesterov, over=False):
    """Gradient descent with momentum: the new p and v. v: the running sum of gradients; None without momentum."""
    if v is None:
        return *_over(over, (p,), (p - rate * g,)), None
    new = momentum * v + g
    return _over(over, (p, v), (p - rate * (momentum * new + g if nesterov else new), new))


def adamw(p, g, m, s, rate, b1, b2, eps, decay, t, over=False):
    """Adam with weight decay: the new p, m and s. m, s: running averages of g and of g². t: the number of this step."""
    mean = b1 * m + (1 - b1) * g
    square = b2 * s + (1 - b2) * (g * g)
    along = (mean * (1 / (1 - b1**t))) / (np.sqrt(square * (1 / (1 - b2**t))) + eps)
    return _over(over, (p, m, s), (p - rate * (along + decay * p if decay else along), mean, square))


def _over(over, arrays, results):
    if not over:
        return results
    for a, new in zip(arrays, results, strict=True):
        a[...] = new
    return arrays
