"""Halos as integers, one dimension at a time: the entries that each block gets, from which blocks, and their places."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from spmd.errors import LayoutError
from spmd.layout import P, block_sizes, offsets
from spmd.operators.memo import memoised
from spmd.transport.algorithms.neighbours import Near
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
    """The pieces of all results along one dimension. Those of a result are computed when they are asked for: a worker
    needs those of its own, and of the few results that have entries of its block.

    sizes: the lengths of the blocks. widths, boundary: see `halo_pieces`.
    """

    sizes: tuple[int, ...]
    widths: tuple[Pair, ...]
    boundary: str

    @cached_property
    def _at(self) -> array[int]:
        """Where the blocks begin, and the end of the last."""
        return array("q", offsets(self.sizes))

    def _box(self, k: int) -> Pair:
        (low, high), at = self.widths[k], self._at
        start, stop = at[k] - low, at[k + 1] + high
        if stop < start:
            raise trimmed("halo_pieces", k, self.sizes[k], (low, high))
        if self.boundary == "none":
            start, stop = (min(max(end, 0), at[-1]) for end in (start, stop))
        return start, stop

    def length(self, k: int) -> int:
        """The length of result k."""
        start, stop = self._box(k)
        return stop - start

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the results."""
        return tuple(map(self.length, range(len(self.sizes))))

    @memoised
    def pieces(self, k: int) -> tuple[Piece, ...]:
        """The pieces of result k, in the order of their places; entries that no piece fills are zero."""
        return tuple(self._pieces(k))

    def _pieces(self, k: int) -> Iterator[Piece]:
        for run in _runs(*self._box(k), self._at[-1], self.boundary):
            yield from _owned(run, self._at)

    @cached_property
    def _reach(self) -> Pair:
        """How far boxes reach below and above their blocks, at most."""
        return max(0, *(low for low, _ in self.widths)), max(0, *(high for _, high in self.widths))

    def _readers(self, k: int) -> list[int]:
        """The results that may have entries of block k: those that reach it, and those that go beyond the ends."""
        (low, high), at, count = self._reach, self._at, len(self.sizes)
        readers = {*range(max(bisect_right(at, at[k] - high) - 1, 0), min(bisect_left(at, at[k + 1] + low), count))}
        if self.boundary not in ("none", "zero"):
            readers |= {*range(min(bisect_left(at, low), count))}
            readers |= {*range(max(bisect_right(at, at[-1] - high) - 1, 0), count)} if high else set()
        return sorted(readers)

    @memoised
    def outgoing(self, k: int) -> dict[int, Message]:
        """The messages that block k sends, by target."""
        by_target = {t: [p for p in self.pieces(t) if p.source == k] for t in self._readers(k) if t != k}
        return {t: _packed(pieces) for t, pieces in by_target.items() if pieces}

    @memoised
    def incoming(self, k: int) -> dict[int, Message]:
        """The messages that block k receives, by source."""
        by_source: dict[int, list[Piece]] = {}
        for p in self.pieces(k):
            by_source.setdefault(p.source, []).append(p)
        return {s: _packed(pieces) for s, pieces in sorted(by_source.items()) if s != k}

    @cached_property
    def moves(self) -> bool:
        """Whether any block receives entries of another."""
        return any(p.source != k for k in range(len(self.sizes)) for p in self._pieces(k))

    def own(self, k: int) -> tuple[Piece, ...]:
        """The pieces of result k that are entries of block k."""
        return tuple(p for p in self.pieces(k) if p.source == k)

    def keeps(self, k: int) -> bool:
        """Whether the result of block k is the block itself."""
        own = self.length(k) == self.sizes[k] and not self.gaps(k)
        return own and all(p[:4] == (k, 0, self.sizes[k], 0) for p in self.pieces(k))

    def gaps(self, k: int) -> tuple[Pair, ...]:
        """The ranges of result k that no piece fills, which are zero."""
        ends = (0, *(p.at + p.length for p in self.pieces(k)))
        starts = (*(p.at for p in self.pieces(k)), self.length(k))
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)


def _packed(pieces: Sequence[Piece]) -> Message:
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


@lru_cache(maxsize=256)
def halo_pieces(sizes: tuple[int, ...], widths: tuple[Pair, ...], boundary: str) -> HaloPieces:
    """The pieces of all results along one dimension.

    sizes: the lengths of its blocks. widths: (low, high) of each block, by which its result extends below and above
    the block; a negative width trims. boundary: the entries beyond the ends of the array; see `halo_exchange`.

    The result of a block at [start, stop) is the box [start - low, stop + high) of the array, continued at its ends.
    Its methods raise LayoutError if widths trim more than a block has, or an array without entries is to be continued.
    """
    return HaloPieces(sizes, widths, boundary)


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

    def near(self, d: int) -> Near:
        """Which lengths this worker needs to know. d: which dimension it is.

        Halos reach from one block to another if the blocks between are together shorter than the widest halo. A halo
        beyond an end of the array begins at that end, and so do the entries that it repeats: these are as near.
        With "reflect" they begin one entry further on, and are mirrored again if they reach the last entry of the
        array. So a worker that does not know all lengths must know that there are two entries more than the halo has.
        """
        widest, most = (max(f(w) for pair in self.pairs for w in pair) for f in (int, abs))
        return Near(d, widest + 2 * (self.boundary == "reflect"), self.boundary == "periodic", 3 * most + 3)


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

    line: the workers along it. pieces: of their results. k: the place of this worker's block. learnt: whether lengths
    are known to each worker only as far as they matter to it.
    """

    line: Group
    pieces: HaloPieces
    k: int
    learnt: bool

    @property
    def moves(self) -> bool:
        """Whether the workers meet. All say the same: where one does not know all lengths, they do."""
        return self.learnt or self.pieces.moves

    @property
    def idle(self) -> bool:
        """Whether no entry moves, and this worker's result is its block."""
        return not self.moves and self.pieces.keeps(self.k)

    @property
    def length(self) -> int:
        return self.pieces.length(self.k)

    @property
    def place(self) -> int | None:
        """The place of the block in its result; None if the result does not have all of it."""
        size = self.pieces.sizes[self.k]
        if size == 0:
            return 0
        whole = whole_piece(self.pieces.own(self.k), size)
        return whole.at if whole else None


def stages_of(
    dimensions: Sequence[Dimension],
    block: Shape,
    given: Sequence[tuple[int, ...] | None],
    learnt: Sequence[tuple[int, ...] | None],
    nothing: bool = False,
) -> list[Stage]:
    """The stages for a block of this shape. given, learnt: per dimension the lengths of all blocks, where they matter,
    in one of the two. nothing: whether an array of length 0 may be continued, with zeros."""
    stages = []
    for dim, n, given_lengths, learnt_lengths in zip(dimensions, block, given, learnt, strict=True):
        all_lengths = given_lengths if learnt_lengths is None else learnt_lengths
        lengths, pairs, k = ((n,), (dim.own,), 0) if dim.alone else (all_lengths, dim.pairs, dim.line.index)
        assert lengths is not None
        boundary = "zero" if nothing and not sum(lengths) and dim.boundary != "none" else dim.boundary
        pieces = halo_pieces(lengths, pairs, boundary)
        stages.append(Stage(dim.line, pieces, k, learnt_lengths is not None and not dim.alone))
    return stages
