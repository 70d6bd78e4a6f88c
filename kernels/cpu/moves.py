"""Blocks that are put together, and parts of blocks put in their boxes."""

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
    """The entrywise sum (max, min) of at least one block, in order. Gives a new array, or the only block itself.

    into: a C-contiguous array, which the result of several blocks is written into: the first or the second of them, or
    another one.
    """
    fold = _FOLDS[how]
    first = blocks[0]
    if len(blocks) == 1:
        return first
    if into is None and first.nbytes < min(split_work.SPLIT_MIN, pool.out_min()) and _plain(first):
        return _folded(fold, blocks)
    total = pool.empty_like(first) if into is None else into
    n = split_work.part_count(total.nbytes * (1 + len(blocks)) // 2)  # A copy is read once and written once.
    past = fold is np.add and nontemporal.pays(total.nbytes) and not any(np.may_share_memory(total, b) for b in blocks)
    if n == 1:
        _fold(total, blocks, fold, past)
        return total
    out, *blocks = split_work.flattened((total, *blocks))
    spans = split_work.spans(out.shape, n)
    split_work.run([partial(_fold, out[span], [block[span] for block in blocks], fold, past) for span in spans])
    return total


def small_fold(like: np.ndarray, how: str) -> Callable[..., np.ndarray] | None:
    """`combine` for many calls with small C-contiguous blocks like this one, two at least, each an argument; gives what
    nobody writes to. None if it is not for such blocks."""
    if not _plain(like):
        return None
    fold = _FOLDS[how]

    def folded(one: np.ndarray, other: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        total = _folded(fold, (one, other, *rest)) if rest else fold(one, other)
        total.setflags(False)  # pyright: ignore[reportCallIssue]  (by its name it takes twice as long)
        return total

    return folded


def _plain(x: np.ndarray) -> bool:
    return bool(x.ndim) and x.itemsize >= 4 and x.dtype.isnative and x.flags.c_contiguous


def _folded(fold: np.ufunc, blocks: Sequence[np.ndarray]) -> np.ndarray:
    """In a new array: three times as fast as in one that is made before."""
    total = fold(blocks[0], blocks[1])
    for block in blocks[2:]:
        fold(total, block, out=total)
    return total


def _fold(total: np.ndarray, blocks: Sequence[np.ndarray], fold: np.ufunc, past: bool) -> None:
    """past: write the result past the caches, if it is for that."""
    if fold is np.add and total.itemsize < 4 and accurate(total.dtype) is not total.dtype:
        into_rows(_sum, (total.reshape(-1),), *(np.ascontiguousarray(block).reshape(-1) for block in blocks))
        return
    if len(blocks) == 2:
        if not (past and nontemporal.add(total, *blocks)):
            fold(*blocks, out=total)
        return
    total, *blocks = split_work.flattened((total, *blocks))
    past = past and total.ndim == 1
    # So much at a time that it stays in the cache until all are added.
    step = max(1, CACHE // total.itemsize if total.ndim == 1 else total.size)
    room = np.empty(min(step, total.size) if past else 0, total.dtype)
    for start in range(0, total.size, step):
        out, so_far, *others, last = (a[start : start + step] for a in (total, *blocks))
        for other in others:
            so_far = fold(so_far, other, out=room[: len(out)] if past else out)
        if not (past and nontemporal.add(out, so_far, last)):
            fold(so_far, last, out=out)


def _sum(out: np.ndarray, *blocks: np.ndarray) -> None:
    np.add(blocks[0], blocks[1], out=out)
    for block in blocks[2:]:
        out += block


def _in_turn(shape: tuple[int, ...], places: Sequence[Any]) -> list[int] | None:
    """The order in which blocks fill a small array of this shape one after the other, each without a break; None where
    they do not. places: the index of each. Blocks of nothing are left out."""
    entries = np.arange(prod(shape))
    found = [entries.reshape(shape)[place].reshape(-1) for place in places]
    order = sorted((k for k, some in enumerate(found) if some.size), key=lambda k: found[k][0])
    return order if np.array_equal(np.concatenate([entries[:0], *(found[k] for k in order)]), entries) else None


def joiner(shape: tuple[int, ...], dtype: np.dtype, places: Sequence[Any]) -> Callable[[Sequence[Any]], Any] | None:
    """What joins small blocks into an array, in half of the time of writing them there one by one: it is read-only.
    None where they do not lie one after the other. places: the index of each; it has the shape of its place, and the
    dtype of the array."""
    order = None if dtype.hasobject else _in_turn(shape, places)
    if order is None:
        return None
    if len(order) == 2:
        one, other = order
        return lambda blocks: np.ndarray(shape, dtype, blocks[one].tobytes() + blocks[other].tobytes())
    return lambda blocks: np.ndarray(shape, dtype, b"".join([blocks[k].tobytes() for k in order]))


Box = tuple[tuple[int, int], ...]


def within(box: Box) -> tuple[Any, ...]:
    """The index that takes a box, as a view: without its end it would take a number out of what has no dimensions."""
    return (*[slice(start, stop) for start, stop in box], ...)


def unpack(shape: tuple[int, ...], boxes: tuple[Box, ...], parts: Sequence[np.ndarray]) -> np.ndarray:
    """An array with each part in its box, and zeros elsewhere; of several parts in one place the last one counts."""
    found, everything, apart = places(shape, boxes)
    out = pool.empty(shape, parts[0].dtype)
    if not everything:
        out.fill(0)
    if out.nbytes < split_work.SPLIT_MIN:
        for place, part in zip(found, parts, strict=True):
            out[place] = part
        return out
    pairs = [(out[place], part) for place, part in zip(found, parts, strict=True)]
    for some in [pairs] if apart else [[pair] for pair in pairs]:
        split_work.copy(some)
    return out


@lru_cache(maxsize=1024)
def places(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> tuple[list[tuple[Any, ...]], bool, bool]:
    """The indices of boxes, whether they cover everything, and whether they are apart: such that are do cover it, if
    their sizes say so."""
    covered = sum(prod(stop - start for start, stop in box) for box in boxes)
    apart = not _overlap(boxes)
    return [within(box) for box in boxes], apart and covered == prod(shape), apart


def add_boxes(shape: tuple[int, ...], boxes: tuple[Box, ...], parts: Sequence[np.ndarray]) -> np.ndarray:
    """An array of zeros to which each part is added in its box, in order."""
    first = boxes[0] == tuple((0, n) for n in shape)
    out = pool.empty(shape, parts[0].dtype)
    if first:
        split_work.copy([(out, parts[0])])
    else:
        out.fill(0)
    for box, part in zip(boxes[first:], parts[first:], strict=True):
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
