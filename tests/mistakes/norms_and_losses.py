"""Mistakes with norms, losses and dropout."""

from __future__ import annotations

import numpy as np

import spmd
from mistakes import D, Row, X, here, run
from spmd import P, functions
from spmd.errors import LayoutError, SpecError, StateError

IMAGES = np.arange(24.0).reshape(2, 3, 4)
KEY = spmd.random.key(0)


def _norm(argument: str, name: str, call, got: str, need: str, mend: str, error: type[Exception] = SpecError) -> Row:
    return Row(f"{name}: {got}", call, error, f"spmd.functions.{name}: argument {argument}", got, need, mend)


ROWS = [
    _norm(
        "weight",
        "layer_norm",
        lambda: functions.layer_norm(X, np.ones(3)),
        "ndarray float64[3]",
        "shape [2]",
        "weight=None",
    ),
    _norm(
        "weight",
        "batch_norm",
        lambda: run(lambda x: functions.batch_norm(x, np.ones(3), spec=D)),
        "ndarray float64[3]",
        "shape [2]",
        "reshape it",
    ),
    _norm(
        "weight",
        "instance_norm",
        lambda: functions.instance_norm(spmd.put(IMAGES, P(None, "data")), np.ones(4)),
        "an array of shape [4]",
        "shape [3]",
        "reshape it",
    ),
    _norm(
        "groups",
        "group_norm",
        lambda: functions.group_norm(spmd.put(IMAGES, P(None, "data")), 2),
        "2",
        "a divisor of the 3 channels",
        "groups=1",
    ),
    _norm(
        "spec",
        "layer_norm",
        lambda: run(lambda x: functions.layer_norm(x, spec=P(None, "model"))),
        "which is the same on all workers along 'model'",
        "the layout of an array of which each worker has a block",
        "leave 'model' out of spec",
        StateError,
    ),
    _norm(
        "spec",
        "rms_norm",
        lambda: functions.rms_norm(here(), spec=D),
        "P('data'",
        "no spec: a global array has its layout",
        "leave spec out",
    ),
    _norm("x", "dropout", lambda: functions.dropout(X > 1, 0.5, KEY), "bool", "floating-point", "x.astype(float)"),
    _norm(
        "target", "mse_loss", lambda: functions.mse_loss(X, X[:, 0]), "ndarray float64[3]", "the shape of x", "reshape"
    ),
    _norm(
        "reduction",
        "l1_loss",
        lambda: functions.l1_loss(X, X, reduction="batchmean"),
        "'batchmean'",
        '"none", "sum" or "mean"',
        'reduction="mean"',
    ),
    _norm(
        "weight",
        "binary_cross_entropy",
        lambda: functions.binary_cross_entropy(X, X, weight=np.ones(3)),
        "ndarray float64[3] for x of shape [3, 2]",
        "broadcasts to x",
        "np.broadcast_to(weight, x.shape)",
    ),
    _norm("delta", "huber_loss", lambda: functions.huber_loss(X, X, delta=0), "0", "above 0", "delta=1.0"),
    _norm(
        "spec",
        "kl_div",
        lambda: run(lambda x: functions.kl_div(x, x, spec=P("data", "model"))),
        "which is the same on all workers along 'model'",
        "the layout of an array of which each worker has a block",
        "spmd.pvary(x, 'model')",
        StateError,
    ),
    _norm(
        "target",
        "cross_entropy",
        lambda: functions.cross_entropy(X, np.array([0, 1, 5])),
        "target from 0 to 5",
        "classes from 0 to 1",
        "count from 0",
    ),
    Row(
        "classes that are split without axis_name",
        lambda: spmd.map(spmd.softmax_cross_entropy, (P(None, "data"), P()), P(None))(X, np.array([0, 1, 1])),
        SpecError,
        "spmd.softmax_cross_entropy: argument labels",
        "labels from 0 to 1, the same along 'data', where not all have the same logits",
        "classes from 0 to 0",
        "axis_name='data', if that axis splits the classes",
    ),
    _norm(
        "target",
        "cross_entropy",
        lambda: spmd.map(functions.cross_entropy, (P(None, "data"), P()), P())(X, np.array([0, 1, 1])),
        "the same along 'data', where not all have the same x",
        "classes from 0 to 0",
        "a spec of x that names 'data'",
    ),
    _norm(
        "ids",
        "one_hot",
        lambda: functions.one_hot(here(), 3),
        "PartitionedArray float64[3, 2]",
        "integers",
        "ids.astype(int)",
    ),
    *(
        _norm(
            "axis_name",
            name,
            lambda call=call: call(here(), axis_name="data"),
            "'data' for PartitionedArray float64[3, 2]",
            "no axis_name: a global array has its layout",
            "leave axis_name out",
        )
        for name, call in (("logsumexp", functions.logsumexp), ("moments", functions.moments))
    ),
    _norm(
        "x",
        "stencil",
        lambda: spmd.grad(lambda x: np.sum(functions.stencil(x, [(0, 0)], [1.0])))(here()),
        "traced array float64[3, 2]",
        "a block, or a bare array",
        "call it in a body",
    ),
    _norm(
        "x",
        "stencil",
        lambda: functions.stencil(here(), [(0, 0)], [1.0]),
        "PartitionedArray float64[3, 2]",
        "a block, or a bare array",
        "call it in a body",
    ),
    _norm(
        "target",
        "nll_loss",
        lambda: functions.nll_loss(IMAGES, np.zeros(2, int)),
        "ndarray int64[2] for x of shape [2, 4, 3], with classes in its last dimension",
        "integers of shape [2, 4]",
        "one class number per row",
    ),
    _norm(
        "spec",
        "cross_entropy",
        lambda: _of_one_row(),
        "Layout.grid((2,)",
        "(batch, classes)",
        "x[None]",
        LayoutError,
    ),
]


def _of_one_row():
    layout = spmd.Layout.grid((2,), (1,), spmd.mesh.current_mesh().axes)
    return spmd.map(lambda x: functions.cross_entropy(x, np.array(0), spec=layout), layout, P())(X[0])
