"""Rules of the error function, the exponential integrals, and their relatives."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import _ufuncs

from spmd.autodiff import cupy_fallback
from spmd.autodiff.registry import rule
from spmd.autodiff.rules.special.elementary import exprel, log1p_quotient
from spmd.autodiff.rules.special.frame import composed, is_complex, runner, special, ufunc, where_finite

# The error function and its relatives

_BELL = 2 / math.sqrt(math.pi)
NORMAL = 1 / math.sqrt(2 * math.pi)
_FAR = 8.0


def _double_factorials(y):
    """The sum of (2m - 1)!! y^(m - 1) for m = 1, 2, ...: what is left of these functions far from zero."""
    total = 1.0
    for m in range(20, 1, -1):
        total = 1 + (2 * m - 1) * y * total
    return total


def _either(far, x, series: Callable, closed):
    """`closed`, and where x is far the series, since there the terms of `closed` cancel."""
    return np.where(far, series(1 / np.where(far, x, _FAR) ** 2 / 2), closed)


def _erfcx(x, ans):
    far = (np.real(x) > 0) & (np.abs(x) > _FAR)
    return _either(far, x, lambda y: -_BELL * y * _double_factorials(-y), 2 * x * ans - _BELL)


def _dawsn(x, ans):
    far = np.real(x * x) > _FAR**2
    return _either(far, x, lambda y: -y * _double_factorials(y), 1 - 2 * x * ans)


def _wofz(z, ans):
    far = (np.imag(z) >= 0) & (np.abs(z) > _FAR)
    return _either(far, z, lambda y: -1j * _BELL * y * _double_factorials(y), 1j * _BELL - 2 * z * ans)


ufunc("erf", lambda g, _ans, x: g * (_BELL * np.exp(-x * x)))
ufunc("erfc", lambda g, _ans, x: g * (-_BELL * np.exp(-x * x)))
ufunc("erfi", lambda g, _ans, x: g * (_BELL * np.exp(x * x)))
ufunc("erfcx", lambda g, ans, x: g * _erfcx(x, ans))
ufunc("dawsn", lambda g, ans, x: g * _dawsn(x, ans))
ufunc("wofz", lambda g, ans, z: g * _wofz(z, ans))
ufunc("erfinv", lambda g, ans, _x: g * (np.exp(ans * ans) / _BELL))
ufunc("erfcinv", lambda g, ans, _x: g * (np.exp(ans * ans) / -_BELL))
ufunc("ndtr", lambda g, _ans, x: g * (NORMAL * np.exp(-0.5 * x * x)))
ufunc("log_ndtr", lambda g, _ans, x: g * (2 * NORMAL / special.erfcx(x * -math.sqrt(0.5))))
ufunc("ndtri", lambda g, ans, _x: g * (np.exp(0.5 * ans * ans) / NORMAL))
ufunc("ndtri_exp", lambda g, ans, _x: g * (special.erfcx(ans * -math.sqrt(0.5)) / (2 * NORMAL)))
ufunc("fresnel", lambda g, _ans, z: g[0] * np.sin(math.pi / 2 * z * z) + g[1] * np.cos(math.pi / 2 * z * z))
ufunc("modfresnelp", lambda g, ans, x: _modfresnel(g, ans, x, 1j))
ufunc("modfresnelm", lambda g, ans, x: _modfresnel(g, ans, x, -1j))


def _modfresnel(g, ans, x, i):
    return -g[0] * np.exp(i * x * x) - g[1] * (2 * i * x * ans[1] + (1 - i) / math.sqrt(2 * math.pi))


ufunc(
    "owens_t",
    lambda g, _ans, h, a: g * (-NORMAL / 2 * np.exp(-0.5 * h * h) * special.erf(math.sqrt(0.5) * a * h)),
    lambda g, _ans, h, a: g * (np.exp(-0.5 * h * h * (1 + a * a)) / (2 * math.pi * (1 + a * a))),
)


def _voigt(x, sigma, gamma, ans):
    """The derivative of the profile by x + iγ, of which the profile is the real part, and that by σ.

    With z = (x + iγ) / σ√2 they are w'(z) / 2√π σ², and σ times the second derivative by x, for a normal distribution
    spreads as heat does. Far from zero σ is no longer a divisor, so that it may vanish.
    """
    point = x + 1j * gamma
    far = np.abs(point) > 12 * sigma
    away, width = np.where(far, point, 1), np.where(far, 1, sigma)
    y = np.where(far, sigma, 0) ** 2 / (away * away)
    first = second = 0.0
    for m in range(20, 0, -1):
        first, second = (1 + (2 * m + 1) * y * first, 2 * m + (2 * m + 1) * y * second)
    z = np.where(far, 1j, point) / (width * math.sqrt(2))
    slope = 1j * _BELL - 2 * z * special.wofz(z)
    by_point = np.where(far, first / (1j * math.pi * away**2), slope / (2 * math.sqrt(math.pi) * width**2))
    heat = np.where(far, sigma, 1) * np.real(second / (-1j * math.pi * away**3))
    return by_point, np.where(far, heat, -ans / width - np.real(slope * z) * NORMAL / width**2)


ufunc(
    "voigt_profile",
    lambda g, ans, x, sigma, gamma: g * np.real(_voigt(x, sigma, gamma, ans)[0]),
    lambda g, ans, x, sigma, gamma: g * _voigt(x, sigma, gamma, ans)[1],
    lambda g, ans, x, sigma, gamma: -g * np.imag(_voigt(x, sigma, gamma, ans)[0]),
)

# Exponential integrals


def _sinhc(x):
    """sinh(x) / x."""
    return (exprel(x, 0) + exprel(-x, 0)) / 2


def _sinc(x):
    """sin(x) / x."""
    return np.real(exprel(1j * x, 0)) if not is_complex(x) else _sinhc(1j * x)


def _expn_below(n, x):
    """The exponential integral of order n - 1; those of orders 0 and -1, which scipy leaves out, are elementary."""
    zeroth = np.exp(-x) / np.where(n > 1, 1, x)
    elementary = np.where(n == 1, zeroth, (1 + 1 / np.where(n > 1, 1, x)) * zeroth)
    return np.where(n > 1, special.expn(n - 1 + (n <= 1) * 2, x), elementary)


ufunc("expi", lambda g, _ans, x: g * np.exp(x) / x)
ufunc("exp1", lambda g, _ans, x: -g * np.exp(-x) / x)
ufunc("expn", None, lambda g, _ans, n, x: -g * _expn_below(n, x))
ufunc("shichi", lambda g, ans, x: g[0] * _sinhc(x) + g[1] * where_finite(ans[1], lambda x: np.cosh(x) / x, x))
ufunc("sici", lambda g, ans, x: g[0] * _sinc(x) + g[1] * where_finite(ans[1], lambda x: np.cos(x) / x, x))
ufunc("spence", lambda g, _ans, z: -g * log1p_quotient(z - 1, 0))
ufunc("wrightomega", lambda g, ans, _z: g * ans / (1 + ans))
if hasattr(_ufuncs, "_lambertw"):
    cupy_fallback.alternatives[_ufuncs._lambertw] = runner("lambertw")
    rule(_ufuncs._lambertw, lambda g, ans, _z, _k, _tol: g * np.exp(-ans) / (1 + ans))


@composed("lambertw")
def lambertw(z, k=0, tol=1e-8):
    return special.lambertw(z, k, tol)
