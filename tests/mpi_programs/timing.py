"""A program with sums of every kind, run with workers that dawdle at random: hashes of its values and gradients.

Argument 1 says how often. Runs with any transport.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time

import numpy as np

import spmd
from spmd import P

RNG = np.random.default_rng(0)
W, X = RNG.normal(size=(5, 5)).astype("f"), RNG.normal(size=(9, 5)).astype("f")


def hashes(times: int, **options: str) -> list[str]:
    """The different hashes that so many runs give."""
    mesh = spmd.Mesh(a=2, b=2, **options)
    clock = random.Random(1 + 7 * mesh.local_workers[0])  # on each process another

    def dawdle():
        if clock.random() < 0.3:
            time.sleep(clock.random() * 1e-3)

    def body(w, x):
        for _ in range(3):
            dawdle()
            x = np.tanh(x @ w)
            dawdle()
            x = x + spmd.psum(x.sum(), "a") * np.float32(0.1)
            x = spmd.all_gather(spmd.psum_scatter(spmd.pvary(x, "b"), "b", tiled=True), "b", tiled=True)
        return spmd.mean(x, ("a", "b"))

    loss = spmd.map(body, in_specs=(P(), P("a")), out_specs=P(), mesh=mesh)
    found = set()
    for _ in range(times):
        value, gradient = spmd.value_and_grad(loss)(W, X)
        found.add(hashlib.sha256(np.asarray(value).tobytes() + np.asarray(gradient).tobytes()).hexdigest())
    return sorted(found)


if __name__ == "__main__":
    found = hashes(int(sys.argv[1]))
    if spmd.is_main():
        print(json.dumps(found))
