"""Cosines and sines of rotary embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["turns"]


def turns(positions: Any, rates: np.ndarray, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosine and sine of each position times each rate, in the dtype of a tensor."""
    at = torch.as_tensor(positions, device=like.device)
    angles = at.unsqueeze(-1) * torch.as_tensor(rates, device=like.device)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)
