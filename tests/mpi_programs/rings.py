"""Products whose operands go round between processes: values, derivatives, and the memory that they take."""

from __future__ import annotations

import os
import tracemalloc

os.environ["SPMD_GATHER_LIMIT"] = "0"
os.environ["SPMD_BUFFERS"] = "0"  # no memory is kept that tracemalloc would not see again

import numpy as np

import spmd
from spmd import P

RNG = np.random.default_rng(0)


def value(u, v):
    return np.sum((u @ v) ** 2)


def gradient(u, v):
    return spmd.grad(value, (0, 1))(u, v)


def second(u, v):
    return spmd.grad(lambda u, v: sum(np.sum(g**2) for g in gradient(u, v)), (0, 1))(u, v)


def peak_of(f, *args) -> int:
    f(*args)  # what is cached now is not counted
    tracemalloc.start()
    f(*args)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> list[str]:
    wrong = []
    for shape, inner in (((53, 70), 54), ((60, 41), 43)):  # uneven blocks
        a, b = RNG.normal(size=shape) / 10, RNG.normal(size=(shape[1], inner)) / 10
        for specs in ((P("x", "y"), P("x", "y")), (P(("x", "y")), P(("y", "x"))), (P("y"), P("x"))):
            u, v = (spmd.put(array, spec) for array, spec in zip((a, b), specs, strict=True))
            if not np.allclose((u @ v).numpy(), a @ b):
                wrong.append(f"product of {specs}")
            for f in (gradient, second):
                for have, want in zip(f(u, v), f(a, b), strict=True):
                    if not np.allclose(have.numpy(), want):
                        wrong.append(f"{f.__name__} of {specs}")
    return wrong


def too_large() -> list[str]:
    """Each worker has a quarter of the rows of 16 MiB. Who gathers, or keeps what came, has at least three more."""
    u = spmd.put(RNG.normal(size=(1024, 2048)), P(("x", "y")))
    peaks = []
    for limit in ("1", "64"):
        os.environ["SPMD_GATHER_LIMIT"] = limit
        peaks.append(peak_of(lambda u: u @ u.T, u) / (u.nbytes // 4))
    right = peaks[0] < 4.5 and peaks[0] + 1 < peaks[1]
    return [] if right else [f"{peaks[0]:.2f} blocks, {peaks[1]:.2f} if it is gathered"]


with spmd.Mesh(x=2, y=2):
    found = main() + too_large()
    if spmd.is_main():
        print("\n".join(found[:10]) or "right")
