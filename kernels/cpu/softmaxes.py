"""Softmax and related functions: each row is read from memory once. Without numba, as many rows at a time as fit into
the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.kernels import jit
from spmd.kernels.cpu.chunks import STRETCH, accurate, dots, into_rows
from spmd.kernels.cpu.elementary import exp_below, rank, unrank
from spmd.kernels.memory import pool

_FAST = ("contract", "reassoc", "nsz")


def softmax(x: np.ndarray) -> np.ndarray:
    """exp(x) / sum(exp(x)) along the last axis."""
    return _by_row(_softmax, _softmax_numpy, x)


def softmax_vjp(g: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The cotangent of x, given that of y = softmax(x)."""
    return _by_row(_softmax_vjp, _softmax_vjp_numpy, g, y)


def log_softmax(x: np.ndarray) -> np.ndarray:
    """x - log(sum(exp(x))) along the last axis."""
    return _by_row(_log_softmax, _log_softmax_numpy, x)


def log_softmax_vjp(g: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The cotangent of x, given that of y = log_softmax(x)."""
    return _by_row(_log_softmax_vjp, _log_softmax_vjp_numpy, g, y)


def logsumexp(x: np.ndarray) -> np.ndarray:
    """log(sum(exp(x))) along the last axis."""
    out = np.empty(x.shape[:-1], x.dtype)
    _run(_logsumexp, _logsumexp_numpy, (out.reshape(-1),), _rows(x))
    return out


def scaled_exp(g: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """g * exp(x - y), where g and y have a number for each row."""
    out = pool.empty_like(x)
    _run(_scaled_exp, _scaled_exp_numpy, (_rows(out),), _flat(g), _rows(x), _flat(y))
    return out


def exp_sums(x: np.ndarray, top: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """sum(exp(x - top)), x[label] and sum(x) of each row, along a new first axis."""
    out = np.empty((3, *x.shape[:-1]), x.dtype)
    _run(_exp_sums, _exp_sums_numpy, tuple(out.reshape(3, -1)), _rows(x), _flat(top), _labels(labels))
    return out


def cross_entropy(x: np.ndarray, labels: np.ndarray, smoothing: float = 0.0, ignore: int | None = None) -> np.ndarray:
    """The cross-entropy of softmax(x) against classes."""
    return _class_loss(x, labels, smoothing, ignore, None)


def cross_entropy_and_gradient(
    x: np.ndarray, labels: np.ndarray, smoothing: float = 0.0, ignore: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """`cross_entropy`, and its derivative with respect to x, in one pass."""
    d = pool.empty_like(x)
    return _class_loss(x, labels, smoothing, ignore, d), d


def soft_cross_entropy(x: np.ndarray, t: np.ndarray) -> np.ndarray:
    """The cross-entropy of softmax(x) against distributions."""
    return _soft_loss(x, t, None)


def soft_cross_entropy_and_gradient(x: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`soft_cross_entropy`, and its derivative with respect to x, in one pass."""
    d = pool.empty_like(x)
    return _soft_loss(x, t, d), d


def _class_loss(x: Any, labels: Any, smoothing: float, ignore: int | None, d: Any) -> np.ndarray:
    options = accurate(x.dtype).type(smoothing), -(2**63) if ignore is None else ignore
    loops = _cross_entropy if d is None else _cross_entropy_and_gradient
    return _loss(lambda *a: loops(*a, *options), lambda *a: _cross_entropy_numpy(*a, *options), d, x, _labels(labels))


def _soft_loss(x: Any, t: Any, d: Any) -> np.ndarray:
    loops = _soft_cross_entropy if d is None else _soft_cross_entropy_and_gradient
    return _loss(loops, _soft_cross_entropy_numpy, d, x, _rows(t))


def _loss(loops: Any, numpy: Any, d: Any, x: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The loss of each row; d, unless it is None, gets the derivative."""
    loss = np.empty(x.shape[:-1], x.dtype)
    outs = (loss.reshape(-1),) if d is None else (loss.reshape(-1), _rows(d))
    _run(loops, numpy, outs, _rows(x), target)
    return loss


def _labels(labels: np.ndarray) -> np.ndarray:
    return _flat(labels).astype(np.int64, copy=False)


def _flat(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a).reshape(-1)


def _rows(a: np.ndarray) -> np.ndarray:
    """The array as a matrix of its rows."""
    return np.ascontiguousarray(a).reshape(math.prod(a.shape[:-1]), a.shape[-1])


def _by_row(loops: Any, numpy: Any, *arrays: np.ndarray) -> np.ndarray:
    out = pool.empty_like(arrays[0])
    if out.size:
        _run(loops, numpy, (_rows(out),), *map(_rows, arrays))
    return out


def _run(loops: Callable[..., None], numpy: Callable[..., None], outs: tuple[np.ndarray, ...], *arrays: Any) -> None:
    x = next(a for a in arrays if a.ndim == 2)
    native = all(a.dtype.isnative for a in arrays) and accurate(x.dtype).char in "fd"
    compiled = jit.available() and x.size > 0 and native
    into_rows(loops if compiled else numpy, outs, *arrays, whole=compiled)


# Loops. The largest entry of a row is found among integers: the compiler does not vectorise a maximum with NaNs.


@jit.helper
def _largest(x, i):
    top = rank(x[i, 0])
    for j in range(x.shape[1]):
        top = max(top, rank(x[i, j]))
    return unrank(x[i, 0], top)


@jit.helper(fastmath=_FAST)
def _sum_less(x, i, shift):
    """The sum of x[i] - shift."""
    total = 0.0
    for begin in range(0, x.shape[1], STRETCH):
        partial = x.dtype.type(0)
        for k in range(min(x.shape[1] - begin, STRETCH)):
            partial += x[i, np.uint64(begin) + np.uint64(k)] - shift
        total += partial
    return total


@jit.helper(fastmath=_FAST)
def _sum_exp(x, i, top):
    """The sum of exp(x[i] - top)."""
    total = 0.0
    for begin in range(0, x.shape[1], STRETCH):
        partial = x.dtype.type(0)
        for k in range(min(x.shape[1] - begin, STRETCH)):
            partial += exp_below(x[i, np.uint64(begin) + np.uint64(k)] - top)
        total += partial
    return total


@jit.helper(fastmath=_FAST)
def _put_exp(out, x, i, top):
    """Write out[i] = exp(x[i] - top); return the sum.

    A loop that writes nothing takes the sum. One that writes is not vectorised where it reads nearby memory, so the
    order of the sum, and its last bits, would depend on addresses.
    """
    total = 0.0
    for begin in range(0, x.shape[1], STRETCH):
        n = min(x.shape[1] - begin, STRETCH)
        for k in range(n):
            j = np.uint64(begin) + np.uint64(k)
            out[i, j] = exp_below(x[i, j] - top)
        partial = x.dtype.type(0)
        for k in range(n):
            partial += out[i, np.uint64(begin) + np.uint64(k)]
        total += partial
    return total


@jit.helper(fastmath=_FAST)
def _weighted(x, t, i, top):
    """The sums of t[i] and of t[i] * (x[i] - top)."""
    weight, value = 0.0, 0.0
    for begin in range(0, x.shape[1], STRETCH):
        partial, partial_value = x.dtype.type(0), x.dtype.type(0)
        for k in range(min(x.shape[1] - begin, STRETCH)):
            j = np.uint64(begin) + np.uint64(k)
            partial += t[i, j]
            partial_value += t[i, j] * (x[i, j] - top) if t[i, j] != 0 else x.dtype.type(0)
        weight += partial
        value += partial_value
    return weight, value


@jit.loops("out", fastmath=_FAST)
def _softmax(out: Any, x: Any) -> None:
    for i in range(x.shape[0]):
        top = _largest(x, i)
        total = _put_exp(out, x, i, top)
        part = x.dtype.type(1 / total)
        for j in range(x.shape[1]):
            out[i, j] *= part


@jit.loops("out", fastmath=_FAST)
def _softmax_vjp(out: Any, g: Any, y: Any) -> None:
    for i in range(y.shape[0]):
        total = 0.0
        for begin in range(0, y.shape[1], STRETCH):
            partial = y.dtype.type(0)
            for k in range(min(y.shape[1] - begin, STRETCH)):
                j = np.uint64(begin) + np.uint64(k)
                partial += g[i, j] * y[i, j]
            total += partial
        inner = y.dtype.type(total)
        for j in range(y.shape[1]):
            out[i, j] = y[i, j] * (g[i, j] - inner)


@jit.loops("out", fastmath=_FAST)
def _log_softmax(out: Any, x: Any) -> None:
    for i in range(x.shape[0]):
        top = _largest(x, i)
        total = _sum_exp(x, i, top)
        log = x.dtype.type(np.log(total))
        for j in range(x.shape[1]):
            out[i, j] = (x[i, j] - top) - log


@jit.loops("out", fastmath=_FAST)
def _log_softmax_vjp(out: Any, g: Any, y: Any) -> None:
    for i in range(y.shape[0]):
        weight = g.dtype.type(_sum_less(g, i, g.dtype.type(0)))
        for j in range(y.shape[1]):
            out[i, j] = g[i, j] - exp_below(y[i, j]) * weight


@jit.loops("out", fastmath=_FAST)
def _logsumexp(out: Any, x: Any) -> None:
    for i in range(x.shape[0]):
        top = _largest(x, i)
        total = _sum_exp(x, i, top)
        out[i] = top + np.log(total)
        if abs(top) == np.inf:  # the result, unless there is a NaN
            out[i] = top
            for j in range(x.shape[1]):
                out[i] = out[i] if x[i, j] == x[i, j] else x[i, j]


@jit.loops("out", fastmath=_FAST)
def _scaled_exp(out: Any, g: Any, x: Any, y: Any) -> None:
    for i in range(x.shape[0]):
        shift = y[i] if y[i] != -np.inf else y.dtype.type(0)
        for j in range(x.shape[1]):
            out[i, j] = g[i] * exp_below(x[i, j] - shift)


@jit.loops("sums", "chosen", "totals", fastmath=_FAST)
def _exp_sums(sums: Any, chosen: Any, totals: Any, x: Any, top: Any, labels: Any) -> None:
    for i in range(x.shape[0]):
        shift = top[i] if top[i] != -np.inf else x.dtype.type(0)
        total, plain = 0.0, 0.0
        for begin in range(0, x.shape[1], STRETCH):
            partial, partial_plain = x.dtype.type(0), x.dtype.type(0)
            for k in range(min(x.shape[1] - begin, STRETCH)):
                j = np.uint64(begin) + np.uint64(k)
                partial += exp_below(x[i, j] - shift)
                partial_plain += x[i, j]
            total += partial
            plain += partial_plain
        sums[i], totals[i] = total, plain
        chosen[i] = x[i, labels[i]] if 0 <= labels[i] < x.shape[1] else 0


@jit.loops("loss", fastmath=_FAST)
def _cross_entropy(loss: Any, x: Any, labels: Any, smoothing: Any, ignore: Any) -> None:
    for i in range(x.shape[0]):
        label = labels[i]
        if label == ignore:
            loss[i] = 0
            continue
        top = _largest(x, i)
        total = _sum_exp(x, i, top)
        value = np.log(total) - (1 - smoothing) * (x[i, label] - top)
        if smoothing != 0:
            value -= smoothing / x.shape[1] * _sum_less(x, i, top)
        loss[i] = value


@jit.loops("loss", "d", fastmath=_FAST)
def _cross_entropy_and_gradient(loss: Any, d: Any, x: Any, labels: Any, smoothing: Any, ignore: Any) -> None:
    for i in range(x.shape[0]):
        label = labels[i]
        if label == ignore:
            loss[i] = 0
            d[i] = 0
            continue
        top = _largest(x, i)
        total = _put_exp(d, x, i, top)
        value = np.log(total) - (1 - smoothing) * (x[i, label] - top)
        if smoothing != 0:
            value -= smoothing / x.shape[1] * _sum_less(x, i, top)
        loss[i] = value
        part, share = x.dtype.type(1 / total), x.dtype.type(smoothing / x.shape[1])
        for j in range(x.shape[1]):
            d[i, j] = d[i, j] * part - share
        d[i, label] -= 1 - smoothing


@jit.loops("loss", fastmath=_FAST)
def _soft_cross_entropy(loss: Any, x: Any, t: Any) -> None:
    for i in range(x.shape[0]):
        top = _largest(x, i)
        total = _sum_exp(x, i, top)
        weight, value = _weighted(x, t, i, top)
        loss[i] = weight * np.log(total) - value


@jit.loops("loss", "d", fastmath=_FAST)
def _soft_cross_entropy_and_gradient(loss: Any, d: Any, x: Any, t: Any) -> None:
    for i in range(x.shape[0]):
        top = _largest(x, i)
        total = _put_exp(d, x, i, top)
        weight, value = _weighted(x, t, i, top)
        loss[i] = weight * np.log(total) - value
        part = x.dtype.type(weight / total)
        for j in range(x.shape[1]):
            d[i, j] = d[i, j] * part - t[i, j]


# NumPy, in place


def _shifted_exp(out: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Write exp(x - top) into out; return top and the sums."""
    top = np.max(x, axis=-1, keepdims=True, initial=-np.inf)
    np.subtract(x, top, out=out)
    np.exp(out, out=out)
    return top, np.sum(out, axis=-1, keepdims=True)


def _softmax_numpy(out: Any, x: Any) -> None:
    _, total = _shifted_exp(out, x)
    out *= 1 / total


def _softmax_vjp_numpy(out: Any, g: Any, y: Any) -> None:
    np.subtract(g, dots(g, y)[:, None], out=out)
    out *= y


def _log_softmax_numpy(out: Any, x: Any) -> None:
    top, total = _shifted_exp(out, x)
    np.subtract(x, top, out=out)
    out -= np.log(total)


def _log_softmax_vjp_numpy(out: Any, g: Any, y: Any) -> None:
    np.exp(y, out=out)
    out *= np.sum(g, axis=-1, keepdims=True)
    np.subtract(g, out, out=out)


def _logsumexp_numpy(out: Any, x: Any) -> None:
    top = np.max(x, axis=-1, initial=-np.inf)
    e = x - np.where(np.isinf(top), 0, top)[:, None]
    np.exp(e, out=e)
    with np.errstate(divide="ignore"):
        np.log(np.sum(e, axis=-1), out=out)
    out += np.where(np.isinf(top), 0, top)


def _scaled_exp_numpy(out: Any, g: Any, x: Any, y: Any) -> None:
    np.subtract(x, np.where(y == -np.inf, 0, y)[:, None], out=out)
    np.exp(out, out=out)
    out *= g[:, None]


def _exp_sums_numpy(sums: Any, chosen: Any, totals: Any, x: Any, top: Any, labels: Any) -> None:
    sums[...] = np.sum(np.exp(x - np.where(top == -np.inf, 0, top)[:, None]), axis=-1)
    chosen[...] = 0
    inside = np.flatnonzero((labels >= 0) & (labels < x.shape[1]))
    chosen[inside] = x[inside, labels[inside]]
    np.sum(x, axis=-1, out=totals)


def _cross_entropy_numpy(loss: Any, *rest: Any) -> None:
    *d, x, labels, smoothing, ignore = rest
    e = d[0] if d else np.empty_like(x)
    top, total = _shifted_exp(e, x)
    ignored, rows = labels == ignore, np.arange(len(x))
    labels = np.where(ignored, 0, labels)
    loss[...] = np.log(total[:, 0])
    loss -= (1 - smoothing) * (x[rows, labels] - top[:, 0])
    if smoothing:
        loss -= smoothing * np.mean(x - top, axis=-1)
    loss[ignored] = 0
    if d:
        e /= total
        if smoothing:
            e -= smoothing / x.shape[1]
        e[rows, labels] -= 1 - smoothing
        e[ignored] = 0


def _soft_cross_entropy_numpy(loss: Any, *rest: Any) -> None:
    *d, x, t = rest
    e = d[0] if d else np.empty_like(x)
    top, total = _shifted_exp(e, x)
    weight = np.sum(t, axis=-1)
    np.multiply(np.log(total[:, 0]), weight, out=loss)
    loss -= np.sum(np.multiply(t, x - top, where=t != 0, out=np.zeros_like(x)), axis=-1)
    if d:
        e *= weight[:, None] / total
        e -= t
