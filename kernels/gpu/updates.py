"""Optimiser steps, in one launch each."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np

from spmd.kernels.cpu.chunks import accurate
from spmd.kernels.gpu.source import FLOATING, Kernel, blocks_for, over

_descend, _momentum, _adamw = (
    Kernel("updates", name, over(FLOATING), exact=True) for name in ("descend", "momentum", "adamw")
)


def sgd(p: Any, g: Any, v: Any, rate: float, momentum: float, nesterov: bool, over: bool = False) -> Any:
    """Gradient descent with momentum: the new p and v."""
    if v is None:
        return *_stepped(_descend, (p, g), over, rate), None
    return _stepped(_momentum, (p, g, v), over, rate, momentum, flags=(int(nesterov),))


def adamw(
    p: Any,
    g: Any,
    m: Any,
    s: Any,
    rate: float,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
    t: int,
    over: bool = False,
) -> Any:
    """Adam with weight decay: the new p, m and s."""
    numbers = rate, b1, 1 - b1, 1 / (1 - b1**t), b2, 1 - b2, 1 / (1 - b2**t), eps, decay
    return _stepped(_adamw, (p, g, m, s), over, *numbers)


def _stepped(
    kernel: Kernel, arrays: tuple[Any, ...], over: bool, *numbers: float, flags: tuple[int, ...] = ()
) -> tuple[Any, ...]:
    p, _, *state = arrays
    wide = accurate(p.dtype)
    # Each thread reads its entries before it writes them, so the results may be the arguments.
    outs = (p, *state) if over else tuple(cp.empty(p.shape, wide if k else p.dtype) for k in range(1 + len(state)))
    arrays = tuple(cp.ascontiguousarray(a) for a in arrays)
    if p.size:
        packs = int(all(a.data.ptr % 16 == 0 for a in (*outs, *arrays)))
        args = (*outs, *arrays, p.size, packs, *(np.float64(n) for n in numbers), *flags)
        kernel(p.dtype, grid=blocks_for(-(-p.size * p.itemsize // 16), 256), block=256, args=args)
    return outs
