"""Modules whose parameters lie split over workers train as on one worker."""

from __future__ import annotations

import sys
from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from data_parallel_cases import drawn, on_workers, randn, share  # noqa: E402
from launch import PROGRAMS, TORCHRUN, launch, mpiexec  # noqa: E402
from torch import nn  # noqa: E402

import spmd  # noqa: E402
from bridge.torch.plans.test_parallelize import CASES, train  # noqa: E402
from bridge.torch.sharding.sharded_models import Block, Net, assert_trained, serial, sharded  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.host("a body makes its tensors on the host")]

UNITS = {"net": Block, "image": nn.Conv2d, "text": "gpt.blocks.*"}


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


expected = cache(serial)


RUNS = [("net", n, True) for n in (1, 2, 3, 4)]
RUNS += [("net", 8, False), ("image", 2, True), ("image", 3, False), ("text", 2, True), ("text", 4, False)]


@pytest.mark.parametrize(("name", "n", "check"), RUNS)
def test_ten_steps_equal_those_of_one_worker(name, n, check):
    """Ten steps of AdamW: losses, parameters, buffers and moments."""
    for result in on_workers(n, lambda worker: sharded(name, n, worker, unit=UNITS[name]), check=check):
        assert_trained(result, expected(name))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"unit": (Block, nn.Linear)},
        {"unit": Block, "reshard_after_forward": False},
        {"unit": Block, "prefetch": 0},
        {"unit": ["blocks.*"], "prefetch": 3},
        {"unit": lambda name, module: name.endswith(".up")},
    ],
    ids=["whole", "nested", "kept", "no prefetch", "prefetch 3", "function"],
)
def test_units_and_prefetch_change_no_result(options, check):
    for result in on_workers(3, lambda worker: sharded("net", 3, worker, **options), check=check):
        assert_trained(result, expected("net"))


PLANNED = [("gpt", {"data": 2, "model": 2}, True), ("gpt by positions", {"data": 3, "model": 2}, False)]
FULL = [(name, axes, check) for name in CASES for axes in (PLANNED[0][1], PLANNED[1][1]) for check in (True, False)]


def axes_of(net):
    """The axes over which its parameters lie split."""
    return {axis for p in net.parameters() if hasattr(p, "block_layout") for axis in p.block_layout.varying}


@pytest.mark.parametrize(
    ("name", "axes", "check"), [*PLANNED, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)], ids=str
)
def test_with_plans(name, axes, check):
    """data x model, and positions of sequences or images: parameters that the plan splits lie split over both."""
    make, plan, args = CASES[name]
    torch.manual_seed(0)
    whole = drawn(make(), 1)
    losses = train(whole, args, 3)

    def main():
        split = spt.parallelize(drawn(make(), 1), plan)
        planned = axes_of(split)
        split = spt.shard_parameters(split, "data", unit="blocks.*" if "gpt" in name else None)
        assert axes_of(split) == planned | {"data"}
        assert planned == {"model"} or "gpt" not in name
        return train(split, [spt.put(x, P("data")) for x in args], 3), spt.state_dict(split)

    own, state = spt.map(main, (), None, mesh=spmd.Mesh(**axes), check=check)()
    assert max(abs(a - b) for a, b in zip(own, losses, strict=True)) < 1e-10
    assert list(state) == list(whole.state_dict())
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=1e-10)


def test_the_parameters_lie_split():
    """Each worker keeps a block of parameters, gradients and states: what divides adds to the whole."""

    def main(worker):
        net = spt.shard_parameters(Net(), "data", unit=Block)
        optimizer = torch.optim.AdamW(net.parameters())
        net(share(randn(6, 5), worker, 4)).sum().backward()
        optimizer.step()
        blocks = [p.block() if isinstance(p, spt.Parameter) else p for p in net.parameters()]
        grads = [p.grad._block.numel() if isinstance(p, spt.Parameter) else 1 for p in net.parameters()]
        return sum(b.numel() for b in blocks), sum(grads)

    count = sum(p.numel() for p in Net().parameters())
    found = on_workers(4, main)
    assert sum(a for a, _ in found) == count + 3 * 4  # four numbers lie whole on all workers
    assert all(a == b for a, b in found)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions(reduction):
    x = randn(8, 5)

    def main(worker):
        net = spt.shard_parameters(drawn(Net(), 2), "data", unit=Block, reduction=reduction)
        net(share(x, worker, 4)).sin().mean().backward()
        return [p.grad.whole() if isinstance(p, spt.Parameter) else p.grad for p in net.parameters()]

    net = drawn(Net(), 2)
    (net(x).sin().mean() * (4 if reduction == "sum" else 1)).backward()
    for grads in on_workers(4, main):
        for g, p in zip(grads, net.parameters(), strict=True):
            torch.testing.assert_close(g, p.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("python", "n"),
    [
        pytest.param(
            sys.executable,
            4,
            id="mpi",
            marks=[pytest.mark.mpi, pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")],
        ),
        pytest.param(TORCHRUN, 2, id="torchrun"),
    ],
)
def test_in_processes(python, n):
    ended = launch(PROGRAMS / "torch_sharding.py", str(n), n=n, python=python, timeout=240)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("sharded modules hold") == n, str(ended)


class Spectrum(nn.Module):
    """A complex weight, as spectral layers have one, and a real one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.complex(randn(5, 3, seed=1), randn(5, 3, seed=2)))
        self.bias = nn.Parameter(randn(5, seed=3))

    def forward(self, x):
        return (torch.fft.fft(x) @ self.weight.T).abs().add(self.bias).sin()


OPTIMISERS = "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
OPTIONS = {"Adam": {"amsgrad": True}, "RMSprop": {"momentum": 0.9, "centered": True}, "SGD": {"momentum": 0.9}}


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "for"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimisers_of_complex_parameters(name, foreach):
    """They write to views of the real and imaginary parts."""
    x, n = randn(6, 3), 2 + OPTIMISERS.index(name) % 2

    def losses(net, x):
        optimiser = getattr(torch.optim, name)(net.parameters(), lr=0.01, foreach=foreach, **OPTIONS.get(name, {}))
        found = []
        for _ in range(4):
            optimiser.zero_grad()
            loss = net(x).mean()
            loss.backward()
            optimiser.step()
            found.append(loss.item())
        return found

    main = lambda: losses(spt.shard_parameters(Spectrum(), "data"), spt.put(x, P("data")))
    found = spt.map(main, (), None, mesh=spmd.Mesh(data=n))()
    assert max(abs(a - b) for a, b in zip(found, losses(Spectrum(), x), strict=True)) < 1e-12


def test_real_and_imaginary_parts_are_views():
    whole = torch.complex(randn(5, 3, seed=1), randn(5, 3, seed=2))

    def main():
        p = spt.Parameter(whole.clone(), P("data")).detach()
        parts = torch.view_as_real(p)
        with pytest.raises(LayoutError, match="view_as_complex"):
            torch.view_as_complex(spt.Parameter(randn(3, 2), P(None, "data")).detach())
        found = [parts.whole(), torch.view_as_complex(parts).whole(), p.real.whole(), p.imag.whole()]
        parts.mul_(2)
        p.imag.add_(1)
        return *found, p.whole()

    found = spt.map(main, (), None, mesh=spmd.Mesh(data=3))()
    for a, b in zip(found, (torch.view_as_real(whole), whole, whole.real, whole.imag, 2 * whole + 1j), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("axes", [{"data": 3, "model": 1}, {"data": 3, "model": 2}], ids=str)
def test_states_of_packed_weights_go_to_another_mesh(axes, tmp_path):
    """The queries, keys and values of one weight lie on workers of their own."""
    make, plan, _ = CASES["gpt"]
    whole = drawn(make(), 1).state_dict()
    sharded = lambda seed: spt.shard_parameters(spt.parallelize(drawn(make(), seed), plan), "data")

    def save():
        net = sharded(1)
        spt.save(tmp_path / "state", {"net": net})
        lies = [(tuple(p.shape), p.block_layout) for p in net.parameters() if hasattr(p, "block_layout")]
        assert any(shape != layout.shape and len(layout.cuts[0]) > 1 for shape, layout in lies)

    def load():
        net = sharded(2)
        spt.load(tmp_path / "state", {"net": net})
        return spt.state_dict(net)

    spt.map(save, (), None, mesh=spmd.Mesh(**axes))()
    for other in (axes, {"data": 3, "model": 4}, {"data": 2, "model": 2}, {"data": 1, "model": 1}):
        found = spt.map(load, (), None, mesh=spmd.Mesh(**other))()
        for key, value in whole.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_packed_array_is_saved_whole(n, tmp_path):
    """Its three parts lie on n workers: several on one, or none."""
    whole = randn(3, 5, 2)
    view = lambda x: spt.Parameter(x.clone(), P("data", "model")).detach().view(15, 2)

    def body():
        x = view(whole)
        spmd.save(tmp_path / "state", {"x": x})
        return x.block_layout.shape, spmd.load(tmp_path / "state", like={"x": view(0 * whole)})["x"].whole()

    shape, found = spt.map(body, (), None, mesh=spmd.Mesh(data=n, model=2))()
    assert shape == whole.shape
    torch.testing.assert_close(found, whole.reshape(15, 2), rtol=0, atol=0)
    np.testing.assert_array_equal(spmd.load(tmp_path / "state")["x"], whole.reshape(15, 2).numpy())
