"""Constant padding, on one block of NumPy or CuPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["pad"]


def pad(x: Any, widths: Sequence[tuple[int, int]], value: float = 0) -> Any:
    """x with (low, high) entries of a value around each dimension."""
    return np.pad(x, tuple(widths), constant_values=value) if any(map(any, widths)) else x
