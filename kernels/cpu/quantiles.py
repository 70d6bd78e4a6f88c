"""Logarithms and quantiles of the normal distribution with the same bits everywhere: for arrays, and in loops.

They are sums, products, quotients and roots, each rounded by itself, in one order.
"""

from __future__ import annotations

import math

import numpy as np

from spmd.kernels import jit

__all__ = ["minus_log", "quantile"]


def _where(condition, x, y):
    return np.where(condition, x, y)


jit.in_loops(_where, lambda condition, x, y: x if condition else y)


def minus_log(x, rest):
    """-log(x) of a positive normal x, with rest = 1 - x, which is more precise than x where x is near 1."""
    return (_minus_log_single if x.dtype == np.float32 else _minus_log_double)(x, rest)


# With x = 2^k m, f = m - 1 and s = f / (2 + f), log(m) = log(1 + s) - log(1 - s). The coefficients are those of
# FreeBSD's logf and log.
_f, _i = np.float32, np.int32
_ONE, _TWICE, _SOME, _TOP, _DIGITS = _f(1), _f(2), _f(0.5), _i(0x3F3504F3), _i(23)
_LN2_HIGH, _LN2_LOW = _f(6.9313812256e-01), _f(9.0580006145e-06)
_L1, _L2, _L3, _L4 = _f(0.66666662693), _f(0.40000972152), _f(0.28498786688), _f(0.24279078841)


def _minus_log_single(x, rest):
    b = _f(x).view(np.int32)
    k = _i((b - _TOP) >> _DIGITS)
    m = _i(b - (k << _DIGITS)).view(np.float32)
    f = _where(k == 0, -rest, m - _ONE)
    s = f / (_TWICE + f)
    z = s * s
    w = z * z
    r = z * (_L1 + w * _L3) + w * (_L2 + w * _L4)
    h = _SOME * f * f
    e = _f(k)
    return -(e * _LN2_HIGH - ((h - (s * (h + r) + e * _LN2_LOW)) - f))


_d, _l = np.float64, np.int64
_TOP_D, _DIGITS_D = _l(0x3FE6A09E00000000), _l(52)
_LN2_HIGH_D, _LN2_LOW_D = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_D1, _D2, _D3, _D4 = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
)
_D5, _D6, _D7 = 1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01


def _minus_log_double(x, rest):
    b = _d(x).view(np.int64)
    k = (b - _TOP_D) >> _DIGITS_D
    m = _l(b - (k << _DIGITS_D)).view(np.float64)
    f = _where(k == 0, -rest, m - 1.0)
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    r = z * (_D1 + w * (_D3 + w * (_D5 + w * _D7))) + w * (_D2 + w * (_D4 + w * _D6))
    h = 0.5 * f * f
    e = _d(k)
    return -(e * _LN2_HIGH_D - ((h - (s * (h + r) + e * _LN2_LOW_D)) - f))


jit.by_width(minus_log, single=_minus_log_single, double=_minus_log_double, fastmath=())


# The quantiles of the normal distribution, after M. Giles, "Approximating the erfinv function", GPU Computing Gems,
# 2011: with w = -log(1 - x²) they are x times a polynomial in w, and for large w one in sqrt(w). The polynomials are
# interpolations at Chebyshev's points; the factor sqrt(2) comes last.

_SQRT2, _SQRT2_D = _f(math.sqrt(2)), math.sqrt(2)

_SINGLE_AT, _SINGLE_TAIL_AT, _CUT = _f(2.5), _f(3.5), _f(5)
# fmt: off
(
    _A0, _A1, _A2, _A3, _A4, _A5, _A6, _A7, _A8, _A9,
) = map(_f, (
    1.5014094e+00, 2.4664028e-01, -4.177393e-03, -1.2527264e-03, 2.1834939e-04, -4.97242e-06, -3.4639852e-06,
    4.6813136e-07, 2.3335968e-08, -8.931926e-09,
))
(
    _B0, _B1, _B2, _B3, _B4, _B5, _B6, _B7, _B8, _B9, _B10,
) = map(_f, (
    3.3354857e+00, 1.0073693e+00, 3.2761886e-03, -2.070203e-03, 1.0977448e-03, -6.528988e-04, 4.2075204e-04,
    -2.6844404e-04, 8.966577e-05, 2.6395226e-05, -2.0514492e-05,
))
(
    _C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10, _C11, _C12, _C13, _C14, _C15, _C16, _C17, _C18, _C19,
    _C20, _C21, _C22,
) = (
    1.6536545626831027, 0.2401581824255897, -0.006033670871427011, -0.0007407025341669402, 0.0001867342080212427,
    -1.3882523361276876e-05, -1.3654691796592068e-06, 4.2347877672780653e-07, -2.907038666019143e-08,
    -4.112633104297614e-09, 1.0512202440121784e-09, -5.4154417754696635e-11, -1.2977505202014966e-11,
    2.6335724924608484e-12, -8.106594456438496e-14, -4.0554139746886e-14, 6.581955305929239e-15,
    2.166994626283574e-17, -1.290702354613073e-16, 1.1125794759379464e-17, 1.1027771591500033e-18,
    -1.6787330615256773e-19, -2.362369698566107e-22,
)
(
    _E0, _E1, _E2, _E3, _E4, _E5, _E6, _E7, _E8, _E9, _E10, _E11, _E12, _E13, _E14, _E15, _E16, _E17, _E18,
) = (
    3.0838856104922208, 1.0052589676941581, 0.00537091455349845, -0.0037512085074678137, 0.002491442100505963,
    -0.0016882755585818404, 0.0009532892986547544, -0.0003550374916382641, 2.403185759422663e-05,
    6.828468160803809e-05, -4.732209008525346e-05, 1.247587101780709e-05, 2.9351472438578695e-06,
    -4.014938762864796e-06, 1.4820950332955519e-06, 1.9310292683999456e-08, -2.555532227554427e-07,
    9.031733776293067e-08, -5.5491571865817295e-09,
)
(
    _G0, _G1, _G2, _G3, _G4, _G5, _G6, _G7, _G8, _G9, _G10, _G11, _G12, _G13, _G14, _G15, _G16, _G17, _G18,
) = (
    5.102469766505419, 1.0101951772794822, -0.000274322687431142, -0.00015004600199947955, 5.514872379485559e-05,
    -1.4023131897055382e-05, 3.1188154215539935e-06, -6.473557668158898e-07, 1.3086977141696914e-07,
    -2.8126871216245407e-08, 7.899353980967362e-09, -3.25795273485046e-09, 1.557192006811228e-09,
    -7.679112633480804e-10, 4.077174653982199e-10, -1.7798960125114405e-10, 3.885378801796441e-11,
    1.3759020978704506e-12, -1.4918084681361763e-12,
)
# fmt: on


@jit.exact
def _p_single(t):
    p = ((((((_A9 * t + _A8) * t + _A7) * t + _A6) * t + _A5) * t + _A4) * t + _A3) * t + _A2
    p = (p * t + _A1) * t + _A0
    return p


@jit.exact
def _p_single_tail(t):
    p = ((((((_B10 * t + _B9) * t + _B8) * t + _B7) * t + _B6) * t + _B5) * t + _B4) * t + _B3
    p = ((p * t + _B2) * t + _B1) * t + _B0
    return p


@jit.exact
def _p_double(t):
    p = ((((((_C22 * t + _C21) * t + _C20) * t + _C19) * t + _C18) * t + _C17) * t + _C16) * t + _C15
    p = ((((((p * t + _C14) * t + _C13) * t + _C12) * t + _C11) * t + _C10) * t + _C9) * t + _C8
    p = ((((((p * t + _C7) * t + _C6) * t + _C5) * t + _C4) * t + _C3) * t + _C2) * t + _C1
    p = p * t + _C0
    return p


@jit.exact
def _p_double_tail(t):
    p = ((((((_E18 * t + _E17) * t + _E16) * t + _E15) * t + _E14) * t + _E13) * t + _E12) * t + _E11
    p = ((((((p * t + _E10) * t + _E9) * t + _E8) * t + _E7) * t + _E6) * t + _E5) * t + _E4
    p = (((p * t + _E3) * t + _E2) * t + _E1) * t + _E0
    return p


@jit.exact
def _p_double_end(t):
    p = ((((((_G18 * t + _G17) * t + _G16) * t + _G15) * t + _G14) * t + _G13) * t + _G12) * t + _G11
    p = ((((((p * t + _G10) * t + _G9) * t + _G8) * t + _G7) * t + _G6) * t + _G5) * t + _G4
    p = (((p * t + _G3) * t + _G2) * t + _G1) * t + _G0
    return p


@jit.exact
def _central_single(w):
    return _p_single(w - _SINGLE_AT)


@jit.exact
def _tail_single(w):
    return _p_single_tail(np.sqrt(w) - _SINGLE_TAIL_AT)


@jit.exact
def _central_double(w):
    return _p_double(w - 3.125)


@jit.exact
def _tail_double(w):
    s = np.sqrt(w)
    return _where(s < 4.0, _p_double_tail(s - 3.25), _p_double_end(s - 5.25))


def quantile(x, tail):
    """The number that a normal one exceeds in absolute value with the probability `tail` = 1 - x."""
    single = x.dtype == np.float32
    two = _TWICE if single else 2.0
    w = minus_log(tail * (two - tail), x * x)
    p = (_central_single if single else _central_double)(w)
    far = np.flatnonzero(w >= (_CUT if single else 6.25))
    p[far] = (_tail_single if single else _tail_double)(w[far])
    return (x * p) * (_SQRT2 if single else _SQRT2_D)


def _quantile_single(x, tail):
    w = minus_log(tail * (_TWICE - tail), x * x)
    return x * _where(w < _CUT, _central_single(w), _tail_single(w)) * _SQRT2


def _quantile_double(x, tail):
    w = minus_log(tail * (2.0 - tail), x * x)
    return x * _where(w < 6.25, _central_double(w), _tail_double(w)) * _SQRT2_D


jit.by_width(quantile, single=_quantile_single, double=_quantile_double, fastmath=())
