"""Mistakes in recurrent layers: parameters, shapes and specs that do not fit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mistakes import Row, run
from spmd import P, functions
from spmd.errors import LayoutError, SpecError
from spmd.layout import Layout

X = np.zeros((5, 4, 3))
AXES = {"data": 2, "model": 2}


def params(gates: int = 4, hidden: int = 2) -> dict[str, np.ndarray]:
    return {
        "weight_ih_l0": np.zeros((gates * hidden, 3)),
        "weight_hh_l0": np.zeros((gates * hidden, hidden)),
        "bias_ih_l0": np.zeros(gates * hidden),
        "bias_hh_l0": np.zeros(gates * hidden),
    }


def lstm(x: Any = X, state: Any = None, given: Any = None, **options: Any) -> Callable[[], Any]:
    return lambda: functions.lstm(x, state, params() if given is None else given, **options)


def in_body(**options: Any) -> Callable[[], Any]:
    return lambda: run(lambda x: functions.lstm(x, None, params(), **options)[0], X)


def without(name: str) -> dict[str, np.ndarray]:
    return {n: a for n, a in params().items() if n != name}


LSTM, SPLIT_ROWS = "spmd.functions.lstm: argument ", Layout.grid((2,), (2,), AXES)

ROWS = [
    Row(
        "a nonlinearity that is none",
        lambda: functions.rnn(X, None, params(1), nonlinearity="sigmoid"),
        SpecError,
        "spmd.functions.rnn: argument nonlinearity",
        "'sigmoid'",
        '"tanh" or "relu"',
        'nonlinearity="tanh"',
    ),
    *(
        Row(f"recurrent layers, {name}", call, error, LSTM + argument, got, need, mend)
        for name, call, error, argument, got, need, mend in (
            (
                "a state without c",
                lstm(state=np.zeros((1, 4, 2))),
                SpecError,
                "state",
                "float64[1, 4, 2]",
                "(h0, c0), or None",
                "lstm(x, (h0, c0), params)",
            ),
            (
                "a list of parameters",
                lstm(given=[*params().values()]),
                SpecError,
                "params",
                "list",
                "a dictionary with weight_ih_l0",
                "dict(module.named_parameters())",
            ),
            (
                "a parameter that is missing",
                lstm(given=without("bias_ih_l0")),
                SpecError,
                "params",
                "without bias_ih_l0",
                "the parameters of 1 layers in 1 directions: weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0",
                "of one module of torch.nn",
            ),
            (
                "a parameter too many",
                lstm(given={**params(), "weight_hr_l1": np.zeros((1, 2))}),
                SpecError,
                "params",
                "with weight_hr_l1",
                "weight_ih_l0",
                "of one module",
            ),
            (
                "weights without rows",
                lstm(given={**params(), "weight_ih_l0": np.zeros(8)}),
                SpecError,
                "params['weight_ih_l0']",
                "float64[8]",
                "an array of 2 or 3 dimensions",
                "weights (gates * hidden, in_features)",
            ),
            (
                "parameters of another cell",
                lambda: functions.lstm(X, None, {**params(), "weight_ih_l0": np.zeros((6, 3))}),
                SpecError,
                "params['weight_ih_l0']",
                "shape [6, 3] of the whole",
                "shape [8, 3], for x of [5, 4, 3] and weight_hh_l0 of [8, 2]",
                "weights of shape (gates * hidden, in_features)",
            ),
            (
                "x without a batch",
                lstm(X[0]),
                SpecError,
                "x",
                "float64[4, 3]",
                "(time, batch, features)",
                "np.asarray(x)",
            ),
            (
                "states of another batch",
                lstm(state=(np.zeros((1, 4, 2)), np.zeros((1, 5, 2)))),
                LayoutError,
                "c0",
                "shape [1, 5, 2] of the whole",
                "shape [1, 4, 2], of (layers * directions, batch, features)",
                "x of shape (time, batch, features)",
            ),
            (
                "lengths of another batch",
                lstm(lengths=np.ones(5, int)),
                LayoutError,
                "lengths",
                "shape [5] of the whole",
                "shape [4], of (batch,)",
                "x of shape (time, batch, features)",
            ),
            (
                "packed data of other sizes",
                lstm(X[0], batch_sizes=(1, 2)),
                SpecError,
                "batch_sizes",
                "[1, 2] for x, ndarray float64[4, 3]",
                "x of shape (sum(batch_sizes), features), sizes that do not grow, no lengths and no spec",
                "packed.data and packed.batch_sizes",
            ),
            (
                "a number of microbatches that is none",
                lstm(microbatches=0),
                SpecError,
                "microbatches",
                "0",
                "a positive integer, or None",
                "microbatches=4",
            ),
            (
                "a spec of weights in place of hidden features",
                in_body(w_spec=P("model", None, "data")),
                SpecError,
                "w_spec",
                "P('model', None, 'data')",
                "a spec of the hidden features alone",
                'w_spec=P("model")',
            ),
            (
                "hidden features on some of the workers",
                in_body(w_spec=SPLIT_ROWS),
                SpecError,
                "w_spec",
                "Layout.grid((2,), (2,)",
                "a spec of the hidden features alone, or a Layout by such a spec",
                'w_spec=P("model")',
            ),
            (
                "rows that are no gates",
                lambda: run(
                    lambda x: functions.lstm(x, None, {n: a[:5] for n, a in params().items()}, w_spec=P("model"))[0], X
                ),
                SpecError,
                "params['weight_ih_l0']",
                "a block of shape [5, 3]",
                "4 gates of each hidden feature of this worker",
                'spmd.put(w.reshape(gates, hidden, -1), P(None, "model"))',
            ),
        )
    ),
]
