"""Optimisers, learning rates and clipping, as pure functions on pytrees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd.lazy_imports import lazy_attributes
from spmd.optim.averages import EMAState, ema
from spmd.optim.clipping import clip_by_global_norm, clipped
from spmd.optim.grouping import frozen, groups
from spmd.optim.mixed_precision import MixedPrecisionState, mixed_precision
from spmd.optim.optimizers import AdamState, Optimizer, SGDState, adam, adamw, sgd
from spmd.optim.schedules import constant, cosine, linear, one_cycle, step_decay
from spmd.optim.sharded import shard

__all__ = [
    "AdamState",
    "EMAState",
    "MixedPrecisionState",
    "Optimizer",
    "SGDState",
    "adam",
    "adamw",
    "clip_by_global_norm",
    "clipped",
    "constant",
    "cosine",
    "ema",
    "frozen",
    "groups",
    "linear",
    "mixed_precision",
    "one_cycle",
    "sgd",
    "shard",
    "step_decay",
]

if not TYPE_CHECKING:  # Type checkers report misspelt names themselves.
    __getattr__, __dir__ = lazy_attributes(__name__, {})
