"""Weighted sums of shifted entries by NumPy alone: what `spmd.kernels.cpu.shifts` is where there is no numba.

The inner box, in which all that is read is there, is made in pieces that fit into the last cache. Entries of one weight
are added up before they are multiplied, and what pairs of them have in common is added up once. What is around the box
is made from a copy of what it reads, with zeros for the padding. The order of the sums is that of the offsets alone, so
no entry depends on where an array is cut; but for weights that are complex, whose products NumPy rounds in one way
within its vectors and in another one beside them.

Arrays have one leading dimension, of examples, and three of places.
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
Place = tuple[int, ...]
Box = tuple[slice, ...]

_PIECE = 4 * CACHE
"""Bytes of a piece. Smaller ones would be as fast in one thread, but every call may wait for that of another worker."""


def weighted_sums(
    out: np.ndarray, x: np.ndarray, table: np.ndarray, weights: np.ndarray, loose: Sequence[int] = ()
) -> None:
    """out[e, i] = sum over t of weights[t] * x[e, i + table[t]], with zeros around x.

    table: (terms, 3). weights: of the dtype of the arrays. loose: dimensions of places at whose ends the entries that
    see zeros may be anything. Nothing is told of overflow, as by the compiled loops: it may be that of entries that are
    nobody's.
    """
    places = tuple(map(tuple, table.tolist()))
    flat = x.flags.c_contiguous and out.flags.c_contiguous
    numbers: list[Any] = weights.tolist()
    known: dict[str, int] = {}  # by what they are written as: bytes of long doubles are partly arbitrary
    alike = tuple([known.setdefault(repr(w), k) for k, w in enumerate(numbers)])
    plan = _plan(x.shape, out.shape, places, alike, x.dtype.itemsize, tuple(loose), flat)
    with np.errstate(all="ignore"):
        if isinstance(plan.inner, _Joined):
            _joined(out, x, plan.inner, numbers)
        elif plan.inner is not None:
            _by_rows(out, x, plan.inner, numbers)
        for sides in plan.around:
            _around(out, x, sides, numbers)


def inside(at: int, n: int, m: int) -> Pair:
    """The entries of a result of length m that read among n, `at` entries further."""
    return max(0, -at), max(0, min(m, n - at))


class _Term(NamedTuple):
    """What has one weight, by its number: sums of two entries each, at `firsts` and so much further, and the entries at
    `singles`; added up in this order."""

    weight: int
    firsts: tuple[Any, ...]
    apart: Any
    singles: tuple[Any, ...]

    @property
    def several(self) -> bool:
        return 2 * len(self.firsts) + len(self.singles) > 1


class _Joined(NamedTuple):
    """Sums where rows follow each other in the result as they do in what is read: places are single numbers. first,
    last: where they begin and end. step: entries of a piece. spread: how many sums of pairs it keeps more than it has
    entries; once: for each term whether it does so."""

    terms: tuple[_Term, ...]
    first: int
    last: int
    step: int
    spread: int
    once: tuple[bool, ...]


class _Rows(NamedTuple):
    """Sums in a box of some examples. pieces: its parts."""

    terms: tuple[_Term, ...]
    pieces: tuple[tuple[Pair, ...], ...]


class _Around(NamedTuple):
    """What lies before and behind the inner box along a dimension: the shape of a copy of what is read for it, which of
    its boxes hold which of what is read, the sums, and which boxes of the result hold which of them."""

    shape: tuple[int, ...]
    takes: tuple[tuple[Box, Box], ...]
    sums: _Joined
    gives: tuple[tuple[Box, Box], ...]


class _Plan(NamedTuple):
    inner: _Joined | _Rows | None
    around: tuple[_Around, ...]


@lru_cache(maxsize=1024)
def _plan(
    x: tuple[int, ...],
    out: tuple[int, ...],
    table: tuple[Place, ...],
    alike: tuple[int, ...],
    itemsize: int,
    loose: tuple[int, ...],
    flat: bool,
) -> _Plan:
    """How the sums are made of an array of one shape to one of another. alike: for each place the first that has its
    weight. flat: whether both are contiguous."""
    terms, (examples, *n), (_, *m) = _terms(table, alike), x, out
    box = []
    for d in range(3):
        spans = [inside(at[d], n[d], m[d]) for at in table]
        first = min(m[d], max(a for a, _ in spans))
        box.append((first, max(first, min(b for _, b in spans))))
    inner: _Joined | _Rows | None = None
    if examples and all(lo < hi for lo, hi in box):
        # Rows of all layers, and layers of all examples, if there are several.
        if flat and n[2] == m[2] and (n[1] == m[1] or m[0] == 1) and (x[1:] == out[1:] or examples == 1):
            inner = _as_joined(terms, out, n, box, itemsize)
        else:
            inner = _Rows(terms, _pieces([(0, examples), *box], _PIECE // itemsize))
    sides = [_sides(terms, table, x, out, box, d, itemsize) for d in range(3) if d not in loose]
    return _Plan(inner, tuple(s for s in sides if s is not None))


def _as_joined(
    terms: tuple[_Term, ...], out: tuple[int, ...], n: Sequence[int], box: Sequence[Pair], itemsize: int
) -> _Joined:
    place = lambda at: (at[0] * n[1] + at[1]) * n[2] + at[2]
    first = place([lo for lo, _ in box])
    last = (out[0] - 1) * out[1] * out[2] * out[3] + place([hi - 1 for _, hi in box]) + 1
    step = min(_PIECE // itemsize, last - first)
    along, once, spread = [], [], 0
    for t in terms:
        firsts = tuple(map(place, t.firsts))
        wide = max(firsts) - min(firsts) if firsts else 0
        once.append(bool(firsts) and 4 * wide <= step)
        spread = max(spread, wide) if once[-1] else spread
        along.append(_Term(t.weight, firsts, place(t.apart), tuple(map(place, t.singles))))
    return _Joined(tuple(along), first, last, step, spread, tuple(once))


def _pieces(box: Sequence[Pair], most: int) -> tuple[tuple[Pair, ...], ...]:
    """A box in parts of so many entries at most, if a row is not longer than that: rows of a layer, or layers of an
    example, or examples."""
    steps, whole = [box[-1][1] - box[-1][0]], True
    for lo, hi in reversed(box[:-1]):
        count = max(1, min(hi - lo, most // prod(steps))) if whole else 1
        whole = whole and count == hi - lo
        steps.append(count)
    cuts = [
        [(at, min(at + step, hi)) for at in range(lo, hi, step)]
        for (lo, hi), step in zip(box, reversed(steps), strict=True)
    ]
    return tuple(itertools.product(*cuts))


def _sides(
    terms: tuple[_Term, ...],
    table: tuple[Place, ...],
    x: tuple[int, ...],
    out: tuple[int, ...],
    box: Sequence[Pair],
    d: int,
    itemsize: int,
) -> _Around | None:
    """Both sides along dimension d, within the inner box along those before, in one copy one after the other: what is
    made in between, of some of both, is nobody's."""
    (_, *n), (_, *m) = x, out
    spans = [(lo, hi) for lo, hi in ((0, box[d][0]), (box[d][1], m[d])) if lo < hi]
    boxes = [[*box[:d], span, *((0, k) for k in m[d + 1 :])] for span in spans]
    if not boxes or any(lo == hi for lo, hi in boxes[0]):
        return None
    low, high = (tuple(map(f, zip(*table, strict=True))) for f in (min, max))
    read = [[(lo + a, hi + b) for (lo, hi), a, b in zip(side, low, high, strict=True)] for side in boxes]
    starts = [0, *itertools.accumulate(side[d][1] - side[d][0] for side in read)]
    lengths = [hi - lo for lo, hi in read[0]]
    lengths[d] = starts[-1]
    takes, gives = [], []
    for side, span, start in zip(boxes, read, starts, strict=False):
        shift = [start if e == d else 0 for e in range(3)]
        there = [(min(max(lo, 0), k), max(0, min(hi, k))) for (lo, hi), k in zip(span, n, strict=True)]
        if all(lo < hi for lo, hi in there):
            moved = [(a - lo + s, b - lo + s) for (a, b), (lo, _), s in zip(there, span, shift, strict=True)]
            takes.append((_slices(moved), _slices(there)))
        gives.append((_slices(side), _slices([(s, s + hi - lo) for (lo, hi), s in zip(side, shift, strict=True)])))
    back = lambda places: tuple(_plus(at, low, -1) for at in places)
    counted = tuple(_Term(t.weight, back(t.firsts), t.apart, back(t.singles)) for t in terms)
    shape, ends = (x[0], *lengths), [(0, k - b + a) for k, a, b in zip(lengths, low, high, strict=True)]
    return _Around(shape, tuple(takes), _as_joined(counted, shape, lengths, ends, itemsize), tuple(gives))


def _slices(box: Sequence[Pair]) -> Box:
    return slice(None), *(slice(lo, hi) for lo, hi in box)


@lru_cache(maxsize=1024)
def _terms(table: tuple[Place, ...], alike: tuple[int, ...]) -> tuple[_Term, ...]:
    """The terms in the order in which they are added up: those of several entries first."""
    places: dict[int, list[Place]] = {}
    for at, k in zip(table, alike, strict=True):
        places.setdefault(k, []).append(at)
    terms = [_Term(k, *_twins(ats)) for k, ats in places.items()]
    return tuple(sorted(terms, key=lambda term: not term.several))


def _twins(places: Sequence[Place]) -> tuple[tuple[Place, ...], Place, tuple[Place, ...]]:
    """The firsts of pairs, how far apart all of them are, and single places. The four neighbours of a five-point
    stencil are two such pairs: what one adds up to is what the other one does elsewhere, and is made once. The more
    pairs the better, and then the nearer to each other: the further, the more sums are kept until then."""
    rank: Any = (-1, [])
    found: tuple[Any, ...] = ((), (0, 0, 0), tuple(places))
    steps = [_plus(b, places[0], -1) for b in places] + [_plus(b, a, -1) for a, b in itertools.pairwise(places)]
    for apart in itertools.islice(dict.fromkeys(step for step in steps if any(step)), _TRIED):
        firsts, left = [], Counter(places)
        for a in places:
            b = _plus(a, apart)
            if left[a] and left[b]:
                firsts.append(a)
                left.subtract((a, b))
        now = -len(firsts), [max(at) - min(at) for at in zip(*firsts, strict=True)]
        if len(firsts) > 1 and now < rank:
            rank, found = now, (tuple(firsts), apart, tuple(left.elements()))
    return found


_TRIED = 32
"""Distances that are tried: those of small stencils are fewer, and of thousands of places all would take seconds."""


def _plus(a: Place, b: Place, times: int = 1) -> Place:
    return tuple(i + times * j for i, j in zip(a, b, strict=True))


def _joined(out: np.ndarray, x: np.ndarray, sums: _Joined, weights: Sequence[Any]) -> None:
    """Rows are read and written as one: NumPy takes up to twice as long for each by itself. Entries around the box get
    what is not theirs.

    All views are made beforehand: between the sums they would keep other workers' threads from beginning theirs.
    """
    of, to = x.reshape(-1), out.reshape(-1)
    rooms, calls = pool.empty((3, sums.step + sums.spread), x.dtype), []
    for lo in range(sums.first, sums.last, sums.step):
        hi = min(lo + sums.step, sums.last)
        parts: list[_Part] = []
        for (weight, firsts, apart, singles), once in zip(sums.terms, sums.once, strict=True):
            begun, pairs, ones = None, [], [of[lo + at : hi + at] for at in singles]
            if once:
                a, b = lo + min(firsts), hi + max(firsts)
                shared = rooms[1, : b - a]
                begun = np.add, of[a:b], of[a + apart : b + apart], shared
                ones = [shared[lo + at - a : hi + at - a] for at in firsts] + ones
            else:
                pairs = [(of[lo + at : hi + at], of[lo + at + apart : hi + at + apart]) for at in firsts]
            parts.append((weights[weight], begun, pairs, ones))
        calls += _calls(to[lo:hi], parts, rooms[:, : hi - lo])
    for f, *args in calls:
        f(*args)


def _by_rows(out: np.ndarray, x: np.ndarray, sums: _Rows, weights: Sequence[Any]) -> None:
    """A box, which is part of the rows that are read or of those that are made."""
    rooms = pool.empty((3, *(hi - lo for lo, hi in sums.pieces[0])), x.dtype)  # no other piece is larger
    for examples, *box in sums.pieces:
        read = lambda at, n=slice(*examples), box=box: x[(n, *_moved(box, at))]
        parts: list[_Part] = []
        for weight, firsts, apart, singles in sums.terms:
            pairs = [(read(a), read(_plus(a, apart))) for a in firsts]
            parts.append((weights[weight], None, pairs, list(map(read, singles))))
        to = out[(slice(*examples), *_moved(box, (0, 0, 0)))]
        for f, *args in _calls(to, parts, rooms[(slice(None), *map(slice, to.shape))]):
            f(*args)


def _moved(box: Sequence[Pair], at: Place) -> Iterator[slice]:
    return (slice(lo + by, hi + by) for (lo, hi), by in zip(box, at, strict=True))


def _around(out: np.ndarray, x: np.ndarray, sides: _Around, weights: Sequence[Any]) -> None:
    copy = np.zeros(sides.shape, x.dtype)
    for to, of in sides.takes:
        copy[to] = x[of]
    made = np.empty_like(copy)
    _joined(made, copy, sides.sums, weights)
    for to, of in sides.gives:
        out[to] = made[of]


_Part = tuple[Any, Any, list[tuple[np.ndarray, np.ndarray]], list[np.ndarray]]
"""Of a term in a piece: its weight, a call that comes first, if any, pairs, and single parts of arrays."""


def _calls(out: np.ndarray, parts: Sequence[_Part], rooms: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """What makes a piece of the result: functions, of what, and what they write. rooms: three, of its shape."""
    whole, spare, more = rooms
    for k, (weight, begun, pairs, ones) in enumerate(parts):
        if begun is not None:
            yield begun
        alone = not pairs and len(ones) == 1
        total = out if len(parts) == 1 else whole if k == 0 else spare if alone else more
        so_far: Any = None
        for a, b in pairs:
            yield np.add, a, b, total if so_far is None else spare
            if so_far is not None:
                yield np.add, total, spare, total
            so_far = total
        for a in ones:
            if so_far is not None:
                yield np.add, so_far, a, total
            so_far = a if so_far is None else total
        yield np.multiply, so_far, weight, total
        if k > 0:
            yield np.add, whole, total, out if k == len(parts) - 1 else whole
