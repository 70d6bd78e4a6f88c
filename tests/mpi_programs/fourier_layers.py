"""Fourier layers over blocks and their gradients, as digests of all workers. Runs with any transport."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import spmd
from spmd import P, functions

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a program it stands beside, not in, the package
from mpi_programs.convolving import digest

CASES = {
    "space": ({"x": 4}, P(None, None, "x"), P()),
    "channels": ({"c": 2, "x": 2}, P(None, "c", "x"), P("c")),
    "batch": ({"b": 2, "c": 2}, P("b", None), P(None, "c")),
    "modes": ({"k": 2, "x": 2}, P(None, None, None, "x"), P(None, None, "k")),
}


def results(**options) -> dict[str, str]:
    found = {}
    for name, (axes, spec, w_spec) in CASES.items():
        rng = np.random.default_rng(len(name))
        x, w = rng.standard_normal((3, 4, 9, 6)), rng.standard_normal((2, 4, 5, 4, 3))
        mesh = spmd.Mesh(**axes, **options)
        placed = spmd.put(x, spec, mesh), spmd.put(w[0] + 1j * w[1], w_spec, mesh)
        y, pullback = spmd.vjp(functions.spectral_conv, *placed)
        found[name] = " ".join(digest(a.numpy()) for a in (y, *pullback(y)))
    return found


if __name__ == "__main__":
    found = results()
    if spmd.is_main():
        print(json.dumps(found))
