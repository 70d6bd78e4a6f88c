"""Normalisation: a row, or some rows of all channels, is read from memory once and stays in the cache.

Long sums are sums of short ones, the outer ones in float64. Statistics are float32 where x has a short dtype: sums over
many entries exceed its range. Means and squares of pieces are merged as in T. F. Chan, G. H. Golub, R. J. LeVeque,
"Updating formulae and a pairwise algorithm", 1979.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from spmd.kernels import jit
from spmd.kernels.cpu.chunks import CACHE, STRETCH, accurate, dots, into_rows
from spmd.kernels.memory import pool
from spmd.kernels.reference import normalisation as reference

_FAST = ("contract", "reassoc", "nsz")


def moments(x: np.ndarray) -> np.ndarray:
    """The mean and the sum of squared distances from it, of every channel."""
    _, channels, inner = x.shape
    total = np.zeros((2, channels))
    if jit.fits(x) and x.dtype.char in "fd" and x.size:
        x = np.ascontiguousarray(x)
        if inner == 1:
            _moments_of_columns(total, x[:, :, 0])
        else:
            _moments_of_rows(total, x)
        return total.astype(accurate(x.dtype))
    counts = np.zeros(channels)
    for part, piece in _pieces(x) if x.size else ():
        base = piece[:1, :, :1]  # nearer to the mean than zero
        n, (mean, square) = piece.shape[0] * piece.shape[2], reference.moments(piece - base)
        count = counts[part]
        delta = base[0, :, 0].astype(float) + mean - total[0, part]
        total[0, part] += delta * (n / (count + n))
        total[1, part] += square + delta * delta * (count * n / (count + n))
        counts[part] += n
    return total.astype(accurate(x.dtype))


def channel_affine(x: np.ndarray, mean: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """(x - mean) * scale + shift."""
    out = pool.empty_like(x)
    parameters = [np.ascontiguousarray(a, accurate(x.dtype)) for a in (mean, scale, shift)]
    if jit.fits(x) and x.dtype.char in "fd" and x.size:
        x = np.ascontiguousarray(x)
        if x.shape[2] == 1:
            _affine_of_columns(out[:, :, 0], x[:, :, 0], *parameters)
        else:
            _affine_of_rows(out, x, *parameters)
        return out
    for (part, piece), (_, target) in zip(_pieces(x), _pieces(out, writing=True), strict=True):
        m, a, b = (v[part, None] for v in parameters)
        y = piece - m
        y *= a
        np.add(y, b, out=target, casting="unsafe")
    return out


def channel_sums(g: np.ndarray, x: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """sum(g) and sum(g * (x - mean)) of every channel."""
    total = np.zeros((2, x.shape[1]))
    mean = np.ascontiguousarray(mean, accurate(x.dtype))
    if jit.fits(g, x) and x.dtype.char in "fd" and x.size:
        g, x = np.ascontiguousarray(g), np.ascontiguousarray(x)
        if x.shape[2] == 1:
            _sums_of_columns(total, g[:, :, 0], x[:, :, 0], mean)
        else:
            _sums_of_rows(total, g, x, mean)
    else:
        for (part, a), (_, b) in zip(_pieces(g), _pieces(x), strict=True):
            total[:, part] += reference.channel_sums(a, b, mean[part])
    return total.astype(accurate(x.dtype))


def _pieces(x: np.ndarray, writing: bool = False) -> Iterator[tuple[slice, np.ndarray]]:
    """Slices of channels, and the entries of x there, in pieces that fit into the cache; short dtypes are widened."""
    outer, channels, inner = x.shape
    wide = x.dtype if writing else accurate(x.dtype)
    capacity = CACHE // accurate(x.dtype).itemsize
    if channels * inner <= capacity:
        step = max(1, capacity // max(1, channels * inner))
        for i in range(0, outer, step):
            yield slice(0, channels), x[i : i + step].astype(wide, copy=False)
        return
    step = max(1, capacity // max(1, inner))
    for i in range(outer):
        for j in range(0, channels, step):
            yield slice(j, j + step), x[i : i + 1, j : j + step].astype(wide, copy=False)


def normalize(
    x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, eps: float, centred: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x - mean) * rstd * weight + bias of every row; mean and rstd."""
    out, wide, n = pool.empty_like(x), accurate(x.dtype), x.shape[-1]
    mean, rstd = np.zeros(x.shape[:-1], wide), np.zeros(x.shape[:-1], wide)
    if not x.size:
        return out, mean, rstd
    wide_weight = np.ones(n, wide) if weight is None else np.ascontiguousarray(weight, wide)
    wide_bias = np.zeros(n, wide) if bias is None else np.ascontiguousarray(bias, wide)
    compiled, rows = _compiled(x), math.prod(x.shape[:-1])

    def normalize_rows(o, m, r, x):
        if compiled:
            _normalize(o, m, r, x, wide_weight, wide_bias, wide.type(eps), centred)
        else:
            _normalize_numpy(o, m, r, x, wide_weight, wide_bias, eps, centred)

    flat_x = np.ascontiguousarray(x).reshape(rows, n)
    into_rows(normalize_rows, (out.reshape(rows, n), mean.reshape(-1), rstd.reshape(-1)), flat_x, whole=compiled)
    return out, mean, rstd


def normalize_vjp(
    g: np.ndarray, x: np.ndarray, weight: np.ndarray | None, mean: np.ndarray, rstd: np.ndarray, centred: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The cotangents of x, weight and bias."""
    out, wide, n = pool.empty_like(x), accurate(x.dtype), x.shape[-1]
    wide_weight = np.ones(n, wide) if weight is None else np.ascontiguousarray(weight, wide)
    compiled, rows = _compiled(g, x), math.prod(x.shape[:-1])
    total = np.zeros((2, n))
    if not x.size:
        return out, total[0].astype(wide), total[1].astype(wide)

    def vjp_of_rows(o, g, x, m, r):
        if compiled:
            _normalize_vjp(o, total, g, x, wide_weight, m, r, centred)
        else:
            _normalize_vjp_numpy(o, total, g, x, wide_weight, m, r, centred)

    arrays = [np.ascontiguousarray(a).reshape(rows, n) for a in (g, x)]
    statistics = [np.ascontiguousarray(a, wide).reshape(-1) for a in (mean, rstd)]
    into_rows(vjp_of_rows, (out.reshape(rows, n),), *arrays, *statistics, whole=compiled)
    return out, total[0].astype(wide), total[1].astype(wide)


def _compiled(*arrays: np.ndarray) -> bool:
    native = all(a.dtype.isnative and accurate(a.dtype).char in "fd" for a in arrays)
    return jit.available() and native and arrays[0].size > 0


# NumPy, in place


def _normalize_numpy(out: Any, mean: Any, rstd: Any, x: Any, weight: Any, bias: Any, eps: float, centred: bool) -> None:
    mean[...] = np.mean(x, axis=-1) if centred else 0
    np.subtract(x, mean[:, None], out=out)
    rstd[...] = 1 / np.sqrt(dots(out, out) / x.shape[-1] + eps)
    out *= rstd[:, None]
    out *= weight
    out += bias


def _normalize_vjp_numpy(
    out: Any, total: Any, g: Any, x: Any, weight: Any, mean: Any, rstd: Any, centred: bool
) -> None:
    z = x - mean[:, None]
    z *= rstd[:, None]
    np.multiply(g, weight, out=out)
    first = np.mean(out, axis=-1, keepdims=True) if centred else 0
    second = dots(out, z)[:, None] / x.shape[-1]
    total[0] += np.einsum("ij,ij->j", g, z)
    total[1] += np.sum(g, axis=0)
    z *= second
    out -= z
    out -= first
    out *= rstd[:, None]


# Loops


@jit.loops("out", "mean", "rstd", fastmath=_FAST)
def _normalize(out: Any, mean: Any, rstd: Any, x: Any, weight: Any, bias: Any, eps: Any, centred: bool) -> None:
    n = x.shape[1]
    for i in range(x.shape[0]):
        o, row = out[i], x[i]
        m, total = x.dtype.type(0), 0.0
        if centred:
            for start in range(0, n, STRETCH):
                partial, base, piece = x.dtype.type(0), row[0], row[start : start + STRETCH]
                for j in range(len(piece)):
                    partial += piece[j] - base
                total += partial
            m = row[0] + x.dtype.type(total / n)
        total = 0.0
        for start in range(0, n, STRETCH):
            partial, piece = x.dtype.type(0), row[start : start + STRETCH]
            for j in range(len(piece)):
                partial += (piece[j] - m) * (piece[j] - m)
            total += partial
        r = 1 / np.sqrt(x.dtype.type(total / n) + eps)
        mean[i], rstd[i] = m, r
        for j in range(len(row)):
            o[j] = (row[j] - m) * r * weight[j] + bias[j]


@jit.loops("out", "total", fastmath=_FAST)
def _normalize_vjp(out: Any, total: Any, g: Any, x: Any, weight: Any, mean: Any, rstd: Any, centred: bool) -> None:
    n = x.shape[1]
    dw, db = np.empty(x.shape[1], x.dtype), np.empty(x.shape[1], x.dtype)
    for start in range(0, x.shape[0], 64):
        dw[:] = 0
        db[:] = 0
        for i in range(start, min(start + 64, x.shape[0])):
            o, y, h = out[i], x[i], g[i]
            m, r = mean[i], rstd[i]
            sum_u, sum_uz = 0.0, 0.0
            for k in range(0, n, STRETCH):
                first, second = x.dtype.type(0), x.dtype.type(0)
                ys, hs, ws = y[k : k + STRETCH], h[k : k + STRETCH], weight[k : k + STRETCH]
                for j in range(len(ys)):
                    u = hs[j] * ws[j]
                    first += u
                    second += u * ((ys[j] - m) * r)
                sum_u += first
                sum_uz += second
            first, second = x.dtype.type(sum_u / n if centred else 0.0), x.dtype.type(sum_uz / n)
            for j in range(len(y)):
                z = (y[j] - m) * r
                o[j] = r * (h[j] * weight[j] - first - z * second)
                dw[j] += h[j] * z
                db[j] += h[j]
        for j in range(x.shape[1]):
            total[0, j] += dw[j]
            total[1, j] += db[j]


@jit.loops("total", fastmath=_FAST)
def _moments_of_rows(total: Any, x: Any) -> None:
    for c in range(x.shape[1]):
        count, mean, square = 0.0, 0.0, 0.0
        for o in range(x.shape[0]):
            for start in range(0, x.shape[2], STRETCH):
                y = x[o, c, start : start + STRETCH]
                base, m = y[0], x.dtype.type(0)  # the base is nearer to the mean than zero
                for j in range(len(y)):
                    m += y[j] - base
                m /= x.dtype.type(len(y))
                s = x.dtype.type(0)
                for j in range(len(y)):
                    s += ((y[j] - base) - m) * ((y[j] - base) - m)
                delta = np.float64(base) + m - mean
                new_count = count + len(y)
                mean += delta * (len(y) / new_count)
                square += s + delta * delta * (count * len(y) / new_count)
                count = new_count
        total[0, c], total[1, c] = mean, square


@jit.loops("total", fastmath=_FAST)
def _moments_of_columns(total: Any, x: Any) -> None:
    n = x.shape[1]
    mean, square = np.empty(n, x.dtype), np.empty(n, x.dtype)
    step = max(8, min(256, 65536 // n))
    for start in range(0, x.shape[0], step):
        stop, base = min(start + step, x.shape[0]), x[start]
        mean[:] = 0
        square[:] = 0
        for i in range(start, stop):
            y = x[i]
            for j in range(n):
                mean[j] += y[j] - base[j]
        part = x.dtype.type(1) / x.dtype.type(stop - start)
        for j in range(n):
            mean[j] *= part
        for i in range(start, stop):
            y = x[i]
            for j in range(n):
                square[j] += ((y[j] - base[j]) - mean[j]) * ((y[j] - base[j]) - mean[j])
        share, weight = (stop - start) / stop, start * ((stop - start) / stop)
        for j in range(n):
            delta = np.float64(base[j]) + mean[j] - total[0, j]
            total[0, j] += delta * share
            total[1, j] += square[j] + delta * delta * weight


@jit.loops("out", fastmath=_FAST)
def _affine_of_rows(out: Any, x: Any, mean: Any, scale: Any, shift: Any) -> None:
    for o in range(x.shape[0]):
        for c in range(x.shape[1]):
            target, y, m, a, b = out[o, c], x[o, c], mean[c], scale[c], shift[c]
            for j in range(len(y)):
                target[j] = (y[j] - m) * a + b


@jit.loops("out", fastmath=_FAST)
def _affine_of_columns(out: Any, x: Any, mean: Any, scale: Any, shift: Any) -> None:
    for i in range(x.shape[0]):
        target, y = out[i], x[i]
        for j in range(len(y)):
            target[j] = (y[j] - mean[j]) * scale[j] + shift[j]


@jit.loops("total", fastmath=_FAST)
def _sums_of_rows(total: Any, g: Any, x: Any, mean: Any) -> None:
    for c in range(x.shape[1]):
        for o in range(x.shape[0]):
            for start in range(0, x.shape[2], STRETCH):
                h, y, m = g[o, c, start : start + STRETCH], x[o, c, start : start + STRETCH], mean[c]
                first, second = x.dtype.type(0), x.dtype.type(0)
                for j in range(len(y)):
                    first += h[j]
                    second += h[j] * (y[j] - m)
                total[0, c] += first
                total[1, c] += second


@jit.loops("total", fastmath=_FAST)
def _sums_of_columns(total: Any, g: Any, x: Any, mean: Any) -> None:
    n = x.shape[1]
    first, second = np.empty(n, x.dtype), np.empty(n, x.dtype)
    for start in range(0, x.shape[0], 64):
        first[:] = 0
        second[:] = 0
        for i in range(start, min(start + 64, x.shape[0])):
            h, y = g[i], x[i]
            for j in range(n):
                first[j] += h[j]
                second[j] += h[j] * (y[j] - mean[j])
        for j in range(n):
            total[0, j] += first[j]
            total[1, j] += second[j]
