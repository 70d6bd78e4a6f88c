"""Modules, data and comparisons for the tests of `spt.data_parallel`."""

from __future__ import annotations

import torch
from torch import nn

import spmd
from spmd.bridge import torch as spt
from spmd.bridge.torch.tensor_state import plain
from spmd.layout import block_sizes, offsets

SIZES = (1, 2, 3, 4)
CHECKS = (True, False)
SMALL = 100
"""Bytes: a bucket of one or two parameters of the models here."""


def on_workers(n, main, *args, check=True, mesh=None):
    """Run main(index, *args) on n workers; the results, by worker."""
    results = {}

    def body():
        worker = spt.worker_index("data")
        results[worker] = main(worker, *args)

    spt.map(body, (), None, mesh=mesh or spmd.Mesh(data=n), check=check)()
    return [results[worker] for worker in sorted(results)]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


def share(x, worker, n):
    """The block of a minibatch that a worker has, as a tensor that varies."""
    at = offsets(block_sizes(len(x), n))
    return spt.varying(x[at[worker] : at[worker + 1]], "data")


def drawn(module, seed):
    """The module with random parameters."""
    for k, p in enumerate(module.parameters()):
        p.data.copy_(randn(*p.shape, seed=1000 * seed + k, dtype=p.dtype))
    return module


class Net(nn.Module):
    """Layers declared in another order than they are used in."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.last = nn.Linear(7, 3, dtype=dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.middle = nn.Linear(6, 7, dtype=dtype)
        self.first = nn.Linear(5, 6, dtype=dtype)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))) * self.scale)


class Branches(nn.Module):
    """Three layers, of which a forward uses some."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 3, dtype=torch.float64)
        self.b = nn.Linear(5, 3, dtype=torch.float64)
        self.c = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x, names):
        return sum(getattr(self, name)(x) for name in names)


class Mixed(nn.Module):
    """Parameters of five dtypes."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, dtype=torch.float64)
        self.b = nn.Linear(4, 4, dtype=torch.float32)
        self.c = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.d = nn.Linear(4, 4, dtype=torch.complex128)
        self.e = nn.Parameter(torch.zeros(4, dtype=torch.float16))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        y = self.b(torch.tanh(self.a(x)).float())
        y = self.d(y.to(torch.complex128)).real + self.c(y.bfloat16()).double()
        return y * self.e.double()


def squares(y, t):
    """For each sample a loss."""
    return ((y - t) ** 2).mean(1)


def values(module):
    return [plain(p).detach().clone() for p in module.parameters()]


def gradients(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def serial_run(module, x):
    """The module after one backward of a serial program."""
    module(x).sin().sum().backward()
    return module


def assert_near(result, expected, atol=1e-12):
    assert len(result) == len(expected)
    for a, b in zip(result, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert type(a) is torch.Tensor
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=0, atol=atol)


def assert_gradients(serial, n, main, **options):
    """Check that main returns the gradients of a serial module, on each of n workers."""
    for result in on_workers(n, main, **options):
        assert_near(result, gradients(serial))
