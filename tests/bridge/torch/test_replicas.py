"""Tensors that count as one value are one, or the program stops: reductions, gradients and results in torch."""

from __future__ import annotations

import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from launch import PROGRAMS, TORCHRUN, launch, mpiexec  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import ReplicaError, StateError  # noqa: E402

pytestmark = pytest.mark.host("tensors of the host")

SOURCES = {
    "a tensor": lambda w: torch.full((3,), 1.0 + w),
    "draws of one seed each": lambda w: torch.randn(3, generator=torch.Generator().manual_seed(w)),
    "double": lambda w: torch.arange(3, dtype=torch.float64) * (1 + w),
    "short": lambda w: torch.full((3,), 1.0 + w, dtype=torch.bfloat16),
    "a parameter": lambda w: torch.nn.Parameter(torch.full((3,), 1.0 + w)),
    "an array": lambda w: torch.from_numpy(np.full(3, 1.0 + w)),
}


def loss(w, x):
    return spt.mean((x * w.sum()) ** 2, "x")


def by_backward(w, x):
    w = w.detach().requires_grad_()
    loss(w, x).backward()
    return w.grad.sum()


def by_autograd(w, x):
    w = w.detach().requires_grad_()
    return torch.autograd.grad(loss(w, x), w)[0].sum()


def of_a_module(w, x):
    layer = torch.nn.Linear(3, 1, bias=False, dtype=w.dtype)
    with torch.no_grad():
        layer.weight.copy_(w[None])
    spt.mean((x.to(w.dtype)[:, None] * layer(torch.ones(3, dtype=w.dtype))) ** 2, "x").backward()
    return layer.weight.grad.sum()


def in_a_replicated_layer(w, x):
    """The weight meets Invariant tensors only, and its result data that vary."""
    layer = torch.nn.Linear(3, 3, bias=False, dtype=w.dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(w))
    spt.mean((x.to(w.dtype) * layer(torch.ones(3, dtype=w.dtype)).sum()) ** 2, "x").backward()
    return layer.weight.grad.sum()


DOORS = {
    "mean": lambda w, x: spt.mean(w, "x"),
    "max": lambda w, x: spt.max(w, "x"),
    "pmean": lambda w, x: spt.pmean(w, "x").sum(),
    "pmin": lambda w, x: spt.pmin(w, "x").sum(),
    "backward": by_backward,
    "autograd.grad": by_autograd,
    "func.grad": lambda w, x: torch.func.grad(loss)(w.detach(), x).sum(),
    "func.vjp": lambda w, x: (
        torch.func.vjp(lambda w: loss(w, x), w.detach())[1](torch.ones(()))[0].sum()
        if w.dtype == torch.float32
        else torch.func.grad(loss)(w.detach(), x).sum()
    ),
    "a module": of_a_module,
    "a replicated layer": in_a_replicated_layer,
}


def run(door, source, differ: bool, calls: int = 1):
    def body(x):
        for _ in range(calls):
            y = door(source(spmd.worker_index("x") if differ else 1), x)
        return x + y.detach().to(x.dtype)

    with spmd.Mesh(x=3):
        return spt.map(body, P("x"), P("x"))(torch.ones(6))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("source", SOURCES)
def test_undeclared_tensors_are_compared(door, source):
    run(DOORS[door], SOURCES[source], False, calls=4)
    with pytest.raises(ReplicaError, match=r"(?s)differs between worker \d.*and worker \d.*mend.*spmd\.varying"):
        run(DOORS[door], SOURCES[source], True)


def test_declared_tensors_may_differ():
    def body(x):
        w = spt.varying(torch.full((3,), 1.0 + spmd.worker_index("x")), "x").requires_grad_()
        spt.psum((x.sum() * w).sum(), "x").backward()
        return x + spt.mean(w.detach(), "x") + w.grad.sum()

    with spmd.Mesh(x=2):
        found = spt.map(body, P("x"), P("x"))(torch.tensor([1.0, 2.0]))
    assert found.tolist() == [1 + 1.5 + 3, 2 + 1.5 + 6]


@pytest.mark.parametrize("result", [lambda w: torch.full((2,), float(w)), lambda w: float(w), lambda w: {"a": [w]}])
def test_results_without_a_spec_are_equal(result):
    with spmd.Mesh(x=2):
        spt.map(lambda x: result(1), P("x"), None)(torch.ones(2))
        with pytest.raises(StateError, match="equal on all workers"):
            spt.map(lambda x: result(spmd.worker_index("x")), P("x"), None)(torch.ones(2))


def processes(python: str) -> None:
    ended = launch(PROGRAMS / "torch_replicas.py", n=2, python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("all raised") == 2, str(ended)


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_processes_compare_tensors():
    processes(sys.executable)


def test_processes_of_torchrun_compare_tensors():
    processes(TORCHRUN)
