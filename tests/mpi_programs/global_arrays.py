"""Functions of global arrays between processes: the values of NumPy, and the gradients of the same functions of bare
arrays. Argument 1: "all" specs for each function and shape, or "half" of them, so that each function meets all."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import spmd
from spmd import P

sys.path.insert(0, str(Path(__file__).parent.parent))
from global_cases import EVERY, bare, outcome

SPECS = [P("x"), P(None, "y"), P("y", "x"), P(("x", "y"))]
HALVES = [SPECS[::2], SPECS[1::2]]


def main(how: str) -> list[str]:
    wrong = []
    for k, shape in enumerate(((6, 5), (3, 4))):
        a = np.random.default_rng(len(shape)).random(shape)
        for number, (name, function) in enumerate(EVERY.items()):
            want, expected = outcome(function, a)
            for spec in SPECS if how == "all" else HALVES[(number + k) % 2]:
                x = spmd.put(a, spec)
                have, error = outcome(lambda: bare(function(x)))  # noqa: B023
                if (error is None) != (expected is None):
                    wrong.append(f"{name} {shape} {spec}: {error!r}, NumPy: {expected!r}")
                elif error is None and not np.allclose(have, want, rtol=1e-12, equal_nan=True):
                    wrong.append(f"{name} {shape} {spec}: {have} is not {want}")
    for name in ("mean 0", "T", "slice", "x @ x.T", "sort", "reshape", "roll"):
        squares = lambda x, f=EVERY[name]: np.sum(f(x) ** 2)
        a = np.random.default_rng(5).random((6, 5))
        for spec in SPECS:
            gradient = spmd.grad(squares)(spmd.put(a, spec))
            if not np.allclose(bare(gradient), spmd.grad(squares)(a), rtol=1e-10):
                wrong.append(f"gradient of {name}, {spec}")
    return wrong


with spmd.Mesh(x=2, y=2):
    found = main(sys.argv[1])
    u = spmd.put(np.ones((6, 5)), P("x"))
    assert (len(u), u.shape, u.spec) == (6, (6, 5), P("x"))
    repr(u)  # not collective
    if spmd.is_main():
        len(u), repr(u)
        print("\n".join(found[:10]) or "right")
