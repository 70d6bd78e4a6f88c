"""Training with sharded parameters and states, on one mesh, with the values that one worker gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd.lazy_imports import lazy_attributes
from spmd.optim.sharding import shard_specs
from spmd.training.accumulation import accumulate
from spmd.training.evaluation import evaluate
from spmd.training.gathered import gathered
from spmd.training.stage_costs import split_stages

if TYPE_CHECKING:
    from spmd.training.pipelines.pipeline import pipeline
    from spmd.training.pipelines.stage_specs import stage_specs

__all__ = ["accumulate", "evaluate", "gathered", "pipeline", "shard_specs", "split_stages", "stage_specs"]

if not TYPE_CHECKING:  # Type checkers report misspelt names themselves.
    __getattr__, __dir__ = lazy_attributes(
        __name__,
        {
            "spmd.training.pipelines.pipeline": ("pipeline",),
            "spmd.training.pipelines.stage_specs": ("stage_specs",),
        },
    )
