"""Memory of gradients that `spt.data_parallel` sums, and of training steps of every kind."""

from __future__ import annotations

import copy
import weakref

import pytest

torch = pytest.importorskip("torch")

from launch import PROGRAMS, run_python  # noqa: E402
from process_cases import each_engine, ended_well  # noqa: E402

import spmd  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.host("a body makes its tensors on the host")]

LAYERS, IN_FLIGHT = 8, 2


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_sums_take_the_place_of_own_gradients_while_backward_runs(workers):
    """When the last gradient is there, those of earlier buckets are freed, but for the ones under way."""

    def body():
        net = torch.nn.Sequential(*(torch.nn.Linear(20, 20, bias=False) for _ in range(LAYERS)))
        alive, left = [], []

        def note(p):
            alive.append(weakref.ref(p.grad.untyped_storage()))
            left.append(sum(storage() is not None for storage in alive))

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(note)
        net = spt.data_parallel(net, "data", bucket_bytes=1)
        for _ in range(2):
            alive.clear()
            net(torch.ones(3, 20)).sum().backward()
        return max(left)

    most = spt.map(body, (), None, mesh=spmd.Mesh(data=workers), check=False)()
    assert most <= IN_FLIGHT + 1


class Kinds(torch.nn.Module):
    """Parameters whose gradients lie in memory in different ways."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(30, 40))
        self.position = torch.nn.Parameter(torch.randn(30, 40))
        self.weight = torch.nn.Parameter(torch.randn(40, 40) / 6)
        self.last = torch.nn.Parameter(torch.randn(30, 40))
        self.number = torch.nn.Parameter(torch.tensor(1.5))
        self.complex = torch.nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.empty = torch.nn.Parameter(torch.randn(0, 3))
        self.unused = torch.nn.Parameter(torch.randn(5))

    def forward(self, x, images):
        h = (self.first * x).tanh()
        h = (h[None] + self.position[None])[0]  # one memory has the gradients of the parameter and of h
        h = (h @ self.weight).tanh() + self.last
        z = (self.complex * (1 + 2j)).imag.sum() + self.complex.abs().square().sum() + self.empty.sum()
        return h.square().mean() * self.number + self.conv(images).square().mean() + z


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 12, 1 << 22])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_of_every_kind_are_those_of_one_worker(workers, bucket_bytes, backwards):
    torch.manual_seed(0)
    net = Kinds()
    xs, images = torch.randn(workers, 30, 40), torch.randn(workers, 1, 3, 8, 8)
    alone = copy.deepcopy(net)
    for _ in range(backwards):
        for x, image in zip(xs, images, strict=True):
            (alone(x, image) / workers).backward()

    def body():
        k, own = spt.worker_index("data"), copy.deepcopy(net)
        model = spt.data_parallel(own, "data", reduction="mean", bucket_bytes=bucket_bytes)
        for _ in range(backwards):
            model(xs[k], images[k]).backward()
        for p, wanted in zip(own.parameters(), alone.parameters(), strict=True):
            if wanted.grad is None:
                assert p.grad is None
                continue
            torch.testing.assert_close(p.grad, wanted.grad, rtol=1e-4, atol=1e-6)
            assert type(p.grad) is torch.Tensor
            assert not p.numel() or p.grad.stride() == wanted.grad.stride()
        norm = torch.nn.utils.clip_grad_norm_(own.conv.parameters(), 0.1)
        torch.testing.assert_close(norm, torch.nn.utils.get_total_norm([p.grad for p in alone.conv.parameters()]))
        model.zero_grad(set_to_none=False)  # writes to the memory of the sums
        model(xs[k], images[k]).backward()
        for p, wanted in zip(own.parameters(), alone.parameters(), strict=True):
            if wanted.grad is not None:
                torch.testing.assert_close(p.grad * backwards, wanted.grad, rtol=1e-4, atol=1e-5)

    spt.map(body, (), None, mesh=spmd.Mesh(data=workers), check=False)()


@pytest.mark.full
@each_engine
def test_steps_leave_no_memory_behind(python):
    assert not ended_well("steady_memory.py", python=python, n=2, timeout=180)


@pytest.mark.full
def test_steps_of_virtual_workers_leave_no_memory_behind():
    ended = run_python(PROGRAMS / "steady_memory.py", timeout=180)
    assert ended.returncode == 0, str(ended)
    assert not ended.stdout
