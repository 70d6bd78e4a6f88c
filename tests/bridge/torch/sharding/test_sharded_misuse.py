"""Sharded modules whose parameters change, or are used, where other modules would compute something wrong silently."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from data_parallel_cases import CHECKS, assert_near, drawn, on_workers, randn, share  # noqa: E402
from torch import nn  # noqa: E402
from torch.func import functional_call  # noqa: E402

from bridge.torch.sharding.sharded_models import Block, Net  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.bridge.torch.tensor_state import plain  # noqa: E402
from spmd.errors import LayoutError, StateError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.host("a body makes its tensors on the host")]
X = randn(9, 5)


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class Small(Net):
    def __init__(self):
        super().__init__(count=2)


class Methods(Small):
    def encoded(self, x):
        return self.blocks[0](self.first(x))

    def tied(self, x):
        return nn.functional.linear(self.blocks[0](x @ x.new_ones(5, 7)), self.blocks[1].up.weight)


def _sharded(worker, make=Small, **options):
    return spt.shard_parameters(drawn(make(), worker), "data", **{"unit": Block, **options})


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_parameters_that_change_before_backward_raise(prefetch, check):
    """Backward would gather other values than forward had."""

    def main(worker):
        net = _sharded(worker, prefetch=prefetch)
        loss = net(share(X, worker, 3)).square().sum()
        with torch.no_grad():
            net.blocks[1].up.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        net.zero_grad()
        net(share(X, worker, 3)).square().sum().backward()
        return net.first.weight.grad.whole()

    serial = drawn(Small(), 0)
    with torch.no_grad():
        serial.blocks[1].up.weight.mul_(2)
    serial(X).square().sum().backward()
    for result in on_workers(3, main, check=check):
        assert_near([result], [serial.first.weight.grad])


@pytest.mark.parametrize("check", CHECKS)
def test_a_unit_that_is_called_alone_fetches_nothing_ahead(check):
    """Units that it fetched ahead would be used after the next step of the optimiser."""

    def train(net, x):
        optimizer, losses = torch.optim.SGD(net.parameters(), 1e-5), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(x).square().sum() / len(X)
            loss.backward()
            with torch.no_grad():
                net.blocks[0](net.first.bias.new_ones(2, 7))
            optimizer.step()
            losses.append(loss.detach())
        return losses

    def main(worker):
        return [plain(spt.psum(loss, "data")) for loss in train(_sharded(worker), share(X, worker, 3))]

    for losses in on_workers(3, main, check=check):
        assert_near(losses, train(drawn(Small(), 0), X), atol=1e-8)


def _another_weight(net, x):
    net.last.weight = nn.Parameter(torch.ones(3, 7))
    net(x)


def _tied_later(net, x):
    net.blocks[1].up.weight = net.blocks[0].up.weight
    with torch.no_grad():
        net(x)


def _functional(net, x):
    functional_call(net, {name: 2 * p for name, p in net.named_parameters()}, (x,))


REPLACED = [(_another_weight, "last.weight"), (_tied_later, "blocks.1.up.weight"), (_functional, "")]


@pytest.mark.parametrize(("use", "name"), REPLACED, ids=["another", "tied", "functional"])
def test_replaced_parameters_raise_without_states(use, name):
    """Nothing would gather them, or sum their gradients."""

    def main(worker):
        with pytest.raises(StateError, match=f"argument {name}[\\s\\S]*before spt.shard_parameters"):
            use(_sharded(worker), share(X, worker, 3))

    on_workers(3, main, check=False)


def test_replaced_parameters_that_are_not_trained_are_wholes():
    """Also without states: the program's own tensors are used as they are."""

    def main(worker):
        net = _sharded(worker)
        values = {"last.weight": torch.ones(3, 7), "last.bias": torch.zeros(3)}
        with torch.no_grad():
            return spt.all_gather(functional_call(net, values, (share(X, worker, 3),)), "data", tiled=True)

    serial = drawn(Small(), 0)
    expected = functional_call(serial, {"last.weight": torch.ones(3, 7), "last.bias": torch.zeros(3)}, (X,)).detach()
    for result in on_workers(3, main, check=False):
        assert_near([result], [expected])


OUTSIDE = [
    (lambda net, x: net.encoded(x), "torch's linear"),
    (lambda net, x: net.tied(x), "torch's linear"),
    (lambda net, x: net.first.bias * net.blocks[0](x @ x.new_ones(5, 7)), "torch's mul"),
    (lambda net, x: net.last.bias + net(x), "torch's add"),
]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("use", "words"), OUTSIDE, ids=["method", "tied", "product", "sum"])
def test_parameters_beside_data_outside_of_their_unit_raise(use, words, grad):
    """The data would count as wholes without states; with them they vary."""

    def main(worker, checked):
        net, x = _sharded(worker, Methods), share(X, worker, 2)
        with torch.set_grad_enabled(grad):
            if checked:
                with pytest.raises((LayoutError, StateError, TypeError)):
                    use(net, x)
            else:
                with pytest.raises(LayoutError, match=words):
                    use(net, x)

    on_workers(2, main, False, check=False)
    on_workers(2, main, True)


def test_differentiated_wholes_raise_without_states():
    def main(worker):
        net = _sharded(worker)
        with pytest.raises(LayoutError, match=r"p\.whole\(\)[\s\S]*check=True"):
            net.last.weight.whole()
        with torch.no_grad():
            return net.last.weight.whole()

    for result in on_workers(3, main, check=False):
        assert_near([result], [drawn(Small(), 0).last.weight.detach()])


@pytest.mark.parametrize("check", CHECKS)
def test_penalties_and_writes_of_wholes_go_on(check):
    """Functions of parameters alone, and wholes that are written into them, are right everywhere."""

    def steps(net, x, total):
        optimizer, losses = torch.optim.SGD(net.parameters(), 1e-5), []
        with torch.no_grad():
            net.first.weight.copy_(torch.full((7, 5), 0.1))
            net.first.bias.add_(torch.arange(7.0) / 7)
        for _ in range(2):
            optimizer.zero_grad()
            loss = total(net(x).square()) + sum(p.square().sum() for p in net.parameters())
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    def main(worker):
        return [*map(plain, steps(_sharded(worker), share(X, worker, 3), lambda e: spt.sum(e, "data")))]

    for losses in on_workers(3, main, check=check):
        assert_near(losses, steps(drawn(Small(), 0), X, torch.sum), atol=1e-8)
