"""Minibatches: which samples each worker takes in which step, and reading them ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd.data.loader import Loader
from spmd.data.sampler import Sampler
from spmd.lazy_imports import lazy_attributes

__all__ = ["Loader", "Sampler"]

if not TYPE_CHECKING:  # Type checkers report misspelt names themselves.
    __getattr__, __dir__ = lazy_attributes(__name__, {})
