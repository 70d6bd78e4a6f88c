"""A window over blocks, taken apart: what a block's outputs see of the block itself, and of slabs of its neighbours.

Integers only. A convolution is linear in its input, so its outputs are the sum over such parts, each with zeros in the
place of the others. The part of the block itself needs no copy with a halo around it, and slabs are thin.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from spmd.layout import Layout, P
from spmd.window import Window
from spmd.window_nd import plan_windows

__all__ = ["Part", "Parts", "Slabs", "plan_parts"]

Pair = tuple[int, int]
Axes = tuple[str, ...]


class Part(NamedTuple):
    """Some entries of the input, in every dimension: `of` are the outputs of this block that see them, and the window
    over these entries alone, with this padding (negative: cropped), gives what those outputs see of them."""

    padding: tuple[Pair, ...]
    of: tuple[slice, ...]


class Slabs(NamedTuple):
    """What a block needs of its neighbours along dimension d. They are halos of both faces of the block, one beside the
    other: low entries of its beginning, high ones of its end.

    widths, sizes: of the halo exchange of the faces, which in later dimensions gives them their own halos. halos: how
    many entries come, below and above; parts: what the outputs see of them.
    """

    d: int
    low: int
    high: int
    widths: tuple[tuple[Pair, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    halos: Pair
    parts: tuple[Part, Part]


class Parts(NamedTuple):
    """windows: of each dimension. own: what the outputs see of the block itself. slabs: what they see of others, or
    None where they see of some block that is not next to theirs, or nothing of their own block."""

    windows: tuple[Window, ...]
    own: Part
    slabs: tuple[Slabs, ...] | None


@lru_cache(maxsize=256)
def plan_parts(
    lengths: tuple[tuple[int, ...], ...],
    names: tuple[Axes, ...],
    axes: tuple[tuple[str, int], ...],
    places: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[Pair, ...],
    dilation: tuple[int, ...],
) -> Parts:
    """lengths: of all blocks in each dimension. names: the axes that split it. axes: of the mesh, with their sizes.
    places: which block of each dimension is meant. The outputs lie in balanced blocks."""
    spec = P(*(n or None for n in names))
    source = Layout([sum(n) for n in lengths], spec, dict(axes), lengths)
    plan = plan_windows(source, kernel, stride=stride, padding=padding, dilation=dilation)
    windows = plan.dims
    own = [_all(w, k, *w.input_bounds[k]) for w, k in zip(windows, places, strict=True)]
    moving = [d for d, w in enumerate(windows) if len(w.inputs) > 1 and any(map(any, _halos(w)))]
    slabs = None
    if all(_beside(windows[d]) for d in moving):
        slabs = tuple(_slabs(windows, places, own, d) for d in moving)
    return Parts(windows, _part(own), slabs)


_Along = tuple[Pair, slice]
"""A part in one dimension: its padding, and the outputs that see it."""


def _part(along: Sequence[_Along]) -> Part:
    return Part(tuple(p for p, _ in along), tuple(of for _, of in along))


def _between(w: Window, k: int, start: int, stop: int, first: int, end: int) -> _Along:
    """What the outputs first:end of block k see of the entries start:stop."""
    taps, (begin, _) = w.taps, w.needs[k]
    assert taps is not None
    span = begin + first * taps.stride, begin + (end - 1) * taps.stride + taps.extent
    return (start - span[0], span[1] - stop) if end > first else (0, start - stop), slice(first, end)


def _all(w: Window, k: int, start: int, stop: int) -> _Along:
    """What all outputs see of these entries."""
    return _between(w, k, start, stop, 0, w.outputs[k])


def _some(w: Window, k: int, start: int, stop: int) -> _Along:
    """What those outputs see of these entries that see any."""
    if start == stop:
        return (0, 0), slice(0, 0)
    taps, (begin, _) = w.taps, w.needs[k]
    assert taps is not None
    first = max(0, (start - begin - taps.extent) // taps.stride + 1)
    return _between(w, k, start, stop, first, min(w.outputs[k], -((begin - stop) // taps.stride)))


def _inside(w: Window, k: int) -> Pair:
    """The interval that block k needs, without padding."""
    begin, end = (min(max(i, 0), w.length) for i in w.needs[k])
    return begin, end


def _halos(w: Window) -> list[Pair]:
    """How many entries each block needs before its own and after them."""
    found = []
    for k, (start, stop) in enumerate(w.input_bounds):
        begin, end = _inside(w, k)
        found.append((max(0, start - begin), max(0, end - stop)) if begin < end else (0, 0))
    return found


def _beside(w: Window) -> bool:
    """Whether each block needs no others than its own and those next to it, and sees or borders its own."""
    halos, last = _halos(w), len(w.inputs) - 1
    for k, ((low, high), (start, stop)) in enumerate(zip(halos, w.input_bounds, strict=True)):
        begin, end = _inside(w, k)
        if begin < end and (begin > stop or end < start):
            return False
        if (low and low > w.inputs[k - 1]) or (high and (k == last or high > w.inputs[k + 1])):
            return False
    return True


def _slabs(windows: Sequence[Window], places: Sequence[int], own: Sequence[_Along], d: int) -> Slabs:
    w, k = windows[d], places[d]
    halos = _halos(w)
    lows = [0, *(high for _, high in halos[:-1])]  # what the block before needs of each
    highs = [*(low for low, _ in halos[1:]), 0]
    nothing = ((0, 0),)
    later = range(d + 1, len(windows))
    widths = [nothing] * d + [tuple(halos)] + [windows[j].halos for j in later]
    sizes = [v.inputs for v in windows]
    sizes[d] = tuple(map(sum, zip(lows, highs, strict=True)))
    start, stop = w.input_bounds[k]
    (low, high), others = halos[k], [_all(windows[j], places[j], *_inside(windows[j], places[j])) for j in later]
    below, above = (_part([*own[:d], _some(w, k, *of), *others]) for of in ((start - low, start), (stop, stop + high)))
    return Slabs(d, lows[k], highs[k], tuple(widths), tuple(sizes), (low, high), (below, above))
