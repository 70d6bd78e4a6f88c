"""Convolution as networks call it (a correlation), over one to three spatial dimensions, and its two adjoints.

    x (N, C, *n), w (O, C / groups, *k) -> y (N, O, *m),    m = 1 + (n + low + high - 1 - dilation (k - 1)) // stride

stride, dilation: an int per spatial dimension. padding: (low, high) zeros per dimension; negative ones crop. The
filters of each of `groups` read the channels of that group. `conv` is linear in x and in w, and its adjoints satisfy

    sum(conv(x, w) * g) = sum(x * conv_input_adjoint(g, w, n)) = sum(w * conv_weight_adjoint(g, x, k))
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from spmd.kernels.windows import output_length


def _outputs(shape, kernel, stride, padding, dilation):
    return tuple(map(output_length, shape, kernel, stride, padding, dilation))


def _taps(shape, kernel, stride, padding, dilation):
    """For each entry of the kernel: its index, the slices of a padded x that it reads, and the shape of the outputs."""
    out = _outputs(shape, kernel, stride, padding, dilation)
    for tap in itertools.product(*map(range, kernel)):
        starts = [t * d - min(0, low) for t, d, (low, _) in zip(tap, dilation, padding, strict=True)]
        yield tap, tuple(slice(a, a + s * (m - 1) + 1, s) for a, s, m in zip(starts, stride, out, strict=True)), out


def _padded(x, padding):
    """x with zeros around it; negative paddings are ignored here."""
    return np.pad(x, [(0, 0)] * (x.ndim - len(padding)) + [(max(0, low), max(0, high)) for low, high in padding])


def im2col(x, kernel, stride, padding, dilation):
    """The inputs of each output: x (N, C, *n) -> (N, C, *k, *m). Adjoint: col2im."""
    wide = _padded(x, padding)
    out = _outputs(x.shape[2:], kernel, stride, padding, dilation)
    cols = np.zeros((*x.shape[:2], *kernel, *out), x.dtype)
    for tap, places, m in _taps(x.shape[2:], kernel, stride, padding, dilation):
        if 0 not in m:
            cols[(slice(None), slice(None), *tap)] = wide[(slice(None), slice(None), *places)]
    return cols


def col2im(cols, shape, kernel, stride, padding, dilation):
    """Add the inputs of each output where they were read: cols (N, C, *k, *m) -> (N, C, *shape)."""
    wide = _padded(np.zeros((*cols.shape[:2], *shape), cols.dtype), padding)
    for tap, places, m in _taps(shape, kernel, stride, padding, dilation):
        if 0 not in m:
            wide[(slice(None), slice(None), *places)] += cols[(slice(None), slice(None), *tap)]
    inner = (slice(max(0, low), max(0, low) + n) for n, (low, _) in zip(shape, padding, strict=True))
    return wide[(slice(None), slice(None), *inner)]


def conv(x, w, stride, padding, dilation, groups):
    """The sum over the channels and the entries of the kernel."""
    cols = im2col(x, w.shape[2:], stride, padding, dilation)
    m = cols.shape[w.ndim :]
    terms = math.prod(w.shape[1:])
    cols = cols.reshape(x.shape[0], groups, terms, *m)
    filters = w.reshape(groups, w.shape[0] // groups, terms)
    return np.einsum("ngc...,goc->ngo...", cols, filters).reshape(x.shape[0], w.shape[0], *m)


def conv_input_adjoint(g, w, shape, stride, padding, dilation, groups):
    """The adjoint in x: g (N, O, *m), w -> (N, C, *shape). Networks call it the transposed convolution."""
    filters = w.reshape(groups, w.shape[0] // groups, math.prod(w.shape[1:]))
    split = g.reshape(g.shape[0], groups, w.shape[0] // groups, *g.shape[2:])
    cols = np.einsum("ngo...,goc->ngc...", split, filters)
    cols = cols.reshape(g.shape[0], groups * w.shape[1], *w.shape[2:], *g.shape[2:])
    return col2im(cols, shape, w.shape[2:], stride, padding, dilation)


def conv_weight_adjoint(g, x, kernel, stride, padding, dilation, groups):
    """The adjoint in w: g (N, O, *m), x -> (O, C / groups, *kernel)."""
    cols = im2col(x, kernel, stride, padding, dilation)
    cols = cols.reshape(x.shape[0], groups, x.shape[1] // groups, math.prod(kernel), math.prod(g.shape[2:]))
    split = g.reshape(g.shape[0], groups, g.shape[1] // groups, math.prod(g.shape[2:]))
    return np.einsum("ngop,ngckp->gock", split, cols).reshape(g.shape[1], x.shape[1] // groups, *kernel)
