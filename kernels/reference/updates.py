"""Steps of optimisers: new parameters and new state, from parameters p, gradient g and state, all of one shape.

State is float32 where p and g are of a short floating-point type.
"""

from __future__ import annotations

import numpy as np

__all__ = ["adamw", "sgd"]


def sgd(p, g, v, rate, momentum, nesterov):
    """Gradient descent with momentum: the new p and v. v: the running sum of gradients; None without momentum."""
    if v is None:
        return p - rate * g, None
    v = momentum * v + g
    return p - rate * (momentum * v + g if nesterov else v), v


def adamw(p, g, m, s, rate, b1, b2, eps, decay, t):
    """Adam with weight decay: the new p, m and s. m, s: running averages of g and of g². t: the number of this step."""
    m = b1 * m + (1 - b1) * g
    s = b2 * s + (1 - b2) * (g * g)
    along = (m * (1 / (1 - b1**t))) / (np.sqrt(s * (1 / (1 - b2**t))) + eps)
    return p - rate * (along + decay * p if decay else along), m, s
