"""Values that go from worker to worker: small and large, in both directions, differentiated; and calls that differ."""

from __future__ import annotations

import json
import sys

import numpy as np

import spmd
from spmd import P
from spmd.errors import MismatchError

SIZES = (0, 1, 100, 5_000, 400_000)


def there_and_back(n: int) -> list[float]:
    """What comes of a value that goes around, and the gradient of that."""
    mesh = spmd.Mesh(x=4)

    def body(x):
        r = spmd.sum_reduce(x * x, "x", root=0)
        for source, target in ((0, 3), (3, 1), (1, 2)):
            r = spmd.move((r,), "x", source, target)[0]
        return np.sum(spmd.replicate(r, "x", root=2))

    value, grad = spmd.value_and_grad(spmd.map(body, P("x"), P(), mesh=mesh))(np.arange(4.0 * n))
    return [float(value), float(np.sum(grad))]


def crossed(x):
    first, second = (spmd.sum_reduce(x, "x", root=k) for k in (0, 1))
    if spmd.worker_index("x") == 1:
        spmd.move(second, "x", 1, 0)
    else:
        spmd.move(first, "x", 0, 1)
    return spmd.psum(1, "x")


def other_tree(x):
    r = spmd.sum_reduce(x, "x", root=0)
    spmd.move((r,) if spmd.worker_index("x") == 1 else r, "x", 0, 1)
    return spmd.psum(1, "x")


def left_out(x):
    r = spmd.sum_reduce(x, "x", root=0)
    if spmd.worker_index("x") != 3:
        r = spmd.move(r, "x", 0, 1)
    return spmd.psum(1, "x")


def told(body) -> str:
    try:
        spmd.map(body, P("x"), P(), mesh=spmd.Mesh(x=4))(np.arange(8.0))
    except MismatchError as error:
        return type(error).__name__
    return "nothing"


def main() -> None:
    found: dict = {"values": [there_and_back(n) for n in SIZES]}
    if "values" not in sys.argv:
        found["errors"] = [told(f) for f in (other_tree, left_out, crossed)]
    found["after"] = there_and_back(3)
    if spmd.is_main():
        print(json.dumps(found))


if __name__ == "__main__":
    main()
