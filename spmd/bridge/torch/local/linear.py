"""Products with weights, on one block."""

from __future__ import annotations

import torch
from torch.nn import functional as F

__all__ = ["linear", "with_bias"]


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x wᵀ + bias, for w of shape (out_features, in_features)."""
    return F.linear(x, w, bias)


def with_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y + bias, in the dtype of y, which is narrower under autocast; y without one."""
    return y if bias is None else y + bias.to(y.dtype)
