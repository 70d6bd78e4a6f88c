"""Units of a sharded module: parts of it whose parameters are gathered, computed with and released together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spmd.bridge.torch.sharding.blocks import ShardedParameter

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
