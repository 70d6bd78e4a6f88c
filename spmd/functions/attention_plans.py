"""What each worker computes of an attention, and how queries, keys and values come there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from spmd.functions.attention_tiles import Part, merged, runs_of_heads
from spmd.functions.layouts import checked_target, spec_of_names
from spmd.functions.local import local, namespace
from spmd.functions.movement import fetched, relaid, varied
from spmd.layout import Box, Layout, Spec, block_bounds
from spmd.mesh import here
from spmd.operators.memo import interned
from spmd.operators.permute import Permute

__all__ = ["AttentionPlan", "Options", "Ring", "attention_plan", "with_dimensions"]

Pair = tuple[int, int]

HEADS, ROWS, FEATURES = -3, -2, -1
"""Dimensions of queries, keys and values."""


class Options(NamedTuple):
    """causal, scale, method: as for `attention`."""

    causal: bool
    scale: float | None
    method: str | None

    def scale_for(self, features: int) -> float:
        """The scale, for queries of so many features."""
        return max(1, features) ** -0.5 if self.scale is None else self.scale


Send = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Ring:
    """What one worker computes: its queries with the keys that it holds, then with those that come.

    parts: which rows meet which columns, with the worker's own keys and after each shift; one for each piece of the
    rows. shift: hands keys and values to the next worker; None where they do not go round. swap: hands the second half
    of a block to a partner, which computes with it, and back; None where workers compute with their blocks. Backward
    swaps again, so that between the sweeps no worker holds halves of others.
    """

    parts: tuple[tuple[Part, ...], ...]
    shift: Permute | None = None
    swap: Permute | None = None

    def forward(self, send: Send, q, k, v, bias, mask) -> tuple[Any, Any]:
        """The result, and the log-sum-exp of each row of the pieces."""
        family, lib = local(q, "attentions"), local(q, "attentions").library(q)
        dtype, rows = q.dtype, self._rows(bias, mask, self._swapped(send, q))
        k, v = (_joined(self._swapped(send, x)) for x in (k, v))
        results: list[Any] = [None] * len(rows)
        for step, parts in enumerate(self.parts):
            if step:
                k, v = send(self.shift, k), send(self.shift, v)
            for n, (part, (bias, mask, q)) in enumerate(zip(parts, rows, strict=True)):
                results[n] = merged(lib.xp, results[n], family.attend(q, k, v, bias, mask, part=part))
        out = [lib.cast(piece, dtype) for piece, _ in results]
        return self._returned(send, out), _joined([lse for _, lse in results], axis=-1)

    def backward(self, send: Send, q, k, v, bias, mask, out, lse, g, g_lse) -> list[Any]:
        """The cotangents of q, k, v and, if there is one, the bias. Those of k and v go round with them, and arrive
        where these began."""
        family, lib = local(q, "attentions"), local(q, "attentions").library(q)
        dtypes, half = (q.dtype, k.dtype, v.dtype), _half(k)
        deltas = self._swapped(send, lib.xp.sum(lib.wide(g) * lib.wide(out), axis=-1), axis=-1)
        lses, g_lses = (self._split(x, _half(q), axis=-1) for x in (lse, g_lse))
        deltas = [a - b for a, b in zip(deltas, g_lses, strict=True)]
        rows = self._rows(bias, mask, self._swapped(send, q), lses, deltas, self._swapped(send, g))
        k, v = (_joined(self._swapped(send, x)) for x in (k, v))
        of_rows: list[list[Any]] = [[] for _ in rows]
        of_keys: list[Any] = []
        for step, parts in enumerate(self.parts):
            if step:
                k, v = send(self.shift, k), send(self.shift, v)
            for n, (part, (b, m, *row)) in enumerate(zip(parts, rows, strict=True)):
                dq, dk, dv, *db = family.attend_adjoint(row[0], k, v, b, m, *row[1:], part=part)
                of_rows[n], of_keys = _added(of_rows[n], [dq, *db]), _added(of_keys, [dk, dv])
                del dq, dk, dv, db, row
            if self.shift is not None:
                of_keys = [send(self.shift, a) for a in of_keys]
        of_queries, *of_bias = zip(*of_rows, strict=True)
        of_blocks = zip((of_queries, *(self._split(a, half) for a in of_keys)), dtypes, strict=True)
        found = [self._returned(send, [lib.cast(a, dtype) for a in pieces]) for pieces, dtype in of_blocks]
        for pieces in of_bias:
            whole = sum(pieces[1:], pieces[0]) if bias.shape[ROWS] == 1 else _joined(pieces)
            found.append(lib.cast(whole, bias.dtype))
        return found

    def _swapped(self, send: Send, x: Any, axis: int = ROWS) -> list[Any]:
        """The pieces that the worker computes with, from its block."""
        if self.swap is None:
            return [x]
        first, second = self._split(x, _half(x, axis), axis)
        return [first, send(self.swap, second)]

    def _returned(self, send: Send, pieces: Sequence[Any]) -> Any:
        """The worker's block, from the pieces: the adjoint of `_swapped`."""
        return pieces[0] if self.swap is None else _joined([pieces[0], send(self.swap, pieces[1])])

    def _split(self, x: Any, at: int, axis: int = ROWS) -> list[Any]:
        """The two pieces that are joined in an array, the first of this length; one if nothing is swapped."""
        if self.swap is None:
            return [x]
        after = (slice(None),) * (-1 - axis)
        return [x[..., piece, *after] for piece in (slice(at), slice(at, None))]

    def _rows(self, bias: Any, mask: Any, *of_pieces: list[Any]) -> list[tuple[Any, ...]]:
        """For each piece of the rows its bias, its mask, and what else there is of it."""
        count, half = len(of_pieces[0]), of_pieces[0][0].shape[ROWS]
        terms = ([a] * count if a is None or a.shape[ROWS] == 1 else self._split(a, half) for a in (bias, mask))
        return [*zip(*terms, *of_pieces, strict=True)]


def _half(x: Any, axis: int = ROWS) -> int:
    """The length of the first half of a block, which is not swapped."""
    return (x.shape[axis] + 1) // 2


def _joined(pieces: Sequence[Any], axis: int = ROWS) -> Any:
    return pieces[0] if len(pieces) == 1 else namespace(pieces[0]).concat([*pieces], axis=axis)


def _added(sums: list[Any], terms: list[Any]) -> list[Any]:
    return [a + b for a, b in zip(sums, terms, strict=True)] if sums else terms


@lru_cache(maxsize=1024)
def attention_plan(
    where: str, q: Layout, k: Layout, v: Layout, mask: Layout | None, bias: Layout | None, options: Options, out: Any
) -> AttentionPlan:
    """The plan for these layouts; by `options.method`, or by that which fits them."""
    method = options.method
    if method is None:
        blocks = len(q.cuts[ROWS])
        sharing = blocks * len(q.cuts[HEADS])
        method = "heads" if blocks == 1 else "sequence" if q.shape[HEADS] >= sharing else "ring"
    return AttentionPlan(where, q, k, v, mask, bias, options._replace(method=method), out)


@dataclass(frozen=True)
class AttentionPlan:
    """The layouts of an attention, and what each worker needs for it."""

    where: str
    q: Layout
    k: Layout
    v: Layout
    mask: Layout | None
    bias: Layout | None
    options: Options
    out_spec: Spec | None

    @cached_property
    def queries(self) -> Layout:
        """The layout by which queries are dealt out: with whole features, by "sequence" with whole sequences too."""
        q, by_heads = self.q, self.options.method == "sequence"
        if q.spec is None:
            *batch, heads, rows, features = map(len, q.cuts)
            assert q.workers is not None
            if by_heads:
                grid, workers = (*batch, heads * rows * features, 1, 1), q.workers
            else:
                grid, workers = (*batch, heads, rows, 1), q.workers[::features]
            same = [*q.cuts[:HEADS], None if by_heads else q.cuts[HEADS], None if by_heads else q.cuts[ROWS], None]
            return Layout.grid(q.shape, grid, q.axes, workers, same)
        *batch, heads, rows, features = q.spec.dims
        if by_heads and (rows or features):
            names = [*batch, (*heads, *rows, *features), (), ()]
        else:
            names = [*batch, heads, rows, ()]
        return _with_names(q, names)

    @cached_property
    def out(self) -> Layout:
        """The layout of the result. By itself that of q, or of the queries where features are split."""
        lies = self.q if self.options.method == "sequence" and len(self.q.cuts[FEATURES]) == 1 else self.queries
        natural = _with_features(lies, self.v.shape[FEATURES])
        return checked_target(self.where, "out_spec", self.out_spec, natural.shape, natural, self.q.axes)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes over which queries vary, and along which what they need moves."""
        lies = self.queries
        return tuple(n for n in lies.axes if lies.spec is None or n in lies.spec.varying)

    @cached_property
    def _dealt(self) -> Layout:
        """The layout of the queries over these axes alone; workers are numbered along them. Where halves are swapped,
        blocks are of even length."""
        return _over(_even(self.queries) if self._in_pairs else self.queries, self.axes)

    @cached_property
    def _places(self) -> list[tuple[int, ...] | None]:
        """For each worker the place of its block of queries in each dimension."""
        return [self._dealt.positions(w) for w in range(self._dealt.size)]

    @cached_property
    def _blocks(self) -> int:
        """How many blocks of keys go round."""
        return len(self.queries.cuts[ROWS]) if self.options.method == "ring" else 1

    @property
    def _in_pairs(self) -> bool:
        """Whether workers swap halves of their blocks, so that all have as much to compute: those at places i and
        n - 1 - i along a ring of n, if it is causal."""
        return self.options.causal and self._blocks > 1

    def _pieces(self, cuts: Sequence[int], at: int) -> tuple[Pair, ...]:
        """The positions with which the worker at a place along the ring computes, of a sequence in these blocks."""
        start, stop = _bounds(cuts, at)
        if not self._in_pairs:
            return ((start, stop),)
        first, last = _bounds(cuts, self._blocks - 1 - at)
        return (start, (start + stop + 1) // 2), ((first + last + 1) // 2, last)

    def rows(self, worker: int) -> tuple[Pair, ...]:
        """The positions of the queries of a worker."""
        place = self._places[worker]
        if place is None:
            return ((0, 0),) * (1 + self._in_pairs)
        return self._pieces(self._dealt.cuts[ROWS], place[ROWS])

    def columns(self, worker: int, step: int = 0) -> tuple[Pair, ...]:
        """The positions of the keys that a worker has after so many shifts."""
        place, length = self._places[worker], self.k.shape[ROWS]
        if place is None:
            return ((0, 0),) * (1 + self._in_pairs)
        if self._blocks > 1:
            return self._pieces(self._key_cuts, (place[ROWS] - step) % self._blocks)
        last = max(stop for _, stop in self.rows(worker))
        return ((0, min(length, last) if self.options.causal else length),)

    @cached_property
    def _key_cuts(self) -> tuple[int, ...]:
        """The lengths of the blocks of keys that go round: as they lie, if they lie as the queries do, but even where
        halves are swapped."""
        lies = _even(self._reduced(self.k)) if self._in_pairs else self._reduced(self.k)
        spec, of_queries = lies.spec, self.queries.spec
        if spec is not None and of_queries is not None and spec.dims[ROWS] == of_queries.dims[ROWS]:
            return lies.cuts[ROWS]
        length, n = self.k.shape[ROWS], self._blocks
        if self.k.spec is None and len(self.k.cuts[ROWS]) == n and not self._in_pairs:
            return self.k.cuts[ROWS]
        return tuple(b - a for a, b in (block_bounds(length, n, i) for i in range(n)))

    def parts(self, worker: int, step: int) -> tuple[Part, ...]:
        """Which rows meet which columns on a worker after so many shifts, for each piece of its rows."""
        heads = self._dealt.boxes[worker][HEADS]
        runs, columns = runs_of_heads(heads, self._group), self.columns(worker, step)
        return tuple(Part((rows,), columns, runs, self.options.causal, self._scale) for rows in self.rows(worker))

    @property
    def _scale(self) -> float:
        return self.options.scale_for(self.q.shape[FEATURES])

    @property
    def _group(self) -> int:
        """How many heads share one of the keys."""
        return self.q.shape[HEADS] // self.k.shape[HEADS] if self.k.shape[HEADS] else 1

    @cached_property
    def shift(self) -> Permute | None:
        """The operator that hands keys to the next worker of the ring."""
        return None if self._blocks == 1 else self._along(lambda at: (at + 1) % self._blocks)

    @cached_property
    def swap(self) -> Permute | None:
        """The operator by which partners swap halves of their blocks."""
        return self._along(lambda at: self._blocks - 1 - at) if self._in_pairs else None

    def _along(self, target: Callable[[int], int]) -> Permute:
        """The operator that hands something from each place along a ring to another."""
        at = {place: w for w, place in enumerate(self._places) if place is not None}
        pairs = [(w, at[*p[:ROWS], target(p[ROWS]), p[FEATURES]]) for p, w in at.items()]
        return interned(Permute, self.axes, tuple(sorted(pairs)))

    def _reduced(self, layout: Layout) -> Layout:
        """A layout of the same array over the axes of the queries: what lies along other axes is gathered."""
        if self.queries.spec is None:
            return layout
        if layout.spec is None:
            n = len(layout.shape)
            names = [() if s == 1 else d for s, d in zip(layout.shape, self.queries.spec.dims[-n:], strict=True)]
            return Layout(layout.shape, spec_of_names([*names[:-1], ()]), layout.axes)
        return _with_names(layout, [[n for n in each if n in self.axes] for each in layout.spec.dims])

    @cached_property
    def _needs(self) -> dict[str, tuple[tuple[Box, ...], ...]]:
        """For each operand the boxes that the workers need: one, of bias and mask one for each piece of the rows."""
        workers = range(len(self._places))
        needs: dict[str, tuple[tuple[Box, ...], ...]] = {}
        for name in ("q", "k", "v"):
            needs[name] = (tuple(self._box(name, w) for w in workers),)
        for name in ("bias", "mask"):
            layout = getattr(self, name)
            if layout is not None:
                pieces = 1 + (self._in_pairs and len(layout.shape) > 1 and layout.shape[ROWS] != 1)
                needs[name] = tuple(tuple(self._term_box(layout, w, n) for w in workers) for n in range(pieces))
        return needs

    def _box(self, name: str, worker: int) -> Box:
        """What a worker needs of q, k or v."""
        layout, place = getattr(self, name), self._places[worker]
        if place is None:
            return ((0, 0),) * len(layout.shape)
        *batch, (start, stop), rows, _ = self._dealt.boxes[worker]
        features = (0, layout.shape[FEATURES])
        if name == "q":
            return (*batch, (start, stop), rows, features)
        group = self._group
        keys = (start // group, (stop - 1) // group + 1) if stop > start else (0, 0)
        columns = self.columns(worker)[0] if self._blocks == 1 else _bounds(self._key_cuts, place[ROWS])
        return (*batch, keys, columns, features)

    def _term_box(self, layout: Layout, worker: int, piece: int) -> Box:
        """What a worker needs of a bias or mask, which broadcasts in dimensions of length 1."""
        if self._places[worker] is None:
            return ((0, 0),) * len(layout.shape)
        *batch, heads, _, _ = self._dealt.boxes[worker]
        wanted = (*batch, heads, self.rows(worker)[piece], (0, self.k.shape[ROWS]))
        return tuple(
            (0, 1) if n == 1 else box for n, box in zip(layout.shape, wanted[-len(layout.shape) :], strict=True)
        )

    def _brought(self, name: str, x: Any) -> Any:
        """What this worker needs of an operand."""
        layout = getattr(self, name)
        if layout is None:
            return None
        needs, lies = self._needs[name], self._reduced(layout)
        x = relaid(x, layout, lies)
        if self._stays[name]:
            return varied(x, [n for n in self.axes if n not in lies.varying])
        inner = _over(lies, self.axes)
        return _joined([fetched(x, inner, boxes) for boxes in needs])

    @cached_property
    def _stays(self) -> dict[str, bool]:
        """Whether all workers have what they need of an operand, once it lies over the axes of the queries."""
        return {
            name: len(boxes) == 1 and boxes[0] == _over(self._reduced(getattr(self, name)), self.axes).boxes
            for name, boxes in self._needs.items()
        }

    def brought(self, q: Any, k: Any, v: Any, mask: Any, bias: Any) -> tuple[Any, Any, Any, Any, Any]:
        """What this worker needs of the operands."""
        q, k, v = (self._brought(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        mask, bias = self._brought("mask", mask), self._brought("bias", bias)
        mask, bias = (None if a is None else with_dimensions(a, q.ndim) for a in (mask, bias))
        return q, k, v, mask, bias

    @cached_property
    def lies(self) -> Layout:
        """How the result lies where it is computed."""
        return _with_features(self.queries, self.v.shape[FEATURES])

    def __call__(self, q: Any, k: Any, v: Any, mask: Any, bias: Any) -> Any:
        me = here(self.where).group(self.axes).index if self.axes else 0
        q, k, v, mask, bias = self.brought(q, k, v, mask, bias)
        y = local(q, "attentions").ruled(_ring(self, me), q, k, v, bias, mask)
        lies = _with_features(_even(self.queries), self.v.shape[FEATURES]) if self._in_pairs else self.lies
        return relaid(y, lies, self.out)


@lru_cache(maxsize=1024)
def _ring(plan: AttentionPlan, worker: int) -> Ring:
    return Ring(tuple(plan.parts(worker, step) for step in range(plan._blocks)), plan.shift, plan.swap)


def with_dimensions(a: Any, ndim: int) -> Any:
    """An array with further first dimensions, of length 1."""
    missing = ndim - a.ndim
    return namespace(a).reshape(a, (*[1] * missing, *a.shape)) if missing else a


def _with_names(layout: Layout, names: Sequence[Sequence[str]]) -> Layout:
    """The layout by other axes; dimensions that are split as before keep the lengths of their blocks."""
    same = zip(layout.cuts, layout.spec.dims, names, strict=True)
    cuts = [cut if tuple(old) == tuple(new) else None for cut, old, new in same]
    return Layout(layout.shape, spec_of_names(names), layout.axes, cuts)


def _with_features(layout: Layout, features: int) -> Layout:
    """The layout of another array with whole features, of another number, that lies the same."""
    shape, cuts = (*layout.shape[:FEATURES], features), [*layout.cuts[:FEATURES], (features,)]
    if layout.spec is not None:
        return Layout(shape, layout.spec, layout.axes, cuts)
    return Layout.grid(shape, [len(c) for c in cuts], layout.axes, layout.workers, cuts)


def _over(layout: Layout, axes: Sequence[str]) -> Layout:
    """A layout over those axes that it names, and no others."""
    if tuple(layout.axes) == tuple(axes):
        return layout
    sizes = {n: layout.axes[n] for n in axes}
    return Layout(layout.shape, layout.spec, sizes, layout.cuts)


def _even(layout: Layout) -> Layout:
    """The layout with the sequence in blocks of even length."""
    cuts = [*layout.cuts[:ROWS], None, layout.cuts[FEATURES]]
    if layout.spec is not None:
        return Layout(layout.shape, layout.spec, layout.axes, cuts)
    return Layout.grid(layout.shape, [len(c) for c in layout.cuts], layout.axes, layout.workers, cuts)


def _bounds(cuts: Sequence[int], at: int) -> Pair:
    """Where a block of these lengths begins and ends."""
    start = sum(cuts[:at])
    return start, start + cuts[at]
