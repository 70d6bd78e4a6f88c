"""spmd.jit of functions of global arrays gives what they give without it, bit for bit, from one program per worker."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from global_cases import EVERY, MESHES, SPECS, outcome
from launch import launch
from process_cases import each_engine, ended_well

import spmd
from spmd import P
from spmd.errors import DonatedError, JitError, MeshError, SpecError

pytestmark = pytest.mark.host("on a GPU the functions themselves run")

rng = np.random.default_rng(0)


def assert_same(have: Any, want: Any) -> None:
    """Equal trees of the same types, layouts, dtypes and bits."""
    have, structure = spmd.tree.flatten(have)
    want, expected = spmd.tree.flatten(want)
    assert structure == expected
    for h, w in zip(have, want, strict=True):
        assert type(h) is type(w)
        if isinstance(h, spmd.PartitionedArray):
            assert h.layout == w.layout
            h, w = h.numpy(), w.numpy()
        assert np.shape(h) == np.shape(w)
        assert getattr(h, "dtype", None) == getattr(w, "dtype", None)
        np.testing.assert_array_equal(h, w)


def assert_replays(f: Callable, *args: Any) -> None:
    """Equal results of f and its programs, which are recorded once."""
    once, runs = counted(f)
    want = f(*args)
    for _ in range(3):
        assert_same(once(*args), want)
    assert len(runs) == 1


def counted(f: Callable) -> tuple[Callable, list]:
    """The jitted function, and one entry for each time that it runs."""
    runs = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        runs.append(args)
        return f(*args, **kwargs)

    return spmd.jit(noted), runs


def arrays(axes: dict[str, int], shape: tuple[int, ...] = (6, 5)):
    """A global array in each layout, and a part of one in uneven blocks."""
    mesh, a = spmd.Mesh(**axes), rng.random(shape)
    for spec in SPECS:
        if len(spec.dims) <= len(shape):
            yield spmd.put(a, spec, mesh)
    yield spmd.put(rng.random((9, 8)), P("x"), mesh)[2:7:2]


BY_VALUE = {"mask", "allclose"}
"""Functions whose results have shapes that depend on values, or are Python's truth values."""


def compare(name: str, transformed: Callable, meshes: list, shape: tuple[int, ...]) -> None:
    """transformed(function, jit) of each array, with jit=spmd.jit and without."""
    for axes in meshes:
        for x in arrays(axes, shape):
            want, error = outcome(transformed(EVERY[name], lambda f: f), x)
            if error is not None:
                continue
            once = transformed(EVERY[name], spmd.jit)
            for _ in range(2):
                have, error = outcome(once, x)
                assert error is None, f"{x!r}: {error}"
                assert_same(have, want)


@pytest.mark.parametrize("name", [name for name in EVERY if name not in BY_VALUE])
def test_values(name):
    compare(name, lambda f, jit: jit(f), MESHES[2:], (5, 3))


@pytest.mark.full
@pytest.mark.parametrize("shape", [(7,), (6, 5), (1, 4), (0, 3), (4, 3, 5)])
@pytest.mark.parametrize("name", [name for name in EVERY if name not in BY_VALUE])
def test_values_of_all_shapes(name, shape):
    compare(name, lambda f, jit: jit(f), MESHES, shape)


def squared(f: Callable) -> Callable:
    """A number that depends on the floating entries of a function's result."""

    def number(x):
        y = f(x)
        return np.sum(np.real(y) ** 2) if np.dtype(getattr(y, "dtype", bool)).kind in "fc" else np.sum(x * x)

    return number


WAYS = {
    "jit of grad": lambda f, jit: jit(spmd.grad(squared(f))),
    "grad of jit": lambda f, jit: spmd.grad(jit(squared(f))),
    "jit within grad": lambda f, jit: spmd.grad(squared(jit(f))),
}


FEW = ["mean 0", "sum 0", "T", "slice", "x @ x.T", "tensordot", "sort", "reshape", "roll"]
"""Functions of each kind, which the ordinary run takes where the others are for the long search."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FEW else pytest.mark.full) for n in EVERY if n not in BY_VALUE]
)
def test_gradients(name, way):
    compare(name, WAYS[way], MESHES[3:], (5, 3))


SECOND = {
    "jit of both": lambda f, jit: jit(spmd.grad(lambda x: np.sum(spmd.grad(squared(f))(x) ** 2))),
    "jit of the inner": lambda f, jit: spmd.grad(lambda x: np.sum(jit(spmd.grad(squared(f)))(x) ** 2)),
    "of a jitted function": lambda f, jit: spmd.grad(lambda x: np.sum(spmd.grad(jit(squared(f)))(x) ** 2)),
}


@pytest.mark.parametrize("way", SECOND)
@pytest.mark.parametrize("name", ["mean 0", "T", "slice", "x @ x.T", "sort", "reshape", "roll"])
@pytest.mark.parametrize("axes", [pytest.param(MESHES[2], marks=pytest.mark.full), MESHES[3]], ids=str)
def test_second_derivatives(name, way, axes):
    compare(name, SECOND[way], [axes], (6, 5))


# A step of training


def model(mesh: spmd.Mesh, rows: int = 10) -> tuple[Any, Any, np.ndarray]:
    x, y = rng.normal(size=(rows, 3)), rng.normal(size=rows)
    return spmd.put(x, P("data"), mesh), spmd.put(y, P("data"), mesh), rng.normal(size=3)


def step(w, x, y):
    value, g = spmd.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(w)
    return w - 0.1 * g, value


@pytest.mark.parametrize("scheduler", ["threads", "lockstep", "auto"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_step_of_training(n, scheduler):
    mesh = spmd.Mesh(data=n, scheduler=scheduler)
    for rows in (10, 2):  # uneven, and empty blocks
        x, y, w = model(mesh, rows)
        assert_replays(step, w, x, y)
        assert_replays(step, spmd.put(w, P(), mesh), x, y)


def test_one_program_has_the_collectives_of_the_map_by_hand():
    mesh = spmd.Mesh(data=4)
    x, y, w = model(mesh)

    def body(w, x, y):
        value, g = spmd.value_and_grad(lambda w: spmd.mean((x @ w - y) ** 2, "data"))(w)
        return w - 0.1 * g, value

    by_hand = spmd.jit(mesh.map(body, (P(), P("data"), P("data")), (P(), P())))
    once = spmd.jit(step)
    assert_same(once(w, x, y)[0], once(w, x, y)[0])
    np.testing.assert_allclose(once(w, x, y)[0], by_hand(w, x, y)[0].numpy())
    assert once.text().count("def program") == 1
    assert once.text().count("(comm, ") == by_hand.text().count("(comm, ") == 3  # with the definition


@pytest.mark.parametrize("optimizer", [spmd.optim.sgd(0.1, 0.9), spmd.optim.adam(0.1)])
@pytest.mark.parametrize("donate", [False, True])
def test_optimizers(optimizer, donate):
    mesh = spmd.Mesh(x=2, y=2)

    def update(params, state):
        grads = spmd.grad(lambda p: (p["w"] ** 2).sum() + (p["b"] * 3).sum())(params)
        return optimizer.update(grads, state, params, donate=donate)

    params = {"w": spmd.put(rng.random((3, 5)), P("x"), mesh), "b": spmd.put(rng.random(4), P(), mesh)}
    state = optimizer.init(params)
    want = update(spmd.tree.map(copy.copy, params), spmd.tree.map(copy.copy, state))
    once = spmd.jit(update)
    for _ in range(2):
        assert_same(once(params, state), want)


# Arguments and results


def test_bare_data_numbers_trees_and_keywords():
    mesh = spmd.Mesh(x=2, y=2)
    u, w = spmd.put(rng.random((5, 3)), P("x", "y"), mesh), rng.random(3)

    def f(tree, n, *, rate, name="a"):
        u, w = tree["u"], tree["w"]
        return {"n": (n, None, name), "bare": [w * rate, np.outer(w, w), w.sum()], "global": (u * rate + w, u @ w)}

    once, runs = counted(f)
    for rate in (0.5, 2.0, 3.0):
        for scale in (1, 2):
            tree = {"u": u, "w": w * scale}
            assert_same(once(tree, 3, rate=rate), f(tree, 3, rate=rate))
    assert len(runs) == 1
    assert_replays(lambda u, i: (u[i], u[:, 1:]), u, np.array([2, 0]))
    assert_replays(lambda u, a: spmd.grad(lambda a: (u * a).sum())(a), u, 0.5)
    assert_replays(lambda u, a: (np.where(u > a, u, a), np.clip(u, -a, a), np.full_like(u, a)), u, 0.5)


def test_bare_results_are_the_callers_own():
    u, w = spmd.put(np.ones(4), P("x"), spmd.Mesh(x=2)), np.ones(3)
    once = spmd.jit(lambda u, w: (w, w + 1, np.zeros(3), w.T))
    for _ in range(2):
        for result in once(u, w):
            result += 5
    assert_same(once(u, w), (np.ones(3), np.full(3, 2.0), np.zeros(3), np.ones(3)))
    np.testing.assert_array_equal(w, 1)


def test_the_function_runs_anew_for_other_kinds_of_arguments():
    mesh, other = spmd.Mesh(x=2, y=2), spmd.Mesh(x=4)
    once, runs = counted(lambda u, n: u * n)
    a = rng.random((8, 4))
    kinds = [
        *(spmd.put(a, spec, mesh) for spec in (P(), P("x"), P("x", "y"))),
        *(spmd.put(a, P("x"), mesh)[1:6], spmd.put(a[:6], P("x"), mesh), spmd.put(a.astype(np.float32), P("x"), mesh)),
        spmd.put(a, P("x"), other),
    ]
    for k, u in enumerate(kinds):
        for _ in range(2):
            assert_same(once(u, 2), u * 2)
        assert len(runs) == k + 1
    for k, n in enumerate((3, True, 2.5, np.float64(2.5), np.ones(4))):
        for again in (n, n + 1 if k > 1 else n):
            assert_same(once(kinds[1], again), kinds[1] * again)
        assert len(runs) == len(kinds) + k + 1


def test_arrays_that_a_function_makes_or_closes_over():
    mesh = spmd.Mesh(x=2, y=2)
    u, v = spmd.put(rng.random((5, 3)), P("x"), mesh), spmd.put(rng.random((5, 3)), P("y"), mesh)
    assert_replays(
        lambda u: (u + v, u + np.arange(3), spmd.zeros((2, 3), spec=P("x"), mesh=mesh) + u[0], np.ones(2)), u
    )
    with mesh:
        assert_replays(lambda w: (spmd.put(w, P("x")) * 2, w @ w), rng.random(4))


def test_maps_and_jitted_functions_within():
    mesh = spmd.Mesh(x=2, y=2)
    v, w = spmd.put(rng.random(6), P("x"), mesh), rng.random(3)
    product = mesh.map(lambda a, b: spmd.sum(a * b, "x"), (P("x"), P("x")), P())
    total = mesh.map(lambda a: (a, spmd.sum(a, "x")), P("x"), (P("x"), None))
    for f in (product, spmd.jit(product), spmd.jit(lambda a, b: (a * b).sum())):
        assert_replays(lambda v, f=f: f(v, v) + 1, v)
        assert_replays(lambda v, f=f: spmd.value_and_grad(f)(v, v), v)
    assert_replays(lambda v: total(v)[1] * 2, v)
    assert_replays(lambda v, w: mesh.map(lambda a: a * w.sum() + w[0], P("x"), P("x"))(v), v, w)


def test_pullbacks_serve_many_times_and_cotangents_may_be_missing():
    mesh = spmd.Mesh(x=2, y=2)
    u, w = spmd.put(rng.random((5, 3)), P("x", "y"), mesh), rng.random(3)
    f = lambda u, w: (u @ w, u * 2, w * 3, np.argmax(u))
    once = spmd.jit(f)
    for _ in range(2):
        (have, pull), (want, expected) = spmd.vjp(lambda *a: once(*a)[:3], u, w), spmd.vjp(lambda *a: f(*a)[:3], u, w)
        assert_same(have, want)
        for scale in (1.0, 2.0, 3.0):
            gs = tuple(scale * y for y in have)
            assert_same(pull(gs), expected(gs))
        one = lambda f: spmd.grad(lambda w: f(u, w)[2].sum())
        assert_same(one(once)(w), one(f)(w))
    assert_same(spmd.jvp(lambda w: once(u, w)[0], (w,), (w,)), spmd.jvp(lambda w: f(u, w)[0], (w,), (w,)))


def test_debug_ledgers_and_copies_run_the_function():
    u = spmd.put(np.ones(4), P("x"), spmd.Mesh(x=2))
    once, runs = counted(lambda u: u.mean())
    for _ in range(2):
        once(u)
    with spmd.debug(nans=True):
        once(u)
    with spmd.ledger() as log:
        once(u)
    assert log.messages
    assert len(runs) == 3
    assert_same(copy.deepcopy(once)(u), u.mean())


# Errors


def refused(f: Callable, *args: Any, match: str, error: type[Exception] = JitError) -> None:
    once = spmd.jit(f)
    for _ in range(2):  # nothing stays of the first
        with pytest.raises(error, match=match):
            once(*args)


def test_what_depends_on_values_is_refused():
    u, w = spmd.put(rng.random((4, 3)), P("x"), spmd.Mesh(x=2)), rng.random(3)
    refused(lambda u: u if u.sum() > 0 else -u, u, match="bool\\(\\)(?s:.*)np.where")
    refused(lambda u: u[u > 0], u, match="x\\[mask\\](?s:.*)np.where\\(mask, x, other\\)")
    refused(lambda u: u.numpy(), u, match="x.numpy(?s:.*)spmd.reshard\\(x, P\\(\\)\\)")
    refused(lambda u: np.asarray(u), u, match="np.asarray")
    refused(lambda u: float(u.sum()), u, match="float\\(\\)")
    refused(lambda u: u[0, 0].item(), u, match="item\\(\\)")
    refused(lambda u: np.allclose(u, u), u, match="bool\\(\\)")
    refused(lambda u: np.nonzero(u), u, match="np.nonzero")
    refused(lambda u, w: u if w[0] > 0 else -u, u, w, match="bool\\(\\)")
    refused(lambda u, w: w.__setitem__(0, 1), u, w, match="works in place")

    def caught(u):
        try:
            return u * float(u.sum())
        except JitError:
            return u

    refused(caught, u, match="float\\(\\)")


def test_other_errors():
    mesh = spmd.Mesh(x=2)
    u, w = spmd.put(rng.random(4), P("x"), mesh), rng.random(3)
    refused(lambda u: object(), u, match="result(?s:.*)one object each time")
    refused(lambda u, s: u, u, {1}, match="hashed")
    refused(lambda w: w, w, match="no global array", error=MeshError)
    unchecked = mesh.map(lambda a: a + 1, P("x"), P("x"), check=False)
    refused(lambda u: unchecked(u), u, match="check=False", error=SpecError)
    kept = []
    spmd.jit(lambda u, w: (kept.extend((u, w)), u)[1])(u, w)
    refused(lambda u: u * kept[0], u, match="another call")
    refused(lambda u: u[:3] * kept[1], u, match="another call")
    refused(lambda u, w: w * kept[1], u, w, match="another call")
    with pytest.raises(JitError, match=r"x\.numpy"):
        kept[0].numpy()
    elsewhere = spmd.put(w, P(), spmd.Mesh(y=3))
    refused(lambda u, v: u, u, elsewhere, match="argument v", error=MeshError)
    refused(lambda u: elsewhere.mean(), u, match="arrays on one mesh")
    refused(lambda u: elsewhere + 1, u, match="arrays on one mesh")
    refused(lambda u: u + w, u, match="broadcast", error=spmd.errors.LayoutError)
    spmd.grad(lambda a: (refused(lambda u: u * a, u, match="traced array"), a)[1])(2.0)
    with pytest.raises(SpecError, match="argument f"):
        spmd.jit(3)
    optimizer = spmd.optim.sgd(0.1)
    optimizer.update(u, optimizer.init(u), u, donate=True)
    refused(lambda u: u + 1, u, match="argument u", error=DonatedError)


@each_engine
@pytest.mark.parametrize("how", ["half", pytest.param("all", marks=pytest.mark.full)])
def test_between_processes(python, how):
    assert ended_well("jitted_global_arrays.py", how, python=python, n=4, timeout=200) == "right\n"


ON_ONE = """
import numpy as np, spmd
from spmd import P

with spmd.Mesh(x=2):
    u = spmd.put(np.ones(4), P("x"))
    total = spmd.jit(lambda u: u.sum())
    total(u)
    if spmd.is_main():
        print(total(u))
"""


def test_a_call_on_one_process_only_is_an_error(tmp_path):
    program = tmp_path / "alone.py"
    program.write_text(ON_ONE)
    ended = launch(program, n=2, python=sys.executable, timeout=60)
    assert ended.returncode not in (0, None), str(ended)
    assert "DeadlockError" in ended.stderr
