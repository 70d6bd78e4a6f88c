"""Dropout, softmax and losses, for the table of what every layer does."""

from __future__ import annotations

import torch

from bridge.torch.nn.module_cases import Case
from spmd import P

ROWS = {"data": 3}
X = P("data")


def _dropout(name: str, shape: tuple[int, ...]) -> Case:
    """Without draws, as torch would draw other numbers."""
    return Case(name, {"p": 0.0}, {"spec": X}, [shape], [X], X, ROWS)


def _loss(name: str, *shapes: object, **options: object) -> Case:
    return Case(name, options, {"spec": X}, shapes, [X, X], P(), ROWS)


def _softmax(name: str, *shape: int, **options: object) -> Case:
    spec = P(None, "data")
    return Case(name, options, {"spec": spec}, [shape], [spec], spec, ROWS)


_PROBABILITIES = torch.linspace(0.05, 0.45, 20, dtype=torch.float64).reshape(4, 5)
_CLASSES = torch.tensor([2, 0, 4, 1])

CASES = [
    _dropout("Dropout", (4, 3)),
    _dropout("Dropout1d", (4, 3, 2)),
    _dropout("Dropout2d", (4, 3, 2, 2)),
    _dropout("Dropout3d", (4, 3, 2, 2, 1)),
    _dropout("AlphaDropout", (4, 3)),
    _dropout("FeatureAlphaDropout", (4, 3, 2)),
    *(_softmax(name, 2, 5, 3, dim=1) for name in ("Softmax", "LogSoftmax", "Softmin")),
    _softmax("Softmax2d", 2, 4, 3, 2),
    _loss("L1Loss", (4, 5), (4, 5)),
    _loss("MSELoss", (4, 5), (4, 5)),
    _loss("SmoothL1Loss", (4, 5), (4, 5), beta=0.5),
    _loss("HuberLoss", (4, 5), (4, 5), delta=0.7),
    _loss("BCELoss", _PROBABILITIES, _PROBABILITIES.flip(0).square()),
    _loss("BCEWithLogitsLoss", (4, 5), _PROBABILITIES),
    _loss("KLDivLoss", (4, 5), _PROBABILITIES, reduction="batchmean"),
    _loss("PoissonNLLLoss", (4, 5), _PROBABILITIES),
    _loss("CrossEntropyLoss", (4, 5), _CLASSES, label_smoothing=0.1),
    _loss("NLLLoss", (4, 5), _CLASSES),
]
