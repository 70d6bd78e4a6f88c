"""Interpolation along an axis by given taps, and at arbitrary points."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import cupy as cp
import numpy as np

from spmd.kernels.gpu.source import FLOATING, REAL, Kernel, over, row_grid, uploaded
from spmd.kernels.taps import BOUNDARIES, nearest_shift, polynomials

Ints = tuple[int, ...]

_resample = Kernel("interpolation", "resample", over(FLOATING))
_sample = Kernel("interpolation", "sample", over(FLOATING, REAL))
_inject_taps = Kernel("interpolation", "inject_taps", over(REAL))
_inject = Kernel("interpolation", "inject", over(FLOATING))


def resample(x: Any, index: Any, weight: Any, axis: int) -> Any:
    """Along an axis, output o is the sum of weight[o, k] * x[index[o, k]]."""
    out = cp.empty((*x.shape[:axis], len(index), *x.shape[axis + 1 :]), x.dtype)
    if not out.size:
        return out
    if not x.size or not index.shape[1]:
        out.fill(0)
        return out
    x, into = cp.ascontiguousarray(x), out
    dtype, inner = x.dtype, math.prod(x.shape[axis + 1 :])
    if x.dtype.kind == "c":  # as pairs of real numbers
        dtype, inner = np.dtype(np.float32 if x.dtype.char == "F" else np.float64), 2 * inner
        x, into = x.view(dtype), out.view(dtype)
    weight = cp.ascontiguousarray(weight).astype(np.float64 if dtype == np.float64 else np.float32, copy=False)
    index = cp.ascontiguousarray(index).astype(np.int32, copy=False)
    outer, m, taps = math.prod(out.shape[:axis]), *index.shape
    grid, block = row_grid(outer, m * inner, 1 << 15)
    args = (into, x, index, weight, outer, x.shape[axis] if inner else 0, m, inner, taps)
    _resample(dtype, grid=grid, block=block, args=args)
    return out


def sample(x: Any, points: Any, method: str, boundary: str, orders: Ints, cubic: float = -0.5) -> Any:
    """x: (C, *spatial) at points: (m, spatial dimensions)."""
    if x.dtype.kind == "c":
        real, imag = (sample(part, points, method, boundary, orders, cubic) for part in (x.real, x.imag))
        return _complex(real, imag, x.dtype)
    out = cp.zeros((x.shape[0], points.shape[0]), x.dtype)
    if out.size and x.size:
        x, points = cp.ascontiguousarray(x), cp.ascontiguousarray(points)
        grid, block = row_grid(x.shape[0], points.shape[0], 1 << 15)
        args = (out, x, points, _table(method, orders, cubic), *out.shape, *_parameters(x.shape[1:], method, boundary))
        _sample(x.dtype, points.dtype, grid=grid, block=block, args=args)
    return out


def inject(g: Any, points: Any, shape: Ints, method: str, boundary: str, orders: Ints, cubic: float = -0.5) -> Any:
    """A field (C, *shape) with the values g: (C, m) spread over the entries from which sample would read."""
    if g.dtype.kind == "c":
        real, imag = (inject(part, points, shape, method, boundary, orders, cubic) for part in (g.real, g.imag))
        return _complex(real, imag, g.dtype)
    out = cp.zeros((g.shape[0], *shape), g.dtype)
    if out.size and g.size:
        g, points = cp.ascontiguousarray(g), cp.ascontiguousarray(points)
        channels, m = g.shape
        parameters = _parameters(shape, method, boundary)
        taps = parameters[1] ** parameters[0]
        place, weight = cp.empty(m * taps, np.int64), cp.empty(m * taps, np.float64)
        grid, block = row_grid(1, m, 1 << 15)
        args = (place, weight, points, _table(method, orders, cubic), m, *parameters)
        _inject_taps(points.dtype, grid=grid, block=block, args=args)
        order = cp.argsort(place, kind="stable")
        grid, block = row_grid(channels, m * taps, 1 << 15)
        args = (out, g, place, weight, order, channels, m, taps, math.prod(shape))
        _inject(g.dtype, grid=grid, block=block, args=args)
    return out


def _complex(real: Any, imag: Any, dtype: Any) -> Any:
    out = cp.empty(real.shape, dtype)
    out.real[...] = real
    out.imag[...] = imag
    return out


def _parameters(shape: Ints, method: str, boundary: str) -> tuple:
    """Parameters of the sources: dims, taps, shift, boundary, and three lengths."""
    taps = len(polynomials(method))
    lengths = (*(1,) * (3 - len(shape)), *shape)
    return (len(shape), taps, nearest_shift(method), BOUNDARIES.index(boundary), *lengths)


def _table(method: str, orders: Ints, cubic: float) -> Any:
    return uploaded(_polynomials(method, orders, cubic))


@cache
def _polynomials(method: str, orders: Ints, cubic: float) -> np.ndarray:
    return np.array([polynomials(method, cubic, order) for order in orders])
