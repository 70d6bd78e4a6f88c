"""Sums of blocks, and parts written into boxes of an array."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np

from spmd.kernels.cpu.chunks import CACHE, accurate, into_rows
from spmd.kernels.memory import nontemporal, pool
from spmd.kernels.pairwise import first_half, pairs
from spmd.kernels.parallel import split_work

_FOLDS = {"sum": np.add, "max": np.maximum, "min": np.minimum}

_PIECE = CACHE
"""Bytes of each block that are added before the next ones, so that partial sums stay in the cache. Blocks of up to two
pieces are added at once: the calls would take longer than the cache saves."""


def combine(blocks: Sequence[np.ndarray], how: str = "sum", into: np.ndarray | None = None) -> np.ndarray:
    """The entrywise sum (max, min) of at least one block, in the order of `pairs`: a new array, or the only block
    itself.

    into: a C-contiguous array for the result of several blocks: any of the blocks, or another one.
    """
    fold = _FOLDS[how]
    first = blocks[0]
    if len(blocks) == 1:
        return first
    nbytes = first.nbytes
    if into is None and nbytes < split_work.SPLIT_MIN and nbytes < pool.out_min() and _is_simple(first):
        return _folded(fold, blocks)
    result = pool.empty_like(first) if into is None else into
    apart = into is None or not any(np.may_share_memory(into, block) for block in blocks)
    n = split_work.part_count(nbytes * (1 + len(blocks)) // 2)  # a copy is read once and written once
    past_caches = apart and fold is np.add and nontemporal.pays(nbytes)
    if n == 1:
        _fold(result, blocks, fold, apart, past_caches)
        return result
    out, *blocks = split_work.flattened((result, *blocks))
    spans = split_work.spans(out.shape, n)
    parts = [(out[span], [block[span] for block in blocks]) for span in spans]
    split_work.run([partial(_fold, *part, fold, apart, past_caches) for part in parts])
    return result


def small_fold(like: np.ndarray, how: str) -> Callable[..., np.ndarray] | None:
    """`combine` for many calls with small C-contiguous blocks like this one, at least two, as arguments. The result is
    read-only. None where there is no faster way for such blocks."""
    if not _is_simple(like.reshape(-1)):
        return None
    fold = _FOLDS[how]

    def folded(first: np.ndarray, second: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        result = _folded(fold, (first, second, *rest)) if rest else fold(first, second)
        result.setflags(False)  # pyright: ignore[reportCallIssue]  (a keyword takes twice as long)
        return result

    if like.ndim > 0:
        return folded
    return lambda *blocks: folded(*[block.reshape(1) for block in blocks]).reshape(())


def _is_simple(x: np.ndarray) -> bool:
    return x.itemsize >= 4 and x.ndim > 0 and x.dtype.isnative and x.flags.c_contiguous


@lru_cache(maxsize=1024)
def _steps(n: int) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """How many partial sums exist at a time, and the steps (i, j, t): the sum of those at i and j goes to t, where a
    partial sum already is, or to one of the places from n on."""
    places: dict[int, int] = {}
    steps = []
    depth = 0
    for i, j in pairs(n):
        place = places.setdefault(i, len(places))
        places.pop(j, None)
        depth = max(depth, len(places))
        steps.append((i, j, n + place))
    return depth, tuple(steps)


def _folded(fold: np.ufunc, blocks: Sequence[np.ndarray]) -> np.ndarray:
    """The fold in a new array: NumPy allocates in less time than `out` takes."""
    n = len(blocks)
    if n > 4 and n != 8:
        left = first_half(n)
        total, other = _folded(fold, blocks[:left]), _folded(fold, blocks[left:])
        return fold(total, other, out=total)
    total = fold(blocks[0], blocks[1])
    if n == 2:
        return total
    if n == 3:
        return fold(total, blocks[2], out=total)
    fold(total, fold(blocks[2], blocks[3]), out=total)
    if n == 8:  # without calls, which take longer than small sums
        other = fold(blocks[4], blocks[5])
        fold(other, fold(blocks[6], blocks[7]), out=other)
        fold(total, other, out=total)
    return total


def _fold(result: np.ndarray, blocks: Sequence[np.ndarray], fold: np.ufunc, apart: bool, past_caches: bool) -> None:
    """apart: the result is none of the blocks. past_caches: write it past the caches where the arrays allow it."""
    if fold is np.add and result.itemsize < 4 and accurate(result.dtype) is not result.dtype:
        into_rows(_sum, (result.reshape(-1),), *(np.ascontiguousarray(block).reshape(-1) for block in blocks))
        return
    if len(blocks) == 2:
        if not (past_caches and nontemporal.add(result, *blocks)):
            fold(*blocks, out=result)
        return
    pieces: Iterable[Sequence[np.ndarray]] = [(result, *blocks)]
    if result.nbytes > 2 * _PIECE:
        arrays = split_work.flattened((result, *blocks))
        rows = max(1, len(arrays[0]) * _PIECE // result.nbytes)
        pieces = ([a[k : k + rows] for a in arrays] for k in range(0, len(arrays[0]), rows))
    depth, (*steps, (_, last, _)) = _steps(len(blocks))
    in_result = apart and not past_caches  # the first partial sum
    partial_sums: list[np.ndarray] | None = None
    for out, *sums in pieces:
        if partial_sums is None:
            partial_sums = [pool.empty_like(out) for _ in range(depth - in_result)]
        else:
            partial_sums = [a[: len(out)] for a in partial_sums]
        sums += (out, *partial_sums) if in_result else partial_sums
        for i, j, t in steps:
            sums[i] = fold(sums[i], sums[j], out=sums[t])
        if not (past_caches and nontemporal.add(out, sums[0], sums[last])):
            fold(sums[0], sums[last], out=out)


def _sum(out: np.ndarray, *blocks: np.ndarray) -> None:
    """The sum of arrays that may be overwritten."""
    *steps, (_, last) = pairs(len(blocks))
    for i, j in steps:
        np.add(blocks[i], blocks[j], out=blocks[i])
    np.add(blocks[0], blocks[last], out=out)


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
