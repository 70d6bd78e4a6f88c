"""Every operator: what it does, that its adjoint is its adjoint, what it costs, and what it says to bad input.

Blocks hold small random integers, different on every worker, so that sums are exact and `==` is the only tolerance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from oracle import Each, Oracle

import spmd
from spmd import P
from spmd.device import to_host
from spmd.errors import ClosureError, LayoutError, MeshError, StateError
from spmd.kernels.windows import reach
from spmd.layout import Layout, block_sizes
from spmd.mesh import here
from spmd.operators.all_to_all import AllToAll, Piece, RaggedAllToAll
from spmd.operators.base import Operator
from spmd.operators.gather import AllGather, Collect, ReduceScatter, Slice
from spmd.operators.halo import HaloAccumulate, HaloExchange
from spmd.operators.move import Move
from spmd.operators.permute import Permute
from spmd.operators.repartition import Accumulate, Repartition
from spmd.operators.root import Broadcast, Enroot, Gather, Keep, Replicate, Rooted, Scatter, SumReduce, Unroot
from spmd.operators.stencil import Stencil
from spmd.operators.sums import Sum, Vary
from spmd.state import ROOTED, VARYING

MESHES = [
    dict(zip("xyz", dims, strict=False))
    for k in (1, 2, 3)
    for dims in itertools.product(range(1, 9), repeat=k)
    if math.prod(dims) <= 8 and dims.count(1) < 2
]


# Cases


class Case(NamedTuple):
    """An operator, the axes along which its argument varies, a block for each worker, and what comes of them."""

    axes: dict[str, int]
    op: Operator
    varying: tuple[str, ...]
    blocks: list[np.ndarray]
    expect: Callable[[Oracle, Each], Each]
    balanced: bool = True

    @property
    def out_varying(self) -> tuple[str, ...]:
        extra = [a for a in self.varying if a not in self.op.axes]
        if isinstance(self.op, Repartition | Accumulate):
            return tuple(extra) + tuple(a for a in self.op.axes if a in self.op.dst.varying)
        return tuple(extra) + (self.op.axes if self.op.target == VARYING else ())

    def __repr__(self) -> str:
        shapes = " ".join(str(list(b.shape)) for b in self.blocks)
        return f"{self.op} on {self.axes}, of blocks {shapes} {self.blocks[0].dtype} varying over {self.varying}"


class Draw:
    """Draws the mesh, the axes and whatever else a case needs."""

    def __init__(self, draw):
        self.draw = draw
        self.axes = draw(st.sampled_from(MESHES))
        self.world = Oracle(self.axes)
        subsets = [s for r in range(1, len(self.axes) + 1) for s in itertools.permutations(self.axes, r)]
        self.over = draw(st.sampled_from(subsets))
        self.n = math.prod(self.axes[a] for a in self.over)
        self.dims = tuple(self.axes[a] for a in self.over)
        self.dtype = np.dtype(draw(st.sampled_from(["f8", "f8", "f4", "c16"])))
        self.rng = np.random.default_rng(draw(st.integers(0, 999)))
        others = [a for a in self.axes if a not in self.over]
        self.extra = tuple(a for a in others if draw(st.booleans()))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def upto(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def shape(self, least: int = 0) -> list[int]:
        return self.draw(st.lists(st.sampled_from([2, 3, 1, 4, 0]), min_size=least, max_size=3))

    def sizes(self, total: int) -> tuple[int, ...]:
        """n sizes, some of them zero, that add to `total`."""
        cuts = np.sort(self.rng.integers(0, total + 1, self.n - 1))
        return tuple(int(k) for k in np.diff([0, *cuts, total]))

    def dim(self, ndim: int) -> int:
        """A dimension, counted from the front or from behind."""
        return self.upto(-ndim, ndim - 1)

    def case(self, op: Operator, shape_of: Callable[[int], Any], expect, balanced=True) -> Case:
        """A case in which the group's member k has a block of shape shape_of(k)."""
        varying = self.extra + (op.axes if op.source == VARYING else ())
        shapes = [()] * self.world.grid.size
        for row in self.world.rows(op.axes):
            for k, w in enumerate(row):
                held = op.source != ROOTED or k == op.root
                shapes[w] = tuple(shape_of(k)) if held else (0,)
        blocks = stated_blocks(self.world, self.rng, self.dtype, shapes, (*varying, *self.rooted(op)))
        return Case(self.axes, op, varying, blocks, expect, balanced)

    def rooted(self, op: Operator) -> tuple[str, ...]:
        return op.axes if op.source == ROOTED else ()


def stated_blocks(world: Oracle, rng, dtype, shapes, varying) -> list[np.ndarray]:
    """Random integers for each worker; equal along the axes that are not named."""
    blocks = [integers(rng, s, dtype) for s in shapes]
    fixed = tuple(a for a in world.axes if a not in varying)
    return world.replicate(Each(blocks), fixed).blocks if fixed else blocks


def integers(rng, shape, dtype) -> np.ndarray:
    a = rng.integers(-9, 10, shape)
    return (a + 1j * rng.integers(-9, 10, shape) if dtype.kind == "c" else a).astype(dtype)


def vary(d: Draw) -> Case:
    shape = d.shape()
    return d.case(Vary(d.over), lambda k: shape, lambda w, x: x)


def total(d: Draw) -> Case:
    shape = d.shape()
    return d.case(Sum(d.over), lambda k: shape, lambda w, x: w.psum(x, d.over))


def gather(kind) -> Callable[[Draw], Case]:
    def case(d: Draw) -> Case:
        if not d.flag():
            shape = d.shape()
            axis = d.dim(len(shape) + 1)
            return d.case(kind(d.over, axis), lambda k: shape, lambda w, x: w.all_gather(x, d.over, axis=axis))
        shape = d.shape(least=1)
        axis = d.dim(len(shape))
        balanced = d.flag()
        n = d.upto(0, 9)
        sizes = block_sizes(n, d.dims) if balanced else d.sizes(n)
        return d.case(
            kind(d.over, axis, True),
            lambda k: replaced(shape, axis, sizes[k]),
            lambda w, x: w.all_gather(x, d.over, axis=axis, tiled=True),
            balanced,
        )

    return case


def split(kind) -> Callable[[Draw], Case]:
    def case(d: Draw) -> Case:
        shape = d.shape(least=1)
        axis = d.dim(len(shape))
        tiled = d.flag()
        n = d.upto(0, 9) if tiled else d.n
        sizes = d.sizes(n) if tiled and d.flag() else None

        def expect(w: Oracle, x: Each) -> Each:
            if kind is Slice:
                return w.pslice(x, d.over, axis=axis, tiled=tiled, sizes=sizes)
            return w.psum_scatter(x, d.over, scatter_dimension=axis, tiled=tiled, sizes=sizes)

        return d.case(kind(d.over, axis, tiled, sizes), lambda k: replaced(shape, axis, n), expect)

    return case


def halo(kind) -> Callable[[Draw], Case]:
    """Along one dimension; tests/operators/test_halo.py has the others. The joined blocks are padded by np.pad."""
    modes = {"zero": "constant", "periodic": "wrap", "reflect": "reflect", "edge": "edge"}

    def case(d: Draw) -> Case:
        shape = d.shape(least=1)
        axis, n = d.upto(0, len(shape) - 1), d.upto(1, 9)
        sizes = block_sizes(n, d.dims) if d.flag() else d.sizes(n)
        widths, boundary = (d.upto(0, 3), d.upto(0, 3)), d.draw(st.sampled_from(list(modes)))
        beyond = {"constant_values": n} if boundary == "zero" else {}
        line = np.pad(np.arange(n), widths, modes[boundary], **beyond)  # entry n is the zero beyond the ends
        ends = np.cumsum([0, *sizes])
        stand = [line[ends[k] : ends[k + 1] + sum(widths)] for k in range(d.n)]
        spec = P(*[None] * axis, d.over)
        op = HaloExchange(d.over, spec, (0,) * axis + (widths,), boundary, (None,) * axis + (sizes,))

        def exchange(blocks: list) -> list:
            whole = np.concatenate([*blocks, np.zeros(replaced(shape, axis, 1), d.dtype)], axis)
            return [np.take(whole, s, axis) for s in stand]

        def accumulate(blocks: list) -> list:
            whole = np.zeros(replaced(shape, axis, n + 1), d.dtype)
            for s, b in zip(stand, blocks, strict=True):
                np.add.at(np.moveaxis(whole, axis, 0), s, np.moveaxis(b, axis, 0))
            return np.split(whole, ends[1:], axis)[:-1]

        if kind is HaloExchange:
            return d.case(op, lambda k: replaced(shape, axis, sizes[k]), lambda w, x: w.meet(x, d.over, exchange))
        lengths = [len(s) for s in stand]
        return d.case(op.H, lambda k: replaced(shape, axis, lengths[k]), lambda w, x: w.meet(x, d.over, accumulate))

    return case


def points(d: Draw) -> Case:
    """One dimension is split; offsets reach into all. The joined blocks are padded by np.pad."""
    shape = d.shape(least=1)
    axis = d.upto(0, len(shape) - 1)
    boundary = tuple(d.draw(st.sampled_from(["zero", "periodic"])) for _ in shape)
    least = [int(b == "periodic") for b in boundary]
    shape = [max(n, k) for n, k in zip(shape, least, strict=True)]
    n = d.upto(least[axis], 20)
    sizes = block_sizes(n, d.dims) if d.flag() else d.sizes(n)
    offsets = tuple(tuple(d.upto(-2, 2) for _ in shape) for _ in range(d.upto(1, 4)))
    weights = tuple(d.upto(-3, 3) for _ in offsets)
    # The lengths that the exchange along each dimension that goes on elsewhere learns: with them the cost is exact.
    reached = [any(pair) for pair in reach(offsets)]
    alone = [k for k, b in enumerate(boundary) if reached[k] and b == "periodic" and (k != axis or d.n == 1)]
    met = (None,) * len(alone) + (((*[None] * axis, tuple(sizes)),) if reached[axis] and d.n > 1 else ())
    op = Stencil(d.over, P(*[None] * axis, d.over), offsets, weights, boundary, met)

    def apply(blocks: list) -> list:
        whole = np.concatenate(blocks, axis)
        wide = whole
        for k, b in enumerate(boundary):
            wide = np.pad(
                wide,
                [(2, 2) if j == k else (0, 0) for j in range(len(shape))],
                "wrap" if b == "periodic" else "constant",
            )
        parts = [wide[tuple(slice(2 + i, 2 + i + m) for i, m in zip(o, whole.shape, strict=True))] for o in offsets]
        y = sum(w * part for w, part in zip(weights, parts, strict=True))
        return np.split(y, np.cumsum(sizes)[:-1], axis)

    return d.case(op, lambda k: replaced(shape, axis, sizes[k]), lambda w, x: w.meet(x, d.over, apply))


def permute(d: Draw) -> Case:
    ndim = d.upto(0, 3)
    targets = d.draw(st.permutations(range(d.n)))
    perm = tuple((k, t) for k, t in enumerate(targets) if d.flag())
    if d.flag():
        shape = [d.upto(0, 3) for _ in range(ndim)]
        return d.case(Permute(d.over, perm), lambda k: shape, lambda w, x: w.ppermute(x, d.over, perm))
    shapes = [[d.upto(0, 3) for _ in range(ndim)] for _ in range(d.n)]
    return d.case(Permute(d.over, perm), shapes.__getitem__, lambda w, x: w.ppermute(x, d.over, perm), balanced=False)


def all_to_all(d: Draw) -> Case:
    shape = d.shape(least=1)
    out, into = d.dim(len(shape)), d.dim(len(shape))
    if not d.flag():
        expect = lambda w, x: w.all_to_all(x, d.over, out, into)
        return d.case(AllToAll(d.over, out, into), lambda k: replaced(shape, out, d.n), expect)
    ndim = len(shape)
    balanced = d.flag()
    n = d.upto(0, 9)
    joined = block_sizes(n, d.dims) if balanced else d.sizes(n)
    sizes = None if balanced or d.flag() else d.sizes(shape[out])
    same = out % ndim == into % ndim
    lengths = [shape[out]] * d.n if same else joined
    return d.case(
        AllToAll(d.over, out, into, True, sizes),
        lambda k: replaced(shape, into, lengths[k]),
        lambda w, x: w.all_to_all(x, d.over, out, into, tiled=True, sizes=sizes),
        balanced and not same,
    )


def rooted(kind) -> Callable[[Draw], Case]:
    def case(d: Draw) -> Case:
        shape, root = d.shape(), d.upto(0, d.n - 1)

        def expect(w: Oracle, x: Each) -> Each:
            if kind in (Broadcast, Replicate):
                return w.replicate(x, d.over, root)
            x = w.sum_reduce(x, d.over) if kind is SumReduce else x
            return at_root(w, x, d.over, root)

        return d.case(kind(d.over, root), lambda k: shape, expect)

    return case


def moved(d: Draw) -> Case:
    shape, sender, receiver = d.shape(), d.upto(0, d.n - 1), d.upto(0, d.n - 1)
    held = lambda k: shape

    def expect(w: Oracle, x: Each) -> Each:
        return at_root(w, w.replicate(x, d.over, sender), d.over, receiver)

    return d.case(Move(d.over, sender, receiver), held, expect)


def unroot(d: Draw) -> Case:
    shape, root = d.shape(), d.upto(0, d.n - 1)
    empty = lambda b: np.zeros((0,) * max(1, len(shape)), b.dtype)
    expect = lambda w, x: w.meet(x, d.over, lambda bs: [b if k == root else empty(b) for k, b in enumerate(bs)])
    return d.case(Unroot(d.over, root, len(shape)), lambda k: shape, expect)


def enroot(d: Draw) -> Case:
    shape, root = d.shape(), d.upto(0, d.n - 1)
    held = lambda k: shape if k == root else (0,) * max(1, len(shape))
    return d.case(Enroot(d.over, root, len(shape)), held, lambda w, x: at_root(w, x, d.over, root))


def at_root(w: Oracle, x: Each, over, root: int) -> Each:
    """The root's block, and nothing elsewhere."""
    return w.meet(x, over, lambda bs: [b if k == root else np.zeros(0, b.dtype) for k, b in enumerate(bs)])


def scatter(d: Draw) -> Case:
    shape, root = d.shape(least=1), d.upto(0, d.n - 1)
    axis, n = d.dim(len(shape)), d.upto(0, 9)
    sizes = d.sizes(n) if d.flag() else None
    expect = lambda w, x: w.pslice(w.replicate(x, d.over, root), d.over, axis=axis, tiled=True, sizes=sizes)
    return d.case(Scatter(d.over, root, axis, sizes), lambda k: replaced(shape, axis, n), expect)


def join_at_root(d: Draw) -> Case:
    shape, root = d.shape(least=1), d.upto(0, d.n - 1)
    axis, n, balanced = d.dim(len(shape)), d.upto(0, 9), d.flag()
    sizes = block_sizes(n, d.dims) if balanced else d.sizes(n)
    expect = lambda w, x: at_root(w, w.all_gather(x, d.over, axis=axis, tiled=True), d.over, root)
    return d.case(Gather(d.over, root, axis), lambda k: replaced(shape, axis, sizes[k]), expect, balanced)


def ragged(d: Draw) -> Case:
    """Pieces that may overlap, on both sides."""
    shape, (before, after) = d.shape(least=1), (d.upto(0, 6), d.upto(0, 6))

    def piece() -> Piece:
        size = d.upto(0, min(before, after, 3))
        return Piece(d.upto(0, d.n - 1), d.upto(0, d.n - 1), d.upto(0, before - size), d.upto(0, after - size), size)

    pieces = tuple(piece() for _ in range(d.upto(0, 6)))

    def expect(blocks: list) -> list:
        new = [np.zeros((after, *b.shape[1:]), b.dtype) for b in blocks]
        for p in pieces:
            new[p.target][p.at : p.at + p.size] += blocks[p.source][p.start : p.start + p.size]
        return new

    op = RaggedAllToAll(d.over, pieces, (before, after))
    return d.case(op, lambda k: replaced(shape, 0, before), lambda w, x: w.meet(x, d.over, expect))


def replaced(shape: list[int], axis: int, n: int) -> list[int]:
    shape = list(shape)
    shape[axis] = n
    return shape


def a_layout(d: Draw, shape: tuple[int, ...], copies: str) -> Layout:
    """Any layout over the axes: a spec with cuts, or a grid on some workers; its copies vary only if that is asked."""
    axes = {a: d.axes[a] for a in d.over}
    if d.flag():
        dims: list[list[str]] = [[] for _ in shape]
        for a in d.draw(st.permutations(d.over)):
            k = d.upto(0, len(shape)) if shape else 0
            if k < len(shape):
                dims[k].append(a)
        parts = [math.prod(axes[a] for a in names) for names in dims]
        cuts = [uneven(d, n, p) if d.flag() else None for n, p in zip(shape, parts, strict=True)]
        return Layout(shape, P(*map(tuple, dims)), axes, cuts, copies=copies)
    left, grid = d.n, []
    for _ in range(len(shape) + (copies == "varying")):
        grid.append(d.upto(1, left))
        left //= grid[-1]
    workers = d.draw(st.permutations(range(d.n)))[: math.prod(grid)]
    cuts = [uneven(d, n, p) if d.flag() else None for n, p in zip(shape, grid, strict=False)]
    return Layout.grid(shape, grid, axes, workers, cuts, copies=copies)


def uneven(d: Draw, total: int, parts: int) -> tuple[int, ...]:
    cuts = np.sort(d.rng.integers(0, total + 1, parts - 1))
    return tuple(int(k) for k in np.diff([0, *cuts, total]))


def relayout(kind):
    def make(d: Draw) -> Case:
        shape = tuple(d.draw(st.lists(st.sampled_from([5, 3, 1, 8, 0]), max_size=3)))
        plain, any_ = (
            a_layout(d, shape, "invariant"),
            a_layout(d, shape, d.draw(st.sampled_from(["varying", "invariant"]))),
        )
        src, dst = (plain, any_) if kind is Repartition else (any_, plain)
        op = kind(d.over, src, dst)

        def expect(world: Oracle, x: Each) -> Each:
            out: list = [None] * world.grid.size
            for row in world.rows(d.over):
                whole = np.zeros(shape, d.dtype)
                for holders in src.holders.values():
                    for k in holders if src.copies == "varying" else holders[:1]:
                        whole[src.slices(k)] += x.blocks[row[k]]
                for k, w in enumerate(row):
                    nothing = dst.positions(k) is None
                    out[w] = np.zeros(dst.block_shape(k), d.dtype) if nothing else whole[dst.slices(k)]
            return Each(out)

        varying = d.extra + tuple(a for a in d.over if a in src.varying)
        shapes: list = [None] * d.world.grid.size
        for row in d.world.rows(d.over):
            for k, w in enumerate(row):
                shapes[w] = src.block_shape(k)
        return Case(d.axes, op, varying, stated_blocks(d.world, d.rng, d.dtype, shapes, varying), expect)

    return make


OPERATORS: dict[type[Operator], Callable[[Draw], Case]] = {
    Vary: vary,
    Sum: total,
    AllGather: gather(AllGather),
    Collect: gather(Collect),
    ReduceScatter: split(ReduceScatter),
    Slice: split(Slice),
    HaloExchange: halo(HaloExchange),
    HaloAccumulate: halo(HaloAccumulate),
    Stencil: points,
    Permute: permute,
    AllToAll: all_to_all,
    Broadcast: rooted(Broadcast),
    Replicate: rooted(Replicate),
    SumReduce: rooted(SumReduce),
    Keep: rooted(Keep),
    Move: moved,
    Unroot: unroot,
    Enroot: enroot,
    Scatter: scatter,
    Gather: join_at_root,
    RaggedAllToAll: ragged,
    Repartition: relayout(Repartition),
    Accumulate: relayout(Accumulate),
}


def cases(kind) -> st.SearchStrategy[Case]:
    return st.composite(lambda draw: OPERATORS[kind](Draw(draw)))()


def leaves(kind: type) -> set[type]:
    """The operators that have a name of their own."""
    children = {leaf for child in kind.__subclasses__() for leaf in leaves(child)}
    return children | ({kind} if "H" in vars(kind) and kind is not Operator else set())


def test_every_operator_has_its_cases():
    assert {k for k in leaves(Operator) if k.__module__.startswith("spmd.")} <= OPERATORS.keys()


# How they run


def on_workers(axes, f, *lists, scheduler="lockstep", check=True) -> list:
    """f on every worker's own blocks, each given as (a list of blocks, the axes it varies over): all that f returns."""
    out: list = [None] * math.prod(axes.values())

    def body():
        k = spmd.worker_index(tuple(axes))
        out[k] = f(*(spmd.varying(blocks[k], varying) for blocks, varying in lists))

    mesh = spmd.Mesh(**axes, transport="local", scheduler=scheduler)
    spmd.map(body, in_specs=(), out_specs=None, mesh=mesh, check=check)()
    return out


def copies_agree(world: Oracle, blocks: list, varying) -> bool:
    fixed = tuple(a for a in world.axes if a not in varying)
    if not fixed:
        return True
    first = world.replicate(Each(blocks), fixed).blocks
    return all(np.array_equal(to_host(a), to_host(b)) for a, b in zip(blocks, first, strict=True))


def inner(world: Oracle, varying, xs: list, ys: list):
    """The sum of x * y: over the workers along axes where they vary, once along the others."""
    fixed = tuple(a for a in world.axes if a not in varying)
    counted = world.rows(fixed)[:, 0] if fixed else range(world.grid.size)
    return sum(np.sum(to_host(xs[w]) * to_host(ys[w])) for w in counted)


def exactly(got: list, want: list) -> None:
    for w, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"worker {w}: {a.dtype}{a.shape}, not {b.dtype}{b.shape}"
        np.testing.assert_array_equal(a, b, err_msg=f"worker {w}")


def check_case(case: Case, scheduler: str, seed: int) -> None:
    """Forward, adjoint, and the adjoint of the adjoint."""
    note(repr(case))
    world, op = Oracle(case.axes), case.op
    root = op.axes if ROOTED in (op.source, op.target) else ()
    before = [b.copy() for b in case.blocks]
    x = (case.blocks, case.varying)

    # What it does, tracked and bare.
    results = on_workers(case.axes, op, x, scheduler=scheduler)
    want = [np.asarray(b) for b in case.expect(world, Each(case.blocks)).blocks]
    ys = [spmd.block(y) for y in results]
    exactly(ys, want)
    assert all(y.state.varying == set(case.out_varying) for y in results)
    if op.target != ROOTED:
        assert copies_agree(world, ys, case.out_varying)
    bare = on_workers(case.axes, op, x, scheduler=scheduler, check=False)
    exactly(bare, want)
    mesh = spmd.Mesh(**case.axes)
    for w, y in enumerate(ys):
        group = mesh.group(w, op.axes)
        assert op.out_shape(group, [case.blocks[m].shape for m in group.members], y.dtype) == y.shape

    # Its adjoint on the tape: back to the blocks that came in; twice, and once more as a linear map of its own.
    shapes = [y.shape for y in ys]
    target = case.out_varying + (root if op.target == ROOTED else ())
    cs = stated_blocks(world, np.random.default_rng(seed), ys[0].dtype, shapes, target)

    def back(x, c):
        _, pull = spmd.vjp(op, x)
        g, again = pull(c)[0], pull(c)[0]
        _, forward = spmd.vjp(lambda c: pull(c)[0], c)
        return g, again, forward(x)[0]

    pulled = on_workers(case.axes, back, x, (cs, case.out_varying), scheduler=scheduler)
    gs = [to_host(spmd.block(g)) for g, _, _ in pulled]
    assert [(g.shape, g.dtype) for g in gs] == [(b.shape, b.dtype) for b in case.blocks]
    assert all(g.state.varying == set(case.varying) for g, _, _ in pulled)
    assert op.source == ROOTED or copies_agree(world, gs, case.varying)
    exactly([spmd.block(again) for _, again, _ in pulled], gs)
    exactly([spmd.block(f) for _, _, f in pulled], ys)
    source = case.varying + (root if op.source == ROOTED else ())
    assert inner(world, target, ys, cs) == inner(world, source, case.blocks, gs)

    # The declared one: an involution, and on balanced blocks the same without a tape.
    assert op == op.H.H
    assert op.T == op.H
    if case.balanced:
        unbound = on_workers(case.axes, op.H, (cs, case.out_varying), scheduler=scheduler)
        exactly([spmd.block(g) for g in unbound], gs)
        assert all(g.state.varying == set(case.varying) for g in unbound)
    exactly(case.blocks, before)


@pytest.mark.parametrize("kind", OPERATORS, ids=lambda kind: kind.__name__)
@given(st.data(), st.sampled_from(["lockstep", "threads"]), st.integers(0, 99))
@settings(max_examples=15)
def test_operator(kind, data, scheduler, seed):
    check_case(data.draw(cases(kind)), scheduler, seed)


@pytest.mark.full
@pytest.mark.parametrize("kind", OPERATORS, ids=lambda kind: kind.__name__)
@given(st.data(), st.sampled_from(["lockstep", "threads"]), st.integers(0, 99))
@settings(max_examples=1000)
def test_operator_at_length(kind, data, scheduler, seed):
    check_case(data.draw(cases(kind)), scheduler, seed)


@pytest.mark.parametrize("kind", OPERATORS, ids=lambda kind: kind.__name__)
@given(st.data())
@settings(max_examples=20)
def test_declared_cost_is_what_was_sent(kind, data):
    case = data.draw(cases(kind))
    note(repr(case))
    declared = {}

    def body(x):
        worker = here("test")
        plan, y = case.op.plan(worker.group(case.op.axes), x.shape, x.dtype), case.op(x)
        cost = plan.costs(came=spmd.block(y).nbytes)
        declared[worker.index] = cost.messages, cost.nbytes
        if getattr(plan, "kind", "") not in ("broadcast", "scatter"):  # of which only the root knows the size
            assert plan.cost == declared[worker.index]
        return y

    with spmd.ledger() as log:
        on_workers(case.axes, body, (case.blocks, case.varying))
    sent = {w: (r.messages, r.bytes) for w, r in log.workers.items()}
    assert sent == declared
    assert all(dict(r.axes) == {(kind.__name__, case.op.axes): 1} for r in log.workers.values())


@pytest.mark.parametrize(
    ("op", "messages", "nbytes"),
    [
        (Sum(("x",)), [2] * 4, [128] * 4),  # the block, twice
        (AllGather(("x",)), [2] * 4, [192] * 4),  # one block, then two
        (Collect(("x",), 0, True), [2] * 4, [192] * 4),
        (ReduceScatter(("x",), 0, True), [2] * 4, [48] * 4),  # half of the block, then a quarter
        (AllToAll(("x",), 0, 0, True), [2] * 4, [64] * 4),  # two parts of four, twice
        (Permute(("x",), ((0, 1), (1, 2), (3, 3))), [1, 1, 0, 0], [64, 64, 0, 0]),
        (Broadcast(("x",), 1), [0, 2, 0, 1], [0, 128, 0, 64]),  # 1 -> 3 -> 0, and 1 -> 2
        (Replicate(("x",), 1), [0, 2, 0, 1], [0, 128, 0, 64]),
        (SumReduce(("x",), 1), [1, 0, 1, 1], [64, 0, 64, 64]),
        (Move(("x",), 1, 3), [0, 1, 0, 0], [0, 64, 0, 0]),
        (Move(("x",), 2, 2), [0] * 4, [0] * 4),
        (Vary(("x",)), [0] * 4, [0] * 4),
        (Slice(("x",), 0, True), [0] * 4, [0] * 4),
        (Keep(("x",), 1), [0] * 4, [0] * 4),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_a_block_of_64_bytes_costs(op, messages, nbytes):
    varying = op.axes if op.source == VARYING else ()
    with spmd.ledger() as log:
        on_workers({"x": 4}, op, ([np.ones(8)] * 4, varying))
    sent = [log.workers[w] for w in range(4)]
    assert ([r.messages for r in sent], [r.bytes for r in sent]) == (messages, nbytes)


def test_the_members_of_a_group_are_in_the_order_of_its_axes():
    for axes in MESHES:
        mesh, world = spmd.Mesh(**axes, transport="local"), Oracle(axes)
        for over in (s for r in range(1, len(axes) + 1) for s in itertools.permutations(axes, r)):
            for row in world.rows(over):
                for k, w in enumerate(row):
                    group = mesh.group(int(w), over)
                    assert (list(group.members), group.index) == (list(row), k)


@pytest.mark.parametrize("kind", [Vary, Slice, Keep])
@given(st.data())
@settings(max_examples=10)
def test_what_stays_in_place_sends_nothing(kind, data):
    case = data.draw(cases(kind))
    with spmd.ledger() as log:
        on_workers(case.axes, case.op, (case.blocks, case.varying))
    assert not any(r.messages or r.bytes or r.verbs for r in log.workers.values())


@pytest.mark.parametrize("how", ["sum", "mean", "max", "min"])
@given(st.data(), st.sampled_from(["lockstep", "threads"]))
@settings(max_examples=40)
def test_reductions_over_entries_and_workers(how, data, scheduler):
    """On blocks of any lengths, empty ones too, with the gradient of the whole array."""
    d = Draw(data.draw)
    shape = d.shape(least=1)
    axis = data.draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    dim = 0 if axis is None else axis
    sizes = d.sizes(data.draw(st.integers(1, 9)))
    if 0 in replaced(shape, dim, 1):
        return
    blocks = stated_blocks(
        d.world,
        d.rng,
        np.dtype("f8"),
        [replaced(shape, dim, sizes[k]) for k in places(d.world, d.over)],
        (*d.over, *d.extra),
    )
    x = (blocks, (*d.over, *d.extra))

    def body(x):
        y, pull = spmd.vjp(lambda x: getattr(spmd, how)(x, d.over, axis), x)
        return y, pull(np.ones(y.shape))[0]

    got = on_workers(d.axes, body, x, scheduler=scheduler)
    want = getattr(d.world, how)(Each(blocks), d.over, axis).blocks
    np.testing.assert_allclose(np.stack([spmd.block(y) for y, _ in got]), np.stack(want), rtol=1e-14)
    assert all(y.state.varying == set(d.extra) for y, _ in got)
    for row in d.world.rows(d.over):
        mine = [blocks[w] for w in row]
        joined = np.concatenate(mine, dim)
        _, pull = spmd.autodiff.vjp(lambda x: getattr(np, how)(x, axis), joined)
        (wanted,) = pull(np.ones_like(want[row[0]]))
        found = np.concatenate([spmd.block(got[w][1]) for w in row], dim)
        np.testing.assert_allclose(found, wanted, rtol=1e-14)


def places(world: Oracle, over) -> list[int]:
    """Each worker's place in its group."""
    return [int(k) for k in world.axis_index(over).blocks]


# Pytrees and numbers


def test_arguments_may_be_pytrees(scheduler):
    def body(x):
        tree = {"a": x, "b": (x * 2, [x + 1])}
        total = spmd.psum(tree, "x")
        mean, top, rolled = spmd.pmean(tree, "x"), spmd.pmax(tree, "x"), spmd.shift(tree, "x")
        return total, mean, top, rolled, spmd.all_gather(tree, "x", to="invariant")

    x = np.arange(8.0)
    blocks = x.reshape(4, 2)
    with spmd.Mesh(x=4, transport="local", scheduler=scheduler):
        total, mean, top, rolled, all_ = spmd.map(body, P("x"), (P(), P(), P(), P("x"), P()))(x)
    for k, f in (("a", lambda b: b), ("b", lambda b: b * 2)):
        of = lambda tree, k=k: (tree[k] if k == "a" else tree[k][0]).numpy()
        np.testing.assert_array_equal(of(total), f(blocks).sum(0))
        np.testing.assert_array_equal(of(mean), f(blocks).mean(0))
        np.testing.assert_array_equal(of(top), f(blocks).max(0))
        np.testing.assert_array_equal(of(rolled), np.roll(f(x), 2))
        np.testing.assert_array_equal(of(all_), f(blocks))


@pytest.mark.parametrize("check", [True, False])
def test_numbers_and_booleans_are_counted(check):
    def body(x):
        assert spmd.psum(1, "x") == 3
        assert spmd.psum(len(x), "x") == 7
        assert spmd.psum(True, "x") == 3
        assert spmd.pmax(len(x), "x") == 3
        assert spmd.pmean(1.5, "x") == 1.5
        assert spmd.sum(2.5, "x") == 7.5
        assert spmd.axis_size("x") == 3
        assert range(spmd.psum(1, "x")) == range(3)
        return spmd.psum(x > 2, "x") if len(x) == 2 else spmd.psum((x > 2)[:2], "x")

    with spmd.Mesh(x=3, transport="local"):
        counted = spmd.map(body, P("x"), P(), check=check)(np.arange(7.0))
    assert counted.dtype == np.int64
    np.testing.assert_array_equal(counted, [2, 2])


def test_integers_keep_their_dtype():
    with spmd.Mesh(x=3, transport="local"):
        y = spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P())(np.arange(3, dtype=np.int32))
    assert y.dtype == np.int32
    assert y.item() == 3


def test_infinities_and_nans_travel():
    x = np.array([np.inf, -np.inf, np.nan, 1.0])
    with spmd.Mesh(x=2, transport="local"):
        assert np.isnan(spmd.map(lambda x: spmd.max(x, "x"), P("x"), P())(x).item())
        assert spmd.map(lambda x: spmd.max(x, "x"), P("x"), P())(x[[0, 1, 3, 3]]).item() == np.inf
        np.testing.assert_array_equal(spmd.map(lambda x: spmd.shift(x, "x"), P("x"), P("x"))(x), x[[2, 3, 0, 1]])


# What is said to bad input


class Wrong(NamedTuple):
    name: str
    body: Callable
    error: type[Exception]
    words: str
    spec: P = P("x")


SIZED = {
    "psum_scatter": lambda x, sizes, tiled: spmd.psum_scatter(x, "x", tiled=tiled, sizes=sizes),
    "pslice": lambda x, sizes, tiled: spmd.pslice(spmd.psum(x, "x"), "x", tiled=tiled, sizes=sizes),
    "all_to_all": lambda x, sizes, tiled: spmd.all_to_all(x, "x", 0, 0, tiled=tiled, sizes=sizes),
}

ERRORS = [
    Wrong(
        "perm out of range",
        lambda x: spmd.ppermute(x, "x", [(0, 4)]),
        LayoutError,
        "ppermute | (0, 4) | target | 0 to 3 | % 4",
    ),
    Wrong(
        "negative place",
        lambda x: spmd.ppermute(x, "x", [(-1, 0)]),
        LayoutError,
        "ppermute | (-1, 0) | source | 0 to 3",
    ),
    Wrong(
        "target twice", lambda x: spmd.ppermute(x, "x", [(0, 1), (2, 1)]), LayoutError, "target 1 twice | at most once"
    ),
    Wrong(
        "source twice", lambda x: spmd.ppermute(x, "x", [(0, 1), (0, 2)]), LayoutError, "source 0 twice | at most once"
    ),
    Wrong(
        "axis of no mesh",
        lambda x: spmd.psum(x, "dta"),
        MeshError,
        "spmd.psum | 'dta' | Mesh(x=4, data=1) | write 'data'",
    ),
    Wrong("axis twice", lambda x: spmd.psum(x, ("x", "x")), MeshError, "spmd.psum | ('x', 'x') | each axis once"),
    Wrong(
        "sum of Invariant",
        lambda x: spmd.psum(x, "x"),
        StateError,
        "spmd.psum | does not vary over axis 'x' | pvary(x, 'x') | 4 workers",
        P(),
    ),
    Wrong(
        "sum over one axis too many",
        lambda x: spmd.psum(x, ("x", "data")),
        StateError,
        "does not vary over axis 'data' | name 'x' only",
    ),
    Wrong("scatter of Invariant", lambda x: spmd.psum_scatter(x, "x"), StateError, "spmd.psum_scatter | axis 'x'", P()),
    Wrong("sum_reduce of Invariant", lambda x: spmd.sum_reduce(x, "x"), StateError, "spmd.sum_reduce | axis 'x'", P()),
    Wrong("spmd.sum of Invariant", lambda x: spmd.sum(x, "x"), StateError, "axis 'x'", P()),
    Wrong(
        "slice of Varying", lambda x: spmd.pslice(x, "x"), StateError, "spmd.pslice | varies over axis 'x' | Invariant"
    ),
    Wrong("keep of Varying", lambda x: spmd.keep(x, "x"), StateError, "spmd.keep | varies over axis 'x'"),
    Wrong(
        "untiled scatter",
        lambda x: spmd.psum_scatter(x, "x", scatter_dimension=1),
        LayoutError,
        "spmd.psum_scatter | length 2 in dimension 1 | length 4 | tiled=True",
    ),
    Wrong(
        "untiled slice",
        lambda x: spmd.pslice(x, "x", axis=1),
        LayoutError,
        "spmd.pslice | length 2 | length 4 | tiled=True",
        P(),
    ),
    Wrong(
        "untiled all_to_all",
        lambda x: spmd.all_to_all(x, "x", 0, 0),
        LayoutError,
        "spmd.all_to_all | length 1 in dimension 0 | length 4 | tiled=True",
    ),
    Wrong(
        "axis out of range",
        lambda x: spmd.all_gather(x, "x", axis=2, tiled=True),
        LayoutError,
        "spmd.all_gather | argument axis | 2 for an array of 2 dimensions | -2 to 1",
    ),
    Wrong(
        "dimension out of range",
        lambda x: spmd.psum_scatter(x, "x", scatter_dimension=-3),
        LayoutError,
        "argument scatter_dimension | -3",
    ),
    Wrong("split_axis", lambda x: spmd.all_to_all(x, "x", 5, 0, tiled=True), LayoutError, "argument split_axis | 5"),
    Wrong("concat_axis", lambda x: spmd.all_to_all(x, "x", 0, 5, tiled=True), LayoutError, "argument concat_axis | 5"),
    Wrong(
        "rank 0, tiled",
        lambda x: spmd.all_gather(np.sum(x), "x", tiled=True),
        LayoutError,
        "an array of 0 dimensions | reshape(x, (1,))",
    ),
    Wrong(
        "rank 0, split",
        lambda x: spmd.psum_scatter(np.sum(x), "x", tiled=True),
        LayoutError,
        "an array of 0 dimensions | reshape(x, (1,))",
    ),
    Wrong(
        "reduced dimension", lambda x: spmd.mean(x, "x", 2), LayoutError, "spmd.mean | 2 for an array of 2 dimensions"
    ),
    Wrong(
        "sizes",
        lambda x: spmd.psum_scatter(x, "x", scatter_dimension=1, tiled=True, sizes=(1, 1)),
        LayoutError,
        "argument sizes | (1, 1) | 4 sizes that add to 2",
    ),
    Wrong(
        "to",
        lambda x: spmd.all_gather(x, "x", to="Varying"),
        StateError,
        'argument to | \'Varying\' | "varying" or "invariant"',
    ),
    Wrong("root", lambda x: spmd.sum_reduce(x, "x", 4), LayoutError, "argument root | 4 | 0 to 3"),
    Wrong("not rooted", lambda x: spmd.replicate(x, "x"), StateError, "spmd.replicate | Rooted(0) | spmd.keep"),
    Wrong(
        "other root",
        lambda x: spmd.broadcast(spmd.sum_reduce(x, "x", 1), "x"),
        StateError,
        "Rooted(1 along x) | Rooted(0)",
    ),
    Wrong(
        "uneven elsewhere",
        lambda x: spmd.all_gather(x[:, : 1 + (spmd.worker_index("x") > 1)], "x", tiled=True),
        LayoutError,
        "spmd.all_gather | [1, 1] (member 0) | [1, 2] (member 2) | dimension 0",
    ),
    *(
        Wrong(
            f"sizes {sizes} of {name}, tiled={tiled}",
            lambda x, f=f, sizes=sizes, tiled=tiled: f(x, sizes, tiled),
            LayoutError,
            f"spmd.{name}: argument sizes | got:    {sizes} | {mend}",
        )
        for name, f in SIZED.items()
        for sizes, tiled, mend in (
            ((1.5, 0.5, 1, 1), True, "one integer"),
            (3, True, "one integer"),
            ((1, 1, 1, 1), False, "tiled=True"),
        )
    ),
    Wrong("order of complex numbers", lambda x: spmd.pmax(x + 1j, "x"), StateError, "spmd.pmax | complex128 | np.abs"),
    Wrong("object", lambda x: spmd.psum({"a": "text"}, "x"), StateError, "spmd.psum | text | array of numbers"),
    Wrong("cast back", lambda x: spmd.pcast(x, "x", to="invariant"), StateError, "spmd.pcast | Invariant | spmd.psum"),
    Wrong("pcast to", lambda x: spmd.pcast(x, "x", to="rooted"), StateError, "spmd.pcast | 'rooted'"),
]


@pytest.mark.parametrize("wrong", ERRORS, ids=lambda w: w.name)
def test_errors_name_the_mend(wrong, scheduler):
    with spmd.Mesh(x=4, data=1, transport="local", scheduler=scheduler), pytest.raises(wrong.error) as caught:
        spmd.map(wrong.body, wrong.spec, P("x"))(np.ones((4, 2)))
    text = str(caught.value)
    missing = [word for word in wrong.words.split(" | ") if word not in text]
    assert not missing, f"{missing} not in:\n{text}"
    assert all(f"  {part}" in text for part in ("got:", "needed:", "mend:"))


@pytest.mark.parametrize(
    "f",
    [
        lambda: spmd.psum(1, "x"),
        lambda: spmd.pmean(1.0, "x"),
        lambda: spmd.axis_index("x"),
        lambda: spmd.axis_size("x"),
        lambda: spmd.worker_index("x"),
        lambda: spmd.varying(1.0, "x"),
        lambda: spmd.mean(np.ones(3), "x"),
        lambda: spmd.shift(np.ones(3), "x"),
    ],
)
def test_collectives_outside_of_a_body(f):
    with pytest.raises(MeshError, match="outside of any body") as caught:
        f()
    assert "spmd.map" in str(caught.value)


def test_empty_everywhere_has_no_maximum():
    with spmd.Mesh(x=2, transport="local"), pytest.raises(ValueError, match="without entries on every worker"):
        spmd.map(lambda x: spmd.max(x, "x"), P("x"), P())(np.zeros(0))


@pytest.mark.parametrize(
    "use",
    [
        lambda r, x: r + x,
        lambda r, x: x * r,
        lambda r, x: np.tanh(r),
        lambda r, x: np.concatenate([x, r]),
        lambda r, x: r[0],
        lambda r, x: float(r),
        lambda r, x: np.asarray(r),
        lambda r, x: spmd.psum(r, "x"),
    ],
)
def test_rooted_values_mix_with_nothing(use):
    def body(x):
        r = spmd.sum_reduce(x, "x")
        assert type(r) is Rooted
        assert (r.shape, r.dtype) == (x.shape, x.dtype)
        return use(r, x)

    with spmd.Mesh(x=2, transport="local"), pytest.raises(StateError) as caught:
        spmd.map(body, P("x"), P("x"))(np.ones(4))
    text = str(caught.value)
    assert "Rooted(0 along x) value float64[2]" in text
    assert "replicate" in text or "array of numbers" in text, text


def test_a_rooted_result_is_refused_with_the_mend():
    with spmd.Mesh(x=2, transport="local"), pytest.raises(StateError, match="replicate") as caught:
        spmd.map(lambda x: {"r": spmd.keep(x, "x")}, P(), P())(np.ones(4))
    assert "result['r']" in str(caught.value)


def test_arrays_from_outside_are_refused():
    outside: list = []
    with spmd.Mesh(x=2, transport="local"):

        def f(x):
            outside.append(x)
            return spmd.map(lambda y: spmd.psum(outside[-1], "x"), P("x"), P())(x)

        with pytest.raises(ClosureError, match="pass it to the map"):
            spmd.grad(f)(np.ones(2))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: spmd.all_gather(x, "x", axis=[0], tiled=True),
        lambda x: spmd.psum_scatter(x, "x", scatter_dimension=[0], tiled=True),
        lambda x: spmd.all_to_all(x, "x", [0], 0, tiled=True),
        lambda x: spmd.broadcast(spmd.keep(1.0, "x", [0]), "x"),
    ],
)
def test_an_argument_that_cannot_be_hashed_is_named_as_any_wrong_one(call):
    with pytest.raises(LayoutError, match=r"got: +\[0\]"):
        spmd.map(call, in_specs=P("x"), out_specs=P("x"), mesh=spmd.Mesh(x=2))(np.arange(4.0))
