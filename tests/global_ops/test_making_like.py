"""Global arrays that are laid out as others are: by `like`, NumPy's own `like`, and `np.zeros_like` of other shapes."""

from __future__ import annotations

import io

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.errors import ClosureError, LayoutError, MeshError, SpecError

KEY = spmd.random.key(3)
SHAPE = (7, 5)
OTHER_SHAPES = [(), (7,), (4,), (7, 5), (7, 3), (2, 5), (0, 5), (7, 5, 2)]

MAKERS = {
    "zeros": lambda shape, **how: spmd.zeros(shape, **how),
    "ones of integers": lambda shape, **how: spmd.ones(shape, int, **how),
    "full": lambda shape, **how: spmd.full(shape, np.arange(shape[-1] if shape else 1)[-1], **how),
    "put": lambda shape, **how: spmd.put(np.arange(np.prod(shape, dtype=int)).reshape(shape), **how),
    "normal": lambda shape, **how: spmd.random.normal(KEY, shape, **how),
    "uniform": lambda shape, **how: spmd.random.uniform(KEY, shape, np.float32, 2, 3, **how),
    "bits": lambda shape, **how: spmd.random.bits(KEY, shape, **how),
    "gumbel": lambda shape, **how: spmd.random.gumbel(KEY, shape, **how),
    "exponential": lambda shape, **how: spmd.random.exponential(KEY, shape, **how),
    "truncated": lambda shape, **how: spmd.random.truncated_normal(KEY, -1, 2, shape, **how),
    "bernoulli": lambda shape, **how: spmd.random.bernoulli(KEY, 0.3, shape, **how),
    "randint": lambda shape, **how: spmd.random.randint(KEY, shape, 0, 9, **how),
}


def layouts(mesh: spmd.Mesh) -> list:
    """Ways to lay an array of SHAPE out on a mesh."""
    n = mesh.axes["x"]
    uneven = spmd.Layout(SHAPE, P("x"), mesh.axes, [(*[0] * (n - 1), 7), None])
    grid = spmd.Layout.grid(SHAPE, (1, min(2, mesh.size)), mesh.axes, range(mesh.size)[::-1][: min(2, mesh.size)])
    return [P(), P("x"), P(None, "x"), P("y", "x"), P(("x", "y")), uneven, grid]


def meshes() -> list[spmd.Mesh]:
    return [spmd.Mesh(x=1, y=1), spmd.Mesh(x=2, y=1), spmd.Mesh(x=3, y=1), spmd.Mesh(x=3, y=2), spmd.Mesh(x=2, y=2)]


@pytest.mark.parametrize("name", MAKERS)
def test_an_array_like_another_lies_as_it_does(name):
    make = MAKERS[name]
    for mesh in meshes():
        for how in layouts(mesh):
            x = spmd.put(np.zeros(SHAPE, np.float32), how, mesh)
            for shape in OTHER_SHAPES:
                made = make(shape, like=x)
                whole = make(shape, spec=P(), mesh=mesh)
                assert made.mesh is mesh
                assert made.dtype == whole.dtype
                np.testing.assert_array_equal(made.numpy(), whole.numpy(), strict=True)
                if shape == SHAPE:
                    assert made.layout == x.layout
                elif x.layout.spec is None:
                    assert made.spec == P() or made.layout.workers == x.layout.workers
                else:
                    assert made.spec == P(*x.spec.trimmed[: len(shape)])
                    for d in range(min(2, len(shape))):
                        assert shape[d] != SHAPE[d] or made.layout.cuts[d] == x.layout.cuts[d]


def test_a_random_array_has_the_shape_of_the_other_if_none_is_given():
    with spmd.Mesh(x=3):
        x = spmd.put(np.zeros(SHAPE, np.float32), P("x"))
        y = spmd.random.normal(KEY, like=x)
        assert (y.layout, y.dtype) == (x.layout, np.float64)
        assert spmd.random.normal(KEY, (), like=x).shape == ()
        assert spmd.random.bernoulli(KEY, 0.5, like=x).layout == x.layout
        assert spmd.random.bernoulli(KEY, x).layout == x.layout
        assert spmd.random.normal(KEY).shape == ()


@pytest.mark.parametrize("name", ["arange", "linspace", "eye"])
def test_ranges_and_diagonals(name):
    args = {"arange": (2, 9, 2), "linspace": (0, 1, 5), "eye": (7, 5, 1)}[name]
    with spmd.Mesh(x=2, y=2):
        x = spmd.put(np.zeros(SHAPE), P("x", "y"))
        made = getattr(spmd, name)(*args, like=x)
        np.testing.assert_array_equal(made.numpy(), getattr(np, name)(*args), strict=True)
        assert made.spec == P(*["x", "y"][: made.ndim])


NUMPYS = {
    "zeros": lambda **like: np.zeros((7, 3), **like),
    "empty": lambda **like: 0 * np.empty(4, int, **like),
    "ones": lambda **like: np.ones(4, **like),
    "ones of a dtype": lambda **like: np.ones(4, "int8", **like),
    "full": lambda **like: np.full((2, 5), [1, 2, 3, 4, 5], **like),
    "full of a dtype": lambda **like: np.full((7,), 2, float, **like),
    "arange": lambda **like: np.arange(7, **like),
    "arange with steps": lambda **like: np.arange(1, 8, 3, dtype=float, **like),
    "eye": lambda **like: np.eye(7, 5, -1, **like),
    "identity": lambda **like: np.identity(4, int, **like),
    "tri": lambda **like: np.tri(7, 4, 1, **like),
    "fromfunction": lambda **like: np.fromfunction(lambda i, j: i * 10 + j, (7, 5), dtype=int, **like),
    "fromfunction of no place": lambda **like: 1 * np.fromfunction(lambda i: i * 0 + 3.0, (3,), **like),
    "array": lambda **like: np.array([[1, 2], [3, 4]], **like),
    "array of more dimensions": lambda **like: np.array([1.0, 2, 3], ndmin=2, **like),
    "asarray": lambda **like: np.asarray(range(7), np.float32, **like),
    "asanyarray": lambda **like: np.asanyarray([True, False], **like),
    "ascontiguousarray": lambda **like: np.ascontiguousarray(np.arange(35.0).reshape(5, 7).T, **like),
    "asfortranarray": lambda **like: np.asfortranarray(np.arange(35.0).reshape(7, 5), **like),
    "require": lambda **like: np.require([1, 2, 3], float, **like),
    "frombuffer": lambda **like: np.frombuffer(b"\1\2\3", np.uint8, **like),
    "fromiter": lambda **like: np.fromiter(iter([1, 2, 3]), float, **like),
    "fromstring": lambda **like: np.fromstring("1 2 3", sep=" ", **like),
    "loadtxt": lambda **like: np.loadtxt(io.StringIO("1 2\n3 4"), **like),
    "genfromtxt": lambda **like: np.genfromtxt(io.StringIO("1 2\n3 4"), **like),
}


@pytest.mark.parametrize("name", NUMPYS)
def test_like_of_numpy(name):
    make, want = NUMPYS[name], NUMPYS[name]()
    for mesh in meshes():
        for how in layouts(mesh):
            x = spmd.put(np.ones(SHAPE, np.float32), how, mesh)
            made = make(like=x)
            assert type(made) is spmd.PartitionedArray
            np.testing.assert_array_equal(made.numpy(), want, strict=True)
            if want.shape == SHAPE:
                assert made.layout == x.layout
            elif x.layout.spec is not None:
                assert made.spec == P(*x.spec.trimmed[: want.ndim])


def test_like_of_numpy_with_a_file(tmp_path):
    np.arange(5.0).tofile(tmp_path / "numbers")
    x = spmd.zeros(5, spec=P("x"), mesh=spmd.Mesh(x=3))
    made = np.fromfile(tmp_path / "numbers", like=x)
    assert made.layout == x.layout
    np.testing.assert_array_equal(made.numpy(), np.arange(5.0))


def test_like_with_traced_arrays():
    a = np.random.default_rng(0).random(SHAPE)
    with spmd.Mesh(x=2, y=2):
        x = spmd.put(a, P("x", "y"))
        made = []

        def loss(x):
            made.extend([spmd.zeros(7, like=x), np.zeros(7, like=x), spmd.random.normal(KEY, like=x)])
            return (np.asarray(x, like=x) ** 2 * np.ones(SHAPE, like=x)).sum()

        np.testing.assert_allclose(spmd.grad(loss)(x).numpy(), 2 * a)
        assert [type(m) for m in made] == [spmd.PartitionedArray] * 3
        assert [m.spec for m in made] == [P("x"), P("x"), P("x", "y")]


def test_global_arrays_are_laid_out_like_others():
    a = np.arange(35.0).reshape(SHAPE)
    with spmd.Mesh(x=2, y=2):
        x, y = spmd.put(a, P("x")), spmd.zeros(SHAPE, int, spec=P(None, "y"))
        for moved, dtype in (
            (spmd.put(x, like=y), float),
            (np.asarray(x, like=y), float),
            (np.array(x, int, like=y), int),
        ):
            assert (moved.layout, moved.dtype) == (y.layout, dtype)
            np.testing.assert_array_equal(moved.numpy(), a)


def test_trees_are_placed_like_trees():
    with spmd.Mesh(x=2, y=2) as mesh:
        parameters = {"w": spmd.zeros((4, 6), spec=P("x", "y")), "b": spmd.zeros(6, spec=P("y"))}
        values = {"w": np.ones((4, 6)), "b": np.arange(6)}
        placed = spmd.put(values, like=parameters)
        assert {k: v.layout for k, v in placed.items()} == {k: v.layout for k, v in parameters.items()}
        np.testing.assert_array_equal(placed["b"].numpy(), values["b"])
        placed = spmd.put({"w": (values["w"], None), "b": values["b"]}, like=parameters, mesh=mesh)
        assert placed["w"][1] is None
        assert placed["w"][0].spec == P("x", "y")
        assert spmd.put(values, like=parameters["w"])["b"].spec == P("x")
        with pytest.raises(LayoutError, match=r"spmd\.put: argument like\n  got: .*\['w'|spmd\.put: argument like"):
            spmd.put(values, like={"w": parameters["w"]})


def test_zeros_like_of_another_shape_follows_the_same_rule():
    with spmd.Mesh(x=2, y=2):
        x = spmd.put(np.ones(SHAPE, np.float32), P("x", "y"))
        for shape in (4, (7,), (2, 5), (7, 5, 3)):
            made = np.ones_like(x, shape=shape)
            assert (made.layout, made.dtype) == (spmd.ones(shape, like=x).layout, np.float32)
            np.testing.assert_array_equal(made.numpy(), np.ones(shape))


def test_mistakes():
    with spmd.Mesh(x=2):
        x = spmd.zeros(4, spec=P("x"))
        for call in (
            lambda: spmd.zeros(4, spec=P("x"), like=x),
            lambda: spmd.random.normal(KEY, 4, spec=P("x"), like=x),
            lambda: spmd.put(np.ones(4), P("x"), like=x),
        ):
            with pytest.raises(SpecError, match=r"argument spec and like\n  got: .*\n  needed: .*\n  mend: "):
                call()
        for bad in (np.ones(4), 3, P("x")):
            for call in (lambda: spmd.zeros(4, like=bad), lambda: spmd.random.bits(KEY, like=bad)):  # noqa: B023
                with pytest.raises(LayoutError, match=r"argument like\n  got: .*\n  needed: a global array"):
                    call()
        with pytest.raises(MeshError, match=r"spmd\.ones: argument mesh"):
            spmd.ones(4, like=x, mesh=spmd.Mesh(x=3))
        with pytest.raises(SpecError, match=r"spmd\.put: argument spec\n  got: +none"):
            spmd.put(np.ones(3))
        with pytest.raises(LayoutError, match=r"np\.asarray: argument copy"):
            np.asarray([1.0], copy=False, like=x)
        with pytest.raises(ClosureError, match=r"spmd\.random\.normal"):
            spmd.map(lambda: spmd.random.normal(KEY, like=x), (), P())()
