"""The layouts that an array goes through, so that each dimension is whole when it is transformed. Integers only."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from spmd.fourier.lines import FROM_REAL, TO_REAL, Line
from spmd.layout import Layout, P, block_sizes

__all__ = ["Stage", "stages"]

Names = tuple[tuple[Any, ...], ...]
"""The parts that split each dimension: axes of the mesh, or dimensions of a grid."""


class Stage(NamedTuple):
    """A layout, the lines that are transformed in it, and the layout of the result."""

    before: Layout
    lines: tuple[Line, ...]
    after: Layout


@dataclass(frozen=True)
class Splits:
    """Layouts whose dimensions are split by the same parts, in other ways: those of a spec by its axes, those of a grid
    by the dimensions of the grid that it began with."""

    source: Layout

    @cached_property
    def names(self) -> Names:
        if self.source.spec is not None:
            return tuple(map(tuple, self.source.spec.dims))
        return tuple((d,) if len(cut) > 1 else () for d, cut in enumerate(self.source.cuts))

    def sizes(self, names: Sequence[Any]) -> list[int]:
        if self.source.spec is not None:
            return [self.source.axes[n] for n in names]
        return [len(self.source.cuts[n]) for n in names]

    def layout(self, names: Names, shape: Sequence[int], like: Layout | None = None, old: Names = ()) -> Layout:
        """Balanced blocks, but for dimensions that `like` splits in the same way by `old`."""
        cuts = [
            like.cuts[d] if like is not None and old[d] == names[d] and like.shape[d] == n else None
            for d, n in enumerate(shape)
        ]
        if self.source.spec is not None:
            return Layout(shape, P(*(each or None for each in names)), self.source.axes, cuts)
        assert self.source.workers is not None
        blocks = [len(c) for c in self.source.cuts]
        order = [n for each in names for n in each]
        counts = [math.prod(self.sizes(each)) for each in names]
        workers = []
        for place in itertools.product(*(range(blocks[n]) for n in order)):
            at = dict(zip(order, place, strict=True))
            workers.append(self.source.workers[_flat([at.get(d, 0) for d in range(len(blocks))], blocks)])
        cuts = [
            block_sizes(n, self.sizes(each)) if cut is None and each else cut
            for n, each, cut in zip(shape, names, cuts, strict=True)
        ]
        return Layout.grid(shape, counts, self.source.axes, workers, cuts)


def _flat(place: Sequence[int], counts: Sequence[int]) -> int:
    index = 0
    for k, n in zip(place, counts, strict=True):
        index = index * n + k
    return index


def stages(source: Layout, lines: tuple[Line, ...], target: Layout | None, fixed: frozenset[int]) -> list[Stage]:
    """The stages of the way of an array through these lines, to a target if there is one.

    Of all ways those come first that do not gather the array, then those that leave no worker idle for want of
    entries, then those of fewest repartitions, of best balance, and of fewest entries that move. fixed: dimensions
    to which nothing is moved that splits others.
    """
    search = _Search(source, lines, target, fixed)
    queue: list[Any] = []
    counter = itertools.count()
    heapq.heappush(queue, ((0, 0, 0, 0, 0, ()), next(counter), search.start()))
    seen = set()
    while True:
        cost, _, node = heapq.heappop(queue)
        key = node.names, node.remaining, node.layout
        if key in seen:
            continue
        seen.add(key)
        if not node.remaining and (target is None or node.layout == target):
            return list(node.stages)
        for more, following in search.next(node):
            total = tuple(a + b for a, b in zip(cost, more, strict=True))
            heapq.heappush(queue, (total, next(counter), following))


class _Node(NamedTuple):
    """A place of the search. names: None in the target. remaining: the indices of lines that are still to come."""

    names: Names | None
    layout: Layout
    remaining: tuple[int, ...]
    stages: tuple[Stage, ...]


class _Search:
    def __init__(self, source: Layout, lines: tuple[Line, ...], target: Layout | None, fixed: frozenset[int]):
        self.splits, self.lines, self.target, self.fixed = Splits(source), lines, target, fixed
        self.source = source

    def start(self) -> _Node:
        return self._through(self.splits.names, self.source, tuple(range(len(self.lines))), ())

    def _through(
        self, names: Names | None, layout: Layout, remaining: tuple[int, ...], stages: tuple[Stage, ...]
    ) -> _Node:
        """The place after all lines that can be transformed in a layout."""
        shape, done = list(layout.shape), []
        for k in remaining:
            if len(layout.cuts[self.lines[k].dim]) == 1 and self._may_come(k, remaining, done):
                shape[self.lines[k].dim] = self.lines[k].after
                done.append(k)
        after = _resized(layout, shape)
        stage = Stage(layout, tuple(self.lines[k] for k in done), after)
        return _Node(names, after, tuple(k for k in remaining if k not in done), (*stages, stage))

    def _may_come(self, k: int, remaining: Sequence[int], done: Sequence[int]) -> bool:
        """A line from real numbers comes first, one to real numbers last, two along one dimension in their order."""
        missing = [j for j in remaining if j not in done and j != k]
        if self.lines[k].kind in TO_REAL:
            return not missing
        return not any(
            self.lines[j].kind in FROM_REAL or (j < k and self.lines[j].dim == self.lines[k].dim) for j in missing
        )

    def next(self, node: _Node) -> Iterator[tuple[tuple, _Node]]:
        if self.target is not None:
            ndim = len(self.target.shape)
            waiting = all(len(self.target.cuts[self.lines[k].dim]) == 1 for k in node.remaining)
            shape = list(self.target.shape)
            for k in node.remaining:
                shape[self.lines[k].dim] = node.layout.shape[self.lines[k].dim]
            if waiting and node.names is not None:
                yield self._moved(node, None, _resized(self.target, shape), ((ndim, 0),))
        if node.names is None or not node.remaining:
            return
        split = sorted({self.lines[k].dim for k in node.remaining if len(node.layout.cuts[self.lines[k].dim]) > 1})
        for count in range(1, len(split) + 1):
            for chosen in itertools.combinations(split, count):
                yield from self._making_whole(node, node.names, chosen)

    def _making_whole(self, node: _Node, names: Names, chosen: Sequence[int]) -> Iterator[tuple[tuple, _Node]]:
        """The places where these dimensions are whole, and what split them splits others."""
        ndim = len(names)
        free = [d for d in range(ndim) if d not in chosen]
        places = [d for d in free if d not in self.fixed] or free
        for choice in itertools.product(places or [None], repeat=len(chosen)):
            moved = [() if d in chosen else names[d] for d in range(ndim)]
            for d, to in zip(chosen, choice, strict=True):
                if to is not None:
                    moved[to] = (*moved[to], *names[d])
            layout = self.splits.layout(tuple(moved), node.layout.shape, node.layout, names)
            order = tuple((abs(to - d), to) for d, to in zip(chosen, choice, strict=True) if to is not None)
            yield self._moved(node, tuple(moved), layout, order)

    def _moved(self, node: _Node, names: Names | None, layout: Layout, order: tuple) -> tuple[tuple, _Node]:
        following = self._through(names, layout, node.remaining, node.stages)
        entries, most = _entries_moved(node.layout, layout), max(map(math.prod, _block_shapes(layout)))
        blocks = len(node.layout.holders)
        even = math.prod(layout.shape) / max(1, blocks)
        by_choice = names is None
        gathers = not by_choice and len(layout.holders) < blocks
        idle = not by_choice and any(n < len(c) for n, c in zip(layout.shape, layout.cuts, strict=True))
        balance = round(2 * math.log2(max(most, 1) / even)) if even >= 1 else 0
        return (gathers, idle, 1, balance, entries, (order,)), following


def _block_shapes(layout: Layout) -> list[tuple[int, ...]]:
    return [layout.block_shape(w) for w in range(layout.size)]


def _resized(layout: Layout, shape: Sequence[int]) -> Layout:
    """The layout of an array of another shape, of which the same dimensions are cut in the same way; those whose length
    is another one are whole."""
    shape = tuple(shape)
    if shape == layout.shape:
        return layout
    cuts = [c if n == m else (n,) for c, n, m in zip(layout.cuts, shape, layout.shape, strict=True)]
    if layout.spec is not None:
        return Layout(shape, layout.spec, layout.axes, cuts, copies=layout.copies)
    return Layout.grid(shape, [len(c) for c in cuts], layout.axes, layout.workers, cuts)


def _entries_moved(source: Layout, target: Layout) -> int:
    """The entries that workers of the target do not hold in the source."""
    moved = 0
    for have, need in zip(source.boxes, target.boxes, strict=True):
        inside = math.prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(have, need, strict=True))
        moved += math.prod(d - c for c, d in need) - inside
    return moved
