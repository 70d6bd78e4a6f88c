"""Softmax of rows, and its parts where rows are split over workers, on one block."""

from __future__ import annotations

import torch
from torch.nn import functional as F

__all__ = ["exp_from", "log_softmax", "softmax", "top"]


def softmax(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Softmax along an axis."""
    return F.softmax(x, axis)


def log_softmax(x: torch.Tensor, axis: int) -> torch.Tensor:
    """The logarithm of `softmax`."""
    return F.log_softmax(x, axis)


def exp_from(x: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """exp(x - top), by row."""
    return (x - top.unsqueeze(-1)).exp()


def top(x: torch.Tensor) -> torch.Tensor:
    """The largest entry of each row, as a constant."""
    x = x.detach()
    return x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf) + x.sum(-1)
