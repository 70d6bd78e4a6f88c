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
from typing import Any, NamedTuple

import numpy as np

from spmd.kernels import buffers, jit
from spmd.kernels.cpu.chunks import accurate
from spmd.kernels.cpu.shifts import shifted_copies, shifted_products, shifted_sums
from spmd.kernels.cpu.vectors import FILTERS, add_taps, combine, places
from spmd.kernels.windows import output_length

__all__ = ["col2im", "conv", "conv_input_adjoint", "conv_weight_adjoint", "im2col"]

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
    out = buffers.empty((x.shape[0], w.shape[0], *m), dtype)
    if 0 in out.shape or 0 in x.shape or 0 in w.shape:
        out.fill(0)
        return out
    wide = accurate(dtype)
    if _single(dtype, x, w, stride, groups, w.shape):
        table = _shifts(w.shape[2:], padding, dilation)
        _shift(out, x.astype(dtype, copy=False), table, w.astype(dtype, copy=False).reshape(groups, -1))
        return out
    taps, residues = _taps(w.shape[2:], stride, padding, dilation)
    filters = w.astype(wide, copy=False).reshape(groups, w.shape[0] // groups, w.shape[1], -1)
    into = out if dtype == wide else buffers.empty(out.shape, wide)
    for n, g in _parts(x, groups):
        source = _planes(x[n, _of(g, w.shape[1])].astype(wide, copy=False), g, stride, residues, taps, m)
        _correlate(into[n, _of(g, filters.shape[1])], source, filters[g], taps)
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
        return buffers.zeros((n, c, *shape), dtype)
    if _single(dtype, g, w, stride, groups, w.shape):
        out = buffers.empty((n, c, *shape), dtype)
        table = -_shifts(w.shape[2:], padding, dilation)
        _shift(out, g.astype(dtype, copy=False), table, w.astype(dtype, copy=False).reshape(groups, -1))
        return out
    # (groups, O, C, taps) -> (groups, C, O, taps): now the filters' channels are what is summed over.
    filters = w.reshape(groups, w.shape[0] // groups, w.shape[1], -1).swapaxes(1, 2).astype(wide, copy=False)
    g = g.astype(wide, copy=False)
    whole = all(s == 1 for s in stride)
    out = buffers.empty((n, c, *shape), dtype)
    for residue in itertools.product(*(range(min(s, k)) for s, k in zip(stride, shape, strict=True))):
        part = out[(slice(None), slice(None), *(slice(r, None, s) for r, s in zip(residue, stride, strict=True)))]
        met = list(_met(w.shape[2:], stride, padding, dilation, residue))
        if not met or 0 in part.shape:
            part[...] = 0
            continue
        taps = [_Tap(0, shift) for _, shift in met]
        chosen = np.ascontiguousarray(filters[..., [k for k, _ in met]])
        into = part if whole and dtype == wide else buffers.empty(part.shape, wide)
        for i, j in _parts(g, groups):
            some = g[i, _of(j, chosen.shape[2])]
            source = _planes(some, j, (1,) * len(stride), [(0,) * len(stride)], taps, part.shape[2:])
            _correlate(into[i, _of(j, chosen.shape[1])], source, chosen[j], taps)
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
    taps, residues = _taps(kernel, stride, padding, dilation)
    count, channels = shape[0] // groups, shape[1]
    total = np.zeros((groups, count, channels * len(taps)), wide if wide.kind == "c" else np.float64)
    for n, k in _parts(x, groups):
        source = _planes(x[n, _of(k, channels)].astype(wide, copy=False), k, stride, residues, taps, g.shape[2:])
        total[k] += _correlate_weights(g[n, _of(k, count)].astype(wide, copy=False), source, taps)
    return total.reshape(shape).astype(dtype, copy=False)


def im2col(x: np.ndarray, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape) -> np.ndarray:
    """What each output sees: x (N, C, *n) -> (N, C, *k, *m)."""
    m = tuple(map(output_length, x.shape[2:], kernel, stride, padding, dilation))
    cols = buffers.empty((*x.shape[:2], *kernel, *m), x.dtype)
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
    out = buffers.empty((*cols.shape[:2], *shape), cols.dtype)
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


_PART = 1 << 19
"""Bytes of a part of the work, if it can be cut so small: what is padded for it is in the cache when it is read."""


def _parts(x: np.ndarray, groups: int) -> Iterator[tuple[slice, slice]]:
    """The examples and groups of parts of the work: some examples of all groups, or some groups of one example."""
    per_group = max(1, x[:1].nbytes // groups)
    if groups * per_group <= _PART or groups == 1:
        step = max(1, _PART // (groups * per_group))
        yield from ((slice(n, min(n + step, len(x))), slice(0, groups)) for n in range(0, len(x), step))
        return
    step = max(1, _PART // per_group)
    for n in range(len(x)):
        yield from ((slice(n, n + 1), slice(g, min(g + step, groups))) for g in range(0, groups, step))


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


class _Tap(NamedTuple):
    """Where a tap reads for output u: entry u + shift of a plane."""

    plane: int
    shift: Shape


def _taps(kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape) -> tuple[list[_Tap], list[Shape]]:
    """The taps of a convolution, in the order of the kernel's entries. Its input x[o * stride + t * dilation - low] is
    entry o + shift of the plane of a residue of the stride. With them the residue of each plane that they read."""
    taps, planes = [], {}
    for tap in itertools.product(*map(range, kernel)):
        each = zip(tap, stride, padding, dilation, strict=True)
        shift, residue = zip(*(divmod(t * d - low, s) for t, s, (low, _), d in each), strict=True)
        taps.append(_Tap(planes.setdefault(residue, len(planes)), shift))
    return taps, list(planes)


def _met(
    kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape, residue: Shape
) -> Iterator[tuple[int, Shape]]:
    """The taps by which outputs meet the inputs residue + u * stride: output u + shift does."""
    for k, tap in enumerate(itertools.product(*map(range, kernel))):
        shift = []
        for t, s, (low, _), d, r in zip(tap, stride, padding, dilation, residue, strict=True):
            times, rest = divmod(r + low - t * d, s)
            if rest:
                break
            shift.append(times)
        else:
            yield k, tuple(shift)


class _Source(NamedTuple):
    """Planes of an array, with zeros around where taps reach: data (N, groups, C, planes, *lengths), three of them.

    origin: the place of entry 0 in each dimension. reach: the three lengths of the outputs.
    """

    data: np.ndarray
    origin: Shape
    reach: Shape


def _three(shape: Shape, fill: int) -> Shape:
    return (fill,) * (3 - len(shape)) + tuple(shape)


def _planes(
    x: np.ndarray, of: slice, stride: Shape, residues: Sequence[Shape], taps: Sequence[_Tap], m: Shape
) -> _Source:
    """x (N, C, *n), the channels of some groups, as planes of these residues of the stride, that all taps of outputs
    0:m lie in."""
    groups = of.stop - of.start
    n, c, shape = x.shape[0], x.shape[1], x.shape[2:]
    shifts = list(zip(*(tap.shift for tap in taps), strict=True))
    origin = [max(0, -min(s)) for s in shifts]
    lengths = [
        max(o + -(-k // s), o + end + max(t)) for o, k, s, end, t in zip(origin, shape, stride, m, shifts, strict=True)
    ]
    planes = len(residues)
    head = (n, groups, c // groups, planes)
    if all(s == 1 for s in stride) and tuple(lengths) == shape:
        data = np.ascontiguousarray(x)
    else:
        data = buffers.empty((n, c, planes, *lengths), x.dtype)
        for plane, residue in enumerate(residues):
            part = x[(slice(None), slice(None), *(slice(r, None, s) for r, s in zip(residue, stride, strict=True)))]
            _put(data[:, :, plane], part, origin)
    return _Source(data.reshape(*head, *_three(tuple(lengths), 1)), _three(tuple(origin), 0), _three(m, 1))


def _put(out: np.ndarray, x: np.ndarray, origin: Sequence[int]) -> None:
    """x into the last dimensions of out, from origin on, and zeros around it."""
    inner: tuple[slice, ...] = (slice(None), slice(None))
    for o, k in zip(origin, x.shape[2:], strict=True):
        out[(*inner, slice(0, o))] = 0
        out[(*inner, slice(o + k, None))] = 0
        inner = (*inner, slice(o, o + k))
    out[inner] = x


def _offsets(source: _Source, taps: Sequence[_Tap]) -> np.ndarray:
    """For every channel of a group and every tap: how far its entry lies from the first of the group."""
    channels, planes, *lengths = source.data.shape[2:]
    _, high, wide = lengths
    size = math.prod(lengths)
    places_ = [
        tap.plane * size + ((o0 + a) * high + o1 + b) * wide + o2 + c
        for tap in taps
        for (a, b, c), (o0, o1, o2) in [(_three(tap.shift, 0), source.origin)]
    ]
    return (np.arange(channels)[:, None] * planes * size + np.array(places_)).reshape(-1)


# Sums over taps

_STRIP = 1024
"""Places between two writings of what was summed: the sums of all filters at work lie in the cache."""


def _correlate(out: np.ndarray, source: _Source, filters: np.ndarray, taps: Sequence[_Tap]) -> None:
    """out (N, groups * O, *m), contiguous: the sums over channels and taps. filters: (groups, O, C, taps)."""
    groups, count = filters.shape[:2]
    flat = filters.reshape(groups, count, -1)
    n = source.data.shape[0]
    _, rows, columns = source.reach
    wide = source.data.shape[-1]
    at_once = 1 if count == 1 else FILTERS
    if out.dtype.char in "fd" and jit.fits(out) and out.flags.c_contiguous:
        span = 1 if count == 1 else places(out.dtype)
        if (rows - 1) * wide + columns >= span:
            padded = np.zeros((groups, -(-count // at_once) * at_once, flat.shape[2]), out.dtype)
            padded[:, :count] = flat
            scratch = np.empty((at_once, _STRIP // span * span), out.dtype)
            table, steps, shape = _offsets(source, taps), _steps(source), (n, groups, count, *source.reach)
            _tiles(out.reshape(-1), scratch, source.data.reshape(-1), padded, table, steps, shape, span)
            return
    _by_products(out.reshape(n, groups, count, -1), source, flat, taps)


def _steps(source: _Source) -> np.ndarray:
    """How far the next example, group, layer and row of a source lie."""
    data = source.data
    size = math.prod(data.shape[2:])
    return np.array([data.shape[1] * size, size, data.shape[-2] * data.shape[-1], data.shape[-1]])


@jit.loops("out", "scratch")
def _tiles(out: Any, scratch: Any, x: Any, w: Any, offsets: Any, steps: Any, shape: Any, span: int) -> None:
    # The places of a layer are gone through as they lie in memory, over the ends of its rows: what is computed in
    # between two rows is left out when a strip is written. The last piece begins early enough to end with the layer.
    examples, groups, count, layers, rows, columns = shape
    wide = steps[3]
    end = (rows - 1) * wide + columns
    at_once, strip = scratch.shape
    for n in range(examples):
        for g in range(groups):
            weights = w[g]
            for z in range(layers):
                base = n * steps[0] + g * steps[1] + z * steps[2]
                start = 0
                while start < end:
                    # Whole spans, as many as a strip holds: a last one that would be cut begins earlier.
                    length = min(strip, (end - start) // span * span)
                    if length == 0:
                        start, length = end - span, span
                    for first in range(0, w.shape[1], at_once):
                        if at_once == 1:
                            taps = offsets.size
                            combine(scratch, 0, length, x, base + start, offsets, 0, weights, first * taps, taps)
                        else:
                            for p in range(0, length, span):
                                add_taps(scratch, p, x, base + start + p, offsets, weights, first)
                        for a in range(min(at_once, count - first)):
                            line = scratch[a]
                            layer = (((n * groups + g) * count + first + a) * layers + z) * rows * columns
                            row, k = start // wide, 0
                            column = start - row * wide
                            while k < length:
                                keep = min(length - k, columns - column)
                                if keep > 0:
                                    to = layer + row * columns + column
                                    out[to : to + keep] = line[k : k + keep]
                                k, row, column = k + wide - column, row + 1, 0
                    start += length


def _by_products(out: np.ndarray, source: _Source, w: np.ndarray, taps: Sequence[_Tap]) -> None:
    """out (N, groups, O, places): piece by piece the product of the filters and of what the taps see."""
    for n, g, first, end, cols in _pieces(source, taps):
        np.matmul(w[g], cols, out=out[n, g, :, first:end])


def _pieces(source: _Source, taps: Sequence[_Tap]) -> Iterator[tuple[int, int, int, int, np.ndarray]]:
    """Some rows of outputs at a time, first:end of the places: what their taps see, (channels * taps, places)."""
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
            first = (z * rows + y) * columns
            yield n, g, first, first + (stop - y) * columns, cols.reshape(channels * len(taps), -1)


def _correlate_weights(g: np.ndarray, source: _Source, taps: Sequence[_Tap]) -> np.ndarray:
    """The sums over examples and places of g (N, groups * O, *m) times what each tap sees: (groups, O, C * taps)."""
    n, groups, channels = source.data.shape[:3]
    count = g.shape[1] // groups
    if g.dtype.char in "fd" and jit.fits(g):
        layers, rows, columns = source.reach
        wide = source.data.shape[-1]
        offsets = _offsets(source, taps)
        # Taps beyond the last one bring their number to a multiple of four.
        padded = np.append(offsets, np.repeat(offsets[-1:], -offsets.size % 4))
        flat, steps = source.data.reshape(-1), _steps(source)
        if count == 1:
            sums = np.zeros((groups, 1, padded.size))
            _dot_rows(sums, np.ascontiguousarray(g).reshape(n, groups, *source.reach), flat, padded, steps)
            return sums[:, :, : offsets.size]
        # g with the rows of the source, zeros behind its own: one loop goes over many rows. Rows beyond the last filter
        # bring their number to a multiple of four.
        more = -(-count // 4) * 4
        around = buffers.zeros((n, groups, more, layers, rows, wide), g.dtype)
        around[:, :, :count, ..., :columns] = g.reshape(n, groups, count, *source.reach)
        sums = np.zeros((groups, more, padded.size))
        _dot_tiles(sums, around, flat, padded, steps, (rows - 1) * wide + columns)
        # Between two rows zeros of g meet whatever x has there, and zero times infinity is no number. So where such
        # entries came in, the products below say which of the sums they belong to.
        if np.isfinite(sums).all():
            return sums[:, :count, : offsets.size]
    total = np.zeros((groups, count, channels * len(taps)), g.dtype if g.dtype.kind == "c" else np.float64)
    flat = g.reshape(n, groups, count, -1)
    for k, j, first, end, cols in _pieces(source, taps):
        total[j] += flat[k, j, :, first:end] @ cols.T
    return total


@jit.loops("sums", fastmath=("contract", "reassoc", "nsz"))
def _dot_rows(sums: Any, g: Any, x: Any, offsets: Any, steps: Any) -> None:
    examples, groups, layers, rows, columns = g.shape
    zero = g.dtype.type(0)
    for n in range(examples):
        for i in range(groups):
            for t in range(0, offsets.size, 4):
                total0 = total1 = total2 = total3 = 0.0
                for z in range(layers):
                    base = n * steps[0] + i * steps[1] + z * steps[2]
                    for y in range(rows):
                        at = base + y * steps[3]
                        row = g[n, i, z, y]
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


_TILE = 2048


@jit.loops("sums", fastmath=("contract", "reassoc", "nsz"))
def _dot_tiles(sums: Any, g: Any, x: Any, offsets: Any, steps: Any, end: int) -> None:
    examples, groups, count, layers, rows, wide = g.shape
    flat = g.reshape(-1)
    layer = rows * wide
    zero = g.dtype.type(0)
    for n in range(examples):
        for i in range(groups):
            for z in range(layers):
                base = n * steps[0] + i * steps[1] + z * steps[2]
                for p in range(0, end, _TILE):
                    m = min(_TILE, end - p)
                    for o in range(0, count, 4):
                        at = (((n * groups + i) * count + o) * layers + z) * layer + p
                        apart = layers * layer
                        g0, g1 = flat[at : at + m], flat[at + apart : at + apart + m]
                        g2, g3 = flat[at + 2 * apart : at + 2 * apart + m], flat[at + 3 * apart : at + 3 * apart + m]
                        for t in range(0, offsets.size, 4):
                            b0, b1 = base + p + offsets[t], base + p + offsets[t + 1]
                            b2, b3 = base + p + offsets[t + 2], base + p + offsets[t + 3]
                            x0, x1, x2, x3 = x[b0 : b0 + m], x[b1 : b1 + m], x[b2 : b2 + m], x[b3 : b3 + m]
                            s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = zero
                            s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = zero
                            for j in range(m):
                                u0, u1, u2, u3 = x0[j], x1[j], x2[j], x3[j]
                                v = g0[j]
                                s00 += v * u0
                                s01 += v * u1
                                s02 += v * u2
                                s03 += v * u3
                                v = g1[j]
                                s10 += v * u0
                                s11 += v * u1
                                s12 += v * u2
                                s13 += v * u3
                                v = g2[j]
                                s20 += v * u0
                                s21 += v * u1
                                s22 += v * u2
                                s23 += v * u3
                                v = g3[j]
                                s30 += v * u0
                                s31 += v * u1
                                s32 += v * u2
                                s33 += v * u3
                            r0, r1, r2, r3 = sums[i, o], sums[i, o + 1], sums[i, o + 2], sums[i, o + 3]
                            r0[t] += s00
                            r0[t + 1] += s01
                            r0[t + 2] += s02
                            r0[t + 3] += s03
                            r1[t] += s10
                            r1[t + 1] += s11
                            r1[t + 2] += s12
                            r1[t + 3] += s13
                            r2[t] += s20
                            r2[t + 1] += s21
                            r2[t + 2] += s22
                            r2[t + 3] += s23
                            r3[t] += s30
                            r3[t + 1] += s31
                            r3[t + 2] += s32
                            r3[t + 3] += s33
