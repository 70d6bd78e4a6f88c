"""Data and tensors that come into a body of torch by ways which no argument and no declaration tells of."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import ReplicaError, StateError  # noqa: E402

pytestmark = pytest.mark.host("tensors of these tests lie on the host")

MESH = spmd.Mesh(x=2, transport="local")
X = torch.arange(4.0, dtype=torch.float64)


def gradient(f, x=X):
    """The gradient of the sum of f(x, w) for w = 1, on two workers and on one."""

    def main(x):
        w = torch.ones((), dtype=torch.float64, requires_grad=True)
        spt.psum(spt.pvary(f(x, w).sum(), "x"), "x").backward()
        return w.grad

    return spt.map(main, P("x"), P(), mesh=MESH)(x)


class Of(torch.autograd.Function):
    """w times the data that lie in a dict."""

    @staticmethod
    def forward(ctx, w, batch):
        ctx.x = batch["x"]
        return batch["x"] * w

    @staticmethod
    def backward(ctx, g):
        return (g * ctx.x).sum(), None


WAYS = {
    "a copy": lambda x, w: copy.copy(x) * w,
    "a deep copy": lambda x, w: copy.deepcopy(x) * w,
    "full": lambda x, w: torch.full((1,), x.sum()) * w,
    "full_like": lambda x, w: torch.full_like(torch.zeros(1, dtype=torch.float64), x.sum()) * w,
    "full by keyword": lambda x, w: torch.full(size=(1,), fill_value=x.sum()) * w,
    "scalar_tensor": lambda x, w: torch.scalar_tensor(x.sum(), dtype=torch.float64) * w,
    "tensor of a number": lambda x, w: torch.tensor(x.sum().clone().detach()) * w,
    "tensor of a list": lambda x, w: torch.tensor([x[0], x[1]]) * w,
    "as_tensor": lambda x, w: torch.as_tensor([x[0], x[1]]) * w,
    "a function with a dict": lambda x, w: Of.apply(w, {"x": x}),
}


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("way", WAYS)
def test_what_is_made_of_varying_tensors_varies(way):
    assert gradient(WAYS[way]).item() == pytest.approx(X.sum().item())


def test_splits_of_a_data_set_are_those_of_all_workers():
    def main():
        parts = torch.utils.data.random_split(range(10), [7, 3])
        return list(parts[1].indices), torch.randperm(5, generator=torch.default_generator).tolist()

    assert len(spt.map(main, (), None, mesh=MESH)()[0]) == 3  # results with None are compared


def test_a_loss_of_undeclared_data_is_compared():
    def main(differ):
        net = nn.Linear(2, 1)
        x = torch.ones(3, 2) + (spt.worker_index("x") if differ else 0)
        net(x).mean().backward()
        return net.weight.grad

    spt.map(lambda: main(False), (), P(), mesh=MESH)()
    with pytest.raises(ReplicaError, match="differentiated scalar"):
        spt.map(lambda: main(True), (), P("x"), mesh=MESH)()
    with pytest.raises(ReplicaError, match="differentiated scalar"):
        spt.map(grad_of_own, (), P("x"), mesh=MESH)()


def grad_of_own():
    w = torch.ones(2, requires_grad=True)
    return torch.autograd.grad(w.sum() * (1.0 + spt.worker_index("x")), w)[0]


def test_counts_of_this_worker_do_not_scale_gradients():
    table = nn.Embedding(3, 1, scale_grad_by_freq=True)
    weight = table.weight.detach()

    def main(ids):
        own = nn.Embedding(3, 1, scale_grad_by_freq=True, _weight=weight.clone())
        return own(ids)

    with pytest.raises(StateError, match="scale_grad_by_freq"):
        spt.map(main, P("x"), P("x"), mesh=MESH)(torch.tensor([0, 0, 1, 0]))


def test_invariant_numbers_are_formatted():
    def main(x):
        with pytest.raises(StateError, match="Invariant"):
            f"{x.sum():.3f}"
        return f"{spt.mean(x, 'x'):.3f}"

    assert spt.map(main, P("x"), None, mesh=MESH)(X) == "1.500"
