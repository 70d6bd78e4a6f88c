"""Sums and products of shifted arrays with zeros around them: stencils, convolutions of single channels, im2col.

Arrays have a leading dimension of examples and three spatial dimensions. A row of a table describes a tap: the plane of
the example that it reads, and its shift against the output. The result is computed row by row: in vector registers
where all taps lie inside, entry by entry at the ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.kernels import jit
from spmd.kernels.cpu.chunks import STRETCH
from spmd.kernels.cpu.rows import fill, move
from spmd.kernels.cpu.vectors import combine, fetch

__all__ = ["shifted_copies", "shifted_products", "shifted_sums"]


def shifted_sums(out: np.ndarray, x: np.ndarray, table: np.ndarray, weights: np.ndarray) -> None:
    """out[e, i] = sum over t of weights[e % len(weights), t] * x[e, plane of t, i + shift of t].

    out: (examples, *m). x: (examples, planes, *n). table: (taps, 4). weights: (channels, taps). All contiguous, of
    float32 or float64.
    """
    _sums(out.reshape(-1), x.reshape(-1), table, weights, out.shape, x.shape[1:])


def shifted_products(g: np.ndarray, x: np.ndarray, table: np.ndarray, channels: int) -> np.ndarray:
    """(channels, taps), float64: the sums of g[e, i] * x[e, plane of t, i + shift of t] over i and over the examples of
    a channel, which are every `channels`-th."""
    products = np.zeros((channels, len(table)))
    _products(products, g.reshape(-1), x.reshape(-1), table, g.shape, x.shape[1:])
    return products


def shifted_copies(out: np.ndarray, x: np.ndarray, table: np.ndarray) -> None:
    """out[e, t, i] = x[e, i + shift of t]. out: (examples, taps, *m), x: (examples, *n)."""
    _copies(out.reshape(-1), x.reshape(-1), table, out.shape, x.shape[1:])


@jit.loops("out")
def _copies(out: Any, x: Any, table: Any, shape: Any, lengths: Any) -> None:
    examples, taps, layers, rows, columns = shape
    depth, height, width = lengths
    for n in range(examples):
        for t in range(taps):
            c = table[t, 3]
            first = min(columns, max(0, -c))
            last = max(first, min(columns, width - c))
            for z in range(layers):
                for y in range(rows):
                    a, b = z + table[t, 1], y + table[t, 2]
                    to = (((n * taps + t) * layers + z) * rows + y) * columns
                    if 0 <= a < depth and 0 <= b < height:
                        fill(out, to, first, 0)
                        move(out, to + first, x, ((n * depth + a) * height + b) * width + first + c, last - first)
                        fill(out, to + last, columns - last, 0)
                    else:
                        fill(out, to, columns, 0)


@jit.loops("out")
def _sums(out: Any, x: Any, table: Any, weights: Any, shape: Any, lengths: Any) -> None:
    examples, layers, rows, columns = shape
    planes, depth, height, width = lengths
    channels, taps = weights.shape
    factors, offsets, shifts = np.empty(taps, x.dtype), np.empty(taps, np.int64), np.empty(taps, np.int64)
    low_z, high_z, low_y, high_y = 0, 0, 0, 0
    for t in range(taps):
        low_z, high_z = min(low_z, table[t, 1]), max(high_z, table[t, 1])
        low_y, high_y = min(low_y, table[t, 2]), max(high_y, table[t, 2])
    fetched, size = 0, x.itemsize
    for n in range(examples):
        channel = n % channels
        start = n * planes * depth * height * width
        all_inside, count, last_offset, first, last = False, 0, 0, 0, columns
        for z in range(layers):
            for y in range(rows):
                to = ((n * layers + z) * rows + y) * columns
                base = start + (z * height + y) * width
                rows_inside = z + low_z >= 0 and z + high_z < depth and y + low_y >= 0 and y + high_y < height
                if not (rows_inside and all_inside):
                    # The taps whose row lies inside, and the columns where all of these lie inside.
                    count, last_offset, first, last = 0, 0, 0, columns
                    for t in range(taps):
                        a, b, c = table[t, 1], table[t, 2], table[t, 3]
                        if 0 <= z + a < depth and 0 <= y + b < height:
                            offset = ((table[t, 0] * depth + a) * height + b) * width + c
                            factors[count], offsets[count], shifts[count] = weights[channel, t], offset, c
                            last_offset = max(last_offset, offset)
                            first, last = max(first, -c), min(last, width - c)
                            count += 1
                    all_inside = count == taps
                    if last <= first:
                        first = last = columns
                if planes == 1:
                    fetched = fetch(x, fetched, base + last_offset + columns, size)
                combine(out, to + first, last - first, x, base + first, offsets, 0, factors, 0, count)
                for j in range(columns):
                    if j == first:
                        break
                    out[to + j] = _one(x, base, j, width, factors, offsets, shifts, count)
                for j in range(last, columns):
                    out[to + j] = _one(x, base, j, width, factors, offsets, shifts, count)


@jit.helper
def _one(x, base, j, width, factors, offsets, shifts, count):
    """One entry, near an end of a row."""
    total = x.dtype.type(0)
    for t in range(count):
        if 0 <= j + shifts[t] < width:
            total += factors[t] * x[base + j + offsets[t]]
    return total


@jit.loops("total", fastmath=("contract", "reassoc"))
def _products(total: Any, g: Any, x: Any, table: Any, shape: Any, lengths: Any) -> None:
    examples, layers, rows, columns = shape
    planes, depth, height, width = lengths
    fetched_g, fetched_x, size = 0, 0, x.itemsize
    for n in range(examples):
        channel = n % total.shape[0]
        base = n * planes * depth * height * width
        for z in range(layers):
            for y in range(rows):
                to = ((n * layers + z) * rows + y) * columns
                fetched_g = fetch(g, fetched_g, to + columns, size)
                fetched_x = fetch(x, fetched_x, base + (z * height + y) * width + columns, size)
                for t in range(table.shape[0]):
                    a, b, c = table[t, 1], table[t, 2], table[t, 3]
                    if 0 <= z + a < depth and 0 <= y + b < height:
                        row = base + ((table[t, 0] * depth + z + a) * height + y + b) * width
                        end = min(columns, width - c)
                        for begin in range(max(0, -c), end, STRETCH):
                            u, v = np.uint64(to + begin), np.uint64(row + begin + c)
                            partial = g.dtype.type(0)
                            for j in range(min(STRETCH, end - begin)):
                                partial += g[u + np.uint64(j)] * x[v + np.uint64(j)]
                            total[channel, t] += partial
