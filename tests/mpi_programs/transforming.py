"""Fourier transforms over blocks, their inverses and gradients, as digests of all workers. Runs with any transport."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import spmd
from spmd import P

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a program it stands beside, not in, the package
from mpi_programs.convolving import digest

CASES = {
    "slabs": ({"x": 4}, P("x"), (12, 10, 9), {}),
    "pencils": ({"x": 2, "y": 2}, P("x", "y"), (3, 2, 5), {}),
    "padded": ({"x": 4}, P(None, "x"), (6, 12, 9), {"padding": 1.5}),
    "cropped": ({"x": 2, "y": 2}, P("y", None, "x"), (6, 7, 8), {"s": (4, 8, 5)}),
}


def results(**options) -> dict[str, str]:
    found = {}
    for name, (axes, spec, shape, how) in CASES.items():
        x = np.random.default_rng(len(name)).standard_normal(shape)
        mesh = spmd.Mesh(**axes, **options)
        f, pullback = spmd.vjp(lambda x, how=how: spmd.fft.rfftn(x, **how), spmd.put(x, spec, mesh))
        (g,) = pullback(f * 2)
        found[name] = " ".join(digest(a.numpy()) for a in (f, g))
    return found


if __name__ == "__main__":
    found = results()
    if spmd.is_main():
        print(json.dumps(found))
