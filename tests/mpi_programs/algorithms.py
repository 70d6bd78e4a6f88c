"""What collectives give by every algorithm, worker by worker, as digests. The same file runs with any transport.

Arguments: how many workers; with a second one each algorithm has a share of the cases only.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from verbs import digest

import spmd
from spmd.transport.algorithms import choice
from spmd.transport.call import Call

ALGORITHMS = {
    "all_reduce": [
        *("recursive doubling", "pairwise", "halving and doubling"),
        *("two levels, recursive doubling", "two levels, pairwise", "two levels, halving and doubling"),
    ],
    "reduce": ["binomial tree", "pairwise", "halving and gather"],
    "reduce_scatter": ["halving", "pairwise"],
    "all_to_all": ["Bruck", "pairwise"],
    "all_gather": ["Bruck", "ring", "pairwise"],
    "all_gather_large": ["ring", "pairwise"],
}
DTYPES = "bool int32 float16 float32 complex128".split()
SIZES = [0, 1, 5, 300, 20_000]


def collectives(worker, dtype: str, size: int) -> dict[str, object]:
    comm, group = worker.comm, worker.group(tuple(worker.mesh.axes))
    n, k = group.size, group.index
    rng = np.random.default_rng([worker.index, size])
    x = (rng.normal(size=size) * 50).astype(dtype)
    uneven = x[: size * (k + 1) // n]
    parts = [x[: size * (j + 1) // n] for j in range(n)]

    def call(name: str, alike: bool | None) -> Call:
        return Call(name, group.axes, x.dtype, x.shape, same_shape=alike)

    handles = {
        "sum": comm.all_reduce(group, call("sum", True), x),
        "gather": comm.all_gather(group, call("gather", False), uneven),
        "to all": comm.all_to_all(group, call("to all", False), parts),
        "scatter": comm.reduce_scatter(group, call("scatter", False), parts),
        "several": comm.all_reduce_many(group, call("several", None), [x, x[:3]]),
        "shapes": comm.shapes(group, call("shapes", False).of(uneven.shape)),
    }
    if dtype != "complex128":
        handles["max"] = comm.all_reduce(group, call("max", True), x, "max")
    for root in {0, n // 2, n - 1}:
        handles[f"broadcast {root}"] = comm.broadcast(group, call("broadcast", None), x if k == root else None, root)
        handles[f"reduce {root}"] = comm.reduce(group, call("reduce", True), x, root)
    found = {name: handle.wait() for name, handle in handles.items()}
    return {name: str(y) if name == "shapes" else digest(y) for name, y in found.items()}


def cases_of(number: int, share: bool) -> list[tuple[str, int]]:
    """Dtypes and sizes. share: two of five, in which an algorithm has each dtype and each size twice."""
    return [
        (dtype, size)
        for d, dtype in enumerate(DTYPES)
        for s, size in enumerate(SIZES)
        if not share or (d + s + number) % 5 < 2
    ]


def results(n: int, algorithms=((None, None),), share=False, **options) -> dict[str, dict[str, dict[str, object]]]:
    """By algorithm, then by worker."""
    mesh = spmd.Mesh(x=n, **options)
    found = {}
    for number, (kind, algorithm) in enumerate(algorithms):
        if kind is not None:
            choice.forced(kind, algorithm)
        cases = cases_of(number, share)

        def body(worker, cases=cases) -> dict[str, object]:
            return {f"{dtype} {size}": collectives(worker, dtype, size) for dtype, size in cases}

        shared = mesh.transport.share(mesh.run(body, tracked=False).results)
        found[f"{kind}, {algorithm}"] = {str(w): shared[w] for w in range(n)}
        if kind is not None:
            choice.forced(kind, None)
    return found


if __name__ == "__main__":
    every = [(None, None), *((kind, name) for kind, names in ALGORITHMS.items() for name in names)]
    found = results(int(sys.argv[1]), every, share=len(sys.argv) > 2)
    if spmd.is_main():
        print(json.dumps(found))
