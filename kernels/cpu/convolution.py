"""Convolution and its adjoints, for one to three spatial dimensions.

Each of the three is a correlation: sums over a table of taps, each a plane of a padded array and a shift. A stride
goes into the planes (every s-th entry is of one of s planes), so that neighbouring outputs read neighbouring inputs:

    conv                 out[u] = sum over taps of w * x[u + shift]
    conv_input_adjoint   for each residue of the stride: the same of g, over the taps that meet it
    conv_weight_adjoint  sum over u of g[u] * x[u + shift]

With numba the sums stay in vector registers (`vectors`). Without it, and for complex numbers, a piece of the output at
a time is a product of matrices, of what its taps see, gathered in the cache.
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
from spmd.kernels.cpu.chunks import accurate
from spmd.kernels.cpu.shifts import shifted_copies, shifted_products, shifted_sums
from spmd.kernels.cpu.vectors import ROWS, add_taps, combine, dot_taps
from spmd.kernels.memory import pool
from spmd.kernels.windows import output_length

Pair = tuple[int, int]
Shape = tuple[int, ...]

_PIECE = 1 << 19
"""Bytes of what the taps of a piece see."""


def conv(
    x: np.ndarray, w: np.ndarray, stride: Shape, padding: Sequence[Pair], dilation: Shape, groups: int
) -> np.ndarray:
    """x (N, C, *n), w (O, C / groups, *k) -> (N, O, *m)."""
    dtype = np.result_type(x, w)
    m = tuple(map(output_length, x.shape[2:], w.shape[2:], stride, padding, dilation))
    out = pool.empty((x.shape[0], w.shape[0], *m), dtype)
    if 0 in out.shape or 0 in x.shape or 0 in w.shape:
        out.fill(0)
        return out
    wide = accurate(dtype)
    if _single(dtype, x, w, stride, groups, w.shape):
        table = _shifts(w.shape[2:], padding, dilation)
        _shift(out, x.astype(dtype, copy=False), table, w.astype(dtype, copy=False).reshape(groups, -1))
        return out
    taps, residues = _taps(w.shape[2:], stride, _pairs(padding), dilation)
    filters = w.astype(wide, copy=False).reshape(groups, w.shape[0] // groups, w.shape[1], -1)
    into = out if dtype == wide else pool.empty(out.shape, wide)
    for n, g, rows in _parts(x, groups, m, taps):
        some = x[n, _of(g, w.shape[1])].astype(wide, copy=False)
        source = _planes(some, g, stride, residues, taps, m, rows)
        _correlate(into, (n, _of(g, filters.shape[1]), rows), source, filters[g], taps)
        del source  # The next part takes its memory.
    if into is not out:
        out[...] = into
    return out


def conv_input_adjoint(
    g: np.ndarray,
    w: np.ndarray,
    shape: Shape,
    stride: Shape,
    padding: Sequence[Pair],
    dilation: Shape,
    groups: int,
) -> np.ndarray:
    """g (N, O, *m), w -> (N, C, *shape)."""
    dtype = np.result_type(g, w)
    wide = accurate(dtype)
    n, c = g.shape[0], groups * w.shape[1]
    if 0 in g.shape or 0 in w.shape or 0 in shape or n * c == 0:
        return pool.zeros((n, c, *shape), dtype)
    if _single(dtype, g, w, stride, groups, w.shape):
        out = pool.empty((n, c, *shape), dtype)
        table = -_shifts(w.shape[2:], padding, dilation)
        _shift(out, g.astype(dtype, copy=False), table, w.astype(dtype, copy=False).reshape(groups, -1))
        return out
    # (groups, O, C, taps) -> (groups, C, O, taps): now the filters' channels are what is summed over.
    filters = w.reshape(groups, w.shape[0] // groups, w.shape[1], -1).swapaxes(1, 2).astype(wide, copy=False)
    g = g.astype(wide, copy=False)
    whole, ends = all(s == 1 for s in stride), _pairs(padding)
    out = pool.empty((n, c, *shape), dtype)
    for residue in itertools.product(*(range(min(s, k)) for s, k in zip(stride, shape, strict=True))):
        part = out[(slice(None), slice(None), *(slice(r, None, s) for r, s in zip(residue, stride, strict=True)))]
        met, taps = _met(w.shape[2:], stride, ends, dilation, residue)
        if not met or 0 in part.shape:
            part[...] = 0
            continue
        chosen = np.ascontiguousarray(filters[..., met])
        into = part if whole and dtype == wide else pool.empty(part.shape, wide)
        for i, j, rows in _parts(g, groups, part.shape[2:], taps):
            some = g[i, _of(j, chosen.shape[2])]
            source = _planes(some, j, (1,) * len(stride), [(0,) * len(stride)], taps, part.shape[2:], rows)
            _correlate(into, (i, _of(j, chosen.shape[1]), rows), source, chosen[j], taps)
            del source
        if into is not part:
            part[...] = into
    return out


def conv_weight_adjoint(
    g: np.ndarray,
    x: np.ndarray,
    kernel: Shape,
    stride: Shape,
    padding: Sequence[Pair],
    dilation: Shape,
    groups: int,
) -> np.ndarray:
    """g (N, O, *m), x (N, C, *n) -> (O, C / groups, *kernel)."""
    dtype = np.result_type(g, x)
    wide = accurate(dtype)
    shape = (g.shape[1], x.shape[1] // groups, *kernel)
    if 0 in g.shape or 0 in x.shape or 0 in shape:
        return np.zeros(shape, dtype)
    if _single(dtype, g, x, stride, groups, shape):
        found = shifted_products(
            _examples(g.astype(dtype, copy=False)),
            _examples(x.astype(dtype, copy=False))[:, None],
            _shifts(kernel, padding, dilation),
            groups,
        )
        return found.reshape(shape).astype(dtype)
    taps, residues = _taps(kernel, stride, _pairs(padding), dilation)
    count, channels = shape[0] // groups, shape[1]
    total = np.zeros((groups, count, channels * len(taps)), wide if wide.kind == "c" else np.float64)
    g = g.astype(wide, copy=False)
    for n, k, rows in _parts(x, groups, g.shape[2:], taps):
        source = _planes(x[n, _of(k, channels)].astype(wide, copy=False), k, stride, residues, taps, g.shape[2:], rows)
        total[k] += _correlate_weights(g, (n, _of(k, count), rows), source, taps)
        del source
    return total.reshape(shape).astype(dtype, copy=False)


def im2col(x: np.ndarray, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape) -> np.ndarray:
    """What each output sees: x (N, C, *n) -> (N, C, *k, *m)."""
    m = tuple(map(output_length, x.shape[2:], kernel, stride, padding, dilation))
    cols = pool.empty((*x.shape[:2], *kernel, *m), x.dtype)
    if x.dtype.char in "fd" and jit.fits(x) and all(s == 1 for s in stride) and x.size and cols.size:
        table = _shifts(kernel, padding, dilation)
        shifted_copies(cols.reshape(-1, len(table), *_three(m, 1)), _examples(x), table)
        return cols
    taps = list(_seen(x.shape[2:], m, kernel, stride, padding, dilation))
    # Plane by plane: what the taps see again is still in the cache.
    for n, c in np.ndindex(*x.shape[:2]):
        plane, into = x[n, c], cols[n, c]
        for tap, inside, seen in taps:
            part = into[tap]
            if any(b - a < k for (a, b), k in zip(inside, m, strict=True)):
                part[...] = 0
            part[tuple(slice(a, b) for a, b in inside)] = plane[tuple(seen)]
    return cols


def col2im(
    cols: np.ndarray, shape: Shape, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape
) -> np.ndarray:
    """Adds what each output saw where it came from: cols (N, C, *k, *m) -> (N, C, *shape)."""
    wide = accurate(cols.dtype)
    out = pool.empty((*cols.shape[:2], *shape), cols.dtype)
    m = cols.shape[2 + len(kernel) :]
    if cols.dtype.char in "fd" and jit.fits(cols) and all(s == 1 for s in stride) and cols.size and out.size:
        table = -_shifts(kernel, padding, dilation)
        table[:, 0] = np.arange(len(table))
        planes = np.ascontiguousarray(cols).reshape(-1, len(table), *_three(m, 1))
        shifted_sums(_examples(out), planes, table, np.ones((1, len(table)), cols.dtype))
        return out
    taps = list(_seen(shape, m, kernel, stride, padding, dilation))
    room = np.empty(shape, wide)
    for n, c in np.ndindex(*cols.shape[:2]):
        plane = room if wide != cols.dtype else out[n, c]
        plane.fill(0)
        for tap, inside, seen in taps:
            plane[tuple(seen)] += cols[n, c][tap][tuple(slice(a, b) for a, b in inside)]
        if plane is room:
            out[n, c] = room
    return out


# Every channel by itself, without strides: shifted sums, with no padded copy


def _single(dtype: np.dtype, a: np.ndarray, b: np.ndarray, stride: Shape, groups: int, filters: Shape) -> bool:
    """Whether filters of the shape (O, C / groups, ...) see a channel each, and loops take it."""
    alone = filters[:2] == (groups, 1) and all(s == 1 for s in stride)
    return alone and dtype.char in "fd" and jit.fits(a, b)


def _shifts(kernel: Shape, padding: Sequence[Pair], dilation: Shape) -> np.ndarray:
    """How much further than an output each tap reads, as `spmd.kernels.cpu.shifts` wants it."""
    table = np.zeros((math.prod(kernel), 4), np.int64)
    low = [before for before, _ in padding]
    table[:, 4 - len(kernel) :] = np.array(list(np.ndindex(*kernel))) * dilation - low
    return table


def _examples(x: np.ndarray) -> np.ndarray:
    """(N, C, *n) with one leading and three spatial dimensions."""
    return np.ascontiguousarray(x).reshape(x.shape[0] * x.shape[1], *_three(x.shape[2:], 1))


def _shift(out: np.ndarray, x: np.ndarray, table: np.ndarray, weights: np.ndarray) -> None:
    shifted_sums(_examples(out), _examples(x)[:, None], table, np.ascontiguousarray(weights))


_PART = 1 << 21
"""Bytes of a part of the work, if it can be cut so small: what is padded for it is in the cache when it is read."""

_Part = tuple[slice, slice, slice]
"""Some examples, of them some channels, of those some rows: entries of the first spatial dimension."""


def _parts(x: np.ndarray, groups: int, m: Shape, taps: tuple[_Tap, ...]) -> Iterator[_Part]:
    """Examples, groups and rows of the outputs 0:m, of parts of the work: some examples of all groups, or some groups
    of one example, or of one group some rows, at least as many as the taps of one see."""
    per_group = max(1, x[:1].nbytes // groups)
    everything = slice(0, m[0])
    if groups * per_group <= _PART:
        step = max(1, _PART // (groups * per_group))
        yield from ((slice(n, min(n + step, len(x))), slice(0, groups), everything) for n in range(0, len(x), step))
        return
    step = max(1, _PART // per_group)
    first = [tap.shift[0] for tap in taps]
    rows = m[0] if per_group <= _PART else max(1, max(first) - min(first), m[0] * _PART // per_group)
    rows = -(-m[0] // -(-m[0] // rows))  # as many in each
    for n in range(len(x)):
        for g in range(0, groups, step):
            for y in range(0, m[0], rows):
                yield slice(n, n + 1), slice(g, min(g + step, groups)), slice(y, min(y + rows, m[0]))


def _of(groups: slice, each: int) -> slice:
    """The channels, or filters, of some groups."""
    return slice(groups.start * each, groups.stop * each)


def _seen(
    shape: Shape, m: Shape, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape
) -> Iterator[tuple[Shape, list[Pair], list[slice]]]:
    """For each entry of the kernel: the outputs that see no padding there, and the inputs that they see."""
    for tap in itertools.product(*map(range, kernel)):
        inside, seen = [], []
        for t, n, count, s, (low, _), d in zip(tap, shape, m, stride, padding, dilation, strict=True):
            at = t * d - low
            first = min(count, max(0, -(at // s)))
            end = max(first, min(count, (n - 1 - at) // s + 1))
            inside.append((first, end))
            seen.append(slice(at + first * s, at + end * s, s) if end > first else slice(0, 0))
        yield tap, inside, seen


# Tables of taps


def _pairs(padding: Sequence[Pair]) -> tuple[Pair, ...]:
    """A padding as tables are looked up by."""
    return tuple((low, high) for low, high in padding)


class _Tap(NamedTuple):
    """Where a tap reads for output u: entry u + shift of a plane."""

    plane: int
    shift: Shape


@lru_cache(maxsize=256)
def _taps(
    kernel: Shape, stride: Shape, padding: tuple[Pair, ...], dilation: Shape
) -> tuple[tuple[_Tap, ...], tuple[Shape, ...]]:
    """The taps of a convolution, in the order of the kernel's entries. Its input x[o * stride + t * dilation - low] is
    entry o + shift of the plane of a residue of the stride. With them the residue of each plane that they read."""
    taps, planes = [], {}
    for tap in itertools.product(*map(range, kernel)):
        each = zip(tap, stride, padding, dilation, strict=True)
        shift, residue = zip(*(divmod(t * d - low, s) for t, s, (low, _), d in each), strict=True)
        taps.append(_Tap(planes.setdefault(residue, len(planes)), shift))
    return tuple(taps), tuple(planes)


@lru_cache(maxsize=256)
def _met(
    kernel: Shape, stride: Shape, padding: tuple[Pair, ...], dilation: Shape, residue: Shape
) -> tuple[tuple[int, ...], tuple[_Tap, ...]]:
    """The taps by which outputs meet the inputs residue + u * stride, for which output u + shift does: which they are,
    and as taps of the outputs."""
    met, taps = [], []
    for k, tap in enumerate(itertools.product(*map(range, kernel))):
        shift = []
        for t, s, (low, _), d, r in zip(tap, stride, padding, dilation, residue, strict=True):
            times, rest = divmod(r + low - t * d, s)
            if rest:
                break
            shift.append(times)
        else:
            met.append(k)
            taps.append(_Tap(0, tuple(shift)))
    return tuple(met), tuple(taps)


class _Source(NamedTuple):
    """Planes of an array, with zeros around where taps reach: data (N, groups, C, planes, *lengths), three of them.

    origin: the place of what a shift of 0 reads for the first output. reach: the three lengths of the outputs.
    """

    data: np.ndarray
    origin: Shape
    reach: Shape


def _three(shape: Shape, fill: int) -> Shape:
    return (fill,) * (3 - len(shape)) + tuple(shape)


def _planes(
    x: np.ndarray, of: slice, stride: Shape, residues: Sequence[Shape], taps: tuple[_Tap, ...], m: Shape, rows: slice
) -> _Source:
    """x (N, C, *n), the channels of some groups, as planes of these residues of the stride, that all taps of some rows
    of the outputs 0:m lie in: x itself if that is so."""
    groups = of.stop - of.start
    n, c = x.shape[:2]
    lows, highs = zip(*((min(s), max(s)) for s in zip(*(tap.shift for tap in taps), strict=True)), strict=True)
    begins = (rows.start + lows[0], *lows[1:])
    ends = (rows.stop + highs[0], *map(sum, zip(m[1:], highs[1:], strict=True)))
    reach = _three((rows.stop - rows.start, *m[1:]), 1)
    whole = all(s == 1 for s in stride) and min(begins) >= 0
    if whole and all(end <= k for end, k in zip(ends, x.shape[2:], strict=True)):
        data = np.ascontiguousarray(x).reshape(n, groups, c // groups, 1, *_three(x.shape[2:], 1))
        return _Source(data, _three((rows.start, *[0] * len(m[1:])), 0), reach)
    lengths = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    data = pool.empty((n, c, len(residues), *lengths), x.dtype)
    for plane, residue in enumerate(residues):
        part = x[(slice(None), slice(None), *(slice(r, None, s) for r, s in zip(residue, stride, strict=True)))]
        _put(data[:, :, plane], part, begins)
    data = data.reshape(n, groups, c // groups, len(residues), *_three(lengths, 1))
    return _Source(data, _three(tuple(-low for low in lows), 0), reach)


def _put(out: np.ndarray, x: np.ndarray, begins: Sequence[int]) -> None:
    """x from these entries of its last dimensions on, which may lie before it, into out; zeros for what is not in x."""
    to: tuple[slice, ...] = (slice(None), slice(None))
    of = to
    for begin, n, length in zip(begins, x.shape[2:], out.shape[2:], strict=True):
        first = min(length, max(0, -begin))
        end = max(first, min(length, n - begin))
        out[(*to, slice(0, first))] = 0
        out[(*to, slice(end, None))] = 0
        to, of = (*to, slice(first, end)), (*of, slice(begin + first, begin + end))
    out[to] = x[of]


@lru_cache(maxsize=64)
def _offsets(shape: Shape, origin: Shape, taps: tuple[_Tap, ...]) -> np.ndarray:
    """For every channel of a group and every tap: how far its entry lies from the first of the group. shape: of the
    source, from the channels on."""
    channels, planes, *lengths = shape
    _, high, wide = lengths
    size = math.prod(lengths)
    places_ = [
        tap.plane * size + ((o0 + a) * high + o1 + b) * wide + o2 + c
        for tap in taps
        for (a, b, c), (o0, o1, o2) in [(_three(tap.shift, 0), origin)]
    ]
    table = (np.arange(channels)[:, None] * planes * size + np.array(places_)).reshape(-1)
    table.flags.writeable = False
    return table


class _Lines(NamedTuple):
    """Rows of a part of an array (N, C, *m): data, flat, where its first entry is, and how far the next example,
    channel, layer and row lie."""

    data: np.ndarray
    start: int
    steps: np.ndarray


def _lines(x: np.ndarray, part: _Part) -> _Lines:
    """A part, in x itself if that is contiguous."""
    if not x.flags.c_contiguous:
        x, part = np.ascontiguousarray(x[part]), (slice(0, None), slice(0, None), slice(0, None))
    n, channel, rows = (each.start for each in part)
    per_row = math.prod(x.shape[3:])
    size = x.shape[2] * per_row
    _, high, wide = _three(x.shape[2:], 1)
    start = (n * x.shape[1] + channel) * size + rows * per_row
    return _Lines(x.reshape(-1), start, np.array([x.shape[1] * size, size, high * wide, wide]))


# Sums over taps

_STRIP = 1024
"""Places of one filter alone that are summed before they are written, where rows are short."""


def _correlate(out: np.ndarray, part: _Part, source: _Source, filters: np.ndarray, taps: tuple[_Tap, ...]) -> None:
    """Write a part of out (N, all groups' O, *m): the sums over channels and taps. filters: (groups, O, C, taps)."""
    groups, count = filters.shape[:2]
    flat = filters.reshape(groups, count, -1)
    _, rows, columns = source.reach
    if out.dtype.char in "fd" and jit.fits(out):
        at_once = 1 if count == 1 else vectors.filters()
        span = 4 * vectors.lanes(out.dtype) if count == 1 else vectors.places(out.dtype)
        if count == 1 or (rows - 1) * source.data.shape[-1] + columns >= span:
            padded = np.zeros((groups, -(-count // at_once) * at_once, flat.shape[2]), out.dtype)
            padded[:, :count] = flat
            scratch = np.empty((at_once, _STRIP if count == 1 else span), out.dtype)
            lines, shape = _lines(out, part), (source.data.shape[0], groups, count, *source.reach)
            table, data = _offsets(source.data.shape[2:], source.origin, taps), source.data.reshape(-1)
            _tiles(lines.data, scratch, data, padded, table, lines.start, lines.steps, _steps(source), shape, span)
            return
    _by_products(out[part], source, flat, taps)


def _steps(source: _Source) -> np.ndarray:
    """How far the next example, group, layer and row of a source lie."""
    data = source.data
    size = math.prod(data.shape[2:])
    return np.array([data.shape[1] * size, size, data.shape[-2] * data.shape[-1], data.shape[-1]])


@jit.helper
def _pick(out: Any, to: int, pitch: int, columns: int, line: Any, at: int, length: int, wide: int, column: int) -> None:
    # The neighbours of line that are of a row's columns, rows of `wide` of them that begin with this column, are
    # written to rows that lie `pitch` apart.
    k = 0
    while k < length:
        for j in range(k, min(length, k + columns - column)):
            out[to + j - k] = line[at + j]
        k, to, column = k + wide - column, to + pitch - column, 0


@jit.loops("out", "scratch")
def _tiles(
    out: Any, scratch: Any, x: Any, w: Any, offsets: Any, start: int, out_steps: Any, steps: Any, shape: Any, span: int
) -> None:
    # The places of a layer are gone through as they lie in memory. So many neighbours as are computed at once are
    # written as they are if they are of one row. Those that begin in one row and end in another one, and those of fewer
    # filters than there are at once, are picked from scratch. The last ones begin early enough to end with the layer.
    examples, groups, count, layers, rows, columns = shape
    wide = steps[3]
    end = (rows - 1) * wide + columns
    at_once, strip = scratch.shape
    line = scratch.reshape(-1)
    for n in range(examples):
        for g in range(groups):
            weights = w[g]
            taps = weights.shape[1]
            for z in range(layers):
                base = n * steps[0] + g * steps[1] + z * steps[2]
                layer = start + n * out_steps[0] + g * count * out_steps[1] + z * out_steps[2]
                place = 0
                while place < end:
                    row = place // wide
                    column = place - row * wide
                    if column >= columns:
                        place = (row + 1) * wide
                        continue
                    within = column + span <= columns
                    if within:
                        length = columns - column if at_once == 1 else span
                    else:
                        length = min(strip, end) if at_once == 1 else span
                        place = min(place, end - length)
                        row = place // wide
                        column = place - row * wide
                    for first in range(0, count, at_once):
                        to = layer + first * out_steps[1] + row * out_steps[3] + column
                        kept = min(at_once, count - first)
                        if within and at_once == 1:
                            combine(out, to, length, x, base + place, offsets, 0, weights, 0, taps)
                        elif within and kept == at_once:
                            add_taps(out, to, out_steps[1], x, base + place, offsets, weights, first)
                        else:
                            if at_once == 1:
                                combine(scratch, 0, length, x, base + place, offsets, 0, weights, 0, taps)
                            else:
                                add_taps(line, 0, strip, x, base + place, offsets, weights, first)
                            for a in range(kept):
                                into = to + a * out_steps[1]
                                _pick(out, into, out_steps[3], columns, line, a * strip, length, wide, column)
                    place += length


def _by_products(out: np.ndarray, source: _Source, w: np.ndarray, taps: tuple[_Tap, ...]) -> None:
    """out (N, groups * O, *m): piece by piece the product of the filters and of what the taps see."""
    out = out.reshape(*out.shape[:2], *source.reach)
    count = w.shape[1]
    for n, g, rows, cols in _pieces(source, taps):
        some = out[(n, slice(g * count, (g + 1) * count), *rows)]
        some[...] = (w[g] @ cols).reshape(some.shape)


def _pieces(source: _Source, taps: tuple[_Tap, ...]) -> Iterator[tuple[int, int, tuple[int, slice], np.ndarray]]:
    """Some rows of a layer at a time, of an example and a group: what their taps see, (channels * taps, places)."""
    data = source.data
    examples, groups, channels = data.shape[:3]
    layers, rows, columns = source.reach
    per_row = channels * len(taps) * columns * data.itemsize
    step = max(1, min(rows, _PIECE // max(1, per_row)))
    for n, g, z in itertools.product(range(examples), range(groups), range(layers)):
        for y in range(0, rows, step):
            stop = min(rows, y + step)
            cols = np.empty((channels, len(taps), stop - y, columns), data.dtype)
            for k, tap in enumerate(taps):
                a, b, c = (o + s for o, s in zip(source.origin, _three(tap.shift, 0), strict=True))
                cols[:, k] = data[n, g, :, tap.plane, z + a, y + b : stop + b, c : c + columns]
            yield n, g, (z, slice(y, stop)), cols.reshape(channels * len(taps), -1)


def _correlate_weights(g: np.ndarray, part: _Part, source: _Source, taps: tuple[_Tap, ...]) -> np.ndarray:
    """The sums over examples and places of a part of g (N, all groups' O, *m) times what each tap sees: (groups, O,
    C * taps)."""
    n, groups, channels = source.data.shape[:3]
    count = (part[1].stop - part[1].start) // groups
    if g.dtype.char in "fd" and jit.fits(g):
        found = _dots(_lines(g, part), count, source, _offsets(source.data.shape[2:], source.origin, taps))
        if found is not None:
            return found
    total = np.zeros((groups, count, channels * len(taps)), g.dtype if g.dtype.kind == "c" else np.float64)
    g = g[part].reshape(n, groups, count, *source.reach)
    for k, j, (z, rows), cols in _pieces(source, taps):
        total[j] += g[k, j, :, z, rows].reshape(count, -1) @ cols.T
    return total


def _dots(g: _Lines, count: int, source: _Source, offsets: np.ndarray) -> np.ndarray | None:
    """`_correlate_weights` by loops, or None where they cannot."""
    n, groups = source.data.shape[:2]
    layers, rows, columns = source.reach
    steps, lanes = _steps(source), vectors.lanes(g.data.dtype)
    wide, at_once = source.data.shape[-1], 4 if count == 1 else vectors.taps()
    # Taps beyond the last one, and rows beyond the last filter, bring their numbers to multiples.
    padded = np.append(offsets, np.repeat(offsets[-1:], -offsets.size % at_once))
    sums = np.zeros((groups, count + -count % ROWS, padded.size))
    found = sums[:, :count, : offsets.size]
    x, shape = source.data.reshape(-1), (n, groups, count, *source.reach)
    if count == 1:
        _dot_rows(sums, g.data, x, padded, g.start, g.steps, steps, shape)
        return found
    if lanes <= columns and columns + -columns % lanes <= wide + lanes // 4:
        _dot_tiles(sums, g.data, x, padded, g.start, g.steps, steps, shape, at_once)
        return found
    # Short rows as one: g with the rows of the source, zeros behind its own.
    end = (rows - 1) * wide + columns
    if end < lanes:
        return None
    around = pool.zeros((n, groups * count, layers, rows, wide), g.data.dtype)
    around[..., :columns] = np.lib.stride_tricks.as_strided(
        g.data[g.start :], (*around.shape[:-1], columns), [s * g.data.itemsize for s in (*g.steps, 1)], writeable=False
    )
    size = layers * rows * wide
    apart = np.array([groups * count * size, size, rows * wide, wide])
    _dot_tiles(sums, around.reshape(-1), x, padded, 0, apart, steps, (n, groups, count, layers, 1, end), at_once)
    # Between two rows zeros of g meet whatever x has there, and zero times infinity is no number. So where such
    # entries came in, products say which of the sums they belong to.
    return found if np.isfinite(sums).all() else None


@jit.loops("sums", fastmath=("contract", "reassoc", "nsz"))
def _dot_rows(sums: Any, g: Any, x: Any, offsets: Any, start: int, g_steps: Any, steps: Any, shape: Any) -> None:
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


_TILE = 8192
"""Bytes of what is multiplied at a time, of each row: a part of the first cache."""


@jit.loops("sums")
def _dot_tiles(
    sums: Any, g: Any, x: Any, offsets: Any, start: int, g_steps: Any, steps: Any, shape: Any, taps: int
) -> None:
    examples, groups, count, layers, rows, columns = shape
    apart = g_steps[3], steps[3]
    most = _TILE // x.itemsize
    high, cuts = max(1, most // columns), -(-columns // most)
    for n in range(examples):
        for i in range(groups):
            found = sums[i]
            for z in range(layers):
                for y in range(0, rows, high):
                    for cut in range(cuts):
                        first, end = columns * cut // cuts, columns * (cut + 1) // cuts
                        tile = min(high, rows - y), end - first
                        base = n * steps[0] + i * steps[1] + z * steps[2] + y * steps[3] + first
                        at = start + n * g_steps[0] + i * count * g_steps[1] + z * g_steps[2] + y * g_steps[3] + first
                        for o in range(0, count, ROWS):
                            of, left = at + o * g_steps[1], count - o
                            for t in range(0, offsets.size, taps):
                                dot_taps(found, o, t, g, of, g_steps[1], left, x, base, offsets, tile, apart)
