"""Pooling, on one block: (N, C, *spatial). A window is as in `spmd.functions.local.pooling`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from spmd.bridge.torch.local.pads import pad
from spmd.kernels.windows import Window, windows

__all__ = ["avg_pool", "max_pool"]

Parameters = tuple[Any, Any, Any, Any]
_MAX: Any = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_MEAN: Any = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_EDGES = ((0, 0), (0, 0))


def max_pool(x: torch.Tensor, window: Parameters, ceil_mode: bool, indices: bool = True) -> tuple[torch.Tensor, Any]:
    """The largest entry of every window; with indices, also its index among the spatial entries of x, -1 for padding
    alone."""
    geometry = windows(x.shape[2:], *window, ceil_mode)
    kernel, stride, padding, dilation = window
    options = {"stride": stride, "dilation": dilation, "return_indices": indices}
    if _allowed(geometry, padding) and _is_filled(x, geometry):
        low = [w.low for w in geometry]
        y = _MAX[len(kernel)](x, kernel, **options, padding=low, ceil_mode=ceil_mode)
        return y if indices else (y, None)
    # Torch pads both ends alike, at most by half a window. What it may pad below stays to it: there its ties are right.
    inside = [w.low if w.low <= _most(w) else 0 for w in geometry]
    ends = [(w.low - low, w.high) for w, low in zip(geometry, inside, strict=True)]
    padded = _filled(pad(x, (*_EDGES, *ends), -math.inf), geometry)
    y = _MAX[len(kernel)](padded, kernel, **options, padding=inside)
    shape = (*x.shape[:2], *(w.m for w in geometry))
    if not indices:
        return _cropped(y, shape), None
    top, at = (_cropped(part, shape) for part in y)
    return top, _within(at, padded.shape[2:], geometry, [low for low, _ in ends])


def avg_pool(
    x: torch.Tensor, window: Parameters, ceil_mode: bool, count_include_pad: bool, divisor: int | None
) -> torch.Tensor:
    """The mean of every window; with a divisor, the sum of its entries over that."""
    geometry = windows(x.shape[2:], *window, ceil_mode)
    kernel, stride, padding, dilation = window
    dims = len(kernel)
    plain = not x.is_complex() and all(d == 1 for d in dilation)
    is_long = all(w.n >= w.kernel for w in geometry)  # in three dimensions torch wants that
    if plain and is_long and _allowed(geometry, padding) and _is_filled(x, geometry) and (divisor is None or dims > 1):
        override = {} if dims == 1 else {"divisor_override": divisor}
        low = [w.low for w in geometry]
        return _MEAN[dims](x, kernel, stride, low, ceil_mode, count_include_pad, **override)
    padded = pad(x, (*_EDGES, *((w.low, w.high) for w in geometry)))
    if not plain:
        sums = _sums(padded, geometry)
    else:
        shape = (*x.shape[:2], *(w.m for w in geometry))
        sums = _cropped(_MEAN[dims](_filled(padded, geometry), kernel, stride), shape) * math.prod(kernel)
    if divisor is not None:
        return sums / divisor
    counts = torch.ones((), dtype=torch.int64)
    for w in geometry:
        counts = counts[..., None] * torch.from_numpy(w.counts(count_include_pad)).clamp(min=1)
    return sums / counts.to(sums.device, sums.dtype)


def _allowed(geometry: Sequence[Window], padding: Sequence[tuple[int, int]]) -> bool:
    """Whether torch's functions take this padding."""
    return all(low == high <= _most(w) for w, (low, high) in zip(geometry, padding, strict=True))


def _most(w: Window) -> int:
    """The most that torch pads. Of a dilated window whose taps are all padding its maximum has a wrong index."""
    return w.kernel // 2 if w.dilation == 1 or w.low == 0 or w.counts().min(initial=1) > 0 else 0


def _is_filled(x: torch.Tensor, geometry: Sequence[Window]) -> bool:
    """Whether there is a channel and an output: torch wants one."""
    return x.shape[1] > 0 and all(w.n > 0 and w.m > 0 for w in geometry)


def _filled(x: torch.Tensor, geometry: Sequence[Window]) -> torch.Tensor:
    """x with a channel and room for a window, if need be."""
    least = (0, 1, *((w.kernel - 1) * w.dilation + 1 for w in geometry))
    return pad(x, [(0, max(0, n - m)) for n, m in zip(least, x.shape, strict=True)])


def _cropped(y: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The first entries of y, in this shape."""
    return y if y.shape == shape else y[tuple(slice(n) for n in shape)]


def _within(at: torch.Tensor, padded: Sequence[int], geometry: Sequence[Window], low: Sequence[int]) -> torch.Tensor:
    """Indices among the entries of a padded array as indices among those inside; -1 for padding."""
    if all(n == w.n for n, w in zip(padded, geometry, strict=True)):
        return at
    index, outside, step = torch.zeros_like(at), torch.zeros_like(at, dtype=torch.bool), 1
    for n, w, before in reversed(list(zip(padded, geometry, low, strict=True))):
        place = at % n - before
        outside |= (place < 0) | (place >= w.n)
        index, at, step = index + place * step, at // n, step * w.n
    return torch.where(outside, -1, index)


def _sums(x: torch.Tensor, geometry: Sequence[Window]) -> torch.Tensor:
    """The sums over windows without padding, one dimension after the other: for what torch's means do not take."""
    for d, w in enumerate(geometry, 2):
        first = [slice(None)] * d
        parts = [x[(*first, slice(j, j + (w.m - 1) * w.stride + 1, w.stride))] for j in _starts(w)] if w.m else []
        x = sum(parts[1:], parts[0]) if parts else x[(*first, slice(0, 0))]
    return x


def _starts(w: Window) -> range:
    """The first entry that each tap reads."""
    return range(0, w.kernel * w.dilation, w.dilation)
