"""Units of a sharded module: parts of it whose parameters are gathered, computed with and released together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spmd.bridge.torch.global_tensors.tensor import GlobalTensor
from spmd.bridge.torch.sharding.blocks import WHERE, ShardedParameter
from spmd.bridge.torch.tensor_state import is_partitioned
from spmd.errors import StateError

__all__ = ["Unit"]


class Unit:
    """A part of a module whose parameters are gathered together.

    name: of the module. parameters: those that are gathered for it. depth: how many calls of it run. unsummed: whether
    backwards that sent nothing (`no_sync`) left gradients of its parameters.
    """

    def __init__(self, name: str, module: nn.Module, parameters: list[ShardedParameter]):
        self.name = name or type(module).__name__
        self.module = module
        self.parameters = parameters
        self.depth = 0
        self.unsummed = False

    @contextmanager
    def replaced(self, wholes: list[Any], tracked: bool) -> Iterator[None]:
        """The module with wholes in place of its parameters. tracked: whether tensors carry states.

        What the module has in place of a parameter by now stays. Raises StateError where its gradient would be wrong.
        """
        replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        flat: list[tuple[nn.Module, Any]] = []
        try:
            for q, whole in zip(self.parameters, wholes, strict=True):
                for module, name in q.slots:
                    own = module._parameters.get(name)
                    if own is not q.p and own is not None and not tracked:
                        _check_replaced(q.name, own)
                    if own is q.p:
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


def _check_replaced(name: str, own: torch.Tensor) -> None:
    """Raise for a tensor that came in place of a sharded parameter, in a body without states, unless it is a whole
    that is not trained."""
    if is_partitioned(own) or isinstance(own, GlobalTensor) or (own.requires_grad and torch.is_grad_enabled()):
        raise StateError.at(
            f"a module of {WHERE}",
            argument=name,
            got="another tensor than the parameter that was sharded, in a map with check=False: nobody gathers it, or "
            "sums its gradient",
            need="the parameter itself, with new values",
            mend=f"with torch.no_grad(): parameter.copy_(values); or replace it before {WHERE}",
        )
