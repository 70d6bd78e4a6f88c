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
    """The rows that ids name of a table that has those from `start` to `stop` of `n`; zeros for others.

    bounds: (start, stop, n). padding: rows without gradient, at most one. On a GPU the range of ids is not checked: ids
    out of range give NaN.
    """
    start, stop, n = bounds
    ids = ids.long()
    if ids.device.type == "cpu":
        in_range(array_of(ids), n, where)
    here = (ids >= start) & (ids < stop)
    shape = (*ids.shape, *table.shape[1:])
    if not table.shape[0] or not ids.numel():  # of no ids, torch's embedding has no second derivative
        return table.sum() * torch.zeros(shape, dtype=table.dtype, device=table.device)
    flat = table.reshape(table.shape[0], -1)
    own = torch.where(here, ids - start, 0)
    fixed = next((i - start for i in padding if start <= i < stop), None)
    if flat.is_complex():  # of which torch's embedding has no derivative
        parts = F.embedding(own, torch.view_as_real(flat).reshape(flat.shape[0], -1), fixed)
        y = torch.view_as_complex(parts.reshape(*shape, 2))
    else:
        y = F.embedding(own, flat, fixed).reshape(shape)
    mask = here.reshape(*here.shape, *[1] * (table.ndim - 1))
    y = torch.where(mask, y, 0)
    if ids.device.type != "cpu":
        known = (ids >= 0) & (ids < n)
        y = torch.where(known.reshape(mask.shape), y, torch.nan)
    return y
