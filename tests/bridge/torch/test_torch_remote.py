"""Modules that lie on one worker each, called from all: `spt.remote`."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from launch import PROGRAMS, TORCHRUN, launch, mpiexec  # noqa: E402
from mpi_programs.torch_remote_calls import alone, stages, trained  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402


@pytest.fixture(autouse=True)
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("places", [(0, 1, 2), (2, 0, 1), (1, 1, 0), (0, 0, 0)], ids=str)
def test_ten_steps_are_those_of_one_worker(places, check):
    """The parameters of a module are on one worker only; none of the others has anything to differentiate."""
    modules, x = stages(), torch.randn(5, 3)
    losses, wanted = alone(modules, x)
    found = []
    body = lambda x: found.append(trained(modules, x, places))
    spt.map(body, in_specs=P(), out_specs=None, mesh=spmd.Mesh(x=3, transport="local"), check=check)(x)
    at = []
    for own_losses, own in found:
        np.testing.assert_allclose(own_losses, losses, rtol=1e-10)
        for s, m in own:
            at.append(s)
            for p, want in zip(m.parameters(), wanted[s].parameters(), strict=True):
                assert torch.allclose(p, want, rtol=1e-10, atol=1e-12)
    assert sorted(at) == [0, 1, 2]


def test_gradients_of_inputs_and_dtypes():
    """Float32 and integers travel in their dtypes; x gets its gradient on every worker."""
    x = torch.randn(4, 3)

    def body(x):
        x = x.detach().requires_grad_()
        pair = spt.remote(lambda a: (a.float() * 2, torch.arange(3), a**2), at=1)(x)
        total = spt.remote(lambda v: (v[0] * v[1]).sum().double() + v[2].sum(), at=2)(pair)
        half, counts, _ = pair.result()
        assert spt.replicate(half, "x", 1).dtype == torch.float32
        spt.replicate(total.result(), "x", 2).backward()
        return x.grad.clone(), spt.replicate(counts, "x", 1)

    grad, counts = spt.map(body, in_specs=P(), out_specs=(P(), P()), mesh=spmd.Mesh(x=3, transport="local"))(x)
    assert torch.equal(grad, 2.0 * torch.arange(3).expand(4, 3) + 2 * x)
    assert torch.equal(counts, torch.arange(3))


@pytest.mark.parametrize("check", [True, False])
def test_f_may_use_collectives_along_other_axes(check):
    """Its backward makes theirs, which workers that have not run f do not count."""
    x = torch.randn(5)

    def body(x):
        x = x.detach().requires_grad_()
        f = lambda a: (spt.all_gather(a, "y", tiled=True) ** 3).sum()
        y = spt.remote(f, at=1, axis_name="x")(spt.keep(x, "x", 1)).result()
        spt.psum(spt.replicate(y, "x", 1), "y").backward()
        return x.grad.clone()

    mesh = spmd.Mesh(x=2, y=3, transport="local")
    grad = spt.map(body, in_specs=P("y"), out_specs=P("y"), mesh=mesh, check=check)(x)
    assert torch.allclose(grad, 9 * x**2)


LAYERS = nn.Sequential(nn.Linear(3, 5), nn.Tanh()).double(), nn.Linear(5, 2).double()
X = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def loss_of_two(first, last, x, axis_name="x", total=torch.sum):
    """The first layer on worker 1, the last one on worker 0 along the axis."""
    h = spt.remote(first, at=1, axis_name=axis_name)(x)
    loss = spt.remote(lambda h: total(last(h) ** 2), at=0, axis_name=axis_name)(h)
    return spt.replicate(loss.result(), axis_name, 0)


def gradients(first, last, axis_name="x"):
    """The gradients of the weights, each on its worker."""
    place = spt.worker_index(axis_name)
    return [
        spmd.varying((p.grad if place == at else torch.zeros_like(p))[None], axis_name)
        for p, at in ((first[0].weight, 1), (last.weight, 0))
    ]


def of_one() -> tuple:
    (first, last), x = copy.deepcopy(LAYERS), X.clone().requires_grad_()
    (last(first(x)) ** 2).sum().backward()
    return first[0].weight.grad, last.weight.grad, x.grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_calls(reentrant):
    """Workers that run nothing recompute where the others do: at the same collectives."""

    def body(x):
        first, last = copy.deepcopy(LAYERS)
        x = x.detach().requires_grad_()
        checkpoint(lambda x: loss_of_two(first, last, x), x, use_reentrant=reentrant).backward()
        return (*gradients(first, last), x.grad)

    found = spt.map(body, P(), (P("x"), P("x"), P()), mesh=spmd.Mesh(x=3, transport="local"))(X)
    for got, want in zip((found[0].sum(0), found[1].sum(0), found[2]), of_one(), strict=True):
        assert torch.allclose(got, want, rtol=1e-12)


def test_functions_use_collectives_along_other_axes():
    """Backward sums the gradients of a module over the axis of the data, among its own workers alone."""

    def body(x):
        first, last = copy.deepcopy(LAYERS)
        loss_of_two(first, last, x, "stage", lambda y: spt.psum(y.sum(), "data")).backward()
        return gradients(first, last, "stage")

    mesh = spmd.Mesh(data=2, stage=2, transport="local")
    found = spt.map(body, P("data"), P("stage"), mesh=mesh)(X)
    for got, want in zip(found, of_one()[:2], strict=True):
        assert torch.allclose(got.sum(0), want, rtol=1e-12)


@pytest.mark.parametrize("linear", [True, False])
def test_derivatives_of_higher_order(linear):
    def loss(x, calls):
        h = calls((lambda x: 3 * x) if linear else torch.sin, 1)(x)
        return calls(lambda h: (h**3).sum(), 2)(h)

    value = lambda x: spt.replicate(loss(x, lambda f, at: spt.remote(f, at=at)).result(), "x", 2)
    alone = lambda x: loss(x, lambda f, at: f)

    def second(f, x):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        return torch.autograd.grad((g**2).sum(), x)[0]

    mesh = spmd.Mesh(x=3, transport="local")
    assert torch.allclose(spt.map(lambda x: second(value, x), P(), P(), mesh=mesh)(X), second(alone, X))
    mapped = spt.map(value, P(), P(), mesh=mesh)
    for of in (lambda f: torch.func.jvp(f, (X,), (torch.cos(X),))[1], lambda f: torch.func.grad(f)(X)):
        assert torch.allclose(of(mapped), of(alone))


def test_plain_tensors_are_arguments():
    """A tensor of no state is one value: its gradient is on all workers. Arguments have names too."""

    def body():
        w = torch.ones(3, requires_grad=True)
        future = spt.remote(lambda a, *, b: (a * b).sum(), at=1)(w * 2, b=X)
        spt.replicate(future.result(), "x", 1).backward()
        return w.grad

    assert torch.allclose(spt.map(body, (), P(), mesh=spmd.Mesh(x=3, transport="local"))(), 2 * X.sum(0))


def test_a_module_is_saved_from_where_it_lies(tmp_path):
    def body():
        net = copy.deepcopy(LAYERS[1])
        if spt.worker_index("x") == 1:
            net.bias.data += 1
        state = spt.replicate(spt.remote(net.state_dict, at=1)().result(), "x", 1)
        spmd.save(tmp_path / "net", state)

    spt.map(body, (), None, mesh=spmd.Mesh(x=2, transport="local"))()
    loaded = spmd.load(tmp_path / "net")
    np.testing.assert_array_equal(loaded["bias"], LAYERS[1].bias.detach() + 1)
    np.testing.assert_array_equal(loaded["weight"], LAYERS[1].weight.detach())


def test_errors_are_raised_where_the_result_is_asked_for():
    def body(x):
        future = spt.remote(lambda a: {}["no such entry"], at=1)(x)
        with pytest.raises(KeyError, match="no such entry"):
            future.result()
        return spt.psum(spt.pvary(x, "x"), "x")

    y = spt.map(body, in_specs=P(), out_specs=P(), mesh=spmd.Mesh(x=3, transport="local"))(torch.ones(2))
    assert torch.equal(y, torch.full((2,), 3.0))


@pytest.mark.parametrize(
    ("python", "n"),
    [pytest.param(sys.executable, 4, marks=pytest.mark.mpi, id="mpi"), pytest.param(TORCHRUN, 2, id="torchrun")],
)
def test_processes(python, n):
    if python == sys.executable and mpiexec() is None:
        pytest.skip("no mpiexec beside this Python")
    ended = launch(PROGRAMS / "torch_remote_calls.py", str(n), n=n, python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert "as on one worker" in ended.stdout, str(ended)
