"""Transformations: values, nesting, and what they refuse, by the words."""

from __future__ import annotations

import math
import threading
import weakref

import numpy as np
import pytest

from spmd.autodiff import (
    at,
    checkpoint,
    custom_vjp,
    grad,
    hessian,
    hvp,
    jacfwd,
    jacrev,
    jvp,
    linear_transpose,
    linearize,
    stop_gradient,
    value_and_grad,
    vjp,
)
from spmd.autodiff.check import check_grads
from spmd.autodiff.tracer import Array
from spmd.errors import ClosureError, DifferentiationError, StateError, TracedConversionError

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
    assert value[0] is X


def test_pullbacks_refuse_other_shapes_and_structures():
    _, pull = vjp(lambda x: x * 2, X)
    with pytest.raises(DifferentiationError, match=r"argument cotangent(.|\n)*shape \[3\](.|\n)*np\.broadcast_to"):
        pull(np.ones(2))
    with pytest.raises(DifferentiationError, match="structure"):
        pull((X, X))


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


def test_linear_transpose():
    A = np.arange(6.0).reshape(2, 3)
    (g,) = linear_transpose(lambda x: A @ x, X)(np.array([1.0, 2.0]))
    np.testing.assert_array_equal(g, A.T @ [1.0, 2.0])


# Jacobians


def test_jacobians_agree():
    def f(x):
        return np.outer(np.sin(x), x**2)[:2]

    rows, columns = jacrev(f)(X), jacfwd(f)(X)
    assert rows.shape == (2, 3, 3)
    np.testing.assert_allclose(rows, columns, atol=1e-15)
    h = 1e-6
    for j, e in enumerate(np.eye(3)):
        np.testing.assert_allclose(rows[..., j], (f(X + h * e) - f(X - h * e)) / (2 * h), atol=1e-8)


def test_jacobians_of_trees_argnums_and_nothing():
    out = jacrev(lambda x, p: {"a": x * p["s"], "b": np.sum(p["s"])}, (0, 1))(X, {"s": X})
    np.testing.assert_array_equal(out["a"][0], np.diag(X))
    np.testing.assert_array_equal(out["a"][1]["s"], np.diag(X))
    np.testing.assert_array_equal(out["b"][0], np.zeros(3))
    assert jacrev(lambda x: x[:0])(X).shape == (0, 3)
    assert jacfwd(lambda x: x * 2)(np.zeros(0)).shape == (0, 0)
    jacobian, aux = jacrev(lambda x: (x**2, "aux"), has_aux=True)(X)
    np.testing.assert_array_equal(jacobian, np.diag(2 * X))
    assert aux == "aux"
    np.testing.assert_allclose(jacrev(lambda z: z**2, holomorphic=True)(X * 1j), np.diag(2j * X))


def test_hessian_and_hvp():
    def f(x):
        return np.sum(x**3) + x[0] * x[1]

    expected = np.diag(6 * X) + np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(hessian(f)(X), expected)
    np.testing.assert_allclose(hvp(f, (X,), (np.ones(3),))[0], expected @ np.ones(3))
    np.testing.assert_allclose(jacfwd(jacrev(f))(X), expected)
    np.testing.assert_allclose(jacrev(jacfwd(f))(X), expected)


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


def test_gradient_steps_inside_a_gradient():
    def trained(rate):
        x = X
        for _ in range(3):
            x = x - rate * grad(lambda x: np.sum(x**4) / 4)(x)
        return np.sum(x**2)

    check_grads(trained, (np.array(0.01),))


# Long tapes


def test_a_long_chain_needs_no_recursion():
    def f(x):
        for _ in range(200_000):
            x = x * 1.0
        return x

    assert value_and_grad(f)(2.0) == (2.0, 1.0)
    value, pull = vjp(f, 2.0)
    assert pull(1.0)[0] == 1
    del value, pull


def test_memory_is_freed_as_the_sweep_goes():
    later = []

    @custom_vjp
    def first(x):
        return x * 1.0

    def bwd(_, g):
        assert len(later) == 4
        assert all(r() is None for r in later)
        return (g,)

    first.defvjp(lambda x: (x * 1.0, None), bwd)

    def f(x):
        x = first(x)
        for _ in range(4):
            y = np.exp(x)
            later.append(weakref.ref(y.value))
            x = y * 0.1
        return np.sum(x)

    grad(f)(X)


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


def test_checkpoint_refuses_closures():
    with pytest.raises(ClosureError, match=r"checkpoint of <lambda>(.|\n)*pass the array as an argument"):
        grad(lambda x: np.sum(checkpoint(lambda y: y * x)(x)))(X)
    assert grad(lambda x: np.sum(checkpoint(lambda y, z: y * z)(x, x)))(X).tolist() == (2 * X).tolist()


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


def test_custom_vjp_with_nondiff_argnums_and_trees():
    def fwd(power, p):
        return {"out": p["x"] ** power}, p["x"]

    def bwd(power, x, g):
        return ({"x": power * x ** (power - 1) * g["out"], "unused": np.zeros(2)},)

    f = custom_vjp(lambda power, p: {"out": p["x"] ** power}, nondiff_argnums=(0,))
    f.defvjp(fwd, bwd)
    g = grad(lambda p: np.sum(f(3, p)["out"]))({"x": X, "unused": np.ones(2)})
    np.testing.assert_array_equal(g["x"], 3 * X**2)
    np.testing.assert_array_equal(g["unused"], np.zeros(2))


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
    (lambda x: np.add.at(np.zeros(3), [0], x), DifferentiationError, r"np\.add\.at(.|\n)*x\.at\[i\]\.add\(v\)"),
    (lambda x: np.frompyfunc(math.sin, 1, 1)(x), DifferentiationError, r"nearest are np\.sin(.|\n)*spmd\.custom_vjp"),
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
    with pytest.raises(DifferentiationError, match=r"jacrev(.|\n)*real results"):
        jacrev(lambda x: x * 1j)(X)


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


# Exceptions and threads


def test_exceptions_leave_nothing_behind():
    class Own(Exception):
        pass

    def fails(x):
        raise Own

    for f in (
        lambda: grad(fails)(X),
        lambda: grad(lambda x: grad(fails)(x) + x)(X),
        lambda: grad(lambda x: np.sum(checkpoint(fails)(x)))(X),
        lambda: vjp(fails, X),
    ):
        with pytest.raises(Own):
            f()

    def recovers(x):
        try:
            checkpoint(fails)(x)
        except Own:
            return np.sum(x * checkpoint(np.sin)(x))

    np.testing.assert_allclose(grad(recovers)(X), np.sin(X) + X * np.cos(X))


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
