"""Plans: modules of torch as they are, split by styles for patterns of their names."""

from spmd.bridge.torch.plans.parallelize import distribute_module, parallelize
from spmd.bridge.torch.plans.report import PlanReport, plan_report
from spmd.bridge.torch.plans.styles import Style, column, heads, row, sequence, spatial, vocab, whole

__all__ = [
    "PlanReport",
    "Style",
    "column",
    "distribute_module",
    "heads",
    "parallelize",
    "plan_report",
    "row",
    "sequence",
    "spatial",
    "vocab",
    "whole",
]
