"""spt.data_parallel on meshes of several axes, and parameters that differ along an axis."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from data_parallel_cases import CHECKS, Net, assert_near, drawn, gradients, on_workers, randn, serial_run, share  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.bridge.torch.tensor_state import plain  # noqa: E402
from spmd.errors import MeshError, ReplicaError, StateError  # noqa: E402
from spmd.layout import block_sizes, offsets  # noqa: E402

pytestmark = pytest.mark.host("a body makes its tensors on the host")


class Shards(nn.Module):
    """A layer of which each worker along `model` has some rows."""

    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(rows)
        self.bias = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        own = F.linear(spt.pvary(x, "model"), spt.varying(self.weight, "model"))
        return spt.all_gather(own, "model", axis=1, tiled=True, to="invariant") * self.bias


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("direct", [False, True])
def test_with_a_parallel_layer_along_another_axis(check, direct):
    """Sums are taken along the axis of the data, among workers that have the same shard."""
    x, w = randn(7, 5, seed=1), randn(3, 5, seed=2)
    serial = nn.Linear(5, 3, dtype=torch.float64, bias=False)
    serial.weight.data.copy_(w)
    bias = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (serial(x) * bias).sin().sum().backward()
    mesh = spmd.Mesh(data=3, model=2)
    at = offsets(block_sizes(3, 2))
    results = {}

    def main():
        k, j = spt.worker_index("data"), spt.worker_index("model")
        model = spt.data_parallel(Shards(w[at[j] : at[j + 1]].clone()), "data")
        forward = model.module if direct else model
        forward(share(x, k, 3)).sin().sum().backward()
        results[k, j] = gradients(model)

    spt.map(main, (), None, mesh=mesh, check=check)()
    assert len(results) == 6
    for (_, j), (weight, biases) in results.items():
        assert_near([weight], [serial.weight.grad[at[j] : at[j + 1]]])
        assert_near([biases], [bias.grad])


def test_along_two_axes_together():
    x = randn(7, 5, seed=1)
    serial = serial_run(drawn(Net(), 2), x)
    results = []

    def main():
        model = spt.data_parallel(drawn(Net(), 2), ("data", "more"))
        at = offsets(block_sizes(7, 4))
        k = spt.worker_index(("data", "more"))
        model(spt.varying(x[at[k] : at[k + 1]], ("data", "more"))).sin().sum().backward()
        results.append(gradients(model))

    spt.map(main, (), None, mesh=spmd.Mesh(data=2, more=2))()
    assert len(results) == 4
    for result in results:
        assert_near(result, gradients(serial))


def stages(varying, *, make=None, equal=False, check=True):
    """Two stages with a linear layer each; the gradients of each, and what they are in one program."""
    x = randn(6, 3, seed=4)
    nets = [drawn(nn.Linear(3, 3, dtype=torch.float64), 1 if equal else k) for k in range(2)]
    (nets[1](torch.tanh(nets[0](x))).sin().sum()).backward()
    results = {}

    def main():
        k, stage = spt.worker_index("data"), spt.worker_index("stage")
        net = drawn(nn.Linear(3, 3, dtype=torch.float64), 1 if equal else stage)
        options = {} if varying is None else {"varying": varying}
        model = spt.data_parallel(make(net) if make else net, "data", **options)
        rows = share(x, k, spt.axis_size("data"))
        first = torch.tanh(model(spt.varying(rows, "stage")))
        last = model(spt.shift(first, "stage", 1)) * float(stage == 1)
        spt.psum(last.sin().sum(), ("data", "stage")).backward()
        results[k, stage] = [p.grad.clone() for p in net.parameters()]

    spt.map(main, (), None, mesh=spmd.Mesh(data=2, stage=2), check=check)()
    return results, [[p.grad for p in net.parameters()] for net in nets]


@pytest.mark.parametrize("varying", ["stage", ("stage",)])
def test_stages_have_gradients_of_their_own(varying):
    results, expected = stages(varying)
    for (_, stage), gs in results.items():
        assert_near([plain(g) for g in gs], expected[stage])


def test_replicated_parameters_are_summed_along_other_axes():
    results, expected = stages(None, equal=True)
    for gs in results.values():
        assert_near([plain(g) for g in gs], [a + b for a, b in zip(*expected, strict=True)])


class Wrapped(nn.Module):
    """A module of the user's that says nothing, or declares."""

    def __init__(self, net, declares, operators=False):
        super().__init__()
        self.weight, self.bias, self.declares, self.operators = net.weight, net.bias, declares, operators

    def forward(self, x):
        if self.operators:
            return x @ self.weight.T + self.bias
        if self.declares:
            return F.linear(x, spt.varying(self.weight, "stage"), spt.varying(self.bias, "stage"))
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize(
    "make",
    [None, lambda net: nn.Sequential(net), lambda net: Wrapped(net, False), lambda net: Wrapped(net, False, True)],
)
def test_undeclared_differences_raise(make):
    with pytest.raises((StateError, ReplicaError), match=r"weight, which differs[\s\S]*'stage'[\s\S]*varying='stage'"):
        stages(None, make=make)


def test_a_forward_may_declare_its_parameters():
    results, expected = stages(None, make=lambda net: Wrapped(net, True))
    for (_, stage), gs in results.items():
        assert_near([plain(g) for g in gs], expected[stage])


def test_undeclared_differences_of_one_entry_of_frozen_parameters_and_of_modules():
    def main(change):
        net = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2))
        drawn(net, 1).requires_grad_(False)
        change(net, spt.worker_index("stage"))
        spt.data_parallel(net, "data")

    def run(change):
        spt.map(lambda: main(change), (), None, mesh=spmd.Mesh(data=1, stage=3))()

    def one_entry(net, stage):
        net[2].weight[1, 7] += stage == 2

    run(lambda net, stage: None)
    with pytest.raises(StateError, match=r"2\.weight, which differs between workers along 'stage'"):
        run(one_entry)
    with pytest.raises(StateError, match="list of parameters, which differs between workers along 'stage'"):
        run(lambda net, stage: net.append(nn.Linear(2, 2)) if stage else None)
    with pytest.raises(StateError, match=r"0\.bias, which differs"):
        run(lambda net, stage: setattr(net[0], "bias", nn.Parameter(torch.zeros(300 + stage))))
    with pytest.raises(StateError, match="argument varying"):
        spt.map(lambda: spt.data_parallel(nn.Linear(2, 2), "data", varying="data"), (), None, mesh=spmd.Mesh(data=2))()
    with pytest.raises(MeshError, match="satge"):
        spt.map(lambda: spt.data_parallel(nn.Linear(2, 2), "data", varying="satge"), (), None, mesh=spmd.Mesh(data=2))()


def test_sharded_layers_need_no_declaration():
    def main():
        net = nn.Sequential(
            spt.nn.Linear(4, 6, w_spec=P("model")), nn.Tanh(), spt.nn.Linear(6, 2, w_spec=P(None, "model"))
        )
        model = spt.data_parallel(net, "data")
        spt.mean(model(spt.varying(torch.ones(2, 4), "data")) ** 2, "data").backward()

    spt.map(main, (), None, mesh=spmd.Mesh(data=2, model=2))()


def test_synchronised_batch_norms_raise():
    """torch's would take the statistics of one worker; plain ones are DDP's, which do so by contract."""

    def main(norm):
        spt.data_parallel(norm(4), "data")(spt.varying(torch.ones(3, 4), "data"))

    mesh = spmd.Mesh(data=2)
    with pytest.raises(StateError, match=r"SyncBatchNorm[\s\S]*spt\.functions\.batch_norm\(x"):
        spt.map(lambda: main(nn.SyncBatchNorm), (), None, mesh=mesh)()
    spt.map(lambda: main(nn.BatchNorm1d), (), None, mesh=mesh)()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("summed", [True, False])
def test_a_penalty_counts_once_for_each_worker(reduction, summed, check):
    """Whether it is added to a loss of each worker or to that of all, and whether states are tracked or not."""
    x = randn(6, 5, seed=1)
    serial = drawn(Net(), 2)
    (serial(x).sin().sum() + 3 * sum(p.square().sum() for p in serial.parameters())).backward()
    expected = [g / (3 if reduction == "mean" else 1) for g in gradients(serial)]

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data", reduction=reduction)
        loss = model(share(x, worker, 3)).sin().sum()
        loss = spt.psum(loss, "data") if summed else loss
        (loss + sum(p.square().sum() for p in model.parameters())).backward()
        return gradients(model)

    for result in on_workers(3, main, check=check):
        assert_near(result, expected)


def test_what_is_computed_of_its_parameters_and_of_others_is_refused():
    def main(worker):
        net, other = drawn(Net(), 2), nn.Parameter(torch.ones((), dtype=torch.float64))
        loss = spt.data_parallel(net, "data")(share(randn(6, 5), worker, 2)).sum()
        (loss + net.scale * other).backward()

    with pytest.raises(ReplicaError, match=r"spt\.pvary\(value, 'data'\)"):
        on_workers(2, main)
