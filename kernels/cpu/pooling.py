"""Pooling that reads each entry from memory once: what windows share is in the cache then.

Loops have three spatial dimensions, the first ones of length 1 if need be. They make a row at a time, with neighbours
in one vector: a mean adds rows and then goes along the sum, a maximum goes along each row first. Without numba, a piece
of the outputs at a time, tap by tap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from spmd.kernels import jit
from spmd.kernels.cpu.chunks import CACHE, accurate, by_planes
from spmd.kernels.cpu.pooling_loops import (
    avg_pool_loop,
    avg_pool_vjp_loop,
    gather_loop,
    max_pool_loop,
    max_pool_vjp_loop,
)
from spmd.kernels.memory import pool
from spmd.kernels.windows import Window, windows

Ints = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]


def max_pool(
    x: np.ndarray, window: Ints, stride: Ints, padding: Pairs, dilation: Ints, ceil_mode: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The largest entry of every window, and its index among the spatial entries of x."""
    if accurate(x.dtype) != x.dtype:
        return by_planes(lambda x: max_pool(x, window, stride, padding, dilation, ceil_mode), x)
    geometry = windows(x.shape[2:], window, stride, padding, dilation, ceil_mode)
    shape = (*x.shape[:2], *(w.m for w in geometry))
    top = pool.empty(shape, x.dtype)
    index = pool.empty(shape, _index_dtype(x.shape[2:]))
    if x.dtype.char in "fd" and jit.fits(x):
        planes = math.prod(x.shape[:2])
        max_pool_loop(_flat(top), _flat(index), _flat(x), _table(geometry), planes, *_max_plan(geometry[-1]))
        return top, index
    lowest = -np.inf if x.dtype.kind != "i" else np.iinfo(x.dtype).min
    flat, tops, indices = _planes(x), _planes(top), _planes(index)
    origin, steps, offsets = _indices(geometry, index.dtype)
    for planes, outputs, inputs, part in _pieces(flat, tops, geometry):
        piece, largest = flat[planes, inputs], tops[planes, outputs]
        largest.fill(lowest)
        for to, read in _taps(part):
            np.maximum(largest[:, *to], piece[:, *read], out=largest[:, *to])
        # Backwards, so that the first of equal taps is written last.
        argmax = np.full(largest.shape, len(offsets) - 1, np.uint8 if len(offsets) <= 256 else np.int64)
        has_nan = x.dtype.kind == "f" and bool(np.isnan(largest).any())
        for k, (to, read) in reversed(list(enumerate(_taps(part)))):
            v = piece[:, *read]
            is_largest = v == largest[:, *to]
            if has_nan:
                is_largest |= v != v
            np.copyto(argmax[:, *to], k, where=is_largest)
        at = indices[planes, outputs]
        np.take(offsets, argmax, out=at, mode="clip")
        at += origin + sum(_along(step, d, len(steps)) for d, step in enumerate((steps[0][outputs], *steps[1:])))
        np.copyto(at, -1, where=argmax == len(offsets) - 1)
    return top, index


def max_pool_gather(x: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The entries of x at index, as max_pool gives it; 0 where it is -1."""
    out = pool.empty(index.shape, x.dtype)
    if x.dtype.char in "fd" and jit.fits(x, index):
        sizes = math.prod(x.shape[2:]), math.prod(index.shape[2:])
        gather_loop(_flat(out), _flat(x), _flat(index), *sizes)
        return out
    flat, at, gathered = _matrix(x), _matrix(index), _matrix(out)
    if not flat.shape[1]:
        out.fill(0)
        return out
    for p in range(len(flat)):
        np.take(flat[p], at[p], out=gathered[p], mode="wrap")
    np.copyto(gathered, 0, where=at < 0)
    return out


def max_pool_vjp(
    g: np.ndarray, index: np.ndarray, shape: Ints, window: Ints, stride: Ints, padding: Pairs, dilation: Ints
) -> np.ndarray:
    """The cotangent of x, given that of max_pool(x): g is added to the largest entries."""
    if accurate(g.dtype) != g.dtype:
        return by_planes(lambda g, at: max_pool_vjp(g, at, shape, window, stride, padding, dilation), g, index)
    out = pool.empty((*g.shape[:2], *shape), g.dtype)
    if g.dtype.char in "fd" and jit.fits(g, index):
        geometry = windows(shape, window, stride, padding, dilation)
        g, index = _as_4d(np.ascontiguousarray(g)), _as_4d(np.ascontiguousarray(index))
        max_pool_vjp_loop(_matrix(out), g, index, _table(geometry))
        return out
    flat, at, gradient = _matrix(g), _matrix(index), _matrix(out)
    size = gradient.shape[1]
    step = max(1, CACHE // max(1, 8 * size))
    for start in range(0, len(gradient), step):
        piece = slice(start, start + step)
        # Each plane has one more entry at its start, for the index -1.
        planes = np.arange(len(gradient[piece]))[:, None] * (size + 1) + 1
        sums = np.bincount((at[piece] + planes).reshape(-1), flat[piece].reshape(-1), len(planes) * (size + 1))
        gradient[piece] = sums.reshape(-1, size + 1)[:, 1:]
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
        avg_pool_loop(_flat(out), _flat(x), _table(geometry), planes, *_three_dims(shares), *_gather_plan(geometry[-1]))
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
    """The cotangent of x, given that of avg_pool(x): each entry of g is spread evenly over its window."""
    if accurate(g.dtype) != g.dtype:
        options = (shape, window, stride, padding, dilation, ceil_mode, count_include_pad)
        return by_planes(lambda g: avg_pool_vjp(g, *options), g)
    geometry = windows(shape, window, stride, padding, dilation, ceil_mode)
    out = pool.empty((*g.shape[:2], *shape), g.dtype)
    shares = _shares(geometry, count_include_pad, _real(g.dtype))
    if g.dtype.char in "fd" and jit.fits(g):
        planes = math.prod(g.shape[:2])
        avg_pool_vjp_loop(
            _flat(out), _flat(g), _table(geometry), planes, *_three_dims(shares), *_spread_plan(geometry[-1])
        )
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
    """For each dimension, 1 / the number of taps of each output that count."""
    return [(1 / np.maximum(w.counts(count_include_pad), 1)).astype(dtype) for w in geometry]


def _three_dims(shares: list[np.ndarray]) -> list[np.ndarray]:
    return [np.ones(1, shares[0].dtype)] * (3 - len(shares)) + shares


def _table(geometry: list[Window]) -> np.ndarray:
    """The windows of three dimensions, a row each, for loops."""
    return np.array([Window.of(1, 1)] * (3 - len(geometry)) + geometry, np.int64)


def _planes(x: np.ndarray) -> np.ndarray:
    return x.reshape(math.prod(x.shape[:2]), *x.shape[2:])


def _matrix(x: np.ndarray) -> np.ndarray:
    return x.reshape(math.prod(x.shape[:2]), math.prod(x.shape[2:]))


def _flat(x: np.ndarray) -> np.ndarray:
    """All entries in one dimension; for a new array, a view."""
    return np.ascontiguousarray(x).reshape(-1)


def _as_4d(x: np.ndarray) -> np.ndarray:
    """(N, C, *spatial) as (planes, *three spatial dimensions)."""
    return x.reshape(math.prod(x.shape[:2]), *(1,) * (5 - x.ndim), *x.shape[2:])


# Plans of what loops do along a row: divisions cost more there than sums. A row that is read in strides is split into
# its phases (`spmd.kernels.cpu.rows`).


def _plan_arrays(pieces: list[tuple], adds: list[tuple], taps: int) -> tuple[np.ndarray, np.ndarray]:
    """A plan as arrays. pieces: (to, n, starts): n neighbours from `to` on are the sums of those from each start on.
    adds: (to, n, start): then n neighbours from `start` on are added to those from `to` on."""
    sums = np.zeros((len(pieces), 2 + taps + 1), np.int64)
    for row, (to, n, starts) in zip(sums, pieces, strict=True):
        row[: 3 + len(starts)] = to, n, len(starts), *starts
    return sums, np.array(adds, np.int64).reshape(-1, 3)


@lru_cache(64)
def _gather_plan(w: Window) -> tuple[np.ndarray, np.ndarray]:
    """The plan by which each output of a row is the sum of its taps."""
    first, end = _inner(w)
    starts = [_phase_index(w, first * w.stride + w.input_of(j)) for j in range(w.kernel)]
    pieces = [(first, end - first, starts), (0, first, []), (end, w.m - end, [])]
    spans = [(o, n, o * w.stride + w.input_of(j)) for j in range(w.kernel) for o, n in _outside(w, j, first, end)]
    adds = [(o, n, _phase_index(w, i)) for o, n, i in spans]
    return _plan_arrays(pieces, adds, w.kernel)


@lru_cache(64)
def _spread_plan(w: Window) -> tuple[np.ndarray, np.ndarray]:
    """The plan by which each input of a row, in phases, is the sum of the outputs that read it."""
    pieces, adds = [], []
    for c in range(min(w.stride, w.n)):
        entries = len(range(c, w.n, w.stride))
        to = _phase_index(w, c)
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
    return _plan_arrays(pieces, adds, w.kernel)


@lru_cache(64)
def _max_plan(w: Window) -> tuple[np.ndarray, np.ndarray]:
    """The plan of a maximum: (first, end, start of tap 0, start of tap 1, input of tap 0) of the outputs whose taps all
    lie inside; and rows (to, n, start, input) of the entries that compete afterwards."""
    first, end = _inner(w) if w.kernel > 1 else (w.m, w.m)
    inputs = [first * w.stride + w.input_of(j) for j in range(w.kernel)]
    rest = []
    for j in range(w.kernel):
        spans = _outside(w, j, first, end) + ([(first, end - first)] if j > 1 and first < end else [])
        reads = [(o, n, o * w.stride + w.input_of(j)) for o, n in spans]
        rest += [(o, n, _phase_index(w, i), i) for o, n, i in reads]
    pair = [_phase_index(w, i) for i in (inputs[0], inputs[min(1, w.kernel - 1)])]
    return np.array([first, end, *pair, inputs[0]], np.int64), np.array(rest, np.int64).reshape(-1, 4)


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


def _phase_index(w: Window, i: int) -> int:
    """The index of input i in a row split into phases."""
    return i % w.stride * (w.n // w.stride + 1) + i // w.stride


# NumPy


def _pieces(x: np.ndarray, out: np.ndarray, geometry: list[Window]) -> Iterator[tuple[slice, slice, slice, list]]:
    """Pieces of planes (P, *spatial) that fit into the cache: slices of the planes, of the outputs along the first
    dimension, and of the inputs that these read; and the geometry of the piece."""
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
    """For each tap, in row-major order: the outputs that read an input by it, and these inputs."""
    for taps in np.ndindex(*(w.kernel for w in geometry)):
        slices = [_tap(w, j) for w, j in zip(geometry, taps, strict=True)]
        yield tuple(to for to, _ in slices), tuple(read for _, read in slices)


def _tap(w: Window, j: int) -> tuple[slice, slice]:
    first, end = w.inside(j)
    start = first * w.stride + w.input_of(j)
    if first == end:
        return slice(first, end), slice(0)
    return slice(first, end), slice(start, start + (end - first - 1) * w.stride + 1, w.stride)


def _indices(geometry: list[Window], dtype: Any) -> tuple[int, list[np.ndarray], np.ndarray]:
    """The index of a tap's input: an origin, a step for each coordinate of the output, and an offset for each tap. The
    last offset stands for no tap."""
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
    for to, read in _taps_along(axis, w):
        out[to] += x[read]
    return out


def _spread(g: np.ndarray, axis: int, w: Window) -> np.ndarray:
    """The adjoint of _summed."""
    out = np.zeros((*g.shape[:axis], w.n, *g.shape[axis + 1 :]), g.dtype)
    for to, read in _taps_along(axis, w):
        out[read] += g[to]
    return out


def _taps_along(axis: int, w: Window) -> Iterator[tuple[tuple, tuple]]:
    """For each tap: the index of the outputs that read an input by it, and that of these inputs."""
    for j in range(w.kernel):
        to, read = _tap(w, j)
        yield (*(slice(None),) * axis, to), (*(slice(None),) * axis, read)
