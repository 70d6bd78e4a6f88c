"""Rows of a table, on one block of NumPy or CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff.registry import primitive
from spmd.autodiff.staging.recorder import checked
from spmd.autodiff.tracer import value_of
from spmd.autodiff.transforms import stop_gradient
from spmd.errors import SpecError
from spmd.functions.arguments import as_array

__all__ = ["added_rows", "checked_ids", "in_range", "rows", "rows_at"]

_NO_ROW = -1


def _take_rows_vjp(g, _ans, _table, ids) -> Any:
    return added_rows(ids, g, rows=_table.shape[0])


@primitive("take_rows", _take_rows_vjp, None)
def rows_at(table, ids):
    """The rows that ids name; zeros for -1, NaN for other ids without a row."""
    return kernels.of(table).take_rows(table, ids)


@primitive("add_rows", None, lambda h, _ans, ids, _g, *, rows: rows_at(h, ids))
def added_rows(ids, g, *, rows):
    return kernels.of(g).add_rows(ids, g, rows)


def rows(where: str, table: Any, ids: Any, bounds: tuple[int, int, int], padding: tuple[int, ...]) -> Any:
    """The rows that ids name of a table that has those from `start` to `stop` of `n`; zeros for others.

    bounds: (start, stop, n). padding: rows without gradient.
    """
    y = _differentiated_rows(where, table, ids, bounds, padding)
    for i in padding:
        if bounds[0] <= i < bounds[1]:
            mask = np.reshape(ids == i, (*ids.shape, *[1] * (table.ndim - 1)))
            y = np.where(mask, stop_gradient(table[i - bounds[0]]), y)
    return y


def _differentiated_rows(where: str, table: Any, ids: Any, bounds: tuple[int, int, int], padding: Any) -> Any:
    """The rows with gradient; zeros for others."""
    start, stop, n = bounds
    own = checked_ids(where, ids, n, padding)
    if (start, stop) == (0, n):
        return rows_at(table, own)
    absent = own < -1
    own = np.where((own >= start) & (own < stop), own - start, _NO_ROW)
    if kernels.on_device(value_of(ids)):
        own = np.where(absent | (ids >= n), 2 * _NO_ROW, own)  # NaN
    return rows_at(table, own)


def in_range(ids: np.ndarray, n: int, where: str) -> None:
    """Raise for an id that names no row."""
    if ids.size and (ids.min() < 0 or ids.max() >= n):
        raise SpecError.at(
            where,
            argument="ids",
            got=f"ids from {ids.min()} to {ids.max()}",
            need=f"numbers of rows, from 0 to {n - 1}" if n else "no ids: there are no rows",
            mend="count rows from 0",
        )


def checked_ids(where: str, ids: Any, n: int, padding: tuple[int, ...]) -> Any:
    """ids as int64; padding becomes -1. On the host their range is checked."""
    ids = as_array(where, "ids", ids, "iu", "integers", "ids.astype(int)")
    value = value_of(ids)
    if not kernels.on_device(value):
        checked(in_range, value, n, where)
    ids = ids.astype(np.int64)
    if kernels.on_device(value):
        ids = np.where(ids < 0, 2 * _NO_ROW, ids)  # NaN, unlike _NO_ROW
    for i in padding:
        ids = np.where(ids == i, _NO_ROW, ids)
    return ids
