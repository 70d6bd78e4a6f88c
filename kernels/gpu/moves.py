"""Sums of blocks, and parts written into boxes of an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy as cp

from spmd.kernels.cpu.chunks import accurate
from spmd.kernels.gpu.source import COMPLEX, FLOATING, Kernel, blocks_for, over

_FOLDS = {"sum": cp.add, "max": cp.maximum, "min": cp.minimum}


_add = Kernel("moves", "add", over((*FLOATING, *COMPLEX)))
_BLOCKS_MAX = 8
"""Blocks that a launch adds."""


def combine(blocks: Sequence[Any], how: str = "sum", into: Any = None) -> Any:
    """The entrywise sum (max, min) of at least one block, in order. A new array, or the only block itself.

    into: the first or the second of several blocks, C-contiguous, that the result may overwrite.
    """
    dtype, fold = blocks[0].dtype, _FOLDS[how]
    if len(blocks) == 1:
        return blocks[0]
    short = accurate(dtype) != dtype
    if how == "sum" and len(blocks) > 2 and (dtype.name,) in _add.types and not (short and len(blocks) > _BLOCKS_MAX):
        total, *rest = map(cp.ascontiguousarray, blocks)
        while rest:
            total, rest = _sum([total, *rest[: _BLOCKS_MAX - 1]]), rest[_BLOCKS_MAX - 1 :]
        return total.reshape(blocks[0].shape)
    if len(blocks) == 2 and not short:
        return fold(blocks[0], blocks[1], out=into)
    total = fold(blocks[0], blocks[1], dtype=accurate(dtype) if how == "sum" else dtype)
    for block in blocks[2:]:
        fold(total, block, out=total)
    return total.astype(dtype, copy=False)


def _sum(blocks: list[Any]) -> Any:
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
