"""The rules of state, one test each: what varies, what is summed, how often, and what is refused."""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import pytest

import spmd
from spmd import P
from spmd import functions as F
from spmd.errors import DifferentiationError, StateError, TracedConversionError

N = 4
X = np.random.default_rng(0).standard_normal((N, 3))
W = np.random.default_rng(1).standard_normal(3)


@pytest.fixture
def mesh(scheduler):
    """Four workers along x."""
    with spmd.Mesh(x=N, transport="local", scheduler=scheduler) as mesh:
        yield mesh


@pytest.fixture
def grid(scheduler):
    """Two workers along x, three along y."""
    with spmd.Mesh(x=2, y=3, transport="local", scheduler=scheduler) as mesh:
        yield mesh


def near(got, want):
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-12, atol=1e-14)


def sums(log, *axes: str) -> int:
    return log.first.axes["Sum", axes]


# Invariant meets Varying


def test_an_invariant_value_is_varied_once_and_its_cotangents_meet_before_one_sum(mesh):
    def loss(w, x):
        h = np.tanh(x * w) + w * x
        return spmd.psum(np.sum(h * w - np.sin(x - w)), "x")

    with spmd.ledger() as log:
        value, g = spmd.value_and_grad(spmd.map(loss, (P(), P("x")), P()))(W, X)
    assert log.operators["Vary"] == 2  # w, and the cotangent of the loss
    assert sums(log, "x") == 2  # the loss and the gradient
    serial = lambda w: np.sum((np.tanh(X * w) + w * X) * w - np.sin(X - w))
    near(value, serial(W))
    near(g, spmd.autodiff.grad(serial)(W))


def test_once_for_each_set_of_axes(grid):
    a, b, c = np.arange(2.0), np.arange(3.0), np.arange(6.0).reshape(2, 3)

    def loss(w, a, b, c):
        first = spmd.psum(np.sum(w * a + w * a * w), "x") + spmd.psum(np.sum(np.sin(w) * b + w * b), "y")
        return first + spmd.psum(np.sum(w * c + w * c * w), ("x", "y"))

    f = spmd.map(loss, (P(), P("x"), P("y"), P("x", "y")), P())
    with spmd.ledger() as log:
        value, g = spmd.value_and_grad(f)(0.7, a, b, c)
    # np.sin(w) is another Invariant value than w: its cotangents have a sum of their own.
    assert (sums(log, "x"), sums(log, "y"), sums(log, "x", "y")) == (2, 3, 2)
    serial = lambda w: np.sum(w * a + w * a * w) + np.sum(np.sin(w) * b + w * b) + np.sum(w * c + w * c * w)
    near(value, serial(0.7))
    near(g, spmd.autodiff.grad(serial)(0.7))


def test_data_parallel_training_takes_one_sum_per_parameter(grid):
    rng = np.random.default_rng(2)
    params = {"w": [rng.standard_normal((3, 4)), rng.standard_normal((4, 2))], "b": rng.standard_normal(4)}

    def loss(p, x):
        h = np.tanh(x @ p["w"][0] + p["b"])
        return spmd.psum(np.sum((h @ p["w"][1]) ** 2) + np.sum(p["b"] * h), "x")

    with spmd.ledger() as log:
        spmd.value_and_grad(spmd.map(loss, (P(), P("x")), P()))(params, rng.standard_normal((5, 3)))
    assert sums(log, "x") == 1 + 3
    assert dict(log.verbs) == {"all_reduce": 2}  # the loss; all gradients in one bucket
    assert sums(log, "y") == 0


def test_gradients_of_layers_travel_in_one_bucket(grid):
    """Nothing stands between a parameter and its sum: no cast, no reshape, that the sum would have to wait for."""
    rng = np.random.default_rng(4)
    shapes = {"w": (3, 4), "b": (4,), "scale": (4,), "shift": (4,), "v": (4, 2), "c": (2,)}
    params = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    x, labels = rng.standard_normal((6, 3)), rng.integers(0, 2, 6)

    def loss(p, x, labels, **options):
        h = F.layer_norm(F.bias_act(x @ p["w"], p["b"], "gelu"), p["scale"], p["shift"])
        return F.softmax_cross_entropy(h @ p["v"] + p["c"], labels, reduction="mean", **options)

    mapped = spmd.map(partial(loss, batch_axis_name="x"), (P(), P("x"), P("x")), P())
    with spmd.ledger() as log:
        value, grads = spmd.value_and_grad(mapped)(params, x, labels)
    assert dict(log.verbs) == {"all_reduce": 2}  # the loss; all gradients
    want, serial = spmd.autodiff.value_and_grad(loss)(params, x, labels)
    near(value, want)
    for name in shapes:
        near(grads[name], serial[name])


def test_sums_of_gradients_are_written_over_terms_that_nobody_has(scheduler):
    """What a backward function keeps of a gradient, or gives to two parameters, stays as it was."""
    mesh = spmd.Mesh(x=3, transport="local", scheduler=scheduler)
    rng = np.random.default_rng(5)
    w, v, u, x = (rng.standard_normal(shape) for shape in ((7, 5), (5,), (5,), (6, 7)))
    kept: dict[int, np.ndarray] = {}

    @spmd.custom_vjp
    def both(a, b):
        return a + 2 * b

    def backward(_, g):
        g = np.array(spmd.block(g)) if type(g) is not np.ndarray else g.copy()
        kept[spmd.worker_index("x")] = g
        return g, g

    both.defvjp(lambda a, b: (a + 2 * b, None), backward)

    def loss(w, v, u, x):
        return spmd.psum(np.sum(np.tanh(x @ w) * both(spmd.pvary(v, "x"), spmd.pvary(u, "x"))), "x")

    grads = spmd.grad(spmd.map(loss, (P(), P(), P(), P("x")), P(), mesh=mesh), (0, 1, 2))(w, v, u, x)
    terms = [np.tanh(part @ w).sum(0) for part in np.split(x, 3)]
    near(grads[1], sum(terms))
    near(grads[2], sum(terms))
    near(grads[0], x.T @ ((1 - np.tanh(x @ w) ** 2) * (v + 2 * u)))
    for k, term in enumerate(terms):
        near(kept[k], term)


def test_a_map_leaves_no_cycles_behind(scheduler):
    """Else what a training step was given would stay until Python looks for them."""
    mesh = spmd.Mesh(x=2, transport="local", scheduler=scheduler)
    step = spmd.value_and_grad(
        spmd.map(lambda w, x: spmd.psum(np.sum(np.tanh(x @ w + w[0])), "x"), (P(), P("x")), P(), mesh=mesh)
    )
    w, x = np.ones((3, 2)), np.ones((4, 3))
    step(w, x)
    gc.collect()
    gc.disable()
    try:
        step(w, x)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_tensor_parallel_pair_takes_one_sum_each_way(grid):
    rng = np.random.default_rng(3)
    x, c, r = (rng.standard_normal(s) for s in ((5, 4), (4, 7), (7, 2)))
    pair = lambda x, c, r: np.sum(spmd.psum(np.tanh(x @ c) @ r, "y") ** 2)
    with spmd.ledger() as log:
        g = spmd.grad(spmd.map(pair, (P(), P(None, "y"), P("y")), P()), (0, 1, 2))(x, c, r)
    assert sums(log, "y") == 2
    assert log.verbs["all_reduce"] == 2
    for got, want in zip(
        g, spmd.autodiff.grad(lambda x, c, r: np.sum((np.tanh(x @ c) @ r) ** 2), (0, 1, 2))(x, c, r), strict=True
    ):
        near(got, want)


def test_a_sum_moves_nothing_backward(mesh):
    _, pull = spmd.vjp(spmd.map(lambda x: spmd.psum(np.sum(np.sin(x), 0), "x"), P("x"), P()), X)
    with spmd.ledger() as log:
        (g,) = pull(W)
    assert not log.verbs
    assert log.messages == log.bytes == 0
    near(g, np.cos(X) * W)


# Gradients in a body


def test_the_gradient_of_a_sum_of_squares_is_twice_the_block(mesh):
    square = lambda w: spmd.psum((w**2).sum(), "x")
    x = np.arange(7.0)  # uneven blocks
    near(spmd.map(lambda w: spmd.grad(square)(w), P("x"), P("x"))(x), 2 * x)
    near(spmd.map(lambda w: spmd.grad(lambda w: spmd.grad(square)(w).sum())(w), P("x"), P("x"))(x), np.full(7, 2.0))


def test_the_gradient_of_an_invariant_value_is_the_true_sum_at_every_call(mesh):
    def body(w, x):
        f = spmd.grad(lambda w: spmd.psum(np.sum(w * x * w), "x"))
        return f(w), f(w), f(w + 0), f(w)

    mapped = spmd.map(body, (P(), P("x")), P())
    for _ in range(3):
        for g in mapped(W, X):
            near(g, 2 * W * X.sum(0))


def test_of_a_varying_scalar_it_is_that_of_the_sum_over_workers(mesh):
    near(spmd.map(lambda w, x: spmd.grad(lambda w: np.sum(w * x))(w), (P(), P("x")), P())(W, X), X.sum(0))


def test_at_a_varied_value_it_is_the_share_of_the_worker(mesh):
    body = lambda w, x: spmd.grad(lambda w: np.sum(w * x))(spmd.pvary(w, "x"))
    near(spmd.map(body, (P(), P("x")), P("x"))(W, X), X.reshape(-1))


def test_gradients_nest(mesh):
    """Third powers, differentiated twice in the body, and once more from outside."""

    def second(w, x):
        cube = lambda w: spmd.psum(np.sum((w * x) ** 3), "x")
        return spmd.grad(lambda w: np.sum(spmd.grad(cube)(w)))(w)

    mapped = spmd.map(second, (P(), P("x")), P())
    near(mapped(W, X), 6 * W * (X**3).sum(0))
    near(spmd.grad(lambda w, x: np.sum(mapped(w, x) * W), (0, 1))(W, X)[0], 6 * W * (X**3).sum(0))
    near(spmd.grad(lambda x: np.sum(mapped(W, x) * W))(X), 18 * W * W * X**2)


def test_every_transformation_goes_through_a_map(mesh):
    loss = spmd.map(lambda w, x: spmd.psum(np.sum(np.sin(w * x)), "x"), (P(), P("x")), P())
    columns = spmd.map(lambda w, x: spmd.psum(w * x * x, "x")[0], (P(), P("x")), P())
    serial = lambda w, x: np.sum(np.sin(w * x))
    v = (W + 1, X - 2)
    near(spmd.jvp(loss, (W, X), v)[1], np.sum(np.cos(W * X) * (v[0] * X + W * v[1])))
    near(spmd.jacrev(columns)(W, X), np.diag((X * X).sum(0)))
    near(spmd.jacfwd(columns)(W, X), np.diag((X * X).sum(0)))
    near(spmd.jacrev(columns, 1)(W, X), np.einsum("j,ij,jk->jik", 2 * W, X, np.eye(3)))
    near(spmd.hessian(loss)(W, X), spmd.autodiff.hessian(serial)(W, X))
    for got, want in zip(spmd.hvp(loss, (W, X), v), spmd.autodiff.hvp(serial, (W, X), v), strict=True):
        near(got, want)


def test_every_transformation_goes_inside_a_body(mesh):
    def body(w, x):
        shifted = lambda x: spmd.shift(w * np.sin(x), "x")
        moved = spmd.jvp(shifted, (x,), (x * x,))[1]
        back = spmd.linear_transpose(lambda x: spmd.shift(w * x, "x"), x)(x)[0]
        rows = spmd.jacrev(lambda w: w * spmd.psum(x[0], "x"))(w)
        hessian = spmd.hessian(lambda w: spmd.psum(np.sum((w * x) ** 2), "x"))(w)
        return moved, back, rows, hessian

    moved, back, rows, hessian = spmd.map(body, (P(), P("x")), (P("x"), P("x"), P(), P()))(W, X)
    near(moved, np.roll(W * np.cos(X) * X * X, 1, 0))
    near(back, W * np.roll(X, -1, 0))
    near(rows, np.diag(X.sum(0)))
    near(hessian, np.diag(2 * (X * X).sum(0)))


def test_a_cotangent_is_brought_to_the_state_of_its_primal(mesh):
    def body(w, x):
        _, pull = spmd.vjp(lambda w: 2 * w, w)
        (more,) = pull(x[0])  # Varying, for an Invariant result: summed
        _, pull = spmd.vjp(lambda x: 3 * x, x)
        (less,) = pull(w[None])  # Invariant, for a Varying result: every worker's own
        return more, less

    more, less = spmd.map(body, (P(), P("x")), (P(), P("x")))(W, X)
    near(more, 2 * X.sum(0))
    near(less, np.tile(3 * W, (N, 1)))


def test_a_backward_function_that_gives_a_more_varying_cotangent_is_summed(mesh):
    @spmd.custom_vjp
    def scaled(w, x):
        return w * np.sum(x)

    scaled.defvjp(
        lambda w, x: (scaled(w, x), (w, x)), lambda res, g: (g * np.sum(res[1]), np.sum(g * res[0]) + 0 * res[1])
    )
    loss = lambda w, x: spmd.psum(np.sum(scaled(w, x)), "x")
    specs = (P(), P("x"))
    outside = spmd.grad(spmd.map(loss, specs, P()), (0, 1))(W, X)
    inside = spmd.map(lambda w, x: spmd.grad(loss, (0, 1))(w, x), specs, specs)(W, X)
    for gw, gx in (outside, inside):
        near(gw, np.full(3, X.sum()))
        near(gx, np.full((N, 3), W.sum()))


def test_a_checkpoint_region_varies_once_and_computes_again(mesh):
    def loss(w, x):
        region = lambda w, x: spmd.psum(np.sum(np.sin(w * x) * w + w), "x") * w
        return np.sum(spmd.checkpoint(region)(w, x) + w)

    plain = lambda w, x: np.sum(spmd.psum(np.sum(np.sin(w * x) * w + w), "x") * w + w)
    specs = (P(), P("x"))
    with spmd.ledger() as log:
        g = spmd.grad(spmd.map(loss, specs, P()), (0, 1))(W, X)
    assert sums(log, "x") == 3  # forward, forward again, and the gradient of w
    for a, b in zip(g, spmd.grad(spmd.map(plain, specs, P()), (0, 1))(W, X), strict=True):
        near(a, b.numpy() if isinstance(b, spmd.PartitionedArray) else b)


# What varies


MIXED = {
    "arithmetic": lambda w, x: w + x,
    "comparison": lambda w, x: w > x,
    "mask": lambda w, x: np.where(x > 0, w, -w),
    "boolean factor": lambda w, x: w * (x > 0),
    "mask as index": lambda w, x: np.sum(w[x > 0]),
    "place of the largest": lambda w, x: w[np.argmax(x)],
    "order": lambda w, x: w[np.argsort(x)],
    "take": lambda w, x: np.take(w, np.argmin(x)),
    "take_along_axis": lambda w, x: np.take_along_axis(w, np.argsort(x), 0),
    "searchsorted": lambda w, x: np.searchsorted(np.sort(w), x),
    "integer": lambda w, x: w * np.sum(x > 0),
    "rounded": lambda w, x: np.round(x) * w,
    "cast": lambda w, x: w + x.astype(np.int64),
    "bound": lambda w, x: np.clip(w, x, 9.0),
    "keyword bound": lambda w, x: np.clip(w, min=x),
    "condition": lambda w, x: np.select([x > 0], [w], 0.0),
    "concatenate": lambda w, x: np.concatenate([w, x]),
    "stack": lambda w, x: np.stack([w, w, x]),
    "einsum": lambda w, x: np.einsum("i,i->", w, x),
    "update": lambda w, x: w.at[0].set(x[0]),
    "update at": lambda w, x: spmd.at(w)[np.argmax(x)].set(1.0),
    "update a bare array": lambda w, x: spmd.at(np.zeros(3))[np.argmax(x)].set(1.0),
    "bare data": lambda w, x: np.ones(3)[spmd.block(np.zeros(3, int))] * x,
    "zeros times": lambda w, x: w * 0 * x,
    "zeros_like": lambda w, x: w + np.zeros_like(x),
    "place": lambda w, x: w * spmd.axis_index("x"),
    "one-hot": lambda w, x: w * (np.arange(3) == spmd.axis_index("x")),
    "slice": lambda w, x: spmd.pslice(np.concatenate([w, w[:1]]), "x"),
    "declared": lambda w, x: w * spmd.varying(1.0 + spmd.worker_index("x"), "x"),
    "number": lambda w, x: 2.0 * spmd.varying(3.0, "x"),
    "max of all": lambda w, x: np.max(x),
    "gathered": lambda w, x: spmd.all_gather(w, "x"),
    "moved": lambda w, x: spmd.shift(w, "x"),
    "nonzero": lambda w, x: w[np.nonzero(x == np.max(x))[0]],
    "floor": lambda w, x: w // (x * x + 1),
    "any": lambda w, x: np.any(x > 0) & (w > 0),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_comes_of_a_varying_value_is_varying(name):
    f = MIXED[name]

    def body(w, x):
        assert f(w, x[0]).state.varying == {"x"}
        result = []

        def traced(w, x):
            result.append(f(w, x[0]))
            assert result[0].state.varying == {"x"}
            return np.sum(w) + np.sum(x)

        spmd.grad(traced, (0, 1))(w, x)
        return f(w, x[0])

    with spmd.Mesh(x=N, transport="local"), pytest.raises(StateError, match="promised by out_specs P"):
        spmd.map(body, (P(), P("x")), P())(W, X)


INVARIANT = {
    "sum": lambda w, x: spmd.psum(x, "x"),
    "mean": lambda w, x: spmd.pmean(x, "x"),
    "max": lambda w, x: spmd.pmax(x, "x") + spmd.pmin(x, "x"),
    "entries": lambda w, x: spmd.mean(x, "x") + spmd.max(x, "x", 0) - spmd.min(x, "x") + spmd.sum(x, "x"),
    "collected": lambda w, x: spmd.all_gather(x, "x", to="invariant"),
    "collected, tiled": lambda w, x: spmd.all_gather(x, "x", tiled=True, to="invarying"),
    "inner": lambda w, x: spmd.inner(x, w + x) + spmd.norm(x),
    "number": lambda w, x: w * spmd.psum(1, "x") + spmd.axis_size("x"),
    "size": lambda w, x: w * x.size,
    "root": lambda w, x: spmd.replicate(spmd.sum_reduce(x, "x", 2), "x", 2),
    "cast": lambda w, x: spmd.pcast(w, "x", to="invariant"),
}


@pytest.mark.parametrize("name", INVARIANT)
def test_what_is_made_one_value_is_invariant(name, mesh):
    def body(w, x):
        y = INVARIANT[name](w, x[0])
        assert not y.state.varying
        return y

    y = spmd.map(body, (P(), P("x")), P())(W, X)
    np.testing.assert_allclose(
        y.numpy(), spmd.map(body_without_states(name), (P(), P("x")), P(), check=False)(W, X).numpy()
    )


def body_without_states(name):
    return lambda w, x: INVARIANT[name](w, x[0])


def test_states_along_other_axes_are_untouched(grid):
    def body(x):
        assert spmd.psum(x, "x").state.varying == {"y"}
        assert spmd.pmean(x, ("y", "x")).state.varying == set()
        assert spmd.all_gather(x, "y", to="invariant").state.varying == {"x"}
        return spmd.psum(x, "y")

    spmd.map(body, P("x", "y"), P("x"))(np.ones((2, 3)))


def test_a_varying_result_that_is_promised_invariant_is_an_error_before_any_number(mesh):
    made = []

    def body(w, x):
        made.append(1)
        return {"loss": np.sum(w * x), "w": w}

    with pytest.raises(StateError) as caught:
        made.append(spmd.map(body, (P(), P("x")), P())(W, X))
    text = str(caught.value)
    for word in ("spmd.map of body", "result['loss']", "'x'", "spmd.psum(x, 'x')", "spmd.mean", "all_gather"):
        assert word in text
    assert set(made) == {1}


def test_an_invariant_result_may_be_laid_out_over_an_axis(mesh):
    y = spmd.map(lambda w: w, P(), P("x"))(W)
    near(y, np.tile(W, N))
    near(spmd.grad(lambda w: np.sum(spmd.map(lambda w: w * w, P(), P("x"))(w)))(W), N * 2 * W)


# Reductions of what does not vary


@pytest.mark.host("looks at the arrays of NumPy in a body")
def test_means_and_extrema_of_an_invariant_array_are_the_array(mesh):
    def body(w):
        for f in (spmd.pmean, spmd.pmax, spmd.pmin):
            assert f(w, "x") is w
        near(spmd.block(spmd.mean(w, "x")), W.mean())
        near(spmd.block(spmd.max(w, "x", 0)), W.max())
        return w

    with spmd.ledger() as log:
        spmd.map(body, P(), P())(W)
    assert not log.verbs


def test_they_reduce_over_the_axes_that_vary(grid):
    with spmd.ledger() as log:
        y = spmd.map(lambda x: spmd.pmean(x, ("x", "y")), P("y"), P())(np.arange(6.0).reshape(3, 2))
    near(y, [[2, 3]])
    assert sums(log, "y") == 1


@pytest.mark.parametrize("check", [True, False])
def test_a_number_is_summed_over_all_workers(mesh, check):
    def body(x):
        n = spmd.psum(len(x), "x")
        return spmd.psum(np.sum(x), "x") / n, n, spmd.psum(1, "x"), spmd.psum(2.5, "x")

    with spmd.ledger() as log:
        mean, n, workers, total = spmd.map(body, P("x"), P(), check=check)(np.arange(7.0))
    assert (mean.item(), n.item(), workers.item(), total.item()) == (3.0, 7, 4, 10.0)
    assert log.operators["Sum"] == 4


def test_a_summed_number_stays_weakly_typed(mesh):
    y = spmd.map(lambda x: x / spmd.psum(1.0, "x"), P("x"), P("x"))(np.ones(4, np.float32))
    assert y.dtype == np.float32


def test_a_number_argument_stays_weakly_typed(mesh):
    f = spmd.map(lambda x, c: c * x + c, (P("x"), P()), P("x"))
    x = np.ones(4, np.float32)
    assert f(x, 0.5).dtype == np.float32
    value, pull = spmd.vjp(f, x, 0.5)
    assert value.dtype == np.float32
    g, c = pull(np.ones(4, np.float32))
    assert g.dtype == np.float32
    near(c, 8.0)


# Python numbers of arrays


KINDS = {"bool": bool, "int": int, "float": float, "range": range, "index": lambda x: [1, 2, 3][x]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_of_a_varying_value_is_refused(mesh, kind):
    with pytest.raises(StateError) as caught:
        spmd.map(lambda x: KINDS[kind](x[0]), P("x"), None)(np.arange(4))
    assert "Varying(x) array int64[]" in str(caught.value)
    assert "spmd.worker_index" in str(caught.value)


def test_a_branch_on_a_varying_value_is_refused(mesh):
    with pytest.raises(StateError, match=r"bool\(\)"):
        spmd.map(lambda x: x if x[0] > 0 else -x, P("x"), P("x"))(np.arange(4.0))


def test_of_an_invariant_value_it_is_the_number(mesh):
    def body(x):
        i = spmd.psum(x[0], "x")
        assert (bool(i), int(i), float(i), [*range(i)]) == (True, 6, 6.0, list(range(6)))
        assert (complex(i), i.item(), [*"abcdefg"][i]) == (6, 6, "g")
        assert f"{i:.1f}" == "6.0"
        return i

    assert spmd.map(body, P("x"), P())(np.arange(4)).item() == 6


@pytest.mark.parametrize("kind", ["bool", "int", "float"])
def test_of_a_differentiated_value_it_is_refused(mesh, kind):
    body = lambda w: spmd.grad(lambda w: w * KINDS[kind](w))(w)
    with pytest.raises(TracedConversionError, match="stop_gradient"):
        spmd.map(body, P(), P())(1.0)


# Places, bare data


def test_a_workers_place(grid):
    def body():
        i, j = spmd.worker_index("x"), spmd.worker_index("y")
        assert type(i) is int
        assert spmd.worker_index(("x", "y")) == 3 * i + j
        assert spmd.worker_index(("y", "x")) == 2 * j + i
        assert spmd.axis_index(("y", "x")).state.varying == {"x", "y"}
        assert spmd.block(spmd.axis_index(("y", "x"))) == 2 * j + i
        assert spmd.axis_size(("x", "y")) == 6
        assert spmd.is_main() == (i == j == 0)
        return spmd.varying(np.full((1, 1), 10 * i + j), ("x", "y"))

    np.testing.assert_array_equal(spmd.map(body, (), P("x", "y"))(), [[0, 1, 2], [10, 11, 12]])


@pytest.mark.host("arrays of a device have no flag that forbids writing")
def test_a_block_is_bare_and_read_only(mesh):
    def body(x):
        b = spmd.block(x)
        assert type(b) is np.ndarray
        with pytest.raises(ValueError, match="read-only"):
            b[0] = 1
        with pytest.raises(StateError, match="stop_gradient"):
            spmd.grad(lambda x: np.sum(x * spmd.block(x)))(x)
        return spmd.grad(lambda x: np.sum(x * spmd.block(spmd.stop_gradient(x))))(x)

    near(spmd.map(body, P("x"), P("x"))(X), X)


def test_declared_data_is_copied(mesh):
    def body():
        mine = np.full(1, float(spmd.worker_index("x")))
        x = spmd.varying(mine, "x")
        mine[0] = -1
        return x

    near(spmd.map(body, (), P("x"))(), range(N))


@pytest.mark.host("numbers on a device are not compared: that would wait for it")
def test_the_backstop_compares_what_is_typed_invariant(mesh):
    lie = lambda w: w * (1.0 + spmd.worker_index("x"))
    with pytest.raises(StateError) as caught:
        spmd.map(lie, P(), P())(W)
    for word in ("differs between worker 0 (x=0) and worker 1 (x=1)", "spmd.varying", "result"):
        assert word in str(caught.value)
    near(spmd.map(lie, P(), P(), check=False)(W), W)  # worker 0's
    big = np.ones(1 << 17)
    with pytest.raises(StateError, match="differs between"):
        spmd.map(lambda w: w * (1.0 + spmd.worker_index("x")), P(), P())(big)


@pytest.mark.host("numbers on a device are not compared: that would wait for it")
def test_the_backstop_compares_gradients(mesh):
    lie = lambda w, x: spmd.psum(np.sum(x), "x") + np.sum(w * spmd.worker_index("x"))
    quiet = lambda w, x: spmd.psum(np.sum(x), "x") + np.sum(0 * w)

    @spmd.custom_vjp
    def wrong(w):
        return w

    wrong.defvjp(lambda w: (w, None), lambda _, g: (g * (1.0 + spmd.worker_index("x")),))
    with pytest.raises(StateError, match="differs between"):
        spmd.map(lie, (P(), P("x")), P())(W, X)
    with pytest.raises(StateError, match="the gradient of w"):
        spmd.grad(spmd.map(lambda w, x: quiet(wrong(w), x) + np.sum(wrong(w)), (P(), P("x")), P()))(W, X)


@pytest.mark.host("arrays of a device have no flag that forbids writing")
def test_without_checks_bodies_see_bare_read_only_arrays(mesh):
    def body(w, x):
        assert type(w) is type(x) is np.ndarray
        assert not w.flags.writeable
        assert not x.flags.writeable
        assert type(spmd.axis_index("x") * x) is np.ndarray
        return spmd.psum(x * w, "x")

    near(spmd.map(body, (P(), P("x")), P(), check=False)(W, X), (X * W).sum(0)[None])


def test_without_checks_gradients_in_a_body_are_refused(mesh):
    f = spmd.map(lambda w: spmd.grad(lambda w: np.sum(w * w))(w), P(), P(), check=False)
    with pytest.raises(DifferentiationError, match="check=True"):
        f(W)
    near(spmd.grad(lambda w: np.sum(spmd.map(lambda w: w * w, P(), P(), check=False)(w)))(W), 2 * W)


# Rooted values


@pytest.mark.parametrize("root", range(N))
def test_rooted_values_and_their_gradients(mesh, root):
    def body(w, x):
        def parts(w, x):
            one = spmd.replicate(spmd.keep(w, "x", root), "x", root)
            own = spmd.broadcast(spmd.keep(w, "x", root), "x", root)
            total = spmd.replicate(spmd.sum_reduce(x, "x", root), "x", root)
            spread = spmd.broadcast(spmd.sum_reduce(x, "x", root), "x", root)
            assert not one.state.varying | total.state.varying
            assert own.state.varying == spread.state.varying == {"x"}
            return one, own, total, spread

        one, own, total, spread = parts(w, x)

        def loss(w, x):
            one, own, total, spread = parts(w, x)
            i = 1 + spmd.axis_index("x")
            return np.sum(one) + np.sum(2 * total) + spmd.psum(i * (np.sum(own) + np.sum(3 * spread)), "x")

        gw, gx = spmd.grad(loss, (0, 1))(w, x)
        return one, own[None], total, spread, gw, gx

    out = (P(), P("x"), P(), P("x"), P(), P("x"))
    one, own, total, spread, gw, gx = spmd.map(body, (P(), P("x")), out)(W, X)
    near(one, W)
    near(own, np.tile(W, (N, 1)))
    near(total, X.sum(0)[None])
    near(spread, np.tile(X.sum(0), (N, 1)))
    near(gw, np.full(3, 1.0 + 10))
    near(gx, np.full((N, 3), 2 + 3 * 10.0))


def test_a_root_along_two_axes(grid):
    """Place 5 along (y, x) is (y=2, x=1)."""

    def body(x):
        total = spmd.sum_reduce(x, ("y", "x"), 5)
        assert total.block.shape == ((1, 1) if spmd.worker_index(("y", "x")) == 5 else (0,))
        return spmd.replicate(total, ("y", "x"), 5)

    near(spmd.map(body, P("x", "y"), P())(np.arange(6.0).reshape(2, 3)), [[15]])


def test_rooted_inner_products_count_the_root(mesh):
    def body(w, x):
        r = spmd.keep(w, "x", 2)
        return spmd.inner(r, r), spmd.inner(spmd.sum_reduce(x, "x"), spmd.sum_reduce(x, "x"))

    one, other = spmd.map(body, (P(), P("x")), P())(W, X)
    near(one, W @ W)
    near(other, X.sum(0) @ X.sum(0))


# Complex numbers and the inner product


Z = X + 1j * np.random.default_rng(2).standard_normal((N, 3))


def test_complex_gradients_are_those_of_jax(mesh):
    modulus = lambda z: spmd.psum(np.sum(np.abs(z) ** 2), "x")
    near(spmd.grad(spmd.map(modulus, P("x"), P()))(Z), 2 * np.conj(Z))
    near(spmd.map(lambda z: spmd.grad(modulus)(z), P("x"), P("x"))(Z), 2 * np.conj(Z))
    near(
        spmd.map(lambda z: spmd.grad(lambda z: spmd.psum(np.sum(z * z), "x"), holomorphic=True)(z), P("x"), P("x"))(Z),
        2 * Z,
    )
    w = Z[0] + 1
    body = lambda w, z: spmd.psum(np.sum(np.real(w * z)), "x")
    near(spmd.grad(spmd.map(body, (P(), P("x")), P()))(w, Z), Z.sum(0))
    real = spmd.grad(spmd.map(lambda w, z: spmd.psum(np.sum(np.real(w * z)), "x"), (P(), P("x")), P()))(W, Z)
    assert real.dtype == np.float64
    near(real, Z.real.sum(0))


def test_the_inner_product_counts_invariant_values_once(mesh):
    w = Z[1]

    def body(w, z):
        return (
            spmd.inner(w, 2 * w),
            spmd.inner(z, 3j * z),
            spmd.inner({"a": w, "b": [z]}, {"a": w, "b": [z]}),
            spmd.norm([w, z]),
        )

    one, all_, tree, norm = spmd.map(body, (P(), P("x")), P())(w, Z)
    near(one, 2 * np.vdot(w, w))
    near(all_, 3j * np.vdot(Z, Z))
    near(tree, np.vdot(w, w) + np.vdot(Z, Z))
    near(norm, np.sqrt(np.vdot(w, w) + np.vdot(Z, Z)).real)
    assert norm.dtype == np.float64
    a, b = spmd.put(Z, P("x")), spmd.put(w, P())
    near(spmd.inner(a, 1j * a), 1j * np.vdot(Z, Z))
    near(spmd.inner({"a": a, "b": b}, {"a": a, "b": b}), np.vdot(Z, Z) + np.vdot(w, w))
    near(spmd.inner(Z, a), np.vdot(Z, Z))
    near(spmd.norm(a), np.linalg.norm(Z))


def test_the_inner_product_of_different_states_and_its_gradient(grid):
    a, b, c = (np.random.default_rng(k).standard_normal((4, 6)) for k in range(3))
    f = spmd.map(lambda a, b, c: spmd.inner([a, b], [2 * a, b]) + spmd.inner(c, c), (P("x"), P("x", "y"), P()), P())
    near(f(a, b, c), 2 * np.sum(a * a) + np.sum(b * b) + np.sum(c * c))
    for got, want in zip(spmd.grad(f, (0, 1, 2))(a, b, c), (4 * a, 2 * b, 2 * c), strict=True):
        near(got, want)
    with spmd.ledger() as log:
        f(a, b, c)
    assert log.operators["Sum"] == 2  # one per set of axes


# Immutability


def test_arrays_are_immutable(mesh):
    def body(x):
        with pytest.raises(StateError, match=r"x = x.at\[i\].set\(v\)"):
            x[0] = 1
        with pytest.raises(StateError, match="immutable"):
            np.add(x, 1, out=x)
        h = x
        h += 1
        h *= 2
        return x, h, x.at[0].set(5.0), x.at[0].add(5.0), spmd.at(x)[:, 1].set(x[:, 0])

    same, h, put, add, column = spmd.map(body, P("x"), P("x"))(X)
    near(same, X)
    near(h, 2 * (X + 1))
    near(put, np.full((N, 3), 5.0))
    near(add, X + 5)
    near(column, X[:, [0, 0, 2]])


def test_updates_are_differentiated(mesh):
    def loss(w, x):
        y = x.at[:, 0].set(w[0] * x[:, 1]).at[:, 2].add(w[2])
        return spmd.psum(np.sum(y * y), "x")

    def serial(w, x):
        return np.sum((w[0] * x[:, 1]) ** 2) + np.sum(x[:, 1] ** 2) + np.sum((x[:, 2] + w[2]) ** 2)

    got = spmd.grad(spmd.map(loss, (P(), P("x")), P()), (0, 1))(W, X)
    for a, b in zip(got, spmd.autodiff.grad(serial, (0, 1))(W, X), strict=True):
        near(a, b)


@pytest.mark.host("arrays of a device have no flag that forbids writing")
@pytest.mark.parametrize("check", [True, False])
def test_nobody_writes_through(mesh, check):
    """Neither the owner of an argument, after the call, nor a body."""
    mine = X.copy()
    kept = spmd.map(lambda x: x, P("x"), P("x"), check=check)(mine)
    laid_out = spmd.put(mine, P("x"))
    mine[:] = 0
    near(kept, X)
    near(laid_out, X)
    with pytest.raises(ValueError, match="read-only"):
        kept.numpy()[0] = 1
    with pytest.raises((ValueError, StateError)):
        spmd.map(lambda x: x.__setitem__(0, 1.0), P("x"), None, check=check)(X)


def test_a_returned_scratch_array_is_copied(mesh):
    scratch = [np.zeros(1) for _ in range(N)]

    def body():
        k = spmd.worker_index("x")
        scratch[k][0] += k
        return spmd.varying(scratch[k], "x") if spmd.axis_size("x") else None

    f = spmd.map(body, (), P("x"))
    first = f()
    f()
    near(first, range(N))


# The two schedulers give the same bits


def test_schedulers_agree_bit_for_bit():
    rng = np.random.default_rng(4)
    x, w = rng.standard_normal((50, 30)), rng.standard_normal((30, 20))

    def loss(w, x):
        h = np.tanh(x @ w)
        return spmd.psum(np.sum(h * spmd.shift(h[:1], "x")), "x") + spmd.mean(h, "x")

    results = []
    for scheduler in ("lockstep", "threads", "auto", "auto"):
        with spmd.Mesh(x=4, transport="local", scheduler=scheduler):
            value, (gw, gx) = spmd.value_and_grad(spmd.map(loss, (P(), P("x")), P()), (0, 1))(w, x)
            results.append((value.item(), gw.tobytes(), gx.tobytes()))
    assert all(r == results[0] for r in results)


# Functions that return several arrays


@pytest.mark.parametrize("name", ["broadcast_arrays", "meshgrid"])
def test_results_vary_alike_whether_differentiated_or_not(name):
    """An Invariant argument beside a Varying one gives a Varying result: its shape follows the block."""

    def body(a, w):
        first, second = np.broadcast_arrays(a, w) if name == "broadcast_arrays" else np.meshgrid(a[:, 0], w[0])
        return spmd.psum(np.sum(first * 1.0) + np.sum(second * second), "x")

    def alone(a, w):
        return np.sum(np.broadcast_arrays(a, w)[1])

    a, w = np.arange(6.0).reshape(3, 2), np.ones((1, 2))
    with spmd.Mesh(x=2):
        f = spmd.map(body, in_specs=(P("x"), P()), out_specs=P())
        value, gradient = spmd.value_and_grad(f, 1)(a, w)
        assert value == f(a, w)
        for k in range(2):
            moved = w + 1e-6 * (np.arange(2) == k)
            np.testing.assert_allclose((f(a, moved) - value) / 1e-6, gradient[0, k], rtol=1e-4)
        promised = spmd.map(alone, in_specs=(P("x"), P()), out_specs=P())
        for run in (promised, spmd.grad(promised, 1)):
            with pytest.raises(StateError, match="promised"):
                run(a, w)
