"""Stencils, with one reading and one writing of memory.

With numba by `spmd.kernels.cpu.shifts`. Without it the inner box is made in pieces that fit into the cache: entries of
one weight are added up before they are multiplied. What is near the ends, where some offsets meet padding, is made from
a copy with zeros around.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from spmd.kernels import buffers, jit
from spmd.kernels.cpu.chunks import CACHE, accurate
from spmd.kernels.cpu.shifts import shifted_products, shifted_sums
from spmd.kernels.windows import reach

__all__ = ["stencil", "stencil_weights"]

Pair = tuple[int, int]
Offsets = Sequence[Sequence[int]]


def stencil(x: np.ndarray, offsets: Offsets, weights: Sequence[Any], padding: Sequence[Pair]) -> np.ndarray:
    """y[i] = sum over k of weights[k] * x[i + offsets[k]]; the last dimensions of x are those of the offsets."""
    wide = accurate(x.dtype)
    if wide != x.dtype:
        return stencil(x.astype(wide), offsets, weights, padding).astype(x.dtype)
    source, table, lengths = _three(x, offsets, padding)
    made = buffers.empty((*x.shape[: x.ndim - len(padding)], *lengths[3 - len(padding) :]), x.dtype)
    out = made.reshape(source.shape[0], *lengths)
    if out.size == 0:
        return made
    factors = np.asarray([np.asarray(w) for w in weights]).astype(x.dtype)
    if source.size == 0:
        out.fill(0)
    elif x.dtype.char in "fd" and jit.fits(x):
        shifted_sums(out, np.ascontiguousarray(source)[:, None], table, factors[None])
    else:
        _boxes(out, source, table[:, 1:], factors)
    return made


def stencil_weights(g: np.ndarray, x: np.ndarray, offsets: Offsets, padding: Sequence[Pair]) -> np.ndarray:
    """For each offset the sum over i of g[i] * x[i + offset]."""
    dtype = np.result_type(g, x)
    wide = accurate(dtype)
    source, table, lengths = _three(x.astype(wide, copy=False), offsets, padding)
    given = np.ascontiguousarray(g, wide).reshape(source.shape[0], *lengths)
    if wide.char in "fd" and jit.fits(given, source):
        source = np.ascontiguousarray(source)[:, None]
        return shifted_products(given, source, table, 1)[0].astype(dtype)
    total = np.zeros(len(table), wide if wide.kind == "c" else np.float64)
    for k, (_, *at) in enumerate(table):
        inside = [_inside(int(a), n, m) for a, n, m in zip(at, source.shape[1:], lengths, strict=True)]
        if all(a < b for a, b in inside):
            to = tuple(slice(a, b) for a, b in inside)
            of = tuple(slice(a + int(s), b + int(s)) for (a, b), s in zip(inside, at, strict=True))
            total[k] = sum(_dot(a[to], b[of]) for a, b in zip(given, source, strict=True))
    return total.astype(dtype)


def _dot(a: np.ndarray, b: np.ndarray) -> Any:
    """The sum of a * b, three dimensions each, some layers and rows at a time: both are contiguous in no other way."""
    step = max(1, CACHE // max(1, a.shape[2] * a.itemsize))
    total = a.dtype.type(0) if a.dtype.kind == "c" else 0.0
    for z in range(a.shape[0]):
        for y in range(0, a.shape[1], step):
            total += np.dot(a[z, y : y + step].reshape(-1), b[z, y : y + step].reshape(-1))
    return total


def _three(x: np.ndarray, offsets: Offsets, padding: Sequence[Pair]) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """x with one leading and three spatial dimensions; for each offset 0, a plane, and where it is read, counted from
    the entry of the same index of the result; the lengths of the result."""
    dims = len(padding)
    lead, n = x.shape[: x.ndim - dims], x.shape[x.ndim - dims :]
    table, lengths = _places(n, tuple(map(tuple, offsets)), tuple(map(tuple, padding)))
    return x.reshape(math.prod(lead), *(1,) * (3 - dims), *n), table, lengths


@lru_cache(maxsize=1024)
def _places(
    n: tuple[int, ...], offsets: tuple[tuple[int, ...], ...], padding: tuple[Pair, ...]
) -> tuple[np.ndarray, tuple[int, ...]]:
    dims, ends = len(padding), reach(offsets)
    lengths = tuple(
        max(0, k + before + after - low - high)
        for k, (before, after), (low, high) in zip(n, padding, ends, strict=True)
    )
    table = np.zeros((len(offsets), 4), np.int64)
    table[:, 4 - dims :] = np.asarray(offsets) + [
        low - before for (low, _), (before, _) in zip(ends, padding, strict=True)
    ]
    table.flags.writeable = False
    return table, (*(1,) * (3 - dims), *lengths)


def _inside(at: int, n: int, m: int) -> Pair:
    """The entries of a result of length m that read among n, `at` entries further."""
    return max(0, -at), max(0, min(m, n - at))


def _boxes(out: np.ndarray, x: np.ndarray, table: np.ndarray, weights: np.ndarray) -> None:
    """The inner box in one way, and then what is around it in the other."""
    m = out.shape[1:]
    inside = []
    for d in range(3):
        spans = [_inside(int(at), x.shape[1 + d], m[d]) for at in table[:, d]]
        first = min(m[d], max(a for a, _ in spans))
        inside.append((first, max(first, min(b for _, b in spans))))
    _inner(out, x, table, weights, inside)
    for d in range(3):
        around = [slice(*inside[e]) if e < d else slice(None) for e in range(3)]
        for part in (slice(0, inside[d][0]), slice(inside[d][1], m[d])):
            around[d] = part
            _around(out, x, table, weights, tuple(around))


def _around(out: np.ndarray, x: np.ndarray, table: np.ndarray, weights: np.ndarray, box: tuple[slice, ...]) -> None:
    """A box of the result, from a copy of what it reads with zeros for the padding: its sums are in the same order."""
    bounds = [part.indices(n)[:2] for part, n in zip(box, out.shape[1:], strict=True)]
    if any(lo >= hi for lo, hi in bounds):
        return
    low, high = table.min(axis=0), table.max(axis=0)
    read = [(lo + int(a), hi + int(b)) for (lo, hi), a, b in zip(bounds, low, high, strict=True)]
    there = [(min(max(lo, 0), n), max(0, min(hi, n))) for (lo, hi), n in zip(read, x.shape[1:], strict=True)]
    copy = np.zeros((x.shape[0], *(hi - lo for lo, hi in read)), x.dtype)
    if all(lo < hi for lo, hi in there):
        to = tuple(slice(lo - first, hi - first) for (lo, hi), (first, _) in zip(there, read, strict=True))
        copy[(slice(None), *to)] = x[(slice(None), *(slice(lo, hi) for lo, hi in there))]
    part = out[(slice(None), *box)]
    _inner(part, copy, table - low, weights, [(0, n) for n in part.shape[1:]])


def _inner(out: np.ndarray, x: np.ndarray, table: np.ndarray, weights: np.ndarray, inside: Sequence[Pair]) -> None:
    """The box in which all offsets read x, as much at a time as fits into the cache."""
    if any(lo == hi for lo, hi in inside):
        return
    groups: dict[Any, list[Any]] = {}
    for at, w in zip(table.tolist(), weights, strict=True):
        groups.setdefault(w.item(), []).append(at)
    if x.shape == out.shape and x.flags.c_contiguous and out.flags.c_contiguous:
        _add_up_joined(out, x, groups, inside)
        return
    (z0, z1), (y0, y1), (c0, c1) = inside
    step = max(1, CACHE // ((c1 - c0) * x.itemsize))
    room = np.empty((min(step, y1 - y0), c1 - c0), x.dtype)
    for n, z in itertools.product(range(x.shape[0]), range(z0, z1)):
        for y in range(y0, y1, step):
            stop = min(y1, y + step)
            parts = [
                (w, [x[n, z + a, y + b : stop + b, c0 + c : c1 + c] for a, b, c in places])
                for w, places in groups.items()
            ]
            _add_up(out[n, z, y:stop, c0:c1], parts, room[: stop - y])


def _add_up_joined(out: np.ndarray, x: np.ndarray, groups: dict[Any, list[Any]], inside: Sequence[Pair]) -> None:
    """Where rows follow each other as they do in the result, they are read and written as one: NumPy takes up to
    twice as long for each by itself. Entries around the box get what is not theirs, and that may overflow: nothing is
    told of overflow, as by the compiled loops.

    All views are made beforehand: between the sums they would keep other workers' threads from beginning theirs.
    """
    _, _, rows, columns = x.shape
    place = lambda z, y, c: (z * rows + y) * columns + c
    first = place(*[lo for lo, _ in inside])
    last = x.size - x[0].size + place(*[hi - 1 for _, hi in inside]) + 1
    of, to, step = x.reshape(-1), out.reshape(-1), CACHE // x.itemsize
    places = [(w, [place(*at) for at in ats]) for w, ats in groups.items()]
    spans = [(lo, min(lo + step, last)) for lo in range(first, last, step)]
    parts = [[(w, [of[lo + at : hi + at] for at in ats]) for w, ats in places] for lo, hi in spans]
    outs, room = [to[lo:hi] for lo, hi in spans], np.empty(min(step, last - first), x.dtype)
    rooms = [room[: hi - lo] for lo, hi in spans]
    with np.errstate(all="ignore"):
        for part in zip(outs, parts, rooms, strict=True):
            _add_up(*part)


def _add_up(out: np.ndarray, parts: Sequence[tuple[Any, Sequence[np.ndarray]]], room: np.ndarray) -> None:
    """The sum of what has one weight, times that, of all weights. room: of the shape of the result."""
    total = out
    for w, (first, *rest) in parts:
        if rest:
            np.add(first, rest[0], total)
            for part in rest[1:]:
                np.add(total, part, total)
            np.multiply(total, w, total)
        else:
            np.multiply(first, w, total)
        if total is room:
            np.add(out, room, out)
        total = room
