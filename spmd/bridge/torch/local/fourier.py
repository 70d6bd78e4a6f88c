"""Fourier transforms, on one block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

__all__ = ["pad", "transform"]


def transform(
    x: torch.Tensor, kind: str, sizes: Sequence[int], dims: Sequence[int], norm: str, overwrite: bool = False
) -> torch.Tensor:
    """NumPy's transform of this kind, of these lengths along these dimensions."""
    if len(dims) == 1:
        return getattr(torch.fft, kind)(x, sizes[0], dims[0], norm)
    return getattr(torch.fft, kind + "n")(x, tuple(sizes), tuple(dims), norm)


def pad(x: torch.Tensor, dim: int, low: int, high: int) -> torch.Tensor:
    """x with zeros before and after it along a dimension."""
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [low, high])
