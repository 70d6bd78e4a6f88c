"""Optimiser steps that read or write each array once. Each operation is rounded by itself, so a step has the bits of
its formula in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from spmd.kernels import jit
from spmd.kernels.cpu.chunks import CACHE, accurate
from spmd.kernels.memory import pool


def sgd(
    p: np.ndarray, g: np.ndarray, v: np.ndarray | None, rate: float, momentum: float, nesterov: bool, over: bool = False
):
    """Gradient descent with momentum: the new p and v."""
    if v is None:
        return *_stepped(_DESCEND, over, (p, g), rate), None
    return _stepped(_MOMENTUM, over, (p, g, v), rate, momentum, flag=bool(nesterov))


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
    over: bool = False,
):
    """Adam with weight decay: the new p, m and s."""
    numbers = (rate, b1, 1 - b1, 1 / (1 - b1**t), b2, 1 - b2, 1 / (1 - b2**t), eps, decay)
    return _stepped(_ADAMW, over, (p, g, m, s), *numbers, flag=bool(decay))


class _Step(NamedTuple):
    """A formula: loops that write new arrays, loops that overwrite the parameters and the state, and NumPy."""

    loops: jit.Loops
    loops_over: jit.Loops
    numpy: Callable[..., None]


def _stepped(
    step: _Step, over: bool, arrays: tuple[np.ndarray, ...], *numbers: float, flag: bool = False
) -> tuple[np.ndarray, ...]:
    """The results, the first like the parameters, the others like the state. Short dtypes are widened in pieces."""
    p, _, *state = arrays
    wide = accurate(p.dtype)
    scalars = tuple([wide.type(n) for n in numbers])
    in_one_call = compiled = wide.char in "fd" and jit.available()
    for a in arrays:
        if a.dtype is not wide:
            compiled, in_one_call = compiled and a.dtype.isnative, in_one_call and a.dtype == wide
    outs = [p, *state] if over else [pool.empty(p.shape, wide if k else p.dtype) for k in range(1 + len(state))]
    # Loops are compiled for contiguous arrays: a view of one dimension may have strides.
    flat = [(a if a.flags.c_contiguous else np.ascontiguousarray(a)).reshape(-1) for a in arrays]
    if compiled and in_one_call:
        if over:
            step.loops_over(*flat, scalars, flag)
        else:
            step.loops(*[o.reshape(-1) for o in outs], *flat, scalars, flag)
        return tuple(outs)
    flat_outs = [o.reshape(-1) for o in outs]
    length = CACHE // wide.itemsize
    for start in range(0, p.size, length):
        piece = slice(start, start + length)
        parts = [a[piece].astype(wide, copy=False) for a in flat]
        # Nothing that is read is written before all is computed.
        results = [np.empty(len(parts[0]), wide) if over or o.dtype != wide else o[piece] for o in flat_outs]
        (step.loops if compiled else step.numpy)(*results, *parts, scalars, flag)
        for o, result in zip(flat_outs, results, strict=True):
            if over or o.dtype != wide:
                o[piece] = result
    return tuple(outs)


@jit.exact
def _descended(p: Any, g: Any, numbers: Any) -> Any:
    (rate,) = numbers
    return p - rate * g


@jit.loops("out", fastmath=())
def _descend(out: Any, p: Any, g: Any, numbers: Any, _flag: Any) -> None:
    for i in range(out.shape[0]):
        out[i] = _descended(p[i], g[i], numbers)


@jit.loops("p", fastmath=())
def _descend_over(p: Any, g: Any, numbers: Any, _flag: Any) -> None:
    for i in range(p.shape[0]):
        p[i] = _descended(p[i], g[i], numbers)


def _descend_numpy(out: np.ndarray, p: np.ndarray, g: np.ndarray, numbers: Any, _flag: bool) -> None:
    (rate,) = numbers
    np.multiply(g, rate, out=out)
    np.subtract(p, out, out=out)


@jit.exact
def _with_momentum(p: Any, g: Any, v: Any, numbers: Any, nesterov: Any) -> Any:
    rate, momentum = numbers
    new = momentum * v + g
    return p - rate * (momentum * new + g if nesterov else new), new


@jit.loops("out", "sums", fastmath=())
def _momentum(out: Any, sums: Any, p: Any, g: Any, v: Any, numbers: Any, nesterov: Any) -> None:
    for i in range(out.shape[0]):
        out[i], sums[i] = _with_momentum(p[i], g[i], v[i], numbers, nesterov)


@jit.loops("p", "v", fastmath=())
def _momentum_over(p: Any, g: Any, v: Any, numbers: Any, nesterov: Any) -> None:
    for i in range(p.shape[0]):
        p[i], v[i] = _with_momentum(p[i], g[i], v[i], numbers, nesterov)


def _momentum_numpy(out, sums, p, g, v, numbers: Any, nesterov: bool) -> None:
    rate, momentum = numbers
    np.multiply(v, momentum, out=sums)
    sums += g
    if nesterov:
        np.multiply(sums, momentum, out=out)
        out += g
        out *= rate
    else:
        np.multiply(sums, rate, out=out)
    np.subtract(p, out, out=out)


@jit.exact
def _adapted(p: Any, g: Any, m: Any, s: Any, numbers: Any, decays: Any) -> Any:
    rate, b1, rest1, unbias1, b2, rest2, unbias2, eps, decay = numbers
    mean = b1 * m + rest1 * g
    square = b2 * s + rest2 * (g * g)
    along = (mean * unbias1) / (np.sqrt(square * unbias2) + eps)
    return p - rate * (along + decay * p if decays else along), mean, square


@jit.loops("out", "mean", "square", fastmath=())
def _adamw(out: Any, mean: Any, square: Any, p: Any, g: Any, m: Any, s: Any, numbers: Any, decays: Any) -> None:
    for i in range(out.shape[0]):
        out[i], mean[i], square[i] = _adapted(p[i], g[i], m[i], s[i], numbers, decays)


@jit.loops("p", "m", "s", fastmath=())
def _adamw_over(p: Any, g: Any, m: Any, s: Any, numbers: Any, decays: Any) -> None:
    for i in range(p.shape[0]):
        p[i], m[i], s[i] = _adapted(p[i], g[i], m[i], s[i], numbers, decays)


def _adamw_numpy(out, mean, square, p, g, m, s, numbers: Any, decays: bool) -> None:
    rate, b1, rest1, unbias1, b2, rest2, unbias2, eps, decay = numbers
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


_DESCEND = _Step(_descend, _descend_over, _descend_numpy)
_MOMENTUM = _Step(_momentum, _momentum_over, _momentum_numpy)
_ADAMW = _Step(_adamw, _adamw_over, _adamw_numpy)
