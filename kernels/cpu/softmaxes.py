"""Softmax and kin: a row is read from memory once, and stays in the cache until it is done.

Without numba as many rows at a time as fit into the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.kernels import buffers, jit
from spmd.kernels.cpu.chunks import by_rows
from spmd.kernels.cpu.elementary import exp
from spmd.kernels.reference import softmaxes as reference

__all__ = ["log_softmax", "log_softmax_vjp", "softmax", "softmax_vjp"]

_FAST = ("contract", "reassoc", "nsz")


def softmax(x: np.ndarray) -> np.ndarray:
    """exp(x) / sum(exp(x)) along the last axis."""
    return _by_row(_softmax, reference.softmax, x)


def softmax_vjp(g: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The cotangent of x, given that of y = softmax(x)."""
    return _by_row(_softmax_vjp, reference.softmax_vjp, g, y)


def log_softmax(x: np.ndarray) -> np.ndarray:
    """x - log(sum(exp(x))) along the last axis."""
    return _by_row(_log_softmax, reference.log_softmax, x)


def log_softmax_vjp(g: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The cotangent of x, given that of y = log_softmax(x)."""
    return _by_row(_log_softmax_vjp, reference.log_softmax_vjp, g, y)


def _by_row(rows: jit.Loops, plain: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
    x = arrays[0]
    if x.size and x.dtype.char in "fd" and jit.fits(*arrays):
        out = buffers.empty_like(x)
        n = x.shape[-1]
        rows(out.reshape(-1, n), *(np.ascontiguousarray(a).reshape(-1, n) for a in arrays))
        return out
    return by_rows(plain, *arrays)


@jit.loops("out", fastmath=_FAST)
def _softmax(out: Any, x: Any) -> None:
    for i in range(x.shape[0]):
        top = x[i, 0]
        for j in range(x.shape[1]):
            top = max(top, x[i, j])
        total = x[i, 0] * 0
        for j in range(x.shape[1]):
            e = exp(x[i, j] - top)
            out[i, j] = e
            total += e
        for j in range(x.shape[1]):
            out[i, j] /= total


@jit.loops("out", fastmath=_FAST)
def _softmax_vjp(out: Any, g: Any, y: Any) -> None:
    for i in range(y.shape[0]):
        inner = y[i, 0] * 0
        for j in range(y.shape[1]):
            inner += g[i, j] * y[i, j]
        for j in range(y.shape[1]):
            out[i, j] = y[i, j] * (g[i, j] - inner)


@jit.loops("out", fastmath=_FAST)
def _log_softmax(out: Any, x: Any) -> None:
    for i in range(x.shape[0]):
        top = x[i, 0]
        for j in range(x.shape[1]):
            top = max(top, x[i, j])
        total = x[i, 0] * 0
        for j in range(x.shape[1]):
            total += exp(x[i, j] - top)
        log = np.log(total)
        for j in range(x.shape[1]):
            out[i, j] = x[i, j] - top - log


@jit.loops("out", fastmath=_FAST)
def _log_softmax_vjp(out: Any, g: Any, y: Any) -> None:
    for i in range(y.shape[0]):
        total = g[i, 0] * 0
        for j in range(y.shape[1]):
            total += g[i, j]
        for j in range(y.shape[1]):
            out[i, j] = g[i, j] - exp(y[i, j]) * total
