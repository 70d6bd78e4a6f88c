"""The tape against its peers: HIPS autograd, torch's eager tape, derivatives written by hand, and bare NumPy.

Run: python benchmarks/tape.py. It needs `pip install -e ".[bench]"`. One BLAS thread for all. Every gradient is
compared before it is timed.
"""

from __future__ import annotations

import functools

import autograd
import autograd.numpy as anp
import numpy as np
import torch
from threadpoolctl import threadpool_limits
from timing import interleaved

import spmd
from spmd import P

RNG = np.random.default_rng(0)
LENGTH = 20


def chain(step, length=LENGTH):
    """The sum of x after so many steps, in the NumPy of the tape that is timed."""

    def f(x, xp=np):
        for _ in range(length):
            x = step(x, xp)
        return xp.sum(x)

    return f


def against_autograd(name: str, step, x, length=LENGTH) -> None:
    f = chain(step, length)
    ours, theirs = spmd.value_and_grad(f), autograd.value_and_grad(lambda x: f(x, anp))
    np.testing.assert_allclose(ours(x)[1], theirs(x)[1], rtol=1e-9, atol=1e-12)
    plain, a, b = (t / length * 1e6 for t in interleaved(lambda: f(x), lambda: ours(x), lambda: theirs(x)))
    print(f"{name:30}{plain:10.2f}{a:10.2f}{b:10.2f}{a / b:10.2f}")


def small() -> None:
    n = 10
    c, m = RNG.normal(size=n), RNG.normal(size=(n, n)) / n
    index = RNG.integers(0, n, n)
    steps = {
        "add": lambda x, xp: x + c,
        "multiply": lambda x, xp: x * c,
        "tanh": lambda x, xp: xp.tanh(x),
        "matmul": lambda x, xp: m @ x,
        "x[::-1]": lambda x, xp: x[::-1],
        "x[array]": lambda x, xp: x[index],
        "all of them": lambda x, xp: xp.tanh(m @ x + c)[index][::-1] * c,
    }
    print(f"\nValue and gradient, chains of {10 * LENGTH} steps on {n} entries: µs per step")
    print(f"{'':30}{'NumPy':>10}{'spmd':>10}{'autograd':>10}{'ratio':>10}")
    for name, step in steps.items():
        against_autograd(name, step, RNG.normal(size=n), 10 * LENGTH)


def sizes() -> None:
    print("\nThe same by size, x = tanh(x * c + x): µs per step")
    print(f"{'entries':30}{'NumPy':>10}{'spmd':>10}{'autograd':>10}{'ratio':>10}")
    for n in (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000):
        c = RNG.normal(size=n)
        against_autograd(f"{n:,}", lambda x, xp, c=c: xp.tanh(x * c + x), RNG.normal(size=n), LENGTH if n < 1e5 else 3)
    print("and x = tanh(m @ x), m of n × n:")
    for n in (10, 100, 300):
        m = RNG.normal(size=(n, n)) / n
        against_autograd(f"{n} × {n}", lambda x, xp, m=m: xp.tanh(m @ x), RNG.normal(size=(n, n)), 5)


def against_torch() -> None:
    x, w = RNG.normal(size=(8, 8)), RNG.normal(size=(8, 8)) / 4
    tw = torch.from_numpy(w.copy())

    def f(x, w=w, tanh=np.tanh):
        for _ in range(5):
            x = tanh(x @ w * 2.0) + w
        return x.sum()

    def by_torch():
        leaf = torch.tensor(x, requires_grad=True)
        value = f(leaf, tw, torch.tanh)
        value.backward()
        return value, leaf.grad

    ours, theirs = spmd.value_and_grad(f), autograd.value_and_grad(lambda x: f(x, w, anp.tanh))
    np.testing.assert_allclose(ours(x)[1], by_torch()[1].numpy(), rtol=1e-9, atol=1e-12)
    a, b, c = (t * 1e6 for t in interleaved(lambda: ours(x), by_torch, lambda: theirs(x)))
    print("\nValue and gradient of 20 operations on 8 × 8: µs")
    print(f"spmd {a:.0f}, torch {b:.0f} (ratio {a / b:.2f}), autograd {c:.0f} (ratio {a / c:.2f})")


def against_hand() -> None:
    """What the tape costs beside the arithmetic: forward and backward in NumPy, as one writes them down."""
    n = 1_000_000
    x, c = RNG.normal(size=n), RNG.normal(size=n)
    m, w = RNG.normal(size=(1000, 1000)), RNG.normal(size=(1000, 1000)) / 30

    def recurrence(x):
        for _ in range(5):
            x = np.tanh(x * c + x)
        return np.sum(x)

    def recurrence_by_hand(x):
        kept = []
        for _ in range(5):
            x = np.tanh(x * c + x)
            kept.append(x)
        value, g = np.sum(x), np.ones_like(x)
        while kept:
            y = kept.pop()
            g = g - g * y * y
            g = g * c + g
        return value, g

    def residual(x):
        r = np.sin(x) * c - 1.0
        return np.sum(r * r)

    def residual_by_hand(x):
        r = np.sin(x) * c - 1.0
        return np.sum(r * r), 2 * r * c * np.cos(x)

    def stencil(x):
        for _ in range(4):
            x = x[1:-1] + 0.1 * (x[2:] - 2 * x[1:-1] + x[:-2])
        return np.sum(x * x)

    def stencil_by_hand(x):
        for _ in range(4):
            x = x[1:-1] + 0.1 * (x[2:] - 2 * x[1:-1] + x[:-2])
        value, g = np.sum(x * x), 2 * x
        for _ in range(4):
            d, wider = 0.1 * g, np.zeros(len(g) + 2)
            wider[1:-1] = g - 2 * d
            wider[2:] += d
            wider[:-2] += d
            g = wider
        return value, g

    def layer(x):
        return np.sum(np.sin(x @ w) * m)

    def layer_by_hand(x):
        y = x @ w
        return np.sum(np.sin(y) * m), (m * np.cos(y)) @ w.T

    def polynomial(x):
        return np.sum(((x * c + 1.0) * x - c) * x)

    def polynomial_by_hand(x):
        p = x * c + 1.0
        q = p * x - c
        return np.sum(q * x), q + x * p + x * x * c

    print("\nValue and gradient of a million entries: ms")
    print(f"{'':30}{'by hand':>10}{'spmd':>10}{'autograd':>10}{'ratio':>10}")
    for name, f, by_hand, start in (
        ("x = tanh(x * c + x), 5 times", recurrence, recurrence_by_hand, x),
        ("squares of sin(x) * c - 1", residual, residual_by_hand, x),
        ("heat equation, 4 steps", stencil, stencil_by_hand, x),
        ("sin(x @ w) * m, 1000 × 1000", layer, layer_by_hand, m),
        ("a cubic, simplified by hand", polynomial, polynomial_by_hand, x),
    ):
        _beside_hand(name, f, by_hand, start)


def _beside_hand(name: str, f, by_hand, x) -> None:
    ours, theirs = spmd.value_and_grad(f), autograd.value_and_grad(_with(f, anp))
    for value, gradient in (by_hand(x), theirs(x)):
        np.testing.assert_allclose(ours(x)[0], value, rtol=1e-9)
        np.testing.assert_allclose(ours(x)[1], gradient, rtol=1e-9, atol=1e-9)
    a, b, c = (t * 1e3 for t in interleaved(lambda: by_hand(x), lambda: ours(x), lambda: theirs(x), rounds=31))
    print(f"{name:30}{a:10.2f}{b:10.2f}{c:10.2f}{b / a:10.2f}")


def _with(f, xp):
    """f, whose global np is another module."""
    return type(f)(f.__code__, {**f.__globals__, "np": xp}, f.__name__, f.__defaults__, f.__closure__)


STATED = {
    "x * x": lambda x: x * x,
    "tanh": np.tanh,
    "x @ x": lambda x: x @ x,
    "x[1:3]": lambda x: x[1:3],
    "reshape": lambda x: np.reshape(x, (5, 1)),
    "sum over an axis": lambda x: x.sum(axis=0),
    "where": lambda x: np.where(x > 0, x, 0.0),
    "concatenate": lambda x: np.concatenate([x, x]),
}


def state() -> None:
    """What carrying the state costs an operation of a body."""
    x, count = RNG.normal(size=10), 1000

    def repeated(step):
        def body(x):
            for _ in range(count):
                step(x)
            return x

        return body

    print("\nAn operation of a body on 5 entries: µs")
    print(f"{'':30}{'bare':>10}{'stated':>10}{'more':>10}")
    with spmd.Mesh(x=2, scheduler="lockstep"):
        for name, step in STATED.items():
            runs = [
                functools.partial(spmd.map(repeated(step), in_specs=P("x"), out_specs=P("x"), check=check), x)
                for check in (False, True)
            ]
            a, b = (t / count / 2 * 1e6 for t in interleaved(*runs))
            print(f"{name:30}{a:10.2f}{b:10.2f}{b - a:10.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with threadpool_limits(1):
        small()
        sizes()
        against_torch()
        against_hand()
        state()
