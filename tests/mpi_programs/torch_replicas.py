"""Tensors that should be one value and are another one on each process raise the same on all."""

from __future__ import annotations

import torch

import spmd
from spmd import P
from spmd.bridge import torch as spt
from spmd.errors import ReplicaError, StateError

MESH = spmd.Mesh(x=2)
(RANK,) = MESH.local_workers
X = torch.arange(4.0)


def own() -> torch.Tensor:
    return torch.full((3,), 1.0 + RANK)


def trains(x):
    w = own().requires_grad_()
    spt.mean((x * w.sum()) ** 2, "x").backward()
    return x + w.grad.sum()


CASES = {
    "an argument": lambda: spt.map(lambda w, x: x * w.sum(), (P(), P("x")), P("x"), mesh=MESH)(own(), X),
    "a shape": lambda: spt.map(lambda x: x, P("x"), P("x"), mesh=MESH)(torch.ones(4 * (RANK + 1))),
    "a reduction": lambda: spt.map(lambda x: x + spt.mean(own(), "x"), P("x"), P("x"), mesh=MESH)(X),
    "a gradient": lambda: spt.map(trains, P("x"), P("x"), mesh=MESH)(X),
    "a result": lambda: spt.map(lambda x: own(), P("x"), P(), mesh=MESH)(X),
    "a result without a spec": lambda: spt.map(lambda x: own(), P("x"), None, mesh=MESH)(X),
}


def main() -> None:
    for name, case in CASES.items():
        try:
            case()
        except (StateError, ReplicaError):
            continue
        raise AssertionError(f"{name} raised nothing")
    spt.map(lambda w, x: x * w.sum(), (P(), P("x")), P("x"), mesh=MESH)(torch.ones(3), X)
    print("all raised")


if __name__ == "__main__":
    main()
