"""Lockstep: workers take turns in the order of their numbers, in greenlets, and the last one in the caller."""

from __future__ import annotations

import contextvars
import functools
import gc

import greenlet
import numpy as np
import pytest
from virtual_workers import living, mesh_of, run

import spmd
from spmd import P
from spmd.errors import DeadlockError, MismatchError
from spmd.transport.local.rendezvous import Run

pytestmark = pytest.mark.usefixtures("no_hang")


def test_lockstep_is_lockstep():
    order: list[int] = []

    def body(worker):
        for _ in range(3):
            order.append(worker.index)
            spmd.psum(np.ones(1), "x")

    run(mesh_of("lockstep"), body)
    first = list(order)
    order.clear()
    run(mesh_of("lockstep"), body)
    assert first == order
    assert first[:4] == [0, 1, 2, 3]


def test_the_last_worker_in_lockstep_is_the_caller():
    """Greenlets are begun for the others only; a map may be called in a greenlet of the user's own."""

    def places(n: int) -> list[bool]:
        caller = greenlet.getcurrent()

        def body(worker):
            spmd.psum(np.ones(1), "x")
            return greenlet.getcurrent() is caller

        return list(run(spmd.Mesh(x=n, scheduler="lockstep"), body).values())

    assert places(1) == [True]
    assert places(3) == [False, False, True]
    found: list[list[bool]] = []
    other = greenlet.greenlet(lambda: found.append(places(2)))
    other.switch()
    assert other.dead
    assert found == [[False, True]]


@pytest.mark.parametrize("scheduler", ["auto", "lockstep"])
def test_the_caller_runs_workers_one_by_one_where_none_has_waited(scheduler):
    """From the second call on. If one waits then after all, others begin in greenlets beside it."""
    caller = greenlet.getcurrent()

    def body(x, axes):
        for axis in axes:
            x = spmd.psum(x, axis)
        return np.full((1, 1), greenlet.getcurrent() is caller) | (x != x)

    mesh, spec = spmd.Mesh(x=2, y=3, scheduler=scheduler), P("x", "y")
    whole = np.arange(6.0).reshape(2, 3)

    def places(f):
        return f(whole).numpy().reshape(-1).tolist()

    waits: list[str] = []
    f = mesh.map(lambda x: spmd.varying(spmd.block(body(x, waits)), ("x", "y")), in_specs=spec, out_specs=spec)
    last = [False] * 5 + [True]
    assert places(f) == last
    for _ in range(3):
        assert places(f) == [True] * 6
    waits.append("y")  # of each row the first is in the caller: the other two begin while it waits
    assert places(f) == [True, False, False] * 2
    assert places(f) == last
    waits.clear()
    assert places(f) == last
    waits.append("x")  # all begin before the first can go on
    assert places(f)[0]
    assert places(f) == last


@pytest.mark.parametrize("n", [2, 5])
def test_a_map_that_has_not_waited_may_fail_or_wait_in_vain(n):
    """As any other, and leaves nothing behind."""
    does: dict[int, str] = {}

    def body(x):
        me = int(spmd.block(spmd.worker_index("x")))
        if does.get(me) == "fail":
            raise ValueError(f"of {me}")
        if does.get(me) == "interrupt":
            raise KeyboardInterrupt
        if does.get(me) == "wait":
            spmd.psum(x, "x")
        return x

    f = spmd.Mesh(x=n, scheduler="lockstep").map(body, in_specs=P("x"), out_specs=P("x"))
    x = np.arange(float(n))

    def ends(error: type[BaseException], match: str | None, **acts: str) -> None:
        for _ in range(2):  # the first time no worker waits any more
            assert f(x).numpy().tolist() == x.tolist()
        does.update({int(k.removeprefix("w")): act for k, act in acts.items()})
        with pytest.raises(error, match=match):
            f(x)
        does.clear()

    gc.collect()
    gc.disable()
    try:
        for k in {0, n - 1}:
            ends(ValueError, f"of {k}", **{f"w{k}": "fail"})
            ends(KeyboardInterrupt, None, **{f"w{k}": "interrupt"})
            ends(MismatchError, "the end of the map|waits in psum", **{f"w{k}": "wait"})
        ends(ValueError, "of 1", w0="wait", w1="fail")
        ends(KeyboardInterrupt, None, w0="wait", w1="interrupt")
        assert living(Run) == 0
    finally:
        gc.enable()


def test_a_greenlet_of_a_body_waits_for_its_own_meeting_only():
    """Though the body has been waited for before, by one that has ended meanwhile."""

    def body(worker, at):
        x = spmd.psum(np.ones(1), ("x", "y"))
        x = spmd.ppermute(x, "x", [(0, 1), (1, 0)])
        if worker.index != at:
            return float(spmd.psum(x, "y")[0])
        let = greenlet.greenlet(lambda: float(spmd.psum(x, "y")[0]))
        let.gr_context = contextvars.copy_context()
        return let.switch()

    for at in range(8):
        ran = run(spmd.Mesh(x=2, y=4, scheduler="lockstep"), functools.partial(body, at=at))
        assert ran == dict.fromkeys(range(8), 32.0)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_greenlets_that_bodies_make_themselves_wait_for_the_others(n):
    """Those of the last body too, for which the caller waits."""

    def inside(f, *args):
        let = greenlet.greenlet(f)
        let.gr_context = contextvars.copy_context()
        return let.switch(*args)

    def body(worker):
        def twice(x):
            return spmd.psum(spmd.psum(x, "x"), "x")

        return int(inside(twice, np.int64(worker.index + 1)))

    total = n * n * (n + 1) // 2
    assert run(spmd.Mesh(x=n, scheduler="lockstep"), body) == dict.fromkeys(range(n), total)

    def parting(worker):
        for _ in range(worker.index):
            inside(lambda: spmd.psum(np.ones(1), "x"))

    with pytest.raises(DeadlockError, match=rf"worker {n - 1} \(x={n - 1}\) waits in psum"):
        run(spmd.Mesh(x=n, scheduler="lockstep"), parting)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_after_an_interrupt_no_other_body_begins_in_lockstep(kind):
    begun: list[int] = []

    def body(worker):
        begun.append(worker.index)
        if worker.index == 1:
            raise kind

    with pytest.raises(kind):
        run(spmd.Mesh(x=5, scheduler="lockstep"), body)
    assert begun == [0, 1]


@pytest.mark.parametrize("waiting", [0, 1, 2])
def test_whoever_waits_in_vain_in_lockstep_is_named(waiting):
    """The last worker too, which no greenlet of its own runs."""

    def body(worker):
        spmd.psum(np.ones(1), "x")
        if worker.index == waiting:
            spmd.pmax(np.ones(1), "x")

    with pytest.raises(DeadlockError, match=rf"worker {waiting} \(x={waiting}\) waits in pmax"):
        run(spmd.Mesh(x=3, scheduler="lockstep"), body)
    assert run(spmd.Mesh(x=3, scheduler="lockstep"), lambda worker: worker.index) == {0: 0, 1: 1, 2: 2}
