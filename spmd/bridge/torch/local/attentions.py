"""Attention on one block, and the rule of attention whose keys go round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd.bridge.torch.frontend import FRONTEND
from spmd.bridge.torch.function import apply
from spmd.bridge.torch.tensor_state import plain
from spmd.bridge.torch.thread_settings import without_autocast
from spmd.bridge.torch.worker_context import context_of
from spmd.functions import attention_tiles as tiles
from spmd.mesh import WORKER
from spmd.operators.permute import Permute

__all__ = ["attend", "attend_adjoint", "library", "ruled"]

_SHORT = (torch.float16, torch.bfloat16)


def library(x: torch.Tensor) -> tiles.Library:
    """The arithmetic for tensors."""
    return tiles.Library(
        FRONTEND.namespace,
        lambda shape, like: like.new_zeros(shape),
        lambda a: a.to(torch.float32) if a.dtype in _SHORT else a,
        lambda a, dtype: a.to(dtype),
        FRONTEND.where,
    )


def attend(q, k, v, bias, mask, *, part: tiles.Part) -> tuple[torch.Tensor, torch.Tensor]:
    """See `attention_tiles.attend`."""
    return tiles.attend(library(q), q, k, v, bias, mask, part)


def attend_adjoint(q, k, v, bias, mask, lse, delta, g, *, part: tiles.Part) -> Sequence[Any]:
    """See `attention_tiles.attend_adjoint`. Where autograd records by `attention_tiles.potential`."""
    arrays = (q, k, v) if bias is None else (q, k, v, bias)
    if not torch.is_grad_enabled() or not any(a.requires_grad for a in (*arrays, lse, delta, g)):
        return tiles.attend_adjoint(library(q), q, k, v, bias, mask, lse, delta, g, part)[: len(arrays)]
    # Views: of tensors that depend on one another, only this use is differentiated.
    own = [a.view_as(a) if a.requires_grad else a.detach().requires_grad_() for a in arrays]
    lib = library(q)
    q, k, v, bias = (*own, None)[:4]
    total = tiles.potential(lib, q, k, v, bias, mask, lse, delta, g, part)
    return torch.autograd.grad(total, own, create_graph=True)


class _Attention(torch.autograd.Function):
    """The results of layer.forward, with the cotangents of layer.backward."""

    @staticmethod
    def forward(layer: Any, send: Any, *operands: torch.Tensor | None) -> Any:
        return layer.forward(send, *(None if a is None else plain(a) for a in operands))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.layer, ctx.send = inputs[:2]
        ctx.save_for_backward(*inputs[2:], *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        saved = [None if a is None else plain(a) for a in ctx.saved_tensors]
        with without_autocast():
            found = ctx.layer.backward(ctx.send, *saved, *map(plain, cotangents))
        return (None, None, *found, *[None] * (5 - len(found)))


def _sender() -> Callable[[Permute, torch.Tensor], torch.Tensor] | None:
    """What sends tensors by an operator, also in a backward pass that runs elsewhere; None outside of bodies."""
    worker = WORKER.get()
    if worker is None:
        return None
    context = context_of(worker)
    return lambda op, x: apply(op, x, context)


def ruled(layer: Any, q, k, v, bias, mask) -> torch.Tensor:
    """The first result of layer.forward, whose cotangents are by layer.backward."""
    result: Any = _Attention.apply(layer, _sender(), q, k, v, bias, mask)
    return result[0]
