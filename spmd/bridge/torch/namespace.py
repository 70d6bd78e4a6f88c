"""The functions of the Array API standard for tensors: those of `array_api_compat`, with a differentiable `concat`."""

from __future__ import annotations

from typing import Any

import torch
from array_api_compat import torch as compat

__all__ = ["concat"]


def concat(arrays: list[torch.Tensor] | tuple[torch.Tensor, ...], /, *, axis: int | None = 0) -> torch.Tensor:
    """The arrays joined along an axis.

    torch takes an array of shape (0,) as absent: its cotangent is a constant, and gradients of gradients do not reach
    the collectives before it, which other workers wait for. So such arrays are joined with a dimension more.
    """
    if axis == 0 and any(tuple(a.shape) == (0,) for a in arrays):
        return torch.cat([a.unsqueeze(-1) for a in arrays]).squeeze(-1)
    return compat.concat(arrays, axis=axis)


def __getattr__(name: str) -> Any:
    return getattr(compat, name)
