"""spmd.jit: what a program gives is what the body gives, bit for bit, with whatever arrays; and what it refuses."""

from __future__ import annotations

import importlib
import itertools
import math
import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from launch import ROOT
from rules import Table

import spmd
from spmd import P
from spmd.autodiff import tree
from spmd.errors import DonatedError, JitError, SpecError
from spmd.functions import bias_act, conv, embedding, layer_norm, softmax_cross_entropy
from spmd.operators.move import Move
from spmd.operators.root import Broadcast, Replicate, Rooted, Scatter, Unroot
from spmd.state import ROOTED, VARYING
from spmd.testing import operator_cases, operator_classes

for _file in (ROOT / "tests" / "autodiff" / "rules").glob("test_*.py"):
    importlib.import_module(f"autodiff.rules.{_file.stem}")

MESHES = [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 2, "y": 2}, {"x": 4, "y": 2}]


def bits(tree_of_arrays) -> list:
    """What tells results from each other: structure, layouts, and the bits and flags of all blocks."""
    leaves, structure = tree.flatten(tree_of_arrays, none_is_leaf=True)
    found = [structure]
    for x in leaves:
        if isinstance(x, spmd.PartitionedArray):
            found.append((x.layout, x.dtype))
            found += [(w, b.shape, b.tobytes(), b.flags.writeable, b.flags.c_contiguous) for w, b in x.blocks.items()]
        else:
            found.append(x if not isinstance(x, np.ndarray) else (x.dtype, x.shape, x.tobytes()))
    return found


def alike(run, again, *calls) -> None:
    """The same of both, whatever call comes first; and no argument has changed."""
    for args in (*calls, *calls[::-1]):
        before = bits(args)
        assert bits(again(*args)) == bits(run(*args))
        assert bits(args) == before


def normal(seed: int, *shape: int, dtype="f8") -> np.ndarray:
    x = np.random.default_rng([seed, *shape]).normal(size=shape)
    return (x + 1j * x[::-1] if np.dtype(dtype).kind == "c" else x).astype(dtype)


# Programs give what bodies give


def mlp(params, x, labels):
    *hidden, (w, b) = params
    for v, a in hidden:
        x = bias_act(x @ v, a, "gelu")
    return softmax_cross_entropy(x @ w + b, labels, reduction="mean", batch_axis_name="x")


def network(seed: int, widths=(7, 9, 5, 3)) -> list:
    pairs = itertools.pairwise(widths)
    return [(normal(seed, n, m, dtype="f4"), normal(seed, m, dtype="f4")) for n, m in pairs]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_training(axes, scheduler):
    mesh = spmd.Mesh(**axes, scheduler=scheduler)
    loss = mesh.map(mlp, in_specs=(P(), P("x"), P("x")), out_specs=P())
    once = spmd.jit(loss)

    def batch(seed: int, rows: int):
        return spmd.put((normal(seed, rows, 7, dtype="f4"), np.arange(rows) % 3), P("x"), mesh)

    calls = [(spmd.put(network(k), P(), mesh), *batch(k, rows)) for k, rows in enumerate((13, 13, 2, 16, 13))]
    alike(loss, once, *calls)
    alike(spmd.value_and_grad(loss), spmd.value_and_grad(once), *calls)
    assert bits(spmd.grad(once)(*calls[0])) == bits(spmd.grad(loss)(*calls[0]))


def test_the_body_runs_once_for_each_kind_of_arguments(capsys):
    mesh = spmd.Mesh(x=2, scheduler="lockstep")

    @spmd.jit
    @mesh.map(in_specs=(P("x"), P()), out_specs=P())
    def f(x, scale):
        print("runs", x.shape, x.dtype)
        return spmd.sum(x * scale, "x")

    rows = lambda n, dtype="f8": spmd.put(np.arange(n, dtype=dtype), P("x"), mesh)
    for _ in range(3):
        assert f(rows(4), 0.5) == 3
        assert f(rows(4), 2.0) == 12  # a float is no part of the program
    assert capsys.readouterr().out.count("runs") == 2  # once on each of two workers
    assert f(rows(6), 2.0) == 30
    assert f(rows(4, "f4"), 2.0).dtype == np.float32
    assert capsys.readouterr().out.count("runs") == 4
    assert [float(f(rows(4), n)) for n in (1, 2, 1, True)] == [6, 12, 6, 6]
    assert capsys.readouterr().out.count("runs") == 6  # integers are, and so is True
    for args in ((rows(4), 0.5), (rows(6), 2.0)):
        spmd.value_and_grad(f)(*args), spmd.value_and_grad(f)(*args)
    assert capsys.readouterr().out.count("runs") == 4


def test_floats_keep_their_weak_type():
    mesh = spmd.Mesh(x=2)

    def f(x, rate):
        y = rate * x - rate / 3 + rate**2
        return y, spmd.sum(y, "x") * (1 - rate), np.where(x > rate, x, rate)

    run = mesh.map(f, in_specs=(P("x"), P()), out_specs=(P("x"), P(), P("x")))
    x, y = (spmd.put(normal(k, 5, dtype="f4"), P("x"), mesh) for k in (0, 1))
    alike(run, spmd.jit(run), (x, 0.3), (y, -1.7), (x, 2.0), (x, np.float32(3)), (y, np.float64(0.1)))


def test_a_float_may_be_differentiated_in_the_body():
    mesh = spmd.Mesh(x=2)

    def f(x, rate):
        return spmd.grad(lambda r: spmd.sum(np.sin(r * x) * r, "x"))(rate), spmd.grad(np.sin)(rate)

    run = mesh.map(f, in_specs=(P("x"), P()), out_specs=P())
    x = spmd.put(normal(0, 5), P("x"), mesh)
    alike(run, spmd.jit(run), (x, 0.3), (x, -1.7), (x, 0.0))


@pytest.mark.parametrize("axes", [{"x": 3}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("kind", operator_classes(), ids=lambda kind: kind.__name__)
def test_every_operator_and_its_adjoint(kind, axes, scheduler):
    """On two axes: along the one whose workers are no neighbours, and along both in the other order."""
    record_operator(kind, spmd.Mesh(**axes, scheduler=scheduler), along=[("x",), ("y", "x")])


@pytest.mark.full
@pytest.mark.parametrize("kind", operator_classes(), ids=lambda kind: kind.__name__)
def test_every_operator_along_the_other_axes(kind, scheduler):
    record_operator(kind, spmd.Mesh(x=2, y=2, scheduler=scheduler), along=[("y",), ("x", "y")])


def record_operator(kind, mesh, along):
    done = 0
    for case in operator_cases(kind, mesh):
        op = case.operator
        if op.source == ROOTED or op.axes not in along:
            continue  # the adjoints of those that give Rooted values
        shapes = [case.shape] * mesh.size
        if case.spec is not None:
            layout = mesh.layout(case.shape, case.spec)
            apart = (
                hasattr(op, "src") or len(layout.boxes) < mesh.size
            )  # it is of the workers along these axes, in their order
            shapes = [layout.block_shape(mesh.group(w, op.axes).index if apart else w) for w in range(mesh.size)]
        names = tuple(n for n in mesh.axes if n not in op.axes or op.takes(n) == VARYING)

        def f(b, op=op, shapes=shapes, names=names):
            own = shapes[spmd.worker_index(tuple(mesh.axes))]
            x = np.reshape(b[: math.prod(own)], own)
            if names:
                x = x * (spmd.axis_index(names) + 1.5)

            def g(x):
                y = op(np.tanh(x))
                return spmd.replicate(y, y.axes, y.root) if isinstance(y, Rooted) else y

            y, pull = spmd.vjp(g, x)
            return np.ravel(y), np.ravel(pull(y * y)[0])

        run = mesh.map(f, in_specs=P(), out_specs=P(tuple(mesh.axes)))
        alike(run, spmd.jit(run), *((normal(k, max(map(math.prod, shapes))),) for k in (1, 2)))
        done += 1
    assert done or issubclass(kind, FROM_ROOT)


FROM_ROOT = (Broadcast, Move, Replicate, Scatter, Unroot)


# Rules


VALUES_DECIDE = tuple(
    "cov-weights delete-compress-extract det- extract histogram index-signed intersect1d lstsq- multigammaln piecewise "
    "pinv poly- polydiv polyfit polymul polyval-list quantile- roots setdiff1d setxor1d trim_zeros union1d "
    "unique".split()
)
"""Rows that may be refused: the shapes of their results, or which formula serves, depend on values."""


def reused(row, shapes, order: int) -> tuple:
    """The results of a program of a row's values and cotangents on arguments that it was not recorded with, and
    those of the body."""
    mesh = spmd.Mesh(x=1)

    def drawn(seed: int) -> tuple:
        rng = np.random.default_rng(seed)
        return tuple(np.asarray(d(rng, s)) for d, s in zip(row.domains, shapes, strict=True))

    def ones(y, k: float):
        return tree.map(lambda a: np.ones_like(a) * k, y)

    def first(*args):
        y, pull = spmd.vjp(row.f, *args)
        return y, pull(ones(y, 0.7))

    def body(*args):
        if order == 1:
            return first(*args)
        y, pull = spmd.vjp(first, *args)
        return y, pull(ones(y, 0.3))

    run = mesh.map(body, in_specs=P(), out_specs=P())
    once = spmd.jit(run)
    once(*drawn(5))
    return tree.leaves(run(*drawn(9))), tree.leaves(once(*drawn(9)))


def check_row(row, shapes, order: int) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected, found = reused(row, shapes, order)
    except JitError:
        assert row.name.startswith(VALUES_DECIDE), row.name
        return
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if b.dtype.kind not in "fc":
            np.testing.assert_array_equal(a.numpy(), b.numpy())
        else:  # where more than two cotangents meet, they may be added in another order
            scale = np.max(np.abs(b.numpy()), initial=1, where=np.isfinite(b.numpy()))
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-13, atol=1e-14 * scale)


ROWS = {f"{name}-{k}": row for k, table in enumerate(Table.all) for name, row in table.rows.items()}
FEW = settings(max_examples=1, suppress_health_check=list(HealthCheck))
MORE = settings(max_examples=8, suppress_health_check=list(HealthCheck))


def in_shapes(searched: settings, row, order: int) -> None:
    # A function of its own for each row: of one for all, Hypothesis puts the settings for each on top of those for the
    # one before, and asks them one through the other, deeper than Python goes.
    @searched
    @given(shapes=row.shapes)
    def check(shapes):
        check_row(row, shapes, order)

    check()


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_every_rule(row):
    in_shapes(FEW, row, 1)


@pytest.mark.full
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_every_rule_in_many_shapes_and_to_order_2(row, order):
    in_shapes(MORE, row, order)


# Where something further out differentiates


@pytest.fixture
def regression(scheduler):
    """A map of several results, of which one is no array, and arrays for it."""
    mesh = spmd.Mesh(x=3, scheduler=scheduler)

    def body(w, x, y):
        error = np.tanh(x @ w) - y
        return {"loss": spmd.mean(error**2, "x"), "rows": error, "count": spmd.axis_size("x"), "nothing": None}

    specs = {"loss": P(), "rows": P("x"), "count": None, "nothing": None}
    run = mesh.map(body, in_specs=(P(), P("x"), P("x")), out_specs=specs)
    x, y = spmd.put((normal(1, 7, 2), normal(2, 7)), P("x"), mesh)
    return run, x, y


def test_gradients_from_outside(regression):
    run, x, y = regression
    once = spmd.jit(run)

    def loss(run, w, x):
        found = run(w, x, y)
        assert found["nothing"] is None
        return found["loss"] * 3 + np.sum(w**2), found["count"]

    for k in range(4):
        w = normal(k, 2)
        for of in (0, 1, (0, 1)):
            way = [spmd.value_and_grad(lambda w, x, run=r: loss(run, w, x), of, has_aux=True) for r in (run, once)]
            assert bits(way[1](w, x)) == bits(way[0](w, x))


def test_a_pullback_serves_more_than_once_and_what_is_not_asked_for_is_zero(regression):
    run, x, y = regression
    once = spmd.jit(run)
    for k in range(3):  # recorded, and run again
        w = normal(k, 2)
        (_, pull), (_, again) = (
            spmd.vjp(lambda w, x, r=r: (r(w, x, y)["loss"], r(w, x, y)["rows"]), w, x) for r in (run, once)
        )
        for loss in (1.0, -2.0, 0.0):
            g = loss, normal(7, 7)
            assert bits(again(g)) == bits(pull(g))
        whole = [spmd.grad(lambda w, r=r: r(w, x, y)["loss"])(w) for r in (run, once)]
        assert bits(whole[1]) == bits(whole[0])


def test_second_derivatives_run_the_body(regression):
    run, x, y = regression
    once = spmd.jit(run)
    w, v = normal(3, 2), normal(4, 2)
    loss = lambda run: lambda w: run(w, x, y)["loss"]
    for _ in range(2):
        assert bits(spmd.hvp(loss(once), (w,), (v,))) == bits(spmd.hvp(loss(run), (w,), (v,)))
        assert bits(spmd.jvp(loss(once), (w,), (v,))) == bits(spmd.jvp(loss(run), (w,), (v,)))
        assert bits(spmd.hessian(loss(once))(w)) == bits(spmd.hessian(loss(run))(w))
        assert bits(spmd.grad(loss(once))(w)) == bits(spmd.grad(loss(run))(w))


# Arguments


def test_trees_keywords_and_arguments_that_are_laid_out_at_the_call(scheduler):
    mesh = spmd.Mesh(x=2, scheduler=scheduler)

    def body(tree, scale=None, *, name="sum", shift=0):
        a, b = tree["a"], tree["b"]
        y = a * (1 if scale is None else scale) + shift + (0 if b is None else b)
        return {"sum": spmd.sum, "max": spmd.max}[name](y, "x")

    specs = {"tree": P("x"), "scale": P(), "name": None, "shift": None}
    run = mesh.map(body, in_specs=specs, out_specs=P())
    once = spmd.jit(run)
    a, b = normal(1, 5), normal(2, 5)
    for _ in range(2):
        for args, kwargs in (
            (({"a": a, "b": b},), {}),
            (({"a": b, "b": a}, 2.5), {}),
            (({"a": a, "b": None}, 0.5), {"name": "max"}),
            (({"a": a, "b": b},), {"name": "max", "shift": 3}),
            (({"a": a, "b": b},), {"name": "max", "shift": 3.5}),
            (({"a": a, "b": b},), {"name": "max", "shift": 4.5}),
            (({"a": spmd.put(b, P("x"), mesh), "b": a.astype("f4")},), {"scale": np.float64(3)}),
            (({"a": spmd.put(b, P(), mesh), "b": a},), {}),  # laid out otherwise
        ):
            assert bits(once(*args, **kwargs)) == bits(run(*args, **kwargs))


def test_blocks_of_other_sizes_are_other_arguments():
    mesh = spmd.Mesh(x=3)
    run = mesh.map(lambda x: (np.cumsum(x) * len(x), spmd.sum(x, "x")), P("x"), (P("x"), P()))
    cuts = [(2, 2, 2), (6, 0, 0), (1, 2, 3), (0, 6, 0)]
    arrays = [spmd.from_blocks(dict(enumerate(np.split(normal(1, 6), np.cumsum(c)[:-1]))), P("x"), mesh) for c in cuts]
    alike(run, spmd.jit(run), *((x,) for x in arrays))


def test_meshes_of_with_blocks():
    run = spmd.map(lambda x: spmd.psum(x, "x") / spmd.axis_size("x"), P("x"), P("x"))
    once = spmd.jit(run)
    for _ in range(2):
        for n in (1, 2, 4):
            with spmd.Mesh(x=n):
                assert bits(once(normal(n, 8))) == bits(run(normal(n, 8)))


def test_what_is_given_away_is_refused():
    mesh = spmd.Mesh(x=2)
    f = spmd.value_and_grad(spmd.jit(mesh.map(lambda w, x: spmd.sum(x * w, "x"), (P(), P("x")), P())))
    step = spmd.optim.sgd(0.1)
    w, x = spmd.put(normal(1, 4), P(), mesh), spmd.put(normal(2, 2, 4), P("x"), mesh)
    state = step.init(w)
    for _ in range(3):
        old = w
        _, g = f(w, x)
        w, state = step.update(g, state, w, donate=True)
        with pytest.raises(DonatedError):
            f(old, x)


# Memory


def test_what_is_written_over_is_nobody_elses():
    """Large arrays, whose memory programs use again: arguments, constants and results stay as they are."""
    mesh, n = spmd.Mesh(x=2, scheduler="lockstep"), 40_000
    fixed = normal(9, n)

    def body(x, y):
        a = np.exp(x) * 2 + fixed  # chains of temporaries
        b = (a - y) * (a + y) / 3
        pairs = np.reshape(a * 1.5, (-1, 2))  # over what has a view nothing is written
        c = pairs[:, 0] + 1
        return b + x, np.repeat(c * c, 2), np.ravel(pairs * pairs), x, fixed + 0 * x, a

    run = mesh.map(body, P("x"), P("x"))
    once, before = spmd.jit(run), fixed.copy()
    x, y = (spmd.put(normal(k, 2 * n), P("x"), mesh) for k in (1, 2))
    alike(run, once, (x, y), (y, x), (x, x))
    assert ", out=v" in once.text()
    first, expected = once(x, y), bits(run(x, y))
    once(y, x)  # writes nothing into what it gave before
    assert bits(first) == expected
    np.testing.assert_array_equal(fixed, before)


def test_no_more_memory_than_the_body():
    """Of a long chain a program holds what it needs next, forward and back."""
    mesh = spmd.Mesh(x=2, scheduler="lockstep")

    def chain(x):
        for _ in range(8):
            x = x * 0.5 + 1
        return spmd.sum(x * x, "x")

    run = mesh.map(chain, P("x"), P())
    x = spmd.put(normal(1, 200_000), P("x"), mesh)
    peaks = []
    for f in (spmd.value_and_grad(run), spmd.value_and_grad(spmd.jit(run))):
        f(x), f(x)
        tracemalloc.start()
        f(x)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] <= peaks[0]


# What is in the body


def test_collectives_of_constants_are_done_each_time(scheduler):
    """Where one worker's argument of a collective is a constant and another's is not, they still meet."""
    mesh = spmd.Mesh(x=2, scheduler=scheduler)

    def body(x):
        mine = x if spmd.worker_index("x") else spmd.varying(np.full(3, 5.0), "x")
        return spmd.psum(mine, "x"), spmd.psum(len(x), "x") * np.ones(2)

    run = mesh.map(body, P("x"), P())
    alike(run, spmd.jit(run), *((normal(k, 6),) for k in (1, 2)))


def test_gradients_in_the_body_checkpoints_and_rules_of_ones_own(scheduler):
    mesh = spmd.Mesh(x=2, scheduler=scheduler)

    @spmd.custom_vjp
    def clipped(x):
        return np.sum(x**3)

    clipped.defvjp(lambda x: (np.sum(x**3), x), lambda x, g: (np.clip(g * 3 * x * x, 0, 1),))

    def local(w, x):
        y = spmd.checkpoint(lambda w: np.tanh(x @ w))(w)
        return spmd.sum(y * spmd.stop_gradient(y), "x") + spmd.psum(clipped(y), "x")

    def step(w, x):
        value, g = spmd.value_and_grad(local)(w, x)
        _, hv = spmd.jvp(spmd.grad(lambda w: local(w, x)), (w,), (g,))
        return value, w - 0.1 * g, hv

    run = mesh.map(step, (P(), P("x")), P())
    alike(run, spmd.jit(run), *((normal(k, 3), normal(k, 5, 3)) for k in (1, 2)))


def test_functions_of_models(scheduler):
    mesh = spmd.Mesh(x=2, scheduler=scheduler)

    def body(params, ids, image):
        table, scale, kernel = params
        rows = embedding(table, ids, axis_name="x")
        rows = layer_norm(rows, scale, None)
        seen = conv(image, kernel, padding=1, spec=P(None, None, "x"))
        return spmd.sum(np.tanh(seen), "x") + np.sum(rows**2)

    specs = ((P("x"), P(), P()), P(), P(None, None, "x"))
    run = mesh.map(body, in_specs=specs, out_specs=P())
    once = spmd.jit(run)
    for k in range(3):
        params = spmd.put((normal(k, 7, 4), normal(k, 4), normal(k, 2, 3, 3, 3)), specs[0], mesh)
        ids, image = np.arange(5) + k % 2, spmd.put(normal(k, 1, 3, 6, 5), specs[2], mesh)
        assert bits(once(params, ids, image)) == bits(run(params, ids, image))
        ways = [spmd.value_and_grad(f)(params, spmd.put(ids, P(), mesh), image) for f in (run, once)]
        assert bits(ways[1]) == bits(ways[0])
    with pytest.raises(SpecError, match="ids from 0 to 70"):  # a check is done each time
        once(params, np.array([0, 70, 1, 2, 3]), image)
    assert bits(once(params, ids, image)) == bits(run(params, ids, image))


def test_random_numbers_of_keys(scheduler):
    mesh = spmd.Mesh(x=2, scheduler=scheduler)
    run = mesh.map(lambda k, x: x + spmd.random.normal(k, (3,)), (P(), P("x")), P("x"))
    once = spmd.jit(run)
    for seed in (0, 1, 0):
        assert bits(once(spmd.random.key(seed), normal(1, 6))) == bits(run(spmd.random.key(seed), normal(1, 6)))


def test_floating_point_errors_are_treated_as_in_the_body():
    mesh = spmd.Mesh(x=2)

    def body(x):
        with np.errstate(divide="ignore"):
            a = 1 / x
        with np.errstate(all="raise"):
            return a, np.sqrt(x)

    run = mesh.map(body, P("x"), P("x"))
    once = spmd.jit(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alike(run, once, (np.array([1.0, 0.0]),), (np.array([0.0, 2.0]),))
        for f in (run, once):
            with pytest.raises(FloatingPointError):
                f(np.array([1.0, -1.0]))


def test_in_debug_and_ledgers_the_body_runs():
    mesh = spmd.Mesh(x=2, scheduler="lockstep")
    ran = []

    def body(x):
        ran.append(1)
        return spmd.psum(np.log(x), "x")

    once = spmd.jit(mesh.map(body, P("x"), P()))
    for _ in range(2):
        once(np.ones(4))
    assert len(ran) == 2
    with spmd.ledger() as book:
        once(np.ones(4))
    assert len(ran) == 4
    assert "psum" in str(book) or "Sum" in str(book)
    with spmd.debug(nans=True), pytest.raises(FloatingPointError):
        once(-np.ones(4))


# Refusals


def failing(body, *args, specs=None, match: str) -> None:
    mesh = spmd.Mesh(x=2, scheduler="lockstep")
    once = spmd.jit(mesh.map(body, specs or P("x"), P()))
    for _ in range(2):
        with pytest.raises(JitError, match=match) as caught:
            once(*args)
        assert all(word in str(caught.value) for word in ("got:", "needed:", "mend:", "spmd.jit"))


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (lambda x: x.sum() if spmd.sum(x, "x") > 0 else x, r"bool\(\), as `if` calls it"),
        (lambda x: float(spmd.sum(x, "x")), r"float\(\)"),
        (lambda x: range(spmd.sum(x, "x").astype(int)), r"index\(\)"),
        (lambda x: spmd.sum(x, "x").item(), "x.item"),
        (lambda x: spmd.block(x), "np.asarray"),
        (lambda x: spmd.sum(x[x > 0], "x"), r"x\[mask\]"),
        (lambda x: np.nonzero(spmd.psum(x, "x")), "np.nonzero"),
        (lambda x: np.where(spmd.psum(x, "x")), "np.where of one argument"),
        (lambda x: np.unique(spmd.psum(x, "x")), "np.unique"),
        (
            lambda x: spmd.replicate(spmd.at_root(np.sum, spmd.keep(spmd.psum(x, "x"), "x"), axis_name="x"), "x"),
            "at_root",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_depends_on_values_is_refused(body, match):
    failing(body, normal(1, 4), match=match)


def test_a_function_whose_result_changes_its_shape_is_refused():
    mesh = spmd.Mesh(x=1)
    once = spmd.jit(mesh.map(lambda x: np.polydiv(x, np.array([1.0, 0.0, 1.0]))[1], P(), P()))
    for rest in (0, 4):
        np.testing.assert_array_equal(once(np.array([1.0, 1.0, 1.0, 1.0 + rest])), [rest])
    with pytest.raises(JitError, match="float64\\[2\\]"):
        once(np.array([1.0, 1.0, 2.0, 5.0]))


def test_arguments_that_cannot_be_part_of_a_program():
    failing(
        lambda x, table: spmd.sum(x, "x") * len(table), normal(1, 4), np.zeros(3), specs=(P("x"), None), match="hashed"
    )


def test_what_is_no_function_is_refused():
    mesh = spmd.Mesh(x=2)
    run = mesh.map(lambda x: spmd.sum(x, "x"), P("x"), P())
    assert spmd.jit(spmd.jit(run)) is not None
    for f, match in (
        (3, "a map, or a function"),
        (mesh.map(lambda x: x, P("x"), P("x"), check=False), "check=False"),
    ):
        with pytest.raises(SpecError, match=match):
            spmd.jit(f)


def test_an_error_of_the_body_leaves_nothing_behind(scheduler):
    mesh = spmd.Mesh(x=2, scheduler=scheduler)
    run = mesh.map(lambda x, n: spmd.psum(x, "x").reshape(n, -1), (P("x"), None), P())
    once = spmd.jit(run)
    for _ in range(2):
        with pytest.raises(ValueError, match="reshape"):
            once(normal(1, 8), 3)
        assert bits(once(normal(2, 8), 2)) == bits(run(normal(2, 8), 2))


def test_many_kinds_of_arguments_are_told():
    once = spmd.jit(spmd.Mesh(x=1).map(lambda x, n: x * n, (P("x"), None), P("x")))
    for n in range(63):
        once(np.ones(2), n), once(np.ones(2), n)  # not recorded in a row
    with pytest.warns(UserWarning, match="64 kinds of arguments"):
        once(np.ones(2), 63)


def test_the_text_is_python():
    mesh = spmd.Mesh(x=2, scheduler="lockstep")
    once = spmd.jit(mesh.map(lambda x: spmd.sum(np.sin(x) ** 2, "x"), P("x"), P()))
    assert once.text() == ""
    spmd.value_and_grad(once)(spmd.put(np.ones(4), P("x"), mesh))
    text = once.text()
    compile(text, "text", "exec")
    assert "psum(comm, " in text
    assert "test_jit.py" in text
    assert repr(once).startswith("spmd.jit of spmd.map of <lambda>")


# What has been wrong once


@pytest.mark.parametrize("axis", [0, -1, np.int64(0), np.int64(-1), (0, -1), 1])
@pytest.mark.parametrize("number", [2.5, 2.5j, np.float32(1.5), np.array([1.0, 2.0])])
def test_dimensions_are_added_to_arrays_and_to_numbers(axis, number):
    if axis == 1 and np.ndim(number) == 0:
        axis = 0
    mesh = spmd.Mesh(x=2)

    def body(x, s):
        return spmd.psum(np.sum(x * np.expand_dims(np.sum(np.expand_dims(s, axis)), 0)), "x")

    def given(k):
        return np.arange(4.0) + k, number * (1 + k)

    plain = mesh.map(body, in_specs=(P("x"), P()), out_specs=P())
    once = spmd.jit(plain)
    for k in range(3):
        np.testing.assert_array_equal(once(*given(k)).numpy(), plain(*given(k)).numpy())


@pytest.mark.parametrize("axis", [0, -1])
def test_a_number_is_given_a_dimension(axis):
    mesh = spmd.Mesh(x=2)
    plain = mesh.map(lambda x, s: x * np.expand_dims(s, axis), in_specs=(P("x"), P()), out_specs=P("x"))
    once = spmd.jit(plain)
    for s in (2.5, 1.5, 3.0):
        np.testing.assert_array_equal(once(np.arange(4.0), s).numpy(), plain(np.arange(4.0), s).numpy())


def test_arrays_of_the_body_may_change_while_it_runs():
    mesh = spmd.Mesh(x=2)

    def body(x):
        w, y = np.zeros(3), x * 0
        for k in range(3):
            w[:] = k + 1
            y = y + x * w
        i = np.array([0, 1])
        a = x[:, i]
        i += 1
        return y, a, x[:, i]

    run = mesh.map(body, P("x"), P("x"))
    alike(run, spmd.jit(run), *((normal(k, 4, 3),) for k in (1, 2)))


def test_an_array_outside_is_read_once():
    outside = np.ones(3)
    once = spmd.jit(spmd.Mesh(x=2).map(lambda x: x * outside + np.sum(outside), P("x"), P("x")))
    for k in (1, 2, 3):
        np.testing.assert_array_equal(once(np.full((4, 3), k)), np.full((4, 3), k + 3.0))
        outside[:] = 9 + k
    assert outside.flags.writeable


@pytest.mark.parametrize("error", [np.linalg.LinAlgError, FloatingPointError, Exception])
def test_a_body_that_catches_errors_of_values_is_refused(error):
    def body(x):
        try:
            if error is Exception:
                return spmd.psum(x, "x") * float(spmd.sum(x, "x"))
            if error is np.linalg.LinAlgError:
                return np.linalg.cholesky(spmd.psum(x.T @ x, "x"))
            with np.errstate(all="raise"):
                return 1 / spmd.psum(x, "x")
        except error:
            return np.zeros((3, 3))

    once = spmd.jit(spmd.Mesh(x=2).map(body, P("x"), P()))
    with pytest.raises(JitError, match=r"float\(\)|that it catches"):
        once(np.zeros((4, 3)))


@pytest.mark.parametrize(
    ("f", "values"),
    [
        (lambda x, i: x[:, :i], (2, 1)),
        (lambda x, i: x[i:], (1, 0)),
        (lambda x, i: np.sum(x, axis=i), (0, 1)),
        (lambda x, i: x.sum(axis=i), (0, 1)),
        (lambda x, i: np.moveaxis(x[..., None], 0, i), (1, 2)),
        (lambda x, i: np.expand_dims(x, i), (1, 2)),
        (lambda x, i: np.tile(x, i), (1, 2)),
        (lambda x, i: x.reshape((i, -1)), (1, 2)),
        (lambda x, i: np.broadcast_to(x, (i, 4, 3)), (1, 2)),
        (lambda x, i: np.pad(x, i), (1, 2)),
    ],
)
def test_integers_in_arrays_give_no_shapes(f, values):
    run = spmd.Mesh(x=1).map(f, (P(), P()), P())
    once = spmd.jit(run)

    def in_arrays():
        for i in (values[0], *values):
            once(normal(1, 4, 3), np.int64(i))

    with pytest.raises(JitError):
        in_arrays()
    for i in values:  # part of the program
        assert bits(once(normal(1, 4, 3), i)) == bits(run(normal(1, 4, 3), i))


def test_floats_are_floats():
    def body(x, r):
        assert isinstance(r, float)
        assert not isinstance(r, int)
        return x * r.real + r.conjugate() - r.imag

    run = spmd.Mesh(x=1).map(body, (P(), P()), P())
    alike(run, spmd.jit(run), (normal(1, 3), 0.5), (normal(2, 3), -1.0))
    for f, match in ((round, "round"), (math.floor, "floor"), (math.ceil, "ceil"), (math.sqrt, "float")):
        with pytest.raises(JitError, match=match):
            spmd.jit(spmd.Mesh(x=1).map(lambda x, r, f=f: x * f(r), (P(), P()), P()))(np.ones(2), 0.5)


def test_zeros_of_both_signs_are_different_objects():
    run = spmd.Mesh(x=1).map(lambda x, c: (x * c, c), (P(), None), (P(), None))
    once = spmd.jit(run)
    for c in (0.0, -0.0, 0, False, math.nan, math.nan):
        value, same = once(np.ones(2), c)
        assert bits(value) == bits(run(np.ones(2), c)[0])
        assert (type(same), repr(same)) == (type(c), repr(c))


def test_a_pullback_knows_the_arguments_of_its_call():
    once = spmd.jit(spmd.Mesh(x=2).map(lambda x: x * x, P("x"), P("x")))
    for k in range(3):
        x = normal(k, 4)
        _, pull = spmd.vjp(once, x)
        expected = 2 * x
        for _ in range(2):
            np.testing.assert_array_equal(pull(np.ones(4))[0], expected)
            x[:] = 0


def test_a_pullback_that_fails_may_be_called_again():
    fails = [True]

    @spmd.custom_vjp
    def f(x):
        return x * x

    def back(x, g):
        if fails:
            fails.clear()
            raise ArithmeticError("once")
        return (2 * x * g,)

    f.defvjp(lambda x: (x * x, x), back)
    once = spmd.jit(spmd.Mesh(x=1).map(f, P(), P()))
    _, pull = spmd.vjp(once, np.arange(3.0))
    with pytest.raises(ArithmeticError):
        pull(np.ones(3))
    for _ in range(3):
        np.testing.assert_array_equal(pull(np.ones(3))[0], 2 * np.arange(3.0))
        _, pull = spmd.vjp(once, np.arange(3.0))
        np.testing.assert_array_equal(pull(np.ones(3))[0], 2 * np.arange(3.0))


def test_objects_of_a_call_are_refused_and_arrays_outside_stay_writable():
    class Box:
        def __init__(self, x):
            self.x = x

    table = np.arange(3.0)
    for made in (lambda x: Box(x + 1), lambda x: {1}, lambda x: table):
        once = spmd.jit(spmd.Mesh(x=1).map(lambda x, made=made: (x, made(x)), P(), (P(), None)))
        with pytest.raises(JitError, match="out_spec None"):
            once(np.ones(2))
    assert table.flags.writeable
    once = spmd.jit(spmd.Mesh(x=1).map(lambda x: (x, np.sum(x), (1, "a", x.dtype)), P(), (P(), None, None)))
    for k in (1.0, 2.0):
        _, total, told = once(np.full(2, k))
        assert (total, told) == (2 * k, (1, "a", np.dtype(float)))


def test_treatments_of_errors_are_those_of_the_call():
    run = spmd.Mesh(x=1).map(lambda x: 1 / x, P(), P())
    once = spmd.jit(run)
    for how in ("ignore", "raise", "ignore"):
        with np.errstate(divide=how):
            if how == "raise":
                with pytest.raises(FloatingPointError):
                    once(np.zeros(2))
            else:
                assert bits(once(np.zeros(2))) == bits(run(np.zeros(2)))


def test_programs_go_with_their_maps():
    import gc
    import linecache

    def count() -> int:
        gc.collect()
        return sum(name.startswith("<spmd.jit of ") for name in linecache.cache)

    before = count()
    once = spmd.jit(spmd.Mesh(x=2).map(np.tanh, P("x"), P("x")))

    def used(once) -> None:
        for _ in range(2):
            spmd.grad(lambda x: np.sum(once(x)))(np.ones(4))

    used(once)
    assert count() > before
    del once
    assert count() == before


def test_the_same_bits_from_outside():
    run = spmd.Mesh(x=2).map(lambda x: spmd.sum(np.linalg.matrix_power(x @ x.T, 3), "x"), P("x"), P())
    once = spmd.jit(run)
    for k in range(3):
        x = normal(k, 6, 4) * 3
        assert bits(spmd.value_and_grad(once)(x)) == bits(spmd.value_and_grad(run)(x))


def test_what_is_written_to_is_no_constant():
    """Rules write into zeros that they have made, and into views of them; each call has zeros of its own."""

    def body(x):
        y = x.at[1].set(2 * x[0]).at[2:].add(x[:2])
        return np.diag(y), np.triu(np.outer(y, y))

    run = spmd.Mesh(x=1).map(lambda x: spmd.vjp(body, x)[1](spmd.tree.map(np.ones_like, body(x)))[0], P(), P())
    alike(run, spmd.jit(run), *((normal(k, 4),) for k in (1, 2)))
