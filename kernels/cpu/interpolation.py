"""Interpolation: along an axis by sums of whole rows; at points by all taps of a point at once. Without numba, along an
axis in pieces that fit into the cache, and at points tap by tap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from spmd.kernels import jit
from spmd.kernels.cpu.chunks import CACHE, accurate
from spmd.kernels.cpu.rows import join_phases, split_phases
from spmd.kernels.cpu.vectors import combine
from spmd.kernels.memory import pool
from spmd.kernels.taps import BOUNDARIES, continued, nearest_shift, polynomials

Ints = tuple[int, ...]

_PIECE = 1 << 14
"""Points that are sampled at once without numba."""


def resample(x: np.ndarray, index: np.ndarray, weight: np.ndarray, axis: int) -> np.ndarray:
    """Along an axis, output o is the sum of weight[o, k] * x[index[o, k]]."""
    shape = (*x.shape[:axis], len(index), *x.shape[axis + 1 :])
    out = pool.empty(shape, x.dtype)
    if not out.size:
        return out
    if not x.size or not index.shape[1]:
        out.fill(0)
        return out
    flat = np.ascontiguousarray(x).reshape(math.prod(shape[:axis]), x.shape[axis], -1)
    flat_out = out.reshape(len(flat), len(index), -1)
    wide = accurate(x.dtype)
    if x.dtype.kind == "c":  # as pairs of real numbers
        wide = np.dtype(np.float32 if x.dtype.char == "F" else np.float64)
        flat, flat_out = flat.view(wide), flat_out.view(wide)
    weight = np.ascontiguousarray(weight, wide)
    if flat.dtype.char in "fd" and jit.fits(flat, index):
        index = np.ascontiguousarray(index)
        if flat.shape[2] == 1:
            period = _period(index, weight)
            if period is None:
                _resample_last(flat_out[..., 0], flat[..., 0], index, weight)
            else:
                _resample_periodic(flat_out.reshape(-1), flat.reshape(-1), index, weight, *period, flat.shape[1])
        else:
            starts = index.astype(np.int64) * flat.shape[2]
            _resample(flat_out.reshape(-1), flat.reshape(-1), starts, weight, flat.shape[1] * flat.shape[2], len(flat))
        return out
    row_step = max(1, CACHE // max(1, flat[0, 0].size * wide.itemsize))
    plane_step = max(1, row_step // max(1, flat.shape[1], len(index)))
    for p in range(0, len(flat), plane_step):
        for a in range(0, len(index), row_step):
            i, w = index[a : a + row_step], weight[a : a + row_step, :, None]
            piece = flat[p : p + plane_step]
            total = np.take(piece, i[:, 0], axis=1).astype(wide, copy=False)
            total *= w[:, 0]
            for k in range(1, i.shape[1]):
                part = np.take(piece, i[:, k], axis=1).astype(wide, copy=False)
                part *= w[:, k]
                total += part
            flat_out[p : p + plane_step, a : a + row_step] = total
    return out


def sample(
    x: np.ndarray, points: np.ndarray, method: str, boundary: str, orders: Ints, cubic: float = -0.5
) -> np.ndarray:
    """x: (C, *spatial) at points: (m, spatial dimensions)."""
    if x.dtype.kind == "c":
        parts = (np.ascontiguousarray(part) for part in (np.real(x), np.imag(x)))
        real, imag = (sample(part, points, method, boundary, orders, cubic) for part in parts)
        return _complex(real, imag, x.dtype)
    out = pool.zeros((len(x), len(points)), x.dtype)
    if not out.size or not x.size:
        return out
    if x.dtype.char in "fd" and jit.fits(x, points):
        lengths = (1,) * (4 - x.ndim) + x.shape[1:]
        field = np.ascontiguousarray(x).reshape(len(x), *lengths)
        _sample(out, field, *_loop_arguments(points, method, boundary, orders, cubic))
        return out
    wide = accurate(x.dtype)
    flat = x.reshape(len(x), -1)
    for start in range(0, len(points), _PIECE):
        piece = slice(start, start + _PIECE)
        total = np.zeros(out[:, piece].shape, wide)
        for index, weight in _taps(points[piece], x.shape[1:], method, boundary, orders, cubic):
            is_entry = index >= 0
            values = np.take(flat, np.where(is_entry, index, 0), axis=1).astype(wide, copy=False)
            total += np.where(is_entry, values * weight.astype(wide), 0)
        out[:, piece] = total
    return out


def inject(
    g: np.ndarray, points: np.ndarray, shape: Ints, method: str, boundary: str, orders: Ints, cubic: float = -0.5
) -> np.ndarray:
    """A field (C, *shape) with the values g: (C, m) spread over the entries from which sample would read."""
    if g.dtype.kind == "c":
        parts = (np.ascontiguousarray(part) for part in (np.real(g), np.imag(g)))
        real, imag = (inject(part, points, shape, method, boundary, orders, cubic) for part in parts)
        return _complex(real, imag, g.dtype)
    if g.dtype.char in "fd" and jit.fits(g, points):
        out = pool.zeros((len(g), *shape), g.dtype)
        if out.size and g.size:
            field = out.reshape(len(g), *(1,) * (4 - out.ndim), *shape)
            _inject(field, np.ascontiguousarray(g), *_loop_arguments(points, method, boundary, orders, cubic))
        return out
    size = math.prod(shape)
    indices, weights = [], []
    for index, weight in _taps(points, shape, method, boundary, orders, cubic):
        indices.append(index + 1)  # index 0 is for taps outside the field
        weights.append(weight)
    out = pool.zeros((len(g), size), g.dtype)
    if indices:
        index = np.concatenate(indices)
        for c in range(len(g)):
            shares = np.concatenate([w * g[c].astype(np.float64) for w in weights])
            out[c] = np.bincount(index, shares, size + 1)[1:]
    return out.reshape(len(g), *shape)


def _complex(real: np.ndarray, imag: np.ndarray, dtype: np.dtype) -> np.ndarray:
    out = pool.empty(real.shape, dtype)
    out.real, out.imag = real, imag
    return out


def _taps(
    points: np.ndarray, shape: Ints, method: str, boundary: str, orders: Ints, cubic: float
) -> Iterator[tuple[Any, Any]]:
    """For each combination of taps: the index that each point reads, -1 for none, and the weight."""
    if 0 in shape:
        return
    axes = []
    for p, n, order in zip(points.astype(np.float64).T, shape, orders, strict=True):
        p = p + nearest_shift(method)
        low = np.floor(p)
        with np.errstate(invalid="ignore"):
            t = p - low
        base = np.clip(np.where(np.isfinite(p), low, 0), -_FAR, _FAR).astype(np.int64)
        rows = polynomials(method, cubic, order)
        weights = [((c[3] * t + c[2]) * t + c[1]) * t + c[0] for c in rows]
        axes.append([(continued(base + k - (len(rows) - 1) // 2, n, boundary), w) for k, w in enumerate(weights)])
    for taps in itertools.product(*axes):
        inside, weight, index = True, 1.0, 0
        for ((i, is_entry), w), n in zip(taps, shape, strict=True):
            inside, weight, index = inside & is_entry, weight * w, index * n + i
        yield (index if inside is True else np.where(inside, index, -1)), weight


# Loops

_ROWS = 16
_FAR = 2.0**62


def _loop_arguments(points: np.ndarray, method: str, boundary: str, orders: Ints, cubic: float) -> tuple:
    """Arguments of loops over points: points, polynomials of each dimension, shift, and number of the boundary."""
    table = np.array([polynomials(method, cubic, order) for order in orders])
    return (np.ascontiguousarray(points, np.float64), table, nearest_shift(method), BOUNDARIES.index(boundary))


@jit.loops("out")
def _resample(out: Any, x: Any, starts: Any, weight: Any, plane: int, planes: int) -> None:
    m, taps = starts.shape
    wide = out.size // (planes * m)
    for p in range(planes):
        for o in range(m):
            combine(out, (p * m + o) * wide, wide, x, p * plane, starts, o * taps, weight, o * taps, taps)


_PERIOD_MAX = 8
"""The longest period of taps for which rows are split into phases."""


def _period(index: np.ndarray, weight: np.ndarray) -> tuple[int, int, int, int] | None:
    """(first, end, step, period): among the outputs first:end, output o + period has the taps of output o, `step`
    inputs further. None unless that holds for most outputs."""
    m = len(index)
    for period in range(1, min(_PERIOD_MAX, m // (2 * _ROWS)) + 1):
        shifts = index[period:] - index[:-period]
        step = int(shifts[len(shifts) // 2, 0])
        is_periodic = np.all(shifts == step, axis=1) & np.all(weight[period:] == weight[:-period], axis=1)
        stops = np.flatnonzero(~is_periodic)
        breaks = np.concatenate([[-1], stops, [len(is_periodic)]])
        longest = int(np.argmax(np.diff(breaks)))
        first, end = int(breaks[longest]) + 1, int(breaks[longest + 1]) + period
        if 0 < step <= _PERIOD_MAX and end - first > 0.75 * m:
            return first, end, step, period
    return None


@jit.loops("out")
def _resample_periodic(
    out: Any, x: Any, index: Any, weight: Any, first: int, end: int, step: int, period: int, n: int
) -> None:
    # Rows are split into phases by the step of the inputs, and joined from phases by the period of the outputs, so that
    # neighbours have the same taps.
    m, taps = index.shape
    length = end - first
    width = length // period + 1
    phases = np.empty(step * (n // step + 1), x.dtype)
    out_phases = np.empty(period * width, x.dtype)
    starts = np.empty(period * taps, np.int64)
    for c in range(period):
        for k in range(taps):
            i = index[first + c, k]
            starts[c * taps + k] = i % step * (n // step + 1) + i // step
    for p in range(x.size // n):
        if step > 1:
            split_phases(phases, x, p * n, n, step)
        for c in range(period):
            to, count, begin = c * width, (length - c + period - 1) // period, (first + c) * taps
            if period == 1 and step == 1:
                combine(out, p * m + first, length, x, p * n, starts, 0, weight, begin, taps)
            elif period == 1:
                combine(out, p * m + first, length, phases, 0, starts, 0, weight, begin, taps)
            elif step == 1:
                combine(out_phases, to, count, x, p * n, starts, c * taps, weight, begin, taps)
            else:
                combine(out_phases, to, count, phases, 0, starts, c * taps, weight, begin, taps)
        if period > 1:
            join_phases(out, p * m + first, out_phases, length, period)
        for o in range(m):
            if o == first:
                break
            out[p * m + o] = _one_output(x, p * n, index, weight, o)
        for o in range(end, m):
            out[p * m + o] = _one_output(x, p * n, index, weight, o)


@jit.helper
def _one_output(x, start, index, weight, o):
    total = x.dtype.type(0)
    for k in range(index.shape[1]):
        total += weight[o, k] * x[start + index[o, k]]
    return total


@jit.helper
def _transpose_rows(to, x, start, n, rows):
    """Transpose some rows: entry i of row b goes to index i * _ROWS + b. x is flat; rows of n entries begin at
    `start`."""
    for first in range(0, n, _ROWS):
        for b in range(rows):
            for i in range(first, min(first + _ROWS, n)):
                to[np.uint64(i * _ROWS + b)] = x[np.uint64(start + b * n + i)]


@jit.loops("out")
def _resample_last(out: Any, x: Any, index: Any, weight: Any) -> None:
    # Reads at arbitrary indices are not vectorised. So a few rows are transposed: their entries at an index are
    # neighbours.
    m, taps = index.shape
    outer, n = x.shape
    x, out = x.reshape(-1), out.reshape(-1)
    transposed = np.zeros(n * _ROWS, x.dtype)
    results = np.empty(_ROWS * _ROWS, x.dtype)
    for p in range(0, outer, _ROWS):
        rows = min(_ROWS, outer - p)
        _transpose_rows(transposed, x, p * n, n, rows)
        for start in range(0, m, _ROWS):
            count = min(_ROWS, m - start)
            for o in range(count):
                to = np.uint64(o * _ROWS)
                i, w = np.uint64(index[start + o, 0]) * np.uint64(_ROWS), weight[start + o, 0]
                for b in range(_ROWS):
                    results[to + np.uint64(b)] = w * transposed[i + np.uint64(b)]
                for k in range(1, taps):
                    i, w = np.uint64(index[start + o, k]) * np.uint64(_ROWS), weight[start + o, k]
                    for b in range(_ROWS):
                        results[to + np.uint64(b)] += w * transposed[i + np.uint64(b)]
            for b in range(rows):
                to = np.uint64((p + b) * m + start)
                for o in range(count):
                    out[to + np.uint64(o)] = results[np.uint64(o * _ROWS + b)]


@jit.helper
def _continued(i, n, boundary):
    """As `spmd.kernels.taps.continued`, with -1 where there is no entry."""
    if 0 <= i < n:
        return i
    if boundary == 0:
        return -1
    if boundary == 1:
        return 0 if i < 0 else n - 1
    if boundary == 2:
        return i % n
    if n == 1:
        return 0
    i = i % (2 * (n - 1))
    return min(i, 2 * (n - 1) - i)


@jit.helper
def _taps_of_axis(index, weight, row, p, n, table, a, shift, boundary):
    """Write the indices and weights of the taps along an axis into a row of both."""
    q = p + shift
    low = np.floor(q)
    t = q - low
    base = 0
    if abs(low) <= _FAR:
        base = int(low)
    elif abs(low) < np.inf:
        base = int(_FAR) if low > 0 else -int(_FAR)
    taps = table.shape[1]
    base -= (taps - 1) // 2
    for k in range(taps):
        weight[row, k] = ((table[a, k, 3] * t + table[a, k, 2]) * t + table[a, k, 1]) * t + table[a, k, 0]
    for k in range(taps):
        index[row, k] = _continued(base + k, n, boundary)


_POINTS = 128
"""Points that loops take together, so that computations for each are vectorised."""


@jit.helper
def _locate(points, first, count, lengths, table, shift, index, weight, inside, q):
    """For the points first:first + count: whether all taps are entries of the field, the index of the first tap, and
    the weights of the taps along each of three axes."""
    dims, taps = points.shape[1], table.shape[1]
    index[:], inside[:] = 0, True
    for a in range(dims):
        n = lengths[3 - dims + a]
        row = np.uint64((3 - dims + a) * 4 * _POINTS)
        before = (taps - 1) // 2
        for j in range(count):
            q[j] = points[first + j, a] + shift
        for j in range(count):
            low = np.floor(q[j])
            fits = (low >= before) & (low + (taps - before) <= n)
            inside[j] &= fits
            index[j] = index[j] * n + (int(low) if fits else before) - before
            q[j] -= low
        for k in range(taps):
            c0, c1, c2, c3 = table[a, k, 0], table[a, k, 1], table[a, k, 2], table[a, k, 3]
            to = row + np.uint64(k * _POINTS)
            for j in range(count):
                t = q[j]
                weight[to + np.uint64(j)] = ((c3 * t + c2) * t + c1) * t + c0


@jit.helper
def _outer_weights(factor, weight, d, h, count):
    for j in range(count):
        i = np.uint64(j)
        factor[i] = weight[np.uint64(d * _POINTS) + i] * weight[np.uint64((4 + h) * _POINTS) + i]


@jit.loops("out")
def _sample(out: Any, x: Any, points: Any, table: Any, shift: float, boundary: int) -> None:
    dims, taps = points.shape[1], table.shape[1]
    nd, nh, nw = x.shape[1:]
    flat = x.reshape(-1)
    index, inside = np.zeros(_POINTS, np.int64), np.ones(_POINTS, np.bool_)
    weight, factor, q, total = np.ones(12 * _POINTS), np.ones(_POINTS), np.ones(_POINTS), np.ones(_POINTS)
    indices, weights = np.zeros((3, 4), np.int64), np.ones((3, 4))
    kd, kh = taps if dims > 2 else 1, taps if dims > 1 else 1
    for first in range(0, points.shape[0], _POINTS):
        count = min(_POINTS, points.shape[0] - first)
        _locate(points, first, count, x.shape[1:], table, shift, index, weight, inside, q)
        for c in range(x.shape[0]):
            total[:] = 0
            for d in range(kd):
                for h in range(kh):
                    _outer_weights(factor, weight, d, h, count)
                    for w in range(taps):
                        start, row = ((c * nd + d) * nh + h) * nw + w, np.uint64((8 + w) * _POINTS)
                        for j in range(count):
                            if inside[j]:
                                i = np.uint64(j)
                                total[i] += factor[i] * weight[row + i] * flat[np.uint64(start + index[i])]
            for j in range(count):
                out[c, first + j] = total[j]
        for j in range(count):
            if not inside[j]:
                _taps_of_point(indices, weights, points, first + j, x.shape[1:], table, shift, boundary)
                for c in range(x.shape[0]):
                    value = 0.0
                    for d in range(kd):
                        for h in range(kh):
                            for w in range(taps):
                                if indices[0, d] >= 0 and indices[1, h] >= 0 and indices[2, w] >= 0:
                                    start = ((c * nd + indices[0, d]) * nh + indices[1, h]) * nw + indices[2, w]
                                    value += weights[0, d] * weights[1, h] * weights[2, w] * flat[np.uint64(start)]
                    out[c, first + j] = value


@jit.loops("out")
def _inject(out: Any, g: Any, points: Any, table: Any, shift: float, boundary: int) -> None:
    dims, taps = points.shape[1], table.shape[1]
    nd, nh, nw = out.shape[1:]
    flat = out.reshape(-1)
    index, inside = np.zeros(_POINTS, np.int64), np.ones(_POINTS, np.bool_)
    weight, factor, q = np.ones(12 * _POINTS), np.ones(_POINTS), np.ones(_POINTS)
    indices, weights = np.zeros((3, 4), np.int64), np.ones((3, 4))
    kd, kh = taps if dims > 2 else 1, taps if dims > 1 else 1
    for first in range(0, points.shape[0], _POINTS):
        count = min(_POINTS, points.shape[0] - first)
        _locate(points, first, count, out.shape[1:], table, shift, index, weight, inside, q)
        for c in range(out.shape[0]):
            for d in range(kd):
                for h in range(kh):
                    _outer_weights(factor, weight, d, h, count)
                    for j in range(count):
                        factor[j] *= g[c, first + j]
                    for w in range(taps):
                        start, row = ((c * nd + d) * nh + h) * nw + w, np.uint64((8 + w) * _POINTS)
                        for j in range(count):
                            if inside[j]:
                                i = np.uint64(j)
                                flat[np.uint64(start + index[i])] += factor[i] * weight[row + i]
        for j in range(count):
            if not inside[j]:
                _taps_of_point(indices, weights, points, first + j, out.shape[1:], table, shift, boundary)
                for c in range(out.shape[0]):
                    for d in range(kd):
                        for h in range(kh):
                            for w in range(taps):
                                if indices[0, d] >= 0 and indices[1, h] >= 0 and indices[2, w] >= 0:
                                    start = ((c * nd + indices[0, d]) * nh + indices[1, h]) * nw + indices[2, w]
                                    part = weights[0, d] * weights[1, h] * weights[2, w] * g[c, first + j]
                                    flat[np.uint64(start)] += part


@jit.helper
def _taps_of_point(indices, weights, points, j, lengths, table, shift, boundary):
    """`_taps_of_axis` for each axis of point j."""
    dims = points.shape[1]
    for a in range(dims):
        _taps_of_axis(indices, weights, 3 - dims + a, points[j, a], lengths[3 - dims + a], table, a, shift, boundary)
