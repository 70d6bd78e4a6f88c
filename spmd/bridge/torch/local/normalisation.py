"""Normalisation of rows and of channels, on one block, and their statistics."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from spmd.bridge.torch.tensor import Tensor

__all__ = ["affine", "batch_norm", "constant", "detached", "group_norm", "layer_norm", "moments"]

Parameter = torch.Tensor | None


def detached(x: torch.Tensor) -> torch.Tensor:
    """x without history."""
    return x.detach()


def constant(x: torch.Tensor, data: np.ndarray) -> torch.Tensor:
    """Numbers in the dtype of x, where x is."""
    return torch.as_tensor(data, dtype=x.dtype, device=x.device)


def _accurate(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype of the computation."""
    return x.float() if x.dtype.itemsize < 4 else x


def _like(p: Parameter, x: torch.Tensor) -> Parameter:
    """A parameter in the dtype of x."""
    return p if p is None else p.to(x.dtype)


def layer_norm(x: torch.Tensor, weight: Parameter, bias: Parameter, eps: float, ndim: int, centred: bool) -> Any:
    """The layer norm of rows, the last ndim dimensions; the RMS norm unless they are centred."""
    shape = x.shape[x.ndim - ndim :]
    if not centred:
        return F.rms_norm(x, shape, _like(weight, x), eps)
    return F.layer_norm(x, shape, _like(weight, x), _like(bias, x), eps)


def group_norm(x: torch.Tensor, groups: int, weight: Parameter, bias: Parameter, eps: float) -> torch.Tensor:
    """The group norm of (batch, channels, ...)."""
    return torch.group_norm(x, groups, _like(weight, x), _like(bias, x), eps)


def moments(x: torch.Tensor, kept: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the sum of squared distances from it, over all dimensions but those from kept[0] to kept[1]."""
    x = _accurate(x)
    dims = [d for d in range(x.ndim) if not kept[0] <= d < kept[1]]
    if not dims:
        return x, torch.zeros_like(x)
    if not x.numel():
        nothing = x.sum(dims, keepdim=True)
        return nothing, nothing
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return mean, variance * prod(x.shape[d] for d in dims)


def affine(x: torch.Tensor, _kept: Any, mean: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """(x - mean) * scale + shift, for parameters that broadcast to x."""
    return ((_accurate(x) - mean) * scale + shift).to(x.dtype)


def batch_norm(
    x: torch.Tensor, weight: Parameter, bias: Parameter, eps: float, axis: int, statistics: bool
) -> tuple[torch.Tensor, Any, Any]:
    """The batch norm, and the mean and the sum of squared distances of each channel if they are wanted."""
    kept, shape = (axis, axis + 1), [1] * x.ndim
    shape[axis] = x.shape[axis]
    if isinstance(x, Tensor) or axis != 1 or not x.numel():  # batch norms of torch refuse blocks with states
        mean, square = moments(x, kept)
        scale = (square / max(1, x.numel() // max(1, x.shape[axis])) + eps).rsqrt()
        if weight is not None:
            scale = scale * weight.reshape(shape)
        y = affine(x, kept, mean, scale, torch.zeros_like(scale) if bias is None else bias.reshape(shape))
        return y, mean.reshape(-1), square.reshape(-1)
    y = torch.batch_norm(x, _like(weight, x), _like(bias, x), None, None, True, 0.0, eps, False)
    if not statistics:
        return y, None, None
    with torch.no_grad():
        mean, square = moments(x, kept)
    return y, mean.reshape(-1), square.reshape(-1)
