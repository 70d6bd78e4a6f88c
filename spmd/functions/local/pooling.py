"""Pooling, on one block of NumPy or CuPy: (N, C, *spatial).

A window is (window, stride, padding, dilation) here, each with an entry for each spatial dimension; padding is of pairs
(low, high).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff.registry import primitive
from spmd.functions.local import namespace
from spmd.kernels.windows import windows

__all__ = ["avg_pool", "max_pool"]

Parameters = tuple[Any, Any, Any, Any]


def _gather_vjp(g, _ans, _x, index, *, window) -> Any:
    return _max_pool_vjp(g, index, shape=_x.shape[2:], window=window)


@primitive("max_pool_gather", _gather_vjp)
def _max_pool_gather(x, index, *, window) -> Any:
    return kernels.of(x).max_pool_gather(x, index)


@primitive("max_pool_vjp", lambda h, _ans, _g, index, *, shape, window: _max_pool_gather(h, index, window=window))
def _max_pool_vjp(g, index, *, shape, window) -> Any:
    return kernels.of(g).max_pool_vjp(g, index, shape, *window)


@primitive(
    "max_pool",
    lambda g, ans, _x, *, window, ceil_mode: _max_pool_vjp(g[0], ans[1], shape=_x.shape[2:], window=window),
)
def _max_pool(x, *, window, ceil_mode):
    return kernels.of(x).max_pool(x, *window, ceil_mode)


def max_pool(x: Any, window: Parameters, ceil_mode: bool, indices: bool = True) -> tuple[Any, Any]:
    """The largest entry of every window, and its index among the spatial entries of x; -1 for padding alone."""
    return _max_pool(x, window=window, ceil_mode=ceil_mode)


def _avg_pool_transpose(h, _ans, _g, *, shape, options) -> Any:
    return _avg_pool(h, options=options)


@primitive("avg_pool_vjp", _avg_pool_transpose)
def _avg_pool_vjp(g, *, shape, options) -> Any:
    return kernels.of(g).avg_pool_vjp(g, shape, *options)


@primitive("avg_pool", lambda g, _ans, _x, *, options: _avg_pool_vjp(g, shape=_x.shape[2:], options=options))
def _avg_pool(x, *, options) -> Any:
    return kernels.of(x).avg_pool(x, *options)


def avg_pool(x: Any, window: Parameters, ceil_mode: bool, count_include_pad: bool, divisor: int | None) -> Any:
    """The mean of every window; with a divisor, the sum of its entries over that."""
    y = _avg_pool(x, options=(*window, ceil_mode, count_include_pad))
    if divisor is None:
        return y
    counts = np.ones(())
    for w in windows(x.shape[2:], *window, ceil_mode):
        counts = counts[..., None] * w.counts(count_include_pad)
    return y * namespace(y).asarray(counts / divisor, dtype=y.dtype)
