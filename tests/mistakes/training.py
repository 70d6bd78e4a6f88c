"""Mistakes in training with sharded parameters and states."""

from __future__ import annotations

import spmd
from mistakes import EVEN, D, Row, X, run
from spmd import P
from spmd.errors import LayoutError, MeshError, SpecError

SPECS = "spmd.training.shard_specs"

SHARD_SPECS = [
    Row(f"shard_specs: {name}", call, error, f"{SPECS}: argument {argument}" if argument else SPECS, got, need, mend)
    for name, call, error, argument, got, need, mend in (
        (
            "what is no array",
            lambda: spmd.training.shard_specs({"w": EVEN, "kind": "linear"}, "data"),
            SpecError,
            "params['kind']",
            "'linear'",
            "an array, a global array, or an object with a shape",
            "params with None",
        ),
        (
            "what is no spec",
            lambda: spmd.training.shard_specs([EVEN], "data", ["model"]),
            SpecError,
            "param_specs, for params[0]",
            "'model'",
            "a spec, a Layout, or None",
            "P() for copies on all workers",
        ),
        (
            "specs of another tree",
            lambda: spmd.training.shard_specs({"w": EVEN}, "data", {"v": P()}),
            SpecError,
            "param_specs, for 'params'",
            "has no 'v'",
            "a prefix of",
            "write a spec for the whole",
        ),
        (
            "an unreduced spec",
            lambda: spmd.training.shard_specs(EVEN, "data", P(unreduced="model")),
            SpecError,
            "param_specs, for params",
            "unreduced={'model'}",
            "a spec without unreduced axes",
            "P()",
        ),
        (
            "a grid",
            lambda: spmd.training.shard_specs(EVEN, "data", spmd.Layout.grid((4, 2), (2, 1), {"data": 2, "model": 2})),
            SpecError,
            "param_specs, for params",
            "Layout.grid",
            "a layout by a spec",
            "spmd.reshard(x, spec)",
        ),
        (
            "a layout of another shape",
            lambda: spmd.training.shard_specs(EVEN, "data", spmd.Layout((5, 2), P(), {"data": 2, "model": 2})),
            LayoutError,
            "param_specs, for params",
            "for an array of shape [4, 2]",
            "a layout of shape [5, 2]",
            "a spec",
        ),
        (
            "another axis",
            lambda: spmd.training.shard_specs(EVEN, "dta"),
            MeshError,
            "axis_name",
            "'dta'",
            "an axis of Mesh(data=2, model=2)",
            "write 'data'",
        ),
        (
            "in a body",
            lambda: run(lambda x: spmd.training.shard_specs(x, "data"), X, ins=D, out=None),
            MeshError,
            "",
            "a call inside a body",
            "a call from outside",
            "before the map",
        ),
    )
]

ROWS = [*SHARD_SPECS]
