"""Losses entry by entry, on one block."""

from __future__ import annotations

import torch
from torch.nn import functional as F

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


def _promoted(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in one dtype, which torch wants of some losses."""
    dtype = torch.promote_types(x.dtype, target.dtype)
    return x.to(dtype), target.to(dtype)


def absolute(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.l1_loss(x, target, reduction="none")


def square(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(x, target, reduction="none")


def smooth_absolute(x: torch.Tensor, target: torch.Tensor, beta: float) -> torch.Tensor:
    return F.smooth_l1_loss(x, target, reduction="none", beta=beta)


def huber(x: torch.Tensor, target: torch.Tensor, delta: float) -> torch.Tensor:
    return F.huber_loss(*_promoted(x, target), reduction="none", delta=delta)


def binary(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of probabilities."""
    return F.binary_cross_entropy(*_promoted(x, target), reduction="none")


def binary_of_logits(x: torch.Tensor, target: torch.Tensor, pos_weight: torch.Tensor | None) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(x, target, reduction="none", pos_weight=pos_weight)


def kl_div(x: torch.Tensor, target: torch.Tensor, log_target: bool) -> torch.Tensor:
    return F.kl_div(x, target, reduction="none", log_target=log_target)


def poisson(x: torch.Tensor, target: torch.Tensor, log_input: bool, full: bool, eps: float) -> torch.Tensor:
    return F.poisson_nll_loss(x, target, log_input, full, eps=eps, reduction="none")
