"""Rules of elliptic integrals and functions, by Carlson's integrals."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from spmd.autodiff.registry import primitive
from spmd.autodiff.rules.elementwise import nonzero
from spmd.autodiff.rules.special.frame import special, ufunc


@primitive("Carlson's integral", variadic=lambda k, g, _ans, *xs, powers: -powers[k] * g * _steeper(k, xs, powers))
def _carlson(*xs, powers):
    """∫₀^∞ Π (t + x)^-p dt by the trapezoidal rule in log t, whose error falls faster than any power of its step.

    The x may be positive or complex, and those of power 1/2 in all also zero.
    """
    shape, dtype = np.broadcast_shapes(*map(np.shape, xs)), np.result_type(*xs)
    points: list[Any] = [np.asarray(x) for x in xs]
    valid = functools.reduce(np.logical_and, [(np.abs(x) < np.inf) & ((x.imag != 0) | (x.real >= 0)) for x in points])
    points = [np.where(valid, x, 1) for x in points]
    sizes = [np.abs(x[x != 0]) for x in points]
    least = min(float(np.min(s, initial=1)) for s in sizes)
    most = max(float(np.max(s, initial=1)) for s in sizes)
    at_zero = float(np.max(sum(p * (x == 0) for x, p in zip(points, powers, strict=True)), initial=0))
    turn = max(float(np.max(np.abs(np.angle(x)), initial=0)) for x in points)
    step = (math.pi - turn) / (2 * math.pi)
    low, high = math.log(least) - 40 / (1 - at_zero), math.log(most) + 40 / (sum(powers) - 1)
    total = np.zeros(shape, np.result_type(dtype, float))
    for u in np.arange(low, high, step):
        t = math.exp(u)
        total = total + t * math.prod((t + x) ** -p for x, p in zip(points, powers, strict=True))
    return np.where(valid, total * step, np.nan).astype(dtype)


def _steeper(k, xs, powers):
    """The integral with one more power of argument k: its derivative but for a factor."""
    return _carlson(*xs, powers=(*powers[:k], powers[k] + 1, *powers[k + 1 :]))  # type: ignore


@primitive("Legendre's complete integral", lambda g, _ans, p, k, e: -e * g * _complete(p, k + 1, e + 1))  # type: ignore
def _complete(p, k, e):
    """The integral of sin²ᵏ θ (1 - m sin² θ)^-e over a quarter turn, by p = 1 - m."""
    if (k, e) == (1, 1.5):
        return special.elliprd(0, 1, p) / 3
    if (k, e) == (1, 0.5):
        return special.elliprd(0, p, 1) / 3
    return _carlson(np.zeros_like(p), p, np.ones_like(p), powers=(0.5, e, k + 1 - e)) / 2


@primitive(
    "Legendre's incomplete integral",
    lambda g, _ans, phi, m, k, e: g * np.sin(phi) ** (2 * k) * (1 - m * np.sin(phi) ** 2) ** -e,
    lambda g, _ans, phi, m, k, e: g * e * _incomplete(phi, m, k + 1, e + 1),  # type: ignore
)
def _incomplete(phi, m, k, e):
    """The integral of sin²ᵏ θ (1 - m sin² θ)^-e from 0 to phi."""
    turns = np.round(phi / math.pi)
    sine, cosine = np.sin(phi - turns * math.pi), np.cos(phi - turns * math.pi)
    c, y = cosine * cosine, 1 - m * sine * sine
    if (k, e) == (1, 1.5):
        within = special.elliprd(c, 1, y) / 3
    elif (k, e) == (1, 0.5):
        within = special.elliprd(c, y, 1) / 3
    else:
        within = _carlson(c, y, np.ones_like(y), powers=(0.5, e, k + 1 - e)) / 2
    around = np.where(turns == 0, 0, 2 * turns * _complete(np.where(turns == 0, 1, 1 - m), k, e))
    return sine ** (2 * k + 1) * within + around


ufunc("ellipk", lambda g, _ans, m: g * _complete(1 - m, 1, 1.5) / 2)
ufunc("ellipkm1", lambda g, _ans, p: g * _complete(p, 1, 1.5) / -2)
ufunc("ellipe", lambda g, _ans, m: g * _complete(1 - m, 1, 0.5) / -2)
ufunc(
    "ellipkinc",
    lambda g, _ans, phi, m: g / np.sqrt(1 - m * np.sin(phi) ** 2),
    lambda g, _ans, phi, m: g * _incomplete(phi, m, 1, 1.5) / 2,
)
ufunc(
    "ellipeinc",
    lambda g, _ans, phi, m: g * np.sqrt(1 - m * np.sin(phi) ** 2),
    lambda g, _ans, phi, m: g * _incomplete(phi, m, 1, 0.5) / -2,
)


def _ellipj_by_m(g, ans, m):
    """By the amplitude, whose incomplete integral is u whatever m."""
    sn, cn, dn, ph = ans
    turn = -dn * _incomplete(ph, m, 1, 1.5) / 2
    return g[0] * cn * turn - g[1] * sn * turn - g[2] * sn * (sn / 2 + m * cn * turn) / dn + g[3] * turn


ufunc(
    "ellipj",
    lambda g, ans, _u, m: g[0] * ans[1] * ans[2] - g[1] * ans[0] * ans[2] - g[2] * m * ans[0] * ans[1] + g[3] * ans[2],
    lambda g, ans, _u, m: _ellipj_by_m(g, ans, m),
)


def _agm(g, ans, a, b):
    return g * (2 / 3 / math.pi) * ans * ans * np.abs(a) * special.elliprd(0, b * b, a * a)


ufunc("agm", lambda g, ans, a, b: _agm(g, ans, a, b), lambda g, ans, a, b: _agm(g, ans, b, a))


def _rc_by_x(ans, x, y):
    """For real y < 0 the integral is a principal value; the function solves the same equation there."""
    beyond = (np.real(y) < 0) & (np.imag(y) == 0)
    x1, y1 = np.where(beyond, x, 2), np.where(beyond, y, 1)
    closed = (ans - 1 / np.sqrt(x1)) / (2 * (y1 - x1))
    return np.where(beyond, closed, _carlson(np.where(beyond, 1, x), np.where(beyond, 1, y), powers=(1.5, 1)) / -4)


def _rc_by_y(ans, x, y):
    beyond = (np.real(y) < 0) & (np.imag(y) == 0)
    x1, y1 = np.where(beyond, x, 2), np.where(beyond, y, 1)
    closed = -(ans / 2 + x1 * (ans - 1 / np.sqrt(x1)) / (2 * (y1 - x1))) / y1
    return np.where(beyond, closed, _carlson(np.where(beyond, 1, x), np.where(beyond, 1, y), powers=(0.5, 2)) / -2)


def _rg(x, y, z):
    return special.elliprf(x, y, z) / 4 - x * special.elliprd(y, z, nonzero(x)) / 12


ufunc("elliprc", lambda g, ans, x, y: g * _rc_by_x(ans, x, y), lambda g, ans, x, y: g * _rc_by_y(ans, x, y))
ufunc(
    "elliprf",
    lambda g, _ans, x, y, z: g * special.elliprd(y, z, x) / -6,
    lambda g, _ans, x, y, z: g * special.elliprd(x, z, y) / -6,
    lambda g, _ans, x, y, z: g * special.elliprd(x, y, z) / -6,
)
ufunc(
    "elliprd",
    lambda g, _ans, x, y, z: g * -0.75 * _carlson(x, y, z, powers=(1.5, 0.5, 1.5)),
    lambda g, _ans, x, y, z: g * -0.75 * _carlson(x, y, z, powers=(0.5, 1.5, 1.5)),
    lambda g, _ans, x, y, z: g * -2.25 * _carlson(x, y, z, powers=(0.5, 0.5, 2.5)),
)
ufunc(
    "elliprg",
    lambda g, _ans, x, y, z: g * _rg(x, y, z),
    lambda g, _ans, x, y, z: g * _rg(y, x, z),
    lambda g, _ans, x, y, z: g * _rg(z, x, y),
)
ufunc(
    "elliprj",
    lambda g, _ans, x, y, z, p: g * -0.75 * _carlson(x, y, z, p, powers=(1.5, 0.5, 0.5, 1)),
    lambda g, _ans, x, y, z, p: g * -0.75 * _carlson(x, y, z, p, powers=(0.5, 1.5, 0.5, 1)),
    lambda g, _ans, x, y, z, p: g * -0.75 * _carlson(x, y, z, p, powers=(0.5, 0.5, 1.5, 1)),
    lambda g, _ans, x, y, z, p: g * -1.5 * _carlson(x, y, z, p, powers=(0.5, 0.5, 0.5, 2)),
)
