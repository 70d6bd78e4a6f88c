"""What counts as one value is one, or the program stops: digests, bodies of virtual workers, processes."""

from __future__ import annotations

import itertools
import json
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch import PROGRAMS, TORCHRUN, launch, mpiexec

import spmd
from spmd import P
from spmd.errors import ReplicaError, StateError
from spmd.replicas.compare import (
    OTHER,
    PARTS,
    ROUNDING,
    SAME,
    compared_part,
    digest,
    part_slice,
    relation,
    sketch,
    sketches_agree,
)

DTYPES = "bool int8 uint16 int32 int64 float16 float32 float64 longdouble complex64 complex128".split()


def values(dtype: str, shape, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 50, shape) + (1j * rng.normal(0, 50, shape) if "complex" in dtype else 0)
    return x.astype(dtype)


# Arrays


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (4099,), (9, 4099)])
def test_a_digest_depends_on_each_entry_and_its_place(dtype, shape):
    x = values(dtype, shape)
    assert digest(x) == digest(x.copy()) == digest(np.asfortranarray(x))
    for at in {0, x.size // 2, x.size - 1}:
        other = x.copy().reshape(-1)
        other[at] = ~other[at] if dtype == "bool" else other[at] + 1
        assert digest(other.reshape(shape)) != digest(x)
    if x.size > 1 and x.reshape(-1)[0] != x.reshape(-1)[-1]:
        swapped = x.copy().reshape(-1)
        swapped[[0, -1]] = swapped[[-1, 0]]
        assert digest(swapped.reshape(shape)) != digest(x)


@given(st.integers(0, 1 << 26), st.sampled_from([1, 2, 4, 8, 16]))
def test_all_entries_are_compared_within_few_calls(size, itemsize):
    calls = 3 if size * itemsize <= 1 << 20 else PARTS
    assert all(part_slice(size, itemsize, turn) == slice(None) for turn in range(3))
    for first in (3, 10, 64):
        parts = sorted({part_slice(size, itemsize, turn).indices(size)[:2] for turn in range(first, first + calls)})
        assert parts[0][0] == 0
        assert max(stop for _, stop in parts) == size
        assert all(stop >= start for (_, stop), (start, _) in itertools.pairwise(parts))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_the_same_what_is_rounded_and_what_is_another_value(dtype):
    x = values(dtype, (50, 3))
    assert relation(x, x.copy()) == SAME
    other = x.copy()
    other[3, 1] = not other[3, 1] if dtype == "bool" else other[3, 1] + 20
    assert relation(x, other) == OTHER
    assert not sketches_agree(sketch(x), sketch(other))
    assert relation(x, x[:-1]) == OTHER
    if np.dtype(dtype).kind in "fc":
        rounded = (x * (1 + 4 * np.finfo(dtype).eps)).astype(dtype)
        assert relation(x, rounded) == ROUNDING
        assert sketches_agree(sketch(x), sketch(rounded))
        missing = x.copy()
        missing[0, 0] = np.nan
        assert relation(x, missing) == OTHER
        assert not sketches_agree(sketch(x), sketch(missing))
        assert relation(missing, missing.copy()) == SAME


def test_what_may_be_written_to_is_copied_before_it_is_compared():
    x = np.zeros(3)
    part = compared_part(x, 0)
    x[0] = 1
    assert part[0] == 0
    x.flags.writeable = False
    assert np.shares_memory(compared_part(x, 0), x)


# Bodies of virtual workers

SOURCES = {
    "a bare array": lambda w: np.random.default_rng(w).normal(size=3),
    "an integer array": lambda w: np.arange(3) + w,
    "a matrix": lambda w: np.full((2, 2), 1.0 + w),
    "one entry of many": lambda w: np.where(np.arange(3000) == 2999, w, 0.0),
    "an array of the library": lambda w: spmd.numpy.ones(3) * np.float64(1 + w),
}
REDUCTIONS = {
    "mean": lambda x: spmd.mean(x, "x"),
    "max": lambda x: spmd.max(x, "x"),
    "min": lambda x: spmd.min(x, "x", axis=0),
    "pmean": lambda x: spmd.pmean(x, "x"),
    "pmax": lambda x: spmd.pmax(x, "x"),
    "pmin": lambda x: spmd.pmin(x, "x"),
    "pcast": lambda x: spmd.pcast(x, "x", to="invariant"),
    "moments": lambda x: spmd.functions.moments(x * 1.0, axis_name="x")[0],
    "a tuple of axes": lambda x: spmd.mean(x, ("x", "y")),
    "of varying data along y": lambda x: spmd.mean(spmd.pvary(x, "y"), ("y", "x")),
    "a tree": lambda x: spmd.pmean({"a": x, "b": x}, "x")["b"],
    "a gradient": lambda x: spmd.grad(lambda v: np.sum(v * v))(x * 1.0),
    "a pullback": lambda x: spmd.vjp(lambda v: v * 2.0, x * 1.0)[1](spmd.numpy.ones(np.shape(x)))[0],
}


def run(scheduler: str, reduce, source, differ: bool, calls: int = 1) -> None:
    def body(x):
        for _ in range(calls):
            y = reduce(source(spmd.worker_index("x") if differ else 1))
        return spmd.pvary(np.sum(spmd.block(y)), ("x", "y")) + x

    with spmd.Mesh(x=3, y=2, scheduler=scheduler):
        spmd.map(body, P(("x", "y")), P(("x", "y")))(np.zeros(6))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("source", SOURCES)
def test_undeclared_values_of_a_body_are_compared(scheduler, source, reduction):
    run(scheduler, REDUCTIONS[reduction], SOURCES[source], False, calls=4)
    with pytest.raises(ReplicaError, match=r"(?s)differs between worker \d.*and worker \d.*mend.*spmd\.varying"):
        run(scheduler, REDUCTIONS[reduction], SOURCES[source], True)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_error_names_the_line(reduction):
    with pytest.raises(ReplicaError) as caught:
        run("lockstep", REDUCTIONS[reduction], SOURCES["a bare array"], True)
    line = REDUCTIONS[reduction].__code__.co_firstlineno
    assert f"{__file__}:{line} in <lambda>" in str(caught.value)


@pytest.mark.parametrize("source", SOURCES)
def test_recorded_programs_compare_too(scheduler, source):
    """The first call records what each worker has; later ones are given other values."""

    def body(x, shift):
        w = SOURCES["a bare array"](0)
        y = spmd.pmean(w * shift, "x")
        return np.sum(y) + x

    with spmd.Mesh(x=3, scheduler=scheduler):
        run = spmd.jit(spmd.map(body, (P("x"), P("x")), P("x")))
        plain = spmd.map(lambda x, shift: body(x, shift), (P("x"), P("x")), P("x"))
        assert np.array_equal(run(np.zeros(3), np.ones(3)).numpy(), plain(np.zeros(3), np.ones(3)).numpy())

    def parts(x):
        own = SOURCES[source](spmd.worker_index("x"))
        return x + np.sum(spmd.pmean(own, "x"))

    with spmd.Mesh(x=3, scheduler=scheduler), pytest.raises(ReplicaError, match="differs between"):
        spmd.jit(spmd.map(parts, P("x"), P("x")))(np.zeros(3))


def test_rounding_is_a_warning_at_the_line(scheduler):
    def body(x):
        w = np.ones(3) * (1 + spmd.worker_index("x") * 2.0**-52)
        return x + np.sum(spmd.pmean(w, "x"))

    with spmd.Mesh(x=2, scheduler=scheduler), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        spmd.map(body, P("x"), P("x"))(np.zeros(2))
    (warning,) = told
    assert "differs by rounding between worker" in str(warning.message)
    assert warning.filename == __file__


def test_a_line_that_some_workers_pass_is_no_error(scheduler):
    def body(x):
        if spmd.worker_index("x") == 1:
            spmd.pmean(np.ones(2), "x")
        for k in range(spmd.worker_index("x")):
            spmd.pmax(np.full(2, k), "x")
        return x

    with spmd.Mesh(x=3, scheduler=scheduler):
        spmd.map(body, P("x"), P("x"))(np.zeros(3))


def test_at_one_worker_nothing_is_compared_with_others(scheduler):
    def body(x):
        for root in range(3):
            own = spmd.at_root(
                lambda r=root: spmd.grad(lambda v: np.sum(v**2))(np.full(2, 1.0 + r)), axis_name="x", root=root
            )
            x = x + np.sum(spmd.replicate(own, "x", root))
        return x

    with spmd.Mesh(x=3, scheduler=scheduler):
        spmd.map(body, P("x"), P("x"))(np.zeros(3))


def test_without_checks_nothing_is_compared(scheduler, monkeypatch):
    monkeypatch.setenv("SPMD_CHECK", "0")
    run(scheduler, REDUCTIONS["mean"], SOURCES["a bare array"], True)


OBJECTS = {
    "an integer": lambda w: w,
    "a float": lambda w: 0.5 * w,
    "a text": lambda w: f"on {w}",
    "an array": lambda w: np.arange(3) + w,
    "a tuple": lambda w: (1, {"a": [w]}),
    "a type": lambda w: w if w else 0.0,
    "a shape": lambda w: np.zeros(2 + w),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_without_a_spec_are_equal_on_all_workers(scheduler, name):
    with spmd.Mesh(x=2, scheduler=scheduler):
        spmd.map(lambda x: OBJECTS[name](1), P("x"), None)(np.zeros(2))
        with pytest.raises(StateError, match=r"(?s)result.*needed: an object that is equal on all workers"):
            spmd.map(lambda x: OBJECTS[name](spmd.worker_index("x")), P("x"), None)(np.zeros(2))


def test_results_of_many_entries_are_compared_within_64_calls(scheduler):
    def body(x, at):
        own = np.zeros(1 << 18)
        own[at] = spmd.worker_index("x")
        return own

    with spmd.Mesh(x=2, scheduler=scheduler):
        run = spmd.map(body, (P("x"), None), P())
        right = spmd.map(lambda x, at: np.zeros(1 << 18), (P("x"), None), P())
        for _ in range(5):
            right(np.zeros(2), 0)
        with pytest.raises(StateError, match="differs between"):
            run(np.zeros(2), 200_000)


# Processes


def cases(n: int, python) -> None:
    ended = launch(PROGRAMS / "replicas.py", str(n), n=n, python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    every = list(json.loads(ended.stdout).values())
    assert len(every) == n
    for name, how in every[0].items():
        others = [found[name] for found in every]
        if name == "rounding":
            assert others == ["rounding"] * n
        elif name.startswith("right"):
            assert others == ["ok"] * n, name
        elif name.startswith("calls"):
            assert len({*others}) == 1
            assert 1 <= int(how) <= 64
        else:
            assert len({*others}) == 1, name  # the same error on every process
            assert how.startswith(("StateError", "ReplicaError", "LayoutError", "MismatchError")), f"{name}: {how}"
            assert "mend: " in how


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
@pytest.mark.parametrize("n", [2, 4])
def test_processes_compare_what_each_of_them_passes(n):
    cases(n, sys.executable)


@pytest.mark.torch
def test_processes_of_torchrun_compare_too():
    cases(2, TORCHRUN)


# How long a difference may go unnoticed


def _square(w, v):
    return spmd.mean((w * v) ** 2, "x")


LATE = {
    "a reduction": lambda w, x: spmd.pmean(w, "x"),
    "a gradient": lambda w, x: spmd.grad(_square)(w, x),
    "a result": lambda w, x: w,
}


@pytest.mark.parametrize("door", LATE)
@pytest.mark.parametrize("since", range(9))
def test_a_difference_is_found_within_three_calls(scheduler, door, since):
    calls = [0]

    def body(x):
        w = np.full(3, 1.0 + spmd.worker_index("x") * (calls[0] >= since))
        return LATE[door](w, x)

    mapped = spmd.map(body, P("x"), P(), mesh=spmd.Mesh(x=3, scheduler=scheduler, transport="local"))

    def program():
        while calls[0] < since + 3:
            mapped(np.ones(9))
            calls[0] += 1

    with pytest.raises((ReplicaError, StateError), match="differs between"):
        program()
    assert calls[0] >= since


@pytest.mark.parametrize("door", ["a reduction", "a gradient"])
@pytest.mark.parametrize("since", [0, 2, 3, 4, 5, 6, 7, 20, 21, 22, 100])
def test_a_difference_is_found_within_three_turns_of_a_loop(scheduler, door, since):
    reached = [0, 0, 0]

    def body(x):
        for k in range(since + 3):
            w = np.full(3, 1.0 + spmd.worker_index("x") * (k >= since))
            LATE[door](w, x)
            reached[spmd.worker_index("x")] = k
        return x

    with pytest.raises(ReplicaError, match="differs between"):
        spmd.map(body, P("x"), P("x"), mesh=spmd.Mesh(x=3, scheduler=scheduler, transport="local"))(np.ones(9))
    assert max(reached) >= since - 1


@pytest.mark.parametrize("values", [2, 3, 5, 8, 13, 21])
def test_one_of_several_values_of_a_line_is_found(scheduler, values):
    """A loop over parameters, of which one differs from its tenth turn on."""

    def body(x):
        for k in range(40 * values):
            odd = k % values == values - 1 and k // values >= 10
            spmd.pmean(np.full(3, 1.0 + spmd.worker_index("x") * odd), "x")
        return x

    with pytest.raises(ReplicaError, match="differs between"):
        spmd.map(body, P("x"), P("x"), mesh=spmd.Mesh(x=2, scheduler=scheduler, transport="local"))(np.ones(4))
