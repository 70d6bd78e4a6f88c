"""Softmax and kin: rows of a language model's attention, and of a classifier."""

from __future__ import annotations

import numpy as np

from spmd.bench import Row

_SHAPE = (16384, 1024)
_BYTES = 16384 * 1024 * 4


def _rows(rng: np.random.Generator, count: int) -> tuple[np.ndarray, ...]:
    return tuple(rng.standard_normal(_SHAPE, np.float32) for _ in range(count))


ROWS = [
    Row(name, f"{_SHAPE[0]}x{_SHAPE[1]} float32", lambda rng, n=n: _rows(rng, n), (n + 1) * _BYTES)
    for name, n in (("softmax", 1), ("softmax_vjp", 2), ("log_softmax", 1), ("log_softmax_vjp", 2))
]
