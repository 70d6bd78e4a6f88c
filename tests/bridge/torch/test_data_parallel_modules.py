"""spt.data_parallel: the wrapped module, its state, its copies, and what is refused."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

from data_parallel_cases import (  # noqa: E402
    CHECKS,
    SMALL,
    Mixed,
    Net,
    assert_gradients,
    assert_near,
    drawn,
    gradients,
    on_workers,
    randn,
    serial_run,
    share,
    values,
)
from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.bridge.torch.tensor_state import GRADIENT_SYNCS, plain  # noqa: E402
from spmd.errors import LayoutError, MeshError, MismatchError, StateError  # noqa: E402

pytestmark = pytest.mark.host("a body makes its tensors on the host")


def test_the_first_workers_parameters_and_buffers_are_taken():
    def build(worker):
        module = nn.Sequential(drawn(Mixed(), worker), nn.BatchNorm1d(4))
        module[1].running_mean += worker
        module[0].count += worker
        return module

    def main(worker):
        model = spt.data_parallel(build(worker), "data")
        return {k: v.clone() for k, v in model.state_dict().items()}

    expected = build(0).state_dict()
    for result in on_workers(3, main):
        assert list(result) == list(expected)
        assert all(torch.equal(result[k], v) for k, v in expected.items())


def test_verification_names_what_differs():
    def main(worker):
        module = drawn(Net(), 1)
        if worker == 2:
            module.middle.bias.data[3] += 1
        spt.data_parallel(module, "data", init="verify")

    with pytest.raises(StateError, match=r"middle\.bias that differs[\s\S]*worker 2"):
        on_workers(3, main)

    def alike(worker):
        spt.data_parallel(drawn(Net(), 1), "data", init="verify")

    on_workers(3, alike)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_running_means(broadcast_buffers, check):
    """They are those of the first worker, or each worker's own."""
    x = [randn(6, 4, seed=k) for k in range(3)]
    own = []
    for k in range(3):
        norm = nn.BatchNorm1d(4, dtype=torch.float64)
        for _ in range(2):
            norm(x[k])
        own.append(norm.running_mean.clone())

    def main(worker):
        model = spt.data_parallel(nn.BatchNorm1d(4, dtype=torch.float64), "data", broadcast_buffers=broadcast_buffers)
        for _ in range(2):
            model(spt.varying(x[worker], "data")).sum().backward()
        return model.running_mean.clone(), int(model.num_batches_tracked)

    for k, (result, count) in enumerate(on_workers(3, main, check=check)):
        torch.testing.assert_close(plain(result), own[0 if broadcast_buffers else k], rtol=0, atol=1e-15)
        assert count == 2


def test_state_dict_and_names_are_those_of_the_module():
    plain_names = [name for name, _ in Net().named_parameters()]

    def main(worker):
        module = drawn(Net(), worker)
        model = spt.data_parallel(module, "data")
        assert model.module is module
        assert [name for name, _ in model.named_parameters()] == plain_names
        assert list(model.state_dict()) == list(Net().state_dict())
        assert model.first is module.first
        assert [id(p) for p in model.parameters()] == [id(p) for p in module.parameters()]
        with pytest.raises(AttributeError, match="nothing_like_this"):
            _ = model.nothing_like_this
        model.eval()
        assert not module.first.training
        assert module.first.weight.__class__ is nn.Parameter
        model.load_state_dict(drawn(Net(), 7).state_dict())
        assert_near(values(module), values(drawn(Net(), 7)))

        parent = nn.ModuleDict({"inner": model, "outer": nn.Linear(2, 2)})
        names = [f"inner.{name}" for name in plain_names] + ["outer.weight", "outer.bias"]
        assert list(parent.state_dict()) == names
        other = {k: v + 1 for k, v in parent.state_dict().items()}
        assert str(parent.load_state_dict(other)) == "<All keys matched successfully>"
        assert_near(values(module), [v + 1 for v in values(drawn(Net(), 7))])
        with pytest.raises(RuntimeError, match=r"Missing key[\s\S]*last\.bias"):
            parent.load_state_dict({k: v for k, v in other.items() if "last.bias" not in k})
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)

    on_workers(2, main)


@pytest.mark.parametrize("check", CHECKS)
def test_parameters_that_are_replaced(check):
    """By load_state_dict(assign=True), by another dtype: the new ones are summed."""
    x = randn(6, 5, seed=1)
    serial = drawn(Net(), 5)
    serial(x).sin().sum().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Net(torch.float32), 2), "data")
        model(share(x, worker, 3).float()).sum().backward()
        model.zero_grad()
        model.double()
        model.load_state_dict(drawn(Net(), 5).state_dict())
        model(share(x, worker, 3)).sin().sum().backward()
        results = [gradients(model)]
        model.load_state_dict(drawn(Net(), 5).state_dict(), assign=True)
        model(share(x, worker, 3)).sin().sum().backward()
        return [*results, gradients(model)]

    for results in on_workers(3, main, check=check):
        for result in results:
            assert_near(result, gradients(serial))


@pytest.mark.parametrize("check", CHECKS)
def test_parameters_that_are_converted_and_back(check):
    """Torch then has other nodes that accumulate their gradients, which hooks have to be on."""
    x = randn(6, 5, seed=1)
    serial = drawn(Net(), 5).float().double()
    serial(x).sin().sum().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 5), "data")
        model.float()
        model.double()
        model(share(x, worker, 3)).sin().sum().backward()
        return gradients(model)

    for result in on_workers(3, main, check=check):
        assert_near(result, gradients(serial))


@pytest.mark.parametrize("check", CHECKS)
def test_copies_have_sums_of_their_own(check):
    x = randn(6, 5, seed=1)
    serial = serial_run(drawn(Net(), 2), x)

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data")
        with spmd.ledger() as log:
            copied = copy.deepcopy(model)
        assert not log.workers
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        results = []
        for one in (copied, loaded):
            assert one.first.weight is not model.first.weight
            assert all(p.grad is None for p in one.parameters())
            one(share(x, worker, 3)).sin().sum().backward()
            results.append(gradients(one))
        assert all(p.grad is None for p in model.parameters())
        return results

    for results in on_workers(3, main, check=check):
        for result in results:
            assert_near(result, gradients(serial))


@pytest.mark.parametrize("check", CHECKS)
def test_a_module_in_a_later_map(check):
    """On the same mesh it works on; elsewhere it says where it was made."""
    n, x = 3, randn(7, 5, seed=1)
    mesh = spmd.Mesh(data=n)
    serial = serial_run(drawn(Net(), 2), x)

    def make(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data")
        model(share(x, worker, n)).sum().backward()
        return model

    models = on_workers(n, make, check=check, mesh=mesh)

    def use(worker):
        model = models[worker]
        model.zero_grad()
        model(share(x, worker, n)).sin().sum().backward()
        return gradients(model)

    assert_gradients(serial, n, use, check=check, mesh=mesh)
    assert_gradients(serial, n, use, check=check, mesh=spmd.Mesh(data=n))

    with pytest.raises(MeshError, match=r"worker 1[\s\S]*worker 0[\s\S]*where it was made"):
        on_workers(n, lambda worker: models[(worker + 2) % n](x), mesh=mesh)
    with pytest.raises(MeshError, match="where it was made"):
        on_workers(1, lambda worker: models[0](x))
    with pytest.raises(MeshError, match=r"outside of any body[\s\S]*no_grad"):
        models[0](x)
    with torch.no_grad():
        assert torch.equal(models[0](x), models[0].module(x))


def test_two_workers_cannot_share_a_module():
    shared = Net()
    with pytest.raises(StateError, match=r"parameters that a module[\s\S]*copy\.deepcopy"):
        on_workers(2, lambda worker: spt.data_parallel(shared, "data"))
    gc.collect()
    on_workers(1, lambda worker: spt.data_parallel(shared, "data"))


def test_modules_that_differ_are_a_mismatch():
    with pytest.raises(MismatchError, match=r"2 parameters of 18 entries[\s\S]*2 parameters of 24 entries"):
        on_workers(2, lambda worker: spt.data_parallel(nn.Linear(5 + 2 * worker, 3), "data"))
    with pytest.raises(MismatchError, match="digest"):
        on_workers(2, lambda worker: spt.data_parallel(nn.Linear(*[(5, 3), (2, 6)][worker]), "data"))


def test_what_it_refuses():
    def wrong(**options):
        return lambda worker: spt.data_parallel(nn.Linear(2, 2), "data", **options)

    with pytest.raises(MeshError, match="body"):
        spt.data_parallel(Net(), "data")
    with pytest.raises(ValueError, match=r"reduction[\s\S]*'average'[\s\S]*\"sum\"|\"mean\""):
        on_workers(1, wrong(reduction="average"))
    with pytest.raises(ValueError, match=r"init[\s\S]*\"verify\""):
        on_workers(1, wrong(init="verifi"))
    with pytest.raises(ValueError, match="bucket_bytes"):
        on_workers(1, wrong(bucket_bytes=0))
    with pytest.raises(MeshError, match=r"axis_name[\s\S]*'data'"):
        on_workers(1, lambda worker: spt.data_parallel(nn.Linear(2, 2), "dta"))
    with pytest.raises(TypeError, match=r"nn\.Module"):
        on_workers(1, lambda worker: spt.data_parallel(torch.ones(2), "data"))
    with pytest.raises(StateError, match="lazy"):
        on_workers(1, lambda worker: spt.data_parallel(nn.LazyLinear(2), "data"))

    def sparse(worker):
        model = spt.data_parallel(nn.Embedding(5, 2, sparse=True), "data")
        model(torch.tensor([1, 2])).sum().backward()

    with pytest.raises(LayoutError, match=r"weight[\s\S]*sparse=False"):
        on_workers(2, sparse)


@pytest.mark.parametrize("check", CHECKS)
def test_a_loss_outlives_its_module(check):
    """Its gradients are summed all the same."""
    x = randn(7, 5, seed=1)
    serial = serial_run(drawn(Net(), 2), x)

    def main(worker):
        net = drawn(Net(), 2)
        loss = spt.data_parallel(net, "data")(share(x, worker, 3)).sin().sum()
        gc.collect()
        loss.backward()
        return gradients(net)

    assert_gradients(serial, 3, main, check=check)


def test_nothing_is_left_when_a_module_goes():
    before = len(GRADIENT_SYNCS)

    def main(worker):
        model = spt.data_parallel(Net(), "data")
        model(spt.varying(randn(3, 5), "data")).sum().backward()
        gone = weakref.ref(model._sync)
        module = model.module
        del model
        assert gone() is None
        out = module(plain(randn(3, 5)))
        with spmd.ledger() as log:
            out.sum().backward()
        assert not log.workers
        assert not module.first.weight._post_accumulate_grad_hooks

    on_workers(2, main)
    gc.collect()
    assert len(GRADIENT_SYNCS) == before


@pytest.mark.parametrize("layer", ["lstm", "attention", "conv", "embedding"])
def test_layers_of_many_kinds(layer):
    """Both modes of checking give the gradients of one worker."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            double = {"dtype": torch.float64}
            self.layer = {
                "lstm": lambda: nn.LSTM(5, 4, num_layers=2, batch_first=True, **double),
                "attention": lambda: nn.TransformerEncoderLayer(
                    4, 2, 8, dropout=0.0, batch_first=True, norm_first=True, **double
                ),
                "conv": lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 3, 3, **double)),
                "embedding": lambda: nn.Embedding(11, 4, padding_idx=0, **double),
            }[layer]()

        def forward(self, x):
            y = self.layer(x)
            return y[0] if layer == "lstm" else y

    shape = {"lstm": (7, 6, 5), "attention": (7, 6, 4), "conv": (7, 6, 5), "embedding": (7, 3)}[layer]
    x = randn(*shape, seed=1)
    if layer == "embedding":
        x = (x * 3).long().abs() % 11
    serial = serial_run(drawn(Model(), 2), x)

    for check in CHECKS:

        def main(worker):
            model = spt.data_parallel(drawn(Model(), 2), "data", bucket_bytes=SMALL)
            model(share(x, worker, 3)).sin().sum().backward()
            return gradients(model)

        assert_gradients(serial, 3, main, check=check)


def test_a_compiled_module():
    """torch.compile of the module, and of what data_parallel gives."""
    n, x = 2, randn(8, 5, seed=1)
    serial = serial_run(drawn(Net(), 2), x)
    lock = threading.Lock()
    seen = []

    def backend(graph, inputs):
        seen.append(len(inputs))
        return graph

    def main(worker):
        results = []
        for compiles_result in (False, True):
            module = drawn(Net(), 2)
            with lock:  # torch's compiler is not for several threads at once
                if not compiles_result:
                    module = torch.compile(module, backend=backend)
            model = spt.data_parallel(module, "data")
            called = torch.compile(model, backend=backend) if compiles_result else model
            y = share(x, worker, n)
            with lock:
                out = called(y)
            out.sin().sum().backward()
            results.append(gradients(model))
        return results

    for results in on_workers(n, main, check=False):
        for result in results:
            assert_near(result, gradients(serial))
    assert len(seen) >= 2
