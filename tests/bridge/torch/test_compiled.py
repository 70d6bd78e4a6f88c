"""Compiled functions give what they give when they are not: every operator, and the functions of bodies."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from launch import ROOT, launch, mpiexec  # noqa: E402
from torch_operators import MESHES, applied, integers, placed  # noqa: E402

from bridge.torch.test_operators import KINDS, each, few, mesh_name, result  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import MeshError, StateError  # noqa: E402
from spmd.layout import Layout  # noqa: E402
from spmd.mesh import Mesh  # noqa: E402
from spmd.testing import Case, operator_cases  # noqa: E402

ORDINARY = {
    "test_functions_compile",
    "test_compiled_operators[Sum]",
    "test_compiled_operators[AllGather]",
    "test_compiled_operators[Permute]",
    "test_torch_checks_the_registrations[Sum]",
    "test_torch_checks_the_registrations[AllGather]",
    "test_nothing_is_compiled_again_per_step_or_worker",
    "test_halos_across_short_blocks_have_the_length_that_comes",
    "test_tensors_with_states_are_refused_by_name",
    "test_a_map_in_a_compiled_function_runs_as_it_is",
}
"""The tests of the ordinary run; the others are long searches."""

pytestmark = pytest.mark.host("tensors of these tests lie on the host")


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled is left from other tests: each counts its own."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Every operator


def compiled(case: Case, mesh: Mesh, rng: np.random.Generator, backend: str = "aot_eager") -> None:
    """The values and the gradients of a compiled operator, and of its adjoint, are those of the operator."""
    torch._dynamo.reset()
    at = placed(case, mesh)
    op = spt.operator(at.operator)
    x, y = integers(rng, at.size), integers(rng, applied(case, mesh).function(torch.zeros(at.size)).numel())

    def loss(block, g):
        z = op(block)
        return (z * g).sum() + (z * z * g).sum()

    fast = torch.compile(loss, fullgraph=True, backend=backend)

    def body(function: Callable) -> Callable:
        def run(x, y):
            block = at.block(x).clone().requires_grad_()
            z = op(block.detach())
            value = function(block, y.reshape(z.shape))
            value.backward()
            return value.detach().reshape(1), at.flat(z), block.grad.reshape(-1)

        every = P(tuple(mesh.axes))
        specs = (at.source, at.results()), (every, at.target, at.source)
        return spt.map(run, *specs, mesh=mesh, check=False)

    want = body(loss)(x, y)
    for _ in range(2):
        for got, w in zip(body(fast)(x, y), want, strict=True):
            assert torch.equal(got, w)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_compiled_operators(kind):
    axes = ({"x": 3}, {"x": 2, "y": 2})[KINDS.index(kind) % 2]
    each(compiled, few(kind, axes, 1), axes)


@pytest.mark.full
@pytest.mark.parametrize("axes", MESHES, ids=mesh_name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_compiled_operators_everywhere(kind, axes):
    each(compiled, [("", case) for case in operator_cases(kind, Mesh(**axes))], axes)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_compiled_operators_with_inductor(kind):
    each(lambda *args: compiled(*args, backend="inductor"), few(kind, {"x": 2}, 2), {"x": 2})


def registered(case: Case, mesh: Mesh, rng: np.random.Generator) -> None:
    """torch's own checks of the two ops that stand in graphs: schema, autograd, shapes, and what AOT makes of them.

    The last two are for one thread of a process only, by what torch keeps in globals: one traces by make_fx, the other
    asks for sizes that are not known yet. See also the test with mpiexec.
    """
    every = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    tests = every if mesh.size == 1 or mesh.transport.name != "local" else every[:-2]

    def opcheck(op, args):
        torch.library.opcheck(op, args, test_utils=tests)

    at = placed(case, mesh)
    op = spt.operator(at.operator)
    y = integers(rng, applied(case, mesh).function(torch.zeros(at.size)).numel())

    def body(x, y):
        block = at.block(x).clone().requires_grad_()
        z = op(block.detach())
        opcheck(torch.ops.spmd.apply.default, (block, op.token))
        _, ticket = torch.ops.spmd.apply(block.detach(), op.token)
        g = y.reshape(z.shape).clone().requires_grad_()
        opcheck(torch.ops.spmd.move.default, (g, ticket, list(block.shape), False))
        opcheck(torch.ops.spmd.move.default, (block, ticket, list(z.shape), True))
        return result(at, z)

    spt.map(body, (at.source, at.results()), at.target, mesh=mesh, check=False)(integers(rng, at.size), y)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_torch_checks_the_registrations(kind):
    for axes in ({"x": 1}, {"x": 2}):
        each(registered, few(kind, axes, 1), axes)


@pytest.mark.full
@pytest.mark.parametrize("axes", MESHES, ids=mesh_name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_torch_checks_the_registrations_everywhere(kind, axes):
    each(registered, few(kind, axes, 8), axes)


@pytest.mark.full
@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_torch_checks_the_registrations_in_processes():
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    ended = launch(ROOT / "tests" / "bridge" / "torch" / "test_compiled.py", n=2, timeout=300, PYTHONPATH=path)
    assert ended.returncode == 0, ended


# Functions of bodies

FUNCTIONS: dict[str, Callable[[Any, Mesh], Any]] = {
    "psum": lambda x, mesh: spt.psum(x.sum(0), "x"),
    "psum of a tuple": lambda x, mesh: spt.psum(x.sum(0), ("x",)),
    "pmean": lambda x, mesh: spt.pmean(x.sum(0), "x"),
    "mean": lambda x, mesh: spt.mean(x, "x"),
    "mean of columns": lambda x, mesh: spt.mean(x, "x", 0),
    "sum": lambda x, mesh: spt.sum(x * x, "x"),
    "sum of columns": lambda x, mesh: spt.sum(x, "x", axis=(0,)),
    "max": lambda x, mesh: spt.max(x, "x"),
    "min of columns": lambda x, mesh: spt.min(x, "x", 0),
    "pmax": lambda x, mesh: spt.pmax(x.sum(0), "x"),
    "pmin": lambda x, mesh: spt.pmin(x.sum(0), axis_name="x"),
    "all_gather": lambda x, mesh: spt.all_gather(x, "x", axis=0, tiled=True),
    "all_gather, invariant": lambda x, mesh: spt.all_gather(x, "x", axis=0, tiled=True, to="invariant"),
    "psum_scatter": lambda x, mesh: spt.psum_scatter(x.t() @ x, "x", scatter_dimension=0, tiled=True),
    "ppermute": lambda x, mesh: spt.ppermute(x.sum(0), "x", [(0, mesh.size - 1)]),
    "shift": lambda x, mesh: spt.shift(x, "x", 1),
    "all_to_all": lambda x, mesh: spt.all_to_all(x, "x", 1, 0, tiled=True),
    "halo_exchange": lambda x, mesh: spt.halo_exchange(x, P("x"), ((1, 0),), "periodic"),
    "halo_exchange, zero": lambda x, mesh: spt.halo_exchange(x, P("x"), widths=1, boundary="zero"),
    "repartition": lambda x, mesh: spt.repartition(
        x, Layout((7, 5), P("x"), mesh.axes), Layout((7, 5), P(None, "x"), mesh.axes)
    ),
    "pvary": lambda x, mesh: spt.pvary(x.sum(0), "x"),
}


@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 4))])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_compile(name, size):
    """On uneven blocks, of which what the others hold decides the lengths of results; values and gradients."""
    mesh = Mesh(x=size)

    def loss(x):
        y = FUNCTIONS[name](x, mesh)
        return (torch.sin(y) * y).sum() + x.sum()

    fast = torch.compile(loss, fullgraph=True, backend="aot_eager")

    def body(function: Callable) -> Callable:
        def run(x):
            x = x.clone().requires_grad_()
            value = function(x)
            value.backward()
            return value.detach().reshape(1), x.grad

        return spt.map(run, P("x"), (P("x"), P("x")), mesh=mesh, check=False)

    x = torch.from_numpy(np.random.default_rng(size).standard_normal((7, 5)))
    for got, want in zip(body(fast)(x), body(loss)(x), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "complex64"])
def test_compiled_means_of_all_dtypes(dtype):
    x = (torch.arange(70).reshape(7, 10) % 13).to(getattr(torch, dtype))
    mesh = Mesh(x=3)
    found = [
        spt.map(lambda x, f=f: f(x), P("x"), P(), mesh=mesh, check=False)(x)
        for f in (
            lambda x: spt.mean(x, "x", 0),
            torch.compile(lambda x: spt.mean(x, "x", 0), fullgraph=True, backend="aot_eager"),
        )
    ]
    assert found[0].dtype == found[1].dtype
    assert torch.equal(*found)


def program(x, w):
    w = spt.pvary(w, "x")
    y = torch.tanh(x @ w)
    h = spt.halo_exchange(x, P("x"), 1, "periodic")
    g = spt.all_gather(y, "x", axis=0, tiled=True)
    return spt.psum(g.sum() + y.sum() + h.square().sum(), "x") + spt.mean(y, "x") + spt.max(y, "x")


def trained(step: Callable, mesh: Mesh, steps: int = 3) -> Any:
    def body(x, w):
        losses = []
        for _ in range(steps):
            w = w.detach().clone().requires_grad_()
            loss = step(x, w)
            loss.backward()
            losses.append(loss.detach())
            w = w - 0.01 * w.grad
        return torch.stack(losses), w.detach()

    rng = np.random.default_rng(0)
    x, w = torch.from_numpy(rng.standard_normal((9, 3))), torch.from_numpy(rng.standard_normal(3))
    return spt.map(body, (P("x"), P()), P(), mesh=mesh, check=False)(x, w)


@pytest.mark.parametrize("size", [1, 4])
def test_a_program_of_several_collectives(size):
    mesh = Mesh(x=size)
    step = torch.compile(program, fullgraph=True, backend="aot_eager")
    for got, want in zip(trained(step, mesh), trained(program, mesh), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_program_with_inductor(size):
    mesh = Mesh(x=size)
    step = torch.compile(program, fullgraph=True)
    for got, want in zip(trained(step, mesh), trained(program, mesh), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 3])
def test_nothing_is_compiled_again_per_step_or_worker(size):
    """Threads that come to a function for the first time at once each compile it, as torch does; then never again."""
    from torch._dynamo.testing import CompileCounterWithBackend

    graphs = CompileCounterWithBackend("aot_eager")
    step = torch.compile(program, fullgraph=True, backend=graphs)
    trained(step, Mesh(x=size), steps=2)
    first = graphs.frame_count
    assert first <= size
    for _ in range(3):
        trained(step, Mesh(x=size), steps=4)
    assert graphs.frame_count == first


def test_tensors_with_states_are_refused_by_name():
    step = torch.compile(lambda x: spt.psum(x.sum(), "x"), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"check=False") as caught:
        spt.map(step, P("x"), P(), mesh=Mesh(x=2))(torch.ones(4))
    assert isinstance(caught.value, StateError) or "carries its state" in str(caught.value)


def test_a_map_in_a_compiled_function_runs_as_it_is():
    mesh = Mesh(x=2)
    mapped = spt.map(lambda x: spt.psum((x * x).sum(), "x"), P("x"), P(), mesh=mesh)
    fast = torch.compile(lambda x: mapped(torch.sin(x)) * 2, backend="aot_eager")
    x = torch.arange(5.0, dtype=torch.float64).requires_grad_()
    value = fast(x)
    value.backward()
    torch.testing.assert_close(value, 2 * (torch.sin(x) ** 2).sum())
    torch.testing.assert_close(x.grad, (4 * torch.sin(x) * torch.cos(x)).detach())


if __name__ == "__main__":  # by mpiexec
    for kind in KINDS:
        each(registered, few(kind, {"x": 2}, 3), {"x": 2})


@pytest.mark.parametrize("lengths", [(1, 1), (2, 1), (1, 0), (2, 2), (3, 1)])
def test_halos_across_short_blocks_have_the_length_that_comes(lengths):
    mesh = Mesh(x=2)

    def mean(x):
        y = spt.halo_exchange(x, P("x"), 2)
        return y.sum() / y.shape[0]

    fast = torch.compile(mean, fullgraph=True, backend="eager")

    def body(x):
        return mean(x).reshape(1), fast(x).reshape(1)

    x = torch.arange(2.0 * sum(lengths)).reshape(-1, 2)
    layout = Layout(x.shape, P("x"), mesh.axes, [lengths, None])
    run = spt.map(body, layout, P("x"), mesh=mesh, check=False)
    if lengths == (3, 1):  # the graph for 3 rows takes two more from the next worker for granted
        with pytest.raises(MeshError, match=r"(?s)result of shape \[4, 2\].*shape \[5, 2\]"):
            run(x)
        return
    eager, fast_ = run(x)
    assert torch.equal(eager, fast_)
