"""Kernels for NumPy arrays."""

from __future__ import annotations

from functools import partial

import numpy as np

from spmd.kernels import shared

__all__ = ["combine", "log_softmax", "softmax_cross_entropy"]

combine = partial(shared.combine, np)
log_softmax = partial(shared.log_softmax, np)
softmax_cross_entropy = partial(shared.softmax_cross_entropy, np)
