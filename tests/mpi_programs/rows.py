"""Sums over the columns of a grid, of which one row brings more than the other: it takes them in two meetings, in which
everyone adds up a part, and the other row in one. Sums over blocks that nobody else has are written there."""

from __future__ import annotations

import json

import numpy as np

import spmd
from spmd.kernels.memory import pool
from spmd.transport.call import Call

mesh = spmd.Mesh(r=2, c=3)


def laid(x: np.ndarray, shared: bool) -> np.ndarray:
    """Where others can read it, if it is large enough."""
    if not shared:
        return x
    out = pool.empty(x.shape, x.dtype)
    out[...] = x
    return out


def body(worker) -> str:
    row, column = divmod(worker.index, 3)
    sizes = (12_000 - 5_000 * row, 300_000 if row == 0 else 3, 90_000, 5_000, 17)

    def block(size: int, k: int) -> np.ndarray:
        return np.full(size, 1.0 + k + 10 * row, np.float32)

    for turn in range(8):
        total = spmd.psum(spmd.varying(block(sizes[turn % 5], column), ("r", "c")), "c")
        assert np.array_equal(spmd.block(total), sum(block(sizes[turn % 5], k) for k in range(3)))
        everyone = spmd.psum(spmd.varying(np.ones(2), ("r", "c")), ("r", "c"))
        assert spmd.block(everyone)[0] == 6
        # Of blocks that lie elsewhere on one worker none is written over.
        where = [turn != 5 or k != 2 for k in range(3)]
        xs = [laid(block(size, column) + turn, where[column]) for size in sizes]
        where = [all(where)] * 3
        call = Call("many", ("c",), xs[0].dtype, (sum(sizes),), same_shape=True)
        spare = [turn % 2 == 1 and k != 3 for k in range(len(xs))]
        mine = [x.ctypes.data for x in xs]
        totals = worker.comm.all_reduce_many(worker.group(("c",)), call, xs, spare).wait()
        # Those that are sums of their own, which others can read; the smaller ones go together.
        over = [a == t.ctypes.data for a, t in zip(mine, totals, strict=True)]
        assert over == [where[column] and spare[k] and sizes[k] > 65536 for k in range(len(xs))], (turn, over)
        rooms = [np.full(20_000, np.nan) for _ in range(9)]  # where something was that nobody has any more
        for size, total in zip(sizes, totals, strict=True):
            assert np.array_equal(total, sum(block(size, k) + turn for k in range(3))), (turn, size, len(rooms))
        # A small one that goes by itself beside a large one: it lies where others can read it, and is not to be spared.
        pair = [laid(block(size, column) + turn, True) for size in (100_000, 20_000)]
        pair[1].flags.writeable = turn % 3 > 0
        call = Call("pair", ("c",), pair[0].dtype, (120_000,), same_shape=True)
        totals = worker.comm.all_reduce_many(worker.group(("c",)), call, pair, [True, turn % 4 == 3]).wait()
        for k, total in enumerate(totals):
            assert np.array_equal(total, sum(block(total.size, j) + turn for j in range(3)))
            spared = k == 0 or (turn % 4 == 3 and turn % 3 > 0)
            assert (total.ctypes.data == pair[k].ctypes.data) is spared, (turn, k)
            assert spared or np.array_equal(pair[k], block(pair[k].size, column) + turn)
        # What others were told of is told of once.
        mail = worker.comm.transport.channel(worker.group(("c",)).ordered).mailbox
        assert mail is None or len(mail.next) + len(mail.now) + len(mail.before) < 40
        rows = spmd.psum(spmd.varying(np.ones(2), ("r", "c")), "r")
        assert spmd.block(rows)[0] == 2
    return "well"


outcome = mesh.run(body)
found = mesh.transport.share(outcome.results)
if spmd.is_main():
    print(json.dumps([found[k] for k in range(6)]))
