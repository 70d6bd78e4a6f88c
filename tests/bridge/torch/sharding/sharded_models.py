"""Models for the tests of `spt.shard_parameters`, and their training on one worker and on several."""

from __future__ import annotations

import torch
from data_parallel_cases import drawn, randn, share
from torch import nn
from torch.nn import functional as F

from bridge.torch.plans.plain_models import GPT
from spmd import P
from spmd.bridge import torch as spt

__all__ = ["MODELS", "Block", "Net", "assert_trained", "serial", "sharded", "trained"]


class Block(nn.Module):
    def __init__(self, width: int = 7, hidden: int = 9):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale


class Net(nn.Module):
    """Blocks between layers of the module's own."""

    def __init__(self, count: int = 4, width: int = 7):
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Image(nn.Module):
    """A convolutional net with batch norms, of whole batches where norm is that of a spec."""

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1, bias=False),
            norm(3),
            nn.ReLU(),
            nn.Conv2d(3, 4, 3, stride=2, bias=False),
            norm(4),
            nn.Flatten(),
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.layers(x.view(-1, 1, 5, 5)))


def shared_norm(n):
    return spt.nn.BatchNorm2d(n, spec=P("data"))


class Text(nn.Module):
    """Losses of a GPT, for rows of letters."""

    def __init__(self):
        super().__init__()
        self.gpt = GPT()

    def forward(self, rows):
        logits = self.gpt(rows[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").mean(1)


def _letters(seed):
    return torch.randint(0, 11, (11, 8), generator=torch.Generator().manual_seed(seed))


def _squares(model, x, t):
    return ((model(x) - t) ** 2).mean(1)


MODELS = {
    "net": (Net, Net, lambda k: (randn(11, 5, seed=k), randn(11, 3, seed=100 + k)), _squares),
    "image": (
        Image,
        lambda: Image(shared_norm),
        lambda k: (randn(11, 25, seed=k), randn(11, 3, seed=100 + k)),
        _squares,
    ),
    "text": (Text, Text, lambda k: (_letters(k),), lambda model, x: model(x)),
}
"""By name: the model on one worker, that on several, the data of a step, and the losses of samples."""


def trained(model, name, steps, take, mean, optimizer=None):
    """Losses, parameters and states of an optimiser after some steps."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)
    losses = []
    for k in range(steps):
        optimizer.zero_grad()
        loss = mean(MODELS[name][3](model, *map(take, MODELS[name][2](k))))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    moments = {}
    for key, p in model.named_parameters():
        for what, value in optimizer.state[p].items():
            moments[f"{key} {what}"] = value.whole() if hasattr(value, "whole") else value.clone()
    return losses, spt.state_dict(model), moments


def serial(name, steps=10):
    torch.manual_seed(0)
    return trained(drawn(MODELS[name][0](), 3), name, steps, lambda x: x, torch.mean)


def sharded(name, n, worker, steps=10, adapt=lambda model: model, **options):
    """The same on a worker of n."""
    model = adapt(spt.shard_parameters(drawn(MODELS[name][1](), 3 if worker == 0 else 4), "data", **options))
    return trained(model, name, steps, lambda x: share(x, worker, n), lambda losses: spt.mean(losses, "data"))


def assert_trained(result, expected, tolerance=1e-10):
    """Losses, parameters and moments are near those of one worker."""
    assert max(abs(a - b) for a, b in zip(result[0], expected[0], strict=True)) <= tolerance
    for own, other in zip(result[1:], expected[1:], strict=True):
        assert list(own) == list(other)
        for key, value in other.items():
            torch.testing.assert_close(torch.as_tensor(own[key]), torch.as_tensor(value), rtol=0, atol=tolerance)
