"""Gather and scatter of uneven blocks, small and large, and their gradients: with SPMD_CHECK=0 by messages."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

import spmd
from spmd import P

n = MPI.COMM_WORLD.size
mesh = spmd.Mesh(x=n)


def check(root: int, scale: int) -> None:
    rows = [(3 * k + 1) % 4 * scale for k in range(n)]
    blocks = [np.arange(rows[k] * 2.0).reshape(-1, 2) + 100 * k for k in range(n)]

    def body(x):
        own = blocks[spmd.worker_index("x")]
        held = spmd.gather(spmd.varying(own, "x"), "x", root=root)
        back = spmd.scatter(held, "x", root=root, sizes=rows)
        np.testing.assert_array_equal(spmd.block(back), own)
        np.testing.assert_array_equal(spmd.block(spmd.replicate(held, "x", root=root)), np.concatenate(blocks))
        return x

    spmd.map(body, P("x"), P("x"), mesh=mesh)(np.zeros(n))


for root in {0, n // 2, n - 1}:
    for scale in (1, 3000):
        check(root, scale)

loss = spmd.map(lambda x: spmd.psum(np.sum(spmd.broadcast(spmd.gather(x, "x"), "x")), "x"), P("x"), P(), mesh=mesh)
assert np.all(np.asarray(spmd.grad(loss)(np.ones((2 * n, 3)))) == n)
if MPI.COMM_WORLD.rank == 0:
    print("rooted")
