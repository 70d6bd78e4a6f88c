"""Stencils: a thread for each entry of the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np

from spmd.kernels.gpu.source import COMPLEX, FLOATING, Kernel, blocks_for, uploaded
from spmd.kernels.windows import reach

Pair = tuple[int, int]
Offsets = Sequence[Sequence[int]]

_WIDE = {name: name if name in ("float64", *COMPLEX) else "float32" for name in (*FLOATING, *COMPLEX)}
_stencil, _stencil_weights = (Kernel("stencils", name, tuple(_WIDE.items())) for name in ("stencil", "stencil_weights"))

_THREADS = 256


def stencil(
    x: Any, offsets: Offsets, weights: Sequence[Any], padding: Sequence[Pair], loose: Sequence[int] = ()
) -> Any:
    """y[i] = sum over k of weights[k] * x[i + offsets[k]]; the last dimensions of x are those of the offsets."""
    x = cp.ascontiguousarray(x)
    table, examples, n, m, shape = _geometry(x, offsets, padding)
    out = cp.empty(shape, x.dtype)
    if out.size:
        wide = np.dtype(_WIDE[x.dtype.name])
        # The weights are rounded to the dtype of x first, as on the CPU.
        factors = np.array([np.asarray(w).astype(x.dtype) for w in weights]).astype(wide)
        args = (out, x, table, uploaded(factors), len(offsets), examples, *n, *m)
        _stencil(x.dtype, wide, grid=blocks_for(out.size, _THREADS), block=_THREADS, args=args)
    return out


def stencil_weights(g: Any, x: Any, offsets: Offsets, padding: Sequence[Pair]) -> Any:
    """For each offset the sum over i of g[i] * x[i + offset]."""
    dtype = cp.result_type(g, x)
    g, x = cp.ascontiguousarray(g, dtype), cp.ascontiguousarray(x, dtype)
    table, examples, n, m, _ = _geometry(x, offsets, padding)
    wide = np.dtype(_WIDE[dtype.name])
    if g.size == 0:
        return cp.zeros(len(offsets), dtype)
    blocks = min(256, blocks_for(g.size, 8 * _THREADS))
    partial_sums = cp.empty((len(offsets), blocks), wide)
    args = (partial_sums, g, x, table, examples, *n, *m)
    _stencil_weights(dtype, wide, grid=(blocks, len(offsets)), block=_THREADS, args=args)
    return cp.sum(partial_sums, axis=1).astype(dtype)


def _geometry(x: Any, offsets: Offsets, padding: Sequence[Pair]) -> tuple[Any, int, tuple, tuple, tuple]:
    """The shifts of the taps, on the device; the number of examples; the lengths of x and of the result; its shape."""
    dims = len(padding)
    n = x.shape[x.ndim - dims :]
    ends = reach(offsets)
    bounds = zip(n, padding, ends, strict=True)
    m = tuple(max(0, k + before + after - low - high) for k, (before, after), (low, high) in bounds)
    starts = [low - before for (low, _), (before, _) in zip(ends, padding, strict=True)]
    shifts = np.zeros((len(offsets), 3), np.int64)
    shifts[:, 3 - dims :] = np.asarray(offsets) + starts
    ones = (1,) * (3 - dims)
    lead = x.shape[: x.ndim - dims]
    return uploaded(shifts), math.prod(lead), (*ones, *n), (*ones, *m), (*lead, *m)
