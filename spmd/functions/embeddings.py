"""Rows of a table by number, on one worker or with the rows split over many."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff.registry import primitive
from spmd.autodiff.staging.recorder import checked
from spmd.autodiff.tracer import Array, value_of
from spmd.errors import LayoutError, SpecError, StateError, describe
from spmd.functions.arguments import as_array, require_invariant
from spmd.mesh import here
from spmd.operators.reduce import psum
from spmd.operators.splitting import agree
from spmd.operators.varying import varying
from spmd.tracebacks import api_boundary
from spmd.transport.call import Call

__all__ = ["add_rows", "embedding", "one_hot", "take_rows"]


def _take_rows_vjp(g, _ans, _table, ids) -> Any:
    return _add_rows(ids, g, rows=_table.shape[0])


@primitive("take_rows", _take_rows_vjp, None)
def rows_at(table, ids):
    """The rows that ids name; zeros for -1, NaN for other ids without a row."""
    return kernels.of(table).take_rows(table, ids)


@primitive("add_rows", None, lambda h, _ans, ids, _g, *, rows: rows_at(h, ids))
def _add_rows(ids, g, *, rows):
    return kernels.of(g).add_rows(ids, g, rows)


@primitive("one_hot", None)
def _one_hot(ids, *, classes, dtype):
    column = ids[..., None]
    return (column == np.arange(classes, like=column)).astype(dtype)


@api_boundary
def take_rows(table, ids):
    """The rows of a table that ids name. table: (n, ...). ids: integers of any shape, from 0 to n - 1.

    Forward: y[i, ...] = table[ids[i], ...], of shape ids.shape + table.shape[1:]. Adjoint: `add_rows`.
    Raises SpecError for ids out of range. On a GPU the ids are not read: there such rows are NaN, and the table gets no
    gradient of them.
    """
    where = "spmd.functions.take_rows"
    table = _table(where, "table", table)
    return rows_at(table, _checked_ids(where, ids, table.shape[0], ()))


@api_boundary
def add_rows(ids, g, rows: int):
    """A table in which row r is the sum of the entries of g whose id is r. ids: integers of any shape, from 0 to
    rows - 1. g: of shape ids.shape + (...). Gives (rows, ...).

    Forward: y[ids[i], ...] += g[i, ...], in a fixed order; in float32 where g is of a short type. Adjoint: `take_rows`.
    Raises SpecError for ids out of range (on a GPU these are left out), LayoutError for g of another shape.
    """
    where = "spmd.functions.add_rows"
    g, rows = _table(where, "g", g), _count(where, "rows", rows)
    ids = _checked_ids(where, ids, rows, ())
    if g.shape[: ids.ndim] != ids.shape:
        raise LayoutError.at(
            where,
            argument="g",
            got=f"{describe(g)} for ids of shape {list(ids.shape)}",
            need="an entry for each id: its first dimensions are those of ids",
            mend="np.broadcast_to(g, (*ids.shape, ...))",
        )
    return _add_rows(ids, g, rows=rows)


@api_boundary
def embedding(table, ids, axis_name: str | Sequence[str] | None = None, padding_idx: int | None = None):
    """The rows of a table that ids name, where the rows may be split over workers.

    table: (n, ...); with axis_name this worker's rows of it, which vary over the axes, as many as there are on each
    worker. ids: integers of any shape from 0 to n - 1, n counting all workers' rows; the same along axis_name.
    padding_idx: an id that gives zeros, and whose row gets no gradient.

    Forward: y = table[ids], of shape ids.shape + table.shape[1:]. Each worker looks up the rows that it has, and one
    `psum` of the results makes them Invariant along axis_name. Adjoint: each worker adds the cotangents of its rows;
    nothing moves. Shoeybi et al., "Megatron-LM: Training multi-billion parameter language models using model
    parallelism", 2019.
    Raises SpecError for ids out of range (on a GPU their rows are NaN, and the table gets no gradient of them),
    StateError for a table or ids of another state.
    """
    where = "spmd.functions.embedding"
    table = _table(where, "table", table)
    padding = () if padding_idx is None else (_count(where, "padding_idx", padding_idx),)
    if axis_name is None:
        return rows_at(table, _checked_ids(where, ids, table.shape[0], padding))
    worker = here(where)
    names = worker.mesh.names(axis_name, where)
    _check_states(where, table, ids, names)
    group = worker.group(names)
    call = Call("functions.embedding", names, np.dtype(table.dtype), tuple(table.shape))
    shapes = worker.comm.shapes(group, call).wait()
    agree("functions.embedding", [tuple(s) for s in shapes], 0)
    lengths = [s[0] for s in shapes]
    first = sum(lengths[: group.index])
    ids = _checked_ids(where, ids, sum(lengths), padding)
    varying_ids: Any = varying(ids, names)
    own_ids = varying_ids - first
    own_ids = np.where((own_ids >= 0) & (own_ids < table.shape[0]), own_ids, _NO_ROW)
    if kernels.on_device(value_of(ids)):
        own_ids = np.where((ids < -1) | (ids >= sum(lengths)), 2 * _NO_ROW, own_ids)  # NaN
    return psum(rows_at(table, own_ids), names)


_NO_ROW = -1


def _check_states(where: str, table: Any, ids: Any, names: tuple[str, ...]) -> None:
    """Raise where the table does not vary over the axes, or ids do."""
    whole = [n for n in names if type(table) is Array and table.state is not None and n not in table.state.varying]
    if whole:
        raise StateError.at(
            where,
            argument="table",
            got=f"{describe(table)}, which does not vary over axis {whole[0]!r}",
            need="this worker's rows of a table that is split over the axis",
            mend="leave axis_name out: each worker has the whole table; or pass it by a spec that splits its rows",
        )
    require_invariant(where, "ids", ids, names, "the same ids on all workers that share the table")


@api_boundary
def one_hot(ids, classes: int, dtype: Any = float):
    """Rows of zeros with a one at the place that each id names. ids: integers of any shape, from 0 to classes - 1.

    Gives (*ids.shape, classes). Raises SpecError for ids out of range; on a GPU their rows are zero.
    """
    where = "spmd.functions.one_hot"
    classes = _count(where, "classes", classes)
    try:
        dtype = np.dtype(dtype)
    except TypeError:
        need = "a dtype"
        raise SpecError.at(where, argument="dtype", got=describe(dtype), need=need, mend="dtype=np.float32") from None
    return _one_hot(_checked_ids(where, ids, classes, ()), classes=classes, dtype=dtype)


def _table(where: str, name: str, x: Any) -> Any:
    x = as_array(where, name, x, "fciub", "an array of numbers", "np.asarray(x)")
    if not x.shape:
        raise LayoutError.at(
            where, argument=name, got=describe(x), need="rows: at least one dimension", mend="np.atleast_1d(x)"
        )
    return x


def _count(where: str, name: str, value: Any) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if count < 0:
        raise SpecError.at(
            where, argument=name, got=describe(value), need="an integer from 0", mend=f"{name}=table.shape[0]"
        )
    return count


def _in_range(ids: np.ndarray, n: int, where: str) -> None:
    """Raise for an id that names no row."""
    if ids.size and (ids.min() < 0 or ids.max() >= n):
        raise SpecError.at(
            where,
            argument="ids",
            got=f"ids from {ids.min()} to {ids.max()}",
            need=f"numbers of rows, from 0 to {n - 1}" if n else "no ids: there are no rows",
            mend="count rows from 0; padding_idx=... names an id without a row",
        )


def _checked_ids(where: str, ids: Any, n: int, padding: tuple[int, ...]) -> Any:
    """ids as int64; padding becomes -1. On the host their range is checked."""
    ids = as_array(where, "ids", ids, "iu", "integers", "ids.astype(int)")
    value = value_of(ids)
    if not kernels.on_device(value):
        checked(_in_range, value, n, where)
    ids = ids.astype(np.int64)
    if kernels.on_device(value):
        ids = np.where(ids < 0, 2 * _NO_ROW, ids)  # NaN, unlike _NO_ROW
    for i in padding:
        ids = np.where(ids == i, _NO_ROW, ids)
    return ids
