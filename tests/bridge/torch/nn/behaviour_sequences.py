"""Attention and recurrent layers, for the table of what every layer does."""

from __future__ import annotations

from spmd import P
from tests.bridge.torch.nn.module_cases import Case

AXES = {"model": 3}
FEATURES = {"w_spec": P("model")}
LAST = P(None, None, "model")


def _recurrent(name: str, states: int) -> list[Case]:
    """A layer, and its cell, of hidden features that are split unevenly."""
    made = {"input_size": 3, "hidden_size": 5}
    of_cell = (P(None, "model"),) * (states if states > 1 else 1)
    return [
        Case(name, made | {"num_layers": 2}, FEATURES, [(4, 2, 3)], [P()], (LAST,) * (1 + states), AXES),
        Case(f"{name}Cell", made, FEATURES, [(2, 3)], [P()], of_cell, AXES),
    ]


CASES = [
    Case(
        "MultiheadAttention",
        {"embed_dim": 6, "num_heads": 3, "kdim": 4, "vdim": 5},
        {"heads": ("model",)},
        [(3, 2, 6), (4, 2, 4), (4, 2, 5)],
        [P()] * 3,
        (P(), P()),
        {"model": 2},
    ),
    *_recurrent("RNN", 1),
    *_recurrent("LSTM", 2),
    *_recurrent("GRU", 1),
]
