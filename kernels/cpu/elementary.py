"""Elementary functions for compiled loops, of arithmetic only, so that the compiler makes vectors of them.

By themselves they are NumPy's. A number is brought near zero, where a polynomial serves, and the exponent is put back
in two halves, so that the smallest and the largest results are right: W. J. Cody, W. Waite, "Software manual for the
elementary functions", 1980.
"""

from __future__ import annotations

import math

import numpy as np

from spmd.kernels.jit import by_bits

__all__ = ["exp"]


def exp(x):
    """e to the x, within 2 units in the last place."""
    return np.exp(x)


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
