"""Tensors outside of bodies whose blocks lie on the workers of a mesh."""

from spmd.bridge.torch.sharded_tensors import functions, operators  # noqa: F401
from spmd.bridge.torch.sharded_tensors.placing import put
from spmd.bridge.torch.sharded_tensors.tensor import ShardedTensor

__all__ = ["ShardedTensor", "put"]
