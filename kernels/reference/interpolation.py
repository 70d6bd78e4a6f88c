"""Interpolation along an axis by given taps, and at arbitrary points. `spmd.kernels.taps` has the weights."""

from __future__ import annotations

import itertools

import numpy as np

from spmd.kernels.taps import continued, nearest_shift, polynomials


def resample(x, index, weight, axis):
    """Along an axis, output o is the sum of weight[o, k] * x[index[o, k]]. index, weight: (outputs, taps).

    Linear in x; its adjoint is resample with the transposed taps (`spmd.kernels.taps.transposed`).
    """
    taps = np.moveaxis(x, axis, -1)[..., index] * weight.astype(x.real.dtype)
    return np.moveaxis(np.sum(taps, axis=-1), -1, axis)


def sample(x, points, method, boundary, orders, cubic=-0.5):
    """x: (C, *spatial) at points: (m, spatial dimensions), in units of its entries. Gives (C, m).

    method: "nearest", "linear", "cubic" (with Keys' parameter `cubic`). boundary: how x continues beyond its ends,
    "zero", "edge", "periodic" or "reflect". orders: of the derivative by each coordinate. A NaN point gives NaN.
    Linear in x; its adjoint is inject.
    """
    out = np.zeros((len(x), len(points)), x.dtype)
    for index, weight, inside in _taps(points, x.shape[1:], method, boundary, orders, cubic):
        out += np.where(inside, weight * x[(slice(None), *index)], 0)
    return out


def inject(g, points, shape, method, boundary, orders, cubic=-0.5):
    """A field (C, *shape) with the values g: (C, m) spread over the entries from which sample would read.

    Linear in g; its adjoint is sample.
    """
    out = np.zeros((len(g), *shape), g.dtype)
    for index, weight, inside in _taps(points, shape, method, boundary, orders, cubic):
        for c in range(len(g)):
            np.add.at(out[c], tuple(index), np.where(inside, weight * g[c], 0))
    return out


def _taps(points, shape, method, boundary, orders, cubic):
    """For each combination of taps: the indices that the points read, the weights, and whether there is an entry."""
    if 0 in shape:
        return
    axes = []
    for p, n, order in zip(points.astype(np.float64).T, shape, orders, strict=True):
        p = p + nearest_shift(method)
        with np.errstate(invalid="ignore"):
            t = p - np.floor(p)
        base = np.clip(np.where(np.isfinite(p), np.floor(p), 0), -(2.0**62), 2.0**62).astype(np.int64)
        rows = polynomials(method, cubic, order)
        weights = [((c[3] * t + c[2]) * t + c[1]) * t + c[0] for c in rows]
        axes.append([(continued(base + k - (len(rows) - 1) // 2, n, boundary), w) for k, w in enumerate(weights)])
    for taps in itertools.product(*axes):
        inside = np.ones(len(points), bool)
        weight = np.ones(len(points))
        for (_, is_entry), w in taps:
            inside, weight = inside & is_entry, weight * w
        yield [index for (index, _), _ in taps], weight, inside
