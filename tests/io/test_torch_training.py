"""What training of PyTorch keeps besides parameters: optimisers, schedulers, scalers, random generators and samplers.

A run that stops and goes on, on another mesh too, makes the steps that it would have made there.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest
from mistakes import parsed

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.optim import lr_scheduler as lr  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import CheckpointError  # noqa: E402
from spmd.io.reading import read_manifest  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.host("tensors of these tests lie on the host")]


def on(body, axes: dict[str, int], *args) -> Any:
    mesh = spmd.Mesh(transport="local", scheduler="threads", **axes)
    return spt.map(body, (P(),) * len(args), None, mesh=mesh)(*args)


# Optimisers


class Net(nn.Module):
    """Layers in blocks over one axis, a parameter over both, and replicated ones. All names are those of one worker."""

    def __init__(self) -> None:
        super().__init__()
        with spt.drawing(0):
            self.up = spt.nn.Linear(4, 7, w_spec=P("a"), dtype=torch.float64)
            self.down = spt.nn.Linear(7, 3, w_spec=P(None, "a"), dtype=torch.float64)
            self.last = nn.Linear(3, 3, dtype=torch.float64)
            self.table = spt.Parameter(nn.init.normal_(torch.empty(5, 6, dtype=torch.float64)), P("b", "a"))
            self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)

    def loss(self) -> torch.Tensor:
        x = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)
        y = self.last(torch.tanh(self.down(torch.tanh(self.up(x)))))
        return (y - x[:, :3] ** 2).square().mean() + 0.1 * (self.table * self.table).sum()


def groups(net: Net) -> list[dict[str, Any]]:
    """Two groups; parameters of each are not in the order of the module."""
    matrices = [p for p in net.parameters() if p.ndim == 2]
    return [{"params": matrices[::-1]}, {"params": [p for p in net.parameters() if p.ndim != 2], "lr": 0.02}]


def muon(net: Net):
    return torch.optim.Muon([p for p in net.parameters() if p.ndim == 2], lr=0.01)


OPTIMIZERS = {
    "sgd": lambda net: torch.optim.SGD(groups(net), lr=0.1),
    "momentum": lambda net: torch.optim.SGD(groups(net), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda net: torch.optim.Adam(groups(net), lr=0.1, amsgrad=True, betas=(0.8, 0.95)),
    "adamw loops": lambda net: torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False),
    "adam tensor": lambda net: torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1), foreach=False),
    "adamax": lambda net: torch.optim.Adamax(groups(net), lr=0.1),
    "adadelta": lambda net: torch.optim.Adadelta(groups(net)),
    "adafactor": lambda net: torch.optim.Adafactor(groups(net), lr=0.1),
    "adagrad": lambda net: torch.optim.Adagrad(groups(net), lr=0.1, lr_decay=0.1),
    "asgd": lambda net: torch.optim.ASGD(groups(net), lr=0.1, t0=2),
    "lbfgs": lambda net: torch.optim.LBFGS([p for p in net.parameters() if p.requires_grad], max_iter=2),
    "nadam": lambda net: torch.optim.NAdam(groups(net), lr=0.1),
    "radam": lambda net: torch.optim.RAdam(groups(net), lr=0.1),
    "rmsprop": lambda net: torch.optim.RMSprop(groups(net), lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda net: torch.optim.Rprop(groups(net), lr=0.01),
    **({"muon": muon} if hasattr(torch.optim, "Muon") else {}),
}
MESHES = [{"a": 2, "b": 2}, {"a": 3, "b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 4}, {"a": 4, "b": 2}]


def steps(net: Net, optimizer: Any, n: int) -> list[float]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net.loss()
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(n)]


def drawn(name: str) -> list[tuple[dict[str, int], dict[str, int]]]:
    """A pair of meshes for each optimiser; with -m full all pairs."""
    at = zlib.crc32(name.encode())
    src = MESHES[at % len(MESHES)]
    rest = [m for m in MESHES if m != src]
    return [(src, rest[at // 7 % len(rest)])]


ALL_PAIRS = [(name, a, b) for name in OPTIMIZERS for a in MESHES for b in MESHES]
CASES = [(name, *pair) for name in OPTIMIZERS for pair in drawn(name)]
CASES = [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in ALL_PAIRS if case not in CASES)]


@pytest.mark.parametrize(("name", "src", "dst"), CASES)
def test_an_optimizer_goes_on_on_another_mesh(name, src, dst, tmp_path):
    """3 steps, saved, loaded elsewhere, and 3 steps are 6 steps there."""
    make = OPTIMIZERS[name]

    def whole_run():
        net = Net()
        return steps(net, make(net), 6), spt.state_dict(net)

    def first_half():
        net = Net()
        optimizer = make(net)
        losses = steps(net, optimizer, 3)
        spmd.save(tmp_path, {"net": net, "optimizer": optimizer})
        return losses

    def second_half():
        net = Net()
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.5)
        optimizer = make(net)
        kinds = {}
        spmd.load(tmp_path, like={"net": net, "optimizer": optimizer})
        for p, state in optimizer.state.items():
            for key, x in state.items():
                if isinstance(x, torch.Tensor):
                    kinds[key] = x.dtype
                    if x.shape == p.shape and name != "lbfgs":
                        assert getattr(x, "block_layout", None) == getattr(p, "block_layout", None)
        return steps(net, optimizer, 3), spt.state_dict(net), kinds

    losses = on(first_half, src)
    more, parameters, kinds = on(second_half, dst)
    expected, expected_parameters = on(whole_run, dst)
    tolerance = 1e-3 if name == "muon" else 1e-12  # its iteration runs in bfloat16
    assert losses + more == pytest.approx(expected, rel=tolerance, abs=tolerance)
    for key, x in expected_parameters.items():
        assert torch.allclose(parameters[key], x, rtol=tolerance, atol=tolerance), key
    if name != "sgd":
        assert kinds
    if name == "adam":
        assert kinds["step"] == torch.float32  # as the optimiser makes it


@pytest.mark.parametrize("check", [True, False])
def test_data_parallel_training_goes_on(check, tmp_path):
    """Bodies that do not track states too."""
    x = torch.linspace(-1, 1, 39, dtype=torch.float64).reshape(13, 3)

    def make():
        with spt.drawing(0):
            net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        model = spt.data_parallel(net, "d")
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.05)}

    def train(x, state, n):
        losses = []
        for _ in range(n):
            state["optimizer"].zero_grad()
            loss = spt.mean((state["model"](x) - x[:, :2] ** 2) ** 2, "d")
            loss.backward()
            state["optimizer"].step()
            losses.append(loss.item())
        return losses

    def first(x):
        state = make()
        losses = train(x, state, 3)
        spmd.save(tmp_path, state)
        return losses

    def second(x):
        state = make()
        spmd.load(tmp_path, like=state)
        return train(x, state, 3)

    def mapped(body, **axes):
        mesh = spmd.Mesh(transport="local", scheduler="threads", **axes)
        return spt.map(body, P("d"), None, mesh=mesh, check=check)(x)

    losses = mapped(first, d=2, e=2) + mapped(second, d=3)
    assert losses == pytest.approx(mapped(lambda x: train(x, make(), 6), d=3), rel=1e-12)
    serial = {"model": nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()}
    serial["optimizer"] = torch.optim.Adam(serial["model"].parameters())
    spmd.load(tmp_path, like=serial)  # under the same names
    assert len(serial["optimizer"].state) == 4


def test_hyperparameters_groups_and_names(tmp_path):
    """Those that were saved; how steps are computed is the optimiser's own."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    saved = torch.optim.Adam(
        [{"params": net[0].parameters(), "lr": 0.5, "note": "first"}, {"params": [net[1].bias]}],
        betas=(0.5, 0.75),
        maximize=True,
    )
    net(torch.ones(2, 2)).sum().backward()
    saved.step()
    spmd.save(tmp_path, {"net": net, "optimizer": saved})
    node = json.loads((tmp_path / "manifest.json").read_bytes())["tree"]["dict"][1][1]["dict"]
    assert [key for key, _ in node[0][1]["dict"]] == ["0.weight", "0.bias", "1.bias"]
    other = torch.optim.Adam([{"params": net[0].parameters()}, {"params": [net[1].bias]}], foreach=False)
    spmd.load(tmp_path, like={"net": net, "optimizer": other})
    assert [g["lr"] for g in other.param_groups] == [0.5, 0.001]
    assert other.param_groups[0]["note"] == "first"
    assert all(g["betas"] == (0.5, 0.75) and g["maximize"] and g["foreach"] is False for g in other.param_groups)
    assert set(other.state) == {*net[0].parameters(), net[1].bias}


@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    [
        ({}, {"fused": True}, torch.float32),
        ({"fused": True}, {"foreach": False}, torch.float64),
        ({"foreach": True}, {}, torch.bfloat16),
    ],
)
def test_steps_are_computed_as_the_optimizer_was_made_to(before, after, dtype, tmp_path):
    def train(net, optimizer, n):
        for k in range(n):
            optimizer.zero_grad()
            net(torch.full((4, 3), 1.0 + k, dtype=dtype)).square().sum().backward()
            optimizer.step()

    net, other = nn.Linear(3, 2, dtype=dtype), nn.Linear(3, 2, dtype=dtype)
    saved = torch.optim.AdamW(net.parameters(), lr=0.1, **before)
    train(net, saved, 3)
    spmd.save(tmp_path, {"net": net, "optimizer": saved})
    loaded = torch.optim.AdamW(other.parameters(), **after)
    spmd.load(tmp_path, like={"net": other, "optimizer": loaded})
    train(net, saved, 2)
    train(other, loaded, 2)
    assert torch.allclose(net.weight, other.weight, rtol=1e-6)
    state = loaded.state[other.weight]
    assert (state["step"].dtype, state["exp_avg"].dtype) == (torch.float32, dtype)
    assert {key: loaded.param_groups[0][key] for key in after} == after


def test_an_object_that_is_not_renamed_is_refused(tmp_path):
    net = nn.Linear(2, 2)
    spmd.save(tmp_path, {"old": torch.optim.SGD(net.parameters())})
    like = {"new": torch.optim.SGD(net.parameters())}
    spmd.load(tmp_path, like=like, rename=lambda name: name.replace("new", "old"))
    with pytest.raises(CheckpointError) as caught:
        spmd.load(tmp_path, like=like, rename=lambda name: name.replace("new.", "old."), strict=False)
    message = parsed(caught.value)
    assert "the object 'new'" in message.head
    assert "no tree 'new'" in message.got
    assert "rename=" in message.mend


def test_parameters_of_several_modules_have_the_names_of_these(tmp_path):
    def make():
        return {"g": nn.Linear(2, 2), "d": nn.Linear(2, 2)}

    def optimizer(tree):
        return torch.optim.SGD([*tree["g"].parameters(), *tree["d"].parameters()], momentum=0.5)

    tree = make()
    tree["optimizer"] = optimizer(tree)
    tree["g"](tree["d"](torch.ones(1, 2))).sum().backward()
    tree["optimizer"].step()
    spmd.save(tmp_path, tree)
    assert "optimizer.state.d.weight.momentum_buffer" in read_manifest(tmp_path).arrays
    other = make()
    # In another order: the names tell.
    other["optimizer"] = torch.optim.SGD([*other["d"].parameters(), *other["g"].parameters()], momentum=0.5)
    spmd.load(tmp_path, like=other)
    for one, two in zip(tree["g"].parameters(), other["g"].parameters(), strict=True):
        buffers = tree["optimizer"].state[one]["momentum_buffer"], other["optimizer"].state[two]["momentum_buffer"]
        assert torch.equal(*buffers)


@pytest.mark.parametrize("named", [False, True])
def test_an_optimizer_without_its_module(named, tmp_path):
    """The names that it was made with, else numbers."""
    net = nn.Linear(2, 2)
    parameters = [*net.named_parameters()] if named else [*net.parameters()]
    if named and "param_names" not in torch.optim.SGD(parameters).param_groups[0]:
        pytest.skip("this version of torch has no names of parameters")
    optimizer = torch.optim.SGD(parameters, momentum=0.5)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    spmd.save(tmp_path, optimizer)
    first = "weight" if named else "0"
    assert f"state.{first}.momentum_buffer" in read_manifest(tmp_path).arrays
    other = torch.optim.SGD(parameters, momentum=0.5)
    spmd.load(tmp_path, like=other)
    assert torch.equal(other.state[net.weight]["momentum_buffer"], optimizer.state[net.weight]["momentum_buffer"])


def test_a_state_of_other_parameters_is_refused(tmp_path):
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    saved = torch.optim.Adam(net["a"].parameters())
    net["a"](torch.ones(1, 2)).sum().backward()
    saved.step()
    spmd.save(tmp_path, {"net": net, "optimizer": saved})
    other = torch.optim.Adam([net["a"].weight, *net["b"].parameters()])
    with pytest.raises(CheckpointError) as caught:
        spmd.load(tmp_path, like={"net": net, "optimizer": other})
    got = parsed(caught.value).got
    assert "missing in the checkpoint: 'optimizer.param_groups.0.params.b.weight'" in got
    assert "unexpected there: 'optimizer.state.a.bias.step'" in got
    assert not other.state
    spmd.load(tmp_path, like={"net": net, "optimizer": other}, strict=False)
    assert set(other.state) == {net["a"].weight}
    fresh = torch.optim.Adam(net["a"].parameters())
    spmd.load(tmp_path, like={"net": net, "optimizer": fresh}, names="net.*")
    assert not fresh.state
    spmd.save(tmp_path, {"net": net, "optimizer": fresh})  # without a state
    spmd.load(tmp_path, like={"net": net, "optimizer": saved})
    assert not saved.state


def test_sparse_gradients(tmp_path):
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    spmd.save(tmp_path, {"net": table, "optimizer": optimizer})
    other = torch.optim.SparseAdam(table.parameters())
    spmd.load(tmp_path, like={"net": table, "optimizer": other})
    assert torch.equal(other.state[table.weight]["exp_avg"], optimizer.state[table.weight]["exp_avg"])


# Learning rates


class Warmup:
    """A factor with a state, which `LambdaLR` saves."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, epoch: int) -> float:
        return min(1.0, (epoch + 1) / self.length)


def sequence(o):
    return lr.SequentialLR(o, [lr.ConstantLR(o, 0.1, 2), lr.ExponentialLR(o, 0.9)], milestones=[2])


SCHEDULERS = {
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.1, 4), lr.ExponentialLR(o, 0.9)]),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.5, 4),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr.LambdaLR(o, Warmup(5)),
    "LinearLR": lambda o: lr.LinearLR(o, 0.1, total_iters=6),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 4, 4, 5]),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda epoch: 0.9),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.5, total_steps=12),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 8, 2.0),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "SequentialLR": sequence,
    "StepLR": lambda o: lr.StepLR(o, 2),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 4),
    "nested": lambda o: lr.SequentialLR(o, [sequence(o), lr.MultiStepLR(o, [1, 2])], milestones=[4]),
}


def test_every_scheduler_is_tried():
    known = {
        name
        for name in dir(lr)
        if isinstance(getattr(lr, name), type) and issubclass(getattr(lr, name), lr.LRScheduler)
    }
    assert known - {"LRScheduler", "_LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:The epoch parameter")
def test_a_scheduler_goes_on(name, tensor, tmp_path):
    def make():
        p = nn.Parameter(torch.ones(2))
        rate = torch.tensor(0.1, dtype=torch.float64) if tensor else 0.1
        optimizer = torch.optim.SGD([p], lr=rate)
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer, scheduler, n, at=0):
        values = []
        for k in range(n):
            optimizer.step()
            scheduler.step(*([max(0.2, 1 - 0.3 * (at + k))] if name == "ReduceLROnPlateau" else []))
            values.append(float(optimizer.param_groups[0]["lr"]))
        return values

    def train():
        optimizer, scheduler = make()
        before = rates(optimizer, scheduler, 4)
        spmd.save(tmp_path, {"optimizer": optimizer, "scheduler": scheduler})
        return before

    def go_on():
        optimizer, scheduler = make()
        spmd.load(tmp_path, like={"optimizer": optimizer, "scheduler": scheduler})
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) == tensor
        return rates(optimizer, scheduler, 6, 4)

    expected = rates(*make(), 10)
    assert on(train, {"a": 2}) + on(go_on, {"a": 3}) == expected
    assert len(set(expected)) > 1


# Scalers, random numbers, samplers


def test_a_scaler_goes_on(tmp_path):
    def train():
        scaler = spt.GradScaler(init_scale=64.0, growth_interval=2)
        p = spt.Parameter(torch.ones(4), P("a"))
        optimizer = torch.optim.SGD([p], lr=0.1)
        for factor in (1.0, 1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale((p * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        state = scaler.state_dict()
        off = spt.GradScaler(enabled=False)
        spmd.save(tmp_path, {"scaler": scaler, "off": off, "torchs": torch.amp.GradScaler("cpu", init_scale=32.0)})
        return state

    def load():
        tree = {"scaler": spt.GradScaler(), "off": spt.GradScaler(enabled=False), "torchs": torch.amp.GradScaler("cpu")}
        spmd.load(tmp_path, like=tree)
        return tree["scaler"].state_dict(), tree["torchs"].get_scale()

    saved = on(train, {"a": 2})
    assert (saved["scale"], saved["_growth_tracker"]) == (64.0, 1)
    assert on(load, {"a": 3}) == (saved, 32.0)


def test_random_numbers_go_on(tmp_path):
    """The generator of a program, that of the worker, which torch's functions and `spt.drawing` use, and dropout."""

    def numbers(generator):
        with spt.drawing():
            drawn = torch.rand(3)
        return [torch.rand(2, generator=generator), torch.randn(2), nn.functional.dropout(torch.ones(20)), drawn]

    def train():
        generator = torch.Generator().manual_seed(3)
        numbers(generator)
        spmd.save(tmp_path, {"generator": generator, "worker": torch.get_rng_state()})
        return numbers(generator)

    def go_on():
        generator = torch.Generator()
        tree = spmd.load(tmp_path, like={"generator": generator, "worker": torch.get_rng_state()})
        torch.set_rng_state(tree["worker"])
        return numbers(generator)

    torch.manual_seed(5)
    expected = on(train, {"a": 2})
    torch.manual_seed(6)
    assert all(torch.equal(x, y) for x, y in zip(on(go_on, {"a": 3}), expected, strict=True))


def test_a_generator_of_another_device_is_refused(tmp_path):
    spmd.save(tmp_path, {"g": torch.Generator()})
    manifest = read_manifest(tmp_path)
    text = json.loads(json.dumps(manifest.tree).replace('"cpu"', '"cuda"'))
    manifest.tree = text
    (tmp_path / "manifest.json").write_bytes(manifest.to_bytes())
    with pytest.raises(CheckpointError) as caught:
        spmd.load(tmp_path, like={"g": torch.Generator()})
    message = parsed(caught.value)
    assert "'g'" in message.head
    assert "a generator on cpu, for the state of one on cuda" in message.got
    assert "torch.Generator('cuda')" in message.mend


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, k: int) -> int:
        return k


@pytest.mark.parametrize("processes", [0, 1])
def test_a_sampler_goes_on_within_an_epoch(processes, tmp_path):
    """On another mesh too, and whatever a process has read ahead."""

    def epoch(sampler, number, stop=None):
        sampler.set_epoch(number)
        seen = []
        for k, x in enumerate(sampler.loader(num_workers=processes)):
            seen.append(sorted(spt.all_gather(x, "a", tiled=True, to="invariant").tolist()))
            if k + 1 == stop:
                break
        return seen

    def train():
        sampler = spt.DistributedSampler(Numbers(), batch_size=5, axis_name="a")
        epoch(sampler, 0)
        seen = epoch(sampler, 1, 2)
        spmd.save(tmp_path, {"sampler": sampler})
        return seen

    def go_on():
        sampler = spt.DistributedSampler(Numbers(), batch_size=5, axis_name="a")
        spmd.load(tmp_path, like={"sampler": sampler})
        return epoch(sampler, sampler.epoch) + epoch(sampler, sampler.epoch + 1)

    def whole():
        sampler = spt.DistributedSampler(Numbers(), batch_size=5, axis_name="a")
        return epoch(sampler, 1) + epoch(sampler, 2)

    assert on(train, {"a": 2}) + on(go_on, {"a": 3, "b": 1}) == on(whole, {"a": 1})


def test_a_sampler_of_another_order_is_refused(tmp_path):
    spmd.save(tmp_path, spt.DistributedSampler(Numbers(), 1, 0, batch_size=5))
    with pytest.raises(ValueError, match=r"state_dict\['seed'\]"):
        spmd.load(tmp_path, like=spt.DistributedSampler(Numbers(), 1, 0, batch_size=5, seed=1))
