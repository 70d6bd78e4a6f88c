"""Counter-based random numbers: a thread makes the words of one counter. The bits are those of the CPU."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np

from spmd.kernels.cpu.chunks import accurate
from spmd.kernels.cpu.philox import extent, runs, top, truncated_ends
from spmd.kernels.gpu.source import FLOATING, Kernel, blocks_for, over

_bits = Kernel("philox", "random_bits", over(("uint32", "uint64")), exact=True)
_uniform, _normal, _truncated, _exponential, _gumbel = (
    Kernel("philox", f"random_{name}", over(FLOATING), exact=True)
    for name in ("uniform", "normal", "truncated", "exponential", "gumbel")
)


def random_bits(key: Any, shape: tuple[int, ...], box: Any, dtype: Any, domain: int = 0) -> Any:
    """Random integers of all values of a dtype, uint32 or uint64."""
    return _drawn(_bits, key, shape, box, dtype, domain)


def random_uniform(key: Any, shape: tuple[int, ...], box: Any, dtype: Any, low: float, high: float) -> Any:
    """Numbers from low up to, but without, high."""
    return _drawn(_uniform, key, shape, box, dtype, *_interval(dtype, low, high))


def random_normal(key: Any, shape: tuple[int, ...], box: Any, dtype: Any) -> Any:
    """Numbers of the normal distribution."""
    return _drawn(_normal, key, shape, box, dtype)


def random_truncated(key: Any, shape: tuple[int, ...], box: Any, dtype: Any, low: float, high: float) -> Any:
    """Numbers of the normal distribution, truncated to low and high."""
    side, ends = truncated_ends(low, high)
    interval = _interval(accurate(np.dtype(dtype)), *ends)
    return _drawn(_truncated, key, shape, box, dtype, *interval, np.float64(low), np.float64(high), side)


def random_exponential(key: Any, shape: tuple[int, ...], box: Any, dtype: Any) -> Any:
    """Numbers of the exponential distribution, of mean 1."""
    return _drawn(_exponential, key, shape, box, dtype)


def random_gumbel(key: Any, shape: tuple[int, ...], box: Any, dtype: Any) -> Any:
    """Numbers of the Gumbel distribution."""
    return _drawn(_gumbel, key, shape, box, dtype)


def _interval(dtype: Any, low: float, high: float) -> tuple[np.float64, ...]:
    wide = accurate(np.dtype(dtype)).type
    return np.float64(low), np.float64(wide(high) - wide(low)), np.float64(top(dtype, low, high))


def _drawn(kernel: Kernel, key: Any, shape: tuple[int, ...], box: Any, dtype: Any, *options: Any) -> Any:
    out = cp.empty(extent(box), np.dtype(dtype))
    if out.size:
        starts, n = runs(shape, box, cp)
        rows = out.size // n
        entries_per_counter = 2 if out.itemsize == 8 else 4
        grid = blocks_for(rows * (n // entries_per_counter + 2), 256)
        args = (out, cp.ascontiguousarray(key), starts, rows, n, *options)
        kernel(out.dtype, grid=grid, block=256, args=args)
    return out
