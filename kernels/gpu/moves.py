"""Blocks that are put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy as cp

__all__ = ["combine"]

_FOLDS = {"sum": cp.add, "max": cp.maximum, "min": cp.minimum}


def combine(blocks: Sequence[Any], how: str = "sum") -> Any:
    """The entrywise sum (max, min) of at least one block, in order. Gives a new array, or the only block itself."""
    fold = _FOLDS[how]
    if len(blocks) == 1:
        return blocks[0]
    total = fold(blocks[0], blocks[1], dtype=blocks[0].dtype)
    for block in blocks[2:]:
        fold(total, block, out=total)
    return total
