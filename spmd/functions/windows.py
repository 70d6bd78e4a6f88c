"""Blocks extended to what their outputs need: by neighbours' edges, and by what stands beyond the ends of the array."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from spmd.functions.local import local, namespace
from spmd.functions.movement import fetched
from spmd.layout import Box, Layout
from spmd.mesh import here
from spmd.operators.halo import halo_exchange
from spmd.window import Window

__all__ = ["continued", "extended", "mapped"]

Pair = tuple[int, int]


def extended(x: Any, source: Layout, windows: Sequence[Window | None], boundaries: Sequence[str]) -> Any:
    """The entries of the whole array that the windows of this worker's outputs need.

    x: this worker's block of `source`. windows: of each dimension; None: the block as it is. boundaries: what stands
    beyond the ends in each dimension: "zero", "periodic", "reflect" or "edge"; "none": the result ends there.

    By a spec: a halo exchange, a message to each neighbour. On some of the workers: an exchange between those who need
    something of one another; at ends that are not zeros one more for each side. Adjoint: cotangents are added where
    the entries lie.
    """
    if source.spec is None:
        return continued(x, source, _needs(source, tuple(windows)), boundaries)
    inside = [w is None or b == "none" for w, b in zip(windows, boundaries, strict=True)]
    no_halo = ((0, 0),)
    widths = [
        no_halo if w is None else w.halos if b == "none" else w.widths for w, b in zip(windows, boundaries, strict=True)
    ]
    if not any(n for pairs in widths for pair in pairs for n in pair):
        return x
    each = ["none" if ends else b for ends, b in zip(inside, boundaries, strict=True)]
    return halo_exchange(x, source.spec, widths, each, sizes=source.cuts)


def continued(x: Any, source: Layout, needs: Sequence[Box | None], boundaries: Sequence[str]) -> Any:
    """The box that this worker needs of the whole array, continued beyond its ends.

    x: this worker's block of `source`. needs: for each worker (start, stop) in every dimension; None: nothing.
    boundaries: as for `extended`; where one is "none" the boxes are cut to the array. Boxes may lie anyhow.
    """
    plan = _parts(source, tuple(needs), tuple(boundaries))
    me, xp = here("spmd.functions").index, namespace(x)
    parts = {}
    for choice, boxes, indices in plan:
        part = fetched(x, source, boxes)
        for d, index in enumerate(indices[me]):
            if index is not None:
                part = local(x, "pads").take(part, index, d)
        parts[choice] = part
    joined, own = _joined(parts, len(boundaries), xp), needs[me]
    if own is None:
        return joined
    pads = [
        (min(stop, 0) - min(start, 0), max(stop, n) - max(start, n)) if boundary == "zero" else (0, 0)
        for (start, stop), n, boundary in zip(own, source.shape, boundaries, strict=True)
    ]
    return local(x, "pads").pad(joined, pads)


def _joined(parts: dict[tuple[int, ...], Any], ndim: int, xp: Any) -> Any:
    """Parts, by their place below (0), inside (1) and above (2) in each dimension, as one array."""
    for d in reversed(range(ndim)):
        rows: dict[tuple[int, ...], list[Any]] = {}
        for choice in sorted(parts):
            rows.setdefault(choice[:d], []).append(parts[choice])
        parts = {choice: row[0] if len(row) == 1 else xp.concat(row, axis=d) for choice, row in rows.items()}
    return parts[()]


@lru_cache(maxsize=256)
def _needs(source: Layout, windows: tuple[Window | None, ...]) -> tuple[Box | None, ...]:
    """For each worker the box that the windows of its outputs need; its block in dimensions without a window."""
    needs: list[Box | None] = []
    for worker, box in enumerate(source.boxes):
        place = source.positions(worker)
        needs.append(
            None
            if place is None
            else tuple(b if w is None else w.needs[k] for b, w, k in zip(box, windows, place, strict=True))
        )
    return tuple(needs)


@lru_cache(maxsize=256)
def _parts(source: Layout, needs: tuple[Box | None, ...], boundaries: tuple[str, ...]) -> list[tuple]:
    """What is fetched, part by part: its place in each dimension, below (0), inside (1) or above (2); the boxes of all
    workers; and for each worker and dimension the index into the box, or None where the box is in order."""
    ndim = len(boundaries)
    lines = [_lines(source, d, needs, boundaries[d]) for d in range(ndim)]
    choices = itertools.product(
        *([p for p in range(3) if p == 1 or any(len(own[p]) for own in line)] for line in lines)
    )
    plan = []
    for choice in choices:
        boxes, indices = [], []
        for w in range(source.size):
            needed = [lines[d][w][p] for d, p in enumerate(choice)]
            boxes.append(tuple((int(min(i)), int(max(i)) + 1) if len(i) else (0, 0) for i in needed))
            indices.append([_within(i) for i in needed])
        plan.append((choice, boxes, indices))
    return plan


def _within(index: np.ndarray) -> np.ndarray | None:
    """An index into the shortest box that holds the entries; None if they are all of it, in order."""
    if not len(index) or np.array_equal(index, np.arange(index[0], index[0] + len(index))):
        return None
    return index - index.min()


def _lines(source: Layout, d: int, needs: Sequence[Box | None], boundary: str) -> list[tuple[np.ndarray, ...]]:
    """For each worker the entries of dimension d that it needs: for places below the array, inside, and above."""
    n, lines = source.shape[d], []
    for box in needs:
        if box is None:
            lines.append((np.arange(0),) * 3)
            continue
        start, stop = box[d]
        inside = np.arange(min(max(start, 0), n), max(min(stop, n), 0))
        ends = (np.arange(start, min(stop, 0)), np.arange(max(start, n), stop))
        lines.append((mapped(ends[0], n, boundary), inside, mapped(ends[1], n, boundary)))
    return lines


def mapped(index: np.ndarray, n: int, boundary: str) -> np.ndarray:
    """The entries that stand at places beyond the ends of n entries; none for zeros."""
    if boundary == "periodic":
        return index % n
    if boundary == "edge":
        return np.clip(index, 0, n - 1)
    if boundary == "reflect":
        period = max(1, 2 * (n - 1))
        index = index % period
        return np.where(index < n, index, period - index)
    if boundary == "symmetric":
        index = index % max(1, 2 * n)
        return np.where(index < n, index, 2 * n - 1 - index)
    return index[:0]
