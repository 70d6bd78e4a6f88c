"""Rules of the gamma function and its relatives, and the compositions of them that count things."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import _ufuncs

from spmd.autodiff.registry import primitive, rule
from spmd.autodiff.rules.special.frame import (
    arrays,
    composed,
    cospi,
    function,
    functions,
    is_complex,
    is_pole,
    refusal,
    runner,
    sinpi,
    special,
    ufunc,
)
from spmd.autodiff.tracer import value_of


@primitive("polygamma", None, lambda g, _ans, n, x: g * _polygamma(n + 1, x))  # type: ignore
def _polygamma(n, x):
    """The n-th derivative of the digamma function, n > 0; for complex x too."""
    if is_complex(x):
        return _complex_polygamma(int(n), x)
    return (-1.0) ** (n + 1) * special.gamma(n + 1.0) * runner("zeta")(n + 1, x)


def _complex_polygamma(n: int, z):
    """By reflection to Re z > 0, recurrence to Re z > 16, and the asymptotic series there."""
    left = np.real(z) < 0.5
    x = np.where(left, 1 - z, z)
    total = np.zeros_like(x)
    for _ in range(16):
        total, x = total + math.factorial(n) / x ** (n + 1), x + 1
    total = total + math.factorial(n - 1) / x**n + math.factorial(n) / (2 * x ** (n + 1))
    for k, b in enumerate((1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510), 1):
        total = total + b * math.factorial(2 * k + n - 1) / math.factorial(2 * k) / x ** (2 * k + n)
    cot = 1 / np.tan(math.pi * np.where(left, z, 0.25))
    powers = np.polynomial.Polynomial([0, 1])
    for _ in range(n):
        powers = powers.deriv() * np.polynomial.Polynomial([-1, 0, -1])
    reflected = sum(c * cot**k for k, c in enumerate(powers.coef.tolist())) * math.pi ** (n + 1)
    return np.where(left, -total - reflected, (-1) ** (n + 1) * total)


def rgamma_slope(x):
    """The derivative of 1 / Γ. Left of 1/2 it is that of Γ(1 - x) sin(πx) / π, which knows no poles."""
    left = np.real(x) < 0.5
    y, right = np.where(left, 1 - x, 1), np.where(left, 1, x)
    slope = special.gamma(y) * (cospi(x) - sinpi(x) * special.digamma(y) / math.pi)
    return np.where(left, slope, -special.rgamma(right) * special.digamma(right))


ufunc("gamma", lambda g, ans, x: g * ans * special.digamma(x))
ufunc("gammaln", lambda g, _ans, x: g * special.digamma(x))
ufunc("loggamma", lambda g, _ans, x: g * special.digamma(x))
ufunc("rgamma", lambda g, _ans, x: g * rgamma_slope(x))
for _name in ("digamma", "psi"):
    ufunc(_name, lambda g, _ans, x: g * _polygamma(1, x))
function("polygamma", None, lambda g, _ans, n, x: g * _polygamma(n + 1, x))
function("zeta", None, lambda g, _ans, s, q: -g * s * functions["zeta"](s + 1, q))
if hasattr(_ufuncs, "_zeta"):
    rule(_ufuncs._zeta, None, lambda g, _ans, s, q: -g * s * functions["zeta"](s + 1, q))


@composed("multigammaln", by_scipy=True)
def multigammaln(a, d):
    runner("multigammaln")(value_of(a), value_of(d))  # for its errors
    # scipy gives double precision here, whatever comes.
    return sum((special.gammaln(a - j / 2) for j in range(int(d))), np.float64(d * (d - 1) / 4 * math.log(math.pi)))


def _beta(ans, a, b):
    """The derivative of the beta function by a; where a + b is a pole of Γ, B is zero and its derivative is not."""
    pole = is_pole(a + b)
    x, y = np.where(pole, a, 1), np.where(pole, b, 1)
    at_pole = special.gamma(x) * special.gamma(y) * rgamma_slope(x + y)
    return ans * special.digamma(a) + np.where(pole, at_pole, -ans * special.digamma(np.where(pole, 1, a + b)))


ufunc("beta", lambda g, ans, a, b: g * _beta(ans, a, b), lambda g, ans, a, b: g * _beta(ans, b, a))
ufunc(
    "betaln",
    lambda g, _ans, a, b: g * (special.digamma(a) - special.digamma(a + b)),
    lambda g, _ans, a, b: g * (special.digamma(b) - special.digamma(a + b)),
)


def _binom(ans, n, k):
    """The derivatives of a binomial coefficient by n and by k.

    For k ≥ n + 1 it is B(n + 1, k - n) sin(π(k - n)) / π, and for k ≤ -1 the same of n - k: there digamma has poles.
    """
    psi = special.digamma
    mirror = (k <= -1) & (n > -1)
    over = (k >= n + 1) & (n > -1) | mirror
    top = np.where(over, n, 0)
    low = np.where(over, np.where(mirror, n - k, k), 1)
    t = low - top
    b = special.beta(top + 1, t)
    sine, cosine = b * sinpi(t) / math.pi, b * cospi(t)
    by_top = sine * (psi(top + 1) - psi(t)) - cosine
    by_low = sine * (psi(t) - psi(low + 1)) + cosine
    n, k = np.where(over, 1, n), np.where(over, 0.5, k)
    inside = psi(n - k + 1)
    return (
        np.where(over, np.where(mirror, by_top + by_low, by_top), ans * (psi(n + 1) - inside)),
        np.where(over, np.where(mirror, -by_low, by_low), ans * (inside - psi(k + 1))),
    )


ufunc("binom", lambda g, ans, n, k: g * _binom(ans, n, k)[0], lambda g, ans, n, k: g * _binom(ans, n, k)[1])


def _poch(ans, z, m):
    """The derivative of Γ(z + m) / Γ(z) by z, without the poles that cancel."""
    psi = special.digamma
    crosses, left = (z <= 0) & (z + m > 0), (z <= 0) & (z + m <= 0)
    zc, mc = np.where(crosses, z, 1), np.where(crosses, m, 1)
    across = special.gamma(zc + mc) * (psi(zc + mc) * special.rgamma(zc) + rgamma_slope(zc))
    zl, ml = np.where(left, z, -0.5), np.where(left, m, 0)
    sine = sinpi(ml)
    poles = np.where(sine == 0, 1, sinpi(zl) * sinpi(zl + ml))
    leftwards = ans * (psi(1 - zl - ml) - psi(1 - zl) + math.pi * sine / poles)
    plain = crosses | left
    zp, mp = np.where(plain, 1, z), np.where(plain, 1, m)
    return np.where(crosses, across, np.where(left, leftwards, ans * (psi(zp + mp) - psi(zp))))


ufunc("poch", lambda g, ans, z, m: g * _poch(ans, z, m), lambda g, ans, z, m: g * ans * special.digamma(z + m))


def _inexact(name: str, exact: bool) -> None:
    if exact:
        raise refusal(
            name, "exact", "True, with a traced array", "exact=False: integers have no derivative", "exact=False"
        )


@composed("comb", by_scipy=True)
def comb(N, k, *, exact=False, repetition=False):
    _inexact("comb", exact)
    N, k = arrays(N, k)
    if repetition:
        return np.where((k == 0) & (N >= 0), 1, special.binom(N + k - 1, k))
    return np.where((k <= N) & (N >= 0) & (k >= 0), special.binom(N, k), 0)


@composed("perm", by_scipy=True)
def perm(N, k, exact=False):
    _inexact("perm", exact)
    N, k = arrays(N, k)
    return np.where((k <= N) & (N >= 0) & (k >= 0), special.poch(N - k + 1, k), 0)


@composed("factorial")
def factorial(n, exact=False, extend="zero"):
    _inexact("factorial", exact)
    if extend == "complex":
        return special.gamma(n + 1)
    if extend != "zero" or is_complex(n):
        special.factorial(value_of(n), extend=extend)  # raises
    if not n.size:
        return n
    result = np.where(n < 0, 0, special.gamma(np.where(n < 0, 0, n) + 1))
    # scipy gives arrays of double precision here, whatever comes.
    return result if isinstance(value_of(n), np.generic) else result.astype(float)


@composed("factorialk", by_scipy=True)
def factorialk(n, k, exact=False, extend="zero"):
    _inexact("factorialk", exact)
    if extend != "complex":
        raise refusal(
            "factorialk",
            "extend",
            f"{extend!r}, with a traced array",
            "'complex', the extension to numbers between integers",
            "extend='complex'",
        )
    if np.ndim(k) or is_complex(k) or k <= 0:
        raise refusal("factorialk", "k", f"{k}", "a positive number", "write the powers and gamma functions out")
    result = float(k) ** ((n - 1) / k) * special.gamma(n / k + 1) * float(special.rgamma(1 / k + 1))
    # scipy gives single numbers, unlike arrays, in double precision, whatever comes.
    return result if np.ndim(n) else result * np.float64(1)


@composed("factorial2", by_scipy=True)
def factorial2(n, exact=False, extend="zero"):
    return factorialk(n, 2, exact, extend)
