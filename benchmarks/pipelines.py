"""Pipelines of two processes: beside the ideal time of their schedules, and beside torch.distributed.pipelining.

`sleeping`: stages that sleep 50 ms forward, and 50 ms for the gradient of each, the input and the weights; 8
microbatches. So only messages and their order keep a pipeline from the ideal time, that of the schedule as data.
`perceptron`: stages of four layers of width 1024, GPipe with 8 microbatches of 64 samples, 1F1B with 64 of 32; value
and gradients. `remote`: calls of 50 ms by `remote`, two on different workers at once, and 6 that go through both. All
in float32, processes of one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from benchmarks.contest import ONE_THREAD, Builders, Case, Section, repeated, torch_with

PIPELINES = Section(
    "pipelines", "pipelines and remote calls of two processes", 1e-3, memory=True, ours="spmd tensors, MPI"
)
TORCHRUN: dict[str, Any] = {"launcher": "torchrun", "processes": 2, "needs": ("torch",), "env": ONE_THREAD}
MPIEXEC: dict[str, Any] = {"launcher": "mpiexec", "processes": 2, "env": ONE_THREAD}
SLEEPING = {name: f"sleeping, {name}" for name in ("gpipe", "1f1b", "zero_bubble")}
PERCEPTRONS = {"gpipe": "perceptron, gpipe", "1f1b": "perceptron, 1f1b"}
REMOTE = {"at once": "remote, 2 calls at once", "in a row": "remote, 6 calls through 2 workers"}
LAYERS = 4
"""Of each of the two stages."""


def seconds(quick: bool) -> float:
    return 0.005 if quick else 0.05


def cases(quick: bool, titles: dict[str, str], build: Callable[[bool, str], Case]) -> Builders:
    return {title: partial(build, quick, name) for name, title in titles.items()}


# Stages that sleep


def sleeping_arrays(forward: float, backward: float) -> Callable[[Any], Any]:
    """The identity, which takes so long forward and backward."""
    import spmd

    @spmd.custom_vjp
    def f(x: Any) -> Any:
        time.sleep(forward)
        return x

    def backward_of(kept: None, g: Any) -> tuple[Any]:
        time.sleep(backward)
        return (g,)

    f.defvjp(lambda x: (f(x), None), backward_of)
    return f


def sleeping_tensors(forward: float, backward: float) -> Callable[[Any], Any]:
    """The identity, which takes so long forward and backward."""
    import torch

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            time.sleep(forward)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            time.sleep(backward)
            return g

    return Sleep.apply


def numbers() -> np.ndarray:
    """A batch of 8 microbatches of one sample."""
    return np.arange(1.0, 9.0, dtype=np.float32)


def arrays_asleep(quick: bool, schedule: str) -> Case:
    import spmd
    from spmd import P

    time_of = seconds(quick)
    of_input, of_weights = sleeping_arrays(time_of, time_of), sleeping_arrays(0.0, time_of)
    stages = [lambda w, x: of_input(x) * of_weights(w)] * 2
    pipeline = spmd.training.pipeline(stages, microbatches=8, schedule=schedule, loss=np.mean)
    mesh = spmd.Mesh(stage=2, transport="mpi")

    def body(x: Any) -> tuple[Any, Any]:
        value, grads = pipeline.value_and_grad([np.full(1, w, np.float32) for w in (2, 3)], x, of_input=True)
        return value, spmd.psum(grads.params, "stage")

    step = spmd.map(body, P(), P(), mesh=mesh)

    def tell() -> list[Any]:
        value, grads = step(numbers())
        return [value, *grads]

    return Case(repeated(lambda: step(numbers())), tell)


def tensors_asleep(quick: bool, schedule: str, transport: str) -> Case:
    torch = torch_with(1)
    time_of = seconds(quick)
    of_input, of_weights = sleeping_tensors(time_of, time_of), sleeping_tensors(0.0, time_of)

    class Stage(torch.nn.Module):
        def __init__(self, weight: float):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((1,), weight))

        def forward(self, x: Any) -> Any:
            return of_input(x) * of_weights(self.weight)

    options = {"schedule": schedule, "microbatches": 8, "loss": torch.mean}
    return of_modules([Stage(2.0), Stage(3.0)], (torch.from_numpy(numbers()),), transport, options, of_input=True)


# Modules


def of_modules(stages: list[Any], batch: Any, transport: str, options: Any, **inputs: bool) -> Case:
    """Value and gradients of a pipeline. options: of it; inputs: of its backward."""
    import spmd
    from spmd.bridge import torch as spt

    mesh, made = spmd.Mesh(stage=2, transport=transport), {}

    def step() -> Any:
        if not made:
            made["pipeline"] = spt.pipeline(stages, "stage", **options)
        made["pipeline"].zero_grad(set_to_none=True)
        return made["pipeline"].backward(*batch, **inputs)

    run = spt.map(lambda count: repeated(step)(count), (None,), None, mesh=mesh, check=False)

    def tell() -> list[Any]:
        def main() -> list[Any]:
            loss = step()[0] if inputs else step()
            return [loss, *spt.all_gather(gradients(made["pipeline"]), "stage")]

        return spt.map(main, (), None, mesh=mesh, check=False)()

    return Case(run, tell, lambda: [stage.zero_grad(set_to_none=True) for stage in stages])


def gradients(module: Any) -> Any:
    """Those of this process, in one dimension."""
    import torch

    return torch.cat([p.grad.reshape(-1) for p in module.parameters()])


def perceptron(quick: bool, schedule: str) -> tuple[list[Any], tuple[Any, Any], int]:
    """Both stages, a batch with its targets, and the number of microbatches."""
    import torch
    from torch import nn

    microbatches, samples = {"gpipe": (8, 64), "1f1b": (64, 32)}[schedule]
    samples, n = (2, 64) if quick else (samples, 1024)
    torch.manual_seed(0)
    stages = [nn.Sequential(*(f for _ in range(LAYERS) for f in (nn.Linear(n, n), nn.Tanh()))) for _ in range(2)]
    return stages, (torch.randn(microbatches * samples, n), torch.randn(microbatches * samples, n)), microbatches


def of_perceptron(quick: bool, schedule: str, transport: str) -> Case:
    torch = torch_with(1)
    stages, batch, microbatches = perceptron(quick, schedule)
    options = {"schedule": schedule, "microbatches": microbatches, "loss": torch.nn.functional.mse_loss}
    return of_modules(stages, batch, transport, options)


def by_torch(quick: bool, schedule: str) -> Case:
    torch = torch_with(1, group=True)
    dist = torch.distributed
    from torch.distributed import pipelining

    stages, (x, y), microbatches = perceptron(quick, schedule)
    rank = dist.get_rank()
    stage = pipelining.PipelineStage(stages[rank], rank, 2, torch.device("cpu"))
    kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[schedule]
    pipeline = kind(stage, microbatches, loss_fn=torch.nn.functional.mse_loss)

    def step() -> list[Any]:
        stages[rank].zero_grad(set_to_none=True)
        losses: list[Any] = []
        if rank == 0:
            pipeline.step(x, return_outputs=False)
        else:
            pipeline.step(target=y, losses=losses, return_outputs=False)
        return losses

    def tell() -> list[Any]:
        losses = step()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, 1)
        own = gradients(stages[rank])
        both = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(both, own)
        return [loss.numpy(), *(g.numpy() for g in both)]

    def drop() -> None:
        stages[rank].zero_grad(set_to_none=True)
        stage.clear_runtime_states()

    step()  # It makes memory for what it receives from all microbatches, and keeps it.
    received = chain(*stage.args_recv_info.values(), *stage.grad_recv_info.values())
    buffers = [info.buffer for info in received if getattr(info, "buffer", None) is not None]
    return Case(repeated(step), tell, drop, kept=sum(buffer.nbytes for buffer in buffers))


# Remote calls


def remote_calls(quick: bool, name: str, tensors: str = "") -> Case:
    """tensors: the transport, where they are tensors and no arrays."""
    import spmd
    from spmd import P

    x: Any = numbers()
    library: Any = spmd
    if tensors:
        torch = torch_with(1)
        from spmd.bridge import torch as library

        x = torch.from_numpy(x)

    def f(x: Any) -> Any:
        time.sleep(seconds(quick))
        return x + 1

    def body(x: Any) -> Any:
        if name == "at once":
            futures = [(library.remote(f, at=k)(x), k) for k in range(2)]
        else:
            futures = [(library.remote(f, at=1)(library.remote(f, at=0)(x * k)), 1) for k in range(6)]
        return [library.replicate(future.result(), "stage", k) for future, k in futures]

    options = {"check": False} if tensors else {}
    step = library.map(body, P(), P(), mesh=spmd.Mesh(stage=2, transport=tensors or "mpi"), **options)
    return Case(repeated(lambda: step(x)), lambda: [np.asarray(y) for y in step(x)])


# Contestants


@PIPELINES.contestant("spmd tensors, MPI", needs=("torch",), **MPIEXEC)
def _(quick: bool) -> Builders:
    return tensors(quick, "mpi")


@PIPELINES.contestant("spmd tensors, gloo", **TORCHRUN)
def _(quick: bool) -> Builders:
    return tensors(quick, "torch")


def tensors(quick: bool, transport: str) -> Builders:
    return (
        cases(quick, SLEEPING, partial(tensors_asleep, transport=transport))
        | cases(quick, PERCEPTRONS, partial(of_perceptron, transport=transport))
        | cases(quick, REMOTE, partial(remote_calls, tensors=transport))
    )


@PIPELINES.contestant("spmd, MPI", **MPIEXEC)
def _(quick: bool) -> Builders:
    return cases(quick, SLEEPING, arrays_asleep) | cases(quick, REMOTE, remote_calls)


@PIPELINES.contestant("torch pipelining", **TORCHRUN)
def _(quick: bool) -> Builders:
    return cases(quick, PERCEPTRONS, by_torch)


@PIPELINES.contestant("ideal")
def _(quick: bool) -> Builders:
    return cases(quick, SLEEPING, ideal_pipeline) | cases(quick, REMOTE, ideal_calls)


def ideal_pipeline(quick: bool, schedule: str) -> Case:
    """Sleeps as long as the schedule takes where messages take no time."""
    from spmd.training.pipelines.schedules import schedule_of
    from spmd.training.pipelines.simulation import makespan

    t = seconds(quick)
    whole = makespan(schedule_of(schedule, 2, 8), t, 2 * t, t)
    return Case(repeated(lambda: time.sleep(whole)), list)


def ideal_calls(quick: bool, name: str) -> Case:
    whole = seconds(quick) * {"at once": 1, "in a row": 6 + 1}[name]
    return Case(repeated(lambda: time.sleep(whole)), list)
