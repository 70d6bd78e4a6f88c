"""Kernels for CuPy arrays; imported when a CuPy array appears."""

from __future__ import annotations

from functools import partial

import cupy as cp

from spmd.kernels import shared

__all__ = ["combine", "log_softmax"]

combine = partial(shared.combine, cp)
log_softmax = partial(shared.log_softmax, cp)
