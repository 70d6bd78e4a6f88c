"""Boxes of the index space of an array."""

from __future__ import annotations

import math
from typing import Any

from spmd.layout import Box

__all__ = ["flat_index", "is_within", "slices_within", "volume", "whole_box"]


def whole_box(shape: tuple[int, ...]) -> Box:
    """The box of all entries of an array."""
    return tuple((0, n) for n in shape)


def is_within(box: Box, around: Box) -> bool:
    """Whether a box lies within another one."""
    return all(lo <= a and b <= hi for (a, b), (lo, hi) in zip(box, around, strict=True))


def slices_within(box: Box, around: Box) -> tuple[Any, ...]:
    """The slices of a box in an array that has the entries of a box around it."""
    # The ellipsis keeps an array without dimensions an array.
    return (*(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(box, around, strict=True)), ...)


def flat_index(index: list[int], lengths: tuple[int, ...]) -> int:
    """The place of an entry, last dimension fastest."""
    at = 0
    for k, n in zip(index, lengths, strict=True):
        at = at * n + k
    return at


def volume(box: Box) -> int:
    """The number of entries of a box."""
    return math.prod(stop - start for start, stop in box)
