"""Pooling: every entry is read from memory once; what several windows share is in the cache by then.

Loops have three spatial dimensions, of which the first may have length 1. They make one row at a time, of which
neighbours lie in one vector: a sum first adds up rows and then goes along the one that results, the largest entry is
looked for along rows first. Without numba, one piece of the outputs at a time, tap by tap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from spmd.kernels import jit
from spmd.kernels.cpu.chunks import CACHE, accurate, by_planes
from spmd.kernels.cpu.rows import fill, join_phases, scale, split_phases
from spmd.kernels.cpu.vectors import combine, fetch
from spmd.kernels.memory import pool
from spmd.kernels.windows import Window, windows

Ints = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]


def max_pool(
    x: np.ndarray, window: Ints, stride: Ints, padding: Pairs, dilation: Ints, ceil_mode: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The largest entry of every window, and its place among the spatial entries of x."""
    if accurate(x.dtype) != x.dtype:
        return by_planes(lambda x: max_pool(x, window, stride, padding, dilation, ceil_mode), x)
    geometry = windows(x.shape[2:], window, stride, padding, dilation, ceil_mode)
    shape = (*x.shape[:2], *(w.m for w in geometry))
    top = pool.empty(shape, x.dtype)
    index = pool.empty(shape, _index_dtype(x.shape[2:]))
    if x.dtype.char in "fd" and jit.fits(x):
        planes = math.prod(x.shape[:2])
        _max_pool(_line(top), _line(index), _line(x), _table(geometry), planes, *_contests(geometry[-1]))
        return top, index
    least = -np.inf if x.dtype.kind != "i" else np.iinfo(x.dtype).min
    flat, tops, indices = _planes(x), _planes(top), _planes(index)
    origin, steps, offsets = _places(geometry, index.dtype)
    for planes, outputs, inputs, part in _pieces(flat, tops, geometry):
        piece, t = flat[planes, inputs], tops[planes, outputs]
        t.fill(least)
        for to, read in _taps(part):
            np.maximum(t[:, *to], piece[:, *read], out=t[:, *to])
        # The last tap that is noted is the first one that won: they are gone through backwards.
        won = np.full(t.shape, len(offsets) - 1, np.uint8 if len(offsets) <= 256 else np.int64)
        odd = x.dtype.kind == "f" and bool(np.isnan(t).any())
        for k, (to, read) in reversed(list(enumerate(_taps(part)))):
            v = piece[:, *read]
            wins = v == t[:, *to]
            if odd:
                wins |= v != v
            np.copyto(won[:, *to], k, where=wins)
        at = indices[planes, outputs]
        np.take(offsets, won, out=at, mode="clip")
        at += origin + sum(_along(step, d, len(steps)) for d, step in enumerate((steps[0][outputs], *steps[1:])))
        np.copyto(at, -1, where=won == len(offsets) - 1)
    return top, index


def max_pool_gather(x: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The entries of x at index, as max_pool gives it; 0 where it is -1."""
    out = pool.empty(index.shape, x.dtype)
    if x.dtype.char in "fd" and jit.fits(x, index):
        sizes = math.prod(x.shape[2:]), math.prod(index.shape[2:])
        _gather(_line(out), _line(x), _line(index), *sizes)
        return out
    flat, at, into = _flat(x), _flat(index), _flat(out)
    if not flat.shape[1]:
        out.fill(0)
        return out
    for p in range(len(flat)):
        np.take(flat[p], at[p], out=into[p], mode="wrap")
    np.copyto(into, 0, where=at < 0)
    return out


def max_pool_vjp(
    g: np.ndarray, index: np.ndarray, shape: Ints, window: Ints, stride: Ints, padding: Pairs, dilation: Ints
) -> np.ndarray:
    """The cotangent of x, given that of max_pool(x): g is added to the entries that won."""
    if accurate(g.dtype) != g.dtype:
        return by_planes(lambda g, at: max_pool_vjp(g, at, shape, window, stride, padding, dilation), g, index)
    out = pool.empty((*g.shape[:2], *shape), g.dtype)
    if g.dtype.char in "fd" and jit.fits(g, index):
        geometry = windows(shape, window, stride, padding, dilation)
        g, index = _solid(np.ascontiguousarray(g)), _solid(np.ascontiguousarray(index))
        _max_pool_vjp(_flat(out), g, index, _table(geometry))
        return out
    flat, at, into = _flat(g), _flat(index), _flat(out)
    size = into.shape[1]
    step = max(1, CACHE // max(1, 8 * size))
    for start in range(0, len(into), step):
        piece = slice(start, start + step)
        # Each plane has a place more at its start, for the index -1.
        planes = np.arange(len(into[piece]))[:, None] * (size + 1) + 1
        total = np.bincount((at[piece] + planes).reshape(-1), flat[piece].reshape(-1), len(planes) * (size + 1))
        into[piece] = total.reshape(-1, size + 1)[:, 1:]
    return out


def avg_pool(
    x: np.ndarray,
    window: Ints,
    stride: Ints,
    padding: Pairs,
    dilation: Ints,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> np.ndarray:
    """The mean of every window."""
    if accurate(x.dtype) != x.dtype:
        options = (window, stride, padding, dilation, ceil_mode, count_include_pad)
        return by_planes(lambda x: avg_pool(x, *options), x)
    geometry = windows(x.shape[2:], window, stride, padding, dilation, ceil_mode)
    out = pool.empty((*x.shape[:2], *(w.m for w in geometry)), x.dtype)
    shares = _shares(geometry, count_include_pad, _real(x.dtype))
    if x.dtype.char in "fd" and jit.fits(x):
        planes = math.prod(x.shape[:2])
        _avg_pool(_line(out), _line(x), _table(geometry), planes, *_three(shares), *_gathers(geometry[-1]))
        return out
    flat, outs = _planes(x), _planes(out)
    for planes, outputs, inputs, part in _pieces(flat, outs, geometry):
        piece = flat[planes, inputs]
        for d, w in enumerate(part):
            piece = _summed(piece, 1 + d, w)
            piece *= _along(shares[d][outputs] if d == 0 else shares[d], 1 + d, piece.ndim)
        outs[planes, outputs] = piece
    return out


def avg_pool_vjp(
    g: np.ndarray,
    shape: Ints,
    window: Ints,
    stride: Ints,
    padding: Pairs,
    dilation: Ints,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> np.ndarray:
    """The cotangent of x, given that of avg_pool(x): each entry of g is shared among its window."""
    if accurate(g.dtype) != g.dtype:
        options = (shape, window, stride, padding, dilation, ceil_mode, count_include_pad)
        return by_planes(lambda g: avg_pool_vjp(g, *options), g)
    geometry = windows(shape, window, stride, padding, dilation, ceil_mode)
    out = pool.empty((*g.shape[:2], *shape), g.dtype)
    shares = _shares(geometry, count_include_pad, _real(g.dtype))
    if g.dtype.char in "fd" and jit.fits(g):
        planes = math.prod(g.shape[:2])
        _avg_pool_vjp(_line(out), _line(g), _table(geometry), planes, *_three(shares), *_spreads(geometry[-1]))
        return out
    flat, outs = _planes(g), _planes(out)
    step = max(1, CACHE // max(1, outs[:1].nbytes))
    for start in range(0, len(outs), step):
        piece = flat[start : start + step]
        for d, w in reversed(list(enumerate(geometry))):
            piece = _spread(piece * _along(shares[d], 1 + d, piece.ndim), 1 + d, w)
        outs[start : start + step] = piece
    return out


# Geometry


def _index_dtype(shape: Ints) -> Any:
    return np.int32 if math.prod(shape) < 1 << 31 else np.int64


def _real(dtype: np.dtype) -> np.dtype:
    return np.dtype({"F": np.float32, "D": np.float64}.get(dtype.char, dtype))


def _shares(geometry: list[Window], count_include_pad: bool, dtype: Any) -> list[np.ndarray]:
    """For each dimension, 1 / the taps of every output that count."""
    return [(1 / np.maximum(w.counts(count_include_pad), 1)).astype(dtype) for w in geometry]


def _three(shares: list[np.ndarray]) -> list[np.ndarray]:
    return [np.ones(1, shares[0].dtype)] * (3 - len(shares)) + shares


def _table(geometry: list[Window]) -> np.ndarray:
    """A row for each of three dimensions, as loops read it."""
    return np.array([Window.of(1, 1)] * (3 - len(geometry)) + geometry, np.int64)


def _planes(x: np.ndarray) -> np.ndarray:
    return x.reshape(math.prod(x.shape[:2]), *x.shape[2:])


def _flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(math.prod(x.shape[:2]), math.prod(x.shape[2:]))


def _line(x: np.ndarray) -> np.ndarray:
    """All entries in a row; of a new array a view."""
    return np.ascontiguousarray(x).reshape(-1)


def _solid(x: np.ndarray) -> np.ndarray:
    """(N, C, *spatial) with all planes along one axis and three spatial dimensions."""
    return x.reshape(math.prod(x.shape[:2]), *(1,) * (5 - x.ndim), *x.shape[2:])


# What loops do along a row, decided beforehand: divisions cost more there than sums. A row that is read in strides is
# dealt out (`spmd.kernels.cpu.rows`).


def _program(pieces: list[tuple], adds: list[tuple], taps: int) -> tuple[np.ndarray, np.ndarray]:
    """As arrays. pieces: (to, n, starts), where n neighbours from `to` on are the sums of those from `starts` on; adds:
    (to, n, start) afterwards."""
    sums = np.zeros((len(pieces), 2 + taps + 1), np.int64)
    for row, (to, n, starts) in zip(sums, pieces, strict=True):
        row[: 3 + len(starts)] = to, n, len(starts), *starts
    return sums, np.array(adds, np.int64).reshape(-1, 3)


@lru_cache(64)
def _gathers(w: Window) -> tuple[np.ndarray, np.ndarray]:
    """Every output of a row is the sum of its taps."""
    first, end = _inner(w)
    starts = [_dealt(w, first * w.stride + w.input_of(j)) for j in range(w.kernel)]
    pieces = [(first, end - first, starts), (0, first, []), (end, w.m - end, [])]
    adds = [
        (o, n, _dealt(w, o * w.stride + w.input_of(j))) for j in range(w.kernel) for o, n in _outside(w, j, first, end)
    ]
    return _program(pieces, adds, w.kernel)


@lru_cache(64)
def _spreads(w: Window) -> tuple[np.ndarray, np.ndarray]:
    """Every input of a row, dealt out, is the sum of the outputs that read it."""
    pieces, adds = [], []
    for c in range(min(w.stride, w.n)):
        entries = len(range(c, w.n, w.stride))
        to = _dealt(w, c)
        shifts = [w.input_of(j) // w.stride for j in range(w.kernel) if w.input_of(j) % w.stride == c]
        first, end = max(0, *shifts, 0), min(entries, *(w.m + s for s in shifts), entries)
        if first >= end:
            first = end = entries
        pieces += [
            (to + first, end - first, [first - s for s in shifts]),
            (to, first, []),
            (to + end, entries - end, []),
        ]
        for s in shifts:
            spans = (max(0, s), min(first, w.m + s)), (max(end, s), min(entries, w.m + s))
            adds += [(to + a, b - a, a - s) for a, b in spans if a < b]
    return _program(pieces, adds, w.kernel)


@lru_cache(64)
def _contests(w: Window) -> tuple[np.ndarray, np.ndarray]:
    """One row of numbers for the outputs whose taps all lie inside, (first, end, start of tap 0, start of tap 1, input
    of tap 0); then what competes afterwards: (to, n, start, input)."""
    first, end = _inner(w) if w.kernel > 1 else (w.m, w.m)
    inputs = [first * w.stride + w.input_of(j) for j in range(w.kernel)]
    later = []
    for j in range(w.kernel):
        spans = _outside(w, j, first, end) + ([(first, end - first)] if j > 1 and first < end else [])
        later += [(o, n, _dealt(w, o * w.stride + w.input_of(j)), o * w.stride + w.input_of(j)) for o, n in spans]
    pair = [_dealt(w, i) for i in (inputs[0], inputs[min(1, w.kernel - 1)])]
    return np.array([first, end, *pair, inputs[0]], np.int64), np.array(later, np.int64).reshape(-1, 4)


def _inner(w: Window) -> tuple[int, int]:
    """The outputs first:end all of whose taps read inputs; m:m if there are none."""
    bounds = [w.inside(j) for j in range(w.kernel)]
    first, end = max(a for a, _ in bounds), min(b for _, b in bounds)
    return (first, end) if first < end else (w.m, w.m)


def _outside(w: Window, j: int, first: int, end: int) -> list[tuple[int, int]]:
    """The outputs before `first` and from `end` on whose tap j reads an input: (start, length)."""
    a, b = w.inside(j)
    spans = (a, min(b, first)), (max(a, end), b)
    return [(start, stop - start) for start, stop in spans if start < stop]


def _dealt(w: Window, i: int) -> int:
    """Where input i lies when its row is dealt out."""
    return i % w.stride * (w.n // w.stride + 1) + i // w.stride


# NumPy


def _pieces(x: np.ndarray, out: np.ndarray, geometry: list[Window]) -> Iterator[tuple[slice, slice, slice, list]]:
    """Pieces of planes (P, *spatial) that fit into the cache: which planes, which of the first dimension's outputs,
    the inputs that these read, and their geometry by themselves."""
    if not out.size:
        return
    first, *rest = geometry
    step = max(1, CACHE // max(1, x[:1].nbytes))
    rows = first.m if x[:1].nbytes <= 2 * CACHE else max(1, first.m * CACHE // x[:1].nbytes)
    for p in range(0, len(x), step):
        for a in range(0, first.m, rows):
            b = min(a + rows, first.m)
            (start, stop), (low, _) = first.part(a, b)
            if start == stop and low:  # padding alone
                low = start - (a * first.stride - first.low)
            part = first._replace(n=stop - start, m=b - a, low=low)
            yield slice(p, p + step), slice(a, b), slice(start, stop), [part, *rest]


def _taps(geometry: list[Window]) -> Iterator[tuple[tuple, tuple]]:
    """For every tap, in row-major order: which outputs read an input by it, and which inputs these are."""
    for taps in np.ndindex(*(w.kernel for w in geometry)):
        found = [_tap(w, j) for w, j in zip(geometry, taps, strict=True)]
        yield tuple(to for to, _ in found), tuple(read for _, read in found)


def _tap(w: Window, j: int) -> tuple[slice, slice]:
    first, end = w.inside(j)
    start = first * w.stride + w.input_of(j)
    return slice(first, end), slice(
        start, start + (end - first - 1) * w.stride + 1, w.stride
    ) if first < end else slice(0)


def _places(geometry: list[Window], dtype: Any) -> tuple[int, list[np.ndarray], np.ndarray]:
    """The place of an output's tap: an origin, a step for each of its coordinates, and an offset for the tap. After the
    offsets one more, for no tap."""
    pitches = [math.prod(w.n for w in geometry[d + 1 :]) for d in range(len(geometry))]
    each = list(zip(geometry, pitches, strict=True))
    steps = [np.arange(w.m, dtype=dtype) * (w.stride * pitch) for w, pitch in each]
    offsets = np.zeros((), dtype)
    for w, pitch in each:
        offsets = offsets[..., None] + np.arange(w.kernel, dtype=dtype) * (w.dilation * pitch)
    return -sum(w.low * pitch for w, pitch in each), steps, np.append(offsets.reshape(-1), offsets.dtype.type(0))


def _along(v: np.ndarray, axis: int, ndim: int) -> np.ndarray:
    return v.reshape(-1, *(1,) * (ndim - axis - 1))


def _summed(x: np.ndarray, axis: int, w: Window) -> np.ndarray:
    """The sums over the taps along an axis."""
    out = np.zeros((*x.shape[:axis], w.m, *x.shape[axis + 1 :]), x.dtype)
    front = (slice(None),) * axis
    for j in range(w.kernel):
        to, read = _tap(w, j)
        out[(*front, to)] += x[(*front, read)]
    return out


def _spread(g: np.ndarray, axis: int, w: Window) -> np.ndarray:
    """The adjoint of _summed."""
    out = np.zeros((*g.shape[:axis], w.n, *g.shape[axis + 1 :]), g.dtype)
    front = (slice(None),) * axis
    for j in range(w.kernel):
        to, read = _tap(w, j)
        out[(*front, read)] += g[(*front, to)]
    return out


# Loops. A row of `table` is a `Window`: n, m, kernel, stride, dilation, low.


@jit.helper
def _compete(top, index, to, n, row, start, base, stride):
    """Entry start + k of a row competes for output to + k; its place is base + k * stride."""
    to, start = np.uint64(to), np.uint64(start)
    for k in range(n):
        o = to + np.uint64(k)
        v, b, i = row[start + np.uint64(k)], top[o], index[o]
        wins = (not (v <= b)) & (b == b) | (i < 0)
        top[o] = v if wins else b
        index[o] = base + k * stride if wins else i


@jit.helper
def _row_max(top, index, to, row, start, base, m, stride, dilation, pair, later):
    """The largest entries of an input row's windows, and their places; -1 of windows of padding alone. The row's first
    entry lies at `start` of `row` and has the place `base`."""
    first, end, at = pair[0], pair[1], base + pair[4]
    a, b, o = np.uint64(start + pair[2]), np.uint64(start + pair[3]), np.uint64(to + first)
    for k in range(end - first):
        u = np.uint64(k)
        v, w = row[a + u], row[b + u]
        wins = (not (w <= v)) & (v == v)
        top[o + u] = w if wins else v
        index[o + u] = at + (dilation if wins else 0) + k * stride
    for begin, stop in ((0, first), (end, m)):
        fill(top, to + begin, stop - begin, -np.inf)
        fill(index, to + begin, stop - begin, -1)
    for j in range(later.shape[0]):
        _compete(top, index, to + later[j, 0], later[j, 1], row, start + later[j, 2], base + later[j, 3], stride)


@jit.helper
def _larger(top, index, to, n, tops, places, a, b):
    """The larger of the entries a + k and b + k, with its place; the first one where they are equal."""
    to, a, b = np.uint64(to), np.uint64(a), np.uint64(b)
    for k in range(n):
        u = np.uint64(k)
        v, i, w, j = tops[a + u], places[a + u], tops[b + u], places[b + u]
        wins = (not (w <= v)) & (v == v) | (i < 0)
        top[to + u] = w if wins else v
        index[to + u] = j if wins else i


@jit.helper
def _improve(top, index, to, n, tops, places, b):
    """The same, of what is there and the entry b + k."""
    to, b = np.uint64(to), np.uint64(b)
    for k in range(n):
        u = np.uint64(k)
        v, i, w, j = top[to + u], index[to + u], tops[b + u], places[b + u]
        wins = (not (w <= v)) & (v == v) | (i < 0)
        top[to + u] = w if wins else v
        index[to + u] = j if wins else i


@jit.loops("top", "index")
def _max_pool(top: Any, index: Any, x: Any, table: Any, planes: int, pair: Any, later: Any) -> None:
    # First along a row of inputs, then among rows: so the first one of a window's largest wins. What was found of a row
    # is held while other windows may ask for it.
    nd, nh, nw = table[0, 0], table[1, 0], table[2, 0]
    md, mh, mw = table[0, 1], table[1, 1], table[2, 1]
    taps, stride, dilation = table[1, 2], table[2, 3], table[2, 4]
    phases = np.empty(stride * (nw // stride + 1), x.dtype)
    slots = min(nh, (taps - 1) * table[1, 4] + 1)
    tops, places = np.empty(table[0, 2] * slots * mw, top.dtype), np.empty(table[0, 2] * slots * mw, index.dtype)
    held = np.empty(table[0, 2] * slots, np.int64)
    fetched, size = 0, x.itemsize
    for p in range(planes):
        held[:] = -1
        for od in range(md):
            for oh in range(mh):
                to = ((p * md + od) * mh + oh) * mw
                count, before = 0, 0
                for jd in range(table[0, 2]):
                    d = od * table[0, 3] + jd * table[0, 4] - table[0, 5]
                    if d < 0 or d >= nd:
                        continue
                    for jh in range(taps):
                        h = oh * table[1, 3] + jh * table[1, 4] - table[1, 5]
                        if h < 0 or h >= nh:
                            continue
                        slot = jd * slots + h % slots
                        at, base = slot * mw, (d * nh + h) * nw
                        if held[slot] != base:
                            held[slot] = base
                            row = p * nd * nh * nw + base
                            fetched = fetch(x, fetched, row + nw, size)
                            if stride > 1:
                                split_phases(phases, x, row, nw, stride)
                                _row_max(tops, places, at, phases, 0, base, mw, stride, dilation, pair, later)
                            else:
                                _row_max(tops, places, at, x, row, base, mw, stride, dilation, pair, later)
                        count += 1
                        if count == 2:
                            _larger(top, index, to, mw, tops, places, before, at)
                        elif count > 2:
                            _improve(top, index, to, mw, tops, places, at)
                        before = at
                if count == 0:
                    fill(top, to, mw, -np.inf)
                    fill(index, to, mw, -1)
                elif count == 1:
                    top[to : to + mw] = tops[before : before + mw]
                    index[to : to + mw] = places[before : before + mw]


@jit.loops("out")
def _gather(out: Any, x: Any, index: Any, n: int, m: int) -> None:
    # Where the winners lie is not foreseen by the machine, but it is about as far on in their plane as the outputs are.
    if m == 0:
        return
    size, piece = x.itemsize, 64
    for p in range(out.size // m):
        plane, fetched = p * n, p * n
        for start in range(0, m, piece):
            end = min(m, start + piece)
            fetched = fetch(x, fetched, plane + end * n // m + n // 64, size)
            for j in range(start, end):
                k = np.uint64(p * m + j)
                i = index[k]
                out[k] = x[np.uint64(plane + i)] if i >= 0 else x.dtype.type(0)


@jit.helper
def _end_of(o, n, kernel, stride, dilation, low):
    """One past the last input that output o reads; 0 if it reads none."""
    last = o * stride + (kernel - 1) * dilation - low
    while last >= n:
        last -= dilation
    return max(0, last + 1)


@jit.loops("out")
def _max_pool_vjp(out: Any, g: Any, index: Any, table: Any) -> None:
    # Entries are set to zero shortly before the first output that may add to them, so that they are in the cache then.
    nd, nh, nw = table[0, 0], table[1, 0], table[2, 0]
    planes, md, mh, mw = g.shape
    for p in range(planes):
        done = 0
        for od in range(md):
            d = _end_of(od, nd, table[0, 2], table[0, 3], table[0, 4], table[0, 5])
            for oh in range(mh):
                h = _end_of(oh, nh, table[1, 2], table[1, 3], table[1, 4], table[1, 5])
                upto = ((d - 1) * nh + h) * nw
                if upto > done:
                    out[p, done:upto] = 0
                    done = upto
                for ow in range(mw):
                    i = index[p, od, oh, ow]
                    if i >= 0:
                        out[p, np.uint64(i)] += g[p, od, oh, ow]
        out[p, done:] = 0


@jit.helper
def _row_sums(out, to, row, sums, adds, ones):
    """What `_program` says."""
    for j in range(sums.shape[0]):
        combine(out, to + sums[j, 0], sums[j, 1], row, 0, sums, j * sums.shape[1] + 3, ones, 0, sums[j, 2])
    for j in range(adds.shape[0]):
        o, start = np.uint64(to + adds[j, 0]), np.uint64(adds[j, 2])
        for k in range(adds[j, 1]):
            out[o + np.uint64(k)] += row[start + np.uint64(k)]


@jit.loops("out")
def _avg_pool(
    out: Any, x: Any, table: Any, planes: int, share_d: Any, share_h: Any, share_w: Any, sums: Any, adds: Any
) -> None:
    nd, nh, nw = table[0, 0], table[1, 0], table[2, 0]
    md, mh, mw = table[0, 1], table[1, 1], table[2, 1]
    stride = table[2, 3]
    row, phases = np.empty(nw, x.dtype), np.empty(stride * (nw // stride + 1), x.dtype)
    starts = np.empty(table[0, 2] * table[1, 2], np.int64)
    factors, ones = np.empty(starts.size, x.dtype), np.ones(table[2, 2], x.dtype)
    fetched, size = 0, x.itemsize
    for p in range(planes):
        for od in range(md):
            for oh in range(mh):
                count = 0
                for jd in range(table[0, 2]):
                    d = od * table[0, 3] + jd * table[0, 4] - table[0, 5]
                    for jh in range(table[1, 2]):
                        h = oh * table[1, 3] + jh * table[1, 4] - table[1, 5]
                        if 0 <= d < nd and 0 <= h < nh:
                            starts[count], factors[count] = ((p * nd + d) * nh + h) * nw, share_d[od] * share_h[oh]
                            count += 1
                to = ((p * md + od) * mh + oh) * mw
                if count:
                    fetched = fetch(x, fetched, starts[count - 1] + nw, size)
                combine(row, 0, nw, x, 0, starts, 0, factors, 0, count)
                if stride > 1:
                    split_phases(phases, row, 0, nw, stride)
                    _row_sums(out, to, phases, sums, adds, ones)
                else:
                    _row_sums(out, to, row, sums, adds, ones)
                scale(out, to, mw, share_w)


@jit.loops("out")
def _avg_pool_vjp(
    out: Any, g: Any, table: Any, planes: int, share_d: Any, share_h: Any, share_w: Any, sums: Any, adds: Any
) -> None:
    # A row of inputs is the sum of the rows of outputs that read it, along which each is spread over its taps.
    nd, nh, nw = table[0, 0], table[1, 0], table[2, 0]
    md, mh, mw = table[0, 1], table[1, 1], table[2, 1]
    stride = table[2, 3]
    total, phases = np.empty(mw, g.dtype), np.empty(stride * (nw // stride + 1), g.dtype)
    starts = np.empty(table[0, 2] * table[1, 2], np.int64)
    factors, ones = np.empty(starts.size, g.dtype), np.ones(table[2, 2], g.dtype)
    deep, high = _readers(table, 0), _readers(table, 1)
    fetched, size = 0, g.itemsize
    for p in range(planes):
        for d in range(nd):
            for h in range(nh):
                count = 0
                for a in range(deep[d, 0]):
                    od = deep[d, 1 + a]
                    for b in range(high[h, 0]):
                        oh = high[h, 1 + b]
                        starts[count] = ((p * md + od) * mh + oh) * mw
                        factors[count] = share_d[od] * share_h[oh]
                        count += 1
                to = ((p * nd + d) * nh + h) * nw
                if count:
                    fetched = fetch(g, fetched, starts[count - 1] + mw, size)
                combine(total, 0, mw, g, 0, starts, 0, factors, 0, count)
                scale(total, 0, mw, share_w)
                if stride > 1:
                    _row_sums(phases, 0, total, sums, adds, ones)
                    join_phases(out, to, phases, nw, stride)
                else:
                    _row_sums(out, to, total, sums, adds, ones)


@jit.helper
def _readers(table, d):
    """For every input, how many outputs read it, and which; the last taps come first."""
    n, m, taps, stride, dilation, low = table[d, 0], table[d, 1], table[d, 2], table[d, 3], table[d, 4], table[d, 5]
    found = np.zeros((n, 1 + taps), np.int64)
    for j in range(taps - 1, -1, -1):
        for o in range(m):
            i = o * stride + j * dilation - low
            if 0 <= i < n:
                found[i, 0] += 1
                found[i, found[i, 0]] = o
    return found
