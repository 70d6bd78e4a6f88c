"""Cross-entropies row by row, on one block. The classes are in the last dimension."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from spmd.bridge.torch.local.softmaxes import top
from spmd.operators.reduce import pmax, psum

__all__ = ["chosen", "class_sums", "log_total", "of_classes", "of_distributions", "row_weights", "weights_at"]

Weight = torch.Tensor | None


def of_classes(
    x: torch.Tensor, labels: torch.Tensor, weight: Weight, ignore: int | None, smoothing: float
) -> tuple[torch.Tensor, Weight]:
    """The loss of each row, and its weight in a mean; None: 1. Labels are in range, or ignored."""
    labels = labels.long()
    rows = x if x.ndim < 3 else x.movedim(-1, 1)
    own = weight if weight is None else weight.to(x.dtype)
    index = -100 if ignore is None else ignore
    loss = F.cross_entropy(rows, labels, own, ignore_index=index, reduction="none", label_smoothing=smoothing)
    return loss, row_weights(labels, weight, ignore, loss)


def of_distributions(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """-sum(t * log_softmax(x)) of each row."""
    return -(t.to(x.dtype) * F.log_softmax(x, -1)).sum(-1)


def row_weights(labels: torch.Tensor, weight: Weight, ignore: int | None, like: torch.Tensor) -> Weight:
    """The weight of each row in a mean; None: 1."""
    if weight is None and ignore is None:
        return None
    counted = torch.ones_like(labels, dtype=torch.bool) if ignore is None else labels != ignore
    if weight is None:
        return counted.to(torch.promote_types(like.dtype, torch.float32))
    return weights_at(weight, torch.where(counted, labels, -1))


def weights_at(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The weights that ids name; 0 for -1."""
    return chosen(weight.expand(*ids.shape, len(weight)), ids)


def chosen(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """x[label] of each row; 0 where the label is none of these classes."""
    n = x.shape[-1]
    if not n:
        return x.sum(-1)
    own, column = (labels >= 0) & (labels < n), labels.long().clamp(0, n - 1).unsqueeze(-1)
    return x.gather(-1, column).squeeze(-1).masked_fill(~own, 0)


def class_sums(x: torch.Tensor, top: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """sum(exp(x - top)), x[label], sum(x): by row, along a new first axis."""
    return torch.stack([(x - top.unsqueeze(-1)).exp().sum(-1), chosen(x, labels), x.sum(-1)])


def log_total(x: torch.Tensor, names: tuple[str, ...], _where: str) -> torch.Tensor:
    """log(sum(exp(x))) of rows that are split over workers."""
    x = x.float() if x.dtype.itemsize < 4 else x
    largest = pmax(top(x), names)
    base = largest.masked_fill(largest.isinf(), 0)
    return psum((x - base.unsqueeze(-1)).exp().sum(-1), names).log() + base
