"""Rows of a table by index. Sums have a fixed order, without atomic additions."""

from __future__ import annotations

import math
from typing import Any

import cupy as cp

from spmd.kernels.gpu.source import COMPLEX, FLOATING, Kernel, blocks_for, over

_take, _add = (Kernel("embeddings", name, over((*FLOATING, *COMPLEX))) for name in ("take_rows", "add_rows"))


def take_rows(table: Any, ids: Any) -> Any:
    """The rows of ids; zeros where they are -1, NaN where they are out of range."""
    rows, row_size = table.shape[0], math.prod(table.shape[1:])
    out = cp.empty((*ids.shape, *table.shape[1:]), table.dtype)
    if out.size:
        args = (out, cp.ascontiguousarray(table), cp.ascontiguousarray(ids, cp.int64), ids.size, rows, row_size)
        _take(table.dtype, grid=blocks_for(out.nbytes // 16 + ids.size, 256), block=256, args=args)
    return out


def add_rows(ids: Any, g: Any, rows: int) -> Any:
    """A table of so many rows, each the sum of the entries of g with its id."""
    shape = (rows, *g.shape[ids.ndim :])
    out = cp.empty(shape, g.dtype)
    if out.size:
        flat_ids = cp.ascontiguousarray(ids, cp.int64).reshape(-1)
        order = cp.argsort(flat_ids, kind="stable")
        row_size = math.prod(shape[1:])
        row_blocks = -(-row_size * g.itemsize // 512)
        args = (out, flat_ids[order], order, cp.ascontiguousarray(g), flat_ids.size, rows, row_size)
        _add(g.dtype, grid=min(rows * row_blocks, 1 << 20), block=256, args=args)
    return out
