"""Graphs through sharded modules: checkpoints, shared and frozen parameters, errors, several backwards."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from data_parallel_cases import CHECKS, drawn, on_workers, randn, share  # noqa: E402
from torch import nn  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from bridge.torch.sharding.sharded_models import Block, Net  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.bridge.torch.sharding.traffic import Wholes  # noqa: E402
from spmd.errors import DifferentiationError, MeshError, StateError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.host("a body makes its tensors on the host")]
X = randn(7, 5)


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class Checkpointed(Net):
    """Blocks in checkpoints."""

    reentrant = False

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class Reentrant(Checkpointed):
    reentrant = True


class Around(nn.Module):
    """All blocks, and parameters of the module itself, in one checkpoint."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


class Repeated(Net):
    """Each block twice."""

    def forward(self, x):
        x = self.first(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.last(x)


class Unused(Net):
    """One block whose result is not used, and two that are not called."""

    def forward(self, x):
        x = self.first(x)
        self.blocks[0](x)
        return self.last(self.blocks[1](x))


class Tied(Net):
    """A weight that two blocks share, and one that a block has twice."""

    def __init__(self):
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.blocks[3].norm.weight = self.blocks[3].norm.bias


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.weight.requires_grad_(False)


class Recurrent(nn.Module):
    """Modules that keep lists of their parameters, or compute them."""

    def __init__(self):
        super().__init__()
        self.block, self.lstm = Block(5), nn.LSTM(5, 4, 2)
        self.normed = parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, x):
        return self.normed(self.lstm(self.block(x)[None])[0][0])


def once(net, take, mean):
    mean(net(take(X)).sin()).backward()


def of_input(net, take, mean):
    mean(net(take(X).requires_grad_()).sin()).backward()


def several_forwards(net, take, mean):
    a, b = net(take(X)), net(take(X + 1))
    mean((a * b).sin()).backward()


def retained(net, take, mean):
    loss = mean(net(take(X)).sin())
    loss.backward(retain_graph=True)
    loss.backward()


def twice(net, take, mean):
    once(net, take, mean)
    mean(net(take(2 * X)).cos()).backward()


def accumulated(net, take, mean):
    """Two backwards that send nothing, and one that does."""
    if hasattr(net, "no_sync"):
        with net.no_sync():
            twice(net, take, mean)
        with pytest.raises(StateError, match="under no_sync"):
            spt.grad_norm(net)
    else:
        twice(net, take, mean)
    mean(net(take(3 * X)).cos()).backward()


def by_grad(net, take, mean):
    parameters = list(net.parameters())
    for p, g in zip(parameters, torch.autograd.grad(mean(net(take(X)).sin()), parameters), strict=True):
        p.grad = g.detach()


def copied(net, take, mean):
    other = copy.deepcopy(net)
    once(other, take, mean)
    assert all(p.grad is None for p in net.parameters())
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        p.grad = q.grad


def after_evaluation(net, take, mean):
    net.eval()
    with torch.no_grad():
        net(take(X))
    net.train()
    once(net, take, mean)


def after_errors(net, take, mean):
    """An error in forward, and one in backward."""

    def fail(*_):
        raise ZeroDivisionError

    for handle in (net.blocks[2].register_forward_hook(fail), net.blocks[1].up.register_full_backward_hook(fail)):
        with pytest.raises(ZeroDivisionError):
            once(net, take, mean)
        handle.remove()
        net.zero_grad()
    once(net, take, mean)


def of_one_sample(net, take, mean):
    """Other workers have no data."""
    mean(net(take(X[:1])).sin()).backward()


CASES = [
    (Net, once),
    (Checkpointed, once),
    (Reentrant, of_input),
    (Around, once),
    (Repeated, once),
    (Unused, once),
    (Tied, once),
    (Frozen, once),
    (Recurrent, once),
    (Net, several_forwards),
    (Net, retained),
    (Net, twice),
    (Net, accumulated),
    (Net, by_grad),
    (Net, copied),
    (Net, after_evaluation),
    (Net, after_errors),
    (Net, of_one_sample),
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("make", "use"), CASES, ids=lambda f: f.__name__)
def test_gradients_are_those_of_one_worker(make, use, check):
    serial = drawn(make(), 3)
    use(serial, lambda x: x, torch.mean)

    def main(worker):
        net = spt.shard_parameters(drawn(make(), 3), "data", unit=Block)
        names = list(net.state_dict())
        use(net, lambda x: share(x, worker, 2), lambda losses: spt.mean(losses, "data"))
        sharding = vars(net)["_spmd_sharding"]
        assert (sharding.wholes, sharding.storages, sharding.pending) == ({}, {}, None)
        assert all(p is not None and p.is_leaf for p in net.parameters())
        assert names == list(net.state_dict()) == list(serial.state_dict())
        return [p.grad.whole() if hasattr(p.grad, "whole") else p.grad for p in net.parameters()]

    for grads in on_workers(2, main, check=check):
        for g, p in zip(grads, serial.parameters(), strict=True):
            assert (g is None) == (p.grad is None)
            if g is not None:
                torch.testing.assert_close(g, p.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("prefetch", "most"), [(0, 1), (1, 2), (2, 3)])
def test_at_most_two_units_are_whole(prefetch, most, monkeypatch):
    """Memory of wholes that exists, in forward and backward, the module's own parameters aside."""
    wait = Wholes.wait

    def main(worker):
        net = spt.shard_parameters(Net(6), "data", unit=Block, prefetch=prefetch)
        storages, counts = {}, []

        def noted(wholes):
            arrived = wholes.tensors is None
            tensors = wait(wholes)
            if arrived and len(tensors) == 7:
                storages.setdefault(id(wholes.parameters), []).extend(
                    StorageWeakRef(t.untyped_storage()) for t in tensors
                )
            return tensors

        if worker == 0:
            monkeypatch.setattr(Wholes, "wait", noted)

        def count(*_):
            alive = {key for key, refs in storages.items() if any(not ref.expired() for ref in refs)}
            under_way = {
                id(w.parameters)
                for w in vars(net)["_spmd_sharding"].wholes.values()
                if w.tensors is None and len(w.parameters) == 7
            }
            counts.append(len(alive | under_way))

        for block in net.blocks:
            for part in (block.norm, block.up, block.down):
                part.register_forward_hook(count)
                part.register_full_backward_hook(count)
        for _ in range(3):
            net(share(randn(4, 5), worker, 1)).sum().backward()
        count()
        return counts

    (counts,) = on_workers(1, main)
    assert max(counts) == most
    assert counts[-1] == 0
    assert len(counts) == 3 * 6 * 6 + 1


@pytest.mark.parametrize("check", CHECKS)
def test_parameters_in_short_numbers(check):
    """Wholes of bfloat16, masters and sums of float32: near what float32 gives, and the same on all workers."""

    def main(worker):
        net = drawn(Net(), 3).float()
        net = spt.shard_parameters(net, "data", unit=Block, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        seen = []
        net.blocks[0].register_forward_hook(lambda m, args, y: seen.append((m.up.weight.dtype, args[0].dtype)))
        spt.mean(net(share(X.float(), worker, 2)).float().sin(), "data").backward()
        assert seen == [(torch.bfloat16, torch.bfloat16)]
        assert all(p.dtype is torch.float32 and p.grad.dtype is torch.float32 for p in net.parameters())
        return [p.grad.whole() if hasattr(p.grad, "whole") else p.grad for p in net.parameters()]

    serial = drawn(Net(), 3).float()
    once(serial, lambda x: x.float(), torch.mean)
    results = on_workers(2, main, check=check)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    own, expected = (
        torch.cat([g.reshape(-1) for g in gs]) for gs in (results[0], [p.grad for p in serial.parameters()])
    )
    assert (own - expected).norm() <= 0.1 * expected.norm()


def test_autocast():
    def main(worker):
        net = spt.shard_parameters(drawn(Net(), 3).float(), "data", unit=Block)
        with torch.autocast("cpu", torch.bfloat16):
            loss = spt.mean(net(share(X.float(), worker, 2)).float().sin(), "data")
        loss.backward()
        return loss.item()

    serial = drawn(Net(), 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = serial(X.float()).float().sin().mean().item()
    for loss in on_workers(2, main):
        assert abs(loss - expected) < 1e-3


@pytest.mark.parametrize("check", CHECKS)
def test_states_are_loaded_whole_and_in_blocks(check):
    state = drawn(Net(), 8).state_dict()

    def main(worker):
        net = spt.shard_parameters(drawn(Net(), 3), "data", unit=Block)
        net.load_state_dict(state)
        blocks = {name: x.clone() for name, x in spt.state_dict(net, whole=False).items()}
        net.load_state_dict({name: 0 * x for name, x in blocks.items()})
        assert all(not x.any() for x in spt.state_dict(net).values())
        net.load_state_dict(blocks)
        return spt.state_dict(net)

    for result in on_workers(3, main, check=check):
        assert list(result) == list(state)
        assert all(torch.equal(result[name], x) for name, x in state.items())


def test_in_place_changes_of_saved_tensors_raise():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x):
            y = self.layer(x).exp()
            z = y * y
            y.add_(1)
            return z

    def main(worker):
        net = spt.shard_parameters(Wrong(), "data")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            net(X).sum().backward()

    on_workers(1, main, check=False)


def test_wrong_calls_raise():
    def main(worker):
        net = spt.shard_parameters(drawn(Net(), 3 + worker), "data", unit=Block)
        with pytest.raises(StateError, match="sharded already"):
            spt.shard_parameters(net, "data")
        with pytest.raises(StateError, match=r"first\.weight that differs") if worker else nullcontext():
            spt.shard_parameters(drawn(Net(), 3 + worker), "data", init="verify")
        with pytest.raises(DifferentiationError, match="create_graph=True"):
            spt.mean(net(share(X, worker, 2)), "data").backward(create_graph=True)
        once(net, lambda x: share(x, worker, 2), lambda losses: spt.mean(losses, "data"))
        return net

    net = on_workers(2, main)[0]
    with pytest.raises(MeshError, match="outside of any body"):
        net(X)
