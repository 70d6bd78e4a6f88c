"""Plans: modules of torch as they are, split by styles for patterns of their names."""

from spmd.bridge.torch.plans.parallelize import distribute_module, parallelize
from spmd.bridge.torch.plans.styles import Style, column, heads, row, sequence, spatial, vocab, whole

__all__ = [
    "Style",
    "column",
    "distribute_module",
    "heads",
    "parallelize",
    "row",
    "sequence",
    "spatial",
    "vocab",
    "whole",
]
