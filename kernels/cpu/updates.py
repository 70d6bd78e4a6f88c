"""Steps of optimisers: every array is read or written once.

Each operation is rounded by itself, so a step has the bits of its formula in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.kernels import buffers, jit
from spmd.kernels.cpu.chunks import CACHE, accurate

__all__ = ["adamw", "sgd"]


def sgd(p: np.ndarray, g: np.ndarray, v: np.ndarray | None, rate: float, momentum: float, nesterov: bool):
    """Gradient descent with momentum: the new p and v."""
    if v is None:
        return *_stepped(_descend, _descend_plain, (p, g), 1, rate), None
    return _stepped(_momentum, _momentum_plain, (p, g, v), 2, rate, momentum, flag=bool(nesterov))


def adamw(
    p: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    s: np.ndarray,
    rate: float,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
    t: int,
):
    """Adam with weight decay: the new p, m and s."""
    numbers = (rate, b1, 1 - b1, 1 / (1 - b1**t), b2, 1 - b2, 1 / (1 - b2**t), eps, decay)
    return _stepped(_adamw, _adamw_plain, (p, g, m, s), 3, *numbers, flag=bool(decay))


def _stepped(
    rows: jit.Loops,
    plain: Callable[..., None],
    arrays: tuple[np.ndarray, ...],
    results: int,
    *numbers: float,
    flag: bool = False,
) -> tuple[np.ndarray, ...]:
    """The results, the first like the parameters, the others like the state. Short numbers are widened in pieces."""
    p = arrays[0]
    wide = accurate(p.dtype)
    scalars = [wide.type(n) for n in numbers]
    at_once = compiled = wide.char in "fd" and jit.available()
    for a in arrays:
        compiled, at_once = compiled and a.dtype.isnative, at_once and a.dtype == wide
    outs = [buffers.empty(p.shape, wide if k else p.dtype) for k in range(results)]
    # Loops are compiled for contiguous arrays: a view of one dimension may have strides.
    into, flat = [o.reshape(-1) for o in outs], [np.ascontiguousarray(a).reshape(-1) for a in arrays]
    if compiled and at_once:
        rows(*into, *flat, *scalars, flag)
        return tuple(outs)
    step = CACHE // wide.itemsize
    for start in range(0, p.size, step):
        piece = slice(start, start + step)
        parts = [a[piece].astype(wide, copy=False) for a in flat]
        made = [o[piece] if o.dtype == wide else np.empty(len(parts[0]), wide) for o in into]
        (rows if compiled else plain)(*made, *parts, *scalars, flag)
        if made[0].dtype != into[0].dtype:
            into[0][piece] = made[0]
    return tuple(outs)


@jit.loops("out", fastmath=())
def _descend(out: Any, p: Any, g: Any, rate: Any, _flag: Any) -> None:
    for i in range(out.shape[0]):
        out[i] = p[i] - rate * g[i]


def _descend_plain(out: np.ndarray, p: np.ndarray, g: np.ndarray, rate: Any, _flag: bool) -> None:
    np.multiply(g, rate, out=out)
    np.subtract(p, out, out=out)


@jit.loops("out", "sums", fastmath=())
def _momentum(out: Any, sums: Any, p: Any, g: Any, v: Any, rate: Any, momentum: Any, nesterov: Any) -> None:
    for i in range(out.shape[0]):
        new = momentum * v[i] + g[i]
        sums[i] = new
        out[i] = p[i] - rate * (momentum * new + g[i] if nesterov else new)


def _momentum_plain(out, sums, p, g, v, rate: Any, momentum: Any, nesterov: bool) -> None:
    np.multiply(v, momentum, out=sums)
    sums += g
    if nesterov:
        np.multiply(sums, momentum, out=out)
        out += g
        out *= rate
    else:
        np.multiply(sums, rate, out=out)
    np.subtract(p, out, out=out)


@jit.loops("out", "mean", "square", fastmath=())
def _adamw(
    out: Any,
    mean: Any,
    square: Any,
    p: Any,
    g: Any,
    m: Any,
    s: Any,
    rate: Any,
    b1: Any,
    rest1: Any,
    unbias1: Any,
    b2: Any,
    rest2: Any,
    unbias2: Any,
    eps: Any,
    decay: Any,
    decays: Any,
) -> None:
    for i in range(out.shape[0]):
        new = b1 * m[i] + rest1 * g[i]
        spread = b2 * s[i] + rest2 * (g[i] * g[i])
        mean[i] = new
        square[i] = spread
        along = (new * unbias1) / (np.sqrt(spread * unbias2) + eps)
        out[i] = p[i] - rate * (along + decay * p[i] if decays else along)


def _adamw_plain(
    out, mean, square, p, g, m, s, rate, b1, rest1, unbias1, b2, rest2, unbias2, eps, decay, decays
) -> None:
    other = np.empty_like(out)
    np.multiply(m, b1, out=mean)
    mean += np.multiply(g, rest1, out=other)
    np.multiply(g, g, out=other)
    other *= rest2
    np.multiply(s, b2, out=square)
    square += other
    np.multiply(square, unbias2, out=other)
    np.sqrt(other, out=other)
    other += eps
    np.multiply(mean, unbias1, out=out)
    out /= other
    if decays:
        out += np.multiply(p, decay, out=other)
    out *= rate
    np.subtract(p, out, out=out)
