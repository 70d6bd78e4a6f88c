"""Sums of a recorded program that do not depend on each other go in one all-reduce, with the same bits."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from launch import PROGRAMS, TORCHRUN, each_mpi, launch
from mpi_programs import joined_sums
from random_sums import bits, job, loss

import spmd
from spmd import P
from spmd.autodiff.staging.joining import Batch
from spmd.autodiff.staging.program import COMM
from spmd.autodiff.staging.recorder import Program
from spmd.errors import MismatchError

pytestmark = pytest.mark.host("on a GPU the body runs at every call")

RNG = np.random.default_rng(5)
MESHES = [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 2, "y": 2}, {"x": 2, "y": 3}, {"x": 2, "y": 2, "z": 2}]


def drawn(mesh: spmd.Mesh, *shapes: tuple[int, ...], dtype: Any = np.float64) -> list[Any]:
    """Arrays of random numbers, split along all axes of a mesh. shapes: of the blocks."""
    n, spec = mesh.size, P(tuple(mesh.axes))
    return [spmd.put(RNG.normal(size=(n * s[0], *s[1:])).astype(dtype), spec, mesh) for s in shapes]


def sums_in(text: str) -> list[int]:
    """How many blocks each sum of a program adds, in order."""
    calls = re.findall(r"\b(packed_psum|psum|pmean)(?:_\d+)?\(comm((?:, v\d+)+)\)", text)
    return [args.count("v") for _, args in calls]


def sums_of(body: Any, mesh: spmd.Mesh, *args: Any, worker: int = 0) -> list[int]:
    """`sums_in` of the program of a body that gives a copy, checked against the body in two runs."""
    mapped = mesh.map(body, tuple(P(tuple(mesh.axes)) for _ in args), P())
    once = spmd.jit(mapped)
    for k in (1, 1, -2):
        given = [x * k for x in args]
        assert bits(once(*given)) == bits(mapped(*given))
    (entry,) = once._entries.values()
    return sums_in(entry.programs[worker].source())


@pytest.fixture
def line() -> spmd.Mesh:
    return spmd.Mesh(x=3)


def test_sums_that_do_not_depend_on_each_other_go_together(line):
    def body(a: Any, b: Any, c: Any) -> Any:
        return spmd.psum(a, "x").sum() + spmd.psum(np.sin(b), "x").sum() * spmd.pmean(c, "x")

    assert sums_of(body, line, *drawn(line, (4,), (2, 3), (0, 5))) == [3]


def test_the_leaves_of_a_tree_go_together(line):
    def body(a: Any, b: Any) -> Any:
        total = spmd.psum({"a": a, "b": (b, a.sum())}, "x")
        return total["a"].sum() + total["b"][0].sum() - total["b"][1]

    assert sums_of(body, line, *drawn(line, (4,), (2, 3))) == [3]


def test_a_sum_that_depends_on_another_comes_after_it(line):
    def body(a: Any, b: Any) -> Any:
        first = spmd.psum(a, "x")
        second = spmd.psum(b * np.tanh(first.sum()), "x")
        third = spmd.psum(b + 1, "x")  # goes with the second one, on which it does not depend
        return first.sum() + (second * third).sum() + spmd.psum(third.sum() * a, "x").sum()

    assert sums_of(body, line, *drawn(line, (4,), (2, 3))) == [1, 2, 1]


def test_sums_of_other_dtypes_and_axes_go_by_themselves():
    mesh = spmd.Mesh(x=2, y=2)

    def body(a: Any, b: Any) -> Any:
        along = spmd.psum(a, "x").sum() + spmd.psum(b, "x").sum()
        back = spmd.psum(a * 2, ("x", "y")).sum() + spmd.psum(a * 3, ("y", "x")).sum()
        short = spmd.psum(b.astype(np.float32), ("y", "x")).sum() + spmd.psum(b.astype(np.int16), ("y", "x")).sum()
        return spmd.psum(along, "y") + back + short

    assert sums_of(body, mesh, *drawn(mesh, (4,), (3,))) == [2, 1, 1, 1, 1, 1]


def test_large_blocks_go_by_themselves_and_small_ones_up_to_a_limit(line):
    full, count = drawn(line, (1024,))[0], 10

    def several(a: Any) -> Any:
        return sum(spmd.psum(a * k, "x").sum() for k in range(count))

    def large(a: Any) -> Any:
        return spmd.psum(np.append(a, 1.0), "x").sum() + spmd.psum(a[:5], "x").sum() + spmd.psum(a[5:], "x").sum()

    assert sums_of(several, line, full) == [8, 2]
    assert sums_of(large, line, full) == [1, 2]


@pytest.mark.parametrize("writes", [False, True])
def test_a_batch_ends_where_a_line_writes_into_an_array(writes):
    program, batch = Program(), Batch(0, "sums")
    x = program.input(np.ones(3))
    y, z = np.sin(x), np.cos(x)
    program.call(lambda comm, x: x + 1, (COMM, y), effect=True)
    batch.add(program.lines, 24)
    if writes:
        z[0] = 5.0
    program.call(lambda comm, x: x + 1, (COMM, z), effect=True)
    assert batch.takes(program.lines, "sums", 24) == (not writes)


def test_other_collectives_and_error_states_stand_between(line):
    def another(a: Any) -> Any:
        return spmd.psum(a, "x").sum() + spmd.pmax(a, "x").sum() * spmd.psum(a[1:], "x").sum()

    def other_errors(a: Any) -> Any:
        first = spmd.psum(a, "x")
        with np.errstate(all="raise"):
            return first.sum() + spmd.psum(a[1:], "x").sum()

    (a,) = drawn(line, (4,))
    assert sums_of(another, line, a) == [1, 1]
    assert sums_of(other_errors, line, a) == [1, 1]


def test_sums_go_together_where_they_can_on_all_workers_of_the_group(scheduler):
    """What depends on what differs between rows in one, within each row in the other."""
    mesh = spmd.Mesh(x=2, y=3, scheduler=scheduler)

    def body(axis: str, a: Any, b: Any) -> Any:
        first = spmd.psum(a, "x")
        c = b * first[0] if spmd.worker_index(axis) == 1 else b
        both = first.sum() + spmd.psum(c, "x").sum()
        return spmd.psum(both, "y") + spmd.psum(both, "y")

    a, b = drawn(mesh, (4,), (3,))
    by_row = [sums_of(lambda a, b: body("y", a, b), mesh, a, b, worker=w) for w in range(6)]
    assert by_row == [[2, 2], [1, 1, 2], [2, 2]] * 2
    assert sums_of(lambda a, b: body("x", a, b), mesh, a, b) == [1, 1, 2]


def test_rows_may_call_other_collectives(scheduler):
    mesh = spmd.Mesh(x=2, y=3, scheduler=scheduler)

    def body(a: Any, b: Any) -> Any:
        row = spmd.worker_index("y")
        first = (spmd.psum if row == 0 else spmd.pmax)(a, "x")
        second = spmd.psum(b if row == 1 else np.tile(b, 2000), "x")
        return spmd.psum(first.sum() + second.sum(), "y")

    a, b = drawn(mesh, (4,), (3,))
    by_row = [sums_of(body, mesh, a, b, worker=w) for w in range(3)]
    assert by_row == [[1, 1, 1], [1, 1], [1, 1]]


def test_sums_of_a_function_of_global_arrays_go_together(line):
    u, v = drawn(line, (2, 3), (4, 1))

    def both(u: Any, v: Any) -> Any:
        return (np.sin(u).sum(0) * v.mean(0)).sum()

    once = spmd.jit(both)
    for k in (1, 1, 3):
        assert bits(once(u * k, v)) == bits(both(u * k, v))
    assert sums_in(once.text()) == [2]


def test_steps_of_a_loop_and_their_way_back(line):
    u, w = drawn(line, (4, 3), (3,))

    def body(u: Any, w: Any) -> Any:
        def step(carry: Any, k: Any) -> Any:
            a, b = spmd.psum((u * carry, u[0] * k), "x")
            return np.tanh(a.sum(0) * 0.1) + b + carry, spmd.psum(carry * w, "x")

        last, ys = spmd.scan(step, spmd.psum(w, "x"), np.arange(5.0))
        return (last * ys).sum()

    mapped = line.map(body, (P("x"), P("x")), P())
    once = spmd.jit(mapped)
    plain, recorded = (spmd.value_and_grad(f, (0, 1)) for f in (mapped, once))
    for k in (1, 1, -1):
        assert bits(once(u * k, w)) == bits(mapped(u * k, w))
        assert bits(recorded(u, w * k)) == bits(plain(u, w * k))
    forward, back = once.text().split("# ('value and gradients'")
    assert 3 in sums_in(forward)
    assert max(sums_in(back)) >= 3


def test_a_ledger_counts_each_sum_and_one_message():
    """On the way back, which is replayed within a ledger."""
    mesh = spmd.Mesh(x=2)

    def body(u: Any, v: Any) -> Any:
        a, b = spmd.psum(u, "x"), spmd.psum(v, "x")
        return spmd.psum((np.sin(a) * u).sum() + (np.sin(b) * v).sum(), "x")

    u, v = drawn(mesh, (4,), (2, 3))
    once = spmd.jit(mesh.map(body, (P("x"), P("x")), P()))
    for _ in range(3):
        value, pull = spmd.vjp(once, u, v)
        with spmd.ledger() as log:
            pull(value)
    assert log.workers.keys() == {0, 1}
    for record in log.workers.values():
        assert record.operators == {"Sum": 2}
        assert record.verbs == {"all_reduce": 1}
        assert (record.messages, record.bytes) == (1, 10 * 8)


def test_a_mismatch_names_all_lines():
    mesh = spmd.Mesh(x=2)

    @spmd.jit
    @mesh.map(in_specs=(P("x"), None), out_specs=P())
    def f(x: Any, n: int) -> Any:
        first = spmd.psum({"a": x[0], "b": x[1:]}, "x")
        return first["a"] + spmd.psum(x[:n], "x").sum()

    (x,) = drawn(mesh, (4,))
    f(x, 2), f(x, 3)
    second, third = f._entries.values()
    second.programs[1] = third.programs[1]
    with pytest.raises(MismatchError) as caught:
        f(x, 2)
    judge(str(caught.value), "test_joined_sums.py")


def judge(text: str, file: str) -> None:
    """Whether an error names what each worker has called, and where."""
    blocks = [text.count(f"psum(float64[{n}], 'x'") for n in (6, 7)]
    assert blocks == [1, 1], text
    assert "packed: psum(float64[], 'x'), psum(float64[3], 'x'), psum(float64[2], 'x')" in text, text
    assert "packed: psum(float64[], 'x'), 2 times psum(float64[3], 'x')" in text, text
    assert len(re.findall(rf"at \S*{file}:\d+ in f, \S*{file}:\d+ in f\n", text)) == 2, text


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_random_bodies_have_the_same_bits(axes, scheduler):
    packed = 0
    for seed in range(6):
        packed += compare(seed, axes, scheduler)
    assert packed or axes == {"x": 1}


@pytest.mark.full
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_many_random_bodies_have_the_same_bits(axes):
    for seed in range(100, 400):
        compare(seed, axes, "lockstep")


def compare(seed: int, axes: dict[str, int], scheduler: str) -> int:
    """Compare a body with its program; odd ones are differentiated, too. The number of sums that are packed."""
    alike = seed % 2 == 1
    mapped, arguments, text = job(seed, axes, alike, scheduler=scheduler)
    once = spmd.jit(mapped)
    pairs = [(mapped, once)]
    if alike:
        pairs.append(tuple(spmd.value_and_grad(loss(f), (1, 2, 3)) for f in (mapped, once)))  # type: ignore[arg-type]
    for plain, recorded in pairs:
        for a in arguments:
            assert bits(recorded(*a)) == bits(plain(*a)), text
    return once.text().count("packed_psum(")


@each_mpi
@pytest.mark.parametrize(("n", "seeds"), [(3, (0, 1)), (4, (2, 3, 4))])
def test_processes_have_the_same_bits(python, n, seeds):
    processes(python, n, seeds)


@pytest.mark.torch
def test_processes_of_torchrun_have_the_same_bits():
    processes(TORCHRUN, 4, (2, 3))


def processes(python: Any, n: int, seeds: tuple[int, ...]) -> None:
    ended = launch(PROGRAMS / "joined_sums.py", *map(str, (n, *seeds)), n=n, python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.splitlines() == joined_sums.lines(n, *seeds)
    assert ", 0 packed" not in ended.stdout
    assert "differs" not in ended.stdout


@each_mpi
def test_processes_with_different_programs_are_told_so(python):
    ended = launch(PROGRAMS / "joined_sums.py", "parted", n=2, python=python, timeout=60)
    assert ended.returncode == 0, str(ended)
    judge(ended.stdout, "joined_sums.py")
