"""Constant padding, on one block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

__all__ = ["pad"]


def pad(x: torch.Tensor, widths: Sequence[tuple[int, int]], value: float = 0) -> torch.Tensor:
    """x with (low, high) entries of a value around each dimension."""
    return F.pad(x, [n for pair in reversed(widths) for n in pair], value=value) if any(map(any, widths)) else x
