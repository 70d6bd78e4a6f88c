"""Four processes whose program has process groups of its own, before, during and after a mesh's traffic.

The first argument says when it initialises them: `before` or `after` the mesh.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.distributed as dist

import spmd
from spmd import P

WHEN = sys.argv[1]
if WHEN == "before":
    dist.init_process_group("gloo")
mesh, square = spmd.Mesh(x=4), spmd.Mesh(a=2, b=2)
assert mesh.transport is square.transport
assert mesh.transport.name == "torch"
me = mesh.local_workers[0]
total = spmd.map(lambda x: spmd.psum(x[0], "x"), P("x"), P(), mesh=mesh)
assert float(total(np.arange(4.0))) == 6.0
if WHEN == "after":
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
assert me == dist.get_rank()

pair = dist.new_group([0, 1])
if me < 2:  # A group's own traffic, of which the others know nothing.
    mine = torch.full((3,), float(me))
    dist.all_reduce(mine, group=pair)
    assert mine.tolist() == [1.0, 1.0, 1.0]


def body(worker):
    """The user's messages are under way while the mesh's go, along axes in both orders."""
    rng = np.random.default_rng(me)
    theirs = [torch.full((50_000,), float(me + k)) for k in range(3)]
    works = [dist.all_reduce(t, async_op=True) for t in theirs]
    x = rng.normal(size=(3, 40_000))
    found = [spmd.psum(x, axes) for axes in ("a", "b", ("a", "b"), ("b", "a"))]
    found += [spmd.all_gather(x[:, : 5 * me], axes, axis=1, tiled=True) for axes in ("b", "a")]
    for k, work in enumerate(works):
        work.wait()
        assert theirs[k].tolist() == [6.0 + 4 * k] * 50_000
    return found


def expected(workers: list[int], width: int | None = None) -> list[np.ndarray]:
    drawn = [np.random.default_rng(w).normal(size=(3, 40_000)) for w in workers]
    return [x if width is None else x[:, : width * w] for w, x in zip(workers, drawn, strict=True)]


def in_order(blocks: list[np.ndarray]) -> np.ndarray:
    total = blocks[0]
    for block in blocks[1:]:
        total = total + block
    return total


found = square.run(body, tracked=False).results[me]
along_a, along_b = sorted({me, (me + 2) % 4}), sorted({me, me ^ 1})
for got, workers in zip(found, (along_a, along_b, [0, 1, 2, 3], [0, 2, 1, 3]), strict=False):
    assert np.array_equal(got, in_order(expected(workers)))
for got, workers in zip(found[4:], (along_b, along_a), strict=True):
    assert np.array_equal(got, np.concatenate(expected(workers, 5), axis=1))

dist.barrier()
dist.destroy_process_group()
assert float(total(np.arange(4.0) + 1)) == 10.0  # The mesh does not need them.
print(f"worker {me} is through", flush=True)
