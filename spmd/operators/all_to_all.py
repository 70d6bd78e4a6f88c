"""All-to-all: every worker has a piece for every other, of equal, balanced or any lengths."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.signatures import Tree
from spmd.autodiff.tracer import value_of
from spmd.device import to_host
from spmd.errors import LayoutError, describe
from spmd.frontends import frontend
from spmd.kernels.memory import pool
from spmd.mesh import Worker, here
from spmd.operators.apply import operate
from spmd.operators.base import Called, Operator, named
from spmd.operators.memo import interned, memoised, rebound
from spmd.operators.reduce import AxisName, _names
from spmd.operators.splitting import agree, given_sizes, normal_axis, split_ways
from spmd.operators.varying import varying
from spmd.transport.call import Call, Group, Shape
from spmd.transport.handles import read_only
from spmd.transport.plan import Combine, Concatenate, Make, Plan

__all__ = ["AllToAll", "Piece", "RaggedAllToAll", "all_to_all", "pswapaxes", "ragged_all_to_all"]


@dataclass(frozen=True)
class AllToAll(Operator):
    """V -> V: each block is split along one dimension, piece k goes to worker k, what arrives is joined along another.

    sizes: the lengths of the pieces along split_axis (None: balanced). joined: those of the pieces that arrive along
    concat_axis (None: as they come). Its adjoint is `AllToAll` with the two swapped.
    """

    split_axis: int = 0
    concat_axis: int = 0
    tiled: bool = False
    sizes: tuple[int, ...] | None = None
    joined: tuple[int, ...] | None = None

    function: ClassVar[str] = "all_to_all"
    private: ClassVar[tuple[str, ...]] = ("sizes", "joined")

    @memoised
    def _split(self, group: Group, shape: Shape) -> tuple[int, int, Sequence[Any], tuple[int, ...] | None]:
        """Of a block of this shape: the dimensions, counted from the front, the index of the piece for each member,
        and the lengths of the pieces where it is tiled."""
        split, indices, sizes = split_ways(self, "split_axis", self.split_axis, group, shape, self.tiled, self.sizes)
        return split, normal_axis(self.function, "concat_axis", self.concat_axis, len(shape)), indices, sizes

    def check(self, group: Group, x: np.ndarray) -> None:
        self._split(group, x.shape)

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        split, concat, indices, sizes = self._split(group, shape)

        def bind(shapes: Sequence[Shape]) -> AllToAll:
            agree(self.function, shapes, concat if self.tiled else None)
            if not self.tiled:
                return rebound(self, split_axis=split, concat_axis=concat)
            lengths = tuple(s[concat] for s in shapes)
            return rebound(self, split_axis=split, concat_axis=concat, sizes=sizes, joined=lengths)

        return Plan("all_to_all", group, shape, dtype, indices, Concatenate(concat, self.tiled), bind)

    @property
    def H(self) -> Operator:
        return interned(AllToAll, self.axes, self.concat_axis, self.split_axis, self.tiled, self.joined, self.sizes)


def all_to_all(
    x: Tree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
    sizes: Sequence[int] | None = None,
) -> Tree:
    """Each worker's block split over the workers along axis_name, and what they send here joined.

    x: the block, or a pytree of blocks. tiled=True: dimension split_axis is cut into n pieces (balanced, or of the
    given sizes), piece k goes to worker k, and what arrives is joined along concat_axis; blocks may be uneven there.
    tiled=False: dimension split_axis has one entry per worker and goes away; the entries that arrive are stacked
    along a new dimension concat_axis.

    Forward: y_k = [x_0[piece k]; x_1[piece k]; ...]. Adjoint: the same with the dimensions swapped, the pieces as they
    came. Cost: one all-to-all. Raises LayoutError for a length or sizes that do not fit. As `jax.lax.all_to_all`.

        >>> with spmd.Mesh(x=2):
        ...     columns = spmd.map(lambda x: spmd.all_to_all(x, "x", 1, 0, tiled=True), P("x"), P(None, "x"))
        ...     x = columns(np.arange(6.0).reshape(2, 3))
        >>> x
        PartitionedArray([[0., 1., 2.],
                          [3., 4., 5.]], dtype=float64, spec=P(None, 'x'))
    """
    names = _names(axis_name, "all_to_all")
    given = given_sizes("all_to_all", sizes, tiled)
    return operate(interned(AllToAll, names, split_axis, concat_axis, tiled, given), x, sys._getframe(1))


def pswapaxes(x: Tree, axis_name: AxisName, axis: int) -> Tree:
    """Dimension `axis` of the blocks swapped with the mesh axis: y_k[j] = x_j[k] along it.

    x: the block, or a pytree of blocks; dimension `axis` has one entry per worker along axis_name.

    Forward: the transpose of workers and entries. Adjoint: the same. Cost: one all-to-all. Raises LayoutError for
    another length. As `jax.lax.pswapaxes`; for blocks of any length, uneven ones too, `all_to_all(x, axis_name, axis,
    axis, tiled=True)`.

        >>> with spmd.Mesh(x=2):
        ...     spmd.map(lambda x: spmd.pswapaxes(x, "x", 0), P("x"), P("x"))(np.array([1, 2, 3, 4]))
        PartitionedArray([1, 3, 2, 4], dtype=int64, spec=P('x'))
    """
    names = _names(axis_name, "pswapaxes")
    n = here("spmd.pswapaxes").group(names).size
    for leaf in tree.leaves(x):
        shape = np.shape(value_of(leaf))
        d = normal_axis("pswapaxes", "axis", axis, len(shape))
        if shape[d] != n:
            raise LayoutError.at(
                "spmd.pswapaxes",
                argument="x",
                got=f"length {shape[d]} in dimension {d}",
                need=f"length {n}, one entry per worker",
                mend="spmd.all_to_all(x, axis_name, axis, axis, tiled=True) exchanges pieces of any length",
            )
    return operate(named("pswapaxes", AllToAll, names, axis, axis), x, sys._getframe(1))


class Piece(NamedTuple):
    """Rows [start, start + size) of the block of member `source`: they go to rows from `at` on of member `target`."""

    source: int
    target: int
    start: int
    at: int
    size: int


@dataclass(frozen=True)
class RaggedAllToAll(Operator):
    """V -> V: pieces of the blocks' rows, of any length, copied to other workers and added to zeros there.

    pieces: those that this worker sends or gets, at least; those of other workers are left alone. rows: the lengths of
    the blocks before and after in dimension 0. Its adjoint is the same with the pieces the other way round.
    """

    pieces: tuple[Piece, ...] = ()
    rows: tuple[int, int] = (0, 0)

    function: ClassVar[str] = "ragged_all_to_all"
    private: ClassVar[tuple[str, ...]] = ("pieces", "rows")

    def check(self, group: Group, x: np.ndarray) -> None:
        k = group.index
        if x.ndim == 0 or x.shape[0] != self.rows[0]:
            raise self._error(f"a block of shape {list(x.shape)}", f"{self.rows[0]} rows, as rows={self.rows} says")
        for p in self.pieces:
            if not (0 <= p.source < group.size and 0 <= p.target < group.size):
                raise self._error(repr(p), f"places from 0 to {group.size - 1}")
            for is_own, start, n in ((p.source == k, p.start, self.rows[0]), (p.target == k, p.at, self.rows[1])):
                if is_own and not (p.size >= 0 and 0 <= start <= n - p.size):
                    raise self._error(repr(p), f"rows from 0 to {n}")

    def _error(self, got: str, need: str) -> LayoutError:
        return LayoutError.at(
            f"spmd.{self.function}", argument="x", got=got, need=need, mend="give pieces of the blocks there are"
        )

    def plan(self, group: Group, shape: Shape, dtype: np.dtype) -> Plan:
        gives: dict[int, list[Piece]] = {}
        gets: dict[int, list[Piece]] = {}
        for p in self.pieces:
            if p.size and p.source == group.index:
                gives.setdefault(p.target, []).append(p)
            if p.size and p.target == group.index:
                gets.setdefault(p.source, []).append(p)
        parts = [_rows(gives[k]) if k in gives else None for k in range(group.size)]
        return Plan("exchange", group, shape, dtype, parts, AddRows(self.rows[1], gets), lambda _: self)

    @property
    def H(self) -> Operator:
        return self._adjoint

    @cached_property
    def _adjoint(self) -> RaggedAllToAll:
        reversed_pieces = tuple(Piece(p.target, p.source, p.at, p.start, p.size) for p in self.pieces)
        return RaggedAllToAll(self.axes, reversed_pieces, (self.rows[1], self.rows[0]))


def _rows(pieces: Sequence[Piece]) -> Any:
    """The index of the rows of some pieces, one piece after the other."""
    if all(p.start + p.size == q.start for p, q in itertools.pairwise(pieces)):
        return slice(pieces[0].start, pieces[-1].start + pieces[-1].size)
    return np.concatenate([np.arange(p.start, p.start + p.size) for p in pieces])


@dataclass(frozen=True)
class AddRows(Combine):
    """Zeros of so many rows, to which the pieces that come from each member are added where they belong."""

    rows: int
    pieces: Mapping[int, Sequence[Piece]]
    parallel: ClassVar[bool] = True

    def sources(self, plan: Plan) -> Collection[int]:
        return tuple(self.pieces)

    def complete(self, plan: Plan, shapes: Sequence[Any]) -> tuple[Make, Shape]:
        shape = (self.rows, *plan.shape[1:])
        spans = sorted((p.at, p.at + p.size) for run in self.pieces.values() for p in run)
        apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        covered = apart and sum(end - start for start, end in spans) == self.rows
        pooled = covered and math.prod(shape) * plan.dtype.itemsize >= pool.POOL_MIN
        empty = np.empty_like if covered else np.zeros_like

        def make(x: Any, blocks: Sequence[Any], *more: Any) -> Any:
            y = pool.empty(shape, x.dtype) if pooled and type(x) is np.ndarray else empty(x, shape=shape, order="C")
            for source, run in self.pieces.items():
                ends = itertools.accumulate(p.size for p in run)
                for p, end in zip(run, ends, strict=True):
                    block = blocks[source][end - p.size : end]
                    if apart:
                        y[p.at : p.at + p.size] = block
                    else:
                        y[p.at : p.at + p.size] += block
            return read_only(y)

        return make, shape

    def __str__(self) -> str:
        return f"{self.rows} rows of zeros, to which rows from members {', '.join(map(str, self.pieces))} are added"


def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
) -> Any:
    """Pieces of any number of rows from every worker to every other along axis_name, written into `output`.

    operand: the block to send from. output: the block whose rows are replaced by those that arrive. Both have the same
    dtype and the same dimensions but for the first; or pytrees of such blocks, all sent alike.
    input_offsets, send_sizes: where the pieces to send begin in operand, and how many rows they have: m for each
    worker along the axis, those for the first worker first. output_offsets: where each begins in the output of the
    worker that it goes to. recv_sizes: how many rows come, m from each worker, in its order. Integer arrays, which may
    differ from worker to worker (bare data of this worker, or Varying), or sequences of ints.

    Forward (V -> V): y_k = output_k, with the rows [output_offsets_j, + size) replaced by the piece that j sends to k.
    Linear in operand and output. Adjoint: to operand, the rows of the cotangent go back to where they came from, and
    those of a row that was sent twice are added; to output, the cotangent with zeros where rows were replaced.
    Cost: a message to each worker that gets rows from here, and an all-to-all of 16 bytes per piece, which checks it.
    Raises LayoutError for rows that are not there, sizes that do not agree, and pieces that overlap in output.

        >>> def body(x, to, come):
        ...     return spmd.ragged_all_to_all(x, np.zeros(4), [0, 1], [1, 2], to, come, axis_name="x")
        >>> with spmd.Mesh(x=2):
        ...     spmd.map(body, P("x"), P("x"))(np.arange(6.0), np.array([0, 0, 1, 2]), np.array([1, 1, 2, 2]))
        PartitionedArray([0., 3., 0., 0., 1., 2., 4., 5.], dtype=float64, spec=P('x'))
    """
    names, frame = _names(axis_name, "ragged_all_to_all"), sys._getframe(1)
    worker = here("spmd.ragged_all_to_all")
    group = worker.group(names)
    numbers = _checked_numbers(
        group, input_offsets=input_offsets, send_sizes=send_sizes, output_offsets=output_offsets, recv_sizes=recv_sizes
    )
    pairs, treedef = _pairs(operand, output)
    rows = [(np.shape(x)[0], np.shape(y)[0]) for x, y in pairs]
    for n, _ in rows:
        _check_rows("input_offsets", numbers["input_offsets"], numbers["send_sizes"], n, worker, group)
    sent = np.stack([numbers["output_offsets"], numbers["send_sizes"]], axis=-1)
    *leaves, whole = tree.leaf_positions(treedef)
    detail = "where the rows go"
    call = Call(
        "ragged_all_to_all", names, sent.dtype, sent.shape, detail=detail, same_shape=True, frame=frame, leaf=whole
    )
    received = np.stack(worker.comm.all_to_all(group, call, [np.ascontiguousarray(t) for t in sent]).wait())
    _check_sizes(received[..., 1], numbers["recv_sizes"], worker, group)
    for _, n in rows:
        _check_rows("output_offsets", received[..., 0], received[..., 1], n, worker, group)
    _check_overlap(received, worker, group)

    pieces = _pieces(group, numbers, sent, received)
    results = []
    for (x, y), n, leaf in zip(pairs, rows, leaves, strict=True):
        called = Called("ragged_all_to_all", leaf)
        arrived = operate(RaggedAllToAll(names, pieces, n, called=called), x, frame)
        results.append(_placed(arrived, y, received.reshape(-1, 2).tolist(), x, names))
    return tree.unflatten(treedef, results)


def _placed(arrived: Any, y: Any, rows: Sequence[Sequence[int]], x: Any, names: tuple[str, ...]) -> Any:
    """y, with the rows that arrived in place of its own. rows: where they begin, and how many they are."""
    replaced = np.zeros((np.shape(y)[0],) + (1,) * (np.ndim(y) - 1), bool)
    for at, size in rows:
        replaced[at : at + size] = True
    other = frontend(x)
    if other is not None:
        return other.where(varying(replaced, names), arrived, y)
    return read_only(np.where(varying(replaced, names), arrived, y))


def _pieces(group: Group, numbers: dict[str, np.ndarray], sent: np.ndarray, received: np.ndarray) -> tuple[Piece, ...]:
    """The pieces that this worker sends, and those that it gets. sent, received: starts and lengths in the targets, as
    sent to each worker, and as received from each."""
    me, m = group.index, sent.shape[1]
    pieces = [
        Piece(me, k, *map(int, (numbers["input_offsets"][k, i], *sent[k, i])))
        for k in range(group.size)
        for i in range(m)
    ]
    # Where a piece begins at its sender no receiver knows, nor needs to: it takes what comes in order.
    pieces += [Piece(k, me, 0, *map(int, received[k, i])) for k in range(group.size) if k != me for i in range(m)]
    return tuple(pieces)


def _checked_numbers(group: Group, **given) -> dict[str, np.ndarray]:
    """The offsets and sizes, a row of them for each worker."""
    table, need = {}, f"integers, one for each of the {group.size} workers, or m of them each; as many in all four"
    for argument, numbers in given.items():
        bare = np.asarray(to_host(value_of(numbers)))
        bare = bare.astype(np.int64) if bare.size == 0 or bare.dtype.kind in "iu" else bare
        first = next(iter(table.values()), bare)
        if bare.ndim != 1 or bare.dtype != np.int64 or bare.size % group.size or bare.size != first.size:
            raise LayoutError.at(
                "spmd.ragged_all_to_all",
                argument=argument,
                got=describe(numbers),
                need=need,
                mend="np.array([...]), those for the first worker first",
            )
        table[argument] = bare.reshape(group.size, -1) if bare.size else np.zeros((group.size, 0), np.int64)
    return table


def _pairs(operand, output) -> tuple[list[tuple[Any, Any]], Any]:
    """The leaves of operand and output, matched, and the structure of both."""
    (xs, treedef), (ys, other) = tree.flatten(operand), tree.flatten(output)

    def fit(x, y) -> bool:
        shapes = np.shape(value_of(x)), np.shape(value_of(y))
        dtypes = getattr(x, "dtype", None), getattr(y, "dtype", None)
        return min(map(len, shapes)) > 0 and shapes[0][1:] == shapes[1][1:] and dtypes[0] == dtypes[1] is not None

    wrong = [(x, y) for x, y in zip(xs, ys, strict=False) if not fit(x, y)]
    if treedef != other or wrong:
        raise LayoutError.at(
            "spmd.ragged_all_to_all",
            argument="output",
            got=f"{describe(wrong[0][1])} for {describe(wrong[0][0])}" if wrong else f"structure {other}",
            need="the dtype of operand, and its shape but for the first dimension"
            if wrong
            else f"the structure of operand, {treedef}",
            mend="np.zeros((rows, *operand.shape[1:]), operand.dtype)",
        )
    return list(zip(xs, ys, strict=True)), treedef


def _worker_name(worker: Worker, group: Group, k: int) -> str:
    return worker.mesh.describe(group.members[k])


def _check_rows(argument: str, offsets: np.ndarray, sizes: np.ndarray, rows: int, worker: Worker, group: Group) -> None:
    """Raise where a piece is not within the rows of this worker's block."""
    wrong = (offsets < 0) | (sizes < 0) | (offsets + sizes > rows)
    if wrong.any():
        k, i = np.argwhere(wrong)[0]
        own, other = _worker_name(worker, group, group.index), _worker_name(worker, group, int(k))
        ends = f"from {own} to {other}" if argument == "input_offsets" else f"from {other} to {own}"
        raise LayoutError.at(
            "spmd.ragged_all_to_all",
            argument=argument,
            got=f"a piece of {sizes[k, i]} rows from row {offsets[k, i]} on, {ends}",
            need=f"rows of a block that has {rows}",
            mend="offsets from 0 on, with offset + size within the block",
        )


def _check_sizes(sent: np.ndarray, expected: np.ndarray, worker: Worker, group: Group) -> None:
    """Raise where this worker expects other sizes than come."""
    if (sent != expected).any():
        k, i = np.argwhere(sent != expected)[0]
        raise LayoutError.at(
            "spmd.ragged_all_to_all",
            argument="recv_sizes",
            got=f"{_worker_name(worker, group, int(k))} sends {sent[k, i]} rows to "
            f"{_worker_name(worker, group, group.index)}, which waits for {expected[k, i]}",
            need="the sender's send_sizes",
            mend="recv_sizes = spmd.all_to_all(send_sizes, axis_name, 0, 0, tiled=True)",
        )


def _check_overlap(received: np.ndarray, worker: Worker, group: Group) -> None:
    """Raise where two pieces go into the same rows: the result would depend on their order."""
    spans = [(at, at + size, k) for k, run in enumerate(received.tolist()) for at, size in run if size]
    spans.sort()
    for (_, end, k), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise LayoutError.at(
                "spmd.ragged_all_to_all",
                argument="output_offsets",
                got=f"row {start} of {_worker_name(worker, group, group.index)} twice: "
                f"from {_worker_name(worker, group, k)} and from {_worker_name(worker, group, other)}",
                need="pieces that do not overlap in output",
                mend="give each its own rows, from where the one before ends",
            )
