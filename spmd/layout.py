"""Which worker holds which box of a global array: partition specs, block bounds, layouts. Integers only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from spmd.errors import LayoutError, SpecError, message

__all__ = ["Layout", "P", "block_bounds", "block_sizes", "offsets"]

Box = tuple[tuple[int, int], ...]


def block_sizes(n: int, parts: int | Sequence[int]) -> tuple[int, ...]:
    """How n items are split: the first n mod p of p parts get one more.

    parts: a number, or several from major to minor: each part of the first is split by the next, and so on.
    """
    parts = (parts,) if isinstance(parts, int) else tuple(parts)
    if not parts:
        return (n,)
    share, more = divmod(n, parts[0])
    major = (share + (i < more) for i in range(parts[0]))
    return tuple(itertools.chain.from_iterable(block_sizes(m, parts[1:]) for m in major))


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where each of some consecutive blocks begins, and where the last ends."""
    return (0, *itertools.accumulate(sizes))


def block_bounds(n: int, parts: int | Sequence[int], index: int) -> tuple[int, int]:
    """First and one past the last of the items that part `index` gets of n."""
    at = offsets(block_sizes(n, parts))
    return at[index], at[index + 1]


class P:
    """A partition spec: for each dimension the mesh axes that split it.

    `P("x", None)`: dimension 0 is split over axis x, dimension 1 is whole. `P(("x", "y"))`: split over x, then each
    block over y. Dimensions that are not mentioned are whole. Axes that are not mentioned hold copies.
    """

    __slots__ = ("dims",)

    def __init__(self, *dims: str | Sequence[str] | None):
        for d, names in enumerate(dims):
            if not (names is None or isinstance(names, str | tuple | list) and all(isinstance(n, str) for n in names)):
                raise SpecError(
                    message(
                        "spmd.P",
                        argument=f"dimension {d}",
                        got=repr(dims[d]),
                        need="an axis name, a tuple of axis names, or None",
                        mend='write P("x"), P(("x", "y")) or P(None, "x")',
                    )
                )
        self.dims: tuple[tuple[str, ...], ...] = tuple(
            () if d is None else (d,) if isinstance(d, str) else tuple(d) for d in dims
        )
        names = self.axes
        repeated = sorted({n for n in names if names.count(n) > 1})
        if repeated:
            raise SpecError(
                message(
                    "spmd.P",
                    argument=repr(self),
                    got=f"axis {repeated[0]!r} more than once",
                    need="each axis at most once: it can split one dimension only",
                    mend="split the other dimension over another axis, or leave it whole (None)",
                )
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split something, in the order of the dimensions."""
        return tuple(n for d in self.dims for n in d)

    def __len__(self) -> int:
        return len(self.dims)

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self.dims)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self.trimmed == other.trimmed

    def __hash__(self) -> int:
        return hash(self.trimmed)

    @property
    def trimmed(self) -> tuple[tuple[str, ...], ...]:
        """The dimensions without whole ones at the end: what equality of specs goes by."""
        dims = self.dims
        while dims and not dims[-1]:
            dims = dims[:-1]
        return dims

    def __repr__(self) -> str:
        def one(names: tuple[str, ...]) -> str:
            return "None" if not names else repr(names[0]) if len(names) == 1 else repr(names)

        return f"P({', '.join(one(d) for d in self.dims)})"

    def check(self, axes: Mapping[str, int], where: str, argument: str, ndim: int | None = None) -> None:
        """Raise where the spec names unknown axes, or is longer than the array has dimensions."""
        unknown = [n for n in self.axes if n not in axes]
        if unknown:
            raise SpecError(
                message(
                    where,
                    argument=argument,
                    got=f"{self}, which names axis {unknown[0]!r}",
                    need=f"axes of the mesh: {', '.join(map(repr, axes))}",
                    mend="name an axis of the mesh, or make a mesh that has this one",
                )
            )
        if ndim is not None and len(self.dims) > ndim:
            raise SpecError(
                message(
                    where,
                    argument=argument,
                    got=f"{self} for an array of {ndim} dimension{'s' * (ndim != 1)}",
                    need=f"a spec of at most {ndim} entr{'y' if ndim == 1 else 'ies'}",
                    mend="shorten the spec, or give the array the dimensions it names",
                )
            )


class Layout:
    """Which box of a global array each worker of a mesh holds.

    shape: the global shape. spec: the axes that split each dimension. axes: the names and sizes of the mesh axes,
    major to minor. cuts: for each dimension the sizes of its blocks, or None where they are balanced.
    Workers are numbered by their coordinates, last axis fastest. Along axes that the spec does not name the workers
    hold copies of one value.
    """

    __slots__ = ("__dict__", "axes", "cuts", "shape", "spec")

    def __init__(
        self,
        shape: Sequence[int],
        spec: P,
        axes: Mapping[str, int],
        cuts: Sequence[Sequence[int] | None] | None = None,
    ):
        self.shape = tuple(shape)
        self.axes = dict(axes)
        spec.check(self.axes, "spmd.Layout", "spec", len(self.shape))
        self.spec = P(*spec.trimmed, *[None] * (len(self.shape) - len(spec.trimmed)))
        given = cuts if cuts is not None else [None] * len(self.shape)
        self.cuts = tuple(self._sizes(d, c) for d, c in enumerate(given))

    def _sizes(self, d: int, cut: Sequence[int] | None) -> tuple[int, ...]:
        balanced = block_sizes(self.shape[d], [self.axes[n] for n in self.spec.dims[d]])
        if cut is None:
            return balanced
        if len(cut) != len(balanced) or sum(cut) != self.shape[d] or min(cut, default=0) < 0:
            raise LayoutError(
                message(
                    "spmd.Layout",
                    argument=f"cuts, dimension {d}",
                    got=f"block sizes {tuple(cut)}",
                    need=f"{len(balanced)} sizes that add to {self.shape[d]}",
                    mend="give one size per block, zeros included, or None for balanced blocks",
                )
            )
        return tuple(cut)

    def _key(self):
        return self.shape, self.spec, tuple(self.axes.items()), self.cuts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        uneven = "" if self.balanced else f", cuts={self.cuts}"
        return f"Layout({self.shape}, {self.spec}, {self.axes}{uneven})"

    @cached_property
    def balanced(self) -> bool:
        """Whether every dimension is split by the one formula."""
        return all(
            self.cuts[d] == block_sizes(self.shape[d], [self.axes[n] for n in names])
            for d, names in enumerate(self.spec.dims)
        )

    @cached_property
    def size(self) -> int:
        """The number of workers."""
        return math.prod(self.axes.values())

    @cached_property
    def varying(self) -> frozenset[str]:
        """The axes along which workers hold different blocks."""
        return frozenset(self.spec.axes)

    def coordinates(self, worker: int) -> dict[str, int]:
        """The worker's place along each axis."""
        place = {}
        for name, n in reversed(self.axes.items()):
            worker, place[name] = divmod(worker, n)
        return {name: place[name] for name in self.axes}

    def positions(self, worker: int) -> tuple[int, ...]:
        """Which block of each dimension the worker holds."""
        place = self.coordinates(worker)
        found = []
        for names in self.spec.dims:
            at = 0
            for n in names:
                at = at * self.axes[n] + place[n]
            found.append(at)
        return tuple(found)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """For each worker the (start, stop) of its block in each dimension."""
        at = [offsets(c) for c in self.cuts]
        return tuple(
            tuple((at[d][k], at[d][k + 1]) for d, k in enumerate(self.positions(w))) for w in range(self.size)
        )

    def block_shape(self, worker: int) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.boxes[worker])

    def slices(self, worker: int) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.boxes[worker])

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """For each worker the first that holds the same block."""
        first: dict[tuple[int, ...], int] = {}
        return tuple(first.setdefault(self.positions(w), w) for w in range(self.size))

    @classmethod
    def of_blocks(cls, shapes: Sequence[tuple[int, ...]], spec: P, axes: Mapping[str, int], where: str) -> Layout:
        """The layout in which workers hold blocks of these shapes, joined as the spec says."""
        ndim = len(shapes[0])
        spec.check(axes, where, "spec", ndim)
        probe = cls((0,) * ndim, spec, axes)
        cuts: list[list[int | None]] = [[None] * len(c) for c in probe.cuts]
        for w, shape in enumerate(shapes):
            for d, k in enumerate(probe.positions(w)):
                known = cuts[d][k]
                if len(shape) != ndim or (known is not None and known != shape[d]):
                    other = next(v for v in range(w) if len(shape) != ndim or probe.positions(v)[d] == k)
                    raise LayoutError(
                        message(
                            where,
                            argument=f"spec {spec}",
                            got=f"worker {probe.coordinates(other)} with a block of shape {list(shapes[other])}, "
                            f"worker {probe.coordinates(w)} with one of shape {list(shape)}",
                            need=f"blocks that join to one array: equal lengths in dimension {d}"
                            if len(shape) == ndim
                            else "blocks of as many dimensions everywhere",
                            mend="make the lengths agree, or name in the spec the axis that they differ along",
                        )
                    )
                cuts[d][k] = shape[d]
        sizes = [[k or 0 for k in c] for c in cuts]
        return cls([sum(c) for c in sizes], spec, axes, sizes)
