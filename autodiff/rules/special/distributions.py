"""Rules of distributions and their inverses. Each density is written so that it holds at the ends of its support."""

from __future__ import annotations

import numpy as np

from spmd.autodiff.rules.special.frame import special, ufunc
from spmd.autodiff.rules.special.integrals import NORMAL


def _gamma_pdf(a, x):
    """x^(a - 1) exp(-x) / Γ(a): the derivative of gammainc(a, x)."""
    zero = x == 0
    at, off = np.where(zero, x, 1), np.where(zero, 1, x)
    return np.where(
        zero, at ** (a - 1) * special.rgamma(a), np.exp(special.xlogy(a - 1, off) - off - special.gammaln(a))
    ) * np.where(zero, np.exp(-at), 1)


def _beta_pdf(a, b, x):
    """x^(a - 1) (1 - x)^(b - 1) / B(a, b): the derivative of betainc(a, b, x)."""
    edge = (x == 0) | (x == 1)
    at, off = np.where(edge, x, 0.5), np.where(edge, 0.5, x)
    scale = special.betaln(a, b)
    inside = np.exp(special.xlogy(a - 1, off) + special.xlog1py(b - 1, -off) - scale)
    return np.where(edge, at ** (a - 1) * (1 - at) ** (b - 1) * np.exp(-scale), inside)


def _t_pdf(df, t):
    normal = np.isinf(df)
    n = np.where(normal, 1, df)
    student = np.exp(-(n + 1) / 2 * np.log1p(t * t / n) - special.betaln(0.5, n / 2)) / np.sqrt(n)
    return np.where(normal, NORMAL * np.exp(-0.5 * t * t), student)


def _f_pdf(dfn, dfd, x):
    total = dfd + dfn * x
    return dfn * dfd / total**2 * _beta_pdf(dfn / 2, dfd / 2, dfn * x / total)


def _noncentral_pdf(x, df, nc):
    """The density of the noncentral chi-squared distribution: a difference of two, or a Bessel function."""
    many = df > 2
    lower = special.chndtr(x, np.where(many, df - 2, 1), nc) - special.chndtr(x, np.where(many, df, 1), nc)
    few = np.where(many, 1, df) / 2
    closed = np.exp(-nc / 2) * special.hyp0f1(few, np.where(many, 0, nc * x / 4)) * _gamma_pdf(few, x / 2)
    return np.where(many, lower, closed) / 2


def _noncentral_by_nc(x, df, nc):
    return (special.chndtr(x, df + 2, nc) - special.chndtr(x, df, nc)) / 2


def _tukey_pdf(x, lmbda, p):
    """The reciprocal of the derivative p^(λ-1) + (1-p)^(λ-1) of the quantile function; zero outside of the support."""
    outside = np.abs(x) * lmbda >= 1
    p = np.where(outside, 0.5, p)
    return np.where(outside, 0, 1 / (p ** (lmbda - 1) + (1 - p) ** (lmbda - 1)))


ufunc("gammainc", None, lambda g, _ans, a, x: g * _gamma_pdf(a, x))
ufunc("gammaincc", None, lambda g, _ans, a, x: -g * _gamma_pdf(a, x))
ufunc("gammaincinv", None, lambda g, ans, a, _y: g / _gamma_pdf(a, ans))
ufunc("gammainccinv", None, lambda g, ans, a, _y: -g / _gamma_pdf(a, ans))
ufunc("betainc", None, None, lambda g, _ans, a, b, x: g * _beta_pdf(a, b, x))
ufunc("betaincc", None, None, lambda g, _ans, a, b, x: -g * _beta_pdf(a, b, x))
ufunc("betaincinv", None, None, lambda g, ans, a, b, _y: g / _beta_pdf(a, b, ans))
ufunc("betainccinv", None, None, lambda g, ans, a, b, _y: -g / _beta_pdf(a, b, ans))
ufunc("chdtr", None, lambda g, _ans, v, x: g / 2 * _gamma_pdf(v / 2, x / 2))
ufunc("chdtrc", None, lambda g, _ans, v, x: -g / 2 * _gamma_pdf(v / 2, x / 2))
ufunc("chdtri", None, lambda g, ans, v, _p: -2 * g / _gamma_pdf(v / 2, ans / 2))
ufunc(
    "gdtr",
    lambda g, _ans, a, b, x: g * x * _gamma_pdf(b, a * x),
    None,
    lambda g, _ans, a, b, x: g * a * _gamma_pdf(b, a * x),
)
ufunc(
    "gdtrc",
    lambda g, _ans, a, b, x: -g * x * _gamma_pdf(b, a * x),
    None,
    lambda g, _ans, a, b, x: -g * a * _gamma_pdf(b, a * x),
)
ufunc(
    "gdtrix",
    lambda g, ans, a, _b, _p: -g * ans / a,
    None,
    lambda g, ans, a, b, _p: g / (a * _gamma_pdf(b, a * ans)),
)
ufunc(
    "gdtria",
    lambda g, ans, _p, b, x: g / (x * _gamma_pdf(b, ans * x)),
    None,
    lambda g, ans, _p, _b, x: -g * ans / x,
)
ufunc("pdtr", None, lambda g, _ans, k, m: -g * _gamma_pdf(np.floor(k) + 1, m))
ufunc("pdtrc", None, lambda g, _ans, k, m: g * _gamma_pdf(np.floor(k) + 1, m))
ufunc("pdtri", None, lambda g, ans, k, _y: -g / _gamma_pdf(np.floor(k) + 1, ans))
ufunc("bdtr", None, None, lambda g, _ans, k, n, p: -g * _beta_pdf(np.floor(k) + 1, n - np.floor(k), p))
ufunc("bdtrc", None, None, lambda g, _ans, k, n, p: g * _beta_pdf(np.floor(k) + 1, n - np.floor(k), p))
ufunc("bdtri", None, None, lambda g, ans, k, n, _y: -g / _beta_pdf(np.floor(k) + 1, n - np.floor(k), ans))
ufunc("nbdtr", None, None, lambda g, _ans, k, n, p: g * _beta_pdf(n, np.floor(k) + 1, p))
ufunc("nbdtrc", None, None, lambda g, _ans, k, n, p: -g * _beta_pdf(n, np.floor(k) + 1, p))
ufunc("nbdtri", None, None, lambda g, ans, k, n, _y: g / _beta_pdf(n, np.floor(k) + 1, ans))
ufunc("fdtr", None, None, lambda g, _ans, dfn, dfd, x: g * _f_pdf(dfn, dfd, x))
ufunc("fdtrc", None, None, lambda g, _ans, dfn, dfd, x: -g * _f_pdf(dfn, dfd, x))
ufunc("fdtri", None, None, lambda g, ans, dfn, dfd, _p: g / _f_pdf(dfn, dfd, ans))
ufunc("stdtr", None, lambda g, _ans, df, t: g * _t_pdf(df, t))
ufunc("stdtrit", None, lambda g, ans, df, _p: g / _t_pdf(df, ans))
ufunc(
    "chndtr",
    lambda g, _ans, x, df, nc: g * _noncentral_pdf(x, df, nc),
    None,
    lambda g, _ans, x, df, nc: g * _noncentral_by_nc(x, df, nc),
)
ufunc(
    "chndtrix",
    lambda g, ans, _p, df, nc: g / _noncentral_pdf(ans, df, nc),
    None,
    lambda g, ans, _p, df, nc: -g * _noncentral_by_nc(ans, df, nc) / _noncentral_pdf(ans, df, nc),
)
ufunc("tklmbda", lambda g, ans, x, lmbda: g * _tukey_pdf(x, lmbda, ans), None)
ufunc(
    "nrdtrimn",
    lambda g, _ans, p, std, _x: -g * std * np.exp(0.5 * special.ndtri(p) ** 2) / NORMAL,
    lambda g, _ans, p, _std, _x: -g * special.ndtri(p),
    lambda g, _ans, _p, _std, _x: g,
)
ufunc(
    "nrdtrisd",
    lambda g, _ans, _mn, p, _x: -g / special.ndtri(p),
    lambda g, ans, _mn, p, _x: -g * ans * np.exp(0.5 * special.ndtri(p) ** 2) / (NORMAL * special.ndtri(p)),
    lambda g, _ans, _mn, p, _x: g / special.ndtri(p),
)
