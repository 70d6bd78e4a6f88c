"""Modules that lie on one worker each, called from all: `spt.remote`."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from launch import PROGRAMS, TORCHRUN, launch, mpiexec
from mpi_programs.torch_remote_calls import alone, stages, trained

import spmd
from spmd import P
from spmd.bridge import torch as spt


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
