"""spmd.map: how arguments and results pass, the forms of the call, and gradients from outside."""

from __future__ import annotations

from collections import namedtuple
from types import MethodType, SimpleNamespace

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.autodiff import Array
from spmd.mapped_body import MappedBody

X = np.random.default_rng(1).normal(size=(7, 4))
W = np.random.default_rng(2).normal(size=4)
Y = np.random.default_rng(3).normal(size=7)
ROWS = P("x")
MESHES = [{"x": 1}, {"x": 3}, {"x": 2, "y": 2}, {"y": 2, "x": 4}, {"x": 8}]


@pytest.fixture(params=MESHES, ids=str)
def mesh(request):
    with spmd.Mesh(**request.param) as m:
        yield m


@pytest.fixture
def four():
    with spmd.Mesh(x=2, y=2) as m:
        yield m


def equal(x, expected) -> None:
    np.testing.assert_array_equal(np.asarray(x), expected)


def close(x, expected, rtol: float = 1e-12) -> None:
    expected = np.asarray(expected)
    assert np.asarray(x).dtype == expected.dtype
    np.testing.assert_allclose(np.asarray(x), expected, rtol=rtol, atol=rtol * np.max(np.abs(expected), initial=1.0))


def double(x):
    """Twice x."""
    return 2 * x


# The forms of the call


def test_as_a_function_a_decorator_and_a_method(four):
    @spmd.map(in_specs=ROWS, out_specs=ROWS)
    def decorated(x):
        return 2 * x

    @four.map(in_specs=ROWS, out_specs=ROWS)
    def bound(x):
        return 2 * x

    for mapped in (
        spmd.map(double, ROWS, ROWS),
        spmd.map(double, in_specs=(ROWS,), out_specs=ROWS, mesh=four),
        spmd.map(double, [ROWS], ROWS),
        spmd.map(double, {"x": ROWS}, ROWS, check=False),
        four.map(double, ROWS, ROWS),
        four.map(double, in_specs=ROWS, out_specs=ROWS, check=False),
        decorated,
        bound,
    ):
        equal(mapped(X), 2 * X)
        equal(mapped(x=X), 2 * X)


def test_a_mapped_function_keeps_its_name_and_its_words():
    mapped = spmd.map(double, ROWS, P("x", None))
    assert mapped.__name__ == "double"
    assert mapped.__doc__ == "Twice x."
    assert repr(mapped) == "spmd.map of double (P('x') -> P('x', None))"


def test_the_mesh_is_looked_up_at_the_call():
    size = spmd.map(lambda: spmd.axis_size("x"), (), None)
    outer, inner = spmd.Mesh(x=2), spmd.Mesh(x=3)
    with outer:
        assert size() == 2
        with inner:
            assert size() == 3
            assert spmd.map(size.f, (), None, mesh=outer)() == 2
            assert outer.map(size.f, (), None)() == 2
            with outer:
                assert size() == 2
            with pytest.raises(ZeroDivisionError), outer:
                spmd.map(lambda: 1 // 0, (), None)()
            assert size() == 3
        assert size() == 2
    assert spmd.map(size.f, (), None, mesh=inner)() == 3


def test_a_mesh_in_a_with_block_again_and_again():
    mesh = spmd.Mesh(x=2)
    for _ in range(3):
        with mesh, mesh:
            equal(spmd.map(double, ROWS, ROWS)(X), 2 * X)


def test_bodies_that_are_not_plain_functions(four):
    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, x):
            return self.factor * x

        def method(self, x):
            return self.factor * x

    equal(spmd.map(Scale(3), ROWS, ROWS)(X), 3 * X)
    equal(spmd.map(Scale(3).method, ROWS, ROWS)(X), 3 * X)
    equal(spmd.map(np.negative, ROWS, ROWS)(X), -X)
    equal(spmd.map(lambda *xs: sum(xs), (ROWS, ROWS, ROWS), ROWS)(X, X, X), 3 * X)
    equal(spmd.map(lambda **xs: xs["a"] - xs["b"], {"a": ROWS, "b": ROWS}, ROWS)(b=X, a=2 * X), X)


# Arguments


Pair = namedtuple("Pair", "w b")


def test_a_spec_stands_for_a_whole_tree(four):
    tree = {"layers": [Pair(X, W), Pair(2 * X, 2 * W)], "scale": 0.5}

    shapes = {}

    def body(p, x):
        shapes[spmd.worker_index(("x", "y"))] = [q.w.shape for q in p["layers"]]
        return {"sum": spmd.sum(x * p["scale"], "x", axis=0), "layers": p["layers"]}, len(p["layers"])

    specs = {"layers": [Pair(P("x"), P()), P()], "scale": P()}
    out, count = spmd.map(body, (specs, P("x", "y")), ({"sum": P("y"), "layers": [Pair(P("x"), P()), P()]}, None))(
        tree, X
    )
    assert count == 2
    assert shapes == {w: [(rows, 4), (7, 4)] for w, rows in enumerate((4, 4, 3, 3))}
    assert type(out["layers"][0]) is Pair
    equal(out["layers"][0].w, X)
    equal(out["layers"][1].b, 2 * W)
    assert out["layers"][0].w.spec == P("x")
    assert out["layers"][1].w.spec == P()
    close(out["sum"], 0.5 * X.sum(0))


def test_one_spec_for_all_arguments(four):
    equal(spmd.map(lambda a, b: a + b, ROWS, ROWS)(X, 2 * X), 3 * X)
    equal(spmd.map(lambda a, b=0.0: a + b, P(), P())(X), X)
    equal(spmd.map(lambda a, *, b: a + b["k"], ROWS, ROWS)(X, b={"k": X}), 2 * X)


def test_none_passes_an_argument_as_it_is(four):
    thing, table = SimpleNamespace(factor=3), {"mode": "fast", "none": None}
    seen = []

    def body(x, thing, table, f, flag=True):
        seen.append((thing, table, f, flag))
        return f(x, thing.factor) if flag else x

    mapped = spmd.map(body, (ROWS, None, {"mode": None, "none": None}, None, None), ROWS)
    equal(mapped(X, thing, table, np.multiply), 3 * X)
    equal(mapped(X, thing, table, np.multiply, False), X)
    assert all(t is thing and d == table and f is np.multiply for t, d, f, _ in seen)
    assert [flag for *_, flag in seen] == [True] * 4 + [False] * 4
    bare = np.ones(7)
    same = spmd.map(lambda x, a: spmd.pvary(x, "x") * (type(a) is np.ndarray and a is bare), (P(), None), ROWS)
    equal(same(W, bare), np.concatenate([W, W]))


def test_a_none_among_arrays_needs_no_spec_of_its_own(four):
    out = spmd.map(lambda p: (p[0], p[1]), ROWS, ROWS)((X, None))
    equal(out[0], X)
    assert out[1] is None


def test_keyword_arguments_take_specs_by_name(four):
    def body(a, b, *, c, d=1.0):
        return spmd.sum(a, "x") * b.sum() + spmd.sum(c, "y") * d

    expected = X.sum() * W.sum() + Y.sum() * 2.0
    for specs in (
        {"a": ROWS, "b": P(), "c": P("y"), "d": P()},
        {"a": ROWS, "b": P(), "c": P("y"), "d": None},
    ):
        for call in (
            lambda f: f(X, W, c=Y, d=2.0),
            lambda f: f(X, b=W, c=Y, d=2.0),
            lambda f: f(d=2.0, c=Y, b=W, a=X),
        ):
            close(call(spmd.map(body, specs, P())), expected)
    close(spmd.map(body, {"a": ROWS, "b": P(), "c": P("y")}, P())(X, W, c=Y), X.sum() * W.sum() + Y.sum())
    by_place = spmd.map(lambda a, b: spmd.sum(a, "x") * b.sum(), (ROWS, P()), P())
    close(by_place(X, b=W), X.sum() * W.sum())
    close(by_place(b=W, a=X), X.sum() * W.sum())


def test_a_default_needs_no_argument(four):
    mapped = spmd.map(lambda x, scale=2.0, shift=None: x * scale, (ROWS, P(), P()), ROWS)
    equal(mapped(X), 2 * X)
    equal(mapped(X, 3.0), 3 * X)
    equal(mapped(X, shift=X), 2 * X)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("number", [2, 0.5, 1j, True])
def test_python_numbers_stay_weakly_typed(four, check, number):
    a = X.astype(np.float32)
    seen = []
    mapped = spmd.map(lambda x, s: (seen.append(type(s)), x * s)[1], (ROWS, P()), ROWS, check=check)
    x = mapped(a, number)
    assert x.dtype == (a * number).dtype
    equal(x, a * number)
    assert set(seen) == {type(number)}
    assert mapped(a, np.float64(2)).dtype == np.float64
    assert spmd.map(lambda s: s * 2, P(), P(), check=check)(number).dtype == np.asarray(number * 2).dtype


def test_global_arrays_are_used_as_they_lie(four):
    x = spmd.put(X, ROWS)
    seen = {}

    def body(x):
        seen[spmd.worker_index(("x", "y"))] = spmd.block(x)
        return 2 * x

    mapped = spmd.map(body, ROWS, ROWS)
    with spmd.ledger() as log:
        out = mapped(x)
    assert not log.verbs
    equal(out, 2 * X)
    assert all(np.shares_memory(seen[w], x.blocks[w]) for w in range(4))
    assert out.mesh == four
    again = mapped(out)  # a chain of maps assembles nothing
    equal(again, 4 * X)
    assert all(np.shares_memory(seen[w], out.blocks[w]) for w in range(4))


@pytest.mark.parametrize("source", [P(), P("y"), P(None, "x"), P(("y", "x")), P("x", "y")], ids=str)
def test_global_arrays_are_brought_to_the_spec(four, source):
    with spmd.ledger() as log:
        out = spmd.map(double, ROWS, ROWS)(spmd.put(X, source))
    equal(out, 2 * X)
    assert out.spec == ROWS
    assert (log.messages == 0) == (source == P())


def test_uneven_blocks_are_balanced_before_a_body_sees_them(four):
    blocks = [X[:6], X[:6], X[6:], X[6:]]
    shapes = spmd.map(lambda x: spmd.all_gather(np.array(x.shape[0]), "x", to="invariant"), ROWS, P())
    equal(shapes(spmd.from_blocks(blocks, ROWS)), [4, 3])
    equal(shapes(X), [4, 3])


def test_results_may_be_uneven(four):
    out = spmd.map(lambda x: x[: 1 + 2 * spmd.worker_index("x")], ROWS, ROWS)(X)
    assert out.layout.cuts == ((1, 3), (4,))
    equal(out, np.concatenate([X[:1], X[4:7]]))
    empty = spmd.map(lambda x: x[:0], ROWS, ROWS)(X)
    assert empty.shape == (0, 4)
    equal(spmd.map(double, P("y"), P("y"))(out), 2 * np.concatenate([X[:1], X[4:7]]))


def test_the_order_of_axes_on_a_dimension(four):
    numbers = spmd.map(lambda x: 0 * x + spmd.axis_index(("x", "y")), P(("x", "y")), P(("x", "y")))
    equal(numbers(np.zeros(4, int)), [0, 1, 2, 3])
    swapped = spmd.map(lambda x: 0 * x + spmd.axis_index(("x", "y")), P(("y", "x")), P(("y", "x")))
    equal(swapped(np.zeros(4, int)), [0, 2, 1, 3])
    equal(spmd.map(lambda x: x, P(("x", "y")), P(("x", "y")))(X), X)
    equal(spmd.map(lambda x: x, P(("y", "x")), P(("y", "x")))(X), X)
    turned = spmd.map(lambda x: x, P(("x", "y")), P(("y", "x")))(np.arange(4))
    equal(turned, [0, 2, 1, 3])


@pytest.mark.parametrize("shape", [(1, 1), (0, 4), (2, 0), (9, 2)])
def test_arrays_shorter_than_the_mesh(shape):
    a = np.arange(float(np.prod(shape))).reshape(shape)
    with spmd.Mesh(x=4, y=2):
        equal(spmd.map(double, P("x", "y"), P("x", "y"))(a), 2 * a)
        equal(spmd.map(double, P(("x", "y")), P(("x", "y")))(a), 2 * a)
        close(spmd.map(lambda x: spmd.sum(x, ("x", "y")), P("x", "y"), P())(a), a.sum())


# Results


def test_any_object_may_be_returned(four):
    thing = {"name": "a", "list": [1, None, 2.5], "set": {3}}
    out = spmd.map(lambda x: (x, thing, "text"), ROWS, (ROWS, None, None))(X)
    assert out[1] is not None
    assert out[1:] == (thing, "text")
    equal(out[0], X)
    assert spmd.map(lambda x: thing, ROWS, None)(X) == thing
    assert spmd.map(lambda: None, (), None)() is None


@pytest.mark.host("looks at the arrays of NumPy in a body")
def test_an_invariant_array_may_pass_as_an_object(four):
    out = spmd.map(lambda x: {"total": spmd.sum(x, "x"), "bare": np.ones(2)}, ROWS, None)(X)
    assert type(out["total"]) is not Array
    close(out["total"], X.sum())
    equal(out["bare"], np.ones(2))


def test_results_of_every_kind(four):
    def body(x):
        return [spmd.psum(1, ("x", "y")), 2.5, np.float32(3), np.arange(3), True, 1j, spmd.psum(len(x), "x")]

    out = spmd.map(body, ROWS, P())(X)
    assert [o.dtype for o in out] == [np.int64, np.float64, np.float32, np.int64, bool, complex, np.int64]
    assert all(type(o) is spmd.PartitionedArray and o.spec == P() for o in out)
    assert [o.item() for o in out if not o.shape] == [4, 2.5, 3.0, True, 1j, 7]


def test_an_invariant_result_is_split_by_its_spec(four):
    """What is Invariant and promised Varying is each worker's own copy."""
    out = spmd.map(lambda w: w, P(), P("x"))(W)
    equal(out, np.concatenate([W, W]))


def test_bare_results_are_not_shared_with_the_body(four):
    kept = []

    def body(x):
        kept.append(np.zeros(2))
        return kept[-1]

    out = spmd.map(body, P(), P("x"))(X)
    for a in kept:
        a[:] = 1
    equal(out, np.zeros(4))


# check=True and check=False


@pytest.mark.host("looks at the arrays of NumPy in a body")
def test_bodies_see_states_or_bare_arrays(four):
    seen = {}

    def body(x, w):
        seen[spmd.worker_index(("x", "y"))] = (x, w)
        return x

    for check in (True, False):
        equal(spmd.map(body, (ROWS, P()), ROWS, check=check)(X, W), X)
        for x, w in seen.values():
            assert type(x) is type(w) is (Array if check else np.ndarray)
            if check:
                assert (str(x.state), str(w.state)) == ("Varying(x)", "Invariant")
            else:
                assert not x.flags.writeable
                assert not w.flags.writeable


def test_check_changes_no_value(mesh):
    def body(w, x, y):
        pred = np.tanh(x @ w)
        loss = spmd.mean((pred - y) ** 2, "x")
        return {
            "loss": loss,
            "pred": pred,
            "max": spmd.pmax(np.max(np.abs(w)) * loss, "x"),
            "k": spmd.axis_index("x") + x,
        }

    specs = {"loss": P(), "pred": ROWS, "max": P(), "k": ROWS}
    checked = spmd.map(body, (P(), ROWS, ROWS), specs)(W, X, Y)
    unchecked = spmd.map(body, (P(), ROWS, ROWS), specs, check=False)(W, X, Y)
    for name, a in checked.items():
        assert a.layout == unchecked[name].layout
        assert a.numpy().tobytes() == unchecked[name].numpy().tobytes()


def test_without_checks_a_promised_invariant_is_worker_0_s(four):
    mapped = spmd.map(lambda x: x + spmd.worker_index("y"), ROWS, ROWS, check=False)
    equal(mapped(X), X)
    assert float(spmd.map(lambda: spmd.worker_index(("x", "y")), (), P(), check=False)()) == 0


# Gradients from outside


def local_loss(w, x, y):
    return spmd.mean((np.tanh(x @ w) - y) ** 2, "x")


def whole_loss(w, x, y):
    return np.mean((np.tanh(x @ w) - y) ** 2)


def gradient_by_hand(w, x, y):
    t = np.tanh(x @ w)
    return x.T @ (2 * (t - y) * (1 - t * t)) / len(y)


LOSS = spmd.map(local_loss, (P(), ROWS, ROWS), P())


def test_gradients_by_hand(mesh):
    value, g = spmd.value_and_grad(LOSS)(W, X, Y)
    close(value, whole_loss(W, X, Y))
    close(g, gradient_by_hand(W, X, Y))
    t = np.tanh(X @ W)
    close(spmd.grad(LOSS, argnums=2)(W, X, Y), -2 * (t - Y) / 7)
    first, second = spmd.grad(LOSS, argnums=(1, 0))(W, X, Y)
    close(first, np.outer(2 * (t - Y) * (1 - t * t), W) / 7)
    close(second, gradient_by_hand(W, X, Y))


@pytest.mark.parametrize("spec", [P(), ROWS, P("y"), P(("y", "x"))], ids=str)
def test_a_gradient_has_the_layout_of_its_argument(four, spec):
    w, x = spmd.put(W, spec), spmd.put(X, P("y", "x"))
    y = spmd.from_blocks([Y[:1], Y[:1], Y[1:], Y[1:]], ROWS)
    value, grads = spmd.value_and_grad(LOSS, argnums=(0, 1, 2))(w, x, y)
    assert type(value) is spmd.PartitionedArray
    assert [g.layout for g in grads] == [w.layout, x.layout, y.layout]
    assert all(type(g) is spmd.PartitionedArray for g in grads)
    for g, bare in zip(grads, spmd.grad(LOSS, argnums=(0, 1, 2))(W, X, Y), strict=True):
        assert type(bare) is np.ndarray
        close(g, bare)
    equal(w - 0.5 * grads[0], W - 0.5 * grads[0].numpy())  # operands that are laid out alike


def test_gradients_of_trees(four):
    def body(p, batch):
        h = np.tanh(batch["x"] @ p["in"][0] + p["in"][1])
        return spmd.mean((h @ p["out"] - batch["y"]) ** 2, "x")

    rng = np.random.default_rng(5)
    p = {"in": [rng.normal(size=(4, 3)), rng.normal(size=3)], "out": rng.normal(size=3)}
    batch = {"x": X, "y": Y}
    loss = spmd.map(body, (P(), ROWS), P())
    grads = spmd.grad(loss)(p, batch)
    with spmd.Mesh(x=1):
        serial = spmd.grad(loss)(p, batch)
    assert grads.keys() == p.keys()
    assert type(grads["in"]) is list
    for g, s, a in zip((*grads["in"], grads["out"]), (*serial["in"], serial["out"]), (*p["in"], p["out"]), strict=True):
        assert g.shape == a.shape
        close(g, s)


def test_has_aux(four):
    def body(w, x, y):
        pred = np.tanh(x @ w)
        return spmd.mean((pred - y) ** 2, "x"), {"pred": pred, "note": "text", "count": spmd.psum(len(y), "x")}

    mapped = spmd.map(body, (P(), ROWS, ROWS), (P(), {"pred": ROWS, "note": None, "count": P()}))
    (value, aux), g = spmd.value_and_grad(mapped, has_aux=True)(W, X, Y)
    close(value, whole_loss(W, X, Y))
    close(g, gradient_by_hand(W, X, Y))
    assert type(aux["pred"]) is spmd.PartitionedArray
    close(aux["pred"], np.tanh(X @ W))
    assert aux["note"] == "text"
    assert int(aux["count"]) == 7


def test_pullbacks_may_be_called_many_times(four):
    w = spmd.put(W, ROWS)
    predict = spmd.map(lambda w, x: np.tanh(x @ w), (P(), ROWS), ROWS)
    out, pull = spmd.vjp(lambda w: predict(w, X), w)
    t = np.tanh(X @ W)
    close(out, t)
    assert out.spec == ROWS
    for ct in (Y, np.ones(7), spmd.put(Y, P("y")), spmd.put(Y, P())):
        (g,) = pull(ct)
        assert g.layout == w.layout
        close(g, X.T @ (np.asarray(ct) * (1 - t * t)))


def test_forward_mode_and_second_order(mesh):
    def loss(w):
        return LOSS(w, X, Y)

    def jacobian(f, w, h=1e-6):
        return np.stack([(f(w + h * e) - f(w - h * e)) / (2 * h) for e in np.eye(len(w))], -1)

    v = np.random.default_rng(7).normal(size=4)
    g = gradient_by_hand(W, X, Y)
    second = jacobian(lambda w: gradient_by_hand(w, X, Y), W)
    value, tangent = spmd.jvp(loss, (W,), (v,))
    close(value, whole_loss(W, X, Y))
    close(tangent, g @ v)
    close(spmd.jacrev(loss)(W), g)
    close(spmd.jacfwd(loss)(W), g)
    close(spmd.hvp(loss, (W,), (v,))[0], second @ v, rtol=1e-8)
    close(spmd.hessian(loss)(W), second, rtol=1e-8)
    close(spmd.jacfwd(spmd.grad(loss))(W), second, rtol=1e-8)
    close(spmd.jvp(spmd.grad(loss), (W,), (v,))[1], second @ v, rtol=1e-8)
    value, push = spmd.linearize(loss, W)
    close(value, whole_loss(W, X, Y))
    close(push(v), g @ v)
    close(push(2 * v), 2 * g @ v)


def test_jacobians_of_maps_to_arrays(four):
    predict = spmd.map(lambda w, x: np.tanh(x @ w), (P(), ROWS), ROWS)
    t = np.tanh(X @ W)
    expected = (1 - t * t)[:, None] * X
    close(spmd.jacrev(predict)(W, X), expected)
    close(spmd.jacfwd(predict)(W, X), expected)


@pytest.mark.parametrize("spec", [P(), ROWS, P("y")], ids=str)
def test_jacobians_at_global_arrays(four, spec):
    w = spmd.put(W, spec)
    predict = spmd.map(lambda w, x: np.tanh(x @ w), (P(), ROWS), ROWS)
    t = np.tanh(X @ W)
    expected = (1 - t * t)[:, None] * X
    rows = spmd.jacrev(predict)(w, X)
    close(rows, expected)
    assert rows.spec == P(None, *spec)
    columns = spmd.jacfwd(predict)(w, X)
    close(columns, expected)
    assert columns.spec == ROWS
    close(spmd.hessian(LOSS)(w, X, Y), spmd.hessian(LOSS)(W, X, Y))
    assert spmd.jacrev(LOSS)(w, X, Y).layout == w.layout


@pytest.mark.parametrize("spec", [P(), ROWS, P(None, "x"), P("y", "x")], ids=str)
def test_gradients_of_numpy_outside_of_maps(four, spec):
    """Broadcasting, sums and ufuncs of global arrays, and their gradients, keep layouts."""
    x = spmd.put(X, spec)
    column = spmd.put(X[:, :1], P(*[spec.dims[0] if spec.dims else None]))
    row = spmd.put(W, P(*[spec.dims[1] if len(spec.dims) > 1 else None]))

    def f(x, column, row):
        return np.sum(np.sin(x * column + row) * x**2) + np.sum(np.sum(x, axis=0) * row) + np.sum(x) ** 2

    grads = spmd.grad(f, argnums=(0, 1, 2))(x, column, row)
    for g, s, a in zip(grads, spmd.grad(f, argnums=(0, 1, 2))(X, X[:, :1], W), (x, column, row), strict=True):
        close(g, s)
        assert g.layout == a.layout
    g = spmd.grad(np.sum)(x)
    equal(g, np.ones_like(X))
    assert g.layout == x.layout


def test_second_order_with_global_arrays(four):
    w, v = spmd.put(W, P("y")), spmd.put(W[::-1], P("y"))
    x = spmd.put(X, P("x"))
    (hv,) = spmd.hvp(lambda w: LOSS(w, x, Y), (w,), (v,))
    assert hv.layout == w.layout
    close(hv, spmd.hvp(lambda w: LOSS(w, X, Y), (W,), (W[::-1],))[0])


def test_gradients_inside_and_outside_together(mesh):
    """A step of descent in the body, and the loss after it differentiated from outside: second derivatives."""

    def after_a_step(w, x, y, rate):
        g = spmd.grad(local_loss)(w, x, y)
        return local_loss(w - rate * g, x, y)

    mapped = spmd.map(after_a_step, (P(), ROWS, ROWS, P()), P())

    def outside(w, rate):
        return LOSS(w - rate * spmd.grad(lambda w: LOSS(w, X, Y))(w), X, Y)

    stepped = W - 0.3 * gradient_by_hand(W, X, Y)
    close(mapped(W, X, Y, 0.3), whole_loss(stepped, X, Y))
    inside = spmd.grad(mapped, argnums=(0, 3))(W, X, Y, 0.3)
    close(inside[1], -gradient_by_hand(stepped, X, Y) @ gradient_by_hand(W, X, Y))
    for a, b in zip(inside, spmd.grad(outside, argnums=(0, 1))(W, 0.3), strict=True):
        close(a, b)


def test_gradients_with_respect_to_numbers(mesh):
    mapped = spmd.map(lambda s, x: spmd.mean((s * x) ** 2, "x"), (P(), ROWS), P())
    close(spmd.grad(mapped)(3.0, X), 6 * np.mean(X**2))
    value, g = spmd.value_and_grad(mapped)(np.float32(3.0), X.astype(np.float32))
    assert value.dtype == np.float32
    assert np.asarray(g).dtype == np.float32
    narrow = spmd.map(lambda s, x: spmd.mean(s * x, "x"), (P(), ROWS), P())
    assert spmd.value_and_grad(narrow)(3.0, X.astype(np.float32))[0].dtype == np.float32
    tree = spmd.grad(lambda p: mapped(p["s"], X) * p["t"])({"s": 3.0, "t": 2.0})
    close(tree["s"], 12 * np.mean(X**2))
    close(tree["t"], 9 * np.mean(X**2))
    close(spmd.grad(spmd.grad(mapped))(3.0, X), 2 * np.mean(X**2))


def test_integers_and_booleans_ride_along(mesh):
    labels, mask = np.array([0, 3, 1, 2, 0, 1, 3]), Y > 0

    def body(w, x, labels, mask, power):
        assert labels.dtype == np.int64
        assert mask.dtype == bool
        picked = np.take_along_axis(x * w, labels[:, None], axis=1)[:, 0]
        return spmd.sum(np.where(mask, picked**power, 0.0), "x")

    mapped = spmd.map(body, (P(), ROWS, ROWS, ROWS, P()), P())
    expected = np.zeros(4)
    np.add.at(expected, labels[mask], 2 * (X[np.arange(7), labels] ** 2 * W[labels])[mask])
    close(spmd.grad(mapped)(W, X, labels, mask, 2), expected)


def test_maps_in_sequence_and_an_array_in_two_maps(mesh):
    """One array goes into two maps by two specs, and through NumPy in between; its cotangents add up."""
    columns = spmd.map(lambda w, x: spmd.psum(np.sin(x @ w), "x"), (ROWS, P(None, "x")), P())
    rows = spmd.map(lambda h, w, x: spmd.sum(h * np.cos(x @ w), "x"), (ROWS, P(), ROWS), P())

    def f(w):
        h = columns(w, X[:, :4])
        return rows(2 * h + 1, w * w, X) + np.sum(w**2)

    def serial(w, n):
        blocks = np.array_split(np.arange(4), n)
        h = sum(np.sin(X[:, b] @ w[b]) for b in blocks)
        return np.sum((2 * h + 1) * np.cos(X @ (w * w))) + np.sum(w**2)

    n = mesh.axes["x"]
    for w in (W, spmd.put(W, ROWS), spmd.put(W, P())):
        value, g = spmd.value_and_grad(f)(w)
        close(value, serial(W, n))
        close(g, spmd.grad(lambda w: serial(w, n))(W))
        if w is not W:
            assert g.layout == w.layout


def test_numpy_between_maps_keeps_layouts(four):
    w, x = spmd.put(W, ROWS), spmd.put(X, P("y"))

    def f(w):
        step = w - 0.1 * np.sin(w)
        return LOSS(step, x, Y) + 0.01 * np.sum(step**2)

    value, g = spmd.value_and_grad(f)(w)
    assert g.layout == w.layout
    s = W - 0.1 * np.sin(W)
    close(value, whole_loss(s, X, Y) + 0.01 * np.sum(s**2))
    close(g, (gradient_by_hand(s, X, Y) + 0.02 * s) * (1 - 0.1 * np.cos(W)))


def test_complex_arguments(mesh):
    """The gradient of |z|^2 is 2 conj(z), as in JAX."""
    z = X[:, 0] + 1j * X[:, 1]
    squares = spmd.map(lambda z: spmd.sum(np.abs(z) ** 2, "x"), ROWS, P())
    close(spmd.grad(squares)(z), 2 * np.conj(z))
    close(spmd.grad(squares)(spmd.put(z, ROWS)), 2 * np.conj(z))
    both = spmd.map(lambda a, z: spmd.sum(np.real(np.conj(a) * z * z), "x"), (P(), ROWS), P())
    a = 0.5 - 2j
    ga, gz = spmd.grad(both, argnums=(0, 1))(np.asarray(a), z)
    close(ga, np.sum(np.conj(z * z)))
    close(gz, 2 * np.conj(a) * z)
    _, pull = spmd.vjp(spmd.map(lambda z: np.exp(1j * z), ROWS, ROWS), z)
    close(pull(np.ones(7, complex))[0], 1j * np.exp(1j * z))


def in_one_run(f, argnums, args, monkeypatch):
    """Value and gradients of a map by itself, and of a function that calls it, which runs it forward and back apart."""
    run, ran = MappedBody.execute, []
    monkeypatch.setattr(MappedBody, "execute", lambda *a, **k: ran.append(a) or run(*a, **k))
    together = spmd.value_and_grad(f, argnums)(*args)
    assert len(ran) == 1
    apart = spmd.value_and_grad(lambda *a: f(*a), argnums)(*args)
    assert len(ran) == 3
    monkeypatch.undo()
    assert spmd.tree.structure(together) == spmd.tree.structure(apart)
    for x, y in zip(spmd.tree.leaves(together), spmd.tree.leaves(apart), strict=True):
        assert type(x) is type(y)
        assert x.dtype == y.dtype
        if type(x) is spmd.PartitionedArray:
            assert x.layout == y.layout
        equal(x, np.asarray(y))
    return together


@pytest.mark.parametrize("argnums", [0, 1, (0, 1), (1, 0), -3], ids=str)
@pytest.mark.parametrize("check", [True, False])
def test_value_and_gradients_take_one_run(mesh, argnums, check, monkeypatch):
    def local(params, x, label, note):
        assert note == "as it is"
        y = np.tanh(x @ params["w"] + params["b"])
        return spmd.psum(np.sum(np.where(label > 0, y, 2 * y) ** 2), "x")

    f = spmd.map(local, (P(), ROWS, ROWS, None), P(), check=check)
    params = spmd.put({"w": W, "b": np.ones(1)}, P())
    x = spmd.put(X, ROWS)
    args = (params, x, Y, "as it is")
    value, grads = in_one_run(f, argnums, args, monkeypatch)
    wanted = spmd.value_and_grad(lambda p, x: np.sum(np.where(Y > 0, 1, 4) * np.tanh(x @ p["w"] + p["b"]) ** 2), (0, 1))
    expected, (of_params, of_x) = wanted({"w": W, "b": np.ones(1)}, X)
    close(value, expected)
    chosen = [of_params, of_x]
    several = not isinstance(argnums, int)
    for n, g in zip(argnums if several else [argnums], grads if several else [grads], strict=True):
        for a, b in zip(spmd.tree.leaves(g), spmd.tree.leaves(chosen[n % 4]), strict=True):
            close(a, b)


@pytest.mark.parametrize("source", [P("y"), P(("y", "x")), P(None, "x"), P()], ids=str)
def test_one_run_brings_gradients_back_to_where_arguments_lie(four, source, monkeypatch):
    f = spmd.map(lambda w, x: spmd.psum(np.sum((x @ w) ** 2), "x"), (P(), ROWS), P())
    value, g = in_one_run(f, 1, (W, spmd.put(X, source)), monkeypatch)
    close(value, np.sum((X @ W) ** 2))
    assert g.layout == spmd.put(X, source).layout
    close(g, 2 * np.outer(X @ W, W))


def test_one_run_of_what_no_argument_reaches_of_complex_ones_and_of_keywords(four, monkeypatch):
    x, z = spmd.put(X, ROWS), spmd.put(X + 1j * X[::-1], ROWS)
    value, g = in_one_run(spmd.map(lambda x: np.float32(2), ROWS, P()), 0, (x,), monkeypatch)
    assert value.dtype == np.float32
    equal(g, np.zeros_like(X))
    value, g = in_one_run(spmd.map(lambda x: 2.5, ROWS, P()), 0, (x,), monkeypatch)
    equal(g, np.zeros_like(X))
    value, g = in_one_run(spmd.map(lambda z: spmd.psum(np.sum(abs(z) ** 2), "x"), ROWS, P()), 0, (z,), monkeypatch)
    close(g, 2 * np.conj(z.numpy()))
    f = spmd.map(lambda x, *, scale: spmd.psum(np.sum(x * scale), "x"), {"x": ROWS, "scale": P()}, P())
    equal(spmd.grad(f)(x, scale=3.0), np.full_like(X, 3))


def test_gradients_of_gradients_and_of_bare_arrays_run_apart(four):
    f = spmd.map(lambda w, x: spmd.psum(np.sum((x @ w) ** 3), "x"), (P(), ROWS), P())
    w, x = spmd.put(W, P()), spmd.put(X, ROWS)
    second = spmd.grad(lambda w: np.sum(spmd.grad(f)(w, x)))(w)
    close(second, 6 * X.T @ ((X @ W) * X.sum(axis=1)))
    g = spmd.grad(f)(W, X)
    assert type(g) is np.ndarray
    close(g, 3 * X.T @ (X @ W) ** 2)


@pytest.mark.parametrize(
    ("f", "specs"),
    [
        (lambda x: x, (ROWS, ROWS)),
        (lambda x: spmd.psum(x.sum(axis=0), "x"), (ROWS, P())),
        (lambda x: spmd.psum(np.sum(x > 0), "x"), (ROWS, P())),
        (lambda x: spmd.psum(np.sum(x + 1j), "x"), (ROWS, P())),
        (lambda x: (spmd.psum(np.sum(x), "x"),), (ROWS, P())),
        (lambda x: (), (ROWS, P())),
        (lambda x: np.sum(x), (ROWS, P())),
        (lambda x: None, (ROWS, P())),
        (lambda x: x["w"], (ROWS, P())),
    ],
)
def test_one_run_says_what_two_would_say(four, f, specs):
    """Of a function that has no gradient, and of one that fails."""
    mapped, x = spmd.map(f, *specs), spmd.put(X, ROWS)
    said = []
    for function in (mapped, named(mapped)):
        with pytest.raises((ValueError, TypeError, AttributeError, IndexError)) as caught:
            spmd.value_and_grad(function)(x)
        lines = str(caught.value).splitlines()
        said.append((type(caught.value), [line for line in lines if "got:" not in line]))  # an array, traced or not
    assert said[0] == said[1]


@pytest.mark.parametrize("here", [0, 1])
@pytest.mark.parametrize(
    "other", [lambda x: x * np.ones(2), lambda x: 3, lambda x: x * 1j], ids=["array", "integer", "complex"]
)
def test_workers_that_disagree_whether_there_is_a_gradient(here, other, scheduler):
    """The one that has none says so, whoever it is; nobody waits for it."""
    mesh = spmd.Mesh(x=2, transport="local", scheduler=scheduler)

    def local(x):
        total = spmd.psum(np.sum(x), "x")
        return other(total) if spmd.worker_index("x") == here else total

    f = mesh.map(local, P("x"), P(), check=False)
    with pytest.raises(TypeError, match="grad of local: result"):
        spmd.grad(f)(spmd.put(np.ones(3), P("x"), mesh))


def test_what_forwards_attributes_of_a_map_is_called_itself(four):
    class Twice:
        def __init__(self, f):
            self.f = f

        def __call__(self, *args):
            return 2 * self.f(*args)

        def __getattr__(self, name):
            return getattr(self.f, name)

    f = spmd.map(lambda x: spmd.psum(np.sum(x), "x"), ROWS, P())
    equal(spmd.grad(Twice(f))(spmd.put(X, ROWS)), np.full_like(X, 2))
    scaled = spmd.map(lambda w, x: spmd.psum(np.sum(w * x), "x"), (P(), ROWS), P())
    bound = MethodType(scaled, spmd.put(W, P()))
    equal(spmd.grad(bound)(spmd.put(X, ROWS)), np.broadcast_to(W, X.shape))


def test_one_run_of_an_argument_given_twice_and_of_trees_with_nothing(four, monkeypatch):
    x = spmd.put(X, ROWS)
    f = spmd.map(lambda x, y, none: spmd.psum(np.sum(x * y), "x"), (ROWS, ROWS, None), P())
    _, (g, h) = in_one_run(f, (0, 1), (x, x, ()), monkeypatch)
    equal(g, X)
    equal(h, X)
    f = spmd.map(lambda p: spmd.psum(np.sum(p["x"]), "x"), ROWS, P())
    grads = spmd.grad(f)({"x": x, "none": None, "empty": ()})
    equal(grads["x"], np.ones_like(X))
    assert grads["none"] is None
    assert grads["empty"] == ()


def named(f):
    """A function that calls f, under its name."""

    def calls(*args):
        return f(*args)

    calls.__name__ = f.__name__
    return calls


def test_a_gradient_that_nothing_reaches_is_zero(four):
    mapped = spmd.map(lambda w, x: spmd.sum(x, "x") + 0 * spmd.stop_gradient(w).sum(), (P(), ROWS), P())
    g = spmd.grad(mapped)(W, X)
    assert g.shape == W.shape
    assert not g.any()
    g = spmd.grad(mapped)(spmd.put(W, ROWS), X)
    assert g.spec == ROWS
    assert not g.numpy().any()


def test_gradients_through_results_that_are_not_used(four):
    two = spmd.map(lambda x: (spmd.sum(x**2, "x"), x**3, spmd.sum(np.exp(x), "x")), ROWS, (P(), ROWS, P()))
    close(spmd.grad(lambda x: two(x)[0])(X), 2 * X)
    close(spmd.grad(lambda x: np.sum(two(x)[1]))(X), 3 * X**2)


def test_gradients_with_uneven_results(four):
    cut = spmd.map(lambda x: x[: 1 + 2 * spmd.worker_index("x")] ** 2, ROWS, ROWS)
    expected = np.zeros_like(X)
    for rows in (slice(0, 1), slice(4, 7)):
        expected[rows] = 2 * X[rows]
    close(spmd.grad(lambda x: np.sum(cut(x)))(X), expected)
    close(spmd.grad(lambda x: np.sum(np.sin(cut(x))))(X), np.cos(X**2) * expected)
    # To second order the cotangents of the results, uneven too, are arguments of the map that is the derivative.
    kept = expected != 0
    second = np.where(kept, 2 * np.cos(X**2) - 4 * X**2 * np.sin(X**2), 0.0)
    for x in (X, spmd.put(X, ROWS), spmd.put(X, P("y"))):
        close(spmd.hvp(lambda x: np.sum(np.sin(cut(x))), (x,), (np.ones_like(X),))[0], second)


def test_check_false_under_a_gradient(mesh):
    """Differentiating from outside tracks states, whatever check says."""
    unchecked = spmd.map(local_loss, (P(), ROWS, ROWS), P(), check=False)
    close(spmd.grad(unchecked)(W, X, Y), gradient_by_hand(W, X, Y))
    close(spmd.hessian(unchecked)(W, X, Y), spmd.hessian(LOSS)(W, X, Y))


def test_a_chain_of_gradients_to_third_order(four):
    cubes = spmd.map(lambda w: spmd.sum(np.sin(w), "x"), ROWS, P())

    def f(s):
        return cubes(s * W)

    close(spmd.grad(f)(0.7), np.sum(W * np.cos(0.7 * W)))
    close(spmd.grad(spmd.grad(f))(0.7), -np.sum(W**2 * np.sin(0.7 * W)))
    close(spmd.grad(spmd.grad(spmd.grad(f)))(0.7), -np.sum(W**3 * np.cos(0.7 * W)))


# Counts


def test_a_step_of_data_parallel_training_is_one_sum_per_parameter():
    def body(p, x, y):
        return spmd.mean((np.tanh(x @ p["w"] + p["b"]) @ p["v"] - y) ** 2, "x")

    rng = np.random.default_rng(0)
    p = {"w": rng.normal(size=(4, 3)), "b": rng.normal(size=3), "v": rng.normal(size=3)}
    loss = spmd.map(body, (P(), ROWS, ROWS), P())
    with spmd.Mesh(x=4):
        with spmd.ledger() as forward:
            loss(p, X, Y)
        with spmd.ledger() as log:
            spmd.grad(loss)(p, X, Y)
        assert forward.operators["Sum"] == 2  # the total and the count of spmd.mean
        assert log.operators["Sum"] == 2 + 3
        with spmd.ledger() as none:
            spmd.grad(spmd.map(lambda x: spmd.sum(x**2, "x"), ROWS, P()))(X)
        assert none.operators["Sum"] == 1  # a psum sends nothing back


# Schedulers


def program(w, x, y):
    h = np.tanh(x @ np.outer(w, w))
    h = spmd.all_gather(h, "x", tiled=True)
    h = spmd.psum_scatter(h, "x", tiled=True)
    near = spmd.shift(h, "y")
    return spmd.mean(((near * h).sum(1) - y) ** 2, "x")


def test_schedulers_agree_bit_for_bit_and_count_alike():
    mapped = spmd.map(lambda w, x, y: spmd.pmean(program(w, x, y), "y"), (P(), ROWS, ROWS), P())
    found = []
    for scheduler in ("lockstep", "threads", "auto", "auto"):
        with spmd.Mesh(x=3, y=2, scheduler=scheduler), spmd.ledger() as log:
            value, grads = spmd.value_and_grad(mapped, argnums=(0, 1))(W, X, Y)
            hv = spmd.hvp(lambda w: mapped(w, X, Y), (W,), (W,))[0]
        counts = {w: (r.operators, r.axes, r.verbs, r.messages, r.bytes) for w, r in log.workers.items()}
        found.append((value.numpy().tobytes(), *(g.tobytes() for g in (*grads, hv)), counts))
    assert all(f == found[0] for f in found)
    assert len(found[0][-1]) == 6


def test_maps_may_be_called_from_several_threads():
    from concurrent.futures import ThreadPoolExecutor

    def work(k):
        with spmd.Mesh(x=2, scheduler=("threads", "lockstep")[k % 2]):
            return [np.asarray(spmd.grad(LOSS)(W * k, X, Y)) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        for k, grads in enumerate(pool.map(work, range(8))):
            for g in grads:
                close(g, gradient_by_hand(W * k, X, Y))


def test_fixed_parts_of_classes_may_be_arrays():
    """They are no part of what is known of a call from the one before."""

    class Table:
        def __init__(self, w, fixed):
            self.w, self.fixed = w, fixed

    spmd.tree.register(Table, lambda t: ((t.w,), t.fixed), lambda fixed, ws: Table(*ws, fixed))
    double = spmd.map(
        lambda t: t.w * t.fixed[0], in_specs=P("x"), out_specs=P("x"), mesh=spmd.Mesh(x=2, transport="local")
    )
    for factor in 2.0, 3.0, 3.0:
        np.testing.assert_array_equal(double(Table(np.arange(4.0), np.array([factor, 0.0]))), factor * np.arange(4))


@pytest.mark.parametrize("name", ["float8_e4m3b11fnuz", "bfloat16", "int4", "float8_e5m2"])
def test_copies_of_foreign_dtypes_are_compared(name):
    """Whose letters may be those of NumPy's own."""
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))
    mesh = spmd.Mesh(x=2, transport="local")
    x = spmd.from_blocks([np.ones(3).astype(dtype)] * 2, P(), mesh=mesh)
    assert x.dtype == dtype
    y = mesh.map(lambda a: np.ones(3).astype(dtype), in_specs=P("x"), out_specs=P())(np.arange(4.0))
    np.testing.assert_array_equal(y.numpy().astype(float), np.ones(3))
