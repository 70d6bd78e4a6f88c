"""Rows of a table by number, on one worker or with the rows split over many."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd.autodiff.registry import primitive
from spmd.autodiff.signatures import Tree
from spmd.autodiff.tracer import Array
from spmd.errors import LayoutError, SpecError, StateError, describe
from spmd.frontends import frontend
from spmd.functions.arguments import as_array, require_invariant
from spmd.functions.embedding_plans import embedding_plan
from spmd.functions.global_operands import first_global, layout_of_values, run_by_specs
from spmd.functions.layouts import array_operand, dtype_of
from spmd.functions.local import local
from spmd.functions.local.embeddings import added_rows, checked_ids, rows_at
from spmd.functions.planned import Operand, is_split, run_layer
from spmd.global_ops.call import global_value, names_of
from spmd.layout import Layout, P, Spec
from spmd.mesh import here
from spmd.tracebacks import api_boundary

__all__ = ["add_rows", "embedding", "one_hot", "take_rows"]


@primitive("one_hot", None)
def _one_hot(ids, *, classes, dtype):
    column = ids[..., None]
    return (column == np.arange(classes, like=column)).astype(dtype)


@api_boundary
def take_rows(table: Tree, ids: Any) -> Tree:
    """The rows of a table that ids name. table: (n, ...). ids: integers of any shape, from 0 to n - 1.

    Forward: y[i, ...] = table[ids[i], ...], of shape ids.shape + table.shape[1:]. Adjoint: `add_rows`.
    Raises SpecError for ids out of range. On a GPU the ids are not read: there such rows are NaN, and the table gets no
    gradient of them.

        >>> table = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> spmd.functions.take_rows(table, np.array([2, 0]))
        array([[5., 6.],
               [1., 2.]])
        >>> spmd.grad(lambda t: np.sum(spmd.functions.take_rows(t, np.array([2, 2]))))(table)
        array([[0., 0.],
               [0., 0.],
               [2., 2.]])
    """
    where = "spmd.functions.take_rows"
    table = _table(where, "table", table, array_operand)
    if first_global(table, ids) is not None:
        ids = array_operand(where, "ids", ids, "iu", "integers", "ids.astype(int)")
        return run_layer(where, lambda t, i: embedding_plan(where, t, i, (), None), _operands(table, ids))
    return rows_at(table, checked_ids(where, ids, table.shape[0], ()))


@api_boundary
def add_rows(ids: Any, g: Any, rows: int) -> Any:
    """A table in which row r is the sum of the entries of g whose id is r. ids: integers of any shape, from 0 to
    rows - 1. g: of shape ids.shape + (...). Gives (rows, ...).

    Forward: y[ids[i], ...] += g[i, ...], in a fixed order; in float32 where g is of a short type. Adjoint: `take_rows`.
    Raises SpecError for ids out of range (on a GPU these are left out), LayoutError for g of another shape.

        >>> spmd.functions.add_rows(np.array([0, 2, 0]), np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), 3)
        array([[6., 8.],
               [0., 0.],
               [3., 4.]])
    """
    where = "spmd.functions.add_rows"
    g, rows = _table(where, "g", g), _count(where, "rows", rows)
    ids = checked_ids(where, ids, rows, ())
    if g.shape[: ids.ndim] != ids.shape:
        raise LayoutError.at(
            where,
            argument="g",
            got=f"{describe(g)} for ids of shape {list(ids.shape)}",
            need="an entry for each id: its first dimensions are those of ids",
            mend="np.broadcast_to(g, (*ids.shape, ...))",
        )
    return added_rows(ids, g, rows=rows)


@api_boundary
def embedding(
    table: Any,
    ids: Any,
    axis_name: str | Sequence[str] | None = None,
    padding_idx: int | None = None,
    *,
    spec: Spec | None = None,
    table_spec: Spec | None = None,
    out_spec: Spec | None = None,
) -> Any:
    """The rows of a table that ids name. Arrays of NumPy, CuPy or PyTorch.

    table: (n, ...). ids: integers of any shape, from 0 to n - 1. Gives ids.shape + table.shape[1:].
    padding_idx: an id whose row gets no gradient.
    spec, table_spec: in a body, how the whole ids and table are split, of which ids and table are this worker's blocks:
    specs, or a `Layout` on some of the workers. None: the whole. Outside of bodies global arrays have their layouts.
    axis_name: in place of table_spec, the axes that split the rows. out_spec: how the result is to lie. None: as ids
    and the further dimensions of the table, without the axes of the rows.

    Forward: y = table[ids]. Each worker looks up the rows that it has; the results are summed over the axes of the
    rows, by one all-reduce, or by a reduce-scatter where out_spec splits the result by them. Ids that the axes of the
    table split are gathered first. Adjoint: each worker adds the cotangents of its rows; those of a table that lies
    whole along the axes of ids are summed over them.
    Raises SpecError for ids out of range (on a GPU their rows are NaN, and the table gets no gradient of them),
    LayoutError for layouts that do not fit, StateError for a table or ids of another state than axis_name says.
    Source: Shoeybi et al., "Megatron-LM: Training multi-billion parameter language models using model parallelism",
    2019.

        >>> with spmd.Mesh(model=2):
        ...     table = spmd.put(np.arange(8.0).reshape(4, 2), P("model"))
        ...     spmd.functions.embedding(table, np.array([3, 0]))
        ...     spmd.grad(lambda t: np.sum(spmd.functions.embedding(t, np.array([3, 3]))))(table)
        PartitionedArray([[6., 7.],
                          [0., 1.]], dtype=float64, spec=P(None, None))
        PartitionedArray([[0., 0.],
                          [0., 0.],
                          [0., 0.],
                          [2., 2.]], dtype=float64, spec=P('model', None))
    """
    where = "spmd.functions.embedding"
    padding = () if padding_idx is None else (_count(where, "padding_idx", padding_idx),)
    table_spec = _spec_of_rows(where, table, ids, axis_name, table_spec)
    operands = [Operand("table_spec", table, table_spec), Operand("spec", ids, spec)]
    if all(frontend(o.x) is None for o in operands):
        table = _table(where, "table", table, array_operand)
        ids = array_operand(where, "ids", ids, "iu", "integers", "ids.astype(int)")
    operands = [o._replace(x=x) for o, x in zip(operands, (table, ids), strict=True)]
    _check_dtype_of_ids(where, ids)
    if out_spec is None and not is_split(*operands):
        return local(table, "embeddings").rows(where, table, ids, (0, table.shape[0], table.shape[0]), padding)
    return run_layer(where, lambda t, i: embedding_plan(where, t, i, padding, out_spec), operands)


def _spec_of_rows(where: str, table: Any, ids: Any, axis_name: Any, table_spec: Spec | None) -> Spec | None:
    """The spec of a table: that which is given, or that which splits its rows along these axes."""
    if axis_name is None:
        return table_spec
    if table_spec is not None:
        got, need = f"{axis_name!r}, and table_spec={table_spec}", "one of the two"
        raise SpecError.at(where, argument="axis_name", got=got, need=need, mend="leave axis_name out")
    names = here(where).mesh.names(axis_name, where)
    _check_states(where, table, ids, names)
    return P(names)


def _check_dtype_of_ids(where: str, ids: Any) -> None:
    if dtype_of(ids).kind not in "iu":
        need, mend = "integers", "ids.astype(int)"
        raise SpecError.at(where, argument="ids", got=describe(ids), need=need, mend=mend)


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
def one_hot(ids: Any, classes: int, dtype: Any = float) -> Any:
    """Rows of zeros with a one at the place that each id names. ids: integers of any shape, from 0 to classes - 1.

    Gives (*ids.shape, classes). Raises SpecError for ids out of range; on a GPU their rows are zero.

        >>> spmd.functions.one_hot(np.array([2, 0]), 3)
        array([[0., 0., 1.],
               [1., 0., 0.]])
    """
    where = "spmd.functions.one_hot"
    classes = _count(where, "classes", classes)
    try:
        dtype = np.dtype(dtype)
    except TypeError:
        need = "a dtype"
        raise SpecError.at(where, argument="dtype", got=describe(dtype), need=need, mend="dtype=np.float32") from None
    fun, value = _OneHot(where, classes, dtype), global_value(ids)
    if value is None:
        return fun(None, ids)
    ids = array_operand(where, "ids", ids, "iu", "integers", "ids.astype(int)")
    lies = layout_of_values(value, ids.shape)
    out = Layout((*ids.shape, classes), P(*names_of(lies, ids.ndim), None), lies.axes, [*lies.cuts, None])
    return run_by_specs(where, fun, lies, [ids], [lies], out, value)


@dataclass(frozen=True)
class _OneHot:
    """`one_hot` of blocks."""

    where: str
    classes: int
    dtype: np.dtype

    def __call__(self, _lies: Layout | None, ids: Any) -> Any:
        return _one_hot(checked_ids(self.where, ids, self.classes, ()), classes=self.classes, dtype=self.dtype)


def _operands(table: Any, ids: Any) -> list[Operand]:
    return [Operand("table", table), Operand("ids", ids)]


def _table(where: str, name: str, x: Any, checked: Callable[..., Any] = as_array) -> Any:
    x = checked(where, name, x, "fciub", "an array of numbers", "np.asarray(x)")
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
