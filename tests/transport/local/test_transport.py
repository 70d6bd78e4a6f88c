"""Virtual workers: errors, deadlocks, interrupts, isolation and determinism, with both schedulers."""

from __future__ import annotations

import contextvars
import faulthandler
import gc
import os
import random
import re
import sys
import threading
import time
import traceback
import warnings
import weakref
from contextlib import suppress

import numpy as np
import pytest
from conftest import placed
from mpi_programs import timing, verbs
from mpi_programs.parting import draw_call, execute, spoil
from virtual_workers import all_is_well, in_process, living, mesh_of, run

import spmd
from spmd import P
from spmd.errors import DeadlockError, LayoutError, MismatchError
from spmd.kernels.parallel import thread_pool
from spmd.transport.call import Call, Group
from spmd.transport.processes.announce import Pending

pytestmark = pytest.mark.usefixtures("no_hang")


def call_of(group: Group, x: np.ndarray, **options) -> Call:
    return Call("test", group.axes, x.dtype, x.shape, **options)


# Errors in bodies


@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize("step", range(5))
def test_the_error_of_any_worker_at_any_step_reaches_the_caller(scheduler, failing, step):
    mesh = mesh_of(scheduler)
    before = threading.active_count()
    raised = KeyError(f"{failing} at {step}")

    def body(worker):
        for k in range(5):
            if (worker.index, k) == (failing, step):
                raise raised
            spmd.psum(np.ones(3), "x")

    with pytest.raises(KeyError) as caught:
        run(mesh, body)
    assert caught.value is raised
    assert raised.__notes__ == [f"raised by worker {failing} (x={failing})"]
    assert traceback.extract_tb(raised.__traceback__)[-1].name == "body"
    assert all_is_well(mesh)
    assert threading.active_count() <= max(before, 1 + 4)


def test_the_first_error_is_that_of_the_earliest_collective_then_of_the_lowest_worker(scheduler):
    steps = {0: 3, 1: 2, 2: 2, 3: 1}  # The collectives after which each worker raises.

    def body(worker, delay=0.0):
        pair = "b"  # Pairs that do not depend on each other, so that all four come to their errors.
        for _ in range(steps[worker.index]):
            spmd.psum(np.ones(1), pair)
        time.sleep(delay)
        raise ValueError(f"worker {worker.index}")

    mesh = mesh_of(scheduler, a=2, b=2)
    # Worker 3 raises after one collective, so worker 2 never gets to its second.
    with pytest.raises(ValueError, match="worker 3") as caught:
        run(mesh, body)
    assert caught.value.__notes__ == ["raised by worker 3 (a=1, b=1)"]
    steps[3] = 2
    for slow in range(4):
        with pytest.raises(ValueError, match="worker 1") as caught:
            run(mesh, lambda worker, slow=slow: body(worker, 0.01 * (worker.index == slow)))
        assert caught.value.__notes__ == [
            "raised by worker 1 (a=0, b=1)\n"
            "worker 2 (a=1, b=0) raised ValueError: worker 2\n"
            "worker 3 (a=1, b=1) raised ValueError: worker 3"
        ]


def test_an_error_that_all_raise_alike_is_told_once(scheduler):
    with pytest.raises(ZeroDivisionError) as caught:
        run(mesh_of(scheduler), lambda worker: 1 // 0)
    assert caught.value.__notes__ == ["raised by worker 0 (x=0), and alike by 3 more"]


def test_one_error_object_raised_again_has_one_note(scheduler):
    error = ValueError("the same")

    def body(worker, k):
        if worker.index == k:
            raise error

    for k in (2, 2, 1):
        with pytest.raises(ValueError, match="the same"):
            run(mesh_of(scheduler), lambda worker, k=k: body(worker, k))
        assert error.__notes__ == [f"raised by worker {k} (x={k})"]


def test_an_error_does_not_wait_for_workers_that_never_end_by_themselves(scheduler):
    def body(worker):
        if worker.coordinates["a"] == 0:
            raise ValueError("early")
        while True:
            spmd.psum(np.ones(1), "b")

    with pytest.raises(ValueError, match="early"):
        run(mesh_of(scheduler, a=2, b=2), body)


def test_what_a_worker_raises_while_it_is_stopped_is_not_the_error(scheduler):
    def body(worker):
        if worker.index == 3:
            spmd.psum(np.ones(1), "b")
            raise ValueError("the cause")
        try:
            spmd.psum(np.ones(1), "b")
            spmd.psum(np.ones(1), "a")
        finally:
            raise RuntimeError("in finally")

    mesh = mesh_of(scheduler, a=2, b=2)
    # Worker 0 and 1 wait for 2 and 3 along a; they are stopped, and raise what says nothing.
    with pytest.raises(ValueError, match="the cause") as caught:
        run(mesh, body)
    assert caught.value.__notes__ == ["raised by worker 3 (a=1, b=1)"]
    assert all_is_well(mesh)


def test_a_body_that_swallows_the_stop_is_stopped_at_its_next_collective(scheduler):
    def body(worker):
        if worker.index == 0:
            raise ValueError("gone")
        group = worker.group(("x",))
        handle = worker.comm.all_reduce(group, call_of(group, np.ones(1)), np.ones(1))
        for _ in range(3):
            with suppress(BaseException):
                spmd.psum(np.ones(1), "x")
        with suppress(BaseException):
            handle.wait()
        return handle.wait()

    mesh = mesh_of(scheduler)
    with pytest.raises(ValueError, match="gone"):
        run(mesh, body)
    assert all_is_well(mesh)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, "GreenletExit"])
def test_exceptions_that_end_programs_stop_all_at_once(scheduler, kind):
    if kind == "GreenletExit":
        from greenlet import GreenletExit as kind

    def body(worker):
        if worker.index == 1:
            raise kind("enough")
        if worker.index == 0:
            raise ValueError("less urgent")
        spmd.psum(np.ones(1), "x")

    mesh = mesh_of(scheduler)
    with pytest.raises(kind, match="enough"):
        run(mesh, body)
    assert all_is_well(mesh)


def test_deep_recursion_around_a_collective_is_an_error_and_no_hang(scheduler):
    mesh = mesh_of(scheduler)

    def deep(n):
        spmd.psum(np.ones(1), "x")
        return deep(n + 1)

    for only in (range(4), [2]):
        with pytest.raises((RecursionError, MismatchError)):
            run(mesh, lambda worker, only=only: deep(0) if worker.index in only else None)
        assert all_is_well(mesh)


@pytest.mark.host("sums on a GPU raise no floating-point errors")
def test_an_error_inside_a_sum_reaches_every_worker(scheduler):
    mesh = mesh_of(scheduler)
    caught = []

    def body(worker):
        try:
            with np.errstate(over="raise"):
                spmd.psum(np.full(3, 1e308), "x")
        except FloatingPointError:
            caught.append(worker.index)
        return spmd.psum(np.ones(1), "x")

    run(mesh, body)
    assert sorted(caught) == [0, 1, 2, 3]


def test_nothing_of_a_run_outlives_it_in_a_cycle(scheduler):
    """Neither results nor blocks nor frames wait for the garbage collector, whether a map ends well or fails."""
    mesh = mesh_of(scheduler)
    seen: list[weakref.ref] = []

    def body(worker, fails=False):
        big = np.ones(1000)
        seen.append(weakref.ref(big))
        total = spmd.psum(big, "x")
        seen.append(weakref.ref(total))
        if fails and worker.index == 2:
            raise ValueError("gone")
        return spmd.psum(big, "x")

    run(mesh, body)
    gc.collect()
    gc.disable()
    try:
        run(mesh, body)
        assert [r() for r in seen if r() is not None] == []
        for _ in range(3):
            with pytest.raises(ValueError, match="gone"):
                run(mesh, lambda worker: body(worker, fails=True))
            deadline = time.monotonic() + 5
            while any(r() is not None for r in seen) and time.monotonic() < deadline:
                time.sleep(0.001)  # The last thread may still be on its way out of the body.
            assert [r() for r in seen if r() is not None] == []
    finally:
        gc.enable()


def test_a_thousand_failures_leave_no_threads_and_no_greenlets(scheduler):
    from greenlet import greenlet

    mesh = mesh_of(scheduler)

    def body(worker, k):
        spmd.psum(np.ones(1), "x")
        if worker.index == k % 4:
            raise ValueError
        spmd.psum(np.ones(1), "x")

    run(mesh, lambda worker: None)
    gc.collect()
    thread_pool, before = threading.active_count(), living(greenlet)
    for k in range(1000 if scheduler == "lockstep" else 300):
        with pytest.raises(ValueError):  # noqa: PT011
            run(mesh, lambda worker, k=k: body(worker, k))
    assert threading.active_count() == thread_pool
    gc.collect()
    assert living(greenlet) <= before
    assert all_is_well(mesh)


# Deadlocks and mismatches


def test_a_mismatch_names_both_workers_calls_and_lines(scheduler):
    def body(worker):
        x = np.ones((2, 3))
        if worker.index == 3:
            return spmd.pmax(x, ("a", "b"))  # line of worker 3
        return spmd.psum(x, ("a", "b"))  # line of the others

    with pytest.raises(MismatchError) as caught:
        run(mesh_of(scheduler, a=2, b=2), body)
    first = body.__code__.co_firstlineno
    assert str(caught.value) == (
        "a collective\n"
        "  got:    workers that met with different calls\n"
        "          worker 0 (a=0, b=0): psum(float64[2, 3], ('a', 'b'))\n"
        f"            at {__file__}:{first + 4} in body\n"
        "          worker 3 (a=1, b=1): pmax(float64[2, 3], ('a', 'b'), how='max', dims=())\n"
        f"            at {__file__}:{first + 3} in body\n"
        "  needed: the same operator, axes, parameters, dtype and shape from all of the group, in the same order\n"
        "  mend:   let all workers take the same path: no branch on a worker's own data around a collective; "
        "spmd.at_root(f, x, axis_name=..., root=...) runs f on some workers only"
    )
    assert not hasattr(caught.value, "__notes__")
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert sum(frame.name == "body" for frame in frames) == 1, "frames of several workers"


def test_axes_in_another_order_are_a_mismatch(scheduler):
    with pytest.raises(MismatchError, match=r"psum\(int64\[\], \('b', 'a'\)\)"):
        run(mesh_of(scheduler, a=2, b=2), lambda w: spmd.psum(np.int64(1), ("b", "a") if w.index == 1 else ("a", "b")))


def test_a_deadlock_says_what_each_worker_waits_for(scheduler):
    def body(worker):
        if worker.index == 0:
            return None
        if worker.index == 1:
            spmd.psum(np.ones(2), "b")
        elif worker.index == 2:
            spmd.pmax(np.ones(2), "b")
            spmd.psum(np.ones(2), "a")
        else:
            spmd.pmax(np.ones(2), "b")

    with pytest.raises(DeadlockError) as caught:
        run(mesh_of(scheduler, a=2, b=2), body)
    first = body.__code__.co_firstlineno
    waits = str(caught.value).splitlines()[2:-2]
    assert waits == [
        "          worker 0 (a=0, b=0) has left the map and called nothing",
        "          worker 1 (a=0, b=1) waits in psum(float64[2], 'b') for worker 0 (a=0, b=0)",
        f"            at {__file__}:{first + 4} in body",
        "          worker 2 (a=1, b=0) waits in psum(float64[2], 'a') for worker 0 (a=0, b=0)",
        f"            at {__file__}:{first + 7} in body",
        "          worker 3 (a=1, b=1) has left the map; the last it called was "
        "pmax(float64[2], 'b', how='max', dims=())",
        f"            at {__file__}:{first + 9} in body",
    ]


def test_a_report_of_many_workers_is_cut(scheduler):
    with pytest.raises(DeadlockError) as caught:
        run(mesh_of(scheduler, x=40), lambda w: w.index and spmd.psum(np.ones(1), "x"))
    assert "and 24 more" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 40


def test_workers_that_take_two_axes_in_another_order_are_an_error(scheduler):
    """Every meeting by itself looks right: both sums would be of arrays that have been summed over the other axis."""

    def body(worker):
        x = np.arange(3.0) + worker.index
        for axis in "yx" if worker.index == 0 else "xy":
            x = spmd.psum(x, axis)

    with pytest.raises(MismatchError, match=r"its collective 1\n.*\n.*its collective 2") as caught:
        run(mesh_of(scheduler, x=2, y=2), body)
    assert "worker 0 (x=0, y=0): psum(float64[3], 'y')" in str(caught.value)


def test_groups_that_make_different_numbers_of_collectives_are_an_error(scheduler):
    def body(worker):
        if worker.coordinates["x"]:
            spmd.psum(np.ones(2), "y")

    with pytest.raises(MismatchError, match="the end of the map, its collective 0") as caught:
        run(mesh_of(scheduler, x=2, y=2), body)
    assert "after psum(float64[2], 'y')" in str(caught.value)


def test_what_only_some_workers_do_stands_in_at_root(scheduler):
    def body(x):
        once = spmd.at_root(lambda x: spmd.psum(x * x, "y"), spmd.keep(x, "x", 1), axis_name="x", root=1)
        return spmd.psum(spmd.replicate(once, "x", 1) + x, "y")

    with mesh_of(scheduler, x=2, y=2):
        f = spmd.map(body, P("y"), P())
        v = np.array([1.0, 2.0])
        np.testing.assert_array_equal(f(v), [2 * 5.0 + 3.0])
        np.testing.assert_array_equal(spmd.grad(lambda v: np.sum(f(v)))(v), 4 * v + 1)


@pytest.mark.full
def test_thousands_of_programs_in_which_workers_part_ways(scheduler):
    part_ways(scheduler, 11, 4000)


def test_workers_that_part_ways_are_always_an_error(scheduler):
    part_ways(scheduler, 7, 400)


def part_ways(scheduler: str, seed: int, count: int) -> None:
    rng = random.Random(seed)
    drawn = deadlocks = 0
    for _ in range(count):
        sizes = rng.choice([{"x": 2}, {"x": 3}, {"x": 2, "y": 2}, {"x": 3, "y": 2}])
        mesh, axes = mesh_of(scheduler, **sizes), list(sizes)
        usual = [draw_call(rng, axes) for _ in range(rng.randrange(1, 6))]
        other, culprit = spoil(rng, usual, axes), rng.randrange(mesh.size)
        if other == usual:
            continue
        drawn += 1
        # Rounds that go well before: where arrays carry states, lines then call again what they have.
        rounds = rng.randrange(3)

        def body(w, usual=usual, other=other, culprit=culprit, rounds=rounds):
            for call in [*(usual * rounds), *(other if w.index == culprit else usual)]:
                execute(call)

        with pytest.raises(MismatchError) as caught:
            mesh.run(body, tracked=rng.random() < 0.7)
        said = str(caught.value)
        assert mesh.describe(culprit) in said, said
        assert len(set(re.findall(r"worker \d", said))) >= 2, said
        assert "parting.py:" in said, said
        assert isinstance(caught.value, DeadlockError) or said.count("parting.py:") == 2, said
        deadlocks += isinstance(caught.value, DeadlockError)
        assert all_is_well(mesh)
    assert drawn > count * 5 / 8
    assert count / 20 < deadlocks < drawn - count / 20


def test_stacked_blocks_of_different_shapes_are_an_error(scheduler):
    with pytest.raises((MismatchError, LayoutError)):
        run(mesh_of(scheduler), lambda w: spmd.all_gather(np.ones(3 + (w.index == 2)), "x"))


# Interrupts, forks, exit: in processes of their own


@pytest.mark.parametrize("what", ["waits", "computes", "stuck"])
def test_an_interrupt_stops_all_workers_wherever_they_are(scheduler, what):
    program = f"""
all_is_well()
for k in range(5):
    try:
        later(0.02 + 0.013 * k, interrupt)
        run({what})
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("not interrupted")
    all_is_well()
assert threading.active_count() <= 1 + 5 + (4 if sys.argv[1] == "threads" else 0), threading.enumerate()
print("well")
"""
    assert in_process(scheduler, program) == "well\n"


def test_a_second_interrupt_does_not_wait_for_workers_that_cannot_be_stopped():
    program = """
def sleeps(w):
    if w.index == 1: time.sleep(60)
    spmd.psum(np.ones(1), "x")
all_is_well()
started = time.monotonic()
try:
    later(0.05, interrupt)
    later(0.8, interrupt)
    run(sleeps)
except KeyboardInterrupt:
    pass
assert time.monotonic() - started < 20
all_is_well()
print("well")
"""
    assert in_process("threads", program) == "well\n"


def test_interrupts_at_random_moments_leave_the_pool_in_order():
    program = """
import random
rng = random.Random(3)
def body(w):
    for _ in range(20): spmd.psum(np.ones(1), "x")
signal.signal(signal.SIGALRM, signal.default_int_handler)
run(body)  # What is imported at first use does not bear an interrupt in the middle.
hits = 0
for k in range(300):
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 3e-3))
        run(body)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        hits += 1
    if k % 10 == 0: all_is_well()
all_is_well()
assert hits > 30, hits
assert threading.active_count() <= 20, threading.enumerate()
print("well")
"""
    assert in_process("threads", program) == "well\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_has_workers_of_its_own(scheduler):
    program = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks of processes with threads.
all_is_well()
child = os.fork()
all_is_well()
if child == 0: os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print("well")
"""
    assert in_process(scheduler, program) == "well\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_forked_inside_a_body_cannot_wait_for_the_others():
    program = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
from spmd.errors import TransportError
children = []
def body(w):
    if w.index == 1:
        child = os.fork()
        if child == 0:
            try:
                for _ in range(2): spmd.psum(np.ones(1), "x")  # The others may have come to the first.
            except TransportError as error:
                os._exit(7 if "forked inside a body" in str(error) else 8)
            os._exit(9)
        children.append(child)
    return spmd.psum(np.ones(1), "x")
run(body)
assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
print("well")
"""
    assert in_process("threads", program) == "well\n"


def test_programs_end_while_threads_lie_idle_and_run_maps_at_exit(scheduler):
    program = """
import atexit
all_is_well()
atexit.register(lambda: print("well", flush=True))
atexit.register(all_is_well)
"""
    assert in_process(scheduler, program) == "well\n"


# Isolation


def test_several_threads_run_maps_at_once(scheduler):
    found, errors = {}, []

    def caller(k):
        mesh = mesh_of(scheduler, x=2 + k % 3)

        def body(worker):
            total = placed(np.zeros(4))
            for j in range(20):
                total = total + spmd.psum(np.full(4, float(k + j + worker.index)), "x")
                if k == 5 and j == 10:
                    raise ValueError("caller 5 fails")
            return total

        for _ in range(5):
            try:
                results = run(mesh, body)
            except ValueError:
                errors.append(k)
                continue
            n = mesh.size
            found[k] = [r.tolist() for r in results.values()]
            assert found[k] == [[20.0 * (n * k + n * (n - 1) / 2) + 190 * n] * 4] * n

    thread_pool = [threading.Thread(target=caller, args=(k,)) for k in range(6)]
    for t in thread_pool:
        t.start()
    for t in thread_pool:
        t.join()
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert errors == [5] * 5


def test_the_pool_is_used_again():
    mesh = mesh_of("threads", x=3)
    run(mesh, lambda w: None)
    before = threading.enumerate()
    for _ in range(200):
        run(mesh, lambda w: spmd.psum(np.ones(1), "x"))
    assert threading.enumerate() == before


_setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting", default="outside")


def test_context_is_that_of_the_caller_and_stays_with_each_worker(scheduler):
    mesh = mesh_of(scheduler)

    def body(worker):
        seen = _setting.get()
        _setting.set(f"worker {worker.index}")
        with np.errstate(all="raise" if worker.index == 2 else "ignore"):
            spmd.psum(np.ones(1), "x")
            spmd.psum(np.ones(1), "x")
            return seen, _setting.get(), np.geterr()["divide"], dict(np.geterr())["over"]

    token = _setting.set("caller")
    try:
        results = run(mesh, body)
    finally:
        assert _setting.get() == "caller"
        _setting.reset(token)
    for w, seen in results.items():
        rule = "raise" if w == 2 else "ignore"
        assert seen == ("caller", f"worker {w}", rule, rule)


def test_floating_point_errors_and_warnings_are_those_of_the_caller(scheduler):
    mesh = mesh_of(scheduler)

    def body(worker):
        return spmd.psum(np.zeros(2) / np.zeros(2), "x")

    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        run(mesh, body)
    with np.errstate(invalid="raise"), pytest.raises(FloatingPointError):
        run(mesh, body)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(mesh, body)
    assert len(told) == 4
    assert told[0].category is RuntimeWarning


@pytest.mark.parametrize("size", [3, 700000])
@pytest.mark.parametrize("dtype", ["f2", "f4", "i8", "c16"])
def test_sums_are_written_over_what_can_be_spared(scheduler, dtype, size):
    mesh = mesh_of(scheduler)

    def body(worker):
        comm, group, me = worker.comm, worker.group(("x",)), worker.index
        rng = np.random.default_rng(me)
        xs = [(rng.standard_normal(n) * 9).astype(dtype) for n in (size, 5, size, 4)]
        before = [x.copy() for x in xs]
        spare = [me == 0, me == 1, me == 2, False]
        call = Call("psum", ("x",), xs[0].dtype, (sum(x.size for x in xs),), same_shape=True)
        totals = comm.all_reduce_many(group, call, xs, spare).wait()
        for k, (x, old) in enumerate(zip(xs, before, strict=True)):
            written = k == me and k < 3  # over that of the worker that can spare it
            assert (totals[k] is x) == written
            np.testing.assert_array_equal(x, totals[k] if written else old)
        plain = comm.all_reduce_many(group, call, before).wait()
        return all(a.tobytes() == b.tobytes() and not a.flags.writeable for a, b in zip(totals, plain, strict=True))

    assert all(run(mesh, body).values())


@pytest.mark.host("arrays of a device have no flag that forbids writing")
def test_nothing_received_can_be_written_to(scheduler):
    mesh = mesh_of(scheduler)

    def body(worker):
        comm, group = worker.comm, worker.group(("x",))
        x = np.full(4, float(worker.index))

        def parts():
            return [np.full(2, float(worker.index)) for _ in range(4)]

        got = [
            comm.all_reduce(group, call_of(group, x), x).wait(),
            *comm.all_reduce_many(group, call_of(group, x), [x.copy(), parts()[0]]).wait(),
            comm.reduce_scatter(group, call_of(group, x), parts()).wait(),
            *comm.all_gather(group, call_of(group, x), x.copy()).wait(),
            *comm.all_to_all(group, call_of(group, x), parts()).wait(),
            comm.broadcast(group, call_of(group, x, same_shape=None), x.copy() if group.index == 1 else None, 1).wait(),
            *comm.exchange(group, call_of(group, x), dict(enumerate(parts())), range(4)).wait().values(),
        ]
        total = comm.reduce(group, call_of(group, x), x, 2).wait()
        got += [] if total is None else [total]
        got += [
            spmd.psum(x, "x"),
            spmd.all_gather(x, "x"),
            spmd.psum_scatter(x, "x"),
            spmd.all_to_all(x, "x", 0, 0, tiled=True),
            spmd.shift(x, "x"),
            spmd.broadcast(spmd.sum_reduce(x, "x"), "x"),
        ]
        for a in got:
            with pytest.raises(ValueError, match="read-only"):
                a[...] = -1
        gathered = comm.all_gather(group, call_of(group, x), x).wait()
        length = len(gathered)
        gathered.clear()  # The list is this worker's own.
        spmd.psum(x, "x")
        assert length == 4
        return [a.sum() for a in got]

    run(mesh, body)


def test_a_block_that_is_written_to_after_it_was_sent_reaches_the_others_as_it_was(scheduler):
    mesh = mesh_of(scheduler)

    def body(worker):
        x = np.full(3, float(worker.index))
        received = spmd.shift(x, "x")
        x[:] = -1
        spmd.psum(np.ones(1), "x")
        return received.tolist()

    assert run(mesh, body) == {w: [float((w - 1) % 4)] * 3 for w in range(4)}


def test_read_only_views_of_what_a_worker_writes_to_are_copied(scheduler):
    mesh = mesh_of(scheduler)

    def body(worker):
        x = np.full(3, float(worker.index))
        view, stretched = x[:], np.broadcast_to(x, (2, 3))
        view.flags.writeable = False
        received = [spmd.shift(view, "x"), spmd.broadcast(spmd.keep(stretched, "x"), "x")]
        spmd.psum(np.ones(1), "x")
        x[:] = -1
        spmd.psum(np.ones(1), "x")
        return [float(r.min()) for r in received]

    assert run(mesh, body) == {w: [float((w - 1) % 4), 0.0] for w in range(4)}


@pytest.mark.host("arrays of a device have no flag that forbids writing")
def test_blocks_of_a_map_are_nobodys_to_write(scheduler):
    mesh, whole = mesh_of(scheduler), np.arange(8.0)
    kept = []

    def body(copy, part):
        for x in (copy, part):
            with pytest.raises(ValueError, match="read-only"):
                x[0] = -1
            with pytest.raises(ValueError, match="WRITEABLE"):
                x[:].flags.writeable = True
        mine = np.ones(2)
        kept.append(mine)
        return copy, mine

    mapped = spmd.map(body, in_specs=(P(), P("x")), out_specs=(P(), P("x")), mesh=mesh, check=False)
    copy, mine = mapped(whole, whole)
    whole[:] = -2
    for x in kept:
        x[:] = -3
    assert copy.numpy().tolist() == list(range(8))
    assert mine.numpy().tolist() == [1.0] * 8
    for block in [*copy.blocks.values(), *mine.blocks.values()]:
        assert not block.flags.writeable


def test_calls_do_not_keep_the_arrays_of_those_who_called(scheduler):
    """While others have still to come, and afterwards: a call remembers its line, not its frame."""
    mesh = mesh_of(scheduler)

    def start(worker):
        big = np.ones(1000)
        handle = worker.comm.all_reduce(
            worker.group(("x",)), call_of(worker.group(("x",)), np.ones(1), frame=sys._getframe()), np.ones(1)
        )
        return handle, weakref.ref(big)

    def body(worker):
        handle, big = start(worker)
        early = big() is None
        handle.wait()
        return early

    assert run(mesh, body) == dict.fromkeys(range(4), True)


# Determinism


def test_verbs_and_operators_give_the_same_bits_with_both_schedulers():
    """Of a third of the cases; `process_cases.py` has them all, on processes and by the scheduler lockstep."""
    _with_both_schedulers(share=True)


@pytest.mark.full
def test_all_verbs_and_operators_give_the_same_bits_with_both_schedulers():
    _with_both_schedulers(share=False)


def _with_both_schedulers(share: bool) -> None:
    lockstep, threads = (verbs.results(share, transport="local", scheduler=s) for s in ("lockstep", "threads"))
    assert lockstep == threads


def test_timing_changes_nothing(scheduler):
    """Forward values and gradients, with workers that dawdle at random."""
    found = timing.hashes(25, transport="local", scheduler=scheduler)
    assert len(found) == 1
    assert found == _hashes.setdefault("timing", found), "the schedulers differ"


@pytest.mark.full
def test_timing_changes_nothing_in_a_thousand_runs(scheduler):
    faulthandler.cancel_dump_traceback_later()
    assert len(timing.hashes(1000, transport="local", scheduler=scheduler)) == 1


_hashes: dict[str, list[str]] = {}


def test_threads_run_at_the_same_time():
    """Each waits outside of any collective until all have come."""
    barrier = threading.Barrier(4)
    run(mesh_of("threads"), lambda worker: barrier.wait(timeout=20))


def test_results_come_in_the_order_of_the_workers(scheduler):
    results = run(mesh_of(scheduler), lambda worker: time.sleep(0.01 * (3 - worker.index)))
    assert list(results) == [0, 1, 2, 3]


def test_a_handle_may_be_asked_twice_and_late(scheduler):
    def body(worker):
        group = worker.group(("x",))
        handles = [worker.comm.all_reduce(group, call_of(group, np.ones(2)), np.full(2, float(k))) for k in range(3)]
        values = [h.wait() for h in reversed(handles)]
        assert [h.wait() is v for h, v in zip(reversed(handles), values, strict=True)] == [True] * 3
        return [v.tolist() for v in values]

    assert run(mesh_of(scheduler), body)[1] == [[8.0, 8.0], [4.0, 4.0], [0.0, 0.0]]


# The pool itself


def test_a_thread_that_cannot_start_leaves_the_pool_in_order(monkeypatch):
    pool = thread_pool.Pool()
    started = []

    def start(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)

    monkeypatch.setattr(thread_pool.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        pool.take(4)
    assert sorted(map(id, pool.idle)) == sorted(map(id, started))
    assert len(pool.take(2)) == 2
    assert pool.idle == []


def test_signals_that_raise_other_exceptions_end_a_map_too(scheduler):
    program = """
class Alarm(Exception): pass
def ring(*_): raise Alarm
signal.signal(signal.SIGALRM, ring)
all_is_well()
try:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    run(computes if sys.argv[1] == "threads" else waits)
except Alarm:
    print("well")
all_is_well()
"""
    assert in_process(scheduler, program) == "well\n"


def test_what_is_under_way_keeps_its_buffers():
    """Engines may read and write them until it is over."""

    class Engine:
        def __init__(self):
            self.pending, self.last_call = set(), None

        def arrive(self, requests, call):
            assert buffer() is not None

    block = np.ones(3)
    buffer = weakref.ref(block)
    pending = Pending(Engine(), ["a request"], (block,), lambda: "done")
    del block
    gc.collect()
    assert buffer() is not None
    assert pending.wait() == "done"
    assert buffer() is None
