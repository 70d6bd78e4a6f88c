"""Pipelines of modules together with mixed precision, stages that are split, checkpointing and frozen parameters."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.training.pipelines.schedules import SCHEDULES  # noqa: E402

pytestmark = pytest.mark.host("a body makes its tensors on the host")


def model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Tanh()))).double()
    for p in net.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return net


X = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def close(x, y):
    torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_all_stages_skip_a_step_together(schedule):
    """An infinite gradient at one stage; the scale and the parameters are those of one worker."""

    def steps(backward, parameters, scaler):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for k in range(4):
            optimizer.zero_grad()
            backward(X * (torch.inf if k == 1 else 1.0))
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    net = model()
    alone = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    want = steps(lambda x: alone.scale((net(x) ** 2).mean()).backward(), net.parameters(), alone)

    def body():
        scaler = spt.GradScaler(init_scale=64.0, growth_interval=2)
        stages = spt.split_stages(model(), 2)
        step = spt.pipeline(stages, microbatches=3, schedule=schedule, loss=lambda y: (y**2).mean())
        assert steps(lambda x: step.backward(x, scale=scaler.scale), step.parameters(), scaler) == want
        names = {name: p for stage in step.modules_by_stage.values() for name, p in stage.named_parameters()}
        found.update(names)

    found: dict = {}
    spt.map(body, (), None, mesh=spmd.Mesh(stage=2))()
    for name, p in net.named_parameters():
        close(found[name], p)


def test_autocast_reaches_all_stages():
    def body(x):
        step = spt.pipeline(spt.split_stages(model().float(), 2), microbatches=2, loss=lambda y: y.float().mean())
        with torch.autocast("cpu", torch.bfloat16):
            loss = step.backward(x)
            y = step(x)
        assert y.dtype is torch.bfloat16
        return loss, torch.stack([p.grad.norm() for p in step.parameters()]).isfinite().all()

    x = X[:6].float()
    with torch.autocast("cpu", torch.bfloat16):
        want = model().float()(x).float().mean()
    loss, finite = spt.map(body, P(), P(), mesh=spmd.Mesh(stage=2))(x)
    torch.testing.assert_close(loss, want.detach(), rtol=1e-2, atol=1e-2)
    assert finite


class Block(nn.Module):
    def __init__(self, layer: nn.Module, recompute: bool = False):
        super().__init__()
        self.up, self.down, self.recompute = layer, copy.deepcopy(layer), recompute

    def forward(self, x):
        inner = lambda x: self.down(F.gelu(self.up(x)))
        return x + (checkpoint(inner, x, use_reentrant=False) if self.recompute else inner(x))


def blocks(recompute: bool = False) -> list[nn.Module]:
    return [Block(layer, recompute) for layer in model() if isinstance(layer, nn.Linear)]


def expected():
    net = nn.Sequential(*blocks())
    loss = (net(X) ** 2).mean()
    loss.backward()
    return loss.detach(), [[p.grad for p in block.parameters()] for block in net]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_that_are_split(schedule):
    """Stages that `spt.parallelize` splits over `model`."""
    workers = 2 if schedule == "interleaved" else 4

    def body(x):
        stages = blocks()
        for k in range(spt.worker_index("stage"), 4, workers):
            stages[k] = spt.parallelize(stages[k], {"up": spt.column("model"), "down": spt.row("model")})
        step = spt.pipeline(stages, microbatches=3, schedule=schedule, loss=lambda y: (y**2).mean())
        loss = step.backward(x)
        norms.append(float(spt.grad_norm(step)))
        for k, stage in step.modules_by_stage.items():
            found[k, spt.worker_index("model")] = [
                (p.block() if isinstance(p, spt.PartitionedTensor) else p).shape for p in stage.parameters()
            ]
        return loss

    loss, grads = expected()
    norm = float(torch.stack([g.norm() for block in grads for g in block]).norm())
    norms: list = []
    found: dict = {}
    close(spt.map(body, P(), P(), mesh=spmd.Mesh(stage=workers, model=2))(X), loss)
    assert norms == pytest.approx([norm] * len(norms), rel=1e-12)
    assert found[0, 0][0] == (2, 4)


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
@pytest.mark.parametrize("check", [True, False])
def test_stages_that_recompute_or_are_frozen(schedule, check):
    def body(x):
        stages = blocks(recompute=True)
        stages[0].requires_grad_(False)
        stages[2].requires_grad_(False)
        step = spt.pipeline(stages, microbatches=3, schedule=schedule, loss=lambda y: (y**2).mean())
        loss = step.backward(x)
        for k, stage in step.modules_by_stage.items():
            found[k] = [p.grad for p in stage.parameters()]
        losses.append(float(spmd.block(loss)))

    found: dict = {}
    losses: list = []
    spt.map(body, P(), None, mesh=spmd.Mesh(stage=4), check=check)(X)
    loss, grads = expected()
    assert losses == pytest.approx([float(loss)] * 4, rel=1e-12)
    assert found[0] == found[2] == [None] * 4
    for k in (1, 3):
        for g, want in zip(found[k], grads[k], strict=True):
            close(g, want)


class Twice(nn.Module):
    """A parameter that two layers use."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return torch.sin(self.layer(torch.tanh(self.layer(x))))


def test_a_parameter_that_is_used_twice_in_zero_bubble():
    layers = [layer for layer in model() if isinstance(layer, nn.Linear)]
    net = nn.Sequential(*(Twice(layer) for layer in layers))
    net(X).square().mean().backward()

    def body(x):
        own = Twice(copy.deepcopy(layers[spt.worker_index("stage")]))
        own.zero_grad()
        step = spt.pipeline(own, microbatches=3, schedule="zero_bubble", loss=lambda y: y.square().mean())
        step.backward(x)
        found[spt.worker_index("stage")] = own.layer.weight.grad

    found: dict = {}
    spt.map(body, P(), None, mesh=spmd.Mesh(stage=4))(X)
    for k, layer in enumerate(layers):
        close(found[k], layer.weight.grad)
