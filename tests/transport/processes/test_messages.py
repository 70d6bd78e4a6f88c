"""Groups that share no memory: their collectives go by messages, with the bits and the errors of all others."""

from __future__ import annotations

import json

import numpy as np
import pytest
from launch import PROGRAMS, each_mpi, launch
from mpi_programs import again, mismatch
from process_cases import each_engine, ended_well, of_virtual_workers


def by_messages(program: str, *args: str, python: str, per_host: int = 0, **options) -> str:
    return ended_well("by_messages.py", str(per_host), program, *args, python=python, **options)


@pytest.mark.both
@each_engine
@pytest.mark.parametrize(
    ("per_host", "which"),
    [(1, "share"), *(pytest.param(k, "all", marks=pytest.mark.full) for k in (1, 2))],
)
def test_verbs_operators_and_gradients_have_the_bits_of_virtual_workers(python, per_host, which):
    found = json.loads(by_messages("verbs.py", "checked", which, python=python, per_host=per_host, timeout=150))
    assert found == of_virtual_workers(which == "share")


@each_engine
def test_programs_that_are_done_again_have_the_bits_of_virtual_workers(python):
    found = json.loads(by_messages("again.py", python=python, n=3))
    assert found == again.results(transport="local", scheduler="lockstep")


def _algorithms(python: str, n: int, per_host: int, *share: str) -> None:
    timeout = 240 if n < 32 else 600
    words = ("algorithms.py", str(n), *share)
    found = json.loads(by_messages(*words, python=python, n=n, per_host=per_host, timeout=timeout))
    ended = launch(PROGRAMS / "algorithms_of_virtual_workers.py", str(n), n=1)
    assert ended.returncode == 0, str(ended)
    (expected,) = json.loads(ended.stdout).values()
    wrong = [
        (algorithm, worker, case)
        for algorithm, workers in found.items()
        for worker, cases in workers.items()
        for case in cases
        if cases[case] != expected[worker][case]
    ]
    assert not wrong, wrong[:10]
    assert len(found) == 19
    assert all(len(cases) == (10 if share else 25) for workers in found.values() for cases in workers.values())


@each_engine
@pytest.mark.parametrize(("n", "per_host"), [(3, 1), (6, 2)])  # two levels, over three hosts
def test_every_algorithm_gives_the_bits_of_virtual_workers(python, n, per_host):
    _algorithms(python, n, per_host, "share")


@each_mpi
@pytest.mark.parametrize(("n", "per_host"), [(4, 2), (6, 2), pytest.param(8, 4, marks=pytest.mark.full)])
def test_what_is_sent_between_hosts_is_what_the_ledger_counts(python, n, per_host):
    assert by_messages("counted.py", python=python, n=n, per_host=per_host) == "counted\n"


@pytest.mark.full
@each_engine
@pytest.mark.parametrize(
    ("n", "per_host"),
    [(1, 1), (2, 1), (3, 1), (4, 2), (5, 1), (6, 2), (7, 1), (8, 2), (10, 2), (12, 4), (16, 4), (20, 4), (32, 8)],
)
def test_every_algorithm_gives_the_bits_of_virtual_workers_for_many(python, n, per_host):
    _algorithms(python, n, per_host)


@pytest.mark.both
@each_engine
def test_workers_that_call_different_things_are_told_so_on_every_rank(python):
    found = json.loads(by_messages("mismatch.py", python=python, timeout=90))
    assert found.pop("afterwards") == ["4"]
    assert found.keys() == mismatch.CASES.keys() | {"axes"}
    for name, texts in found.items():
        for text in texts:
            assert text.startswith("MismatchError: a collective"), f"{name}: {text}"
            assert "worker 2 (x=" in text, f"{name}: {text}"
            assert text.count("          worker ") == 2, text
            assert text.count("mismatch.py:") == (1 if name == "missing" else 2), f"{name}: {text}"


@each_engine
def test_workers_that_part_ways_are_always_an_error(python):
    found = json.loads(by_messages("fuzz.py", "20", "5", python=python, timeout=120))
    assert found["drawn"] > 10
    assert found["slowest"] < 5


@pytest.mark.full
@each_engine
@pytest.mark.parametrize("seed", range(4))
def test_hundreds_of_programs_in_which_workers_part_ways(python, seed):
    found = json.loads(by_messages("fuzz.py", "300", str(200 + seed), python=python, timeout=300))
    assert found["drawn"] > 180
    assert found["slowest"] < 6


ORDERS = """
import numpy as np, spmd
from spmd.transport.call import Call

mesh = spmd.Mesh(x=4)

def body(worker):  # workers wait for what they have started in orders of their own; and have much under way
    group, comm = worker.group(("x",)), worker.comm
    xs = [np.full(3000 if k % 7 else 2, worker.index + 10.0 * k) for k in range(150)]
    handles = [comm.all_reduce(group, Call("sum", ("x",), x.dtype, x.shape, same_shape=True), x) for x in xs]
    order = np.random.default_rng(worker.index).permutation(len(xs))[: 150 - 20 * worker.index]
    for k in order:
        assert (handles[k].wait() == 6 + 40.0 * k).all()
    return 0

for _ in range(3):
    mesh.transport.share(mesh.run(body, tracked=False).results)
print("well\\n", end="", flush=True)
"""


@each_engine
def test_workers_may_wait_in_different_orders_for_what_they_have_started(python, tmp_path):
    program = tmp_path / "orders.py"
    program.write_text(ORDERS)
    assert by_messages(str(program), python=python).count("well") == 4


AHEAD = """
import sys, time
import numpy as np, spmd
from spmd import P

mesh = spmd.Mesh(x=2)
sent = np.memmap(sys.argv[1], np.int64, "r+", shape=1)

def body(x):
    if spmd.worker_index("x") == 1:
        time.sleep(1)
        seen.append(int(sent[0]))
    for k in range(1000):
        y = spmd.broadcast(spmd.keep(np.ones(4), "x", root=0), "x", root=0)
        if spmd.worker_index("x") == 0:
            sent[0] = k
    return y

seen = []
spmd.map(body, P("x"), P("x"), mesh=mesh)(np.ones(4))
if seen:
    print(seen[0])
"""


@each_engine
def test_who_only_sends_does_not_run_far_ahead_of_its_receiver(python, tmp_path):
    program = tmp_path / "ahead.py"
    program.write_text(AHEAD)
    np.zeros(1, np.int64).tofile(tmp_path / "sent")
    ahead = int(by_messages(str(program), str(tmp_path / "sent"), python=python, n=2))
    assert 10 < ahead <= 520


HELD = """
import numpy as np, spmd
from spmd.errors import DeadlockError, MismatchError
from spmd.transport.call import Call

mesh = spmd.Mesh(x=2, y=2)

def body(worker):  # worker 2 waits for 3, 3 for 1, 1 for 0; and 0 for 2 to take what it has sent
    comm, me, x = worker.comm, worker.index, np.ones(4)
    across, along = worker.group(("x",)), worker.group(("y",))

    def exchange(group, sends, sources):
        call = Call("ppermute", group.axes, x.dtype, x.shape, detail=str(group.axes))
        return comm.exchange(group, call, sends, sources).wait()

    def psum(group):
        return comm.all_reduce(group, Call("psum", group.axes, x.dtype, x.shape, same_shape=True), x).wait()

    if me == 2:
        exchange(along, {}, [1])
    for _ in range(1500):
        exchange(across, {1: x} if me == 0 else {}, [0] if me == 2 else [])
    if me in (0, 1):
        psum(along)
    elif me == 3:
        exchange(worker.group(("x", "y")), {}, [])
    if me in (1, 3):
        psum(across)
    return 0

try:
    mesh.transport.share(mesh.run(body, tracked=False).results)
except (DeadlockError, MismatchError):
    print("told\\n", end="", flush=True)
"""


@each_engine
def test_who_waits_for_its_packets_to_be_taken_is_seen_to_wait(python, tmp_path):
    program = tmp_path / "held.py"
    program.write_text(HELD)
    assert by_messages(str(program), python=python, SPMD_TIMEOUT="20").count("told") == 4


BETWEEN = """
import time
import numpy as np, spmd
from spmd import P
from spmd.transport.call import Call

mesh = spmd.Mesh(x=3)

def body(x0):  # halos of the same line while another collective is under way, which their wait finishes
    comm, group, me = mesh.transport.comm, mesh.transport.everyone, spmd.worker_index("x")
    for k in range(9):
        b = np.full(100, 1000.0)
        handle = comm.all_reduce(group, Call("psum", ("x",), b.dtype, b.shape, same_shape=True), b)
        time.sleep((0.05, 0, 0.15)[me] if k > 3 else 0)
        x = np.full(4, 10.0 * me + k)
        halo = spmd.halo_exchange(spmd.varying(x, "x"), P("x"), 1, "periodic", sizes=[(4, 4, 4)])
        want = [10.0 * ((me - 1) % 3) + k, *x, 10.0 * ((me + 1) % 3) + k]
        assert spmd.block(halo).tolist() == want, (k, me, spmd.block(halo).tolist(), want)
        assert (handle.wait() == 3000).all()
    return x0

spmd.map(body, P("x"), P("x"), mesh=mesh)(np.ones(3))
print("well\\n", end="", flush=True)
"""


@each_engine
def test_repeated_exchanges_while_another_collective_is_under_way(python, tmp_path):
    program = tmp_path / "between.py"
    program.write_text(BETWEEN)
    assert by_messages(str(program), python=python, n=3).count("well") == 3


SILENT = """
import numpy as np, spmd
from spmd import P
from spmd.errors import MismatchError

mesh = spmd.Mesh(x=4)

def body(x):  # nobody waits, and nobody hears of the other call
    y = spmd.psum(x, "x")
    return spmd.ppermute(x, "x", [(0, 1)] if spmd.worker_index("x") < 3 else [(3, 2)])

for _ in range(3):
    try:
        spmd.map(body, P("x"), P("x"), mesh=mesh)(np.ones(4))
    except MismatchError as error:
        text = str(error)
        assert "perm=((0, 1),)" in text and "perm=((3, 2),)" in text and "worker 3 (x=3)" in text, text
        print("told\\n", end="", flush=True)
total = spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P(), mesh=mesh)(np.ones(4))
assert total.numpy() == 4
"""


@each_engine
def test_calls_of_which_no_partner_hears_are_compared_at_the_end_of_the_map(python, tmp_path):
    program = tmp_path / "silent.py"
    program.write_text(SILENT)
    assert by_messages(str(program), python=python).count("told") == 12


@each_engine
def test_collectives_that_only_some_workers_make_are_not_taken_for_others(python):
    """At a root, in stages, and sums of gradients that go on meanwhile: their numbers come again."""
    ended = launch(PROGRAMS / "uncounted.py", python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert "all are as they should be" in ended.stdout
