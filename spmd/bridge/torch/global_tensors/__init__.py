"""Tensors of bodies that stand for the whole, and the functions of torch on them."""

from spmd.bridge.torch.global_tensors import contractions, layers, pointwise, reductions, views  # noqa: F401
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor, global_tensor

__all__ = ["GlobalTensor", "global_tensor"]
