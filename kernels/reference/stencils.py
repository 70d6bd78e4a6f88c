"""Stencils: each entry of the result is a weighted sum of entries of x at fixed offsets from it.

x (..., *n): the last dimensions are those of the offsets. x is padded by zeros, `padding` (low, high) in each of them.
The result has an entry wherever all offsets stay inside, so padding as wide as the offsets reach keeps n.
"""

from __future__ import annotations

import numpy as np

from spmd.kernels.windows import reach


def _shifted(x, offsets, padding):
    """For each offset, the entries of x that the result reads there."""
    dims = len(padding)
    ends = reach(offsets)
    wide = np.pad(x, [(0, 0)] * (x.ndim - dims) + list(padding))
    lengths = [n - low - high for n, (low, high) in zip(wide.shape[x.ndim - dims :], ends, strict=True)]
    for offset in offsets:
        starts = [low + o for (low, _), o in zip(ends, offset, strict=True)]
        yield wide[(..., *(slice(a, a + max(0, m)) for a, m in zip(starts, lengths, strict=True)))]


def stencil(x, offsets, weights, padding, loose=()):
    """y[i] = sum over k of weights[k] * x[i + offsets[k]].

    loose: dimensions of the offsets at whose ends entries that read padding are arbitrary: nobody reads them.
    Linear in x. Adjoint: the stencil of the negated offsets, with the padding that restores n.
    """
    return sum(
        np.asarray(w).astype(x.dtype) * part for w, part in zip(weights, _shifted(x, offsets, padding), strict=True)
    )


def stencil_weights(g, x, offsets, padding):
    """The adjoint in the weights: for each offset the sum over i of g[i] * x[i + offset]. At least float32."""
    return np.array([np.sum(g * part) for part in _shifted(x, offsets, padding)]).astype(np.result_type(g, x))
