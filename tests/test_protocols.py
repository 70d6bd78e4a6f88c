"""Copies, pickles, weak references and equality of meshes and global arrays, and of what holds some."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import weakref
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
from launch import TORCHRUN, each_mpi, launch

import spmd
from spmd import P
from spmd.errors import DonatedError
from spmd.optim import adam, sgd
from spmd.solvers import Solution, cg

X = np.random.default_rng(0).normal(size=(7, 3))

pytestmark = pytest.mark.host("arrays of NumPy")


def total(x):
    return spmd.psum(x.sum(0), "x")


def twice(x):
    return 2 * x


def of(n: int) -> spmd.Mesh:
    return spmd.Mesh(x=n, transport="local")


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy}
ALL = {**COPIES, "pickle": lambda a: pickle.loads(pickle.dumps(a))}


@pytest.mark.parametrize("again", ALL.values(), ids=ALL)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
def test_copies_of_global_arrays(again, workers, spec):
    x = spmd.put(X, spec, of(workers))
    twin = again(x)
    assert twin is not x
    assert twin.mesh == x.mesh
    assert hash(twin.mesh) == hash(x.mesh)
    assert (twin.layout, twin.dtype, twin.compared) == (x.layout, x.dtype, x.compared)
    np.testing.assert_array_equal((twin + x).numpy(), 2 * X)
    assert not any(block.flags.writeable for block in twin.blocks.values())
    assert len({*map(id, twin.blocks.values())}) == len({*map(id, x.blocks.values())}), "copies are one array"


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
def test_copies_share_the_mesh_and_the_blocks(again):
    x = spmd.put(X, P("x"), of(3))
    assert again(x.mesh) is x.mesh
    twin = again({"a": [x], "b": x.mesh})
    assert twin["b"] is x.mesh
    assert twin["a"][0].mesh is x.mesh
    assert all(twin["a"][0].blocks[w] is block for w, block in x.blocks.items())


def test_copies_outlive_what_is_given_away():
    x, g = (spmd.put(X, P("x"), of(3)) for _ in range(2))
    twin = copy.deepcopy(x)
    sgd(0.5).update(g, sgd(0.5).init(x), x, donate=True)
    np.testing.assert_array_equal(twin.numpy(), X)
    for again in COPIES.values():
        with pytest.raises(DonatedError):
            again(x).numpy()
    with pytest.raises(DonatedError, match="pickle"):
        pickle.dumps(x)


@pytest.mark.parametrize("again", ALL.values(), ids=ALL)
def test_copies_of_what_holds_a_mesh(again):
    mesh = of(3)
    x = spmd.put(X, P("x"), mesh)
    mapped, want = spmd.map(total, P("x"), P(), mesh=mesh), total_of(X)
    state = adam(0.1).init({"w": x})
    A = spmd.linear_operator(twice, P("x"), P("x"), shape=X.shape, mesh=mesh)
    solution = cg(A, x)
    np.testing.assert_array_equal(again(x.layout).slices(1), x.layout.slices(1))
    for f in (mapped, spmd.jit(mapped)):
        np.testing.assert_allclose(f(x).numpy(), want)
        if again in COPIES.values():  # What `spmd.map` decorates or wraps goes by its name into a pickle.
            np.testing.assert_allclose(again(f)(x).numpy(), want)
    moved = again(state)
    new, _ = adam(0.1).update({"w": x}, moved, {"w": x})
    assert new["w"].shape == X.shape
    if again in COPIES.values():
        np.testing.assert_allclose((again(A) @ x).numpy(), 2 * X)
    twin = again(solution)
    assert isinstance(twin, Solution)
    np.testing.assert_array_equal(twin.x.numpy(), solution.x.numpy())


def total_of(x: np.ndarray) -> np.ndarray:
    return x.sum(0)


def test_weak_references_and_equality():
    mesh = of(3)
    x = spmd.put(X, P("x"), mesh)
    kept = weakref.WeakValueDictionary({"mesh": mesh, "x": x})
    assert (kept["mesh"], kept["x"]) == (mesh, kept["x"])
    del x
    assert "x" not in kept
    assert {mesh: 1}[copy.deepcopy(mesh)] == 1
    assert {mesh: 1}[pickle.loads(pickle.dumps(mesh))] == 1


def sum_of(x: spmd.PartitionedArray) -> spmd.PartitionedArray:
    return x + x


def test_executors():
    x = spmd.put(X, P("x"), of(3))
    with ThreadPoolExecutor(2) as threads:
        for y in threads.map(sum_of, [x] * 4):
            np.testing.assert_array_equal(y.numpy(), 2 * X)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        np.testing.assert_array_equal(processes.submit(sum_of, x).result(60).numpy(), 2 * X)


PROGRAM = """
import copy, pickle, threading
import numpy as np, spmd
from concurrent.futures import ThreadPoolExecutor
from spmd import P
from spmd.errors import MeshError
from spmd.optim import adam

mesh = spmd.Mesh(x=3)
x = spmd.put(np.arange(14.0).reshape(7, 2), P("x"), mesh)
mapped = spmd.map(lambda x: spmd.psum(x.sum(0), "x"), P("x"), P(), mesh=mesh)
jitted = spmd.jit(mapped)
for _ in range(3): want = mapped(x).numpy(), jitted(x).numpy()
optimizer = adam(0.1)
state = optimizer.init({"w": x})
refused = []
for again in (copy.copy, copy.deepcopy):
    twin = again(x)
    assert again(mesh) is mesh and twin.mesh is mesh
    assert np.array_equal((twin + x).numpy(), 2 * x.numpy())
    assert np.array_equal(again(mapped)(twin).numpy(), want[0])
    for _ in range(3): assert np.array_equal(again(jitted)(twin).numpy(), want[1])
    new, _ = optimizer.update({"w": x}, again(state), {"w": again(x)})
    assert not np.array_equal(new["w"].numpy(), x.numpy())
    assert {mesh: 1}[again(mesh)] == 1
for thing in (x, mesh, state, {"a": [x]}, twin, x + x):
    try:
        pickle.dumps(thing)
    except MeshError as error:
        refused.append(str(error))
assert np.array_equal(pickle.loads(pickle.dumps(x.numpy())), x.numpy())
assert len(refused) == 6 and all("x.numpy()" in r and "np.save" in r and "pickle of a " in r for r in refused), refused
if spmd.is_main(): print("well")
"""


def in_a_job(python, tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = launch(program, n=3, python=python)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout == "well\n", str(ended)


@each_mpi
def test_copies_and_pickles_under_mpi(python, tmp_path):
    in_a_job(python, tmp_path)


@pytest.mark.torch
def test_copies_and_pickles_under_torchrun(tmp_path):
    in_a_job(TORCHRUN, tmp_path)
