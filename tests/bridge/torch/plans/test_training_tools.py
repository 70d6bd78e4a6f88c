"""Optimisers, hooks, copies, parametrizations and states of torch with parallelized modules: as on one worker."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations  # noqa: E402
from torch.optim import swa_utils  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import spmd  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
F64 = torch.float64
MESHES = [{"model": 2}, {"model": 3}, {"data": 2, "model": 2}]
PLAN = {"up": spt.column("model"), "down": spt.row("model")}


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=F64)


X, Y = numbers(6, 5), numbers(6, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)

    def forward(self, x):
        return self.down(self.norm(self.up(x).tanh()))


def net() -> Any:
    torch.manual_seed(0)
    return Net().double()


def wholes(y: Any) -> Any:
    if isinstance(y, list | tuple):
        return [wholes(a) for a in y]
    if isinstance(y, dict):
        return {k: wholes(a) for k, a in y.items()}
    y = y.whole() if hasattr(type(y), "whole") else y
    return y.detach().clone() if isinstance(y, torch.Tensor) else y


def assert_alike(a: Any, b: Any, where: str = "") -> None:
    if isinstance(b, list):
        assert len(a) == len(b), where
        for k, each in enumerate(zip(a, b, strict=True)):
            assert_alike(*each, f"{where}[{k}]")
    elif isinstance(b, torch.Tensor):
        assert a.shape == b.shape, where
        assert torch.allclose(a.to(F64), b.to(F64), rtol=1e-9, atol=1e-9), (where, a, b)
    else:
        assert a == b or abs(a - b) <= 1e-9 * abs(b), (where, a, b)


def steps(net: Any, optimizer: Any, before: Callable[[Any], Any] = lambda net: None, count: int = 3) -> list[float]:
    losses = []
    for _ in range(count):

        def loss():
            optimizer.zero_grad()
            y = F.mse_loss(net(X), Y)
            y.backward()
            before(net)
            return y

        losses.append(float(optimizer.step(loss)))
    return losses


def optimised(make: Callable[[list[Any]], Any], before: Callable[[Any], Any] = lambda net: None) -> Callable:
    return lambda net: [steps(net, make(list(net.parameters())), before), list(net.parameters())]


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


OPTIMISERS = {
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "AdamW by parameter": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
}


def averaged(net: Any) -> Any:
    ema = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    losses = steps(net, sgd(net.parameters()), ema.update_parameters)
    return [losses, ema(X), list(ema.module.parameters())]


def scheduled(net: Any) -> Any:
    optimizer = sgd(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=5)
    return steps(net, optimizer, lambda _: schedule.step())


def thawed(net: Any) -> Any:
    optimizer = sgd(net.parameters())
    net.up.weight.requires_grad_(False)
    losses = steps(net, optimizer)
    assert net.up.weight.grad is None
    net.up.weight.requires_grad_(True)
    net.down.requires_grad_(False)
    net.zero_grad()
    losses += steps(net, optimizer)
    net.zero_grad(set_to_none=False)
    return [
        losses,
        [p.grad for p in net.parameters() if p.grad is not None],
        [p.requires_grad for p in net.parameters()],
    ]


def accumulated(net: Any) -> Any:
    for k in range(2):
        F.mse_loss(net(X[3 * k :][:3]), Y[3 * k :][:3]).backward()
    total = net(X).sum()
    total.backward(retain_graph=True)
    total.backward()
    return [p.grad for p in net.parameters()]


def copied(net: Any) -> Any:
    steps(net, sgd(net.parameters()), count=1)
    other = copy.deepcopy(net)
    return [steps(other, sgd(other.parameters())), steps(net, sgd(net.parameters()), count=1), list(other.parameters())]


def penalised(net: Any) -> Any:
    parameters = list(net.parameters())
    grads = torch.autograd.grad(F.mse_loss(net(X), Y), parameters, create_graph=True)
    sum((g * g).sum() for g in grads).backward()
    return [p.grad for p in parameters]


def functional(net: Any) -> Any:
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    grads = torch.func.grad(lambda p: F.mse_loss(torch.func.functional_call(net, p, (X,)), Y))(parameters)
    return list(grads.values())


def hooked(net: Any) -> Any:
    seen: list[Any] = []
    net.up.register_forward_hook(lambda m, args, y: y * 2)
    net.up.weight.register_hook(lambda g: g * 3)
    net.norm.register_full_backward_pre_hook(lambda m, gs: (gs[0] * 2,))
    net.norm.register_full_backward_hook(lambda m, gs, outs: (gs[0] + outs[0].sum(),))
    net.norm.register_full_backward_hook(lambda m, gs, outs: seen.append(list(gs[0].shape)))
    net.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))
    F.mse_loss(net(X), Y).backward()
    return [seen, [p.grad for p in net.parameters()]]


def recomputed(net: Any) -> Any:
    F.mse_loss(checkpoint(net, X, use_reentrant=False), Y).backward()
    return [p.grad for p in net.parameters()]


def without_gradients(net: Any) -> Any:
    with torch.inference_mode():
        a = net(X)
    with torch.no_grad():
        return [a, net(X)]


def weight_normed(net: Any) -> Any:
    parametrizations.weight_norm(net.up)
    parametrizations.weight_norm(net.down, dim=None)
    return [steps(net, sgd(net.parameters())), net.up.weight, list(net.parameters())]


USES = {
    "SGD": optimised(sgd),
    **{name: optimised(make) for name, make in OPTIMISERS.items()},
    "clipped by norm": optimised(sgd, lambda net: clip_grad_norm_(net.parameters(), 0.1)),
    "clipped by the largest": optimised(sgd, lambda net: clip_grad_norm_(net.parameters(), 0.1, float("inf"))),
    "clipped by value": optimised(sgd, lambda net: clip_grad_value_(net.parameters(), 0.01)),
    "averaged": averaged,
    "scheduled": scheduled,
    "frozen and thawed": thawed,
    "two backwards": accumulated,
    "copied": copied,
    "a penalty of gradients": penalised,
    "functional_call": functional,
    "hooks": hooked,
    "checkpoint": recomputed,
    "without gradients": without_gradients,
    "weight_norm": weight_normed,
}


def compare(name: str, axes: dict[str, int], check: bool) -> None:
    expected, plain = wholes(USES[name](net())), net()
    main = lambda: wholes(USES[name](spt.parallelize(plain, PLAN)))
    assert_alike(spt.map(main, (), None, mesh=spmd.Mesh(**axes), check=check)(), expected, name)


@pytest.mark.parametrize("name", USES)
def test_as_on_one_worker(name):
    k = list(USES).index(name)
    compare(name, MESHES[k % 3], check=k % 2 == 0)


@pytest.mark.full
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", USES)
def test_on_any_mesh(name, axes, check):
    compare(name, axes, check)


@pytest.mark.parametrize("check", [True, False])
def test_states_between_plans_and_meshes(check, tmp_path):
    plans = [PLAN, {"up": spt.row("model")}, {"down": spt.column("model")}, {}]
    path = str(tmp_path / "state")

    def save():
        split = spt.parallelize(plain, PLAN)
        optimizer = sgd(split.parameters())
        steps(split, optimizer, count=1)
        spt.save(path, {"net": split, "optimizer": optimizer})
        return wholes(steps(split, optimizer, count=2))

    def load(plan):
        split = spt.parallelize(Net().double(), plan)
        optimizer = sgd(split.parameters())
        spt.load(path, {"net": split, "optimizer": optimizer})
        again = spt.parallelize(Net().double(), PLAN)
        again.load_state_dict(spt.state_dict(split))
        assert torch.equal(again.up.weight.whole(), wholes(split.up.weight))
        return steps(split, optimizer, count=2)

    plain = net()
    expected = spt.map(save, (), None, mesh=spmd.Mesh(model=3), check=check)()
    for k, plan in enumerate(plans):
        assert_alike(spt.map(partial(load, plan), (), None, mesh=spmd.Mesh(**MESHES[k % 3]), check=check)(), expected)
