"""Activations of recurrent cells, on one block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["before", "integers", "relu", "sigmoid", "zeros"]

relu, sigmoid = torch.relu, torch.sigmoid


def zeros(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros of the library, dtype and device of x."""
    return torch.zeros(tuple(shape), dtype=x.dtype, device=x.device)


def before(lengths: torch.Tensor, steps: int) -> torch.Tensor:
    """Whether each step is before the end: (steps, len(lengths))."""
    return torch.arange(steps, device=lengths.device)[:, None] < lengths


def integers(x: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Numbers that are the same on all workers, as an array of the library of x."""
    return torch.as_tensor(values, device=x.device)
