"""Small arrays packed in one message, where each worker of a group gets or gives its part of every array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from spmd.layout import block_sizes, offsets
from spmd.transport.algorithms.choice import SEPARATE_MIN

__all__ = ["Packing", "batches", "packing_of"]

Shape = tuple[int, ...]


def batches(arrays: Sequence[Any], kinds: Sequence[Any], uneven: Sequence[bool]) -> list[list[int]]:
    """The indices of the arrays that go in one message each: large ones alone, small ones by their kind.

    uneven: whether other workers may have an array of another size. Those send as many messages: then what has several
    dimensions goes alone.
    """
    found: dict[Any, list[int]] = {}
    for k, (x, kind) in enumerate(zip(arrays, kinds, strict=True)):
        large = len(x.shape) > 1 if uneven[k] else math.prod(x.shape) * x.dtype.itemsize >= SEPARATE_MIN
        found.setdefault((k,) if large else kind, []).append(k)
    return list(found.values())


@lru_cache(maxsize=256)
def packing_of(shapes: tuple[Shape, ...], dims: tuple[int, ...], counts: tuple[int, ...]) -> Packing:
    """The packing of arrays of these shapes, each cut in one dimension. counts: the sizes of the axes that cut it."""
    return Packing(shapes, dims, counts)


class Packing:
    """Several arrays as one of one dimension, in which the parts of each worker lie together.

    sizes: the entries of each worker. The parts of a worker lie in the order of the arrays, each in C order.
    """

    def __init__(self, shapes: tuple[Shape, ...], dims: tuple[int, ...], counts: tuple[int, ...]):
        self.shapes, self.dims = shapes, dims
        self.cuts = [block_sizes(shape[d], counts) for shape, d in zip(shapes, dims, strict=True)]
        self.part_shapes = [
            [(*s[:d], lengths[k], *s[d + 1 :]) for s, d, lengths in zip(shapes, dims, self.cuts, strict=True)]
            for k in range(math.prod(counts))
        ]
        self.sizes = tuple([sum(map(math.prod, part)) for part in self.part_shapes])

    @cached_property
    def _order(self) -> np.ndarray:
        """For each entry of the packed array its index among the entries of all arrays, one after the other."""
        starts = offsets([math.prod(s) for s in self.shapes])
        entries = [
            np.split(start + np.arange(math.prod(s)).reshape(s), [*accumulate(cut)][:-1], axis=d)
            for start, s, d, cut in zip(starts, self.shapes, self.dims, self.cuts, strict=False)
        ]
        return np.concatenate([np.ravel(parts[k]) for k in range(len(self.sizes)) for parts in entries])

    @cached_property
    def _places(self) -> np.ndarray:
        return np.argsort(self._order)

    def pack(self, arrays: Sequence[Any]) -> Any:
        """The packed array of whole ones."""
        if len(arrays) > 1:
            return np.concatenate([np.reshape(x, (-1,)) for x in arrays])[self._order]
        (x,), (d,), (cut,) = arrays, self.dims, self.cuts
        if d == 0:
            return np.reshape(x, (-1,))
        before = (slice(None),) * d
        return np.concatenate([np.reshape(x[(*before, slice(a, b))], (-1,)) for a, b in pairwise(offsets(cut))])

    def unpack(self, packed: Any) -> list[Any]:
        """The whole arrays of a packed one."""
        if len(self.shapes) > 1:
            flat, ends = packed[self._places], offsets([math.prod(s) for s in self.shapes])
            return [np.reshape(flat[a:b], s) for (a, b), s in zip(pairwise(ends), self.shapes, strict=True)]
        [whole], [d] = list(self.shapes), list(self.dims)
        if d == 0:
            return [np.reshape(packed, whole)]
        parts = [
            np.reshape(packed[a:b], shape)
            for (a, b), (shape,) in zip(pairwise(offsets(self.sizes)), self.part_shapes, strict=True)
        ]
        return [np.concatenate(parts, axis=d)]

    def pack_parts(self, parts: Sequence[Any]) -> Any:
        """What a worker gives: its parts, one after the other."""
        flat = [np.reshape(x, (-1,)) for x in parts]
        return flat[0] if len(flat) == 1 else np.concatenate(flat)

    def unpack_parts(self, packed: Any, index: int) -> list[Any]:
        """The parts of a worker."""
        shapes = self.part_shapes[index]
        ends = offsets([math.prod(s) for s in shapes])
        return [np.reshape(packed[a:b], s) for (a, b), s in zip(pairwise(ends), shapes, strict=True)]
