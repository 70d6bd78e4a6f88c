"""What is alive, and when: measured in arrays, by tracemalloc and weak references, not in seconds."""

from __future__ import annotations

import gc
import math
import tracemalloc
import weakref
from contextlib import contextmanager

import numpy as np
import pytest

import spmd
from spmd import P, functions
from spmd.autodiff import checkpoint, custom_vjp, grad, hvp, jacrev, jvp, linearize, value_and_grad, vjp
from spmd.autodiff.registry import primitive
from spmd.kernels.memory import pool

SIZE = 20_000
X = np.linspace(-1, 1, SIZE)


def arrays() -> float:
    """The bytes that Python holds, in arrays like X."""
    return tracemalloc.get_traced_memory()[0] / X.nbytes


@contextmanager
def measured():
    """Without the cycle collector: what is freed is freed because nothing refers to it."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


def peak(run) -> float:
    with measured():
        before = arrays()
        run()
        return tracemalloc.get_traced_memory()[1] / X.nbytes - before


def left(run) -> float:
    with measured():
        run()
        before = arrays()
        run()
        return arrays() - before


def step(x):
    return np.tanh(x) * 1.01


def chain(n: int):
    def f(x):
        for _ in range(n):
            x = step(x)
        return np.sum(x)

    return f


def blocks(n: int):
    """The same chain in √n checkpointed blocks of √n steps."""

    def block(x):
        for _ in range(math.isqrt(n)):
            x = step(x)
        return x

    def f(x):
        for _ in range(math.isqrt(n)):
            x = checkpoint(block)(x)
        return np.sum(x)

    return f


def test_memory_falls_while_the_sweep_goes():
    samples = []

    @custom_vjp
    def probe(x):
        return x * 1.0

    def bwd(_, g):
        samples.append(arrays())
        return (g,)

    probe.defvjp(lambda x: (x * 1.0, None), bwd)

    def f(x):
        for _ in range(20):
            x = probe(step(x))
        return np.sum(x)

    grad(f)(X)  # what is imported at the first call is not measured
    samples.clear()
    with measured():
        grad(f)(X)
    falls = -np.diff(samples)
    assert samples[0] > 18
    assert samples[-1] < 6
    assert falls.min() > -0.5
    # One array per step, but for the first ones, where cotangents come into being.
    assert np.abs(falls[3:] - 1).max() < 0.5


def test_every_array_is_dropped_once_the_sweep_has_passed_it():
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

    grad(f)(np.ones(3))


PRODUCTS = {
    "@": (lambda x, w: x @ w, (6, 4), (4, 5)),
    "np.matmul": (np.matmul, (2, 6, 4), (2, 4, 5)),
    "np.tensordot": (lambda x, w: np.tensordot(x, w, 1), (6, 4), (4, 3, 2)),
    "conv": (functions.conv, (2, 3, 6), (4, 3, 2)),
    "conv_transpose": (functions.conv_transpose, (2, 4, 5), (4, 3, 2)),
    "stencil": (lambda x, w: functions.stencil(x, [(-1,), (1,)], w), (7,), (2,)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_first_factor_is_dropped_before_its_own_cotangent_is_made(name):
    product, *shapes = PRODUCTS[name]
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape) for shape in shapes)
    gone = []

    def f(x, w):
        x = x * 2.0
        y = product(x, w)
        factor = weakref.ref(x.value)
        to_x, to_w = y.node.pulls

        def looking(*args, **kwargs):
            gone.append(factor() is None)
            return to_x(*args, **kwargs)

        y.node.pulls = looking, to_w
        return np.sum(y * y)

    once = grad(f, (0, 1))(x, w)
    assert gone == [True]
    _, pull = vjp(f, x, w)
    for _ in range(2):  # which takes the factor both times
        for a, b in zip(once, pull(np.ones(())), strict=True):
            np.testing.assert_array_equal(a, b)
    assert gone == [True, False, False]


def test_a_rule_of_a_user_keeps_its_residuals_alone():
    """Neither the argument nor the result, where the rule does not ask for them."""
    alive = []

    @custom_vjp
    def double(x):
        return x * 2

    def fwd(x):
        y = x * 2
        alive.extend((weakref.ref(x), weakref.ref(y)))
        return y, None

    double.defvjp(fwd, lambda _, g: (2 * g,))
    _, pull = vjp(lambda x: np.sum(double(x * 1.0) * 1.0), X)
    assert [r() for r in alive] == [None, None]
    assert pull(1.0)[0][0] == 2


FIRST_ORDER = [
    (grad, lambda f: grad(f)(X)),
    (vjp, lambda f: vjp(f, X)[1](1.0)),
]
SECOND_ORDER = [
    (hvp, lambda f: hvp(f, (X,), (X,))),
    (jvp, lambda f: jvp(f, (X,), (X,))),
    (grad, lambda f: grad(lambda x: np.sum(grad(f)(x) ** 2))(X)),
]


def fit(run) -> tuple[float, float]:
    """Arrays at the peak for n steps in √n blocks: the coefficient and the exponent of a power of n."""
    sizes = np.array([16, 64, 256])
    exponent, log = np.polyfit(np.log(sizes), np.log([peak(lambda n=n: run(blocks(n))) for n in sizes]), 1)
    return float(np.exp(log)), float(exponent)


@pytest.mark.parametrize("run", [r for _, r in FIRST_ORDER], ids=[t.__name__ for t, _ in FIRST_ORDER])
def test_checkpoints_hold_the_root_of_all_arrays(run):
    assert peak(lambda: run(chain(64))) > 64
    coefficient, exponent = fit(run)
    assert 0.35 < exponent < 0.55
    assert coefficient < 5
    assert peak(lambda: run(blocks(256))) < 2.5 * 16


@pytest.mark.parametrize("run", [r for _, r in SECOND_ORDER], ids=["hvp", "jvp", "grad of grad"])
def test_checkpoints_hold_the_root_of_all_arrays_at_second_order_too(run):
    assert peak(lambda: run(chain(64))) > 64
    coefficient, exponent = fit(run)
    assert 0.3 < exponent < 0.55
    assert coefficient < 12


LEFT = {
    "grad": lambda: grad(chain(8))(X),
    "grad of grad": lambda: grad(lambda x: np.sum(grad(blocks(9))(x) ** 2))(X),
    "vjp": lambda: vjp(chain(8), X),
    "vjp, swept": lambda: vjp(chain(8), X)[1](1.0),
    "vjp of checkpoints": lambda: vjp(blocks(9), X)[1](1.0),
    "linearize": lambda: linearize(chain(8), X)[1](X),
    "jvp": lambda: jvp(blocks(9), (X,), (X,)),
    "hvp": lambda: hvp(blocks(9), (X,), (X,)),
    "jacrev": lambda: jacrev(chain(8))(X),
    "a closure": lambda: grad(lambda x: np.sum(checkpoint(lambda: np.sin(x))()))(X),
}


@pytest.mark.parametrize("case", LEFT)
def test_nothing_is_left_to_the_cycle_collector(case):
    assert left(LEFT[case]) < 0.5


# Long tapes


def long_chain(n: int) -> None:
    def f(x):
        for _ in range(n):
            x = x * 1.0
        return x

    x = np.array(2.0)
    assert value_and_grad(f)(x) == (2.0, 1.0)
    kept = []
    value, pull, _ = vjp(lambda x: (f(x), kept.append(x)), x, has_aux=True)
    assert pull(1.0)[0] == 1
    # The first array and the last result hold the two ends of the tape; it goes without recursion.
    del pull
    kept.clear()
    del value
    assert jvp(f, (x,), (x,)) == (2.0, 2.0)


def test_a_long_chain_needs_no_recursion():
    long_chain(100_000)


@pytest.mark.full
def test_a_million_operations():
    long_chain(1_000_000)


def test_a_traced_array_that_outlives_its_long_tape():
    kept = []

    def f(x):
        for _ in range(100_000):
            x = x * 1.0
        kept.append(x)
        return x

    _, pull = vjp(f, np.array(2.0))
    del pull
    kept.clear()


@pytest.mark.parametrize("held", [False, True])
def test_the_cotangent_of_a_part_goes_into_that_of_the_whole_if_nobody_else_has_it(held):
    made, kept = [], []

    def back(g, _ans, _x):
        out = 2.0 * g
        made.append(out.ctypes.data)
        kept.extend([out] * held)
        return out

    twice = primitive("twice", back)(lambda x: 2.0 * x)

    def f(x):
        part = x[2:4]  # before, so that its cotangent comes after
        return np.sum(twice(x)) + np.sum(part)

    g = grad(f)(np.ones(1000))
    assert (g.ctypes.data == made[0]) is not held
    np.testing.assert_array_equal(g, 2.0 + np.isin(np.arange(1000), (2, 3)))
    assert all(np.all(out == 2.0) for out in kept)


@pytest.mark.parametrize("scheduler", ["lockstep", "threads"])
def test_the_sum_of_large_gradients_is_written_over_one_of_them(scheduler):
    """In a bucket that is full while the sweep goes on. Of two workers there are two terms, and nothing more."""
    n = 1024
    w, x = np.ones((n, n), np.float32), np.ones((4, n), np.float32)
    mesh = spmd.Mesh(x=2, transport="local", scheduler=scheduler)
    loss = mesh.map(lambda w, x: spmd.psum(np.sum((x @ w) ** 2), "x"), in_specs=(P(), P("x")), out_specs=P())
    args = spmd.put((w, x), (P(), P("x")), mesh)
    step = grad(loss)
    np.testing.assert_allclose(step(*args).numpy(), 2 * x.T @ (x @ w))
    step(*args)
    pool.release()
    assert peak(lambda: step(*args)) * X.nbytes < 2.5 * w.nbytes
