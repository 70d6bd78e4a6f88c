"""Interpolation: images to twice the size and back, a field that is warped a little, receivers at random points."""

from __future__ import annotations

import numpy as np

from spmd.bench import Row
from spmd.kernels.taps import resize_taps, transposed

_N = 2048
_BYTES = 4 * _N * _N


def _field(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def _resamples(method: str) -> list[Row]:
    def double(axis: int, n: int = _N):
        return lambda rng: (_field(rng, 2, n, n), *resize_taps(n, 2 * n, method), axis)

    def halve(axis: int, n: int = _N):
        shape = (2, 2 * n, n) if axis == 1 else (2, n, 2 * n)
        return lambda rng: (_field(rng, *shape), *transposed(*resize_taps(n, 2 * n, method), n), axis)

    rows = []
    for axis, name in ((1, "rows"), (2, "columns")):
        rows += [
            Row("resample", f"{method}, {name} {_N} -> {2 * _N}, 2x{_N}x{_N} f4", double(axis), 6 * _BYTES),
            Row("resample", f"its adjoint, {name} {2 * _N} -> {_N}", halve(axis), 6 * _BYTES),
        ]
    return rows


def _warp(rng: np.random.Generator) -> np.ndarray:
    """Points near those of the grid."""
    grid = np.stack(np.meshgrid(np.arange(_N), np.arange(_N), indexing="ij"), axis=-1).reshape(-1, 2)
    return (grid + rng.uniform(-2, 2, grid.shape)).astype(np.float32)


def _at_points(method: str) -> list[Row]:
    options = (method, "zero", (0, 0))
    what = f"{method}, {_N}x{_N} float32, all warped"
    return [
        Row("sample", what, lambda rng: (_field(rng, 1, _N, _N), _warp(rng), *options), 4 * _BYTES),
        Row("inject", what, lambda rng: (_field(rng, 1, _N * _N), _warp(rng), (_N, _N), *options), 4 * _BYTES),
    ]


ROWS = _resamples("linear") + _resamples("cubic") + _at_points("linear") + _at_points("cubic")
