"""How many carries of a loop with `checkpoint` are alive at once, counted by weak references; and in bytes."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.autodiff.tracer import Array

STEPS = 400
U, LARGE = np.linspace(0.1, 1, 5000), np.linspace(0.1, 1, 40_000)
KEPT = {5: 5, 20: 20, 100: 100, "sqrt": 20}
"""What is asked for, and the states that may be kept."""


class Alive:
    """The different arrays that were noted and are alive, and the most there were at once."""

    def __init__(self) -> None:
        self.refs: dict[int, weakref.ref] = {}
        self.most = 0

    def note(self, x: Any) -> None:
        while type(x) is Array:
            x = x.value
        key = id(x)
        if key not in self.refs:
            self.refs[key] = weakref.ref(x, lambda _: self.refs.pop(key))
            self.most = max(self.most, len(self.refs))


@pytest.fixture
def uncollected():
    """What is freed is freed because nothing refers to it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def energy(u: Any, alive: Alive | None, checkpoint: Any, reverse: bool = False) -> Any:
    def step(u, x):
        if alive is not None:
            alive.note(u)
        return np.sin(u) + x, None

    u, _ = spmd.scan(step, u, np.full(STEPS, 1e-3), reverse=reverse, checkpoint=checkpoint)
    return np.sum(u * u)


@pytest.mark.parametrize(("checkpoint", "reverse"), [*((k, False) for k in KEPT), (20, True)])
def test_states_that_are_alive_are_those_kept_and_three(checkpoint, reverse, uncollected):
    alive = Alive()
    spmd.grad(lambda u: energy(u, alive, checkpoint, reverse))(U)
    assert KEPT[checkpoint] <= alive.most <= KEPT[checkpoint] + 3


def test_without_checkpoint_all_states_are_alive(uncollected):
    alive = Alive()
    spmd.grad(lambda u: energy(u, alive, None))(U)
    assert alive.most >= STEPS


def test_a_loop_that_is_not_differentiated_keeps_no_states(uncollected):
    alive = Alive()
    energy(U, alive, 20)
    assert alive.most <= 3


@pytest.mark.parametrize("workers", [1, 3])
def test_states_of_each_worker(workers, uncollected):
    each = [Alive() for _ in range(workers)]
    mesh = spmd.Mesh(x=workers, transport="local")

    def local(u):
        return spmd.psum(energy(u, each[spmd.worker_index("x")], 20), "x")

    spmd.grad(mesh.map(local, in_specs=P("x"), out_specs=P()))(np.tile(U, workers))
    assert all(20 <= alive.most <= 23 for alive in each)


def peak(run) -> float:
    """The most bytes that a second run takes beside what was there before the first, in arrays like LARGE."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        run()
        tracemalloc.reset_peak()
        run()
        return (tracemalloc.get_traced_memory()[1] - before) / LARGE.nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("states", "jit"),
    [(20, True), *(pytest.param(*case, marks=pytest.mark.full) for case in ((20, False), (100, True)))],
)
def test_states_in_bytes(states, jit, uncollected):
    """Beside the states there are the values of one step, their cotangents, the result, and what is no array."""
    mesh = spmd.Mesh(x=1, transport="local")
    mapped = mesh.map(lambda u: spmd.psum(energy(u, None, states), "x"), in_specs=P("x"), out_specs=P())
    gradient = spmd.grad(spmd.jit(mapped) if jit else mapped)
    u = spmd.put(LARGE, P("x"), mesh)
    most = peak(lambda: gradient(u))
    assert states <= most <= states + 12
