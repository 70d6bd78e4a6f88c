"""Checks of losses: Invariant terms of a Varying loss, and Invariant losses that differ between workers."""

from __future__ import annotations

from typing import Any

import torch

from spmd.bridge.torch.function import CollectiveCall
from spmd.bridge.torch.interop import array_of
from spmd.bridge.torch.tensor_state import state_of_tensor
from spmd.mesh import WORKER
from spmd.operators.terms import is_share, warn_of_term
from spmd.operators.varying import verify

__all__ = ["verify_loss", "warn_of_invariant_terms"]

_ALIASES = ("AliasBackward0", "ViewBackward0", "ToCopyBackward0")
_ADDITIONS = ("AddBackward0", "SubBackward0", "RsubBackward1", "NegBackward0", *_ALIASES)


def warn_of_invariant_terms(loss: torch.Tensor) -> None:
    """Warn if a Varying loss has an Invariant term, which counts once per worker; see `spmd.operators.terms`."""
    worker = WORKER.get()
    if worker is None:
        return
    stack, seen = [loss.grad_fn], set()
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        call = getattr(node, "call", None)
        if isinstance(call, CollectiveCall) and call.scalar_term:
            count = worker.group(call.op.axes).size
            if count > 1 and not _is_share(node.next_functions[0][0], count):
                warn_of_term("backward of a loss", call.op.axes, count, worker)
                return
        elif node.name() in _ADDITIONS:
            stack += [parent for parent, _ in node.next_functions]


def verify_loss(loss: torch.Tensor) -> None:
    """Raise if an Invariant loss differs between workers. The result of a collective cannot."""
    worker = WORKER.get()
    if worker is None or not worker.tracked or isinstance(getattr(loss.grad_fn, "call", None), CollectiveCall):
        return
    axes = tuple(n for n in worker.mesh.axes if n not in state_of_tensor(loss).varying)
    verify(array_of(loss), axes, "a gradient in a body", "the differentiated scalar")


def _is_share(node: Any, count: int) -> bool:
    """Whether a term has been divided by the number of workers. node: its node in the graph, or None."""
    if node is None:
        return False
    while node.name() in _ALIASES:
        node = node.next_functions[0][0]
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, torch.Tensor) or other.ndim:
        return False
    return is_share(node.name().lower(), [float(other)], count)
