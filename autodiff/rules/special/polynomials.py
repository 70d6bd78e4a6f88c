"""Rules of orthogonal polynomials, and of the functions of angles that are made of them.

Each derivative is a polynomial of one degree less, in a family of higher parameters.
"""

from __future__ import annotations

import math

import numpy as np

from spmd.autodiff.registry import primitive
from spmd.autodiff.rules.special.frame import composed, refusal, runner, special, ufunc


def _below(n):
    """n - 1, but 0 for 0, where a factor n stands before the polynomial."""
    return n - (n != 0)


ufunc(
    "eval_jacobi",
    None,
    None,
    None,
    lambda g, _ans, n, a, b, x: g * ((n != 0) * (n + a + b + 1) / 2) * special.eval_jacobi(_below(n), a + 1, b + 1, x),
)
ufunc(
    "eval_sh_jacobi",
    None,
    None,
    None,
    lambda g, _ans, n, p, q, x: g * n * special.eval_sh_jacobi(_below(n), p + 2, q + 1, x),
)
ufunc(
    "eval_gegenbauer",
    None,
    None,
    lambda g, _ans, n, a, x: g * ((n != 0) * 2 * a) * special.eval_gegenbauer(_below(n), a + 1, x),
)
ufunc("eval_legendre", None, lambda g, _ans, n, x: g * (n != 0) * special.eval_gegenbauer(_below(n), 1.5, x))
ufunc(
    "eval_genlaguerre",
    None,
    None,
    lambda g, _ans, n, a, x: -g * (n != 0) * special.eval_genlaguerre(_below(n), a + 1, x),
)
ufunc("eval_laguerre", None, lambda g, _ans, n, x: -g * (n != 0) * special.eval_genlaguerre(_below(n), 1.0, x))
ufunc("eval_hermite", None, lambda g, _ans, n, x: g * (2 * n) * special.eval_hermite(_below(n), x))
ufunc("eval_hermitenorm", None, lambda g, _ans, n, x: g * n * special.eval_hermitenorm(_below(n), x))
ufunc("eval_chebyt", None, lambda g, _ans, n, x: g * n * special.eval_chebyu(_below(n), x))
ufunc("eval_chebyu", None, lambda g, _ans, n, x: g * (2 * (n != 0)) * special.eval_gegenbauer(_below(n), 2.0, x))
ufunc("eval_chebyc", None, lambda g, _ans, n, x: g * n * special.eval_chebys(_below(n), x))
ufunc("eval_chebys", None, lambda g, _ans, n, x: g * (n != 0) * special.eval_gegenbauer(_below(n), 2.0, x / 2))
ufunc(
    "eval_sh_legendre",
    None,
    lambda g, _ans, n, x: g * (2 * (n != 0)) * special.eval_gegenbauer(_below(n), 1.5, 2 * x - 1),
)
ufunc("eval_sh_chebyt", None, lambda g, _ans, n, x: g * (2 * n) * special.eval_sh_chebyu(_below(n), x))
ufunc(
    "eval_sh_chebyu",
    None,
    lambda g, _ans, n, x: g * (4 * (n != 0)) * special.eval_gegenbauer(_below(n), 2.0, 2 * x - 1),
)


@composed("assoc_laguerre")
def assoc_laguerre(x, n, k=0.0):
    return special.eval_genlaguerre(n, k, x)


def _lpmv(m, v, x):
    """Inside by the recurrence; at ±1, where that divides by zero, by (1 - x²)^(m/2) and a Jacobi polynomial."""
    edge = np.abs(x) == 1
    inside, at = np.where(edge, 0, x), np.where(edge, x, 0)
    f = special.lpmv
    lower = (v + m) * f(m, v - 1 + (v + m == 0), inside)
    slope = (lower - v * inside * f(m, v, inside)) / (1 - inside * inside)
    a, w = np.abs(m), 1 - at * at
    scale = np.where(m > 0, 1 - 2 * (a % 2), 1) / 2.0**a * special.poch(v + 1, m)
    rising = (v + a + 1) / 2 * special.eval_jacobi(v - a - 1, a + 1.0, a + 1.0, at) * w ** (a / 2)
    falling = a * at * special.eval_jacobi(v - a, a + 0.0, a + 0.0, at) * w ** (a / 2 - (a != 0))
    return np.where(edge, np.where(v < a, 0, scale * (rising - falling)), slope)


ufunc("lpmv", None, None, lambda g, _ans, m, v, x: g * _lpmv(m, v, x))


def _one_derivative(name: str, diff_n) -> None:
    if diff_n:
        raise refusal(
            name,
            "diff_n",
            f"{diff_n}, with a traced array",
            "diff_n=0, the function itself",
            "differentiate the function (spmd.grad, spmd.jacrev)",
        )


@composed("legendre_p", by_scipy=True)
def legendre_p(n, z, *, diff_n=0):
    _one_derivative("legendre_p", diff_n)
    return np.expand_dims(special.eval_legendre(n, z), 0)


@composed("sph_harm_y")
def sph_harm_y(n, m, theta, phi, *, diff_n=0):
    _one_derivative("sph_harm_y", diff_n)
    return _sph_harm_y(n, m, theta, phi)


def _ladder(n, m, theta, phi, step):
    """The next spherical harmonic up or down in m, times exp(∓i phi)."""
    factor = np.sqrt(np.maximum((n - step * m) * (n + step * m + 1), 0))
    return factor * np.exp(-1j * step * phi) * _sph_harm_y(n, m + step, theta, phi)  # type: ignore


@primitive(
    "scipy.special.sph_harm_y",
    None,
    None,
    lambda g, _ans, n, m, theta, phi: g * (_ladder(n, m, theta, phi, 1) - _ladder(n, m, theta, phi, -1)) / 2,
    lambda g, ans, _n, m, _theta, _phi: 1j * m * g * ans,
)
def _sph_harm_y(n, m, theta, phi):
    return runner("sph_harm_y")(n, m, theta, phi)


@composed("diric")
def diric(x, n):
    return _diric(x, n, 0)


@primitive("scipy.special.diric", lambda g, _ans, x, n, k: g * _diric(x, n, k + 1))  # type: ignore
def _diric(x, n, k):
    """The k-th derivative of sin(nx/2) / n sin(x/2), the mean of cos((n - 1 - 2j) x / 2) over j < n."""
    if k == 0:
        return runner("diric")(x, n)
    n = np.where((n > 0) & (n == np.floor(n)), n, np.nan)
    total = np.zeros_like(x * n)
    known = n[n == n]
    for j in range(int(np.max(known)) if known.size else 0):
        a = np.where(j < n, (n - 1 - 2 * j) / 2, 0)
        total = total + a**k * np.cos(a * x + k * math.pi / 2)
    return (total / n).astype(np.result_type(x))
