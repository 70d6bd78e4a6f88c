"""What loops do with whole rows of flat arrays: neighbours in memory, so that compilers make vectors of them.
`spmd.kernels.cpu.vectors.combine` adds rows up.

Helpers go from given places on: a view of a row costs more than a short loop. Places are unsigned, so that they are not
looked at for being negative; only then the compiler makes vectors.
"""

from __future__ import annotations

import numpy as np

from spmd.kernels import jit

__all__ = ["deal", "fill", "move", "scale", "undeal"]


@jit.helper
def fill(out, start, n, value):
    """out[start:start + n] = value."""
    start = np.uint64(start)
    for k in range(n):
        out[start + np.uint64(k)] = value


@jit.helper
def move(out, to, row, start, n):
    """out[to:to + n] = row[start:start + n]."""
    to, start = np.uint64(to), np.uint64(start)
    for k in range(n):
        out[to + np.uint64(k)] = row[start + np.uint64(k)]


@jit.helper
def scale(out, start, n, factors):
    """out[start:start + n] *= factors."""
    start = np.uint64(start)
    for k in range(n):
        out[start + np.uint64(k)] *= factors[np.uint64(k)]


# A row that is read in strides is first dealt out: entry q * stride + c goes to place c * width + q, where
# width = n // stride + 1. Then what strides pass over lies together.


@jit.helper
def deal(phases, row, start, n, stride):
    """phases[c * width + q] = row[start + q * stride + c] for the n entries of a row."""
    start = np.uint64(start)
    width = np.uint64(n // stride + 1)
    if stride == 2:
        for k in range(n // 2):
            q = np.uint64(k)
            phases[q] = row[start + q * np.uint64(2)]
            phases[width + q] = row[start + q * np.uint64(2) + np.uint64(1)]
        if n % 2:
            phases[np.uint64(n // 2)] = row[start + np.uint64(n - 1)]
    else:
        for c in range(stride):
            for q in range((n - c + stride - 1) // stride):
                phases[np.uint64(c) * width + np.uint64(q)] = row[start + np.uint64(q * stride + c)]


@jit.helper
def undeal(row, start, phases, n, stride):
    """row[start + q * stride + c] = phases[c * width + q]."""
    start = np.uint64(start)
    width = np.uint64(n // stride + 1)
    if stride == 2:
        for k in range(n // 2):
            q = np.uint64(k)
            row[start + q * np.uint64(2)] = phases[q]
            row[start + q * np.uint64(2) + np.uint64(1)] = phases[width + q]
        if n % 2:
            row[start + np.uint64(n - 1)] = phases[np.uint64(n // 2)]
    else:
        for c in range(stride):
            for q in range((n - c + stride - 1) // stride):
                row[start + np.uint64(q * stride + c)] = phases[np.uint64(c) * width + np.uint64(q)]
