"""A jitted map, or function, that is recorded again and again warns once: which argument changes, and what to do."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import P, optim
from spmd.optim import SGDState

pytestmark = pytest.mark.host("nothing is recorded on a GPU")


def warned(f: Any, *calls: tuple) -> list[str]:
    """The warnings of these calls, which must point at this file."""
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        for args in calls:
            f(*args)
    assert {w.filename for w in log} <= {__file__}
    assert all(w.category is UserWarning for w in log)
    return [str(w.message) for w in log]


def summing(mesh: spmd.Mesh, *specs: Any) -> Any:
    return spmd.jit(mesh.map(lambda x, *more: spmd.sum(x, "x"), (P("x"), *specs), P()))


ROWS = [(np.ones(n),) for n in (2, 3, 4, 5, 6)]


def steps(kind: str) -> list[tuple]:
    """Calls of an update whose count changes."""
    return [(np.ones(3), SGDState(k if kind == "integers" else np.asarray(k), np.ones(3))) for k in range(5)]


@pytest.mark.parametrize("axes", [1, 2, 4])
def test_a_count_that_is_an_integer(axes, scheduler):
    mesh, optimizer = spmd.Mesh(x=axes, scheduler=scheduler), optim.sgd(0.1, 0.9)
    update = lambda params, state: optimizer.update(params, state, params)
    specs = P("x"), optimizer.specs(P("x"))
    (text,) = warned(spmd.jit(mesh.map(update, specs, specs)), *steps("integers"))
    where, got, need, mend = text.split("\n  ")
    assert where.endswith("recorded anew in 3 calls in a row: argument state.steps")
    assert got == "got:    2, after 1 in the call before"
    assert need.startswith("needed: what is part of the program")
    assert mend.startswith("mend:   np.asarray(2): ")
    assert warned(spmd.jit(mesh.map(update, specs, specs)), *steps("arrays")) == []
    with mesh:
        (text,) = warned(spmd.jit(update), *steps("integers"))
        assert "argument state.steps\n  got:    2, after 1" in text
        assert warned(spmd.jit(update), *steps("arrays")) == []


def layouts(mesh: spmd.Mesh) -> list[tuple]:
    cuts = [(6, 0), (5, 1), (4, 2)]
    return [(spmd.put(np.ones(6), spmd.Layout((6,), P("x"), mesh.axes, cuts=[c]), mesh),) for c in cuts]


MESH = spmd.Mesh(x=2)
CHANGES = {
    "shape": (lambda: summing(MESH), ROWS, "x\n", "ndarray float64[4], after ndarray float64[3]", "pad arrays"),
    "dtype": (
        lambda: summing(MESH),
        [(np.ones(2, d),) for d in "efd"],
        "x\n",
        "ndarray float64[2], after ndarray float32[2]",
        "one dtype",
    ),
    "layout": (lambda: summing(MESH), layouts(MESH), "x\n", "cuts=((4, 2),)), after PartitionedArray", "spmd.reshard"),
    "static number": (
        lambda: summing(MESH, None),
        [(np.ones(2), n / 2) for n in range(4)],
        "args[1]\n",
        "1.0, after 0.5",
        "the spec P() in place of None: ",
    ),
    "static integer": (
        lambda: summing(MESH, {"a": [None]}),
        [(np.ones(2), {"a": [n]}) for n in range(4)],
        "args[1]['a'][0]\n",
        "2, after 1",
        "the spec P() in place of None, and np.asarray(2)",
    ),
    "object": (
        lambda: summing(MESH, None),
        [(np.ones(2), f"name {n}") for n in range(4)],
        "args[1]\n",
        "'name 2', after 'name 1'",
        "an object that equals the one before",
    ),
    "structure": (
        lambda: summing(MESH, P()),
        [(np.ones(2), [1.0] * n) for n in range(1, 5)],
        "args[1][2]\n",
        "arguments of 4 leaves, after 3",
        "arguments of one structure",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_warning_names_what_changes(name):
    make, calls, argument, got, mend = CHANGES[name]
    (text,) = warned(make(), *calls)
    assert f"in a row: argument {argument}" in text
    assert got in text
    assert mend in text.split("mend:")[1]


TRANSFORMS = {
    "none": lambda f: f,
    "grad": spmd.grad,
    "value and grad": spmd.value_and_grad,
    "from outside": lambda f: spmd.grad(lambda y: 2 * f(y)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients_and_functions_of_global_arrays(transform):
    laid = [(spmd.put(*rows, P("x"), MESH),) for rows in ROWS]
    for make, calls in ((lambda: summing(MESH), ROWS), (lambda: spmd.jit(lambda x: x.sum()), laid)):
        (text,) = warned(TRANSFORMS[transform](make()), *calls)
        assert "argument x\n  got:    " in text
        assert "float64[4]" in text.split("after")[0]


@pytest.mark.parametrize(
    "sizes",
    [
        (2, 3, 2, 3, 2, 3),  # training and evaluation
        (2, 2, 2, 3, 4, 2, 2, 3, 4),  # ... of two sets
        (2, 3, 3, 4, 4, 5, 5, 6, 6),  # never three in a row
    ],
)
def test_kinds_that_alternate_do_not_warn(sizes):
    for make in (lambda: summing(MESH), lambda: spmd.jit(lambda x: x.sum())):
        f = make()
        assert warned(f, *[(spmd.put(np.ones(n), P("x"), MESH),) for n in sizes]) == []
        grads = spmd.grad(make())
        assert warned(grads, *[(spmd.put(np.ones(n), P("x"), MESH),) for n in sizes]) == []


def test_what_is_no_argument_does_not_warn():
    x = np.ones(6)
    run = spmd.map(lambda x: spmd.sum(x, "x"), P("x"), P())
    once = spmd.jit(run)
    for n in (1, 2, 3, 4):  # other meshes
        with spmd.Mesh(x=n):
            assert warned(once, (x,)) == []
    once = spmd.jit(MESH.map(lambda x: spmd.sum(x, "x"), P("x"), P()))
    for transform in TRANSFORMS.values():
        assert warned(transform(once), (x,)) == []  # other programs of the same call
    for over, under in itertools.product(("ignore", "raise"), repeat=2):
        with np.errstate(over=over, under=under):
            assert warned(once, (x,)) == []


def test_first_calls_that_change_one_argument_after_the_other_do_not_warn():
    f = summing(MESH, P("x"))
    laid = lambda n: spmd.put(np.ones(n), P("x"), MESH)
    assert warned(f, (np.ones(4), np.ones(3)), (laid(4), np.ones(3)), (laid(4), laid(3)), (laid(4), laid(3))) == []


def test_each_map_warns_once_and_of_its_own_calls():
    f, g = summing(MESH), summing(MESH)
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        for x in ROWS:
            f(*x), g(*x)
    assert len(log) == 2
    assert warned(f, *[(np.ones(n),) for n in range(10, 14)]) == []
