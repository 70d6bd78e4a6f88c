"""Loops under spmd.jit: a step is recorded once, forward and back, with the bits of the loop of Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from launch import PROGRAMS, TORCHRUN, each_mpi, launch
from mpi_programs import recorded_loops

import spmd
from loops.random_recorded import bits, job
from spmd import P, optim
from spmd.errors import JitError

RNG = np.random.default_rng(0)
MESH = spmd.Mesh(x=2)
U, W = spmd.put(RNG.normal(size=(5, 3)), P("x"), MESH), spmd.put(RNG.normal(size=(3, 3)), P(), MESH)
OTHERS = [(U, W), (U * 0.5 + 1, W.T.copy()), (U, W)]


def in_body(f: Any) -> Any:
    return MESH.map(lambda *args: spmd.psum(f(*args), "x"), (P("x"), P()), P())


def whole(f: Any) -> Any:
    return f


def check(f: Any, arguments: Any, numbers: tuple[int, ...]) -> Any:
    """Value and gradients by programs are those of Python, bit for bit, in the first call and later ones."""
    wanted = [spmd.value_and_grad(f, numbers)(*a) for a in arguments]
    programs = spmd.jit(spmd.value_and_grad(f, numbers)), spmd.value_and_grad(spmd.jit(f), numbers)
    for program in programs:
        for a, each in zip(arguments, wanted, strict=True):
            assert bits(program(*a)) == bits(each)
    value = spmd.jit(f)
    for a, each in zip(arguments, wanted, strict=True):
        assert bits(value(*a)) == bits(each[0])
    return programs[0]


def checked_job(seed: int, scheduler: str, *, whole: bool) -> None:
    f, arguments, differentiated, text = job(seed, scheduler, whole=whole)
    try:
        check(f, arguments, differentiated)
    except Exception as error:
        error.add_note(f"seed {seed}: {text}")
        raise


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("of", ["bodies", "global arrays"])
def test_random_loops(of, seed):
    checked_job(seed, ("auto", "threads")[seed % 2], whole=of == "global arrays")


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8, 200))
@pytest.mark.parametrize("of", ["bodies", "global arrays"])
def test_many_random_loops(of, seed):
    checked_job(seed, ("auto", "threads")[seed % 2], whole=of == "global arrays")


def loss(tree: Any) -> Any:
    return sum(((x * x).sum() for x in spmd.tree.leaves(tree)), start=0.0)


def pair(u: Any, w: Any) -> Any:
    return {"a": u, "b": u}


STEPS = {
    "a constant y": (lambda c, x, u, w: (np.tanh(c @ w) * x, np.ones(3)), None, {}),
    "a closed-over y": (lambda c, x, u, w: (np.tanh(c @ w) * x, u), None, {}),
    "a closed-over carry": (lambda c, x, u, w: (u, c * x), None, {}),
    "the carry unchanged": (lambda c, x, u, w: (c, c @ w), None, {}),
    "the carry as y": (lambda c, x, u, w: (c, c), None, {}),
    "y twice": (lambda c, x, u, w: (lambda d: (d, (d, d)))(np.tanh(c @ w)), None, {}),
    "what is the carry too": (lambda c, x, u, w: (np.tanh(c @ w) + u * x, None), None, {}),
    "one array as two leaves": (
        lambda c, x, u, w: ({"a": c["a"] @ w + np.sin(c["b"]), "b": np.sin(c["a"] @ w)}, c["b"]),
        pair,
        {},
    ),
    "a swap": (lambda c, x, u, w: ({"a": c["b"], "b": np.sin(c["a"])}, c["b"]), pair, {}),
    "one step": (lambda c, x, u, w: (np.tanh(c @ w) * x, c), None, {"n": 1}),
    "two steps": (lambda c, x, u, w: (np.tanh(c @ w) * x, c), None, {"n": 2}),
    "two states": (
        lambda c, x, u, w: ({"a": c["a"] * c["b"] + u, "b": np.sin(c["a"] @ w)}, c["a"]),
        lambda u, w: {"a": u, "b": u @ w},
        {"checkpoint": 2, "n": 7},
    ),
    "a sum that is not reduced": (lambda c, x, u, w: (np.tanh(c @ w) + u.sum(0) * 2, None), None, {}),
    "complex": (lambda c, x, u, w: (np.sin(c @ w) * x, None), lambda u, w: 0.1 * u * (1 + 1j), {"n": 3}),
}


ROUNDED = {"a closed-over carry", "the carry unchanged", "the carry as y", "a swap"}
"""Where one array is several values of the steps, whose cotangents are summed in another order."""


@pytest.mark.parametrize("at", [whole, in_body])
@pytest.mark.parametrize("name", STEPS)
def test_steps_that_return_what_they_like(name, at):
    step, init, options = STEPS[name]
    options = dict(options)
    n = options.pop("n", 5)

    def f(u, w):
        xs = np.linspace(0.5, 1, n).reshape(n, 1)
        start = u if init is None else init(u, w)
        c, ys = spmd.scan(lambda c, x: step(c, x, u, w), start, xs, **options)
        return np.real(loss(c) + loss(ys)) + loss(u * w[0]) + 0.0

    if name not in ROUNDED:
        check(at(f), OTHERS, (0, 1))
        return
    run = spmd.value_and_grad(at(f), (0, 1))
    once = spmd.jit(run)
    for a in OTHERS:
        for one, other in zip(spmd.tree.leaves(once(*a)), spmd.tree.leaves(run(*a)), strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("at", [whole, in_body])
def test_several_loops_share_arrays(at):
    """Sums of cotangents begin with what came from what is downstream of a loop, term by term."""

    def f(u, w):
        step = lambda c, x: (np.tanh(c @ w) + x * u, c.sum(0))
        a, some = spmd.scan(step, u, np.ones((4, 1)))
        b, _ = spmd.scan(step, a, np.ones((3, 1)), reverse=True)
        spmd.scan(step, b, np.ones((2, 1)))
        return loss([a, b, a * b, some * 0.5, u @ w])

    check(at(f), OTHERS, (0, 1))


@pytest.mark.parametrize("at", [in_body, whole])
def test_steps_whose_derivatives_write_into_their_own_arrays(at):
    def f(u, w):
        step = lambda h, _: (h + np.fft.irfft(np.fft.rfft(np.tanh(h @ w)), 3), np.sum(h))
        return np.sum(spmd.scan(step, u, np.arange(4))[0] ** 2)

    check(at(f), OTHERS, (0, 1))


def test_slices_that_a_step_closes_over():
    """The sums of one array come from two places: the slices, and the steps."""

    def f(u, w):
        c, ys = spmd.scan(lambda c, x: (np.tanh(c * x + w[0]), c @ w), w[1], w)
        return loss([c, ys, u @ w])

    for at in (whole, in_body):
        for run in (at(f), spmd.jit(at(f))):
            _, (gu, gw) = spmd.value_and_grad(run, (0, 1))(U, W)
            plain = spmd.grad(f, (0, 1))(U.numpy(), W.numpy())
            if at is whole:
                np.testing.assert_allclose(gu.numpy(), plain[0], rtol=1e-10)
                np.testing.assert_allclose(gw.numpy(), plain[1], rtol=1e-10)
            unrolled = at(lambda u, w: loss(_by_hand(u, w)))
            wanted = spmd.grad(unrolled, (0, 1))(U, W)
            np.testing.assert_allclose(gw.numpy(), wanted[1].numpy(), rtol=1e-10)


def _by_hand(u: Any, w: Any) -> Any:
    c, ys = w[1], []
    for x in w:
        c, y = np.tanh(c * x + w[0]), c @ w
        ys.append(y)
    return [c, np.stack(ys), u @ w]


@pytest.mark.parametrize("at", [whole, in_body])
@pytest.mark.parametrize("checkpoint", [None, 2, "sqrt"])
def test_a_program_has_the_step_once(at, checkpoint):
    def lines(n):
        def f(u, w):
            step = lambda c, x: (np.tanh(c @ w) + x * u, c.sum(0))
            c, ys = spmd.scan(step, u, np.linspace(0, 1, n).reshape(n, 1), checkpoint=checkpoint)
            return loss([c, ys, u])

        program = spmd.jit(spmd.value_and_grad(at(f), (0, 1)))
        program(U, W)
        return len(program.text().splitlines())

    assert lines(50) == lines(200)


@pytest.mark.parametrize("at", [whole, in_body])
def test_second_derivatives_within_one_function(at):
    def f(u, w):
        inner = lambda u: loss(spmd.scan(lambda c, x: (np.tanh(c @ w) + u * x, None), u, np.ones((3, 1)))[0])
        return loss(spmd.grad(inner)(u))

    check(at(f), OTHERS[:2], (0, 1))


def test_a_pullback_is_called_twice():
    def f(u, w):
        out, pull = spmd.vjp(lambda u, w: spmd.scan(lambda c, x: (np.tanh(c @ w), c), u, length=4), u, w)
        return loss([pull(out), pull((out[0] * 2, out[1]))])

    for at in (whole, in_body):
        check(at(f), OTHERS[:2], (0, 1))
    g = in_body(lambda u, w: loss(spmd.scan(lambda c, x: (np.tanh(c @ w), c), u, length=4)))
    for run in (g, spmd.jit(g)):
        _, pull = spmd.vjp(run, U, W)
        assert bits(pull(np.float64(1.0))) == bits(pull(np.float64(1.0))) == bits(spmd.grad(g, (0, 1))(U, W))


def test_training_in_a_scan():
    optimizer = optim.adam(0.05)

    def f(u, w):
        def step(c, x):
            p, state = c
            value, g = spmd.value_and_grad(lambda p: ((np.tanh(p) @ w - x) ** 2).sum())(p)
            p, state = optimizer.update(g, state, p)
            return (p, state), value

        (p, state), values = spmd.scan(step, (w[0], optimizer.init(w[0])), np.linspace(0, 1, 4).reshape(4, 1))
        return p, state, values

    for at in (f, MESH.map(f, (P("x"), P()), (P(), optimizer.specs(P()), P()))):
        once = spmd.jit(at)
        for a in OTHERS:
            assert bits(once(*a)) == bits(at(*a))


# Values that leave a step by other ways than its results


def _leaky(way: str) -> Any:
    def f(u, w):
        seen: list[Any] = []

        def step(c, x):
            seen.append(np.sin(c) * x)
            more = seen[0] if way == "an earlier trial" else 0.0
            return np.sin(c) * x + more, seen[0] if way == "an earlier trial, as y" else None

        c, _ = spmd.scan(step, u, np.ones((3, 1)))
        match way:
            case "an operation":
                return loss(c + seen[-1])
            case "the result":
                return loss(c), seen[-1]
            case "the carry of another loop":
                return loss(spmd.scan(lambda c, x: (np.cos(c), None), seen[-1], length=3)[0])
            case "the step of another loop":
                return loss(spmd.scan(lambda c, x: (np.cos(c) + seen[-1], None), c, length=3)[0])
            case "the y of another loop":
                return loss(spmd.scan(lambda c, x: (np.cos(c), seen[-1]), c, length=3)[1])
        return loss(c)

    return f


WAYS = ["an operation", "the result", "the carry of another loop", "the step of another loop", "the y of another loop"]


@pytest.mark.host("functions on a GPU are not recorded")
@pytest.mark.parametrize("way", [*WAYS, "an earlier trial", "an earlier trial, as y"])
def test_values_of_a_step_are_refused_outside_of_it(way):
    f = _leaky(way)
    out = (P(), P("x")) if way == "the result" else P()

    def body(u, w):
        found = f(u, w)
        return (spmd.psum(found[0], "x"), found[1]) if way == "the result" else spmd.psum(found, "x")

    for run in (f, MESH.map(body, (P("x"), P()), out)):
        with pytest.raises(JitError, match="which a step computed, used outside of the loop"):
            spmd.jit(run)(U, W)
    if way != "the result":
        with pytest.raises(JitError, match="which a step computed, used outside of the loop"):
            spmd.jit(spmd.grad(f))(U, W)


def test_kept_sums_do_not_leave_a_step():
    """x.reduced is kept with the array: but not what a step computed of it."""

    def f(u, w):
        r = u.sum(0)
        c, _ = spmd.scan(lambda c, x: (np.tanh(c @ w) + np.sin(r), None), u, length=3)
        d = spmd.cond(c.sum() > 0, lambda c: c + np.sin(r), lambda c: c * np.cos(r), c)
        return loss([c, np.cos(r), d, r])

    check(f, OTHERS, (0, 1))


def test_steps_write_into_their_own_arrays_only():
    def own(u, w):
        def step(c, x):
            new = np.zeros(3)
            new[:1] = 2.0
            return np.tanh(c @ w) + new * x, None

        return loss(spmd.scan(step, u, np.arange(1.0, 4.0).reshape(3, 1))[0])

    check(in_body(own), OTHERS, (0, 1))


def test_python_runs_once(capsys):
    def f(u, w):
        def step(c, x):
            print("a step")
            return np.tanh(c @ w), None

        return spmd.scan(step, u, length=50)[0]

    once = spmd.jit(f)
    once(U, W)
    runs = capsys.readouterr().out.count("a step")
    assert runs <= 3 or MESH.device != "cpu"
    once(U + 1, W)
    assert not capsys.readouterr().out or MESH.device != "cpu"


EVERY_SEED = (0, 5, 9, 12, 13, 15)


@each_mpi
@pytest.mark.parametrize(
    ("n", "seeds"),
    [
        (1, (0,)),
        (3, (5, 12, 13)),
        (4, (0, 9, 15)),
        *(pytest.param(n, EVERY_SEED, marks=pytest.mark.full) for n in (1, 3, 4)),
    ],
)
def test_processes_have_the_same_bits(python, n, seeds):
    processes(python, n, seeds)


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize("n", [3, 4])
def test_processes_of_torchrun_have_the_same_bits(n):
    processes(TORCHRUN, n, EVERY_SEED)


def processes(python: Any, n: int, seeds: tuple[int, ...]) -> None:
    ended = launch(PROGRAMS / "recorded_loops.py", *map(str, (n, *seeds)), n=n, python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.splitlines() == recorded_loops.lines(n, *seeds)
