"""Normalisation: a block of threads for each row, or for some channels. Sums over many rows have parts, which are added
in a fixed order."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np

from spmd.kernels.gpu.source import FLOATING, Kernel, over, row_threads

_moments, _affine, _sums, _normalize, _normalize_vjp, _weights_vjp = (
    Kernel("normalisation", name, over(FLOATING))
    for name in ("moments", "channel_affine", "channel_sums", "normalize", "normalize_vjp", "weights_vjp")
)

_THREADS = 256


def _wide(dtype: Any) -> np.dtype:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _plan(channels: int, places: int, inner: int) -> tuple[int, tuple[int, int], int]:
    """The channels of a block; the grid, of blocks over channels and over parts of the places; the number of parts."""
    lanes = 32 if inner == 1 else 1
    parts = max(1, min(64, places // (16 * _THREADS // lanes)))
    return lanes, (min(-(-channels // lanes), 1 << 20), parts), parts


def moments(x: Any) -> Any:
    """The mean and the sum of squared distances from it, of every channel."""
    outer, channels, inner = x.shape
    if not x.size:
        return cp.zeros((2, channels), _wide(x.dtype))
    lanes, grid, parts = _plan(channels, outer * inner, inner)
    parts_of_sums = cp.empty((3, parts, channels), _wide(x.dtype))
    args = (parts_of_sums, cp.ascontiguousarray(x), outer, channels, inner, lanes)
    _moments(x.dtype, grid=grid, block=_THREADS, args=args)
    parts_of_sums = parts_of_sums.astype(np.float64)
    count, mean, square = parts_of_sums[0], parts_of_sums[1], parts_of_sums[2]
    overall_mean = cp.sum(count * mean, axis=0) / (outer * inner)
    squares = cp.sum(square + count * (mean - overall_mean) ** 2, axis=0)
    return cp.stack([overall_mean, squares]).astype(_wide(x.dtype))


def channel_affine(x: Any, mean: Any, scale: Any, shift: Any) -> Any:
    """(x - mean) * scale + shift."""
    out = cp.empty(x.shape, x.dtype)
    if x.size:
        _, channels, inner = x.shape
        numbers = [cp.ascontiguousarray(a.astype(_wide(x.dtype), copy=False)) for a in (mean, scale, shift)]
        blocks = max(1, min(-(-x.size // _THREADS), 1 << 16))
        args = (out, cp.ascontiguousarray(x), *numbers, x.size, channels, inner)
        _affine(x.dtype, grid=blocks, block=_THREADS, args=args)
    return out


def channel_sums(g: Any, x: Any, mean: Any) -> Any:
    """sum(g) and sum(g * (x - mean)) of every channel."""
    outer, channels, inner = x.shape
    if not x.size:
        return cp.zeros((2, channels), _wide(x.dtype))
    lanes, grid, parts = _plan(channels, outer * inner, inner)
    parts_of_sums = cp.empty((2, parts, channels), _wide(x.dtype))
    wide_mean = cp.ascontiguousarray(mean.astype(parts_of_sums.dtype, copy=False))
    args = (parts_of_sums, *map(cp.ascontiguousarray, (g, x)), wide_mean, outer, channels, inner, lanes)
    _sums(x.dtype, grid=grid, block=_THREADS, args=args)
    return cp.sum(parts_of_sums, axis=1)


def normalize(x: Any, weight: Any, bias: Any, eps: float, centred: bool) -> Any:
    """(x - mean) * rstd * weight + bias of every row; mean and rstd."""
    out, wide = cp.empty(x.shape, x.dtype), _wide(x.dtype)
    mean, rstd = cp.empty(x.shape[:-1], wide), cp.empty(x.shape[:-1], wide)
    if x.size:
        n = x.shape[-1]
        arrays = (cp.ascontiguousarray(x), *(_or_null(a, wide) for a in (weight, bias)))
        args = (out, mean, rstd, *arrays, np.float64(eps), int(centred), x.size // n, n)
        _normalize(x.dtype, grid=min(x.size // n, 1 << 20), block=row_threads(n), args=args)
    return out, mean, rstd


def normalize_vjp(g: Any, x: Any, weight: Any, mean: Any, rstd: Any, centred: bool) -> Any:
    """The cotangents of x, weight and bias."""
    out, n, wide = cp.empty(x.shape, x.dtype), x.shape[-1], _wide(x.dtype)
    if not x.size:
        return out, cp.zeros(n, wide), cp.zeros(n, wide)
    rows = x.size // n
    g, x = map(cp.ascontiguousarray, (g, x))
    mean, rstd = (_or_null(a, wide) for a in (mean, rstd))
    args = (out, g, x, _or_null(weight, wide), mean, rstd, int(centred), rows, n)
    _normalize_vjp(x.dtype, grid=min(rows, 1 << 20), block=row_threads(n), args=args)
    _, grid, parts = _plan(n, rows, 1)
    parts_of_sums = cp.empty((2, parts, n), wide)
    _weights_vjp(x.dtype, grid=grid, block=_THREADS, args=(parts_of_sums, g, x, mean, rstd, rows, n))
    total = cp.sum(parts_of_sums, axis=1)
    return out, total[0], total[1]


def _or_null(a: Any, dtype: np.dtype) -> Any:
    return 0 if a is None else cp.ascontiguousarray(a.astype(dtype, copy=False))
