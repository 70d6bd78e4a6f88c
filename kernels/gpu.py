"""Kernels for CuPy arrays; imported when a CuPy array appears."""

from __future__ import annotations

from functools import partial

import cupy as cp

from spmd.kernels import shared

__all__ = ["combine", "log_softmax", "softmax_cross_entropy"]

combine = partial(shared.combine, cp)
log_softmax = partial(shared.log_softmax, cp)
softmax_cross_entropy = partial(shared.softmax_cross_entropy, cp)
