"""Pooling: every entry is read from memory once; what several windows share is in the cache by then.

Loops have three spatial dimensions, of which the first may have length 1. They take one row of outputs at a time and
go along it once per tap. Without numba, one piece of the outputs at a
time, tap by tap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from spmd.kernels import buffers, jit
from spmd.kernels.cpu.chunks import CACHE, accurate, by_planes
from spmd.kernels.windows import Window

__all__ = ["avg_pool", "avg_pool_vjp", "max_pool", "max_pool_gather", "max_pool_vjp"]

Ints = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]


def max_pool(
    x: np.ndarray, window: Ints, stride: Ints, padding: Pairs, dilation: Ints, ceil_mode: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The largest entry of every window, and its place among the spatial entries of x."""
    if accurate(x.dtype) != x.dtype:
        return by_planes(lambda x: max_pool(x, window, stride, padding, dilation, ceil_mode), x)
    geometry = _geometry(x.shape[2:], window, stride, padding, dilation, ceil_mode)
    shape = (*x.shape[:2], *(w.m for w in geometry))
    top = buffers.empty(shape, x.dtype)
    index = buffers.empty(shape, _index_dtype(x.shape[2:]))
    if x.dtype.char in "fd" and jit.fits(x):
        planes = math.prod(x.shape[:2])
        _max_pool(_line(top), _line(index), _line(x), _table(geometry), planes)
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
    out = buffers.empty(index.shape, x.dtype)
    if x.dtype.char in "fd" and jit.fits(x, index):
        _gather(_flat(out), _flat(np.ascontiguousarray(x)), _flat(np.ascontiguousarray(index)))
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
    out = buffers.empty((*g.shape[:2], *shape), g.dtype)
    if g.dtype.char in "fd" and jit.fits(g, index):
        geometry = _geometry(shape, window, stride, padding, dilation)
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
    geometry = _geometry(x.shape[2:], window, stride, padding, dilation, ceil_mode)
    out = buffers.empty((*x.shape[:2], *(w.m for w in geometry)), x.dtype)
    shares = _shares(geometry, count_include_pad, _real(x.dtype))
    if x.dtype.char in "fd" and jit.fits(x):
        _avg_pool(_line(out), _line(x), _table(geometry), math.prod(x.shape[:2]), *_three(shares))
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
    geometry = _geometry(shape, window, stride, padding, dilation, ceil_mode)
    out = buffers.empty((*g.shape[:2], *shape), g.dtype)
    shares = _shares(geometry, count_include_pad, _real(g.dtype))
    if g.dtype.char in "fd" and jit.fits(g):
        _avg_pool_vjp(_line(out), _line(g), _table(geometry), math.prod(g.shape[:2]), *_three(shares))
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


def _geometry(shape: Ints, window: Ints, stride: Ints, padding: Pairs, dilation: Ints, ceil_mode=False) -> list[Window]:
    each = zip(shape, window, stride, padding, dilation, strict=True)
    return [Window.of(n, k, s, p, r, ceil_mode) for n, k, s, p, r in each]


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
    start = first * w.stride + w.at(j)
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
def _bounds(at, n, m, stride):
    """The outputs first:end that a tap lets read one of n inputs; output 0 reads the one `at`."""
    first = min(m, max(0, -(at // stride)))
    return first, max(first, min(m, (n - 1 - at) // stride + 1))


# Helpers go along rows of flat arrays, from given places on: a view of a row costs more than a short loop. Places are
# unsigned, so that they are not looked at for being negative; then the compiler makes vectors. It does so of loops over
# neighbours, so a row that is read in strides is first dealt out: entry q * stride + c to place c * width + q.


@jit.helper
def _deal(phases, row, start, n, stride):
    """phases[c * width + q] = row[start + q * stride + c] for the n entries of a row."""
    start = np.uint64(start)
    width = np.uint64(n // stride + 1)
    if stride == 2:
        for k in range(n // 2):
            q = np.uint64(k)
            phases[q] = row[start + q * np.uint64(2)]
            phases[width + q] = row[start + q * np.uint64(2) + np.uint64(1)]
        if n % 2:
            phases[np.uint64(n // 2)] = row[start + np.uint64(n - 1)]
    else:
        for c in range(stride):
            for q in range((n - c + stride - 1) // stride):
                phases[np.uint64(c) * width + np.uint64(q)] = row[start + np.uint64(q * stride + c)]


@jit.helper
def _undeal(row, phases, n, stride):
    """row[q * stride + c] = phases[c * width + q]."""
    width = np.uint64(n // stride + 1)
    if stride == 2:
        for k in range(n // 2):
            q = np.uint64(k)
            row[q * np.uint64(2)] = phases[q]
            row[q * np.uint64(2) + np.uint64(1)] = phases[width + q]
        if n % 2:
            row[np.uint64(n - 1)] = phases[np.uint64(n // 2)]
    else:
        for c in range(stride):
            for q in range((n - c + stride - 1) // stride):
                row[np.uint64(q * stride + c)] = phases[np.uint64(c) * width + np.uint64(q)]


@jit.helper
def _dealt(i, n, stride):
    """Where entry i of a row lies when it has been dealt out."""
    return i % stride * (n // stride + 1) + i // stride


@jit.helper
def _set(out, start, n, value):
    start = np.uint64(start)
    for k in range(n):
        out[start + np.uint64(k)] = value


@jit.helper
def _add(out, to, row, start, n):
    """out[to:to + n] += row[start:start + n]."""
    to, start = np.uint64(to), np.uint64(start)
    for k in range(n):
        out[to + np.uint64(k)] += row[start + np.uint64(k)]


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


@jit.loops("top", "index")
def _max_pool(top: Any, index: Any, x: Any, table: Any, planes: int) -> None:
    nd, nh, nw = table[0, 0], table[1, 0], table[2, 0]
    md, mh, mw = table[0, 1], table[1, 1], table[2, 1]
    stride = table[2, 3]
    phases = np.empty(stride * (nw // stride + 1), x.dtype)
    for p in range(planes):
        for od in range(md):
            for oh in range(mh):
                to = ((p * md + od) * mh + oh) * mw
                _set(top, to, mw, -np.inf)
                _set(index, to, mw, -1)
                for jd in range(table[0, 2]):
                    d = od * table[0, 3] + jd * table[0, 4] - table[0, 5]
                    if d < 0 or d >= nd:
                        continue
                    for jh in range(table[1, 2]):
                        h = oh * table[1, 3] + jh * table[1, 4] - table[1, 5]
                        if h < 0 or h >= nh:
                            continue
                        base = (d * nh + h) * nw
                        row = p * nd * nh * nw + base
                        if stride > 1:
                            _deal(phases, x, row, nw, stride)
                        for jw in range(table[2, 2]):
                            a = jw * table[2, 4] - table[2, 5]
                            first, end = _bounds(a, nw, mw, stride)
                            i = first * stride + a
                            if stride > 1:
                                from_phase = _dealt(i, nw, stride)
                                _compete(top, index, to + first, end - first, phases, from_phase, base + i, stride)
                            else:
                                _compete(top, index, to + first, end - first, x, row + i, base + i, stride)


@jit.loops("out")
def _gather(out: Any, x: Any, index: Any) -> None:
    for p in range(out.shape[0]):
        for j in range(out.shape[1]):
            i = index[p, j]
            out[p, j] = x[p, np.uint64(i)] if i >= 0 else x.dtype.type(0)


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


@jit.loops("out")
def _avg_pool(out: Any, x: Any, table: Any, planes: int, share_d: Any, share_h: Any, share_w: Any) -> None:
    nd, nh, nw = table[0, 0], table[1, 0], table[2, 0]
    md, mh, mw = table[0, 1], table[1, 1], table[2, 1]
    stride = table[2, 3]
    rows = np.empty(nw, x.dtype)
    phases = np.empty(stride * (nw // stride + 1), x.dtype)
    for p in range(planes):
        for od in range(md):
            for oh in range(mh):
                to = ((p * md + od) * mh + oh) * mw
                _set(rows, 0, nw, 0)
                _set(out, to, mw, 0)
                for jd in range(table[0, 2]):
                    d = od * table[0, 3] + jd * table[0, 4] - table[0, 5]
                    if d < 0 or d >= nd:
                        continue
                    for jh in range(table[1, 2]):
                        h = oh * table[1, 3] + jh * table[1, 4] - table[1, 5]
                        if h >= 0 and h < nh:
                            _add(rows, 0, x, ((p * nd + d) * nh + h) * nw, nw)
                if stride > 1:
                    _deal(phases, rows, 0, nw, stride)
                for jw in range(table[2, 2]):
                    a = jw * table[2, 4] - table[2, 5]
                    first, end = _bounds(a, nw, mw, stride)
                    i = first * stride + a
                    if stride > 1:
                        _add(out, to + first, phases, _dealt(i, nw, stride), end - first)
                    else:
                        _add(out, to + first, rows, i, end - first)
                share = share_d[od] * share_h[oh]
                for o in range(mw):
                    out[np.uint64(to) + np.uint64(o)] *= share * share_w[o]


@jit.loops("out")
def _avg_pool_vjp(out: Any, g: Any, table: Any, planes: int, share_d: Any, share_h: Any, share_w: Any) -> None:
    nd, nh, nw = table[0, 0], table[1, 0], table[2, 0]
    md, mh, mw = table[0, 1], table[1, 1], table[2, 1]
    stride = table[2, 3]
    width = stride * (nw // stride + 1)
    row = np.empty(nw, g.dtype)
    phases = np.empty(width, g.dtype)
    scaled = np.empty(mw, g.dtype)
    for p in range(planes):
        plane = p * nd * nh * nw
        done = 0
        for od in range(md):
            end_d = _end_of(od, nd, table[0, 2], table[0, 3], table[0, 4], table[0, 5])
            for oh in range(mh):
                end_h = _end_of(oh, nh, table[1, 2], table[1, 3], table[1, 4], table[1, 5])
                upto = ((end_d - 1) * nh + end_h) * nw
                if upto > done:
                    _set(out, plane + done, upto - done, 0)
                    done = upto
                share = share_d[od] * share_h[oh]
                at = np.uint64(((p * md + od) * mh + oh) * mw)
                for o in range(mw):
                    scaled[o] = g[at + np.uint64(o)] * (share * share_w[o])
                _set(phases, 0, width, 0)
                for jw in range(table[2, 2]):
                    a = jw * table[2, 4] - table[2, 5]
                    first, end = _bounds(a, nw, mw, stride)
                    _add(phases, _dealt(first * stride + a, nw, stride), scaled, first, end - first)
                _undeal(row, phases, nw, stride)
                for jd in range(table[0, 2]):
                    d = od * table[0, 3] + jd * table[0, 4] - table[0, 5]
                    if d < 0 or d >= nd:
                        continue
                    for jh in range(table[1, 2]):
                        h = oh * table[1, 3] + jh * table[1, 4] - table[1, 5]
                        if h >= 0 and h < nh:
                            _add(out, plane + (d * nh + h) * nw, row, 0, nw)
        _set(out, plane + done, nd * nh * nw - done, 0)
