"""Weighted sums of entries along an axis, on one block."""

from __future__ import annotations

from typing import Any

import torch

from spmd.bridge.torch.tensor_state import is_traced

__all__ = ["resample"]


def resample(x: torch.Tensor, taps: Any, axis: int) -> torch.Tensor:
    """Along an axis, output o is the sum of weight[o, k] * x[index[o, k]], of these taps. Half precision is widened."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else None
    key = (x.device, stream, wide.dtype)
    index, weight = _tensors(taps, wide) if is_traced(x) else taps.cached(key, lambda: _tensors(taps, wide))
    parts = (wide.index_select(axis, index[k]) for k in range(len(index)))
    if taps.is_selection:
        return next(parts).to(x.dtype)
    shape = [-1 if d == axis else 1 for d in range(x.ndim)]
    y = None
    for k, part in enumerate(parts):
        term = part * weight[k].reshape(shape)
        y = term if y is None else y + term
    assert y is not None
    return y.to(x.dtype)


def _tensors(taps: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and weights, a row for each tap."""
    index = torch.from_numpy(taps.index.T.copy()).to(x.device)
    return index, torch.from_numpy(taps.weight.T.copy()).to(x.device, x.real.dtype)
