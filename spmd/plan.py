"""Moves from one layout to another: which worker sends which box to which worker. Integers only."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from spmd.errors import LayoutError
from spmd.layout import Box, Layout

__all__ = ["Move", "overlap", "plan"]


class Move(NamedTuple):
    """The box of the global index space that worker `source` sends to worker `target`, which may be itself."""

    source: int
    target: int
    box: Box


def overlap(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    box = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


@lru_cache(maxsize=1024)
def plan(source: Layout, target: Layout) -> tuple[Move, ...]:
    """The moves that turn `source` into `target`, ordered by target, then source.

    If several workers hold an invariant copy, a target uses its own copy; otherwise the copy of the worker that has the
    least to send so far, and among equals the nearest by number. If the copies vary, all are sent, and the target adds
    them.
    """
    # The order of the axes numbers the workers.
    if source.shape != target.shape or [*source.axes.items()] != [*target.axes.items()]:
        raise LayoutError.at(
            "spmd.plan",
            got=f"a source of shape {source.shape} over {source.axes} "
            f"and a target of shape {target.shape} over {target.axes}",
            need="the same global shape and the same workers: equal axes, in one order",
            mend="lay the same array out twice on one mesh",
        )
    moves = []
    load = [0] * source.size
    for t, target_box in enumerate(target.boxes):
        for workers in source.holders.values():
            shared = overlap(source.boxes[workers[0]], target_box)
            if shared is None or target.positions(t) is None:
                continue
            if source.copies == "varying":
                moves += [Move(s, t, shared) for s in workers]
            else:
                s = t if t in workers else min(workers, key=lambda w: (load[w], abs(w - t), w))
                load[s] += math.prod(stop - start for start, stop in shared) if s != t else 0
                moves.append(Move(s, t, shared))
    return tuple(sorted(moves, key=lambda m: (m.target, m.source, m.box)))
