"""Checkpointed loops run few steps, keep few carries, and notice steps that are not functions."""

from __future__ import annotations

import gc
import itertools
import math
import re
import tracemalloc

import numpy as np
import pytest
from launch import ROOT

import spmd
from spmd import P
from spmd.autodiff.loops.schedules import Back, Drop, Keep, backward, first_kept
from spmd.errors import DifferentiationError


def optimal(n: int, states: int) -> int:
    """The fewest steps by which a chain of n steps is reversed, besides one of each with its sweep: t(n, s) = r n −
    C(s + r, r − 1) of Griewank & Walther, where r is the least number with n ≤ C(s + r, s)."""
    r = next(r for r in itertools.count(0) if n <= math.comb(states + r, states))
    return r * n - (math.comb(states + r, r - 1) if r else 0)


def calls_of_a_step(n: int, checkpoint) -> int:
    count = itertools.count()

    def f(c, _):
        next(count)
        return np.sin(c), None

    g = spmd.grad(lambda c: spmd.scan(f, c, length=n, checkpoint=checkpoint)[0])(0.5)
    assert g == spmd.grad(lambda c: spmd.scan(lambda c, _: (np.sin(c), None), c, length=n)[0])(0.5)
    return next(count)


@pytest.mark.parametrize("states", [1, 2, 3, 5, 8, 40])
def test_the_steps_that_run_are_the_fewest(states):
    for n in [*range(1, 15), 20, 35, 36, 50]:
        count = calls_of_a_step(n, states)
        assert 0 <= count - optimal(n, states) - n <= 1, (n, states, count)


@pytest.mark.full
@pytest.mark.parametrize("states", range(1, 16))
def test_the_steps_that_run_are_the_fewest_for_many(states):
    for n in [*range(1, 130), 200, 455, 456, 1000]:
        count = n + sum(a.at - a.start for a in backward(n, states) if type(a) is not Drop) + n
        assert 0 <= count - optimal(n, states) - n <= 1, (n, states, count)


def test_the_optimum_is_that_of_trying_everything():
    """By dynamic programming over where the next state is kept."""
    least = {(1, s): 0 for s in range(1, 8)}
    for n, s in itertools.product(range(2, 40), range(1, 8)):
        least[n, s] = n * (n - 1) // 2
        if s > 1:
            split = (m + least[m, s] + least[n - m, s - 1] for m in range(1, n))
            least[n, s] = min(least[n, s], *split)
    assert all(optimal(n, s) == steps for (n, s), steps in least.items())


@pytest.mark.parametrize(("n", "states"), [*itertools.product([1, 2, 3, 7, 20, 57], [1, 2, 3, 6, 100])])
def test_a_schedule_differentiates_each_step_once_from_the_last_to_the_first(n, states):
    kept, done, most = set(first_kept(n, states)), [], 0
    for action in backward(n, states):
        if type(action) is Drop:
            kept.remove(action.at)
            continue
        assert action.start in kept
        assert action.start <= action.at
        assert not any(action.start < k <= action.at for k in kept)
        if type(action) is Keep:
            kept.add(action.at)
        else:
            assert type(action) is Back
            done.append(action.at)
        most = max(most, len(kept))
    assert done == [*reversed(range(n))]
    assert most <= states + 1  # the state before the last step is there until that is differentiated


def test_sqrt_and_policies():
    asked = []
    policy = lambda n: asked.append(n) or 4
    assert calls_of_a_step(25, "sqrt") == calls_of_a_step(25, 5)
    assert calls_of_a_step(26, "sqrt") == calls_of_a_step(26, 6)
    assert calls_of_a_step(9, policy) == calls_of_a_step(9, 4)
    assert asked == [9]
    assert calls_of_a_step(30, None) == 30
    assert [calls_of_a_step(1, k) for k in (1, 2, "sqrt")] == [2, 2, 2]


def test_the_table_on_the_page_is_true():
    rows = re.findall(
        r"^\| `([^`]+)`.*\| ([\d,]+) \|$", (ROOT / "docs" / "how_to" / "loops.md").read_text(), re.MULTILINE
    )
    counts = {name: int(count.replace(",", "")) for name, count in rows}
    assert counts == {"None": 1000, "10": calls_of_a_step(1000, 10), '"sqrt"': calls_of_a_step(1000, "sqrt")}


def test_without_a_gradient_each_step_runs_once():
    count = itertools.count()
    spmd.scan(lambda c, _: (np.sin(c), next(count)), 0.5, length=30, checkpoint=2)
    assert next(count) == 30


@pytest.mark.parametrize(("n", "states"), [(100, 3), (100, 10), (300, 6)])
def test_so_many_states_are_kept(n, states):
    """Besides those, the step that is differentiated needs its argument, its result and cotangents."""
    size = 50_000
    c = np.full(size, 0.5)
    loss = lambda c: np.sum(spmd.scan(lambda c, _: (np.sin(c), None), c, length=n, checkpoint=states)[0])
    spmd.grad(lambda c: np.sum(spmd.scan(lambda c, _: (np.sin(c), None), c, length=3, checkpoint=1)[0]))(c)
    gc.collect()
    tracemalloc.start()
    try:
        spmd.grad(loss)(c)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak / c.nbytes <= states + 5


@pytest.mark.parametrize("checkpoint", [1, 3, "sqrt"])
def test_a_step_that_changes_with_its_calls_is_noticed(checkpoint):
    count = itertools.count(1)
    step = lambda c, _: (np.tanh(c * next(count)), None)
    with pytest.raises(DifferentiationError, match=r"(?s)spmd\.scan of <lambda>: result.*when it is called again"):
        spmd.grad(lambda c: spmd.scan(step, c, length=6, checkpoint=checkpoint)[0])(0.3)


def test_a_collective_in_each_step_is_repeated_with_it(scheduler):
    """The messages of a checkpointed loop: those of the forward steps that run, and of each step's way back."""

    def messages(n, checkpoint):
        f = lambda c, _: (np.tanh(spmd.shift(c, "x", 1)), None)
        body = lambda c: spmd.sum(spmd.scan(f, c, length=n, checkpoint=checkpoint)[0], "x")
        with spmd.Mesh(x=3, scheduler=scheduler), spmd.ledger() as log:
            spmd.grad(spmd.map(body, P("x"), P()))(np.arange(6.0))
        return log.messages

    one = messages(2, None) - messages(1, None)  # a step and its way back
    assert one > 0
    assert messages(9, None) - messages(8, None) == one
    more = optimal(9, 2) + 1 - 9 + 9  # steps that run besides the first ones
    assert messages(9, 2) - messages(9, None) == more * one / 2
