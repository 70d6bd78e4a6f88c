"""Meshes on communicators of all kinds, in a world of four."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

import spmd
from spmd import P
from spmd.errors import TransportError

world = MPI.COMM_WORLD
rank = world.Get_rank()


def total(mesh: spmd.Mesh, axis: str, mine: int) -> int:
    """The sum of what the processes bring."""
    return mesh.run(lambda worker: int(spmd.psum(np.int64(mine), axis)), tracked=False).results[mesh.local_workers[0]]


# Choosing a transport, and comparing meshes, sends nothing: one process may do it alone.
line, square = spmd.Mesh(x=4), spmd.Mesh(a=2, b=2)
if rank == 3:
    assert line.transport is square.transport
    assert line == spmd.Mesh(x=4) != square
assert total(line, "x", rank) == 6
assert total(square, "b", rank) == [1, 5][rank // 2]

# Parts of the world, and two meshes on the same part.
half = world.Split(rank % 2)
part = spmd.Mesh(x=2, comm=half)
assert total(part, "x", rank) == [2, 4][rank % 2]
assert part.transport is spmd.Mesh(y=2, comm=world.Split(rank % 2)).transport is not line.transport
with part:
    assert spmd.is_main() == (rank < 2)
    doubled = spmd.map(lambda x: 2 * x, P("x"), P("x"))(np.arange(3.0))
    assert doubled.numpy().tolist() == [0, 2, 4]

# Another order of the processes is another order of the workers.
back = spmd.Mesh(x=4, comm=world.Split(0, -rank))
assert back.transport is not line.transport
assert back.local_workers == (3 - rank,)
gathered = back.run(lambda worker: spmd.all_gather(np.array(rank), "x"), tracked=False).results[3 - rank]
assert gathered.tolist() == [3, 2, 1, 0]

# A communicator that is freed leaves its number to the next one.
pairs = [[0, 1], [0, 2], [0, 3]]
for pair in pairs:
    mine = world.Split(rank in pair)
    assert total(spmd.Mesh(x=2, comm=mine), "x", rank) == (sum(pair) if rank in pair else 6 - sum(pair))
    mine.Free()


# Workers in another order than their ranks.
def sums(worker):
    return {axis: int(spmd.psum(np.int64(rank), axis)) for axis in ("a", "b")}


fresh = spmd.Mesh(a=2, b=2, comm=world.Split(0, (rank + 2) % 4))
me = fresh.local_workers[0]
found = fresh.run(sums, tracked=False).results[me]
others = [(w + 2) % 4 for w in range(4)]
assert found == {"a": others[me % 2] + others[me % 2 + 2], "b": others[me // 2 * 2] + others[me // 2 * 2 + 1]}


# Groups that first meet in another order than their numbers, and of which not all have something to send.
def to_one(worker):
    mine = worker.group(("b", "a")).index
    return int(spmd.ppermute(np.full(200, mine + 1.0), ("b", "a"), [(0, 1)])[0]) == (mine == 1)


def kept(worker):
    mine = worker.group(("b", "a")).index
    sizes = (1 + 19 * (mine == 0), 1, 1, 1)
    y = spmd.all_to_all(np.ones((sum(sizes), 8)), ("b", "a"), 0, 0, tiled=True, sizes=sizes)
    return len(y) == 4 + 19 * (mine == 0)


for turn, body in ((1, to_one), (3, kept)):
    turned = spmd.Mesh(a=2, b=2, comm=world.Split(0, (rank + turn) % 4))
    assert turned.run(body, tracked=False).results[turned.local_workers[0]]
    assert total(turned, "a", 1) == 2

# Small values for everyone.
assert line.transport.share({rank: {"é": [rank] * rank}}) == {k: {"é": [k] * k} for k in range(4)}

# A communicator of another size than the mesh.
said = ""
try:
    total(spmd.Mesh(x=3, comm=half), "x", 0)
except TransportError as error:
    said = str(error)
assert "3 workers, and an MPI world of 2 processes" in said
print(f"rank {rank} is through", flush=True)
