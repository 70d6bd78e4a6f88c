"""spt.pipeline: ten steps in each schedule are those of one worker, with what each worker keeps counted."""

from __future__ import annotations

import sys

import pytest
from launch import ROOT, TORCHRUN, launch, mpiexec

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_pipeline_cases import Case, agree  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.training.pipelines.schedules import schedule_of  # noqa: E402
from spmd.training.pipelines.simulation import alive  # noqa: E402

pytestmark = pytest.mark.host("a body makes its tensors on the host")

CASES = {
    "one worker": Case(stages=1, axes={"stage": 1}),
    "two on one worker": Case("interleaved", axes={"stage": 1}),
    "uneven microbatches": Case("gpipe", n=5, microbatches=3),
    "empty microbatches": Case("zero_bubble", n=3, microbatches=5),
    "a sum": Case(n=7, reduction="sum", clip=0.1, optimizer="sgd"),
    "zero bubble": Case("zero_bubble", n=7, stages=4, axes={"stage": 4}, clip=0.3),
    "interleaved": Case("interleaved", stages=6, n=7, microbatches=5, axes={"stage": 3}),
    "accumulation": Case(stages=3, axes={"stage": 3}, tied=True, parts=2, n=7, clip=0.1),
    "tied in zero bubble": Case("zero_bubble", stages=3, axes={"stage": 3}, tied=True, n=7),
    "data": Case(axes={"data": 3, "stage": 2}, n=10, optimizer="sgd", parts=2, tied=True),
    "split states": Case("zero_bubble", stages=3, axes={"data": 2, "stage": 3}, n=9, shard=True, clip=0.3),
}


def check(case: Case, **options) -> None:
    mesh = spmd.Mesh(**case.axes)
    plan = schedule_of(case.schedule, case.axes["stage"], case.microbatches, case.stages // case.axes["stage"])
    assert agree(case, **options) == [alive(plan, mesh.coordinates(w)["stage"]) for w in range(mesh.size)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ten_steps_are_those_of_one_worker(case):
    check(case)


MPI = [pytest.mark.mpi, pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")]
PROGRAM = ROOT / "tests" / "mpi_programs" / "torch_pipelined.py"


@pytest.mark.parametrize(
    ("python", "n"),
    [pytest.param(sys.executable, 4, id="mpiexec", marks=MPI), pytest.param(TORCHRUN, 2, id="torchrun")],
)
def test_the_same_in_processes(python, n):
    ended = launch(PROGRAM, n=n, python=python, timeout=240)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("a process is through") == n, str(ended)


def drawn(stages: int, workers: int, schedule: str) -> tuple[float, list[torch.Tensor]]:
    """The loss and gradients of stages with dropout and batch norms, and their running means, after two batches."""

    def body(x: torch.Tensor) -> None:
        modules = []
        for k in range(stages):
            with spt.drawing(k):
                layers = nn.Linear(4, 4), nn.Dropout(0.4), nn.BatchNorm1d(4), nn.Tanh()
            modules.append(nn.Sequential(*layers).double())
        step = spt.pipeline(modules, "stage", microbatches=3, schedule=schedule, loss=lambda y: (y**2).mean())
        losses = [float(step.backward(x)) for _ in range(2)]
        assert losses[0] != losses[1]  # the second batch draws others
        for k, module in step.modules_by_stage.items():
            found[k] = [*(p.grad for p in module.parameters()), module[2].running_mean]
        found["loss"] = losses

    found: dict = {}
    torch.manual_seed(3)
    spt.map(body, P(), None, mesh=spmd.Mesh(stage=workers))(torch.arange(32.0, dtype=torch.float64).reshape(8, 4))
    return found.pop("loss"), [x for k in sorted(found) for x in found[k]]


@pytest.mark.parametrize(("workers", "schedule"), [(4, "1f1b"), (4, "zero_bubble"), (2, "interleaved")])
def test_dropout_and_batch_norms_do_as_on_one_worker(workers, schedule):
    losses, tensors = drawn(4, workers, schedule)
    want_losses, want = drawn(4, 1, "interleaved")
    assert losses == pytest.approx(want_losses, rel=1e-12)
    for x, y in zip(tensors, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


class Pair(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0 + seed, dtype=torch.float64))

    def forward(self, x):
        a, b = (x, x**2) if isinstance(x, torch.Tensor) else x
        return self.w * a + b, torch.sin(a)


def test_gradients_of_the_input_and_inference():
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(*(Pair(k) for k in range(3)))
    inner = x.clone().requires_grad_()
    want = model(inner)
    (want[0] * want[1]).sum().backward()

    def body(x):
        stage, loss = Pair(spt.worker_index("stage")), lambda y: (y[0] * y[1]).sum()
        step = spt.pipeline(stage, "stage", microbatches=2, loss=loss, reduction="sum")
        loss, of_x = step.backward(x, of_input=True)
        assert isinstance(of_x, spmd.operators.root.Rooted)
        outputs = step(x)
        assert not outputs[0].requires_grad
        return loss, spt.replicate(of_x, "stage"), *outputs

    loss, of_x, *outputs = spt.map(body, P(), P(), mesh=spmd.Mesh(stage=3))(x)
    torch.testing.assert_close(loss, (want[0] * want[1]).sum().detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(of_x, inner.grad, rtol=0, atol=1e-12)
    for y, z in zip(outputs, want, strict=True):
        torch.testing.assert_close(y, z.detach(), rtol=0, atol=1e-12)
