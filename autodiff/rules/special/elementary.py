"""Rules of the elementary functions, the entropies and the losses of scipy.special."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from spmd.autodiff.registry import primitive
from spmd.autodiff.rules.elementwise import nonzero, power_slope
from spmd.autodiff.rules.special.frame import special, ufunc

ufunc("expit", lambda g, ans, _x: g * (ans * (1 - ans)))
ufunc("log_expit", lambda g, _ans, x: g * special.expit(-x))
ufunc("logit", lambda g, _ans, x: g / (x * (1 - x)))
ufunc("exp10", lambda g, ans, _x: g * ans * math.log(10))
ufunc("exp2", lambda g, ans, _x: g * ans * math.log(2))
ufunc("expm1", lambda g, ans, _x: g * (ans + 1))
ufunc("log1p", lambda g, _ans, x: g / (1 + x))
ufunc("cbrt", lambda g, ans, _x: g / (3 * ans * ans))
ufunc("cosm1", lambda g, _ans, x: -g * np.sin(x))

DEGREE = math.pi / 180

ufunc("sindg", lambda g, _ans, x: g * (DEGREE * special.cosdg(x)))
ufunc("cosdg", lambda g, _ans, x: g * (-DEGREE * special.sindg(x)))
ufunc("tandg", lambda g, ans, _x: g * (DEGREE * (1 + ans * ans)))
ufunc("cotdg", lambda g, ans, _x: g * (-DEGREE * (1 + ans * ans)))
ufunc(
    "radian",
    lambda g, _ans, _d, _m, _s: g * DEGREE,
    lambda g, _ans, _d, _m, _s: g * (DEGREE / 60),
    lambda g, _ans, _d, _m, _s: g * (DEGREE / 3600),
)


def _quotient(name: str, derivative: Callable, coefficient: Callable, near: Callable) -> Callable:
    """q(x) = f(x) / x, where f(0) = 0, as a primitive q(x, k) of its k-th derivative.

    It is (f_k - k q_{k-1}) / x; where |x| < near(k) that loses digits, and Taylor's series serves.

    derivative: (x, k) -> the k-th derivative of f.
    coefficient: n -> the factor of x^n in the series of q.
    """

    @primitive(name, lambda g, _ans, x, k: g * q(x, k + 1))  # type: ignore
    def q(x, k):
        small = np.abs(x) < near(k)
        inside, outside = np.where(small, x, 0), np.where(small, 1, x)
        series = np.zeros_like(inside)
        for n in range(60 + k, -1, -1):
            series = series * inside + coefficient(n + k) * math.perm(n + k, k)
        closed = derivative(outside, 0) / outside
        for m in range(1, k + 1):
            closed = (derivative(outside, m) - m * closed) / outside
        return np.where(small, series, closed)

    return q


exprel = _quotient(
    "exprel",
    lambda x, k: np.exp(x) if k else np.expm1(x),
    lambda n: 1 / math.factorial(n + 1),
    lambda k: k + 1,
)
log1p_quotient = _quotient(
    "log1p(x) / x",
    lambda x, k: -math.factorial(k - 1) / (-1 - x) ** k if k else np.log1p(x),
    lambda n: (-1) ** n / (n + 1),
    lambda k: 0.5,
)

ufunc("exprel", lambda g, _ans, x: g * exprel(x, 1))
ufunc(
    "powm1",
    lambda g, _ans, x, y: g * power_slope(x, y),
    lambda g, ans, x, _y: g * ((ans + 1) * np.log(nonzero(x))),
)


def _by_exponent(g, x, log, lmbda):
    """The cotangent of λ in (x^λ - 1) / λ = L exprel(λ L), where L = log x; at x = 0 that is -1 / λ."""
    zero = x == 0
    logx = log(np.where(zero, 1, x))
    return g * np.where(zero, 1 / np.where(zero, lmbda, 1) ** 2, logx * logx * exprel(lmbda * logx, 1))


ufunc(
    "boxcox",
    lambda g, _ans, x, lmbda: g * x ** (lmbda - 1),
    lambda g, _ans, x, lmbda: _by_exponent(g, x, np.log, lmbda),
)
ufunc(
    "boxcox1p",
    lambda g, _ans, x, lmbda: g * (1 + x) ** (lmbda - 1),
    lambda g, _ans, x, lmbda: _by_exponent(g, 1 + x, lambda _: np.log1p(np.where(x == -1, 0, x)), lmbda),
)


def _inverse_boxcox(power, y, lmbda):
    """The derivatives by y and by lmbda of power = (1 + lmbda y)^(1 / lmbda), of which exp(y) is the limit."""
    base = 1 + lmbda * y
    edge = base == 0
    exponent = np.where(edge, lmbda, 1)
    there = np.where(edge, base, 1) ** (1 / exponent - 1)
    by_y = np.where(edge, there, power / np.where(edge, 1, base))
    inside = power * y * y * log1p_quotient(np.where(edge, 0, lmbda * y), 1)
    return by_y, np.where(edge, there * y / exponent, inside)


ufunc(
    "inv_boxcox",
    lambda g, ans, y, lmbda: g * _inverse_boxcox(ans, y, lmbda)[0],
    lambda g, ans, y, lmbda: g * _inverse_boxcox(ans, y, lmbda)[1],
)
ufunc(
    "inv_boxcox1p",
    lambda g, ans, y, lmbda: g * _inverse_boxcox(ans + 1, y, lmbda)[0],
    lambda g, ans, y, lmbda: g * _inverse_boxcox(ans + 1, y, lmbda)[1],
)

# Entropies and losses

ufunc("entr", lambda g, _ans, x: -g * (np.log(x) + 1))
ufunc("rel_entr", lambda g, _ans, x, y: g * (np.log(x) - np.log(y) + 1), lambda g, _ans, x, y: -g * x / y)
ufunc("kl_div", lambda g, _ans, x, y: g * (np.log(x) - np.log(y)), lambda g, _ans, x, y: g * (1 - x / y))
# At x = 0 and y = 0 the second is taken as zero.
ufunc(
    "xlogy",
    lambda g, _ans, _x, y: g * np.log(y),
    lambda g, _ans, x, y: g * x / (y + ((x == 0) & (y == 0))),
)
ufunc(
    "xlog1py",
    lambda g, _ans, _x, y: g * np.log1p(y),
    lambda g, _ans, x, y: g * x / (1 + y + ((x == 0) & (y == -1))),
)
ufunc(
    "huber",
    lambda g, _ans, delta, r: g * np.maximum(np.abs(r) - delta, 0),
    lambda g, _ans, delta, r: g * np.clip(r, -delta, delta),
)


def _pseudo_huber_by_delta(delta, r):
    """(h - delta)² / h, where h = hypot(delta, r)."""
    h = np.hypot(delta, r)
    excess = r * r / nonzero(h + delta)
    return excess * excess / nonzero(h)


ufunc(
    "pseudo_huber",
    lambda g, _ans, delta, r: g * _pseudo_huber_by_delta(delta, r),
    lambda g, _ans, delta, r: g * (delta * r / nonzero(np.hypot(delta, r))),
)
