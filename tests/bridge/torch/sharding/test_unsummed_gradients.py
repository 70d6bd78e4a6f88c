"""Gradients that backwards under `no_sync` left: what clears `.grad` drops them, and no step or norm takes them."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from data_parallel_cases import drawn, on_workers, randn, share  # noqa: E402

from bridge.torch.sharding.sharded_models import Block, Net  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import StateError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.host("a body makes its tensors on the host")]


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def shard(**options):
    return lambda net: (model := spt.shard_parameters(net, "data", unit=Block, **options), sgd(model))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def replicate(net):
    return (model := spt.data_parallel(net, "data")), sgd(model)


def split_states(net):
    return (model := spt.data_parallel(net, "data")), spt.shard_optimizer(sgd(model), "data")


MODELS = {
    "shard_parameters": shard(),
    "kept": shard(reshard_after_forward=False),
    "another dtype": shard(reduce_dtype=torch.float32),
    "data_parallel": replicate,
    "shard_optimizer": split_states,
}


def each_grad_to_none(model, optimizer):
    for p in model.parameters():
        p.grad = None


CLEARS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "module": lambda model, optimizer: model.zero_grad(),
    "module to zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "parameters": each_grad_to_none,
}


def loss_of(model, x):
    return spt.sum(model(x).sin(), "data")


def summed(model):
    return [None if p.grad is None else getattr(p.grad, "whole", p.grad.clone)() for p in model.parameters()]


def serial(*minibatches):
    net = drawn(Net(), 2)
    for x in minibatches:
        net(x).sin().sum().backward()
    return [p.grad for p in net.parameters()]


def assert_near(own, expected, tolerance=1e-10):
    for g, e in zip(own, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=tolerance)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("earlier", [False, True], ids=["", "after a sum"])
@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("make", MODELS)
def test_what_clears_gradients_drops_those_that_are_not_summed(make, clear, earlier, check):
    dropped, kept = randn(7, 5, seed=1), [randn(k, 5, seed=k) for k in (5, 6)]

    def main(worker):
        model, optimizer = MODELS[make](drawn(Net(), 2))
        if earlier:
            loss_of(model, share(dropped, worker, 3)).backward()
        with model.no_sync():
            loss_of(model, share(dropped, worker, 3)).backward()
        CLEARS[clear](model, optimizer)
        with model.no_sync():
            loss_of(model, share(kept[0], worker, 3)).backward()
        loss_of(model, share(kept[1], worker, 3)).backward()
        return summed(model)

    for own in on_workers(3, main, check=check):
        assert_near(own, serial(*kept), 1e-4 if make == "another dtype" else 1e-10)


@pytest.mark.parametrize("make", MODELS)
def test_gradients_are_added_to_an_earlier_sum(make):
    minibatches = [randn(4, 5, seed=k) for k in range(3)]

    def main(worker):
        model, _ = MODELS[make](drawn(Net(), 2))
        own = [share(x, worker, 4) for x in minibatches]
        loss_of(model, own[0]).backward()
        with model.no_sync():
            loss_of(model, own[1]).backward()
        loss_of(model, own[2]).backward()
        return summed(model)

    for own in on_workers(4, main):
        assert_near(own, serial(*minibatches), 1e-4 if make == "another dtype" else 1e-10)


@pytest.mark.parametrize("earlier", [False, True], ids=["", "after a sum"])
def test_a_copy_has_what_is_not_summed(earlier):
    minibatches = [randn(4, 5, seed=k) for k in range(3)]

    def main(worker):
        model, optimizer = shard()(drawn(Net(), 2))
        own = [share(x, worker, 2) for x in minibatches]
        if earlier:
            loss_of(model, own[2]).backward()
        with model.no_sync():
            loss_of(model, own[0]).backward()
        copied = copy.deepcopy(model)
        optimizer.zero_grad()
        loss_of(model, own[1]).backward()
        loss_of(copied, own[1]).backward()
        return summed(model), summed(copied)

    expected = serial(*(minibatches if earlier else minibatches[:2]))
    for own, copied in on_workers(2, main):
        assert_near(own, serial(minibatches[1]))
        if earlier:  # torch copies no gradients of plain parameters, such as numbers
            copied, expected = ([g for g in grads if g.ndim] for grads in (copied, expected))
        assert_near(copied, expected)


USES = {
    "step": lambda model, optimizer: optimizer.step(),
    "grad_norm": lambda model, optimizer: spt.grad_norm(model),
    "clip_grad_norm_": lambda model, optimizer: spt.clip_grad_norm_(model, 1.0),
}


@pytest.mark.parametrize("earlier", [False, True], ids=["", "after a sum"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("make", MODELS)
def test_gradients_that_are_not_summed_are_refused(make, use, earlier):
    x = randn(6, 5)

    def main(worker):
        model, optimizer = MODELS[make](drawn(Net(), 2))
        if earlier:
            loss_of(model, share(x, worker, 2)).backward()
        with model.no_sync():
            loss_of(model, share(x, worker, 2)).backward()
        with pytest.raises(StateError, match="this worker's own part, of a backward under no_sync"):
            USES[use](model, optimizer)
        loss_of(model, share(x, worker, 2)).backward()
        USES[use](model, optimizer)
        optimizer.zero_grad()
        optimizer.step()

    on_workers(2, main)


@pytest.mark.parametrize("make", MODELS)
def test_a_closure_may_have_the_sum(make):
    x = randn(6, 5)

    def main(worker):
        model, optimizer = MODELS[make](drawn(Net(), 2))
        with model.no_sync():
            loss_of(model, share(x, worker, 2)).backward()

        def closure():
            loss = loss_of(model, share(x, worker, 2))
            loss.backward()
            return loss

        optimizer.step(closure)
        return summed(model)

    for own in on_workers(2, main):
        assert_near(own, serial(x, x), 1e-4 if make == "another dtype" else 1e-10)


CHANGES = {
    "halved": lambda p: p.grad.mul_(0.5),
    "clipped": lambda p: torch.nn.utils.clip_grad_norm_([p], 0.05),
    "clipped by value": lambda p: torch.nn.utils.clip_grad_value_([p], 1e-3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("make", MODELS)
def test_gradients_that_were_changed_before_the_sum(make, change):
    """A norm of them is that of this worker's own part."""
    x = randn(6, 5)

    def main(worker):
        model, _ = MODELS[make](drawn(Net(), 2))
        with model.no_sync():
            loss_of(model, share(x, worker, 2)).backward()
        for p in model.parameters():
            change(p)
        with pytest.raises(StateError, match="changed after a backward under no_sync"):
            loss_of(model, share(x, worker, 2)).backward()

    on_workers(2, main)
