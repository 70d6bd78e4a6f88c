"""Layers of linear families, for the table of what every layer does."""

from __future__ import annotations

from spmd import P
from tests.bridge.torch.nn.module_cases import Case

CASES = [
    Case(
        "Linear",
        {"in_features": 7, "out_features": 5},
        {"w_spec": P("model")},
        [(3, 7)],
        [P()],
        P(None, "model"),
        {"model": 3},
    ),
]
