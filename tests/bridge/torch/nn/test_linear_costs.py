"""What linear layers send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from bridge.torch.nn.linear_layers import column, general, lies, row  # noqa: E402
from spmd import Grid, P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402

pytestmark = pytest.mark.torch


def count(mesh: spmd.Mesh, make: Callable[[], nn.Module], x: torch.Tensor, src: Any, dst: Any, check: bool) -> tuple:
    """The operators of the forward run and of the backward sweep, and the messages of both."""
    logs = {}

    def main():
        w = spmd.mesh.here("a test").index
        net = make()
        X = lies(src, x.shape, mesh.axes)
        leaf = x[X.slices(w)].clone().requires_grad_()
        block = spt.varying(leaf, tuple(X.varying)) if X.varying else leaf
        with spmd.ledger() as forward:
            loss = net(block).sum()
        with spmd.ledger() as backward:
            loss.backward()
        logs[w] = forward.workers[w], backward.workers.get(w)

    spt.map(main, (), None, mesh=mesh, check=check)()
    forward, backward = logs[0]
    return (
        dict(forward.operators),
        dict(backward.operators) if backward else {},
        forward.messages,
        backward.messages if backward else 0,
    )


@pytest.mark.parametrize("check", [True, False])
def test_a_pair_costs_one_sum_forward_and_one_backward(check):
    mesh = spmd.Mesh(x=4)

    def pair(**options):
        return nn.Sequential(column("x", 6, 8, **options), nn.Tanh(), row("x", 8, 6, **options))

    x = torch.randn(2, 5, 6)
    # Each small collective of four workers costs log2(4) messages.
    assert count(mesh, pair, x, P(), P(), check) == ({"Sum": 1}, {"Sum": 1}, 2, 2)
    # Of a sequence an all-gather and a reduce-scatter each way; and the sum that the bias is owed.
    split = P(None, "x")
    assert count(mesh, lambda: pair(sequence=1), x, split, split, check) == (
        {"AllGather": 1, "ReduceScatter": 1},
        {"AllGather": 1, "ReduceScatter": 1, "Sum": 1},
        4,
        6,
    )
    no_bias = lambda: nn.Sequential(column("x", 6, 8, sequence=1), row("x", 8, 6, False, sequence=1))
    assert count(mesh, no_bias, x, split, split, check)[1:] == ({"AllGather": 1, "ReduceScatter": 1}, 4, 4)
    alone = lambda: column("x", 6, 8, gather=True)
    assert count(mesh, alone, x, P(), P(), check) == ({"Collect": 1}, {"Slice": 1, "Sum": 1}, 2, 2)


@pytest.mark.parametrize("check", [True, False])
def test_a_layer_between_grids_moves_blocks_to_who_lacks_them(check):
    mesh = spmd.Mesh(x=4)
    x_on, y_on, w_on = Grid((2,), (0, 1)), Grid((2,), (0, 2)), Grid((2, 2))
    make = lambda: general(x_on, y_on, w_on, 6, 8)
    # Worker 0 holds block 0 of x, which worker 2 needs too; its products are of block 0 of y, which is its own.
    result = count(mesh, make, torch.randn(3, 6), x_on, y_on, check)
    assert result == ({"Repartition": 1, "Accumulate": 1}, {"Repartition": 1, "Accumulate": 1}, 1, 1)


def test_parameters_take_no_communication_to_make_or_load():
    whole = nn.Linear(6, 8).state_dict()

    def main():
        with spmd.ledger() as log:
            layer = general(Grid((1,)), Grid((1,)), Grid((2, 2)), 6, 8)
            layer.load_state_dict(whole)
            spt.nn.Linear.from_torch(nn.Linear(6, 8), w_spec=P(None, "x"))
        assert not log.operators
        assert not log.verbs

    spt.map(main, (), None, mesh=spmd.Mesh(x=4))()
