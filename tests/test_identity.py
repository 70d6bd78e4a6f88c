"""What workers compare when they meet: the function as the user called it, and the tree that was given to it."""

from __future__ import annotations

import json
import random
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from launch import PROGRAMS, TORCHRUN, launch, mpiexec
from mpi_programs import identity
from mpi_programs.identity import body_of, draw, every_pair, judged

import spmd
from spmd import P
from spmd.autodiff import tree
from spmd.errors import MismatchError

RNG = np.random.default_rng(3)
DATA = RNG.normal(size=(4, 2))


def mesh_of(scheduler: str) -> spmd.Mesh:
    return spmd.Mesh(x=2, transport="local", scheduler=scheduler)


def refused(scheduler: str, body: Callable[..., Any], check: bool = True) -> str:
    """What the workers are told that run this body on halves of DATA."""
    with pytest.raises(MismatchError) as caught:
        spmd.map(body, P("x"), None, mesh=mesh_of(scheduler), check=check)(DATA)
    assert str(caught.value).count("test_identity.py:") == 2, caught.value
    return str(caught.value)


def first() -> bool:
    return spmd.worker_index("x") == 0


# The sampler


@pytest.mark.parametrize("check", [True, False])
def test_workers_meet_where_function_and_tree_are_the_same_and_only_there(scheduler, check):
    assert identity.wrong(mesh_of(scheduler), 150, 5 + check, check) == []


@pytest.mark.full
def test_thousands_of_draws(scheduler):
    assert identity.wrong(mesh_of(scheduler), 3000, 11, True) == []


def test_every_tree_differs_from_every_other_and_every_function_too(scheduler):
    for drawn in every_pair():
        with pytest.raises(MismatchError) as caught:
            spmd.map(body_of(drawn), P("x"), None, mesh=mesh_of(scheduler))(DATA[:, None].repeat(2, 1)[:, 0])
        assert judged(drawn, caught.value) == ""


@pytest.mark.parametrize(
    "python",
    [
        pytest.param(
            sys.executable,
            id="mpich",
            marks=[pytest.mark.mpi, pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")],
        ),
        pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.torch),
    ],
)
def test_processes_meet_where_function_and_tree_are_the_same_and_only_there(python):
    ended = launch(PROGRAMS / "identity.py", "120", n=2, python=python, timeout=90, SPMD_TIMEOUT="30")
    assert ended.returncode == 0, ended
    assert json.loads(ended.stdout) == [[], []], ended


# The examples


def test_a_sum_across_keys_says_which_paths_differ(scheduler):
    def body(x):
        spmd.psum({"a": x, "b": 10 * x} if first() else {"b": x, "c": 10 * x}, "x")

    line = body.__code__.co_firstlineno + 1
    assert refused(scheduler, body) == (
        "a collective\n"
        "  got:    workers that met with different calls\n"
        "          worker 0 (x=0): psum(float64[2, 2], 'x'), leaf ['a'] of {'a': *, 'b': *}\n"
        f"            at {__file__}:{line} in body\n"
        "          worker 1 (x=1): psum(float64[2, 2], 'x'), leaf ['b'] of {'b': *, 'c': *}\n"
        f"            at {__file__}:{line} in body\n"
        "          paths that differ: ['a'] on worker 0 (x=0) only; ['c'] on worker 1 (x=1) only\n"
        "  needed: the same operator, tree, axes, parameters, dtype and shape from all of the group, "
        "in the same order\n"
        "  mend:   give the function one tree on all workers: the same containers with the same keys; a dict may have "
        "its keys in any order, an OrderedDict may not"
    )


def test_a_tuple_and_a_dict_an_ordered_dict_and_another_order_a_mean_and_a_sum(scheduler):
    text = refused(scheduler, lambda x: spmd.psum((x, x) if first() else {"a": x, "b": x}, "x"))
    assert "leaf [0] of (*, *)" in text
    assert "leaf ['a'] of {'a': *, 'b': *}" in text

    def ordered(x):
        spmd.psum(OrderedDict(a=x, b=x) if first() else OrderedDict(b=x, a=x), "x")

    assert "leaf 0 is ['a'] on worker 0 (x=0), ['b'] on worker 1 (x=1)" in refused(scheduler, ordered)
    text = refused(scheduler, lambda x: (spmd.psum if first() else spmd.pmean)(x, "x"))
    assert "psum(float64" in text
    assert "pmean(float64" in text
    assert "let all workers take the same path" in text
    assert "an array by itself" in refused(scheduler, lambda x: spmd.psum(x if first() else (x,), "x"))


def test_classes_and_keys_made_in_the_body_are_one_tree(scheduler):
    """Each worker has its own class of one name, and keys without a text of their own."""

    def body(x):
        class Key:
            pass

        from collections import namedtuple

        Made = namedtuple("Made", "w b")
        return spmd.psum({"made": Made(x, 2 * x), "keyed": {Key(): x}}, "x")["made"].b

    total = 2 * (DATA[:2] + DATA[2:])
    np.testing.assert_array_equal(spmd.map(body, P("x"), P(), mesh=mesh_of(scheduler))(DATA).numpy(), total)


def test_lines_of_one_function_may_differ(scheduler):
    """Workers may call it, and take its gradient, from lines of their own."""

    def loss(x):
        if first():
            y = spmd.all_gather({"a": x, "b": (x, 2 * x)}, "x")
            y = spmd.shift(spmd.pmean(y, "x"), "x")
        else:
            y = spmd.all_gather({"b": (x, 2 * x), "a": x}, "x")
            y = spmd.shift(spmd.pmean(y, "x"), "x")
        return spmd.psum(np.sum(y["a"] * y["b"][1]), "x")

    def body(x):
        return spmd.grad(loss)(x) if first() else spmd.grad(lambda x: loss(x))(x)

    def same(x):
        y = spmd.shift(spmd.pmean(spmd.all_gather({"a": x, "b": (x, 2 * x)}, "x"), "x"), "x")
        return spmd.psum(np.sum(y["a"] * y["b"][1]), "x")

    found = spmd.map(body, P("x"), P("x"), mesh=mesh_of(scheduler))(DATA).numpy()
    np.testing.assert_array_equal(
        found, spmd.map(spmd.grad(same), P("x"), P("x"), mesh=mesh_of(scheduler))(DATA).numpy()
    )


# Backward


def test_the_adjoint_knows_of_which_leaf_it_is(scheduler):
    """What worker 0 does with one leaf and worker 1 with the other would be added up."""

    def body(x):
        def loss(x):
            whole = spmd.all_gather({"a": x, "b": 2 * x}, "x")
            return spmd.psum(np.sum((whole["a"] if first() else whole["b"]) ** 2), "x")

        return spmd.grad(loss)(x)

    text = refused(scheduler, body)
    assert "the adjoint of all_gather), leaf ['a'] of {'a': *, 'b': *}" in text
    assert "the adjoint of all_gather), leaf ['b'] of {'a': *, 'b': *}" in text


def test_an_adjoint_does_not_meet_a_call_of_the_user(scheduler):
    def body(x):
        if first():
            return spmd.grad(lambda x: np.sum(spmd.all_gather(x, "x", tiled=True) ** 2))(x)
        spmd.all_gather(x, "x", tiled=True)
        return spmd.psum_scatter(np.zeros((4, 2)) * x[0], "x", tiled=True)

    assert "the adjoint of all_gather)" in refused(scheduler, body)


@pytest.mark.parametrize("wrapped", ["plain", "checkpoint"])
def test_sums_of_gradients_know_their_arguments(scheduler, wrapped):
    """Gradients of replicated arguments travel together, in the order in which they were used."""
    w = RNG.normal(size=2)

    def by_trees(x):
        params = {"a": w, "b": w} if first() else {"b": w, "c": w}

        def loss(params):
            one, other = params.values()
            return spmd.psum(np.sum(x * one) + np.sum(x * x * other), "x")

        return spmd.grad(loss)(params)

    def by_order(x):
        def local(u, v):
            return (np.sum(x * u) + np.sum(x * x * v)) if first() else (np.sum(x * x * v) + np.sum(x * u))

        def loss(u, v):
            # What a checkpoint closes over are leaves of its own sweep.
            value = local(u, v) if wrapped == "plain" else spmd.checkpoint(lambda: local(u, v))()
            return spmd.psum(value, "x")

        return spmd.grad(loss, (0, 1))(w, 2 * w)

    if wrapped == "plain":
        text = refused(scheduler, by_trees)
        assert "argument 0['a'] on worker 0 (x=0) only; argument 0['c'] on worker 1 (x=1) only" in text
    text = refused(scheduler, by_order)
    assert "let all workers use the arguments that they differentiate in one order" in text


# Programs, and what is given alongside


def test_recorded_programs_compare_trees_too(scheduler):
    def body(x):
        return spmd.psum({"a": x, "b": 10 * x} if first() else {"b": x, "c": 10 * x}, "x")["b"]

    def right(x):
        return spmd.psum({"a": x, "b": 10 * x} if first() else {"b": 10 * x, "a": x}, "x")["b"]

    with pytest.raises(MismatchError, match="paths that differ"):
        spmd.jit(spmd.map(body, P("x"), P(), mesh=mesh_of(scheduler)))(DATA)
    again = spmd.jit(spmd.map(right, P("x"), P(), mesh=mesh_of(scheduler)))
    for _ in range(3):
        np.testing.assert_array_equal(again(DATA).numpy(), 10 * DATA[:2] + 10 * DATA[2:])


def test_at_root_compares_the_trees_of_its_arguments(scheduler):
    def body(x):
        kept = spmd.keep(spmd.psum(x, "x"), "x")
        return spmd.at_root(lambda t: t["a"], {"a": kept} if first() else {"b": kept}, axis_name="x")

    assert "at_root" in refused(scheduler, body)


def test_a_tree_is_described_once():
    """Later calls of a line find what they compare where the operator is kept."""
    described = []
    given = tree.Described.of

    def counted(structure):
        described.append(structure)
        return given(structure)

    def body(x):
        for _ in range(20):
            spmd.psum({"once only": x, "and": x}, "x")
            spmd.pmean({"once only": x, "and": x}, "x")

    tree.Described.of = counted  # type: ignore[method-assign]
    try:
        spmd.map(body, P("x"), None, mesh=mesh_of("lockstep"))(DATA)
    finally:
        tree.Described.of = given  # type: ignore[method-assign]
    assert len(described) == 1


def test_long_trees_are_told_in_part():
    """A process has 16 KB to say what it called: of a long tree the beginning goes there."""
    from spmd.transport.call import Call, Side, mismatch

    def side(worker: str, last: str) -> Side:
        names = [f"layer {k}" for k in range(5000)] + [last]
        leaf = tree.leaf_positions(tree.structure(dict.fromkeys(names, 0.0)))[0]
        return Side.of(worker, Call("psum", ("x",), np.dtype(float), (2,), leaf=leaf), 1)

    first, second = (Side.unpacked(w, side(w, last).packed(1 << 14)) for w, last in (("one", "y"), ("two", "z")))
    assert len(side("one", "y").packed(1 << 14)) <= 1 << 14
    assert "paths that differ: further on" in str(mismatch(first, second))
    whole = str(mismatch(side("one", "y"), side("two", "z")))
    assert "paths that differ: ['y'] on one only; ['z'] on two only" in whole
    assert len(whole) < 2000


def test_seeded_draws_hold_all_kinds():
    rng = random.Random(5)
    drawn = [draw(rng) for _ in range(300)]
    assert sum(d.equal for d in drawn) > 50
    assert sum(not d.equal and d.trees[0] != d.trees[1] for d in drawn) > 50
    assert sum(d.functions[0] != d.functions[1] for d in drawn) > 50


@pytest.mark.parametrize("f", [spmd.sum, spmd.mean, spmd.max])
def test_the_dimensions_of_a_reduction_are_part_of_the_call(scheduler, f):
    text = refused(scheduler, lambda x: f(x, "x", axis=0 if first() else 1))
    assert "axis=0" in text or "dims=(0,)" in text


def test_all_dimensions_by_name_are_no_other_call(scheduler):
    found = spmd.map(
        lambda x: spmd.mean(x, "x", axis=None if first() else (0, 1)), P("x"), P(), mesh=mesh_of(scheduler)
    )(DATA)
    np.testing.assert_allclose(found.numpy(), DATA.mean())
