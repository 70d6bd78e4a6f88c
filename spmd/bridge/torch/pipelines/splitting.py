"""Models of layers cut into stages of even cost: `spt.split_stages`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from spmd.autodiff import tree
from spmd.bridge.torch.function import apply
from spmd.bridge.torch.worker_context import context_of, device_of
from spmd.errors import SpecError, describe
from spmd.mesh import WORKER
from spmd.operators.sums import Sum
from spmd.tracebacks import api_boundary
from spmd.training.stage_costs import costs_of, cuts_of

__all__ = ["split_stages"]

_WHERE = "spt.split_stages"
_RUNS = 3
"""Layers are timed so many times, and the shortest time counts."""


@api_boundary
def split_stages(
    module: nn.Sequential | Sequence[nn.Module],
    n: int,
    *,
    cost: Literal["parameters", "flops", "seconds"] | Callable[[nn.Module], float] | Sequence[float] = "parameters",
    sample: Any = None,
) -> list[nn.Sequential]:
    """The layers of a model cut into n stages, for `spt.pipeline`, whose most expensive one is as cheap as can be.

    module: an nn.Sequential, or the modules of a model in the order in which it calls them, each with the result of the
    one before: `[model.embedding, *model.blocks, model.head]`. The stages hold the same layers, and an nn.Sequential's
    have the same names. cost: of a layer: its "parameters"; the "flops" or the "seconds" of a forward and a backward,
    tried with sample; a function of the layer; or a number for each. sample: an input of the model.
    Layers without cost go with those before them. All workers cut alike: seconds are those of all together.
    Cost: a trial of each layer, and with "seconds" one sum over the mesh. Raises SpecError for fewer layers than n.

        >>> layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        >>> [[*stage._modules] for stage in spt.split_stages(torch.nn.Sequential(*layers), 2)]
        [['0', '1'], ['2', '3']]
    """
    named = _named_layers(module)
    layers = [layer for _, layer in named]
    costs: Any = cost
    if isinstance(cost, str):
        costs = _costs(layers, cost, sample)
    ends = cuts_of(costs_of(layers, costs, _WHERE), n, _WHERE)
    return [_stage(named[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def _stage(named: list[tuple[str, nn.Module]]) -> nn.Sequential:
    stage = nn.Sequential()
    for name, layer in named:
        stage.add_module(name, layer)
    return stage


def _named_layers(module: Any) -> list[tuple[str, nn.Module]]:
    if isinstance(module, nn.Sequential | nn.ModuleList):
        return [*module._modules.items()]  # type: ignore[list-item]
    layers = [*module] if isinstance(module, list | tuple) else []
    if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        raise SpecError.at(
            _WHERE,
            argument="module",
            got=describe(module),
            need="an nn.Sequential, or modules of which each takes what the one before gives",
            mend="spt.split_stages([model.embedding, *model.blocks, model.head], n)",
        )
    return [(str(k), layer) for k, layer in enumerate(layers)]


def _costs(layers: Sequence[nn.Module], cost: str, sample: Any) -> list[float]:
    if cost == "parameters":
        return [sum(p.numel() for p in layer.parameters()) for layer in layers]
    if cost not in ("flops", "seconds"):
        raise SpecError.at(
            _WHERE,
            argument="cost",
            got=repr(cost),
            need='"parameters", "flops", "seconds", a function of a layer, or numbers',
            mend='cost="parameters"',
        )
    if sample is None:
        raise SpecError.at(
            _WHERE, argument="sample", got="None", need=f'an input, for cost="{cost}"', mend="sample=x, a microbatch"
        )
    trial = _flops if cost == "flops" else _seconds
    costs, x = [], sample
    for layer in layers:
        number, x = trial(layer, x)
        costs.append(number)
    return _of_all_workers(costs) if cost == "seconds" else costs


def _run(layer: nn.Module, x: Any) -> Any:
    """The result of a forward and a backward, which leave gradients and buffers as they were."""
    own = {name: b.clone() for name, b in layer.named_buffers()}
    leaf = lambda t: t.detach().requires_grad_(t.is_floating_point()).clone() if isinstance(t, torch.Tensor) else t
    with torch.enable_grad():
        y = torch.func.functional_call(layer, own, (tree.map(leaf, x),))
        ends = [t for t in tree.leaves(y) if isinstance(t, torch.Tensor) and t.requires_grad]
        inputs = [p for p in layer.parameters() if p.requires_grad]
        if ends and inputs:
            torch.autograd.grad([t.real.sum() for t in ends], inputs, allow_unused=True)
    return tree.map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, y)


def _flops(layer: nn.Module, x: Any) -> tuple[float, Any]:
    with FlopCounterMode(display=False) as counter:
        y = _run(layer, x)
    return float(counter.get_total_flops()), y


def _seconds(layer: nn.Module, x: Any) -> tuple[float, Any]:
    y, times = _run(layer, x), []
    for _ in range(_RUNS):
        begin = time.perf_counter()
        y = _run(layer, x)
        if device_of(WORKER.get()).type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times), y


def _of_all_workers(costs: list[float]) -> list[float]:
    """The sum over all workers, so that all cut alike."""
    worker = WORKER.get()
    if worker is None or worker.mesh.size == 1:
        return costs
    own = torch.tensor(costs, dtype=torch.float64, device=device_of(worker))
    return apply(Sum(tuple(worker.mesh.axes)), own, context_of(worker)).tolist()
