"""The geometry of windows, one dimension at a time: integers only. Convolutions, poolings and their adjoints share it.

Output o of a window reads the inputs o * stride - low + j * dilation, 0 <= j < kernel: those before 0 and from n on
are padding. `spmd.window` plans the same windows over blocks; low and high mean the same there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Window", "extent", "output_length", "reach", "same_padding", "stencil_adjoint_padding"]

Pair = tuple[int, int]


class Window(NamedTuple):
    """A window over n inputs, with its m outputs. high is what the outputs read beyond the end, and may be less or
    more than the padding that was asked for; `padded` is the end of that padding, counted from the first input."""

    n: int
    m: int
    kernel: int
    stride: int
    dilation: int
    low: int
    high: int
    padded: int

    @classmethod
    def of(
        cls, n: int, kernel: int, stride: int = 1, padding: Pair = (0, 0), dilation: int = 1, ceil_mode: bool = False
    ) -> Window:
        low, high = padding
        m = output_length(n, kernel, stride, padding, dilation, ceil_mode)
        reads = (m - 1) * stride - low + extent(kernel, dilation) if m else 0
        return cls(n, m, kernel, stride, dilation, low, max(0, reads - n), n + high)

    def at(self, j: int) -> int:
        """The input that output 0 reads by its tap j."""
        return j * self.dilation - self.low

    def inside(self, j: int, stop: int | None = None, start: int = 0) -> Pair:
        """The outputs first:end whose tap j lies in start:stop, by default among the inputs."""
        stop = self.n if stop is None else stop
        at = self.at(j)
        first = min(self.m, max(0, -((at - start) // self.stride)))
        return first, max(first, min(self.m, (stop - 1 - at) // self.stride + 1))

    def counts(self, include_padding: bool = False) -> np.ndarray:
        """How many taps of each output read inputs, or padding that was asked for."""
        found = np.zeros(self.m, np.int64)
        for j in range(self.kernel):
            bounds = self.inside(j, self.padded, -self.low) if include_padding else self.inside(j)
            found[slice(*bounds)] += 1
        return found

    def part(self, first: int, end: int) -> tuple[Pair, Pair]:
        """What the outputs first:end read: start:stop of the inputs, and the padding around it."""
        start = first * self.stride - self.low
        stop = (end - 1) * self.stride - self.low + extent(self.kernel, self.dilation)
        a, b = (min(max(i, 0), self.n) for i in (start, stop))
        return (a, b), (min(stop, 0) - min(start, 0), max(stop, self.n) - max(start, self.n))


def extent(kernel: int, dilation: int = 1) -> int:
    """From the first tap of an output to its last, both included."""
    return (kernel - 1) * dilation + 1


def output_length(
    n: int, kernel: int, stride: int = 1, padding: Pair = (0, 0), dilation: int = 1, ceil_mode: bool = False
) -> int:
    """The outputs of n inputs, padded by (low, high); a negative padding crops.

    ceil_mode: what is left over at the end has an output too, unless that would start in the high padding.
    """
    low, high = padding
    free = n + low + high - extent(kernel, dilation)
    count = max(0, free // stride + 1)
    more = max(0, -(-free // stride) + 1)
    return more if ceil_mode and (more - 1) * stride < n + low else count


def same_padding(n: int, kernel: int, stride: int = 1, dilation: int = 1, lower: bool = False) -> Pair:
    """The padding that gives ceil(n / stride) outputs; an odd entry is at the high end, or at the low one."""
    total = max(0, (-(-n // stride) - 1) * stride + extent(kernel, dilation) - n) if n else 0
    half = total // 2
    return (total - half, half) if lower else (half, total - half)


def reach(offsets: Sequence[Sequence[int]]) -> tuple[Pair, ...]:
    """How far offsets reach below and above 0, (low, high) in each dimension: low and high of a halo for a stencil."""
    return tuple((max(0, -min(column)), max(0, *column)) for column in zip(*offsets, strict=True))


def stencil_adjoint_padding(offsets: Sequence[Sequence[int]], padding: Sequence[Pair]) -> tuple[Pair, ...]:
    """The padding of the adjoint of a stencil, which has the negated offsets."""
    ends = zip(reach(offsets), padding, strict=True)
    return tuple((low + high - before, low + high - after) for (low, high), (before, after) in ends)
