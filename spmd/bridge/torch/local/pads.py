"""Padding, and entries by their indices, on one block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

__all__ = ["pad", "take"]


def pad(x: torch.Tensor, widths: Sequence[tuple[int, int]], value: complex = 0) -> torch.Tensor:
    """x with (low, high) entries of a value around each dimension."""
    if not any(map(any, widths)):
        return x
    if isinstance(value, complex):
        return pad(x - value, widths) + value
    return F.pad(x, [n for pair in reversed(widths) for n in pair], value=value)


def take(x: torch.Tensor, index: np.ndarray, axis: int) -> torch.Tensor:
    """The entries at these indices along an axis."""
    return x.index_select(axis, torch.as_tensor(index, device=x.device))
