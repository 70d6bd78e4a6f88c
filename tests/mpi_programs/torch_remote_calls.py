"""Modules that lie on one process each, trained by remote calls, as on one worker. Argument 1: how many processes."""

from __future__ import annotations

import copy
import sys

import numpy as np
import torch
from torch import nn

import spmd
from spmd import P
from spmd.bridge import torch as spt


def stages() -> list[nn.Module]:
    return [nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)), nn.Linear(2, 5)]


def alone(modules: list[nn.Module], x: torch.Tensor, steps: int = 10) -> tuple[list[float], list[nn.Module]]:
    modules, losses = copy.deepcopy(modules), []
    optimizer = torch.optim.Adam([p for m in modules for p in m.parameters()], 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        y = x
        for m in modules:
            y = m(y)
        loss = (y**2).sum() * x.shape[0]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, modules


def trained(modules: list[nn.Module], x: torch.Tensor, places: tuple[int, ...]) -> tuple[list[float], list[nn.Module]]:
    """Ten steps of modules at places along `x`, each with an optimiser there; the modules of this worker."""
    me = spmd.worker_index("x")
    own = {s: copy.deepcopy(m) for s, (m, k) in enumerate(zip(modules, places, strict=True)) if k == me}
    params = [p for m in own.values() for p in m.parameters()]
    optimizer, losses = torch.optim.Adam(params, 0.01) if params else None, []
    for _ in range(10):
        if optimizer:
            optimizer.zero_grad()
        y = {"y": x, "n": x.shape[0]}
        for s, k in enumerate(places):
            y = spt.remote(lambda v, s=s: {"y": own[s](v["y"]), "n": v["n"]}, at=k)(y)
        loss = spt.remote(lambda v: (v["y"] ** 2).sum() * v["n"], at=places[-1])(y)
        loss = spt.replicate(loss.to(0).result(), "x")
        loss.backward()
        if optimizer:
            optimizer.step()
        losses.append(loss.item())
    return losses, list(own.items())


def main(n: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    modules, x, places = stages(), torch.randn(5, 3), (0, 1, n - 1)
    losses, wanted = alone(modules, x)

    def body(x):
        own_losses, own = trained(modules, x, places)
        np.testing.assert_allclose(own_losses, losses, rtol=1e-10)
        for s, m in own:
            assert all(map(torch.allclose, m.parameters(), wanted[s].parameters()))

    spt.map(body, in_specs=P(), out_specs=None, mesh=spmd.Mesh(x=n))(x)
    if spmd.is_main():
        print("as on one worker")


if __name__ == "__main__":
    main(int(sys.argv[1]))
