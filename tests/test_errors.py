"""Bad input, a row each: the error names the function, the argument, what came, what was needed and the mend."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from conftest import DEVICE

import spmd
from spmd import P, errors
from spmd.errors import (
    ClosureError,
    DeadlockError,
    DifferentiationError,
    DtypeError,
    LayoutError,
    MeshError,
    MismatchError,
    MissingMethodError,
    MutationError,
    SpecError,
    StateError,
    TracedConversionError,
)
from spmd.operators.reduce import Sum

X = np.arange(6.0).reshape(3, 2)
"""Rows of 2 and 1 on the workers along `data`."""
EVEN = np.arange(8.0).reshape(4, 2)
D = P("data")


class Row(NamedTuple):
    """A mistake, and words of the head of its message and of each of the three lines."""

    name: str
    call: Callable
    error: type[Exception]
    head: str
    got: str
    need: str
    mend: str


class Message(NamedTuple):
    head: str
    got: str
    need: str
    mend: str


def parsed(error: BaseException) -> Message:
    """The four parts of a message; each stands once, in this order."""
    text = str(error)
    marks = ["\n  got:    ", "\n  needed: ", "\n  mend:   "]
    places = [text.find(mark) for mark in marks]
    assert -1 not in places, f"no got, needed and mend in: {type(error).__name__}: {text}"
    assert places == sorted(places)
    assert [text.count(mark) for mark in marks] == [1, 1, 1]
    bounds = [0, *places, len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(bounds)]
    return Message(*(part.removeprefix(mark) for part, mark in zip(parts, ["", *marks], strict=True)))


def refused(row: Row) -> None:
    """The call raises this error of ours, with these words."""
    assert getattr(errors, row.error.__name__) is row.error
    with pytest.raises(row.error) as caught:
        row.call()
    assert type(caught.value) is row.error
    said = parsed(caught.value)
    for part, word in zip(said, row[3:], strict=True):
        assert word in part, f"{word!r} is not in {part!r}, of\n{caught.value}"
    assert not any(part.endswith(" ") or "  " in part.split("\n")[0] for part in said)


def run(body, *args, ins=D, out=D, **options):
    """A body on X, or on these arguments, cut by rows."""
    return spmd.map(body, ins, out, **options)(*(args or (X,)))


def _written_into():
    x = X.copy()
    with spmd.debug(mutation=True):
        _, pull = spmd.vjp(lambda x: np.sum(x * x), x)
        x += 1
        pull(1.0)


def here() -> spmd.PartitionedArray:
    return spmd.put(X, D)


def step(w, *, rate):
    return w * rate


@spmd.custom_vjp
def lopsided(x):
    return x


lopsided.defvjp(lambda x: (x, None), lambda _, g: (g * (1.0 + spmd.worker_index("model")),))


SPECS = [
    Row(
        "an array of fewer dimensions than its spec",
        lambda: spmd.map(step, {"w": P(None, "data"), "rate": None}, P())(X[0], rate=1.0),
        SpecError,
        "spmd.map of step: argument w",
        "P(None, 'data') for an array of 1 dimension",
        "a spec of at most 1 entry",
        "give the array the dimensions it names",
    ),
    Row(
        "a keyword without a spec",
        lambda: spmd.map(step, (P(), P()), P())(X, rate=X),
        SpecError,
        "spmd.map of step: argument in_specs, for 'rate'",
        "2 specs, all for positional arguments",
        "a spec for every argument",
        "in_specs as a dict by name: {'rate': P(), ...}",
    ),
    Row(
        "a spec longer than the rank",
        lambda: run(lambda x: x, ins=P("data", None, "model")),
        SpecError,
        "spmd.map of <lambda>: argument x",
        "P('data', None, 'model') for an array of 2 dimensions",
        "at most 2 entries",
        "shorten the spec",
    ),
    Row(
        "in a tree, the path of the leaf",
        lambda: run(lambda p: p, {"layers": [X, X[0]]}, ins=(P(None, "data"),)),
        SpecError,
        "argument p['layers'][1]",
        "P(None, 'data') for an array of 1 dimension",
        "at most 1 entry",
        "shorten the spec",
    ),
    Row(
        "a number that is split",
        lambda: run(lambda x: x, 3.0),
        SpecError,
        "argument x",
        "P('data') for an array of 0 dimensions",
        "P()",
        "give the array the dimensions it names",
    ),
    Row(
        "a list is a tree, not an array",
        lambda: run(lambda x: x, [1.0, 2.0]),
        SpecError,
        "argument x[0]",
        "an array of 0 dimensions",
        "P()",
        "np.asarray makes one array of a list",
    ),
    Row(
        "a result of fewer dimensions than its spec",
        lambda: run(lambda x: {"sum": spmd.psum(x.sum(), "data")}),
        SpecError,
        "spmd.map of <lambda>: result['sum']",
        "P('data') for an array of 0 dimensions",
        "P()",
        "shorten the spec",
    ),
    Row(
        "an unknown axis",
        lambda: run(lambda x: x, ins=P("dta")),
        SpecError,
        "argument x",
        "P('dta'), which names axis 'dta'",
        "axes of the mesh: 'data', 'model'",
        "write 'data'",
    ),
    Row(
        "an axis like none",
        lambda: run(lambda x: x, ins=P("q")),
        SpecError,
        "argument x",
        "axis 'q'",
        "'data', 'model'",
        "name an axis of the mesh",
    ),
    Row(
        "an unknown axis in out_specs",
        lambda: run(lambda x: x, out=P("modell")),
        SpecError,
        "spmd.map of <lambda>: result",
        "axis 'modell'",
        "'data', 'model'",
        "write 'model'",
    ),
    Row(
        "a repeated axis",
        lambda: P("data", "data"),
        SpecError,
        "spmd.P: argument P('data', 'data')",
        "axis 'data' more than once",
        "each axis at most once",
        "another axis",
    ),
    Row(
        "a repeated axis within a dimension",
        lambda: P(("x", "y", "x")),
        SpecError,
        "spmd.P",
        "axis 'x' more than once",
        "each axis at most once",
        "None",
    ),
    Row("an entry of P", lambda: P("x", 3), SpecError, "spmd.P: argument dimension 1", "3", "an axis name", 'P("x")'),
    Row(
        "an entry within an entry of P",
        lambda: P(("x", None)),
        SpecError,
        "spmd.P: argument dimension 0",
        "('x', None)",
        "a tuple of axis names",
        'P(("x", "y"))',
    ),
    Row(
        "a spec that is a string",
        lambda: run(lambda x: x, ins=({"w": ["data"]},)),
        SpecError,
        "argument in_specs[0]['w'][0]",
        "str 'data'",
        "P(...), a Layout, None, or a pytree of them",
        'P("x") splits dimension 0',
    ),
    Row(
        "no out_specs",
        lambda: spmd.map(lambda x: x, P()),
        SpecError,
        "spmd.map: argument out_specs",
        "nothing",
        "a spec",
        "out_specs=P()",
    ),
    Row(
        "a map of no function",
        lambda: spmd.map(D, D, D),
        SpecError,
        "spmd.map: argument f",
        "P('data')",
        "a function",
        "spmd.map(f, in_specs, out_specs)",
    ),
    Row(
        "fewer specs than arguments",
        lambda: run(lambda x, y: x, X, X, ins=(P(),)),
        SpecError,
        "argument in_specs",
        "1 spec for 2 arguments",
        "one entry per argument",
        "None for one that is passed as it is",
    ),
    Row(
        "more specs than arguments",
        lambda: run(lambda x: x, ins=(P(), P())),
        SpecError,
        "argument in_specs",
        "2 specs for 1 argument",
        "one entry per argument",
        "in_specs=((P(), ...),)",
    ),
    Row(
        "a name without a spec",
        lambda: spmd.map(step, {"w": P()}, P())(X, rate=2.0),
        SpecError,
        "spmd.map of step: argument in_specs, for 'rate'",
        "specs for 'w'",
        "a spec for every argument",
        "{'rate': P(), ...}",
    ),
    Row(
        "a spec for a name that f does not have",
        lambda: spmd.map(step, {"w": P(), "rate": None, "rat": P()}, P())(X, rate=2.0),
        SpecError,
        "spmd.map of step: argument in_specs",
        "a spec for 'rat'",
        "names of arguments: 'w', 'rate'",
        "write 'rate'",
    ),
    Row(
        "specs for a dict that are taken by name",
        lambda: run(lambda p: p["w"], {"w": X}, ins={"p": P(), "w": P()}),
        SpecError,
        "argument in_specs",
        "a spec for 'w'",
        "names of arguments: 'p'",
        "in_specs=({...},)",
    ),
    Row(
        "a key too many in in_specs",
        lambda: run(lambda p: p["a"], {"a": X}, ins=({"a": P(), "b": P()},)),
        SpecError,
        "argument in_specs, for 'p'",
        "{'a': *, 'b': *}: p has no 'b'",
        "a prefix of {'a': *}",
        "one for each part",
    ),
    Row(
        "a key too few in in_specs, deep down",
        lambda: run(lambda p: p, {"l": [X, {"w": X, "b": X}]}, ins=({"l": [P(), {"w": P()}]},)),
        SpecError,
        "argument in_specs, for 'p'",
        "p['l'][1]['b'] has no spec",
        "a prefix of {'l': [*, {'b': *, 'w': *}]}",
        "one for each part",
    ),
    Row(
        "another length in in_specs",
        lambda: run(lambda p: p, (X, X, X), ins=((P(), P()),)),
        SpecError,
        "argument in_specs, for 'p'",
        "p has 3 entries for 2 specs",
        "a prefix of (*, *, *)",
        "one for each part",
    ),
    Row(
        "another container in in_specs",
        lambda: run(lambda p: p, {"a": X}, ins=([P()],)),
        SpecError,
        "argument in_specs, for 'p'",
        "p is a dict, its specs a list",
        "a prefix of {'a': *}",
        "one for each part",
    ),
    Row(
        "specs of a tree for one array",
        lambda: run(lambda x: x, ins=((P(), P()),)),
        SpecError,
        "argument in_specs, for 'x'",
        "x is an ndarray, its specs a tuple",
        "one spec",
        "a spec for the whole",
    ),
    Row(
        "a key too many in out_specs",
        lambda: run(lambda x: {"a": x}, out={"a": D, "b": D}),
        SpecError,
        "argument out_specs, for 'result'",
        "result has no 'b'",
        "a prefix of {'a': *}",
        "one for each part",
    ),
    Row(
        "another length in out_specs",
        lambda: run(lambda x: (x, x), out=(D, D, D)),
        SpecError,
        "argument out_specs, for 'result'",
        "result has 2 entries for 3 specs",
        "a prefix of (*, *)",
        "one for each part",
    ),
    Row(
        "a tuple promised, an array returned",
        lambda: run(lambda x: x, out=(D, D)),
        SpecError,
        "argument out_specs, for 'result'",
        "result is an Array, its specs a tuple",
        "one spec",
        "a spec for the whole",
    ),
    Row(
        "put by a string",
        lambda: spmd.put(X, "data"),
        SpecError,
        "spmd.put: argument spec",
        "str 'data'",
        "a P",
        'P("x", None)',
    ),
    Row(
        "put a tree by a spec longer than the rank",
        lambda: spmd.put({"w": [X, X[0]]}, P(None, "model")),
        SpecError,
        "spmd.put: argument spec, for x['w'][1]",
        "an array of 1 dimension",
        "at most 1 entry",
        "shorten",
    ),
    Row(
        "put a tree by another tree",
        lambda: spmd.put({"w": X}, {"v": P()}),
        SpecError,
        "spmd.put: argument spec, for 'x'",
        "x has no 'v'",
        "a prefix of {'w': *}",
        "one for each part",
    ),
    Row(
        "put by a spec longer than the rank",
        lambda: spmd.put(X, P("data", None, "model")),
        SpecError,
        "spmd.put: argument spec",
        "an array of 2 dimensions",
        "at most 2 entries",
        "shorten",
    ),
]

ARGUMENTS = [
    Row(
        "a string",
        lambda: run(lambda x, mode: x, X, "fast", ins=(P(), P()), out=P()),
        SpecError,
        "argument mode",
        "str 'fast'",
        "an array, a number, or a PartitionedArray",
        "the spec None to pass it as it is",
    ),
    Row(
        "a string in a tree",
        lambda: run(lambda p: p, [X, {"k": "fast"}], ins=P()),
        SpecError,
        "argument p[1]['k']",
        "str 'fast'",
        "an array",
        "the spec None",
    ),
    Row(
        "an array of objects",
        lambda: run(lambda x: x, np.array([None, 1])),
        SpecError,
        "argument x",
        "ndarray object[2]",
        "an array",
        "np.asarray",
    ),
    Row(
        "an array of strings",
        lambda: run(lambda x: x, np.array(["a", "b"])),
        SpecError,
        "argument x",
        "<U1[2]",
        "an array",
        "np.asarray",
    ),
    Row(
        "an array of dates",
        lambda: run(lambda x: x, np.zeros(4, "datetime64[s]")),
        SpecError,
        "argument x",
        "datetime64[s][4]",
        "an array",
        "np.asarray",
    ),
    Row("put a string", lambda: spmd.put("abc", P()), LayoutError, "spmd.put: argument x", "<U3[]", "numbers", "dtype"),
    Row(
        "an array on another mesh",
        lambda: run(lambda x: x, spmd.put(X, P("x"), spmd.Mesh(x=4))),
        MeshError,
        "spmd.map of <lambda>: argument x",
        "an array on Mesh(x=4)",
        "an array on Mesh(data=2, model=2)",
        "x.numpy()",
    ),
    Row(
        "too few blocks",
        lambda: spmd.from_blocks([X, X], D),
        LayoutError,
        "spmd.from_blocks: argument blocks",
        "2 blocks",
        "one for each worker held here: [0, 1, 2, 3]",
        "empty ones too",
    ),
    Row(
        "blocks that do not join",
        lambda: spmd.from_blocks([X, X, X[:, :1], X[:, :1]], D),
        LayoutError,
        "spmd.from_blocks, laid out by P('data')",
        "shape [3, 2] on worker 0 (data=0, model=0), and one of shape [3, 1] on worker 2 (data=1, model=0)",
        "equal lengths in dimension 1",
        "name in the spec the axis",
    ),
    Row(
        "blocks of different rank",
        lambda: spmd.from_blocks([X, X, X[0], X[0]], D),
        LayoutError,
        "spmd.from_blocks",
        "shape [3, 2] on worker 0 (data=0, model=0), and one of shape [2] on worker 2",
        "as many dimensions everywhere",
        "np.expand_dims",
    ),
    Row(
        "blocks of different dtype",
        lambda: spmd.from_blocks([X, X, X.astype(int), X], D),
        LayoutError,
        "spmd.from_blocks: argument blocks",
        "float64 on worker 0 (data=0, model=0) and int64 on worker 2 (data=1, model=0)",
        "one dtype",
        "astype",
    ),
    Row(
        "copies that differ",
        lambda: spmd.from_blocks([X, X + 1, X, X], D),
        LayoutError,
        "spmd.from_blocks: argument blocks",
        "differ between worker 0 (data=0, model=0) and worker 1 (data=0, model=1)",
        "copies of one block along the axes that P('data') does not name",
        "name in the spec",
    ),
    Row(
        "a block of another shape than its index",
        lambda: spmd.from_callback((4, 2), D, lambda index: X),
        LayoutError,
        "spmd.from_callback: argument fn",
        "a block of shape [3, 2]",
        "shape [2, 2]",
        "whole[index]",
    ),
]

RESULTS = [
    Row(
        "a result that is not replicated",
        lambda: run(lambda x: x, out=P()),
        StateError,
        "spmd.map of <lambda>: result",
        "Varying(data) array float64[2, 2], promised by out_specs P() to be Invariant along 'data'",
        "one value along axis 'data'",
        "spmd.psum(x, 'data'), spmd.mean(x, 'data') or spmd.all_gather(x, 'data', to=\"invariant\")",
    ),
    Row(
        "a result in a tree that is not replicated",
        lambda: run(lambda x: {"loss": (x.sum(), 1.0)}, out=P()),
        StateError,
        "spmd.map of <lambda>: result['loss'][0]",
        "Varying(data) array float64[]",
        "one value along axis 'data'",
        "name 'data' in out_specs",
    ),
    Row(
        "a result that varies over one axis too many",
        lambda: run(lambda x: x, ins=P("data", "model")),
        StateError,
        "spmd.map of <lambda>: result",
        "Varying(data, model) array float64[2, 1], promised by out_specs P('data') to be Invariant along 'model'",
        "one value along axis 'model'",
        "spmd.psum(x, 'model')",
    ),
    Row(
        "a result that differs by value",
        lambda: run(lambda x: np.ones(3) * spmd.worker_index("data"), out=P()),
        StateError,
        "spmd.map of <lambda>: result",
        "an Invariant array that differs between worker 0 (data=0, model=0) and worker 2 (data=1, model=0)",
        "one value on all workers",
        "spmd.varying(a, axis_name)",
    ),
    Row(
        "a gradient that differs by value",
        lambda: spmd.grad(spmd.map(lambda w: lopsided(w).sum(), P(), P()))(X),
        StateError,
        "the gradient of w",
        "differs between worker 0 (data=0, model=0) and worker 1 (data=0, model=1)",
        "one value on all workers",
        "spmd.varying(a, axis_name)",
    ),
    Row(
        "blocks of different dtype",
        lambda: run(lambda x: x if spmd.worker_index("data") else x.astype(np.float32)),
        LayoutError,
        "spmd.map of <lambda>: result",
        "float32 on worker 0 (data=0, model=0) and float64 on worker 2 (data=1, model=0)",
        "one dtype on all workers",
        "astype",
    ),
    Row(
        "blocks that do not join",
        lambda: run(lambda x: [np.zeros((3, 2 + spmd.worker_index("data")))]),
        LayoutError,
        "spmd.map of <lambda>: result[0], laid out by P('data')",
        "a block of shape [3, 2] on worker 0 (data=0, model=0), and one of shape [3, 3] on worker 2",
        "equal lengths in dimension 1",
        "make the lengths agree",
    ),
    Row(
        "different trees",
        lambda: run(lambda x: (x, x) if spmd.worker_index("data") else x),
        LayoutError,
        "spmd.map of <lambda>: result",
        "* on worker 0 (data=0, model=0) and (*, *) on worker 2 (data=1, model=0)",
        "one structure",
        "the same tree",
    ),
    Row(
        "a string",
        lambda: run(lambda x: ["done"]),
        StateError,
        "spmd.map of <lambda>: result[0]",
        "str 'done'",
        "an array of numbers, or a number",
        "the out_spec None",
    ),
    Row(
        "an array of objects",
        lambda: run(lambda x: np.array([None])),
        StateError,
        "spmd.map of <lambda>: result",
        "ndarray object[1]",
        "an array of numbers",
        "the out_spec None",
    ),
    Row(
        "no return",
        lambda: run(lambda x: None),
        StateError,
        "spmd.map of <lambda>: result",
        "None",
        "what out_specs promise: P('data')",
        "return",
    ),
    Row(
        "a Varying array with the out_spec None",
        lambda: run(lambda x: x, out=None),
        StateError,
        "spmd.map of <lambda>: result",
        "Varying(data) array float64[2, 2], with the out_spec None",
        "equal on all workers",
        "give it a spec",
    ),
    Row(
        "a traced array with the out_spec None",
        lambda: spmd.grad(lambda x: run(lambda x: (spmd.sum(x, "data"),) * 2, x, out=(P(), None))[0])(X),
        StateError,
        "spmd.map of <lambda>: result[1]",
        "traced Invariant array float64[], with the out_spec None",
        "has no gradient",
        "give it a spec",
    ),
]

SUMS = [
    Row(
        "psum of an Invariant array",
        lambda: run(lambda x: spmd.psum(x, "data"), ins=P(), out=P()),
        StateError,
        "spmd.psum: argument x",
        "Invariant array float64[3, 2], which does not vary over axis 'data'",
        "an array that varies over 'data'",
        "the same on all 2 workers; spmd.pvary(x, 'data') first if the sum of 2 copies is meant",
    ),
    Row(
        "psum of what varies over one axis of two",
        lambda: run(lambda x: spmd.psum(x, ("data", "model")), out=P()),
        StateError,
        "spmd.psum: argument x",
        "Varying(data) array float64[2, 2], which does not vary over axis 'model'",
        "an array that varies over 'data' and 'model'",
        "name 'data' only",
    ),
    Row(
        "psum of an Invariant array over two axes",
        lambda: run(lambda x: spmd.psum(x, ("data", "model")), ins=P(), out=P()),
        StateError,
        "spmd.psum: argument x",
        "axis ('data', 'model')",
        "varies over 'data' and 'model'",
        "the same on all 4 workers",
    ),
    Row(
        "psum_scatter of an Invariant array",
        lambda: run(lambda x: spmd.psum_scatter(x, "data", tiled=True), ins=P()),
        StateError,
        "spmd.psum_scatter: argument x",
        "Invariant array",
        "varies over 'data'",
        "spmd.pvary",
    ),
    Row(
        "spmd.sum of an Invariant array",
        lambda: run(lambda x: spmd.sum(x, "data"), ins=P(), out=P()),
        StateError,
        "argument x",
        "Invariant array",
        "varies over 'data'",
        "spmd.pvary",
    ),
    Row(
        "sum_reduce of an Invariant array",
        lambda: run(lambda x: spmd.sum_reduce(x, "data"), ins=P(), out=P()),
        StateError,
        "spmd.sum_reduce: argument x",
        "Invariant array",
        "varies over 'data'",
        "spmd.pvary",
    ),
    Row(
        "a slice of a Varying array",
        lambda: run(lambda x: spmd.pslice(x, "data", tiled=True)),
        StateError,
        "spmd.pslice: argument x",
        "Varying(data) array float64[2, 2], which varies over axis 'data'",
        "Invariant along 'data'",
        "spmd.psum, spmd.all_gather(..., to='invariant')",
    ),
    Row(
        "a Varying array is no Invariant one",
        lambda: run(lambda x: spmd.pcast(x, "data", to="invariant"), out=P()),
        StateError,
        "spmd.pcast: argument x",
        "Varying(data) array float64[2, 2]",
        "Invariant along 'data'",
        "spmd.psum",
    ),
    Row(
        "a state that there is not",
        lambda: run(lambda x: spmd.pcast(x, "data", to="unvarying")),
        StateError,
        "spmd.pcast: argument to",
        "'unvarying'",
        '"varying" or "invariant"',
        'to="varying"',
    ),
    Row(
        "a state to gather to that there is not",
        lambda: run(lambda x: spmd.all_gather(x, "data", to="all")),
        StateError,
        "spmd.all_gather: argument to",
        "'all'",
        '"varying" or "invariant"',
        'to="invariant"',
    ),
    Row(
        "a sum of strings",
        lambda: run(lambda x: spmd.psum([x, "abc"], "data")),
        StateError,
        "spmd.psum: argument x",
        "str 'abc'",
        "a pytree of them",
        "np.asarray",
    ),
    Row(
        "the largest complex number",
        lambda: run(lambda x: spmd.pmax(x, "data"), EVEN * 1j, out=P()),
        StateError,
        "spmd.pmax: argument x",
        "complex128[2, 2]",
        "real numbers",
        "np.abs",
    ),
    Row(
        "the largest of nothing",
        lambda: run(lambda x: spmd.max(x, "data"), np.ones((0, 2)), out=P()),
        LayoutError,
        "spmd.max: argument x",
        "without entries on every worker",
        "at least one entry",
        "spmd.psum(x.size, axis_name)",
    ),
    Row(
        "a dimension that there is not",
        lambda: run(lambda x: spmd.mean(x, "data", axis=5), out=P()),
        LayoutError,
        "spmd.mean: argument axis",
        "5 for an array of 2 dimensions",
        "from -2 to 1",
        "a dimension that the array has",
    ),
]

AXES = [
    Row(
        "an unknown axis",
        lambda: run(lambda x: spmd.psum(x, "dat"), out=P()),
        MeshError,
        "spmd.psum: argument axis_name",
        "'dat'",
        "an axis of Mesh(data=2, model=2), or a tuple of axes",
        "write 'data'",
    ),
    Row(
        "an axis like none",
        lambda: run(lambda x: spmd.axis_index(("data", "q"))),
        MeshError,
        "spmd.axis_index: argument axis_name",
        "('data', 'q')",
        "an axis of Mesh(data=2, model=2)",
        "name one of 'data', 'model'",
    ),
    Row(
        "a repeated axis",
        lambda: run(lambda x: spmd.pmean(x, ("data", "data"))),
        MeshError,
        "spmd.pmean: argument axis_name",
        "('data', 'data')",
        "each axis once",
        "leave out",
    ),
    Row(
        "an axis by number",
        lambda: run(lambda x: spmd.psum(x, 0)),
        MeshError,
        "spmd.psum: argument axis_name",
        "0",
        "an axis of Mesh",
        "'data', 'model'",
    ),
    *(
        Row(
            f"{name} outside of a body",
            call,
            MeshError,
            f"spmd.{name}",
            "a call outside of any body",
            "a worker",
            f"spmd.map(lambda x: spmd.{name}(...)",
        )
        for name, call in {
            "psum": lambda: spmd.psum(X, "data"),
            "all_gather": lambda: spmd.all_gather(X, "data"),
            "ppermute": lambda: spmd.ppermute(X, "data", [(0, 1)]),
            "mean": lambda: spmd.mean(X, "data"),
            "axis_index": lambda: spmd.axis_index("data"),
            "axis_size": lambda: spmd.axis_size("data"),
            "worker_index": lambda: spmd.worker_index("data"),
            "varying": lambda: spmd.varying(X, "data"),
            "keep": lambda: spmd.keep(X, "data"),
        }.items()
    ),
    Row(
        "an operator outside of a body",
        lambda: Sum(("data",))(X),
        MeshError,
        "spmd.psum",
        "a call outside of any body",
        "a worker",
        "spmd.map",
    ),
]

MOVES = [
    Row(
        "a target out of range",
        lambda: run(lambda x: spmd.ppermute(x, "data", [(0, 2)])),
        LayoutError,
        "spmd.ppermute: argument perm",
        "the pair (0, 2), whose target is out of range",
        "from 0 to 1 along 'data'",
        "(i, (i + 1) % 2) for i in range(2)",
    ),
    Row(
        "a source out of range",
        lambda: run(lambda x: spmd.ppermute(x, "data", [(-1, 0)])),
        LayoutError,
        "spmd.ppermute: argument perm",
        "the pair (-1, 0), whose source is out of range",
        "from 0 to 1",
        "% 2",
    ),
    Row(
        "a target twice",
        lambda: run(lambda x: spmd.ppermute(x, "data", [(0, 1), (1, 1)])),
        LayoutError,
        "spmd.ppermute: argument perm",
        "target 1 twice in [(0, 1), (1, 1)]",
        "at most once as source and once as target",
        "several ppermutes",
    ),
    Row(
        "a source twice",
        lambda: run(lambda x: spmd.ppermute(x, ("data", "model"), [(3, 1), (3, 0)])),
        LayoutError,
        "spmd.ppermute: argument perm",
        "source 3 twice",
        "at most once",
        "several ppermutes",
    ),
    *(
        Row(
            f"a permutation of {name}",
            lambda perm=perm: run(lambda x: spmd.ppermute(x, "data", perm)),
            LayoutError,
            "spmd.ppermute: argument perm",
            repr(perm),
            "pairs (source, target) of ints",
            "[(0, 1), (1, 0)]",
        )
        for name, perm in {"places": [0, 1], "triples": [(0, 1, 2)], "floats": [(0, 1.5)], "letters": "ab"}.items()
    ),
    Row(
        "a shift by half a worker",
        lambda: run(lambda x: spmd.shift(x, "data", 0.5)),
        LayoutError,
        "spmd.shift: argument offset",
        "float 0.5",
        "an int",
        "spmd.ppermute",
    ),
    Row(
        "an untiled gather of uneven blocks",
        lambda: run(lambda x: spmd.all_gather(x, "data")),
        LayoutError,
        "spmd.all_gather: argument x",
        "blocks of shapes [2, 2] (member 0) and [1, 2] (member 1)",
        "blocks of one shape",
        "tiled=True",
    ),
    Row(
        "a gather along the dimension that is even",
        lambda: run(lambda x: spmd.all_gather(x, "data", axis=1, tiled=True)),
        LayoutError,
        "spmd.all_gather: argument x",
        "blocks of shapes [2, 2] (member 0) and [1, 2] (member 1)",
        "differ in dimension 1 only",
        "the dimension in which they differ",
    ),
    Row(
        "a gather along a dimension that there is not",
        lambda: run(lambda x: spmd.all_gather(x, "data", axis=2, tiled=True)),
        LayoutError,
        "spmd.all_gather: argument axis",
        "2 for an array of 2 dimensions",
        "from -2 to 1",
        "a dimension that the array has",
    ),
    Row(
        "an untiled scatter of another length",
        lambda: run(lambda x: spmd.psum_scatter(x, "data"), np.ones((6, 3))),
        LayoutError,
        "spmd.psum_scatter: argument x",
        "length 3 in dimension 0",
        "length 2, one entry per worker",
        "tiled=True",
    ),
    Row(
        "a scatter of a number",
        lambda: run(lambda x: spmd.psum_scatter(x.sum(), "data")),
        LayoutError,
        "spmd.psum_scatter: argument scatter_dimension",
        "0 for an array of 0 dimensions",
        "at least one dimension",
        "np.reshape(x, (1,))",
    ),
    Row(
        "sizes that do not add up",
        lambda: run(lambda x: spmd.psum_scatter(x, "data", tiled=True, sizes=(1, 1)), np.ones((6, 3))),
        LayoutError,
        "spmd.psum_scatter: argument sizes",
        "(1, 1) for a dimension of length 3 over 2 workers",
        "2 sizes that add to 3",
        "leave sizes out",
    ),
    Row(
        "an untiled all-to-all of another length",
        lambda: run(lambda x: spmd.all_to_all(x, "data", 0, 0), np.ones((6, 3))),
        LayoutError,
        "spmd.all_to_all: argument x",
        "length 3 in dimension 0",
        "length 2",
        "tiled=True",
    ),
    Row(
        "an all-to-all along a dimension that there is not",
        lambda: run(lambda x: spmd.all_to_all(x, "data", 0, 7), EVEN),
        LayoutError,
        "spmd.all_to_all: argument concat_axis",
        "7 for an array of 2 dimensions",
        "from -2 to 1",
        "a dimension that the array has",
    ),
]

ROOTED = [
    Row(
        "a Rooted value and a number",
        lambda: run(lambda x: spmd.keep(x, "data") + 1, ins=P()),
        StateError,
        "an operation on arrays",
        "Rooted(0 along data) value float64[3, 2]",
        "a value that this worker has",
        "spmd.replicate(x, axis_name) makes it Invariant, spmd.broadcast(x, axis_name) Varying",
    ),
    *(
        Row(
            f"a Rooted value and {name}",
            call,
            StateError,
            "an operation on arrays",
            "Rooted(0 along data)",
            "a value that this worker has",
            "spmd.replicate",
        )
        for name, call in {
            "an array": lambda: run(lambda x: x * spmd.keep(x, "data"), ins=P()),
            "np.sin": lambda: run(lambda x: np.sin(spmd.keep(x, "data")), ins=P()),
            "np.sum": lambda: run(lambda x: np.sum(spmd.keep(x, "data")), ins=P()),
            "an index": lambda: run(lambda x: spmd.keep(x, "data")[0], ins=P()),
            "if": lambda: run(lambda x: x if spmd.keep(x, "data") else -x, ins=P()),
        }.items()
    ),
    Row(
        "a method of a Rooted value",
        lambda: run(lambda x: spmd.keep(x, "data").sum(), ins=P()),
        MissingMethodError,
        "x.sum",
        "Rooted(0 along data)",
        "a value that this worker has",
        "spmd.replicate",
    ),
    Row(
        "a sum of Rooted values",
        lambda: run(lambda x: spmd.psum(spmd.keep(x, "data"), "data"), ins=P()),
        StateError,
        "spmd.psum: argument x",
        "Rooted(0 along data)",
        "an array of numbers",
        "spmd.replicate",
    ),
    Row(
        "a Rooted result",
        lambda: run(lambda x: [spmd.keep(x, "data")], ins=P()),
        StateError,
        "spmd.map of <lambda>: result[0]",
        "Rooted(0 along data)",
        "an array",
        "spmd.replicate(x, axis_name)",
    ),
    Row(
        "keep of a Varying array",
        lambda: run(lambda x: spmd.keep(x, "data")),
        StateError,
        "spmd.keep: argument x",
        "Varying(data) array",
        "Invariant along 'data'",
        "reduce or gather it",
    ),
    Row(
        "replicate of what is not Rooted",
        lambda: run(lambda x: spmd.replicate(x, "data"), ins=P()),
        StateError,
        "spmd.replicate: argument x",
        "Invariant array",
        "Rooted(0) along 'data'",
        "spmd.keep(x, axis_name, root)",
    ),
    Row(
        "broadcast from another root",
        lambda: run(lambda x: spmd.broadcast(spmd.keep(x, "data", root=1), "data"), ins=P()),
        StateError,
        "spmd.broadcast: argument x",
        "Rooted(1 along data)",
        "Rooted(0) along 'data'",
        ", root=1)",
    ),
    Row(
        "replicate along another axis",
        lambda: run(lambda x: spmd.replicate(spmd.keep(x, "data"), "model"), ins=P()),
        StateError,
        "spmd.replicate: argument x",
        "Rooted(0 along data)",
        "Rooted(0) along 'model'",
        "spmd.replicate(x, ('data',), root=0)",
    ),
    *(
        Row(
            f"a root {root!r}",
            lambda root=root: run(lambda x: spmd.keep(x, ("data", "model"), root=root), ins=P()),
            LayoutError,
            "spmd.keep: argument root",
            repr(root),
            "a place along 'data' and 'model', from 0 to 3",
            "root=0",
        )
        for root in (4, -1, "first")
    ),
]

CLOSURES = [
    Row(
        "a map inside a body",
        lambda: run(lambda x: spmd.map(step, P(), P())(x)),
        MeshError,
        "spmd.map of step",
        "a map that is called inside a body",
        "maps that are called from outside",
        "call the function itself",
    ),
    Row(
        "put inside a body",
        lambda: run(lambda x: spmd.put(x, D)),
        MeshError,
        "spmd.put",
        "a call inside a body",
        "a call from outside",
        "as an argument",
    ),
    *(
        Row(
            f"a global array in a body: {name}",
            lambda use=use: (lambda w: run(lambda x: use(x, w)))(here()),
            ClosureError,
            head,
            "PartitionedArray float64[3, 2] laid out by P('data', None) in a body",
            "bodies that use their arguments only",
            "as an argument, with P('data', None) in in_specs",
        )
        for name, head, use in (
            ("x + w", "np.add", lambda x, w: x + w),
            ("np.sum", "np.sum", lambda x, w: np.sum(w)),
            ("np.linalg.inv", "np.linalg.inv", lambda x, w: np.linalg.inv(w)),
            ("np.asarray", "np.asarray", lambda x, w: np.asarray(w)),
            ("an index", "x[0]", lambda x, w: w[0]),
            ("numpy()", "PartitionedArray.numpy", lambda x, w: w.numpy()),
            ("float()", "float()", lambda x, w: float(w)),
            ("put", "spmd.put", lambda x, w: spmd.put(w, P())),
            ("as a result", "spmd.map of <lambda>: result", lambda x, w: w),
        )
    ),
    Row(
        "a global array in a collective",
        lambda: (lambda w: run(lambda x: spmd.psum(w, "data"), out=P()))(here()),
        StateError,
        "spmd.psum: argument x",
        "PartitionedArray float64[3, 2]",
        "an array of numbers",
        "pass it to the map as an argument",
    ),
    Row(
        "a traced array against one of the body",
        lambda: spmd.grad(lambda w: run(lambda x: spmd.sum(x * w, "data"), out=P()))(X),
        ClosureError,
        "an operation in a body",
        "traced array float64[3, 2] that was traced outside of this map",
        "arrays of this body",
        "pass it to the map as an argument",
    ),
    Row(
        "a traced array by itself",
        lambda: spmd.grad(lambda w: run(lambda x: np.sum(np.sin(w)) + 0 * np.sum(x), out=P()))(X),
        ClosureError,
        "spmd.map",
        "a body that uses an array traced outside of its map",
        "bodies that use their arguments only",
        "pass the array to the map as an argument, with a spec in in_specs",
    ),
    Row(
        "a traced array as a result",
        lambda: spmd.grad(lambda w: run(lambda x: [w], out=P())[0].sum())(X),
        ClosureError,
        "spmd.map of <lambda>: result[0]",
        "traced array float64[3, 2] that was traced outside of this map",
        "arrays of this body",
        "pass it to the map as an argument",
    ),
    Row(
        "a traced array that has outlived its grad",
        lambda: (lambda box: (spmd.grad(lambda w: (box.append(w), w.sum())[1])(X), box[0] + 1))([]),
        DifferentiationError,
        "a traced array",
        "a transformation that has already ended",
        "a value that was returned",
        "has_aux=True",
    ),
]

BODIES = [
    Row(
        "float of a Varying array",
        lambda: run(lambda x: x * float(x.sum())),
        StateError,
        "float()",
        "Varying(data) array float64[]",
        "an Invariant array: each worker would go its own way",
        "spmd.psum",
    ),
    Row(
        "int of a Varying array",
        lambda: run(lambda x: x * int(x.sum())),
        StateError,
        "int()",
        "Varying(data) array float64[]",
        "an Invariant array",
        "spmd.block(x)",
    ),
    Row(
        "if on a Varying array",
        lambda: run(lambda x: x if x.sum() > 0 else -x),
        StateError,
        "bool(), as `if` calls it",
        "Varying(data) array bool[]",
        "an Invariant array",
        "np.where",
    ),
    Row(
        "a range of a Varying array",
        lambda: run(lambda x: [x for _ in range(spmd.axis_index("data"))]),
        StateError,
        "index(), as range(x)",
        "Varying(data) array int64[]",
        "an Invariant array",
        "spmd.worker_index",
    ),
    Row(
        "float of a traced array",
        lambda: spmd.grad(lambda w: w.sum() * float(w.sum()))(X),
        TracedConversionError,
        "float()",
        "traced array float64[]",
        "a Python number has no gradient",
        "spmd.stop_gradient(x)",
    ),
    Row(
        "an assignment",
        lambda: run(lambda x: x.__setitem__(0, 1.0)),
        StateError,
        "x[i] = v",
        "an assignment into a Varying(data) array float64[2, 2]",
        "arrays are immutable",
        "x = x.at[i].set(v), or spmd.at(x)[i].set(v)",
    ),
    Row(
        "a value that the dtype cannot hold",
        lambda: run(lambda x: x.at[0].set(0.5), np.arange(4)),
        DtypeError,
        "x.at[i]: argument v",
        "float64 for an array of int64",
        "values that int64 can hold",
        "x.astype('float64').at[i]",
    ),
    Row(
        "out=",
        lambda: run(lambda x: np.add(x, x, out=np.zeros((2, 2)))),
        StateError,
        "np.add: argument out",
        "an array to write into",
        "immutable",
        "y = np.add(...)",
    ),
    Row(
        "+= into a bare array",
        lambda: run(lambda x: np.zeros((2, 2)).__iadd__(x)),
        StateError,
        "np.add: argument out",
        "an array to write into",
        "immutable",
        "y = np.add(...)",
    ),
    Row(
        "np.asarray of an array of a body",
        lambda: run(np.asarray),
        TracedConversionError,
        "np.asarray, or a function that calls it",
        "Varying(data) array float64[2, 2]",
        "a bare array; converting would lose the state",
        "spmd.block(x)",
    ),
    Row(
        "np.array of arrays of a body",
        lambda: run(lambda x: np.array([x[0], x[0]])),
        TracedConversionError,
        "np.array",
        "Varying(data) array float64[2]",
        "a bare array",
        "np.stack([a, b]) in place of np.array([a, b])",
    ),
    Row(
        "np.asarray of a traced array",
        lambda: spmd.grad(lambda w: np.asarray(w).sum())(X),
        TracedConversionError,
        "np.asarray",
        "traced array float64[3, 2]",
        "cut the result off from its gradient",
        "spmd.stop_gradient(x)",
    ),
    Row(
        "a method that is a function",
        lambda: run(lambda x: x.expand_dims(0)),
        MissingMethodError,
        "x.expand_dims",
        "Varying(data) array float64[2, 2]",
        "a method",
        "np.expand_dims(x)",
    ),
    Row(
        "the bare data of a traced array",
        lambda: spmd.grad(lambda w: spmd.block(w).sum())(X),
        StateError,
        "spmd.block: argument x",
        "traced array",
        "an undifferentiated array",
        "spmd.stop_gradient(x)",
    ),
]

GRADIENTS = [
    Row(
        "of ints",
        lambda: spmd.grad(lambda w, x: x.sum(), argnums=1)(X, np.arange(3)),
        DifferentiationError,
        "grad of <lambda>: argument x",
        "ndarray int64[3]",
        "floating or complex dtype",
        "x.astype(float)",
    ),
    Row(
        "of ints in a tree",
        lambda: spmd.grad(lambda p: np.sum(p["a"][0]))({"a": [X, np.arange(3)]}),
        DifferentiationError,
        "argument p['a'][1]",
        "ndarray int64[3]",
        "floating",
        "leave it out of argnums",
    ),
    Row(
        "of an int",
        lambda: spmd.value_and_grad(lambda q: q * q)(3),
        DifferentiationError,
        "grad of <lambda>: argument q",
        "int 3",
        "floating",
        "float(x)",
    ),
    Row(
        "of a partitioned array of ints",
        lambda: spmd.grad(np.sum)(spmd.put(np.arange(4), D)),
        DifferentiationError,
        "grad of sum: argument a",
        "PartitionedArray int64[4] laid out by P('data')",
        "floating",
        "astype",
    ),
    Row(
        "in a body, of ints",
        lambda: run(lambda x: spmd.grad(lambda q: q.sum())(x), np.arange(4)),
        DifferentiationError,
        "grad of <lambda>: argument q",
        "Varying(data) array int64[2]",
        "floating",
        "astype",
    ),
    Row(
        "an argument that there is not",
        lambda: spmd.grad(lambda w: w.sum(), argnums=1)(X),
        DifferentiationError,
        "grad of <lambda>: argument argnums",
        "1 with 1 positional arguments",
        "an integer, or several different ones, from -1 to 0",
        "by position",
    ),
    Row(
        "of what is no scalar",
        lambda: spmd.grad(step)(X, rate=1.0),
        DifferentiationError,
        "grad of step: result",
        "traced array float64[3, 2]",
        "a scalar (shape ())",
        "spmd.jacrev or spmd.vjp",
    ),
    Row(
        "of a map to what is no scalar",
        lambda: spmd.grad(spmd.map(lambda x: x, D, D))(X),
        DifferentiationError,
        "grad of <lambda>: result",
        "traced array float64[3, 2]",
        "a scalar",
        "x.sum()",
    ),
    Row(
        "in a body, of what is no scalar",
        lambda: run(lambda x: spmd.grad(lambda q: q)(x)),
        DifferentiationError,
        "grad of <lambda>: result",
        "traced Varying(data) array float64[2, 2]",
        "a scalar",
        "x.sum()",
    ),
    Row(
        "of a complex scalar",
        lambda: spmd.grad(np.sum)(X * 1j),
        DifferentiationError,
        "grad of sum: result",
        "traced array complex128[]",
        "a real result",
        "holomorphic=True",
    ),
    Row(
        "of a bare array that was written into",
        _written_into,
        MutationError,
        "np.multiply, recorded at",
        "a bare array that was written into after the tape had kept it",
        "arrays that stay as they are",
        "a = a + 1 in place of a += 1",
    ),
    Row(
        "in a body with check=False",
        lambda: run(lambda x: spmd.grad(lambda q: q.sum())(x), check=False),
        DifferentiationError,
        "a gradient transformation in a body",
        "a map with check=False that is not differentiated from outside",
        "arrays that carry their state",
        "check=True",
    ),
    Row(
        "through a function without a rule",
        lambda: spmd.grad(lambda w: run(lambda w: np.intersect1d(w, w), w))(X),
        DifferentiationError,
        "np.intersect1d",
        "a traced array, and no derivative rule for this function",
        "a function with a rule",
        "np.isin",
    ),
    Row(
        "a cotangent of another structure",
        lambda: spmd.vjp(spmd.map(lambda x: x, D, D), X)[1]((X, X)),
        DifferentiationError,
        "pullback, vjp of <lambda>: argument cotangent",
        "(*, *)",
        "the structure of the result",
        "one cotangent per result",
    ),
    Row(
        "a cotangent of another shape",
        lambda: spmd.vjp(spmd.map(lambda x: x, D, D), X)[1](X[:2]),
        DifferentiationError,
        "pullback, vjp of <lambda>: argument cotangent",
        "ndarray float64[2, 2]",
        "shape [3, 2]",
        "np.broadcast_to(g, shape)",
    ),
]

GLOBAL = [
    *(
        Row(
            f"{name} of a global array",
            call,
            error,
            head,
            "PartitionedArray float64[3, 2] laid out by P('data', None)",
            "a ufunc (+, <, np.exp, ...) or np.sum",
            "spmd.map(f, in_specs=..., out_specs=...)(x), or on x.numpy()",
        )
        for name, head, error, call in (
            ("np.linalg.inv", "np.linalg.inv", LayoutError, lambda: np.linalg.inv(here())),
            ("np.fft.rfft", "np.fft.rfft", LayoutError, lambda: np.fft.rfft(here())),
            ("@", "np.matmul", LayoutError, lambda: here() @ here()),
            ("@ with a bare array", "np.matmul", LayoutError, lambda: X.T @ here()),
            ("np.mean", "np.mean", LayoutError, lambda: np.mean(here())),
            ("np.transpose", "np.transpose", LayoutError, lambda: np.transpose(here())),
            ("np.reshape", "np.reshape", LayoutError, lambda: np.reshape(here(), (2, 3))),
            ("np.concatenate", "np.concatenate", LayoutError, lambda: np.concatenate([here(), here()])),
            ("np.add.reduce", "np.add.reduce", LayoutError, lambda: np.add.reduce(here())),
            ("out=", "np.add with out=", LayoutError, lambda: np.add(here(), 1, out=np.zeros((3, 2)))),
            ("where=", "np.add with where=", LayoutError, lambda: np.add(here(), 1, where=[[True, False]])),
            ("an index", "x[0]", LayoutError, lambda: here()[0]),
            ("iteration", "iteration", LayoutError, lambda: list(here())),
            ("a method", "x.mean", MissingMethodError, lambda: here().mean()),
            ("an attribute", "x.T", MissingMethodError, lambda: here().T),
        )
    ),
    Row(
        "a stack of different shapes",
        lambda: np.stack([here(), X[:1]]),
        LayoutError,
        "np.stack",
        "PartitionedArray float64[3, 2] laid out by P('data', None) and ndarray float64[1, 2]",
        "arrays of one shape",
        "np.broadcast_to",
    ),
    Row(
        "an assignment to a global array",
        lambda: here().__setitem__(0, 1.0),
        LayoutError,
        "x[i] = v",
        "PartitionedArray float64[3, 2]",
        "arrays are immutable",
        "b.at[i].set(v)",
    ),
    Row(
        "the float of an array",
        lambda: float(here()),
        LayoutError,
        "float()",
        "PartitionedArray float64[3, 2]",
        "one entry",
        "x.numpy()",
    ),
    Row("the truth of an array", lambda: bool(here()), LayoutError, "bool()", "[3, 2]", "one entry", "x.numpy()"),
    Row("a format of an array", lambda: f"{here():.3f}", LayoutError, "format()", "[3, 2]", "one entry", "x.numpy()"),
    Row(
        "operands that are split differently",
        lambda: here() + spmd.put(X, P("model")),
        LayoutError,
        "np.add",
        "laid out by P('data', None) and PartitionedArray float64[3, 2] laid out by P('model', None)",
        "operands that are split alike, or not at all",
        "spmd.put(x, other.spec)",
    ),
    Row(
        "operands of different blocks",
        lambda: here() + spmd.from_blocks([X[:1], X[:1], X[1:], X[1:]], D),
        LayoutError,
        "np.add",
        "laid out by P('data', None) in blocks of ((1, 2), (2,))",
        "split alike",
        "spmd.put(x, other.spec)",
    ),
    Row(
        "operands that do not broadcast",
        lambda: here() + np.ones(5),
        LayoutError,
        "np.add",
        "PartitionedArray float64[3, 2] laid out by P('data', None) and ndarray float64[5]",
        "shapes that broadcast",
        "the same shape",
    ),
    Row(
        "operands on different meshes",
        lambda: here() + spmd.put(X, P("x"), spmd.Mesh(x=4)),
        MeshError,
        "np.add",
        "arrays on Mesh(data=2, model=2) and on Mesh(x=4)",
        "arrays on one mesh",
        "spmd.put(x.numpy(), spec, mesh)",
    ),
    Row(
        "put onto another mesh",
        lambda: spmd.put(here(), D, spmd.Mesh(data=4)),
        MeshError,
        "spmd.put: argument mesh",
        "Mesh(data=4) for an array on Mesh(data=2, model=2)",
        "the mesh that the array is on",
        "spmd.put(x.numpy(), spec, mesh)",
    ),
    Row(
        "a sum over a dimension that there is not",
        lambda: np.sum(here(), axis=2),
        LayoutError,
        "np.sum: argument axis",
        "2 for an array of 2 dimensions",
        "from -2 to 1",
        "a dimension that the array has",
    ),
    Row(
        "an inner product of different trees",
        lambda: spmd.inner([X, X], [X]),
        StateError,
        "spmd.inner: argument y",
        "1 arrays for 2",
        "pytrees of one structure",
        "its counterpart",
    ),
]

MESHES = [
    *(
        Row(f"a size {n!r}", lambda n=n: spmd.Mesh(x=n), MeshError, "spmd.Mesh: argument x", repr(n), "1", "Mesh(x=2)")
        for n in (0, -1, 2.0, "2", True)
    ),
    Row(
        "an unknown transport",
        lambda: spmd.Mesh(x=2, transport="mpii"),
        MeshError,
        "spmd.Mesh: argument transport",
        "'mpii'",
        "'local', 'mpi'",
        'transport="mpi"',
    ),
    Row(
        "an unknown scheduler",
        lambda: spmd.Mesh(x=2, scheduler="thread"),
        MeshError,
        "spmd.Mesh: argument scheduler",
        "'thread'",
        "'auto', 'lockstep', 'threads'",
        'scheduler="threads"',
    ),
    Row(
        "an axis named as an option",
        lambda: spmd.Mesh(transport=2),
        MeshError,
        "spmd.Mesh: argument transport",
        "2",
        "'local', 'mpi'",
        'make_mesh((2,), ("transport",))',
    ),
    Row(
        "a communicator and virtual workers",
        lambda: spmd.Mesh(x=2, comm=object(), transport="local"),
        MeshError,
        "spmd.Mesh: argument comm",
        'transport="local"',
        "one of them",
        "leave out",
    ),
    Row(
        "a communicator that is none",
        lambda: spmd.put(X, P("x"), spmd.Mesh(x=2, comm=7)),
        MeshError,
        "spmd.Mesh: argument comm",
        "int 7",
        "an mpi4py communicator",
        "leave it out",
    ),
    *(
        Row(
            f"make_mesh of {shapes!r} and {names!r}",
            lambda shapes=shapes, names=names: spmd.make_mesh(shapes, names),
            MeshError,
            "spmd.make_mesh: argument axis_names",
            f"{names!r} for sizes {shapes!r}",
            "all different",
            'make_mesh((2, 2), ("data", "model"))',
        )
        for shapes, names in (((2, 2), ("a",)), ((2, 2), ("a", "a")), ((2,), "x"), (2, "x"), ((2,), (1,)))
    ),
    Row(
        "a mesh that is none",
        lambda: spmd.put(X, D, 3),
        MeshError,
        "spmd.put: argument mesh",
        "int 3",
        "a Mesh",
        "mesh=spmd.Mesh(x=4)",
    ),
]

COLLECTIVES = [
    Row(
        "different calls",
        lambda: run(
            lambda x: spmd.psum(x, "data") if spmd.worker_index("data") == 0 else spmd.pmax(x, "data"), EVEN, out=P()
        ),
        MismatchError,
        "a collective",
        "worker 0 (data=0, model=0): psum(float64[2, 2], 'data')",
        "the same operator",
        "let all workers take the same path",
    ),
    Row(
        "a worker that never comes",
        lambda: run(lambda x: spmd.psum(x, "data") if spmd.worker_index("data") == 0 else x, EVEN),
        DeadlockError,
        "a collective",
        "worker 2 (data=1, model=0) has left the map",
        "the same collectives in the same order",
        "let all workers take the same path",
    ),
    Row(
        "a sum of uneven blocks",
        lambda: run(lambda x: spmd.psum(x, "data"), out=P()),
        MismatchError,
        "a collective",
        "worker 2 (data=1, model=0): psum(float64[1, 2], 'data')",
        "dtype and shape",
        "reduce uneven blocks over their own dimensions first, as spmd.sum",
    ),
]

EVERY = [
    *SPECS,
    *ARGUMENTS,
    *RESULTS,
    *SUMS,
    *AXES,
    *MOVES,
    *ROOTED,
    *CLOSURES,
    *BODIES,
    *GRADIENTS,
    *GLOBAL,
    *MESHES,
    *COLLECTIVES,
]
if DEVICE != "cpu":  # Numbers on a device are not compared: that would wait for it.
    by_value = {"copies that differ", "a result that differs by value", "a gradient that differs by value"}
    EVERY = [row for row in EVERY if row.name not in by_value]


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.name)
def test_a_mistake_is_explained(row, scheduler):
    with spmd.Mesh(data=2, model=2, scheduler=scheduler):
        refused(row)


def test_the_pool_serves_after_every_error(scheduler):
    """One mesh lives through all of the mistakes, and computes rightly in between."""
    good = spmd.map(lambda x: spmd.psum(x.sum(), "data"), D, P())
    with spmd.Mesh(data=2, model=2, scheduler=scheduler):
        for row in EVERY[:: 3 if scheduler == "lockstep" else 5]:
            with pytest.raises(row.error):
                row.call()
            assert float(good(X)) == X.sum()


def test_without_a_mesh():
    words = ("no mesh, and no enclosing `with mesh:`", "a mesh to run on", "with spmd.Mesh(x=4): ..., or pass mesh=")
    for name, call in (
        ("spmd.map of step: argument mesh", lambda: spmd.map(step, P(), P())(X, rate=1.0)),
        ("spmd.put: argument mesh", lambda: spmd.put(X, P())),
        ("spmd.from_blocks: argument mesh", lambda: spmd.from_blocks([X], P())),
        ("spmd.from_callback: argument mesh", lambda: spmd.from_callback((3,), P(), np.ones)),
        ("spmd.check_adjoint: argument mesh", lambda: spmd.check_adjoint(Sum(("x",)), (3,))),
    ):
        refused(Row(name, call, MeshError, name, *words))


@pytest.mark.parametrize(
    ("variable", "option", "known"),
    [
        ("SPMD_TRANSPORT", "transport", "'local', 'mpi'"),
        ("SPMD_SCHEDULER", "scheduler", "'auto', 'lockstep', 'threads'"),
    ],
)
def test_a_variable_of_the_environment(monkeypatch, variable, option, known):
    monkeypatch.setenv(variable, "bogus")
    head = f"spmd.Mesh: argument {option}, from the environment variable {variable}"
    refused(Row(variable, lambda: spmd.Mesh(x=2), MeshError, head, "'bogus'", known, f'{option}="'))
    assert "bogus" in spmd.info()
    assert spmd.Mesh(x=2, transport="local", scheduler="threads").size == 2


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_more_workers_than_mpi_processes():
    program = """
import numpy as np, spmd
from spmd.errors import TransportError
try:
    spmd.map(lambda x: x, spmd.P(), spmd.P(), mesh=spmd.Mesh(x=2, y=3, transport="mpi"))(np.ones(3))
except TransportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = parsed(RuntimeError(done.stdout.rstrip("\n")))
    assert said.head == "spmd.Mesh"
    assert said.got == "Mesh(x=2, y=3) of 6 workers, and an MPI world of 1 process"
    assert said.need == "as many processes as workers"
    assert '"mpiexec -n 6"' in said.mend
    assert 'Mesh(..., transport="local")' in said.mend


# Errors of the user


class Mine(Exception):
    pass


def test_an_error_of_a_body_keeps_its_type_and_says_which_worker(scheduler):
    def body(x):
        if spmd.worker_index("data") == 1 and spmd.worker_index("model") == 0:
            raise Mine("seven")
        return spmd.psum(x, ("data", "model"))

    with spmd.Mesh(data=2, model=2, scheduler=scheduler), pytest.raises(Mine) as caught:
        run(body, EVEN, ins=P("data", "model"), out=P())
    assert caught.value.args == ("seven",)
    assert any("worker 2 (data=1, model=0)" in note for note in caught.value.__notes__)
    frames = [frame.name for frame in caught.traceback]
    assert frames[-1] == "body"


def test_an_error_of_every_worker_is_told_once(scheduler):
    with spmd.Mesh(x=4, scheduler=scheduler), pytest.raises(ZeroDivisionError) as caught:
        run(lambda x: 1 / 0, ins=P("x"), out=P("x"))
    assert any("worker 0 (x=0)" in note for note in caught.value.__notes__)
    assert sum(note.count("division") for note in caught.value.__notes__) == 0


def test_different_errors_are_all_told(scheduler):
    def body(x):
        raise (ValueError, KeyError)[spmd.worker_index("x")](f"from {spmd.worker_index('x')}")

    with spmd.Mesh(x=2, scheduler=scheduler), pytest.raises(ValueError, match="from 0") as caught:
        run(body, ins=P("x"), out=P("x"))
    assert "KeyError: 'from 1'" in "\n".join(caught.value.__notes__)


def test_an_error_in_the_backward_sweep_says_which_worker(scheduler):
    @spmd.custom_vjp
    def bad(x):
        return x

    def backward(_residuals, g):
        if spmd.worker_index("x") == 1:
            raise Mine("backward")
        return (g,)

    bad.defvjp(lambda x: (x, None), backward)
    with spmd.Mesh(x=2, scheduler=scheduler), pytest.raises(Mine, match="backward") as caught:
        spmd.grad(spmd.map(lambda x: spmd.sum(bad(x), "x"), P("x"), P()))(X)
    assert any("worker 1 (x=1)" in note for note in caught.value.__notes__)


def test_hasattr_says_what_there_is():
    with spmd.Mesh(x=2):
        x = spmd.put(X, P("x"))
        assert not hasattr(x, "mean")
        assert not hasattr(x, "no_such_name")
        assert hasattr(x, "astype")
        assert run(lambda b: b * (hasattr(b, "sum") and not hasattr(b, "expand_dims")), ins=P("x"), out=P("x")).shape


def test_every_error_class_is_documented_and_raised_somewhere():
    kinds = {getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert all(kind.__doc__ and issubclass(kind, Exception) for kind in kinds)
    elsewhere = {errors.TransportError, errors.StallError, errors.NonFiniteError, errors.ReplicaError}
    assert kinds - elsewhere <= {row.error for row in EVERY}  # those: test_mpi.py, test_debug.py


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("dta", ["data", "model"], ["data"]),
        ("svd", ["std", "vdot", "exp"], ["std", "vdot"]),
        ("", ["data"], []),
        ("sum", ["cumsum", "psum"], ["psum", "cumsum"]),
    ],
)
def test_the_nearest_names(name, known, found):
    assert errors.nearest(name, known) == found


def test_values_are_described_briefly():
    assert errors.describe(X) == "ndarray float64[3, 2]"
    assert errors.describe(3) == "int 3"
    assert len(errors.describe("a" * 500)) < 80
    with spmd.Mesh(x=2):
        assert errors.describe(spmd.put(X, P("x"))) == "PartitionedArray float64[3, 2] laid out by P('x', None)"


def test_errors_of_other_processes_have_their_class_where_it_is_known():
    class TakesNothing(Exception):
        def __init__(self):
            super().__init__()

    for error in (ValueError("no"), LayoutError("no"), np.linalg.LinAlgError("no")):
        found = errors.again(errors.class_name(error), "no")
        assert (type(found), str(found)) == (type(error), "no")
    for name in ("nowhere.Lost", "builtins.print", "numpy.ndarray", errors.class_name(TakesNothing())):
        found = errors.again(name, "no")
        assert (type(found), str(found)) == (RuntimeError, f"{name}: no")
