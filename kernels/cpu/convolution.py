"""Convolution and its adjoints, for one to three spatial dimensions, as correlations (`spmd.kernels.cpu.correlation`):

conv                 out[u] = sum over taps of w * x[u + shift]
conv_input_adjoint   for each residue of the stride: the same of g, over the taps that read it
conv_weight_adjoint  sum over u of g[u] * x[u + shift]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from spmd.kernels import jit
from spmd.kernels.cpu.chunks import accurate
from spmd.kernels.cpu.correlation import (
    Pair,
    Shape,
    adjoint_taps,
    as_tuples,
    channels_of,
    conv_taps,
    correlate,
    correlate_weights,
    parts,
    strided_planes,
    three_dims,
)
from spmd.kernels.cpu.shifts import shifted_copies, shifted_products, shifted_sums
from spmd.kernels.memory import pool
from spmd.kernels.windows import output_length


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
    if _is_depthwise(dtype, x, w, stride, groups, w.shape):
        table = _shift_table(w.shape[2:], padding, dilation)
        _depthwise(out, x.astype(dtype, copy=False), table, w.astype(dtype, copy=False).reshape(groups, -1))
        return out
    taps, residues = conv_taps(w.shape[2:], stride, as_tuples(padding), dilation)
    filters = w.astype(wide, copy=False).reshape(groups, w.shape[0] // groups, w.shape[1], -1)
    wide_out = out if dtype == wide else pool.empty(out.shape, wide)
    for n, g, rows in parts(x, groups, m, taps):
        block = x[n, channels_of(g, w.shape[1])].astype(wide, copy=False)
        source = strided_planes(block, g.stop - g.start, stride, residues, taps, m, rows)
        correlate(wide_out, (n, channels_of(g, filters.shape[1]), rows), source, filters[g], taps)
        del source  # the next part reuses its memory
    if wide_out is not out:
        out[...] = wide_out
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
    if _is_depthwise(dtype, g, w, stride, groups, w.shape):
        out = pool.empty((n, c, *shape), dtype)
        table = -_shift_table(w.shape[2:], padding, dilation)
        _depthwise(out, g.astype(dtype, copy=False), table, w.astype(dtype, copy=False).reshape(groups, -1))
        return out
    # (groups, O, C, taps) -> (groups, C, O, taps): the sum is over the outputs of the filters now.
    filters = w.reshape(groups, w.shape[0] // groups, w.shape[1], -1).swapaxes(1, 2).astype(wide, copy=False)
    g = g.astype(wide, copy=False)
    ones, zeros, pairs = (1,) * len(stride), [(0,) * len(stride)], as_tuples(padding)
    out = pool.empty((n, c, *shape), dtype)
    for residue in itertools.product(*(range(min(s, k)) for s, k in zip(stride, shape, strict=True))):
        part = out[(slice(None), slice(None), *(slice(r, None, s) for r, s in zip(residue, stride, strict=True)))]
        tap_indices, taps = adjoint_taps(w.shape[2:], stride, pairs, dilation, residue)
        if not tap_indices or 0 in part.shape:
            part[...] = 0
            continue
        tap_filters = np.ascontiguousarray(filters[..., tap_indices])
        wide_part = part if tuple(stride) == ones and dtype == wide else pool.empty(part.shape, wide)
        for i, j, rows in parts(g, groups, part.shape[2:], taps):
            block = g[i, channels_of(j, tap_filters.shape[2])]
            source = strided_planes(block, j.stop - j.start, ones, zeros, taps, part.shape[2:], rows)
            correlate(wide_part, (i, channels_of(j, tap_filters.shape[1]), rows), source, tap_filters[j], taps)
            del source
        if wide_part is not part:
            part[...] = wide_part
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
    if _is_depthwise(dtype, g, x, stride, groups, shape):
        products = shifted_products(
            _as_3d(g.astype(dtype, copy=False)),
            _as_3d(x.astype(dtype, copy=False))[:, None],
            _shift_table(kernel, padding, dilation),
            groups,
        )
        return products.reshape(shape).astype(dtype)
    taps, residues = conv_taps(kernel, stride, as_tuples(padding), dilation)
    count, channels = shape[0] // groups, shape[1]
    sums = np.zeros((groups, count, channels * len(taps)), wide if wide.kind == "c" else np.float64)
    g = g.astype(wide, copy=False)
    for n, k, rows in parts(x, groups, g.shape[2:], taps):
        block = x[n, channels_of(k, channels)].astype(wide, copy=False)
        source = strided_planes(block, k.stop - k.start, stride, residues, taps, g.shape[2:], rows)
        del block
        sums[k] += correlate_weights(g, (n, channels_of(k, count), rows), source, taps)
        del source
    return sums.reshape(shape).astype(dtype, copy=False)


def im2col(x: np.ndarray, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape) -> np.ndarray:
    """The inputs of each output: x (N, C, *n) -> (N, C, *k, *m)."""
    m = tuple(map(output_length, x.shape[2:], kernel, stride, padding, dilation))
    cols = pool.empty((*x.shape[:2], *kernel, *m), x.dtype)
    if x.dtype.char in "fd" and jit.fits(x) and all(s == 1 for s in stride) and x.size and cols.size:
        table = _shift_table(kernel, padding, dilation)
        shifted_copies(cols.reshape(-1, len(table), *three_dims(m, 1)), _as_3d(x), table)
        return cols
    taps = list(_tap_slices(x.shape[2:], m, kernel, stride, padding, dilation))
    # Plane by plane: taps share inputs, which are still in the cache.
    for n, c in np.ndindex(*x.shape[:2]):
        plane, plane_cols = x[n, c], cols[n, c]
        for tap, inside, read in taps:
            tap_cols = plane_cols[tap]
            if any(b - a < k for (a, b), k in zip(inside, m, strict=True)):
                tap_cols[...] = 0
            tap_cols[tuple(slice(a, b) for a, b in inside)] = plane[tuple(read)]
    return cols


def col2im(
    cols: np.ndarray, shape: Shape, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape
) -> np.ndarray:
    """Add the inputs of each output where they were read: cols (N, C, *k, *m) -> (N, C, *shape)."""
    wide = accurate(cols.dtype)
    out = pool.empty((*cols.shape[:2], *shape), cols.dtype)
    m = cols.shape[2 + len(kernel) :]
    if cols.dtype.char in "fd" and jit.fits(cols) and all(s == 1 for s in stride) and cols.size and out.size:
        table = -_shift_table(kernel, padding, dilation)
        table[:, 0] = np.arange(len(table))
        planes = np.ascontiguousarray(cols).reshape(-1, len(table), *three_dims(m, 1))
        shifted_sums(_as_3d(out), planes, table, np.ones((1, len(table)), cols.dtype))
        return out
    taps = list(_tap_slices(shape, m, kernel, stride, padding, dilation))
    scratch = np.empty(shape, wide)
    for n, c in np.ndindex(*cols.shape[:2]):
        plane = scratch if wide != cols.dtype else out[n, c]
        plane.fill(0)
        for tap, inside, read in taps:
            plane[tuple(read)] += cols[n, c][tap][tuple(slice(a, b) for a, b in inside)]
        if plane is scratch:
            out[n, c] = scratch
    return out


# Depthwise without strides: shifted sums, with no padded copy


def _is_depthwise(dtype: np.dtype, a: np.ndarray, b: np.ndarray, stride: Shape, groups: int, filters: Shape) -> bool:
    """Whether filters of the shape (O, C / groups, ...) read one channel each, without strides, and loops take it."""
    depthwise = filters[:2] == (groups, 1) and all(s == 1 for s in stride)
    return depthwise and dtype.char in "fd" and jit.fits(a, b)


def _shift_table(kernel: Shape, padding: Sequence[Pair], dilation: Shape) -> np.ndarray:
    """The table of taps for `spmd.kernels.cpu.shifts`: their shifts against the output."""
    table = np.zeros((math.prod(kernel), 4), np.int64)
    low = [before for before, _ in padding]
    table[:, 4 - len(kernel) :] = np.array(list(np.ndindex(*kernel))) * dilation - low
    return table


def _as_3d(x: np.ndarray) -> np.ndarray:
    """(N, C, *n) as (N * C, *three spatial dimensions)."""
    return np.ascontiguousarray(x).reshape(x.shape[0] * x.shape[1], *three_dims(x.shape[2:], 1))


def _depthwise(out: np.ndarray, x: np.ndarray, table: np.ndarray, weights: np.ndarray) -> None:
    shifted_sums(_as_3d(out), _as_3d(x)[:, None], table, np.ascontiguousarray(weights))


def _tap_slices(
    shape: Shape, m: Shape, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape
) -> Iterator[tuple[Shape, list[Pair], list[slice]]]:
    """For each entry of the kernel: the outputs that read no padding there, and the inputs that they read."""
    for tap in itertools.product(*map(range, kernel)):
        inside, read = [], []
        for t, n, count, s, (low, _), d in zip(tap, shape, m, stride, padding, dilation, strict=True):
            at = t * d - low
            first = min(count, max(0, -(at // s)))
            end = max(first, min(count, (n - 1 - at) // s + 1))
            inside.append((first, end))
            read.append(slice(at + first * s, at + end * s, s) if end > first else slice(0, 0))
        yield tap, inside, read
