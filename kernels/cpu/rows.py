"""Operations on rows of flat arrays, for loops: neighbours in memory, so that the compiler vectorises them.
`spmd.kernels.cpu.vectors.combine` sums rows.

Rows are given by their first index, for a view of a row costs more than a short loop. Indices are unsigned, so that
they need no check for negative ones; only then does the compiler vectorise.
"""

from __future__ import annotations

import numpy as np

from spmd.kernels import jit

__all__ = ["fill", "join_phases", "move", "scale", "split_phases"]


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


# A row that is read in strides is first split into its phases: entry q * stride + c goes to index c * width + q, where
# width = n // stride + 1. Then the entries of a phase are neighbours.


@jit.helper
def split_phases(phases, row, start, n, stride):
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
def join_phases(row, start, phases, n, stride):
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
