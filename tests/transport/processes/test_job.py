"""Processes that end, are killed or are stopped at any moment: the job ends in bounded time, and says who it was."""

from __future__ import annotations

import os
import random
import re
import socket
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
from launch import OPENMPI, PROGRAMS, TORCHRUN, Ended, launch, mpiexec, run_python

FAULTS = ("SIGKILL", "SIGSTOP", "SIGINT", "SIGTERM", "exit 0", "exit 3", "_exit 0", "_exit 1", "raise")
MOMENTS = ("import", "imported", "mesh", "inside", "between", "after", "first hook", "last hook")
LIMIT = 10.0
"""Seconds in which the processes that are alive end."""
START = 40.0
"""Seconds for the start of a job on a busy machine, with torch."""
TORCHRUNS_PATIENCE = 30.0
"""Seconds that torchrun waits for a process that is stopped to end by SIGTERM."""

Case = tuple[str, str, int, int]
"""A fault, a moment, the rank that meets it, and the number of processes."""


def drawn(seed: int, count: int) -> list[Case]:
    random_ = random.Random(seed)
    grid = [(f, m, n) for f in FAULTS for m in MOMENTS for n in (2, 3, 4)]
    random_.shuffle(grid)
    return [(f, m, random_.randrange(n), n) for f, m, n in grid[:count]]


def ends_alone(fault: str, moment: str, python: str) -> bool:
    """Whether a process that ends like this takes nothing from the others, for none waits for it."""
    if fault in ("exit 0", "_exit 0", "exit 3", "raise", "SIGINT", "_exit 1") and moment == "last hook":
        return True
    if moment == "first hook" and fault in ("exit 0", "exit 3", "raise", "SIGINT", "_exit 0"):
        return True  # Python reports what is raised there, and goes on.
    return fault in ("exit 0", "_exit 0") and moment == "after"


def run(case: Case, python: str) -> None:
    fault, moment, rank, n = case
    if fault == "SIGSTOP" and ends_with_nobody_left(moment, python):
        pytest.skip("its launcher waits for it, and no other process is there to end the job")
    started, mark = time.time(), uuid.uuid4().hex
    limit = LIMIT + START + TORCHRUNS_PATIENCE * (python == TORCHRUN)
    words = fault, moment, str(rank), mark
    up = launch(PROGRAMS / "ends.py", *words, n=n, python=python, timeout=limit, SPMD_TIMEOUT="4")
    told = f"left: {left_behind(mark)}, {case} under {python}, {time.time() - started:.1f} s: {up}"
    assert up.returncode is not None, told
    if not ends_alone(fault, moment, python):
        assert up.returncode != 0, told
        assert (fault, moment) == ("exit 3", "after") or names(up, rank, fault), told
    until = time.monotonic() + 5  # for what was killed to be gone
    while left_behind(mark) and time.monotonic() < until:
        time.sleep(0.05)
    assert left_behind(mark) == [], told


def ends_with_nobody_left(moment: str, python: str) -> bool:
    return moment == "last hook" or (python == TORCHRUN and moment in ("after", "first hook"))


def names(ended: Ended, rank: int, fault: str) -> bool:
    """Whether something that was printed says who it was. A launcher names the process, torchrun its rank."""
    text = ended.stdout + ended.stderr + ended.launcher
    signals = fault in ("SIGKILL", "SIGTERM") and re.search(r"PID \d+ RUNNING AT|Killed|Terminated", text)
    alone = re.search(rf"(worker|rank) {rank}\b|rank\s*: {rank} ", text)
    return bool(alone or signals or (fault in ("raise", "SIGINT") and "Traceback" in text))


def left_behind(mark: str) -> list[str]:
    """Processes with this word in their command that are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


LAUNCHERS = {
    "mpich": pytest.param(
        sys.executable,
        id="mpich",
        marks=[pytest.mark.mpi, pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")],
    ),
    "torchrun": pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.torch),
}
each = pytest.mark.parametrize("python", LAUNCHERS.values())
CASES = drawn(0, 200)
ORDINARY_CASES = {
    # A start that not all come to, a wait for one that has left without a word, an end that one never comes to.
    "mpich": [
        ("exit 0", "import", 1, 3),
        ("exit 3", "mesh", 2, 3),
        ("_exit 1", "inside", 0, 2),
        ("SIGSTOP", "after", 1, 3),
        ("_exit 0", "after", 0, 3),
        ("SIGSTOP", "end of MPI", 1, 3),
    ],
    "torchrun": [("exit 0", "mesh", 0, 2), ("_exit 0", "between", 1, 3)],
}


@pytest.mark.parametrize(
    ("python", "case"),
    [
        pytest.param(
            *LAUNCHERS[name].values, case, id=f"{name}-{'-'.join(map(str, case))}", marks=LAUNCHERS[name].marks
        )
        for name, cases in ORDINARY_CASES.items()
        for case in cases
    ],
)
def test_a_job_ends_whatever_becomes_of_one_process(python, case):
    run(case, python)


@pytest.mark.full
@each
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_job_ends_whatever_becomes_of_one_process_at_any_moment(python, case):
    run(case, python)


SIGNALS = {"SIGKILL": -9, "SIGTERM": -15, "SIGINT": -2}


def local(fault: str, moment: str, scheduler: str) -> None:
    """One process with virtual workers: it ends as any program of Python does."""
    program = str(PROGRAMS / "ends.py")
    ended = run_python(program, fault, moment, "1", timeout=40, SPMD_TRANSPORT="local", SPMD_SCHEDULER=scheduler)
    if moment.endswith("hook") and not fault.startswith(("_exit", "SIGK", "SIGT")):
        expected = 0
    elif fault in SIGNALS:
        expected = SIGNALS[fault]
    else:
        expected = 1 if fault == "raise" else int(fault.split()[1])
    assert ended.returncode == expected, str(ended)
    if fault in ("raise", "SIGINT"):
        assert "Traceback" in ended.stderr, str(ended)


@pytest.mark.parametrize(("fault", "moment"), [("exit 3", "inside"), ("SIGINT", "inside"), ("_exit 0", "between")])
def test_a_process_of_virtual_workers_ends_as_any_program(fault, moment, scheduler):
    local(fault, moment, scheduler)


@pytest.mark.full
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "SIGSTOP"])
def test_a_process_of_virtual_workers_ends_as_any_program_at_any_moment(fault, moment, scheduler):
    local(fault, moment, scheduler)


def full(value: str):
    return pytest.param(value, marks=pytest.mark.full)


ONLY_ONE = """
import os, sys, numpy as np, spmd
from spmd import P
rank = int(os.environ.get("PMI_RANK") or os.environ["RANK"])
with spmd.Mesh(x=3):
    if rank == 0:
        spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P())(np.ones(3))
"""


@each
def test_a_map_that_only_one_process_comes_to_is_an_error(python, tmp_path):
    program = tmp_path / "only_one.py"
    program.write_text(ONLY_ONE)
    ended = launch(program, n=3, python=python, timeout=LIMIT + START)
    assert ended.returncode not in (0, None), str(ended)
    assert "DeadlockError" in ended.stderr, str(ended)
    # One that has left is enough; on a busy machine the other may still be leaving.
    assert re.search(r"worker [12] \(x=[12]\) has left the program, and called nothing", ended.stderr), str(ended)
    assert ended.stderr.count("Traceback") == 1, str(ended)


WITHOUT_STDERR = """
import os, sys, time, numpy as np, spmd
from spmd import P
rank = int(os.environ.get("PMI_RANK") or os.environ["RANK"])
mesh = spmd.Mesh(x=2)
total = spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P(), mesh=mesh)
total(np.ones(2))
if rank == 1:
    sys.stderr = open("/dev/full", "w", buffering=1)
    raise ValueError("nobody reads this")
time.sleep(1)
total(np.ones(2))
"""


@each
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_error_that_cannot_be_written_ends_the_job_too(python, tmp_path):
    program = tmp_path / "without_stderr.py"
    program.write_text(WITHOUT_STDERR)
    ended = launch(program, n=2, python=python, timeout=LIMIT + START)
    assert ended.returncode not in (0, None), str(ended)


@each
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("moment", ["inside", *map(full, ("imported", "mesh", "between"))])
@pytest.mark.parametrize("what", ["exit", *map(full, ("raise", "interrupt"))])
def test_the_end_of_a_forked_child_is_not_that_of_its_parent(python, what, moment):
    ended = launch(PROGRAMS / "forks.py", what, moment, n=2, python=python, timeout=LIMIT + START)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("got 4.0") == 2, str(ended)
    assert ended.stderr.count("Traceback") == (what == "raise"), str(ended)


@each
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("moment", ["between", full("inside")])
def test_a_forked_child_is_refused_what_is_the_jobs(python, moment):
    ended = launch(PROGRAMS / "forks.py", "call", moment, n=2, python=python, timeout=LIMIT + START)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("got 4.0") == 2, str(ended)
    assert "refused: spmd.Mesh\n  got:    a child of os.fork" in ended.stdout
    assert ("by itself: 2.0" in ended.stdout) == (moment == "between")


CHILD_OF_ONE = """
import os, numpy as np, spmd
from spmd import P
def total(n):
    return float(spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P(), mesh=spmd.Mesh(x=n))(np.ones(n)).numpy()[0])
print(total(2), flush=True)
child = os.fork()
if child == 0:
    print(total(3), flush=True)
    raise SystemExit(0)
os.waitpid(child, 0)
print(total(4))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("variables", [{}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}])
def test_a_forked_child_of_a_process_by_itself_has_virtual_workers(variables):
    ended = run_python("-c", CHILD_OF_ONE, timeout=START, **variables)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout == "2.0\n3.0\n4.0\n"


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None or not hasattr(os, "fork"), reason="no mpiexec beside this Python, or no fork")
def test_a_forked_child_of_an_mpi_world_of_one_has_virtual_workers(tmp_path):
    program = tmp_path / "child_of_one.py"
    program.write_text(CHILD_OF_ONE)
    ended = launch(program, n=1, timeout=START)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout == "2.0\n3.0\n4.0\n"


LEFT_OVER = """
import numpy as np, spmd
from spmd import P
with spmd.Mesh(x=4):
    print(float(spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P())(np.ones(4)).numpy()[0]))
"""
OF_TORCH = {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "LOCAL_RANK": "0"}


@pytest.mark.torch
@pytest.mark.parametrize("rank", [full("0"), "2"])
def test_variables_of_torchrun_in_a_plain_shell_are_an_error_in_bounded_time(rank):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    ended = run_python("-c", LEFT_OVER, timeout=20 + START, SPMD_TIMEOUT="6", RANK=rank, MASTER_PORT=port, **OF_TORCH)
    assert ended.returncode == 1, str(ended)
    assert f"got:    RANK={rank}, WORLD_SIZE=4, LOCAL_RANK=0, MASTER_ADDR=localhost, MASTER_PORT={port}" in ended.stderr
    assert '"unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT", or Mesh(..., transport="local")' in ended.stderr
    assert f"spmd: rank {rank} waits for 4 processes of torch.distributed" in ended.stderr  # after five seconds


@pytest.mark.torch
def test_a_store_of_torchrun_that_has_ended_is_an_error_in_bounded_time():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    launched = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ended = run_python(
        "-c", LEFT_OVER, timeout=20 + START, SPMD_TIMEOUT="6", RANK="2", MASTER_PORT=port, **OF_TORCH, **launched
    )
    assert ended.returncode == 1, str(ended)
    assert "spmd.errors.TransportError" in ended.stderr, str(ended)
    assert "no store of torch.distributed" in ended.stderr, str(ended)


def test_variables_of_torchrun_for_a_mesh_of_another_size_say_where_they_come_from():
    pytest.importorskip("torch")
    ended = run_python("-c", LEFT_OVER, RANK="0", MASTER_PORT="1", **(OF_TORCH | {"WORLD_SIZE": "3"}))
    assert ended.returncode == 1, str(ended)
    assert "a torch.distributed world (by RANK=0, WORLD_SIZE=3" in ended.stderr
    assert "may be left over from another job) of 3 processes" in ended.stderr


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
@pytest.mark.parametrize(
    ("variables", "fault"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "77"}, "PMI_FD is no connection"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1", "PMIX_NAMESPACE": "a"}, "no PMIX_SERVER_URI"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, None),
    ],
)
def test_variables_of_mpiexec_in_a_plain_shell_are_told(variables, fault):
    """Of a process that MPI cannot know to be one of several it is a warning, and virtual workers are used."""
    ended = run_python("-c", LEFT_OVER, timeout=20 + START, **variables)
    if fault is None:
        assert ended.returncode == 0, str(ended)
        assert ended.stdout == "4.0\n"
        assert "unset the variable if it is left over" in ended.stderr
    else:
        assert ended.returncode == 1, str(ended)
        assert fault in ended.stderr, str(ended)
        assert f'"unset {" ".join(sorted(variables))}", or Mesh(..., transport="local")' in ended.stderr


def by_open_mpi(test):
    absent = pytest.mark.skipif(OPENMPI is None, reason="SPMD_TEST_OPENMPI_PYTHON is unset")
    return pytest.mark.openmpi(pytest.mark.both(absent(test)))


def aborted(how: str, **env: str) -> str:
    """What a job prints of which one process aborts."""
    ended = launch(PROGRAMS / "aborting.py", how, n=2, python=OPENMPI, **env)
    assert ended.returncode == 3, str(ended)
    assert "got through" not in ended.stdout, str(ended)
    return ended.stdout + ended.stderr


@by_open_mpi
def test_a_process_that_has_aborted_runs_nothing_until_open_mpis_launcher_ends_it():
    printed = aborted("os._exit")
    assert "has called os._exit(3)" in printed, printed
    assert "MPI_ABORT was invoked" not in printed, printed  # which would close its connections
    assert "handled" not in printed, printed


@by_open_mpi
@pytest.mark.parametrize(("env", "seconds"), [({}, 3), ({"OMPI_MCA_mpi_abort_delay": "1"}, 1)])
def test_open_mpi_itself_aborts_after_a_while(env, seconds):
    printed = aborted("MPI_Abort", **env)
    assert f"Delaying for {seconds} seconds before aborting" in printed, printed
    assert "MPI_ABORT was invoked" in printed, printed
