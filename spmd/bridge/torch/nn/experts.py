"""Mixtures of experts, whose experts lie on the workers along an axis."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from spmd.bridge.torch import functions
from spmd.bridge.torch.sharded import ShardedModule
from spmd.bridge.torch.tensor_state import plain
from spmd.errors import LayoutError, SpecError, describe
from spmd.layout import P
from spmd.tracebacks import api_boundary

__all__ = ["Experts"]


class Experts(ShardedModule):
    """A mixture of experts, which lie on the workers along axes of the mesh: by `spt.functions.experts`.

        feed_forward = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)]
        layer = spt.nn.Experts(feed_forward, nn.Linear(64, 8, bias=False), "model")
        y = layer(x)

    experts: modules of one architecture, without buffers, the same on all workers; each worker keeps its own, copied.
    Their parameters become one for each name, of shape (experts, ...), split by P(axis_name) in balanced blocks: so
    optimisers step an expert where it lies, and `spmd.save` and `spt.state_dict` load on another mesh.
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
        experts = [*experts]
        tables = _checked_parameters(experts)
        self.gate = gate
        self.axis_name, self.k, self.capacity = axis_name, k, capacity
        self.renormalize, self.token_axes = renormalize, token_axes
        self._names = {name: name.replace(".", "__") for name in tables[0]}
        self._expert = (copy.deepcopy(experts[0]).to("meta"),)  # in a tuple: its parameters are not the layer's
        for name, own in tables[0].items():
            whole = torch.stack([plain(table[name]).detach() for table in tables])
            self.register_shard(self._names[name], whole, P(axis_name), requires_grad=own.requires_grad)

    def forward(self, x: torch.Tensor, with_scores: bool = False) -> Any:
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.gate(tokens)
        (expert,) = self._expert
        expert.train(self.training)
        y = functions.experts(
            tokens,
            scores,
            lambda params, rows: functional_call(expert, params, (rows,)),
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
        return f"{self._expert[0]}, axis_name={self.axis_name!r}, k={self.k}, capacity={self.capacity}"


def _checked_parameters(experts: list[Any]) -> list[dict[str, nn.Parameter]]:
    """The parameters of each module. Raises unless they are of one architecture, and have parameters only."""
    where = "spt.nn.Experts"
    if not experts or not all(isinstance(m, nn.Module) for m in experts):
        need, mend = "a list of modules, an expert each", "[make_expert() for _ in range(8)]"
        raise SpecError.at(where, argument="experts", got=describe(experts), need=need, mend=mend)
    tables = [dict(m.named_parameters()) for m in experts]
    shapes = [{name: tuple(p.shape) for name, p in table.items()} for table in tables]
    kinds = [(repr(m), each) for m, each in zip(experts, shapes, strict=True)]
    different = next((kind for kind in kinds if kind != kinds[0]), None)
    if different is not None:
        raise LayoutError.at(
            where,
            argument="experts",
            got=f"{kinds[0][0]} with parameters {kinds[0][1]}, and {different[0]} with {different[1]}",
            need="modules of one architecture",
            mend="spt.functions.experts(x, scores, [modules of this worker], axis_name)",
        )
    buffer = next((name for m in experts for name, _ in m.named_buffers()), None)
    if buffer is not None:
        raise LayoutError.at(
            where,
            argument="experts",
            got=f"a module with the buffer {buffer!r}",
            need="modules without buffers, which would be of all experts",
            mend="spt.functions.experts(x, scores, [modules of this worker], axis_name)",
        )
    return tables
