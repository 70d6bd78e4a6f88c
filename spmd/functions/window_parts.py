"""A window over blocks, split into parts: the block itself, and slabs of its neighbours.

Integers only. A convolution is linear in its input, so its outputs are the sum of the outputs for each part alone. The
block itself then needs no copy with a halo around it, and slabs are thin.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from spmd.window import Window

__all__ = ["BlockParts", "Part", "Slabs", "plan_parts"]

Pair = tuple[int, int]


class Part(NamedTuple):
    """Some entries of the input. The window over them alone, with this padding (negative: cropped), gives what they
    contribute to these outputs of the block."""

    padding: tuple[Pair, ...]
    outputs: tuple[slice, ...]


class Slabs(NamedTuple):
    """What a block needs of its neighbours along dimension d. It exchanges halos of its two faces, concatenated.

    low, high: the thickness of its faces. widths, sizes: arguments of the halo exchange; in later dimensions the faces
    get halos of their own. halos: how many entries it receives, below and above; parts: these entries.
    """

    d: int
    low: int
    high: int
    widths: tuple[tuple[Pair, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    halos: Pair
    parts: tuple[Part, Part]


class BlockParts(NamedTuple):
    """own: the block itself. slabs: of its neighbours; None if some outputs need a block beyond the next, or do not
    touch their own block."""

    own: Part
    slabs: tuple[Slabs, ...] | None


@lru_cache(maxsize=256)
def plan_parts(windows: tuple[Window, ...], places: tuple[int, ...]) -> BlockParts:
    """The parts of the block with these indices. windows: of each dimension, with taps."""
    own = [_for_all_outputs(w, block, *w.input_bounds[block]) for w, block in zip(windows, places, strict=True)]
    moving = [d for d, w in enumerate(windows) if len(w.inputs) > 1 and any(map(any, _halos(w)))]
    near = all(_only_neighbours(windows[d]) for d in moving)
    return BlockParts(_part(own), tuple(_slabs(windows, places, own, d) for d in moving) if near else None)


_PartAlong = tuple[Pair, slice]
"""A part in one dimension: its padding, and its outputs."""


def _part(along: Sequence[_PartAlong]) -> Part:
    return Part(tuple(p for p, _ in along), tuple(outputs for _, outputs in along))


def _for_outputs(w: Window, block: int, start: int, stop: int, first: int, end: int) -> _PartAlong:
    """The entries start:stop, for the outputs first:end of a block."""
    taps, (begin, _) = w.taps, w.needs[block]
    assert taps is not None
    span = begin + first * taps.stride, begin + (end - 1) * taps.stride + taps.extent
    return (start - span[0], span[1] - stop) if end > first else (0, start - stop), slice(first, end)


def _for_all_outputs(w: Window, block: int, start: int, stop: int) -> _PartAlong:
    return _for_outputs(w, block, start, stop, 0, w.outputs[block])


def _for_reached_outputs(w: Window, block: int, start: int, stop: int) -> _PartAlong:
    """The entries start:stop, for the outputs that depend on them."""
    if start == stop:
        return (0, 0), slice(0, 0)
    taps, (begin, _) = w.taps, w.needs[block]
    assert taps is not None
    first = max(0, (start - begin - taps.extent) // taps.stride + 1)
    return _for_outputs(w, block, start, stop, first, min(w.outputs[block], -((begin - stop) // taps.stride)))


def _needed_inside(w: Window, block: int) -> Pair:
    """The interval that a block needs, without padding."""
    begin, end = (min(max(i, 0), w.length) for i in w.needs[block])
    return begin, end


def _halos(w: Window) -> list[Pair]:
    """How many entries each block needs before its own and after them."""
    halos = []
    for block, (start, stop) in enumerate(w.input_bounds):
        begin, end = _needed_inside(w, block)
        halos.append((max(0, start - begin), max(0, end - stop)) if begin < end else (0, 0))
    return halos


def _only_neighbours(w: Window) -> bool:
    """Whether the interval that each block needs touches the block, and reaches at most the next blocks."""
    halos, last = _halos(w), len(w.inputs) - 1
    for block, ((low, high), (start, stop)) in enumerate(zip(halos, w.input_bounds, strict=True)):
        begin, end = _needed_inside(w, block)
        if begin < end and (begin > stop or end < start):
            return False
        if (low and low > w.inputs[block - 1]) or (high and (block == last or high > w.inputs[block + 1])):
            return False
    return True


def _slabs(windows: Sequence[Window], places: Sequence[int], own: Sequence[_PartAlong], d: int) -> Slabs:
    w, block = windows[d], places[d]
    halos = _halos(w)
    lows = [0, *(high for _, high in halos[:-1])]  # what the block before each needs of it
    highs = [*(low for low, _ in halos[1:]), 0]
    no_halo = ((0, 0),)
    later = range(d + 1, len(windows))
    widths = [no_halo] * d + [tuple(halos)] + [windows[j].halos for j in later]
    sizes = [v.inputs for v in windows]
    sizes[d] = tuple(map(sum, zip(lows, highs, strict=True)))
    start, stop = w.input_bounds[block]
    low, high = halos[block]
    others = [_for_all_outputs(windows[j], places[j], *_needed_inside(windows[j], places[j])) for j in later]
    intervals = (start - low, start), (stop, stop + high)
    below, above = (_part([*own[:d], _for_reached_outputs(w, block, *interval), *others]) for interval in intervals)
    return Slabs(d, lows[block], highs[block], tuple(widths), tuple(sizes), (low, high), (below, above))
