"""Mistakes in training with sharded parameters and states."""

from __future__ import annotations

import spmd
from mistakes import EVEN, D, Row, X, run
from spmd import P
from spmd.errors import LayoutError, MeshError, SpecError, StateError

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

SHARD = "spmd.optim.shard"


def sharded_step(params, state=None, **options):
    """A step in a body. params: their spec. state: of them, in place of the right one."""

    def call():
        optimizer = spmd.optim.shard(spmd.optim.adam(), "data")

        def body(p):
            given = optimizer.init(p) if state is None else state(p)
            return optimizer.update(p, given, p)[0]

        return run(body, EVEN, ins=params, out=params, **options)

    return call


SHARDED = [
    Row(f"shard: {name}", call, error, head, got, need, mend)
    for name, call, error, head, got, need, mend in (
        (
            "no optimiser",
            lambda: spmd.optim.shard(spmd.optim.adam, "data"),
            SpecError,
            f"{SHARD}: argument optimizer",
            "function adam",
            "functions init, update and specs",
            "spmd.optim.adam(1e-3)",
        ),
        (
            "parameters in blocks",
            sharded_step(D, state=lambda p: spmd.optim.adam().init(p)),
            StateError,
            f"{SHARD}: argument params",
            "Varying(data)",
            "Invariant along 'data'",
            "without shard",
        ),
        (
            "a state made of blocks",
            sharded_step(P("model")),
            StateError,
            f"init of {SHARD}: argument params",
            "Varying(model)",
            "a whole parameter",
            "optimizer.init(params) before the map",
        ),
        (
            "a state that is whole",
            sharded_step(P(), state=lambda p: spmd.optim.adam().init(p)),
            LayoutError,
            f"{SHARD}: argument state, of params",
            "float64[4, 2]",
            "the part of",
            "optimizer.specs(param_specs, params)",
        ),
        (
            "arrays without states",
            sharded_step(P(), check=False),
            StateError,
            SHARD,
            "check=False",
            "arrays that say whether",
            "check=True",
        ),
        (
            "specs without shapes",
            lambda: spmd.optim.shard(spmd.optim.adam(), "data").specs({"w": P()}),
            SpecError,
            f"specs of {SHARD}: argument params",
            "param_specs['w'] = P()",
            "structs of their shapes",
            "optimizer.specs(param_specs, params)",
        ),
        (
            "an axis that the mesh lacks",
            lambda: spmd.optim.shard(spmd.optim.adam(), "dat").init(EVEN),
            MeshError,
            f"{SPECS}: argument axis_name",
            "'dat'",
            "an axis of",
            "write 'data'",
        ),
        (
            "an update without parameters",
            lambda: spmd.optim.shard(spmd.optim.adam(), "data").update(EVEN, None),
            SpecError,
            "update of spmd.optim: argument params",
            "nothing",
            "the parameters",
            "optimizer.update(grads, state, params)",
        ),
    )
]

ROWS = [*SHARD_SPECS, *SHARDED]
