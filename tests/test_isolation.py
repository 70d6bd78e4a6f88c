"""Tapes in different threads, greenlets and generators never see each other; exceptions leave no state behind."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import greenlet
import numpy as np
import pytest

from spmd.autodiff import checkpoint, custom_vjp, grad, hessian, jacfwd, jvp, linearize, value_and_grad, vjp
from spmd.autodiff.tape import ACTIVE
from spmd.errors import ClosureError, DifferentiationError

X = np.array([0.5, -1.0, 2.0])


class Own(Exception):
    pass


@pytest.fixture(autouse=True)
def nothing_is_left():
    assert ACTIVE.get() == ()
    yield
    assert ACTIVE.get() == ()


def work(k: int, pause):
    """A nested transformation that pauses wherever a tape is open, and its right result."""
    c = float(k + 1)

    def inner(y, x):
        pause()
        return np.sum(checkpoint(lambda y: (pause(), np.sin(y) * x * c)[1])(y))

    def outer(x):
        pause()
        g = grad(inner)(x, x)
        pause()
        return np.sum(g * x)

    found = value_and_grad(outer)(X), jvp(outer, (X,), (X,)), hessian(outer)(X)
    f = lambda x: c * np.cos(x) * x * x
    d = c * (2 * X * np.cos(X) - X * X * np.sin(X))
    dd = c * (2 * np.cos(X) - 4 * X * np.sin(X) - X * X * np.cos(X))
    expected = (np.sum(f(X)), d), (np.sum(f(X)), d @ X), np.diag(dd)
    return found, expected


def same(found, expected):
    for a, b in zip(found[0] + found[1] + found[2:], expected[0] + expected[1] + expected[2:], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


# Greenlets


@pytest.mark.parametrize("seed", range(5))
def test_interleaved_greenlets_with_open_tapes(seed):
    """Every greenlet stops wherever it has a tape open; who goes on is drawn."""
    rng, results = random.Random(seed), {}
    hub = greenlet.getcurrent()
    lets = [greenlet.greenlet(lambda k=k: results.update({k: work(k, hub.switch)})) for k in range(4)]
    switches = 0
    while alive := [let for let in lets if not let.dead]:
        rng.choice(alive).switch()
        switches += 1
        assert ACTIVE.get() == ()
    assert switches > 40
    for k in range(4):
        same(*results[k])


def test_a_greenlet_that_fails_leaves_the_others_alone():
    hub, results = greenlet.getcurrent(), []

    def fails():
        def f(x):
            hub.switch()
            raise Own

        with pytest.raises(Own):
            grad(lambda x: np.sum(checkpoint(f)(grad(np.sum)(x) * x)))(X)
        results.append(ACTIVE.get())
        results.append(work(0, lambda: None))

    lets = [greenlet.greenlet(fails), greenlet.greenlet(lambda: results.append(work(1, hub.switch)))]
    while alive := [let for let in lets if not let.dead]:
        for let in alive:
            let.switch()
    assert results[0] == ()
    for r in results[1:]:
        same(*r)


def test_a_greenlet_that_is_killed_inside_a_transformation():
    hub = greenlet.getcurrent()
    let = greenlet.greenlet(lambda: grad(lambda x: np.sum(hub.switch() * x))(X))
    let.switch()
    let.throw()
    assert let.dead
    same(*work(0, lambda: None))


# Threads


def test_threads_with_open_tapes():
    results, barrier = {}, threading.Barrier(4)
    threads = [
        threading.Thread(target=lambda k=k: results.update({k: work(k, lambda: barrier.wait(60))})) for k in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 4
    for k in range(4):
        same(*results[k])


def test_a_refusal_here_is_none_in_another_thread():
    """While one thread runs a custom_vjp, which may not record on outer tapes, another records on its own."""
    inside, done = threading.Event(), threading.Event()
    results = []

    @custom_vjp
    def f(x):
        return x * 2

    def fwd(x):
        inside.set()
        assert done.wait(60)
        return x * 2, None

    f.defvjp(fwd, lambda _, g: (2 * g,))
    thread = threading.Thread(target=lambda: results.append(grad(lambda x: np.sum(f(x)))(X)))
    thread.start()
    assert inside.wait(60)
    same(*work(1, lambda: None))
    done.set()
    thread.join()
    np.testing.assert_array_equal(results[0], np.full(3, 2.0))


# Coroutines and generators


def test_interleaved_coroutines():
    """A transformation cannot await; between two of them, pullbacks of several tasks live side by side."""

    async def task(k):
        _, pull = vjp(lambda x: np.sin(x) * (k + 1), X)
        await asyncio.sleep(0)
        _, push = linearize(lambda x: pull(x)[0], X)
        await asyncio.sleep(0)
        return push(X)

    async def run():
        return await asyncio.gather(*map(task, range(4)))

    for k, found in enumerate(asyncio.run(run())):
        np.testing.assert_allclose(found, (k + 1) * np.cos(X) * X)


def test_a_generator_suspended_inside_a_transformation():
    def steps(x):
        while True:
            x = np.sin(x)
            yield x

    kept = []

    def f(x):
        g = steps(x)
        kept.append(g)
        return np.sum(next(g) * next(g))

    s = np.sin(X)
    expected = np.cos(X) * np.sin(s) + s * np.cos(s) * np.cos(X)
    np.testing.assert_allclose(grad(f)(X), expected)
    np.testing.assert_allclose(jacfwd(f)(X), expected)
    for g in kept:  # its arrays outlived their tape: going on is an error, and harms no other tape
        with pytest.raises(DifferentiationError, match="already ended"):
            grad(lambda x, g=g: np.sum(next(g) * x))(X)
    np.testing.assert_allclose(grad(f)(X), expected)


def test_a_generator_that_transforms_between_yields():
    def gradients(x):
        while True:
            x = x - 0.1 * grad(lambda x: np.sum(x**2))(x)
            yield x

    def f(x):
        g = gradients(x)
        h = gradients(x * 2)
        return np.sum(next(g) * next(h)) + np.sum(next(g))

    np.testing.assert_allclose(grad(f)(X), 2 * 0.8 * 1.6 * X + 0.64)


# Exceptions


def fails(*_):
    raise Own


def rule_that_fails():
    f = custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, None), fails)
    return f


EXCEPTIONS = {
    "in the function": lambda: grad(fails)(X),
    "in an inner gradient": lambda: grad(lambda x: grad(fails)(x) + x)(X),
    "in a checkpoint": lambda: grad(lambda x: np.sum(checkpoint(fails)(x)))(X),
    "in a checkpoint in a checkpoint": lambda: grad(checkpoint(lambda x: np.sum(checkpoint(fails)(x * x))))(X),
    "in a backward function": lambda: grad(lambda x: np.sum(rule_that_fails()(x)))(X),
    "in a backward function of a second order": lambda: hessian(lambda x: np.sum(rule_that_fails()(x * x)))(X),
    "in a backward function in a checkpoint": lambda: grad(checkpoint(lambda x: np.sum(rule_that_fails()(x))))(X),
    "in a vjp": lambda: vjp(fails, X),
    "in a jvp": lambda: jvp(lambda x: grad(fails)(x), (X,), (X,)),
    "in a Jacobian of a Jacobian": lambda: jacfwd(jacfwd(fails))(X),
}


@pytest.mark.parametrize("case", EXCEPTIONS)
def test_exceptions_leave_nothing_behind(case):
    for _ in range(2):
        with pytest.raises(Own):
            EXCEPTIONS[case]()
        assert ACTIVE.get() == ()
        same(*work(0, lambda: None))


@pytest.mark.parametrize("case", EXCEPTIONS)
def test_exceptions_that_are_caught_inside_an_outer_transformation(case):
    def recovers(x):
        y = np.sin(x)
        with pytest.raises(Own):
            EXCEPTIONS[case]()
        return np.sum(x * checkpoint(np.sin)(y))

    y = np.sin(X)
    np.testing.assert_allclose(grad(recovers)(X), np.sin(y) + X * np.cos(y) * np.cos(X))


def test_a_refusal_that_is_caught_leaves_the_tape_open():
    def f(x):
        g = custom_vjp(lambda a: a * x)
        g.defvjp(lambda a: (a * x, None), lambda _, c: (c,))
        with pytest.raises(ClosureError):
            g(x)
        return np.sum(x * x)

    np.testing.assert_array_equal(grad(f)(X), 2 * X)


def test_a_checkpoint_that_fails_while_it_is_computed_again():
    calls = []

    def body(y, x):
        calls.append(1)
        if len(calls) == 2:
            raise Own
        return y * x

    with pytest.raises(Own):
        grad(lambda x: np.sum(checkpoint(lambda y: body(y, x))(x)))(X)
    np.testing.assert_array_equal(grad(lambda x: np.sum(checkpoint(lambda y: body(y, x))(x)))(X), 2 * X)


# Threads that share a tape


@pytest.fixture
def switching():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_record_on_one_tape(switching):
    def work(x, k):
        for _ in range(300):
            x = np.sin(x) + k * 0.01
        return np.sum(x)

    def together(x):
        with ThreadPoolExecutor(4) as pool:
            return sum(pool.map(lambda k: work(x, k), range(8)))

    x = np.array([1.0, 2.0, 3.0])
    want = grad(lambda x: sum(work(x, k) for k in range(8)))(x)
    for _ in range(5):
        np.testing.assert_allclose(grad(together)(x), want, rtol=1e-12)


def test_threads_call_one_pullback(switching):
    x = np.array([1.0, 2.0, 3.0])

    def f(x):
        return np.sum(checkpoint(lambda y: np.sin(x * y) * x)(2 * x))  # closes over x

    _, pull = vjp(f, x)
    want = pull(1.0)[0]
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: pull(1.0)[0], range(100)):
            np.testing.assert_array_equal(got, want)
