"""The geometry of a convolution and of its transpose: which inputs outputs read, and the arithmetic on one block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmd.functions.local import local
from spmd.window import Taps

__all__ = ["Geometry", "with_bias"]

Pair = tuple[int, int]
Ints = tuple[int, ...]


class _TransposedTaps(NamedTuple):
    """The interval of n inputs from which output o of a transposed convolution is summed."""

    n: int
    stride: int
    extent: int
    low: int

    def __call__(self, o: int) -> Pair:
        last = o + self.low
        start, stop = -((self.extent - 1 - last) // self.stride), last // self.stride + 1
        return min(max(start, 0), self.n), min(max(stop, 0), self.n)


@dataclass(frozen=True)
class Geometry:
    """A convolution of an array of these spatial lengths, or the transpose of one, with an entry for each dimension.

    shape, outputs: the lengths of the input and of the result. padding: (low, high) of the convolution.
    """

    shape: Ints
    outputs: Ints
    kernel: Ints
    stride: Ints
    padding: tuple[Pair, ...]
    dilation: Ints
    groups: int
    transposed: bool = False

    @property
    def extents(self) -> Ints:
        """The number of entries from the first tap of an output to its last, both included."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def output_dim(self) -> int:
        """The dimension of the weights that belongs to the channels of the result."""
        return 1 if self.transposed else 0

    def needs(self, d: int) -> Callable[[int], Pair]:
        """The interval of the input that an output reads along spatial dimension d."""
        low, high = self.padding[d]
        if self.transposed:
            return _TransposedTaps(self.shape[d], self.stride[d], self.extents[d], low)
        return Taps(self.kernel[d], self.stride[d], self.dilation[d], low, high)

    def hull(self, d: int, start: int, stop: int) -> Pair:
        """The interval of the input that the outputs start:stop read."""
        if start >= stop:
            return (0, 0)
        first, end = self.needs(d)(start)[0], self.needs(d)(stop - 1)[1]
        return (first, end) if first < end else (0, 0)

    def on_whole(self, x: Any, w: Any) -> Any:
        """The result of the whole input."""
        return self._computed(x, w, self.outputs, self.padding, self.groups)

    def on_block(self, x: Any, w: Any, needs: Sequence[Pair], outputs: Sequence[Pair], groups: int) -> Any:
        """The outputs (start, stop), from the interval of the input that they need; groups: those of this block."""
        lengths = tuple(stop - start for start, stop in outputs)
        if not self.transposed:
            return self._computed(x, w, lengths, ((0, 0),) * len(lengths), groups)
        lows = (
            low + first - start * stride
            for (low, _), (first, _), (start, _), stride in zip(self.padding, outputs, needs, self.stride, strict=True)
        )
        return self._computed(x, w, lengths, tuple((low, 0) for low in lows), groups)

    def _computed(self, x: Any, w: Any, lengths: Ints, padding: tuple[Pair, ...], groups: int) -> Any:
        """The arithmetic. Libraries want at least one channel and one window, so empty blocks are padded with zeros,
        and the result is cropped: it depends on x and w on all workers."""
        channels = w.shape[1] * groups if self.transposed else w.shape[0]
        groups = max(groups, 1)  # a block may have no group
        if 0 in (*w.shape[:2], *x.shape[1:], *lengths):
            filters, depth = w.shape[0] or groups, w.shape[1] or 1
            ends = zip(lengths, x.shape[2:], padding, self.extents, strict=True)
            spatial = [e if not n else sum(p) if not m else 0 for n, m, p, e in ends]
            spatial = [1] * len(lengths) if self.transposed else spatial
            padding = tuple(p if n and m else (0, 0) for p, n, m in zip(padding, lengths, x.shape[2:], strict=True))
            x = _at_least(x, (0, filters if self.transposed else depth * groups, *spatial))
            w = _at_least(w, (filters, depth))
        arithmetic = local(x, "convolution")
        if self.transposed:
            wanted = tuple(n or 1 for n in lengths)
            sizes = zip(x.shape[2:], wanted, self.stride, padding, self.extents, strict=True)
            padding = tuple((low, (m - 1) * s + e - low - n) for m, n, s, (low, _), e in sizes)
            y = arithmetic.conv_transpose(x, w, wanted, self.stride, padding, self.dilation, groups)
        else:
            y = arithmetic.conv(x, w, self.stride, padding, self.dilation, groups)
        shape = (y.shape[0], channels, *lengths)
        return y if y.shape == shape else y[tuple(slice(n) for n in shape)]


def with_bias(y: Any, bias: Any) -> Any:
    """The result with a number added to each channel."""
    return y + bias.reshape(-1, *(1,) * (y.ndim - 2))


def _at_least(x: Any, shape: Sequence[int]) -> Any:
    """x with zeros at the ends of the leading dimensions that are shorter than this."""
    widths = [(0, max(0, n - m)) for n, m in zip(shape, x.shape, strict=False)]
    return local(x, "pads").pad(x, [*widths, *[(0, 0)] * (x.ndim - len(widths))])
