"""Correlation: sums over taps, each of which is a plane of a padded array and a shift.

A stride goes into the planes: every s-th entry is of one of s planes, so that neighbouring outputs read neighbouring
inputs. With numba the sums stay in vector registers (`vectors`). Without it, and for complex numbers, a piece of the
output is a product of matrices, the filters and the inputs of its taps, which are gathered in the cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from spmd.kernels import jit
from spmd.kernels.cpu import vectors
from spmd.kernels.cpu.vectors import ROWS, add_taps, combine, dot_taps
from spmd.kernels.memory import pool

__all__ = ["Pair", "Part", "Shape", "Tap", "adjoint_taps", "as_tuples", "channels_of", "conv_taps", "correlate"]
__all__ += ["correlate_weights", "parts", "strided_planes", "three_dims"]

Pair = tuple[int, int]
Shape = tuple[int, ...]

_PIECE_BYTES = 1 << 19
"""Bytes of the inputs of the taps of a piece."""
_PART_BYTES = 1 << 21
"""Bytes of a part of the work, where it can be cut so small: its padded copy is in the cache when it is read."""

Part = tuple[slice, slice, slice]
"""Slices of the examples, of the channels, and of the rows, the entries of the first spatial dimension."""


def parts(x: np.ndarray, groups: int, m: Shape, taps: tuple[Tap, ...]) -> Iterator[Part]:
    """Slices of the examples, groups and rows of the outputs 0:m, for parts of the work: some examples of all groups,
    some groups of one example, or some rows of one group, at least as many as the taps of one read."""
    per_group = max(1, x[:1].nbytes // groups)
    all_rows = slice(0, m[0])
    if groups * per_group <= _PART_BYTES:
        step = max(1, _PART_BYTES // (groups * per_group))
        yield from ((slice(n, min(n + step, len(x))), slice(0, groups), all_rows) for n in range(0, len(x), step))
        return
    step = max(1, _PART_BYTES // per_group)
    shifts = [tap.shift[0] for tap in taps]
    rows = m[0] if per_group <= _PART_BYTES else max(1, max(shifts) - min(shifts), m[0] * _PART_BYTES // per_group)
    rows = -(-m[0] // -(-m[0] // rows))  # as many in each part
    for n in range(len(x)):
        for g in range(0, groups, step):
            for y in range(0, m[0], rows):
                yield slice(n, n + 1), slice(g, min(g + step, groups)), slice(y, min(y + rows, m[0]))


def channels_of(groups: slice, each: int) -> slice:
    """The slice of the channels, or filters, of some groups."""
    return slice(groups.start * each, groups.stop * each)


# Taps


def as_tuples(padding: Sequence[Pair]) -> tuple[Pair, ...]:
    """A padding as a key of caches."""
    return tuple((low, high) for low, high in padding)


class Tap(NamedTuple):
    """A tap reads entry u + shift of a plane for output u."""

    plane: int
    shift: Shape


@lru_cache(maxsize=256)
def conv_taps(
    kernel: Shape, stride: Shape, padding: tuple[Pair, ...], dilation: Shape
) -> tuple[tuple[Tap, ...], tuple[Shape, ...]]:
    """The taps of a convolution, in the order of the kernel's entries, and the residue of each plane that they read.
    The input x[o * stride + t * dilation - low] is entry o + shift of the plane of a residue of the stride."""
    taps, planes = [], {}
    for tap in itertools.product(*map(range, kernel)):
        each = zip(tap, stride, padding, dilation, strict=True)
        shift, residue = zip(*(divmod(t * d - low, s) for t, s, (low, _), d in each), strict=True)
        taps.append(Tap(planes.setdefault(residue, len(planes)), shift))
    return tuple(taps), tuple(planes)


@lru_cache(maxsize=256)
def adjoint_taps(
    kernel: Shape, stride: Shape, padding: tuple[Pair, ...], dilation: Shape, residue: Shape
) -> tuple[tuple[int, ...], tuple[Tap, ...]]:
    """The taps by which outputs read the inputs residue + u * stride: their indices, and as taps of the adjoint, where
    output u + shift reads the input of u."""
    indices, taps = [], []
    for k, tap in enumerate(itertools.product(*map(range, kernel))):
        shift = []
        for t, s, (low, _), d, r in zip(tap, stride, padding, dilation, residue, strict=True):
            quotient, remainder = divmod(r + low - t * d, s)
            if remainder:
                break
            shift.append(quotient)
        else:
            indices.append(k)
            taps.append(Tap(0, tuple(shift)))
    return tuple(indices), tuple(taps)


class _Source(NamedTuple):
    """Planes of an array, padded as far as taps read: data (N, groups, C, planes, *three lengths).

    origin: the index of what a shift of 0 reads for the first output. lengths: those of the outputs, three.
    """

    data: np.ndarray
    origin: Shape
    lengths: Shape


def three_dims(shape: Shape, fill: int) -> Shape:
    return (fill,) * (3 - len(shape)) + tuple(shape)


def strided_planes(
    x: np.ndarray, groups: int, stride: Shape, residues: Sequence[Shape], taps: tuple[Tap, ...], m: Shape, rows: slice
) -> _Source:
    """x (N, C, *n), the channels of so many groups, as planes of these residues of the stride, which contain all that
    the taps read for some rows of the outputs 0:m. x itself where it contains all of it."""
    n, c = x.shape[:2]
    lows, highs = zip(*((min(s), max(s)) for s in zip(*(tap.shift for tap in taps), strict=True)), strict=True)
    begins = (rows.start + lows[0], *lows[1:])
    ends = (rows.stop + highs[0], *map(sum, zip(m[1:], highs[1:], strict=True)))
    output_lengths = three_dims((rows.stop - rows.start, *m[1:]), 1)
    is_part = all(s == 1 for s in stride) and min(begins) >= 0
    if is_part and all(end <= k for end, k in zip(ends, x.shape[2:], strict=True)):
        data = np.ascontiguousarray(x).reshape(n, groups, c // groups, 1, *three_dims(x.shape[2:], 1))
        return _Source(data, three_dims((rows.start, *[0] * len(m[1:])), 0), output_lengths)
    lengths = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    data = pool.empty((n, c, len(residues), *lengths), x.dtype)
    for plane, residue in enumerate(residues):
        part = x[(slice(None), slice(None), *(slice(r, None, s) for r, s in zip(residue, stride, strict=True)))]
        _copy_padded(data[:, :, plane], part, begins)
    data = data.reshape(n, groups, c // groups, len(residues), *three_dims(lengths, 1))
    return _Source(data, three_dims(tuple(-low for low in lows), 0), output_lengths)


def _copy_padded(out: np.ndarray, x: np.ndarray, begins: Sequence[int]) -> None:
    """Copy x, from these entries of its spatial dimensions on, which may be negative, into out; zeros outside of x."""
    to: tuple[slice, ...] = (slice(None), slice(None))
    read = to
    for begin, n, length in zip(begins, x.shape[2:], out.shape[2:], strict=True):
        first = min(length, max(0, -begin))
        end = max(first, min(length, n - begin))
        out[(*to, slice(0, first))] = 0
        out[(*to, slice(end, None))] = 0
        to, read = (*to, slice(first, end)), (*read, slice(begin + first, begin + end))
    out[to] = x[read]


@lru_cache(maxsize=64)
def _offsets(shape: Shape, origin: Shape, taps: tuple[Tap, ...]) -> np.ndarray:
    """For each channel of a group and each tap: the offset of its entry from the group's first. shape: of the source,
    from the channels on."""
    channels, planes, *lengths = shape
    _, high, wide = lengths
    size = math.prod(lengths)
    tap_offsets = [
        tap.plane * size + ((o0 + a) * high + o1 + b) * wide + o2 + c
        for tap in taps
        for (a, b, c), (o0, o1, o2) in [(three_dims(tap.shift, 0), origin)]
    ]
    table = (np.arange(channels)[:, None] * planes * size + np.array(tap_offsets)).reshape(-1)
    table.flags.writeable = False
    return table


class _Rows(NamedTuple):
    """The rows of a part of an array (N, C, *m): its flat data, the index of the first entry, and the steps to the next
    example, channel, layer and row."""

    data: np.ndarray
    start: int
    steps: np.ndarray


def _rows_of(x: np.ndarray, part: Part) -> _Rows:
    """The rows of a part; in x itself if it is contiguous."""
    if not x.flags.c_contiguous:
        x, part = np.ascontiguousarray(x[part]), (slice(0, None), slice(0, None), slice(0, None))
    n, channel, rows = (each.start for each in part)
    per_row = math.prod(x.shape[3:])
    size = x.shape[2] * per_row
    _, high, wide = three_dims(x.shape[2:], 1)
    start = (n * x.shape[1] + channel) * size + rows * per_row
    return _Rows(x.reshape(-1), start, np.array([x.shape[1] * size, size, high * wide, wide]))


# Sums over taps

_STRIP = 1024
"""Entries of a single filter that are summed before they are written, where rows are short."""


def correlate(out: np.ndarray, part: Part, source: _Source, filters: np.ndarray, taps: tuple[Tap, ...]) -> None:
    """Write a part of out (N, groups * O, *m): the sums over channels and taps. filters: (groups, O, C, taps)."""
    groups, count = filters.shape[:2]
    flat = filters.reshape(groups, count, -1)
    _, rows, columns = source.lengths
    if out.dtype.char in "fd" and jit.fits(out):
        filters_at_once = 1 if count == 1 else vectors.filters()
        span = 4 * vectors.lanes(out.dtype) if count == 1 else vectors.places(out.dtype)
        if count == 1 or (rows - 1) * source.data.shape[-1] + columns >= span:
            padded = np.zeros((groups, -(-count // filters_at_once) * filters_at_once, flat.shape[2]), out.dtype)
            padded[:, :count] = flat
            scratch = np.empty((filters_at_once, _STRIP if count == 1 else span), out.dtype)
            to, steps = _rows_of(out, part), _steps_of(source)
            offsets, x = _offsets(source.data.shape[2:], source.origin, taps), source.data.reshape(-1)
            shape = (source.data.shape[0], groups, count, *source.lengths)
            _tiles_loop(to.data, scratch, x, padded, offsets, to.start, to.steps, steps, shape, span)
            return
    _by_matmul(out[part], source, flat, taps)


def _steps_of(source: _Source) -> np.ndarray:
    """The steps to the next example, group, layer and row of a source."""
    data = source.data
    size = math.prod(data.shape[2:])
    return np.array([data.shape[1] * size, size, data.shape[-2] * data.shape[-1], data.shape[-1]])


@jit.helper
def _copy_columns(out, to, pitch, columns, line, at, length, wide, column):
    """Copy the neighbours in `line` that lie within the columns of rows `wide` apart, the first of which begins at
    `column`, to rows `pitch` apart."""
    k = 0
    while k < length:
        for j in range(k, min(length, k + columns - column)):
            out[to + j - k] = line[at + j]
        k, to, column = k + wide - column, to + pitch - column, 0


@jit.loops("out", "scratch")
def _tiles_loop(
    out: Any, scratch: Any, x: Any, w: Any, offsets: Any, start: int, out_steps: Any, steps: Any, shape: Any, span: int
) -> None:
    # Entries of a layer in the order of memory, `span` neighbours at once. Those within a row are written directly.
    # Those that cross rows, and those of fewer filters than are computed at once, are copied from scratch. The last
    # ones begin early enough to end with the layer.
    examples, groups, count, layers, rows, columns = shape
    wide = steps[3]
    end = (rows - 1) * wide + columns
    filters_at_once, strip = scratch.shape
    line = scratch.reshape(-1)
    for n in range(examples):
        for g in range(groups):
            weights = w[g]
            taps = weights.shape[1]
            for z in range(layers):
                base = n * steps[0] + g * steps[1] + z * steps[2]
                layer = start + n * out_steps[0] + g * count * out_steps[1] + z * out_steps[2]
                position = 0
                while position < end:
                    row = position // wide
                    column = position - row * wide
                    if column >= columns:
                        position = (row + 1) * wide
                        continue
                    within = column + span <= columns
                    if within:
                        length = columns - column if filters_at_once == 1 else span
                    else:
                        length = min(strip, end) if filters_at_once == 1 else span
                        position = min(position, end - length)
                        row = position // wide
                        column = position - row * wide
                    for first in range(0, count, filters_at_once):
                        to = layer + first * out_steps[1] + row * out_steps[3] + column
                        filters_left = min(filters_at_once, count - first)
                        if within and filters_at_once == 1:
                            combine(out, to, length, x, base + position, offsets, 0, weights, 0, taps)
                        elif within and filters_left == filters_at_once:
                            add_taps(out, to, out_steps[1], x, base + position, offsets, weights, first)
                        else:
                            if filters_at_once == 1:
                                combine(scratch, 0, length, x, base + position, offsets, 0, weights, 0, taps)
                            else:
                                add_taps(line, 0, strip, x, base + position, offsets, weights, first)
                            for a in range(filters_left):
                                target = to + a * out_steps[1]
                                _copy_columns(out, target, out_steps[3], columns, line, a * strip, length, wide, column)
                    position += length


def _by_matmul(out: np.ndarray, source: _Source, w: np.ndarray, taps: tuple[Tap, ...]) -> None:
    """Write out (N, groups * O, *m) piece by piece: the product of the filters and of the inputs of the taps."""
    out = out.reshape(*out.shape[:2], *source.lengths)
    count = w.shape[1]
    for n, g, rows, cols in _column_pieces(source, taps):
        piece = out[(n, slice(g * count, (g + 1) * count), *rows)]
        piece[...] = (w[g] @ cols).reshape(piece.shape)


def _column_pieces(source: _Source, taps: tuple[Tap, ...]) -> Iterator[tuple[int, int, tuple[int, slice], np.ndarray]]:
    """For some rows of a layer, example and group at a time: the inputs of the taps, (channels * taps, entries)."""
    data = source.data
    examples, groups, channels = data.shape[:3]
    layers, rows, columns = source.lengths
    per_row = channels * len(taps) * columns * data.itemsize
    step = max(1, min(rows, _PIECE_BYTES // max(1, per_row)))
    for n, g, z in itertools.product(range(examples), range(groups), range(layers)):
        for y in range(0, rows, step):
            stop = min(rows, y + step)
            cols = np.empty((channels, len(taps), stop - y, columns), data.dtype)
            for k, tap in enumerate(taps):
                a, b, c = (o + s for o, s in zip(source.origin, three_dims(tap.shift, 0), strict=True))
                cols[:, k] = data[n, g, :, tap.plane, z + a, y + b : stop + b, c : c + columns]
            yield n, g, (z, slice(y, stop)), cols.reshape(channels * len(taps), -1)


def correlate_weights(g: np.ndarray, part: Part, source: _Source, taps: tuple[Tap, ...]) -> np.ndarray:
    """The sums over examples and entries of a part of g (N, groups * O, *m) times the input of each tap: (groups, O,
    C * taps)."""
    n, groups, channels = source.data.shape[:3]
    count = (part[1].stop - part[1].start) // groups
    if g.dtype.char in "fd" and jit.fits(g):
        sums = _dots(_rows_of(g, part), count, source, _offsets(source.data.shape[2:], source.origin, taps))
        if sums is not None:
            return sums
    totals = np.zeros((groups, count, channels * len(taps)), g.dtype if g.dtype.kind == "c" else np.float64)
    g = g[part].reshape(n, groups, count, *source.lengths)
    for k, j, (z, rows), cols in _column_pieces(source, taps):
        totals[j] += g[k, j, :, z, rows].reshape(count, -1) @ cols.T
    return totals


def _dots(g: _Rows, count: int, source: _Source, offsets: np.ndarray) -> np.ndarray | None:
    """`correlate_weights` by loops; None where they do not apply."""
    n, groups = source.data.shape[:2]
    layers, rows, columns = source.lengths
    steps, lanes = _steps_of(source), vectors.lanes(g.data.dtype)
    wide, taps_at_once = source.data.shape[-1], 4 if count == 1 else vectors.taps()
    # Extra taps and extra rows of filters make their numbers multiples of what is computed at once.
    padded = np.append(offsets, np.repeat(offsets[-1:], -offsets.size % taps_at_once))
    sums = np.zeros((groups, count + -count % ROWS, padded.size))
    result = sums[:, :count, : offsets.size]
    x, shape = source.data.reshape(-1), (n, groups, count, *source.lengths)
    if count == 1:
        _dot_rows_loop(sums, g.data, x, padded, g.start, g.steps, steps, shape)
        return result
    if lanes <= columns and columns + -columns % lanes <= wide + lanes // 4:
        _dot_tiles_loop(sums, g.data, x, padded, g.start, g.steps, steps, shape, taps_at_once)
        return result
    # Short rows as one: g with rows as long as the source's, padded by zeros.
    end = (rows - 1) * wide + columns
    if end < lanes:
        return None
    wide_g = pool.zeros((n, groups * count, layers, rows, wide), g.data.dtype)
    wide_g[..., :columns] = np.lib.stride_tricks.as_strided(
        g.data[g.start :], (*wide_g.shape[:-1], columns), [s * g.data.itemsize for s in (*g.steps, 1)], writeable=False
    )
    size = layers * rows * wide
    wide_steps = np.array([groups * count * size, size, rows * wide, wide])
    shape = (n, groups, count, layers, 1, end)
    _dot_tiles_loop(sums, wide_g.reshape(-1), x, padded, 0, wide_steps, steps, shape, taps_at_once)
    # The zeros between rows are multiplied by entries of x, and zero times infinity is NaN. Where a sum is not finite,
    # the products of `correlate_weights` tell which sums are.
    return result if np.isfinite(sums).all() else None


@jit.loops("sums", fastmath=("contract", "reassoc", "nsz"))
def _dot_rows_loop(sums: Any, g: Any, x: Any, offsets: Any, start: int, g_steps: Any, steps: Any, shape: Any) -> None:
    examples, groups, _, layers, rows, columns = shape
    zero = g.dtype.type(0)
    for n in range(examples):
        for i in range(groups):
            for t in range(0, offsets.size, 4):
                total0 = total1 = total2 = total3 = 0.0
                for z in range(layers):
                    base = n * steps[0] + i * steps[1] + z * steps[2]
                    layer = start + n * g_steps[0] + i * g_steps[1] + z * g_steps[2]
                    for y in range(rows):
                        at = base + y * steps[3]
                        row = g[layer + y * g_steps[3] :]
                        b0, b1, b2, b3 = at + offsets[t], at + offsets[t + 1], at + offsets[t + 2], at + offsets[t + 3]
                        x0, x1, x2, x3 = x[b0:], x[b1:], x[b2:], x[b3:]
                        s0 = s1 = s2 = s3 = zero
                        for j in range(columns):
                            v = row[j]
                            s0 += v * x0[j]
                            s1 += v * x1[j]
                            s2 += v * x2[j]
                            s3 += v * x3[j]
                        total0 += s0
                        total1 += s1
                        total2 += s2
                        total3 += s3
                out = sums[i, 0]
                out[t] += total0
                out[t + 1] += total1
                out[t + 2] += total2
                out[t + 3] += total3


_TILE_BYTES = 8192
"""Bytes of each row that are multiplied at a time: a part of the first cache."""


@jit.loops("sums")
def _dot_tiles_loop(
    sums: Any, g: Any, x: Any, offsets: Any, start: int, g_steps: Any, steps: Any, shape: Any, taps: int
) -> None:
    examples, groups, count, layers, rows, columns = shape
    row_steps = g_steps[3], steps[3]
    tile_entries = _TILE_BYTES // x.itemsize
    tile_rows, cuts = max(1, tile_entries // columns), -(-columns // tile_entries)
    for n in range(examples):
        for i in range(groups):
            group_sums = sums[i]
            for z in range(layers):
                for y in range(0, rows, tile_rows):
                    for cut in range(cuts):
                        first, end = columns * cut // cuts, columns * (cut + 1) // cuts
                        tile = min(tile_rows, rows - y), end - first
                        base = n * steps[0] + i * steps[1] + z * steps[2] + y * steps[3] + first
                        at = start + n * g_steps[0] + i * count * g_steps[1] + z * g_steps[2] + y * g_steps[3] + first
                        for o in range(0, count, ROWS):
                            row, left, step = at + o * g_steps[1], count - o, g_steps[1]
                            for t in range(0, offsets.size, taps):
                                dot_taps(group_sums, o, t, g, row, step, left, x, base, offsets, tile, row_steps)
