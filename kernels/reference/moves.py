"""Sums of blocks, and parts written into boxes of an array.

A box is (start, stop) for each dimension.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

_FOLDS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def combine(blocks, how="sum", into=None):
    """((b0 + b1) + b2) + ...: the entrywise sum (max, min) of blocks of one shape and dtype, in this order.

    into: the first or the second of several blocks, C-contiguous, that the result may overwrite.
    """
    return reduce(lambda a, b: _FOLDS[how](a, b, dtype=a.dtype), blocks)


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
