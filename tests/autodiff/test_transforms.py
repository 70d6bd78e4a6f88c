"""Transformations: values, nesting, and what they refuse, by the words."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.autodiff import (
    at,
    checkpoint,
    float0,
    grad,
    hessian,
    hvp,
    jacfwd,
    jacrev,
    jvp,
    linear_transpose,
    linearize,
    stop_gradient,
    tree,
    value_and_grad,
    vjp,
)
from spmd.autodiff.check import check_grads
from spmd.autodiff.tracer import Array
from spmd.errors import DifferentiationError, StateError, TracedConversionError

X = np.array([0.5, -1.0, 2.0])


def loss(params, x):
    return np.sum(np.tanh(x @ params["w"] + params["b"]) ** 2)


PARAMS = {"w": np.arange(6.0).reshape(3, 2) / 5, "b": np.array([0.1, -0.2])}


# grad and value_and_grad


def test_value_and_grad_of_a_tree():
    value, g = value_and_grad(loss)(PARAMS, X)
    assert value == loss(PARAMS, X)
    assert not isinstance(value, Array)
    z = np.tanh(X @ PARAMS["w"] + PARAMS["b"])
    np.testing.assert_allclose(g["b"], 2 * z * (1 - z**2))
    np.testing.assert_allclose(g["w"], np.outer(X, 2 * z * (1 - z**2)))
    check_grads(loss, (PARAMS, X))


def test_argnums():
    def f(x, y, z=1.0):
        return np.sum(x * y**2) * z

    y = X + 1
    np.testing.assert_array_equal(grad(f)(X, y), y**2)
    np.testing.assert_array_equal(grad(f, 1)(X, y, z=2.0), 4 * X * y)
    np.testing.assert_array_equal(grad(f, -1)(X, y), 2 * X * y)
    gx, gy = grad(f, (0, 1))(X, y)
    np.testing.assert_array_equal(gx, y**2)
    np.testing.assert_array_equal(gy, 2 * X * y)
    value, (gy,) = value_and_grad(f, [1])(X, y)
    assert value == f(X, y)


def test_has_aux():
    def f(x):
        return np.sum(x**2), {"twice": 2 * x, "n": 3}

    (value, aux), g = value_and_grad(f, has_aux=True)(X)
    assert value == np.sum(X**2)
    np.testing.assert_array_equal(aux["twice"], 2 * X)
    assert not isinstance(aux["twice"], Array)
    g2, aux = grad(f, has_aux=True)(X)
    np.testing.assert_array_equal(g, g2)
    assert aux["n"] == 3


def test_what_does_not_reach_the_result_has_zero_gradient():
    g = grad(lambda p: np.sum(p["a"] * 2))({"a": X, "b": np.ones((2, 0), "f4")})
    assert g["b"].shape == (2, 0)
    assert g["b"].dtype == "f4"
    np.testing.assert_array_equal(grad(lambda x: 3.0)(X), np.zeros(3))
    np.testing.assert_array_equal(grad(lambda x: np.sum(stop_gradient(x)))(X), np.zeros(3))


def test_stop_gradient():
    np.testing.assert_array_equal(grad(lambda x: np.sum(stop_gradient(x) * x))(X), X)
    tree = stop_gradient({"a": X, "b": "name"})
    assert tree["a"] is X
    assert grad(lambda x: x * float(stop_gradient(x)))(3.0) == 3


def test_python_control_flow():
    def f(x):
        total = 0.0
        for i in range(len(x)):
            total = total + (x[i] ** 2 if x[i] > 0 else -x[i])
        return total

    np.testing.assert_array_equal(grad(f)(X), [1.0, -1.0, 4.0])


def test_iteration_and_reflected_operators():
    value, g = value_and_grad(lambda x: sum(1.0 / v for v in x) + np.sum(X / x - (2 - X @ x)))(X)
    np.testing.assert_allclose(value, np.sum(1 / X) + 3 - (6 - 3 * (X @ X)))
    np.testing.assert_allclose(g, -2 / X**2 * (1 + X) / 2 + 3 * X)


def test_argnums_of_every_kind():
    f = lambda x, y: np.sum(x * y**2)
    for argnums in (1, -1, np.int64(1), np.array(1), True):
        np.testing.assert_array_equal(grad(f, argnums)(X, X), 2 * X * X)
    for argnums in ([1], (1,), range(1, 2), np.array([1])):
        (g,) = grad(f, argnums)(X, X)
        np.testing.assert_array_equal(g, 2 * X * X)
    assert grad(f, ())(X, X) == ()
    for argnums in (2, -3, (0, 0), (1, -1), 0.0, "x", None):
        with pytest.raises(DifferentiationError, match=r"grad of <lambda>: argument argnums(.|\n)*2 positional"):
            grad(f, argnums)(X, X)
    with pytest.raises(DifferentiationError, match="arguments that are passed by position"):
        grad(lambda: 1.0)()


def test_methods_callables_partials_and_names():
    class Model:
        w = 3.0

        def __call__(self, x, *, power=2):
            return np.sum(self.w * x**power)

        @grad
        def total(self, x):
            return self.w * x

    def named(x):
        "Its words."
        return np.sum(x)

    model = Model()
    np.testing.assert_array_equal(grad(model)(X, power=3), 9 * X**2)
    np.testing.assert_array_equal(grad(model.__call__)(X), 6 * X)
    np.testing.assert_array_equal(grad(functools.partial(model, power=1))(X), np.full(3, 3.0))
    assert (grad(named).__name__, grad(named).__doc__) == ("named", "Its words.")
    with pytest.raises(DifferentiationError, match="grad of named"):
        grad(functools.partial(named))(3)
    np.testing.assert_array_equal(grad(np.sum)(X), np.ones(3))


def test_aux_is_lowered_at_every_level():
    def f(x):
        return np.sum(x**2), {"x": (x, None, "name", [x * 2]), "f": np.sum}

    for got in (grad(f, has_aux=True)(X)[1], vjp(f, X, has_aux=True)[2], jvp(f, (X,), (X,), has_aux=True)[2]):
        np.testing.assert_array_equal(got["x"][0], X)
        np.testing.assert_array_equal(got["x"][3][0], 2 * X)
        assert got["x"][1:3] == (None, "name")
        assert got["f"] is np.sum
    g = grad(lambda x: np.sum(grad(f, has_aux=True)(x)[1]["x"][3][0] * x))(X)
    np.testing.assert_array_equal(g, 4 * X)
    for call in (grad(np.sum, has_aux=True), lambda x: vjp(np.sum, x, has_aux=True)):
        with pytest.raises(DifferentiationError, match=r"a pair \(result, aux\)"):
            call(X)


# Integers


def test_integers_have_gradients_of_float0():
    n = np.arange(3)
    g = grad(lambda x, n: np.sum(x * n["n"] * n["b"]), (0, 1), allow_int=True)(X, {"n": n, "b": True})
    np.testing.assert_array_equal(g[0], n)
    assert (g[1]["n"].dtype, g[1]["n"].shape) == (float0, (3,))
    assert (g[1]["b"].dtype, g[1]["b"].shape) == (float0, ())
    (value, aux), g = value_and_grad(lambda n: (np.sum(n * 2.0), n), has_aux=True, allow_int=True)(n)
    assert (value, aux.tolist(), g.dtype) == (6, [0, 1, 2], float0)
    with pytest.raises(DifferentiationError, match=r"argument n(.|\n)*allow_int=True"):
        grad(lambda n: np.sum(n * 2.0))(n)
    value, pull = vjp(lambda x, n: (x * n, n), X, n)
    gx, gn = pull((X, np.zeros(3, float0)))
    np.testing.assert_array_equal(gx, X * n)
    assert gn.dtype == float0
    with pytest.raises(DifferentiationError, match="integers have no derivative"):
        grad(lambda x: np.sum(x > 0))(X)


def test_tangents_of_integers_are_float0():
    n = np.arange(3)
    value, (tangent, none) = jvp(lambda x, n: (x * n, n * 2), (X, n), (X, np.zeros(3, float0)))
    np.testing.assert_array_equal(value[0], X * n)
    np.testing.assert_array_equal(tangent, X * n)
    assert (none.dtype, none.shape) == (float0, (3,))
    with pytest.raises(DifferentiationError, match=r"dtype float0(.|\n)*np\.zeros\(x\.shape, spmd\.float0\)"):
        jvp(lambda n: n * 2.0, (n,), (n,))


# vjp


def test_a_pullback_may_be_called_many_times():
    value, pull = vjp(lambda x, y: (x * y, np.sum(y)), X, X + 1)
    np.testing.assert_array_equal(value[0], X * (X + 1))
    for c in (1.0, 2.0):
        gx, gy = pull((np.full(3, c), 1.0))
        np.testing.assert_array_equal(gx, c * (X + 1))
        np.testing.assert_array_equal(gy, c * X + 1)


def test_vjp_has_aux():
    value, pull, aux = vjp(lambda x: (x**2, x + 1), X, has_aux=True)
    np.testing.assert_array_equal(aux, X + 1)
    np.testing.assert_array_equal(pull(np.ones(3))[0], 2 * X)
    np.testing.assert_array_equal(value, X**2)


def test_a_result_that_is_an_argument_or_a_constant():
    value, pull = vjp(lambda x: (x, X, 3), X)
    assert pull((X, X, 0))[0].tolist() == X.tolist()
    assert value[0].tolist() == X.tolist()
    value[0][:] = 0
    assert pull((X, X, 0))[0].tolist() == X.tolist()


def test_pullbacks_refuse_other_shapes_and_structures():
    _, pull = vjp(lambda x: x * 2, X)
    with pytest.raises(DifferentiationError, match=r"argument cotangent(.|\n)*shape \[3\](.|\n)*np\.broadcast_to"):
        pull(np.ones(2))
    with pytest.raises(DifferentiationError, match="structure"):
        pull((X, X))


def test_cotangents_and_tangents_have_the_dtype_of_what_they_belong_to():
    single = X.astype("f4")
    _, pull = vjp(np.sum, single)
    assert pull(2)[0].dtype == pull(np.float32(2))[0].dtype == "f4"
    for g, words in ((np.ones(()), r"float32(.|\n)*g\.astype\('float32'\)"), (1j, r"np\.real\(g\)")):
        with pytest.raises(DifferentiationError, match=words):
            pull(g)
        with pytest.raises(DifferentiationError, match=words):
            jvp(np.sin, (np.float32(1),), (g,))
    assert jvp(np.sin, (np.float32(1),), (2,))[1].dtype == "f4"
    assert jvp(lambda x: x * single, (2.0,), (1.0,))[1].dtype == "f4"
    _, pull = vjp(lambda x: x * 1j, X)
    np.testing.assert_array_equal(pull(np.full(3, 1 - 2j))[0], np.full(3, 2.0))
    with pytest.raises(DifferentiationError, match="dtype complex128"):
        pull(X)


def test_the_pullback_follows_a_primal_that_is_written_into():
    x = X.copy()
    _, pull = vjp(lambda x: x * x, x)
    x[:] = 0
    np.testing.assert_array_equal(pull(np.ones(3))[0], np.zeros(3))


# Forward mode


def test_jvp_is_the_directional_derivative():
    value, tangent = jvp(lambda x, y: np.sin(x) * y, (X, X + 1), (np.ones(3), X))
    np.testing.assert_allclose(value, np.sin(X) * (X + 1))
    np.testing.assert_allclose(tangent, np.cos(X) * (X + 1) + np.sin(X) * X)


def test_jvp_of_trees_and_of_grad():
    _, tangent = jvp(grad(loss), (PARAMS, X), (PARAMS, 0 * X))
    h = 1e-6
    plus, minus = (grad(loss)({k: v * (1 + s * h) for k, v in PARAMS.items()}, X) for s in (1, -1))
    for k in PARAMS:
        np.testing.assert_allclose(tangent[k], (plus[k] - minus[k]) / (2 * h), atol=1e-8)


def test_linearize():
    value, push = linearize(lambda x: np.exp(x), X)
    np.testing.assert_array_equal(value, np.exp(X))
    for v in (X, np.ones(3)):
        np.testing.assert_allclose(push(v), np.exp(X) * v)


def test_linearize_and_jvp_with_aux():
    value, push, aux = linearize(lambda x: (np.sin(x), {"k": x * 2}), X, has_aux=True)
    np.testing.assert_allclose(push(X), np.cos(X) * X)
    np.testing.assert_array_equal(aux["k"], 2 * X)
    value, tangent, aux = jvp(lambda x: (np.sin(x), {"k": x * 2}), [X], [X], has_aux=True)
    np.testing.assert_allclose(value, np.sin(X))
    np.testing.assert_allclose(tangent, np.cos(X) * X)
    np.testing.assert_array_equal(aux["k"], 2 * X)


def test_results_that_do_not_depend_on_the_arguments_have_no_tangent():
    value, tangent = jvp(lambda x: (X, 2.0, np.sum(x), 3), (X,), (X,))
    np.testing.assert_array_equal(tangent[0], np.zeros(3))
    assert tangent[1:3] == (0, np.sum(X))
    assert tangent[3].dtype == float0
    assert value[3] == 3
    assert jvp(lambda: 3.0, (), ()) == (3, 0)
    assert vjp(lambda: 3.0)[1](1.0) == ()


def test_forward_mode_checks_its_arguments():
    for primals, tangents, words in (
        (X, X, r"a tuple or list(.|\n)*spmd\.jvp\(f, \(x,\), \(v,\)\)"),
        ((X,), (X, X), "structure"),
        ((X,), ({"x": X},), "structure"),
        ((X,), (X[:2],), "the primal's shape"),
        ((X,), (X.astype("f4"),), "dtype float64"),
    ):
        with pytest.raises(DifferentiationError, match=words):
            jvp(np.sin, primals, tangents)


Z = X + 1j * X[::-1]
COMPLEX = {
    "conj": np.conj,
    "abs": np.abs,
    "real": np.real,
    "imag": np.imag,
    "angle": np.angle,
    "square": lambda z: z * z,
    "z abs z": lambda z: z * np.abs(z),
    "to complex": lambda z: np.real(z) * 1j + np.imag(z),
    "fft": np.fft.fft,
    "several": lambda z: (np.sin(z) * z.real, [np.sum(z.imag * z)]),
}


@pytest.mark.parametrize("name", COMPLEX)
@pytest.mark.parametrize("x", [Z, X], ids=["complex", "real"])
def test_forward_mode_of_functions_that_are_not_holomorphic(name, x):
    """jvp is real-linear: the derivative along a direction, complex or real."""
    f, v, h = COMPLEX[name], x[::-1] * (1 + 2j if x is Z else 1), 1e-6
    value, tangent = jvp(f, (x,), (v,))
    over, under = tree.leaves(f(x + h * v)), tree.leaves(f(x - h * v))
    for t, y, o, u in zip(tree.leaves(tangent), tree.leaves(value), over, under, strict=True):
        np.testing.assert_allclose(t, (o - u) / (2 * h), atol=1e-8)
        assert t.dtype == y.dtype
    again = linearize(f, x)[1](v)
    for t, a in zip(tree.leaves(tangent), tree.leaves(again), strict=True):
        np.testing.assert_array_equal(t, a)


def test_holomorphic_gradients():
    np.testing.assert_allclose(grad(lambda z: np.sum(z**3), holomorphic=True)(Z), 3 * Z**2)
    with pytest.raises(DifferentiationError, match=r"argument z(.|\n)*complex arguments"):
        grad(lambda z: np.sum(z * 1j), holomorphic=True)(X)
    with pytest.raises(DifferentiationError, match="a complex result"):
        grad(lambda z: np.sum(np.abs(z)), holomorphic=True)(Z)


def test_linear_transpose():
    A = np.arange(6.0).reshape(2, 3)
    (g,) = linear_transpose(lambda x: A @ x, X)(np.array([1.0, 2.0]))
    np.testing.assert_array_equal(g, A.T @ [1.0, 2.0])

    class Like:
        def __init__(self, shape, dtype):
            self.shape, self.dtype = shape, np.dtype(dtype)

    back = linear_transpose(lambda x, y: {"k": A @ x + y["y"]}, Like((3,), "f4"), {"y": Like((), "f8")})
    gx, gy = back({"k": np.array([1.0, 2.0])})
    np.testing.assert_array_equal(gx, A.T @ [1.0, 2.0])
    assert gx.dtype == "f4"
    assert gy["y"] == 3
    np.testing.assert_array_equal(linear_transpose(lambda z: z * (1 + 2j), Z)(Z)[0], Z * (1 + 2j))
    assert linear_transpose(lambda x: x * 2, 1.0)(3.0)[0] == 6
    with pytest.raises(DifferentiationError, match="linear_transpose of <lambda>"):
        linear_transpose(lambda x: x * 2, np.arange(3))


# Nesting


@pytest.mark.parametrize(
    "f", [np.sin, np.tanh, lambda x: x**5, lambda x: np.exp(x) / x, lambda x: checkpoint(np.sin)(x)]
)
def test_third_order(f):
    first, second, third = grad(f), grad(grad(f)), grad(grad(grad(f)))
    x, h = 0.7, 1e-4
    np.testing.assert_allclose(second(x), (first(x + h) - first(x - h)) / (2 * h), rtol=1e-6)
    np.testing.assert_allclose(third(x), (second(x + h) - second(x - h)) / (2 * h), rtol=1e-6)


def test_inner_gradients_see_outer_ones():
    def f(x):
        return x * grad(lambda y: x * y**2)(x)

    assert grad(f)(3.0) == 6 * 3**2
    assert grad(lambda x: grad(lambda y: y + x * 0)(1.0) * x)(2.0) == 1


def test_perturbations_are_not_confused():
    assert grad(lambda x: x * grad(lambda y: x + y)(1.0))(1.0) == 1


def test_deep_nestings():
    """Of f = x sin x, whose derivatives are known."""
    f = lambda x: np.sin(x) * x
    d = [f, lambda x: np.sin(x) + x * np.cos(x), lambda x: 2 * np.cos(x) - x * np.sin(x)]
    d += [lambda x: -3 * np.sin(x) - x * np.cos(x), lambda x: -4 * np.cos(x) + x * np.sin(x)]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-12)
    total = lambda x: np.sum(f(x))
    push = lambda f, v: lambda x: jvp(f, (x,), (v(x),))[1]
    close(grad(grad(grad(grad(f))))(0.7), d[4](0.7))
    # One direction after another: of x ↦ f'(x) x, and so on.
    once = push(f, lambda x: x)
    close(once(X), d[1](X) * X)
    close(push(once, lambda x: x * x)(X), (d[2](X) * X + d[1](X)) * X * X)
    ones = np.ones_like
    close(push(push(push(f, ones), ones), ones)(X), d[3](X))
    # Pullbacks of push-forwards and push-forwards of pullbacks.
    pulled = lambda x: vjp(f, x)[1](np.cos(x))[0]
    close(pulled(X), d[1](X) * np.cos(X))
    close(push(pulled, ones)(X), d[2](X) * np.cos(X) - d[1](X) * np.sin(X))
    close(vjp(push(f, ones), X)[1](X)[0], d[2](X) * X)
    close(linearize(grad(lambda x: np.sum(linearize(f, x)[1](ones(x)))), X)[1](X), d[3](X) * X)
    close(grad(lambda x: np.sum(vjp(grad(total), x)[1](ones(x))[0]))(X), d[3](X))
    # Jacobians of all of these.
    close(jacfwd(push(f, ones))(X), np.diag(d[2](X)))
    close(jacrev(pulled)(X), np.diag(d[2](X) * np.cos(X) - d[1](X) * np.sin(X)))
    close(jacfwd(hessian(total))(X)[1, 1, 1], d[3](X[1]))
    close(hessian(push(total, ones))(X), np.diag(d[3](X)))
    close(hvp(push(total, ones), (X,), (X,))[0], d[3](X) * X)
    z = lambda z: jvp(lambda w: w * np.conj(w) * w, (z,), (1j * z,))[1]
    close(z(Z), 1j * Z * np.conj(Z) * Z)
    close(push(z, ones)(Z), 1j * (2 * Z * np.conj(Z) + Z * Z))


def test_deep_nestings_through_maps_and_in_bodies():
    mesh = spmd.Mesh(x=2)
    specs = (P(), P("x"))
    local = lambda w, x: spmd.psum(np.sum(np.sin(w * x) * w), "x")
    serial = lambda w, x: np.sum(np.sin(w * x) * w)
    x = np.arange(15.0).reshape(5, 3) / 10

    def near(found, expected):
        for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
            np.testing.assert_allclose(
                a.numpy() if isinstance(a, spmd.PartitionedArray) else a, b, rtol=1e-9, atol=1e-12
            )

    def norm(f):
        return lambda w, x: np.sum(grad(f)(w, x) ** 2)

    def pushed(f):
        return lambda w, x: jvp(lambda w: f(w, x), (w,), (w * w,))[1]

    def hessians(f):
        return lambda w, x: np.sum(hessian(f)(w, x) ** 2)

    for nest in (norm, pushed, hessians, lambda f: norm(pushed(f)), lambda f: pushed(norm(f)), lambda f: norm(norm(f))):
        whole = spmd.map(local, specs, P(), mesh=mesh)
        body = spmd.map(nest(local), specs, P(), mesh=mesh)
        near(nest(whole)(X, x), nest(serial)(X, x))
        near(body(X, x), nest(serial)(X, x))
        near(grad(body)(X, x), grad(nest(serial))(X, x))


def test_gradient_steps_inside_a_gradient():
    def trained(rate):
        x = X
        for _ in range(3):
            x = x - rate * grad(lambda x: np.sum(x**4) / 4)(x)
        return np.sum(x**2)

    check_grads(trained, (np.array(0.01),))


# What is refused, by its words


def assign(x):
    x[0] = 1


def assign_into(x):
    np.zeros(3)[:] = x


def add_into(x):
    y = np.zeros(3)
    y += x


REFUSED = [
    (lambda x: np.asarray(x), TracedConversionError, r"np\.asarray(.|\n)*spmd\.stop_gradient"),
    (lambda x: np.array([x[0], x[1]]), TracedConversionError, r"np\.stack\(\[a, b\]\)"),
    (lambda x: np.full(3, x[0]), TracedConversionError, "cut the result off from its gradient"),
    (lambda x: math.sin(x[0]), TracedConversionError, r"float\(\)(.|\n)*no gradient"),
    (lambda x: float(x[0]), TracedConversionError, r"float\(\)"),
    (lambda x: int(x[0]), TracedConversionError, r"int\(\)"),
    (lambda x: x[0].item(), TracedConversionError, r"item\(\)"),
    (lambda x: range(x[0]), TracedConversionError, r"index\(\)"),
    (assign, StateError, r"x\[i\] = v(.|\n)*x\.at\[i\]\.set\(v\)"),
    (assign_into, TracedConversionError, "needed: a bare array"),
    (add_into, StateError, "np.add: argument out"),
    (lambda x: np.exp(x, out=np.zeros(3)), StateError, r"np\.exp: argument out(.|\n)*y = np\.exp"),
    (lambda x: np.sum(x, out=np.zeros(())), StateError, r"np\.sum: argument out"),
    (lambda x: np.exp(x, where=x > 0), DifferentiationError, r"np\.where\(mask, f\(x\), other\)"),
    (lambda x: np.add.at(np.zeros(3), [0], x), DifferentiationError, r"np\.add\.at(.|\n)*spmd\.at\(x\)\[i\]\.add\(v\)"),
    (lambda x: np.frompyfunc(math.sin, 1, 1)(x), DifferentiationError, r"nearest are .*np\.sin(.|\n)*spmd\.custom_vjp"),
    (lambda x: np.sinh.outer(x, x), (DifferentiationError, ValueError), "outer"),
    (lambda x: hash(x), TypeError, "not hashable"),
]


@pytest.mark.parametrize(("f", "error", "words"), REFUSED)
def test_refused(f, error, words):
    with pytest.raises(error, match=words):
        grad(f)(X)
    assert grad(np.sum)(X).tolist() == [1, 1, 1]


def test_arguments_and_results_are_checked():
    with pytest.raises(DifferentiationError, match=r"grad of <lambda>: argument x(.|\n)*x\.astype\(float\)"):
        grad(lambda x: np.sum(x))(np.arange(3))
    with pytest.raises(DifferentiationError, match=r"argument p\['a'\]\[1\](.|\n)*str"):
        grad(lambda p: np.sum(p["a"][0]))({"a": [X, "s"]})
    with pytest.raises(DifferentiationError, match="argnums"):
        grad(lambda x: np.sum(x), 2)(X)
    with pytest.raises(DifferentiationError, match="argnums"):
        grad(lambda x: np.sum(x))(x=X)
    with pytest.raises(DifferentiationError, match=r"float64\[3\](.|\n)*a scalar"):
        grad(lambda x: x)(X)
    with pytest.raises(DifferentiationError, match="holomorphic"):
        grad(lambda x: np.sum(x * 1j))(X)


def test_leaked_arrays_are_refused():
    leaked = []

    def f(x):
        leaked.append(x)
        return np.sum(x)

    grad(f)(X)
    for use in (lambda x: x * 2, np.sum, lambda x: x[0], lambda x: at(x)[0].set(1.0)):
        with pytest.raises(DifferentiationError, match=r"already ended(.|\n)*has_aux=True"):
            use(leaked[0])
    assert "traced" in repr(leaked[0])


# Threads


def test_tapes_of_threads_are_separate():
    expected = grad(loss)(PARAMS, X)
    found, start = [], threading.Barrier(4)

    def work():
        start.wait()
        for _ in range(50):
            found.append(grad(lambda x: np.sum(grad(loss)(PARAMS, x)["b"]))(X) is not None and grad(loss)(PARAMS, X))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 200
    for g in found:
        np.testing.assert_array_equal(g["w"], expected["w"])


def test_a_closed_over_array_of_an_outer_tape_in_another_thread():
    """The tape belongs to the array, not to the thread."""
    results = []

    def f(x):
        thread = threading.Thread(target=lambda: results.append(np.sum(x**2)))
        thread.start()
        thread.join()
        return results.pop()

    np.testing.assert_array_equal(grad(f)(X), 2 * X)


# Who owns results


@pytest.mark.parametrize(
    "f",
    [np.tanh, np.exp, lambda x: x, lambda x: x.T, lambda x: x * 1.0],
    ids=["tanh", "exp", "itself", "transposed", "times one"],
)
def test_a_result_may_be_written_into(f):
    x = X.copy()
    y, pull = vjp(f, x)
    want = pull(np.ones(3))[0].copy()
    y -= 1
    np.testing.assert_array_equal(pull(np.ones(3))[0], want)
    np.testing.assert_array_equal(x, X)
    y, push = linearize(f, x)
    y -= 1
    np.testing.assert_array_equal(push(np.ones(3)), want)


def test_results_and_gradients_are_arrays_of_their_own():
    (a, b), pull = vjp(lambda x: (x, x), X)
    a[:] = 0
    assert b.tolist() == X.tolist()
    g = np.ones(3)
    pull((g, g))[0][:] = 5
    vjp(lambda x: x, X)[1](g)[0][:] = 5
    assert g.tolist() == [1, 1, 1]
    first, second = grad(lambda x, y: np.sum(x + y), (0, 1))(X, X)
    first[:] = 5
    assert second.tolist() == [1, 1, 1]


def test_an_index_may_change_after_it_was_used():
    index = [0, 1]
    _, pull = vjp(lambda x: x[index] * 1.0, X)
    index[0] = 2
    assert pull(np.ones(2))[0].tolist() == [1, 1, 0]


@pytest.mark.parametrize("x", [np.ma.array(X, mask=[0, 1, 0]), np.ones(3).view(type("Mine", (np.ndarray,), {}))])
def test_subclasses_of_arrays_are_no_arguments(x):
    with pytest.raises(DifferentiationError, match=r"a subclass of np\.ndarray(.|\n)*np\.asarray\(x\)"):
        grad(np.sum)(x)


def test_memory_maps_are_arguments(tmp_path):
    x = np.memmap(tmp_path / "x", float, "w+", shape=3)
    x[:] = X
    assert grad(lambda x: np.sum(x * x))(x).tolist() == (2 * X).tolist()


# Classes as pytrees


@tree.register
@dataclasses.dataclass
class Layer:
    w: np.ndarray
    b: np.ndarray
    name: str = dataclasses.field(default="layer", metadata={"static": True})


class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b


tree.register(Pair, lambda p: ((p.a, p.b), None), lambda _, children: Pair(*children))


def test_classes_of_users_are_pytrees():
    layer = Layer(np.ones((3, 2)), np.zeros(2), "first")
    g = grad(lambda layer: np.sum(X @ layer.w + 2 * layer.b))(layer)
    assert type(g) is Layer
    assert g.name == "first"
    assert g.b.tolist() == [2, 2]
    assert g.w.tolist() == [[x, x] for x in X]
    p = grad(lambda p: np.sum(p.a * p.b))(Pair(X, 2 * X))
    assert p.a.tolist() == (2 * X).tolist()
    assert p.b.tolist() == X.tolist()
    with spmd.Mesh(x=2):
        f = spmd.map(lambda p: Pair(p.a * 2, spmd.psum(np.sum(p.b), "x")), Pair(P("x"), P("x")), Pair(P("x"), P()))
        assert f(Pair(X, X)).b == X.sum()


def test_what_no_pytree_can_be_made_of():
    with pytest.raises(TypeError, match="a dataclass, or flatten and unflatten"):
        tree.register(dict)
    with pytest.raises(ValueError, match="registered"):
        tree.register(Pair, lambda p: ((p.a, p.b), None), lambda _, children: Pair(*children))
    with pytest.raises(DifferentiationError, match=r"spmd\.tree\.register"):
        grad(lambda p: 1.0)(object())
    with pytest.raises(DifferentiationError, match="pass numbers"):
        grad(lambda p: 1.0)("text")
    with pytest.raises(DifferentiationError, match=r"spmd\.grad\(f\)\(x\)"):
        grad(3.0)
    with pytest.raises(DifferentiationError, match=r"spmd\.hvp\(f, \(x,\), \(v,\)\)"):
        hvp(np.sum, X, X)


# Arrays that are spread over workers


def test_a_spread_array_becomes_whole_on_the_tape():
    v = np.arange(5.0)
    with spmd.Mesh(x=2):
        double = spmd.map(lambda a: a * 2, in_specs=P("x"), out_specs=P("x"))
        f = lambda x: np.sum(np.roll(double(x).numpy(), 1) ** 2 * v)
        check_grads(f, (v + 0.5,))
        x = spmd.put(v, P("x"))
        g = grad(lambda x: np.sum(np.cumsum(x.numpy())))(x)
        assert type(g) is spmd.PartitionedArray
        assert g.numpy().tolist() == [5, 4, 3, 2, 1]
