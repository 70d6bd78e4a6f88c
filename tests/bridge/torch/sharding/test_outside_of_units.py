"""Parameters of sharded modules that are used outside of the forward of their unit: right, or an error."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from data_parallel_cases import CHECKS, assert_near, drawn, on_workers, randn, share  # noqa: E402
from noted import noted  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from bridge.torch.sharding.sharded_models import Block  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import DifferentiationError, LayoutError, StateError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.host("a body makes its tensors on the host")]
WORKERS = 3
X = randn(15, 5)  # as many rows on each worker: blocks of one shape do not show that something is wrong


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class Layers(nn.Module):
    """Layers whose parameters a function uses beside the data."""

    def __init__(self):
        super().__init__()
        self.up, self.square, self.table = nn.Linear(5, 7), nn.Linear(5, 5), nn.Embedding(9, 5)
        self.block = Block(5)

    def forward(self, x):
        return self.block(self.square(x))


DERIVED = {
    "transposed": lambda net, x: x @ net.up.weight.T,
    "reshaped": lambda net, x: x @ net.up.weight.view(7, 5).T,
    "scaled": lambda net, x: F.linear(x, 2 * net.up.weight),
    "detached": lambda net, x: F.linear(x, net.up.weight.detach().T.T),
    "copied": lambda net, x: F.linear(x, net.up.weight.clone(), net.up.bias),
    "cast": lambda net, x: F.linear(x, net.up.weight.float().double()),
    "a part": lambda net, x: x * net.up.weight[0],
    "expanded": lambda net, x: net.square.bias.expand(len(x), 5) * x,
    "with a dimension more": lambda net, x: net.square.bias.unsqueeze(0) * x,
    "of its shape": lambda net, x: (x.T @ x) * net.square.weight,
    "of its shape, transposed": lambda net, x: (x.T @ x) * net.square.weight.T,
    "by a number": lambda net, x: net.square.bias * x.sum(),
    "added in place": lambda net, x: x.clone().add_(net.square.bias),
    "in a product": lambda net, x: torch.outer(x.sum(1), net.square.bias),
    "in a layer": lambda net, x: F.layer_norm(x, (5,), 2 * net.square.bias),
    "in a distance": lambda net, x: torch.cdist(x, 2 * net.up.weight),
    "of a table": lambda net, x: net.table.weight[x.argmax(1)],
    "row means": lambda net, x: x * net.up.weight.mean(0),
}
MAY_BE_WHOLES = {"of its shape", "of its shape, transposed", "expanded", "by a number"}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("is_output", [True, False], ids=["output", "input"])
def test_parameters_and_what_is_made_of_them_raise_beside_data(is_output, check):
    """is_output: the data are the output of a layer, and differentiated. If not, and without states, some may be
    wholes."""

    def main(worker):
        net = spt.shard_parameters(drawn(Layers(), 0), "data", unit=(nn.Linear, nn.Embedding, Block))
        x = share(X, worker, WORKERS)
        x = net.square(x) if is_output else x[1:]
        for name, use in DERIVED.items():
            if check or is_output or name not in MAY_BE_WHOLES:
                with noted(name), pytest.raises(LayoutError):
                    use(net, x)

    on_workers(WORKERS, main, check=check)


SHARED = {
    "a number": lambda net, y: net.block.scale * y,
    "a function of a number": lambda net, y: torch.sigmoid(net.block.scale) * y,
    "a sum": lambda net, y: net.up.bias.sum() * y,
    "a norm": lambda net, y: y / net.up.weight.norm(),
    "means": lambda net, y: y * net.up.weight.mean(1)[:5],
    "a stack": lambda net, y: y + torch.stack([net.square.bias, net.square.bias]).sum(0),
    "a penalty of samples": lambda net, y: y + sum(p.square().sum() for p in net.parameters()),
}
PENALTIES = {
    "a number": lambda net: net.block.scale**2,
    "squares": lambda net: sum(p.square().sum() for p in net.parameters()),
    "lengths of rows": lambda net: net.up.weight.norm(dim=1).sum() + net.up.weight.norm(dim=0).max(),
    "a product": lambda net: (net.square.weight.T @ net.square.weight - torch.eye(5)).square().sum(),
    "directions": lambda net: (net.up.weight / net.up.weight.norm()).sin().sum(),
}


def gradients(net, loss):
    loss.backward()
    return [None if p.grad is None else getattr(p.grad, "whole", p.grad.clone)() for p in net.parameters()]


@pytest.mark.parametrize("check", CHECKS)
def test_what_all_workers_have_beside_data(check):
    """Right with states; without them an error, unless the program varies it."""

    def loss_of(net, x, use, total):
        y = net(x)
        return total(use(net, y).sin())

    def varied(net, x, use):
        value = use(net, torch.ones(1, 5))
        return spt.sum((spt.pvary(value, "data") * net(x)).sin(), "data")

    def main(worker):
        net = spt.shard_parameters(drawn(Layers(), 0), "data", unit=(nn.Linear, Block))
        x, results = share(X, worker, WORKERS), []
        for name, use in SHARED.items():
            with noted(name):
                net.zero_grad()
                loss = loss_of(net, x, use, lambda y: spt.sum(y, "data"))
                if check:
                    results += gradients(net, loss)
                    continue
                with pytest.raises(DifferentiationError, match=r"differs between the workers along 'data'[\s\S]*pvary"):
                    loss.backward()
                net.zero_grad()
                results += gradients(net, varied(net, x, use))
        return results

    serial, expected = drawn(Layers(), 0), []
    for use in SHARED.values():
        serial.zero_grad()
        if check:
            expected += gradients(serial, loss_of(serial, X, use, torch.sum))
        else:
            expected += gradients(serial, (use(serial, torch.ones(1, 5)) * serial(X)).sin().sum())
    for result in on_workers(WORKERS, main, check=check):
        assert_near(result, expected, 1e-9)


@pytest.mark.parametrize("check", CHECKS)
def test_functions_of_parameters_alone(check):
    def penalized(net, x, total):
        grads = []
        for name, use in PENALTIES.items():
            with noted(name):
                net.zero_grad()
                grads += gradients(net, total(net(x).sin()) + use(net))
        return grads

    def main(worker):
        net = spt.shard_parameters(drawn(Layers(), 0), "data", unit=(nn.Linear, Block))
        return penalized(net, share(X, worker, WORKERS), lambda y: spt.sum(y, "data"))

    expected = penalized(drawn(Layers(), 0), X, torch.sum)
    for result in on_workers(WORKERS, main, check=check):
        assert_near(result, expected, 1e-9)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True)
        self.weights = nn.ParameterList([torch.zeros(4, 4)])

    def forward(self, x):
        x = x[:, :4].reshape(-1, 2, 4)[:, [0, 1, 0]]
        return self.encoder(self.attention(x, x, x)[0]) @ self.weights[0]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("unit", [(nn.Linear, nn.ParameterList), lambda name, module: True], ids=["classes", "all"])
def test_modules_that_nobody_calls_are_no_units(unit, check):
    """Their parameters are used by the module around, in training and in the fast path of evaluation."""
    x = randn(12, 5)

    def run(net, x, total):
        grads = gradients(net, total(net(x).sin()))
        net.eval()
        with torch.no_grad():
            return [*grads, total(net(x).sin())]

    def main(worker):
        net = spt.shard_parameters(drawn(Attending(), 0), "data", unit=unit)
        *grads, value = run(net, share(x, worker, 2), lambda y: spt.sum(y, "data"))
        return [*grads, value.as_subclass(torch.Tensor)]

    expected = run(drawn(Attending(), 0), x, torch.sum)
    for result in on_workers(2, main, check=check):
        assert_near(result, expected, 1e-9)


class Keeping(nn.Module):
    """References to a parameter that are none of the module's parameters."""

    def __init__(self, how):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        weight = self.layer.weight
        self.used = {"list": [weight], "function": lambda: weight, "attribute": None}[how]
        if how == "attribute":
            object.__setattr__(self, "used", weight)

    def forward(self, x):
        w = self.used[0] if isinstance(self.used, list) else self.used() if callable(self.used) else self.used
        return self.layer(x) @ w


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("how", ["list", "function", "attribute"])
def test_references_to_parameters_from_before_raise(how, check):
    def main(worker):
        net = spt.shard_parameters(drawn(Keeping(how), 0), "data")
        with pytest.raises(StateError, match=r"was a parameter of the module before spt\.shard_parameters split it"):
            net(share(X, worker, 2)).sum().backward()

    on_workers(2, main, check=check)


def test_a_parameter_that_two_modules_share_is_sharded_once():
    def main(worker):
        first, second = nn.Linear(5, 5), nn.Linear(5, 5)
        second.weight = first.weight
        spt.shard_parameters(first, "data")
        with pytest.raises(StateError, match="which another module had too"):
            spt.shard_parameters(second, "data")

    on_workers(2, main)


@pytest.mark.parametrize("check", CHECKS)
def test_transformations_of_torch_func_raise(check):
    def main(worker):
        net, x = spt.shard_parameters(drawn(Layers(), 0), "data"), share(X, worker, 2)
        for transformed in (torch.func.grad(lambda x: net(x).sum()), torch.func.vmap(net)):
            with pytest.raises(DifferentiationError, match=r"a transformation of torch\.func"):
                transformed(x)

    on_workers(2, main, check=check)


@pytest.mark.parametrize("check", CHECKS)
def test_anomalies_are_looked_for_and_found(check):
    """Each worker looks into its own blocks."""

    def main(worker):
        net = spt.shard_parameters(drawn(Layers(), 0), "data", unit=Block)
        grads = gradients(net, spt.sum(net(share(X, worker, WORKERS)).sin(), "data"))
        with pytest.raises(RuntimeError, match="returned nan values"):
            (0 * net.square.bias).abs().sqrt().sum().backward()
        return grads

    serial = drawn(Layers(), 0)
    expected = gradients(serial, serial(X).sin().sum())
    with torch.autograd.set_detect_anomaly(True):  # for all threads
        results = on_workers(WORKERS, main, check=check)
    for result in results:
        assert_near(result, expected)
