"""Worker 1 of four fails in a map. Argument 1 says who catches it, and what comes then."""

from __future__ import annotations

import sys
import time

import numpy as np
import up  # noqa: F401

import spmd
from spmd import P

HOW = sys.argv[1]
mesh = spmd.Mesh(x=4)
me = mesh.local_workers[0]
attempt = 0


def fails(x):
    if spmd.worker_index("x") == 1 and attempt < 5:
        raise ValueError(f"attempt {attempt}")
    return spmd.psum(x.sum(), "x")


def total() -> float:
    return float(spmd.map(fails, P("x"), P(), mesh=mesh)(np.ones(4)))


for attempt in range(5 if HOW == "retry" else 1):  # noqa: B007 (fails reads it)
    try:
        total()
    except ValueError as error:
        print(f"caught {error}, {error.__notes__[0]}\n", end="", flush=True)
        if HOW == "by one" and me != 1:
            raise
if HOW == "slow" and me == 0:
    until = time.monotonic() + 1
    while time.monotonic() < until:
        np.sin(np.ones(1000))
attempt = 5
if HOW != "leave":
    print(f"got {total()}\n", end="", flush=True)
