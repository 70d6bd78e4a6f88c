"""Which algorithm of a collective by messages is the fastest, by the bytes of a block: the source of the thresholds in
`spmd/transport/algorithms/choice.py`.

    mpiexec -hosts a,b -n 16 python -m benchmarks.crossovers [kinds]

Between processes of one host, whose groups would share memory, with SPMD_CHECK=0. Every algorithm is run in turn, and
medians of the slowest worker's times are printed, in microseconds; * marks what spmd uses.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
from mpi4py import MPI

import spmd
from spmd.layout import block_sizes
from spmd.transport.algorithms import choice
from spmd.transport.call import Call

SIZES = [1 << k for k in range(8, 23, 2)]
ROUNDS = 15
REDUCTIONS = {
    "all_reduce": ["recursive doubling", "halving and doubling", "pairwise"],
    "reduce": ["binomial tree", "halving and gather", "pairwise"],
    "reduce_scatter": ["halving", "pairwise"],
}
THRESHOLDS = {
    "all_gather": "INLINE_MAX",
    "all_to_all": "INLINE_MAX",
    "gather": "INLINE_MAX",
    "scatter": "INLINE_MAX",
    "broadcast": "TREE_MAX",
}
"""Of movements, which go one way up to these bytes, and another above."""


@contextmanager
def algorithm(kind: str, name: str) -> Iterator[None]:
    choice.forced(kind, name)
    try:
        yield
    finally:
        choice.forced(kind, None)


def ways(kind: str, n: int, nbytes: int, per_host: int) -> dict[str, tuple[Callable[[], Any], bool]]:
    """By name: how to have it used, and whether it is used anyway."""
    if kind in THRESHOLDS:
        name = THRESHOLDS[kind]
        small = (nbytes if kind in ("all_gather", "gather", "broadcast") else nbytes // n) <= getattr(choice, name)
        return {
            "as small": (lambda: patch.object(choice, name, 1 << 40), small),
            "as large": (lambda: patch.object(choice, name, 0), not small),
        }
    names = REDUCTIONS[kind]
    used = getattr(choice, kind)(n, nbytes)
    if kind == "all_reduce":
        names = [*names, *(f"two levels, {name}" for name in names)]
        used = choice.all_reduce(n, nbytes, per_host)
    return {
        name: (lambda name=name: algorithm(kind, name), name == used)
        for name in names
        if choice.possible(name, n, per_host)
    }


def collective(worker: Any, kind: str, nbytes: int) -> Callable[[], Any]:
    comm, group = worker.comm, worker.group(tuple(worker.mesh.axes))
    x = np.random.default_rng(worker.index).random(nbytes // 8)
    ends = np.cumsum([0, *block_sizes(x.size, group.size)])
    parts = [x[a:b] for a, b in pairwise(ends)]
    root = group.index == 0

    def call(alike: bool | None) -> Call:
        return Call(kind, group.axes, x.dtype, x.shape, same_shape=alike)

    return {
        "all_reduce": lambda: comm.all_reduce(group, call(True), x),
        "reduce": lambda: comm.reduce(group, call(True), x, 0),
        "reduce_scatter": lambda: comm.reduce_scatter(group, call(False), parts),
        "all_gather": lambda: comm.all_gather(group, call(False), x),
        "all_to_all": lambda: comm.all_to_all(group, call(False), parts),
        "gather": lambda: comm.gather(group, call(False), x, 0),
        "scatter": lambda: comm.scatter(group, call(None), parts if root else None, 0),
        "broadcast": lambda: comm.broadcast(group, call(None), x if root else None, 0),
    }[kind]


def measured(worker: Any, kind: str, nbytes: int) -> dict[str, tuple[float, bool]]:
    """By algorithm: seconds, and whether it is used."""
    comm, group = worker.comm, worker.group(tuple(worker.mesh.axes))
    step, repeats = collective(worker, kind, nbytes), max(2, min(20, (1 << 21) // nbytes))
    every = ways(kind, group.size, nbytes, comm.members_per_host(group))
    times: dict[str, list[float]] = {name: [] for name in every}
    barrier = Call("barrier", group.axes, np.dtype(np.float64), (1,), same_shape=True)
    for _ in range(ROUNDS):
        for name, (used, _) in every.items():
            with used():
                step().wait()
                comm.all_reduce(group, barrier, np.zeros(1)).wait()
                begun = time.perf_counter()
                for _ in range(repeats):
                    step().wait()
                own = np.array([(time.perf_counter() - begun) / repeats])
                times[name].append(float(comm.all_reduce(group, barrier, own, "max").wait()[0]))
    return {name: (statistics.median(taken), every[name][1]) for name, taken in times.items()}


def main(kinds: list[str]) -> None:
    mesh = spmd.Mesh(x=MPI.COMM_WORLD.Get_size())
    for kind in kinds or [*REDUCTIONS, *THRESHOLDS]:
        rows = [mesh.run(partial(measured, kind=kind, nbytes=size), tracked=False).results for size in SIZES]
        if not spmd.is_main():
            continue
        rows = [row[0] for row in rows]
        print(f"\n{kind}, {mesh.size} workers\n")
        print(f"| bytes | {' | '.join(rows[0])} |\n|{'---|' * (1 + len(rows[0]))}")
        for size, row in zip(SIZES, rows, strict=True):
            cells = [f"{seconds * 1e6:.0f}{'*' if used else ''}" for seconds, used in row.values()]
            print(f"| {size} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
