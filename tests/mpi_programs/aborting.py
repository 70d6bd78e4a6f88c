"""Two processes make a mesh, and one of them aborts: by `os._exit`, or by MPI_Abort itself. The other one waits."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import spmd
from spmd import P

HOW = sys.argv[1]

mesh = spmd.Mesh(x=2)
if mesh.local_workers[0] == 1:
    signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
    if HOW == "os._exit":
        os._exit(3)
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(3)
spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P(), mesh=mesh)(np.ones(2))
print("got through", flush=True)
