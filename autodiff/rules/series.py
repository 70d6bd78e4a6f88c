"""Rules of sequences: convolution, interpolation, finite differences, polynomials, numbers at even distances."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from spmd.autodiff import devices
from spmd.autodiff.apply import compute
from spmd.autodiff.dispatch import by_numpy
from spmd.autodiff.primitive import composite
from spmd.autodiff.registry import primitive
from spmd.autodiff.rules.elementwise import nonzero
from spmd.autodiff.rules.index import pick
from spmd.autodiff.rules.reduce import conj
from spmd.autodiff.rules.shape import entries
from spmd.autodiff.staging.recorder import checked
from spmd.autodiff.tracer import bare, value_of

# Convolution: sum_k a_k v_{n-k}, so that the cotangent of a is sum_n g_n v_{n-k}.

_MODES: dict[Any, str] = {0: "valid", 1: "same", 2: "full"}


def _opposite(g, size, other, mode):
    """The cotangent of the operand of a convolution that has `size` entries."""
    if mode == "valid":
        return np.convolve(g, np.flip(other), "full" if size >= other.size else "valid")
    if mode == "same":
        before = (min(size, other.size) - 1) // 2
        g = np.pad(g, (before, size + other.size - 1 - before - g.size))
    return np.convolve(g, np.flip(other), "valid")


@primitive(
    "convolve",
    lambda g, _ans, _a, v, mode: _opposite(g, _a.size, v, mode),
    lambda g, _ans, a, _v, mode: _opposite(g, _v.size, a, mode),
)
def _convolve(a, v, mode):
    return np.convolve(a, v, mode)


@composite(np.convolve)
def convolve(a, v, mode="full"):
    return _convolve(np.atleast_1d(a), np.atleast_1d(v), _MODES.get(mode, mode))


@composite(np.correlate)
def correlate(a, v, mode="valid"):
    """sum_k a_{n+k} conj(v_k). The middle part ("same") is cut from the longer operand, so that order matters."""
    a, v, mode = entries(a), conj(entries(v)), _MODES.get(mode, mode)
    if a.ndim != 1 or v.ndim != 1:
        raise ValueError("np.correlate needs two operands of one dimension")
    if a.size < v.size:
        return np.flip(_convolve(v, np.flip(a), mode))
    return _convolve(a, np.flip(v), mode)


# Interpolation


@composite(np.interp, by_numpy=True)
def interp(x, xp, fp, left=None, right=None, period=None):
    fp = entries(fp).astype(complex if np.iscomplexobj(fp) else float, casting="safe")
    x, xp = (entries(a).astype(float, casting="safe") for a in (x, xp))
    if xp.ndim != 1 or xp.shape != fp.shape or not xp.size:
        raise ValueError("np.interp needs two sequences of one length, xp and fp, that are not empty")
    if period is not None:
        left = right = None
        period = np.abs(period)
        x, xp = np.remainder(x, period), np.remainder(xp, period)
        order = np.argsort(xp)
        xp, fp = pick(xp, order), pick(fp, order)
        xp = np.concatenate([xp[-1:] - period, xp, xp[:1] + period])
        fp = np.concatenate([fp[-1:], fp, fp[:1]])
    before, after = x < xp[0], x > xp[-1]
    x = np.where(before | after, xp[0], x)
    i = np.clip(np.searchsorted(xp, x, "right") - 1, 0, max(xp.size - 2, 0))
    j = np.minimum(i + 1, xp.size - 1)
    low, high = (pick(xp, k) for k in (i, j))
    first, second = (pick(fp, k) for k in (i, j))
    inside = first + (second - first) / nonzero(high - low) * (x - low)
    below = np.where(before, fp[0] if left is None else left, inside)
    return np.where(after, fp[-1] if right is None else right, below)


# Finite differences and integrals


def _end_slope(f, g, h, p, q):
    """The slope at the first of three points with values f, g, h at distances p and q, by a parabola."""
    return -(2 * p + q) / (p * (p + q)) * f + (p + q) / (p * q) * g - p / (q * (p + q)) * h


def _slopes(f, h, edge_order):
    """The slopes of f along its last dimension; h has the distances of neighbours, one number if all are equal."""
    even = np.ndim(h) == 0
    first, second, last, other = (h,) * 4 if even else (h[:1], h[1:2], h[-1:], h[-2:-1])
    if even:
        middle = (f[..., 2:] - f[..., :-2]) / (2.0 * h)
    else:
        p, q = h[:-1], h[1:]
        middle = f[..., 1:-1] * ((q - p) / (p * q)) - f[..., :-2] * (q / (p * (p + q)))
        middle = middle + f[..., 2:] * (p / (q * (p + q)))
    if edge_order == 1:
        ends = (f[..., 1:2] - f[..., :1]) / first, (f[..., -1:] - f[..., -2:-1]) / last
    else:
        start = _end_slope(f[..., :1], f[..., 1:2], f[..., 2:3], first, second)
        ends = start, -_end_slope(f[..., -1:], f[..., -2:-1], f[..., -3:-2], last, other)
    return np.concatenate([ends[0], middle, ends[1]], -1)


@composite(np.gradient, by_numpy=True)
def gradient(f, *varargs, axis=None, edge_order=1):
    f = entries(f)
    f = f if issubclass(f.dtype.type, np.inexact) else f.astype(float)
    axes = range(f.ndim) if axis is None else [a % f.ndim for a in np.atleast_1d(axis).tolist()]
    spacings = list(varargs) or [1.0]
    if len(spacings) == 1 and np.ndim(spacings[0]) == 0:
        spacings *= len(axes)
    if len(spacings) != len(axes):
        raise TypeError("np.gradient needs one spacing, or one for each axis")
    if edge_order not in (1, 2):
        raise ValueError("np.gradient needs an edge_order of 1 or 2")
    results = []
    for a, h in zip(axes, spacings, strict=True):
        n = f.shape[a]
        if n < edge_order + 1:
            raise ValueError(f"np.gradient needs at least {edge_order + 1} entries along axis {a}, and has {n}")
        if np.ndim(h):
            h = entries(h)
            if h.shape != (n,):
                raise ValueError(f"np.gradient needs {n} coordinates along axis {a}, and has the shape {h.shape}")
            h = np.diff(h if issubclass(h.dtype.type, np.inexact) else h.astype(float))
        results.append(np.moveaxis(_slopes(np.moveaxis(f, a, -1), h, edge_order), -1, a).astype(f.dtype))
    return results[0] if len(results) == 1 else tuple(results)


@composite(np.unwrap, by_numpy=True)
def unwrap(p, discont=None, axis=-1, *, period=2 * math.pi):
    def turns(p, period):
        return np.round((np.unwrap(p, discont, axis, period=period) - p) / period)

    return p + compute(turns, (entries(p), period), {}) * period


@composite(np.ediff1d)
def ediff1d(ary, to_end=None, to_begin=None):
    ary = np.ravel(ary)
    parts = [ary[1:] - ary[:-1]]
    for name, x in (("to_begin", to_begin), ("to_end", to_end)):
        if x is None:
            continue
        if not np.can_cast(entries(x).dtype, ary.dtype, "same_kind"):
            raise TypeError(f"np.ediff1d needs a {name} that {ary.dtype} can hold")
        parts.insert(0 if name == "to_begin" else len(parts), np.ravel(x).astype(ary.dtype))
    return np.concatenate(parts)


# Polynomials: coefficients, the highest power first


def _as_given(result, *given):
    """A polynomial as an np.poly1d where one was given."""
    return np.poly1d(result) if any(isinstance(p, np.poly1d) for p in given) else result


def _coefficients(p):
    return np.atleast_1d(p.coeffs if isinstance(p, np.poly1d) else p)


def _aligned(p, q):
    """The coefficients of two polynomials, zeros in front of the shorter."""
    p, q = _coefficients(p), _coefficients(q)
    n = max(p.size, q.size)
    return np.pad(p, (n - p.size, 0)), np.pad(q, (n - q.size, 0))


def _powers(p):
    """The powers of the coefficients of p that are not constant: n, ..., 1."""
    return np.arange(p.size - 1, 0, -1, like=p)


@composite(np.polyadd)
def polyadd(a1, a2):
    p, q = _aligned(a1, a2)
    return _as_given(p + q, a1, a2)


@composite(np.polysub)
def polysub(a1, a2):
    p, q = _aligned(a1, a2)
    return _as_given(p - q, a1, a2)


def _leading(p):
    """The coefficients from the first that is not zero on."""
    p = np.trim_zeros(_coefficients(p), "f")
    return p if p.size else np.zeros_like(p, shape=1)


@composite(np.polymul)
def polymul(a1, a2):
    return _as_given(np.convolve(_leading(a1), _leading(a2)), a1, a2)


@composite(np.polydiv)
def polydiv(u, v):
    rest, divisor = _coefficients(u) + 0.0, _coefficients(v) + 0.0
    rest = rest.astype(np.result_type(rest, divisor))
    n, quotient = divisor.size, []
    for k in range(rest.size - n + 1):
        quotient.append(rest[k] * (1.0 / divisor[0]))
        taken = quotient[-1] * divisor
        rest = rest - np.pad(taken, (k, rest.size - n - k)).astype(rest.dtype)
    while rest.size > 1 and np.allclose(value_of(rest[0]), 0, rtol=1e-14):
        rest = rest[1:]
    q = np.stack(quotient) if quotient else np.zeros_like(rest, shape=1)
    return _as_given(q, u, v), _as_given(rest, u, v)


@composite(np.polyder)
def polyder(p, m=1):
    if m < 0:
        raise ValueError("np.polyder needs an order that is not negative; see np.polyint")
    c = entries(p)
    for _ in range(int(m)):
        c = c[:-1] * _powers(c)
    return _as_given(c, p)


@composite(np.polyint)
def polyint(p, m=1, k=None):
    m = int(m)
    if m < 0:
        raise ValueError("np.polyint needs an order that is not negative; see np.polyder")
    k = np.zeros(m) if k is None else np.atleast_1d(k)
    if len(k) == 1 and m > 1:
        k = k[0] * np.ones_like(k, shape=m, dtype=float)
    if len(k) < m:
        raise ValueError("np.polyint needs one constant, or one for each integration")
    c = entries(p)
    for i in range(m):
        c = np.concatenate([c / np.arange(len(c), 0, -1, like=c), k[i : i + 1]])
    return _as_given(c, p)


@composite(np.polyval)
def polyval(p, x):
    if isinstance(x, np.poly1d):
        return _horner(p, x, np.poly1d(0))
    if not isinstance(p, np.poly1d) and (np.iscomplexobj(p) or np.iscomplexobj(x)):
        return by_numpy(np.polyval, _at_number, p, x)
    return _at_number(p, x)


def _at_number(p, x):
    x = entries(x)
    return _horner(p, x, np.zeros_like(x))


def _horner(p, x, y):
    for c in _coefficients(p) if isinstance(p, np.poly1d) else entries(p):
        y = y * x + c
    return y


@composite(np.poly, by_numpy=True)
def poly(seq_of_zeros):
    z = np.atleast_1d(seq_of_zeros)
    if z.ndim == 2 and z.shape[0] == z.shape[1] != 0:
        z = np.linalg.eigvals(z)
    elif z.ndim != 1:
        raise ValueError("np.poly needs the zeros in one dimension, or a square matrix")
    if not z.size:
        return 1.0
    z = z.astype(np.mintypecode(z.dtype.char))
    c, zero = np.ones_like(z, shape=1), np.zeros_like(z, shape=1)
    for i in range(z.size):
        c = np.concatenate([c, zero]) - z[i] * np.concatenate([zero, c])
    bare = np.sort(value_of(z))
    # The coefficients are real where all zeros come in conjugate pairs.
    return np.real(c) if z.dtype.kind == "c" and np.all(bare == np.sort(np.conj(bare))) else c


@primitive(
    "roots",
    lambda g, ans, p: -_quotient(g, np.polyval(p[:-1] * _powers(p), ans)) @ np.vander(ans, p.size),
)
def _roots(p):
    """The roots r of p: p(r) = 0 holds along every change of p, so p'(r) dr = -sum_k r^k dp_k."""
    return np.roots(p)


def _quotient(g, slope):
    """g / slope, zero where both are: a double root that nothing depends on."""
    return g / (slope + ((slope == 0) & (g == 0)))


@composite(np.roots)
def roots(p):
    p = np.atleast_1d(p)
    if p.ndim != 1:
        raise ValueError("np.roots needs the coefficients in one dimension")
    return _roots(np.trim_zeros(p, "f"))


@composite(np.vander, by_numpy=True)
def vander(x, N=None, increasing=False):
    x = entries(x)
    if x.ndim != 1:
        raise ValueError("np.vander needs one dimension")
    powers = np.arange(x.size if N is None else N, like=x)
    v = x.astype(np.promote_types(x.dtype, int))[:, None] ** powers
    return v if increasing else np.flip(v, 1)


@composite(np.polyfit, by_numpy=True)
def polyfit(x, y, deg, rcond=None, full=False, w=None, cov=False):
    x, y = entries(x) + 0.0, entries(y) + 0.0
    order = int(deg) + 1
    if order < 1:
        raise ValueError("np.polyfit needs a degree that is not negative")
    if x.ndim != 1 or not x.size or y.ndim not in (1, 2) or len(x) != len(y):
        raise TypeError("np.polyfit needs an x of one dimension and a y of one or two, of one length that is not zero")
    rcond = len(x) * np.finfo(x.dtype).eps if rcond is None else rcond
    left, right = np.vander(x, order), y
    if w is not None:
        w = entries(w) + 0.0
        if w.shape != x.shape:
            raise TypeError("np.polyfit needs one weight for each point")
        left, right = left * w[:, None], right * (w[:, None] if y.ndim == 2 else w)
    scale = np.sqrt(np.sum(left * left, 0))
    left = left / scale
    c, residuals, rank, s = np.linalg.lstsq(left, right, rcond)
    c = np.transpose(np.transpose(c) / scale)
    if full:
        return c, residuals, rank, s, rcond
    if devices.is_array(value_of(x)) and value_of(rank) != order:  # NumPy warns by itself
        warnings.warn(
            f"np.polyfit: the rank {value_of(rank)} is below the {order} coefficients",
            np.exceptions.RankWarning,
            stacklevel=2,
        )
    if not cov:
        return c
    spread = np.linalg.inv(np.transpose(left) @ left) / np.outer(scale, scale)
    if cov != "unscaled":
        if len(x) <= order:
            raise ValueError("np.polyfit needs more points than coefficients to scale the covariance")
        residuals = residuals / (len(x) - order)
        spread = spread * residuals if y.ndim == 1 else spread[:, :, None] * residuals
    elif y.ndim == 2:
        spread = spread[:, :, None]
    return c, spread


# Numbers at even distances


def _weights(num, endpoint, like):
    """Numbers from 0 to 1 along a new first dimension of `like`."""
    nothing = np.zeros_like(like, shape=0, dtype=np.finfo(like.dtype).dtype)
    t = np.arange(num, dtype=nothing.dtype, like=nothing) / max(num - bool(endpoint), 1)
    return np.reshape(t, (num,) + (1,) * like.ndim)


def _beside(start, stop):
    """Both where one of them is on a device."""
    return devices.beside(start, value_of(stop)), devices.beside(stop, value_of(start))


@composite(np.linspace, by_numpy=True)
def linspace(start, stop, num=50, endpoint=True, retstep=False, dtype=None, axis=0, *, device=None):
    own = np.linspace(bare(start), bare(stop), min(num, 0)).dtype
    start, stop = _beside(entries(start).astype(own), entries(stop).astype(own))
    length = stop - start
    t = _weights(num, endpoint, length)
    y = np.moveaxis(start * (1 - t) + stop * t, 0, axis)
    if dtype is not None:
        y = (np.floor(y) if np.issubdtype(dtype, np.integer) else y).astype(dtype)
    steps = num - bool(endpoint)
    return (y, length / steps if steps > 0 else math.nan) if retstep else y


@composite(np.logspace, by_numpy=True)
def logspace(start, stop, num=50, endpoint=True, base=10.0, dtype=None, axis=0):
    if np.ndim(base):
        ndim = max(map(np.ndim, (start, stop, base)))
        start, stop, base = (np.reshape(x, (1,) * (ndim - np.ndim(x)) + np.shape(x)) for x in (start, stop, base))
        base = np.expand_dims(base, axis)
    y = np.power(base, np.linspace(start, stop, num, endpoint, axis=axis))
    return y if dtype is None else y.astype(dtype)


def _check_end(end) -> None:
    if not np.all(end):
        raise ValueError("np.geomspace goes between numbers that are not zero")


@composite(np.geomspace, by_numpy=True)
def geomspace(start, stop, num=50, endpoint=True, dtype=None, axis=0):
    start, stop = entries(start), entries(stop)
    for end in (start, stop):
        checked(_check_end, value_of(end))
    own = np.result_type(start.dtype, stop.dtype, 1.0, np.zeros((), dtype))
    start, stop = _beside(start.astype(own), stop.astype(own))
    ratio = stop / start
    t = _weights(num, endpoint, ratio)
    y = np.moveaxis(np.where(t == 1, stop, start * ratio**t), 0, axis)
    return y if dtype is None else y.astype(dtype)
