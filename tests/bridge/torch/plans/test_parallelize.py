"""Plain modules of torch, split by plans, train as on one worker."""

from __future__ import annotations

import copy
import sys

import pytest

torch = pytest.importorskip("torch")

from launch import PROGRAMS, TORCHRUN, launch, mpiexec  # noqa: E402
from torch import nn  # noqa: E402

import spmd  # noqa: E402
from bridge.torch.plans.plain_models import FNO, GPT, ResNet, Translator, UNet  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError, MeshError, SpecError, StateError  # noqa: E402

pytestmark = pytest.mark.torch

MESHES = [{"data": 1, "model": 4}, {"data": 4, "model": 1}, {"data": 2, "model": 2}]
LANGUAGE = {
    "*.attn": spt.heads("model"),
    "*.up": spt.column("model"),
    "*.down": spt.row("model"),
    "embed": spt.vocab("model"),
    "head": spt.vocab("model"),
}
SEQUENCE = LANGUAGE | {
    "*.down": spt.row("model", sequence=1),
    "norm*": spt.sequence("model"),
}
TRANSLATION = {
    "*.self_attn": spt.heads("model"),
    "*.multihead_attn": spt.heads("model"),
    "linear1": spt.column("model"),
    "linear2": spt.row("model"),
    "embed": spt.vocab("model"),
    "head": spt.column("model"),
}
ROWS = spt.spatial(P("data", None, "model"))
CHANNELS = {"*.conv1": spt.column("model"), "*.conv2": spt.row("model"), "fc": spt.row("model")}


def words(*shape: int) -> torch.Tensor:
    return torch.randint(1, 11, shape, generator=torch.Generator().manual_seed(sum(shape)))


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


SOURCE = words(5, 6)
SOURCE[1, 4:] = 0  # padding
CASES = {
    "translator": (Translator, TRANSLATION, (SOURCE, words(5, 7), words(5, 7))),
    "gpt": (GPT, LANGUAGE, (words(5, 7), words(5, 7))),
    "gpt by positions": (GPT, SEQUENCE, (words(5, 7), words(5, 7))),
    "gpt of grouped heads": (lambda: GPT(width=24, heads=6, kv_heads=2), LANGUAGE, (words(5, 7), words(5, 7))),
    "resnet by rows": (ResNet, {"conv1": ROWS}, (image(3, 3, 37, 41), words(3) % 5)),
    "resnet by channels": (ResNet, CHANNELS, (image(3, 3, 37, 41), words(3) % 5)),
    "unet": (UNet, {"enter": ROWS}, (image(3, 1, 24, 20), words(3, 24, 20) % 3)),
    "fno": (FNO, {"lift": ROWS}, (image(3, 1, 12, 14), image(3, 1, 12, 15)[..., :14])),
}


def train(net: nn.Module, args: tuple, steps: int) -> list[float]:
    """The losses of steps of AdamW, and then in evaluation, with and without gradients."""
    # Gradients that are zero but for rounding, as of a bias before a norm, stay small beside eps.
    eps = 1e-3 if any(p.dtype is torch.float32 for p in net.parameters()) else 1e-6
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, eps=eps)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(*args)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    net.eval()
    losses.append(net(*args).item())
    with torch.no_grad():
        losses.append(net(*args).item())
    return losses


def compare(name: str, axes: dict[str, int], dtype: torch.dtype, tolerance: float, steps: int, check: bool) -> None:
    make, plan, args = CASES[name]
    torch.manual_seed(0)
    net = make()
    for p in net.parameters():
        p.data = p.data.to(dtype.to_complex() if p.is_complex() else dtype)
    for b in net.buffers():
        b.data = b.data.to(dtype) if b.is_floating_point() else b.data
    args = tuple(x.to(dtype) if x.is_floating_point() else x for x in args)
    whole = copy.deepcopy(net)
    expected = train(whole, args, steps)

    def main():
        split = spt.parallelize(net, plan)
        given = [spt.put(x, P("data")) for x in args]
        return train(split, given, steps), spt.state_dict(split)

    losses, state = spt.map(main, (), None, mesh=spmd.Mesh(**axes), check=check)()
    assert list(state) == list(whole.state_dict())
    for a, b in zip(losses, expected, strict=True):
        assert abs(a - b) <= tolerance * abs(b)
    for key, value in whole.state_dict().items():
        apart = (state[key] - value).abs().max().item()
        assert apart <= tolerance * value.abs().max().item(), (key, apart)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_ten_steps_equal_those_of_one_worker(name, axes):
    compare(name, axes, torch.float64, 1e-10, 10 if name == "gpt" else 3, check=True)


@pytest.mark.parametrize("name", CASES)
def test_bodies_of_plain_tensors(name):
    compare(name, MESHES[2], torch.float64, 1e-10, 2, check=False)


@pytest.mark.full
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("axes", [*MESHES, {"data": 1, "model": 3}, {"data": 3, "model": 2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_ten_steps_on_any_mesh(name, axes, dtype, check):
    compare(name, axes, dtype, 1e-10 if dtype is torch.float64 else 1e-4, 10, check)


@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_in_short_numbers(name):
    compare(name, MESHES[2], torch.float32, 1e-4, 3, check=True)


# Wrong plans


def run(f, check=True, **axes):
    return spt.map(f, (), None, mesh=spmd.Mesh(**(axes or {"model": 2})), check=check)()


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"*.atn": spt.heads("model")}, ["'*.atn'", "matches no module", "blocks.0"]),
        ({"blocks": spt.column("model")}, ["'blocks'", "nn.Linear", "blocks.0.attn.c_attn"]),
        ({"*.up": "column"}, ["'*.up'", "spt.column"]),
        ({"embed": spt.vocab("model"), "head": spt.row("model")}, ["'weight'", "split otherwise", "share"]),
        ({"norm1": spt.heads("model")}, ["spt.heads", "qkv="]),
        ({"*.attn": spt.heads("model", count=5)}, ["count", "5 heads"]),
        ({"*.up": spt.column("modle")}, ["'modle'"]),
        ({"*.up": spt.column("model", parts=5)}, ["parts", "48"]),
    ],
)
def test_wrong_plans_raise_where_they_are_applied(plan, words):
    with pytest.raises((LayoutError, MeshError, SpecError)) as caught:
        run(lambda: spt.parallelize(GPT(), plan))
    for word in words:
        assert word in str(caught.value)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.mix = nn.Linear(4, 8), Mix()

    def forward(self, x):
        return self.mix(self.up(x))


class Mix(nn.Module):
    def forward(self, x):
        return x.cumsum(-1)


def test_a_function_of_split_dimensions_names_its_module_and_the_styles_that_would_do():
    x = torch.randn(3, 4)
    with pytest.raises(LayoutError) as caught:
        run(lambda: spt.parallelize(Odd(), {"up": spt.column("model")})(x))
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    for word in ("cumsum", "'mix' (Mix)", "spt.whole()", "P(None, 'model')"):
        assert word in text

    def mended():
        with spt.drawing(0):
            net = Odd()
        return spt.parallelize(net, {"up": spt.column("model"), "mix": spt.whole()})(x), net(x)

    a, b = run(mended)
    assert torch.allclose(a, b)


def test_blocks_need_specs():
    x = torch.randn(6, 4)

    def main(block):
        with pytest.raises(StateError, match="in_specs"):
            spt.parallelize(nn.Linear(4, 4), {})(block)
        with spt.drawing(0):
            net = nn.Linear(4, 4)
        y = spt.parallelize(net, {}, in_specs=P("data"), out_specs=P("data"))(block)
        return y, net(x)

    y, whole = spt.map(main, P("data"), (P("data"), P()), mesh=spmd.Mesh(data=4))(x)
    assert torch.allclose(y, whole)


def test_the_module_that_is_given_stays_as_it_was():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    before = copy.deepcopy(net.state_dict())

    def main():
        split = spt.parallelize(net, {"0": spt.column("model"), "2": spt.row("model")})
        split(torch.ones(1, 4)).sum().backward()
        torch.optim.SGD(split.parameters(), 1.0).step()
        assert isinstance(split, nn.Sequential)
        assert isinstance(split[0].weight, spt.Parameter)
        assert not isinstance(split[2].bias, spt.Parameter)
        copied = copy.deepcopy(split)
        assert torch.equal(copied(torch.ones(1, 4)), split(torch.ones(1, 4)))

    run(main)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert type(net[0].weight) is nn.Parameter


def test_distribute_module_has_the_meaning_of_dtensor():
    x = torch.randn(5, 4)

    def partition(name, module, mesh):
        if name == "0":
            module.weight = spt.Parameter(module.weight, P("model"))
            module.bias = spt.Parameter(module.bias, P("model"))

    def main():
        with spt.drawing(0):
            net = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        split = spt.distribute_module(
            net, None, partition, lambda m, args, mesh: (2 * args[0],), lambda m, y, mesh: y.whole()
        )
        return split(x), net(2 * x)

    a, b = run(main, model=3)
    assert torch.allclose(a, b)


def test_hooks_and_buffers_and_frozen_parameters_stay():
    def main():
        with spt.drawing(0):
            net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        net[0].weight.requires_grad_(False)
        seen = []
        net[1].register_forward_hook(lambda m, args, y: seen.append(tuple(y.shape)))
        split = spt.parallelize(net, {"0": spt.column("model"), "2": spt.row("model")})
        x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
        y, whole = split(x), net(x)
        assert seen == [(7, 6), (7, 6)]
        assert torch.allclose(y, whole)
        assert not split[0].weight.requires_grad
        assert torch.allclose(split[1].running_mean, net[1].running_mean)
        y.sum().backward()
        assert split[0].weight.grad is None

    run(main)


def test_a_block_beside_a_global_tensor_raises():
    x = torch.randn(6, 4)

    def main(block):
        whole = spt.put(x, P("data"))
        for use in (
            lambda: whole + block,
            lambda: nn.functional.linear(whole, block),
            lambda: torch.cat([whole, block]),
        ):
            with pytest.raises(LayoutError, match="from_block"):
                use()

    spt.map(main, P("data"), None, mesh=spmd.Mesh(data=2))(torch.randn(8, 4))


@pytest.mark.parametrize(
    "python",
    [
        pytest.param(
            sys.executable,
            id="mpiexec",
            marks=[pytest.mark.mpi, pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")],
        ),
        pytest.param(TORCHRUN, id="torchrun"),
    ],
)
def test_in_processes(python):
    ended = launch(PROGRAMS / "torch_plans.py", python=python, timeout=240)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("plans hold") == 4, str(ended)
