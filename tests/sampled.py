"""Operators at random: any of them, along any axes of any mesh of 1 to 12 workers, on any layout that it accepts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from spmd import P
from spmd.layout import Layout
from spmd.mesh import make_mesh
from spmd.operators.all_to_all import AllToAll, Piece, RaggedAllToAll
from spmd.operators.base import Operator
from spmd.operators.gather import AllGather, Collect, ReduceScatter, Slice
from spmd.operators.halo import HaloAccumulate, HaloExchange
from spmd.operators.halo_geometry import BOUNDARIES, halo_pieces
from spmd.operators.permute import Permute
from spmd.operators.repartition import Accumulate, Repartition
from spmd.operators.root import Broadcast, Gather, Keep, Replicate, Scatter, SumReduce
from spmd.operators.sums import Sum, Vary
from spmd.testing import operator_cases

__all__ = ["MESHES", "Sample", "random_layout", "sample"]

MESHES = [
    dict(zip("xyz", dims, strict=False))
    for k in (1, 2, 3)
    for dims in itertools.product(range(1, 13), repeat=k)
    if math.prod(dims) <= 12 and dims.count(1) < 2
]


class Sample(NamedTuple):
    """What a dot test takes."""

    axes: dict[str, int]
    operator: Operator
    shape: tuple[int, ...]
    spec: P | Layout | None


class Draw:
    """What the samplers below draw from: a mesh, some of its axes in any order, shapes and layouts."""

    def __init__(self, rng: np.random.Generator, axes: Mapping[str, int] | None = None, most: int = 12):
        self.rng = rng
        if axes is None:
            size = rng.integers(1, most + 1)
            fitting = [a for a in MESHES if math.prod(a.values()) == size]
            axes = fitting[rng.integers(len(fitting))]
        self.axes = dict(axes)
        names = [str(name) for name in rng.permutation(list(self.axes))]
        k = self.upto(1, len(names))
        self.over, self.others = tuple(names[:k]), names[k:]
        self.n = math.prod(self.axes[a] for a in self.over)
        self.root = self.upto(0, self.n - 1)

    def upto(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def flag(self) -> bool:
        return self.upto(0, 1) == 1

    def shape(self, least: int = 0) -> list[int]:
        return [self.upto(0, 4) for _ in range(self.upto(least, 3))]

    def sizes(self, total: int, n: int | None = None) -> tuple[int, ...]:
        """Sizes, some of them 0, that add to `total`."""
        at = np.sort(self.rng.integers(0, total + 1, (self.n if n is None else n) - 1))
        return tuple(int(k) for k in np.diff([0, *at, total]))

    def of(self, op: Operator, shape, along: int | None = None) -> Sample:
        """The operator on an array that its axes split in dimension `along`, and others wherever they like."""
        dims: list[tuple[str, ...]] = [()] * len(shape)
        free = [d for d in range(len(shape)) if d != along]
        for name in self.others:
            if free and self.flag():
                d = free[self.upto(0, len(free) - 1)]
                dims[d] += (name,)
        cuts: list[tuple[int, ...] | None] = [None] * len(shape)
        if along is not None:
            dims[along] = self.over
            if self.flag():
                cuts[along] = self.sizes(shape[along])
        return Sample(self.axes, op, tuple(shape), Layout(shape, P(*(d or None for d in dims)), self.axes, cuts))


def _join(kind) -> Callable[[Draw], Sample]:
    def one(d: Draw) -> Sample:
        tiled = d.flag()
        shape = d.shape(least=int(tiled))
        axis = d.upto(0, len(shape) - tiled)
        if tiled:
            shape[axis] = d.upto(0, 9)
        return d.of(kind(d.over, axis, tiled), shape, axis if tiled else None)

    return one


def _split(kind) -> Callable[[Draw], Sample]:
    def one(d: Draw) -> Sample:
        shape, tiled = d.shape(least=1), d.flag()
        axis = d.upto(0, len(shape) - 1)
        shape[axis] = d.upto(0, 9) if tiled else d.n
        sizes = d.sizes(shape[axis]) if tiled and d.flag() else None
        made = d.of(kind(d.over, axis, tiled, sizes), shape)
        # The dimension that is split must be whole.
        assert isinstance(made.spec, Layout)
        assert made.spec.spec is not None
        dims = [None if k == axis else names or None for k, names in enumerate(made.spec.spec.dims)]
        return made._replace(spec=Layout(made.shape, P(*dims), d.axes))

    return one


def _permute(d: Draw) -> Sample:
    shape = d.shape()
    targets = d.rng.permutation(d.n)
    perm = tuple((k, int(t)) for k, t in enumerate(targets) if d.upto(0, 3))
    along = d.upto(0, len(shape) - 1) if shape and d.flag() else None
    if along is not None:
        shape[along] = d.upto(0, 9)
    return d.of(Permute(d.over, perm), shape, along)


def _all_to_all(d: Draw) -> Sample:
    shape = d.shape(least=2)
    if len(shape) < 2:
        shape = [*shape, 2]
    out, into = (int(k) for k in d.rng.permutation(len(shape))[:2])
    shape[out] = d.n
    d.others = []
    if d.flag():
        return d.of(AllToAll(d.over, out, into), shape)
    shape[out], shape[into] = d.upto(0, 7), d.upto(0, 9)
    sizes = d.sizes(shape[out]) if d.flag() else None
    return d.of(AllToAll(d.over, out, into, True, sizes), shape, into)


def _at_root(kind) -> Callable[[Draw], Sample]:
    return lambda d: d.of(kind(d.over, d.root), d.shape())


def _scatter(d: Draw) -> Sample:
    made = _split(lambda over, axis, tiled, sizes: Scatter(over, d.root, axis, sizes))(d)
    return made


def _gather(d: Draw) -> Sample:
    shape = d.shape(least=1)
    axis = d.upto(0, len(shape) - 1)
    shape[axis] = d.upto(0, 9)
    return d.of(Gather(d.over, d.root, axis), shape, axis)


def random_layout(d: Draw, shape, copies: bool) -> Layout:
    """A layout on any workers; copies: whether it may have varying copies."""
    total = math.prod(d.axes.values())
    if d.flag():
        dims: list[tuple[str, ...]] = [()] * len(shape)
        for name in d.rng.permutation(list(d.axes)):
            if shape and d.upto(0, 2):
                dims[d.upto(0, len(shape) - 1)] += (str(name),)
        parts = [math.prod(d.axes[a] for a in names) for names in dims]
        cuts = [d.sizes(n, k) if d.flag() else None for n, k in zip(shape, parts, strict=True)]
        varying = copies and d.flag()
        spec = P(*(names or None for names in dims))
        return Layout(shape, spec, d.axes, cuts, copies="varying" if varying else "invariant")
    counts, room = [], total
    for _ in shape:
        counts.append(d.upto(1, min(room, 4)))
        room //= counts[-1]
    each = d.upto(1, room) if copies else 1
    workers = [int(w) for w in d.rng.permutation(total)[: math.prod(counts) * each]]
    cuts = [d.sizes(n, k) if d.flag() else None for n, k in zip(shape, counts, strict=True)]
    return Layout.grid(shape, (*counts, each), d.axes, workers, cuts)


def _between(kind) -> Callable[[Draw], Sample]:
    def one(d: Draw) -> Sample:
        shape = tuple(d.upto(0, 6) for _ in range(d.upto(0, 3)))
        plain, other = random_layout(d, shape, False), random_layout(d, shape, True)
        src, dst = (plain, other) if kind is Repartition else (other, plain)
        return Sample(d.axes, kind(tuple(d.axes), src, dst), shape, src)

    return one


def _halo(kind) -> Callable[[Draw], Sample]:
    """Any widths, wider than the neighbour's block and negative ones, and any boundary, in each dimension."""

    def one(d: Draw) -> Sample:
        dims: list[tuple[str, ...]] = [() for _ in range(d.upto(1, 3))]
        for name in d.over:
            dims[d.upto(0, len(dims) - 1)] += (name,)
        cuts, widths, boundary = [], [], []
        for names in dims:
            n = math.prod(d.axes[a] for a in names)
            cut = d.sizes(d.upto(0, 2 * n + 1), n)
            pairs = [(d.upto(-1, 3), d.upto(-1, 4)) for _ in range(n if d.flag() else 1)]
            pairs = pairs if len(pairs) == n else pairs * n
            # What would trim more than there is, trims nothing.
            widths.append(tuple(w if sum(w) + k >= 0 else (0, 0) for k, w in zip(cut, pairs, strict=True)))
            boundary.append(BOUNDARIES[d.upto(0, 4 if sum(cut) else 1)])
            cuts.append(cut)
        spec = P(*(names or None for names in dims))
        given = (tuple(widths), tuple(boundary), tuple(cuts) if kind is HaloAccumulate or d.flag() else None)
        lines = cuts
        if kind is HaloAccumulate:
            lines = [halo_pieces(*line).lengths for line in zip(cuts, widths, boundary, strict=True)]
        shape = [sum(line) for line in lines]
        return Sample(d.axes, kind(spec.axes, spec, *given), tuple(shape), Layout(shape, spec, d.axes, lines))

    return one


def _ragged(d: Draw) -> Sample:
    """Pieces that may overlap, on both sides."""
    d.others = []
    shape, after = d.shape(least=1) or [3], d.upto(0, 6)
    shape[0] = before = d.upto(0, 6)

    def piece() -> Piece:
        size = d.upto(0, min(before, after, 3))
        return Piece(d.upto(0, d.n - 1), d.upto(0, d.n - 1), d.upto(0, before - size), d.upto(0, after - size), size)

    pieces = tuple(piece() for _ in range(d.upto(0, 6)))
    return d.of(RaggedAllToAll(d.over, pieces, (before, after)), shape)


SAMPLERS: dict[type[Operator], Callable[[Draw], Sample]] = {
    Vary: lambda d: d.of(Vary(d.over), d.shape()),
    Sum: lambda d: d.of(Sum(d.over), d.shape()),
    **{kind: _join(kind) for kind in (AllGather, Collect)},
    **{kind: _split(kind) for kind in (ReduceScatter, Slice)},
    Permute: _permute,
    AllToAll: _all_to_all,
    RaggedAllToAll: _ragged,
    **{kind: _halo(kind) for kind in (HaloExchange, HaloAccumulate)},
    **{kind: _at_root(kind) for kind in (Broadcast, SumReduce, Replicate, Keep)},
    Scatter: _scatter,
    Gather: _gather,
    **{kind: _between(kind) for kind in (Repartition, Accumulate)},
}


def sample(kind: type[Operator], seed: int, axes: Mapping[str, int] | None = None, most: int = 12) -> Sample:
    """An operator of this kind, on a mesh of these axes, or of any up to `most` workers. Of others than SAMPLERS knows,
    one of its cases."""
    d = Draw(np.random.default_rng([seed, len(kind.__name__)]), axes, most)
    if kind in SAMPLERS:
        return SAMPLERS[kind](d)
    mesh = make_mesh(tuple(d.axes.values()), tuple(d.axes), transport="local")
    cases = operator_cases(kind, mesh)
    case = cases[d.upto(0, len(cases) - 1)]
    return Sample(d.axes, case.operator, case.shape, case.spec)
