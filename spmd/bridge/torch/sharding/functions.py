"""The nodes of autograd between the blocks of a unit's parameters and their wholes.

`Gather` gives the wholes. Its backward runs when the cotangents of all wholes of a unit are there, and starts their sum
over workers. `Blocks` stands between `Gather` and the parameters. Its backward waits for the sums, and runs when
nothing else is left to run, so that sums overlap with the backward of other units.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from spmd.bridge.torch.function import Function
from spmd.bridge.torch.tensor_state import no_overrides, plain

__all__ = ["UnitCall", "connect"]


class UnitCall(Protocol):
    """One call of a unit, from its forward to its backward."""

    def sum_gradients(self, cotangents: list[torch.Tensor | None]) -> None:
        """Start to sum the cotangents of the wholes."""
        ...

    def gradients(self) -> list[Any]:
        """The gradients of the blocks of the parameters."""
        ...


class _Blocks(Function):
    """A number in place of the blocks, through which their gradients pass."""

    @staticmethod
    def forward(ctx: Any, call: UnitCall, *parameters: Any) -> torch.Tensor:
        ctx.call = call
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return None, *ctx.call.gradients()


class _Gather(Function):
    """The wholes of a unit. They are there already."""

    @staticmethod
    def forward(ctx: Any, call: UnitCall, differentiated: list[bool], link: torch.Tensor, *wholes: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        results = tuple(w.detach() for w in wholes)
        ctx.mark_non_differentiable(*(w for w, d in zip(results, differentiated, strict=True) if not d))
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        ctx.call.sum_gradients([None if g is None else plain(g) for g in cotangents])
        return None, None, torch.zeros(()), *[None] * len(cotangents)


def connect(call: UnitCall, parameters: list[Any], wholes: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The wholes of parameters, whose gradients reach the parameters through this call of a unit."""
    with no_overrides():
        link = _Blocks.apply(call, *parameters)
        if link.grad_fn is not None:
            link.grad_fn._set_sequence_nr(0)  # backward runs it last
        return _Gather.apply(call, [p.requires_grad for p in parameters], link, *wholes)
