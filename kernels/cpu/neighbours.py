"""Weighted sums of shifted entries by NumPy alone: `spmd.kernels.cpu.shifts` without numba.

The inner box, whose sums read no padding, is computed in pieces that fit into the last cache. Entries of one weight are
added before they are multiplied, and sums that pairs of them share are computed once. The sides of the box are computed
from a padded copy of what they read. The order of a sum depends on the offsets alone, so no entry depends on where an
array is cut; except for complex weights, whose products NumPy rounds differently within its vectors and beside them.

Arrays have a leading dimension of examples and three spatial dimensions.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from spmd.kernels.cpu.chunks import CACHE
from spmd.kernels.memory import pool

__all__ = ["inside", "weighted_sums"]

Pair = tuple[int, int]
Offset = tuple[int, ...]
Box = tuple[slice, ...]

_PIECE = 4 * CACHE
"""Bytes of a piece. Smaller ones are as fast in one thread, but each call may wait for another worker's."""


def weighted_sums(
    out: np.ndarray, x: np.ndarray, table: np.ndarray, weights: np.ndarray, loose: Sequence[int] = ()
) -> None:
    """out[e, i] = sum over t of weights[t] * x[e, i + table[t]], with zeros around x.

    table: (terms, 3). weights: of the dtype of the arrays. loose: spatial dimensions at whose ends entries that read
    zeros are arbitrary. Overflow is not reported, as by the compiled loops: it may be one of arbitrary entries.
    """
    offsets = tuple(map(tuple, table.tolist()))
    contiguous = x.flags.c_contiguous and out.flags.c_contiguous
    numbers: list[Any] = weights.tolist()
    first_of: dict[str, int] = {}  # by repr: some bytes of long doubles are arbitrary
    weight_ids = tuple([first_of.setdefault(repr(w), k) for k, w in enumerate(numbers)])
    plan = _plan(x.shape, out.shape, offsets, weight_ids, x.dtype.itemsize, tuple(loose), contiguous)
    with np.errstate(all="ignore"):
        if isinstance(plan.inner, _FlatSums):
            _flat_sums(out, x, plan.inner, numbers)
        elif plan.inner is not None:
            _box_sums(out, x, plan.inner, numbers)
        for sides in plan.sides:
            _side_sums(out, x, sides, numbers)


def inside(at: int, n: int, m: int) -> Pair:
    """The entries of a result of length m whose shift by `at` lies among n entries."""
    return max(0, -at), max(0, min(m, n - at))


class _Term(NamedTuple):
    """The entries of one weight, by its index: pairs, at `firsts` and `distance` further, and `singles`; added in this
    order."""

    weight: int
    firsts: tuple[Any, ...]
    distance: Any
    singles: tuple[Any, ...]

    @property
    def several(self) -> bool:
        return 2 * len(self.firsts) + len(self.singles) > 1


class _FlatSums(NamedTuple):
    """Sums where rows follow each other in the result as in what is read, so offsets are single numbers. first, last:
    where the result begins and ends. step: entries of a piece. spread: how many more sums of pairs than entries a piece
    has, if it shares them; once: for each term, whether it does."""

    terms: tuple[_Term, ...]
    first: int
    last: int
    step: int
    spread: int
    once: tuple[bool, ...]


class _BoxSums(NamedTuple):
    """Sums in a box of some examples. pieces: parts of the box."""

    terms: tuple[_Term, ...]
    pieces: tuple[tuple[Pair, ...], ...]


class _SideSums(NamedTuple):
    """Sums before and behind the inner box along a dimension. shape: of a copy of what they read. reads: pairs of
    boxes, of the copy and of x. writes: pairs of boxes, of the result and of the sums."""

    shape: tuple[int, ...]
    reads: tuple[tuple[Box, Box], ...]
    sums: _FlatSums
    writes: tuple[tuple[Box, Box], ...]


class _Plan(NamedTuple):
    inner: _FlatSums | _BoxSums | None
    sides: tuple[_SideSums, ...]


@lru_cache(maxsize=1024)
def _plan(
    x: tuple[int, ...],
    out: tuple[int, ...],
    table: tuple[Offset, ...],
    weight_ids: tuple[int, ...],
    itemsize: int,
    loose: tuple[int, ...],
    contiguous: bool,
) -> _Plan:
    """The plan for arrays of these shapes. weight_ids: for each offset, the first one with its weight. contiguous:
    whether both arrays are."""
    terms, (examples, *n), (_, *m) = _terms(table, weight_ids), x, out
    box = []
    for d in range(3):
        spans = [inside(offset[d], n[d], m[d]) for offset in table]
        first = min(m[d], max(a for a, _ in spans))
        box.append((first, max(first, min(b for _, b in spans))))
    inner: _FlatSums | _BoxSums | None = None
    if examples and all(lo < hi for lo, hi in box):
        # Rows of all layers are one, and layers of all examples, if there are several.
        if contiguous and n[2] == m[2] and (n[1] == m[1] or m[0] == 1) and (x[1:] == out[1:] or examples == 1):
            inner = _as_flat_sums(terms, out, n, box, itemsize)
        else:
            inner = _BoxSums(terms, _pieces([(0, examples), *box], _PIECE // itemsize))
    sides = [_sides(terms, table, x, out, box, d, itemsize) for d in range(3) if d not in loose]
    return _Plan(inner, tuple(s for s in sides if s is not None))


def _as_flat_sums(
    terms: tuple[_Term, ...], out: tuple[int, ...], n: Sequence[int], box: Sequence[Pair], itemsize: int
) -> _FlatSums:
    flat_index = lambda at: (at[0] * n[1] + at[1]) * n[2] + at[2]
    first = flat_index([lo for lo, _ in box])
    last = (out[0] - 1) * out[1] * out[2] * out[3] + flat_index([hi - 1 for _, hi in box]) + 1
    step = min(_PIECE // itemsize, last - first)
    flat_terms, once, spread = [], [], 0
    for t in terms:
        firsts = tuple(map(flat_index, t.firsts))
        extent = max(firsts) - min(firsts) if firsts else 0
        once.append(bool(firsts) and 4 * extent <= step)
        spread = max(spread, extent) if once[-1] else spread
        flat_terms.append(_Term(t.weight, firsts, flat_index(t.distance), tuple(map(flat_index, t.singles))))
    return _FlatSums(tuple(flat_terms), first, last, step, spread, tuple(once))


def _pieces(box: Sequence[Pair], limit: int) -> tuple[tuple[Pair, ...], ...]:
    """A box in parts of at most so many entries, unless a row has more: rows of a layer, layers of an example, or
    examples."""
    steps, whole = [box[-1][1] - box[-1][0]], True
    for lo, hi in reversed(box[:-1]):
        count = max(1, min(hi - lo, limit // prod(steps))) if whole else 1
        whole = whole and count == hi - lo
        steps.append(count)
    cuts = [
        [(at, min(at + step, hi)) for at in range(lo, hi, step)]
        for (lo, hi), step in zip(box, reversed(steps), strict=True)
    ]
    return tuple(itertools.product(*cuts))


def _sides(
    terms: tuple[_Term, ...],
    table: tuple[Offset, ...],
    x: tuple[int, ...],
    out: tuple[int, ...],
    box: Sequence[Pair],
    d: int,
    itemsize: int,
) -> _SideSums | None:
    """Both sides along dimension d, within the inner box along the dimensions before, one after the other in one copy.
    The sums in between, which read both, are not used."""
    (_, *n), (_, *m) = x, out
    spans = [(lo, hi) for lo, hi in ((0, box[d][0]), (box[d][1], m[d])) if lo < hi]
    boxes = [[*box[:d], span, *((0, k) for k in m[d + 1 :])] for span in spans]
    if not boxes or any(lo == hi for lo, hi in boxes[0]):
        return None
    low, high = (tuple(map(f, zip(*table, strict=True))) for f in (min, max))
    read_boxes = [[(lo + a, hi + b) for (lo, hi), a, b in zip(box, low, high, strict=True)] for box in boxes]
    starts = [0, *itertools.accumulate(read[d][1] - read[d][0] for read in read_boxes)]
    lengths = [hi - lo for lo, hi in read_boxes[0]]
    lengths[d] = starts[-1]
    reads, writes = [], []
    for target, read, start in zip(boxes, read_boxes, starts, strict=False):
        shift = [start if e == d else 0 for e in range(3)]
        present = [(min(max(lo, 0), k), max(0, min(hi, k))) for (lo, hi), k in zip(read, n, strict=True)]
        if all(lo < hi for lo, hi in present):
            copied = [(a - lo + s, b - lo + s) for (a, b), (lo, _), s in zip(present, read, shift, strict=True)]
            reads.append((_slices(copied), _slices(present)))
        computed = [(s, s + hi - lo) for (lo, hi), s in zip(target, shift, strict=True)]
        writes.append((_slices(target), _slices(computed)))
    moved_back = lambda offsets: tuple(_plus(offset, low, -1) for offset in offsets)
    moved_terms = tuple(_Term(t.weight, moved_back(t.firsts), t.distance, moved_back(t.singles)) for t in terms)
    shape, ends = (x[0], *lengths), [(0, k - b + a) for k, a, b in zip(lengths, low, high, strict=True)]
    return _SideSums(shape, tuple(reads), _as_flat_sums(moved_terms, shape, lengths, ends, itemsize), tuple(writes))


def _slices(box: Sequence[Pair]) -> Box:
    return slice(None), *(slice(lo, hi) for lo, hi in box)


@lru_cache(maxsize=1024)
def _terms(table: tuple[Offset, ...], weight_ids: tuple[int, ...]) -> tuple[_Term, ...]:
    """The terms in the order in which they are added: those of several entries first."""
    offsets: dict[int, list[Offset]] = {}
    for offset, k in zip(table, weight_ids, strict=True):
        offsets.setdefault(k, []).append(offset)
    terms = [_Term(k, *_paired(of_weight)) for k, of_weight in offsets.items()]
    return tuple(sorted(terms, key=lambda term: not term.several))


def _paired(offsets: Sequence[Offset]) -> tuple[tuple[Offset, ...], Offset, tuple[Offset, ...]]:
    """Offsets as pairs of one distance: the firsts of pairs, the distance, and single offsets. The four neighbours of a
    five-point stencil are two pairs: a sum of one is a sum of the other elsewhere, and is computed once. More pairs are
    better, and then nearer ones, for sums are kept until the last pair uses them."""
    best_rank: Any = (-1, [])
    best: tuple[Any, ...] = ((), (0, 0, 0), tuple(offsets))
    steps = [_plus(b, offsets[0], -1) for b in offsets] + [_plus(b, a, -1) for a, b in itertools.pairwise(offsets)]
    for distance in itertools.islice(dict.fromkeys(step for step in steps if any(step)), _DISTANCES_MAX):
        firsts, remaining = [], Counter(offsets)
        for a in offsets:
            b = _plus(a, distance)
            if remaining[a] and remaining[b]:
                firsts.append(a)
                remaining.subtract((a, b))
        new_rank = -len(firsts), [max(at) - min(at) for at in zip(*firsts, strict=True)]
        if len(firsts) > 1 and new_rank < best_rank:
            best_rank, best = new_rank, (tuple(firsts), distance, tuple(remaining.elements()))
    return best


_DISTANCES_MAX = 32
"""Distances that are tried: small stencils have fewer, and all of thousands of offsets would take seconds."""


def _plus(a: Offset, b: Offset, times: int = 1) -> Offset:
    return tuple(i + times * j for i, j in zip(a, b, strict=True))


def _flat_sums(out: np.ndarray, x: np.ndarray, sums: _FlatSums, weights: Sequence[Any]) -> None:
    """All rows as one: NumPy takes up to twice as long row by row. Entries around the box get arbitrary sums.

    All views are made beforehand: between the sums they would delay other workers' threads.
    """
    flat_x, flat_out = x.reshape(-1), out.reshape(-1)
    scratch, calls = pool.empty((3, sums.step + sums.spread), x.dtype), []
    for lo in range(sums.first, sums.last, sums.step):
        hi = min(lo + sums.step, sums.last)
        parts: list[_Part] = []
        for (weight, firsts, distance, singles), once in zip(sums.terms, sums.once, strict=True):
            shared_call, pairs, singles_of_term = None, [], [flat_x[lo + at : hi + at] for at in singles]
            if once:
                a, b = lo + min(firsts), hi + max(firsts)
                shared = scratch[1, : b - a]
                shared_call = np.add, flat_x[a:b], flat_x[a + distance : b + distance], shared
                singles_of_term = [shared[lo + at - a : hi + at - a] for at in firsts] + singles_of_term
            else:
                pairs = [(flat_x[lo + at : hi + at], flat_x[lo + at + distance : hi + at + distance]) for at in firsts]
            parts.append((weights[weight], shared_call, pairs, singles_of_term))
        calls += _calls(flat_out[lo:hi], parts, scratch[:, : hi - lo])
    for f, *args in calls:
        f(*args)


def _box_sums(out: np.ndarray, x: np.ndarray, sums: _BoxSums, weights: Sequence[Any]) -> None:
    """A box within rows of x or of out."""
    scratch = pool.empty((3, *(hi - lo for lo, hi in sums.pieces[0])), x.dtype)  # no other piece is larger
    for examples, *box in sums.pieces:
        read = lambda at, n=slice(*examples), box=box: x[(n, *_moved(box, at))]
        parts: list[_Part] = []
        for weight, firsts, distance, singles in sums.terms:
            pairs = [(read(a), read(_plus(a, distance))) for a in firsts]
            parts.append((weights[weight], None, pairs, list(map(read, singles))))
        target = out[(slice(*examples), *_moved(box, (0, 0, 0)))]
        for f, *args in _calls(target, parts, scratch[(slice(None), *map(slice, target.shape))]):
            f(*args)


def _moved(box: Sequence[Pair], at: Offset) -> Iterator[slice]:
    return (slice(lo + by, hi + by) for (lo, hi), by in zip(box, at, strict=True))


def _side_sums(out: np.ndarray, x: np.ndarray, sides: _SideSums, weights: Sequence[Any]) -> None:
    copy = np.zeros(sides.shape, x.dtype)
    for target, source in sides.reads:
        copy[target] = x[source]
    sums = np.empty_like(copy)
    _flat_sums(sums, copy, sides.sums, weights)
    for target, source in sides.writes:
        out[target] = sums[source]


_Part = tuple[Any, Any, list[tuple[np.ndarray, np.ndarray]], list[np.ndarray]]
"""A term in a piece: its weight, a call to make first or None, pairs of views, and single views."""


def _calls(out: np.ndarray, parts: Sequence[_Part], scratch: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """The calls that compute a piece of the result: function, operands and output. scratch: three arrays of its
    shape."""
    sum_of_terms, first_scratch, second_scratch = scratch
    for k, (weight, shared_call, pairs, singles) in enumerate(parts):
        if shared_call is not None:
            yield shared_call
        is_single = not pairs and len(singles) == 1
        total = out if len(parts) == 1 else sum_of_terms if k == 0 else first_scratch if is_single else second_scratch
        accumulated: Any = None
        for a, b in pairs:
            yield np.add, a, b, total if accumulated is None else first_scratch
            if accumulated is not None:
                yield np.add, total, first_scratch, total
            accumulated = total
        for a in singles:
            if accumulated is not None:
                yield np.add, accumulated, a, total
            accumulated = a if accumulated is None else total
        yield np.multiply, accumulated, weight, total
        if k > 0:
            yield np.add, sum_of_terms, total, out if k == len(parts) - 1 else sum_of_terms
