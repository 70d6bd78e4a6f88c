"""Functions of global arrays that four processes call at different lines: an error on all of them, although their
collectives look alike. The processes can go on. Arguments: the names of the functions; none: all."""

from __future__ import annotations

import sys

import numpy as np

import spmd
from spmd import P
from spmd.errors import MismatchError


def pairs(u, v):
    """By name what the main process asks for, and what the others do."""
    return {
        "sum": (lambda: u.sum() + 0, lambda: v.sum() + 0),
        "item": (lambda: u[0, 0], lambda: v[0, 0]),
        "float": (lambda: float(u.max()), lambda: float(v.max())),
        "mean": (lambda: u.mean() + 0, lambda: v.mean() + 0),
        "numpy": (lambda: u.numpy() + 0, lambda: v.numpy() + 0),
        "reshard": (lambda: spmd.reshard(u, P(None, "x")), lambda: spmd.reshard(v, P(None, "x"))),
        "sort": (lambda: np.sort(u, axis=0), lambda: np.sort(v, axis=0)),
        "inner": (lambda: spmd.inner(u, v), lambda: spmd.inner(v, u)),
        "gradient": (lambda: spmd.grad(lambda w: (w * u).max())(1.0), lambda: spmd.grad(lambda w: (w * v).max())(1.0)),
    }


def main() -> list[str]:
    u = spmd.put(np.arange(14.0).reshape(7, 2), P("x"))
    v = u * 2
    wrong = []
    both = pairs(u, v)
    for name in sys.argv[1:] or both:
        alone, others = both[name]
        try:
            wrong.append(f"{name}: {alone() if spmd.is_main() else others()}")
        except MismatchError as error:
            text = str(error)
            if "spmd.is_main()" not in text or "one line" not in text:
                wrong.append(f"{name}: {text}")
        if u.sum() != 91 or (name == "sum" and v.max() != 26):
            wrong.append(f"after {name}: {u.sum()}")
    return wrong


with spmd.Mesh(x=4) as mesh:
    shared = mesh.transport.share({mesh.local_workers[0]: main()})
    if spmd.is_main():
        print("\n".join(line for lines in shared.values() for line in lines) or "right")
