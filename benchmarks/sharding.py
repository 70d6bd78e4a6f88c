"""Training steps of two processes whose parameters lie split, or are copied: beside PyTorch's fully_shard and DDP.

`sharded`: a perceptron of six layers of width 1024, batch 64 over both processes, each layer a unit that is gathered
before its use and again in backward; with AdamW. Of 2048 samples, arithmetic hides the messages. `data parallel`: the
same perceptron, which each process has whole, at 64 and at 1024 samples. A learning rate of zero keeps the parameters,
so that any number of steps gives one result; the arithmetic is that of any other rate. All in float32, processes of one
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.contest import ONE_THREAD, Builders, Case, Section, repeated, torch_with

SHARDING = Section("sharding", "training steps of two processes with split or copied parameters", 1e-3, memory=True)
TORCHRUN: dict[str, Any] = {"launcher": "torchrun", "processes": 2, "needs": ("torch",), "env": ONE_THREAD}
MPIEXEC: dict[str, Any] = {"launcher": "mpiexec", "processes": 2, "env": ONE_THREAD}
LAYERS = 6
NO_RATE = 0.0


def width(quick: bool) -> int:
    return 64 if quick else 1024


def titles(quick: bool) -> dict[tuple[str, int], str]:
    """The names of the cases, by kind and samples."""
    samples = (8, 16) if quick else (64, 1024)
    return {(kind, n): f"{kind}, {n} samples" for kind in ("sharded", "data parallel") for n in samples}


def builders(quick: bool, kind: str, build: Callable[[bool, int], Case]) -> Builders:
    return {title: partial(build, quick, n) for (of, n), title in titles(quick).items() if of == kind}


def perceptron(quick: bool, samples: int) -> tuple[Any, Any, Any]:
    """A module, the samples of both processes, and what they are compared with."""
    import torch
    from torch import nn

    n = width(quick)
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(n, n), nn.Tanh())))
    return net, torch.randn(samples, n), torch.randn(samples, n)


def told(loss: Any, net: Any, whole: Callable[[Any], Any]) -> list[Any]:
    return [loss.detach().numpy(), *(whole(p.grad).detach().numpy() for p in net.parameters())]


def of_tensors(quick: bool, samples: int, transport: str, shard: bool) -> Case:
    import spmd

    torch = torch_with(1)
    from spmd.bridge import torch as spt

    net, x, y = perceptron(quick, samples)
    mesh, made = spmd.Mesh(data=2, transport=transport), {}

    def step():
        rank = spt.worker_index("data")
        own, target = x.chunk(2)[rank], y.chunk(2)[rank]
        if not made:
            if shard:
                made["net"] = spt.shard_parameters(net, "data", unit=torch.nn.Linear, reduction="mean")
            else:
                made["net"] = spt.data_parallel(net, "data", reduction="mean")
            made["optimizer"] = torch.optim.AdamW(made["net"].parameters(), lr=NO_RATE)
        made["optimizer"].zero_grad(set_to_none=True)
        loss = (made["net"](own) - target).square().mean()
        loss.backward()
        made["optimizer"].step()
        return loss

    run = spt.map(lambda count: repeated(step)(count), (None,), None, mesh=mesh, check=False)

    def tell():
        def main():
            loss = spt.pmean(step(), "data")
            return told(loss, made["net"], lambda g: g.whole() if hasattr(g, "whole") else g)

        return spt.map(main, (), None, mesh=mesh, check=False)()

    return Case(lambda count: run(count), tell, lambda: made and made["optimizer"].zero_grad(set_to_none=True))


def both_kinds(quick: bool, transport: str) -> Builders:
    build = partial(of_tensors, transport=transport)
    return builders(quick, "sharded", partial(build, shard=True)) | builders(
        quick, "data parallel", partial(build, shard=False)
    )


@SHARDING.contestant("spmd tensors, MPI", needs=("torch",), **MPIEXEC)
def _(quick: bool) -> Builders:
    return both_kinds(quick, "mpi")


@SHARDING.contestant("spmd tensors, gloo", **TORCHRUN)
def _(quick: bool) -> Builders:
    return both_kinds(quick, "torch")


def by_torch(quick: bool, samples: int, shard: bool) -> Case:
    torch = torch_with(1, group=True)
    dist = torch.distributed
    net, x, y = perceptron(quick, samples)
    rank = dist.get_rank()
    own, target = x.chunk(2)[rank], y.chunk(2)[rank]
    if shard:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for layer in net:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        model = net
    else:
        model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=NO_RATE)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = (model(own) - target).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def tell():
        loss = step().detach()
        dist.all_reduce(loss)
        return told(loss / 2, model, lambda g: g.full_tensor() if hasattr(g, "full_tensor") else g)

    return Case(repeated(step), tell, lambda: optimizer.zero_grad(set_to_none=True))


@SHARDING.contestant("torch fully_shard", **TORCHRUN)
def _(quick: bool) -> Builders:
    return builders(quick, "sharded", partial(by_torch, shard=True))


@SHARDING.contestant("torch DDP", **TORCHRUN)
def _(quick: bool) -> Builders:
    return builders(quick, "data parallel", partial(by_torch, shard=False))
