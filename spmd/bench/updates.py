"""Steps of optimisers."""

from __future__ import annotations

import numpy as np

from spmd.bench import Row

_N = 1 << 23


def _arrays(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    return [np.abs(rng.standard_normal(_N, np.float32)) for _ in range(count)]


ROWS = [
    Row("sgd", f"{_N} float32", lambda rng: (*_arrays(rng, 2), None, 0.1, 0.0, False), 3 * 4 * _N),
    Row("sgd", f"{_N} float32, momentum", lambda rng: (*_arrays(rng, 3), 0.1, 0.9, True), 5 * 4 * _N),
    Row("adamw", f"{_N} float32", lambda rng: (*_arrays(rng, 4), 1e-3, 0.9, 0.999, 1e-8, 0.01, 5), 7 * 4 * _N),
]
