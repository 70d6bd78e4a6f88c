"""Activations of x + bias, entry by entry.

They have a few forms, FORMS, each with parameters p. s is the logistic function, 1 / (1 + exp(-u)):

    ramp      (x if p4 else 1) * min(max(p0 x + p1, 0), p2) + p3 min(x, 0)
    gate      (x if p4 else 1) * s(u),  u = p0 x + p1 x^3
    decay     p0 * (x if x > 0 else p1 * (exp(p2 x) - 1))
    softplus  p0 * log(1 + exp(p0 x))
    tanh      tanh(x)
    mish      x * tanh(log(1 + exp(x)))
    normal    x * Phi(x), where Phi is the distribution function of the normal distribution
"""

from __future__ import annotations

import math

import numpy as np

FORMS = ("ramp", "gate", "decay", "softplus", "tanh", "mish", "normal")

_ROOT = math.sqrt(2 / math.pi)
_SELU = (1.0507009873554804934193349852946, 1.6732632423543772848170429916717)

KINDS = {
    "relu": ("ramp", lambda alpha: (1, 0, math.inf, 0, 0)),
    "relu6": ("ramp", lambda alpha: (1, 0, 6, 0, 0)),
    "leaky_relu": ("ramp", lambda alpha: (1, 0, math.inf, alpha, 0)),
    "hard_sigmoid": ("ramp", lambda alpha: (1 / 6, 0.5, 1, 0, 0)),
    "hard_swish": ("ramp", lambda alpha: (1 / 6, 0.5, 1, 0, 1)),
    "sigmoid": ("gate", lambda alpha: (1, 0, 0, 0, 0)),
    "silu": ("gate", lambda alpha: (1, 0, 0, 0, 1)),
    # 1 + tanh(v) = 2 s(2 v)
    "gelu_tanh": ("gate", lambda alpha: (2 * _ROOT, 2 * _ROOT * 0.044715, 0, 0, 1)),
    "elu": ("decay", lambda alpha: (1, alpha, 1, 0, 0)),
    "celu": ("decay", lambda alpha: (1, alpha, 1 / alpha, 0, 0)),
    "selu": ("decay", lambda alpha: (*_SELU, 1, 0, 0)),
    "softplus": ("softplus", lambda alpha: (1, 0, 0, 0, 0)),
    "log_sigmoid": ("softplus", lambda alpha: (-1, 0, 0, 0, 0)),
    "tanh": ("tanh", lambda alpha: (1, 0, 0, 0, 0)),
    "mish": ("mish", lambda alpha: (1, 0, 0, 0, 0)),
    "gelu": ("normal", lambda alpha: (1, 0, 0, 0, 0)),
}


FAR = 1e4
"""Numbers beyond it are clipped for u: their squares may be infinite, and s is 0 or 1 in any case."""


def form(kind: str, alpha: float) -> tuple[int, tuple[float, ...]]:
    """The index of a kind's form in FORMS, and its parameters."""
    name, parameters = KINDS[kind]
    return FORMS.index(name), tuple(map(float, parameters(alpha)))


def activate(x, bias, kind, alpha=1.0):
    """f(x + bias), f being of one of KINDS. bias: (n,) for x of (..., n), or None. alpha: of leaky_relu, elu, celu."""
    return _value_and_slope(x, bias, kind, alpha)[0]


def activate_vjp(g, x, bias, kind, alpha=1.0, into=None):
    """g * f'(x + bias): the cotangent of x; its sum over rows is that of bias. As a map of g it is its own adjoint.

    At a kink of relu, relu6, leaky_relu and hard_sigmoid it is the derivative on the flat side.
    into: an array of its shape and dtype to write it into, such as g itself.
    """
    return np.multiply(g, _value_and_slope(x, bias, kind, alpha)[1], out=into)


def _value_and_slope(x, bias, kind, alpha):
    """f(x + bias) and f'(x + bias)."""
    which, p = form(kind, alpha)
    z = x if bias is None else x + bias
    factor = z if p[4] else np.ones_like(z)
    match FORMS[which]:
        case "ramp":
            v = p[0] * z + p[1]
            clipped, inside = np.clip(v, 0, p[2]), (v > 0) & ((v < p[2]) | (p[2] == math.inf))
            below = p[3] * np.minimum(z, 0) if p[3] else 0
            return factor * clipped + below, np.where(inside, factor * p[0], 0) + p[4] * clipped + p[3] * (z <= 0)
        case "gate":
            c = np.clip(z, -FAR, FAR)
            u = p[0] * c + p[1] * c**3
            s = _logistic(u)
            slope = s * _logistic(-u) * (p[0] + 3 * p[1] * c**2)
            return factor * s, (c * slope + s if p[4] else slope)
        case "decay":
            below = np.minimum(z, 0) * p[2]
            return (
                p[0] * np.where(z > 0, z, p[1] * np.expm1(below)),
                p[0] * np.where(z > 0, 1, p[1] * p[2] * np.exp(below)),
            )
        case "softplus":
            return p[0] * np.logaddexp(0, p[0] * z), _logistic(p[0] * z)
        case "tanh":
            return np.tanh(z), 1 - np.tanh(z) ** 2
        case "mish":
            t = np.tanh(np.logaddexp(0, z))
            return z * t, t + z * (1 - t * t) * _logistic(z)
        case _:
            below = np.vectorize(lambda z: math.erfc(-z / math.sqrt(2)) / 2, otypes=[float])(z)
            density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
            return z * below, below + z * density


def _logistic(u):
    e = np.exp(-np.abs(u))
    return np.where(u > 0, 1, e) / (1 + e)
