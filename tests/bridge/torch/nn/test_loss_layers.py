"""Losses of `spt.nn` are torch's on one worker, however inputs lie."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from bridge.torch.nn.module_cases import Case, check_module, table  # noqa: E402
from spmd import Grid, Layout, P  # noqa: E402

pytestmark = pytest.mark.torch

AXES = {"data": 2, "model": 2}
F64 = torch.float64
CLASSES = torch.tensor([3, 0, 6, -100, 1])
PROBABILITIES = torch.rand(5, 7, generator=torch.Generator().manual_seed(1), dtype=F64)
WEIGHTS = torch.rand(7, generator=torch.Generator().manual_seed(2), dtype=F64) + 0.5
GRID = [3, 1, 0]
REDUCTIONS = ("mean", "sum", "none")
SPEC = P("data", "model")


def entries(name, *targets, spec=SPEC, reduction="mean", **options):
    lies = Layout.grid((5, 7), spec.dims, AXES, spec.workers) if isinstance(spec, Grid) else spec
    out = lies if reduction == "none" else P()
    return Case(name, {"reduction": reduction} | options, {"spec": spec}, targets, [lies, lies], out, AXES)


def rows(name, target=CLASSES, spec=SPEC, reduction="mean", **options):
    target_spec = P(*spec.dims[:1])
    out = target_spec if reduction == "none" else P()
    return Case(
        name, {"reduction": reduction} | options, {"spec": spec}, [(5, 7), target], [spec, target_spec], out, AXES
    )


X = (5, 7)
FORMS = [
    ("L1Loss", X, X, {}),
    ("MSELoss", X, X, {}),
    ("SmoothL1Loss", X, X, {"beta": 0.5}),
    ("HuberLoss", X, X, {"delta": 0.5}),
    ("BCELoss", PROBABILITIES, PROBABILITIES.flip(0), {"weight": WEIGHTS}),
    ("BCEWithLogitsLoss", X, PROBABILITIES, {"weight": WEIGHTS, "pos_weight": WEIGHTS.flip(0)}),
    ("BCEWithLogitsLoss", X, PROBABILITIES, {"weight": PROBABILITIES[:, :1]}),
    ("KLDivLoss", X, PROBABILITIES, {}),
    ("PoissonNLLLoss", X, PROBABILITIES, {"full": True}),
]


@table(
    *(entries(n, x, t, reduction=r, **o) for (n, x, t, o), r in itertools.product(FORMS, REDUCTIONS)),
    entries("KLDivLoss", X, PROBABILITIES, reduction="batchmean", log_target=True),
    entries("MSELoss", X, X, spec=Grid((3, 1), workers=GRID)),
    entries("MSELoss", X, X, spec=P(None, ("model", "data"))),
    *(
        rows(n, reduction=r, spec=s, weight=w)
        for n in ("CrossEntropyLoss", "NLLLoss")
        for r, s, w in itertools.product(REDUCTIONS, (SPEC, P("model")), (None, WEIGHTS))
    ),
    rows("CrossEntropyLoss", CLASSES.abs() % 7, label_smoothing=0.2, weight=WEIGHTS, ignore_index=1),
)
def test_losses(case):
    check_module(case)
