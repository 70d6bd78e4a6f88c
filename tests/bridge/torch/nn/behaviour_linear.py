"""Linear layers and embeddings, for the table of what every layer does."""

from __future__ import annotations

import torch

from bridge.torch.nn.module_cases import Case
from spmd import P

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
    Case(
        "Embedding",
        {"num_embeddings": 7, "embedding_dim": 3, "padding_idx": 2},
        {"w_spec": P("model")},
        [torch.tensor([[1, 2, 6], [0, 1, 1]])],
        [P()],
        P(),
        {"model": 3},
    ),
]
