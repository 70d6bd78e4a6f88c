"""Mistakes with optimisers of torch whose states lie split over workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mistakes import Row
from spmd import P
from spmd.bridge import torch as spt
from spmd.errors import MeshError, StateError

SGD = torch.optim.SGD
WHERE = "spt.shard_optimizer: argument optimizer"
STEP = "optimizer.step of spt.shard_optimizer: argument "


def made(make: Callable[[Any], Any]) -> Callable[[], Any]:
    """A call of `spt.shard_optimizer` for what a function makes of parameters."""
    return lambda: spt.map(lambda: spt.shard_optimizer(make(nn.Linear(2, 4).parameters()), "data"), (), None)()


def scheduled(parameters: Any) -> Any:
    optimizer = SGD(parameters, lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return optimizer


def twice(parameters: Any) -> Any:
    return spt.shard_optimizer(SGD(parameters, lr=0.1), "data")


def stepped(use: Callable[[Any, torch.Tensor], Any]) -> Callable[[], Any]:
    """A step after a function of a module, with parameters that data_parallel sums, and this worker's data."""

    def body(x: torch.Tensor) -> None:
        net = nn.Linear(2, 4)
        model = spt.data_parallel(net, "data")
        optimizer = spt.shard_optimizer(SGD(net.parameters(), lr=0.1), "data")
        use(model, x)
        optimizer.step()

    return lambda: spt.map(body, P("data"), None)(torch.ones(6, 2))


def _unsynced(model: Any, x: torch.Tensor) -> None:
    with model.no_sync():
        model(x).sum().backward()


def _unsummed() -> Any:
    def body(x: torch.Tensor) -> None:
        net = nn.Linear(2, 4)
        optimizer = spt.shard_optimizer(SGD(net.parameters(), lr=0.1), "data")
        net(x).sum().backward()
        optimizer.step()

    return spt.map(body, P("data"), None, check=False)(torch.arange(12.0).reshape(6, 2))


def _own(model: Any, x: torch.Tensor) -> None:
    (model.weight.grad,) = torch.autograd.grad(model(x).sum(), [model.weight])
    model.weight.grad = spt.varying(model.weight.grad, "data")


ROWS = [
    Row(
        "an optimiser that sees a whole parameter",
        made(lambda ps: torch.optim.LBFGS(ps)),
        StateError,
        WHERE,
        "LBFGS",
        "depends on that entry alone: ASGD",
        "elementwise=True",
    ),
    Row(
        "an optimiser of factored moments",
        made(lambda ps: torch.optim.Adafactor(ps)),
        StateError,
        WHERE,
        "Adafactor",
        "depends on that entry alone: ASGD",
        "elementwise=True",
    ),
    Row(
        "a scheduler before the split",
        made(scheduled),
        StateError,
        WHERE,
        "SGD, whose step a scheduler has wrapped",
        "as it was made",
        "make the scheduler of what",
    ),
    Row(
        "an optimiser that is split twice",
        made(twice),
        StateError,
        WHERE,
        "a ShardedSGD, which is sharded already",
        "states are whole",
        'spt.shard_optimizer(optimizer, ("pod"',
    ),
    Row(
        "steps with a history",
        made(lambda ps: SGD(ps, lr=0.1, differentiable=True)),
        StateError,
        WHERE,
        "SGD with differentiable=True",
        "steps without history",
        "differentiable=False",
    ),
    Row(
        "a step outside of bodies",
        lambda: made(lambda ps: SGD(ps, lr=0.1))().step(),
        MeshError,
        "optimizer.step",
        "",
        "a worker to be called on",
        "call it inside a function that spmd.map runs",
    ),
    Row(
        "a step with a worker's own gradients",
        stepped(_own),
        StateError,
        STEP + ".grad",
        "Varying(data) tensor float32[4, 2]",
        "the same gradient on all workers along 'data'",
        "spt.psum(p.grad, axis_name)",
    ),
    Row(
        "a step with a worker's own gradients, without states",
        _unsummed,
        StateError,
        STEP + ".grad",
        "float32[4, 2], which differs between workers",
        "the same gradient on all workers along 'data'",
        "spt.data_parallel(module, axis_name)",
    ),
    Row(
        "a step before the sum",
        stepped(_unsynced),
        StateError,
        "optimizer.step: argument weight",
        "this worker's own part, of a backward under no_sync",
        "the sum over workers",
        "outside of no_sync",
    ),
]
