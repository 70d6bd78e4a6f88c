"""Rooted values that go from worker to worker, while the others go on."""

from __future__ import annotations

import itertools
import json
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi_programs import moved
from oracle import Each, Oracle
from process_cases import each_engine, ended_well

import spmd
from operators.test_root import near, on_workers
from spmd import P
from spmd.errors import DeadlockError, LayoutError, MismatchError, StateError
from spmd.operators.root import Rooted

MESHES = [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 8}, {"x": 3, "y": 2}, {"x": 2, "y": 2, "z": 2}]


@given(st.data(), st.sampled_from(["lockstep", "threads"]))
@settings(max_examples=40)
def test_a_value_goes_from_place_to_place_and_its_gradient_back(data, scheduler):
    """Along any axes, of any shape, in trees; the others hold nothing before, between and after."""
    axes = data.draw(st.sampled_from(MESHES))
    over = tuple(data.draw(st.permutations(list(axes))))[: data.draw(st.integers(1, len(axes)))]
    n = math.prod(axes[a] for a in over)
    path = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=5))
    shape = tuple(data.draw(st.lists(st.sampled_from([0, 1, 3]), max_size=2)))
    rng = np.random.default_rng(0)
    blocks = [rng.integers(-9, 9, shape).astype(float) for _ in range(math.prod(axes.values()))]

    def body():
        w = spmd.worker_index(tuple(axes))
        x = spmd.varying(blocks[w], tuple(axes))

        def along(x):
            r = {"a": spmd.sum_reduce(x, over, path[0]), "b": [spmd.sum_reduce(x * x, over, path[0])]}
            for source, target in itertools.pairwise(path):
                r = spmd.move(r, over, source, target)
            assert all(leaf.is_held_as(Rooted(None, (), None, over, path[-1])) for leaf in (r["a"], r["b"][0]))
            assert r["a"].shape == shape
            a, b = (spmd.replicate(leaf, over, path[-1]) for leaf in (r["a"], r["b"][0]))
            return np.sum(a + a * b), a

        grad, total = spmd.grad(along, has_aux=True)(x)
        return w, spmd.block(total), spmd.block(grad)

    sums = [Oracle(axes).psum(Each([f(block) for block in blocks]), over).blocks for f in (np.asarray, np.square)]
    for w, total, grad in on_workers(axes, body, scheduler):
        near(total, sums[0][w])
        near(grad, 1 + sums[1][w] + 2 * blocks[w] * sums[0][w])


@pytest.mark.parametrize("n", [2, 4])
def test_it_is_counted_by_all_and_sent_by_one(scheduler, n):
    def body(x):
        r = spmd.sum_reduce(x, "x", root=1)
        r = spmd.move(r, "x", 1, 0)
        return spmd.replicate(spmd.move(r, "x", 0, 0), "x")

    with spmd.ledger() as log:
        spmd.map(body, P("x"), P(), mesh=spmd.Mesh(x=n, scheduler=scheduler))(np.arange(8.0 * n))
    for w, ledger in log.workers.items():
        assert ledger.axes["Move", ("x",)] == 2
        assert ledger.verbs.get("exchange", 0) == (w < 2)


def test_the_receiver_gets_a_shape_that_it_does_not_know(scheduler):
    """The handles of all but the source may be wrong about the shape."""

    def body(x):
        r = spmd.sum_reduce(x, "x", root=2)
        if spmd.worker_index("x") != 2:
            r = Rooted(r.block, (7, 7), r.dtype, r.axes, r.root)
        r = spmd.move(r, "x", 2, 0)
        return (r.shape, np.shape(spmd.block(r.block))) if spmd.worker_index("x") == 0 else None

    found = []
    mesh = spmd.Mesh(x=3, scheduler=scheduler)
    spmd.map(lambda x: found.append(body(x)), P("x"), None, mesh=mesh)(np.ones((6, 5)))
    assert ((2, 5), (2, 5)) in found


@pytest.mark.parametrize(("source", "target", "order"), [(0, 2, [0, 1, 2]), (2, 0, [1, 2, 0]), (2, 1, [0, 2, 1])])
def test_only_the_receiver_waits(source, target, order):
    """Of workers that take turns, each goes on until it has to wait."""
    done = []

    def body(x):
        for _ in range(3):
            spmd.move(spmd.keep(x, "x", source), "x", source, target)
            done.append(spmd.worker_index("x"))

    spmd.map(body, P(), None, mesh=spmd.Mesh(x=3, scheduler="lockstep"))(np.ones(3))
    assert done == [place for place in order for _ in range(3)]


def test_within_jit(scheduler):
    def body(x):
        r = spmd.sum_reduce(x * x, "x", root=0)
        return np.sum(spmd.replicate(spmd.move(r, "x", 0, 2), "x", root=2))

    with spmd.Mesh(x=3, scheduler=scheduler):
        step = spmd.jit(spmd.value_and_grad(spmd.map(body, P("x"), P())))
        for k in range(4):
            x = np.arange(6.0) + k
            value, grad = step(x)
            near(value, np.sum(x * x))
            near(grad, 2 * x)


def test_derivatives_of_higher_order():
    def body(x):
        r = spmd.move(spmd.sum_reduce(x**3, "x", root=0), "x", 0, 1)
        return np.sum(spmd.replicate(r, "x", root=1))

    f = spmd.map(body, P("x"), P(), mesh=spmd.Mesh(x=2))
    x = np.array([1.0, 2.0, -3.0, 0.5])
    near(spmd.grad(lambda x: np.sum(spmd.grad(f)(x) ** 2))(x), 36 * x**3)
    near(spmd.jvp(f, (x,), (np.ones(4),))[1], np.sum(3 * x**2))


def run(body):
    spmd.map(body, P("x"), None, mesh=spmd.Mesh(x=3))(np.arange(6.0))


def test_places_and_values_that_are_wrong():
    held = lambda x: spmd.sum_reduce(x, "x", root=1)
    with pytest.raises(LayoutError, match=r"(?s)spmd.move: argument target.*got: +3.*from 0 to 2"):
        run(lambda x: spmd.move(held(x), "x", 1, 3))
    with pytest.raises(StateError, match=r"(?s)spmd.move: argument x.*Rooted\(0\) along 'x'.*source=1, where it is"):
        run(lambda x: spmd.move(held(x), "x", 0, 1))
    with pytest.raises(StateError, match=r"(?s)spmd.move: argument x.*spmd.keep"):
        run(lambda x: spmd.move(x, "x", 0, 1))


@pytest.mark.parametrize("name", ["other_tree", "left_out", "crossed"])
def test_workers_that_part_ways_are_told(scheduler, name):
    mesh = spmd.Mesh(x=4, scheduler=scheduler)
    with pytest.raises((MismatchError, DeadlockError), match="move"):
        spmd.map(getattr(moved, name), P("x"), None, mesh=mesh)(np.arange(8.0))


def test_a_value_that_is_never_taken_is_an_error(scheduler):
    def body(x):
        first, second = (spmd.sum_reduce(x, "x", root=k) for k in (0, 1))
        spmd.move(*((second, "x", 1, 0) if spmd.worker_index("x") else (first, "x", 0, 1)))

    with pytest.raises(MismatchError, match=r"root=0, to=1|root=1, to=0"):
        spmd.map(body, P("x"), None, mesh=spmd.Mesh(x=2, scheduler=scheduler))(np.arange(4.0))


@each_engine
def test_among_processes(python):
    found = json.loads(ended_well("moved.py", python=python))
    for n, (value, total) in zip(moved.SIZES, found["values"], strict=True):
        x = np.arange(4.0 * n)
        near([value, total], [np.sum(x * x), np.sum(2 * x)])
    assert found["errors"] == ["MismatchError"] * 3
    assert found["after"] == [506.0, 132.0]


def test_among_processes_that_verify_nothing():
    found = json.loads(ended_well("moved.py", "values", python=sys.executable, SPMD_CHECK="0"))
    assert found["after"] == [506.0, 132.0]
