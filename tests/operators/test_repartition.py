"""Repartition and accumulate: the partition cases of the field, what they cost, gradients, and errors."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import spmd
from spmd import Layout, P
from spmd.device import to_host
from spmd.errors import LayoutError, SpecError, StateError
from spmd.layout import block_sizes
from spmd.operators.permute import Permute
from spmd.operators.repartition import Accumulate, Repartition
from spmd.operators.sums import Sum
from spmd.testing import check_adjoint

W = {"w": 12}


def cut(layout: Layout, whole: np.ndarray) -> list[np.ndarray]:
    """The block of each worker."""
    empty = lambda k: np.zeros(layout.block_shape(k), whole.dtype)
    return [empty(k) if layout.positions(k) is None else whole[layout.slices(k)] for k in range(layout.size)]


def moved(f, src: Layout, dst: Layout, blocks: list[np.ndarray], scheduler="lockstep") -> list[np.ndarray]:
    """f(x, src, dst) on the blocks of all workers."""
    out: list = [None] * src.size
    axes = tuple(src.axes)

    def body():
        k = spmd.worker_index(axes)
        x = blocks[k] if src.varying == frozenset() else spmd.varying(blocks[k], tuple(sorted(src.varying)))
        out[k] = np.array(to_host(spmd.block(f(x, src, dst))))

    with spmd.Mesh(**src.axes, transport="local", scheduler=scheduler):
        spmd.map(body, in_specs=(), out_specs=None)()
    return out


# Each pair is (source, target) over twelve workers.
BROADCASTS = {
    "[2,2,1] on 4-7 to [2,2,3] on 0-11": ((2, 2), range(4, 8), (2, 2, 3), range(12)),
    "[1,1] on 5 to [1,1,12]": ((1, 1), [5], (1, 1, 12), range(12)),
    "[3,1] on 9-11 to [3,1,2] on 0-5, disjoint": ((3, 1), range(9, 12), (3, 1, 2), range(6)),
    "[1,4] on 0,2,4,6 to [1,4,2] on 7-0": ((1, 4), range(0, 8, 2), (1, 4, 2), range(7, -1, -1)),
}


@pytest.mark.parametrize("name", BROADCASTS)
@pytest.mark.parametrize("scheduler", ["lockstep", "threads"])
def test_broadcast_between_partitions_and_sum_reduce_back(name, scheduler):
    grid, workers, copies, others = BROADCASTS[name]
    shape = (7, 5)
    one, many = Layout.grid(shape, grid, W, workers), Layout.grid(shape, copies, W, others)
    whole = np.random.default_rng(0).integers(-9, 9, shape).astype(float)
    blocks = cut(one, whole)
    spread = moved(spmd.repartition, one, many, blocks, scheduler)
    for got, want in zip(spread, cut(many, whole), strict=True):
        np.testing.assert_array_equal(got, want)
    rng = np.random.default_rng(1)
    cotangents = [rng.integers(-9, 9, b.shape).astype(float) for b in spread]
    total = np.zeros(shape)
    for k, g in enumerate(cotangents):
        if many.positions(k) is not None:
            total[many.slices(k)] += g
    for got, want in zip(moved(spmd.accumulate, many, one, cotangents, scheduler), cut(one, total), strict=True):
        np.testing.assert_array_equal(got, want)
    with spmd.Mesh(**W) as mesh:
        assert check_adjoint(Repartition(("w",), one, many), shape, in_specs=one, mesh=mesh, trials=2)
        assert check_adjoint(Accumulate(("w",), many, one), shape, in_specs=many, mesh=mesh, trials=2)


UNEVEN = [40, 0, 7, 30]
TRANSPOSES = {
    "overlapping": (Layout.grid((77, 55), (4, 1), W), Layout.grid((77, 55), (3, 4), W)),
    "disjoint": (Layout.grid((77, 55), (4, 1), W, range(8, 12)), Layout.grid((77, 55), (2, 4), W, range(8))),
    "unbalanced": (Layout.grid((77, 55), (4, 1), W, cuts=[UNEVEN, None]), Layout.grid((77, 55), (3, 4), W)),
    "backwards": (Layout.grid((77, 55), (3, 4), W), Layout.grid((77, 55), (3, 4), W, range(11, -1, -1))),
    "to one": (Layout.grid((77, 55), (3, 4), W), Layout.grid((77, 55), (1, 1), W, [6])),
    "from one": (Layout.grid((77, 55), (1, 1), W, [6]), Layout.grid((77, 55), (3, 4), W)),
}


@pytest.mark.parametrize("name", TRANSPOSES)
def test_repartition_between_grids(name):
    src, dst = TRANSPOSES[name]
    whole = np.arange(77.0 * 55).reshape(77, 55)
    there = moved(spmd.repartition, src, dst, cut(src, whole))
    back = moved(spmd.repartition, dst, src, there)
    for got, want in zip(there, cut(dst, whole), strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(back, cut(src, whole), strict=True):
        np.testing.assert_array_equal(got, want)
    with spmd.Mesh(**W) as mesh:
        assert check_adjoint(Repartition(("w",), src, dst), (77, 55), in_specs=src, mesh=mesh, trials=1)


@pytest.mark.parametrize("name", TRANSPOSES)
def test_only_what_is_not_there_yet_moves(name):
    src, dst = TRANSPOSES[name]
    blocks = cut(src, np.zeros((77, 55)))
    with spmd.ledger() as log:
        moved(spmd.repartition, src, dst, blocks)
    missing = 0
    for k in range(12):
        if dst.positions(k) is not None:
            both = [max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(src.boxes[k], dst.boxes[k], strict=True)]
            held = math.prod(both) if src.positions(k) is not None else 0
            missing += math.prod(dst.block_shape(k)) - held
    assert sum(record.bytes for record in log.workers.values()) == 8 * missing


def test_the_identity_moves_nothing_and_copies_nothing():
    layout = Layout.grid((6, 4), (3, 2), {"w": 6})
    same = []

    def body():
        x = spmd.varying(np.ones(layout.block_shape(spmd.worker_index("w"))), "w")
        same.append(np.shares_memory(spmd.block(spmd.repartition(x, layout, layout)), spmd.block(x)))

    with spmd.ledger() as log, spmd.Mesh(w=6):
        spmd.map(body, in_specs=(), out_specs=None)()
    assert all(same)
    assert all(record.messages == 0 for record in log.workers.values())


def test_gradients_through_layouts():
    """A product of a matrix by rows with one by columns, whose operands are repartitioned in the body."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(7, 5)), rng.normal(size=(5, 4))
    axes = {"x": 2, "y": 2}
    rows, columns = Layout((7, 5), P(("x", "y")), axes), Layout((7, 5), P("x", "y"), axes)

    def body(a, b):  # a comes by rows over all workers, and is wanted on the grid
        a = spmd.repartition(a, rows, columns)
        part = spmd.psum(a @ b, "y")
        return spmd.psum(np.sum(np.sin(part)), "x")

    with spmd.Mesh(**axes):
        f = spmd.map(body, in_specs=(P(("x", "y")), P("y")), out_specs=P())
        serial = lambda a, b: np.sum(np.sin(a @ b))
        np.testing.assert_allclose(f(a, b), serial(a, b))
        for got, want in zip(spmd.grad(f, (0, 1))(a, b), spmd.grad(serial, (0, 1))(a, b), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        spmd.check_grads(f, (a, b))


def test_states_follow_the_layouts():
    axes = {"x": 2, "y": 2}
    split, whole = Layout((4,), P("x"), axes), Layout((4,), P(), axes)
    found = []

    def body(x):
        y = spmd.repartition(x, split, whole)
        z = spmd.repartition(y, whole, Layout((4,), P("y"), axes))
        found.append((x.state, y.state, z.state))
        return spmd.repartition(z, Layout((4,), P("y"), axes), split)

    with spmd.Mesh(**axes):
        assert spmd.map(body, in_specs=P("x"), out_specs=P("x"))(np.arange(4.0)).numpy().tolist() == [0, 1, 2, 3]
    for states in found:
        assert [sorted(s.varying) for s in states] == [["x"], [], ["y"]]


def test_errors():
    layout, other = Layout.grid((6,), (3,), {"w": 3}), Layout.grid((7,), (3,), {"w": 3})
    copies = Layout.grid((6,), (1, 3), {"w": 3})
    invariant = Layout.grid((6,), (1, 3), {"w": 3}, copies="invariant")

    def raised(f, src, dst, length=2):
        with spmd.Mesh(w=3), pytest.raises(LayoutError) as error:
            spmd.map(lambda: f(spmd.varying(np.zeros(length), "w"), src, dst), in_specs=(), out_specs=P("w"))()
        return str(error.value)

    assert "the shape (6,)" in raised(spmd.repartition, layout, other)
    assert "spmd.accumulate(x, src, dst)" in raised(spmd.repartition, copies, layout, 6)
    assert "one value for each block" in raised(spmd.accumulate, layout, copies)
    assert 'copies="varying"' in raised(spmd.repartition, invariant, layout, 6)
    assert "a block of shape [5]" in raised(spmd.repartition, layout, copies, 5)
    assert "axes of the mesh" in raised(spmd.repartition, Layout((6,), P(), {"v": 3}), layout, 6)
    assert "argument src" in raised(spmd.repartition, P("w"), layout)


def test_adding_copies_counts_booleans_and_refuses_an_invariant_array():
    """As every operator that adds."""
    axes = {"x": 2, "y": 3}
    each, one = Layout((4,), P("x"), axes, copies="varying"), Layout((4,), P("x"), axes)
    mesh = spmd.Mesh(**axes)

    def total(x, src=each):
        return spmd.map(lambda x: spmd.accumulate(x, src, one), in_specs=P("x"), out_specs=P("x"), mesh=mesh)(x).numpy()

    def counted(x):
        return spmd.accumulate(spmd.pvary(x, "y"), each, one)

    for dtype in (bool, np.int64, np.float32):
        for check in (True, False):
            f = spmd.map(counted, in_specs=P("x"), out_specs=P("x"), mesh=mesh, check=check)
            got = f(np.array([1, 0, 1, 1], dtype)).numpy()
            assert got.tolist() == [3, 0, 3, 3]
            assert got.dtype == (np.int64 if dtype is bool else dtype)
    with pytest.raises(StateError, match="does not vary over axis 'y'"):
        total(np.ones(4))
    assert total(np.ones(4, bool), one).dtype == bool  # nothing is added
    with pytest.raises(StateError, match="Invariant along axis 'y'"):
        Accumulate(("x", "y"), each, one) @ Sum(("y",))


def test_the_order_of_the_axes_numbers_the_workers():
    """Layouts that count the workers in different orders do not fit each other; in any one order they do."""
    axes, turned = {"x": 2, "y": 3}, {"y": 3, "x": 2}
    x = np.arange(12.0).reshape(6, 2)

    def run(body):
        return spmd.map(body, in_specs=P(("x", "y")), out_specs=P("y", "x"), mesh=spmd.Mesh(**axes))(x).numpy()

    def pair(src, dst):
        return Layout(x.shape, P(("x", "y")), src), Layout(x.shape, P("y", "x"), dst)

    for order in (axes, turned):
        src, dst = pair(order, order)
        assert np.array_equal(run(lambda x, src=src, dst=dst: spmd.repartition(x, src, dst)), x)
        assert np.array_equal(run(Repartition(tuple(order), src, dst)), x)
        with pytest.raises(LayoutError, match="argument axes"):
            Repartition(tuple(reversed(order)), src, dst)
        with pytest.raises(LayoutError, match="argument axes"):
            Accumulate(("x",), src, dst)
    for f in (spmd.repartition, spmd.accumulate):
        with pytest.raises(LayoutError, match="in this order, which numbers the workers"):
            run(lambda x, f=f: f(x, *pair(axes, turned)))
    other = Layout(x.shape, P(("x", "y")), {"x": 3, "y": 2})
    with pytest.raises(LayoutError, match="axes of the mesh"):
        run(Repartition(("x", "y"), other, other))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout.grid((6, 2), (3,), {"w": 3}), "write 1 for a dimension that is whole"),
        (lambda: Layout.grid((6,), (0,), {"w": 3}), "1 or more"),
        (lambda: Layout.grid((6,), (4,), {"w": 3}), "different workers of the 3"),
        (lambda: Layout.grid((6,), (2,), {"w": 3}, [1, 1]), "one for each block"),
        (lambda: Layout.grid((6,), (2,), {"w": 3}, [1, 3]), "one for each block"),
        (lambda: Layout.grid((6,), (2,), {"w": 3}, cuts=[[2, 2]]), "add to 6"),
        (lambda: Layout.grid((6,), (2,), {"w": 3}, cuts=[None, None]), "one for each of 1 dimensions"),
        (lambda: Layout.grid((6,), (2,), {"w": 3}, copies="equal"), '"invariant"'),
    ],
)
def test_grids_that_cannot_be(make, words):
    with pytest.raises(LayoutError) as error:
        make()
    assert words in str(error.value)


def test_a_grid_says_who_holds_what():
    layout = Layout.grid((5, 4), (2, 1, 2), {"w": 6}, [5, 1, 0, 3], copies="varying")
    assert [layout.positions(k) for k in range(6)] == [(1, 0), (0, 0), None, (1, 0), None, (0, 0)]
    assert [layout.block_shape(k) for k in range(6)] == [(2, 4), (3, 4), (0, 0), (2, 4), (0, 0), (3, 4)]
    assert layout.holders == {(0, 0): (1, 5), (1, 0): (0, 3)}
    assert layout.has_copies
    assert layout.owners == (0, 1, 2, 3, 4, 5)
    assert Layout.grid((5, 4), (2, 1, 2), {"w": 6}, [5, 1, 0, 3], copies="invariant").owners == (0, 1, 2, 0, 4, 1)
    assert eval(repr(layout)) == layout
    assert layout.picture("a").splitlines()[-1] == "workers 2, 4: nothing"
    assert "workers 1, 5" in layout.picture()
    assert Layout.grid((5,), (2,), {"w": 2}) == Layout.grid((5,), [2], {"w": 2}, (0, 1), [block_sizes(5, 2)])


def test_sampled_pairs_cover_disjoint_and_overlapping_sets():
    """The rows of cases hold pairs on disjoint and on overlapping sets of workers."""
    from spmd.testing import operator_cases

    kinds = set()
    for case in operator_cases(Repartition, spmd.Mesh(x=4)):
        held = [
            {k for k in range(4) if layout.positions(k) is not None}
            for layout in (case.operator.src, case.operator.dst)
        ]
        kinds.add("equal" if held[0] == held[1] else "disjoint" if not held[0] & held[1] else "overlapping")
    assert kinds == {"equal", "disjoint", "overlapping"}


def test_between_layouts_a_global_array_stays_what_it_is():
    """Outside of bodies the result lies as the target says, and what does not follow on each other is refused."""
    mesh = spmd.Mesh(x=2, y=2)
    whole = np.arange(16.0).reshape(4, 4)
    specs = [P("x", "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x")), P("y"), P()]
    lay = {spec: mesh.layout(whole.shape, spec) for spec in specs}
    axes = tuple(mesh.axes)
    for one, other in itertools.product(specs, specs):
        there = Repartition(axes, lay[one], lay[other])
        y = there @ spmd.put(whole, one, mesh)
        assert y.layout == lay[other]
        assert np.array_equal(y.numpy(), whole)
        back = 2 * (Repartition(axes, lay[other], lay[one]) @ there)
        assert np.array_equal((back @ spmd.put(whole, P("x"), mesh)).numpy(), 2 * whole)
    uneven = Layout(whole.shape, P("x", "y"), mesh.axes, [(0, 4), (3, 1)])
    y = Accumulate(axes, lay[P()], uneven) @ spmd.put(whole, P(), mesh)
    assert y.layout == uneven
    assert np.array_equal(y.numpy(), whole)

    x = spmd.put(whole, P("x", "y"), mesh)
    turn = Repartition(axes, lay[P("x", "y")], lay[P("y", "x")])
    with pytest.raises(LayoutError, match="the layout that A takes"):
        turn @ turn  # blocks of one shape, which would come to lie elsewhere
    shift = Permute(("x",), ((0, 1), (1, 0)))
    with pytest.raises(SpecError, match="give and take"):
        (turn @ Sum(("x",)) @ turn)(x)
    with pytest.raises(SpecError, match="terms that give"):
        (turn + Repartition(axes, turn.src, turn.src))(x)
    assert (shift @ turn)(x).spec == P("y", "x")
    copies = Layout(whole.shape, P("x"), mesh.axes, copies="varying")
    with pytest.raises(LayoutError, match="several workers hold one block"):
        Repartition(axes, turn.src, copies)(x)
