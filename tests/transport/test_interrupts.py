"""Ctrl-C at random moments of maps, and maps that are called in the handlers of signals."""

from __future__ import annotations

import pytest
from launch import each_mpi, launch
from virtual_workers import in_process

PREPARED = """
import gc, random
from greenlet import greenlet
from threadpoolctl import ThreadpoolController, threadpool_limits
from spmd import P
from spmd.kernels.parallel import split_work
from spmd.kernels.parallel.thread_pool import Thread, pool
from spmd.transport import blas_threads as blas

rng = random.Random(SEED)
small = np.arange(12.0).reshape(4, 3)
large = np.ones((4, 1 << 17))
weights = np.random.default_rng(0).normal(size=(64, 64))

def sums(x):
    for _ in range(6): x = spmd.pvary(spmd.psum(x, "x") / 4, "x") + x
    return x

def products(w, x):
    return spmd.mean((w @ w)[0, 0] * x ** 2, "x")

def moved(x):
    return spmd.psum(spmd.ppermute(x, "x", [(k, (k + 1) % 4) for k in range(4)]), "x")

def apart(x):
    if spmd.worker_index("x") == 1: x = x + 1
    return spmd.all_gather(x, "x")

maps = [
    (spmd.map(sums, P("x"), P("x"), mesh=mesh), (small,)),
    (spmd.value_and_grad(spmd.map(products, (P(), P("x")), P(), mesh=mesh)), (weights, small)),
    (spmd.jit(spmd.map(sums, P("x"), P("x"), mesh=mesh)), (small,)),
    (spmd.map(moved, P("x"), P(), mesh=mesh), (large,)),
    (spmd.map(apart, P("x"), P("x"), mesh=mesh), (small,)),
]

def values(tree):
    return [values(t) for t in tree] if isinstance(tree, tuple) else np.asarray(tree).tobytes()

def call(k): return values(maps[k][0](*maps[k][1]))
def blas_now(): return [x.num_threads for x in ThreadpoolController().select(user_api="blas").lib_controllers]

for _ in range(5): first = [call(k) for k in range(len(maps))]  # What is imported at first use bears no interrupt.
took = []
for k in range(len(maps)):
    started = time.perf_counter()
    call(k)
    took.append(time.perf_counter() - started)

def threads_are_in_order():
    "Each thread of the pool waits for a task, and is there once."
    living = [t for t in threading.enumerate() if isinstance(t, Thread)]
    return len(pool.idle) == len(set(pool.idle)) and set(living) <= set(pool.idle) and not pool.helpers

def all_as_before(threads):
    assert blas_now() == threads, (blas_now(), threads)
    assert not blas._limit.requests and not blas._limit.libraries
    assert split_work._scope() is None
    until = time.monotonic() + 10
    while not threads_are_in_order() and time.monotonic() < until: time.sleep(0.001)
    assert threads_are_in_order(), (pool.idle, pool.helpers, threading.enumerate())
"""

SEARCH = """
armed = False

def raise_if_armed(number, frame):
    "Another thread may take the signal of a timer just as it is stopped; it then comes when the call is over."
    if armed: raise KeyboardInterrupt

signal.signal(signal.SIGALRM, raise_if_armed)

caught = 0
with threadpool_limits(3, user_api="blas"):
    before = blas_now()
    for turn in range(COUNT):
        k = rng.randrange(len(maps))
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 1.2 * took[k]))
            call(k)
            armed = False
        except KeyboardInterrupt:
            caught += 1
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert np.array_equal(weights @ weights, weights @ weights)
        all_as_before(before)
        if turn % 20 == 0:
            assert [call(k) for k in range(len(maps))] == first
    assert [call(k) for k in range(len(maps))] == first
gc.collect()
assert sum(isinstance(x, greenlet) and not x.dead for x in gc.get_objects()) <= 1
assert threading.active_count() < 20, threading.enumerate()
print("well" if caught > COUNT / 4 else caught)
"""


@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 150), *(pytest.param(seed, 400, marks=pytest.mark.full) for seed in range(1, 6))],
)
def test_interrupts_at_random_moments_leave_everything_as_before(scheduler, seed, count):
    """BLAS, greenlets, the pool of threads, the results."""
    program = PREPARED.replace("SEED", str(seed)) + SEARCH.replace("COUNT", str(count))
    assert in_process(scheduler, program, timeout=120) == "well\n"


HANDLED = """
from spmd.errors import MeshError
other = spmd.Mesh(x=3, transport="local", scheduler=sys.argv[2])
called = spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P(), mesh=other)
said, outside = [], contextvars.copy_context()

def handler(*_):
    try:
        said.append(float(called(np.ones(3)).item()))
    except MeshError as error:
        assert "a map that is called inside a body" in str(error) and "signal" in str(error), error
        said.append("error")
        said.append(outside.copy().run(lambda: float(called(np.ones(3)).item())))
    with spmd.debug(nans=True): said.append(3.0)
    release()

called(np.ones(3))
signal.signal(signal.SIGALRM, handler)
with threadpool_limits(3, user_api="blas"):
    before = blas_now()
    for turn in range(COUNT):
        k = rng.randrange(len(maps))
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 1.2 * took[k]))
        with spmd.debug(nans=turn % 5 == 0): assert call(k) == first[k]
        signal.setitimer(signal.ITIMER_REAL, 0)
        all_as_before(before)
assert len(said) > COUNT / 4 and set(said) <= {3.0, "error"}, said
assert ("error" in said) == (sys.argv[1] == "lockstep"), said
print("well")
"""


@pytest.mark.parametrize("count", [80, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize("inner", ["lockstep", "threads"])
def test_a_map_in_a_signals_handler_runs_or_says_why_not(scheduler, inner, count):
    """The handler interrupts maps at random moments; where it interrupts a body it is part of that body."""
    program = PREPARED.replace("SEED", "7") + "import contextvars\nfrom spmd.kernels.memory.pool import release\n"
    assert in_process(scheduler, program + HANDLED.replace("COUNT", str(count)), inner, timeout=120) == "well\n"


AMONG_PROCESSES = """
import random, signal, sys, time
import numpy as np, spmd
from spmd import P
from spmd.errors import MeshError, MismatchError, TransportError

mesh = spmd.Mesh(x=3)
f = spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P(), mesh=mesh)
f(np.ones(3))
said = []

def call():
    try:
        return float(f(np.ones(3)).numpy()[0])
    except (MeshError, MismatchError, TransportError) as error:
        return type(error).__name__

signal.signal(signal.SIGALRM, lambda *_: said.append(call()))
rng = random.Random(3)
for _ in range(int(sys.argv[1])):
    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-3))
    said.append(call())
    signal.setitimer(signal.ITIMER_REAL, 0)
assert set(said) <= {3.0, "MeshError", "MismatchError", "DeadlockError", "TransportError"}, said
print("well", flush=True)
"""


@each_mpi
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_a_map_in_a_signals_handler_is_an_error_between_processes(python, count, tmp_path):
    """Each process is interrupted at moments of its own; none hangs, and no number is wrong."""
    program = tmp_path / "program.py"
    program.write_text(AMONG_PROCESSES)
    ended = launch(program, str(count), n=3, python=python, SPMD_TIMEOUT="20")
    assert ended.returncode is not None, str(ended)
    assert "well" in ended.stdout or "Error" in ended.stderr, str(ended)
    assert "AssertionError" not in ended.stderr, str(ended)
