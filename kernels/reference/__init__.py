"""What every kernel computes, in a few lines of plain NumPy."""

from __future__ import annotations

from spmd.kernels.registry import lazy_getattr

__getattr__ = lazy_getattr(__name__, globals())
