"""Stencils: five points of a plane, seven of a volume."""

from __future__ import annotations

import numpy as np

from spmd.bench import Row

_FIVE = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
_SEVEN = (*((0, *o) for o in _FIVE), (1, 0, 0), (-1, 0, 0))
_WEIGHTS = (0.5, *(0.1,) * 6)
_N = 1 << 23

ROWS = [
    Row(
        "stencil",
        f"5 points, 2048x4096 {dtype}",
        lambda rng, dtype=dtype: (rng.random((2048, 4096)).astype(dtype), _FIVE, _WEIGHTS[:5], ((1, 1),) * 2),
        2 * _N * np.dtype(dtype).itemsize,
    )
    for dtype in ("float32", "float64")
] + [
    Row(
        "stencil",
        "7 points, 128x256x256 float32",
        lambda rng: (rng.random((128, 256, 256), np.float32), _SEVEN, _WEIGHTS, ((1, 1),) * 3),
        2 * 4 * _N,
    ),
    Row(
        "stencil_weights",
        "5 points, 2048x4096 float32",
        lambda rng: (*rng.random((2, 2048, 4096), np.float32), _FIVE, ((1, 1),) * 2),
        2 * 4 * _N,
    ),
]
