"""Kernels for NumPy arrays."""

from __future__ import annotations

from spmd.kernels.registry import finder

__getattr__ = finder(__name__, globals())
