"""Collectives of tensors of PyTorch on two workers: beside torch's own functional collectives, and beside arrays.

4 B, forward and with backward: ours on virtual workers, over MPI and over torch.distributed, torch's on two processes
over gloo. 4 MB and 64 MB, on virtual workers: tensors, and arrays of NumPy that the user may write to; both have to be
safe from that. torch's functional collectives have no differentiable sum: there backward hands the cotangent on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.contest import ONE_THREAD, Builders, Case, Section, repeated, torch_with

BRIDGE = Section("bridge", "collectives of tensors on two workers", 1e-6, ours="spmd tensors, virtual workers")
SMALL, LARGE = {"4 B": 1}, {"4 MB": 1 << 20, "64 MB": 1 << 24}
VERBS = "all-reduce", "all-reduce and backward", "permute", "all-gather"
RING = [(0, 1), (1, 0)]


def cases(build: Callable[[str, int], Case], sizes: dict[str, int], verbs: tuple[str, ...] = VERBS) -> Builders:
    return {f"{verb} {name}": partial(build, verb, n) for name, n in sizes.items() for verb in verbs}


def of_tensors(transport: str, verb: str, n: int) -> Case:
    import spmd
    from spmd.bridge import torch as spt

    torch = torch_with(1)
    mesh = spmd.Mesh(x=2, transport=transport)

    def steps() -> Callable[[], Any]:
        x = torch.full((n,), 1.0 + spt.worker_index("x"))
        y = x.clone().requires_grad_()

        def backward():
            y.grad = None
            spt.psum(y, "x").backward(x)
            return y.grad

        return {
            "all-reduce": lambda: spt.psum(x, "x"),
            "all-reduce and backward": backward,
            "permute": lambda: spt.ppermute(x, "x", RING),
            "all-gather": lambda: spt.all_gather(x, "x", tiled=True),
        }[verb]

    run = spt.map(lambda count: repeated(steps())(count), (None,), None, mesh=mesh, check=False)
    told = spt.map(lambda: np.array(steps()().detach()), (), None, mesh=mesh, check=False)
    return Case(run, lambda: [told()])


@BRIDGE.contestant("spmd tensors, virtual workers", needs=("torch",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return cases(partial(of_tensors, "local"), SMALL if quick else SMALL | LARGE)


@BRIDGE.contestant("spmd tensors, MPI", launcher="mpiexec", processes=2, needs=("torch",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return cases(partial(of_tensors, "mpi"), SMALL)


@BRIDGE.contestant("spmd tensors, torch", launcher="torchrun", processes=2, needs=("torch",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return cases(partial(of_tensors, "torch"), SMALL)


def of_arrays(verb: str, n: int) -> Case:
    import spmd

    mesh = spmd.Mesh(x=2, transport="local")

    def steps() -> Callable[[], Any]:
        x = np.full(n, 1.0 + spmd.worker_index("x"), np.float32)
        return {
            "all-reduce": lambda: spmd.psum(x, "x"),
            "permute": lambda: spmd.ppermute(x, "x", RING),
            "all-gather": lambda: spmd.all_gather(x, "x", tiled=True),
        }[verb]

    run = mesh.map(lambda count: repeated(steps())(count), in_specs=(None,), out_specs=None, check=False)
    told = mesh.map(lambda: np.array(steps()()), in_specs=(), out_specs=None, check=False)
    return Case(run, lambda: [told()])


@BRIDGE.contestant("spmd arrays, virtual workers", env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return cases(of_arrays, SMALL if quick else SMALL | LARGE, tuple(v for v in VERBS if "backward" not in v))


def functional(verb: str, n: int) -> Case:
    import torch.distributed as dist
    import torch.distributed._functional_collectives as collectives

    torch = torch_with(1, group=True)
    group, wait = dist.group.WORLD, collectives.wait_tensor
    x = torch.full((n,), 1.0 + dist.get_rank())
    y = x.clone().requires_grad_()

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return wait(collectives.all_reduce(x, "sum", group))

        @staticmethod
        def backward(ctx, g):
            return g

    def backward():
        y.grad = None
        Sum.apply(y).backward(x)
        return y.grad

    step = {
        "all-reduce": lambda: wait(collectives.all_reduce(x, "sum", group)),
        "all-reduce and backward": backward,
        "permute": lambda: wait(collectives.permute_tensor(x, [1, 0], group)),
        "all-gather": lambda: wait(collectives.all_gather_tensor(x, 0, group)),
    }[verb]
    return Case(repeated(step), lambda: [np.array(step().detach())])


@BRIDGE.contestant("torch functional, gloo", launcher="torchrun", processes=2, needs=("torch",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return cases(functional, SMALL)
