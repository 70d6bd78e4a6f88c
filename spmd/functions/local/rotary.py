"""Cosines and sines of rotary embeddings, for arrays of NumPy and CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.autodiff.tracer import value_of
from spmd.functions.arguments import cast

__all__ = ["turns"]


def turns(positions: Any, rates: np.ndarray, like: Any) -> tuple[Any, Any]:
    """The cosine and sine of each position times each rate, in the dtype of an array."""
    value = value_of(like)
    if type(positions) is np.ndarray:
        positions = np.asarray(positions, like=value)
    angles = np.expand_dims(positions, -1) * np.asarray(rates, like=value)
    return cast(np.cos(angles), like.dtype), cast(np.sin(angles), like.dtype)
