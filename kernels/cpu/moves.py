"""Sums of blocks, and parts written into boxes of an array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np

from spmd.kernels.cpu.chunks import CACHE, accurate, into_rows
from spmd.kernels.memory import nontemporal, pool
from spmd.kernels.parallel import split_work

_FOLDS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def combine(blocks: Sequence[np.ndarray], how: str = "sum", into: np.ndarray | None = None) -> np.ndarray:
    """The entrywise sum (max, min) of at least one block, in order: a new array, or the only block itself.

    into: a C-contiguous array for the result of several blocks: the first or the second of them, or another one.
    """
    fold = _FOLDS[how]
    first = blocks[0]
    if len(blocks) == 1:
        return first
    if into is None and first.nbytes < min(split_work.SPLIT_MIN, pool.out_min()) and _is_simple(first):
        return _folded(fold, blocks)
    result = pool.empty_like(first) if into is None else into
    n = split_work.part_count(result.nbytes * (1 + len(blocks)) // 2)  # a copy is read once and written once
    past_caches = fold is np.add and nontemporal.pays(result.nbytes)
    past_caches = past_caches and not any(np.may_share_memory(result, block) for block in blocks)
    if n == 1:
        _fold(result, blocks, fold, past_caches)
        return result
    out, *blocks = split_work.flattened((result, *blocks))
    spans = split_work.spans(out.shape, n)
    split_work.run([partial(_fold, out[span], [block[span] for block in blocks], fold, past_caches) for span in spans])
    return result


def small_fold(like: np.ndarray, how: str) -> Callable[..., np.ndarray] | None:
    """`combine` for many calls with small C-contiguous blocks like this one, at least two, as arguments. The result is
    read-only. None where there is no faster way for such blocks."""
    if not _is_simple(like):
        return None
    fold = _FOLDS[how]

    def folded(first: np.ndarray, second: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        result = _folded(fold, (first, second, *rest)) if rest else fold(first, second)
        result.setflags(False)  # pyright: ignore[reportCallIssue]  (a keyword takes twice as long)
        return result

    return folded


def _is_simple(x: np.ndarray) -> bool:
    return bool(x.ndim) and x.itemsize >= 4 and x.dtype.isnative and x.flags.c_contiguous


def _folded(fold: np.ufunc, blocks: Sequence[np.ndarray]) -> np.ndarray:
    """The fold in a new array: three times as fast as with `out`."""
    result = fold(blocks[0], blocks[1])
    for block in blocks[2:]:
        fold(result, block, out=result)
    return result


def _fold(result: np.ndarray, blocks: Sequence[np.ndarray], fold: np.ufunc, past_caches: bool) -> None:
    """past_caches: write the result past the caches where the arrays allow it."""
    if fold is np.add and result.itemsize < 4 and accurate(result.dtype) is not result.dtype:
        into_rows(_sum, (result.reshape(-1),), *(np.ascontiguousarray(block).reshape(-1) for block in blocks))
        return
    if len(blocks) == 2:
        if not (past_caches and nontemporal.add(result, *blocks)):
            fold(*blocks, out=result)
        return
    result, *blocks = split_work.flattened((result, *blocks))
    past_caches = past_caches and result.ndim == 1
    # Pieces that stay in the cache until all blocks are added.
    step = max(1, CACHE // result.itemsize if result.ndim == 1 else result.size)
    scratch = np.empty(min(step, result.size) if past_caches else 0, result.dtype)
    for begin in range(0, result.size, step):
        out, accumulated, *others, last = (a[begin : begin + step] for a in (result, *blocks))
        for other in others:
            accumulated = fold(accumulated, other, out=scratch[: len(out)] if past_caches else out)
        if not (past_caches and nontemporal.add(out, accumulated, last)):
            fold(accumulated, last, out=out)


def _sum(out: np.ndarray, *blocks: np.ndarray) -> None:
    np.add(blocks[0], blocks[1], out=out)
    for block in blocks[2:]:
        out += block


def _contiguous_order(shape: tuple[int, ...], places: Sequence[Any]) -> list[int] | None:
    """The order in which blocks fill a small array of this shape one after the other, each without a gap; None where
    they do not. places: the index of each. Empty blocks are left out."""
    entries = np.arange(prod(shape))
    parts = [entries.reshape(shape)[place].reshape(-1) for place in places]
    order = sorted((k for k, part in enumerate(parts) if part.size), key=lambda k: parts[k][0])
    return order if np.array_equal(np.concatenate([entries[:0], *(parts[k] for k in order)]), entries) else None


def joiner(shape: tuple[int, ...], dtype: np.dtype, places: Sequence[Any]) -> Callable[[Sequence[Any]], Any] | None:
    """A function that joins small blocks into a read-only array, in half the time of writing them one by one. None
    where they do not lie one after the other. places: the index of each. Blocks have the shapes of their places, and
    the dtype of the array."""
    order = None if dtype.hasobject else _contiguous_order(shape, places)
    if order is None:
        return None
    if len(order) == 2:
        first, second = order
        return lambda blocks: np.ndarray(shape, dtype, blocks[first].tobytes() + blocks[second].tobytes())
    return lambda blocks: np.ndarray(shape, dtype, b"".join([blocks[k].tobytes() for k in order]))


Box = tuple[tuple[int, int], ...]


def within(box: Box) -> tuple[Any, ...]:
    """The index of a box, which gives a view: the ellipsis is for arrays without dimensions."""
    return (*[slice(start, stop) for start, stop in box], ...)


def unpack(shape: tuple[int, ...], boxes: tuple[Box, ...], parts: Sequence[np.ndarray]) -> np.ndarray:
    """An array with each part in its box, and zeros elsewhere; where boxes overlap the last part counts."""
    indices, covering, disjoint = places(shape, boxes)
    out = pool.empty(shape, parts[0].dtype)
    if not covering:
        out.fill(0)
    if out.nbytes < split_work.SPLIT_MIN:
        for index, part in zip(indices, parts, strict=True):
            out[index] = part
        return out
    pairs = [(out[index], part) for index, part in zip(indices, parts, strict=True)]
    for group in [pairs] if disjoint else [[pair] for pair in pairs]:
        split_work.copy(group)
    return out


@lru_cache(maxsize=1024)
def places(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> tuple[list[tuple[Any, ...]], bool, bool]:
    """The indices of boxes, whether they are disjoint and cover the array, and whether they are disjoint."""
    size = sum(prod(stop - start for start, stop in box) for box in boxes)
    disjoint = not _overlap(boxes)
    return [within(box) for box in boxes], disjoint and size == prod(shape), disjoint


def add_boxes(shape: tuple[int, ...], boxes: tuple[Box, ...], parts: Sequence[np.ndarray]) -> np.ndarray:
    """An array of zeros to which each part is added in its box, in order."""
    first_covers = boxes[0] == tuple((0, n) for n in shape)
    out = pool.empty(shape, parts[0].dtype)
    if first_covers:
        split_work.copy([(out, parts[0])])
    else:
        out.fill(0)
    for box, part in zip(boxes[first_covers:], parts[first_covers:], strict=True):
        view = out[within(box)]
        n = split_work.part_count(view.nbytes)
        if n == 1:
            view += part
        else:
            split_work.run([partial(np.add, view[s], part[s], view[s]) for s in split_work.spans(view.shape, n)])
    return out


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether two of the boxes have an entry in common."""
    return any(
        all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))
        for i, one in enumerate(boxes)
        for other in boxes[:i]
    )
