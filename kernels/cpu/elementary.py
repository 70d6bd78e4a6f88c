"""Elementary functions for compiled loops, of arithmetic only, so that the compiler makes vectors of them.

By themselves they are NumPy's. A number is brought near zero, where a polynomial serves, and the exponent is put back
in two halves, so that the smallest and the largest results are right: W. J. Cody, W. Waite, "Software manual for the
elementary functions", 1980.
"""

from __future__ import annotations

import math

import numpy as np

from spmd.kernels.jit import by_bits

__all__ = ["exp", "exp_below", "rank", "unrank"]


def exp(x):
    """e to the x, within 2 units in the last place."""
    return np.exp(x)


def exp_below(x):
    """e to the x for x <= 0, in less time; what is smaller than the smallest normal number is 0."""
    return np.exp(x)


def rank(x):
    """An integer that is larger for a larger x; of NaN it is beyond all. The compiler finds the largest of integers."""
    return x


def unrank(x, k):
    """The number of rank k, of the type of x."""
    return k


# log(2) is taken away in two parts: the first has so few bits that a multiple of it is exact.

_f, _i = np.float32, np.int32
_LOG2_E, _HIGH, _LOW = _f(1 / math.log(2)), _f(0.693359375), _f(math.log(2) - 0.693359375)
_LEAST, _MOST, _ONE, _HALF = _f(-104), _f(89), _f(1), _f(0.5)
# Near zero, (exp(r) - 1 - r) / r²: S. L. Moshier's minimax polynomial (Cephes, expf).
_P0, _P1, _P2, _P3, _P4, _P5 = map(
    _f, (5.0000001201e-1, 1.6666665459e-1, 4.1665795894e-2, 8.3334519073e-3, 1.3981999507e-3, 1.9875691500e-4)
)


def _exp_single(x):
    y = x if x > _LEAST else _LEAST
    y = y if y < _MOST else _MOST
    n = np.floor(y * _LOG2_E + _HALF)
    r = (y - n * _HIGH) - n * _LOW
    p = ((((_P5 * r + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _P0
    k = _i(n)
    half = k >> _i(1)
    first = _i((half + _i(127)) << _i(23)).view(np.float32)
    second = _i((k - half + _i(127)) << _i(23)).view(np.float32)
    return (p * (r * r) + r + _ONE) * first * second if x == x else x


_d, _l = np.float64, np.int64
_LOG2_E_D, _HIGH_D, _LOW_D = 1 / math.log(2), 6.93145751953125e-1, 1.42860682030941723212e-6
# 1 / k!: on |r| <= log(2) / 2 the rest after r^13 is below one unit in the last place.
_T = [1 / math.factorial(k) for k in range(14)]
_T2, _T3, _T4, _T5, _T6, _T7, _T8, _T9, _T10, _T11, _T12, _T13 = _T[2:]


def _exp_double(x):
    y = x if x > -746.0 else -746.0
    y = y if y < 710.0 else 710.0
    n = np.floor(y * _LOG2_E_D + 0.5)
    r = (y - n * _HIGH_D) - n * _LOW_D
    p = (((((_T13 * r + _T12) * r + _T11) * r + _T10) * r + _T9) * r + _T8) * r + _T7
    p = ((((p * r + _T6) * r + _T5) * r + _T4) * r + _T3) * r + _T2
    k = _l(n)
    half = k >> _l(1)
    first = _l((half + _l(1023)) << _l(52)).view(np.float64)
    second = _l((k - half + _l(1023)) << _l(52)).view(np.float64)
    return (p * (r * r) + r + 1.0) * first * second if x == x else x


by_bits(exp, single=_exp_single, double=_exp_double)


# A number added to one that has so many bits before the point is rounded to an integer, which stands in the last bits.
_SHIFT, _SMALLEST, _ZERO = _f(1.5 * 2**23), _f(-87.33654), _f(0)


def _exp_below_single(x):
    y = _SMALLEST if x < _SMALLEST else x
    t = y * _LOG2_E + _SHIFT
    n = t - _SHIFT
    r = (y - n * _HIGH) - n * _LOW
    p = ((((_P5 * r + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _P0
    scale = _i((_f(t).view(np.int32) << _i(23)) + _i(127 << 23)).view(np.float32)
    return _ZERO if x < _SMALLEST else (p * (r * r) + r + _ONE) * scale


_SHIFT_D, _SMALLEST_D = 1.5 * 2.0**52, -708.3964185322641


def _exp_below_double(x):
    y = _SMALLEST_D if x < _SMALLEST_D else x
    t = y * _LOG2_E_D + _SHIFT_D
    n = t - _SHIFT_D
    r = (y - n * _HIGH_D) - n * _LOW_D
    p = (((((_T13 * r + _T12) * r + _T11) * r + _T10) * r + _T9) * r + _T8) * r + _T7
    p = ((((p * r + _T6) * r + _T5) * r + _T4) * r + _T3) * r + _T2
    scale = _l((_d(t).view(np.int64) << _l(52)) + _l(1023 << 52)).view(np.float64)
    return 0.0 if x < _SMALLEST_D else (p * (r * r) + r + 1.0) * scale


by_bits(exp_below, single=_exp_below_single, double=_exp_below_double)


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


by_bits(rank, single=_rank_single, double=_rank_double)
by_bits(unrank, single=_unrank_single, double=_unrank_double)
