"""Layouts: which box of a global array each worker of a mesh holds. Integers only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from operator import index
from typing import Any

from spmd.errors import LayoutError, SpecError
from spmd.layout_arguments import checked_axes, checked_copies, checked_integers
from spmd.layout_picture import BlockGrids
from spmd.representations.layouts import layout_report
from spmd.representations.tables import Report, Summarised
from spmd.spec import P, unreduced_error
from spmd.tracebacks import api_boundary

__all__ = ["Layout", "P", "Spec", "block_bounds", "block_sizes", "offsets"]

Box = tuple[tuple[int, int], ...]


def block_sizes(n: int, parts: int | Sequence[int]) -> tuple[int, ...]:
    """The sizes of balanced blocks of n items: the first n mod p of p blocks have one item more.

    parts: the number of blocks; or several numbers, major to minor: every block is split by the next number.
    """
    # int: a float key would hit the cache entry of the equal integer.
    return _block_sizes(int(index(n)), (parts,) if isinstance(parts, int) else tuple(parts))


@lru_cache(maxsize=4096)
def _block_sizes(n: int, parts: tuple[int, ...]) -> tuple[int, ...]:
    if not parts:
        return (n,)
    share, more = divmod(n, parts[0])
    major = (share + (i < more) for i in range(parts[0]))
    return tuple(itertools.chain.from_iterable(_block_sizes(m, parts[1:]) for m in major))


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """The start of each of consecutive blocks, and the end of the last."""
    return (0, *itertools.accumulate(sizes))


def block_bounds(n: int, parts: int | Sequence[int], index: int) -> tuple[int, int]:
    """The start and stop of block `index` of n items."""
    at = offsets(block_sizes(n, parts))
    return at[index], at[index + 1]


class Layout(Summarised):
    """Which box of a global array each worker of a mesh holds.

    shape: the global shape. spec: the axes that split each dimension. axes: the names and sizes of the mesh axes, major
    to minor. cuts: for each dimension the sizes of its blocks; None: balanced. Workers are numbered by their
    coordinates, last axis fastest. Along axes that the spec does not name they hold copies.
    copies: "invariant": copies of one value, which counts once; "varying": different values, which all count.

    `Layout.grid` lays the array out on a grid of chosen workers. Its spec is None.

        >>> layout = spmd.Layout((10, 3), P("x"), {"x": 4})
        >>> [layout.block_shape(worker) for worker in range(4)]
        [(3, 3), (3, 3), (2, 3), (2, 3)]
        >>> layout.slices(1)
        (slice(3, 6, None), slice(0, 3, None))
    """

    __slots__ = ("__dict__", "axes", "copies", "cuts", "shape", "spec", "workers")

    spec: Any
    """A P; None for a grid."""
    workers: tuple[int, ...] | None
    """The workers of a grid, last dimension fastest."""

    @api_boundary
    def __init__(
        self,
        shape: Sequence[int],
        spec: P,
        axes: Mapping[str, int],
        cuts: Sequence[Sequence[int] | None] | None = None,
        *,
        copies: str = "invariant",
    ):
        self.shape = checked_integers("spmd.Layout", "shape", shape, 0, "the global shape: (8, 3)")
        self.axes = checked_axes("spmd.Layout", axes)
        if not isinstance(spec, P):
            raise SpecError.at("spmd.Layout", argument="spec", got=repr(spec), need="a spec", mend='P("x") or P()')
        spec.check(self.axes, "spmd.Layout", "spec", len(self.shape), unreduced=True)
        self.spec = P(*spec.trimmed, *[None] * (len(self.shape) - len(spec.trimmed)), unreduced=spec.unreduced)
        self.workers = None
        self.copies = checked_copies(copies)
        self.cuts = self._cut([[self.axes[n] for n in names] for names in self.spec.dims], cuts)

    @classmethod
    @api_boundary
    def grid(
        cls,
        shape: Sequence[int],
        grid: Sequence[int],
        axes: Mapping[str, int],
        workers: Sequence[int] | None = None,
        cuts: Sequence[Sequence[int] | None] | None = None,
        *,
        copies: str = "varying",
    ) -> Layout:
        """An array cut into a Cartesian grid of blocks, on chosen workers of a mesh. Other workers hold nothing.

        grid: the number of blocks in each dimension. Further numbers count copies of each block. workers: the numbers
        of the workers that hold the blocks, last dimension of the grid fastest; by default the first prod(grid) ones.
        cuts, copies: as for `Layout`. The block of a worker that holds nothing has the shape (0, 0, ...).
        """
        where = "spmd.Layout.grid"
        self = cls.__new__(cls)
        self.shape = checked_integers(where, "shape", shape, 0, "the global shape: (8, 3)")
        self.axes, self.spec, self.copies = checked_axes(where, axes), None, checked_copies(copies)
        counts = checked_integers(
            where, "grid", grid, None, "a number of blocks for each dimension, 1 where it is whole"
        )
        ndim, total = len(self.shape), math.prod(self.axes.values())
        if len(counts) < ndim or min(counts, default=1) < 1:
            raise LayoutError.at(
                where,
                argument="grid",
                got=f"{counts} for an array of {ndim} dimensions",
                need="a number of blocks, 1 or more, for each dimension; numbers of copies may follow",
                mend="write 1 for a dimension that is whole",
            )
        chosen = range(math.prod(counts)) if workers is None else workers
        chosen = checked_integers(where, "workers", chosen, None, "their numbers: workers=[4, 5, 6, 7]")
        if len(chosen) != math.prod(counts) or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(total)):
            raise LayoutError.at(
                where,
                argument="workers",
                got=str(chosen),
                need=f"{math.prod(counts)} different workers of the {total} of the mesh, one for each block",
                mend="make the grid smaller, or the mesh larger",
            )
        self.workers = chosen
        self.cuts = self._cut([[n] for n in counts[:ndim]], cuts)
        return self

    def _cut(self, parts: Sequence[Sequence[int]], cuts) -> tuple[tuple[int, ...], ...]:
        """The sizes of the blocks in each dimension, checked; balanced ones for None."""
        per_dimension = [None] * len(self.shape) if cuts is None else [*cuts] if isinstance(cuts, Iterable) else None
        if per_dimension is None or len(per_dimension) != len(self.shape):
            raise LayoutError.at(
                "spmd.Layout",
                argument="cuts",
                got=repr(cuts),
                need=f"one for each of {len(self.shape)} dimensions",
                mend="None for a dimension in balanced blocks",
            )
        return tuple(self._sizes(d, parts[d], c) for d, c in enumerate(per_dimension))

    def _sizes(self, d: int, parts: Sequence[int], cut: Sequence[int] | None) -> tuple[int, ...]:
        balanced = block_sizes(self.shape[d], parts)
        if cut is None:
            return balanced
        cut = checked_integers(
            "spmd.Layout", f"cuts, dimension {d}", cut, None, "a size per block, zeros included, or None"
        )
        if len(cut) != len(balanced) or sum(cut) != self.shape[d] or min(cut, default=0) < 0:
            raise LayoutError.at(
                "spmd.Layout",
                argument=f"cuts, dimension {d}",
                got=f"block sizes {cut}",
                need=f"{len(balanced)} sizes that add to {self.shape[d]}",
                mend="give one size per block, zeros included, or None for balanced blocks",
            )
        return cut

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.shape, self.spec, tuple(self.axes.items()), self.cuts, self.copies, self.workers

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        more = "" if self.balanced else f", cuts={self.cuts}"
        if self.workers is not None:
            blocks = tuple(len(c) for c in self.cuts)
            count = math.prod(blocks)
            grid = (*blocks, len(self.workers) // count) if count < len(self.workers) else blocks
            more += "" if self.copies == "varying" else f", copies={self.copies!r}"
            return f"Layout.grid({self.shape}, {grid}, {self.axes}, {self.workers}{more})"
        more += "" if self.copies == "invariant" else f", copies={self.copies!r}"
        return f"Layout({self.shape}, {self.spec}, {self.axes}{more})"

    @cached_property
    def balanced(self) -> bool:
        """Whether every dimension is cut into balanced blocks."""
        parts = [[len(c)] for c in self.cuts]
        if self.spec is not None:
            parts = [[self.axes[n] for n in names] for names in self.spec.dims]
        return all(self.cuts[d] == block_sizes(self.shape[d], parts[d]) for d in range(len(self.shape)))

    @cached_property
    def size(self) -> int:
        """The number of workers."""
        return math.prod(self.axes.values())

    @cached_property
    def varying(self) -> frozenset[str]:
        """The axes along which workers hold different values; for a grid all axes."""
        return frozenset(self.axes if self.spec is None or self.copies == "varying" else self.spec.varying)

    @property
    def unreduced(self) -> frozenset[str]:
        """The axes along which workers hold parts of a sum."""
        return frozenset() if self.spec is None else self.spec.unreduced

    @cached_property
    def reduced(self) -> Layout:
        """The layout of the same array after these sums: along the axes that were unreduced lie copies."""
        return self.with_unreduced(()) if self.unreduced else self

    def with_unreduced(self, names: Iterable[str]) -> Layout:
        """The same blocks, of an array that is the sum of what lies along these axes."""
        return _with_unreduced(self, frozenset(names))

    def check(
        self, axes: Mapping[str, int], where: str, argument: str, ndim: int | None = None, *, unreduced: bool = False
    ) -> None:
        """Raise if the layout cannot replace a spec: other axes, other dimensions, or copies that vary."""
        if self.unreduced and not unreduced:
            raise unreduced_error(where, argument, self)
        if [*self.axes.items()] != [*axes.items()]:  # their order numbers the workers
            raise LayoutError.at(
                where,
                argument=argument,
                got=f"{self}, over the axes {self.axes}",
                need=f"a layout over the axes of the mesh, {dict(axes)}",
                mend="spmd.Layout(shape, spec, mesh.axes), spmd.Layout.grid(shape, grid, mesh.axes, workers)",
            )
        if ndim is not None and ndim != len(self.shape) and (self.shape or ndim > 1):
            raise LayoutError.at(
                where,
                argument=argument,
                got=f"{self} for an array of {ndim} dimension{'s' * (ndim != 1)}",
                need=f"a layout of an array of {ndim}",
                mend="lay out an array of this shape",
            )
        if self.has_copies and (self.spec is None or self.copies == "varying"):
            raise LayoutError.at(
                where,
                argument=argument,
                got=f"{self}, of which several workers hold one block",
                need="each block on one worker, or copies along axes that a spec leaves out",
                mend="in a body spmd.repartition(x, src, dst) copies blocks to more workers, and spmd.accumulate "
                "adds such copies",
            )

    def coordinates(self, worker: int) -> dict[str, int]:
        """The index of a worker along each axis."""
        place = {}
        for name, n in reversed(self.axes.items()):
            worker, place[name] = divmod(worker, n)
        return {name: place[name] for name in self.axes}

    def describe(self, worker: int) -> str:
        """A worker in error messages."""
        return f"worker {worker} ({', '.join(f'{k}={v}' for k, v in self.coordinates(worker).items())})"

    @cached_property
    def _places(self) -> dict[int, tuple[int, ...]]:
        """For a grid: which block of each dimension its workers hold."""
        assert self.workers is not None
        blocks = list(itertools.product(*(range(len(c)) for c in self.cuts)))
        each = len(self.workers) // len(blocks)
        return {w: blocks[k // each] for k, w in enumerate(self.workers)}

    def positions(self, worker: int) -> tuple[int, ...] | None:
        """The index of the block of a worker in each dimension; None if it holds nothing."""
        if self.spec is None:
            return self._places.get(worker)
        place = self.coordinates(worker)
        positions = []
        for names in self.spec.dims:
            at = 0
            for n in names:
                at = at * self.axes[n] + place[n]
            positions.append(at)
        return tuple(positions)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """For each worker the (start, stop) of its block in each dimension; zeros if it holds nothing."""
        at = [offsets(c) for c in self.cuts]
        places = map(self.positions, range(self.size))
        nothing = ((0, 0),) * len(self.shape)
        return tuple(
            nothing if place is None else tuple((at[d][k], at[d][k + 1]) for d, k in enumerate(place))
            for place in places
        )

    def block_shape(self, worker: int) -> tuple[int, ...]:
        if not self.shape and self.positions(worker) is None:
            return (0,)  # a scalar has no dimension that could be empty
        return tuple(stop - start for start, stop in self.boxes[worker])

    def slices(self, worker: int) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.boxes[worker])

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """For each worker the first worker that holds the same value. Copies that vary have no other owner."""
        first: dict[Any, int] = {}
        places = [self.positions(w) if self.copies == "invariant" else None for w in range(self.size)]
        parts = [[at[n] for n in sorted(self.unreduced)] for at in map(self.coordinates, range(self.size))]
        return tuple(
            w if place is None else first.setdefault((place, *part), w)
            for w, (place, part) in enumerate(zip(places, parts, strict=True))
        )

    @cached_property
    def sharers(self) -> dict[Any, list[list[int]]]:
        """A cache of `Mesh.sharers`: the workers of a process, grouped by the value that they hold."""
        return {}

    @cached_property
    def holders(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """For each block, by its index in each dimension, the workers that hold it."""
        workers_of: dict[tuple[int, ...], list[int]] = {}
        for w in range(self.size):
            place = self.positions(w)
            if place is not None:
                workers_of.setdefault(place, []).append(w)
        return {place: tuple(workers) for place, workers in workers_of.items()}

    @cached_property
    def has_copies(self) -> bool:
        """Whether several workers hold one block."""
        return any(len(workers) > 1 for workers in self.holders.values())

    def picture(self, title: str = "", *, ascii: bool | None = None, width: int = 100) -> str:
        """A drawing of the layout: a box for each block, with its shape and the workers that hold it.

        The coordinates of the workers and the range of indices stand on the left of a box and above it:

            w (5, 8)  P('x')
                ┌──────────┐
            x=0 │ worker 0 │
            0:3 │  (3, 8)  │
                ├──────────┤
            x=1 │ worker 1 │
            3:5 │  (2, 8)  │
                └──────────┘

        Two split dimensions give a grid. With more, there is a grid for each block of the first ones. Several workers
        in one box hold copies of one value; the first line says if the copies vary.
        title: precedes the shape. ascii: draw with + - | only; the default depends on the characters of standard
        output.
        width: in characters; wider grids are continued below.
        """
        return self.block_grids.draw(f"{title} {self.shape}  {self.lies}".lstrip(), ascii=ascii, width=width)

    def report(
        self, title: str = "Layout", rows: Sequence[tuple[str, str]] = (), itemsize: int | None = None
    ) -> Report:
        """What notebooks, rich and `summary` show: a table, and the blocks, to scale and coloured by worker.

        rows: more of the table, names and texts. itemsize: bytes of an entry, to give sizes in bytes.
        """
        return layout_report(title, self.lies, rows, self.block_grids, itemsize)

    _report = report

    @property
    def lies(self) -> str:
        """The spec or the grid, in short, and whether copies vary."""
        how = f"grid {tuple(len(c) for c in self.cuts)}"
        if self.spec is not None:
            how = str(P(*self.spec.trimmed, unreduced=self.unreduced))
        return f"{how}, copies vary" if self.copies == "varying" and self.has_copies else how

    @property
    def block_grids(self) -> BlockGrids:
        """The blocks as pictures show them."""
        return BlockGrids(self.cuts, None if self.spec is None else self.spec.dims, self.axes, self.holders)

    @classmethod
    def of_blocks(cls, shapes: Sequence[tuple[int, ...]], spec: P, axes: Mapping[str, int], where: str) -> Layout:
        """The layout of the array that a spec splits into blocks of these shapes."""
        ndim = len(shapes[0])
        spec.check(axes, where, "spec", ndim, unreduced=True)
        probe = cls((0,) * ndim, spec, axes)
        cuts: list[list[int | None]] = [[None] * len(c) for c in probe.cuts]
        for w, shape in enumerate(shapes):
            for d, k in enumerate(probe.positions(w) or ()):
                length = cuts[d][k]
                if len(shape) != ndim or (length is not None and length != shape[d]):
                    other = next(v for v in range(w) if len(shape) != ndim or (probe.positions(v) or ())[d] == k)
                    raise LayoutError.at(
                        f"{where}, laid out by {spec}",
                        got=f"a block of shape {list(shapes[other])} on {probe.describe(other)}, "
                        f"and one of shape {list(shape)} on {probe.describe(w)}",
                        need=f"blocks that join to one array: equal lengths in dimension {d}"
                        if len(shape) == ndim
                        else "blocks of as many dimensions everywhere",
                        mend="make the lengths agree, or name in the spec the axis that they differ along"
                        if len(shape) == ndim
                        else "np.expand_dims, or reduce everywhere over the same dimensions",
                    )
                cuts[d][k] = shape[d]
        sizes = [[k or 0 for k in c] for c in cuts]
        return cls([sum(c) for c in sizes], spec, axes, sizes)


@lru_cache(maxsize=1024)
def _with_unreduced(layout: Layout, names: frozenset[str]) -> Layout:
    if names == layout.unreduced:
        return layout
    spec = P(*layout.spec.dims, unreduced=names)
    return Layout(layout.shape, spec, layout.axes, layout.cuts, copies=layout.copies)


Spec = P | Layout
"""The layout of an array, as `spmd.map` and `spmd.put` take it."""
