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

__all__ = ["TensorWeights", "axes_of_batch"]


def axes_of_batch(batch: Any) -> frozenset[str]:
    """The axes along which the tensors of a batch vary."""
    blocks = [leaf.block if type(leaf) is Rooted else leaf for leaf in tree.leaves(batch)]
    return frozenset().union(*[state_of_tensor(x).varying for x in blocks if isinstance(x, torch.Tensor)])


class TensorWeights(SampleWeights):
    """`SampleWeights` of losses that are tensors."""

    def _axes_of(self, x: Any) -> frozenset[str]:
        return frozenset(state_of_tensor(x).varying)

    def _array(self, numbers: Sequence[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=device_of(WORKER.get()))

    def _weighted(self, value: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        return torch.where(share == 0, torch.zeros_like(value), value * share.to(value.dtype))
