"""Blocks that are put together, and parts of blocks put in their boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy as cp

from spmd.kernels.cpu.chunks import accurate
from spmd.kernels.gpu.source import COMPLEX, FLOATING, Kernel, blocks_for, over

_FOLDS = {"sum": cp.add, "max": cp.maximum, "min": cp.minimum}


_add = Kernel("moves", "add", over((*FLOATING, *COMPLEX)))
_AT_ONCE = 8
"""Blocks that a launch adds up."""


def combine(blocks: Sequence[Any], how: str = "sum", into: Any = None) -> Any:
    """The entrywise sum (max, min) of at least one block, in order. Gives a new array, or the only block itself.

    into: the first or the second of several blocks, C-contiguous, which the result may be written into.
    """
    dtype, fold = blocks[0].dtype, _FOLDS[how]
    if len(blocks) == 1:
        return blocks[0]
    short = accurate(dtype) != dtype
    if how == "sum" and len(blocks) > 2 and (dtype.name,) in _add.types and not (short and len(blocks) > _AT_ONCE):
        total, *rest = map(cp.ascontiguousarray, blocks)
        while rest:
            total, rest = _sum([total, *rest[: _AT_ONCE - 1]]), rest[_AT_ONCE - 1 :]
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
        args = (out, *blocks, *[first] * (_AT_ONCE - len(blocks)), len(blocks), out.size, packs)
        _add(first.dtype, grid=blocks_for(-(-out.nbytes // 16), 256), block=256, args=args)
    return out


Box = tuple[tuple[int, int], ...]


def within(box: Box) -> tuple[slice, ...]:
    """The index that takes a box."""
    return tuple(slice(start, stop) for start, stop in box)


def unpack(shape: tuple[int, ...], boxes: tuple[Box, ...], parts: Sequence[Any]) -> Any:
    """An array with each part in its box, and zeros elsewhere; of several parts in one place the last one counts."""
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
