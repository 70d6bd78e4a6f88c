"""Pooling: the largest entry, or the mean, of every window. x: (N, C, *spatial).

window, stride, dilation: a tuple of ints, one for each spatial dimension; padding: of pairs (low, high), not negative.
ceil_mode: a last partial window has an output too (`spmd.kernels.windows.output_length`).
"""

from __future__ import annotations

import numpy as np

from spmd.kernels.windows import windows


def max_pool(x, window, stride, padding, dilation, ceil_mode=False):
    """The largest entry of every window, and its index among the spatial entries of x, in row-major order.

    The first of equal entries counts, in row-major order; the first NaN counts before all; padding never counts. A
    window of padding alone has the lowest number of the dtype (-inf), and the index -1.
    """
    geometry = windows(x.shape[2:], window, stride, padding, dilation, ceil_mode)
    indices = _windows(np.arange(np.prod(x.shape[2:], dtype=int)).reshape(1, 1, *x.shape[2:]), geometry, -1)
    lowest = -np.inf if x.dtype.kind != "i" else np.iinfo(x.dtype).min
    entries = _windows(x, geometry, lowest)
    top = np.max(entries, axis=-1, keepdims=True, initial=lowest)
    is_largest = (indices >= 0) & ((entries == top) | (entries != entries))
    index = np.take_along_axis(np.where(is_largest, indices, -1), np.argmax(is_largest, axis=-1)[..., None], axis=-1)
    return top[..., 0], index[..., 0]


def max_pool_gather(x, index):
    """The entries of x: (N, C, *spatial) at index: (N, C, *outputs), as max_pool gives it; 0 where it is -1.

    Linear in x; its adjoint is max_pool_vjp.
    """
    flat, at = (a.reshape(*a.shape[:2], np.prod(a.shape[2:], dtype=int)) for a in (x, index))
    flat = np.concatenate([flat, np.zeros_like(flat, shape=(*x.shape[:2], 1))], axis=2)
    return np.take_along_axis(flat, at, axis=2).reshape(index.shape)


def max_pool_vjp(g, index, shape, window, stride, padding, dilation):
    """The cotangent of x: (N, C, *shape), given that of max_pool(x): g is added to the largest entries.

    Linear in g; its adjoint is max_pool_gather.
    """
    out = np.zeros_like(g, shape=(*g.shape[:2], int(np.prod(shape)) + 1))
    n, c = np.indices(g.shape)[:2]
    np.add.at(out, (n, c, index), g)  # the index -1 is the last entry, which is dropped
    return out[..., :-1].reshape(*g.shape[:2], *shape)


def avg_pool(x, window, stride, padding, dilation, ceil_mode=False, count_include_pad=True):
    """The mean of every window. Padding counts as zeros, or not at all (count_include_pad=False).

    Entries beyond the padding, which ceil_mode may read, do not count; the mean of none is 0. Linear; its adjoint is
    avg_pool_vjp.
    """
    geometry = windows(x.shape[2:], window, stride, padding, dilation, ceil_mode)
    return np.sum(_windows(x, geometry, 0), axis=-1) * _shares(geometry, count_include_pad).astype(x.real.dtype)


def avg_pool_vjp(g, shape, window, stride, padding, dilation, ceil_mode=False, count_include_pad=True):
    """The cotangent of x: (N, C, *shape), given that of avg_pool(x): each entry of g is spread evenly over its window.

    Linear; its adjoint is avg_pool.
    """
    geometry = windows(shape, window, stride, padding, dilation, ceil_mode)
    share = g * _shares(geometry, count_include_pad).astype(g.real.dtype)
    out = np.zeros_like(g, shape=(*g.shape[:2], *(w.low + w.n + w.high for w in geometry)))
    for taps in np.ndindex(*window):
        starts = [j * w.dilation for j, w in zip(taps, geometry, strict=True)]
        reads = (slice(a, a + w.m * w.stride, w.stride) for a, w in zip(starts, geometry, strict=True))
        view = out[(..., *reads)]
        view += share[(..., *map(slice, view.shape[2:]))]
    return out[(..., *(slice(w.low, w.low + w.n) for w in geometry))]


def _windows(x, geometry, fill):
    """The entries of every window, on a new last axis."""
    x = np.pad(x, [(0, 0), (0, 0), *((w.low, w.high) for w in geometry)], constant_values=fill)
    for axis, w in enumerate(geometry, 2):
        reads = np.arange(w.m)[:, None] * w.stride + np.arange(w.kernel) * w.dilation
        x = np.moveaxis(np.take(x, reads, axis=axis), axis + 1, -1)
    return x.reshape(*x.shape[: 2 + len(geometry)], np.prod([w.kernel for w in geometry]))


def _shares(geometry, count_include_pad):
    """1 / the number of entries of every window that count."""
    shares = np.ones(())
    for w in geometry:
        shares = shares[..., None] / np.maximum(w.counts(count_include_pad), 1)
    return shares
