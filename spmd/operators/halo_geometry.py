"""Halos as integers, one dimension at a time: the entries that each block gets, from which blocks, and their places."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from spmd.errors import LayoutError
from spmd.layout import P, block_sizes, offsets
from spmd.transport.call import Group, Shape

__all__ = [
    "BOUNDARIES",
    "HaloPieces",
    "Message",
    "Pair",
    "Piece",
    "along",
    "halo_pieces",
    "lengths_before",
    "near_size",
    "trimmed",
]

Pair = tuple[int, int]
BOUNDARIES = ("none", "zero", "periodic", "reflect", "edge")


class Piece(NamedTuple):
    """Entries start:stop of block `source`, at place `at` of the result.

    flipped: they stand there in reverse. repeat: how often a single entry stands there.
    """

    source: int
    start: int
    stop: int
    at: int
    flipped: bool = False
    repeat: int = 1

    @property
    def length(self) -> int:
        return (self.stop - self.start) * self.repeat


class Message(NamedTuple):
    """Entries that one block sends to another.

    ranges: of entries of the sending block, each entry once, in order. pieces: parts of the message and their places in
    the result; start and stop count within the message, or for a block's own pieces within the block.
    """

    ranges: tuple[Pair, ...]
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class HaloPieces:
    """The pieces of all results along one dimension.

    sizes: the lengths of the blocks; lengths: those of the results. pieces: of each result, in the order of their
    places; entries that no piece fills are zero.
    """

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    @cached_property
    def messages(self) -> dict[Pair, Message]:
        """By source and target. A block's message to itself has its own pieces."""
        by_pair: dict[Pair, list[Piece]] = {}
        for target, pieces in enumerate(self.pieces):
            for p in pieces:
                by_pair.setdefault((p.source, target), []).append(p)
        return {
            (s, t): Message(((0, self.sizes[s]),), tuple(pieces)) if s == t else _packed(pieces)
            for (s, t), pieces in sorted(by_pair.items())
        }

    @cached_property
    def outgoing(self) -> tuple[dict[int, Message], ...]:
        """Per block: the messages that it sends, by target."""
        return self._by_block(lambda source, target: (source, target))

    @cached_property
    def incoming(self) -> tuple[dict[int, Message], ...]:
        """Per block: the messages that it receives, by source."""
        return self._by_block(lambda source, target: (target, source))

    def _by_block(self, ends: Callable[[int, int], tuple[int, int]]) -> tuple[dict[int, Message], ...]:
        """Per block: its messages, by the other block. ends: puts the block first."""
        messages: list[dict[int, Message]] = [{} for _ in self.sizes]
        for pair, message in self.messages.items():
            block, other = ends(*pair)
            if block != other:
                messages[block][other] = message
        return tuple(messages)

    @cached_property
    def moves(self) -> bool:
        """Whether any block receives entries of another."""
        return any(self.outgoing)

    def own(self, k: int) -> tuple[Piece, ...]:
        """The pieces of result k that are entries of block k."""
        message = self.messages.get((k, k))
        return message.pieces if message else ()

    def keeps(self, k: int) -> bool:
        """Whether the result of block k is the block itself."""
        own = self.lengths[k] == self.sizes[k] and not self.gaps[k]
        return own and all(p[:4] == (k, 0, self.sizes[k], 0) for p in self.pieces[k])

    @cached_property
    def gaps(self) -> tuple[tuple[Pair, ...], ...]:
        """Per result: the ranges that no piece fills, which are zero."""
        gaps_by_block = []
        for pieces, length in zip(self.pieces, self.lengths, strict=True):
            ends = (0, *(p.at + p.length for p in pieces))
            starts = (*(p.at for p in pieces), length)
            gaps_by_block.append(tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start))
        return tuple(gaps_by_block)


def _packed(pieces: list[Piece]) -> Message:
    """The message with the entries that these pieces need of a block, each once."""
    ranges: list[list[int]] = []
    for start, stop in sorted((p.start, p.stop) for p in pieces):
        if ranges and start <= ranges[-1][1]:
            ranges[-1][1] = max(ranges[-1][1], stop)
        else:
            ranges.append([start, stop])
    at = offsets([stop - start for start, stop in ranges])

    def shifted(p: Piece) -> Piece:
        k = next(k for k, (start, stop) in enumerate(ranges) if start <= p.start and p.stop <= stop)
        return p._replace(start=p.start - ranges[k][0] + at[k], stop=p.stop - ranges[k][0] + at[k])

    return Message(tuple((start, stop) for start, stop in ranges), tuple(map(shifted, pieces)))


class _Run(NamedTuple):
    """Entries start:stop of the whole dimension, and their place in the result: as `Piece`."""

    start: int
    stop: int
    at: int
    flipped: bool = False
    repeat: int = 1


@lru_cache(maxsize=1024)
def halo_pieces(sizes: tuple[int, ...], widths: tuple[Pair, ...], boundary: str) -> HaloPieces:
    """The pieces of all results along one dimension.

    sizes: the lengths of its blocks. widths: (low, high) of each block, by which its result extends below and above
    the block; a negative width trims. boundary: the entries beyond the ends of the array; see `halo_exchange`.

    The result of a block at [start, stop) is the box [start - low, stop + high) of the array, continued at its ends.
    Raises LayoutError if widths trim more than the block has, or an array without entries is to be continued.
    """
    at, n = offsets(sizes), sum(sizes)
    lengths, pieces = [], []
    for k, (low, high) in enumerate(widths):
        start, stop = at[k] - low, at[k + 1] + high
        if stop < start:
            raise trimmed("halo_pieces", k, sizes[k], (low, high))
        if boundary == "none":
            start, stop = (min(max(end, 0), n) for end in (start, stop))
        lengths.append(stop - start)
        runs = _runs(start, stop, n, boundary)
        pieces.append(tuple(piece for run in runs for piece in _owned(run, at)))
    return HaloPieces(sizes, tuple(lengths), tuple(pieces))


def _runs(start: int, stop: int, n: int, boundary: str) -> Iterator[_Run]:
    """The entries start:stop of an array of length n that is continued at its ends."""
    if 0 <= start <= stop <= n or boundary in ("none", "zero"):
        a, b = max(start, 0), min(stop, n)
        if a < b:
            yield _Run(a, b, a - start)
        return
    if start == stop:
        return
    if n == 0:
        raise LayoutError.at(
            "spmd.halo_exchange",
            argument="boundary",
            got=f'"{boundary}" for an array of length 0',
            need="an entry at least, to be repeated beyond the ends",
            mend='boundary="zero"',
        )
    if boundary == "edge" or (boundary == "reflect" and n == 1):  # a single entry is its own mirror image
        if start < 0:
            yield _Run(0, 1, 0, False, min(stop, 0) - start)
        a, b = max(start, 0), min(stop, n)
        if a < b:
            yield _Run(a, b, a - start)
        a = max(start, n)
        if a < stop:
            yield _Run(n - 1, n, a - start, False, stop - a)
        return
    period = n if boundary == "periodic" else 2 * (n - 1)
    for base in range(start // period * period, stop, period):
        a, b = max(start, base), min(stop, base + n)
        if a < b:
            yield _Run(a - base, b - base, a - start)
        a, b = max(start, base + n), min(stop, base + period)  # the way back, which leaves out the ends
        if a < b:
            mirror = base + 2 * n - 1
            yield _Run(mirror - b, mirror - a, a - start, True)


def _owned(run: _Run, at: Sequence[int]) -> list[Piece]:
    """A run cut at the ends of the blocks, which begin at `at`: pieces in the order of their places."""
    pieces = []
    k = bisect_right(at, run.start) - 1
    while k < len(at) - 1 and at[k] < run.stop:
        start, stop = max(run.start, at[k]), min(run.stop, at[k + 1])
        if start < stop:
            place = run.at + (run.stop - stop if run.flipped else start - run.start)
            pieces.append(Piece(k, start - at[k], stop - at[k], place, run.flipped, run.repeat))
        k += 1
    return pieces[::-1] if run.flipped else pieces


def lengths_before(
    lengths: tuple[int, ...], widths: tuple[Pair, ...], boundary: str, parts: Sequence[int]
) -> tuple[int, ...]:
    """The sizes of the blocks whose results have these lengths.

    With boundary "none" several sizes may fit: balanced blocks come first, then blocks that no halo reaches across.
    """
    if boundary != "none":
        return tuple(n - low - high for n, (low, high) in zip(lengths, widths, strict=True))
    total, count = sum(lengths), len(lengths)
    added = sum(max(w, 0) for pair in widths for w in pair)
    cut = sum(max(-w, 0) for pair in widths for w in pair)
    guesses: Iterator[tuple[int, ...]] = (block_sizes(n, parts) for n in range(max(total - added, 0), total + cut + 1))
    near = tuple(near_size(lengths[k], widths[k], boundary, k, count) for k in range(count))
    for sizes in (*guesses, near):
        fit = min(sizes) >= 0 and all(n + low + high >= 0 for n, (low, high) in zip(sizes, widths, strict=True))
        if fit and halo_pieces(sizes, widths, boundary).lengths == lengths:
            return sizes
    raise LayoutError.at(
        "spmd.halo_accumulate",
        argument="x",
        got=f"blocks of lengths {lengths}",
        need=f"lengths that blocks have after a halo of {widths}",
        mend="give the sizes of the blocks without halo: sizes=, or shape= for balanced ones",
    )


def near_size(length: int, widths: Pair, boundary: str, k: int, blocks: int) -> int:
    """The size of block k without its halo, if halos end within the next block."""
    low, high = widths
    ends = boundary == "none"
    low, high = min(low, 0) if ends and k == 0 else low, min(high, 0) if ends and k == blocks - 1 else high
    return length - low - high


def trimmed(where: str, block: int, size: int, widths: Pair) -> LayoutError:
    return LayoutError.at(
        f"spmd.{where}",
        argument="widths",
        got=f"{widths} for block {block}, of length {size}",
        need="widths that leave a length of zero at least: low + high + the block's length",
        mend="trim less; give each block its own widths, [(low, high), ...], where one pair does not suit all",
    )


def along(d: int, start: int, stop: int | None) -> tuple[slice, ...]:
    """The entries start:stop of dimension d."""
    return (*(slice(None),) * d, slice(start, stop))


class Dimension(NamedTuple):
    """One dimension of a worker: the workers along it, the widths of all their blocks, and the boundary."""

    line: Group
    pairs: tuple[Pair, ...]
    boundary: str

    @property
    def alone(self) -> bool:
        """Whether this worker exchanges nothing along it: there is one block, or halos only trim."""
        return self.line.size == 1 or all(low <= 0 and high <= 0 for low, high in self.pairs)

    @property
    def own(self) -> Pair:
        return self.pairs[self.line.index]


@lru_cache(maxsize=1024)
def dimensions_of(
    spec: P,
    widths: tuple[tuple[Pair, ...], ...],
    boundary: str | tuple[str, ...],
    axes: tuple[str, ...],
    sides: Shape,
    members: Shape,
    place: int,
    ndim: int,
) -> tuple[Dimension, ...]:
    """The dimensions of the block of the worker at `place` of a group."""
    dimensions = []
    for d in range(ndim):
        line = _line(axes, sides, members, place, spec.dims[d] if d < len(spec) else ())
        pairs = widths[d] if d < len(widths) else ((0, 0),)
        end = boundary if isinstance(boundary, str) else boundary[d] if d < len(boundary) else "none"
        dimensions.append(Dimension(line, pairs * line.size if len(pairs) == 1 else pairs, end))
    return tuple(dimensions)


def _line(axes: tuple[str, ...], sides: Shape, members: Shape, place: int, names: tuple[str, ...]) -> Group:
    """The members of a group along `axes` that differ from the one at `place` along `names` only."""
    strides = _strides(axes, sides)
    own = [place // strides[n][0] % strides[n][1] for n in names]
    first = place - sum(k * strides[n][0] for k, n in zip(own, names, strict=True))
    at = 0
    for k, n in zip(own, names, strict=True):
        at = at * strides[n][1] + k
    return _line_from(axes, sides, members, first, names).of_member(at)


@lru_cache(maxsize=1024)
def _line_from(axes: tuple[str, ...], sides: Shape, members: Shape, first: int, names: tuple[str, ...]) -> Group:
    """`_line`, as its first member sees it."""
    strides, places = _strides(axes, sides), [first]
    for n in names:
        places = [p + j * strides[n][0] for p in places for j in range(strides[n][1])]
    return Group(names, tuple(strides[n][1] for n in names), tuple(members[p] for p in places), 0)


def _strides(axes: tuple[str, ...], sides: Shape) -> dict[str, tuple[int, int]]:
    """By axis: by how much places differ along it, and its size."""
    strides, stride = {}, 1
    for name, n in zip(reversed(axes), reversed(sides), strict=True):
        strides[name] = (stride, n)
        stride *= n
    return strides


def whole_piece(pieces: Sequence[Piece], length: int) -> Piece | None:
    """A piece that is the whole block or message, not flipped, if there is one."""
    return next((p for p in pieces if p[1:3] == (0, length) and p.length == length and not p.flipped), None)


class Stage(NamedTuple):
    """The exchange along one dimension.

    line: the workers along it. pieces: of their results. k: the place of this worker's block.
    """

    line: Group
    pieces: HaloPieces
    k: int

    @property
    def idle(self) -> bool:
        """Whether no entry moves, and this worker's result is its block."""
        return not self.pieces.moves and self.pieces.keeps(self.k)

    @property
    def length(self) -> int:
        return self.pieces.lengths[self.k]

    @property
    def place(self) -> int | None:
        """The place of the block in its result; None if the result does not have all of it."""
        size = self.pieces.sizes[self.k]
        if size == 0:
            return 0
        whole = whole_piece(self.pieces.own(self.k), size)
        return whole.at if whole else None


def stages_of(
    dimensions: Sequence[Dimension], block: Shape, sizes: Sequence[tuple[int, ...] | None], nothing: bool = False
) -> list[Stage]:
    """The stages for a block of this shape. sizes: per dimension the lengths of all blocks, where they matter. nothing:
    whether an array of length 0 may be continued, with zeros."""
    stages = []
    for dim, n, all_lengths in zip(dimensions, block, sizes, strict=True):
        lengths, pairs, k = ((n,), (dim.own,), 0) if dim.alone else (all_lengths, dim.pairs, dim.line.index)
        assert lengths is not None
        boundary = "zero" if nothing and not sum(lengths) and dim.boundary != "none" else dim.boundary
        stages.append(Stage(dim.line, halo_pieces(lengths, pairs, boundary), k))
    return stages
