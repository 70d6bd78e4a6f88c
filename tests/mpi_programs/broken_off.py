"""Worker 0 is interrupted while it waits for worker 1, or while it computes, catches that, and all go on with another
map. Argument 1 says which; argument 2 is a file that tells worker 1 of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import up  # noqa: F401

import spmd
from spmd import P
from spmd.transport.processes import transport

mesh = spmd.Mesh(x=2)
me = mesh.local_workers[0]
interrupted = Path(sys.argv[2])


def interrupt():
    if not interrupted.exists():
        interrupted.touch()
        raise KeyboardInterrupt


def late(x):
    spmd.psum(x, "x")  # so that the channel is there
    if me == 1:
        while not interrupted.exists():
            time.sleep(0.01)
    elif sys.argv[1] == "waits":
        transport.let_others = interrupt
    else:
        interrupt()
    return spmd.psum(x, "x")


try:
    spmd.map(late, P("x"), P(), mesh=mesh)(np.ones(2))
except (KeyboardInterrupt, RuntimeError) as error:
    print(f"worker {me}: {type(error).__name__}\n", end="", flush=True)
print(f"got {spmd.map(lambda x: spmd.psum(x, 'x'), P('x'), P(), mesh=mesh)(np.ones(2)).numpy()}\n", end="", flush=True)
