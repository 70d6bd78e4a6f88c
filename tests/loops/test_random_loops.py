"""Random loops give what a plain Python loop gives: the same bits, in values and gradients, wherever they run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from launch import PROGRAMS, TORCHRUN, launch, mpiexec
from mpi_programs import looping

import spmd
from loops.random_loops import BODY, GLOBAL, HOST, Loop, Place, plain_scan, value
from spmd import P
from spmd.device import to_host

EACH = (0, 1, 2)


def host(tree) -> list[np.ndarray]:
    """The leaves as arrays of NumPy, without those that say that there is no derivative."""
    leaves = [x.numpy() if hasattr(x, "numpy") else np.asarray(to_host(x)) for x in spmd.tree.leaves(tree)]
    return [x for x in leaves if x.dtype != spmd.float0]


def bits(tree) -> list:
    return [(x.dtype, x.shape, x.tobytes()) for x in host(tree)]


def laid_out(loop: Loop) -> list[list]:
    """init, xs and closed as global arrays. The first of Python's numbers stays what it is: one that met only another
    number in the first step would meet a global array in the second."""
    init, xs, closed = loop.specs()
    first = loop.numbers.index(True) if any(loop.numbers) else None
    arrays = [
        spmd.put(np.asarray(x, kind.dtype), spec) for x, kind, spec in zip(loop.init, loop.kinds, init, strict=True)
    ]
    carry = [loop.init[k] if k == first else x for k, x in enumerate(arrays)]
    return [carry, [*map(spmd.put, loop.xs, xs)], [*map(spmd.put, loop.closed, closed)]]


def on_the_host(loop: Loop, scan: Callable, checkpoint):
    given = loop.init, loop.xs, loop.closed
    loss = lambda *given: value(loop, scan, HOST, given, checkpoint)
    return loop.run(scan, HOST, given, checkpoint), spmd.value_and_grad(loss, EACH, allow_int=True)(*given)


def in_bodies(loop: Loop, scan: Callable, checkpoint, jit=lambda f: f, **options):
    with spmd.Mesh(x=loop.workers, **options):
        loss = jit(spmd.map(lambda *given: value(loop, scan, BODY, given, checkpoint), loop.specs(), P()))
        return host(spmd.value_and_grad(loss, EACH, allow_int=True)(loop.init, loop.xs, loop.closed))


def gradients_in_bodies(loop: Loop, scan: Callable, checkpoint, **options):
    """The body takes the gradient itself."""

    def body(init, xs, closed):
        w, *others = closed
        return spmd.value_and_grad(lambda w: value(loop, scan, BODY, (init, xs, [w, *others]), checkpoint))(w)

    with spmd.Mesh(x=loop.workers, **options):
        return host(spmd.map(body, loop.specs(), (P(), P()))(loop.init, loop.xs, loop.closed))


def of_global_arrays(loop: Loop, scan: Callable, checkpoint, jit=lambda f: f, **options):
    with spmd.Mesh(x=loop.workers, **options):
        loss = jit(lambda *given: value(loop, scan, GLOBAL, given, checkpoint))
        return host(spmd.value_and_grad(loss, EACH, allow_int=True)(*laid_out(loop)))


def with_zeros(x: np.ndarray) -> bytes:
    """The bytes of an array, with zeros that have no sign: a Python loop adds cotangents of slices to zeros, scan does
    not."""
    return (x + 0).tobytes()


def wrong(seeds: Iterable[int], run: Callable, **options) -> list[str]:
    told = []
    for seed in seeds:
        loop = Loop(seed)
        wanted = run(loop, plain_scan, None, **options)
        for checkpoint in (None, loop.checkpoint):
            found = run(loop, spmd.scan, checkpoint, **options)
            for got, want in zip(host(found), host(wanted), strict=True):
                same = with_zeros(got) == with_zeros(want) if loop.exact else np.allclose(got, want, 1e-4, 1e-5)
                if not same or got.dtype != want.dtype:
                    told.append(f"{loop}\n{checkpoint=}\ngave {got}\nnot  {want}")
    return told


def none_of(told: list[str]) -> None:
    assert not told, "\n\n".join(told[:3])


def test_on_the_host():
    none_of(wrong([*range(60), 1526], on_the_host))


def test_in_bodies(scheduler):
    none_of(wrong([*range(15), 597] if scheduler == "lockstep" else range(20, 30), in_bodies, scheduler=scheduler))


def test_gradients_in_bodies():
    none_of(wrong(range(100, 110), gradients_in_bodies))


def test_of_global_arrays():
    none_of(wrong([*range(8), 1869], of_global_arrays))


def jitted_and_not(loop: Loop, run: Callable, checkpoint, **options) -> str:
    """What is wrong with a loop under spmd.jit, in two calls: other bits of the value, or other gradients."""
    wanted, *found = (run(loop, spmd.scan, checkpoint, jit=jit, **options) for jit in (lambda f: f, spmd.jit, spmd.jit))
    for got in found:
        if got[0].tobytes() != wanted[0].tobytes():
            return f"{loop}\n{checkpoint=}\ngave {got[0]}\nnot  {wanted[0]}"
        for a, b in zip(got[1:], wanted[1:], strict=True):
            if a.dtype != b.dtype or not np.allclose(a, b, 1e-4, 1e-5):
                return f"{loop}\n{checkpoint=}\ngave {a!r}\nnot  {b!r}"
    return ""


@pytest.mark.parametrize("run", [in_bodies, of_global_arrays])
def test_jitted(run):
    told = [jitted_and_not(Loop(k), run, c) for k in range(200, 204) for c in (None, Loop(k).checkpoint)]
    none_of([text for text in told if text])


@pytest.mark.full
@pytest.mark.parametrize("run", [in_bodies, of_global_arrays])
@pytest.mark.parametrize("first", range(1000, 1200, 50))
def test_many_jitted(scheduler, run, first):
    seeds = range(first, first + 50)
    told = [jitted_and_not(Loop(k), run, c, scheduler=scheduler) for k in seeds for c in (None, Loop(k).checkpoint)]
    none_of([text for text in told if text])


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 3000, 500))
def test_many_on_the_host(first):
    none_of(wrong(range(first, first + 500), on_the_host))


@pytest.mark.full
@pytest.mark.parametrize("run", [in_bodies, gradients_in_bodies, of_global_arrays])
@pytest.mark.parametrize("first", range(1000, 1400, 100))
def test_many_on_meshes(scheduler, run, first):
    none_of(wrong(range(first, first + 100), run, scheduler=scheduler))


def second(loop: Loop, scan: Callable, place: Place, given, checkpoint) -> list[np.ndarray]:
    """The derivative of a sum of all gradients with respect to what the loop closes over, and that of the loop alone
    with respect to what it closes over."""
    init, xs, closed = given
    floats = [k for k, x in enumerate(init) if np.asarray(x).dtype.kind == "f"]

    def loss(some, closed):
        start = [some[floats.index(k)] if k in floats else x for k, x in enumerate(init)]
        return value(loop, scan, place, (start, xs, closed), checkpoint)

    def slopes(closed):
        found = spmd.tree.leaves(spmd.grad(loss, EACH[:2])([init[k] for k in floats], closed))
        return sum(np.sum(np.cos(k + 1.0) * np.real(g)) for k, g in enumerate(found))

    return host(spmd.grad(slopes)(closed))


@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.full)])
def test_second_derivatives(first):
    for seed in range(first, first + (30 if first == 0 else 300)):
        loop = Loop(seed)
        given = loop.init, loop.xs, loop.closed
        wanted = second(loop, plain_scan, HOST, given, None)
        for checkpoint in (None, loop.checkpoint):
            for got, want in zip(second(loop, spmd.scan, HOST, given, checkpoint), wanted, strict=True):
                np.testing.assert_allclose(got, want, 1e-3, 1e-3 * (1 + np.abs(want).max(initial=0)), err_msg=str(loop))


# Processes


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.full)])
def test_by_mpiexec(count):
    processes(count, sys.executable)


@pytest.mark.full
@pytest.mark.torch
def test_by_torchrun():
    processes(10, TORCHRUN)


def processes(count: int, python) -> None:
    ended = launch(PROGRAMS / "looping.py", str(count), python=python, timeout=300)
    assert ended.returncode == 0, str(ended)
    found = json.loads(ended.stdout)
    assert len(found) == 3 * count
    assert found == looping.results(count, plain_scan, spmd.Mesh(x=4, transport="local"))
