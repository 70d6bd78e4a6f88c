"""Stages that hand on other things than one activation, or compute in other ways than layers: as on one worker."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import spmd  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.host("a body makes its tensors on the host")]

GENERATOR = torch.Generator().manual_seed(0)
X, T = (torch.randn(7, 4, generator=GENERATOR, dtype=torch.float64) for _ in range(2))


class Stage(nn.Module):
    def __init__(self, f, *layers):
        super().__init__()
        self.f, self.layers = f, nn.ModuleList(layers)

    def forward(self, x):
        return self.f(x, *self.layers)


def layer() -> nn.Linear:
    made = nn.Linear(4, 4, dtype=torch.float64)
    for p in made.parameters():
        p.data.copy_(torch.randn(p.shape, generator=GENERATOR, dtype=p.dtype) / 2)
    return made


def derived(x, m):
    """A stage with a gradient in its forward."""
    x = x if x.requires_grad else x.detach().requires_grad_()
    y = torch.tanh(m(x))
    return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def trained_by_itself(x, m):
    """A stage with a loss of its own."""
    y = m(x)
    if y.requires_grad:
        y.square().mean().backward(retain_graph=True)
    return y


def recomputed(x, m):
    return checkpoint(m, x, use_reentrant=True)


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(layer(), nn.Tanh(), layer()), backend="aot_eager")


STAGES = {
    "integers and booleans": lambda: [
        Stage(lambda x, m: (m(x), x > 0, (x > 0.5).long()), layer()),
        Stage(lambda x, m: (m(x[0]) * x[1], x[2]), layer()),
        Stage(lambda x, m: m(x[0]) * (x[1] + 1), layer()),
    ],
    "what is not used": lambda: [
        Stage(lambda x, m, n: (m(x), n(x)), layer(), layer()),
        Stage(lambda x, m: (m(x[0]), x[0] * 2), layer()),
        Stage(lambda x, m: m(x[1]), layer()),
    ],
    "a stage that uses nothing": lambda: [layer(), Stage(lambda x, m: m(torch.ones_like(x)), layer()), layer()],
    "a stage that gives its input": lambda: [layer(), nn.Identity(), Stage(lambda x, m: x, layer())],
    "one tensor twice": lambda: [layer(), Stage(lambda x: (x, x)), Stage(lambda x, m: m(x[0] * x[1] + x[0]), layer())],
    "parameters": lambda: [
        Stage(lambda x, m: (x, m.weight, m.weight), layer()),
        Stage(lambda x, m: m(x[0] @ x[1]) @ x[2], layer()),
        layer(),
    ],
    "in place": lambda: [
        layer(),
        Stage(lambda x, m: m(x.view(-1, 2).mul_(2).view(-1, 4)), layer()),
        Stage(lambda x, m: m(F.relu_(x)), layer()),
    ],
    "complex numbers": lambda: [
        Stage(lambda x, m: torch.complex(x, m(x)).conj(), layer()),
        Stage(lambda x: (x * x).conj()),
        Stage(lambda x, m: m(x.imag) + x.real, layer()),
    ],
    "gradients in forward": lambda: [Stage(derived, layer()) for _ in range(3)],
    "losses of stages": lambda: [Stage(trained_by_itself, layer()) for _ in range(3)],
    "recomputed by reentrant checkpoints": lambda: [layer(), *(Stage(recomputed, layer()) for _ in range(2))],
    "compiled": lambda: [compiled() for _ in range(3)],
    "a stage without gradients": lambda: [layer(), Stage(lambda x, m: m(x.detach()), layer()), layer()],
    "a maximum, which none has": lambda: [layer(), Stage(lambda x, m: m(x) - x.max(), layer()), layer()],
}


def by_one_worker(stages, microbatches):
    parts = min(microbatches, len(X))
    for x, t in zip(X.tensor_split(parts), T.tensor_split(parts), strict=True):
        for stage in stages:
            x = stage(x)
        loss = F.mse_loss(x, t) * (len(t) / len(T))
        loss.backward()
    return [p.grad for stage in stages for p in stage.parameters()]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "interleaved"])
@pytest.mark.parametrize("name", STAGES)
def test_gradients_are_those_of_one_worker(name, schedule):
    made, microbatches = STAGES[name](), 9 if name.startswith("a maximum") else 3
    found: dict = {}

    def body():
        step = spt.pipeline(copy.deepcopy(made), microbatches=microbatches, schedule=schedule, loss=F.mse_loss)
        step.backward(X, T)
        for k, stage in step.modules_by_stage.items():
            found[k] = [p.grad for p in stage.parameters()]

    spt.map(body, (), None, mesh=spmd.Mesh(stage=1 if schedule == "interleaved" else 3))()
    expected = by_one_worker(made, microbatches)
    for g, want in zip((g for k in range(3) for g in found[k]), expected, strict=True):
        torch.testing.assert_close(g, want, rtol=0, atol=1e-10)


def test_gradients_of_inputs_of_which_some_are_not_used():
    x = {"unused": X, "tokens": torch.arange(7) % 4, "complex": torch.complex(X, T)}
    first = Stage(lambda x, m: m(x["complex"].imag * x["complex"].real) + x["tokens"][:, None], layer())
    inner = x["complex"].clone().requires_grad_()
    first({**x, "complex": inner}).square().sum().backward()

    def body():
        loss = lambda y: y.square().sum()
        step = spt.pipeline([copy.deepcopy(first), nn.Identity()], microbatches=3, loss=loss, reduction="sum")
        _, gradient = step.backward(x, of_input=True)
        assert gradient["tokens"] is None
        return spt.replicate(gradient["unused"], "stage"), spt.replicate(gradient["complex"], "stage")

    unused, found = spt.map(body, (), None, mesh=spmd.Mesh(stage=2))()
    assert not unused.any()
    torch.testing.assert_close(found, inner.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_without_samples(reduction):
    """The loss is that of no samples, and gradients are zeros."""

    def body():
        loss = lambda y, t: F.mse_loss(y, t, reduction=reduction)
        step = spt.pipeline([layer(), nn.Tanh()], microbatches=3, loss=loss, reduction=reduction)
        losses.append(float(step.backward(X[:0], T[:0])))
        assert not any(p.grad.any() for p in step.parameters())

    losses: list[float] = []
    spt.map(body, (), None, mesh=spmd.Mesh(stage=2))()
    expected = float(F.mse_loss(X[:0], T[:0], reduction=reduction))
    assert losses == pytest.approx([expected] * 2, nan_ok=True)
