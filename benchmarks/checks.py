"""What the checks of collectives cost: between virtual workers, and over MPI beside the messages themselves.

Run: python benchmarks/checks.py. It needs `pip install -e ".[bench]"`; the MPI part launches itself by the mpiexec of
this environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
from timing import interleaved

import spmd
from spmd import P
from spmd.transport import local

COUNT = 200
SIZES = (1, 1_000, 100_000)


def body(x):
    for _ in range(COUNT):
        spmd.psum(x, "x")
    return x


def unchecked(self, meeting, finish) -> None:
    """The end of a meeting, without a look at the calls."""
    if finish is not None:
        meeting.result = finish(meeting.payloads)
    meeting.calls = []
    meeting.done = True


def between_virtual_workers() -> None:
    checked = local.Run._complete
    print("\nA psum of one number on virtual workers in lockstep: µs per worker")
    print(f"{'workers':10}{'checked':>10}{'unchecked':>12}{'more':>10}")
    for n in (2, 4, 8):
        f = spmd.map(body, P("x"), P("x"), mesh=spmd.Mesh(x=n, transport="local", scheduler="lockstep"))
        x = np.ones(n)

        def run(complete, f=f, x=x):
            local.Run._complete = complete
            f(x)

        try:
            a, b = (t / COUNT / n * 1e6 for t in interleaved(lambda r=run: r(checked), lambda r=run: r(unchecked)))
        finally:
            local.Run._complete = checked
        print(f"{n:<10}{a:10.2f}{b:12.2f}{a - b:10.2f}")


def here() -> None:
    """As one process of an MPI job: seconds of a psum, and of one small message to and from each of the others."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    n = comm.Get_size()
    found = {}
    with spmd.Mesh(x=n):
        for size in SIZES:
            f = spmd.map(body, P("x"), P("x"), check=False)
            x = np.ones(size * n)
            times = []
            for _ in range(9):
                comm.Barrier()
                started = time.perf_counter()
                f(x)
                times.append((time.perf_counter() - started) / COUNT)
            found[size] = median(times)
    small, got = np.zeros((n, 34), np.int64), np.zeros((n, 34), np.int64)
    times = []
    for _ in range(9):
        comm.Barrier()
        started = time.perf_counter()
        for _ in range(COUNT):
            comm.Alltoall(small, got)
        times.append((time.perf_counter() - started) / COUNT)
    if comm.Get_rank() == 0:
        print(json.dumps({"psum": found, "message": median(times)}))


def over_mpi() -> None:
    launcher = Path(sys.executable).parent / "mpiexec"
    print("\nA psum over MPI, check=False: µs (medians of three launches each, in turns)")
    print(f"{'processes':12}{'numbers':>10}{'checked':>10}{'SPMD_CHECK=0':>14}{'more':>10}{'small message':>15}")
    for n in (2, 4):
        runs: dict[str, list[dict]] = {"1": [], "0": []}
        for _ in range(3):
            for check, done in runs.items():
                command = [launcher, "-n", str(n), sys.executable, __file__, "here"]
                env = os.environ | {"SPMD_CHECK": check, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
                done.append(json.loads(subprocess.run(command, env=env, capture_output=True, text=True).stdout))
        message = median(r["message"] for done in runs.values() for r in done) * 1e6
        for size in SIZES:
            a, b = (median(r["psum"][str(size)] for r in runs[check]) * 1e6 for check in "10")
            print(f"{n:<12}{size:10}{a:10.1f}{b:14.1f}{a - b:10.1f}{message:15.1f}")


if __name__ == "__main__":
    if sys.argv[1:] == ["here"]:
        here()
    else:
        between_virtual_workers()
        over_mpi()
