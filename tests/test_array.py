"""Global arrays: how they are made, taken apart, computed with outside of maps, and shown."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import operator
import pickle
import sys
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spmd
from spmd import P, ownership
from spmd.array import relayout
from spmd.autodiff import array_methods
from spmd.device import to_host
from spmd.errors import LayoutError, StateError
from spmd.kernels.memory import pool
from spmd.layout import Layout
from spmd.ownership import owned
from spmd.placement import cut
from spmd.replicas.compare import digest

MESH = spmd.Mesh(x=2, y=3)
SPECS = [P(), P("x"), P("y"), P(None, "x"), P("y", "x"), P("x", "y"), P(("x", "y")), P(("y", "x")), P(None, ("x", "y"))]
A = np.random.default_rng(0).normal(size=(7, 5))


@functools.cache
def shaped(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape)


def equal(x: spmd.PartitionedArray, expected) -> None:
    """x holds this array: value, dtype, and blocks that are where its layout says."""
    expected = np.asarray(expected)
    assert type(x) is spmd.PartitionedArray
    assert x.dtype == expected.dtype
    assert x.shape == expected.shape
    assert x.layout.shape == x.shape
    np.testing.assert_array_equal(x.numpy(), expected)
    x = x.reduced
    assert sorted(x.blocks) == list(range(x.mesh.size))
    for w, block in x.blocks.items():
        if x.mesh.device == "cpu":
            assert type(block) is np.ndarray
            assert not block.flags.writeable
        assert block.dtype == expected.dtype
        np.testing.assert_array_equal(to_host(block), expected[x.layout.slices(w)])
        assert block is x.blocks[x.layout.owners[w]]


# Making them


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", [(7, 5), (6, 6), (1, 2), (0, 3), (2, 0), (4, 3, 2)])
def test_put_and_assemble(shape, spec):
    a = shaped(shape)
    x = spmd.put(a, spec, MESH)
    equal(x, a)
    assert x.layout == Layout(shape, spec, MESH.axes)
    assert (x.spec, x.ndim, x.size, x.nbytes, x.mesh) == (spec, a.ndim, a.size, a.nbytes, MESH)
    assert len(x) == len(a)


@pytest.mark.parametrize("a", [3, 2.5, 1j, True, np.float32(1.5), np.arange(3, dtype=np.int8)], ids=repr)
def test_put_of_numbers_and_arrays(a):
    equal(spmd.put(a, P(), MESH), np.asarray(a))


def test_put_of_trees():
    placed = spmd.put({"w": [A, A[0]], "n": 2, "none": None}, {"w": [P("x", "y"), P("y")], "n": P(), "none": P()}, MESH)
    equal(placed["w"][0], A)
    assert placed["w"][0].spec == P("x", "y")
    equal(placed["w"][1], A[0])
    equal(placed["n"], 2)
    assert placed["none"] is None
    again = spmd.put(placed, P())
    assert again["w"][0].spec == P()
    equal(again["w"][0], A)
    equal(spmd.put([A, A], P("x"), MESH)[1], A)


def test_put_of_other_orders_and_types():
    for a in (A.T, A[::-2, 1:], np.asfortranarray(A), A.astype(">f4"), np.broadcast_to(A[0], (4, 5)), np.ma.array(A)):
        x = spmd.put(a, P("x", "y"), MESH)
        assert all(b.flags.c_contiguous for b in x.blocks.values())
        equal(x, np.asarray(a))


def test_put_looks_its_mesh_up():
    with MESH:
        assert spmd.put(A, P("x")).mesh is MESH
        with spmd.Mesh(z=2) as inner:
            assert spmd.put(A, P("z")).mesh is inner
            assert spmd.put(A, P("x"), MESH).mesh is MESH
        assert spmd.put(A, P("x")).mesh is MESH
    x = spmd.put(A, P("x"), MESH)
    assert spmd.put(x, P("y")).mesh is MESH


@pytest.mark.parametrize("target", SPECS, ids=str)
@pytest.mark.parametrize("source", SPECS, ids=str)
def test_put_from_spec_to_spec(source, target):
    x = spmd.put(A, source, MESH)
    y = spmd.put(x, target)
    equal(y, A)
    assert y.spec == target
    equal(x, A)
    if source == target:
        assert y is x


def test_put_moves_only_what_is_missing():
    with spmd.Mesh(x=4):
        x = spmd.put(A, P("x"))
        with spmd.ledger() as log:
            spmd.put(x, P("x"))
            spmd.put(spmd.put(A, P()), P("x"))
        assert log.messages == 0
        with spmd.ledger() as log:
            spmd.put(x, P())
        assert {w: r.messages for w, r in log.workers.items()} == dict.fromkeys(range(4), 3)
        assert {w: r.bytes for w, r in log.workers.items()} == {w: 3 * x.blocks[w].nbytes for w in range(4)}


@given(st.data())
def test_from_blocks_of_any_lengths(data):
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=6, max_size=6))
    starts = np.cumsum([0, *lengths])
    blocks = [np.arange(2 * a, 2 * b).reshape(-1, 2) for a, b in itertools.pairwise(starts)]
    x = spmd.from_blocks(blocks, P(("x", "y")), MESH)
    equal(x, np.concatenate(blocks))
    assert x.layout.cuts[0] == tuple(lengths)
    equal(spmd.put(x, P("y")), np.concatenate(blocks))
    balanced = spmd.put(x, P(("x", "y")))
    assert balanced.layout.balanced
    equal(balanced, np.concatenate(blocks))


def test_from_blocks_with_copies_and_by_number():
    rows = [A[:1], A[1:]]
    x = spmd.from_blocks([rows[w // 3] for w in range(6)], P("x"), MESH)
    equal(x, A)
    assert x.layout.cuts == ((1, 6), (5,))
    equal(spmd.from_blocks({w: rows[w // 3] for w in reversed(range(6))}, P("x"), MESH), A)


def test_from_callback_asks_once_for_each_block():
    asked = []

    def part(index):
        asked.append(index)
        return A[index]

    x = spmd.from_callback(A.shape, P("y"), part, MESH)
    equal(x, A)
    assert asked == [(slice(0, 3), slice(0, 5)), (slice(3, 5), slice(0, 5)), (slice(5, 7), slice(0, 5))]
    equal(spmd.from_callback((), P(), lambda index: 3.0, MESH), 3.0)


# Copies and immutability


def test_bare_arrays_are_copied():
    a = A.copy()
    x = spmd.put(a, P("x"), MESH)
    whole = spmd.put(a, P(), MESH)
    made = spmd.from_blocks([a] * 6, P(), MESH)
    a[:] = 0
    for each in (x, whole, made):
        equal(each, A)


@pytest.mark.host("only arrays of NumPy can be frozen")
def test_frozen_arrays_are_shared():
    frozen = spmd.freeze(A)
    assert frozen.base is not None
    assert np.shares_memory(frozen, A)
    assert not frozen.flags.writeable
    assert A.flags.writeable
    x = spmd.put(frozen, P("x"), MESH)
    equal(x, A)
    assert all(np.shares_memory(b, A) for b in x.blocks.values())
    assert np.shares_memory(spmd.put(frozen, P(), MESH).numpy(), A)
    assert np.shares_memory(spmd.from_blocks([frozen] * 6, P(), MESH).blocks[4], A)
    columns = spmd.put(frozen, P(None, "x"), MESH)  # their blocks are not contiguous there
    equal(columns, A)
    assert all(b.flags.c_contiguous for b in columns.blocks.values())


def test_a_view_that_another_may_write_to_is_copied():
    a = A.copy()
    view = a.view()
    view.flags.writeable = False
    x = spmd.put(view, P("x"), MESH)
    a[:] = 0
    equal(x, A)
    b = A.copy()
    thawed = np.array(spmd.freeze(b), subok=True)  # a new array, which is writable again
    y = spmd.put(thawed, P(), MESH)
    thawed[:] = 0
    equal(y, A)


@pytest.mark.host("bare arrays of NumPy")
@pytest.mark.parametrize("dtype", ["f4", "c16", "i8", "?"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 4), (1 << 10, 1 << 10)])
def test_what_is_thawed_may_be_written_to(shape, dtype):
    a = np.asarray(np.arange(np.prod(shape)).reshape(shape) % 7, dtype)
    for of in (a, spmd.freeze(a), a.T, np.asfortranarray(a), a[..., ::2] if a.ndim else a):
        x = spmd.thaw(of)
        assert type(x) is np.ndarray
        assert x.flags.writeable
        assert x.flags.c_contiguous
        assert (x.shape, x.dtype) == (of.shape, of.dtype)
        assert not np.shares_memory(x, a)
        assert np.array_equal(x, of)


@pytest.mark.host("bare arrays of NumPy")
def test_memory_of_somebody_else_is_not_thawed(tmp_path):
    """Whoever has it, and however it came to be an array without a name."""
    octets, named = bytearray(80), np.arange(10.0)
    file = np.memmap(tmp_path / "file", float, "w+", shape=10)
    exported = memoryview(named)
    for make in (
        lambda: np.frombuffer(bytes(octets)),
        lambda: np.frombuffer(octets),
        lambda: np.asarray(file),
        lambda: np.asarray(exported),
        lambda: np.broadcast_to(named[:1], (1,)),
        lambda: named[:],
        lambda: named.reshape(2, 5),
        lambda: np.asarray(spmd.freeze(named)),
        lambda: np.ndarray((10,), float, octets),
    ):
        spmd.thaw(make()).fill(7)
        assert not any(octets)
        assert not file.any()
        np.testing.assert_array_equal(named, np.arange(10.0))


@pytest.mark.host("bare arrays of NumPy")
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 4), (1 << 9, 1 << 9)])
def test_what_has_no_name_is_thawed(shape):
    x = spmd.thaw(np.full(shape, 2.0))
    assert x.flags.writeable
    assert x.flags.c_contiguous
    assert x.shape == shape
    assert (x == 2).all()
    row = spmd.thaw(np.zeros((1000, 1000))[0])
    assert row.base is None  # which would keep all the others


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python lends its variables")
@pytest.mark.parametrize("rows", [100, 10_000])
def test_memory_that_is_used_again_is_thawed_in_place(rows):
    made = []

    def read_only() -> np.ndarray:
        x = pool.empty((rows, 100))
        x.fill(3)
        x.setflags(write=False)
        made.append(pool.address(x))
        return x

    for _ in range(3):
        x = spmd.thaw(read_only())
        assert x.ctypes.data == made.pop()
        x += 1
    named = read_only()
    view = named[1:]
    assert spmd.thaw(named).ctypes.data != made.pop()
    assert not view.flags.writeable


@pytest.mark.parametrize("looks_on", [sys.setprofile, sys.settrace])
def test_who_looks_on_is_not_taken_for_a_name(looks_on):
    """A profiler that holds the variables of every call makes counts of references larger."""

    def look(frame, event, argument):
        return look if frame.f_locals is not None else None

    before = sys.gettrace(), sys.getprofile()
    looks_on(look)
    found = ownership._references_alone(), array_methods._count_temporary()
    sys.settrace(before[0])
    sys.setprofile(before[1])
    assert found == (-1, 0)


@pytest.mark.host("bare arrays of NumPy")
def test_copies_that_differ_outside_of_one_column_are_told_apart():
    """Of a matrix whose lengths are powers of two, or any others."""
    for shape in (1024, 1024), (2048, 512), (3072, 333), (999, 1024), (64, 64, 16), (1000, 100), (1 << 20,), (40000, 1):
        a = np.zeros(shape, np.float32)
        b = np.random.default_rng(0).standard_normal(shape, np.float32)
        if len(shape) > 1 and shape[-1] > 1:
            b[..., 0] = 0
            b[0] = 0
        assert digest(a) != digest(b)


@pytest.mark.host("bare arrays of NumPy")
def test_what_collectives_give_is_thawed_in_bodies_for_libraries_that_work_in_place():
    whole = np.random.default_rng(0).standard_normal((6, 6))
    columns = MESH.layout(whole.shape, P(None, "x"))

    def body(x):
        y = spmd.repartition(x, MESH.layout(whole.shape, P("x")), columns)
        with pytest.raises(ValueError, match="read-only"):
            y *= 2
        z = spmd.thaw(y)
        z *= 2
        return spmd.freeze(z), y

    mapped = spmd.map(body, P("x"), (P(None, "x"), P(None, "x")), mesh=MESH, check=False)
    doubled, same = mapped(whole)
    equal(doubled, 2 * whole)
    equal(same, whole)


def test_only_bare_arrays_are_thawed():
    refused = []

    def body(x):
        with pytest.raises(StateError, match=r"(?s)spmd\.thaw.*spmd\.thaw\(spmd\.block\(x\)\)") as error:
            spmd.thaw(x)
        refused.append(error)
        return x

    x = spmd.map(body, P("x"), P("x"), mesh=MESH)(A)
    assert refused
    with pytest.raises(StateError, match=r"x\.numpy\(\)"):
        spmd.thaw(x)
    with pytest.raises(StateError, match=r"np\.asarray\(x\)"):
        spmd.thaw([1.0, 2.0])
    with pytest.raises(StateError, match=r"x\.filled"):
        spmd.thaw(np.ma.masked_array([1.0, 2.0], [True, False]))


@pytest.mark.host("a mesh of GPUs is not pickled")
def test_meshes_and_results_are_copied_and_pickled_after_maps():
    mesh = spmd.Mesh(x=2, y=3)
    mapped = spmd.map(lambda x: spmd.psum(spmd.psum(x, "x"), "y"), P(("x", "y")), P(), mesh=mesh)
    x = np.arange(12.0)
    total = x.reshape(6, 2).sum(0)
    for _ in range(3):
        equal(mapped(x), total)
    for again in (copy.copy, copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))):
        assert again(mesh) == mesh
        equal(again(mapped(x)), total)
        equal(spmd.map(mapped.f, P(("x", "y")), P(), mesh=again(mesh))(x), total)


@pytest.mark.host("arrays of NumPy")
@pytest.mark.parametrize("length", [6, 6 << 14])
def test_collectives_keep_the_order_of_bytes(length):
    def body(x):
        return [
            spmd.psum(x, "x"),
            spmd.all_gather(x, "x", tiled=True, to="invariant"),
            spmd.all_gather(x, "x", to="invariant"),
            spmd.all_gather(spmd.psum_scatter(x, "x", tiled=True), "x", tiled=True, to="invariant"),
            spmd.all_gather(spmd.all_to_all(x, "x", 0, 0, tiled=True), "x", tiled=True, to="invariant"),
        ]

    def found(dtype):
        return [y.numpy() for y in spmd.map(body, P("x"), P(), mesh=MESH)(np.arange(length).astype(dtype))]

    for there, here in zip(found(">f4"), found("=f4"), strict=True):
        assert there.dtype.str == ">f4"
        np.testing.assert_array_equal(there, here)


@pytest.mark.host("only arrays of NumPy can be frozen")
def test_frozen_arrays_are_shared_with_bodies():
    seen = []
    frozen, bare = spmd.freeze(A), A.copy()

    def body(x, y):
        seen.append((np.shares_memory(spmd.block(x), A), np.shares_memory(spmd.block(y), bare)))
        return x, y

    spmd.map(body, P("x"), P("x"), mesh=MESH)(frozen, bare)
    assert seen == [(True, False)] * 6


@pytest.mark.host("arrays of a device have no flag that forbids writing")
def test_results_are_read_only_and_own_their_data():
    with MESH:
        x = spmd.put(A, P("x"))
        for each in (x.numpy(), (x + 1).numpy(), spmd.map(lambda b: b * 2, P("x"), P("x"))(A).numpy()):
            with pytest.raises(ValueError, match="read-only"):
                each[0, 0] = 1
        for block in x.blocks.values():
            with pytest.raises(ValueError, match="read-only"):
                block[...] = 1
        copy = np.array(x)
        copy[0, 0] = 7
        equal(x, A)
        with pytest.raises(LayoutError, match="immutable"):
            x[0] = 1
        before = x
        x += 1
        equal(before, A)
        equal(x, A + 1)


def test_owned_gives_contiguous_read_only_copies():
    for a in (A, A.T, A[::2], np.float64(3), A.view()):
        mine = owned(np.asarray(a))
        assert mine.flags.c_contiguous
        assert not mine.flags.writeable
        assert not np.shares_memory(mine, a)
        np.testing.assert_array_equal(mine, a)


def test_copies_of_a_block_are_one_array():
    layout = Layout(A.shape, P("y"), MESH.axes)
    blocks = cut(A, layout, MESH)
    assert blocks[0] is blocks[3]
    assert blocks[0] is not blocks[1]
    assert relayout(spmd.put(A, P("y"), MESH), layout).blocks.keys() == blocks.keys()


def test_arrays_can_be_let_go():
    x = spmd.put(A, P("x"), MESH)
    block, handle = weakref.ref(x.blocks[0]), weakref.ref(x)
    del x
    gc.collect()
    assert handle() is None
    assert block() is None


# Whole arrays


@pytest.mark.host("what lies on a device comes to the host as a copy")
def test_assembling():
    x = spmd.put(A, P("x", "y"), MESH)
    np.testing.assert_array_equal(np.asarray(x), A)
    assert np.asarray(x, dtype=np.float32).dtype == np.float32
    np.testing.assert_array_equal(np.asarray(x, dtype=complex), A.astype(complex))
    assert np.array(x).flags.writeable
    assert np.asarray(spmd.put(A, P(), MESH)).shape == A.shape
    assert np.asarray(spmd.put(2.5, P(), MESH)).shape == ()
    for a, dtype in ((x, None), (spmd.put(A, P(), MESH), np.float32)):
        with pytest.raises(LayoutError, match="argument copy"):
            np.array(a, dtype, copy=False)
    copied = spmd.put(A, P(), MESH)
    assert np.shares_memory(np.array(copied, copy=False), copied.blocks[0])
    assert not np.shares_memory(np.asarray(copied), copied.blocks[0])


def test_functions_of_whole_arrays():
    x = spmd.put(A, P("x"), MESH)
    assert np.allclose(x, A)
    assert not np.allclose(x, A + 1)
    assert np.array_equal(spmd.put(A, P("y"), MESH), x)
    np.testing.assert_allclose(x, A)
    assert (np.shape(x), np.ndim(x), np.size(x)) == ((7, 5), 2, 35)


def test_numbers():
    x = spmd.put(2.5, P(), MESH)
    assert float(x) == 2.5
    assert int(x) == 2
    assert complex(x) == 2.5
    assert bool(x)
    assert not spmd.put(0.0, P(), MESH)
    assert x.item() == 2.5
    assert type(x.item()) is float
    assert float(spmd.put(np.array([[4.0]]), P("x"), MESH)) == 4.0
    assert [10, 20, 30][spmd.put(1, P(), MESH)] == 20
    assert list(range(spmd.put(np.int8(3), P(), MESH))) == [0, 1, 2]
    with pytest.raises(TypeError):
        range(x)
    with pytest.raises(TypeError, match="not hashable"):
        hash(x)
    with pytest.raises(TypeError, match="len"):
        len(x)


# Computing outside of maps


UNARY = [np.negative, np.absolute, np.exp, np.sin, np.sign, np.isfinite, np.square, np.conjugate, np.floor]
BINARY = [
    np.add,
    np.subtract,
    np.multiply,
    np.divide,
    np.maximum,
    np.hypot,
    np.greater,
    np.equal,
    np.arctan2,
    np.copysign,
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_ufuncs_work_block_by_block(spec):
    x = spmd.put(A, spec, MESH)
    with spmd.ledger() as log:
        for ufunc in UNARY:
            equal(ufunc(x), ufunc(A))
            assert ufunc(x).layout == x.layout
        for ufunc in BINARY:
            equal(ufunc(x, spmd.put(A[::-1], spec, MESH)), ufunc(A, A[::-1]))
    assert log.verbs == {k: n for k, n in log.verbs.items() if k == "exchange"}  # only numpy() sent anything
    whole, part = np.modf(x), np.modf(A)
    equal(whole[0], part[0])
    equal(whole[1], part[1])


def test_operators():
    x, y = spmd.put(A, P("x"), MESH), spmd.put(A[::-1].copy(), P("x"), MESH)
    equal(x + y, A + A[::-1])
    equal(x - y, A - A[::-1])
    equal(x * y, A * A[::-1])
    equal(x / y, A / A[::-1])
    equal(x // y, A // A[::-1])
    equal(x % y, A % A[::-1])
    equal(x**2, A**2)
    equal(-x, -A)
    equal(+x, +A)
    equal(abs(x), abs(A))
    equal(2 - x, 2 - A)
    equal(2 / x, 2 / A)
    equal(2 // x, 2 // A)
    equal(2 % x, 2 % A)
    equal(2.0**x, 2.0**A)
    equal(1 + x, 1 + A)
    equal(3 * x, 3 * A)
    for a, b in ((x, y), (x, A[::-1]), (x, 0.5)):
        for compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
            equal(compare(a, b), compare(A, np.asarray(b)))
    equal(A[::-1] < x, A[::-1] < A)
    m, n = x > 0, y > 0
    equal(m & n, (A > 0) & (A[::-1] > 0))
    equal(m | n, (A > 0) | (A[::-1] > 0))
    equal(m ^ n, (A > 0) ^ (A[::-1] > 0))
    equal(~m, ~(A > 0))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_operands_of_other_layouts_and_shapes(spec):
    """An Invariant operand, a number, a bare array and anything that broadcasts meet an array as it lies."""
    x = spmd.put(A, spec, MESH)
    for b in (3, 2.5, np.float64(2), np.array(2.0), A, A[0], A[:, :1], A[:1], A[:1, :1], np.asfortranarray(A)):
        equal(x * b, A * b)
        equal(b - x, b - A)
        assert (x * b).layout == x.layout
        invariant = spmd.put(b, P(), MESH)
        equal(x * invariant, A * np.asarray(b))
        equal(invariant - x, np.asarray(b) - A)
        assert (invariant * x).layout == x.layout
    equal(spmd.put(A[0], P(), MESH) * np.ones((7, 5)), A[0] * np.ones((7, 5)))


def test_broadcasting_between_split_arrays():
    column = spmd.put(A[:, :1], P("x"), MESH)
    row = spmd.put(A[0], P("y"), MESH)
    both = spmd.put(A, P("x", "y"), MESH)
    equal(column * row, A[:, :1] * A[0])
    assert (column * row).spec == P("x", "y")
    equal(both + column, A + A[:, :1])
    equal(both + row, A + A[0])
    equal(column + spmd.put(A, P("x"), MESH), A + A[:, :1])
    equal(spmd.put(A[:1], P(), MESH) + row, A[:1] + A[0])
    deep = spmd.put(shaped((2, 7, 5)), P("x"), MESH)
    equal(deep + row, shaped((2, 7, 5)) + A[0])
    equal(deep * A, shaped((2, 7, 5)) * A)
    # A dimension of length 1 that is split holds its one entry on one worker only; then it is laid out anew.
    equal(spmd.put(A[:1], P("x"), MESH) + A, A[:1] + A)
    equal(column + spmd.put(A[0], P("x"), MESH), A[:, :1] + A[0])


def test_uneven_blocks_stay_uneven():
    x = spmd.from_blocks([A[:1]] * 3 + [A[1:]] * 3, P("x"), MESH)
    y = (2 * x + A) * x
    equal(y, (2 * A + A) * A)
    assert y.layout.cuts == ((1, 6), (5,))


@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        (np.float32, 2.0),
        (np.float32, np.float64(2)),
        (np.float32, np.float32(2)),
        (np.int8, 3),
        (np.int32, 2.5),
        (bool, 1),
        (np.float32, 1j),
        (np.float16, np.ones(5, np.float32)),
        (np.complex64, np.ones((7, 1))),
    ],
    ids=str,
)
def test_dtypes_are_numpy_s(dtype, other):
    a = (A * 3).astype(dtype)
    x = spmd.put(a, P("x", "y"), MESH)
    equal(x + other, a + other)
    equal(other * x, other * a)


def test_where_and_dtype_options_pass():
    x = spmd.put(A, P("x"), MESH)
    equal(np.add(x, 1, dtype=np.float32), np.add(A, 1, dtype=np.float32))
    equal(np.sqrt(np.abs(x), dtype=complex), np.sqrt(np.abs(A), dtype=complex))


def test_astype_real_and_imag():
    z = A + 1j * A[::-1]
    x = spmd.put(z, P("y", "x"), MESH)
    equal(np.real(x), z.real)
    equal(np.imag(x), z.imag)
    equal(np.conj(x), z.conj())
    equal(spmd.put(A, P("x"), MESH).astype(np.float32), A.astype(np.float32))
    equal(spmd.put(A, P(), MESH).astype(int), A.astype(int))
    equal(np.zeros_like(x), np.zeros_like(z))
    equal(np.ones_like(spmd.put(A, P("x"), MESH), dtype=int), np.ones_like(A, dtype=int))
    equal(np.full_like(spmd.put(A, P("x"), MESH), 7, dtype=int), np.full_like(A, 7, dtype=int))
    equal(np.zeros_like(spmd.put(A, P("x"), MESH), shape=A.shape), np.zeros_like(A))
    for shape in (3, (), (2, 7)):
        other = np.zeros_like(spmd.put(A, P("x"), MESH), shape=shape)
        equal(other, np.zeros_like(A, shape=shape))
        assert all(b.shape == other.layout.block_shape(w) for w, b in other.blocks.items())
    with pytest.raises(LayoutError, match=r"np\.full_like: argument fill_value"):
        np.full_like(spmd.put(A, P("x"), MESH), A[0])
    _, pull = spmd.vjp(lambda x: np.sum(x**2), spmd.put(A, P("x"), MESH))
    equal(pull(1.0)[0], 2 * A)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 1), (1,), ()], ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
def test_sums(spec, axis, keepdims):
    a = np.round(A * 8)  # small integers: any order gives the same
    x = spmd.put(a, spec, MESH)
    equal(np.sum(x, axis=axis, keepdims=keepdims), np.sum(a, axis=axis, keepdims=keepdims))


@pytest.mark.parametrize("first", [P(), P("x"), P("x", None)])
def test_stack_joins_operands_that_lie_differently(first):
    b = np.arange(35).reshape(7, 5)
    for axis in range(-3, 3):
        one, other = spmd.put(b, first, MESH), spmd.put(A, P("x"), MESH)
        equal(np.stack([one, other], axis), np.stack([b, A], axis))
        equal(np.stack([b, other, one], axis), np.stack([b, A, b], axis))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_stack_expand_and_reshape_what_is_whole(spec):
    x = spmd.put(A, spec, MESH)
    for axis in (0, 1, 2, -1):
        equal(np.stack([x, x + 1, A], axis), np.stack([A, A + 1, A], axis))
        equal(np.expand_dims(x, axis), np.expand_dims(A, axis))
    equal(np.expand_dims(x, (0, 2)), np.expand_dims(A, (0, 2)))
    equal(np.expand_dims(x, (-1, 0)), np.expand_dims(A, (-1, 0)))
    equal(np.broadcast_to(x, (2, 7, 5)), np.broadcast_to(A, (2, 7, 5)))
    for shape in ((7, 5), (7, -1), (7, 1, 5), (1, 7, 5, 1), [7, 5]):
        equal(np.reshape(x, shape), np.reshape(A, shape))
    deep = spmd.put(shaped((6, 5)), spec, MESH)
    for shape in ((2, 3, 5), (6, 5, 1), (3, 2, 5), (30,), -1, (5, 6)):
        try:
            found = np.reshape(deep, shape)
        except LayoutError:
            split = [d for d, names in enumerate(deep.spec.dims) if names]
            assert split
            assert shape in ((30,), -1, (5, 6)) or 0 in split
        else:
            equal(found, np.reshape(shaped((6, 5)), shape))
    wide = spmd.from_blocks([np.ones((2, k // 3 + 1)) for k in range(6)], P(None, "x"), MESH)
    equal(np.reshape(wide, (2, 1, 3)), np.ones((2, 1, 3)))
    assert np.reshape(wide, (2, 1, 3)).layout.cuts == ((2,), (1,), (1, 2))
    for bad in ((7, 6), (-1, -1), (35, 2)):
        with pytest.raises(LayoutError, match=r"np\.reshape"):
            np.reshape(x, bad)


def test_sums_of_uneven_blocks_and_other_dtypes():
    a = np.arange(10, dtype=np.int8) > 3
    x = spmd.from_blocks([a[:0]] * 3 + [a] * 3, P("x"), MESH)
    equal(np.sum(x), np.sum(a))
    equal(np.sum(x, dtype=np.float32), np.sum(a, dtype=np.float32))
    equal(np.sum(spmd.put(np.zeros((0, 3)), P("x"), MESH)), 0.0)
    total = np.sum(spmd.put(A, P("x", "y"), MESH), axis=0)
    assert total.spec == P("y", unreduced={"x"})
    assert total.reduced.spec == P("y")


def test_a_step_of_descent_is_local():
    with spmd.Mesh(x=4):
        w, g = spmd.put(A, P("x")), spmd.put(A[::-1], P("x"))
        with spmd.ledger() as log:
            w = w - 0.1 * g
        assert not log.verbs
        equal(w, A - 0.1 * A[::-1])


# The inner product


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_inner_products_count_copies_once(spec):
    a, b = np.round(A * 8), np.round(A[::-1] * 8)
    x, y = spmd.put(a, spec, MESH), spmd.put(b, spec, MESH)
    assert spmd.inner(x, y) == np.vdot(a, b)
    assert spmd.inner(x, b) == np.vdot(a, b)
    assert spmd.inner(a, y) == np.vdot(a, b)
    assert spmd.inner(x, spmd.put(b, P("y"), MESH)) == np.vdot(a, b)
    assert spmd.inner([x, {"k": b}], [y, {"k": a}]) == 2 * np.vdot(a, b)
    assert spmd.inner(x + 1j * y, y) == np.vdot(a + 1j * b, b)
    assert spmd.norm(x) == np.sqrt(np.vdot(a, a))
    assert spmd.norm((x, 1j * y)) == np.sqrt(np.vdot(a, a) + np.vdot(b, b))


def test_inner_products_of_bare_arrays_and_numbers():
    assert spmd.inner(A, A) == np.vdot(A, A)
    assert spmd.inner(2.0, 3.0) == 6.0
    assert spmd.norm([3.0, np.array(4.0)]) == 5.0


# How they are shown


def test_numbers_are_formatted():
    loss = spmd.put(0.123456, P(), MESH)
    assert f"{loss:.3f}" == "0.123"
    assert f"{loss:8.2e}|" == "1.23e-01|"
    assert f"{loss}" == "0.123456"
    assert str(loss) == "0.123456"
    assert repr(loss) == "PartitionedArray(0.123456, dtype=float64, spec=P())"
    assert f"{spmd.put(7, P(), MESH):03d}" == "007"


def test_small_arrays_are_shown_with_their_data():
    x = spmd.put(np.arange(4), P("x"), MESH)
    assert repr(x) == "PartitionedArray([0, 1, 2, 3], dtype=int64, spec=P('x'))"
    assert str(x) == "[0 1 2 3]"
    assert f"{x}" == "[0 1 2 3]"
    uneven = spmd.from_blocks([np.arange(1.0)] * 3 + [np.arange(2.0)] * 3, P("x"), MESH)
    assert repr(uneven) == "PartitionedArray([0., 0., 1.], dtype=float64, spec=P('x'), blocks of ((1, 2),))"


def test_large_arrays_are_abridged():
    text = repr(spmd.put(np.zeros((300, 300)), P("x", "y"), MESH))
    assert "..." in text
    assert len(text) < 400
    assert text.endswith("dtype=float64, spec=P('x', 'y'))")


def test_in_a_body_a_global_array_shows_its_layout_only():
    x = spmd.put(A, P("x"), MESH)
    seen = []
    spmd.map(lambda b: (seen.append((str(x), repr(x))), b)[1], P("x"), P("x"), mesh=MESH)(A)
    assert set(seen) == {
        (
            "<PartitionedArray float64[7, 5] laid out by P('x', None) on Mesh(x=2, y=3)>",
            "PartitionedArray(shape=(7, 5), dtype=float64, spec=P('x', None))",
        )
    }


# Meshes


def test_meshes_of_one_shape_are_equal_and_mix():
    other = spmd.make_mesh((2, 3), ("x", "y"))
    assert other == MESH
    assert hash(other) == hash(MESH)
    assert spmd.Mesh(y=3, x=2) != MESH
    assert spmd.Mesh(x=6) != MESH
    equal(spmd.put(A, P("x"), MESH) + spmd.put(A, P("x"), other), 2 * A)
