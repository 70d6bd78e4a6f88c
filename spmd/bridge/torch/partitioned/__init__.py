"""Tensors of which each worker holds a block, and the functions of torch on them."""

from spmd.bridge.torch.partitioned import elementwise, functions, reductions, views, wholes  # noqa: F401
