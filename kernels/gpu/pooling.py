"""Pooling: a thread for each output, or for each entry of a cotangent."""

from __future__ import annotations

import math
from typing import Any

import cupy as cp
import numpy as np

from spmd.kernels.gpu.source import COMPLEX, FLOATING, Kernel, over, row_grid
from spmd.kernels.windows import Window, windows

Ints = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]

_INDEX = ("int32", "int64")
_max_pool = Kernel("pooling", "max_pool", over(FLOATING, _INDEX))
_gather = Kernel("pooling", "max_pool_gather", over(FLOATING, _INDEX))
_max_pool_vjp = Kernel("pooling", "max_pool_vjp", over(FLOATING, _INDEX))
_avg_pool = Kernel("pooling", "avg_pool", over((*FLOATING, *COMPLEX)))
_avg_pool_vjp = Kernel("pooling", "avg_pool_vjp", over((*FLOATING, *COMPLEX)))


def max_pool(
    x: Any, window: Ints, stride: Ints, padding: Pairs, dilation: Ints, ceil_mode: bool = False
) -> tuple[Any, Any]:
    """The largest entry of every window, and its index among the spatial entries of x."""
    geometry = windows(x.shape[2:], window, stride, padding, dilation, ceil_mode)
    shape = (*x.shape[:2], *(w.m for w in geometry))
    top = cp.empty(shape, x.dtype)
    index = cp.empty(shape, np.int32 if math.prod(x.shape[2:]) < 1 << 31 else np.int64)
    if top.size:
        x = cp.ascontiguousarray(x)
        _over_rows(_max_pool, shape, (top, index, x), _table(geometry), index.dtype)
    return top, index


def max_pool_gather(x: Any, index: Any) -> Any:
    """The entries of x at index, as max_pool gives it; 0 where it is -1."""
    out = cp.empty(index.shape, x.dtype)
    if out.size:
        arrays = (out, cp.ascontiguousarray(x), cp.ascontiguousarray(index))
        planes, m, n = (math.prod(s) for s in (x.shape[:2], index.shape[2:], x.shape[2:]))
        grid, block = row_grid(planes, m, 1 << 10)
        _gather(x.dtype, index.dtype, grid=grid, block=block, args=(*arrays, planes, m, n))
    return out


def max_pool_vjp(g: Any, index: Any, shape: Ints, window: Ints, stride: Ints, padding: Pairs, dilation: Ints) -> Any:
    """The cotangent of x, given that of max_pool(x): g is added to the largest entries."""
    out = cp.empty((*g.shape[:2], *shape), g.dtype)
    if out.size:
        geometry = windows(shape, window, stride, padding, dilation)
        geometry = [w._replace(m=m) for w, m in zip(geometry, g.shape[2:], strict=True)]  # ceil mode has more outputs
        arrays = (out, cp.ascontiguousarray(g), cp.ascontiguousarray(index))
        _over_rows(_max_pool_vjp, out.shape, arrays, _table(geometry), index.dtype)
    return out


def avg_pool(
    x: Any,
    window: Ints,
    stride: Ints,
    padding: Pairs,
    dilation: Ints,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Any:
    """The mean of every window."""
    geometry = windows(x.shape[2:], window, stride, padding, dilation, ceil_mode)
    out = cp.empty((*x.shape[:2], *(w.m for w in geometry)), x.dtype)
    if out.size:
        _over_rows(_avg_pool, out.shape, (out, cp.ascontiguousarray(x)), _table(geometry, count_include_pad))
    return out


def avg_pool_vjp(
    g: Any,
    shape: Ints,
    window: Ints,
    stride: Ints,
    padding: Pairs,
    dilation: Ints,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Any:
    """The cotangent of x, given that of avg_pool(x): each entry of g is spread evenly over its window."""
    out = cp.empty((*g.shape[:2], *shape), g.dtype)
    if out.size:
        geometry = windows(shape, window, stride, padding, dilation, ceil_mode)
        _over_rows(_avg_pool_vjp, out.shape, (out, cp.ascontiguousarray(g)), _table(geometry, count_include_pad))
    return out


def _table(geometry: list[Window], count_include_pad: bool = False) -> list[int]:
    """The parameters of each of three dimensions, as the sources have them."""
    parameters = []
    for w in [Window.of(1, 1)] * (3 - len(geometry)) + geometry:
        counts = (-w.low, w.padded) if count_include_pad else (0, w.n)
        parameters += [w.n, w.m, w.kernel, w.stride, w.dilation, w.low, *counts]
    return parameters


def _over_rows(kernel: Kernel, shape: tuple[int, ...], arrays: tuple, table: list[int], *dtypes: Any) -> None:
    """Launch a kernel that computes an array of this shape, (N, C, *spatial)."""
    grid, block = row_grid(math.prod(shape[:-1]), shape[-1], 1 << 10)
    kernel(arrays[0].dtype, *dtypes, grid=grid, block=block, args=(*arrays, math.prod(shape[:2]), *table))
