"""The layouts that an array goes through, so that each dimension is whole when it is transformed. Integers only."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

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
        for total, following in search.next(node, cost):
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
        self.bound: tuple[int, ...] | None = None
        """The first numbers of the least cost of a way that is known: ways of higher ones are not looked at."""

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

    def next(self, node: _Node, cost: tuple) -> Iterator[tuple[tuple, _Node]]:
        """The places that a repartition leads to, with the costs of the ways to them. cost: that of the way here."""
        target = self.target
        if target is not None and node.names is not None:
            waiting = all(len(target.cuts[self.lines[k].dim]) == 1 for k in node.remaining)
            shape = list(target.shape)
            for k in node.remaining:
                shape[self.lines[k].dim] = node.layout.shape[self.lines[k].dim]
            if waiting:
                last = ((len(shape), 0),)
                yield from self._moved(node, cost, (False, False), None, last, partial(_resized, target, shape))
        if node.names is None or not node.remaining:
            return
        split = {k: self.lines[k].dim for k in node.remaining if len(node.layout.cuts[self.lines[k].dim]) > 1}
        first = {d for k, d in split.items() if self.lines[k].kind in FROM_REAL}
        for count in range(1, len(split) + 1):
            for chosen in itertools.combinations(sorted({*split.values()}), count):
                if first <= {*chosen}:
                    yield from self._making_whole(node, cost, node.names, chosen)

    def _making_whole(
        self, node: _Node, cost: tuple, names: Names, chosen: Sequence[int]
    ) -> Iterator[tuple[tuple, _Node]]:
        """The places where these dimensions are whole, and what split them splits others."""
        ndim, shape = len(names), node.layout.shape
        free = [d for d in range(ndim) if d not in chosen]
        places = [d for d in free if d not in self.fixed] or free
        for choice in itertools.product(places or [None], repeat=len(chosen)):
            moved = [() if d in chosen else names[d] for d in range(ndim)]
            for d, to in zip(chosen, choice, strict=True):
                if to is not None:
                    moved[to] = (*moved[to], *names[d])
            idle = any(n < math.prod(self.splits.sizes(each)) for n, each in zip(shape, moved, strict=True) if each)
            order = tuple((abs(to - d), to) for d, to in zip(chosen, choice, strict=True) if to is not None)
            layout = partial(self.splits.layout, tuple(moved), shape, node.layout, names)
            yield from self._moved(node, cost, (None in choice, idle), tuple(moved), order, layout)

    def _moved(
        self,
        node: _Node,
        cost: tuple,
        faults: tuple[bool, bool],
        names: Names | None,
        order: tuple,
        make: Callable[[], Layout],
    ) -> Iterator[tuple[tuple, _Node]]:
        """The place after a repartition to a layout, unless a better way is known already. faults: whether it gathers,
        and whether workers are idle."""
        first = (cost[0] + faults[0], cost[1] + faults[1], cost[2] + 1)
        if self.bound is not None and first > self.bound:
            return
        layout = make()
        following = self._through(names, layout, node.remaining, node.stages)
        if not following.remaining and self.target in (None, following.layout):
            self.bound = first
        entries, most = _entries_moved(node.layout, layout)
        even = math.prod(layout.shape) / math.prod(map(len, node.layout.cuts))
        balance = round(2 * math.log2(max(most, 1) / even)) if even >= 1 else 0
        yield (*first, cost[3] + balance, cost[4] + entries, (*cost[5], order)), following


def _entries_moved(source: Layout, target: Layout) -> tuple[int, int]:
    """The entries that workers of the target do not hold in the source, and the most that a worker holds of it."""
    have, need = (np.array(layout.boxes).reshape(layout.size, len(layout.shape), 2) for layout in (source, target))
    inside = np.minimum(have[..., 1], need[..., 1]) - np.maximum(have[..., 0], need[..., 0])
    held = np.prod(need[..., 1] - need[..., 0], axis=1)
    return int(np.sum(held - np.prod(np.maximum(inside, 0), axis=1))), int(held.max())


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
