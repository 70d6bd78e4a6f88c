"""Losses entry by entry, on one block of NumPy or CuPy, as torch computes them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spmd.autodiff.registry import primitive

__all__ = [
    "absolute",
    "binary",
    "binary_of_logits",
    "huber",
    "kl_div",
    "poisson",
    "smooth_absolute",
    "square",
]


def absolute(x: Any, target: Any) -> Any:
    return np.abs(x - target)


def square(x: Any, target: Any) -> Any:
    return np.square(x - target)


def smooth_absolute(x: Any, target: Any, beta: float) -> Any:
    return absolute(x, target) if beta == 0 else huber(x, target, beta) / beta


def huber(x: Any, target: Any, delta: float) -> Any:
    distance = np.abs(x - target)
    return np.where(distance <= delta, 0.5 * distance * distance, delta * (distance - 0.5 * delta))


def _logs(x: Any) -> tuple[Any, Any]:
    """log(x) and log(1 - x), at least -100."""
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(x), -100), np.maximum(np.log1p(-x), -100)


def _binary_target(g: Any, _ans: Any, x: Any, _target: Any) -> Any:
    low, high = _logs(x)
    return g * (high - low)


@primitive(
    "binary_cross_entropy",
    lambda g, _ans, x, target: g * (x - target) / np.maximum((1 - x) * x, 1e-12),
    _binary_target,
)
def binary(x: Any, target: Any) -> Any:
    """Of probabilities; a logarithm is at least -100, as in torch."""
    low, high = _logs(x)
    return (target - 1) * high - target * low


def binary_of_logits(x: Any, target: Any, pos_weight: Any) -> Any:
    below = np.logaddexp(np.zeros((), x.dtype), -x)
    if pos_weight is not None:
        below = (1 + (pos_weight - 1) * target) * below
    return (1 - target) * x + below


def kl_div(x: Any, target: Any, log_target: bool) -> Any:
    if log_target:
        return np.exp(target) * (target - x)
    zero = target == 0
    entropy = target * np.log(np.where(zero, np.ones_like(target), target))
    return np.where(zero, np.zeros_like(target), entropy) - target * x


def poisson(x: Any, target: Any, log_input: bool, full: bool, eps: float) -> Any:
    loss = np.exp(x) - target * x if log_input else x - target * np.log(x + eps)
    if not full:
        return loss
    large = np.where(target > 1, target, np.ones_like(target))
    stirling = target * np.log(large) - target + 0.5 * np.log(2 * math.pi * large)
    return loss + np.where(target > 1, stirling, np.zeros_like(target))
