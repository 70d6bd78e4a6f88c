"""What is really sent by messages, and what the ledger counts: the same, for even blocks.

Run with SPMD_CHECK=0, by which processes share no memory.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

import spmd
from spmd import P
from spmd.transport.processes.running import Running

sent: list[int] = []
send = Running.send


def counted(self, member: int, head: bytes, data) -> None:
    sent.append(len(data) if isinstance(data, bytes) else data.nbytes)
    send(self, member, head, data)


Running.send = counted
n = MPI.COMM_WORLD.size
rank = MPI.COMM_WORLD.rank
mesh = spmd.Mesh(x=n)


def body(x):
    root = n - 1
    held = spmd.sum_reduce(x, "x", root=root)
    whole = spmd.keep(np.zeros((2 * n, x.shape[1])), "x", root=root)
    varying = spmd.varying(np.zeros((2 * n, x.shape[1])), "x")
    for name, run in {
        "psum": lambda: spmd.psum(x, "x"),
        "pmax": lambda: spmd.pmax(x, "x"),
        "short": lambda: spmd.psum(x.astype(np.float16), "x"),
        "all_gather": lambda: spmd.all_gather(x, "x", tiled=True),
        "psum_scatter": lambda: spmd.psum_scatter(varying, "x", tiled=True),
        "all_to_all": lambda: spmd.all_to_all(varying, "x", 0, 0, tiled=True),
        "sum_reduce": lambda: spmd.sum_reduce(x, "x", root=root),
        "broadcast": lambda: spmd.broadcast(held, "x", root=root),
        "scatter": lambda: spmd.scatter(whole, "x", root=root),
        "gather": lambda: spmd.gather(x, "x", root=root),
        "shift": lambda: spmd.shift(x, "x", 1),
        "halo": lambda: spmd.halo_exchange(x, P("x"), 1, shape=(2 * n, x.shape[1])),
    }.items():
        sent.clear()
        with spmd.ledger() as log:
            run()
        found = len(sent), sum(sent)
        assert found == (log.messages, log.bytes), f"{name} of {x.shape}: sent {found}, {log.messages, log.bytes}"
    return x


for width in (1, 3, 700, 5000):
    spmd.map(body, P("x"), P("x"), mesh=mesh)(np.zeros((2 * n, width)))
if rank == 0:
    print("counted")
