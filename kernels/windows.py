"""The geometry of sliding windows, one dimension at a time. Convolutions, poolings and their adjoints share it.

Output o of a window reads the inputs o * stride - low + j * dilation, 0 <= j < kernel. Inputs before 0 and from n on
are padding. `spmd.window` plans the same windows over blocks, with the same low and high.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Window", "output_length", "reach", "same_padding", "stencil_adjoint_padding", "windows"]

Pair = tuple[int, int]


class Window(NamedTuple):
    """A window over n inputs, with m outputs.

    high: how far the outputs read beyond the last input; it may differ from the padding given. padded: the end of the
    padding given, counted from the first input.
    """

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
        reads = (m - 1) * stride - low + _extent(kernel, dilation) if m else 0
        return cls(n, m, kernel, stride, dilation, low, max(0, reads - n), n + high)

    def input_of(self, j: int) -> int:
        """The input that tap j of output 0 reads."""
        return j * self.dilation - self.low

    def inside(self, j: int, stop: int | None = None, start: int = 0) -> Pair:
        """The outputs first:end whose tap j reads in start:stop; by default, reads an input."""
        stop = self.n if stop is None else stop
        at = self.input_of(j)
        first = min(self.m, max(0, -((at - start) // self.stride)))
        return first, max(first, min(self.m, (stop - 1 - at) // self.stride + 1))

    def counts(self, include_padding: bool = False) -> np.ndarray:
        """How many taps of each output read inputs (include_padding: or the padding given)."""
        counts = np.zeros(self.m, np.int64)
        for j in range(self.kernel):
            bounds = self.inside(j, self.padded, -self.low) if include_padding else self.inside(j)
            counts[slice(*bounds)] += 1
        return counts

    def part(self, first: int, end: int) -> tuple[Pair, Pair]:
        """What the outputs first:end read: the inputs start:stop, and the padding around them."""
        start = first * self.stride - self.low
        stop = (end - 1) * self.stride - self.low + _extent(self.kernel, self.dilation)
        a, b = (min(max(i, 0), self.n) for i in (start, stop))
        return (a, b), (min(stop, 0) - min(start, 0), max(stop, self.n) - max(start, self.n))


def windows(
    shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[Pair],
    dilation: Sequence[int],
    ceil_mode: bool = False,
) -> list[Window]:
    """The window along each dimension."""
    return [Window.of(*each, ceil_mode) for each in zip(shape, kernel, stride, padding, dilation, strict=True)]


def _extent(kernel: int, dilation: int = 1) -> int:
    """The length from the first tap of an output to its last, both included."""
    return (kernel - 1) * dilation + 1


def output_length(
    n: int, kernel: int, stride: int = 1, padding: Pair = (0, 0), dilation: int = 1, ceil_mode: bool = False
) -> int:
    """The number of outputs of n inputs, padded by (low, high); a negative padding crops.

    ceil_mode: a last partial window has an output too, unless it would start in the high padding.
    """
    low, high = padding
    free = n + low + high - _extent(kernel, dilation)
    floor = max(0, free // stride + 1)
    ceil = max(0, -(-free // stride) + 1)
    return ceil if ceil_mode and (ceil - 1) * stride < n + low else floor


def same_padding(n: int, kernel: int, stride: int = 1, dilation: int = 1, lower: bool = False) -> Pair:
    """The padding that gives ceil(n / stride) outputs; an odd entry is at the high end, or the low one."""
    total = max(0, (-(-n // stride) - 1) * stride + _extent(kernel, dilation) - n) if n else 0
    half = total // 2
    return (total - half, half) if lower else (half, total - half)


def reach(offsets: Sequence[Sequence[int]]) -> tuple[Pair, ...]:
    """How far offsets reach below and above 0 in each dimension, (low, high): the halo of a stencil."""
    return tuple((max(0, -min(column)), max(0, *column)) for column in zip(*offsets, strict=True))


def stencil_adjoint_padding(offsets: Sequence[Sequence[int]], padding: Sequence[Pair]) -> tuple[Pair, ...]:
    """The padding of a stencil's adjoint, which has the negated offsets."""
    ends = zip(reach(offsets), padding, strict=True)
    return tuple((low + high - before, low + high - after) for (low, high), (before, after) in ends)
