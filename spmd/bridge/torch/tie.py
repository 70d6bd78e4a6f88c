"""`tie`: let the backward of a loss run through other outputs too."""

from __future__ import annotations

from typing import Any

import torch

from spmd.bridge.torch.function import Function
from spmd.bridge.torch.tensor import with_state
from spmd.bridge.torch.tensor_state import plain, state_of_tensor
from spmd.mesh import WORKER
from spmd.tracebacks import api_boundary

__all__ = ["tie"]


class Nothing(Function):
    """A tensor without entries, whose backward reaches another with a cotangent of zero."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x,) = inputs
        ctx.like = x.shape, x.dtype, x.device

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        shape, dtype, device = ctx.like
        return Tie.apply(torch.zeros(shape, dtype=dtype, device=device), g)

    @staticmethod
    def jvp(ctx: Any, tangent: Any) -> Any:
        return tangent.new_zeros(0)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
        return Nothing.apply(x), None


class Tie(Function):
    """The first tensor; backward reaches the others too, which have no entries. It asks for a tensor that forward has
    saved, so that a checkpoint around it recomputes where other workers' do."""

    @staticmethod
    def forward(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return first.view_as(first)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        others = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return g, *(x.new_zeros(0) for x in others)
        return g, *(Tie.apply(x.new_zeros(0), Nothing.apply(g), *others) for x in others)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *others: Any) -> Any:
        return tangent.view_as(tangent) if tangent is not None else None

    @staticmethod
    def vmap(info: Any, in_dims: Any, first: torch.Tensor, *others: torch.Tensor) -> Any:
        return Tie.apply(first, *others), in_dims[0]


@api_boundary
def tie(loss: torch.Tensor, *outputs: torch.Tensor) -> torch.Tensor:
    """The loss, whose backward runs through the outputs too, with cotangents of zero.

    If only some workers compute a loss, or use an output of a collective, their graphs differ. Then backward would
    wait for collectives that other workers never reach. If the outputs are tied to the loss on every worker, backward
    reaches the same collectives on all.

    loss: a tensor; on a worker without a loss of its own `torch.zeros(())`. outputs: tensors of its graph, or none.
    Forward: the loss. Gradient: g to the loss, exact zeros to each output, even if the outputs hold infinities.

        >>> def body(x):
        ...     total = spt.psum(x.sum(), "x")
        ...     loss = total * 2 if spt.is_main() else torch.zeros(())
        ...     return spt.tie(loss, total)  # backward of all workers reaches the same collectives
        >>> with spmd.Mesh(x=2):
        ...     spt.map(body, P("x"), None, check=False)(torch.ones(4))
        tensor(8.)
    """
    tied = Tie.apply(plain(loss), *(Nothing.apply(plain(x)) for x in outputs))
    worker = WORKER.get()
    return with_state(tied, state_of_tensor(loss)) if worker is not None and worker.tracked else tied
