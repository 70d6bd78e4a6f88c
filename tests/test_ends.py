"""Processes that end, are killed or are stopped at any moment: the job ends in bounded time, and says who it was."""

from __future__ import annotations

import random
import re
import sys
import time
from pathlib import Path

import pytest
from launch import PROGRAMS, TORCHRUN, Ended, launch, mpiexec

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
    started = time.time()
    limit = LIMIT + START + TORCHRUNS_PATIENCE * (python == TORCHRUN)
    up = launch(PROGRAMS / "ends.py", fault, moment, str(rank), n=n, python=python, timeout=limit, SPMD_TIMEOUT="4")
    told = f"left: {left_behind(case)}, {case} under {python}, {time.time() - started:.1f} s: {up}"
    if fault == "SIGSTOP" and ends_with_nobody_left(moment, python):
        return  # Its launcher waits for it, and nobody else is there.
    assert up.returncode is not None, told
    if not ends_alone(fault, moment, python):
        assert up.returncode != 0, told
        assert (fault, moment) == ("exit 3", "after") or names(up, rank, fault), told
    until = time.monotonic() + 5  # for what was killed to be gone
    while left_behind(case) and time.monotonic() < until:
        time.sleep(0.05)
    assert left_behind(case) == [], told


def ends_with_nobody_left(moment: str, python: str) -> bool:
    return moment == "last hook" or (python == TORCHRUN and moment in ("after", "first hook"))


def names(ended: Ended, rank: int, fault: str) -> bool:
    """Whether something that was printed says who it was. A launcher names the process, torchrun its rank."""
    text = ended.stdout + ended.stderr + ended.launcher
    signals = fault in ("SIGKILL", "SIGTERM") and re.search(r"PID \d+ RUNNING AT|Killed|Terminated", text)
    alone = re.search(rf"(worker|rank) {rank}\b|rank\s*: {rank} ", text)
    return bool(alone or signals or (fault in ("raise", "SIGINT") and "Traceback" in text))


def left_behind(case: Case) -> list[str]:
    """Processes of this case that are still there."""
    words = [b"ends.py", *(str(word).encode() for word in case[:3])]
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parts = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if len(parts) > 4 and parts[-5].endswith(words[0]) and parts[-4:-1] == words[1:]:
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
