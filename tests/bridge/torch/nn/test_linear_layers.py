"""`spt.nn.Linear` is `nn.Linear`, however x, the weights and the result lie."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from bridge.torch.nn.module_cases import Case, check_module, table
from spmd import Grid, Layout, P

pytestmark = pytest.mark.torch

FOUR = {"data": 2, "model": 2}
THREE = {"model": 3}


def grid(shape, dims, workers, axes):
    return Layout.grid(shape, dims, axes, workers)


@table(
    Case("Linear", {"in_features": 7, "out_features": 5}, {}, [(3, 7)], [P()], P(), THREE),
    Case(
        "Linear",
        {"in_features": 7, "out_features": 5},
        {"w_spec": P("model")},
        [(3, 7)],
        [P()],
        P(None, "model"),
        THREE,
    ),
    Case(
        "Linear",
        {"in_features": 7, "out_features": 5, "bias": False},
        {"w_spec": P(None, "model")},
        [(2, 3, 7)],
        [P(None, None, "model")],
        P(),
        THREE,
    ),
    Case(
        "Linear",
        {"in_features": 6, "out_features": 5},
        {"spec": P("data", "model"), "w_spec": P(None, "model"), "out_spec": P(("data", "model"))},
        [(7, 6)],
        [P("data", "model")],
        P(("data", "model")),
        FOUR,
    ),
    Case(
        "Linear",
        {"in_features": 6, "out_features": 5},
        {"spec": Grid((1, 3), workers=[3, 0, 2]), "w_spec": Grid((2, 2)), "out_spec": Grid((2, 1), workers=[1, 3])},
        [(7, 6)],
        [grid((7, 6), (1, 3), [3, 0, 2], FOUR)],
        grid((7, 5), (2, 1), [1, 3], FOUR),
        FOUR,
    ),
)
def test_linear(case):
    check_module(case)
