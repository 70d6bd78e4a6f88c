"""Logarithms of sums of exponentials, softmax and softplus."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.autodiff.primitive import primitive
from spmd.autodiff.rules.reduce import expand
from spmd.autodiff.rules.special.frame import composed, function, is_complex, runner
from spmd.autodiff.tracer import Array


def _weights(ans, a, b, axis, keepdims):
    """The derivative of log Σ b exp(a) by a, but for a sign: zero where there is no sum, shared by infinite entries."""
    total = expand(ans, a, axis, keepdims)
    infinite = np.isinf(total)
    plain = np.exp(np.where(infinite, -np.inf, a) - np.where(infinite, 0, total))
    if b is not None:
        plain = np.where(b == 0, 0, plain * b)
    top = (a == np.inf) & (total == np.inf) & (True if b is None else b != 0)
    ties = expand(np.sum(top, axis=axis, keepdims=keepdims), a, axis, keepdims)
    return np.where(top, 1 / np.where(top, ties, 1), plain)


def _by_weights(ans, a, axis, keepdims):
    """The derivative of log Σ b exp(a) by b, but for a sign."""
    empty = np.real(a) == -np.inf
    return np.where(empty, 0, np.exp(np.where(empty, 0, a) - expand(ans, a, axis, keepdims)))


@primitive(
    "scipy.special.logsumexp",
    lambda g, ans, a, b, axis, keepdims: expand(g, a, axis, keepdims) * _weights(ans, a, b, axis, keepdims),
    lambda g, ans, a, _b, axis, keepdims: expand(g, a, axis, keepdims) * _by_weights(ans, a, axis, keepdims),
)  # type: ignore
def _logsumexp(a, b, axis, keepdims):
    if not a.size:
        return np.full_like(np.sum(a, axis=axis, keepdims=keepdims), -np.inf)
    return runner("logsumexp")(a, axis=axis, b=b, keepdims=keepdims)


@primitive(
    "scipy.special.logsumexp",
    lambda g, ans, a, b, axis, keepdims: (
        expand(g[0] * ans[1], a, axis, keepdims) * _weights(ans[0], a, b, axis, keepdims)
    ),
    lambda g, ans, a, _b, axis, keepdims: (
        expand(g[0] * ans[1], a, axis, keepdims) * _by_weights(ans[0], a, axis, keepdims)
    ),
)  # type: ignore
def _logabssumexp(a, b, axis, keepdims):
    if not a.size:
        empty = np.full_like(np.sum(a, axis=axis, keepdims=keepdims), -np.inf)
        return empty, np.sign(empty)
    return runner("logsumexp")(a, axis=axis, b=b, keepdims=keepdims, return_sign=True)


@composed("logsumexp")
def logsumexp(a: Any, axis=None, b: Any = None, keepdims=False, return_sign=False):
    a, b = (x if x is None or isinstance(x, Array) else np.asarray(x) for x in (a, b))
    if b is not None:
        a, b = np.broadcast_arrays(a, b)
    a = np.atleast_1d(a)
    b = b if b is None else np.atleast_1d(b)
    if not return_sign:
        return _logsumexp(a, b, axis, keepdims)
    if not is_complex(a) and (b is None or not is_complex(b)):
        return _logabssumexp(a, b, axis, keepdims)
    log = _logsumexp(a + 0j, b, axis, keepdims)
    return np.real(log), np.where(np.real(log) == -np.inf, 0, np.exp(1j * np.imag(log)))


function("softmax", lambda g, ans, _x, axis=None: ans * (g - np.sum(g * ans, axis=axis, keepdims=True)))
function("log_softmax", lambda g, ans, _x, axis=None: g - np.exp(ans) * np.sum(g, axis=axis, keepdims=True))


@composed("softplus")
def softplus(x, **kwargs):
    return np.logaddexp(0, x, **kwargs)
