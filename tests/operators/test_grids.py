"""Layouts in place of specs: global arrays on grids and in uneven blocks, maps of them, and Rooted results."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import PROGRAMS, each_mpi, launch
from mpi_programs import grids as grids_program

import spmd
from spmd import Layout, P
from spmd.errors import LayoutError, MismatchError, SpecError, StateError
from spmd.kernels import on_device
from spmd.operators.permute import Permute
from spmd.operators.repartition import Repartition
from spmd.operators.root import Replicate, SumReduce
from spmd.testing import check_adjoint, layouts, meshes, shapes

W = {"w": 6}
AB = {"a": 2, "b": 3}
MESH = spmd.Mesh(**W, transport="local")
X = np.random.default_rng(0).normal(size=(7, 5))
GRID = Layout.grid((7, 5), (2, 2), W, workers=[4, 1, 2, 0])
OTHER = Layout.grid((7, 5), (1, 3), W, workers=[5, 3, 0], cuts=[None, (0, 4, 1)])
UNEVEN = Layout((7, 5), P("w"), W, [(1, 0, 3, 2, 1, 0), None])


def lies(x: spmd.PartitionedArray, layout: Layout, whole: np.ndarray) -> None:
    """x is this array, each block where its layout has it and read-only."""
    assert (type(x), x.layout, x.shape, x.dtype) == (spmd.PartitionedArray, layout, whole.shape, whole.dtype)
    assert sorted(x.blocks) == list(range(layout.size))
    for w, block in x.blocks.items():
        assert block.shape == layout.block_shape(w)
        assert on_device(block) or not block.flags.writeable
        if layout.positions(w) is not None:
            np.testing.assert_array_equal(block, whole[layout.slices(w)])
    np.testing.assert_array_equal(x.numpy(), whole)


once = {"copies": ("invariant",)}  # strategies' grids then hold each block once


@st.composite
def two_layouts(draw):
    mesh, shape = draw(meshes(max_workers=8)), draw(shapes())
    return mesh, draw(layouts(mesh, shape, **once)), draw(layouts(mesh, shape, **once))


@given(two_layouts(), st.integers(0, 9))
@settings(max_examples=120)
def test_arrays_go_from_any_layout_to_any_other(drawn, seed):
    mesh, src, dst = drawn
    whole = np.random.default_rng(seed).integers(-9, 9, src.shape)
    x = spmd.put(whole, src, mesh)
    lies(x, src, whole)
    lies(spmd.put(x, dst), dst, whole)
    lies(spmd.from_callback(src.shape, dst, lambda index: whole[index], mesh), dst, whole)
    lies(spmd.from_blocks([x.blocks[w] for w in range(mesh.size)], src, mesh), src, whole)
    lies(x.astype(np.float32), src, whole.astype(np.float32))
    assert spmd.inner(x, spmd.put(x, dst)) == np.sum(whole * whole)


@given(two_layouts(), st.integers(0, 9))
@settings(max_examples=60)
def test_maps_between_layouts_and_their_gradients(drawn, seed):
    mesh, src, dst = drawn
    whole, weights = np.random.default_rng(seed).normal(size=(2, *src.shape))

    def body(x):
        return spmd.repartition(np.sin(x) * x, src, dst)

    f = spmd.map(body, src, dst, mesh=mesh)
    value = np.sin(whole) * whole
    lies(f(whole), dst, np.asarray(value))
    lies(spmd.map(body, src, dst, mesh=mesh, check=False)(whole), dst, np.asarray(value))

    def loss(x, f=f):
        return np.sum(weights * f(x))

    def slope(x, f=f):
        return np.sum(spmd.grad(lambda x: loss(x, f))(x) ** 2)

    serial = lambda x: np.sin(x) * x
    expected = spmd.grad(lambda x: loss(x, serial))(whole)
    np.testing.assert_allclose(spmd.grad(loss)(whole), expected, atol=1e-12)
    g = spmd.grad(loss)(spmd.put(whole, src, mesh))
    assert g.layout == src  # as its argument lies
    np.testing.assert_allclose(g.numpy(), expected, atol=1e-12)
    second = spmd.grad(lambda x: slope(x, serial))(whole)
    np.testing.assert_allclose(spmd.grad(slope)(whole), second, atol=1e-12)


def test_blocks_of_a_layout_reach_the_body_as_they_are():
    with MESH:
        seen = spmd.map(lambda x: np.array([x.shape[0]]), UNEVEN, P("w"))(X).numpy()
        assert seen.tolist() == [1, 0, 3, 2, 1, 0]
        x = spmd.put(X, UNEVEN)
        assert x.spec == P("w")
        out = spmd.map(lambda x: 2 * x, P("w"), UNEVEN)  # balanced blocks are not those of the layout
        with pytest.raises(LayoutError, match=r"a block of shape \[2, 5\] on worker 0"):
            out(X)
        lies(spmd.map(lambda x: 2 * x, x.layout, x.layout)(x), UNEVEN, 2 * X)


def test_arithmetic_on_a_grid():
    with MESH:
        x, y, row = spmd.put(X, GRID), spmd.put(X + 1, GRID), spmd.put(X[0], P())
        lies(np.exp(x) * y - 2 * X, GRID, np.exp(X) * (X + 1) - 2 * X)
        lies(x + row, GRID, X + X[0])
        lies(X[:, :1] * x, GRID, X[:, :1] * X)
        np.testing.assert_allclose(float(np.sum(x)), X.sum())
        np.testing.assert_allclose(np.sum(x, keepdims=True).numpy(), [[X.sum()]])
        two = np.stack([x, y], axis=1).numpy()
        np.testing.assert_array_equal(two, np.stack([X, X + 1], axis=1))
        whole = spmd.put(np.ones(X.shape, np.int8), P())
        for axis in range(3):
            mixed = np.stack([whole, x], axis=axis)
            assert {b.dtype for b in mixed.blocks.values()} == {np.dtype(float)}
            np.testing.assert_array_equal(mixed.numpy(), np.stack([np.ones(X.shape), X], axis=axis))
        np.testing.assert_array_equal(np.expand_dims(x, (0, 2)).numpy(), X[None, :, None])
        np.testing.assert_array_equal(np.reshape(x, (7, 1, 5, 1)).numpy(), X[:, None, :, None])
        rows = spmd.put(X, Layout.grid((7, 5), (3, 1), W, workers=[5, 0, 2]))
        np.testing.assert_array_equal(np.reshape(rows * np.ones((7, 5)), (1, 7, 5, 1)).numpy(), X[None, :, :, None])
        f = spmd.map(lambda x: x**2, rows.layout, rows.layout)
        np.testing.assert_array_equal(spmd.jacfwd(f)(X[:, :]).numpy(), spmd.jacfwd(np.square)(X))
        np.testing.assert_array_equal(spmd.grad(lambda x: np.sum(np.expand_dims(f(x), 0)))(X), 2 * X)
        assert "grid (2, 2)" in x.layout.picture()
        assert repr(x).endswith(f"spec={GRID})")
        assert f"{describe(x)}".endswith(str(GRID))
        for other in (spmd.put(X, OTHER), spmd.put(X, P("w")), spmd.put(X[0], P("w"))):
            np.testing.assert_array_equal((x + other).numpy(), X + other.numpy())
        for f in (lambda x: np.sum(x, axis=0), lambda x: np.reshape(x, (5, 7)), np.fft.fft):
            np.testing.assert_allclose(f(x).numpy(), f(X))


def describe(x) -> str:
    return x.__spmd_describe__()


@pytest.mark.parametrize("scheduler", ["lockstep", "threads"])
def test_a_number_on_one_worker(scheduler):
    at = Layout.grid((), (), W, workers=[2])
    with spmd.Mesh(**W, transport="local", scheduler=scheduler):
        x = spmd.put(3.5, at)
        assert [b.shape for b in x.blocks.values()] == [(0,), (0,), (), (0,), (0,), (0,)]
        assert float(x) == 3.5
        assert float(x * 2 + 1) == 8.0
        assert float(spmd.put(x, P())) == 3.5
        assert float(spmd.put(spmd.put(3.5, P()), at)) == 3.5
        assert float(spmd.from_callback((), at, lambda index: 1.5)) == 1.5
        other = spmd.put(1.0, Layout.grid((), (), W, workers=[4]))
        assert float(np.sum(x) + np.sum(other)) == 4.5  # sums are one value for all
        total = spmd.map(lambda x: spmd.sum_reduce(np.sum(x), "w", root=2), P("w"), at)
        assert total(X).layout == at
        np.testing.assert_allclose(float(total(X)), X.sum())
        np.testing.assert_allclose(spmd.grad(lambda x: total(x) ** 2)(X), np.full(X.shape, 2 * X.sum()))
        assert np.sum(spmd.put(True, at)).dtype == np.sum(True).dtype
        both = spmd.map(lambda x: (x, spmd.sum_reduce(np.sum(x), "w", root=2)), P("w"), (P("w"), at))
        loss = lambda x: np.sum(both(x)[0] ** 2) + both(x)[1]  # the cotangent of the first comes from that worker
        np.testing.assert_allclose(spmd.grad(loss)(X), 2 * X + 1)
        (second,) = spmd.hvp(lambda x: total(x) ** 2, (X,), (X,))
        np.testing.assert_allclose(second, np.full(X.shape, 2 * X.sum()))


# Rooted values leave a map


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("spec", "body", "layout"),
    [
        # one value along a: one of its copies leaves
        (P(), lambda v: spmd.keep(3 * v, "b", 1), Layout.grid((4,), (1,), AB, workers=[4])),
        (P(), lambda v: spmd.keep(3 * v, "b", 1), Layout.grid((4,), (1,), AB, workers=[1])),
        # a value for each place along a
        (P("a"), lambda v: spmd.keep(3 * v, "b", 1), Layout.grid((4,), (2,), AB, workers=[1, 4])),
        (P("b"), lambda v: spmd.gather(3 * v, "b", root=2), Layout.grid((4,), (1,), AB, workers=[2])),
        (P("b"), lambda v: spmd.gather(3 * v, "b", root=2), Layout.grid((4,), (1,), AB, workers=[5])),
        (P(("a", "b")), lambda v: spmd.gather(3 * v, ("a", "b"), root=3), Layout.grid((4,), (1,), AB, workers=[3])),
        (P(("b", "a")), lambda v: spmd.gather(3 * v, ("b", "a"), root=3), Layout.grid((4,), (1,), AB, workers=[4])),
    ],
)
def test_a_rooted_value_leaves_by_a_layout(spec, body, layout, check):
    v, weights = np.random.default_rng(1).normal(size=(2, 4))
    with spmd.Mesh(**AB, transport="local"):
        f = spmd.map(body, spec, layout, check=check)
        lies(f(v), layout, 3 * v)
        np.testing.assert_allclose(spmd.grad(lambda v: np.sum(weights * f(v) ** 2))(v), 18 * weights * v)
        (second,) = spmd.hvp(lambda v: np.sum(weights * f(v) ** 2), (v,), (weights,))
        np.testing.assert_allclose(second, 18 * weights * weights)


def test_a_rooted_value_and_a_layout_that_does_not_fit_it():
    v = np.arange(4.0)
    with spmd.Mesh(**AB, transport="local"):
        for spec, layout in (
            (P(), Layout.grid((4,), (1,), AB, workers=[3])),  # not at its root
            (P(), Layout.grid((4,), (2,), AB, workers=[1, 4])),  # one value for two blocks
            (P("a"), Layout.grid((4,), (1,), AB, workers=[4])),  # two values for one block
            (P("a"), Layout.grid((4,), (2,), AB, workers=[0, 4])),
        ):
            with pytest.raises(LayoutError, match=r"worker 1 \(a=0, b=1\) or worker 4 \(a=1, b=1\)"):
                spmd.map(lambda v: spmd.keep(v, "b", 1), spec, layout)(v)
        with pytest.raises(StateError, match="a Layout in out_specs"):
            spmd.map(lambda v: spmd.keep(v, "b", 1), P(), P())(v)


# Operators from layout to layout, outside of bodies


@given(two_layouts(), st.integers(0, 9))
@settings(max_examples=40)
def test_operators_between_layouts_apply_to_global_arrays(drawn, seed):
    mesh, src, dst = drawn
    whole = np.random.default_rng(seed).integers(-9, 9, src.shape).astype(float)
    op = Repartition(tuple(mesh.axes), src, dst)
    x = spmd.put(whole, src, mesh)
    with spmd.ledger() as log:
        lies(op(x), dst, whole)
    groups = [op.plan(spmd_group(mesh, w), x.blocks[w].shape, x.dtype).cost for w in range(mesh.size)]
    assert [log.workers[w].messages for w in range(mesh.size)] == [messages for messages, _ in groups]
    lies((op.H @ op)(x), src, whole)
    lies((2 * op)(spmd.put(whole, dst, mesh)), dst, 2 * whole)  # brought to the source first
    lies((op.H @ op + 2 * op.H @ op)(x), src, 3 * whole)


def spmd_group(mesh: spmd.Mesh, worker: int):
    return mesh.group(worker, tuple(mesh.axes))


def test_what_cannot_be_applied_to_an_array_on_a_grid():
    with MESH:
        x = spmd.put(X, GRID)
        there = Repartition(("w",), GRID, OTHER)
        with pytest.raises(SpecError, match="terms that agree"):
            (there + there.H)(x)
        shift = Permute(("w",), ((0, 1),))
        with pytest.raises(SpecError, match="how the result is laid out"):
            shift(x)
        with pytest.raises(SpecError, match="how the result is laid out"):
            (shift @ there)(x)
        total = Replicate(("w",), 0) @ SumReduce(("w",), 0)
        rows = Repartition(("w",), GRID, Layout((7, 5), P(None, "w"), W))
        with pytest.raises(MismatchError):
            (total @ rows)(x)  # blocks of different lengths have no sum
        whole = Layout((6, 5), P("w"), W)
        even = Repartition(("w",), Layout.grid((6, 5), (1, 3), W), whole)
        y = spmd.put(X[:6], P("w"))
        np.testing.assert_allclose((total @ even)(y).numpy(), X[:6].sum(0, keepdims=True))


def test_linear_operators_on_grids():
    with MESH:
        a = np.random.default_rng(2).normal(size=X.shape)
        op = spmd.linear_operator(lambda x: spmd.repartition(a_block(a) * x, GRID, OTHER), GRID, OTHER)
        assert op.domain.spec == GRID
        assert op.shape == (35, 35)
        lies(op(X), OTHER, a * X)
        np.testing.assert_array_equal(op.dense(), np.diag(a.ravel()))
        assert check_adjoint(op).passed
        found = spmd.solvers.cg(op.H @ op, (op.H @ op)(X), rtol=1e-12)
        assert found.x.layout == GRID
        np.testing.assert_allclose(found.x.numpy(), X, atol=1e-6)
        with pytest.raises(LayoutError, match=r"a layout of shape \[7, 5\]"):
            spmd.linear_operator(lambda x: x, GRID, GRID, shape=(3, 5))


def a_block(a: np.ndarray):
    k = spmd.worker_index("w")
    return spmd.varying(a[GRID.slices(k)] if GRID.positions(k) is not None else np.zeros((0, 0)), "w")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Layout.grid((7, 5), (2, 1, 3), W), "of which several workers hold one block"),
        (Layout((7, 5), P(), W, copies="varying"), "of which several workers hold one block"),
        (Layout.grid((7, 5), (2, 1), {"w": 4}), "over the axes of the mesh"),
        (Layout.grid((7, 5), (2, 1), {"w": 6, "v": 1}), "over the axes of the mesh"),
        (Layout.grid((7, 5, 2), (2, 1, 1), W), "for an array of 2 dimensions"),
        (Layout.grid((7, 4), (2, 2), W), r"for an array of shape \[7, 5\]"),
        (Layout((5, 7), P("w"), W), r"for an array of shape \[7, 5\]"),
    ],
)
def test_layouts_that_cannot_stand_for_a_spec(spec, words):
    with MESH:
        for where, f in {
            "spmd.put": lambda: spmd.put(X, spec),
            "argument x": lambda: spmd.map(lambda x: x, (spec,), P("w"))(X),
            "result|x": lambda: spmd.map(lambda x: x, P("w"), spec)(X),
        }.items():
            with pytest.raises(LayoutError) as raised:
                f()
            if where != "result|x":
                assert spmd_words(words, str(raised.value)), str(raised.value)
            assert any(w in str(raised.value) for w in where.split("|"))
    with MESH, pytest.raises(SpecError, match="a P, or a Layout"):
        spmd.put(X, "w")


def test_the_order_of_the_axes_numbers_the_workers():
    turned = Layout((6, 2), P("b", "a"), {"b": 3, "a": 2})
    with spmd.Mesh(**AB, transport="local"), pytest.raises(LayoutError, match="over the axes of the mesh"):
        spmd.put(np.ones((6, 2)), turned)


def spmd_words(words: str, text: str) -> bool:
    import re

    return re.search(words, text) is not None


@each_mpi
def test_the_same_under_mpiexec(python):
    ended = launch(PROGRAMS / "grids.py", python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    with spmd.Mesh(a=2, b=2, transport="local"):
        assert json.loads(ended.stdout) == grids_program.found()
