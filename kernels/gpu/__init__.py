"""Kernels for CuPy arrays; imported when one appears."""

from __future__ import annotations

from spmd.kernels.registry import finder

__getattr__ = finder(__name__, globals())
