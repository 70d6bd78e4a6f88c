"""custom_vjp, custom_jvp and checkpoint: rules of users, and what is computed again."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.autodiff import (
    check_grads,
    checkpoint,
    custom_jvp,
    custom_vjp,
    grad,
    hessian,
    hvp,
    jacrev,
    jvp,
    value_and_grad,
    vjp,
)
from spmd.autodiff.registry import primitive
from spmd.errors import ClosureError, DifferentiationError, TracedConversionError

X = np.array([0.5, -1.0, 2.0])


# custom_vjp


def clipped():
    @custom_vjp
    def f(x, y):
        return x * y

    f.defvjp(lambda x, y: (x * y, (x, y)), lambda saved, g: (np.clip(g, -1, 1) * saved[1], None))
    return f


def test_custom_vjp():
    f = clipped()
    np.testing.assert_array_equal(f(X, X), X * X)
    gx, gy = grad(lambda x, y: np.sum(5 * f(x, y)), (0, 1))(X, X + 1)
    np.testing.assert_array_equal(gx, X + 1)
    np.testing.assert_array_equal(gy, np.zeros(3))


def test_custom_vjp_differentiates_again():
    @custom_vjp
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x**2 * g,))
    check_grads(cube, (X,), 3)
    assert grad(grad(grad(cube)))(2.0) == 6
    np.testing.assert_allclose(jvp(cube, (X,), (X,))[1], 3 * X**3)


def test_custom_vjp_of_python_numbers_and_single_precision():
    f = clipped()
    assert grad(lambda x: f(x, 3.0))(2.0) == 3
    assert grad(lambda x: np.sum(f(x, 3.0)))(X.astype("f4")).dtype == "f4"


def test_custom_vjp_takes_keywords_and_defaults_by_the_signature():
    @custom_vjp
    def f(x, y=2.0, *more):
        return x * y

    f.defvjp(lambda x, y, *more: (x * y, (x, y, len(more))), lambda r, g: (2 * g * r[1], g * r[0], *[None] * r[2]))
    assert grad(lambda x: f(x))(1.0) == 4
    assert grad(lambda x: f(x=x))(1.0) == 4
    assert grad(lambda x: f(1.0, y=x))(5.0) == 1
    assert grad(lambda x: f(x, 3.0, 4.0))(5.0) == 6
    with pytest.raises(DifferentiationError, match=r"custom_vjp f(.|\n)*unexpected keyword argument 'z'"):
        grad(lambda x: f(x, z=x))(1.0)

    @custom_vjp
    def g(x, *, scale=1.0):
        return x * scale

    g.defvjp(lambda x: (x, None), lambda _, g: (g,))
    assert grad(g)(2.0) == 1
    with pytest.raises(DifferentiationError, match=r"scale(.|\n)*by position"):
        grad(lambda x: g(x, scale=2.0))(1.0)


@pytest.mark.parametrize("options", [{"nondiff_argnums": (0,)}, {"nondiff_argnums": 0}, {"nondiff_argnames": "power"}])
def test_custom_vjp_with_nondiff_arguments_and_trees(options):
    @functools.partial(custom_vjp, **options)
    def f(power, p):
        return {"out": p["x"] ** power}

    def fwd(power, p):
        return {"out": p["x"] ** power}, p["x"]

    def bwd(power, x, g):
        return ({"x": power * x ** (power - 1) * g["out"], "unused": None},)

    f.defvjp(fwd, bwd)
    g = grad(lambda p: np.sum(f(3, p)["out"]))({"x": X, "unused": np.ones(2)})
    np.testing.assert_array_equal(g["x"], 3 * X**2)
    np.testing.assert_array_equal(g["unused"], np.zeros(2))
    with pytest.raises(DifferentiationError, match=r"number 0(.|\n)*nondiff_argnums"):
        grad(lambda n: np.sum(f(n, {"x": X, "unused": X})["out"]))(3.0)


def test_custom_vjp_on_a_method():
    class Model:
        scale = 3.0

        @custom_vjp
        def __call__(self, x):
            return x * self.scale

        __call__.defvjp(lambda self, x: (x * self.scale, self.scale), lambda s, g: (None, 10 * s * g))

    np.testing.assert_array_equal(grad(lambda x: np.sum(Model()(x)))(X), np.full(3, 30.0))


def test_results_without_a_cotangent_come_as_zeros():
    seen = []

    @custom_vjp
    def f(x):
        return x * 2, np.sum(x), 3

    def bwd(_, g):
        seen.append(g)
        return (g[0],)

    f.defvjp(lambda x: ((x * 2, np.sum(x), 3), None), bwd)
    np.testing.assert_array_equal(grad(lambda x: np.sum(f(x)[0]))(X), np.ones(3))
    assert seen[0][1].shape == ()
    assert seen[0][1] == 0


def test_custom_vjp_says_what_is_wrong():
    f = custom_vjp(np.sin)
    with pytest.raises(DifferentiationError, match=r"defvjp\(fwd, bwd\)"):
        grad(lambda x: np.sum(f(x)))(X)
    f.defvjp(lambda x: (np.sin(x), x), lambda x, g: g * np.cos(x))
    with pytest.raises(DifferentiationError, match="a tuple of 1 cotangents"):
        grad(lambda x: np.sum(f(x)))(X)
    f.defvjp(lambda x: (np.sin(x), x), lambda x, g: (g[:2],))
    with pytest.raises(DifferentiationError, match=r"float64\[2\](.|\n)*shape \[3\]"):
        grad(lambda x: np.sum(f(x)))(X)
    f.defvjp(lambda p: (p, None), lambda _, g: ((g, g),))
    with pytest.raises(DifferentiationError, match=r"result of bwd(.|\n)*structure of the argument"):
        grad(lambda x: np.sum(f({"x": x})["x"]))(X)
    f.defvjp(lambda x: np.sin(x), lambda x, g: (g,))
    with pytest.raises(DifferentiationError, match=r"result of fwd(.|\n)*\(result, residuals\)"):
        grad(lambda x: np.sum(f(x)))(X)
    with pytest.raises(DifferentiationError, match="symbolic_zeros"):
        f.defvjp(None, None, symbolic_zeros=True)


def test_custom_vjp_refuses_closures():
    def f(x):
        g = custom_vjp(lambda a: a * x)
        g.defvjp(lambda a: (a * x, None), lambda _, c: (c * x,))
        return g(x)

    with pytest.raises(ClosureError, match="pass the array as an argument"):
        grad(f)(2.0)


# custom_jvp


def tripled():
    @custom_jvp
    def f(x, y):
        return np.sin(x) * y

    @f.defjvp
    def rule(primals, tangents):
        (x, y), (a, b) = primals, tangents
        return f(x, y), 3 * np.cos(x) * a * y + np.sin(x) * b

    return f


def test_custom_jvp():
    f, y = tripled(), X + 1
    np.testing.assert_array_equal(f(X, y), np.sin(X) * y)
    gx, gy = grad(lambda x, y: np.sum(f(x, y)), (0, 1))(X, y)
    np.testing.assert_allclose(gx, 3 * np.cos(X) * y)
    np.testing.assert_allclose(gy, np.sin(X))
    _, tangent = jvp(f, (X, y), (X, y))
    np.testing.assert_allclose(tangent, 3 * np.cos(X) * X * y + np.sin(X) * y)
    np.testing.assert_allclose(jvp(lambda x: f(x, y=x), (X,), (X,))[1], 3 * np.cos(X) * X * X + np.sin(X) * X)


def test_custom_jvp_differentiates_again():
    @custom_jvp
    def cube(x):
        return x**3

    cube.defjvp(lambda p, t: (cube(*p), 3 * p[0] ** 2 * t[0]))
    check_grads(cube, (X,), 3)
    assert grad(grad(grad(cube)))(2.0) == 6
    np.testing.assert_allclose(hessian(lambda x: np.sum(cube(x)))(X), np.diag(6 * X))


def test_custom_jvp_by_argument_with_nondiff_arguments_and_trees():
    f = custom_jvp(lambda x, y: x * x * y)
    f.defjvps(lambda t, out, x, y: 2 * x * y * t, None)
    gx, gy = grad(lambda x, y: np.sum(f(x, y)), (0, 1))(X, X + 1)
    np.testing.assert_array_equal(gx, 2 * X * (X + 1))
    np.testing.assert_array_equal(gy, np.zeros(3))

    @functools.partial(custom_jvp, nondiff_argnums=(0,))
    def power(n, p):
        return {"out": p["x"] ** n}

    power.defjvp(lambda n, p, t: (power(n, *p), {"out": n * p[0]["x"] ** (n - 1) * t[0]["x"]}))
    g = grad(lambda p: np.sum(power(3, p)["out"]))({"x": X})
    np.testing.assert_array_equal(g["x"], 3 * X**2)


def test_custom_jvp_says_what_is_wrong():
    f = custom_jvp(lambda x: x * 2)
    with pytest.raises(DifferentiationError, match=r"f\.defjvp\(rule\)"):
        grad(f)(1.0)
    f.defjvp(lambda p, t: t[0])
    with pytest.raises(DifferentiationError, match=r"result of the rule(.|\n)*\(result, tangent\)"):
        grad(f)(1.0)
    f.defjvp(lambda p, t: (p[0] * 2, np.stack([t[0], t[0]])))
    with pytest.raises(DifferentiationError, match="the tangent of the result"):
        grad(f)(1.0)
    with pytest.raises(DifferentiationError, match="symbolic_zeros"):
        f.defjvp(None, symbolic_zeros=True)


# checkpoint


def test_checkpoint_computes_again():
    calls = []

    def body(x, p):
        calls.append(1)
        return {"y": np.tanh(x * p["w"])}

    def f(x, p):
        return np.sum(checkpoint(body)(checkpoint(body)(x, p)["y"], p)["y"])

    p = {"w": np.array(2.0)}
    g = grad(f, (0, 1))(X, p)
    assert len(calls) == 4
    expected = grad(lambda x, p: np.sum(np.tanh(np.tanh(x * p["w"]) * p["w"])), (0, 1))(X, p)
    np.testing.assert_allclose(g[0], expected[0])
    np.testing.assert_allclose(g[1]["w"], expected[1]["w"])
    check_grads(f, (X, p))
    assert checkpoint(body)(X, p)["y"].shape == (3,)


CLOSURES = {
    "beside an argument": lambda ck, x: np.sum(ck(lambda y: np.sin(y) * x)(x)),
    "alone": lambda ck, x: np.sum(ck(lambda: np.sin(x) * x)()),
    "returned as it is": lambda ck, x: np.sum(ck(lambda: x)() * x),
    "of what was computed": lambda ck, x: (lambda z: np.sum(ck(lambda y: z * y)(x * z)) + np.sum(z))(np.exp(x)),
    "in a nested one": lambda ck, x: np.sum(ck(lambda y: y * ck(lambda z: np.exp(z) * x * y)(y))(x)),
    "in a nested one, alone": lambda ck, x: np.sum(ck(lambda: x * ck(lambda: np.exp(x) * x)())()),
    "of integers beside": lambda ck, x: np.sum(ck(lambda n: (n, x**n))(np.arange(3))[1]),
    "in an inner gradient": lambda ck, x: np.sum(grad(lambda v: np.sum(ck(lambda a: a * v * x * x)(v)))(x) * x),
    "in an inner gradient, of outer arrays": lambda ck, x: np.sum(
        grad(lambda v: np.sum(v * v * ck(lambda a: a * np.sin(x))(2.0)))(x) * x
    ),
    "in an inner gradient, of inner arrays": lambda ck, x: np.sum(
        grad(lambda v: np.sum(v * v * ck(lambda a: v * np.sin(a) * x)(x)))(x) * x
    ),
}


@pytest.mark.parametrize("case", CLOSURES)
def test_checkpoint_takes_closures(case):
    f, plain = (functools.partial(CLOSURES[case], ck) for ck in (checkpoint, lambda f: f))
    value, g = value_and_grad(f)(X)
    assert value == pytest.approx(plain(X))
    np.testing.assert_allclose(g, grad(plain)(X))
    np.testing.assert_allclose(hessian(f)(X), hessian(plain)(X), atol=1e-12)
    np.testing.assert_allclose(jvp(grad(f), (X,), (X,))[1], jvp(grad(plain), (X,), (X,))[1])
    _, pull = vjp(f, X)
    for _ in range(2):
        np.testing.assert_allclose(pull(1.0)[0], grad(plain)(X))


def test_checkpoint_to_the_third_order():
    f = lambda ck, x: ck(lambda y: np.sin(y) * x * ck(lambda z: np.exp(z) * x * y)(y))(x)
    third = [grad(grad(grad(functools.partial(f, ck))))(0.3) for ck in (checkpoint, lambda f: f)]
    np.testing.assert_allclose(*third)


def test_checkpoint_keeps_python_numbers_weak():
    assert grad(lambda x: checkpoint(lambda y: y * y)(x))(3.0) == 6
    value, g = value_and_grad(lambda x, s: np.sum(x * checkpoint(lambda s: s * 2.0)(s)), (0, 1))(X.astype("f4"), 2.0)
    assert value.dtype == "f4"
    assert g[0].dtype == "f4"


def test_checkpoint_with_static_arguments():
    def body(kind, x, *, scale):
        assert type(scale) is str
        return x * x if kind == "square" else x

    f = functools.partial(checkpoint, static_argnums=0, static_argnames="scale")(body)
    np.testing.assert_array_equal(grad(lambda x: np.sum(f("square", x, scale="s")))(X), 2 * X)
    last = checkpoint(lambda x, k: x * k[0], static_argnums=(-1,))
    np.testing.assert_array_equal(grad(lambda x: np.sum(last(x, [3.0])))(X), np.full(3, 3.0))
    with pytest.raises(DifferentiationError, match=r"static_argnums(.|\n)*without a gradient"):
        grad(lambda x: np.sum(last(2.0, [x])))(X)


def test_checkpoint_refuses_policies_and_functions_that_change():
    assert grad(checkpoint(np.sin, prevent_cse=False))(0.0) == 1
    with pytest.raises(DifferentiationError, match="policy"):
        checkpoint(np.sin, policy=lambda *_: True)
    calls = []

    def changes(y, x):
        calls.append(1)
        return (y, y) if len(calls) > 1 else y

    with pytest.raises(DifferentiationError, match="when it is called again"):
        grad(lambda x: np.sum(checkpoint(changes)(x, x)))(X)


def in_a_thread(work):
    found = []

    def run():
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_checkpoints_in_another_thread():
    """A tape belongs to its arrays, not to a thread; but a checkpoint knows only the tapes opened where it runs."""

    def f(x):
        y = in_a_thread(lambda: checkpoint(lambda y: np.sin(y) * x)(x))
        z = in_a_thread(lambda: vjp(lambda _: checkpoint(lambda: y * x)(), X)[0])
        return np.sum(z)

    np.testing.assert_allclose(grad(f)(X), grad(lambda x: np.sum(np.sin(x) * x * x))(X))


# In bodies and through maps


W = np.array([0.3, 0.7, -0.2])
BATCH = np.random.default_rng(0).normal(size=(7, 3))
SPECS = (P(), P("x"))


def deep(ck, psum, w, x):
    """Checkpoints that close over arrays of both states, one with a collective in it."""
    h = ck(lambda v: np.sin(x * v) * w)(w * w)
    k = ck(lambda: psum(np.sum(np.cos(h) * w)))()
    return k * ck(lambda u: np.sum(u * w))(w * w)


@pytest.fixture
def mesh(scheduler):
    return spmd.Mesh(x=3, scheduler=scheduler)


def close(found, expected):
    for a, b in zip(spmd.tree.leaves(found), spmd.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a.numpy() if isinstance(a, spmd.PartitionedArray) else a, b, rtol=1e-9, atol=1e-12)


def test_checkpoints_with_closures_in_bodies(mesh):
    loss = functools.partial(deep, checkpoint, lambda x: spmd.psum(x, "x"))
    serial = functools.partial(deep, lambda f: f, lambda x: x)
    norm = lambda f: lambda w, x: np.sum(grad(f)(w, x) ** 2)
    outside = spmd.map(loss, SPECS, P(), mesh=mesh)
    close(grad(outside, (0, 1))(W, BATCH), grad(serial, (0, 1))(W, BATCH))
    close(hessian(outside)(W, BATCH), hessian(serial)(W, BATCH))
    second = spmd.map(norm(loss), SPECS, P(), mesh=mesh)
    close(grad(second, (0, 1))(W, BATCH), grad(norm(serial), (0, 1))(W, BATCH))
    inside = spmd.map(lambda w, x: (grad(loss, (0, 1))(w, x), hessian(loss)(w, x)), SPECS, (SPECS, P()), mesh=mesh)
    close(inside(W, BATCH), (grad(serial, (0, 1))(W, BATCH), hessian(serial)(W, BATCH)))


def test_a_checkpoint_around_a_map(mesh):
    loss = spmd.map(functools.partial(deep, lambda f: f, lambda x: spmd.psum(x, "x")), SPECS, P(), mesh=mesh)
    serial = functools.partial(deep, lambda f: f, lambda x: x)
    f = lambda w: checkpoint(lambda x: loss(w, x))(BATCH) * np.sum(w)
    close(hessian(f)(W), hessian(lambda w: serial(w, BATCH) * np.sum(w))(W))
    close(hvp(f, (W,), (W,)), hvp(lambda w: serial(w, BATCH) * np.sum(w), (W,), (W,)))


def test_custom_jvp_in_bodies(mesh):
    f = tripled()
    loss = lambda w, x: spmd.psum(np.sum(f(w * x, x)), "x")
    expected = np.sum(3 * np.cos(W * BATCH) * BATCH * BATCH, 0)
    close(grad(spmd.map(loss, SPECS, P(), mesh=mesh))(W, BATCH), expected)
    close(spmd.map(grad(loss), SPECS, P(), mesh=mesh)(W, BATCH), expected)
    close(
        spmd.map(jacrev(grad(loss)), SPECS, P(), mesh=mesh)(W, BATCH), hessian(lambda w: np.sum(f(w * BATCH, BATCH)))(W)
    )


# What rules return, and who owns it


def test_integers_are_cotangents_of_numbers_only():
    f = custom_vjp(lambda x: 2.0 * x)
    f.defvjp(lambda x: (2.0 * x, None), lambda _, g: (2,))
    assert grad(f)(1.0) == 2
    f.defvjp(lambda x: (2.0 * x, None), lambda _, g: (np.arange(3),))
    with pytest.raises(DifferentiationError, match=r"int64\[3\](.|\n)*g\.astype\(float\)"):
        vjp(f, X)[1](X)


def test_integers_are_no_tangents_of_floats():
    f = custom_jvp(lambda x: 2.0 * x)
    for tangent in (2, np.array(2)):
        f.defjvp(lambda primals, tangents, tangent=tangent: (primals[0] * 2.0, tangent))
        with pytest.raises(DifferentiationError, match="the tangent of the result"):
            grad(f)(1.0)


def test_a_gradient_is_no_array_of_the_rule():
    kept = np.ones(3)
    f = custom_vjp(lambda x: np.sum(kept * x))
    f.defvjp(lambda x: (np.sum(kept * x), None), lambda _, g: (kept,))
    gradient = grad(f)(X)
    gradient[:] = 0
    assert kept.tolist() == [1, 1, 1]
    _, pull = vjp(f, X)
    pull(1.0)[0][:] = 0
    assert pull(1.0)[0].tolist() == [1, 1, 1]


def test_errors_of_rules():
    def message(rule, count=1, result=lambda x: 2 * x):
        f = primitive("f", *[rule] * count)(result)
        with pytest.raises((DifferentiationError, AttributeError)) as raised:
            grad(lambda x: np.sum(f(*[x] * count)))(X)
        return str(raised.value)

    assert "parameters (g, x)" in message(lambda g, x: g)
    assert "None from a derivative rule" in message(lambda g, ans, x: None)
    assert "at f" in message(lambda g, ans, x: None)
    for rule in (lambda g, _ans, _x: g * _x, lambda g, _ans, _x: g * (_x != 0), lambda g, _ans, _x: g * _x.sum()):
        assert "underscore" in message(rule)
    assert "return a tuple" in message(lambda g, ans, x: g[0], result=lambda x: [x])
    with pytest.raises(TypeError, match=r'@primitive\("f", rule\)'):
        primitive(lambda x: x)


def test_an_array_within_a_list_is_not_lost():
    f = primitive("f", lambda g, ans, x, y: g, lambda g, ans, x, y: g)(lambda x, y: x + y[0])
    with pytest.raises(TracedConversionError, match=r"a traced array within a list(.|\n)*np\.stack"):
        grad(lambda x: np.sum(f(x, [x])))(X)
    assert vjp(lambda x: f(x, [1.0]), X)[1](X)[0].tolist() == X.tolist()
