"""Where a worker's block lies in the whole array: slices and indices, in bodies and in recorded ones."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.errors import LayoutError, MeshError, SpecError

SHAPE = (7, 5)
SIDES = [(1, 1), (2, 1), (3, 1), (2, 2), (5, 1), (3, 2), (1, 6)]


def layouts(mesh: spmd.Mesh) -> list:
    n, last = mesh.axes["x"], mesh.size - 1
    return [
        *(P(), P("x"), P("y", "x"), P(None, ("x", "y"))),
        spmd.Layout(SHAPE, P("x"), mesh.axes, [(*[0] * (n - 1), 7), None]),
        spmd.Layout.grid(SHAPE, (1, min(2, mesh.size)), mesh.axes, [last, 0][: min(2, mesh.size)]),
    ]


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("wrap", [lambda f: f, spmd.jit], ids=["map", "jit"])
def test_indices_are_those_of_the_whole(sides, wrap):
    with spmd.Mesh(x=sides[0], y=sides[1]) as mesh:
        for how in layouts(mesh):

            def places(x, how=how):
                i, j = spmd.block_indices(SHAPE, how)
                assert np.broadcast_shapes(i.shape, j.shape) == x.shape
                return 0 * x + 100 * i + j

            run = wrap(spmd.map(places, how, how))
            for _ in range(2):  # the second run of jit replays the first
                x = spmd.put(np.random.default_rng(0).integers(0, 9, SHAPE), how)
                i, j = np.indices(SHAPE)
                np.testing.assert_array_equal(run(x).numpy(), 100 * i + j, strict=True)


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("wrap", [lambda f: f, spmd.jit], ids=["map", "jit"])
def test_slices_are_those_of_the_layout(sides, wrap):
    a = np.random.default_rng(1).random(SHAPE)
    with spmd.Mesh(x=sides[0], y=sides[1]) as mesh:
        for how in layouts(mesh):
            layout, axes, found = mesh.layout(SHAPE, how), tuple(mesh.axes), {}

            def part(x, how=how, axes=axes, found=found):
                box = spmd.block_slices(SHAPE, how)
                found[spmd.worker_index(axes)] = box
                return spmd.psum(abs(x - spmd.varying(a[box], axes)).sum(), axes)

            run = wrap(spmd.map(part, how, P()))
            for _ in range(2):
                assert run(spmd.put(a, how)) == 0
            assert found == {w: layout.slices(w) for w in range(mesh.size)}


def test_each_index_varies_over_the_axes_that_split_its_dimension():
    with spmd.Mesh(x=2, y=2) as mesh:
        states = []

        def body():
            for how in (P("x", "y"), P(("y", "x")), P(), spmd.Layout.grid(SHAPE, (2, 1), mesh.axes, [0, 3])):
                states.append([sorted(i.state.varying) for i in spmd.block_indices(SHAPE, how)])
            assert spmd.block_indices((), P()) == ()
            assert spmd.block_slices((), P()) == ()
            assert spmd.block_slices(5, P("x")) == spmd.block_slices((5,), P("x"))

        spmd.map(body, (), None)()
        assert states[:4] == [[["x"], ["y"]], [["x", "y"], []], [[], []], [["x", "y"], ["x", "y"]]]


def test_the_example_of_a_matrix_by_rows():
    def poisson_matrix(a):
        i, j = spmd.block_indices((7, 7), P("rows"))
        return np.where(i == j, 2.0, 0.0) - (abs(i - j) == 1) + 0 * a

    expected = 2 * np.eye(7) - np.eye(7, k=1) - np.eye(7, k=-1)
    for n in range(1, 7):
        with spmd.Mesh(rows=n):
            x = spmd.zeros((7, 7), spec=P("rows"))
            np.testing.assert_array_equal(spmd.map(poisson_matrix, P("rows"), P("rows"))(x).numpy(), expected)


@pytest.mark.parametrize("name", ["block_indices", "block_slices"])
def test_mistakes(name):
    call = getattr(spmd, name)
    with spmd.Mesh(x=2) as mesh:
        for args, error, match in (
            (((4, 3), "x"), SpecError, "argument spec"),
            (((4, 3), P("z")), SpecError, "argument spec"),
            ((4, P(None, "x")), SpecError, "argument spec"),
            (((4, -1), P("x")), LayoutError, "argument shape"),
            (((4, 2.5), P("x")), LayoutError, "argument shape"),
            ((5, spmd.Layout((4,), P("x"), mesh.axes)), LayoutError, "argument spec"),
        ):
            with pytest.raises(error, match=rf"spmd\.{name}: {match}\n  got: .*\n  needed: .*\n  mend: "):
                spmd.map(lambda args=args: call(*args)[0], (), None)()
    with pytest.raises(MeshError, match=rf"spmd\.{name}\n  got: +a call outside of any body"):
        call(4, P("x"))
