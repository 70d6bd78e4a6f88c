"""Four workers of which one does not come, or all wait for another than who waits for them. Argument 1 says how.

Argument 2: `wrapped` starts another process, as `uv run` does; `apart` lets the processes see as little of each other
as on hosts of their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

if sys.argv[2:] == ["wrapped"]:
    sys.exit(subprocess.run([sys.executable, *sys.argv[:2]], close_fds=False).returncode)

import numpy as np
import up  # noqa: F401

import spmd
from spmd import P

HOW = sys.argv[1]
if sys.argv[2:] == ["apart"]:
    import other_hosts  # noqa: F401
if HOW == "early" and "1" in (os.environ.get(name) for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK")):
    if "RANK" not in os.environ:
        from mpi4py import MPI  # noqa: F401

    sys.exit(0)


def away(seconds: float) -> None:
    """Compute for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        np.sin(np.ones(1000))


def body(x):
    k = spmd.worker_index(("x", "y"))
    x = spmd.psum(spmd.pvary(x, "x"), "x")
    if HOW == "circle":  # every worker meets along another axis than its partner
        return spmd.psum(spmd.pvary(x, "x"), "x") if k in (0, 3) else spmd.psum(spmd.pvary(x, "y"), "y")
    if k == 1:
        if HOW == "sleep":
            time.sleep(1000)
        if HOW == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if HOW == "busy":
            away(2.5)
        if HOW == "holding":  # the interpreter: no other thread of the process runs
            started = time.monotonic()
            while time.monotonic() - started < 2:
                sum(range(150_000_000))
        if HOW == "raise":
            raise ValueError("worker one fails")
        if HOW == "return":
            return x
    return spmd.psum(spmd.pvary(x, ("x", "y")), ("x", "y"))


with spmd.Mesh(x=2, y=2) as mesh:
    if HOW == "leave" and mesh.local_workers[0] == 1:
        sys.exit(0)
    print(f"got {spmd.map(body, P(), P(), check=False)(np.ones(3)).numpy()[0]}\n", end="", flush=True)
