"""Bytes per worker of parameters, summed gradients and states of Adam, by the formulas of Rajbhandari et al. (2020),
section 5: what a stage of ZeRO splits takes 1/n. NumPy and torch, measured of live arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest

import spmd
from spmd import P, optim
from spmd.training import gathered, shard_specs

SHAPES = {"0": (384, 257), "1": (257, 510), "2": (510, 130)}
COUNT = sum(map(math.prod, SHAPES.values()))


def formula(stage: int, n: int) -> list[float]:
    """Bytes of parameters, gradients and states, of float64."""
    return [size * COUNT / (n if stage >= first else 1) for size, first in ((8, 3), (8, 2), (16, 1))]


def of_numpy(stage: int, n: int) -> list[list[int]]:
    """By worker, the bytes that it holds."""
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(shape) / 20 for name, shape in SHAPES.items()}
    held = {}

    def nbytes(arrays):
        return sum(x.size * x.dtype.itemsize for x in spmd.tree.leaves(arrays) if x.ndim)

    def update(grads, state, params):
        """What the optimiser gets are sums over the workers."""
        summed.append(nbytes(grads))
        return adam.update(grads, state, params)

    adam, summed = optim.adam(), []
    optimizer = optim.Optimizer(adam.init, update, adam.specs)
    optimizer = optim.shard(optimizer, "data") if stage in (1, 2) else optimizer

    def step(params, state, x):
        def loss(p):
            y = x
            for w in gathered([*p.values()], [*specs.values()], "data") if stage == 3 else p.values():
                y = np.tanh(y @ w)
            return spmd.mean(y, "data")

        grads = spmd.grad(loss)(spmd.pvary(params, "data") if stage == 2 else params)
        before = nbytes(grads)
        params, state = optimizer.update(grads, state, params)
        held[spmd.worker_index("data")] = [nbytes(params), before if stage < 2 else summed[-1], nbytes(state)]
        return params, state

    with spmd.Mesh(data=n, scheduler="lockstep"):
        specs = shard_specs(params, "data") if stage == 3 else spmd.tree.map(lambda _: P(), params)
        params = spmd.put(params, specs)
        state, state_specs = optimizer.init(params), optimizer.specs(specs, params)
        step = spmd.map(step, (specs, state_specs, P("data")), (specs, state_specs))
        step(params, state, rng.standard_normal((9, 384)))
    return [held[k] for k in range(n)]


def of_torch(stage: int, n: int) -> list[list[int]]:
    """By worker, the bytes that it holds."""
    import torch

    from spmd.bridge import torch as spt
    from spmd.bridge.torch.tensor_state import local_data

    held = {}

    def nbytes(x):
        return local_data(x).numel() * x.element_size()

    def main():
        net = torch.nn.Sequential(*[torch.nn.Linear(*shape, bias=False) for shape in SHAPES.values()]).double()
        if stage == 3:
            model = spt.shard_parameters(net, "data", unit=torch.nn.Linear)
        else:
            model = spt.data_parallel(net, "data")
        optimizer = torch.optim.Adam(net.parameters())
        if stage in (1, 2):
            optimizer = spt.shard_optimizer(optimizer, "data", split_gradients=stage == 2)
        model(spt.varying(torch.ones(3, 384).double(), "data")).sum().backward()
        optimizer.step()
        states = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
        held[spt.worker_index("data")] = [
            sum(map(nbytes, net.parameters())),
            sum(nbytes(p.grad) for p in net.parameters()),
            sum(map(nbytes, states)),
        ]

    spt.map(main, (), None, mesh=spmd.Mesh(data=n))()
    return [held[k] for k in range(n)]


@pytest.mark.host("bodies of torch make their tensors on the host")
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("measured", [of_numpy, pytest.param(of_torch, marks=pytest.mark.torch)])
def test_a_worker_holds_what_the_formulas_say(measured, stage, n):
    if measured is of_torch:
        pytest.importorskip("torch")
    for held in measured(stage, n):
        for found, expected in zip(held, formula(stage, n), strict=True):
            assert abs(found / expected - 1) <= 0.02, (held, formula(stage, n))
