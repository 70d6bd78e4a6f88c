"""Failures of workers on two hosts: network namespaces of this machine (`two_hosts/README.md`)."""

from __future__ import annotations

import importlib.util
import random
import re
import time
from typing import NamedTuple

import pytest
from host_pair import needs_hosts, run_on_hosts
from launch import OPENMPI, PROGRAMS, mpiexec

LIMIT = 6.0
"""SPMD_TIMEOUT of these runs."""
SLACK = 4.0
"""Seconds more, of a machine that may be busy."""
LAUNCHERS = {"mpirun": 10.0, "openmpi": 10.0, "torchrun": 45.0}
"""Seconds in which a launcher ends the others: torchrun gives a stopped one 30 to end by itself."""


pytestmark = needs_hosts
MPIRUN = pytest.param(
    "mpirun", marks=[pytest.mark.mpi, pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")]
)
OPENMPI_RUN = pytest.param(
    "openmpi",
    marks=[
        pytest.mark.openmpi,
        pytest.mark.both,
        pytest.mark.skipif(OPENMPI is None, reason="SPMD_TEST_OPENMPI_PYTHON is unset"),
    ],
)
TORCHRUN = pytest.param(
    "torchrun",
    marks=[pytest.mark.torch, pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")],
)


class Run(NamedTuple):
    """How a run ended. struck, ended: when; raised: what each rank raised, and when; got: what each came to."""

    status: int
    struck: float
    ended: float
    raised: dict[int, tuple[str, float]]
    got: dict[int, str]
    printed: str


def run(hosts: str, launcher: str, *words: str) -> Run:
    program = PROGRAMS / "across.py"
    done = run_on_hosts(hosts, launcher, program, *words, limit=150, SPMD_TIMEOUT=f"{LIMIT:g}")
    ended, out = time.time(), done.stdout
    struck = re.search(r"rank \d strikes ([\d.]+)", out)
    raised = {int(r): (kind, float(at)) for r, kind, at in re.findall(r"rank (\d) raised (\w+) ([\d.]+)", out)}
    got = {int(r): value for r, value in re.findall(r"rank (\d) got ([\d.]+)", out)}
    printed = f"{' '.join(words)}: {done.returncode}\n{out}\n{done.stderr}"
    assert struck is not None, printed
    return Run(done.returncode, float(struck[1]), ended, raised, got, printed)


def check(hosts: str, launcher: str, fault: str, moment: str, rank: int, catch: bool) -> Run:
    """Run it, and check what must hold of every fault."""
    ran = run(hosts, launcher, fault, moment, str(rank), *(["catch"] if catch else []))
    said = ran.printed
    goes_on = catch and fault in ("raise", "mismatch", "late")
    within = max(LIMIT, 10.0) + SLACK
    for kind, at in ran.raised.values():
        assert at - ran.struck < within, f"{kind} after {at - ran.struck:.1f} s\n{said}"
    kinds = {kind for kind, _ in ran.raised.values() if kind != "SystemExit"}
    if fault != "raise" or moment not in ("before", "between"):
        assert len(kinds) <= 1, said
    if goes_on:
        assert ran.status == 0, said
        assert ran.got == dict.fromkeys(range(4), "3.0"), said
        alone = fault == "raise" and moment in ("before", "between")  # It is an error of no map.
        assert len(ran.raised) == (1 if alone else 4), said
        return ran
    # 137 is what `timeout` gives of what it has killed; Open MPI's launcher gives it of a process that was.
    killed = launcher == "openmpi" and fault == "kill"
    assert ran.status not in ((0, 124) if killed else (0, 124, 137)), said
    assert ran.ended - ran.struck < within + LAUNCHERS[launcher], said
    assert not ran.got, said
    # Whoever raises ends the job, and the launcher may end others before they see it.
    if fault in ("stop", "away", "late") or (launcher == "torchrun" and fault != "sys_exit"):
        assert any(r // 2 != rank // 2 for r in ran.raised), said
    return ran


CASES = [
    (MPIRUN, "raise", "3", 3, True),
    (MPIRUN, "stop", "6", 2, False),
    (MPIRUN, "mismatch", "5", 0, True),
    (OPENMPI_RUN, "raise", "3", 3, True),
    (OPENMPI_RUN, "os_exit", "300ms", 1, False),
    (OPENMPI_RUN, "stop", "6", 2, False),
    (OPENMPI_RUN, "mismatch", "5", 0, True),
    (OPENMPI_RUN, "sys_exit", "between", 3, False),
    (TORCHRUN, "kill", "4", 3, False),
]
LATER_CASES = [(MPIRUN, "os_exit", "300ms", 1, False), (MPIRUN, "sys_exit", "between", 3, False)]


@pytest.mark.parametrize(
    ("launcher", "fault", "moment", "rank", "catch"),
    [
        pytest.param(case[0].values[0], *case[1:], marks=[*case[0].marks, *more])
        for cases, more in ((CASES, ()), (LATER_CASES, (pytest.mark.full,)))
        for case in cases
    ],
)
def test_a_fault_on_one_host_is_an_error_on_both(hosts, launcher, fault, moment, rank, catch):
    check(hosts, launcher, fault, moment, rank, catch)


FAULTS = ["raise", "mismatch", "kill", "stop", "os_exit", "sys_exit", "away", "late"]
MOMENTS = ["before", "between", "end", *map(str, range(8))]


def draw(seed: int) -> tuple[str, str, int, bool]:
    """A fault, a moment, a rank, and whether all processes catch what they raise."""
    rng = random.Random(seed)
    fault = rng.choice(FAULTS)
    timed = fault in ("kill", "stop", "os_exit") and rng.random() < 0.5
    moments = [m for m in MOMENTS if fault != "mismatch" or m not in ("before", "between")]
    moment = f"{rng.randrange(50, 900)}ms" if timed else rng.choice(moments)
    return fault, moment, rng.randrange(4), rng.random() < 0.5


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("launcher", [MPIRUN, OPENMPI_RUN, TORCHRUN])
def test_any_fault_at_any_moment_ends(hosts, launcher, seed):
    check(hosts, launcher, *draw(seed))
