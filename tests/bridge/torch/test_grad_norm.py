"""The norm of all gradients of modules with parameters in blocks."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from bridge.torch.nn.linear_layers import F64, MESHES, close  # noqa: E402
from spmd import Grid, P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import StateError  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("check", [True, False])
def test_the_norm_of_gradients_counts_every_entry_once(axes, p, check):
    names = tuple(axes)
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Linear(4, 9, dtype=F64), nn.Linear(9, 3, dtype=F64), nn.Linear(3, 3, dtype=F64))
    x = torch.randn(5, 4, dtype=F64)
    serial(x).square().sum().backward()
    total = torch.linalg.vector_norm(torch.cat([q.grad.ravel() for q in serial.parameters()]), p)
    before = torch.nn.utils.clip_grad_norm_(serial.parameters(), 0.5, p)
    result = {}

    def main():
        net = nn.Sequential(
            spt.nn.Linear.from_torch(serial[0], w_spec=P(names)),
            spt.nn.Linear.from_torch(serial[1], w_spec=P(None, names)),
            copy.deepcopy(serial[2]),
        )
        net.zero_grad()
        net(x).square().sum().backward()
        norm = spt.grad_norm(net, p)
        assert torch.equal(norm, spt.clip_grad_norm_([net], 0.5, p, error_if_nonfinite=True))
        with torch.no_grad():
            for q in net.parameters():
                q.copy_(q.grad)
        result[spmd.mesh.here("a test").index] = norm, net.state_dict(), spt.clip_grad_norm_(net, 1e6, p)

    spt.map(main, (), None, mesh=spmd.Mesh(**axes), check=check)()
    for norm, gradients, after in result.values():
        assert type(norm) is torch.Tensor
        close(norm, total)
        close(norm, before)
        assert float(after) == pytest.approx(0.5, rel=1e-5)
        for name, q in serial.named_parameters():
            close(gradients[name], q.grad)


def test_the_norm_of_blocks_on_some_workers_and_of_nothing():
    torch.manual_seed(0)
    linear = nn.Linear(5, 4, dtype=F64)
    linear(torch.ones(5, dtype=F64)).sum().backward()
    expected = torch.linalg.vector_norm(torch.cat([p.grad.ravel() for p in linear.parameters()]))

    def main():
        k = spmd.worker_index("x")
        layer = spt.nn.Linear.from_torch(linear, spec=Grid((1,)), out_spec=Grid((1,)), w_spec=Grid((2, 1), (2, 0)))
        assert float(spt.grad_norm(layer)) == 0
        y = layer(spt.varying(torch.ones(5 if k == 0 else 0, dtype=F64), "x"))
        y.sum().backward()
        close(spt.grad_norm(layer), expected)
        layer.weight.grad.fill_(float("nan"))
        if layer.weight.numel():
            assert torch.isnan(layer.weight.grad).all()
        with pytest.raises(RuntimeError, match="non-finite"):
            spt.clip_grad_norm_(layer, 1.0, error_if_nonfinite=True)
        with pytest.raises(StateError, match="need"):
            spt.grad_norm(list(layer.parameters()))
        with pytest.raises(StateError, match="norm_type"):
            spt.grad_norm(layer, 0)

    spt.map(main, (), None, mesh=spmd.Mesh(x=3))()


@pytest.mark.parametrize("axes", [{"stage": 2}, {"stage": 3}, {"data": 2, "stage": 3}, {"stage": 4, "model": 2}])
@pytest.mark.parametrize("p", [2.0, 1.0, float("inf")])
def test_workers_with_modules_of_their_own(axes, p):
    """Modules of remote calls: each worker has the gradients of those that it ran."""
    torch.manual_seed(1)
    first, last = nn.Linear(4, 5, dtype=F64), nn.Linear(5, 2, dtype=F64)
    x, end = torch.randn(6, 4, dtype=F64), axes["stage"] - 1

    def main():
        f, g = copy.deepcopy(first), copy.deepcopy(last)
        h = spt.remote(f, at=0, axis_name="stage")(x)
        y = spt.remote(lambda h: g(h).square().sum(), at=end, axis_name="stage")(h)
        spt.replicate(y.result(), "stage", end).backward()
        with pytest.raises(StateError, match=r"along 'stage'(.|\n)*varying='stage'"):
            spt.grad_norm([f, g], p)
        before = spt.clip_grad_norm_([f, g], 0.5, p, varying="stage")
        return before, spt.grad_norm([f, g], p, varying="stage")

    last(first(x)).square().sum().backward()
    parameters = [*first.parameters(), *last.parameters()]
    before = torch.nn.utils.clip_grad_norm_(parameters, 0.5, p)
    after = torch.linalg.vector_norm(torch.cat([q.grad.ravel() for q in parameters]), p)
    found = spt.map(main, (), None, mesh=spmd.Mesh(**axes))()
    close(found[0], before)
    close(found[1], after)


def test_gradients_of_copies_that_nobody_summed():
    def main():
        net = nn.Linear(2, 2, dtype=F64)
        for q in net.parameters():
            q.grad = torch.full_like(q, 1.0 + spt.worker_index("data"))
        spt.clip_grad_norm_(net, 1.0)

    with pytest.raises(StateError, match=r"2\.44949 on one worker along 'data', 7\.34847 on another"):
        spt.map(main, (), None, mesh=spmd.Mesh(data=3, model=2))()
