"""Softmax and kin: rows of a language model's attention, and of a classifier."""

from __future__ import annotations

import numpy as np

from spmd.bench import Row

_SHAPE = (16384, 1024)
_BYTES = 16384 * 1024 * 4
_WHAT = f"{_SHAPE[0]}x{_SHAPE[1]} float32"


def _rows(rng: np.random.Generator, count: int) -> tuple[np.ndarray, ...]:
    return tuple(rng.standard_normal(_SHAPE, np.float32) for _ in range(count))


def _each(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(_SHAPE[0], np.float32) + 9


def _classes(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return *_rows(rng, 1), rng.integers(0, _SHAPE[1], _SHAPE[0])


ROWS = [
    *(
        Row(name, _WHAT, lambda rng, n=n: _rows(rng, n), (n + 1) * _BYTES)
        for name, n in (("softmax", 1), ("softmax_vjp", 2), ("log_softmax", 1), ("log_softmax_vjp", 2))
    ),
    Row("logsumexp", _WHAT, lambda rng: _rows(rng, 1), _BYTES),
    Row("scaled_exp", _WHAT, lambda rng: (_each(rng), *_rows(rng, 1), _each(rng)), 2 * _BYTES),
    Row("exp_sums", _WHAT, lambda rng: (*_rows(rng, 1), _each(rng), rng.integers(0, 9999, _SHAPE[0])), _BYTES),
    Row("cross_entropy", _WHAT, _classes, _BYTES),
    Row("cross_entropy_and_gradient", _WHAT, _classes, 2 * _BYTES),
    Row("soft_cross_entropy", _WHAT, lambda rng: _rows(rng, 2), 2 * _BYTES),
    Row("soft_cross_entropy_and_gradient", _WHAT, lambda rng: _rows(rng, 2), 3 * _BYTES),
]
