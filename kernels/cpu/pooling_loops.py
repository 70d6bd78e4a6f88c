"""Loops of `spmd.kernels.cpu.pooling`. A row of `table` is a `Window`: n, m, kernel, stride, dilation, low."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd.kernels import jit
from spmd.kernels.cpu.rows import fill, join_phases, scale, split_phases
from spmd.kernels.cpu.vectors import combine, fetch

__all__ = ["avg_pool_loop", "avg_pool_vjp_loop", "gather_loop", "max_pool_loop", "max_pool_vjp_loop"]


@jit.helper
def _compete(top, index, to, n, row, start, base, stride):
    """Output to + k takes entry start + k of a row, with the index base + k * stride, if it is larger."""
    to, start = np.uint64(to), np.uint64(start)
    for k in range(n):
        o = to + np.uint64(k)
        v, b, i = row[start + np.uint64(k)], top[o], index[o]
        larger = (not (v <= b)) & (b == b) | (i < 0)
        top[o] = v if larger else b
        index[o] = base + k * stride if larger else i


@jit.helper
def _row_max(top, index, to, row, start, base, m, stride, dilation, pair, rest):
    """The largest entries of an input row's windows, and their indices, -1 for windows of padding alone. The row begins
    with row[start], which has the index `base`."""
    first, end, first_index = pair[0], pair[1], base + pair[4]
    a, b, o = np.uint64(start + pair[2]), np.uint64(start + pair[3]), np.uint64(to + first)
    for k in range(end - first):
        u = np.uint64(k)
        v, w = row[a + u], row[b + u]
        larger = (not (w <= v)) & (v == v)
        top[o + u] = w if larger else v
        index[o + u] = first_index + (dilation if larger else 0) + k * stride
    for begin, stop in ((0, first), (end, m)):
        fill(top, to + begin, stop - begin, -np.inf)
        fill(index, to + begin, stop - begin, -1)
    for j in range(rest.shape[0]):
        _compete(top, index, to + rest[j, 0], rest[j, 1], row, start + rest[j, 2], base + rest[j, 3], stride)


@jit.helper
def _larger(top, index, to, n, tops, indices, a, b):
    """The larger of the entries a + k and b + k, with its index; the first one where they are equal."""
    to, a, b = np.uint64(to), np.uint64(a), np.uint64(b)
    for k in range(n):
        u = np.uint64(k)
        v, i, w, j = tops[a + u], indices[a + u], tops[b + u], indices[b + u]
        second_larger = (not (w <= v)) & (v == v) | (i < 0)
        top[to + u] = w if second_larger else v
        index[to + u] = j if second_larger else i


@jit.helper
def _improve(top, index, to, n, tops, indices, b):
    """The larger of output to + k and the entry b + k, likewise. In one function with `_larger` it is slower."""
    to, b = np.uint64(to), np.uint64(b)
    for k in range(n):
        u = np.uint64(k)
        v, i, w, j = top[to + u], index[to + u], tops[b + u], indices[b + u]
        second_larger = (not (w <= v)) & (v == v) | (i < 0)
        top[to + u] = w if second_larger else v
        index[to + u] = j if second_larger else i


@jit.loops("top", "index")
def max_pool_loop(top: Any, index: Any, x: Any, table: Any, planes: int, pair: Any, rest: Any) -> None:
    # First along a row of inputs, then among rows, so that the first of equal entries wins. The maxima of a row stay in
    # a slot while other windows may need them.
    nd, nh, nw = table[0, 0], table[1, 0], table[2, 0]
    md, mh, mw = table[0, 1], table[1, 1], table[2, 1]
    taps, stride, dilation = table[1, 2], table[2, 3], table[2, 4]
    phases = np.empty(stride * (nw // stride + 1), x.dtype)
    slots = min(nh, (taps - 1) * table[1, 4] + 1)
    tops, indices = np.empty(table[0, 2] * slots * mw, top.dtype), np.empty(table[0, 2] * slots * mw, index.dtype)
    row_in_slot = np.empty(table[0, 2] * slots, np.int64)
    fetched, size = 0, x.itemsize
    for p in range(planes):
        row_in_slot[:] = -1
        for od in range(md):
            for oh in range(mh):
                to = ((p * md + od) * mh + oh) * mw
                rows_read, previous = 0, 0
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
                        if row_in_slot[slot] != base:
                            row_in_slot[slot] = base
                            row = p * nd * nh * nw + base
                            fetched = fetch(x, fetched, row + nw, size)
                            if stride > 1:
                                split_phases(phases, x, row, nw, stride)
                                _row_max(tops, indices, at, phases, 0, base, mw, stride, dilation, pair, rest)
                            else:
                                _row_max(tops, indices, at, x, row, base, mw, stride, dilation, pair, rest)
                        rows_read += 1
                        if rows_read == 2:
                            _larger(top, index, to, mw, tops, indices, previous, at)
                        elif rows_read > 2:
                            _improve(top, index, to, mw, tops, indices, at)
                        previous = at
                if rows_read == 0:
                    fill(top, to, mw, -np.inf)
                    fill(index, to, mw, -1)
                elif rows_read == 1:
                    top[to : to + mw] = tops[previous : previous + mw]
                    index[to : to + mw] = indices[previous : previous + mw]


@jit.loops("out")
def gather_loop(out: Any, x: Any, index: Any, n: int, m: int) -> None:
    # The machine does not foresee the indices, but they are about as far along their plane as the outputs.
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
    """The end of the inputs that output o reads; 0 if it reads none."""
    last = o * stride + (kernel - 1) * dilation - low
    while last >= n:
        last -= dilation
    return max(0, last + 1)


@jit.loops("out")
def max_pool_vjp_loop(out: Any, g: Any, index: Any, table: Any) -> None:
    # Entries are zeroed shortly before the first output that may add to them, so that they are in the cache then.
    nd, nh, nw = table[0, 0], table[1, 0], table[2, 0]
    planes, md, mh, mw = g.shape
    for p in range(planes):
        zeroed = 0
        for od in range(md):
            d = _end_of(od, nd, table[0, 2], table[0, 3], table[0, 4], table[0, 5])
            for oh in range(mh):
                h = _end_of(oh, nh, table[1, 2], table[1, 3], table[1, 4], table[1, 5])
                upto = ((d - 1) * nh + h) * nw
                if upto > zeroed:
                    out[p, zeroed:upto] = 0
                    zeroed = upto
                for ow in range(mw):
                    i = index[p, od, oh, ow]
                    if i >= 0:
                        out[p, np.uint64(i)] += g[p, od, oh, ow]
        out[p, zeroed:] = 0


@jit.helper
def _row_sums(out, to, row, sums, adds, ones):
    """Run a plan, see `_plan_arrays`."""
    for j in range(sums.shape[0]):
        combine(out, to + sums[j, 0], sums[j, 1], row, 0, sums, j * sums.shape[1] + 3, ones, 0, sums[j, 2])
    for j in range(adds.shape[0]):
        o, start = np.uint64(to + adds[j, 0]), np.uint64(adds[j, 2])
        for k in range(adds[j, 1]):
            out[o + np.uint64(k)] += row[start + np.uint64(k)]


@jit.loops("out")
def avg_pool_loop(
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
def avg_pool_vjp_loop(
    out: Any, g: Any, table: Any, planes: int, share_d: Any, share_h: Any, share_w: Any, sums: Any, adds: Any
) -> None:
    # A row of inputs is the sum of the rows of outputs that read it, with each output spread over its taps.
    nd, nh, nw = table[0, 0], table[1, 0], table[2, 0]
    md, mh, mw = table[0, 1], table[1, 1], table[2, 1]
    stride = table[2, 3]
    row_sum, phases = np.empty(mw, g.dtype), np.empty(stride * (nw // stride + 1), g.dtype)
    starts = np.empty(table[0, 2] * table[1, 2], np.int64)
    factors, ones = np.empty(starts.size, g.dtype), np.ones(table[2, 2], g.dtype)
    readers_d, readers_h = _readers(table, 0), _readers(table, 1)
    fetched, size = 0, g.itemsize
    for p in range(planes):
        for d in range(nd):
            for h in range(nh):
                count = 0
                for a in range(readers_d[d, 0]):
                    od = readers_d[d, 1 + a]
                    for b in range(readers_h[h, 0]):
                        oh = readers_h[h, 1 + b]
                        starts[count] = ((p * md + od) * mh + oh) * mw
                        factors[count] = share_d[od] * share_h[oh]
                        count += 1
                to = ((p * nd + d) * nh + h) * nw
                if count:
                    fetched = fetch(g, fetched, starts[count - 1] + mw, size)
                combine(row_sum, 0, mw, g, 0, starts, 0, factors, 0, count)
                scale(row_sum, 0, mw, share_w)
                if stride > 1:
                    _row_sums(phases, 0, row_sum, sums, adds, ones)
                    join_phases(out, to, phases, nw, stride)
                else:
                    _row_sums(out, to, row_sum, sums, adds, ones)


@jit.helper
def _readers(table, d):
    """For each input, the number of outputs that read it, and these; the last taps come first."""
    n, m, taps, stride, dilation, low = table[d, 0], table[d, 1], table[d, 2], table[d, 3], table[d, 4], table[d, 5]
    readers = np.zeros((n, 1 + taps), np.int64)
    for j in range(taps - 1, -1, -1):
        for o in range(m):
            i = o * stride + j * dilation - low
            if 0 <= i < n:
                readers[i, 0] += 1
                readers[i, readers[i, 0]] = o
    return readers
