"""Sums of blocks, and parts written into boxes of an array.

A box is (start, stop) for each dimension.
"""

from __future__ import annotations

import numpy as np

from spmd.kernels.cpu.chunks import accurate
from spmd.kernels.pairwise import pairs

_FOLDS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def combine(blocks, how="sum", into=None):
    """The entrywise sum (max, min) of blocks of one shape and dtype, in the order of `pairs`. Short floating-point
    numbers are added in float32, and the sum is rounded once.

    into: a C-contiguous array that the result may overwrite: any of several blocks, or another one.
    """
    fold, dtype = _FOLDS[how], blocks[0].dtype
    sums = [b.astype(accurate(dtype) if how == "sum" else dtype) for b in blocks]
    for i, j in pairs(len(blocks)):
        sums[i] = fold(sums[i], sums[j])
    return np.asarray(sums[0], dtype)


def _within(box):
    return tuple(slice(start, stop) for start, stop in box)


def unpack(shape, boxes, parts):
    """An array with each part in its box, and zeros elsewhere; where boxes overlap the last part counts."""
    out = np.zeros(shape, parts[0].dtype)
    for box, part in zip(boxes, parts, strict=True):
        out[_within(box)] = part
    return out


def add_boxes(shape, boxes, parts):
    """An array of zeros to which each part is added in its box, in order. Adjoint: taking the boxes."""
    out = np.zeros(shape, parts[0].dtype)
    for box, part in zip(boxes, parts, strict=True):
        out[_within(box)] += part
    return out
