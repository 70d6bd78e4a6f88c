"""Rows of a table, on one block."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from spmd.bridge.torch.interop import array_of
from spmd.functions.local.embeddings import in_range

__all__ = ["rows"]


def rows(
    where: str, table: torch.Tensor, ids: torch.Tensor, bounds: tuple[int, int, int], padding: tuple[int, ...]
) -> torch.Tensor:
    """The rows that ids name of a table that has those from `start` to `stop` of `n`; zeros for others and for padding.

    bounds: (start, stop, n). On a GPU the range of ids is not checked: ids out of range give NaN.
    """
    start, stop, n = bounds
    ids = ids.long()
    if ids.device.type == "cpu":
        in_range(array_of(ids), n, where)
    here = (ids >= start) & (ids < stop)
    for i in padding:
        here = here & (ids != i)
    shape = (*ids.shape, *table.shape[1:])
    if not table.shape[0] or not ids.numel():  # of no ids, torch's embedding has no second derivative
        return table.sum() * torch.zeros(shape, dtype=table.dtype, device=table.device)
    flat = table.reshape(table.shape[0], -1)
    own = torch.where(here, ids - start, 0)
    # torch's embedding has no derivative for complex numbers.
    y = (flat[own] if flat.is_complex() else F.embedding(own, flat)).reshape(shape)
    mask = here.reshape(*here.shape, *[1] * (table.ndim - 1))
    y = torch.where(mask, y, 0)
    if ids.device.type != "cpu":
        known = (ids >= 0) & (ids < n)
        y = torch.where(known.reshape(mask.shape), y, torch.nan)
    return y
