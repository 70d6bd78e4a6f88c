"""Convolution and its adjoints: matrix products over the inputs of each output, by cuBLAS; direct sums where an output
has few terms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import cupy as cp
import numpy as np

from spmd.kernels.gpu.source import COMPLEX, FLOATING, REAL, Kernel, blocks_for, over
from spmd.kernels.windows import output_length

Pair = tuple[int, int]
Shape = tuple[int, ...]

_im2col, _col2im = (Kernel("convolution", name, over((*FLOATING, *COMPLEX))) for name in ("im2col", "col2im"))
_conv, _conv_input_adjoint, _conv_weight_adjoint = (
    Kernel("convolution", name, over(FLOATING)) for name in ("conv", "conv_input_adjoint", "conv_weight_adjoint")
)

_THREADS = 256

_DIRECT_MAX = 64
"""Terms of an output up to which the sum is direct: to gather them would move as much as it saves."""

_COLUMN_BYTES = 256 << 20
"""Bytes for the gathered inputs of some examples."""


def im2col(x: Any, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape) -> Any:
    """The inputs of each output: x (N, C, *n) -> (N, C, *k, *m)."""
    x = cp.ascontiguousarray(x)
    m = _outputs(x.shape[2:], kernel, stride, padding, dilation)
    cols = cp.empty((*x.shape[:2], *kernel, *m), x.dtype)
    geometry = _geometry(x.shape[2:], m, kernel, stride, padding, dilation)
    _launch(_im2col, cols, x, cols.size, x.shape[0] * x.shape[1], geometry)
    return cols


def col2im(cols: Any, shape: Shape, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape) -> Any:
    """Add the inputs of each output where they were read: cols (N, C, *k, *m) -> (N, C, *shape)."""
    cols = cp.ascontiguousarray(cols)
    x = cp.empty((*cols.shape[:2], *shape), cols.dtype)
    geometry = _geometry(shape, cols.shape[2 + len(kernel) :], kernel, stride, padding, dilation)
    _launch(_col2im, x, cols, x.size, x.shape[0] * x.shape[1], geometry)
    return x


def conv(x: Any, w: Any, stride: Shape, padding: Sequence[Pair], dilation: Shape, groups: int) -> Any:
    """x (N, C, *n), w (O, C / groups, *k) -> (N, O, *m)."""
    x, w = _contiguous(x, w)
    kernel = w.shape[2:]
    m = _outputs(x.shape[2:], kernel, stride, padding, dilation)
    out = cp.empty((x.shape[0], w.shape[0], *m), x.dtype)
    terms = math.prod(w.shape[1:])
    if 0 in out.shape or 0 in x.shape or terms == 0:
        out[...] = 0
    elif terms <= _DIRECT_MAX and x.dtype.kind != "c":
        geometry = _geometry(x.shape[2:], m, kernel, stride, padding, dilation)
        _direct(_conv, out, (x, w), w.shape, groups, geometry, blocks_for(out.size, _THREADS))
    else:
        filters = _wide(w).reshape(groups, w.shape[0] // groups, terms)
        for part, examples in _column_pieces(x, kernel, stride, padding, dilation, groups):
            products: Any = cp.matmul(filters, part)
            out[examples] = products.reshape(-1, w.shape[0], *m)
    return out


def conv_input_adjoint(
    g: Any, w: Any, shape: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape, groups: int
) -> Any:
    """g (N, O, *m), w -> (N, C, *shape)."""
    g, w = _contiguous(g, w)
    kernel, m = w.shape[2:], g.shape[2:]
    out = cp.empty((g.shape[0], groups * w.shape[1], *shape), g.dtype)
    filters, terms = w.shape[0] // max(1, groups), math.prod(w.shape[1:])
    if 0 in g.shape or 0 in out.shape or terms == 0:
        out[...] = 0
    elif filters * math.prod(kernel) <= _DIRECT_MAX and g.dtype.kind != "c":
        geometry = _geometry(shape, m, kernel, stride, padding, dilation)
        _direct(_conv_input_adjoint, out, (g, w), w.shape, groups, geometry, blocks_for(out.size, _THREADS))
    else:
        transposed = _wide(w).reshape(groups, filters, terms).swapaxes(1, 2)
        step = max(1, _COLUMN_BYTES // (groups * terms * math.prod(m) * 8))
        for start in range(0, g.shape[0], step):
            part = _wide(g[start : start + step]).reshape(-1, groups, filters, math.prod(m))
            products: Any = cp.matmul(transposed, part)
            cols = products.reshape(-1, groups * w.shape[1], *kernel, *m)
            out[start : start + step] = col2im(cols, shape, kernel, stride, padding, dilation)
    return out


def conv_weight_adjoint(
    g: Any, x: Any, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape, groups: int
) -> Any:
    """g (N, O, *m), x (N, C, *n) -> (O, C / groups, *kernel)."""
    g, x = _contiguous(g, x)
    m, filters, channels = g.shape[2:], g.shape[1] // groups, x.shape[1] // groups
    out = cp.empty((g.shape[1], channels, *kernel), g.dtype)
    if 0 in g.shape or 0 in x.shape or 0 in out.shape:
        out[...] = 0
    elif channels * math.prod(kernel) <= _DIRECT_MAX and filters == 1 and x.dtype.kind != "c":
        geometry = _geometry(x.shape[2:], m, kernel, stride, padding, dilation)
        _direct(_conv_weight_adjoint, out, (g, x), out.shape, groups, geometry, min(out.size, 1 << 16))
    else:
        sums: Any = 0
        for part, examples in _column_pieces(x, kernel, stride, padding, dilation, groups):
            wide_g = _wide(g[examples]).reshape(-1, groups, filters, math.prod(m))
            sums = sums + cp.sum(cp.matmul(wide_g, part.swapaxes(2, 3)), axis=0)
        out[...] = sums.reshape(out.shape)
    return out


def _outputs(shape: Shape, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape) -> Shape:
    return tuple(map(output_length, shape, kernel, stride, padding, dilation))


def _contiguous(a: Any, b: Any) -> tuple[Any, Any]:
    """Both contiguous, of one dtype."""
    dtype = cp.result_type(a, b)
    return cp.ascontiguousarray(a, dtype), cp.ascontiguousarray(b, dtype)


def _wide(x: Any) -> Any:
    """x, as float32 where its dtype is short: the dtype in which products are summed."""
    return x if x.dtype.name in (*REAL, *COMPLEX) else x.astype(np.float32)


def _column_pieces(
    x: Any, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape, groups: int
) -> Iterator[tuple[Any, slice]]:
    """The inputs of the outputs of some examples at a time, (examples, groups, terms, places), and the slice of
    these."""
    m = _outputs(x.shape[2:], kernel, stride, padding, dilation)
    terms, places = x.shape[1] // groups * math.prod(kernel), math.prod(m)
    step = max(1, _COLUMN_BYTES // (groups * terms * places * 8))
    for start in range(0, x.shape[0], step):
        examples = slice(start, start + step)
        cols = im2col(_wide(x[examples]), kernel, stride, padding, dilation)
        yield cols.reshape(-1, groups, terms, places), examples


def _geometry(
    shape: Shape, m: Shape, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape
) -> tuple[int, ...]:
    """The parameters of the sources' Geometry: lengths, outputs, kernel, stride, low padding, dilation; three each."""
    rows = (shape, m, kernel, stride, tuple(low for low, _ in padding), dilation)
    padded_rows = [(*(fill,) * (3 - len(row)), *row) for row, fill in zip(rows, (1, 1, 1, 1, 0, 1), strict=True)]
    return tuple(int(n) for row in padded_rows for n in row)


def _launch(kernel: Kernel, out: Any, source: Any, count: int, planes: int, geometry: tuple[int, ...]) -> None:
    if count:
        args = (out, source, planes, *geometry)
        kernel(out.dtype, grid=blocks_for(count, _THREADS), block=_THREADS, args=args)


def _direct(
    kernel: Kernel,
    out: Any,
    operands: tuple[Any, Any],
    weight_shape: Shape,
    groups: int,
    geometry: tuple[int, ...],
    blocks: int,
) -> None:
    """Launch a direct sum. weight_shape: (O, C / groups, *k)."""
    args = (out, *operands, operands[0].shape[0], groups, weight_shape[0] // groups, weight_shape[1], *geometry)
    kernel(out.dtype, grid=blocks, block=_THREADS, args=args)
