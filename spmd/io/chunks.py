"""Chunks of arrays in files: their default lengths, and layouts of which each block consists of whole chunks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence

from spmd.layout import Box, Layout, offsets

__all__ = ["aligned_layout", "chunk_boxes", "common_chunks", "default_chunks", "is_of_chunks"]

CHUNK_BYTES = 16 << 20
"""Chunks that nobody has chosen are not longer."""
_SMALLEST = 4
"""A chunk may be so many times shorter than the mean block, if then nothing has to be moved."""


def common_chunks(shape: Sequence[int], boxes: Collection[Box]) -> tuple[int, ...]:
    """The longest chunks of which each of these boxes consists."""
    return tuple(math.gcd(*(box[d][0] for box in boxes)) or max(1, n) for d, n in enumerate(shape))


def default_chunks(shape: Sequence[int], itemsize: int, boxes: Collection[Box]) -> tuple[int, ...]:
    """The lengths of the chunks of an array that lies in these boxes: if possible each box consists of whole ones."""
    common = common_chunks(shape, boxes)
    lengths = []
    for d, n in enumerate(shape):
        mean = max(1, -(-n // max(1, len({box[d][0] for box in boxes}))))
        lengths.append(common[d] if _SMALLEST * common[d] >= mean else mean)
    while math.prod(lengths) * itemsize > CHUNK_BYTES and max(lengths, default=1) > 1:
        d = max(range(len(lengths)), key=lengths.__getitem__)
        lengths[d] = _shorter(lengths[d])
    return tuple(lengths)


def _shorter(n: int) -> int:
    """A divisor of a length, if it has one that is not much shorter; else half of it, rounded up."""
    return next((n // k for k in (2, 3, 5, 7) if n % k == 0), -(-n // 2))


def aligned_layout(layout: Layout, chunks: Sequence[int]) -> Layout:
    """The layout with its cuts at the nearest multiples of the lengths of chunks. Some blocks may be empty then."""
    cuts = [_aligned(sizes, length) for sizes, length in zip(layout.cuts, chunks, strict=True)]
    if layout.spec is None:
        assert layout.workers is not None
        blocks = [len(c) for c in cuts]
        each = len(layout.workers) // math.prod(blocks)
        return Layout.grid(layout.shape, (*blocks, each), layout.axes, layout.workers, cuts, copies=layout.copies)
    return Layout(layout.shape, layout.spec, layout.axes, cuts, copies=layout.copies)


def _aligned(sizes: Sequence[int], length: int) -> tuple[int, ...]:
    n = sum(sizes)
    places = [n if at == n else min(n, (2 * at + length) // (2 * length) * length) for at in offsets(sizes)]
    return tuple(stop - start for start, stop in itertools.pairwise(places))


def is_of_chunks(box: Box, shape: Sequence[int], chunks: Sequence[int]) -> bool:
    """Whether a box consists of whole chunks. Those at the end of the array may be cut off."""
    return all(
        start % length == 0 and (stop % length == 0 or stop == n)
        for (start, stop), n, length in zip(box, shape, chunks, strict=True)
    )


def chunk_boxes(box: Box, chunks: Sequence[int]) -> Iterator[Box]:
    """The chunks of a box that consists of whole ones, in their order."""
    ranges = [
        [(at, min(at + length, stop)) for at in range(start, stop, length)]
        for (start, stop), length in zip(box, chunks, strict=True)
    ]
    return itertools.product(*ranges)
