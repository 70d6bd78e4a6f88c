"""Rules of functions that act entry by entry."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spmd.autodiff.apply import compute
from spmd.autodiff.primitive import composite, constant
from spmd.autodiff.registry import primitive, rule
from spmd.autodiff.tracer import Array, value_of


def nonzero(x):
    """x, and one where x is zero: a divisor that makes 0 / 0 zero."""
    return x + (x == 0)


def unit(x):
    """conj(x) / |x|, zero at zero: the derivative of |x|."""
    return np.conj(x) / nonzero(np.abs(x)) if np.iscomplexobj(x) else np.sign(x)


# Arithmetic

rule(np.add, lambda g, _ans, _x, _y: g, lambda g, _ans, _x, _y: g)
rule(np.subtract, lambda g, _ans, _x, _y: g, lambda g, _ans, _x, _y: -g)
rule(np.multiply, lambda g, _ans, _x, y: g * y, lambda g, _ans, x, _y: x * g).if_same(lambda g, _ans, x: 2 * g * x)
rule(np.divide, lambda g, _ans, _x, y: g / y, lambda g, ans, _x, y: -g * ans / y)
rule(np.negative, lambda g, _ans, _x: -g)
rule(np.positive, lambda g, _ans, _x: g)
rule(np.reciprocal, lambda g, ans, _x: -g * ans * ans)
rule(np.square, lambda g, _ans, x: 2 * g * x)
rule(np.sqrt, lambda g, ans, _x: 0.5 * g / ans)
rule(np.cbrt, lambda g, ans, _x: g / (3 * ans * ans))
rule(np.remainder, lambda g, _ans, _x, _y: g, lambda g, _ans, x, y: -g * np.floor_divide(x, y))
rule(np.fmod, lambda g, _ans, _x, _y: g, lambda g, _ans, x, y: -g * np.trunc(x / y))


def numpys(x):
    """A float of Python's as NumPy's, which divides by zero as arrays do."""
    return np.float64(x) if type(x) is float else x


def power_slope(x, y: Any) -> Any:
    """y xʸ⁻¹, zero at y = 0, also where x is zero: there x is not raised to -1.

    An exponent that is a mask becomes one of integers by adding 0; others stay what they are.
    """
    if type(y) is int and y == 2:
        return 2 * x
    if type(y) is Array:  # the slope is differentiated by y
        return y * (x + ((x == 0) & (y == 0))) ** (y - 1)  # type: ignore[operator]
    return y * numpys(x) ** (0 + y - (y != 0))


# At x = 0 the second is g · 0ʸ · log 1: no logarithm of zero.
_power = (
    lambda g, _ans, x, y: g * power_slope(x, y),
    lambda g, ans, x, _y: g * (ans * np.log(nonzero(x))),
)
rule(np.power, *_power)
rule(np.float_power, *_power)

for _f in (np.degrees, np.rad2deg):
    rule(_f, lambda g, _ans, _x: g * (180 / math.pi))
for _f in (np.radians, np.deg2rad):
    rule(_f, lambda g, _ans, _x: g * (math.pi / 180))


@composite(np.divmod)
def divmod(x, y):
    return np.floor_divide(x, y), np.remainder(x, y)


rule(np.modf, lambda g, _ans, _x: g[0])


rule(np.ldexp, lambda g, _ans, _x, y: np.ldexp(g, y))


@composite(np.frexp)
def frexp(x):
    exponent: Any = compute(lambda x: np.frexp(x)[1], (x,), {})
    return np.ldexp(x, -exponent), exponent


# Exponentials and logarithms

rule(np.exp, lambda g, ans, _x: g * ans)
rule(np.exp2, lambda g, ans, _x: g * ans * math.log(2))
rule(np.expm1, lambda g, ans, _x: g * (ans + 1))
rule(np.log, lambda g, _ans, x: g / x)
rule(np.log2, lambda g, _ans, x: g / (x * math.log(2)))
rule(np.log10, lambda g, _ans, x: g / (x * math.log(10)))
rule(np.log1p, lambda g, _ans, x: g / (1 + x))


def _finite(ans):
    """The result, and zero where it is -inf, so that exp(x - ans) is zero there."""
    return np.where(ans == -np.inf, 0, ans)


rule(
    np.logaddexp,
    lambda g, ans, x, _y: g * np.exp(x - _finite(ans)),
    lambda g, ans, _x, y: g * np.exp(y - _finite(ans)),
)
rule(
    np.logaddexp2,
    lambda g, ans, x, _y: g * np.exp2(x - _finite(ans)),
    lambda g, ans, _x, y: g * np.exp2(y - _finite(ans)),
)

# Trigonometry

rule(np.sin, lambda g, _ans, x: g * np.cos(x))
rule(np.cos, lambda g, _ans, x: -g * np.sin(x))
rule(np.tan, lambda g, ans, _x: g * (1 + ans * ans))
rule(np.arcsin, lambda g, _ans, x: g / np.sqrt(1 - x * x))
rule(np.arccos, lambda g, _ans, x: -g / np.sqrt(1 - x * x))
rule(np.arctan, lambda g, _ans, x: g / (1 + x * x))
rule(np.sinh, lambda g, _ans, x: g * np.cosh(x))
rule(np.cosh, lambda g, _ans, x: g * np.sinh(x))
rule(np.tanh, lambda g, ans, _x: g - g * ans * ans)
rule(np.arcsinh, lambda g, _ans, x: g / np.sqrt(1 + x * x))
rule(np.arccosh, lambda g, _ans, x: g / (np.sqrt(x - 1) * np.sqrt(x + 1)))
rule(np.arctanh, lambda g, _ans, x: g / (1 - x * x))
rule(np.arctan2, lambda g, _ans, y, x: g * x / (x * x + y * y), lambda g, _ans, y, x: -g * y / (x * x + y * y))
rule(np.hypot, lambda g, ans, x, _y: g * x / nonzero(ans), lambda g, ans, _x, y: g * y / nonzero(ans))


@composite(np.sinc)
def sinc(x):
    return _sinc(x, 0)


@primitive("sinc", lambda g, _ans, x, k: g * _sinc(x, k + 1))  # type: ignore
def _sinc(x, k):
    """The k-th derivative of sin(πx) / πx, which is π^k ∫₀¹ t^k cos(πxt + kπ/2) dt.

    By parts, y f_k + k f_{k-1} = sin(y + kπ/2) with y = πx; that loses digits for small y, where a series serves.
    """
    if k == 0:
        return np.sinc(x)
    y = math.pi * x
    small = np.abs(y) < k + 2
    inside, outside = np.where(small, y, 0), np.where(small, 1, y)
    term, series = np.ones_like(y), np.zeros_like(y)
    for n in range(24 + 4 * k):
        series = series + math.cos((k + n) * math.pi / 2) * term / (n + k + 1)
        term = term * inside / (n + 1)
    closed = np.sin(outside) / outside
    for m in range(1, k + 1):
        closed = (np.sin(outside + m * math.pi / 2) - m * closed) / outside
    return math.pi**k * np.where(small, series, closed)


@composite(np.i0)
def i0(x):
    return _bessel(x, 0)


@primitive("i0", lambda g, _ans, x, k: g * _bessel(x, k + 1))  # type: ignore
def _bessel(x, k):
    """The k-th derivative of I₀(x) = 1/π ∫₀^π exp(x cos t) dt, which brings the k-th power of cos t into the integral.

    The integrand is periodic and smooth, so that the mean over 4n even steps of t is exact to all digits once n is
    some multiple of √|x|; by symmetry a quarter of the period serves. Beyond 720 the result overflows.
    """
    if k == 0:
        return np.i0(x)
    x = x * np.ones_like(np.i0(x))
    most = float(np.max(np.where(np.abs(x) < 720, np.abs(x), 0))) if x.size else 0.0
    n = 10 + int(2.5 * math.sqrt(most)) + k
    half = np.sinh if k % 2 else np.cosh
    total = (half(x) + (k == 0)) / 2
    for i in range(1, n):
        c = math.cos(math.pi * i / (2 * n))
        total = total + c**k * half(c * x)
    return total / n


@composite(np.real_if_close)
def real_if_close(a, tol=100):
    bare = value_of(a)
    return np.real(a) if np.iscomplexobj(a) and not np.iscomplexobj(np.real_if_close(bare, tol)) else a


# Complex numbers. A cotangent is a plain transpose: that of a real argument is made real by the sweep.

rule(np.real, lambda g, _ans, _x: g)
rule(np.imag, lambda g, _ans, _x: -1j * g)
rule(np.conj, lambda g, _ans, _x: np.conj(g))
rule(np.absolute, lambda g, _ans, x: g * unit(x))
rule(np.fabs, lambda g, _ans, x: g * unit(x))


@composite(np.angle)
def angle(z, deg=False):
    radians = np.arctan2(np.imag(z), np.real(z))
    return radians * (180 / math.pi) if deg else radians


@composite(np.sign)
def sign(x):
    """Constant for real x; on the complex plane z / |z|."""
    return _direction(x) if np.iscomplexobj(x) else compute(np.sign, (x,), {})


@primitive("np.sign", lambda g, ans, x: (g - np.real(g * ans) * np.conj(ans)) / nonzero(np.abs(x)))
def _direction(z):
    return np.sign(z)


# Choices. Where both operands are equal, each has half of the derivative.


def larger(g, x, y):
    """The share of g that belongs to x where the larger of x and y was chosen."""
    return np.where(x > y, g, np.where(x == y, g / 2, 0))


def chosen(g, ans, x, y):
    """The share of g that belongs to x where ans is one of x and y."""
    return np.where(x == ans, np.where(y == ans, g / 2, g), 0)


rule(np.maximum, lambda g, _ans, x, y: larger(g, x, y), lambda g, _ans, x, y: larger(g, y, x))
rule(np.minimum, lambda g, _ans, x, y: larger(g, y, x), lambda g, _ans, x, y: larger(g, x, y))
for _f in (np.fmax, np.fmin):
    rule(_f, lambda g, ans, x, y: chosen(g, ans, x, y), lambda g, ans, x, y: chosen(g, ans, y, x))
rule(
    np.where,
    None,
    lambda g, _ans, condition, _x, _y: np.where(condition, g, 0),
    lambda g, _ans, condition, _x, _y: np.where(condition, 0, g),
)


@composite(np.nan_to_num)
def nan_to_num(x, copy=True, nan=0.0, posinf=None, neginf=None):
    return _nan_to_num(x, nan=nan, posinf=posinf, neginf=neginf)


def _kept(g, x):
    """The share of g that belongs to the finite parts of x: its real and its imaginary part are replaced apart."""
    if not np.iscomplexobj(x):
        return np.where(np.isfinite(x), g, 0)
    return np.where(np.isfinite(np.real(x)), np.real(g), 0) + 1j * np.where(np.isfinite(np.imag(x)), np.imag(g), 0)


@primitive("np.nan_to_num", lambda g, _ans, x, **_: _kept(g, x))
def _nan_to_num(x, **values):
    return np.nan_to_num(x, **values)


rule(
    np.copysign,
    lambda g, _ans, x, y: np.where(np.signbit(x) == np.signbit(y), g, -g),
    lambda g, _ans, _x, _y: np.zeros_like(g),
)


rule(np.heaviside, lambda g, _ans, _x, _y: np.zeros_like(g), lambda g, _ans, x, _y: np.where(x == 0, g, 0))
rule(np.nextafter, lambda g, _ans, _x, _y: g, lambda g, _ans, _x, _y: np.zeros_like(g))


@composite(np.clip)
def clip(a, a_min=None, a_max=None, out=None, *, min=None, max=None):
    low, high = (a_min if min is None else min), (a_max if max is None else max)
    return a if low is high is None else _clip(a, low, high)


def _below(g, x, low, high):
    """The share of g that belongs to max(x, low), of which and `high` the smaller was chosen."""
    return g if high is None else larger(g, high, _above(x, low))


def _above(x, low):
    return x if low is None else np.maximum(x, low)


@primitive(
    "np.clip",
    lambda g, _ans, x, low, high: _below(g, x, low, high) if low is None else larger(_below(g, x, low, high), x, low),
    lambda g, _ans, x, low, high: larger(_below(g, x, low, high), low, x),
    lambda g, _ans, x, low, high: larger(g, _above(x, low), high),
)
def _clip(x, low, high):
    return np.clip(x, low, high)


# Constants


@composite(np.full_like)
def full_like(a, fill_value, dtype=None, order="K", subok=True, shape=None, *, device=None):
    where: dict = {} if device is None else {"device": device}
    zeros = np.zeros_like(a, dtype=dtype, shape=shape, **where)
    return np.where(np.ones_like(zeros, dtype=bool), fill_value, zeros).astype(zeros.dtype)


constant(np.empty_like, np.ones_like, np.zeros_like)
constant(np.around, np.ceil, np.fix, np.floor, np.floor_divide, np.rint, np.round, np.signbit, np.trunc)
constant(np.equal, np.greater, np.greater_equal, np.less, np.less_equal, np.not_equal)
constant(np.logical_and, np.logical_not, np.logical_or, np.logical_xor)
constant(np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.invert, np.left_shift, np.right_shift)
constant(np.isfinite, np.isinf, np.isnan, np.isneginf, np.isposinf, np.isreal, np.iscomplex)
constant(np.allclose, np.array_equal, np.array_equiv, np.isclose, np.isin, np.spacing)
constant(np.bitwise_count, np.gcd, np.lcm, np.packbits, np.unpackbits, np.ravel_multi_index, np.unravel_index)
