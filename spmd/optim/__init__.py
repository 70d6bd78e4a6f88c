"""Optimisers, learning rates and clipping, as pure functions on pytrees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd.lazy_imports import lazy_attributes
from spmd.optim.clipping import clip_by_global_norm
from spmd.optim.optimizers import AdamState, Optimizer, SGDState, adam, adamw, sgd
from spmd.optim.schedules import cosine, linear
from spmd.optim.sharded import shard

__all__ = [
    "AdamState",
    "Optimizer",
    "SGDState",
    "adam",
    "adamw",
    "clip_by_global_norm",
    "cosine",
    "linear",
    "sgd",
    "shard",
]

if not TYPE_CHECKING:  # Type checkers report misspelt names themselves.
    __getattr__, __dir__ = lazy_attributes(__name__, {})
