"""Softmax and kin along the last axis: a block of threads for each row."""

from __future__ import annotations

from typing import Any

import cupy as cp

from spmd.kernels.gpu.source import FLOATING, Kernel, over

__all__ = ["log_softmax", "log_softmax_vjp", "softmax", "softmax_vjp"]

_softmax, _softmax_vjp, _log_softmax, _log_softmax_vjp = (
    Kernel("softmaxes", name, over(FLOATING)) for name in ("softmax", "softmax_vjp", "log_softmax", "log_softmax_vjp")
)


def softmax(x: Any) -> Any:
    """exp(x) / sum(exp(x)) along the last axis."""
    return _by_row(_softmax, x)


def softmax_vjp(g: Any, y: Any) -> Any:
    """The cotangent of x, given that of y = softmax(x)."""
    return _by_row(_softmax_vjp, g, y)


def log_softmax(x: Any) -> Any:
    """x - log(sum(exp(x))) along the last axis."""
    return _by_row(_log_softmax, x)


def log_softmax_vjp(g: Any, y: Any) -> Any:
    """The cotangent of x, given that of y = log_softmax(x)."""
    return _by_row(_log_softmax_vjp, g, y)


def _by_row(kernel: Kernel, *arrays: Any) -> Any:
    arrays = tuple(cp.ascontiguousarray(a) for a in arrays)
    x = arrays[0]
    out = cp.empty_like(x)
    if x.size:
        n = x.shape[-1]
        rows = x.size // n
        threads = min(1024, max(32, -(-n // 128) * 32))
        kernel(x.dtype, grid=min(rows, 1 << 20), block=threads, args=(out, *arrays, rows, n))
    return out
