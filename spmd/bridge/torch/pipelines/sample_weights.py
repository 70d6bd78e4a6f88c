"""How losses of microbatches, which are tensors, count in that of the whole minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmd.autodiff import tree
from spmd.bridge.torch.tensor_state import state_of_tensor
from spmd.bridge.torch.worker_context import device_of
from spmd.mesh import WORKER
from spmd.operators.root import Rooted
from spmd.training.sample_weights import SampleWeights

__all__ = ["TensorWeights", "axes_of_batch", "axes_of_leaf"]


def axes_of_batch(batch: Any) -> frozenset[str]:
    """The axes along which the tensors of a batch vary."""
    return frozenset().union(*map(axes_of_leaf, tree.leaves(batch)))


def axes_of_leaf(x: Any) -> frozenset[str]:
    """The axes along which a tensor, or that of a Rooted value, varies."""
    block = x.block if type(x) is Rooted else x
    return frozenset(state_of_tensor(block).varying)


class TensorWeights(SampleWeights):
    """`SampleWeights` of losses that are tensors."""

    def _axes_of(self, x: Any) -> frozenset[str]:
        return axes_of_leaf(x)

    def _array(self, numbers: Sequence[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=device_of(WORKER.get()))

    def _weighted(self, value: torch.Tensor, share: torch.Tensor, counts: bool) -> torch.Tensor:
        weighted = value * share.to(value.dtype)
        return weighted if counts else torch.where(share == 0, torch.zeros_like(value), weighted)
