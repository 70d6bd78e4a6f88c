"""Mistakes with mixtures of experts: tokens, scores and experts that do not fit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import spmd
from mistakes import D, Row, run
from spmd import P, functions
from spmd.errors import JitError, LayoutError, SpecError, StateError

X, GATE = np.zeros((3, 2)), np.zeros((3, 2))
FNS = [lambda rows: rows] * 2


def mixed(x: Any = X, gate: Any = GATE, fns: Any = FNS, *names: str, **options: Any) -> Callable[[], Any]:
    return lambda: functions.experts(x, gate, fns, *names, **options)


def in_body(use: Callable[[Any], Any], spec: P = D) -> Callable[[], Any]:
    """A call of a function in a body, with rows of two numbers, which are tokens and scores of two experts."""
    return lambda: run(use, np.zeros((4, 2)), ins=spec, out=spec)


def over_data(fns: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda x: functions.experts(x, x, fns, "data", **options)


def uneven(expert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Two experts, both on the first worker along `data`."""
    return lambda x: functions.experts(x, x, [] if spmd.worker_index("data") else [expert] * 2, "data")


ROWS = [
    *(
        Row(f"experts, {name}", call, error, f"spmd.functions.experts: argument {argument}", got, need, mend)
        for name, call, error, argument, got, need, mend in (
            ("one token", mixed(X[0]), LayoutError, "x", "[2]", "(tokens, features)", "x.reshape(-1"),
            ("integers", mixed(X.astype(int)), SpecError, "x", "int64", "floating", "x.astype(float)"),
            ("scores of others", mixed(gate=GATE[:2]), LayoutError, "gate", "[2, 2]", "3 tokens", "x @ w_gate"),
            ("scores of one", mixed(gate=GATE[0]), LayoutError, "gate", "[2]", "(tokens, experts)", "x @ w_gate"),
            ("more choices than experts", mixed(k=3), SpecError, "k", "3", "from 1 to 2, the number of experts", "k=1"),
            ("no capacity", mixed(capacity=0), SpecError, "capacity", "0", "an integer from 1", "capacity=1"),
            ("a function alone", mixed(fns=FNS[0]), SpecError, "fns", "function", "and params", "fns=[fn]"),
            ("no functions", mixed(fns=[1, 2]), SpecError, "fns", "list [1, 2]", "a list of functions", "fns=[fn]"),
            (
                "parameters of different numbers",
                mixed(fns=FNS[0], params=[np.zeros(2), np.zeros((3, 1))]),
                SpecError,
                "params",
                "[[2], [3, 1]]",
                "one entry in the first dimension for each expert",
                "np.stack",
            ),
            ("an expert too few", mixed(fns=FNS[:1]), LayoutError, "fns", "1 experts", "2 in all", "its own experts"),
            (
                "the same experts everywhere",
                in_body(over_data(FNS)),
                LayoutError,
                "fns",
                "2 + 2 experts on the workers",
                "2 in all, as gate of shape [2, 2]",
                "no two the same",
            ),
            (
                "other features",
                mixed(fns=[lambda rows: rows[:, :1]] * 2),
                LayoutError,
                "fns",
                "float64[3, 1] for",
                "a row of 2 features",
                "out_features=1",
            ),
            (
                "a sum of rows",
                mixed(fns=[lambda rows: rows.sum(0)] * 2),
                LayoutError,
                "fns",
                "an expert that gives",
                "a row of 2 features for each row",
                "functions of rows",
            ),
            (
                "complex rows",
                mixed(fns=[lambda rows: 1j * rows] * 2),
                SpecError,
                "fns",
                "complex128[3, 2]",
                "real numbers",
                "np.real(y)",
            ),
            (
                "a collective of some",
                in_body(uneven(lambda rows: spmd.psum(rows.sum(), "data") * rows)),
                StateError,
                "fns",
                "psum(float64[], 'data')",
                "no collective along 'data'",
                "before or after the experts",
            ),
            (
                "a gradient of some",
                in_body(lambda x: spmd.grad(lambda w: np.sum(uneven(lambda rows: rows * w)(x)))(np.ones(2)) + x),
                StateError,
                "fns",
                "closes over a differentiated array",
                "arrays that vary along 'data'",
                "spmd.pvary(w, 'data')",
            ),
            (
                "axes without the experts'",
                in_body(
                    lambda x: functions.experts(
                        spmd.varying(x, "model"), x, FNS[:1], "data", capacity=1, token_axes="model"
                    ),
                    P(("data", "model")),
                ),
                SpecError,
                "token_axes",
                "'model'",
                "axes that include 'data'",
                "as in their spec",
            ),
            (
                "a global array",
                lambda: functions.experts(spmd.put(X, P("data")), GATE, FNS),
                SpecError,
                "x",
                "PartitionedArray",
                "a block, or a bare array",
                "call it in a body",
            ),
        )
    ),
    Row(
        "experts, the same tokens everywhere",
        in_body(over_data(FNS[:1]), P()),
        StateError,
        "spmd.functions.experts: argument axis_name",
        "the same on all workers along 'data'",
        "blocks lie along this axis",
        "split the array in in_specs",
    ),
    Row(
        "experts, recorded",
        lambda: spmd.jit(spmd.map(over_data(FNS[:1]), P("data"), P("data")))(np.zeros((4, 2))),
        JitError,
        "spmd.functions.experts",
        "within spmd.jit",
        "depends on their values",
        "leave spmd.jit out",
    ),
    Row(
        "load_balance_loss, of a global array",
        lambda: functions.load_balance_loss(spmd.put(GATE, P("data"))),
        SpecError,
        "spmd.functions.load_balance_loss: argument gate",
        "PartitionedArray",
        "a block, or a bare array",
        "call it in a body",
    ),
    Row(
        "router_z_loss, of one token",
        lambda: functions.router_z_loss(GATE[0]),
        LayoutError,
        "spmd.functions.router_z_loss: argument gate",
        "[2]",
        "(tokens, experts)",
        "x @ w_gate",
    ),
]
