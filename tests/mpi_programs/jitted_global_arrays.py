"""Jitted functions of global arrays between processes: what they give without spmd.jit, bit for bit.

Argument 1: "all" functions with both specs, or "half": each with one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import spmd
from spmd import P

sys.path.insert(0, str(Path(__file__).parent.parent))
from global_cases import EVERY, outcome


def leaves(result) -> list:
    return [x.numpy() if isinstance(x, spmd.PartitionedArray) else x for x in spmd.tree.leaves(result)]


def compared(name: str, f, *args) -> list[str]:
    want, error = outcome(f, *args)
    if error is not None:
        return []
    once = spmd.jit(f)
    for _ in range(3):
        have, error = outcome(once, *args)
        if error is not None:
            return [f"{name}: {error!r}"]
        pairs = zip(leaves(have), leaves(want), strict=True)
        if not all(np.array_equal(h, w, equal_nan=True) for h, w in pairs):
            return [f"{name}: {have} is not {want}"]
    return []


def step(w, x, y):
    value, g = spmd.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(w)
    return w - 0.1 * g, value


def main(how: str) -> list[str]:
    rng, wrong = np.random.default_rng(0), []
    for k, spec in enumerate((P("x"), P("y", "x"))):
        x = spmd.put(rng.random((5, 3)), spec)
        for name, f in [*EVERY.items()][k::2] if how == "half" else EVERY.items():
            if name not in ("mask", "allclose"):
                wrong += compared(f"{name} {spec}", f, x)
        for name in ("mean 0", "T", "slice", "x @ x.T", "sort", "reshape", "roll"):
            number = lambda x, f=EVERY[name]: np.sum(f(x) ** 2)
            wrong += compared(f"gradient of {name}", spmd.grad(number), x)
            once = spmd.jit(number)
            for _ in range(2):
                if not np.array_equal(spmd.grad(lambda x: once(2 * x))(x), spmd.grad(lambda x: number(2 * x))(x)):  # noqa: B023
                    wrong.append(f"gradient through {name}")
    for rows in (10, 3):
        x, y = spmd.put(rng.random((rows, 3)), P(("x", "y"))), spmd.put(rng.random(rows), P(("x", "y")))
        w = rng.random(3)
        wrong += compared("step", step, w, x, y) + compared("step", step, spmd.put(w, P()), x, y)
    return wrong


with spmd.Mesh(x=2, y=2):
    found = main(sys.argv[1])
    if spmd.is_main():
        print("\n".join(found[:10]) or "right")
