"""Blocks that are put together."""

from __future__ import annotations

import numpy as np

from spmd.bench import Row

_N = 1 << 24

ROWS = [
    Row(
        "combine",
        f"{n} blocks of {_N} float32",
        lambda rng, n=n: ([rng.standard_normal(_N, np.float32) for _ in range(n)],),
        (n + 1) * 4 * _N,
    )
    for n in (2, 4)
]
