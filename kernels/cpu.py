"""Kernels for NumPy arrays."""

from __future__ import annotations

from functools import partial

import numpy as np

from spmd.kernels import shared

__all__ = ["combine", "log_softmax"]

combine = partial(shared.combine, np)
log_softmax = partial(shared.log_softmax, np)
