"""Programs with convolutions and poolings of `spt.nn`: what they exchange, compilation, mistakes, and random ones."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from bridge.torch.nn.module_cases import Case, check_module  # noqa: E402
from spmd import Grid, Layout, P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError, SpecError  # noqa: E402

pytestmark = pytest.mark.torch

ROWS = P(None, None, "x")
XY = {"x": 2, "y": 2}


def inside(f, **axes):
    """Call f on every worker."""
    return spt.map(f, (), None, mesh=spmd.Mesh(**axes))()


def test_a_kernel_that_is_too_long_has_no_outputs():
    def body():
        y = spt.nn.Conv1d(2, 3, 5, spec=ROWS)(torch.ones(2, 2, 2 - spmd.worker_index("x")))
        return tuple(y.shape)

    assert inside(body, x=2) == (2, 3, 0)


EXCHANGING = {
    "conv": ("Conv1d", (3, 6, 3), {}, "HaloExchange"),
    "groups": ("Conv1d", (3, 6, 3), {"groups": 3}, "HaloExchange"),
    "transposed": ("ConvTranspose1d", (3, 6, 3), {}, "HaloExchange"),
    "pool": ("MaxPool1d", (4,), {}, "HaloExchange"),
    "adaptive": ("AdaptiveAvgPool1d", (2,), {}, "HaloExchange"),
    "upsample": ("Upsample", (), {"scale_factor": 2, "mode": "linear"}, "HaloExchange"),
    "pad": ("ReflectionPad1d", (1,), {}, "HaloExchange"),
}


@pytest.mark.parametrize("case", EXCHANGING)
def test_lengths_known_beforehand_are_not_exchanged(case):
    """Nor are those of batch and weights."""
    name, args, options, moved = EXCHANGING[case]

    def body(x):
        counted = []
        for size in (None, (9,)):
            layer = getattr(spt.nn, name)(*args, **options, spec=P("y", None, "x"), in_size=size)
            with spmd.ledger() as log:
                layer(x)
            counted.append((log.verbs["shapes"], log.operators[moved]))
        return tuple(counted)

    counted = spt.map(body, (P("y", None, "x"),), None, mesh=spmd.Mesh(x=3, y=2))(torch.ones(3, 3, 9))
    assert counted == ((1, 1), (0, 1))


def test_a_layer_learns_of_other_lengths():
    whole = nn.Sequential(nn.Conv1d(1, 2, 3), nn.MaxPool1d(2), nn.Upsample(scale_factor=2), nn.ZeroPad1d((2, 0)))
    layers = {}

    def body(x):
        me = spmd.worker_index("x")
        if me not in layers:
            ours = (getattr(spt.nn, type(each).__name__).from_torch(each, spec=ROWS) for each in whole)
            layers[me] = nn.Sequential(*ours)
        return layers[me](x)

    mapped = spt.map(body, ROWS, ROWS, mesh=spmd.Mesh(x=3))
    for n in (9, 10, 4, 9):
        x = torch.arange(float(n)).reshape(1, 1, n)
        torch.testing.assert_close(mapped(x), whole(x))


def test_one_sum_forward_and_one_backward():
    """Of a pair of layers whose channels between them are split."""
    middle = P(None, "x")

    def body(x):
        pair = nn.Sequential(
            spt.nn.Conv2d(3, 4, 3, spec=P(), out_spec=middle), spt.nn.Conv2d(4, 2, 3, spec=middle, out_spec=P())
        )
        with spmd.ledger() as forward:
            y = pair(x.detach().requires_grad_())
        with spmd.ledger() as backward:
            y.sum().backward()
        return forward.operators["Sum"], backward.operators["Sum"]

    assert spt.map(body, (P(),), None, mesh=spmd.Mesh(x=4))(torch.ones(1, 3, 8, 8)) == (1, 1)


def test_a_compiled_model_runs_the_layers_as_they_are():
    maps = P(None, "y", "x")

    def body(x):
        model = nn.Sequential(
            *(spt.nn.Conv2d(2, 4, 3, padding=1, spec=ROWS, out_spec=maps), nn.Tanh()),
            *(spt.nn.MaxPool2d(2, spec=maps), spt.nn.Conv2d(4, 3, 3, spec=maps, out_spec=ROWS)),
            spt.nn.Upsample(scale_factor=2, spec=ROWS),
        )
        result = []
        for f in (model, torch.compile(model, backend="eager")):
            own = x.clone().requires_grad_()
            y = f(own)
            (y * y).sum().backward()
            result.append((y.detach(), own.grad))
        return result

    mapped = spt.map(body, ROWS, ROWS, mesh=spmd.Mesh(**XY), check=False)
    eager, compiled = mapped(torch.randn(2, 2, 9, 8))
    for ours, theirs in zip(compiled, eager, strict=True):
        assert torch.equal(ours, theirs)


def test_a_lazy_layer_loads_a_state():
    whole = nn.ConvTranspose1d(4, 3, 2)

    def body(x):
        layer = spt.nn.LazyConvTranspose1d(3, 2, spec=P(None, "x"), in_size=5)
        layer.load_state_dict(whole.state_dict())
        return layer(x)

    x = torch.randn(2, 4, 5)
    torch.testing.assert_close(spt.map(body, P(None, "x"), P(), mesh=spmd.Mesh(x=2))(x), whole(x))


MISTAKES = {
    "another class": (lambda: spt.nn.Conv1d.from_torch(nn.ConvTranspose1d(2, 2, 1)), "argument module", "nn.Conv1d"),
    "too many dimensions": (lambda: spt.nn.Conv1d(3, 3, 1, spec=P(None, None, None, "x")), "argument spec", "3"),
    "no such option": (lambda: spt.nn.MaxPool1d.from_torch(nn.MaxPool1d(2), w_spec=P()), "'w_spec'", "in_size"),
    "too few dimensions": (
        lambda: spt.nn.MaxPool2d(2)(torch.ones(3, 4)),
        "spt.nn.MaxPool2d: argument input",
        "(N, C, H, W)",
        "input[None]",
    ),
    "too many": (lambda: spt.nn.Conv1d(2, 2, 1)(torch.ones(1, 2, 3, 4)), "argument input", "(N, C, W)"),
    "no dimension to pad": (lambda: spt.nn.ZeroPad2d(1)(torch.ones(3)), "spt.nn.ZeroPad2d: argument input"),
    "lengths": (lambda: spt.nn.AvgPool2d(2, spec=ROWS, in_size=(3, 4, 5)), "argument in_size", "2 spatial dimensions"),
    "a mode": (
        lambda: spt.nn.Upsample(scale_factor=2, mode="bilinear")(torch.ones(1, 2, 3)),
        "spt.nn.Upsample: argument mode",
        "'bilinear'",
        "'linear'",
    ),
    "a length": (
        lambda: spt.nn.ConvTranspose1d(2, 2, 3, stride=2, spec=ROWS)(torch.ones(1, 2, 3), [20]),
        "argument output_size",
        "from [13] to [14]",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_explained(mistake):
    wrong, *words = MISTAKES[mistake]
    with pytest.raises((SpecError, LayoutError)) as caught:
        inside(wrong, x=2)
    for word in words:
        assert word in str(caught.value)


MESHES = ({"x": 2}, {"x": 3}, {"x": 2, "y": 2}, {"x": 2, "y": 3}, {"x": 4})


def any_case(seed):
    """A layer with random options, an input that it fits, and random specs or grids."""
    rng = random.Random(seed)
    dims, axes = rng.randint(1, 3), rng.choice(MESHES)
    each = lambda least, most: tuple(rng.randint(least, most) for _ in range(dims))
    kind = rng.choice(["Conv", "Conv", "ConvTranspose", "MaxPool", "AvgPool", "AdaptiveAvgPool"])
    kernel, stride, padding, dilation = each(1, 3), each(1, 3), each(0, 1), each(1, 2)
    groups = rng.choice([1, 1, 2])
    taken, made = groups * rng.randint(1, 3), groups * rng.randint(1, 3)
    options = {"kernel_size": kernel, "stride": stride}
    if kind in ("Conv", "ConvTranspose"):
        options |= {"in_channels": taken, "out_channels": made, "groups": groups, "bias": rng.random() < 0.7}
        options |= {"padding": padding, "dilation": dilation}
        if kind == "Conv":
            options["padding_mode"] = rng.choice(["zeros", "zeros", "circular", "reflect", "replicate"])
    elif kind == "AdaptiveAvgPool":
        options = {"output_size": each(1, 4)}
    else:
        options |= {"padding": tuple(min(p, k // 2) for p, k in zip(padding, kernel, strict=True))}
        options |= {"ceil_mode": rng.random() < 0.3}
    lengths = [max((k - 1) * d + 1, 3) + rng.randint(0, 6) for k, d in zip(kernel, dilation, strict=True)]
    shape = (rng.randint(1, 4), taken, *lengths)[rng.random() < 0.2 :]
    result = tuple(getattr(nn, f"{kind}{dims}d")(**options)(torch.zeros(shape)).shape)
    specs = {"spec": _spec(rng, shape, axes)}
    chosen = rng.random()
    out = lies = specs["spec"]
    if chosen < 0.4 or isinstance(out, Grid):
        specs["out_spec"] = out = lies = _spec(rng, result, axes, grids=chosen < 0.2 or isinstance(out, Grid))
    elif kind in ("Conv", "ConvTranspose"):
        names = [list(n) for n in (*out.dims, *[()] * (len(result) - len(out.dims)))]
        names[len(result) - dims - 1] = []
        specs["out_spec"] = lies = P(*(tuple(n) or None for n in names))
    if kind in ("Conv", "ConvTranspose") and rng.random() < 0.5:
        weight = tuple(getattr(nn, f"{kind}{dims}d")(**options).weight.shape)
        specs["w_spec"] = _spec(rng, weight[:2], axes, grids=False)
    if isinstance(specs["spec"], P) and rng.random() < 0.5:
        specs["in_size"] = tuple(lengths)
    spec = specs["spec"].layout(shape, axes) if isinstance(specs["spec"], Grid) else specs["spec"]
    lies = lies.layout(result, axes) if isinstance(lies, Grid) else lies
    return Case(f"{kind}{dims}d", options, specs, [shape], [spec], lies, axes)


def _spec(rng, shape, axes, *, grids=None):
    """A spec, or a grid of some of the workers."""
    size = len(shape)
    workers = 1
    for n in axes.values():
        workers *= n
    if grids or (grids is None and rng.random() < 0.2):
        d, parts = rng.randrange(size), rng.randint(1, workers)
        return Grid(tuple(parts if k == d else 1 for k in range(size)), rng.sample(range(workers), parts))
    names = [[] for _ in shape]
    for axis in axes:
        place = rng.randint(0, size)
        if place < size:
            names[place].append(axis)
    return P(*(tuple(n) or None for n in names))


@pytest.mark.parametrize("seed", range(4))
def test_any_layer(seed):
    check_module(any_case(seed))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4, 200))
def test_very_many_layers(seed):
    check_module(any_case(seed))


def test_weights_in_unbalanced_blocks_keep_their_layout():
    w = Layout((5, 3, 2), P("x"), {"x": 2}, [(1, 4), None, None])

    def body():
        layer = spt.nn.Conv1d(3, 5, 2, w_spec=w)
        rows = (1, 4)[spmd.worker_index("x")]
        return layer.weight.block().shape == (rows, 3, 2) and layer.bias.block().shape == (rows,)

    assert inside(body, x=2)
