"""Kernels for NumPy arrays."""

from __future__ import annotations

from spmd.kernels.registry import lazy_getattr

__getattr__ = lazy_getattr(__name__, globals())
