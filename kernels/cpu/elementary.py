"""Elementary functions for compiled loops, made of arithmetic only, so that the compiler vectorises them.

In plain Python they are NumPy's. exp is a polynomial near zero, times a power of two: W. J. Cody, W. Waite, "Software
manual for the elementary functions", 1980.
"""

from __future__ import annotations

import math

import numpy as np

from spmd.kernels.jit import by_width

__all__ = ["exp_below", "expm1_below", "log1p_unit", "mills", "rank", "unrank"]


def exp_below(x):
    """exp(x) for x <= 0; a result below the smallest normal number is 0."""
    return np.exp(x)


def expm1_below(x):
    """exp(x) - 1 for x <= 0."""
    return np.expm1(x)


def log1p_unit(x):
    """log(1 + x) for 0 <= x <= 1."""
    return np.log1p(x)


def mills(t):
    """The upper tail of the normal distribution over its density, for t >= 0 with a density of at least 1e-45 (in
    float64: 1e-324). A polynomial in (t - k) / (t + k): M. M. Shepherd, J. G. Laframboise, Math. Comp. 36, 1981."""
    single = t.dtype == np.float32
    k, coefficients = (_f(4), _MILLS) if single else (5.0, _MILLS_D)
    q = (t - k) / (t + k)
    p = coefficients[-1] * q
    for c in coefficients[-2:0:-1]:
        p += c
        p *= q
    p += coefficients[0]
    p /= t + 1
    return p


def rank(x):
    """An integer that grows with x, and is largest for NaN. The compiler vectorises a maximum of integers."""
    return x


def unrank(x, k):
    """The number of rank k, of x's type."""
    return k


# log(2) is subtracted in two parts: the first has so few bits that its multiples are exact.

_f, _i = np.float32, np.int32
_LOG2_E, _HIGH, _LOW = _f(1 / math.log(2)), _f(0.693359375), _f(math.log(2) - 0.693359375)
# A number added to this one is rounded to an integer, which stands in the last bits.
_SHIFT, _SMALLEST, _ZERO, _ONE = _f(1.5 * 2**23), _f(-87.33654), _f(0), _f(1)
# Near zero, (exp(r) - 1 - r) / r²: S. L. Moshier's minimax polynomial (Cephes, expf).
_P0, _P1, _P2, _P3, _P4, _P5 = map(
    _f, (5.0000001201e-1, 1.6666665459e-1, 4.1665795894e-2, 8.3334519073e-3, 1.3981999507e-3, 1.9875691500e-4)
)


def _exp_below_single(x):
    y = _SMALLEST if x < _SMALLEST else x
    t = y * _LOG2_E + _SHIFT
    n = t - _SHIFT
    r = (y - n * _HIGH) - n * _LOW
    p = ((((_P5 * r + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _P0
    scale = _i((_f(t).view(np.int32) << _i(23)) + _i(127 << 23)).view(np.float32)
    return _ZERO if x < _SMALLEST else (p * (r * r) + r + _ONE) * scale


# The reduction is not shared: a helper for it changes how the compiler vectorises sums of exp, and so their bits.


def _expm1_below_single(x):
    y = _SMALLEST if x < _SMALLEST else x
    t = y * _LOG2_E + _SHIFT
    n = t - _SHIFT
    r = (y - n * _HIGH) - n * _LOW
    p = ((((_P5 * r + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _P0
    scale = _i((_f(t).view(np.int32) << _i(23)) + _i(127 << 23)).view(np.float32)
    return (p * (r * r) + r) * scale + (scale - _ONE)  # exact around zero, where the scale is 1


_d, _l = np.float64, np.int64
_LOG2_E_D, _HIGH_D, _LOW_D = 1 / math.log(2), 6.93145751953125e-1, 1.42860682030941723212e-6
_SHIFT_D, _SMALLEST_D = 1.5 * 2.0**52, -708.3964185322641
# 1 / k!: on |r| <= log(2) / 2 the rest after r^13 is below one unit in the last place.
_T2, _T3, _T4, _T5, _T6, _T7, _T8, _T9, _T10, _T11, _T12, _T13 = (1 / math.factorial(k) for k in range(2, 14))


def _exp_below_double(x):
    y = _SMALLEST_D if x < _SMALLEST_D else x
    t = y * _LOG2_E_D + _SHIFT_D
    n = t - _SHIFT_D
    r = (y - n * _HIGH_D) - n * _LOW_D
    p = (((((_T13 * r + _T12) * r + _T11) * r + _T10) * r + _T9) * r + _T8) * r + _T7
    p = ((((p * r + _T6) * r + _T5) * r + _T4) * r + _T3) * r + _T2
    scale = _l((_d(t).view(np.int64) << _l(52)) + _l(1023 << 52)).view(np.float64)
    return 0.0 if x < _SMALLEST_D else (p * (r * r) + r + 1.0) * scale


def _expm1_below_double(x):
    y = _SMALLEST_D if x < _SMALLEST_D else x
    t = y * _LOG2_E_D + _SHIFT_D
    n = t - _SHIFT_D
    r = (y - n * _HIGH_D) - n * _LOW_D
    p = (((((_T13 * r + _T12) * r + _T11) * r + _T10) * r + _T9) * r + _T8) * r + _T7
    p = ((((p * r + _T6) * r + _T5) * r + _T4) * r + _T3) * r + _T2
    scale = _l((_d(t).view(np.int64) << _l(52)) + _l(1023 << 52)).view(np.float64)
    return (p * (r * r) + r) * scale + (scale - 1.0)


by_width(exp_below, single=_exp_below_single, double=_exp_below_double)
by_width(expm1_below, single=_expm1_below_single, double=_expm1_below_double)


def _rank_single(x):
    k = _f(x).view(np.int32)
    return _i(k ^ ((k >> _i(31)) & _i(0x7FFFFFFF)))


def _rank_double(x):
    k = _d(x).view(np.int64)
    return _l(k ^ ((k >> _l(63)) & _l(0x7FFFFFFFFFFFFFFF)))


def _unrank_single(x, k):
    return _i(k ^ ((k >> _i(31)) & _i(0x7FFFFFFF))).view(np.float32)


def _unrank_double(x, k):
    return _l(k ^ ((k >> _l(63)) & _l(0x7FFFFFFFFFFFFFFF))).view(np.float64)


by_width(rank, single=_rank_single, double=_rank_double)
by_width(unrank, single=_unrank_single, double=_unrank_double)

# log(1 + x) = 2 artanh(s), s = x / (2 + x) <= 1/3: its series, up to the last term that counts.

_A0, _A1, _A2, _A3, _A4, _A5, _A6, _A7 = (_f(2 / (2 * k + 1)) for k in range(8))


def _log1p_unit_single(x):
    s = x / (_f(2) + x)
    z = s * s
    return s * (((((((_A7 * z + _A6) * z + _A5) * z + _A4) * z + _A3) * z + _A2) * z + _A1) * z + _A0)


_B0, _B1, _B2, _B3, _B4, _B5, _B6, _B7, _B8, _B9, _B10, _B11, _B12, _B13, _B14, _B15, _B16 = (
    2 / (2 * k + 1) for k in range(17)
)


def _log1p_unit_double(x):
    s = x / (2.0 + x)
    z = s * s
    p = (((((_B16 * z + _B15) * z + _B14) * z + _B13) * z + _B12) * z + _B11) * z + _B10
    p = (((((p * z + _B9) * z + _B8) * z + _B7) * z + _B6) * z + _B5) * z + _B4
    return s * ((((p * z + _B3) * z + _B2) * z + _B1) * z + _B0)


by_width(log1p_unit, single=_log1p_unit_single, double=_log1p_unit_double)

# (1 + t) * mills(t), interpolated at Chebyshev points.

_MILLS = tuple(
    map(
        _f,
        (
            *(1.1832619905471802, -0.24239951372146606, 0.0350891649723053, 0.07168480008840561, -0.08067228645086288),
            *(0.04502583295106888, -0.012679561972618103, -0.0010204326827079058, 0.0018459715647622943),
            0.00024039139680098742,
        ),
    )
)
_MILLS_D = (
    *(1.1568486282918946, -0.22948753825211335, 0.07778159886875508, 0.025072179301657133, -0.0661776007800118),
    *(0.06150504583959051, -0.038026592167140695, 0.01634823129153636, -0.004201290523970449, 1.953052719449801e-05),
    *(0.00045704509734013514, -0.00013437355170783208, -2.481019088430957e-05, 2.2706629432524913e-05),
    *(-1.6618227205693592e-07, -3.2695692255314434e-06, 3.058534842863867e-07, 4.796246174674519e-07),
    *(-5.3460489986194357e-08, -6.595503240709139e-08, 3.814548029672176e-09, 5.419803230399669e-09),
)
_M0, _M1, _M2, _M3, _M4, _M5, _M6, _M7, _M8, _M9 = _MILLS
_N0, _N1, _N2, _N3, _N4, _N5, _N6, _N7, _N8, _N9, _N10 = _MILLS_D[:11]
_N11, _N12, _N13, _N14, _N15, _N16, _N17, _N18, _N19, _N20, _N21 = _MILLS_D[11:]
_FOUR = _f(4)


def _mills_single(t):
    q = (t - _FOUR) / (t + _FOUR)
    p = ((((_M9 * q + _M8) * q + _M7) * q + _M6) * q + _M5) * q + _M4
    return ((((p * q + _M3) * q + _M2) * q + _M1) * q + _M0) / (t + _ONE)


def _mills_double(t):
    q = (t - 5.0) / (t + 5.0)
    p = (((((_N21 * q + _N20) * q + _N19) * q + _N18) * q + _N17) * q + _N16) * q + _N15
    p = (((((p * q + _N14) * q + _N13) * q + _N12) * q + _N11) * q + _N10) * q + _N9
    p = (((((p * q + _N8) * q + _N7) * q + _N6) * q + _N5) * q + _N4) * q + _N3
    return (((p * q + _N2) * q + _N1) * q + _N0) / (t + 1.0)


by_width(mills, single=_mills_single, double=_mills_double)
