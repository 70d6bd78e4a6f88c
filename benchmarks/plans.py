"""Modules of torch split over two processes: by plans, by DTensor, and by hand. The loss and the gradients of a step.

A block of a transformer: attention of 8 heads by four layers, a perceptron, norms and residuals, on 8 samples of 128
tokens of width 512. Plans split heads and hidden features; DTensor does so by `parallelize_module`; by hand the two
sums of each pair are written out. A U-Net of two levels, 3x3 convolutions of 16, 32 and 64 channels, on 4 images of
128x128 points, which are split by rows. By hand each convolution fetches a row from its neighbour, and the gradients of
all parameters are summed in one. LeNet-5 on 64 images of 32x32 points, split by rows: so small that messages show. All
in float32, processes of one thread; one process of two threads sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.contest import ONE_THREAD, Builders, Case, Section, repeated, torch_with

PLANS = Section("plans", "modules split over two processes, value and gradients", 1e-3, memory=True)
BATCH = 64
"""Images of LeNet."""
TORCHRUN: dict[str, Any] = {"launcher": "torchrun", "processes": 2, "needs": ("torch",), "env": ONE_THREAD}


def sizes(quick: bool) -> tuple[int, int, int]:
    """Tokens and width of the block, and points of the images."""
    return (16, 64, 32) if quick else (128, 512, 128)


def make_block(width: int, heads: int = 8, local: int = 1) -> Any:
    """A block of a transformer. local: over how many workers the heads of plain tensors are split."""
    from torch import nn
    from torch.nn import functional as F

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads = heads
            self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
            self.out = nn.Linear(width, width)

        def forward(self, x):
            b, t, _ = x.shape
            q, k, v = (
                p(x).view(b, t, heads // local, width // heads).transpose(1, 2) for p in (self.q, self.k, self.v)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).reshape(b, t, width // local))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), Attention(), nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            x = x + self.attn(self.norm1(x))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    return Block()


def make_unet() -> Any:
    import torch
    from torch import nn

    def pair(n: int, m: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(n, m, 3, padding=1), nn.ReLU(), nn.Conv2d(m, m, 3, padding=1), nn.ReLU())

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.low, self.bottom = pair(1, 16), pair(16, 32), pair(32, 64)
            self.pool = nn.MaxPool2d(2)
            self.up1, self.join1 = nn.ConvTranspose2d(64, 32, 2, 2), pair(64, 32)
            self.up2, self.join2 = nn.ConvTranspose2d(32, 16, 2, 2), pair(32, 16)
            self.head = nn.Conv2d(16, 3, 1)

        def forward(self, x):
            a = self.enter(x)
            b = self.low(self.pool(a))
            y = self.up1(self.bottom(self.pool(b)))
            y = self.up2(self.join1(torch.cat([y, b], 1)))
            return self.head(self.join2(torch.cat([y, a], 1)))

    return UNet()


def make_lenet() -> Any:
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)),
    )


def work(name: str, quick: bool) -> tuple[Any, Any]:
    """A module and its input."""
    import torch

    tokens, width, points = sizes(quick)
    torch.manual_seed(0)
    if name == "block":
        return make_block(width), torch.randn(8, tokens, width)
    if name == "lenet":
        return make_lenet(), torch.randn(BATCH, 1, 32, 32)
    return make_unet(), torch.randn(4, 1, points, points)


def titles(quick: bool) -> dict[str, str]:
    """The names of the cases."""
    tokens, width, points = sizes(quick)
    return {
        "block": f"transformer block, {tokens} tokens of width {width}",
        "unet": f"U-Net, {points}x{points}",
        "lenet": f"LeNet, batch {BATCH}",
    }


def works(case: Callable[..., Case], quick: bool, names: tuple[str, ...] = ("block", "unet", "lenet")) -> Builders:
    return {titles(quick)[name]: lambda name=name: case(name, quick) for name in names}


def told(value: Any, net: Any, whole: Callable[[Any], Any]) -> list[Any]:
    return [value.detach().numpy(), *(whole(p.grad).numpy() for p in net.parameters())]


def by_plans(name: str, quick: bool, transport: str) -> Case:
    import spmd
    from spmd import P

    torch_with(1)
    from spmd.bridge import torch as spt

    net, x = work(name, quick)
    mesh, made = spmd.Mesh(workers=2, transport=transport), {}
    rows = spt.spatial(P(None, None, "workers"))
    plan = {
        "block": {"attn": spt.heads("workers"), "up": spt.column("workers"), "down": spt.row("workers")},
        "unet": {"enter": rows},
        "lenet": {"0": rows},
    }[name]

    def step():
        if not made:
            made["net"] = spt.parallelize(net, plan)
        split = made["net"]
        split.zero_grad(set_to_none=True)
        value = split(x).square().mean()
        value.backward()
        return value

    run = spt.map(lambda count: repeated(step)(count), (None,), None, mesh=mesh, check=False)

    def tell():
        def main():
            value = step()
            return told(value, made["net"], lambda g: g.whole() if hasattr(g, "whole") else g)

        return spt.map(main, (), None, mesh=mesh, check=False)()

    return Case(lambda count: run(count), tell, lambda: made and made["net"].zero_grad(set_to_none=True))


@PLANS.contestant("spmd, MPI", launcher="mpiexec", processes=2, needs=("torch",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return works(lambda name, quick: by_plans(name, quick, "mpi"), quick)


@PLANS.contestant("spmd, gloo", **TORCHRUN)
def _(quick: bool) -> Builders:
    return works(lambda name, quick: by_plans(name, quick, "torch"), quick)


def plain(net: Any, x: Any, step: Callable[[], Any], whole: Callable[[Any], Any]) -> Case:
    return Case(repeated(step), lambda: told(step(), net, whole), lambda: net.zero_grad(set_to_none=True))


@PLANS.contestant("torch DTensor", **TORCHRUN)
def _(quick: bool) -> Builders:
    return works(by_dtensor, quick, ("block",))


def by_dtensor(name: str, quick: bool) -> Case:
    torch = torch_with(1, group=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    whole, x = work(name, quick)
    net = make_block(x.shape[-1], local=2)
    net.load_state_dict(whole.state_dict())
    styles: dict[str, Any] = {f"attn.{n}": ColwiseParallel() for n in "qkv"}
    styles |= {"attn.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    net = parallelize_module(net, init_device_mesh("cpu", (2,)), styles)

    def step():
        net.zero_grad(set_to_none=True)
        value = net(x).square().mean()
        value.backward()
        return value

    return plain(net, x, step, lambda g: g.full_tensor() if isinstance(g, torch.distributed.tensor.DTensor) else g)


@PLANS.contestant("torch, by hand", **TORCHRUN)
def _(quick: bool) -> Builders:
    return works(by_hand, quick, ("unet",))


def by_hand(name: str, quick: bool) -> Case:
    """A U-Net on its rows: a row of the neighbour before each convolution, and one sum of all gradients."""
    torch = torch_with(1, group=True)
    dist, F = torch.distributed, torch.nn.functional
    rank = dist.get_rank()

    def swap(own):
        """The row that the other process sends for the one that this sends."""
        own, other = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
        for request in [dist.isend(own, 1 - rank), dist.irecv(other, 1 - rank)]:
            request.wait()
        return other

    class Halo(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            edge = swap(x[:, :, -1:] if rank == 0 else x[:, :, :1])
            zeros = torch.zeros_like(edge)
            return torch.cat([zeros, x, edge] if rank == 0 else [edge, x, zeros], 2)

        @staticmethod
        def backward(ctx, g):
            edge = swap(g[:, :, -1:] if rank == 0 else g[:, :, :1])
            inner = g[:, :, 1:-1].contiguous()
            target = inner[:, :, -1:] if rank == 0 else inner[:, :, :1]
            target += edge
            return inner

    net, x = work(name, quick)
    for module in net.modules():
        if isinstance(module, torch.nn.Conv2d) and module.kernel_size == (3, 3):
            module.forward = lambda x, m=module: F.conv2d(Halo.apply(x), m.weight, m.bias, padding=(0, 1))
    block, count = x.chunk(2, 2)[rank].contiguous(), x.numel() * 3

    def step():
        net.zero_grad(set_to_none=True)
        value = net(block).square().sum() / count
        value.backward()
        grads = [p.grad for p in net.parameters()]
        flat = torch.cat([*(g.reshape(-1) for g in grads), value.detach().reshape(1)])
        dist.all_reduce(flat)
        for g, part in zip(grads, flat.split([g.numel() for g in grads] + [1]), strict=False):
            g.copy_(part.view_as(g))
        return flat[-1]

    return plain(net, x, step, lambda g: g)


@PLANS.contestant("torch, 1 process", needs=("torch",), env={"OMP_NUM_THREADS": "2"})
def _(quick: bool) -> Builders:
    return works(alone, quick)


def alone(name: str, quick: bool) -> Case:
    torch_with(2)
    net, x = work(name, quick)

    def step():
        net.zero_grad(set_to_none=True)
        value = net(x).square().mean()
        value.backward()
        return value

    return plain(net, x, step, lambda g: g)
