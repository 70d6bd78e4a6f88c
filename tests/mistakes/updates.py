"""Mistakes in calls of optimisers: what they are made of, and the arguments of an update."""

from __future__ import annotations

import numpy as np

import spmd
from mistakes import EVEN, Row, run
from spmd.errors import SpecError, StateError
from spmd.training.pipelines.pipeline import Gradients

CLIPPED = [
    Row(
        "clipped: gradients that are contributions",
        lambda: run(lambda x: spmd.optim.clipped(spmd.optim.sgd(0.1), 1.0).update(x, None, np.ones((2, 2))), EVEN),
        StateError,
        "spmd.optim.clipped: argument grads",
        "Varying(data)",
        "summed over 'data'",
        "spmd.optim.shard(spmd.optim.clipped(optimizer, max_norm), axis_name)",
    ),
]

GROUPS = [
    Row(
        f"groups: {name}",
        call,
        SpecError,
        f"spmd.optim.groups: argument {argument}",
        got,
        need,
        mend,
    )
    for name, call, argument, got, need, mend in (
        (
            "no dictionary",
            lambda: spmd.optim.groups([spmd.optim.adam()]),
            "optimizers",
            "list",
            "a dictionary of optimisers by pattern",
            "spmd.optim.adam(1e-3)",
        ),
        (
            "a parameter that no pattern fits",
            lambda: spmd.optim.groups({"*.bias": spmd.optim.frozen()}).init({"a": {"weight": EVEN}}),
            "params",
            "'a.weight', which fits none of '*.bias'",
            "a pattern for each parameter",
            '"*": spmd.optim.adam(1e-3)',
        ),
        (
            "a pattern that fits nothing",
            lambda: spmd.optim.groups({"layers.0.*": spmd.optim.frozen(), "*": spmd.optim.adam()}).init([{"w": EVEN}]),
            "optimizers",
            "'layers.0.*', which fits no parameter",
            "a pattern of paths such as '0.w'",
            "leave it out",
        ),
        (
            "a pattern behind a wider one",
            lambda: spmd.optim.groups({"*": spmd.optim.adam(), "0.w": spmd.optim.frozen()}).init([{"w": EVEN}]),
            "optimizers",
            "'0.w', whose parameters '*' takes before",
            "each counts for some parameter",
            "'0.w' before '*'",
        ),
    )
]

PARAMS = {"w": EVEN, "b": [np.ones(2)]}
OPTIMIZERS = {
    "sgd": spmd.optim.sgd(0.1, 0.9),
    "adamw": spmd.optim.adamw(),
    "ema": spmd.optim.ema(spmd.optim.adam(), 0.9),
    "mixed_precision": spmd.optim.mixed_precision(spmd.optim.adam()),
    "clipped": spmd.optim.clipped(spmd.optim.adam(), 1.0),
    "groups": spmd.optim.groups({"w": spmd.optim.adam(), "*": spmd.optim.frozen()}),
    "shard": spmd.optim.shard(spmd.optim.adam(), "data"),
}
OWN_STATE = ("sgd", "adamw", "ema", "mixed_precision")
"""Optimisers whose state is of a class of its own, which stands in the message."""


def updated(name, grads=lambda params: params, state=lambda optimizer: optimizer.init(PARAMS), params=PARAMS):
    def call():
        optimizer = OPTIMIZERS[name]
        OPTIMIZERS[name].update(grads(PARAMS), state(optimizer), params)

    return call


def swapped(name):
    def call():
        optimizer = OPTIMIZERS[name]
        optimizer.update(PARAMS, PARAMS, optimizer.init(PARAMS))

    return call


def head(name, argument):
    return f"update of spmd.optim.{name}: argument {argument}"


SWAPPED = [
    Row(
        f"update of {name}: state and parameters swapped",
        swapped(name),
        SpecError,
        head(name, "state" if name == "groups" else "params"),
        "a dict" if name == "groups" else "a state, of class",
        "the state that init and the last update gave" if name == "groups" else "behind the state",
        "params, state = optimizer.update(grads, state, params), in this order",
    )
    for name in OPTIMIZERS
]

GRADIENTS = [
    Row(
        f"update of {name}: gradients {what}",
        updated(name, grads),
        SpecError,
        # Those that only look at the state leave it to the optimiser within.
        head("adam" if name == "ema" else name, "grads"),
        got,
        "a tree of the structure of params",
        mend,
    )
    for name in OPTIMIZERS
    for what, grads, got, mend in (
        ("without an entry", lambda p: {"w": p["w"]}, "without grads['b'][0]", "spmd.grad(loss)(params, ...)"),
        (
            "of more",
            lambda p: {**p, "c": [EVEN]},
            "with grads['c'][0], where there is no params",
            "the same parameters",
        ),
        ("in another container", lambda p: {**p, "b": (p["b"][0],)}, "other containers", "the same parameters"),
        ("of a pipeline", Gradients, "a Gradients, whose .params has the structure of params", "grads.params"),
    )
]

STATES = [
    Row(
        f"update of {name}: the state of another optimiser",
        updated(name, state=lambda _, name=name: spmd.optim.AdamState(0, None, None) if name == "sgd" else ()),
        SpecError,
        head(name, "state"),
        "a AdamState" if name == "sgd" else "a tuple",
        "the state that init and the last update gave",
        "state = optimizer.init(params)",
    )
    for name in OWN_STATE
] + [
    Row(
        f"update of {name}: the state of other parameters",
        updated(name, state=lambda optimizer: optimizer.init({"w": EVEN, "c": EVEN})),
        SpecError,
        head(where, argument),
        got,
        "a tree of the structure of params",
        "state = optimizer.init(params)",
    )
    for name, where, argument, got in (
        ("sgd", "sgd", "state.velocity", "without state.velocity['b'][0]"),
        ("adamw", "adamw", "state.mean", "without state.mean['b'][0]"),
        ("ema", "adam", "state.mean", "without state.mean['b'][0]"),
        ("mixed_precision", "mixed_precision", "state.masters", "without state.masters['b'][0]"),
    )
]

WRAPPERS = [
    Row(
        f"{name} of no optimiser",
        call,
        SpecError,
        f"spmd.optim.{name}: argument optimizer",
        "function adam",
        "functions init, update and specs",
        f"{name}(spmd.optim.adam(1e-3)",
    )
    for name, call in (
        ("ema", lambda: spmd.optim.ema(spmd.optim.adam, 0.9)),
        ("clipped", lambda: spmd.optim.clipped(spmd.optim.adam, 1.0)),
        ("mixed_precision", lambda: spmd.optim.mixed_precision(spmd.optim.adam)),
    )
]

FROZEN_AND_CLIPPING = [
    Row(
        "update of frozen: state and parameters swapped",
        lambda: spmd.optim.frozen().update(PARAMS, PARAMS, ()),
        SpecError,
        head("frozen", "state"),
        "a dict",
        "a tuple",
        "in this order",
    ),
    Row(
        "clip_by_global_norm, as optax has it",
        lambda: spmd.optim.clip_by_global_norm(1.0),
        SpecError,
        "spmd.optim.clip_by_global_norm: argument max_norm",
        "nothing",
        "a positive number, behind the gradients",
        "spmd.optim.clipped(optimizer, 1.0)",
    ),
]

ROWS = [*CLIPPED, *GROUPS, *SWAPPED, *GRADIENTS, *STATES, *WRAPPERS, *FROZEN_AND_CLIPPING]
