"""Worker 0 is interrupted while it waits for worker 1, catches that, and all go on with another map."""

from __future__ import annotations

import time

import numpy as np
import up  # noqa: F401

import spmd
from spmd import P
from spmd.transport import mpi

mesh = spmd.Mesh(x=2)
me = mesh.local_workers[0]
interrupted = []


def interrupt():
    if not interrupted:
        interrupted.append(True)
        raise KeyboardInterrupt


def late(x):
    spmd.psum(x, "x")  # so that the channel is there
    if me == 1:
        time.sleep(0.3)
    else:
        mpi.let_others = interrupt
    return spmd.psum(x, "x")


try:
    spmd.map(late, P("x"), P(), mesh=mesh)(np.ones(2))
except (KeyboardInterrupt, RuntimeError) as error:
    print(f"worker {me}: {type(error).__name__}\n", end="", flush=True)
print(f"got {spmd.map(lambda x: spmd.psum(x, 'x'), P('x'), P(), mesh=mesh)(np.ones(2)).numpy()}\n", end="", flush=True)
