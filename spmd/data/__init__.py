"""Samples for training: in which order workers take them, and their loading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd.lazy_imports import lazy_attributes

__all__: list[str] = []

if not TYPE_CHECKING:  # Type checkers report misspelt names themselves.
    __getattr__, __dir__ = lazy_attributes(__name__, {})
