"""What three processes print by `spmd.debug.print`: in order, and at the first one only."""

from __future__ import annotations

import numpy as np

import spmd
from spmd import P

LINES = [
    "[x=0] 0.0",
    "[x=1] 1.0",
    "[x=2] 2.0",
    "outside",
    *["[x=0] jitted 0.0", "[x=1] jitted 1.0"],
    "[x=2] jitted 2.0",
]


def body(x):
    spmd.debug.print(x.sum())
    return x


def again(x):
    spmd.debug.print("jitted", x.sum())
    return x


if __name__ == "__main__":
    with spmd.Mesh(x=3):
        spmd.map(body, P("x"), P("x"))(np.arange(3.0))
        spmd.debug.print("outside")
        spmd.jit(spmd.map(again, P("x"), P("x")))(np.arange(3.0))
