"""Windows: the interval of the input that each block of an output needs, and the halos that bring it. Integers only.

Output o of a window reads the inputs o·stride − low + j·dilation for 0 ≤ j < kernel. Indices are those of the input;
entries before 0 and after its end are padding. A block of outputs needs the interval from the first tap of its first
output to the last tap of its last output, both included.

Convolution, pooling and stencils are windows (`plan_window`; `plan_windows` for several dimensions). A transposed
convolution is a window read backwards (`plan_transposed`). Interpolation is any other map from outputs to intervals of
the input (`plan_needs`).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from spmd.errors import LayoutError
from spmd.layout import block_sizes, offsets
from spmd.representations.tables import Printed, Report, Table
from spmd.tracebacks import api_boundary

__all__ = ["Taps", "Window", "plan_needs", "plan_transposed", "plan_window"]

Interval = tuple[int, int]
Pairs = tuple[tuple[int, int], ...]
Padding = int | Sequence[int] | str


class Taps(NamedTuple):
    """Output o reads the inputs o·stride − low + j·dilation, 0 ≤ j < kernel; the input is padded by low and high."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    low: int = 0
    high: int = 0

    @property
    def extent(self) -> int:
        """The number of entries from the first tap of an output to its last, both included."""
        return (self.kernel - 1) * self.dilation + 1

    def __call__(self, o: int) -> Interval:
        """The interval of the input that output o reads."""
        start = o * self.stride - self.low
        return start, start + self.extent

    def fit(self, n: int, ceil: bool = False) -> tuple[Taps, int]:
        """The taps with the padding that n inputs need, and the number of outputs.

        ceil: entries left over at the end also give an output, unless it would start in the high padding.
        """
        free = n + self.low + self.high - self.extent
        count = max(0, free // self.stride + 1)
        more = max(0, -(-free // self.stride) + 1)
        if not ceil or more == count or (more - 1) * self.stride >= n + self.low:
            return self, count
        return self._replace(high=self(more - 1)[1] - n), more

    def __str__(self) -> str:
        parts = [f"kernel {self.kernel}"]
        parts += [f"stride {self.stride}"] * (self.stride != 1) + [f"dilation {self.dilation}"] * (self.dilation != 1)
        return ", ".join(parts + [f"padding ({self.low}, {self.high})"] * (self.low != 0 or self.high != 0))


@dataclass(frozen=True)
class Window(Printed):
    """What the blocks of an output need of an input, in one dimension. Entry k of each tuple belongs to block k.

    inputs, outputs: the sizes of the blocks, in order; some may be 0.
    needs: the interval of the input, padding included, from which the outputs are computed. A block without outputs
    needs nothing: its interval is empty, at the start of its own block, so its halo (0, −size) trims all of it.
    taps: the window; None for other maps.

    A block extended by `widths[k]` is `needs[k]`. The same window without padding has `outputs[k]` results there: those
    of the whole from `output_bounds[k]` on.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    needs: tuple[Interval, ...]
    taps: Taps | None = None

    @property
    def length(self) -> int:
        """The length of the input, without padding."""
        return sum(self.inputs)

    @property
    def output_length(self) -> int:
        return sum(self.outputs)

    @cached_property
    def input_bounds(self) -> tuple[Interval, ...]:
        return tuple(itertools.pairwise(offsets(self.inputs)))

    @cached_property
    def output_bounds(self) -> tuple[Interval, ...]:
        return tuple(itertools.pairwise(offsets(self.outputs)))

    @cached_property
    def widths(self) -> Pairs:
        """What extends each block, low and high, padding included: the widths of a halo exchange.

        Negative widths trim. With boundary "zero" the padding is zeros, with "periodic" the other end, and so on.
        """
        return tuple((a - start, stop - b) for (a, b), (start, stop) in self._pairs())

    @cached_property
    def halos(self) -> Pairs:
        """The widths without padding: only entries that the input has."""
        n = self.length
        inside = lambda i: min(max(i, 0), n)
        return tuple((a - inside(start), inside(stop) - b) for (a, b), (start, stop) in self._pairs())

    @cached_property
    def pads(self) -> Pairs:
        """The number of padding entries in each interval, before the input and after it."""
        n = self.length
        return tuple((min(stop, 0) - min(start, 0), max(stop, n) - max(start, n)) for start, stop in self.needs)

    def _pairs(self) -> Iterator[tuple[Interval, Interval]]:
        return zip(self.input_bounds, self.needs, strict=True)

    @property
    def heading(self) -> str:
        """The lengths of input and output, and the taps."""
        return f"{self.length} -> {self.output_length}{f', {self.taps}' if self.taps else ''}"

    def table(self, title: str = "") -> Table:
        """A row per block: its inputs, its outputs, what they need, the halo, and the padding."""

        def span(start: int, stop: int) -> str:
            return f"{start}:{stop}" if start < stop else "-"

        rows = [
            (
                str(k),
                span(*self.input_bounds[k]),
                span(*self.output_bounds[k]),
                span(*self.needs[k]),
                str(self.halos[k]),
                str(self.pads[k]) if any(self.pads[k]) else "",
            )
            for k in range(len(self.inputs))
        ]
        return Table(rows, ("block", "input", "output", "needs", "halo", "padding"), range(6), title)

    def _report(self) -> Report:
        return Report(self.heading, [self.table()], gap="\n")


@api_boundary
def plan_window(
    n: int,
    kernel: int,
    *,
    stride: int = 1,
    padding: Padding = 0,
    dilation: int = 1,
    ceil: bool = False,
    inputs: int | Sequence[int] = 1,
    outputs: Sequence[int] | None = None,
) -> Window:
    """The window over n entries in blocks: what each block of its output needs.

    padding: a number for both ends, (low, high), or a word; negative numbers crop.
        "valid": none.
        "same": ⌈n / stride⌉ outputs. Their (outputs − 1)·stride + extent − n padding entries, if more than 0, are
        shared by both ends; an odd one is at the high end ("same_lower": at the low end). The extent of the kernel is
        (kernel − 1)·dilation + 1.
    ceil: entries left over by the stride also give an output, unless it would start in the high padding. The high
        padding grows by what this output reads beyond it. As in `ceil_mode` of pooling.
    inputs: the sizes of the blocks of the input, or the number of balanced ones.
    outputs: the sizes of as many blocks of the output; None: balanced.

    A stencil that reads `low` entries before each entry and `high` after it has the kernel low + high + 1 and the
    padding (low, high). A kernel longer than the padded input has no outputs and needs nothing.

        >>> window = spmd.plan_window(10, 3, padding="same", inputs=3)
        >>> window.inputs, window.outputs
        ((4, 3, 3), (4, 3, 3))
        >>> window.needs, window.widths
        (((-1, 5), (3, 8), (6, 11)), ((1, 1), (1, 1), (1, 1)))
    """
    where = "spmd.plan_window"
    n = checked_integer(where, "n", n, 0)
    taps = checked_taps(where, n, kernel, stride, padding, dilation)
    sizes = _blocks(where, "inputs", n, inputs)
    taps, m = taps.fit(n, ceil)
    return plan_blocks(where, sizes, _blocks(where, "outputs", m, len(sizes) if outputs is None else outputs), taps)


@api_boundary
def plan_transposed(
    n: int,
    kernel: int,
    *,
    stride: int = 1,
    padding: Padding = 0,
    dilation: int = 1,
    output_padding: int = 0,
    inputs: int | Sequence[int] = 1,
    outputs: Sequence[int] | None = None,
) -> Window:
    """The window of a transposed convolution of n entries: of the convolution that it transposes.

    Input and output are exchanged: `Window.inputs` are the blocks of the result (here `outputs`), `Window.outputs`
    those of the n entries (here `inputs`). Block k of the entries contributes, without padding, to `needs[k]` of the
    result. Entries of the result in its halo belong to other blocks: a halo accumulation with `widths` adds them there.

    The result has (n − 1)·stride + extent − low − high + output_padding entries, 0 ≤ output_padding < stride; with
    padding "same" n·stride. stride, padding, dilation: of the convolution.

        >>> window = spmd.plan_transposed(4, 3, stride=2, inputs=2)
        >>> window.needs, window.widths
        (((0, 5), (4, 9)), ((0, 0), (1, 0)))
    """
    where = "spmd.plan_transposed"
    n = checked_integer(where, "n", n, 0)
    probe = checked_taps(where, 0, kernel, stride, 0, dilation)
    more = checked_integer(where, "output_padding", output_padding, 0)
    word = isinstance(padding, str) and padding.lower() != "valid"
    if more >= probe.stride or (word and more):
        raise LayoutError.at(
            where,
            argument="output_padding",
            got=f"{more}, with " + (f"padding {padding!r}" if word else f"stride {probe.stride}"),
            need="0: the word says how long the result is" if word else "less than the stride",
            mend="leave it out, or give the padding in numbers" if word else "add the rest to `n`, as zeros",
        )
    if word:
        length = n * probe.stride
        taps = checked_taps(where, length, kernel, stride, padding, dilation)
    else:
        taps = checked_taps(where, 0, kernel, stride, padding, dilation)
        length = max(0, taps(n - 1)[1] - taps.high + more) if n else 0
    sizes = _blocks(where, "inputs", n, inputs)
    return plan_blocks(
        where, _blocks(where, "outputs", length, len(sizes) if outputs is None else outputs), sizes, taps
    )


@api_boundary
def plan_needs(
    n: int,
    m: int,
    needs: Callable[[int], tuple[int, int]],
    *,
    inputs: int | Sequence[int] = 1,
    outputs: Sequence[int] | None = None,
) -> Window:
    """What each block of m outputs needs of n inputs, where output o reads the interval needs(o) = (start, stop).

    start and stop must not decrease from one output to the next. needs is called for the first and last output of each
    block only. Entries outside of 0:n are padding. inputs, outputs: as for `plan_window`.

        >>> window = spmd.plan_needs(8, 4, lambda o: (2 * o, 2 * o + 2), inputs=2)
        >>> window.needs, window.widths
        (((0, 4), (4, 8)), ((0, 0), (0, 0)))
    """
    where = "spmd.plan_needs"
    n, m = checked_integer(where, "n", n, 0), checked_integer(where, "m", m, 0)
    sizes = _blocks(where, "inputs", n, inputs)
    return plan_blocks(where, sizes, _blocks(where, "outputs", m, len(sizes) if outputs is None else outputs), needs)


def plan_blocks(
    where: str, inputs: tuple[int, ...], outputs: tuple[int, ...], needs: Callable[[int], tuple[int, int]]
) -> Window:
    if len(inputs) != len(outputs):
        raise LayoutError.at(
            where,
            got=f"{len(inputs)} block{'s' * (len(inputs) != 1)} of the input and {len(outputs)} of the output",
            need="as many: block k of both lies on the same worker",
            mend="give blocks of size 0 to workers without any",
        )
    hulls: list[Interval] = []
    before = (0, (-math.inf, -math.inf))
    starts, ends = offsets(inputs), offsets(outputs)
    for a, first, end in zip(starts, ends, ends[1:], strict=False):
        reads = []
        for o in dict.fromkeys((first, end - 1)) if first < end else ():
            interval = needs(o)
            try:
                start, stop = interval
            except (TypeError, ValueError):
                raise LayoutError.at(
                    where,
                    argument="needs",
                    got=f"{interval!r} for output {o}",
                    need="the interval that it reads, (start, stop)",
                    mend="(i, i + 1) reads entry i alone",
                ) from None
            start, stop = (checked_integer(where, "needs", end, None) for end in (start, stop))
            if start > stop or start < before[1][0] or stop < before[1][1]:
                after = "" if start > stop else f" after {before[1]} for output {before[0]}"
                raise LayoutError.at(
                    where,
                    argument="needs",
                    got=f"{(start, stop)} for output {o}{after}",
                    need="start <= stop, and neither smaller than for the output before",
                    mend="turn the input round if the map runs backwards; (start, start) reads nothing",
                )
            before = (o, (start, stop))
            reads.append((start, stop))
        hull = (reads[0][0], reads[-1][1]) if reads else (a, a)
        hulls.append(hull if hull[0] < hull[1] else (a, a))
    return Window(inputs, outputs, tuple(hulls), needs if isinstance(needs, Taps) else None)


# Checks


_MENDS = {
    "kernel": "1 reads one entry for each output",
    "stride": "1 skips nothing; outputs that lie closer than inputs are spmd.plan_transposed or spmd.plan_needs",
    "dilation": "1 reads neighbours",
    "padding": "round it to whole entries",
    "needs": "round down with //, or by math.floor",
}


def checked_integer(where: str, argument: str, value: Any, minimum: int | None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (minimum is not None and number < minimum):
        raise LayoutError.at(
            where,
            argument=argument,
            got=repr(value),
            need="an integer" + ("" if minimum is None else f" of at least {minimum}"),
            mend=_MENDS.get(argument, f"{minimum} is the least"),
        )
    return number


def checked_taps(where: str, n: int, kernel: int, stride: int, padding: Any, dilation: int) -> Taps:
    taps = Taps(
        *(checked_integer(where, name, v, 1) for name, v in zip(Taps._fields, (kernel, stride, dilation), strict=False))
    )
    word = padding.lower() if isinstance(padding, str) else None
    if word == "valid":
        return taps
    if word in ("same", "same_lower"):
        total = max((-(-n // taps.stride) - 1) * taps.stride + taps.extent - n, 0) if n else 0
        less, more = total // 2, total - total // 2
        low, high = (more, less) if word == "same_lower" else (less, more)
    elif word is None and isinstance(padding, Sequence) and len(padding) == 2:
        low, high = (checked_integer(where, "padding", p, None) for p in padding)
    elif isinstance(padding, Sequence):
        raise LayoutError.at(
            where,
            argument="padding",
            got=repr(padding),
            need='a number, (low, high), "valid", "same" or "same_lower"',
            mend='"same" for ceil(n / stride) outputs, 0 for no padding',
        )
    else:
        low = high = checked_integer(where, "padding", padding, None)
    return taps._replace(low=low, high=high)


def _blocks(where: str, argument: str, n: int, blocks: int | Sequence[int]) -> tuple[int, ...]:
    """The sizes of the blocks of n entries: balanced for a number of blocks, otherwise the given ones."""
    if not isinstance(blocks, Iterable):
        return block_sizes(n, checked_integer(where, argument, blocks, 1))
    sizes = tuple(checked_integer(where, argument, size, 0) for size in blocks)
    if not sizes or sum(sizes) != n:
        raise LayoutError.at(
            where,
            argument=argument,
            got=f"block sizes {sizes}, which add to {sum(sizes)}",
            need=f"sizes that add to the length of the {argument.removesuffix('s')}, {n}",
            mend="one size for each block, zeros included, or None for balanced blocks"
            if argument == "outputs"
            else "one size for each block, zeros included, or the number of balanced blocks",
        )
    return sizes
