"""Global arrays on grids of some of four workers, and gradients of maps between them. Runs with any transport."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import spmd
from spmd import Layout, P

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a program it stands beside, not in, the package
from mpi_programs.verbs import digest

AXES = {"a": 2, "b": 2}
X = np.random.default_rng(0).normal(size=(7, 5))
GRID = Layout.grid((7, 5), (3, 1), AXES, workers=[3, 0, 2])
OTHER = Layout.grid((7, 5), (1, 2), AXES, workers=[1, 2], cuts=[None, (4, 1)])
AT = Layout.grid((5,), (1,), AXES, workers=[2])


def found() -> dict[str, str]:
    """Digests of values and gradients."""
    f = spmd.map(lambda x: spmd.repartition(np.sin(x) * x, GRID, OTHER), GRID, OTHER)
    total = spmd.map(lambda x: spmd.sum_reduce(np.sum(x, 0), ("a", "b"), root=2), P(("a", "b")), AT)
    x = spmd.put(X, GRID)
    back = spmd.grad(lambda x: np.sum(f(x) ** 2))(x)
    assert back.layout == GRID
    results = {
        "map": f(X),
        "put": spmd.put(x, OTHER),
        "gradient": back,
        "second": spmd.grad(lambda x: np.sum(spmd.grad(lambda x: np.sum(f(x) ** 2))(x) ** 2))(x),
        "total": total(X),
        "of the total": spmd.put(spmd.grad(lambda x: np.sum(total(x) ** 2))(X), P()),
        "from blocks": spmd.from_blocks({w: x.blocks[w] for w in x.mesh.local_workers}, GRID),
        "sum": np.sum(x * x),
    }
    return {name: digest(r.numpy()) for name, r in results.items()}


if __name__ == "__main__":
    with spmd.Mesh(**AXES):
        text = json.dumps(found())
    if spmd.is_main():
        print(text)
