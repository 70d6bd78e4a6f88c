"""Rows of a vocabulary's table, for the words of a text: few words are frequent."""

from __future__ import annotations

import numpy as np

from spmd.bench import Row

_ROWS, _EACH, _IDS = 32768, 512, 32768
_BYTES = _IDS * _EACH * 4


def _ids(rng: np.random.Generator) -> np.ndarray:
    return (_ROWS * rng.random(_IDS) ** 4).astype(np.int64)


ROWS = [
    Row(
        "take_rows",
        f"{_IDS} of {_ROWS}x{_EACH} float32",
        lambda rng: (rng.standard_normal((_ROWS, _EACH), np.float32), _ids(rng)),
        2 * _BYTES,
    ),
    Row(
        "add_rows",
        f"{_IDS}x{_EACH} float32 to {_ROWS}",
        lambda rng: (_ids(rng), rng.standard_normal((_IDS, _EACH), np.float32), _ROWS),
        _BYTES + _ROWS * _EACH * 4,
    ),
]
