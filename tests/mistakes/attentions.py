"""Mistakes in attention, rotary and row embeddings: shapes, specs and methods that do not fit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mistakes import Row, run
from spmd import P, functions
from spmd.errors import LayoutError, SpecError

Q, K = np.zeros((4, 3, 2)), np.zeros((2, 5, 2))


def attention(q: Any = Q, k: Any = K, v: Any = K, *terms: Any, **options: Any) -> Callable[[], Any]:
    return lambda: functions.attention(q, k, v, *terms, **options)


ROWS = [
    *(
        Row(f"attention, {name}", call, error, f"spmd.functions.attention: argument {argument}", got, need, mend)
        for name, call, error, argument, got, need, mend in (
            ("one head", attention(Q[0]), SpecError, "q", "[3, 2]", "(..., heads, n, d)", "x[None]"),
            ("integers", attention(Q.astype(int)), SpecError, "q", "int64", "floating", "q.astype(float)"),
            (
                "heads that share unevenly",
                attention(Q[:3]),
                LayoutError,
                "k",
                "[2, 5, 2] for q of shape [3, 3, 2]",
                "a multiple of key heads",
                "k of the batch and features of q",
            ),
            ("fewer values than keys", attention(v=K[:, :4]), LayoutError, "v", "[2, 4, 2]", "key heads, m, e", "as k"),
            (
                "a mask of numbers",
                attention(Q, K, K, np.zeros((3, 5))),
                SpecError,
                "mask",
                "float64",
                "booleans",
                "bias=",
            ),
            (
                "a bias of other heads",
                attention(Q, K, K, None, np.zeros((2, 3, 5))),
                LayoutError,
                "bias",
                "[2, 3, 5]",
                "broadcasts to [4, 3, 5]",
                "reshape bias",
            ),
            (
                "an unknown method",
                attention(method="rings"),
                SpecError,
                "method",
                "'rings'",
                "heads, sequence, ring",
                "ring",
            ),
            ("a negative scale", attention(scale=-1.0), SpecError, "scale", "-1.0", "at least 0", "scale=0"),
            (
                "axes twice",
                lambda: run(lambda x: functions.attention(Q, K, K, axis_name="data", spec=P("data")), Q),
                SpecError,
                "axis_name",
                "'data', and spec=",
                "one of the two",
                "leave axis_name out",
            ),
        )
    ),
    Row(
        "rope of an odd number of features",
        lambda: functions.rope(np.zeros((4, 3))),
        LayoutError,
        "spmd.functions.rope: argument x",
        "[4, 3]",
        "an even number",
        "pad x",
    ),
    Row(
        "rope of one entry",
        lambda: functions.rope(np.zeros(4)),
        SpecError,
        "spmd.functions.rope: argument x",
        "[4]",
        "(..., n, d)",
        "x[None]",
    ),
    Row(
        "rope at positions of another length",
        lambda: functions.rope(np.zeros((3, 4)), np.arange(4)),
        SpecError,
        "spmd.functions.rope: argument positions",
        "int64[4]",
        "integers that broadcast to [3]",
        "positions=None",
    ),
    Row(
        "a table by axes and by a spec",
        lambda: run(lambda x: functions.embedding(x, np.array([0]), "data", table_spec=P("data")), Q),
        SpecError,
        "spmd.functions.embedding: argument axis_name",
        "'data', and table_spec=",
        "one of the two",
        "leave axis_name out",
    ),
]
