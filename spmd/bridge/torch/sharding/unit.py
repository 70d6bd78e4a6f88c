"""Units of a sharded module: parts of it whose parameters are gathered, computed with and released together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spmd.bridge.torch.partitioned.tensor import _FromBlockFunction
from spmd.bridge.torch.replicas import to_be_declared
from spmd.bridge.torch.sharding.blocks import ShardedParameter, block_gradient
from spmd.bridge.torch.sharding.functions import connect
from spmd.bridge.torch.sharding.traffic import GradientSums
from spmd.bridge.torch.tensor import with_state
from spmd.bridge.torch.tensor_state import INVARIANT
from spmd.mesh import Worker

if TYPE_CHECKING:
    from spmd.bridge.torch.sharding.sharding import Sharding

__all__ = ["Unit"]


class Unit:
    """A part of a module whose parameters are gathered together.

    name: of the module. parameters: those that are gathered for it. depth: how many calls of it run. accumulated: this
    worker's own gradients of wholes, by number, of backwards that sent nothing (`no_sync`).
    """

    def __init__(self, name: str, module: nn.Module, parameters: list[ShardedParameter]):
        self.name = name or type(module).__name__
        self.module = module
        self.parameters = parameters
        self.depth = 0
        self.accumulated: dict[int, torch.Tensor] = {}

    @contextmanager
    def replaced(self, wholes: list[Any]) -> Iterator[None]:
        """The module with wholes in place of its parameters."""
        replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        flat: list[tuple[nn.Module, Any]] = []
        try:
            for q, whole in zip(self.parameters, wholes, strict=True):
                for module, name in q.slots:
                    if module._parameters.get(name) is q.p:
                        module._parameters[name] = whole
                        replaced.append((module._parameters, name, whole, q.p))
            for module in {id(m): m for q in self.parameters for m, _ in q.slots if isinstance(m, nn.RNNBase)}.values():
                flat.append((module, module._flat_weights))
                module._flat_weights = [getattr(module, n, None) for n in module._flat_weights_names]
            yield
        finally:
            for parameters, name, whole, original in replaced:
                if parameters.get(name) is whole:
                    parameters[name] = original
            for module, weights in flat:
                module._flat_weights = weights


class Call:
    """One call of a unit, from its forward to its backward.

    summed: whether the cotangents are sums over the workers already. sums: of the backward that runs.
    """

    def __init__(self, sharding: Sharding, unit: Unit, summed: bool):
        self.sharding = sharding
        self.unit = unit
        self.summed = summed
        self.sums: GradientSums | None = None
        self.results: list[Any] = []

    def wholes(self, worker: Worker, data: list[torch.Tensor]) -> list[Any]:
        """The wholes, of these data, as the module gets them: with history, and with their state."""
        parameters, sharding = self.unit.parameters, self.sharding
        if torch.is_grad_enabled() and any(q.p.requires_grad for q in parameters):
            made = list(connect(self, [q.p for q in parameters], data))
        else:
            made = [w.detach() for w in data]
        state = INVARIANT if self.summed else sharding.state
        wholes: list[Any] = []
        for q, w in zip(parameters, made, strict=True):
            whole: Any = w
            if q.base is not None and q.base.layout.varying:
                whole = _FromBlockFunction.apply(w, q.base, state if worker.tracked else INVARIANT, q.outer_shape)
            elif worker.tracked:
                whole = with_state(w.view(q.outer_shape), state)
            if not self.summed:
                self._mark(q, whole, worker)
            wholes.append(whole)
        return wholes

    def _mark(self, q: ShardedParameter, whole: Any, worker: Worker) -> None:
        """Note that the gradients of a whole are summed after backward, not by the adjoint of varying it."""
        if not worker.tracked:
            whole._block_of = id(self.sharding)
            return
        whole.replica = True
        if q.name in self.sharding.undeclared:
            to_be_declared(whole, self.sharding.undeclared[q.name])

    # Backward

    def sum_gradients(self, cotangents: list[torch.Tensor | None]) -> None:
        """Start to sum the cotangents of the wholes, and release the wholes."""
        self.sharding.sum_gradients(self, cotangents)

    def gradients(self) -> list[Any]:
        """The gradients of the blocks, once they are there."""
        self.complete()
        results, self.results = self.results, []
        return [None if g is None else block_gradient(q, g) for q, g in zip(self.unit.parameters, results, strict=True)]

    def complete(self) -> None:
        """Wait for the sums."""
        if self.sums is not None:
            self.results, self.sums = self.sums.wait(), None
