"""Sums of blocks, and parts written into boxes of an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy as cp

from spmd.kernels.cpu.chunks import accurate
from spmd.kernels.gpu.source import COMPLEX, FLOATING, Kernel, blocks_for, over
from spmd.kernels.pairwise import first_half, pairs

_FOLDS = {"sum": cp.add, "max": cp.maximum, "min": cp.minimum}


_add = Kernel("moves", "add", over((*FLOATING, *COMPLEX)))
_BLOCKS_MAX = 8
"""Blocks that a launch adds."""


def combine(blocks: Sequence[Any], how: str = "sum", into: Any = None) -> Any:
    """The entrywise sum (max, min) of at least one block, in the order of `pairs`: a new array, or the only block
    itself.

    into: a C-contiguous array that the result may overwrite: any of several blocks, or another one.
    """
    dtype, fold, n = blocks[0].dtype, _FOLDS[how], len(blocks)
    if n == 1:
        return blocks[0]
    short = accurate(dtype) != dtype
    if how == "sum" and n > 2 and (dtype.name,) in _add.types and not (short and n > _BLOCKS_MAX):
        return _sum([*map(cp.ascontiguousarray, blocks)]).reshape(blocks[0].shape)
    if n == 2 and not short:
        return fold(blocks[0], blocks[1], out=into)
    sums: list[Any] = [*blocks]
    for i, j in pairs(n):
        sums[i] = fold(sums[i], sums[j], dtype=accurate(dtype) if how == "sum" else dtype)
        sums[j] = None  # its memory is free
    return sums[0].astype(dtype, copy=False)


def _sum(blocks: list[Any]) -> Any:
    if len(blocks) > _BLOCKS_MAX:
        left = first_half(len(blocks))
        blocks = [_sum(blocks[:left]), _sum(blocks[left:])]
    first = blocks[0]
    out = cp.empty(first.shape, first.dtype)
    if out.size:
        packs = int(all(a.data.ptr % 16 == 0 for a in (out, *blocks)))
        args = (out, *blocks, *[first] * (_BLOCKS_MAX - len(blocks)), len(blocks), out.size, packs)
        _add(first.dtype, grid=blocks_for(-(-out.nbytes // 16), 256), block=256, args=args)
    return out


Box = tuple[tuple[int, int], ...]


def within(box: Box) -> tuple[slice, ...]:
    """The index of a box."""
    return tuple(slice(start, stop) for start, stop in box)


def unpack(shape: tuple[int, ...], boxes: tuple[Box, ...], parts: Sequence[Any]) -> Any:
    """An array with each part in its box, and zeros elsewhere; where boxes overlap the last part counts."""
    out = cp.zeros(shape, parts[0].dtype)
    for box, part in zip(boxes, parts, strict=True):
        out[within(box)] = part
    return out


def add_boxes(shape: tuple[int, ...], boxes: tuple[Box, ...], parts: Sequence[Any]) -> Any:
    """An array of zeros to which each part is added in its box, in order."""
    out = cp.zeros(shape, parts[0].dtype)
    for box, part in zip(boxes, parts, strict=True):
        out[within(box)] += part
    return out
