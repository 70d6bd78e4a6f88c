"""Mixtures of experts, whose experts lie on the workers along an axis."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from spmd.bridge.torch import functions
from spmd.bridge.torch.sharded import ShardedModule
from spmd.bridge.torch.tensor_state import plain
from spmd.errors import LayoutError, SpecError, describe
from spmd.layout import P, block_bounds
from spmd.mesh import here
from spmd.operators.reduce import _names
from spmd.tracebacks import api_boundary

__all__ = ["Experts"]

_WHERE = "spt.nn.Experts"


class Experts(ShardedModule):
    """A mixture of experts, which lie on the workers along axes of the mesh: by `spt.functions.experts`.

        feed_forward = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)]
        layer = spt.nn.Experts(feed_forward, nn.Linear(64, 8, bias=False), "model")
        y = layer(x)

    experts: modules with parameters of the same names, shapes and dtypes, without buffers, the same on all workers.
    Each worker keeps its own, copied. The parameters of one name become one, `net.0.weight` as `net__0__weight`, of
    shape (experts, ...), split by P(axis_name) in balanced blocks: so optimisers step an expert where it lies, and
    `spmd.save` and `spt.state_dict` load on another mesh.
    gate: a module that gives scores, (..., experts), of inputs. axis_name, k, capacity, renormalize, token_axes: as for
    the function. Construct it in a body.

    forward(x, with_scores=False): x of shape (..., features), tokens in all dimensions but the last; they vary over
    axis_name. With scores the pair of the result and the scores, for `spt.functions.load_balance_loss`.
    Gradients, cost and errors: as `spmd.functions.experts`.
    """

    @api_boundary
    def __init__(
        self,
        experts: Sequence[nn.Module],
        gate: nn.Module,
        axis_name: str | tuple[str, ...],
        k: int = 2,
        capacity: int | None = None,
        *,
        renormalize: bool = True,
        token_axes: str | tuple[str, ...] | None = None,
    ):
        super().__init__()
        worker, experts = here(_WHERE), [*experts]
        tables = _checked_parameters(experts)
        if not callable(gate):
            need, mend = "a module that gives scores of inputs", f"nn.Linear(features, {len(experts)}, bias=False)"
            raise SpecError.at(_WHERE, argument="gate", got=describe(gate), need=need, mend=mend)
        self.gate = gate
        self.axis_name, self.k, self.capacity = axis_name, k, capacity
        self.renormalize, self.token_axes = renormalize, token_axes
        self._names = {name: name.replace(".", "__") for name in tables[0]}
        for name, first in tables[0].items():
            whole = torch.stack([plain(table[name]).detach() for table in tables])
            self.register_shard(self._names[name], whole, P(axis_name), requires_grad=first.requires_grad)
        group, self._count = worker.group(_names(axis_name, "Experts")), len(experts)
        own = experts[slice(*block_bounds(len(experts), group.dims, group.index))]
        self._experts = tuple(map(_without_data, own))  # in a tuple: their parameters are not the layer's

    def train(self, mode: bool = True) -> Experts:
        for expert in self._experts:
            expert.train(mode)
        return super().train(mode)

    def forward(self, x: torch.Tensor, with_scores: bool = False) -> Any:
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.gate(tokens)
        if scores.shape[-1:] != (self._count,):
            need, mend = f"scores of {self._count} experts", f"nn.Linear(features, {self._count}, bias=False)"
            raise LayoutError.at(
                _WHERE, argument="gate", got=f"a module that gives {describe(scores)}", need=need, mend=mend
            )
        calls: list[Any] = [partial(_call, expert) for expert in self._experts]
        y = functions.experts(
            tokens,
            scores,
            calls,
            self.axis_name,
            self.k,
            self.capacity,
            params={name: self.shard(own) for name, own in self._names.items()},
            renormalize=self.renormalize,
            token_axes=self.token_axes,
        )
        y = y.reshape(x.shape)
        return (y, scores.reshape(*x.shape[:-1], -1)) if with_scores else y

    def extra_repr(self) -> str:
        return f"{self._count} experts, axis_name={self.axis_name!r}, k={self.k}, capacity={self.capacity}"


def _without_data(module: nn.Module) -> nn.Module:
    """A copy of a module, whose parameters have no entries of their own."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, memo)


def _call(module: nn.Module, params: dict[str, torch.Tensor], rows: torch.Tensor) -> Any:
    return functional_call(module, params, (rows,))


def _checked_parameters(experts: list[Any]) -> list[dict[str, nn.Parameter]]:
    """The parameters of each module. Raises unless they can be stacked, and modules have parameters only."""
    if not experts or not all(isinstance(m, nn.Module) for m in experts):
        need, mend = "a list of modules, an expert each", "[make_expert() for _ in range(8)]"
        raise SpecError.at(_WHERE, argument="experts", got=describe(experts), need=need, mend=mend)
    tables = [dict(m.named_parameters()) for m in experts]
    kinds = [{name: describe(p) for name, p in table.items()} for table in tables]
    trained = [{name: f"requires_grad={p.requires_grad}" for name, p in table.items()} for table in tables]
    parameters = [p for table in tables for p in table.values()]
    buffer = next((name for m in experts for name, _ in m.named_buffers()), None)
    otherwise = "spt.functions.experts(x, scores, [modules of this worker], axis_name)"
    if buffer is not None:
        got, need = f"a module with the buffer {buffer!r}", "modules without buffers, which would be of all experts"
    elif not kinds[0] or any(kind != kinds[0] for kind in kinds):
        other = next((kind for kind in kinds if kind != kinds[0]), kinds[0])
        got = f"modules with the parameters {kinds[0]}" + (f" and {other}" if other != kinds[0] else "")
        need = "parameters of the same names, shapes and dtypes in all modules"
    elif any(each != trained[0] for each in trained):
        other = next(each for each in trained if each != trained[0])
        got, need = f"{trained[0]} and {other}", "parameters of one name all trained, or all frozen: they become one"
    elif len({id(p) for p in parameters}) != len(parameters):
        got, need = "modules that share a parameter", "modules with parameters of their own"
        otherwise = "[copy.deepcopy(expert) for _ in range(8)]"
    else:
        return tables
    raise LayoutError.at(_WHERE, argument="experts", got=got, need=need, mend=otherwise)
