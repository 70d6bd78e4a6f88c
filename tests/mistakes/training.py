"""Mistakes in training with sharded parameters and states."""

from __future__ import annotations

import numpy as np

import spmd
from mistakes import EVEN, D, Row, X, run
from spmd import P
from spmd.errors import ClosureError, DifferentiationError, LayoutError, MeshError, ReplicaError, SpecError, StateError

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
            "update of spmd.optim.shard: argument params",
            "nothing",
            "the parameters",
            "optimizer.update(grads, state, params)",
        ),
    )
]


GATHERED = "spmd.training.gathered"


def over(units, specs=D, axis_name="data", **options):
    """A loop over units."""
    return [w + 0 for w in spmd.training.gathered(units, specs, axis_name, **options)]


def _in_map(*args, **options):
    return lambda: run(lambda x: over(*(a(x) if callable(a) else a for a in args), **options), EVEN, ins=D, out=None)


def _left_before():
    def body(x):
        kept = None
        for w in spmd.training.gathered([x, x, x], D, "data"):
            if kept is None:
                kept = w
                del w
        return kept + 1

    run(body, EVEN)


def _shapes_differ(x):
    return x[:, : 1 + spmd.worker_index("data")]


GATHERED_UNITS = [
    Row(f"gathered: {name}", call, error, f"{GATHERED}: argument {argument}" if argument else GATHERED, got, need, mend)
    for name, call, error, argument, got, need, mend in (
        (
            "outside of a body",
            lambda: over([EVEN]),
            MeshError,
            "",
            "a call outside of any body",
            "a worker",
            "call it inside a function that spmd.map runs",
        ),
        (
            "units that are no list",
            _in_map(lambda x: {"first": x}),
            SpecError,
            "units",
            "a dict",
            "a list of trees of blocks, one tree for each unit",
            "[params[name] for name in order] of a dict",
        ),
        (
            "an array in place of units",
            _in_map(lambda x: x),
            SpecError,
            "units",
            "Varying(data) array float64[2, 2]",
            "a list of trees of blocks",
            "[unit] of one",
        ),
        (
            "specs of another tree",
            _in_map(lambda x: [x, x], [D]),
            SpecError,
            "specs, for 'units'",
            "units has 2 entries for 1 specs",
            "a prefix of",
            "write a spec for the whole",
        ),
        (
            "what is no spec",
            _in_map(lambda x: [x], ["data"]),
            SpecError,
            "specs, for 'units[0]'",
            "str 'data'",
            "a spec",
            'P("data")',
        ),
        (
            "specs that do not name the axis",
            _in_map(lambda x: [x], P("model")),
            SpecError,
            "specs",
            "specs of which none names axis 'data'",
            "with 'data' in a dimension",
            "spmd.training.shard_specs(params, 'data')",
        ),
        (
            "an axis that the mesh has not",
            _in_map(lambda x: [x], D, "dta"),
            MeshError,
            "axis_name",
            "'dta'",
            "an axis of Mesh(data=2, model=2)",
            "write 'data'",
        ),
        (
            "a spec with more dimensions than the block",
            _in_map(lambda x: [x], P(None, None, "data")),
            SpecError,
            "units[0]",
            "P(None, None, 'data') for an array of 2 dimensions",
            "a spec of at most 2 entries",
            "shorten the spec",
        ),
        (
            "another axis that splits last",
            _in_map(lambda x: [x], P(("data", "model"))),
            SpecError,
            "specs, for 'units[0]'",
            "P(('data', 'model')), in which 'data' is not what splits last",
            "or by other axes first",
            "P(('model', 'data'))",
        ),
        (
            "an Invariant array",
            _in_map(lambda x: [x, spmd.psum(x, "data")]),
            StateError,
            "units[1]",
            "Invariant array float64[2, 2], which does not vary over axis 'data'",
            "this worker's block of the parameter",
            "spmd.pslice(x, axis_name, axis=d, tiled=True)",
        ),
        (
            "a bare array",
            _in_map(lambda x: [EVEN]),
            StateError,
            "units[0]",
            "ndarray float64[4, 2], which does not vary over axis 'data'",
            "this worker's block of the parameter",
            "pass the parameters to the map",
        ),
        (
            "an array traced outside",
            lambda: spmd.grad(lambda w: float(np.sum(run(lambda x: over([w])[0], EVEN, ins=D))))(EVEN),
            ClosureError,
            "units[0]",
            "traced array float64[4, 2] that was traced outside of this map",
            "arrays of this body",
            "pass it to the map as an argument",
        ),
        (
            "blocks of other shapes",
            _in_map(lambda x: [_shapes_differ(x)]),
            LayoutError,
            "units[0]",
            "blocks of shapes [2, 1], [2, 2]",
            "blocks that differ in dimension 0 only",
            "name the axis in the dimension that it splits",
        ),
        (
            "a prefetch that is no number",
            _in_map(lambda x: [x], prefetch=True),
            SpecError,
            "prefetch",
            "bool True",
            "an int of at least 0",
            "prefetch=1",
        ),
        (
            "a negative prefetch",
            _in_map(lambda x: [x], prefetch=-1),
            SpecError,
            "prefetch",
            "int -1",
            "an int of at least 0",
            "prefetch=0 for the least memory",
        ),
    )
] + [
    Row(
        "gathered: an array of a unit that was left",
        _left_before,
        StateError,
        "an array",
        "a whole parameter of a unit, used after the loop over `spmd.training.gathered` had left the unit",
        "arrays of the unit that the loop is at",
        "gather the unit again",
    )
]

ACCUMULATE = "spmd.training.accumulate"


def accumulated(loss, *batch, vary=False, **options):
    def body(w, x):
        at = spmd.pvary(w, "data") if vary else w
        return spmd.training.accumulate(loss, 2, **options)(at, *(batch or (x,)))

    return lambda: run(body, EVEN[0], EVEN, ins=(P(), D), out=None)


ACCUMULATED = [
    Row(f"accumulate: {name}", call, error, f"{ACCUMULATE}: argument {argument}" if argument else head, got, need, mend)
    for head in [ACCUMULATE]
    for name, call, error, argument, got, need, mend in (
        (
            "no parts",
            lambda: spmd.training.accumulate(np.sum, 0),
            SpecError,
            "microbatches",
            "0",
            "an integer of at least 1",
            "accumulate(loss, 4)",
        ),
        (
            "another reduction",
            lambda: spmd.training.accumulate(np.sum, 2, reduction="max"),
            SpecError,
            "reduction",
            "'max'",
            '"mean" or "sum"',
            'reduction="mean"',
        ),
        (
            "samples of two numbers",
            accumulated(lambda w, x, y: np.sum(w), EVEN, EVEN[:3]),
            LayoutError,
            "batch",
            "4 in batch[0], 3 in batch[1]",
            "equally many samples",
            "of the same samples",
        ),
        (
            "a mean over nobody knows what",
            accumulated(lambda w, x: np.mean(w * x), vary=True),
            StateError,
            "axis_name",
            "a loss that varies over 'data', as its parameters do",
            "the axes over which it takes the mean",
            "axis_name='data', or ()",
        ),
        (
            "global arrays",
            lambda: spmd.training.accumulate(lambda w, x: np.sum(w * x), 2)(EVEN, spmd.put(EVEN, D)),
            MeshError,
            "",
            "outside of bodies",
            "a call in a body",
            "spmd.map(spmd.training.accumulate(loss, 4)",
        ),
    )
]

PIPELINE = "spmd.training.pipeline"


def scaled(w, x, *shared):
    return w * x


def squares(y, *target):
    return np.mean(y**2)


def piped(loss=squares, *, x=X, target=None, ins=None, body=None, stages=(scaled, scaled)):
    """A step of two stages along `model`."""

    def of(x, target):
        step = spmd.training.pipeline([*stages], "model", microbatches=2, loss=loss)
        value = step.value_and_grad([2.0, 2.0], x, target)[0] if body is None else body(step, x, target)
        return spmd.psum(value, "data") if value.state.varying else value

    return lambda: spmd.map(of, in_specs=P() if ins is None else ins, out_specs=P())(x, x if target is None else target)


def kept_at_the_last(step, x, target):
    return step.value_and_grad([2.0, 2.0], spmd.keep(x, "model", 1), target)[0]


def closing_over_a_traced_array(step, x, target):
    def of(factor):
        closing = spmd.training.pipeline([lambda w, x: w * x * factor] * 2, "model", microbatches=2)
        return np.sum(closing([2.0, 2.0], x))

    return spmd.grad(of)(np.ones(()))


def differentiating_the_target(step, x, target):
    return np.sum(spmd.grad(lambda target: step.value_and_grad([2.0, 2.0], x, target)[0])(target))


def varying_parameters(step, x, target):
    params = spmd.pvary([np.float64(2.0), np.float64(2.0)], "data")
    return step.value_and_grad(params, x, target)[0]


def own_copies_of_shared(step, x, target):
    return step.value_and_grad([2.0, 2.0], x, target, shared=spmd.varying(np.ones(2), "model"))[0]


def parameters_at_another_worker(step, x, target):
    w = spmd.keep(np.ones(2), "model", 0)
    return step.value_and_grad([w, w], x, target)[0]


def own_batches(step, x, target):
    return step.value_and_grad([2.0, 2.0], np.ones((2, 2)) * spmd.worker_index("model"), np.ones((2, 2)))[0]


PIPELINES = [
    Row(f"pipeline: {name}", call, error, f"{PIPELINE}: argument {argument}" if argument else PIPELINE, got, need, mend)
    for name, call, error, argument, got, need, mend in (
        (
            "a schedule in other letters",
            lambda: spmd.training.pipeline([scaled], schedule="1F1B"),
            SpecError,
            "schedule",
            "'1F1B'",
            "one of 'gpipe', '1f1b'",
            'schedule="1f1b"',
        ),
        (
            "a schedule of torch",
            lambda: spmd.training.pipeline([scaled], schedule="ScheduleInterleavedZeroBubble"),
            SpecError,
            "schedule",
            "'ScheduleInterleavedZeroBubble'",
            "one of",
            'schedule="zero_bubble"',
        ),
        (
            "no microbatches",
            lambda: spmd.training.pipeline([scaled], microbatches=0),
            SpecError,
            "microbatches",
            "0",
            "an integer of at least 1",
            "microbatches=8",
        ),
        (
            "one function",
            lambda: spmd.training.pipeline(scaled),
            SpecError,
            "stages",
            "scaled",
            "a list of functions",
            "[f] * 4",
        ),
        (
            "a step outside of bodies",
            lambda: spmd.training.pipeline([scaled] * 2, "model")([2.0, 2.0], X),
            MeshError,
            "",
            "outside of any body",
            "each worker runs its own stages",
            "spmd.map(lambda params, x: step(params, x), in_specs=(specs, P()), out_specs=P())",
        ),
        (
            "targets of other samples",
            piped(target=X[:2]),
            LayoutError,
            "target",
            "2 entries in dimension 0, and 3 of x",
            "a target for each sample",
            "x[indices] and y[indices]",
        ),
        (
            "a loss that is no scalar",
            piped(lambda y, target: (y - target) ** 2),
            DifferentiationError,
            "",
            "float64[2, 2]",
            "a scalar",
            "reduce it",
        ),
        (
            "a batch for each worker along the pipeline",
            piped(x=EVEN, ins=P("model")),
            StateError,
            "x",
            "each worker along 'model' has another one",
            "x goes in at its first worker, target at its last",
            "axis_name=() for whole minibatches; spmd.keep(x, 'model', 0)",
        ),
        (
            "a target for each worker along the pipeline",
            piped(x=EVEN, ins=(P(), P("model"))),
            StateError,
            "target",
            "each worker along 'model' has another one",
            "target at its last",
            "spmd.keep(x, 'model', 1)",
        ),
        (
            "a batch at the last worker",
            piped(body=kept_at_the_last),
            StateError,
            "x",
            "Rooted(1 along model)",
            "the worker at place 0 along 'model'",
            "spmd.move(x, 'model', 1, 0)",
        ),
        (
            "parameters at another worker",
            piped(body=parameters_at_another_worker),
            StateError,
            "params[1]",
            "Rooted(0 along model)",
            "the worker at place 1 along 'model'",
            "spmd.move(x, 'model', 0, 1)",
        ),
        (
            "shared parameters that differ",
            piped(body=own_copies_of_shared),
            StateError,
            "shared",
            "Varying(model)",
            "one value on all workers along 'model'",
            "belongs to its params",
        ),
        (
            "a stage that closes over a traced array",
            piped(body=closing_over_a_traced_array),
            DifferentiationError,
            "stages",
            "differentiated around the pipeline",
            "a pipeline computes gradients itself",
            "give what stages close over in `shared`",
        ),
        (
            "a target that is differentiated",
            piped(lambda y, target: np.mean((y - target) ** 2), body=differentiating_the_target),
            DifferentiationError,
            "target",
            "differentiated around the pipeline",
            "a pipeline computes gradients itself",
            "without spmd.grad around it",
        ),
        (
            "a parameter that is an integer",
            piped(body=lambda step, x, target: step.value_and_grad([2.0, 2], x, target)[0]),
            DifferentiationError,
            "params[1]",
            "int 2",
            "an array of floating or complex dtype",
            "close over it in the stages",
        ),
        (
            "text between stages",
            piped(stages=[lambda w, x: (w * x, "text"), scaled]),
            StateError,
            "stages",
            "str 'text'",
            "arrays, numbers and None, in tuples, lists and dicts",
            "return the arrays",
        ),
        (
            "outputs without dimensions",
            piped(stages=[scaled, lambda w, x: np.sum(x)], body=lambda step, x, target: step([2.0, 2.0], x)),
            LayoutError,
            "stages",
            "results of microbatches 0 and 0 with shapes [[]] and [[]]",
            "joined in dimension 0",
            "x[None]",
        ),
        (
            "a mean over nobody knows what",
            piped(x=EVEN, ins=D, body=varying_parameters),
            StateError,
            "loss_axis_name",
            "a loss that varies over 'data', as its parameters do",
            "the axes over which it takes the mean",
            "loss_axis_name='data', or ()",
        ),
    )
]


PIPELINES.append(
    Row(
        "pipeline: a batch that each worker made",
        piped(body=own_batches),
        ReplicaError,
        f"{PIPELINE} at ",
        "differs between worker",
        "one value on all workers along 'model'",
        "spmd.varying(a, 'model')",
    )
)

ROWS = [*SHARD_SPECS, *SHARDED, *GATHERED_UNITS, *ACCUMULATED, *PIPELINES]
