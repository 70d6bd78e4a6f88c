"""States of tensors do not depend on sources of data, gradient modes and layers: reductions give the truth."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset, TensorDataset  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.bridge.torch.tensor_state import state_of_tensor  # noqa: E402

pytestmark = pytest.mark.host("a body makes its tensors on the host")


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def on_workers(n, main, *, mesh=None):
    """Run main on every worker of n along `data`; what each returned, in their order."""
    result = {}
    mesh = mesh or spmd.Mesh(data=n)

    def body():
        index = tuple(spt.worker_index(name) for name in mesh.axes)
        result[index] = main()

    spt.map(body, (), None, mesh=mesh)()
    return [result[k] for k in sorted(result)]


# Gradient modes x sources of data x reductions x layers


def linear():
    net = nn.Linear(3, 3, dtype=torch.float64)
    net.load_state_dict({"weight": randn(3, 3, seed=5), "bias": randn(3, seed=6)})
    return net


def frozen():
    return linear().requires_grad_(False)


def evaluated():
    return nn.Sequential(linear(), nn.Dropout(0.5), nn.BatchNorm1d(3, dtype=torch.float64)).eval()


def without_parameters():
    return nn.Tanh()


def functional(x, net):
    parameters = {k: p.detach() for k, p in net.named_parameters()}
    return torch.func.functional_call(net, parameters, (x,))


MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
}
LAYERS = {"linear": linear, "frozen": frozen, "eval": evaluated, "none": without_parameters}
PARALLEL = {
    "module": lambda net: net,
    "data_parallel": lambda net: spt.data_parallel(net, "data"),
    "functional_call": lambda net: lambda x: functional(x, net),
    "vmap": lambda net: lambda x: torch.func.vmap(lambda row: net(row[None])[0])(x),
    "func.vjp": lambda net: lambda x: torch.func.vjp(net, x)[0],
}
REDUCTIONS = {
    "mean": (lambda y: spt.mean(y, "data"), lambda y: y.mean()),
    "sum": (lambda y: spt.sum(y, "data"), lambda y: y.sum()),
    "max": (lambda y: spt.max(y, "data"), lambda y: y.max()),
    "min": (lambda y: spt.min(y, "data"), lambda y: y.min()),
    "pmean": (lambda y: spt.pmean(y.mean(), "data"), lambda y: y.mean()),
    "psum": (lambda y: spt.psum(y.sum(), "data"), lambda y: y.sum()),
    "pmax": (lambda y: spt.pmax(y.max(), "data"), lambda y: y.max()),
    "pmin": (lambda y: spt.pmin(y.min(), "data"), lambda y: y.min()),
}
ROWS, WORKERS = 6, 3


def loaded(x, block):
    sampler = spt.DistributedSampler(TensorDataset(x), batch_size=ROWS, shuffle=False, axis_name="data")
    ((inputs,),) = list(sampler.loader())
    return inputs


def declared(x, block):
    k = spt.worker_index("data")
    return spt.varying(x[2 * k : 2 * k + 2], "data")


SOURCES = {"loader": loaded, "varying": declared, "argument": lambda x, block: block}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("layer", "how"), list(itertools.product(LAYERS, PARALLEL)))
def test_what_is_reduced_is_the_same_in_every_mode(mode, source, layer, how):
    """A reduction over the workers of what a module makes of a worker's rows is that over all rows."""
    x = randn(ROWS, 3)
    expected = {name: serial(LAYERS[layer]()(x)).item() for name, (_, serial) in REDUCTIONS.items()}
    built = {}

    def body(block):
        net = LAYERS[layer]()
        if how == "data_parallel" and not list(net.parameters()):
            net = nn.Sequential(net, nn.Linear(3, 3, dtype=torch.float64).requires_grad_(False))
            nn.init.eye_(net[1].weight), nn.init.zeros_(net[1].bias)
        net = PARALLEL[how](net)
        with MODES[mode]():
            y = net(SOURCES[source](x, block))
            assert state_of_tensor(y).varying == {"data"}
            built[spt.worker_index("data")] = {k: f(y).detach().item() for k, (f, _) in REDUCTIONS.items()}

    spt.map(body, P("data"), None, mesh=spmd.Mesh(data=WORKERS))(x)
    for result in built.values():
        assert result == pytest.approx(expected, abs=1e-12)


def test_the_loss_of_an_evaluation():
    """The value without gradients is the one with them, and the truth."""
    x, t = randn(32, 3, seed=1), randn(32, 1, seed=2)
    weights = linear().state_dict()

    def main():
        net = nn.Linear(3, 1, dtype=torch.float64)
        net.load_state_dict({"weight": weights["weight"][:1], "bias": weights["bias"][:1]})
        model = spt.data_parallel(net, "data")
        sampler = spt.DistributedSampler(TensorDataset(x, t), batch_size=32, axis_name="data")
        values = {}
        for name, mode in MODES.items():
            with mode():
                for a, b in sampler.loader():
                    values[name] = float(spt.mean((model(a) - b) ** 2, "data").detach())
        return values

    truth = float(((x @ weights["weight"][:1].T + weights["bias"][:1] - t) ** 2).mean())
    for result in on_workers(2, main):
        assert result == pytest.approx(dict.fromkeys(MODES, truth), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_every_result_of_data_parallel_varies(mode):
    """Nested results, and those that no data of the worker went into."""
    Pair = collections.namedtuple("Pair", "a b")

    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.register_buffer("table", torch.ones(2))

        def forward(self, x):
            return {"w": self.w, "deep": [Pair(x, self.table), (self.w.sum(), "text", 3)]}

    def main():
        model = spt.data_parallel(Many(), "data")
        with MODES[mode]():
            out = model(torch.ones(2))
        result = [out["w"], *out["deep"][0], out["deep"][1][0]]
        assert out["deep"][1][1:] == ("text", 3)
        return [state_of_tensor(x).varying for x in result]

    assert on_workers(2, main) == [[{"data"}] * 4] * 2


# Batches of loaders


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str


class Nested(Dataset):
    """Samples of dicts, tuples and numbers."""

    def __len__(self):
        return 11

    def __getitem__(self, k):
        return {"x": torch.full((2,), float(k)), "pair": (k, {"y": torch.tensor(k)}), "name": str(k)}


def as_dataclass(samples):
    return Sample(torch.stack([s["x"] for s in samples]) if samples else torch.zeros(0, 2), "name")


def tensors(x):
    return [y for y in torch.utils._pytree.tree_leaves(x) if isinstance(y, torch.Tensor)]


LOADERS = {
    "loader": lambda data, s, **more: s.loader(**more),
    "batches": lambda data, s, **more: DataLoader(data, batch_sampler=s.batches, collate_fn=spt.Collate(data), **more),
    "batch_size": lambda data, s, **more: DataLoader(data, batch_size=s.local_batch_size, sampler=s, **more),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", LOADERS)
def test_batches_of_loaders_vary(how, workers):
    """Whole ones and the last, short one, by processes that read ahead too, for several epochs."""
    more = {"num_workers": workers, "persistent_workers": True} if workers else {}

    def main():
        sampler = spt.DistributedSampler(Nested(), batch_size=4, axis_name="data")
        loader = LOADERS[how](sampler.dataset, sampler, **more)
        seen = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in loader:
                assert [state_of_tensor(x).varying for x in tensors(batch)] == [{"data"}] * 3
                assert [type(n) for n in batch["name"]] == [str] * len(batch["x"])
                seen.append(int(spt.sum(batch["x"][:, 0], "data")))
        return sum(seen), len(seen)

    assert on_workers(2, main) == [(2 * sum(range(11)), 6)] * 2


def test_batches_of_no_samples_of_dataclasses_and_of_several_axes():
    def main():
        sampler = spt.DistributedSampler(Nested(), batch_size=3, axis_name=("data", "more"))
        batches = list(DataLoader(sampler.dataset, batch_sampler=sampler.batches, collate_fn=as_dataclass))
        assert all(isinstance(b, Sample) and b.name == "name" for b in batches)
        return [state_of_tensor(b.x).varying for b in batches], sum(len(b.x) for b in batches)

    result = on_workers(4, main, mesh=spmd.Mesh(data=2, more=2, other=1))
    assert [states for states, _ in result] == [[{"data", "more"}] * 4] * 4
    assert sum(n for _, n in result) == 11


def test_outside_of_bodies_and_without_checks_batches_are_plain():
    sampler = spt.DistributedSampler(Nested(), num_replicas=2, rank=0, batch_size=4)
    assert {type(x) for batch in sampler.loader() for x in tensors(batch)} == {torch.Tensor}

    def body():
        loader = spt.DistributedSampler(Nested(), batch_size=4, axis_name="data").loader()
        assert {type(x) for batch in loader for x in tensors(batch)} == {torch.Tensor}

    spt.map(body, (), None, mesh=spmd.Mesh(data=2), check=False)()
