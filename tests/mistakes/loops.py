"""Mistakes in loops: steps that change the carry, lengths that differ, and what cannot be a leaf."""

from __future__ import annotations

import itertools

import numpy as np

import spmd
from mistakes import EVEN, D, Row, X, run
from spmd import P
from spmd.errors import DifferentiationError, LayoutError
from spmd.global_ops.resharding import reshard
from spmd.layout import Layout

Z = np.zeros(3)
PAIR = {"u": Z, "v": Z}
CUT = Layout((3, 2), D, {"data": 2, "model": 2}, ((1, 2), (2,)))


def step(carry, x):
    return carry, None


def scan(f, init=Z, xs=None, length=2, **options):
    return lambda: spmd.scan(f, init, xs, length, **options)


def _counted():
    """A step that gives something else each time."""
    count = itertools.count(1)
    f = lambda c, _: (np.tanh(c * next(count)), None)
    return spmd.grad(lambda c: np.sum(spmd.scan(f, c, length=5, checkpoint=2)[0]))(Z + 1)


THE_CARRY = "the carry, which a step returns"

CARRIES = [
    Row(
        f"a step that changes {name}",
        call,
        LayoutError,
        head,
        got,
        need,
        mend,
    )
    for name, call, head, got, need, mend in (
        (
            "the shape of a leaf",
            scan(lambda c, _: (c | {"v": c["v"][:2]}, None), PAIR),
            "spmd.scan of <lambda>: the carry['v'], which a step returns",
            "ndarray float64[2]",
            "ndarray float64[3], as the step takes it: one shape throughout the loop",
            "an initial value of the shape that the step returns",
        ),
        (
            "a number into an array",
            scan(lambda c, _: (c + Z, None), 0.0),
            THE_CARRY,
            "ndarray float64[3]",
            "float 0.0, as the step takes it: one shape",
            "np.full((3,), ...)",
        ),
        (
            "the dtype",
            scan(lambda c, _: (c * Z, None), np.ones(3, np.float32)),
            THE_CARRY,
            "ndarray float64[3]",
            "ndarray float32[3], as the step takes it: one dtype throughout the loop",
            "x.astype('float32') in the step",
        ),
        (
            "the dtype of a traced leaf",
            lambda: spmd.grad(lambda w: scan(lambda c, _: (c * w, None), np.ones(3, np.float32))()[0].sum())(Z),
            THE_CARRY,
            "traced array float64[3]",
            "ndarray float32[3]",
            "another dtype of the initial value",
        ),
        (
            "the state",
            lambda: run(
                lambda x: scan(lambda c, _: ((c[0] + x, c[1]), None), (np.zeros((1, 2)), 0.0))()[0][0], EVEN[:2]
            ),
            "spmd.scan of <lambda>: the carry[0], which a step returns",
            "Varying(data) array float64[1, 2]",
            "Invariant array float64[1, 2], as the step takes it: one state throughout the loop",
            "spmd.pvary(x, 'data') of the initial value",
        ),
        (
            "the state back",
            lambda: run(lambda x: scan(lambda c, _: (spmd.psum(c, "data"), None), x)()[0], EVEN),
            THE_CARRY,
            "Invariant array float64[2, 2]",
            "Varying(data) array float64[2, 2]",
            "spmd.pvary(x, axis_name) in the step",
        ),
        (
            "the layout",
            lambda: scan(lambda c, _: (reshard(c, P(None, "data")), None), spmd.put(X, D))(),
            THE_CARRY,
            "PartitionedArray float64[3, 2] laid out by P(None, 'data')",
            "laid out by P('data', None), as the step takes it: one layout throughout the loop",
            "spmd.reshard(x, P('data', None)) at the end of the step",
        ),
        (
            "the cuts of a layout",
            lambda: scan(lambda c, _: (reshard(c, CUT), None), spmd.put(X, D))(),
            THE_CARRY,
            "laid out by P('data', None)",
            "one layout, Layout((3, 2), P('data', None)",
            "spmd.reshard(x, layout) at the end",
        ),
        (
            "an array of NumPy into a global one",
            lambda: scan(lambda c, _: (c + spmd.put(X, D), None), X)(),
            THE_CARRY,
            "PartitionedArray",
            "ndarray float64[3, 2], as the step takes it: one kind of array",
            "spmd.put(x, spec) of an initial value",
        ),
        (
            "the keys",
            scan(lambda c, _: ({"u": c["u"]}, None), PAIR),
            "spmd.scan of <lambda>: the carry that a step returns",
            "the tree {'u': *}; each * is a leaf",
            "{'u': *, 'v': *}: one tree throughout the loop",
            "the same keys",
        ),
        (
            "a tuple into a list",
            scan(lambda c, _: ([*c], None), (Z, Z)),
            "the carry that a step returns",
            "[*, *]",
            "(*, *)",
            "the same kinds of containers",
        ),
        (
            "the carry into None",
            lambda: spmd.fori_loop(0, 3, lambda i, u: None, Z),
            "spmd.fori_loop of <lambda>: the carry that a step returns",
            "the tree None",
            "*: one tree",
            "in each step",
        ),
        (
            "a leaf into a string",
            scan(lambda c, _: ("a", None)),
            THE_CARRY,
            "str 'a'",
            "an array of numbers, or a number",
            "close over",
        ),
        (
            "the shape in fori_loop",
            lambda: spmd.fori_loop(0, 3, lambda u, i: u[None], Z),
            "spmd.fori_loop of <lambda>: the carry, which a step returns",
            "int64[1]",
            "ndarray float64[3]",
            "an initial value",
        ),
    )
]

STEPS = [
    Row(name, call, LayoutError, head, got, need, mend)
    for name, call, head, got, need, mend in (
        (
            "a step that returns the carry alone",
            scan(lambda c, _: c),
            "spmd.scan of <lambda>: the result of a step",
            "ndarray float64[3]",
            "a tuple (carry, y) of two",
            "return carry, None where nothing is collected",
        ),
        (
            "a step that returns three",
            scan(lambda c, _: (c, c, c)),
            "the result of a step",
            "tuple",
            "a tuple (carry, y) of two",
            "return carry, None",
        ),
        (
            "no step",
            lambda: spmd.scan(Z, step, Z),
            "spmd.scan of ndarray: argument f",
            "ndarray float64[3]",
            "a function",
            "as in lambda x",
        ),
        (
            "ys of two shapes",
            scan(lambda c, x: (c, {"y": c[: int(x) + 1]}), Z, np.arange(2)),
            "argument y['y'], which a step returns",
            "ndarray float64[2]",
            "float64[1], as in the first step",
            "pad what grows or shrinks",
        ),
        (
            "ys of two dtypes",
            scan(lambda c, x: (c, c if x else np.arange(3)), Z, np.arange(2)),
            "argument y, which a step returns",
            "ndarray float64[3]",
            "int64[3], as in the first step",
            "one shape and dtype",
        ),
        (
            "ys of two trees",
            scan(lambda c, x: (c, (c, c) if x else c), Z, np.arange(2)),
            "argument y, which a step returns",
            "the tree (*, *)",
            "*: one tree throughout the loop",
            "the same kinds of containers",
        ),
        (
            "a y that is an object",
            scan(lambda c, _: (c, {"name": "y"})),
            "argument y['name'], which a step returns",
            "str 'y'",
            "an array of numbers, or a number",
            "close over",
        ),
    )
]

ARGUMENTS = [
    Row(name, call, LayoutError, f"spmd.{head}", got, need, mend)
    for name, call, head, got, need, mend in (
        (
            "slices of two lengths",
            scan(step, Z, {"a": Z, "b": np.ones(4)}, None),
            "scan of step: argument xs['b']",
            "4 steps",
            "3, as xs['a'] says",
            "one length",
        ),
        (
            "slices of another length",
            scan(step, Z, Z, 4),
            "scan of step: argument xs",
            "3 steps",
            "4, as length says",
            "one length",
        ),
        (
            "no length",
            scan(step, Z, None, None),
            "scan of step: argument length",
            "no xs, and no length",
            "the number of steps, 0 or more",
            "length=n",
        ),
        ("a negative length", scan(step, length=-1), "scan of step: argument length", "-1", "0 or more", "length=n"),
        (
            "a length that is no integer",
            scan(step, length=2.0),
            "scan of step: argument length",
            "float 2.0",
            "an integer: the number of steps is part of the program",
            "spmd.while_loop",
        ),
        (
            "an integer where a number was a float",
            scan(lambda c, _: (np.int64(1), None), 0.5),
            "scan of <lambda>: the carry, which a step returns",
            "int64[]",
            "float 0.5, as the step takes it: one dtype throughout the loop",
            "an initial value of the dtype that the step returns",
        ),
        (
            "a float in place of an integer array",
            lambda: spmd.while_loop(
                lambda c: c["n"] < 3, lambda c: {"n": c["n"] + 1, "a": 0.5}, {"n": 0, "a": np.int32(1)}
            ),
            "while_loop of <lambda>: the carry['a'], which a step returns",
            "float 0.5",
            "int32[], as the step takes it: one dtype throughout the loop",
            "x.astype(dtype) in the step",
        ),
        (
            "a length that is a truth value",
            scan(step, length=True),
            "scan of step: argument length",
            "bool True",
            "an integer",
            "int(n)",
        ),
        (
            "a bound that is traced",
            lambda: spmd.grad(lambda n: spmd.fori_loop(0, n, lambda i, u: u * n, 1.0))(2.0),
            "fori_loop of <lambda>: argument upper",
            "traced array float64[]",
            "an integer",
            "spmd.while_loop",
        ),
        (
            "a list of numbers as slices",
            scan(step, Z, [1.0, 2.0], None),
            "scan of step: argument xs[0]",
            "ndarray float64[]",
            "an array whose first dimension counts the steps",
            "np.array(x) of a list of numbers",
        ),
        (
            "slices that are objects",
            scan(step, Z, np.array([None, 1]), None),
            "scan of step: argument xs",
            "ndarray object[2]",
            "an array of numbers",
            "spmd.tree.register",
        ),
        (
            "a string in the carry",
            scan(step, {"u": Z, "name": "u"}),
            "scan of step: argument init['name']",
            "str 'u'",
            "an array of numbers, or a number",
            "close over what does not change",
        ),
        (
            "an object in the carry of fori_loop",
            lambda: spmd.fori_loop(0, 1, step, (Z, object())),
            "fori_loop of step: argument init_val[1]",
            "object",
            "an array of numbers, or a number",
            "spmd.tree.register(cls)",
        ),
    )
]

CHECKPOINTS = [
    *(
        Row(
            f"checkpoint={name}",
            scan(step, checkpoint=value),
            DifferentiationError,
            f"spmd.scan of step: argument checkpoint{more}",
            got,
            "the number of states that are kept, 1 or more",
            'checkpoint="sqrt"',
        )
        for name, value, more, got in (
            ("0", 0, "", "int 0"),
            ("a truth value", True, "", "bool True"),
            ("a float", 2.0, "", "float 2.0"),
            ("a string", "log", "", "str 'log'"),
            ("an array", Z, "", "ndarray float64[3]"),
            ("a policy that gives a float", lambda n: n / 4, ", a policy, for 2 steps", "float 0.5"),
        )
    ),
    Row(
        "a step that counts",
        _counted,
        DifferentiationError,
        "spmd.scan of <lambda>: result",
        "other values (traced array float64[3]) when it is called again",
        "the values of its first call",
        "counters",
    ),
]

ROWS = [*CARRIES, *STEPS, *ARGUMENTS, *CHECKPOINTS]
