"""Training a network of column, row and convolution layers on 2 x 2 workers with torch's own tools is that of one."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from launch import ROOT, TORCHRUN, launch, mpiexec

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import swa_utils  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError  # noqa: E402

pytestmark = pytest.mark.host("tensors of these tests lie on the host")

AXES = {"a": 2, "b": 2}
ROWS, MAPS = P(None, None, "a"), P(None, "b", "a")


class Net(nn.Module):
    """Two convolutions, two linear layers, and a layer that all workers have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 3, 3, padding=1)
        self.up, self.down = nn.Linear(3 * 5 * 4, 7), nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.norm(self.down(F.gelu(self.up(self.joined(x).flatten(1)))))

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Split(Net):
    """The same on blocks: rows of images over one axis, channels and features over the other."""

    def __init__(self, whole: Net) -> None:
        nn.Module.__init__(self)
        self.first = spt.DistributedConv(whole.first, ROWS, MAPS)
        self.second = spt.DistributedConv(whole.second, MAPS, ROWS)
        self.up = spt.nn.Linear.from_torch(whole.up, w_spec=P("b"))
        self.down = spt.nn.Linear.from_torch(whole.down, w_spec=P(None, "b"))
        self.norm = copy.deepcopy(whole.norm)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return spt.all_gather(x, "a", axis=2, tiled=True, to="invariant")


Step = Callable[[Net, Callable[[], torch.Tensor]], Any]
Train = Callable[[Net, Callable[[], torch.Tensor]], list[Any]]


def steps(make: Callable[[Iterable], torch.optim.Optimizer], before: Step | None = None) -> Train:
    """Five steps of an optimiser; `before` each of them something is done with the gradients."""

    def train(net: Net, loss: Callable[[], torch.Tensor]) -> list[Any]:
        optimizer = make(net.parameters())
        result = []
        for _ in range(5):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                value = loss()
                value.backward()
                return value

            if isinstance(optimizer, torch.optim.LBFGS):
                result.append(optimizer.step(closure))
                continue
            closure()
            if before is not None:
                result.append(before(net, loss))
            optimizer.step()
        return result

    return train


def penalised(penalty: Callable[[Net, torch.Tensor], torch.Tensor]) -> Train:
    """Five steps of SGD on the loss with a penalty."""

    def train(net: Net, loss: Callable[[], torch.Tensor]) -> list[Any]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        result = []
        for _ in range(5):
            optimizer.zero_grad()
            value = loss()
            total = value + penalty(net, value)
            total.backward()
            optimizer.step()
            result.append(total)
        return result

    return train


def weights(net: Net, _: torch.Tensor) -> torch.Tensor:
    return 0.01 * sum(p.square().sum() for p in net.parameters())


def norms(net: Net, _: torch.Tensor) -> torch.Tensor:
    return 0.01 * sum(p.norm() + p.abs().sum() for p in net.parameters())


def gradients(net: Net, loss: torch.Tensor) -> torch.Tensor:
    grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    return 0.1 * sum(g.square().sum() for g in grads)


def muon(net: Net, loss: Callable[[], torch.Tensor]) -> list[Any]:
    matrices = [p for p in net.parameters() if p.ndim == 2]
    others = [p for p in net.parameters() if p.ndim != 2]
    first, second = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others)
    for _ in range(5):
        for o in (first, second):
            o.zero_grad()
        loss().backward()
        for o in (first, second):
            o.step()
    return []


def scaled(infinite: Iterable[int], **options: Any) -> Train:
    """Steps with loss scaling; at some of them one entry of one gradient is infinite."""

    def train(net: Net, loss: Callable[[], torch.Tensor]) -> list[Any]:
        kind = spt.GradScaler if isinstance(net, Split) else torch.amp.GradScaler
        scaler = kind("cpu", init_scale=8.0, growth_interval=2)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01, **options)
        scales = []
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(loss()).backward()
            if step in infinite:
                with torch.no_grad():
                    last = torch.zeros(net.up.weight.shape, dtype=torch.float64)
                    last[-1, -1] = float("inf")
                    net.up.weight.grad.add_(last)
            scaler.unscale_(optimizer) if step % 2 else None
            scaler.step(optimizer)
            scaler.update()
            scales.append(torch.tensor(scaler.get_scale(), dtype=torch.float64))
        return scales

    return train


def averaged(net: Net, loss: Callable[[], torch.Tensor], **options: Any) -> list[Any]:
    model = swa_utils.AveragedModel(net, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        model.update_parameters(net)
    return list(whole_state(model.module).values())


def by_hand(net: Net, loss: Callable[[], torch.Tensor]) -> list[Any]:
    mean = copy.deepcopy(net)
    more = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        with torch.no_grad():
            for m, n, p in zip(mean.parameters(), more, net.parameters(), strict=True):
                m.lerp_(p, 0.1)
                n.mul_(0.9).add_(p, alpha=0.1)
    return [*whole_state(mean).values(), *map(whole, more)]


def lbfgs(p: Iterable, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(p, lr=0.1, max_iter=4, history_size=4, **options)


optim = torch.optim
TRAININGS: dict[str, Train] = {
    "clip_grad_norm_": steps(
        lambda p: optim.SGD(p, 0.1), lambda net, _: nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    ),
    "clip_grad_norm_ 1": steps(
        lambda p: optim.SGD(p, 0.1), lambda net, _: nn.utils.clip_grad_norm_(net.parameters(), 0.1, 1.0)
    ),
    "clip_grad_norm_ inf foreach": steps(
        lambda p: optim.SGD(p, 0.1),
        lambda net, _: nn.utils.clip_grad_norm_(net.parameters(), 0.1, float("inf"), foreach=True),
    ),
    "clip_grad_norm_ foreach": steps(
        lambda p: optim.SGD(p, 0.1), lambda net, _: nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=True)
    ),
    "clip_grad_value_": steps(
        lambda p: optim.SGD(p, 0.1), lambda net, _: nn.utils.clip_grad_value_(net.parameters(), 0.02)
    ),
    "clip_grad_value_ foreach": steps(
        lambda p: optim.SGD(p, 0.1), lambda net, _: nn.utils.clip_grad_value_(net.parameters(), 0.02, foreach=True)
    ),
    "get_total_norm": steps(
        lambda p: optim.SGD(p, 0.1), lambda net, _: nn.utils.get_total_norm([p.grad for p in net.parameters()])
    ),
    "norm of spt": steps(
        lambda p: optim.SGD(p, 0.1),
        lambda net, _: (
            spt.clip_grad_norm_(net, 0.1) if isinstance(net, Split) else nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        ),
    ),
    "weight penalty": penalised(weights),
    "norm penalty": penalised(norms),
    "gradient penalty": penalised(gradients),
    "sgd": steps(lambda p: optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "sgd foreach": steps(lambda p: optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01, foreach=True)),
    "sgd fused": steps(lambda p: optim.SGD(p, 0.05, momentum=0.9, fused=True)),
    "adam": steps(lambda p: optim.Adam(p, 0.01, amsgrad=True)),
    "adam foreach": steps(lambda p: optim.Adam(p, 0.01, foreach=True)),
    "adam fused": steps(lambda p: optim.Adam(p, 0.01, fused=True)),
    "adamw": steps(lambda p: optim.AdamW(p, 0.01)),
    "adamw fused": steps(lambda p: optim.AdamW(p, 0.01, fused=True)),
    "adafactor": steps(lambda p: optim.Adafactor(p, 0.01)),
    "adafactor foreach": steps(lambda p: optim.Adafactor(p, 0.01, foreach=True)),
    "rmsprop": steps(lambda p: optim.RMSprop(p, 0.01, momentum=0.9, centered=True)),
    "adagrad": steps(lambda p: optim.Adagrad(p, 0.01)),
    "adadelta": steps(lambda p: optim.Adadelta(p, 0.5, foreach=True)),
    "adamax": steps(lambda p: optim.Adamax(p, 0.01)),
    "nadam": steps(lambda p: optim.NAdam(p, 0.01, foreach=True)),
    "radam": steps(lambda p: optim.RAdam(p, 0.01)),
    "asgd": steps(lambda p: optim.ASGD(p, 0.01)),
    "rprop": steps(lambda p: optim.Rprop(p, 0.01)),
    "lbfgs": steps(lbfgs),
    "lbfgs line search": steps(lambda p: lbfgs(p, line_search_fn="strong_wolfe")),
    "scaler": scaled([]),
    "scaler of infinite gradients": scaled([1, 2]),
    "scaler fused": scaled([1], fused=True),
    "averaged": averaged,
    "ema": lambda net, loss: averaged(net, loss, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
    "ema one by one": lambda net, loss: averaged(net, loss, avg_fn=swa_utils.get_ema_avg_fn(0.9)),
    "by hand": by_hand,
}
if hasattr(torch.optim, "Muon"):
    TRAININGS["muon"] = muon


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.whole() if isinstance(x, spt.PartitionedTensor) else x).detach()


def whole_state(net: nn.Module) -> dict[str, torch.Tensor]:
    return dict(spt.state_dict(net))


def trained(name: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """What one worker finds, and what each of four finds."""
    torch.manual_seed(0)
    serial = Net().to(dtype)
    x, t = torch.randn(3, 2, 5, 4, dtype=dtype), torch.randn(3, 5, dtype=dtype)
    begin = copy.deepcopy(serial)
    expected = TRAININGS[name](serial, lambda: F.mse_loss(serial(x), t))
    expected = [*(v.detach() for v in expected if v is not None), *serial.state_dict().values()]
    result = []

    def main(x: torch.Tensor) -> None:
        net = Split(begin)
        results = TRAININGS[name](net, lambda: F.mse_loss(net(x), t))
        result.append([*(spt.block(v) for v in results if v is not None), *net.state_dict().values()])

    spt.map(main, (ROWS,), None, mesh=spmd.Mesh(**AXES))(x)
    return expected, result


def check(name: str, dtype: torch.dtype) -> None:
    expected, result = trained(name, dtype)
    # Muon computes in bfloat16: its first rounding is that of one worker, what is rounded differs in the last bits.
    tolerance = 1e-10 if dtype is torch.float64 else 1e-4
    for results in result:
        assert len(results) == len(expected)
        for got, want in zip(results, expected, strict=True):
            assert type(got) is torch.Tensor
            torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", TRAININGS)
def test_training_is_that_of_one_worker(name):
    check(name, torch.float64)


@pytest.mark.parametrize("name", ["clip_grad_norm_", "weight penalty", "gradient penalty", "sgd", "adamw", "by hand"])
def test_training_in_single_precision(name):
    check(name, torch.float32)


PROGRAM = ROOT / "tests" / "mpi_programs" / "torch_optimizers.py"
MPI = [pytest.mark.mpi, pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")]


@pytest.mark.parametrize(
    "python", [pytest.param(sys.executable, id="mpiexec", marks=MPI), pytest.param(TORCHRUN, id="torchrun")]
)
def test_the_same_in_processes(python):
    ended = launch(PROGRAM, n=4, python=python, timeout=240)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("a process is through") == 4, str(ended)


def test_infinite_gradients_of_one_worker_stop_all():
    """Of which only one worker sees any."""

    def main() -> None:
        p = nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([p], lr=1.0)
        scaler = spt.GradScaler(init_scale=4.0)
        scaler.scale(p * 1.0).backward()
        if spmd.worker_index("a"):
            p.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        result.append((p.item(), scaler.get_scale()))

    result: list[Any] = []
    spt.map(main, (), None, mesh=spmd.Mesh(a=2), check=False)()
    assert result == [(1.0, 2.0)] * 2


def test_the_scaler_of_torch_names_ours():
    whole = Net()

    def main() -> None:
        net = Split(whole)
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler.scale(sum(p.sum() for p in net.parameters())).backward()
        scaler.step(optimizer)

    with pytest.raises(LayoutError, match=r"spt\.GradScaler"):
        spt.map(main, (), None, mesh=spmd.Mesh(**AXES))()
