"""Activations of a large layer."""

from __future__ import annotations

import numpy as np

from spmd.bench import Row

_SHAPE = (4096, 4096)
_BYTES = 4096 * 4096 * 4
_KINDS = ("relu", "silu", "gelu_tanh", "gelu", "elu", "softplus", "mish")


def _values(rng: np.random.Generator, count: int) -> tuple[np.ndarray, ...]:
    return tuple(rng.standard_normal(_SHAPE, np.float32) for _ in range(count))


ROWS = [
    row
    for kind in _KINDS
    for row in (
        Row(
            "activate",
            f"{kind} with bias, 4096x4096 float32",
            lambda rng, kind=kind: (*_values(rng, 1), np.ones(_SHAPE[1], np.float32), kind),
            2 * _BYTES,
        ),
        Row(
            "activate_vjp",
            f"{kind} with bias, 4096x4096 float32",
            lambda rng, kind=kind: (*_values(rng, 2), np.ones(_SHAPE[1], np.float32), kind),
            3 * _BYTES,
        ),
    )
]
