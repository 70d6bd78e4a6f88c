"""What each worker computes of an attention, and how queries, keys and values come there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from spmd.box_layout import BoxLayout
from spmd.functions.attention_tiles import Part, merged, runs_of_heads
from spmd.functions.layouts import checked_target, spec_of_names
from spmd.functions.local import local, namespace
from spmd.functions.movement import fetched, relaid, varied
from spmd.layout import Box, Layout, Spec, block_bounds
from spmd.mesh import here
from spmd.operators.memo import interned
from spmd.operators.permute import Permute
from spmd.operators.repartition import accumulate

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


@dataclass(frozen=True)
class Ring:
    """What one worker computes: its queries with the keys that it holds, then with those that come.

    parts: which rows meet which columns, with the worker's own keys and after each shift. shift: hands keys and values
    to the next worker; None where they do not go round.
    """

    parts: tuple[Part, ...]
    shift: Permute | None = None

    def forward(self, send: Callable[[Any, Any], Any], q, k, v, bias, mask) -> tuple[Any, Any]:
        """The result, and the log-sum-exp of each row."""
        family, result = local(q, "attentions"), None
        for step, part in enumerate(self.parts):
            if step:
                k, v = send(self.shift, k), send(self.shift, v)
            result = merged(namespace(q), result, family.attend(q, k, v, bias, mask, part=part))
        assert result is not None
        return family.library(q).cast(result[0], q.dtype), result[1]

    def backward(self, send: Callable[[Any, Any], Any], q, k, v, bias, mask, out, lse, g, g_lse) -> list[Any]:
        """The cotangents of q, k, v and, if there is one, the bias. Those of k and v go round with them, and arrive
        where these began."""
        family, lib = local(q, "attentions"), local(q, "attentions").library(q)
        delta = lib.xp.sum(lib.wide(g) * lib.wide(out), axis=-1) - g_lse
        sums: list[Any] = []
        for step, part in enumerate(self.parts):
            if step:
                k, v = send(self.shift, k), send(self.shift, v)
            terms = family.attend_adjoint(q, k, v, bias, mask, lse, delta, g, part=part)
            sums = [a + b for a, b in zip(sums, terms, strict=True)] if sums else [*terms]
            del terms
            if self.shift is not None:
                sums[1:3] = (send(self.shift, a) for a in sums[1:3])
        return [lib.cast(a, x.dtype) for a, x in zip(sums, (q, k, v, bias), strict=False)]


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
        """The layout of the queries over these axes alone; workers are numbered along them."""
        return _over(self.queries, self.axes)

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
        """Whether each worker has two pieces of the sequences, of which causal attention gives all as much work."""
        return self.options.causal and self._blocks > 1

    def _pieces(self, length: int, at: int, cuts: Sequence[int]) -> tuple[Pair, ...]:
        """The positions that the worker at a place along the ring has of a sequence."""
        n = self._blocks
        if self._in_pairs:
            return block_bounds(length, 2 * n, at), block_bounds(length, 2 * n, 2 * n - 1 - at)
        start = sum(cuts[:at])
        return ((start, start + cuts[at]),)

    def rows(self, worker: int) -> tuple[Pair, ...]:
        """The positions of the queries of a worker."""
        place = self._places[worker]
        if place is None:
            return ((0, 0),) * (1 + self._in_pairs)
        return self._pieces(self.q.shape[ROWS], place[ROWS], self._dealt.cuts[ROWS])

    def columns(self, worker: int, step: int = 0) -> tuple[Pair, ...]:
        """The positions of the keys that a worker has after so many shifts."""
        place, length = self._places[worker], self.k.shape[ROWS]
        if place is None:
            return ((0, 0),) * (1 + self._in_pairs)
        if self._blocks > 1:
            return self._pieces(length, (place[ROWS] - step) % self._blocks, self._key_cuts)
        last = max(stop for _, stop in self.rows(worker))
        return ((0, min(length, last) if self.options.causal else length),)

    @cached_property
    def _key_cuts(self) -> tuple[int, ...]:
        """The lengths of the blocks of keys that go round: as they lie, if they lie as the queries do."""
        lies = self._reduced(self.k)
        spec, of_queries = lies.spec, self.queries.spec
        if spec is not None and of_queries is not None and spec.dims[ROWS] == of_queries.dims[ROWS]:
            return lies.cuts[ROWS]
        length, n = self.k.shape[ROWS], self._blocks
        if self.k.spec is None and len(self.k.cuts[ROWS]) == n:
            return self.k.cuts[ROWS]
        return tuple(b - a for a, b in (block_bounds(length, n, i) for i in range(n)))

    def part(self, worker: int, step: int) -> Part:
        """Which rows meet which columns on a worker after so many shifts."""
        heads = self._dealt.boxes[worker][HEADS]
        runs = runs_of_heads(heads, self._group)
        return Part(self.rows(worker), self.columns(worker, step), runs, self.options.causal, self._scale)

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
        if self._blocks == 1:
            return None
        at = {place: w for w, place in enumerate(self._places) if place is not None}
        pairs = [(w, at[*p[:ROWS], (p[ROWS] + 1) % self._blocks, p[FEATURES]]) for p, w in at.items()]
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
        """For each operand the boxes that the workers need, once or, in pairs of pieces, twice."""
        boxes: dict[str, list[list[Box]]] = {name: [] for name in ("q", "k", "v", "bias", "mask")}
        workers = range(len(self._places))
        for piece in range(1 + self._in_pairs):
            for name in ("q", "k", "v"):
                boxes[name].append([self._box(name, w, piece) for w in workers])
            for name in ("bias", "mask"):
                layout = getattr(self, name)
                if layout is not None and (piece == 0 or (len(layout.shape) > 1 and layout.shape[ROWS] != 1)):
                    boxes[name].append([self._term_box(layout, w, piece) for w in workers])
        return {name: tuple(map(tuple, lists)) for name, lists in boxes.items()}

    def _box(self, name: str, worker: int, piece: int) -> Box:
        """What a worker needs of q, k or v."""
        layout = getattr(self, name)
        if self._places[worker] is None:
            return ((0, 0),) * len(layout.shape)
        *batch, (start, stop), _, _ = self._dealt.boxes[worker]
        features = (0, layout.shape[FEATURES])
        if name == "q":
            return (*batch, (start, stop), self.rows(worker)[piece], features)
        group = self._group
        keys = (start // group, (stop - 1) // group + 1) if stop > start else (0, 0)
        return (*batch, keys, self.columns(worker)[piece], features)

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
        pieces = [fetched(x, inner, boxes) for boxes in needs]
        return pieces[0] if len(pieces) == 1 else namespace(x).concat(pieces, axis=ROWS)

    @cached_property
    def _stays(self) -> dict[str, bool]:
        """Whether all workers have what they need of an operand, once it lies over the axes of the queries."""
        return {
            name: len(boxes) == 1 and boxes[0] == _over(self._reduced(getattr(self, name)), self.axes).boxes
            for name, boxes in self._needs.items()
            if boxes
        }

    def __call__(self, q: Any, k: Any, v: Any, mask: Any, bias: Any) -> Any:
        me = here(self.where).group(self.axes).index if self.axes else 0
        q, k, v = (self._brought(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        mask, bias = self._brought("mask", mask), self._brought("bias", bias)
        mask, bias = (None if a is None else with_dimensions(a, q.ndim) for a in (mask, bias))
        y = local(q, "attentions").ruled(_ring(self, me), q, k, v, bias, mask)
        lies = _with_features(self.queries, self.v.shape[FEATURES])
        if self._in_pairs:
            y = self._returned(y, me, lies)
        return relaid(y, lies, self.out)

    def _returned(self, y: Any, me: int, lies: Layout) -> Any:
        """The two pieces of a result, brought back to where the queries lie."""
        inner, total, at = _over(lies, self.axes), None, 0
        for piece, boxes in enumerate(self._needs["q"]):
            boxes = tuple((*box[:-1], (0, lies.shape[FEATURES])) if any(b for _, b in box) else box for box in boxes)
            start, stop = self.rows(me)[piece]
            block = y[..., at : at + stop - start, :]
            at += stop - start
            source = BoxLayout(lies.shape, boxes, inner.axes)
            added = accumulate(block, source, inner)
            total = added if total is None else total + added
        return total


@lru_cache(maxsize=1024)
def _ring(plan: AttentionPlan, worker: int) -> Ring:
    return Ring(tuple(plan.part(worker, step) for step in range(plan._blocks)), plan.shift)


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
