"""Kernels written once over the array module; `cpu` and `gpu` bind it."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["combine", "log_softmax"]

_FOLDS = {"sum": "add", "max": "maximum", "min": "minimum"}


def combine(xp: ModuleType, blocks: Sequence[Any], how: str = "sum"):
    """((b0 + b1) + b2) + ...: the entrywise sum (max, min) of equal blocks, in this order whatever the engine.

    blocks: at least one array, all of one shape and dtype. Gives a new array, or the only block itself.
    """
    fold = getattr(xp, _FOLDS[how])
    if len(blocks) == 1:
        return blocks[0]
    total = xp.asarray(fold(blocks[0], blocks[1], dtype=blocks[0].dtype))
    for block in blocks[2:]:
        fold(total, block, out=total)
    return total


def log_softmax(xp: ModuleType, x):
    """x - log(sum(exp(x))) along the last axis, without overflow. x: (..., classes)."""
    shifted = x - xp.max(x, axis=-1, keepdims=True, initial=-xp.inf)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))
