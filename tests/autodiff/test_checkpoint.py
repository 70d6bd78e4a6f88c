"""`checkpoint` compares what it computes again with what it gave at first, and raises where they differ."""

from __future__ import annotations

import functools
import itertools
import re
import sys

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.autodiff import checkpoint, grad, hessian, value_and_grad, vjp
from spmd.autodiff.sketch import BLOCK, rounding, sketch, slack
from spmd.autodiff.sketch import differ as differ_by_sketch
from spmd.errors import DifferentiationError

X = np.array([0.1, 0.3])
ANOTHER = r"other values (.|\n)*lambda y, i=i"


def total(x):
    return sum(
        np.sum(np.real(leaf)) for leaf in spmd.tree.leaves(x) if np.asarray(spmd.stop_gradient(leaf)).dtype.kind in "fc"
    )


def chain(checkpointed, bound):
    def f(x):
        y = x
        for i in range(3):
            late = lambda y: np.tanh(y * (i + 1.0))  # noqa: B023 - this is the mistake
            y = checkpointed((lambda y, i=i: np.tanh(y * (i + 1.0))) if bound else late)(y)
        return np.sum(y)

    return f


def test_a_lambda_over_the_variable_of_a_loop():
    with pytest.raises(DifferentiationError, match=ANOTHER) as raised:
        grad(chain(checkpoint, bound=False))(X)
    line = chain.__code__.co_firstlineno + 4
    assert re.match(rf"checkpoint of <lambda>, .*test_checkpoint\.py:{line}: result\n", str(raised.value))
    np.testing.assert_allclose(grad(chain(checkpoint, bound=True))(X), grad(chain(lambda f: f, bound=True))(X))


def test_named_functions_partials_and_objects_are_named():
    class Step:
        def __init__(self):
            self.n = 0.0

        def __call__(self, y):
            self.n += 1
            return y * self.n

    def step(y, counts):
        counts.append(1)
        return y * len(counts)

    for f, name in ((Step(), "Step"), (functools.partial(step, counts=[]), "step")):
        with pytest.raises(DifferentiationError, match=rf"checkpoint of {name}, .*test_checkpoint\.py:\d+"):
            grad(lambda x, f=f: np.sum(checkpoint(f)(x)))(X)


def counter():
    numbers = itertools.count(1)
    return lambda: float(next(numbers))


def changing():
    """Functions that give something else when they are called again."""
    rng = np.random.default_rng(0)
    yield "a stateful generator", lambda y: y * rng.normal(size=2)
    n = counter()
    yield "a counter", lambda y: np.sin(y) + n()
    m = counter()
    yield "one entry of many", lambda y: np.concatenate([np.ones(10 * BLOCK), y[:1] * m(), np.ones(77)])
    p = counter()
    yield "the order of entries", lambda y: np.roll(np.concatenate([y, np.arange(5.0)]), int(p()))
    order = counter()
    yield "whole blocks", lambda y: np.roll(np.concatenate([y, np.arange(3.0 * BLOCK - 2)]), BLOCK * int(order()))
    a = counter()
    yield "in a pytree", lambda y: {"a": y, "b": (y * 2, [y * a()])}
    b = counter()
    yield "integers", lambda y: (y, np.arange(3) * int(b()))
    c = counter()
    yield "booleans", lambda y: (y, np.arange(3) > c())
    d = counter()
    yield "complex", lambda y: y * (1 + 1e-3j * d())
    e = counter()
    yield "where NaN is", lambda y: y + np.array([[np.nan, 0], [0, np.nan]])[int(e()) % 2]
    f = counter()
    yield "which infinity", lambda y: y + np.inf * (-1) ** f()
    g = counter()
    yield "beside an infinity", lambda y: np.concatenate([y * g(), [np.inf]])
    h = counter()
    yield "the shape", lambda y: np.ones(int(h())) * y[0]
    k = counter()
    yield "the dtype", lambda y: y.astype("f4" if k() > 1 else "f8")
    tree = counter()
    yield "the structure", lambda y: (y, y) if tree() > 1 else [y, y]
    large = counter()
    yield "very large numbers", lambda y: y * 1e200 * large()
    nested = counter()
    yield "in a nested one", lambda y: np.sin(checkpoint(lambda z: z * nested())(y))
    written = np.ones(2)

    def writes(y):
        written[0] += 1
        return y * written

    yield "an array written into", writes
    half = counter()
    yield "half precision", lambda y: y.astype("f2") * half()


@pytest.mark.parametrize("case", range(len(list(changing()))), ids=[name for name, _ in changing()])
@pytest.mark.parametrize("around", ["plain", "closure", "hessian", "vjp"])
def test_what_changes_raises(case, around):
    _, f = list(changing())[case]
    call = (lambda x: checkpoint(f)(x)) if around != "closure" else (lambda x: checkpoint(lambda: f(x))())
    run = {
        "plain": lambda: grad(lambda x: total(call(x)))(X),
        "closure": lambda: grad(lambda x: total(call(x)))(X),
        "hessian": lambda: hessian(lambda x: total(call(x)))(X),
        "vjp": lambda: vjp(lambda x: total(call(x)), X)[1](1.0),
    }[around]
    with np.errstate(all="ignore"), pytest.raises(DifferentiationError, match="when it is called again"):
        run()


SAME = {
    "NaN": lambda y: y * np.array([np.nan, 1.0]),
    "infinities": lambda y: y + np.array([np.inf, -np.inf]),
    "huge": lambda y: y * 1e307,
    "tiny": lambda y: y * 5e-324,
    "empty": lambda y: (y[:0], np.zeros((0, 3)), y),
    "integers, booleans, strings and None": lambda y: (y, np.arange(3), y > 0, True, 3, "a", None, np.array(["b"])),
    "complex": lambda y: np.exp(1j * y),
    "structured": lambda y: (y, np.zeros(2, [("a", int), ("b", float)])),
    "objects": lambda y: (y, np.array([object()], dtype=object)),
    "keys": lambda y: y * spmd.random.normal(spmd.random.key(3), (2,)),
    "a generator made inside": lambda y: y * np.random.default_rng(3).normal(size=2),
    "half precision": lambda y: y.astype("f2"),
    "long double": lambda y: y.astype(np.longdouble),
    "not contiguous": lambda y: np.outer(y, np.arange(4.0)).T[::2],
    "large": lambda y: np.outer(y, np.arange(3.0 * BLOCK + 5)),
    "a number": lambda y: float(np.pi),
    "nested": lambda y: checkpoint(lambda z: np.sin(checkpoint(np.exp)(z)))(y),
}


@pytest.mark.parametrize("case", SAME)
def test_what_stays_the_same_passes(case):
    f = SAME[case]
    with np.errstate(all="ignore"):
        for order in (grad, lambda f: grad(lambda x: np.sum(grad(f)(x)))):
            found = order(lambda x: total(checkpoint(f)(x)) + np.sum(x * x))(X)
            np.testing.assert_array_equal(found, order(lambda x: total(f(x)) + np.sum(x * x))(X))


def test_what_may_be_rounding_of_larger_numbers_is_told():
    n = counter()
    with pytest.warns(RuntimeWarning, match=r"other values (.|\n)*rounding of the largest numbers"):
        grad(lambda x: np.sum(checkpoint(lambda y: y * 1e-200 * n())(x)))(X)


@pytest.mark.filterwarnings("ignore:checkpoint of f:RuntimeWarning")
def test_rounding_passes():
    """What is computed in another order when it is called again differs by rounding only."""
    rng = np.random.default_rng(0)
    for dtype, n in itertools.product("fd", (3, 300, 30_000)):
        w = rng.normal(size=(4, n)).astype(dtype)
        calls = []

        def f(y, w=w, calls=calls):
            calls.append(1)
            p = rng.permutation(w.shape[1]) if len(calls) > 1 else np.arange(w.shape[1])
            exact = w[:, p] @ y[p]
            return exact, exact - w @ y, y.astype("f8") * 2  # the second is nothing but rounding

        x = rng.normal(size=n).astype(dtype)
        grad(lambda x, f=f: total(checkpoint(f)(x)))(x)
        assert len(calls) == 2


def bodies():
    yield "late", False, lambda x: chain(spmd.checkpoint, bound=False)(x)
    yield "bound", True, lambda x: chain(spmd.checkpoint, bound=True)(x)
    yield "a collective", True, lambda x: np.sum(spmd.checkpoint(lambda y: spmd.psum(np.sin(y), "x") * y)(x))
    yield (
        "a key",
        True,
        lambda x: np.sum(spmd.checkpoint(lambda y: y * spmd.random.normal(spmd.random.key(1), (2,), spec=P()))(x)),
    )

    def stateful(x):
        stream = spmd.random.default_rng(0, "x")
        return np.sum(spmd.checkpoint(lambda y: y * stream.normal(size=y.shape))(x))

    yield "a stream", False, stateful

    def one_worker(x):
        n = counter() if spmd.worker_index("x") == 1 else (lambda: 1.0)
        return np.sum(spmd.checkpoint(lambda y: spmd.psum(y * n(), "x") * y)(x))

    yield "one worker's counter, and a collective", False, one_worker


@pytest.mark.parametrize(("name", "right", "body"), list(bodies()), ids=[name for name, *_ in bodies()])
@pytest.mark.parametrize("where", ["inside", "outside", "jit"])
def test_in_bodies(scheduler, monkeypatch, name, right, body, where):
    blocks = np.random.default_rng(1).normal(size=(6,))
    mesh = spmd.Mesh(x=3, scheduler=scheduler)

    def run():
        if where == "outside":
            summed = spmd.map(lambda x: spmd.psum(body(x), "x"), P("x"), P(), mesh=mesh)
            return np.asarray(grad(summed)(blocks))
        mapped = spmd.map(grad(body), P("x"), P("x"), mesh=mesh)
        if where == "jit":
            mapped = spmd.jit(mapped)
        return [mapped(blocks).numpy() for _ in range(3)][-1]

    if not right:
        with pytest.raises(DifferentiationError, match="when it is called again"):
            run()
        return
    found = run()
    monkeypatch.setattr(spmd, "checkpoint", lambda f: f)
    np.testing.assert_allclose(found, run(), rtol=1e-12)


def test_around_a_map(scheduler):
    mesh = spmd.Mesh(x=3, scheduler=scheduler)
    n = counter()
    mapped = spmd.map(lambda x, n: spmd.psum(np.sum(np.sin(x) * n), "x"), (P("x"), None), P(), mesh=mesh)
    x = np.random.default_rng(0).normal(size=5)
    f = lambda scale: grad(lambda x: checkpoint(lambda y: mapped(y, scale()))(x))
    with pytest.raises(DifferentiationError, match=ANOTHER):
        f(n)(x)
    np.testing.assert_allclose(np.asarray(f(lambda: 2.0)(x)), 2 * np.cos(x))


def test_a_value_is_sketched_where_it_is_differentiated_only(monkeypatch):
    made = []
    module = sys.modules["spmd.autodiff.checkpoint"]
    monkeypatch.setattr(module, "sketch", lambda x: made.append(x) or sketch(x))
    checkpoint(np.sin)(X)
    grad(lambda x: np.sum(x) + np.sum(checkpoint(np.sin)(X)))(X)
    assert made == []
    value_and_grad(lambda x: np.sum(checkpoint(np.sin)(x)))(X)
    assert len(made) == 2


# Sketches


def differ(x, y):
    first, second = sketch(x), sketch(y)
    assert first is not None
    assert second is not None
    return differ_by_sketch(first, second, rounding([x.dtype]))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("n", [1, 2, 100, BLOCK, 3 * BLOCK + 7])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_sketches_tell_apart(dtype, n, scale):
    rng = np.random.default_rng(n)
    if dtype == "f2" and scale != 1:
        pytest.skip("no numbers of half precision")
    x = (rng.normal(size=n) * scale).astype(dtype)
    eps = np.finfo(x.dtype).eps
    assert not differ(x, x.copy())
    near = (x * (1 + eps * rng.uniform(-8, 8, n))).astype(dtype)
    assert not differ(x, near)
    for k in rng.integers(0, n, 20):
        other = x.copy()
        other[k] += np.abs(x).max()
        assert differ(x, other)
    if n > 1:
        assert differ(x, np.roll(x, 1))
    assert differ(x, -x)
    with_nan = x.copy()
    with_nan[n // 2] = np.nan
    assert differ(x, with_nan)
    assert not differ(with_nan, with_nan.copy())


def test_slack_is_the_rounding_of_the_largest():
    assert slack([np.array([1.0, -4.0, np.inf, 0]), np.arange(3)]) == 80 * 4 * np.finfo(float).eps


def mixed_derivative(checkpointed):
    """By u of the gradient by w of a block, called twice, that closes over w."""

    def slope(u):
        block = lambda w: checkpointed(lambda u: np.tanh(w * u))
        return np.sum(grad(lambda w: np.sum(block(w)(block(w)(u))))(X))

    return grad(slope)(X + 1)


def within_a_block(checkpointed):
    """Twice by w of a block within a block that closes over w; what it is called with depends on nothing."""

    def f(w):
        inner = lambda u: checkpointed(lambda u: np.sin(u) * w)(u * 0.5)
        return np.sum(checkpointed(lambda u: inner(inner(u)))(np.ones(2)) ** 2)

    return hessian(f)(X), hessian(lambda w: np.sum(np.cos(checkpointed(lambda u: u * checkpointed(np.sin)(w))(X))))(X)


@pytest.mark.parametrize("of_blocks", [mixed_derivative, within_a_block])
def test_second_derivatives_by_what_blocks_close_over(of_blocks):
    for got, want in zip(of_blocks(checkpoint), of_blocks(lambda f: f), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-13)
