"""Normalisation: rows of a transformer, vectors and images of a batch."""

from __future__ import annotations

import numpy as np

from spmd.bench import Row

_SHAPES = {"vectors": (16384, 1024, 1), "images": (64, 64, 4096)}
_BYTES = 16384 * 1024 * 4


def _values(rng: np.random.Generator, shape: tuple[int, ...], count: int) -> tuple[np.ndarray, ...]:
    return tuple(rng.standard_normal(shape, np.float32) for _ in range(count))


def _rows(rng: np.random.Generator, count: int) -> tuple:
    return _values(rng, (16384, 1024), count)


def _stats(rng: np.random.Generator) -> tuple:
    return np.zeros(16384, np.float32), np.ones(16384, np.float32)


def _per(shape: tuple[int, ...], count: int) -> tuple:
    return (np.ones(shape[1], np.float32),) * count


_WEIGHTS = (np.ones(1024, np.float32), np.zeros(1024, np.float32))

ROWS = [
    Row("normalize", "16384x1024 float32", lambda rng: (*_rows(rng, 1), *_WEIGHTS, 1e-5, True), 2 * _BYTES),
    Row(
        "normalize_vjp",
        "16384x1024 float32",
        lambda rng: (*_rows(rng, 2), _WEIGHTS[0], *_stats(rng), True),
        3 * _BYTES,
    ),
    *(
        row
        for what, shape in _SHAPES.items()
        for row in (
            Row("moments", f"of {what}, float32", lambda rng, shape=shape: _values(rng, shape, 1), _BYTES),
            Row(
                "channel_affine",
                f"of {what}, float32",
                lambda rng, shape=shape: (*_values(rng, shape, 1), *_per(shape, 3)),
                2 * _BYTES,
            ),
            Row(
                "channel_sums",
                f"of {what}, float32",
                lambda rng, shape=shape: (*_values(rng, shape, 2), *_per(shape, 1)),
                2 * _BYTES,
            ),
        )
    ),
]
