"""Remote calls: one worker runs a function while the others go on; results, gradients and errors when asked for."""

from __future__ import annotations

import json
import math
import threading
import warnings
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi_programs import remote_calls
from oracle import Each, Oracle
from process_cases import each_engine, ended_well, timed

import spmd
from operators.test_root import near, on_workers
from spmd import P
from spmd.errors import DeadlockError, MismatchError
from spmd.operators.root import Rooted

MESHES = [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 8}, {"x": 3, "y": 2}, {"x": 2, "y": 2, "z": 2}]


@given(st.data(), st.sampled_from(["lockstep", "threads"]))
@settings(max_examples=40)
def test_chains_of_calls_and_their_gradients(data, scheduler):
    """Along any axes, from any place to any; trees with numbers, masks and empty arrays travel as they are."""
    axes = data.draw(st.sampled_from(MESHES))
    over = tuple(data.draw(st.permutations(list(axes))))[: data.draw(st.integers(1, len(axes)))]
    n = math.prod(axes[a] for a in over)
    path = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=5))
    shape = tuple(data.draw(st.lists(st.sampled_from([0, 1, 3]), max_size=2)))
    rng = np.random.default_rng(0)
    blocks = [rng.integers(-9, 9, shape).astype(float) for _ in range(math.prod(axes.values()))]
    ran = []

    def stage(k, value):
        ran.append((k, spmd.worker_index(over)))
        x, rest = value if type(value) is tuple else (value, {"n": 1, "empty": np.zeros((2, 0), np.int32)})
        assert rest["empty"].shape == (2, 0)
        return 2.0 * x, {"n": rest["n"] + 1, "mask": [x > 0, None], "empty": rest["empty"], "half": x.astype("f4") / 2}

    def body():
        w = spmd.worker_index(tuple(axes))
        x = spmd.varying(blocks[w], tuple(axes))

        def along(x):
            value = spmd.sum_reduce(x * x, over, path[0])
            for place in path:
                value = spmd.remote(lambda v, place=place: stage(place, v), at=place, axis_name=over)(value)
            (y, rest) = value.result()
            assert type(y) is Rooted
            assert (y.shape, y.dtype, rest["half"].dtype) == (shape, np.dtype(float), np.dtype("f4"))
            y, number, mask, half = (
                spmd.replicate(leaf, over, path[-1]) for leaf in (y, rest["n"], rest["mask"][0], rest["half"])
            )
            return np.sum(y + half), (y, number, mask)

        grad, found = spmd.grad(along, has_aux=True)(x)
        return w, [spmd.block(leaf) for leaf in found], spmd.block(grad)

    calls = len(path)
    sums = Oracle(axes).psum(Each([np.square(block) for block in blocks]), over).blocks
    for w, (y, number, mask), grad in on_workers(axes, body, scheduler):
        near(y, 2.0**calls * sums[w])
        assert number == calls + 1
        np.testing.assert_array_equal(mask, sums[w] > 0)
        near(grad, (2.0**calls + 2.0 ** (calls - 1) / 2) * 2 * blocks[w])
    assert all(place == at for place, at in ran)


def serial(w, x):
    h = np.tanh(w * x)
    return np.sum(h**3 * w) + np.sum(np.sin(h))


def test_derivatives_of_higher_order(scheduler):
    """Parameters are Invariant, or lie where they are used; each gets its gradient there."""
    rng = np.random.default_rng(1)
    w, x = rng.normal(size=3), rng.normal(size=3)

    def loss(w, there, x):
        h = spmd.remote(lambda w, x: {"h": np.tanh(w * x)}, at=2)(w, x)
        first = spmd.remote(lambda d, w: np.sum(d["h"] ** 3 * w), at=1)(h, there)
        second = spmd.remote(lambda d: np.sum(np.sin(d["h"])), at=0)(h)
        total = spmd.remote(lambda a, b: a + b, at=1)(first, second)
        return spmd.replicate(total.result(), "x", root=1)

    def body(w, x):
        there = spmd.keep(w, "x", 1)
        value, (of_w, of_there) = spmd.value_and_grad(loss, (0, 1))(w, there, x)
        assert type(of_there) is Rooted
        assert of_there.root == 1
        whole = lambda w: loss(w, spmd.keep(w, "x", 1), x)
        second = spmd.grad(lambda w: np.sum(spmd.grad(whole)(w) ** 2))(w)
        return value, of_w + spmd.replicate(of_there, "x", root=1), second, spmd.jvp(whole, (w,), (x,))[1]

    with spmd.Mesh(x=3, scheduler=scheduler):
        value, grad, second, push = spmd.map(body, P(), P())(w, x)
    near(value, serial(w, x))
    own = spmd.grad(serial)
    near(grad, own(w, x))
    near(second, spmd.grad(lambda w: np.sum(own(w, x) ** 2))(w))
    near(push, own(w, x) @ x)


def test_optimisers_step_where_parameters_lie(scheduler):
    """Ten steps of two stages, whose parameters and states of Adam lie on two workers, are those of one worker."""
    rng = np.random.default_rng(2)
    ws, x = [rng.normal(size=(3, 5)), rng.normal(size=(5, 2))], rng.normal(size=(7, 3))
    optimizer = spmd.optim.adam(0.1)

    def body(x):
        places = (2, 1)
        params = [spmd.keep(w, "x", k) for w, k in zip(ws, places, strict=True)]
        states = [spmd.remote(optimizer.init, at=k)(w).result() for w, k in zip(params, places, strict=True)]

        def loss(params):
            h = x
            for w, k in zip(params, places, strict=True):
                h = spmd.remote(lambda w, h: np.tanh(h @ w), at=k)(w, h)
            return spmd.replicate(spmd.remote(np.sum, at=0)(h).result(), "x", root=0)

        losses = []
        for _ in range(10):
            value, grads = spmd.value_and_grad(loss)(params)
            losses.append(value)
            for s, k in enumerate(places):
                step = lambda g, state, w: optimizer.update(g, state, w)
                params[s], states[s] = spmd.remote(step, at=k)(grads[s], states[s], params[s]).result()
        return losses, [spmd.replicate(w, "x", root=k) for w, k in zip(params, places, strict=True)]

    with spmd.Mesh(x=3, scheduler=scheduler):
        losses, params = spmd.map(body, P(), P())(x)
    alone, state, wanted = list(ws), optimizer.init(ws), []
    for _ in range(10):
        value, grads = spmd.value_and_grad(lambda ws: np.sum(np.tanh(np.tanh(x @ ws[0]) @ ws[1])))(alone)
        wanted.append(value)
        alone, state = optimizer.update(grads, state, alone)
    near(np.array([float(value) for value in losses]), wanted)
    for found, want in zip(params, alone, strict=True):
        near(found, want)


def test_f_may_use_collectives_along_other_axes(scheduler):
    def loss(x):
        r = spmd.sum_reduce(x, "x", 1)
        total = spmd.remote(lambda a: (spmd.psum(np.sum(a**2), "y"), a), at=0, axis_name="x")(r)
        both = spmd.remote(lambda t, a: t + 0 * spmd.psum(np.sum(a), "y"), at=1, axis_name="x")
        total, a = total.result()
        assert not total.block.state.varying
        assert a.block.state.varying == {"y"}
        return spmd.replicate(both(total, a).result(), "x", 1)

    x = np.random.default_rng(1).normal(size=(2, 6))
    f = spmd.map(loss, P("x", "y"), P(), mesh=spmd.Mesh(x=2, y=3, transport="local", scheduler=scheduler))
    near(f(x), np.sum(x.sum(0) ** 2))
    near(spmd.grad(f)(x), np.tile(2 * x.sum(0), (2, 1)))


def test_calls_of_two_workers_overlap():
    """Each waits, within f, until the other has begun."""
    begun = {1: threading.Event(), 2: threading.Event()}

    def f(x):
        k = spmd.worker_index("x")
        begun[k].set()
        assert begun[3 - k].wait(60)
        return x + k

    def body(x):
        calls = [spmd.remote(f, at=k)(x) for k in (1, 2)]
        return spmd.replicate(spmd.remote(lambda a, b: a * b, at=0)(*calls).result(), "x")

    near(spmd.map(body, P(), P(), mesh=spmd.Mesh(x=3, scheduler="threads"))(np.ones(2)), [6.0, 6.0])


def test_who_neither_runs_nor_takes_goes_on():
    """Of workers that take turns, each goes on until it waits: the first ends its calls before the others begin."""
    done = []

    def stage(x):
        done.append(spmd.worker_index("x"))
        return x

    def body(x):
        results = []
        for _ in range(3):
            for k in range(4):
                x = spmd.remote(stage, at=k)(x if k else np.ones(2))
            results.append(x)
        return sum(spmd.replicate(y.result(), "x", root=3) for y in results)

    near(spmd.map(body, P(), P(), mesh=spmd.Mesh(x=4, scheduler="lockstep"))(np.ones(2)), [3.0, 3.0])
    assert done == [place for place in range(4) for _ in range(3)]


def test_what_a_call_costs():
    """Nothing where all is there; two messages to another place, and the same back; a broadcast of the result."""

    def body(x):
        r = spmd.keep(x, "x", 1)
        with spmd.ledger() as there:
            future = spmd.remote(lambda a: a * 2, at=1)(r)
        with spmd.ledger() as moved:
            future = future.to(0)
        with spmd.ledger() as asked:
            value = future.result()
            assert future.result() is value
        with spmd.ledger() as back:
            spmd.grad(lambda r: spmd.remote(np.sum, at=0)(spmd.remote(lambda a: a * 2, at=1)(r)).result())(r)
        counts = [log.messages for log in (there, moved, asked, back)]
        return spmd.varying(np.array([counts]), "x")

    with spmd.Mesh(x=3):
        found = spmd.map(body, P(), P("x"))(np.ones(1000)).numpy()
    assert found.tolist() == [[0, 0, 2, 3], [0, 2, 0, 2], [0, 0, 0, 0]]


class Own(Exception):
    """An error of this module."""


def test_results_keep_their_dtypes_on_every_way(scheduler):
    """Whatever is beside them; complex numbers too."""
    dtypes = ["float16", "float32", "float64", "complex64", "complex128", "int8", "bool"]
    x = np.arange(1.0, 5.0)

    def body(x):
        future = spmd.remote(lambda x: OrderedDict((d, x.astype(d)) for d in dtypes), at=1)(x=x)
        again = spmd.remote(lambda a: {"same": a}, at=2)(a=future).to(0).result()["same"]
        return spmd.replicate(again, "x", 0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = spmd.map(body, P(), P(), mesh=spmd.Mesh(x=3, scheduler=scheduler))(x)
    for dtype in dtypes:
        assert found[dtype].dtype == dtype
        np.testing.assert_array_equal(found[dtype].numpy(), x.astype(dtype))


def failing(x):
    raise Own("of f")


def test_errors_are_raised_where_the_result_is_asked_for(scheduler):
    went_on = []

    def asked(x):
        future = spmd.remote(failing, at=1)(x)
        also = spmd.remote(lambda y: y, at=1)(future)
        went_on.append(spmd.psum(1, "x"))
        for f in (future, also):
            with pytest.raises(Own, match="of f"):
                f.result()
        return spmd.psum(spmd.varying(np.ones(1), "x"), "x")

    def unasked(x):
        spmd.remote(failing, at=1)(x)
        return spmd.psum(spmd.varying(x, "x"), "x")

    mesh = spmd.Mesh(x=3, scheduler=scheduler)
    near(spmd.map(asked, P(), P(), mesh=mesh)(np.ones(2)), [3.0])
    assert went_on == [3, 3, 3]
    for body in (unasked, lambda x: spmd.remote(failing, at=1)(x).to(2).result()):
        with pytest.raises(Own, match="of f") as caught:
            spmd.map(body, P(), None, mesh=mesh)(np.ones(2))
        assert "raised by worker 1 (x=1)" in caught.value.__notes__


def test_workers_that_part_ways_are_told(scheduler):
    def body(x):
        k = spmd.worker_index("x")
        return spmd.remote(np.sum, at=1)(x).to(2 if k == 1 else 0).result()

    with pytest.raises((MismatchError, DeadlockError), match=r"remote|move"):
        spmd.map(body, P(), None, mesh=spmd.Mesh(x=3, scheduler=scheduler))(np.ones(2))


# Processes


def of_one(n: int) -> list[float]:
    x = np.random.default_rng(n).normal(size=n)
    return [float(remote_calls.serial(x, 4)), float(np.sum(spmd.grad(remote_calls.serial)(x, 4) * np.arange(n)))]


@each_engine
def test_among_processes(python):
    found = json.loads(ended_well("remote_calls.py", "values", "4", python=python))
    np.testing.assert_allclose(found["values"], [of_one(n) for n in (0, 1, 7, 300_000)], rtol=1e-10)
    assert found["caught"] == [4.0]
    assert found["errors"] == ["Own: of worker 1"] * 2
    assert found["after"] == [4.0]


@each_engine
def test_processes_overlap(python, tmp_path):
    assert json.loads(ended_well("remote_calls.py", "overlap", "2", str(tmp_path), n=2, python=python)) == [6.0, 6.0]


@each_engine
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_worker_that_dies_in_f_ends_the_job(python, how):
    ended, seconds = timed("remote_calls.py", how, "2", n=2, python=python, timeout=60)
    assert ended.returncode not in (0, None), str(ended)
    assert seconds < 40


@each_engine
@pytest.mark.parametrize("how", [pytest.param("stop", marks=pytest.mark.full), "wait"])
def test_a_worker_that_stays_in_f_is_a_stall(python, how):
    ended = launch_stalled(python, how)
    assert ended.returncode not in (0, None), str(ended)
    assert "StallError" in ended.stderr, str(ended)
    assert "worker 1 (x=1)" in ended.stderr, str(ended)


def launch_stalled(python, how):
    return timed("remote_calls.py", how, "2", n=2, python=python, timeout=60, SPMD_TIMEOUT="3")[0]
