"""Convolution and its adjoints: products of matrices of what each output sees, by cuBLAS; direct sums where few terms
make an output."""

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

_FEW = 64
"""Terms of an output up to which the direct sum is taken: gathering them would move as much as it saves."""

_BYTES = 256 << 20
"""Memory for what the outputs of some examples see."""


def im2col(x: Any, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape) -> Any:
    """What each output sees: x (N, C, *n) -> (N, C, *k, *m)."""
    x = cp.ascontiguousarray(x)
    m = _outputs(x.shape[2:], kernel, stride, padding, dilation)
    cols = cp.empty((*x.shape[:2], *kernel, *m), x.dtype)
    geometry = _geometry(x.shape[2:], m, kernel, stride, padding, dilation)
    _launch(_im2col, cols, x, cols.size, x.shape[0] * x.shape[1], geometry)
    return cols


def col2im(cols: Any, shape: Shape, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape) -> Any:
    """Adds what each output saw where it came from: cols (N, C, *k, *m) -> (N, C, *shape)."""
    cols = cp.ascontiguousarray(cols)
    x = cp.empty((*cols.shape[:2], *shape), cols.dtype)
    geometry = _geometry(shape, cols.shape[2 + len(kernel) :], kernel, stride, padding, dilation)
    _launch(_col2im, x, cols, x.size, x.shape[0] * x.shape[1], geometry)
    return x


def conv(x: Any, w: Any, stride: Shape, padding: Sequence[Pair], dilation: Shape, groups: int) -> Any:
    """x (N, C, *n), w (O, C / groups, *k) -> (N, O, *m)."""
    x, w = _alike(x, w)
    kernel = w.shape[2:]
    m = _outputs(x.shape[2:], kernel, stride, padding, dilation)
    out = cp.empty((x.shape[0], w.shape[0], *m), x.dtype)
    seen = math.prod(w.shape[1:])
    if 0 in out.shape or 0 in x.shape or seen == 0:
        out[...] = 0
    elif seen <= _FEW and x.dtype.kind != "c":
        geometry = _geometry(x.shape[2:], m, kernel, stride, padding, dilation)
        _direct(_conv, out, (x, w), w.shape, groups, geometry, blocks_for(out.size, _THREADS))
    else:
        filters = _wide(w).reshape(groups, w.shape[0] // groups, seen)
        for part, of in _examples(x, kernel, stride, padding, dilation, groups):
            products: Any = cp.matmul(filters, part)
            out[of] = products.reshape(-1, w.shape[0], *m)
    return out


def conv_input_adjoint(
    g: Any, w: Any, shape: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape, groups: int
) -> Any:
    """g (N, O, *m), w -> (N, C, *shape)."""
    g, w = _alike(g, w)
    kernel, m = w.shape[2:], g.shape[2:]
    out = cp.empty((g.shape[0], groups * w.shape[1], *shape), g.dtype)
    filters, seen = w.shape[0] // max(1, groups), math.prod(w.shape[1:])
    if 0 in g.shape or 0 in out.shape or seen == 0:
        out[...] = 0
    elif filters * math.prod(kernel) <= _FEW and g.dtype.kind != "c":
        geometry = _geometry(shape, m, kernel, stride, padding, dilation)
        _direct(_conv_input_adjoint, out, (g, w), w.shape, groups, geometry, blocks_for(out.size, _THREADS))
    else:
        transposed = _wide(w).reshape(groups, filters, seen).swapaxes(1, 2)
        step = max(1, _BYTES // (groups * seen * math.prod(m) * 8))
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
    g, x = _alike(g, x)
    m, filters, channels = g.shape[2:], g.shape[1] // groups, x.shape[1] // groups
    out = cp.empty((g.shape[1], channels, *kernel), g.dtype)
    if 0 in g.shape or 0 in x.shape or 0 in out.shape:
        out[...] = 0
    elif channels * math.prod(kernel) <= _FEW and filters == 1 and x.dtype.kind != "c":
        geometry = _geometry(x.shape[2:], m, kernel, stride, padding, dilation)
        _direct(_conv_weight_adjoint, out, (g, x), out.shape, groups, geometry, min(out.size, 1 << 16))
    else:
        total: Any = 0
        for part, of in _examples(x, kernel, stride, padding, dilation, groups):
            some = _wide(g[of]).reshape(-1, groups, filters, math.prod(m))
            total = total + cp.sum(cp.matmul(some, part.swapaxes(2, 3)), axis=0)
        out[...] = total.reshape(out.shape)
    return out


def _outputs(shape: Shape, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape) -> Shape:
    return tuple(map(output_length, shape, kernel, stride, padding, dilation))


def _alike(a: Any, b: Any) -> tuple[Any, Any]:
    """Both contiguous, of one dtype."""
    dtype = cp.result_type(a, b)
    return cp.ascontiguousarray(a, dtype), cp.ascontiguousarray(b, dtype)


def _wide(x: Any) -> Any:
    """Short numbers as float32, in which products of them are added up."""
    return x if x.dtype.name in (*REAL, *COMPLEX) else x.astype(np.float32)


def _examples(
    x: Any, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape, groups: int
) -> Iterator[tuple[Any, slice]]:
    """What the outputs of some examples at a time see: (examples, groups, terms, places), and which they are."""
    m = _outputs(x.shape[2:], kernel, stride, padding, dilation)
    terms, places = x.shape[1] // groups * math.prod(kernel), math.prod(m)
    step = max(1, _BYTES // (groups * terms * places * 8))
    for start in range(0, x.shape[0], step):
        of = slice(start, start + step)
        cols = im2col(_wide(x[of]), kernel, stride, padding, dilation)
        yield cols.reshape(-1, groups, terms, places), of


def _geometry(
    shape: Shape, m: Shape, kernel: Shape, stride: Shape, padding: Sequence[Pair], dilation: Shape
) -> tuple[int, ...]:
    """The parameters of the sources' Geometry: lengths, outputs, kernel, stride, low padding, dilation; three each."""
    rows = (shape, m, kernel, stride, tuple(low for low, _ in padding), dilation)
    full = [(*(fill,) * (3 - len(row)), *row) for row, fill in zip(rows, (1, 1, 1, 1, 0, 1), strict=True)]
    return tuple(int(n) for row in full for n in row)


def _launch(kernel: Kernel, out: Any, source: Any, count: int, planes: int, geometry: tuple[int, ...]) -> None:
    if count:
        args = (out, source, planes, *geometry)
        kernel(out.dtype, grid=blocks_for(count, _THREADS), block=_THREADS, args=args)


def _direct(
    kernel: Kernel, out: Any, given: tuple[Any, Any], w: Shape, groups: int, geometry: tuple[int, ...], blocks: int
) -> None:
    """Launch a direct sum; w: the shape of the weights, (O, C / groups, *k)."""
    args = (out, *given, given[0].shape[0], groups, w[0] // groups, w[1], *geometry)
    kernel(out.dtype, grid=blocks, block=_THREADS, args=args)
