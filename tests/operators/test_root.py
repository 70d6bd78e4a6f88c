"""Values that one worker holds: scattered, gathered, computed with where they are, and differentiated."""

from __future__ import annotations

import functools
import itertools
import json
import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import PROGRAMS, launch, mpiexec
from mpi_programs import moves
from oracle import Oracle

import spmd
from spmd import P
from spmd.errors import ClosureError, DifferentiationError, LayoutError, StateError
from spmd.kernels import on_device
from spmd.operators.root import Gather, Rooted, Scatter
from spmd.testing import check_adjoint

N = 4
W = np.array([2.0, -1.0, 0.5])
X = np.random.default_rng(0).normal(size=(N, 3))
MESHES = [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 12}, {"x": 3, "y": 2}, {"x": 2, "y": 2, "z": 2}]


@pytest.fixture
def mesh(scheduler) -> spmd.Mesh:
    return spmd.Mesh(x=N, transport="local", scheduler=scheduler)


def on_workers(axes, body, scheduler="lockstep", check=True) -> list:
    """What a body without arguments gives on every worker."""
    out: list = [None] * math.prod(axes.values())

    def main():
        out[spmd.worker_index(tuple(axes))] = body()

    mesh = spmd.Mesh(**axes, transport="local", scheduler=scheduler)
    spmd.map(main, in_specs=(), out_specs=None, mesh=mesh, check=check)()
    return out


def near(got, want) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


# Scatter and gather


class There(NamedTuple):
    """A mesh, axes of it in some order, a root, and a whole array to be split along a dimension in given sizes."""

    axes: dict[str, int]
    over: tuple[str, ...]
    root: int
    whole: np.ndarray
    axis: int
    sizes: tuple[int, ...] | None

    @property
    def pieces(self) -> list[np.ndarray]:
        return Oracle(self.axes).parts(self.whole, self.over, self.axis, True, self.sizes)


@st.composite
def places(draw) -> There:
    axes = draw(st.sampled_from(MESHES))
    subsets = [s for r in range(1, len(axes) + 1) for s in itertools.permutations(axes, r)]
    over = draw(st.sampled_from(subsets))
    n = math.prod(axes[a] for a in over)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    shape[axis] = draw(st.integers(0, 2 * n + 1))
    cuts = [0, *sorted(rng.integers(0, shape[axis] + 1, n - 1)), shape[axis]]
    sizes = tuple(int(k) for k in np.diff(cuts)) if draw(st.booleans()) else None
    dtype = draw(st.sampled_from(["f8", "f4", "c16", "i4", "?"]))
    return There(axes, over, draw(st.integers(0, n - 1)), rng.integers(-9, 9, shape).astype(dtype), axis, sizes)


@given(places(), st.sampled_from(["lockstep", "threads"]), st.booleans())
@settings(max_examples=60)
def test_scatter_and_gather_split_and_join_at_the_root(there, scheduler, check):
    def body():
        # Only the root has the data: what others pass to keep is dropped there.
        k = spmd.worker_index(there.over)
        mine = there.whole if k == there.root else np.zeros_like(there.whole)
        r = spmd.keep(mine, there.over, there.root)
        options = {"axis": there.axis, "root": there.root}
        pieces = spmd.scatter({"a": r, "b": [r]}, there.over, sizes=there.sizes, **options)
        again = spmd.gather(pieces, there.over, **options)["b"][0]
        handle = again.shape, again.dtype, again.axes, again.root
        return k, spmd.block(pieces["a"]), handle, spmd.block(again.block)

    for k, piece, handle, block in on_workers(there.axes, body, scheduler, check):
        for got, want in ((piece, there.pieces[k]), (block, there.whole if k == there.root else np.zeros(0))):
            assert got.shape == want.shape
            assert got.flags.c_contiguous
            assert on_device(got) or not got.flags.writeable
            np.testing.assert_array_equal(got, want)
            assert got.dtype == there.whole.dtype
        assert handle == (there.whole.shape, there.whole.dtype, there.over, there.root)


@given(places(), st.integers(0, 99))
@settings(max_examples=40)
def test_gradients_of_what_is_scattered_and_gathered_come_back_in_their_pieces(there, seed):
    """Of sum(c * scatter(r)) the gradient is c, joined at the root; of sum(c * gather(x)), the pieces of c."""
    there = there._replace(whole=there.whole.real.astype(float))
    c = np.random.default_rng(seed).integers(-9, 9, there.whole.shape).astype(float)
    others = There(*there)._replace(whole=c)
    options = {"axis": there.axis, "root": there.root}

    def body():
        k = spmd.worker_index(there.over)
        r = spmd.keep(there.whole, there.over, there.root)
        mine = spmd.varying(others.pieces[k], there.over)
        x = spmd.varying(there.pieces[k], there.over)
        g = spmd.grad(lambda r: np.sum(mine * spmd.scatter(r, there.over, sizes=there.sizes, **options)))(r)
        full = spmd.keep(c, there.over, there.root)

        def loss(x):
            y = spmd.gather(x, there.over, **options)
            return spmd.at_root(lambda y, c: np.sum(c * y), y, full, axis_name=there.over, root=there.root)

        h = spmd.grad(loss)(x)
        return k, (g.shape, g.root), spmd.block(g.block), spmd.block(h)

    for k, handle, g, h in on_workers(there.axes, body):
        assert handle == (c.shape, there.root)
        np.testing.assert_array_equal(g, c if k == there.root else np.zeros(0))
        np.testing.assert_array_equal(h, others.pieces[k])


@pytest.mark.parametrize("over", [("x",), ("y",), ("x", "y"), ("y", "x")], ids=str)
@pytest.mark.parametrize("root", [0, 1])
def test_to_the_root_and_back_is_adjoint_to_itself(over, root):
    """gather, then scatter in other sizes: the body of a linear map, tested with its tape and at order 2."""
    mesh = spmd.Mesh(x=3, y=2, transport="local")
    n = math.prod(mesh.axes[a] for a in over)
    length = 2 * n + 3
    sizes = (0,) * (n - 1) + (length,)

    def moved(x):
        r = spmd.gather(x, over, axis=1, root=root)
        r = spmd.at_root(lambda a: 3 * np.flip(a, 1), r, axis_name=over, root=root)
        return spmd.scatter(r, over, axis=1, root=root, sizes=sizes)

    check_adjoint(moved, (2, length), mesh=mesh, in_specs=P(None, over), exact=True)


@pytest.mark.host("looks at the arrays of NumPy in a body")
def test_scattered_pieces_of_virtual_workers_are_views(mesh):
    whole = spmd.freeze(np.arange(8.0))
    shared = []

    def body(x):
        y = spmd.scatter(spmd.keep(whole, "x"), "x")
        shared.append(np.shares_memory(spmd.block(y), whole))
        return y

    near(spmd.map(body, P(), P("x"), mesh=mesh)(0.0), whole)
    assert shared == [True] * N


def test_what_scatter_and_gather_cost():
    """Both go along the binomial tree 1 -> 3 -> 0, 1 -> 2; for gather also the shapes go, from all to all. What worker
    3 passes on for worker 0 is counted as large as its own."""

    def sent(body):
        with spmd.ledger() as log:
            on_workers({"x": N}, body)
        return [(log.workers[w].messages, log.workers[w].bytes) for w in range(N)]

    r = lambda: spmd.keep(np.ones((9, 2)), "x", 1)
    assert sent(lambda: spmd.scatter(r(), "x", root=1)) == [(0, 0), (2, 7 * 16), (0, 0), (1, 2 * 16)]
    x = lambda: spmd.varying(np.ones((spmd.worker_index("x"), 2)), "x")
    shapes = (2, 3 * 16)
    rows = [0, 0, 2, 3 + 3]
    assert sent(lambda: spmd.gather(x(), "x", root=1)) == [
        (shapes[0] + (k != 1), shapes[1] + 16 * rows[k]) for k in range(N)
    ]
    several = sent(lambda: spmd.gather([x()] * 3, "x", root=1))
    assert several[0][0] == 2 + 3  # one meeting for the shapes of all


class Wrong(NamedTuple):
    name: str
    body: object
    error: type
    words: str


def lopsided(x):
    return np.ones((2, 2 + spmd.worker_index("x"))) + x[:1, :1]


KEPT = lambda x: spmd.keep(np.ones((6, 2)), "x")
ERRORS = [
    Wrong(
        "no sizes", lambda x: spmd.scatter(KEPT(x), "x", sizes=[1.5, 2]), LayoutError, "argument sizes | one integer"
    ),
    Wrong("sizes", lambda x: spmd.scatter(KEPT(x), "x", sizes=[1, 2]), LayoutError, "spmd.scatter: argument sizes | 6"),
    Wrong("axis", lambda x: spmd.scatter(KEPT(x), "x", axis=2), LayoutError, "spmd.scatter: argument axis | -2 to 1"),
    Wrong("no handle", lambda x: spmd.scatter(x, "x"), StateError, "spmd.scatter | Rooted(0) | spmd.keep"),
    Wrong("root of scatter", lambda x: spmd.scatter(KEPT(x), "x", root=2), StateError, "Rooted(0 along x) | Rooted(2)"),
    Wrong("root of gather", lambda x: spmd.gather(x, "x", root=4), LayoutError, "spmd.gather: argument root | 0 to 3"),
    Wrong("gather of a handle", lambda x: spmd.gather(KEPT(x), "x"), StateError, "spmd.gather | spmd.replicate"),
    Wrong("gather of a number", lambda x: spmd.gather(1.0, "x"), LayoutError, "spmd.gather | np.reshape"),
    Wrong(
        "other lengths",
        lambda x: spmd.gather(lopsided(x), "x"),
        LayoutError,
        "spmd.gather | [2, 2] (member 0) | [2, 3] (member 1) | dimension 0",
    ),
    Wrong(
        "an array",
        lambda x: spmd.at_root(np.sum, x, axis_name="x"),
        StateError,
        "spmd.at_root: argument x | Varying(x) | Rooted(0) along 'x' | spmd.keep",
    ),
    Wrong(
        "another root",
        lambda x: spmd.at_root(np.sum, KEPT(x), axis_name="x", root=3),
        StateError,
        "Rooted(0 along x) | Rooted(3)",
    ),
    Wrong("no such root", lambda x: spmd.at_root(float, axis_name="x", root=4), LayoutError, "argument root | 0 to 3"),
    Wrong(
        "no array",
        lambda x: spmd.at_root(lambda a: {"a": "text"}, KEPT(x), axis_name="x"),
        StateError,
        "spmd.at_root: result of f | 'text' | arrays, numbers and None",
    ),
    Wrong(
        "a handle in f",
        lambda x: spmd.at_root(functools.partial(lambda k, a: k, KEPT(x)), KEPT(x), axis_name="x"),
        StateError,
        "spmd.at_root: result of f | Rooted(0 along x)",
    ),
    Wrong(
        "a collective",
        lambda x: spmd.at_root(lambda a: spmd.psum(spmd.varying(a, "x"), "x"), KEPT(x), axis_name="x"),
        StateError,
        "spmd.at_root: argument f | psum(float64[6, 2], 'x') | test_root.py: | before or after at_root",
    ),
]


@pytest.mark.parametrize("wrong", ERRORS, ids=lambda w: w.name)
def test_errors_name_the_mend(wrong, mesh):
    with pytest.raises(wrong.error) as caught:
        spmd.map(wrong.body, P("x"), P("x"), mesh=mesh)(X)
    missing = [word for word in wrong.words.split(" | ") if word not in str(caught.value)]
    assert not missing, f"{missing} not in:\n{caught.value}"
    assert float(spmd.map(lambda x: spmd.psum(np.sum(x), "x"), P("x"), P(), mesh=mesh)(np.ones(N))) == N


# at_root


def test_f_runs_at_the_root_only_and_all_know_what_it_gives(mesh):
    ran = []

    def body(x):
        def f(a, k, name, b):
            ran.append(spmd.worker_index("x"))
            assert name == "name"
            assert float(np.sum(b["b"])) > -1e9  # may be asked for its value, and branched on
            return {"sum": a.sum(0), 7: (None, [a > 0]), "n": k, "empty": np.zeros((0, 2), np.int32), "f": 2.5}, a.T

        out, turned = spmd.at_root(
            f, spmd.sum_reduce(x, "x", 2), 3, "name", {"b": spmd.keep(W, "x", 2)}, axis_name="x", root=2
        )
        assert list(out) == ["sum", 7, "n", "empty", "f"]
        assert type(out[7]) is tuple
        assert out[7][0] is None
        handles = [out["sum"], out[7][1][0], out["n"], out["empty"], out["f"], turned]
        assert all(type(h) is Rooted and (h.axes, h.root) == (("x",), 2) for h in handles)
        assert [(h.shape, h.dtype) for h in handles] == [
            ((3,), np.dtype(float)),
            ((1, 3), np.dtype(bool)),
            ((), np.dtype(int)),
            ((0, 2), np.dtype(np.int32)),
            ((), np.dtype(float)),
            ((3, 1), np.dtype(float)),
        ]
        return [spmd.replicate(h, "x", 2) for h in handles]

    total, positive, n, empty, half, turned = spmd.map(body, P("x"), P(), mesh=mesh)(X)
    near(total, X.sum(0))
    near(positive, X.sum(0)[None] > 0)
    near(turned, X.sum(0)[:, None])
    assert (int(n), empty.shape, float(half)) == (3, (0, 2), 2.5)
    assert ran == [2]


@pytest.mark.parametrize("check", [True, False])
def test_without_arguments_the_root_makes_values(mesh, check):
    body = lambda: spmd.replicate(spmd.at_root(lambda: np.arange(5.0), axis_name="x", root=1), "x", 1)
    near(spmd.map(body, (), P(), mesh=mesh, check=check)(), np.arange(5.0))


def test_results_are_copies_of_what_f_may_write_into(mesh):
    store = np.ones(3)

    def body(x):
        r = spmd.at_root(lambda a: store, spmd.keep(x, "x"), axis_name="x")
        if spmd.worker_index("x") == 0:
            store[:] = 5
        return spmd.replicate(r, "x")

    near(spmd.map(body, P(), P(), mesh=mesh)(W), np.ones(3))


def serial(w, x):
    """A loss of the sum over workers, with branches and several uses."""
    h = np.tanh((w * x).sum(0)) * w
    return np.sum(h**3) + np.sum(np.sin(h) * w)


@pytest.mark.parametrize("root", range(N))
def test_gradients_of_a_loss_at_the_root_to_order_three(mesh, root):
    v = np.array([1.0, -2.0, 0.5])

    def loss(w, x):
        h = spmd.sum_reduce(w * x, "x", root)
        k = spmd.keep(w, "x", root)
        h, once = spmd.at_root(lambda h, k: (np.tanh(h[0]) * k, np.sum(k)), h, k, axis_name="x", root=root)
        return spmd.at_root(
            lambda h, k, once: np.sum(h**3) + np.sum(np.sin(h) * k) + 0 * once,
            *(h, k, once),
            axis_name="x",
            root=root,
        )

    def body(w, x):
        value, (gw, gx) = spmd.value_and_grad(loss, (0, 1))(w, x)
        second = lambda w: np.sum(spmd.grad(loss)(w, x) * v)
        third = lambda w: np.sum(spmd.grad(second)(w) * v)
        mixed = spmd.grad(lambda x: np.sum(spmd.grad(loss)(W, x) * v))(x)
        once = spmd.jvp(lambda w: loss(w, x), (w,), (v + 0 * w,))[1]
        again = spmd.checkpoint(lambda w: spmd.replicate(loss(w, x), "x", root))
        back = spmd.vjp(lambda w: loss(w, x), w)[1]
        return [
            spmd.replicate(value, "x", root),
            *(gw, gx, spmd.grad(second)(w), spmd.grad(third)(w), mixed),
            *(spmd.replicate(once, "x", root), spmd.grad(again)(w), back(2.0)[0], back(spmd.keep(3.0, "x", root))[0]),
        ]

    specs = [P(), P(), P("x"), P(), P(), P("x"), P(), P(), P(), P()]
    got = spmd.map(body, (P(), P("x")), specs, mesh=mesh)(W, X)
    gw, gx = spmd.grad(serial, (0, 1))(W, X)
    second = lambda w, x: np.sum(spmd.grad(serial)(w, x) * v)
    third = lambda w: np.sum(spmd.grad(second)(w, X) * v)
    want = [serial(W, X), gw, gx, spmd.grad(second)(W, X), spmd.grad(third)(W)]
    want += [spmd.grad(second, 1)(W, X), gw @ v, gw, 2 * gw, 3 * gw]
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(g), w, rtol=1e-10, atol=1e-10)


def test_a_map_with_a_loss_at_the_root_is_differentiated_from_outside(mesh):
    def body(w, x):
        h = spmd.sum_reduce(w * x, "x", 1)
        r = spmd.at_root(lambda h: np.sum(h**3), h, axis_name="x", root=1)
        return spmd.replicate(r, "x", 1)

    f, g = spmd.map(body, (P(), P("x")), P(), mesh=mesh), lambda w, x: np.sum((w * x).sum(0) ** 3)
    near(spmd.grad(f)(W, X), spmd.grad(g)(W, X))
    hv = lambda f: spmd.hvp(lambda w: f(w, X), (W,), (W[::-1],))[0]
    near(hv(f), hv(g))


def test_workers_that_take_part_in_nothing_go_back_through_the_same_collectives(mesh):
    """The second result does not depend on x, nor the first on w; both are asked for, one at a time and together."""

    def body(w, x):
        def f(w, x):
            return spmd.at_root(
                lambda w, x: (np.sum(x**2), np.sum(w**3), 7),
                *(spmd.keep(w, "x", 3), spmd.sum_reduce(x, "x", 3)),
                axis_name="x",
                root=3,
            )

        grads = [spmd.grad(lambda w, x, k=k: f(w, x)[k], (0, 1))(w, x) for k in (0, 1)]
        return [*grads[0], *grads[1]]

    a, b, c, d = spmd.map(body, (P(), P("x")), [P(), P("x")] * 2, mesh=mesh)(W, X)
    near(a, 0 * W)
    near(b, np.tile(2 * X.sum(0), (N, 1)))
    near(c, 3 * W**2)
    near(d, 0 * X)


def test_rooted_values_are_arguments_cotangents_and_tangents(mesh):
    def body(w):
        r = spmd.keep(w, "x", 1)
        cube = lambda r: spmd.at_root(lambda a: a**3, r, axis_name="x", root=1)
        total = lambda r: np.sum(spmd.replicate(cube(r), "x", 1))
        value, g = spmd.value_and_grad(total)(r)
        y, pull = spmd.vjp(cube, {"a": r}["a"])
        (back,) = pull(r)
        _, push = spmd.jvp(cube, (r,), (r,))
        second = spmd.grad(
            lambda r: spmd.replicate(spmd.at_root(np.sum, spmd.grad(total)(r), axis_name="x", root=1), "x", 1)
        )(r)
        assert all(type(a) is Rooted and a.shape == (3,) for a in (g, y, back, push, second))
        return [value, *(spmd.replicate(a, "x", 1) for a in (g, y, back, push, second))]

    got = spmd.map(body, P(), P(), mesh=mesh)(W)
    want = [np.sum(W**3), 3 * W**2, W**3, 3 * W**3, 3 * W**3, 6 * W]
    for a, b in zip(got, want, strict=True):
        near(a, b)


def test_f_may_use_collectives_along_other_axes(scheduler):
    """Rooted along x, varying along y: the workers at the root of every row run f together."""
    mesh = spmd.Mesh(x=2, y=3, transport="local", scheduler=scheduler)

    def loss(x):
        r = spmd.sum_reduce(x, "x", 1)
        total = spmd.at_root(lambda a: spmd.psum(np.sum(a**2), "y"), r, axis_name="x", root=1)
        assert not total.block.state.varying
        return spmd.replicate(total, "x", 1)

    x = np.random.default_rng(1).normal(size=(2, 6))
    f = spmd.map(loss, P("x", "y"), P(), mesh=mesh)
    near(f(x), np.sum(x.sum(0) ** 2))
    near(spmd.grad(f)(x), np.tile(2 * x.sum(0), (2, 1)))


def test_the_collectives_of_f_go_back_in_the_run_that_goes_back(scheduler):
    """Of a map that is differentiated from outside, forward and backward are two runs."""

    def body(w):
        row = lambda a: spmd.psum(spmd.varying(a**2, "y"), "y")  # its adjoint is a sum too
        return spmd.replicate(spmd.at_root(row, spmd.keep(w, "x", 1), axis_name="x", root=1), "x", 1)

    f = spmd.map(body, P(), P(), mesh=spmd.Mesh(x=2, y=3, transport="local", scheduler=scheduler))
    loss = lambda w: np.sum(f(w))
    near(spmd.grad(loss)(W), 6 * W)
    value, pull = spmd.vjp(loss, W)
    for _ in range(2):
        near(pull(np.ones_like(value))[0], 6 * W)
    near(spmd.hvp(loss, (W,), (W,))[0], 6 * W)


def test_what_f_closes_over(mesh):
    """Bare data and undifferentiated arrays may be; a differentiated one would lose its gradient, and is refused."""

    def body(w, x):
        free = spmd.at_root(lambda a: a * x[0] * W, spmd.keep(w, "x", 1), axis_name="x", root=1)
        assert not free.block.state.varying
        return spmd.replicate(free, "x", 1)

    near(spmd.map(body, (P(), P("x")), P(), mesh=mesh)(W, X), W * X[1] * W)
    for scale in (lambda w, x: w * np.ones(3), lambda w, x: x[0] * w):

        def closed(w, x, scale=scale):
            s, r = scale(w, x), spmd.keep(W, "x")
            return spmd.at_root(lambda a: np.sum(a * s), r, axis_name="x")

        with pytest.raises(ClosureError, match="not among its arguments") as caught:
            spmd.map(lambda w, x, f=closed: spmd.grad(f)(w, x), (P(), P("x")), P(), mesh=mesh)(W, X)
        assert "spmd.keep" in str(caught.value)


def test_a_differentiated_argument_that_meets_varying_data_says_so(mesh):
    """The sum that its gradient would take over workers cannot be: only the root is there."""

    def body(w, x):
        f = lambda w: spmd.at_root(lambda a: np.sum(a * x[0]), spmd.keep(w, "x"), axis_name="x")
        return spmd.grad(f)(w)

    with pytest.raises(StateError, match="only the root along 'x' runs"):
        spmd.map(body, (P(), P("x")), P(), mesh=mesh)(W, X)


def test_an_error_of_f_is_that_of_the_map(mesh):
    def f(a):
        raise KeyError("no such entry")

    def body(x):
        return spmd.replicate(spmd.at_root(f, spmd.keep(x, "x", 2), axis_name="x", root=2), "x", 2)

    with pytest.raises(KeyError, match="no such entry") as caught:
        spmd.map(body, P(), P(), mesh=mesh)(W)
    assert "raised by worker 2 (x=2)" in caught.value.__notes__
    back = lambda x: spmd.grad(lambda x: spmd.at_root(bad, spmd.keep(np.sum(x), "x", 2), axis_name="x", root=2))(x)
    bad = spmd.custom_vjp(lambda a: a)
    bad.defvjp(lambda a: (a, None), lambda _, g: f(g))
    with pytest.raises(KeyError, match="no such entry"):
        spmd.map(back, P(), P(), mesh=mesh)(W)
    near(spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P(), mesh=mesh)(np.ones(N)), [N])


def again(r):
    return spmd.checkpoint(lambda r: spmd.replicate(r, "x"))(r)


def given_back(w):
    return np.sum(spmd.replicate(spmd.checkpoint(lambda w: spmd.keep(w, "x"))(w), "x"))


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (
            lambda r: spmd.grad(lambda r: np.sum(again(r)))(r),
            "checkpoint | arguments | Rooted(0 along x) | spmd.replicate",
        ),
        (lambda r: spmd.grad(lambda w: given_back(w))(W), "checkpoint | result | Rooted(0 along x) | spmd.replicate"),
        (lambda r: spmd.vjp(lambda r: r, r)[1](W), "cotangent | Rooted(0 along x) | spmd.keep"),
        (lambda r: spmd.vjp(lambda r: r, r)[1](spmd.keep(W, "x", 1)), "cotangent | Rooted(0 along x) | Rooted(1"),
        (lambda r: spmd.jvp(lambda r: r, (r,), (W,)), "tangents | Rooted(0 along x) | spmd.keep"),
        (lambda r: spmd.grad(lambda r: r)(r), "scalar | Rooted(0 along x)"),
    ],
)
def test_misuse_in_differentiation_is_an_error(mesh, f, words):
    def body(w):
        r = spmd.keep(w, "x")
        return f(r)

    with pytest.raises(DifferentiationError) as caught:
        spmd.map(body, P(), P(), mesh=mesh)(W)
    missing = [word for word in words.split(" | ") if word not in str(caught.value)]
    assert not missing, f"{missing} not in:\n{caught.value}"


def test_what_at_root_costs(mesh):
    """Forward one broadcast of a few bytes, backward nothing."""

    def body(x):
        r = spmd.keep(x, "x", 1)
        with spmd.ledger() as log:
            value, pull = spmd.vjp(lambda r: spmd.at_root(lambda a: (a * 2, np.sum(a)), r, axis_name="x", root=1), r)
        with spmd.ledger() as after:
            pull(value)
        assert (after.messages, after.bytes) == (0, 0)
        return spmd.varying(np.array([[log.messages, log.bytes]]), "x")

    found = spmd.map(body, P(), P("x"), mesh=mesh)(np.ones(1000)).numpy()
    assert found[:, 0].tolist() == [0, 2, 0, 1]  # down a tree
    assert 0 < found[1, 1] < 2 * 150


# Faults


class _Elsewhere(Gather):
    """Its adjoint gives the pieces to the workers in the wrong order."""

    @property
    def H(self):
        sizes = None if self.sizes is None else self.sizes[::-1]
        return Scatter(self.axes, self.root, self.axis, sizes)


class _Balanced(Gather):
    """Its adjoint forgets how long the pieces were."""

    @property
    def H(self):
        return Scatter(self.axes, self.root, self.axis)


class _OtherDimension(Gather):
    """Its adjoint cuts along another dimension."""

    @property
    def H(self):
        return Scatter(self.axes, self.root, 1 - self.axis, self.sizes)


@pytest.mark.parametrize("kind", [_Elsewhere, _Balanced, _OtherDimension], ids=lambda k: k.__name__)
def test_planted_faults_are_caught(kind):
    mesh = spmd.Mesh(x=3, transport="local")
    layout = spmd.Layout((7, 7), P("x"), mesh.axes, ((1, 4, 2), None))
    check_adjoint(Gather(("x",), 2), (7, 7), mesh=mesh, in_specs=layout)
    for seed in range(20):
        try:
            report = check_adjoint(
                kind(("x",), 2), (7, 7), mesh=mesh, in_specs=layout, seed=seed, raises=False, shrink=False
            )
        except LayoutError:  # the pieces do not even fit
            continue
        assert not report.passed


def test_a_lost_result_of_f_is_caught():
    """A root that keeps what it is to give back: the tape's pullback against a wrong adjoint."""
    mesh = spmd.Mesh(x=3, transport="local")
    forward = lambda x: spmd.replicate(
        spmd.at_root(lambda a: 2 * a[::-1], spmd.sum_reduce(x, "x", 1), axis_name="x", root=1), "x", 1
    )
    right = lambda y: spmd.pvary(2 * y[::-1], "x")
    wrong = lambda y: spmd.varying(2.0 * (spmd.worker_index("x") != 1) * spmd.block(y)[::-1], "x")
    options = {"mesh": mesh, "in_specs": P("x"), "exact": True}
    check_adjoint(forward, (6, 2), **options)
    check_adjoint(forward, (6, 2), adjoint=right, **options)
    assert not check_adjoint(forward, (6, 2), adjoint=wrong, raises=False, **options).passed


# Under mpiexec


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_processes_move_the_bits_that_virtual_workers_move():
    ended = launch(PROGRAMS / "moves.py", timeout=120)
    assert ended.returncode == 0, str(ended)
    assert json.loads(ended.stdout) == moves.results(transport="local", scheduler="lockstep")
    assert moves.results(transport="local", scheduler="threads") == moves.results(transport="local")


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_all_processes_raise_what_f_raised_at_the_root():
    ended = launch(PROGRAMS / "moves.py", "errors", timeout=60)
    assert ended.returncode == 0, str(ended)
    known, ours, own = json.loads(ended.stdout)
    assert all(text.startswith("ValueError: no such file |") for text in known)
    assert all(text.startswith("LayoutError: bad |") for text in ours)
    assert all(text.startswith("Unknown: own |") for text in own)
    assert all("by worker 2 (x=2)" in text for said in (known, ours, own) for text in said)
    assert all("moves.py" in text for k, text in enumerate(own) if k != 2)
