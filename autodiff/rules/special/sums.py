"""Logarithms of sums of exponentials, softmax and softplus."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.autodiff.dispatch import by_numpy
from spmd.autodiff.registry import primitive
from spmd.autodiff.rules.reduce import expand
from spmd.autodiff.rules.special.frame import composed, function, is_complex, runner, special
from spmd.autodiff.tracer import value_of
from spmd.autodiff.transforms import stop_gradient


def _weighed(a, b, axis):
    """exp(a), b exp(a) and the sum of the latter, scaled so that they do not overflow.

    Where all entries are -inf the terms are zero, and entries of +inf share alike.
    """
    bare, weight = stop_gradient(np.real(a)), 1 if b is None else stop_gradient(b)
    top = np.max(np.where(weight == 0, -np.inf, bare), axis=axis, keepdims=True, initial=-np.inf)
    infinite = np.isinf(top)
    a = np.where((bare == -np.inf) | infinite, -np.inf, a - np.where(infinite, 0, top))
    power = np.where((top == np.inf) & (bare == np.inf), 1, np.exp(a))
    power = np.where((top == -np.inf) & (bare > -np.inf), np.inf, power)  # all weights are zero
    terms = power if b is None else np.where(weight == 0, 0, power * b)
    total = np.sum(terms, axis=axis, keepdims=True)
    return power, terms, np.where(top == -np.inf, 1, total)


def _by_a(g, _ans, a, b, axis, keepdims):
    _, terms, total = _weighed(a, b, axis)
    return expand(g, a, axis, keepdims) * (terms / total)


def _by_b(g, _ans, a, b, axis, keepdims):
    power, _, total = _weighed(a, b, axis)
    return expand(g, a, axis, keepdims) * (power / total)


@primitive("scipy.special.logsumexp", _by_a, _by_b)
def _logsumexp(a, b, axis, keepdims):
    if not a.size:
        return np.full_like(np.sum(a, axis=axis, keepdims=keepdims), -np.inf)
    return runner("logsumexp")(a, axis=axis, b=b, keepdims=keepdims)


@primitive(
    "scipy.special.logsumexp",
    lambda g, _ans, a, b, axis, keepdims: _by_a(g[0], _ans, a, b, axis, keepdims),
    lambda g, _ans, a, b, axis, keepdims: _by_b(g[0], _ans, a, b, axis, keepdims),
)
def _logabssumexp(a, b, axis, keepdims):
    if not a.size:
        empty = np.full_like(np.sum(a, axis=axis, keepdims=keepdims), -np.inf)
        return empty, np.sign(empty)
    return runner("logsumexp")(a, axis=axis, b=b, keepdims=keepdims, return_sign=True)


@composed("logsumexp")
def logsumexp(a: Any, axis=None, b: Any = None, keepdims=False, return_sign=False):
    a, b = (np.asarray(x) if isinstance(x, list | tuple) else x for x in (a, b))
    if b is None:
        a = np.atleast_1d(a)
    else:
        # Numbers take the dtype of what they meet.
        dtype = np.result_type(value_of(a), value_of(b))
        a, b = (np.asarray(x, dtype) if isinstance(x, int | float | complex) else x for x in (a, b))
        a, b = (np.atleast_1d(x) for x in np.broadcast_arrays(a, b))
    if not return_sign:
        return _logsumexp(a, b, axis, keepdims)
    if not is_complex(a) and (b is None or not is_complex(b)):
        return _logabssumexp(a, b, axis, keepdims)
    return by_numpy(special.logsumexp, _logsumexp_and_phase, a, axis, b, keepdims, True)


def _logsumexp_and_phase(a, axis, b, keepdims, _return_sign):
    log = _logsumexp(a + 0j, b, axis, keepdims)
    return np.real(log), np.where(np.real(log) == -np.inf, 0, np.exp(1j * np.imag(log)))


function("softmax", lambda g, ans, _x, axis=None: ans * (g - np.sum(g * ans, axis=axis, keepdims=True)))
function("log_softmax", lambda g, ans, _x, axis=None: g - np.exp(ans) * np.sum(g, axis=axis, keepdims=True))


@composed("softplus")
def softplus(x, **kwargs):
    return np.logaddexp(0, x, **kwargs)
