"""Activations: bias, function and cotangent in one pass."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np

from spmd.kernels.gpu.source import FLOATING, Kernel, blocks_for, over
from spmd.kernels.reference.activation import form

# Exact: a fused product and sum moves the kinks.
_activate, _activate_vjp = (
    Kernel("activation", name, over(FLOATING), exact=True) for name in ("activate", "activate_vjp")
)


def activate(x: Any, bias: Any, kind: str, alpha: float = 1.0) -> Any:
    """f(x + bias)."""
    return _each(_activate, (x,), bias, kind, alpha)


def activate_vjp(g: Any, x: Any, bias: Any, kind: str, alpha: float = 1.0, into: Any = None) -> Any:
    """g * f'(x + bias). into: a C-contiguous array of its shape and dtype to write it into, such as g itself."""
    return _each(_activate_vjp, (x, g), bias, kind, alpha, into)


def _each(kernel: Kernel, arrays: tuple[Any, ...], bias: Any, kind: str, alpha: float, into: Any = None) -> Any:
    x, *more = map(cp.ascontiguousarray, arrays)
    out = cp.empty(arrays[0].shape, x.dtype) if into is None else into
    if x.size:
        which, p = form(kind, alpha)
        b = 0 if bias is None else cp.ascontiguousarray(bias)
        n = 1 if bias is None else bias.size
        width = max(1, 16 // x.dtype.itemsize)
        grid = blocks_for(-(-x.size // width), 256)
        kernel(x.dtype, grid=grid, block=256, args=(out, x, *more, b, x.size, n, which, *map(np.float64, p)))
    return out
