"""Checks of functions of torch that write into buffers or weights: they raise where that would mix states.

torch's batch norms write the statistics of this worker's entries into buffers that count as one value on all workers.
So their data may not vary along an axis along which the buffers do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from spmd.bridge.torch.call_arguments import argument
from spmd.bridge.torch.tensor import CALL_CHECKS, Tensor, check_write
from spmd.bridge.torch.tensor_state import state_of_tensor
from spmd.errors import StateError, describe

__all__ = ["check_statistics"]


_BUFFERS = ("running_mean", "running_var")


def check_statistics(where: str, x: Any, *buffers: torch.Tensor | None, takes_spec: bool = False) -> None:
    """Raise if x varies along axes along which not all of the buffers do. Without buffers, along any axis.

    takes_spec: the norm is a module of `spt.nn`, which takes the layout of x.
    """
    varying = [state_of_tensor(b).varying for b in buffers if b is not None]
    axes = sorted(state_of_tensor(x).varying.difference(frozenset.intersection(*varying) if varying else ()))
    if not axes:
        return
    axis = repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))
    if takes_spec:
        mend = (
            f"{where}(..., spec=P(...)), with {axis} in the dimension of x that it splits, takes those of all workers; "
            "module.eval() takes the running statistics as they are"
        )
    else:
        mend = (
            f"y, running = spt.functions.batch_norm(x, weight, bias, running, spec=P({axis})), with the axes "
            "that split x, takes those of all workers and gives the new ones; module.eval() takes the running "
            "statistics as they are; where each worker has channels of its own, declare the buffers: "
            f"bn.running_mean = spt.varying(bn.running_mean, {axis}), and bn.running_var"
        )
    raise StateError.at(
        where,
        argument="input",
        got=f"{describe(x)} in training: the statistics would be those of this worker's entries alone, in buffers "
        "that count as one value on all workers",
        need=f"statistics of all workers' entries along {axis}, or buffers that vary along it",
        mend=mend,
    )


def _batch_norm(mean: int, weight: int) -> Callable[[Callable, Any, dict], None]:
    """The rule of a batch norm whose running mean and weight are at these places."""

    def rule(func: Callable, args: Any, kwargs: dict) -> None:
        if argument(args, kwargs, 5, "training", False):
            buffers = [argument(args, kwargs, mean + k, name) for k, name in enumerate(_BUFFERS)]
            if buffers[0] is None:
                buffers = [argument(args, kwargs, weight, "weight")]
            check_statistics(f"torch.{func.__name__}", argument(args, kwargs, 0, "input"), *buffers)

    return rule


def _instance_norm(mean: int) -> Callable[[Callable, Any, dict], None]:
    def rule(func: Callable, args: Any, kwargs: dict) -> None:
        buffers = [argument(args, kwargs, mean + k, name) for k, name in enumerate(_BUFFERS)]
        if buffers[0] is not None and argument(args, kwargs, 5, "use_input_stats", True):
            check_statistics(f"torch.{func.__name__}", argument(args, kwargs, 0, "input"), *buffers)

    return rule


def _embedding(func: Callable, args: Any, kwargs: dict) -> None:
    """Rows that are longer than max_norm are scaled in place: those that this worker's indices name. Gradients that
    are scaled by how often an index occurs would be scaled by how often it does on this worker."""
    indices, weight = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
    if argument(args, kwargs, 5, "scale_grad_by_freq", False) and state_of_tensor(indices) is not state_of_tensor(
        weight
    ):
        raise StateError.at(
            f"torch.{func.__name__}",
            argument="scale_grad_by_freq",
            got=f"True, for {describe(indices)}",
            need="counts of the indices of all workers",
            mend="scale_grad_by_freq=False, and weight.grad divided by spt.psum of torch.bincount of the indices",
        )
    if argument(args, kwargs, 3, "max_norm") is not None:
        state = state_of_tensor(weight) | state_of_tensor(indices)
        if state is not state_of_tensor(weight):
            check_write(func, weight, state)


CALL_CHECKS.update(
    {
        F.batch_norm: _batch_norm(1, 3),
        torch.batch_norm: _batch_norm(3, 1),
        torch.native_batch_norm: _batch_norm(3, 1),
        F.instance_norm: _instance_norm(1),
        torch.instance_norm: _instance_norm(3),
        F.embedding: _embedding,
        F.embedding_bag: _embedding,
    }
)


def _refusing(forward: Callable) -> Callable:
    """torch's own would synchronise over torch.distributed, or use the entries of this worker only."""

    @functools.wraps(forward)
    def call(self: Any, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, Tensor) and (self.training or self.running_mean is None):
            check_statistics("torch.nn.SyncBatchNorm", input)
        return forward(self, input)

    return call


nn.SyncBatchNorm.forward = _refusing(nn.SyncBatchNorm.forward)
