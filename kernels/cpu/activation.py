"""Activations: bias, function and cotangent in one pass, by arithmetic that the compiler vectorises. Without numba, in
pieces that fit into the cache.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from spmd.kernels import jit
from spmd.kernels.cpu.chunks import accurate, into_rows
from spmd.kernels.cpu.elementary import exp_below, expm1_below, log1p_unit, mills
from spmd.kernels.memory import pool
from spmd.kernels.reference.activation import FAR, FORMS, form

_FAST = ("contract", "nsz")
_RAMP, _GATE, _DECAY, _SOFTPLUS, _TANH, _MISH, _NORMAL = range(len(FORMS))
_WIDTH = 1 << 12
"""Entries of a row of a flat array without bias."""
_COPIED_PIECE = 3 << 15
"""Bytes of a copied piece: so few that the allocator needs no fresh pages."""


def activate(x: np.ndarray, bias: np.ndarray | None, kind: str, alpha: float = 1.0) -> np.ndarray:
    """f(x + bias)."""
    if kind == "relu":
        if bias is None:  # one pass in any case
            return np.maximum(x, x.dtype.type(0), out=pool.empty_like(x))
        if x.size and x.dtype == bias.dtype and jit.fits(x) and x.dtype.char in "fd":
            out, n = pool.empty_like(x), x.shape[-1]
            _relu_of_sum(out.reshape(-1, n), np.ascontiguousarray(x).reshape(-1, n), np.ascontiguousarray(bias))
            return out
    return _by_row(_activate, _activate_numpy, (x,), bias, kind, alpha)


def activate_vjp(
    g: np.ndarray,
    x: np.ndarray,
    bias: np.ndarray | None,
    kind: str,
    alpha: float = 1.0,
    into: np.ndarray | None = None,
) -> np.ndarray:
    """g * f'(x + bias). into: a C-contiguous array of its shape and dtype to write it into, such as g itself."""
    if kind == "relu" and bias is None and x.dtype == g.dtype and jit.fits(x) and x.dtype.char in "fd":
        flat = [np.ascontiguousarray(a).reshape(-1) for a in (x, g)]
        if into is g:
            _relu_vjp_over(flat[1], flat[0])
            return g
        out = pool.empty_like(g) if into is None else into
        _relu_vjp(out.reshape(-1), *flat)
        return out
    return _by_row(_activate_vjp, _activate_vjp_numpy, (x, g), bias, kind, alpha, into)


def _by_row(
    loops: Any,
    numpy: Any,
    arrays: tuple[np.ndarray, ...],
    bias: Any,
    kind: str,
    alpha: float,
    into: np.ndarray | None = None,
) -> np.ndarray:
    """into: the array to write, which may be the last of the arrays. Pieces of that one are copied: the compiler
    vectorises loops only where they do not write what they read."""
    out = pool.empty_like(arrays[0]) if into is None else into
    if not out.size:
        return out
    compute_dtype = accurate(out.dtype)
    compiled = jit.available() and out.dtype.isnative and compute_dtype.char in "fd"
    function = loops if compiled else numpy
    which, p = _numbers(kind, alpha, compute_dtype, compiled)
    if compiled and into is None and bias is not None and bias.dtype == compute_dtype == out.dtype:
        n = out.shape[-1]  # as below, in fewer steps
        operands = [np.ascontiguousarray(a).reshape(-1, n) for a in (out, *arrays)]
        function(*operands, np.ascontiguousarray(bias), p, which)
        return out
    flat = [np.ascontiguousarray(a).reshape(-1) for a in (out, *arrays)]
    pieces = [(0, out.size, out.shape[-1])] if bias is not None else _cut(out.size)
    for start, stop, n in pieces:
        operands = [a[start:stop].reshape(-1, n) for a in flat]
        if compiled:
            b = np.ascontiguousarray(bias, compute_dtype) if bias is not None else _zeros(n, compute_dtype)
        else:
            b = None if bias is None else bias.astype(compute_dtype, copy=False)
        if into is None:
            into_rows(lambda o, *a, b=b: function(o, *a, b, p, which), (operands[0],), *operands[1:], whole=compiled)
        elif compiled and out.dtype == compute_dtype:
            step = max(1, _COPIED_PIECE // (n * compute_dtype.itemsize))
            for k in range(0, len(operands[0]), step):
                o, x, g = (a[k : k + step] for a in operands)
                function(o, x, g.copy(), b, p, which)
        else:
            into_rows(lambda o, x, g, b=b: function(o, x, g.copy(), b, p, which), (operands[0],), *operands[1:])
    return out


@lru_cache(64)
def _numbers(kind: str, alpha: float, dtype: np.dtype, compiled: bool) -> tuple[int, Any]:
    which, numbers = form(kind, alpha)
    return which, np.array(numbers, dtype) if compiled else tuple(map(dtype.type, numbers))


def _cut(size: int) -> list[tuple[int, int, int]]:
    """(start, stop, row length): rows of one length, and the rest as a row."""
    full_rows = size - size % _WIDTH
    return [piece for piece in ((0, full_rows, _WIDTH), (full_rows, size, size - full_rows)) if piece[1] > piece[0]]


@lru_cache(64)
def _zeros(n: int, dtype: np.dtype) -> np.ndarray:
    """A bias of zeros: the loops always have a bias, so that they are compiled once."""
    return np.zeros(n, dtype)


# Loops


@jit.helper
def _ramp(x, p0, p1, p2, p3, p4):
    v = p0 * x + p1
    v = p0 - p0 if v < 0 else v
    v = p2 if v > p2 else v
    return (x * v if p4 != 0 else v) + (p3 * x if p3 != 0 and x < 0 else p0 - p0)


@jit.exact  # a fused product and sum moves the kinks
def _ramp_slope(x, p0, p1, p2, p3, p4):
    v = p0 * x + p1
    zero = p0 - p0
    inside = v > 0 and (v < p2 or p2 == np.inf)
    clipped = zero if v < 0 else v
    clipped = p2 if clipped > p2 else clipped
    factor = x if p4 != 0 else p0 / p0
    slope = p0 * factor if inside else zero
    return (slope + clipped if p4 != 0 else slope) + (p3 if x <= 0 else zero)


_far_single, _far_double = np.float32(FAR), np.float64(FAR)


def _near(z):
    """z, clipped to -FAR and FAR."""
    return np.clip(z, -FAR, FAR)


def _near_single(z):
    c = _far_single if z > _far_single else z
    return -_far_single if c < -_far_single else c


def _near_double(z):
    c = _far_double if z > _far_double else z
    return -_far_double if c < -_far_double else c


jit.by_width(_near, single=_near_single, double=_near_double)


@jit.loops("out", fastmath=_FAST)
def _activate(out: Any, x: Any, bias: Any, p: Any, which: int) -> None:
    p0, p1, p2, p3, p4 = p[0], p[1], p[2], p[3], p[4]
    zero, one, two = x.dtype.type(0), x.dtype.type(1), x.dtype.type(2)
    density, half = x.dtype.type(0.3989422804014327), x.dtype.type(0.5)
    far = x.dtype.type(14 if x.itemsize == 4 else 38)
    for i in range(x.shape[0]):
        o, xs = out[i], x[i]
        if which == 0:
            for j in range(len(xs)):
                o[j] = _ramp(xs[j] + bias[j], p0, p1, p2, p3, p4)
        elif which == 1:
            for j in range(len(xs)):
                z = xs[j] + bias[j]
                c = _near(z)
                u = (p0 + p1 * (c * c)) * c
                e = exp_below(-abs(u))
                s = (one if u > 0 else e) / (one + e)
                o[j] = z * s if p4 != 0 else s
        elif which == 2:
            for j in range(len(xs)):
                z = xs[j] + bias[j]
                m = p1 * expm1_below((zero if z > 0 else z) * p2)
                o[j] = p0 * (z if z > 0 else m)
        elif which == 3:
            for j in range(len(xs)):
                z = (xs[j] + bias[j]) * p0
                o[j] = p0 * (log1p_unit(exp_below(-abs(z))) + (zero if z < 0 else z))
        elif which == 4:
            for j in range(len(xs)):
                z = xs[j] + bias[j]
                m = expm1_below(-two * abs(z))
                t = m / (two + m)
                o[j] = t if z < 0 else -t
        elif which == 5:
            for j in range(len(xs)):
                z = xs[j] + bias[j]
                e = exp_below(-abs(z))
                up = one + two * e if z > 0 else e * (e + two)
                o[j] = z * (up / (up + (two * e * e if z > 0 else two)))
        else:
            for j in range(len(xs)):
                z = xs[j] + bias[j]
                t = abs(z)
                t = far if t > far else t
                upper = exp_below(-half * t * t) * density * mills(t)
                o[j] = z * (upper if z < 0 else one - upper)


@jit.loops("out", fastmath=_FAST)
def _activate_vjp(out: Any, x: Any, g: Any, bias: Any, p: Any, which: int) -> None:
    p0, p1, p2, p3, p4 = p[0], p[1], p[2], p[3], p[4]
    zero, one, two, three = x.dtype.type(0), x.dtype.type(1), x.dtype.type(2), x.dtype.type(3)
    density, half = x.dtype.type(0.3989422804014327), x.dtype.type(0.5)
    far = x.dtype.type(14 if x.itemsize == 4 else 38)
    for i in range(x.shape[0]):
        o, xs, gs = out[i], x[i], g[i]
        if which == 0:
            for j in range(len(xs)):
                o[j] = gs[j] * _ramp_slope(xs[j] + bias[j], p0, p1, p2, p3, p4)
        elif which == 1:
            for j in range(len(xs)):
                z = xs[j] + bias[j]
                c = _near(z)
                u = (p0 + p1 * (c * c)) * c
                e = exp_below(-abs(u))
                part = one / (one + e)
                d = e * part * part * (p0 + three * p1 * (c * c))
                o[j] = gs[j] * (c * d + (one if u > 0 else e) * part if p4 != 0 else d)
        elif which == 2:
            for j in range(len(xs)):
                z = xs[j] + bias[j]
                e = p1 * p2 * exp_below((zero if z > 0 else z) * p2)
                o[j] = gs[j] * p0 * (one if z > 0 else e)
        elif which == 3:
            for j in range(len(xs)):
                z = (xs[j] + bias[j]) * p0
                e = exp_below(-abs(z))
                o[j] = gs[j] * ((one if z > 0 else e) / (one + e))
        elif which == 4:
            for j in range(len(xs)):
                e = exp_below(-two * abs(xs[j] + bias[j]))
                o[j] = gs[j] * (two * two * e / ((one + e) * (one + e)))
        elif which == 5:
            for j in range(len(xs)):
                z = xs[j] + bias[j]
                e = exp_below(-abs(z))
                up = one + two * e if z > 0 else e * (e + two)
                down = two * e * e if z > 0 else two
                t, rest = up / (up + down), down / (up + down)
                o[j] = gs[j] * (t + z * (rest * (one + t)) * ((one if z > 0 else e) / (one + e)))
        else:
            for j in range(len(xs)):
                z = xs[j] + bias[j]
                t = abs(z)
                t = far if t > far else t
                e = exp_below(-half * t * t) * density
                upper = e * mills(t)
                o[j] = gs[j] * ((upper if z < 0 else one - upper) + z * e)


@jit.loops("out", fastmath=_FAST)
def _relu_of_sum(out: Any, x: Any, bias: Any) -> None:
    """max(x + bias, 0)."""
    zero = x.dtype.type(0)
    for i in range(x.shape[0]):
        o, xs = out[i], x[i]
        for j in range(len(xs)):
            z = xs[j] + bias[j]
            o[j] = zero if z < 0 else z


@jit.loops("out", fastmath=_FAST)
def _relu_vjp(out: Any, x: Any, g: Any) -> None:
    """The cotangent of max(x, 0)."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for i in range(len(x)):
        out[i] = g[i] * (one if x[i] > 0 else zero)


@jit.loops("g", fastmath=_FAST)
def _relu_vjp_over(g: Any, x: Any) -> None:
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for i in range(len(x)):
        g[i] = g[i] * (one if x[i] > 0 else zero)


# NumPy, in place


def _logistic(u: np.ndarray) -> np.ndarray:
    """Write 1 / (1 + exp(-u)) into u."""
    np.negative(u, out=u)
    with np.errstate(over="ignore"):
        np.exp(u, out=u)
    u += 1
    return np.reciprocal(u, out=u)


def _tanh_softplus(z: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """t = tanh(log(1 + exp(z))), 1 - t, and the logistic function of z."""
    e = np.abs(z)
    np.negative(e, out=e)
    np.exp(e, out=e)
    positive = z > 0
    up, down = np.where(positive, e + e + 1, (e + 2) * e), np.where(positive, 2 * e * e, z.dtype.type(2))
    total = up + down
    logistic = np.where(positive, z.dtype.type(1), e)
    e += 1
    logistic /= e
    up /= total
    down /= total
    return up, down, logistic


def _normal(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distribution function and the density of the normal distribution."""
    t = np.minimum(np.abs(z), 14 if z.dtype == np.float32 else 38)
    density = np.exp(t * t * -0.5)
    density *= z.dtype.type(1 / math.sqrt(2 * math.pi))
    upper = mills(t)
    upper *= density
    return np.where(z < 0, upper, 1 - upper), density


def _activate_numpy(out: Any, x: Any, bias: Any, p: Any, which: int) -> None:
    z = x if bias is None else x + bias
    p0, p1, p2, p3, p4 = p
    if which == _RAMP:
        if p0 == 1 and not p1 and not p4:
            np.maximum(z, 0, out=out)
        else:
            np.multiply(z, p0, out=out)
            out += p1
            np.maximum(out, 0, out=out)
        if p2 != np.inf:
            np.minimum(out, p2, out=out)
        if p4:
            out *= z
        if p3:
            out += np.minimum(z, 0) * p3
    elif which == _GATE:
        c = _near(z)
        u = c * c
        u *= p1
        u += p0
        u *= c
        np.multiply(z, _logistic(u), out=out) if p4 else np.copyto(out, _logistic(u))
    elif which == _DECAY:
        m = np.minimum(z, 0)
        m *= p2
        np.expm1(m, out=m)
        m *= p1
        np.maximum(z, 0, out=out)
        out += m
        out *= p0
    elif which == _SOFTPLUS:
        e = np.abs(z)
        np.negative(e, out=e)
        np.log1p(np.exp(e, out=e), out=e)
        np.maximum(z * p0, 0, out=out)
        out += e
        out *= p0
    elif which == _TANH:
        np.tanh(z, out=out)
    elif which == _MISH:
        np.multiply(_tanh_softplus(z)[0], z, out=out)
    else:
        np.multiply(z, _normal(z)[0], out=out)


def _activate_vjp_numpy(out: Any, x: Any, g: Any, bias: Any, p: Any, which: int) -> None:
    z = x if bias is None else x + bias
    p0, p1, p2, p3, p4 = p
    if which == _RAMP:
        v = z * p0
        v += p1
        inside = v > 0
        if p2 != np.inf:
            inside &= v < p2
        np.multiply(inside, p0, out=out)
        if p4:
            np.multiply(out, z, out=out, where=inside)
            out += np.clip(v, 0, p2)
        if p3:
            out += (z <= 0) * p3
    elif which == _GATE:
        c = _near(z)
        square = c * c
        slope = square * (3 * p1)
        slope += p0
        square *= p1
        square += p0
        square *= c
        np.negative(square, out=out)
        s = _logistic(square)
        slope *= s
        np.multiply(_logistic(out), slope, out=out)  # 1 - s, also where s is all but 1
        if p4:
            out *= c
            out += s
    elif which == _DECAY:
        m = np.minimum(z, 0)
        m *= p2
        np.exp(m, out=m)
        m *= p1 * p2
        m[z > 0] = 1
        np.multiply(m, p0, out=out)
    elif which == _SOFTPLUS:
        np.copyto(out, _logistic(z * p0))
    elif which == _TANH:
        np.tanh(z, out=out)
        out *= out
        np.subtract(1, out, out=out)
    elif which == _MISH:
        t, rest, s = _tanh_softplus(z)
        np.add(t, 1, out=out)
        out *= rest
        out *= s
        out *= z
        out += t
    else:
        below, density = _normal(z)
        density *= z
        np.add(below, density, out=out)
    out *= g
