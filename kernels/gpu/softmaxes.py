"""Softmax and related functions along the last axis: a block of threads for each row."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np

from spmd.kernels.gpu.source import FLOATING, Kernel, over, row_threads

_NAMES = (
    *("softmax", "softmax_vjp", "log_softmax", "log_softmax_vjp", "logsumexp", "scaled_exp", "exp_sums"),
    *("cross_entropy", "soft_cross_entropy"),
)
_KERNELS = {name: Kernel("softmaxes", name, over(FLOATING)) for name in _NAMES}


def softmax(x: Any) -> Any:
    """exp(x) / sum(exp(x)) along the last axis."""
    return _by_row("softmax", x)


def softmax_vjp(g: Any, y: Any) -> Any:
    """The cotangent of x, given that of y = softmax(x)."""
    return _by_row("softmax_vjp", g, y)


def log_softmax(x: Any) -> Any:
    """x - log(sum(exp(x))) along the last axis."""
    return _by_row("log_softmax", x)


def log_softmax_vjp(g: Any, y: Any) -> Any:
    """The cotangent of x, given that of y = log_softmax(x)."""
    return _by_row("log_softmax_vjp", g, y)


def logsumexp(x: Any) -> Any:
    """log(sum(exp(x))) along the last axis."""
    out = cp.empty(x.shape[:-1], x.dtype)
    _launch("logsumexp", x, out, cp.ascontiguousarray(x))
    return out if x.shape[-1] else cp.full_like(out, -cp.inf)


def scaled_exp(g: Any, x: Any, y: Any) -> Any:
    """g * exp(x - y), where g and y have a number for each row."""
    out = cp.empty(x.shape, x.dtype)
    _launch("scaled_exp", x, out, *map(cp.ascontiguousarray, (g, x, y)))
    return out


def exp_sums(x: Any, top: Any, labels: Any) -> Any:
    """sum(exp(x - top)), x[label] and sum(x) of each row, along a new first axis."""
    out = cp.zeros((3, *x.shape[:-1]), x.dtype)
    _launch("exp_sums", x, out, *map(cp.ascontiguousarray, (x, top)), _classes(labels))
    return out


def cross_entropy(x: Any, labels: Any, smoothing: float = 0.0, ignore: int | None = None) -> Any:
    """The cross-entropy of softmax(x) against classes."""
    return _class_loss(x, labels, smoothing, ignore, None)


def cross_entropy_and_gradient(x: Any, labels: Any, smoothing: float = 0.0, ignore: int | None = None) -> Any:
    """`cross_entropy`, and its derivative with respect to x, in one pass."""
    d = cp.empty(x.shape, x.dtype)
    return _class_loss(x, labels, smoothing, ignore, d), d


def soft_cross_entropy(x: Any, t: Any) -> Any:
    """The cross-entropy of softmax(x) against distributions."""
    return _soft_loss(x, t, None)


def soft_cross_entropy_and_gradient(x: Any, t: Any) -> Any:
    """`soft_cross_entropy`, and its derivative with respect to x, in one pass."""
    d = cp.empty(x.shape, x.dtype)
    return _soft_loss(x, t, d), d


def _class_loss(x: Any, labels: Any, smoothing: float, ignore: int | None, d: Any) -> Any:
    loss = cp.empty(x.shape[:-1], x.dtype)
    options = np.float64(smoothing), -(2**63) if ignore is None else ignore
    _launch("cross_entropy", x, loss, _or_null(d), cp.ascontiguousarray(x), _classes(labels), *options)
    return loss


def _soft_loss(x: Any, t: Any, d: Any) -> Any:
    loss = cp.empty(x.shape[:-1], x.dtype)
    _launch("soft_cross_entropy", x, loss, _or_null(d), *map(cp.ascontiguousarray, (x, t)))
    return loss


def _or_null(d: Any) -> Any:
    return 0 if d is None else d


def _classes(labels: Any) -> Any:
    return cp.ascontiguousarray(labels.astype(np.int64, copy=False))


def _by_row(name: str, *arrays: Any) -> Any:
    out = cp.empty(arrays[0].shape, arrays[0].dtype)
    _launch(name, arrays[0], out, *map(cp.ascontiguousarray, arrays))
    return out


def _launch(name: str, x: Any, *args: Any) -> None:
    """A block of threads for each row of x."""
    if x.size:
        n = x.shape[-1]
        rows = x.size // n
        _KERNELS[name](x.dtype, grid=min(rows, 1 << 20), block=row_threads(n), args=(*args, rows, n))
