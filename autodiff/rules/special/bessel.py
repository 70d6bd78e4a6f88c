"""Rules of the Bessel functions, of others that solve such an equation, and of the hypergeometric functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.autodiff.rules.elementwise import nonzero
from spmd.autodiff.rules.special.elementary import DEGREE
from spmd.autodiff.rules.special.frame import function, functions, is_complex, special, ufunc, where_finite
from spmd.autodiff.tracer import value_of

# Bessel functions: f_v' = (± f_{v-1} ± f_{v+1}) / 2, of all orders and at zero too


def _bessel(name: str, below: float, above: float, scaled: Callable = lambda g, ans, x: 0) -> None:
    """A family by its recurrence; `scaled` is the cotangent that its scaling adds."""
    f: Any = getattr(special, name, None)
    ufunc(name, None, lambda g, ans, v, x: g * (below * f(v - 1, x) + above * f(v + 1, x)) + scaled(g, ans, x))


def _damped(g, ans, x):
    """The cotangent by the factor exp(-|Re x|)."""
    return -np.sign(np.real(x)) * np.real(g * ans)


def _muted(g, ans, x):
    """The cotangent by the factor exp(-|Im x|)."""
    return 1j * np.sign(np.imag(x)) * np.real(g * ans) if is_complex(x) else 0


_bessel("jv", 0.5, -0.5)
_bessel("yv", 0.5, -0.5)
_bessel("yn", 0.5, -0.5)
_bessel("hankel1", 0.5, -0.5)
_bessel("hankel2", 0.5, -0.5)
_bessel("iv", 0.5, 0.5)
_bessel("kv", -0.5, -0.5)
_bessel("kn", -0.5, -0.5)
_bessel("jve", 0.5, -0.5, _muted)
_bessel("yve", 0.5, -0.5, _muted)
_bessel("hankel1e", 0.5, -0.5, lambda g, ans, x: -1j * g * ans)
_bessel("hankel2e", 0.5, -0.5, lambda g, ans, x: 1j * g * ans)
_bessel("ive", 0.5, 0.5, _damped)
_bessel("kve", -0.5, -0.5, lambda g, ans, x: g * ans)


def _second_order(general, zeroth, first, sign):
    """The function of order two. CuPy has those of orders zero and one only: f_2 = ±(2 f_1 / x - f_0)."""

    def f(x):
        if type(value_of(x)).__module__.partition(".")[0] != "cupy":
            return general(2, x)
        return np.where(x == 0, 0, sign * (2 * first(x) / nonzero(x) - zeroth(x)))

    return f


_j2 = _second_order(special.jv, special.j0, special.j1, 1)
_i2 = _second_order(special.iv, special.i0, special.i1, -1)
_i2e = _second_order(special.ive, special.i0e, special.i1e, -1)

ufunc("j0", lambda g, _ans, x: -g * special.j1(x))
ufunc("j1", lambda g, _ans, x: g * (special.j0(x) - _j2(x)) / 2)
ufunc("y0", lambda g, _ans, x: -g * special.y1(x))
ufunc("y1", lambda g, ans, x: g * (special.y0(x) - ans / x))
ufunc("i0", lambda g, _ans, x: g * special.i1(x))
ufunc("i1", lambda g, _ans, x: g * (special.i0(x) + _i2(x)) / 2)
ufunc("k0", lambda g, _ans, x: -g * special.k1(x))
ufunc("k1", lambda g, ans, x: -g * (special.k0(x) + ans / x))
ufunc("i0e", lambda g, ans, x: g * (special.i1e(x) - np.sign(x) * ans))
ufunc("i1e", lambda g, ans, x: g * ((special.i0e(x) + _i2e(x)) / 2 - np.sign(x) * ans))
ufunc("k0e", lambda g, ans, x: g * (ans - special.k1e(x)))
ufunc("k1e", lambda g, ans, x: g * (ans - special.k0e(x) - ans / x))
ufunc(
    "besselpoly",
    lambda g, _ans, a, lmb, nu: g * (special.besselpoly(a, lmb + 1, nu - 1) - special.besselpoly(a, lmb + 1, nu + 1)),
)
ufunc("itj0y0", lambda g, ans, x: g[0] * special.j0(x) + g[1] * where_finite(ans[1], special.y0, x))
ufunc("iti0k0", lambda g, ans, x: g[0] * special.i0(x) + g[1] * where_finite(ans[1], special.k0, x))

for _name in "jvp yvp ivp kvp h1vp h2vp".split():
    function(_name, None, lambda g, _ans, v, z, n=1, *, _name=_name: g * functions[_name](v, z, n + 1))


def _spherical(name: str, below: int, above: int) -> None:
    """f_n' = (± n f_{n-1} ± (n + 1) f_{n+1}) / (2n + 1); the same holds for derivatives."""
    f: Any = functions.get(name)

    def pull(g, _ans, n, z, derivative=False):
        if not derivative:
            return g * f(n, z, True)
        n = np.asarray(n)
        return g * (below * n * f(n - (n > 0), z, True) + above * (n + 1) * f(n + 1, z, True)) / (2 * n + 1)

    function(name, None, pull)


_spherical("spherical_jn", 1, -1)
_spherical("spherical_yn", 1, -1)
_spherical("spherical_in", 1, 1)
_spherical("spherical_kn", -1, -1)


def _struve(f, sign):
    """f_v' = (f_{v-1} ± f_{v+1} + (x/2)^v / √π Γ(v + 3/2)) / 2."""

    def pull(g, _ans, v, x):
        zero = v == 0  # f_{-1} = 2 / π ± f_1, without a pole in its derivatives
        below = (2 / math.pi) * zero + np.where(zero, sign, 1) * f(v - 1 + 2 * zero, x)
        rest = (x / 2) ** v * special.rgamma(v + 1.5) / math.sqrt(math.pi)
        return g * (below + sign * f(v + 1, x) + rest) / 2

    return pull


ufunc("struve", None, _struve(special.struve, -1))
ufunc("modstruve", None, _struve(special.modstruve, 1))
ufunc("itstruve0", lambda g, _ans, x: g * special.struve(0, x))
ufunc("itmodstruve0", lambda g, _ans, x: g * special.modstruve(0, x))

# Functions that solve an equation of the second order, and come with their first derivative


def _airye(g, ans, z):
    """Ai and Ai' are multiplied by exp(ζ), Bi and Bi' by exp(-|Re ζ|), where ζ' = √z; at real z < 0 Ai is not known."""
    a, ap, b, bp = ans
    if is_complex(z):
        root = np.sqrt(z)
    else:
        root = np.where(z > 0, np.sqrt(np.where(z > 0, z, 1)), 0)
        a, ap = np.where(z < 0, 0, a), np.where(z < 0, 0, ap)
    shrinks = np.sign(np.real(z * root)) * root * np.real(g[2] * b + g[3] * bp)
    return g[0] * (ap + root * a) + g[1] * (z * a + root * ap) + g[2] * bp + g[3] * z * b - shrinks


ufunc("airy", lambda g, ans, z: g[0] * ans[1] + g[1] * z * ans[0] + g[2] * ans[3] + g[3] * z * ans[2])
ufunc("airye", lambda g, ans, z: _airye(g, ans, z))
ufunc(
    "itairy",
    lambda g, _ans, x: (
        g[0] * special.airy(x)[0] + g[1] * special.airy(x)[2] + g[2] * special.airy(-x)[0] + g[3] * special.airy(-x)[2]
    ),
)
ufunc("pbdv", None, lambda g, ans, v, x: g[0] * ans[1] + g[1] * (x * x / 4 - v - 0.5) * ans[0])
ufunc("pbvv", None, lambda g, ans, v, x: g[0] * ans[1] + g[1] * (x * x / 4 - v - 0.5) * ans[0])
ufunc("pbwa", None, lambda g, ans, a, x: g[0] * ans[1] + g[1] * (a - x * x / 4) * ans[0])

_KELVIN = complex(-math.sqrt(0.5), math.sqrt(0.5))
"""ber x + i bei x = J_0(x times this)."""


def _be(x):
    """The second derivative of ber + i bei: no quotient, so that it holds at zero."""
    z = _KELVIN * x
    return _KELVIN**2 * (special.jv(2, z) - special.jv(0, z)) / 2


ufunc("ber", lambda g, _ans, x: g * special.berp(x))
ufunc("bei", lambda g, _ans, x: g * special.beip(x))
ufunc("berp", lambda g, _ans, x: g * np.real(_be(x)))
ufunc("beip", lambda g, _ans, x: g * np.imag(_be(x)))
ufunc("ker", lambda g, _ans, x: g * special.kerp(x))
ufunc("kei", lambda g, _ans, x: g * special.keip(x))
ufunc("kerp", lambda g, ans, x: -g * (special.kei(x) + ans / x))
ufunc("keip", lambda g, ans, x: g * (special.ker(x) - ans / x))


def _ke(x):
    """The second derivative of ker + i kei = K_0(x √i)."""
    root = complex(math.sqrt(0.5), math.sqrt(0.5))
    return 0.5j * (special.kv(2, root * x) + special.kv(0, root * x))


ufunc(
    "kelvin",
    lambda g, ans, x: (
        g[0] * ans[2]
        + g[2] * _be(x)
        + g[1] * np.where(np.isfinite(ans[1]), ans[3], 0)
        + g[3] * where_finite(ans[1], _ke, x)
    ),
)


def _mathieu(name: str, characteristic: str, unit: float, force: Callable) -> None:
    """y'' = (2q cos 2x - a) y, or for the modified functions its negative in cosh; x in degrees, or in radians."""
    a: Any = getattr(special, characteristic, None)

    def pull(g, ans, m, q, x):
        return unit * (g[0] * ans[1] + g[1] * force(a(m, q), q, unit * x) * ans[0])

    ufunc(name, None, None, pull)


for _kind, _name in (("c", "mathieu_a"), ("s", "mathieu_b")):
    _mathieu(f"mathieu_{_kind}em", _name, DEGREE, lambda a, q, x: 2 * q * np.cos(2 * x) - a)
    for _number in "12":
        _mathieu(f"mathieu_mod{_kind}em{_number}", _name, 1.0, lambda a, q, x: a - 2 * q * np.cosh(2 * x))

# Hypergeometric functions

ufunc("hyp0f1", None, lambda g, _ans, v, z: g * special.hyp0f1(v + 1, z) / v)
ufunc("hyp1f1", None, None, lambda g, _ans, a, b, z: g * (a / b) * special.hyp1f1(a + 1, b + 1, z))
ufunc("hyp2f1", None, None, None, lambda g, _ans, a, b, c, z: g * (a * b / c) * special.hyp2f1(a + 1, b + 1, c + 1, z))
ufunc("hyperu", None, None, lambda g, _ans, a, b, x: -g * a * special.hyperu(a + 1, b + 1, x))
ufunc("wright_bessel", None, None, lambda g, _ans, a, b, x: g * special.wright_bessel(a, a + b, x))
ufunc(
    "log_wright_bessel",
    None,
    None,
    lambda g, ans, a, b, x: g * np.exp(special.log_wright_bessel(a, a + b, x) - ans),
)
