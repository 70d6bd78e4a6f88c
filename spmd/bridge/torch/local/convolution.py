"""Convolutions over one to three spatial dimensions, and their transposes, on one block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

__all__ = ["conv", "conv_transpose"]

Ints = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]

_FORWARD = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def conv(x: torch.Tensor, w: torch.Tensor, stride: Ints, padding: Pairs, dilation: Ints, groups: int) -> torch.Tensor:
    """The convolution of x (N, C, *n) and w (O, C / groups, *k); negative paddings crop."""
    ends = tuple(low for low, _ in padding)
    if any(low != high or low < 0 for low, high in padding):
        lengths = zip(padding, x.shape[2:], strict=True)
        x, ends = _cut(x, [(-low, n + high) for (low, high), n in lengths]), (0,) * len(padding)
    return _FORWARD[len(stride) - 1](x, w, None, stride, ends, dilation, groups)


def conv_transpose(
    x: torch.Tensor, w: torch.Tensor, shape: Ints, stride: Ints, padding: Pairs, dilation: Ints, groups: int
) -> torch.Tensor:
    """The transpose of the convolution of arrays (N, C, *shape) with these options, of x (N, O, *m)."""
    whole = _TRANSPOSED[len(stride) - 1](x, w, None, stride, 0, 0, groups, dilation)
    return _cut(whole, [(low, low + n) for (low, _), n in zip(padding, shape, strict=True)])


def _cut(x: torch.Tensor, intervals: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The intervals (start, stop) of the spatial dimensions of x, with zeros beyond its ends."""
    widths, inside = [], []
    for (start, stop), n in zip(intervals, x.shape[2:], strict=True):
        a, b = min(max(start, 0), n), min(max(stop, 0), n)
        low = min(max(-start, 0), stop - start)
        inside.append(slice(a, max(a, b)))
        widths.append((low, stop - start - low - max(b - a, 0)))
    x = x[(..., *inside)]
    return F.pad(x, [n for pair in reversed(widths) for n in pair]) if any(map(any, widths)) else x
