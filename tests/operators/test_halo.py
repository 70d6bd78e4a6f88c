"""Halos: the plan of one dimension by itself, then the operators against a padded global array.

The oracle continues the global array at its ends by np.pad, on the indices, and cuts out each worker's box.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from launch import PROGRAMS, each_mpi, launch
from mpi_programs import halo as halo_program
from mpi_programs import near_halos

import spmd
from spmd import P
from spmd.device import to_host
from spmd.errors import LayoutError, SpecError, StateError
from spmd.kernels import on_device
from spmd.kernels.memory import pool
from spmd.layout import Layout, block_sizes, offsets
from spmd.mesh import here
from spmd.operators import halo, halo_geometry
from spmd.operators import halo_geometry as planner
from spmd.operators.halo import HaloAccumulate, HaloExchange
from spmd.operators.halo_geometry import BOUNDARIES, Message, halo_pieces
from spmd.testing import check_adjoint

MODES = {"zero": "constant", "periodic": "wrap", "reflect": "reflect", "edge": "edge"}


# The oracle


def indices(sizes, widths, boundary: str) -> list[np.ndarray]:
    """For each block the indices of the global array that stand in its result; -1 for a zero."""
    at, n = offsets(sizes), sum(sizes)
    far = max([1, *(w for pair in widths for w in pair)])
    if boundary == "none":
        line = np.pad(np.arange(n), far, constant_values=-2)
    elif boundary == "zero":
        line = np.pad(np.arange(n), far, constant_values=-1)
    else:
        line = np.pad(np.arange(n), far, MODES[boundary]) if n else np.full(2 * far, -3)
    boxes = [
        line[a - low + far : b + high + far] for (a, b), (low, high) in zip(itertools.pairwise(at), widths, strict=True)
    ]
    return [box[box != -2] for box in boxes]


def sized(sizes, widths) -> bool:
    return all(n + low + high >= 0 for n, (low, high) in zip(sizes, widths, strict=True))


class Problem(NamedTuple):
    """An array laid out on a mesh, and halos. widths: of every block of every dimension."""

    axes: dict[str, int]
    layout: Layout
    widths: tuple
    boundary: tuple[str, ...]
    dtype: str
    seed: int
    sizes: Any

    @property
    def mesh(self) -> spmd.Mesh:
        return spmd.make_mesh(tuple(self.axes.values()), tuple(self.axes), transport="local", scheduler="lockstep")

    @property
    def operator(self) -> HaloExchange:
        spec = P(*self.layout.spec.trimmed)
        return HaloExchange(spec.axes, spec, self.widths, self.boundary, self.sizes)

    def array(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed)
        x = rng.integers(-9, 10, self.layout.shape)
        if self.dtype == "?":
            x %= 2
        if np.dtype(self.dtype).kind == "c":
            x = x + 1j * rng.integers(-9, 10, x.shape)
        return x.astype(self.dtype)

    def selections(self) -> list[list[np.ndarray]]:
        """For each worker, in each dimension, the indices that stand in its result."""
        cuts = self.layout.cuts
        found = [indices(cuts[d], self.widths[d], self.boundary[d]) for d in range(len(cuts))]
        places = [self.layout.positions(w) for w in range(self.layout.size)]
        return [[found[d][k] for d, k in enumerate(place)] for place in places]

    def expect(self, x: np.ndarray) -> list[np.ndarray]:
        return [chosen(x, picks) for picks in self.selections()]

    def add_back(self, ys: list[np.ndarray]) -> np.ndarray:
        """The adjoint of `expect`."""
        out = np.zeros(self.layout.shape, ys[0].dtype)
        for y, picks in zip(ys, self.selections(), strict=True):
            for d, pick in enumerate(picks):  # zeros of the boundary go nowhere
                y = np.take(y, np.flatnonzero(pick >= 0), d)
            np.add.at(out, np.ix_(*(pick[pick >= 0] for pick in picks)), y)
        return out

    def blocks(self, x: np.ndarray) -> list[np.ndarray]:
        return [np.ascontiguousarray(x[self.layout.slices(w)]) for w in range(self.layout.size)]

    def __str__(self) -> str:
        return f"{self.operator} on {self.layout}, {self.dtype}"


def chosen(x: np.ndarray, picks: list[np.ndarray]) -> np.ndarray:
    for d, pick in enumerate(picks):
        x = np.take(np.concatenate([x, np.zeros_like(x, shape=(*x.shape[:d], 1, *x.shape[d + 1 :]))], d), pick, d)
    return x


MESHES = [
    dict(zip("xyz", dims, strict=False))
    for k in (1, 2, 3)
    for dims in itertools.product(range(1, 13), repeat=k)
    if math.prod(dims) <= 12 and dims.count(1) < 2
]


@st.composite
def problems(draw, dtypes=("f8", "f4", "c16", "i4", "?"), copies=True) -> Problem:
    axes = draw(st.sampled_from(MESHES))
    ndim = draw(st.integers(1, 3))
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for name in draw(st.permutations(list(axes))):
        d = draw(st.integers(0, ndim if copies else ndim - 1))
        if d < ndim:
            dims[d].append(name)
    parts = [[axes[n] for n in names] for names in dims]
    shape, cuts, widths, boundary = [], [], [], []
    for part in parts:
        count = math.prod(part)
        if draw(st.booleans()):
            cut = block_sizes(draw(st.integers(0, 4 * count)), part)
        else:
            cut = tuple(draw(st.sampled_from([2, 1, 0, 5, 3])) for _ in range(count))
        width = st.sampled_from([1, 0, 2, 1, 7, -1, -2])
        if draw(st.booleans()):
            wide = ((draw(width), draw(width)),) * count
        else:
            wide = tuple((draw(width), draw(width)) for _ in range(count))
        # What would trim more than there is, trims nothing.
        wide = tuple((w if sum(w) + n >= 0 else (0, 0)) for n, w in zip(cut, wide, strict=True))
        shape.append(sum(cut))
        cuts.append(cut)
        widths.append(wide)
        boundary.append(draw(st.sampled_from(BOUNDARIES if sum(cut) else ("none", "zero"))))
    layout = Layout(shape, P(*dims), axes, cuts)
    sizes = draw(st.sampled_from([None, tuple(cuts)]))
    dtype = draw(st.sampled_from(dtypes))
    return Problem(axes, layout, tuple(widths), tuple(boundary), dtype, draw(st.integers(0, 99)), sizes)


def on_workers(problem: Problem, f, blocks: list, scheduler="lockstep", check=True) -> list:
    """f on each worker's own block, which varies over the axes that split the array: what it returns."""
    found: list = [None] * problem.layout.size

    def body():
        w = spmd.worker_index(tuple(problem.axes))
        found[w] = f(spmd.varying(blocks[w], problem.layout.spec.axes))

    mesh = spmd.make_mesh(tuple(problem.axes.values()), tuple(problem.axes), transport="local", scheduler=scheduler)
    spmd.map(body, in_specs=(), out_specs=None, mesh=mesh, check=check)()
    return found


def same(got: list, want: list) -> None:
    for w, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"worker {w}: {a.dtype}{a.shape}, not {b.dtype}{b.shape}"
        np.testing.assert_array_equal(to_host(a), b, err_msg=f"worker {w}")


# The plan: integers only


def expanded(plan) -> list[np.ndarray]:
    """The indices of the global array that the pieces of a plan put into each result."""
    at, found = offsets(plan.sizes), []
    for k, length in enumerate(plan.lengths):
        line = np.full(length, -1)
        for p in plan.pieces(k):
            entries = np.arange(at[p.source] + p.start, at[p.source] + p.stop)
            assert p.repeat == 1 or len(entries) == 1
            assert (line[p.at : p.at + p.length] == -1).all(), "two pieces in one place"
            line[p.at : p.at + p.length] = entries[::-1] if p.flipped else entries
        found.append(line)
    return found


def messages(plan) -> dict:
    """The messages between blocks, by source and target."""
    return {(s, t): m for t in range(len(plan.sizes)) for s, m in plan.incoming(t).items()}


def own_message(plan, k: int) -> Message:
    return Message(((0, plan.sizes[k]),), plan.own(k))


def by_messages(plan) -> list[np.ndarray]:
    """The same, as the messages carry it."""
    at = offsets(plan.sizes)
    found = [np.full(length, -1) for length in plan.lengths]
    count = range(len(plan.sizes))
    assert {(s, t): m for s in count for t, m in plan.outgoing(s).items()} == messages(plan)
    for (s, t), m in [*messages(plan).items(), *(((k, k), own_message(plan, k)) for k in count)]:
        content = np.concatenate([np.arange(at[s] + start, at[s] + stop) for start, stop in m.ranges])
        assert len(np.unique(content)) == len(content) == m.length, "an entry twice in a message"
        for p in m.pieces:
            part = content[p.start : p.stop]
            found[t][p.at : p.at + p.length] = part[::-1] if p.flipped else part
    return found


def check_plan(sizes, widths, boundary) -> None:
    plan = halo_pieces(tuple(sizes), tuple(widths), boundary)
    want = indices(sizes, widths, boundary)
    assert list(plan.lengths) == [len(w) for w in want]
    for found in (expanded(plan), by_messages(plan)):
        for k, (got, line) in enumerate(zip(found, want, strict=True)):
            assert got.tolist() == line.tolist(), f"block {k} of {plan}"


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_plan_of_every_small_dimension(boundary):
    for sizes in itertools.chain(itertools.product(range(4), repeat=2), itertools.product(range(3), repeat=3)):
        for low, high in itertools.product((-1, 0, 1, 2, 5), repeat=2):
            widths = tuple((low, high) if n + low + high >= 0 else (0, 0) for n in sizes)
            if sum(sizes) or boundary in ("none", "zero"):
                check_plan(sizes, widths, boundary)


@given(st.data(), st.sampled_from(BOUNDARIES))
@settings(max_examples=150)
def test_plan(data, boundary):
    sizes = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=12).filter(sum))
    width = st.integers(-3, 20)
    widths = [data.draw(st.tuples(width, width)) for _ in sizes]
    widths = [w if sum(w) + n >= 0 else (0, 0) for n, w in zip(sizes, widths, strict=True)]
    check_plan(sizes, widths, boundary)


def test_a_block_may_leave_its_own_entries_behind():
    """Where it is trimmed on one side by as much as the halo is wide on the other."""
    plan = halo_pieces((1, 2), ((1, -1), (2, -2)), "zero")
    assert plan.lengths == plan.sizes
    assert [plan.keeps(k) for k in range(2)] == [False, False]
    assert [len(plan.pieces(k)) for k in range(2)] == [0, 1]
    layout = Layout((3,), P("x"), {"x": 2}, [(1, 2)])
    for widths in (((1, -1), (2, -2)), ((-1, 1), (-2, 2)), ((-1, 2), (3, -2))):
        for boundary in BOUNDARIES:
            check_problem(Problem({"x": 2}, layout, (widths,), (boundary,), "f8", 1, None), "lockstep")


def test_a_plan_reads_well():
    plan = halo_pieces((3, 0, 2), ((1, 1), (0, 0), (1, 1)), "reflect")
    assert [[tuple(p) for p in plan.pieces(k)] for k in range(3)] == [
        [(0, 1, 2, 0, True, 1), (0, 0, 3, 1, False, 1), (2, 0, 1, 4, False, 1)],
        [],
        [(0, 2, 3, 0, False, 1), (2, 0, 2, 1, False, 1), (2, 0, 1, 3, True, 1)],
    ]
    assert plan.lengths == (5, 0, 4)
    assert [sorted(plan.outgoing(k)) for k in range(3)] == [[2], [], [0]]


def test_windows_of_distdl_reach_the_owners_that_they_need():
    plan = halo_pieces((4, 4, 3), ((0, 2), (2, 2), (2, 0)), "none")  # n=11, kernel 5, padding 2
    assert plan.lengths == (6, 8, 5)
    assert [sorted(plan.outgoing(k)) for k in range(3)] == [[1], [0, 2], [1]]
    widths = ((0, 0), (0, 0), (0, 1), (-1, 2), (-2, 1), (-1, 0))  # n=20, kernel 2, stride 2
    plan = halo_pieces((4, 4, 3, 3, 3, 3), widths, "none")
    assert plan.lengths == (4, 4, 4, 4, 2, 2)
    assert [sorted(plan.outgoing(k)) for k in range(6)] == [[], [], [], [2], [3], [4]]


def test_an_entry_travels_once_however_often_it_is_needed():
    plan = halo_pieces((2, 2), ((6, 6), (6, 6)), "periodic")
    assert plan.outgoing(0)[1].ranges == ((0, 2),)
    assert len(plan.outgoing(0)[1].pieces) == 6 // 2 + 1
    plan = halo_pieces((3, 3), ((0, 0), (9, 0)), "edge")
    assert plan.outgoing(0)[1].ranges == ((0, 3),)


# The operators


def check_problem(problem: Problem, scheduler: str) -> None:
    op, x = problem.operator, problem.array()
    blocks, want = problem.blocks(x), problem.expect(x)
    before = [b.copy() for b in blocks]
    results = on_workers(problem, op, blocks, scheduler)
    assert all(y.state.varying == set(problem.layout.spec.axes) for y in results)
    same([spmd.block(y) for y in results], want)
    bare = on_workers(problem, op, blocks, scheduler, check=False)
    same(bare, want)
    assert all(b.flags.c_contiguous and (on_device(b) or not b.flags.writeable) for b in bare)
    same(blocks, before)
    if np.dtype(problem.dtype).kind not in "fc":
        return
    # Back to exactly the blocks that came in.
    rng = np.random.default_rng(problem.seed)
    cs = [rng.integers(-9, 10, y.shape).astype(y.dtype) for y in want]
    cs = [cs[first] for first in problem.layout.owners]  # copies along the axes that split nothing
    counted = [w for w, first in enumerate(problem.layout.owners) if w == first]
    summed = problem.add_back([c if w in counted else np.zeros_like(c) for w, c in enumerate(cs)])

    def back(x):
        c = spmd.varying(cs[here("test").index], op.axes)
        return spmd.vjp(op, x)[1](c)[0]

    same([spmd.block(g) for g in on_workers(problem, back, blocks, scheduler)], problem.blocks(summed))


@given(problems(), st.sampled_from(["lockstep", "threads"]))
@settings(max_examples=75)
def test_against_the_padded_array(problem, scheduler):
    note(str(problem))
    check_problem(problem, scheduler)


@pytest.mark.full
@given(problems(), st.sampled_from(["lockstep", "threads"]))
@settings(max_examples=5000)
def test_against_the_padded_array_at_length(problem, scheduler):
    note(str(problem))
    check_problem(problem, scheduler)


# Around the block where it lies


@st.composite
def tall_problems(draw) -> Problem:
    """Blocks of many rows, around which there is room for a few; among them short and empty ones, which lie elsewhere,
    and so few workers that all of what comes can be looked at."""
    count = draw(st.integers(1, 4))
    row, dtype = draw(st.sampled_from([(8, "f8"), (3, "c16"), (7, "f8"), (16, "f4")]))
    rows = (1 << 17) // (row * np.dtype(dtype).itemsize)
    cut = tuple(draw(st.sampled_from([rows, 2 * rows, rows + 1, 0, 5])) for _ in range(count))
    width = st.integers(0, 7)
    widths = tuple((draw(width), draw(width)) for _ in cut)
    boundary = draw(st.sampled_from(BOUNDARIES if sum(cut) else ("none", "zero")))
    layout = Layout((sum(cut), row), P("x"), {"x": count}, [cut, (row,)])
    sizes = draw(st.sampled_from([None, (cut, None)]))
    return Problem(
        {"x": count}, layout, (widths, ((0, 0),)), (boundary, "zero"), dtype, draw(st.integers(0, 99)), sizes
    )


def repeated(op, keeps: bool):
    """By one line, at first by the verbs, then as what is called again; with the results before still there or not."""

    def f(x):
        found, lie_around = [], []
        for _ in range(3):
            y = op(x)
            lie_around.append(np.shares_memory(spmd.block(x), spmd.block(y)))
            found.append(spmd.block(y) if keeps else spmd.block(y).copy())
            del y
        return found, lie_around

    return f


@given(tall_problems(), st.booleans(), st.sampled_from(["lockstep", "threads"]))
@settings(max_examples=60)
@pytest.mark.host("arrays of a device have no room around them")
def test_around_large_blocks(problem, keeps, scheduler):
    """The same as elsewhere, and in the memory of the block where there is room, for one result at a time."""
    note(str(problem))
    x, op = problem.array(), problem.operator
    blocks, want = problem.blocks(x), problem.expect(x)
    for w, (found, lie_around) in enumerate(on_workers(problem, repeated(op, keeps), blocks, scheduler)):
        for got in found:
            assert (got.shape, got.dtype, got.flags.writeable) == (want[w].shape, want[w].dtype, not keeps)
            np.testing.assert_array_equal(got, want[w], err_msg=f"worker {w}")
        if blocks[w].nbytes > 1 << 16 and problem.widths[0][w] != (0, 0) and len(want[w]) > len(blocks[w]):
            assert lie_around == ([True, False, False] if keeps else [True] * 3), f"worker {w}"
    check_problem(problem, scheduler)


def test_a_block_of_several_workers_has_room_for_one(scheduler):
    """Those that share it go on as if they had it for themselves."""
    mesh = spmd.Mesh(x=2, y=2, transport="local", scheduler=scheduler)
    x = np.random.default_rng(0).standard_normal((4000, 8))
    want, found = np.pad(x, ((2, 2), (0, 0))), {}

    def body(x):
        results = [spmd.halo_exchange(spmd.varying(x, "y"), P("x"), 2, "zero") for _ in range(3)]
        found[spmd.worker_index(("x", "y"))] = [spmd.block(y) for y in results]

    spmd.map(body, in_specs=P("x"), out_specs=None, mesh=mesh)(x)
    for k, results in found.items():
        for y in results:
            np.testing.assert_array_equal(to_host(y), want[2000 * (k // 2) :][:2004])


PROGRAMS_AROUND = {
    "halo": lambda x: spmd.halo_exchange(x, P("x"), ((2, 1),)),
    "twice": lambda x: spmd.halo_exchange(spmd.halo_exchange(x, P("x"), 1), P("x"), 1),
    "back": lambda x: spmd.halo_accumulate(x, P("x"), 1),
    "of what is used again": lambda x: _together(spmd.relu(x)),
    "of a stencil": lambda x: spmd.halo_exchange(spmd.stencil(x, P("x"), [(0, 0), (1, 0)], [1.0, -1.0]), P("x"), 1),
    "reflected": lambda x: spmd.halo_exchange(spmd.relu(x), P("x"), 3, "reflect"),
    "of another shape": lambda x: spmd.halo_exchange(x.reshape(-1), P("x"), 11),
}


def _together(y):
    """Several things of one block, which is written to by none of them."""
    y1, y2 = (spmd.halo_exchange(y, P("x"), 1, boundary) for boundary in ("zero", "periodic"))
    y = y + 1.0
    y *= 2.0
    return y1 * y2 + spmd.halo_exchange(y, P("x"), 1, "edge")


@pytest.mark.host("arrays of a device have no room around them")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", PROGRAMS_AROUND)
def test_values_and_gradients_do_not_depend_on_where_results_lie(name, compiled, scheduler, monkeypatch):
    mesh = spmd.Mesh(x=3, transport="local", scheduler=scheduler)
    rng = np.random.default_rng(5)
    x, made = rng.standard_normal((4001, 8)), []

    def body(x):
        y, pull = spmd.vjp(PROGRAMS_AROUND[name], x)
        (g,) = pull(np.cos(y))
        (again,) = pull(y)
        return [spmd.psum((a * a).sum(), "x") for a in (y, g, again)], x, g, again

    def run():
        f = spmd.map(body, in_specs=P("x"), out_specs=(P(), *[P("x")] * 3), mesh=mesh)
        f = spmd.jit(f) if compiled else f
        for _ in range(3):
            found = f(x)
        sums, *arrays = found
        return [np.asarray(a) for a in (*sums, *arrays)]

    extended = pool.extended
    monkeypatch.setattr(pool, "extended", lambda *args: made.append(extended(*args)) or made[-1])
    found = run()
    assert any(a is not None for a in made), "no result lay around its block"
    monkeypatch.setattr(pool, "extended", lambda *args: None)
    for a, b in zip(found, run(), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(found[3], x)


def test_what_is_sent_of_a_result_is_not_written_over(scheduler):
    """One dimension gets longer here, and another one elsewhere, where it is read when this result is gone."""
    mesh = spmd.Mesh(y=2, transport="local", scheduler=scheduler)
    whole = np.random.default_rng(0).standard_normal((2, 2000, 16))
    wide = np.maximum(np.concatenate([whole[0], whole[1][:, :1]], 1), 0)
    found = {}

    def body():
        k = spmd.worker_index("y")
        x = spmd.relu(spmd.varying(whole[k], "y"))
        for turn in range(6):
            boundary = ("zero" if turn % 2 else "periodic", "zero")
            y = spmd.halo_exchange(x, P(None, "y"), ((2, 2), ((0, 1), (0, 0))), boundary, shape=(2000, 32))
            found[k, turn] = np.array(to_host(spmd.block(y)))
            del y

    mesh.map(body, in_specs=(), out_specs=None)()
    for turn in range(6):
        want = np.pad(wide, ((2, 2), (0, 0)), mode="constant" if turn % 2 else "wrap")
        np.testing.assert_array_equal(found[0, turn], want)


@pytest.mark.host("only of arrays of the host it is known whether they can be written to")
def test_an_array_that_was_thawed_stays_writable(scheduler):
    mesh = spmd.Mesh(x=2, transport="local", scheduler=scheduler)

    def body():
        kept = np.ones((4000, 8))
        mine = spmd.thaw(kept)
        for _ in range(3):
            y = spmd.halo_exchange(spmd.freeze(mine), P("x"), 1)
            assert np.shares_memory(y, mine)
            del y
        assert mine.flags.writeable
        mine += 1

    mesh.map(body, in_specs=(), out_specs=None, check=False)()


@pytest.mark.host("only of arrays of the host it is known whether they can be written to")
def test_what_lies_around_a_block_is_not_written_to(scheduler):
    """Neither block nor result is thawed without a copy while the other is there."""
    mesh = spmd.Mesh(x=2, transport="local", scheduler=scheduler)

    def body():
        k = spmd.worker_index("x")
        x = spmd.freeze(np.full((4000, 8), k + 1.0))
        for _ in range(3):
            held = spmd.repartition(x, *laid)
            y = spmd.halo_exchange(held, P("x"), 1)
            kept, same = held.copy(), y.copy()
            assert np.shares_memory(held, y)
            thawed = spmd.thaw(y)
            thawed.fill(np.nan)
            np.testing.assert_array_equal(held, kept)
            del y  # which has what lies around the block
            y = spmd.halo_exchange(held, P("x"), 1)
            cell = [held]
            del held
            assert np.shares_memory(cell[0], y)
            thawed = spmd.thaw(cell.pop())
            thawed.fill(np.nan)
            np.testing.assert_array_equal(y, same)
        return True

    laid = mesh.layout((4000, 16), P(None, "x")), mesh.layout((4000, 16), P("x"))
    assert mesh.map(body, in_specs=(), out_specs=None, check=False)()


def haloed(problem: Problem) -> Layout:
    """How the results lie, joined."""
    lines = zip(problem.layout.cuts, problem.widths, problem.boundary, strict=True)
    lengths = [[len(i) for i in indices(*line)] for line in lines]
    return Layout([sum(n) for n in lengths], problem.layout.spec, problem.axes, lengths)


def check_pair(problem: Problem) -> None:
    """The exact dot test of the operator, and of its adjoint by itself."""
    given = {"mesh": problem.mesh, "trials": 1, "dtype": problem.dtype, "seed": problem.seed}
    check_adjoint(problem.operator, problem.layout.shape, in_specs=problem.layout, **given)
    back, layout = problem._replace(sizes=problem.layout.cuts).operator.H, haloed(problem)
    check_adjoint(back, layout.shape, in_specs=layout, **given)


@given(problems(("f8", "c16", "f4")))
@settings(max_examples=25)
def test_exact_dot_test(problem):
    note(str(problem))
    check_pair(problem)


@pytest.mark.full
@given(problems(("f8", "c16", "f4")))
@settings(max_examples=5000)
def test_exact_dot_test_at_length(problem):
    note(str(problem))
    check_pair(problem)


# What it costs


@given(problems(("f8", "c8")), st.booleans())
@settings(max_examples=60)
def test_declared_cost_is_what_was_sent(problem, accumulate):
    problem = problem._replace(sizes=problem.layout.cuts)
    note(str(problem))
    op, blocks = problem.operator, problem.blocks(problem.array())
    if accumulate:
        op, blocks = op.H, problem.expect(problem.array())
    declared = {}

    def body(x):
        worker = here("test")
        declared[worker.index] = op.plan(worker.group(op.axes), x.shape, x.dtype).cost
        op(x)

    with spmd.ledger() as log:
        on_workers(problem, body, blocks)
    assert {w: (r.messages, r.bytes) for w, r in log.workers.items()} == declared
    assert all(r.operators == {type(op).__name__: 1} for r in log.workers.values())


def sent_by(mesh: spmd.Mesh, spec: P, body, *args) -> tuple[list[int], list[int]]:
    with spmd.ledger() as log:
        spmd.map(body, spec, None, mesh=mesh)(*args)
    records = [log.workers.get(w) for w in range(mesh.size)]
    return [r.messages if r else 0 for r in records], [r.bytes if r else 0 for r in records]


def test_a_halo_costs_two_messages_in_each_dimension():
    x, mesh = np.zeros(20), spmd.Mesh(x=4, transport="local")
    shape = x.shape

    def cost(widths, boundary="none", **options):
        def body(b):
            spmd.halo_exchange(b, P("x"), widths, boundary, **options)

        return sent_by(mesh, P("x"), body, x)

    assert cost(1, shape=shape) == ([1, 2, 2, 1], [8, 16, 16, 8])
    assert cost(1, sizes=[(5, 5, 5, 5)]) == ([1, 2, 2, 1], [8, 16, 16, 8])
    assert cost(((3, 0),), "zero", shape=shape) == ([1, 1, 1, 0], [24, 24, 24, 0])
    assert cost(2, "periodic", shape=shape) == ([2] * 4, [32] * 4)
    assert cost(1, "reflect", shape=shape) == ([1, 2, 2, 1], [8, 16, 16, 8])
    assert cost(((7, 0),), shape=shape) == ([2, 2, 1, 0], [56, 56, 40, 0])  # to every owner reached, what it needs
    # Lengths that are not given travel with the calls.
    assert cost(1) == ([1, 2, 2, 1], [8, 16, 16, 8])
    # Nothing moves where nobody needs anything.
    assert cost(0) == cost(-1) == cost(((0, -2),)) == ([0] * 4, [0] * 4)

    grid, y = spmd.Mesh(x=2, y=2, transport="local"), np.zeros((8, 8))

    def square(b):
        spmd.halo_exchange(b, P("x", "y"), 1, shape=y.shape)

    assert sent_by(grid, P("x", "y"), square, y) == ([2] * 4, [32 + 40] * 4)  # the corner goes with the edge


def test_the_dot_test_declares_what_far_halos_send():
    """Which nobody knows before the lengths of the blocks are learnt: how many owners a halo of 7 reaches."""
    layout = Layout((9,), P("x"), {"x": 4}, [(1, 0, 5, 3)])
    for boundary in BOUNDARIES:
        op = HaloExchange(("x",), P("x"), ((7, 2),), boundary)
        given = {"in_specs": layout, "mesh": spmd.Mesh(x=4, transport="local"), "trials": 1}
        report = check_adjoint(op, layout.shape, **given)
        assert (report.messages, report.bytes) == report.declared
    op = HaloAccumulate(("x",), P("x"), ((7, 2),), "zero")
    report = check_adjoint(op, (45,), **given | {"in_specs": Layout((45,), P("x"), {"x": 4}, [(10, 9, 14, 12)])})
    assert (report.messages, report.bytes) == report.declared


def test_the_cost_of_near_halos_is_known_before():
    """Without sizes too: what is sent depends on the own block only."""
    for boundary in BOUNDARIES:
        for accumulate in (False, True):
            mesh, declared = spmd.Mesh(x=2, y=3, transport="local"), {}
            op = HaloExchange(("x", "y"), P("x", "y"), (1, (2, 1)), boundary)

            def body(x, op=op, accumulate=accumulate, declared=declared):
                op, x = (op.H, op(x)) if accumulate else (op, x)
                worker = here("test")
                declared[worker.index] = op.plan(worker.group(op.axes), x.shape, x.dtype).cost
                before = log.workers[worker.index] if accumulate else None
                before = (before.messages, before.bytes) if before else (0, 0)
                op(x)
                after = log.workers[worker.index]
                assert (after.messages - before[0], after.bytes - before[1]) == declared[worker.index]

            with spmd.ledger() as log:
                spmd.map(body, P("x", "y"), None, mesh=mesh)(np.zeros((5, 10)))
            assert len(declared) == 6


# Without sizes, the other way


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 12])
def test_accumulate_by_itself(boundary, n, scheduler):
    """What it learns: with balanced blocks everything."""
    x, mesh = np.arange(1.0, n + 1), spmd.Mesh(x=2, y=2, transport="local", scheduler=scheduler)
    spec = P(("x", "y"))
    sizes = block_sizes(n, (2, 2))
    widths = tuple((2, 1) if k % 2 else (1, 3) for k in range(4))

    def body(x):
        return spmd.halo_accumulate(spmd.halo_exchange(x, spec, (widths,), boundary), spec, (widths,), boundary)

    counts = np.zeros(n)
    for line in indices(sizes, widths, boundary):
        np.add.at(counts, line[line >= 0], 1)
    np.testing.assert_array_equal(spmd.map(body, spec, spec, mesh=mesh)(x).numpy(), x * counts)


def test_accumulate_learns_uneven_blocks_that_halos_do_not_reach_across():
    def body(x):
        return spmd.halo_accumulate(spmd.halo_exchange(x, P("x"), 1), P("x"), 1)

    layout = Layout((9,), P("x"), {"x": 3}, [(2, 6, 1)])
    mesh = spmd.Mesh(x=3, transport="local")
    blocks = [np.ones(n) for n in layout.cuts[0]]
    assert [y.tolist() for y in run_blocks(mesh, body, blocks)] == [[1, 2], [2, 1, 1, 1, 1, 2], [2]]


def run_blocks(mesh, body, blocks) -> list:
    found: list = [None] * mesh.size

    def each():
        w = spmd.worker_index(tuple(mesh.axes))
        found[w] = spmd.block(body(spmd.varying(blocks[w], tuple(mesh.axes))))

    spmd.map(each, (), None, mesh=mesh)()
    return found


# In bodies


def laplacian(x, widen):
    """A five-point stencil of a nonlinear function, on an array that `widen` gives its halo."""
    u = np.tanh(widen(x))
    return 4 * u[1:-1, 1:-1] - u[:-2, 1:-1] - u[2:, 1:-1] - u[1:-1, :-2] - u[1:-1, 2:]


def serial(boundary):
    return lambda x: np.pad(x, 1, MODES[boundary])


def split(boundary, **options):
    return lambda x: spmd.halo_exchange(x, P("x", "y"), 1, boundary, **options)


@pytest.mark.parametrize("boundary", ["zero", "periodic", "reflect", "edge"])
@pytest.mark.parametrize("mesh", [{"x": 2, "y": 2}, {"x": 3, "y": 1}, {"y": 3, "x": 4}], ids=str)
def test_gradient_of_a_stencil(boundary, mesh, scheduler):
    mesh = spmd.Mesh(**mesh, transport="local", scheduler=scheduler)
    x = np.random.default_rng(0).normal(size=(7, 5))

    def loss(x):
        return np.sum(laplacian(x, serial(boundary)) ** 2)

    def local(x):
        inside = spmd.checkpoint(lambda x: laplacian(x, split(boundary)))
        return spmd.psum(np.sum(inside(x) ** 2), ("x", "y"))

    ours = spmd.map(local, P("x", "y"), P(), mesh=mesh)
    value, grad = spmd.value_and_grad(ours)(x)
    want, wanted = spmd.value_and_grad(loss)(x)
    np.testing.assert_allclose(float(value), want, rtol=1e-13)
    np.testing.assert_allclose(np.asarray(grad), wanted, rtol=1e-12, atol=1e-12)
    # Along a direction, and twice.
    v = np.random.default_rng(1).normal(size=x.shape)
    np.testing.assert_allclose(
        float(spmd.jvp(ours, (x,), (v,))[1]), float(spmd.jvp(loss, (x,), (v,))[1]), rtol=1e-12, atol=1e-12
    )
    second = spmd.grad(lambda x: np.sum(spmd.grad(ours)(x) * v))(x)
    wanted = spmd.grad(lambda x: np.sum(spmd.grad(loss)(x) * v))(x)
    np.testing.assert_allclose(np.asarray(second), wanted, rtol=1e-11, atol=1e-11)


def test_gradient_inside_a_body():
    mesh, x = spmd.Mesh(x=3, transport="local"), np.arange(7.0)

    def body(x):
        def energy(x):
            wide = spmd.halo_exchange(x, P("x"), ((0, 1),), "zero")
            return spmd.psum(np.sum(np.diff(wide) ** 2), "x")

        return spmd.grad(energy)(x)

    got = spmd.map(body, P("x"), P("x"), mesh=mesh)(x).numpy()
    want = spmd.grad(lambda x: np.sum(np.diff(np.pad(x, (0, 1))) ** 2))(x)
    np.testing.assert_allclose(got, want)


def test_pytrees_numbers_of_widths_and_invariant_blocks(scheduler):
    mesh = spmd.Mesh(x=3, transport="local", scheduler=scheduler)

    def body(x):
        wide = spmd.halo_exchange({"a": x, "b": [x[:, 0] * 2]}, P("x"), np.int64(1), "periodic")
        assert wide["a"].shape == (x.shape[0] + 2, 2)
        whole = spmd.halo_exchange(np.arange(2), P("x"), 1, "periodic")  # one value on all: a block of each
        assert whole.state.varying == {"x"}
        assert spmd.block(whole).tolist() == [1, 0, 1, 0]
        return wide["b"][0]

    got = spmd.map(body, P("x"), P("x"), mesh=mesh)(np.arange(14.0).reshape(7, 2)).numpy()
    assert got.tolist() == [24, 0, 4, 8, 12, 8, 12, 16, 20, 16, 20, 24, 0]


@pytest.mark.host("looks at the arrays of NumPy in a body")
def test_nothing_is_copied_where_there_is_no_halo():
    def body(x):
        x = spmd.block(x)
        assert np.shares_memory(x, spmd.block(spmd.halo_exchange(x, P("x"), 0)))
        assert np.shares_memory(x, spmd.block(spmd.halo_accumulate(spmd.varying(x, "x"), P("x"), 0)))
        assert not np.shares_memory(x, spmd.block(spmd.halo_exchange(x, P("x"), -1)))

    spmd.map(body, P("x"), None, mesh=spmd.Mesh(x=2, transport="local"))(spmd.freeze(np.zeros(8)))


# What it says to bad input


ERRORS = {
    "no spec": (lambda x: spmd.halo_exchange(x, "x", 1), SpecError, r'argument +spec.*P\("x"\)'),
    "unknown axis": (lambda x: spmd.halo_exchange(x, P("z"), 1), SpecError, "names axis 'z'"),
    "widths of no kind": (lambda x: spmd.halo_exchange(x, P("x"), "1"), LayoutError, "got: +'1'"),
    "fractions": (lambda x: spmd.halo_exchange(x, P("x"), 0.5), LayoutError, "got: +0.5"),
    "too few": (lambda x: spmd.halo_exchange(x, P(None, "x"), (1,)), LayoutError, "of 1 entries, for P"),
    "too many": (lambda x: spmd.halo_exchange(x, P("x"), (1, 1, 1)), LayoutError, r"3 entries .*\(\(low, high\),\)"),
    "not one per block": (
        lambda x: spmd.halo_exchange(x, P("x"), ([(1, 0), (0, 1), (1, 1)],)),
        LayoutError,
        "widths, dimension 0.*3 entries.*2, one per block",
    ),
    "no boundary": (lambda x: spmd.halo_exchange(x, P("x"), 1, "reflected"), LayoutError, 'write "reflect"'),
    "boundaries": (lambda x: spmd.halo_exchange(x, P("x"), (1, 1), ["zero"]), LayoutError, "for 2 dimensions"),
    "of nothing": (lambda x: spmd.halo_exchange(x[:0], P("x"), 1, "reflect"), LayoutError, "an array of length 0"),
    "trimmed": (lambda x: spmd.halo_exchange(x, P("x"), ((-2, -2),)), LayoutError, r"\(-2, -2\) for block 0.*length 3"),
    "few dimensions": (lambda x: spmd.halo_exchange(x, P(None, None, "x"), 1), LayoutError, "3 entries for a block"),
    "sizes": (
        lambda x: spmd.halo_exchange(x, P("x"), 1, sizes=[(4, 4)]),
        LayoutError,
        "got: .*length 3.*needed: length 4",
    ),
    "sizes of no kind": (lambda x: spmd.halo_exchange(x, P("x"), 1, sizes=[3, 3]), LayoutError, "argument +sizes"),
    "count of sizes": (lambda x: spmd.halo_exchange(x, P("x"), 1, sizes=[(6,)]), LayoutError, "sizes, dimension 0"),
    "shape and sizes": (
        lambda x: spmd.halo_exchange(x, P("x"), 1, shape=(6, 2), sizes=[(3, 3)]),
        LayoutError,
        "leave one of them out",
    ),
    "shape": (lambda x: spmd.halo_exchange(x, P("x"), 1, shape=(9, 2)), LayoutError, "needed: length [54]"),
    "shape of no kind": (lambda x: spmd.halo_exchange(x, P("x"), 1, shape=6), LayoutError, "argument shape.*got:    6"),
    "floats in the shape": (lambda x: spmd.halo_exchange(x, P("x"), 1, shape=(6.0, 2)), LayoutError, "argument shape"),
    "negative shape": (lambda x: spmd.halo_exchange(x, P("x"), 1, shape=(-6, 2)), LayoutError, "argument shape"),
    "boundary of no kind": (lambda x: spmd.halo_exchange(x, P("x"), 1, None), LayoutError, "boundary.*got:    None"),
    "boundary of a dimension": (lambda x: spmd.halo_exchange(x, P("x"), 1, [0]), LayoutError, "boundary.*got:    0"),
    "not haloed": (lambda x: spmd.halo_accumulate(x, P("x"), 1, shape=(6, 2)), LayoutError, r"shape \[4, 2\]"),
    "impossible": (
        lambda x: spmd.halo_accumulate(x[spmd.worker_index("x") :], P("x"), 9),
        LayoutError,
        "sizes=, or shape=",
    ),
    "invariant": (lambda x: spmd.halo_accumulate(np.ones(3), P("x"), 1), StateError, "does not vary over axis 'x'"),
    "unlike": (
        lambda x: spmd.halo_exchange(x[:, : 1 + spmd.worker_index("x")], P("x"), 1),
        LayoutError,
        "blocks that differ in dimension 0 only",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    body, kind, says = ERRORS[name]
    mesh = spmd.Mesh(x=2, y=1, transport="local")
    with pytest.raises(kind, match=f"(?s)spmd.halo_(exchange|accumulate).*{says}"):
        spmd.map(body, P("x"), P("x"), mesh=mesh)(np.ones((6, 2)))


def test_workers_that_want_different_halos_are_told_so():
    def body(x):
        return spmd.halo_exchange(x, P("x"), 1 + spmd.worker_index("x"), shape=(6,))

    with pytest.raises(spmd.errors.MismatchError, match="halo_exchange"):
        spmd.map(body, P("x"), P("x"), mesh=spmd.Mesh(x=2, transport="local"))(np.ones(6))


# Faults that are planted, and must be found


def lengths_of(op) -> tuple[tuple, tuple]:
    """For each dimension the lengths that were given, and those that were learnt."""
    given = (*(op.sizes or ()), *(None,) * len(op.block))[: len(op.block)]
    return given, op.learnt or (None,) * len(op.block)


@dataclass(frozen=True)
class _WithoutCorners(HaloExchange):
    """Each dimension is exchanged on the block alone, and what lies in the corners is lost."""

    def steps(self, comm, group, x, call, nothing=False):
        y, bound = yield from super().steps(comm, group, x, call, nothing)
        y = y.copy()
        stages = halo_geometry.stages_of(self._dimensions(group, x.ndim), bound.block, *lengths_of(bound))
        beyond = [np.ones(n, bool) for n in y.shape]
        for d, stage in enumerate(stages):
            beyond[d][stage.place : stage.place + x.shape[d]] = False
        y[np.ix_(*beyond)] = 0
        return halo.read_only(y), replace_class(bound, type(self))


@dataclass(frozen=True)
class _Overwriting(HaloAccumulate):
    """What comes back replaces what is there."""

    def _accumulate(self, comm, group, g, call):
        stages = halo_geometry.stages_of(self._dimensions(group, g.ndim), self.block, *lengths_of(self))
        out, _ = yield from super()._accumulate(comm, group, g, call)
        own = [slice(s.place, s.place + n) for s, n in zip(stages, self.block, strict=True)]
        only, out = np.array(g[tuple(own)]), np.array(out)
        return halo.read_only(np.where(out == only, only, out - only).astype(g.dtype)), self


@dataclass(frozen=True)
class _Shifted(HaloAccumulate):
    """Every part is added one entry too far."""

    def _accumulate(self, comm, group, g, call):
        out, _ = yield from super()._accumulate(comm, group, g, call)
        return halo.read_only(np.roll(out, 1, 0)), self


def replace_class(op, kind):
    return kind(*(getattr(op, f) for f in ("axes", "spec", "widths", "boundary", "sizes", "block", "learnt")))


def planted(adjoint: type) -> type:
    class _Planted(HaloExchange):
        def steps(self, comm, group, x, call, nothing=False):
            y, bound = yield from super().steps(comm, group, x, call, nothing)
            return y, replace_class(bound, _Planted)

        @property
        def H(self):
            return replace_class(self, adjoint)

    return _Planted


@pytest.mark.parametrize("fault", [_Overwriting, _Shifted, _WithoutCorners], ids=lambda f: f.__name__)
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("seed", range(3))
def test_planted_faults_are_found(fault, boundary, seed):
    """On random seeds, where F and F* are not a pair: F loses corners, or F* does not add, or adds elsewhere."""
    kind = fault if fault is _WithoutCorners else planted(fault)
    op = kind(("x", "y"), P("x", "y"), 1, boundary)
    mesh = spmd.Mesh(x=2, y=2, transport="local")
    report = check_adjoint(op, (6, 5), mesh=mesh, in_specs=P("x", "y"), seed=seed, trials=1, raises=False, shrink=False)
    assert not report.passed
    right = HaloExchange(("x", "y"), P("x", "y"), 1, boundary)
    assert check_adjoint(right, (6, 5), mesh=mesh, in_specs=P("x", "y"), seed=seed, trials=1)


def test_a_lost_corner_is_located():
    """On the smallest mesh and halo that have one."""
    op = _WithoutCorners(("x", "y"), P("x", "y"), 1, "zero")
    mesh = spmd.Mesh(x=2, y=2, transport="local")
    said = str(check_adjoint(op, (6, 5), mesh=mesh, in_specs=P("x", "y"), trials=1, raises=False))
    assert "of (1, 1) on Mesh(x=2, y=2)" in said
    assert "from y[0, 0] (worker 3 (x=1, y=1)) to x[0, 0] (worker 0 (x=0, y=0)): 1, needed 0" in said


def test_a_planner_that_is_wrong_is_found(monkeypatch):
    """The dot test cannot see it, since both directions follow the plan: the padded array does."""
    right = planner._runs

    def without_ends(start, stop, n, boundary):
        return (
            r._replace(start=r.start + 1, stop=r.stop + 1) if r.flipped else r for r in right(start, stop, n, boundary)
        )

    problem = Problem({"x": 2}, Layout((9,), P("x"), {"x": 2}), (((2, 2), (2, 2)),), ("reflect",), "f8", 0, None)
    check_problem(problem, "lockstep")
    monkeypatch.setattr(planner, "_runs", without_ends)
    halo_pieces.cache_clear()
    try:
        check_pair(problem)
        with pytest.raises(AssertionError):
            check_problem(problem, "lockstep")
    finally:
        halo_pieces.cache_clear()


# Where lengths are learnt


@pytest.mark.parametrize("n", range(1, 9))
def test_blocks_of_any_lengths_that_are_not_given(n, scheduler):
    near_halos.check_samples(n, 10, transport="local", scheduler=scheduler)


# Under mpiexec


@pytest.mark.both
@each_mpi
@pytest.mark.parametrize("before", [[], ["by_messages.py", "0"]], ids=["shared memory", "messages"])
def test_processes_give_the_bits_of_virtual_workers(python, before):
    program, *words = [*before, "halo.py"]
    ended = launch(PROGRAMS / program, *words, python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    found = json.loads(ended.stdout)
    want = halo_program.results(transport="local", scheduler="threads")
    assert found.keys() == want.keys()
    assert len(found) > 100
    assert [name for name in want if found[name] != want[name]] == []


@each_mpi
@pytest.mark.parametrize(
    "n", [pytest.param(3, marks=pytest.mark.both), *(pytest.param(k, marks=pytest.mark.full) for k in (5, 8))]
)
def test_lengths_are_learnt_from_neighbours_where_all_goes_by_messages(python, n):
    """However many they are: a message with the length and one with the edge where lengths are learnt, else one."""
    ended = launch(PROGRAMS / "by_messages.py", "0", "near_halos.py", str(n), "8", n=n, python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert json.loads(ended.stdout) == {"there, learnt": 2, "back, learnt": 1, "there, known": 1, "back, known": 1}


@each_mpi
def test_a_line_on_one_host_may_know_more_than_the_next(python):
    """And yet they agree on what they do, there and back."""
    ended = launch(PROGRAMS / "near_halos.py", "6", "8", "part", n=6, python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
