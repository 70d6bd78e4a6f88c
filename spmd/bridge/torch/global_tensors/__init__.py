"""Tensors of bodies that stand for the whole, and the functions of torch on them."""

from spmd.bridge.torch.global_tensors import (  # noqa: F401
    contractions,
    gradients,
    layers,
    losses,
    module_hooks,
    multihead,
    norms,
    pointwise,
    reductions,
    views,
)
from spmd.bridge.torch.global_tensors.registry import HANDLERS, functions_named, outside_vmap
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor, global_tensor
from spmd.bridge.torch.partitioned.registry import BESIDE_WHOLES, FUNCTIONS, LAYERS

__all__ = ["GlobalTensor", "global_tensor"]

# Layers whose parameters lie in blocks are called so whatever x is.
_LAYERS = """
    linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d embedding
    batch_norm layer_norm rms_norm group_norm instance_norm
    multi_head_attention_forward _weight_norm
"""
LAYERS |= {*functions_named(_LAYERS)}
FUNCTIONS |= {function: outside_vmap(HANDLERS[function]) for function in LAYERS}
_OPERATORS = {function for function in HANDLERS if function not in FUNCTIONS} | {*functions_named("matmul __matmul__")}
BESIDE_WHOLES |= {function: HANDLERS[function] for function in _OPERATORS}
