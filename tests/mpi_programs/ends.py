"""One process of a job meets a fault at a moment: arguments are the fault, the moment, and the rank that it meets.

Without a launcher this is one process with three virtual workers, one of which meets a fault inside of a body.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time

FAULT, MOMENT, RANK = sys.argv[1], sys.argv[2], int(sys.argv[3])
NAMES = "PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK"
ME = next((int(os.environ[name]) for name in NAMES if name in os.environ), RANK)
SIZE = next((int(os.environ[n]) for n in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE") if n in os.environ), 3)


def fault() -> None:
    if FAULT.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, FAULT))
        time.sleep(0.01)  # Python handles it here
    elif FAULT == "raise":
        raise ValueError("this rank fails")
    elif FAULT.startswith("_exit"):
        os._exit(int(FAULT.split()[1]))
    else:
        sys.exit(int(FAULT.split()[1]))


def at(moment: str, me: int = ME) -> None:
    if moment == MOMENT and me == RANK:
        fault()


at("import")
import numpy as np  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402

at("imported")
if MOMENT == "last hook":  # runs after the hooks of the library
    atexit.register(at, "last hook")
mesh = spmd.Mesh(x=SIZE)
if MOMENT == "end of MPI":
    from spmd.transport.processes import lifetime

    finalize = lifetime.finalize
    lifetime.finalize = lambda *args: (at("end of MPI"), finalize(*args))
if MOMENT == "first hook":
    atexit.register(at, "first hook")
at("mesh")


def body(x):
    x = spmd.psum(x, "x")
    at("inside", spmd.worker_index("x"))
    return spmd.psum(spmd.pvary(x, "x"), "x")


f = spmd.map(body, P("x"), P(), mesh=mesh)
f(np.ones(2 * SIZE))
at("between")
f(np.ones(2 * SIZE))
at("after")
print("through", flush=True)
