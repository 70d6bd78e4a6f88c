"""Random numbers: only the results go to memory. Ten rounds of eight operations on integers make four words; what makes
numbers of them is not counted."""

from __future__ import annotations

import numpy as np

from spmd.bench import Row

_N = 1 << 24


def _row(kernel: str, dtype: str, *more: float) -> Row:
    n = _N * 4 // np.dtype(dtype).itemsize

    def make(rng: np.random.Generator) -> tuple:
        return rng.integers(0, 1 << 32, 2, np.uint32), (n,), ((0, n),), dtype, *more

    return Row(kernel, f"{n} {dtype}", make, 4 * _N, 20 * _N)


ROWS = [
    _row("random_bits", "uint32"),
    _row("random_uniform", "float32", 0, 1),
    _row("random_uniform", "float64", 0, 1),
    _row("random_normal", "float32"),
    _row("random_normal", "float64"),
    _row("random_truncated", "float32", -2, 2),
    _row("random_exponential", "float32"),
    _row("random_gumbel", "float32"),
]
