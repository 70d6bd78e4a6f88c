"""`functions.conv` and `conv_transpose` on arrays that lie anyhow, against those of the whole on one worker."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest

import spmd
from functions.layer_cases import FRONTENDS, check_layer, integers, random_layout, random_mesh
from functions.test_convolution import MODES, whole
from spmd import P, functions
from spmd.functions.convolution import _conv_plan, _transpose_plan
from spmd.functions.convolution_plans import bias_layout
from spmd.layout import Layout


class Case(NamedTuple):
    """A convolution of random arrays of these shapes. options: of both functions; boundary: of `conv` alone."""

    shape: tuple[int, ...]
    filters: tuple[int, ...]
    options: dict[str, Any]
    boundary: Any = "zero"
    transposed: bool = False


def random_case(rng: np.random.Generator, transposed: bool) -> Case:
    dims = int(rng.integers(1, 4))
    each = lambda low, high: tuple(rng.integers(low, high, dims).tolist())
    groups = int(rng.choice([1, 1, 2, 3, 4]))
    inputs, results = rng.integers(0 if rng.random() < 0.1 else 1, 4, 2).tolist()
    kernel, stride, dilation = each(1, 4), each(1, 4), each(1, 3)
    lengths = each(1, 12 if dims == 1 else 7 if dims == 2 else 5)
    n = int(rng.integers(0 if rng.random() < 0.1 else 1, 4))
    options: dict[str, Any] = {"stride": stride, "dilation": dilation, "groups": groups}
    if transposed:
        extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
        most = [(m - 1) * s + e for m, s, e in zip(lengths, stride, extents, strict=True)]
        pads = [(int(rng.integers(-1, 3)), int(rng.integers(-1, 3))) for _ in most]
        options["padding"] = tuple(p if m - sum(p) >= 0 else (0, 0) for p, m in zip(pads, most, strict=True))
        extra = zip(stride, dilation, strict=True)
        options["output_padding"] = tuple(int(rng.integers(0, max(s, d))) for s, d in extra)
        shape = (n, groups * inputs, *lengths), (groups * inputs, results, *kernel)
        return Case(*shape, options, transposed=True)
    boundary = rng.choice([*MODES, "zero", "zero"]) if min(lengths) > 2 else "zero"
    pads = [(int(rng.integers(-1, 3)), int(rng.integers(-1, 3))) for _ in lengths]
    options["padding"] = "SAME" if rng.random() < 0.2 and boundary == "zero" else tuple(pads)
    return Case((n, groups * inputs, *lengths), (groups * results, inputs, *kernel), options, str(boundary))


def serial(case: Case, x, w, bias):
    if case.transposed:
        return functions.conv_transpose(x, w, bias, **case.options)
    y = whole(x, w, case.options, case.boundary)
    return y if bias is None else y + bias.reshape(-1, *(1,) * (y.ndim - 2))


def layout_by(mesh: spmd.Mesh, spec: P | Layout, shape: tuple[int, ...]) -> Layout:
    return spec if isinstance(spec, Layout) else mesh.layout(shape, spec)


def plan_of(case: Case, mesh: spmd.Mesh, spec, w_spec, out_spec) -> Any:
    """The plan of a case, and the layout of its bias."""
    x, w = layout_by(mesh, spec, case.shape), layout_by(mesh, w_spec, case.filters)
    bias = bias_layout(w, case.options["groups"], case.transposed)
    dims = len(case.shape) - 2
    options = dict(case.options)
    extra = options.pop("output_padding", None)
    plain = options["stride"], options["padding"], options["dilation"], options["groups"]
    if case.transposed:
        return _transpose_plan("test", x, w, bias, out_spec, (), plain, extra)
    return _conv_plan("test", x, w, bias, out_spec, (), plain, (case.boundary,) * dims)


def check(case: Case, mesh: spmd.Mesh, spec, w_spec, out_spec, rng, torch: bool, biased: bool = True) -> None:
    plan = plan_of(case, mesh, spec, w_spec, out_spec)
    x, w, bias = integers(rng, case.shape), integers(rng, case.filters), integers(rng, plan.shape[1:2])
    g = integers(rng, plan.shape)
    args, specs = [x, w], [spec, w_spec]
    if biased:
        args, specs = [*args, bias], [*specs, plan.bias]
    name = "conv_transpose" if case.transposed else "conv"
    more = {} if case.transposed else {"boundary": case.boundary}

    def fun(x, w, b=None):
        layer = getattr(functions, name)
        return layer(x, w, b, **case.options, **more, spec=spec, w_spec=w_spec, out_spec=out_spec)

    def in_global(x, w, b=None):
        return getattr(functions, name)(x, w, b, **case.options, **more, out_spec=out_spec)

    value, pullback = spmd.vjp(lambda x, w, b=None: serial(case, x, w, b), *args)
    check_layer(fun, (value, pullback(g)), args, specs, plan.out, mesh, g, in_global=in_global, torch=torch)


def check_seed(seed: int, transposed: bool, torch: bool) -> None:
    rng = np.random.default_rng(seed)
    mesh, case = random_mesh(rng), random_case(rng, transposed)
    spec, w_spec = random_layout(rng, case.shape, mesh), P()
    if rng.random() < 0.7:
        w_spec = random_layout(rng, case.filters, mesh, whole=range(2, len(case.filters)) if rng.random() < 0.8 else ())
    whole_plan = plan_of(case, mesh, P(), P(), None)
    out_spec = random_layout(rng, whole_plan.shape, mesh) if rng.random() < 0.6 else None
    check(case, mesh, spec, w_spec, out_spec, rng, torch, biased=rng.random() < 0.8)


LAYERS = pytest.mark.parametrize("transposed", [False, True], ids=["conv", "conv_transpose"])


@FRONTENDS
@LAYERS
@pytest.mark.parametrize("seed", range(25))
def test_any_layouts(seed, transposed, torch):
    check_seed(seed, transposed, torch)


@pytest.mark.full
@FRONTENDS
@LAYERS
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_many_layouts(seed, transposed, torch):
    check_seed(seed, transposed, torch)


class Partitions(NamedTuple):
    """Grids of the input, of the weights (or None: a copy on each worker) and of the result (or None: as the input),
    each on workers from a first one on."""

    workers: int
    x: tuple[int, tuple[int, ...]]
    w: tuple[int, tuple[int, ...]] | None
    y: tuple[int, tuple[int, ...]] | None
    shape: tuple[int, ...]
    kernel: int | tuple[int, ...] = 3
    options: dict[str, Any] = {}  # noqa: RUF012


# Partitions of DistDL's tests of its general, channel and feature convolutions.
OVER_CHANNELS = {
    "2 of 3": Partitions(6, (0, (1, 3)), (0, (2, 3)), (0, (1, 2)), (1, 8)),
    "3 of 2": Partitions(6, (0, (1, 2)), (0, (3, 2)), (0, (1, 3)), (1, 8)),
    "1 of 2": Partitions(2, (0, (1, 2)), (0, (1, 2)), (0, (1, 1)), (1, 8)),
    "2 of 1": Partitions(2, (0, (1, 1)), (0, (2, 1)), (0, (1, 2)), (1, 8)),
    "2 of 2": Partitions(4, (0, (1, 2)), (0, (2, 2)), (0, (1, 2)), (1, 5)),
    "apart": Partitions(4, (0, (1, 2)), (0, (2, 2)), (2, (1, 2)), (1, 3)),
    "weights elsewhere": Partitions(8, (0, (1, 2)), (4, (2, 2)), (2, (1, 2)), (2, 5)),
    "no batch": Partitions(4, (0, (1, 2)), (0, (2, 2)), (2, (1, 2)), (0, 3)),
}
GENERAL = {
    "1d, 2 of 1": Partitions(6, (0, (1, 1, 3)), (0, (2, 1)), (0, (1, 2, 3)), (1, 5, 10)),
    "1d, 1 of 2": Partitions(6, (0, (1, 2, 3)), (0, (1, 2)), (0, (1, 1, 3)), (1, 5, 10)),
    "1d, 2 of 2": Partitions(8, (0, (1, 2, 2)), (0, (2, 2)), (0, (1, 2, 2)), (1, 5, 10)),
    "1d, shifted": Partitions(8, (0, (1, 2, 2)), (0, (2, 2)), (2, (1, 2, 2)), (1, 3, 10)),
    "2d, 2 of 1": Partitions(16, (0, (1, 1, 2, 3)), (4, (2, 1)), (4, (1, 2, 2, 3)), (1, 5, 10, 10)),
    "2d, 1 of 2": Partitions(16, (4, (1, 2, 2, 3)), (4, (1, 2)), (0, (1, 1, 2, 3)), (1, 5, 10, 10)),
    "2d, 2 of 2": Partitions(16, (4, (1, 2, 2, 2)), (0, (2, 2)), (4, (1, 2, 2, 2)), (1, 5, 10, 10)),
    "3d": Partitions(8, (0, (1, 2, 1, 1, 2)), (0, (2, 2)), (2, (1, 2, 1, 1, 2)), (1, 3, 5, 4, 6)),
}
FEATURES = {
    "1d": Partitions(3, (0, (1, 1, 3)), None, None, (1, 5, 10)),
    "2d": Partitions(4, (0, (1, 1, 2, 2)), None, None, (1, 5, 10, 10)),
    "2d, padding": Partitions(4, (0, (1, 1, 2, 2)), None, None, (1, 5, 10, 10), 3, {"padding": 1}),
    "3d": Partitions(12, (0, (1, 1, 3, 2, 2)), None, None, (1, 5, 10, 10, 10)),
    "stride": Partitions(4, (0, (1, 1, 2, 2)), None, None, (1, 5, 10, 10), 5, {"padding": 2, "stride": 2}),
    "odd, stride": Partitions(4, (0, (1, 1, 2, 2)), None, None, (1, 5, 5, 5), 3, {"padding": 1, "stride": 2}),
    "offset": Partitions(4, (0, (1, 1, 2, 2)), None, None, (1, 5, 6, 10), 5, {"padding": 2, "stride": 4}),
    "less padding": Partitions(4, (0, (1, 1, 2, 2)), None, None, (1, 5, 10, 8), 5, {"padding": 1}),
    "even kernel": Partitions(4, (0, (1, 1, 2, 2)), None, None, (1, 5, 8, 8), 4, {"padding": 1}),
    "3d, stride": Partitions(
        4, (0, (1, 1, 2, 1, 2)), None, None, (1, 3, 5, 5, 6), 5, {"padding": 2, "stride": (2, 2, 1)}
    ),
    "1d, padding": Partitions(4, (0, (1, 1, 4)), None, None, (1, 3, 15), 3, {"padding": 1}),
    "dilation": Partitions(4, (0, (1, 1, 2, 2)), None, None, (1, 3, 10, 10), 5, {"padding": 1, "dilation": 2}),
    "many": Partitions(16, (0, (1, 1, 4, 4)), None, None, (1, 3, 10, 10), 5, {"padding": 2, "stride": 2}),
    "3d, all": Partitions(
        18,
        (0, (1, 1, 3, 3, 2)),
        None,
        None,
        (1, 2, 17, 16, 15),
        (5, 4, 3),
        {"padding": (1, 1, 2), "stride": (3, 1, 2), "dilation": (3, 3, 1)},
    ),
    "7 x 7": Partitions(4, (0, (1, 1, 2, 2)), None, None, (1, 5, 20, 20), 7, {"padding": 3, "stride": 2}),
    "one worker": Partitions(1, (0, (1, 1, 1, 1)), None, None, (1, 3, 16, 16), 3, {"padding": 1}),
}


def in_space(partitions: Partitions, dims: int) -> Partitions:
    """Partitions of channels, for arrays with whole dimensions of space."""
    whole = lambda part: (part[0], (*part[1], *(1,) * dims))
    x, y = whole(partitions.x), whole(partitions.y)
    return partitions._replace(x=x, y=y, shape=(*partitions.shape, *(6,) * dims))


TABLE = {
    **{f"channels, {name}, {dims}d": in_space(p, dims) for name, p in OVER_CHANNELS.items() for dims in (1, 2, 3)},
    **{f"general, {name}": p for name, p in GENERAL.items()},
    **{f"features, {name}": p for name, p in FEATURES.items()},
}

LONG = {name for name in TABLE if name.startswith("channels") and not name.endswith("2d")}


def grid(shape: tuple[int, ...], blocks: tuple[int, ...], mesh: spmd.Mesh, first: int) -> Layout:
    return Layout.grid(shape, blocks, mesh.axes, range(first, first + int(np.prod(blocks))))


@FRONTENDS
@pytest.mark.parametrize("transposed", [False, True], ids=["conv", "conv_transpose"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n in LONG else n for n in TABLE])
def test_partitions_of_input_weights_and_result(name, transposed, torch):
    partitions, rng = TABLE[name], np.random.default_rng(len(name))
    mesh, shape, dims = spmd.Mesh(x=partitions.workers), partitions.shape, len(partitions.shape) - 2
    kernel = (partitions.kernel,) * dims if isinstance(partitions.kernel, int) else partitions.kernel
    each = lambda n: (n,) * dims if isinstance(n, int) else n
    options = {
        k: each(partitions.options.get(k, 0 if k == "padding" else 1)) for k in ("stride", "padding", "dilation")
    }
    options |= {"groups": 1, "padding": tuple((n, n) for n in options["padding"])}
    case = Case(shape, (7, shape[1], *kernel), options)
    blocks = partitions.w and (*partitions.w[1], *(1,) * dims)
    if transposed:
        extra = tuple(int(s > 1) for s in options["stride"])
        case = Case(shape, (shape[1], 7, *kernel), options | {"output_padding": extra}, transposed=True)
        blocks = blocks and (blocks[1], blocks[0], *blocks[2:])
    w_spec = P() if blocks is None else grid(case.filters, blocks, mesh, partitions.w[0])
    out_spec = None
    if partitions.y is not None:
        result = plan_of(case, mesh, P(), P(), None).shape
        out_spec = grid(result, partitions.y[1], mesh, partitions.y[0])
    spec = grid(shape, partitions.x[1], mesh, partitions.x[0])
    check(case, mesh, spec, w_spec, out_spec, rng, torch, biased=len(name) % 2 == 0)


@pytest.mark.parametrize(
    ("spec", "w_spec", "out_spec", "forward", "backward"),
    [
        (P("d"), P(), None, {}, {"Sum": 1}),
        (P(None, None, "d"), P(), None, {"HaloExchange": 1}, {"HaloAccumulate": 1, "Sum": 1}),
        (P(), P("m"), None, {}, {"Sum": 1}),
        (P(None, "m"), P(None, "m"), None, {"Sum": 1}, {}),
        (P(None, "m"), P("m"), None, {"AllGather": 1}, {"ReduceScatter": 1}),
        (P(None, "m"), P(None, "m"), P(None, "m"), {"ReduceScatter": 1}, {"AllGather": 1}),
        (P(None, "m"), P(None, "m"), P("m"), {"ReduceScatter": 1}, {"AllGather": 1}),
        (P("d", "m"), P(None, "m"), None, {"Sum": 1}, {"Sum": 1}),
        (P("d"), P("m"), None, {}, {"Sum": 2}),
        (P("d", None, "m"), P(), None, {"HaloExchange": 1}, {"HaloAccumulate": 1, "Sum": 1}),
    ],
)
def test_no_more_operators_than_by_hand(spec, w_spec, out_spec, forward, backward):
    """Of uneven blocks; lengths are exchanged along the axes of space alone."""
    rng = np.random.default_rng(0)
    x, w = integers(rng, (5, 7, 9)), integers(rng, (11, 7, 3))

    def layer(x, w):
        return functions.conv(x, w, padding=1, spec=spec, w_spec=w_spec, out_spec=out_spec)

    def forward_only(x, w):
        layer(x, w)

    def both(x, w):
        y, pullback = spmd.vjp(layer, x, w)
        pullback(y)

    applied = []
    for body in (forward_only, both):
        with spmd.Mesh(d=2, m=3) as mesh, spmd.ledger() as log:
            mesh.map(body, in_specs=(spec, w_spec), out_specs=None)(x, w)
        applied.append(Counter({name: n for name, n in log.operators.items() if name != "Vary"}))
        assert ("shapes" in log.verbs) == any(spec.dims[2:])
    assert applied[0] == forward
    assert applied[1] - applied[0] == backward


@pytest.mark.parametrize("transposed", [False, True], ids=["conv", "conv_transpose"])
@pytest.mark.parametrize("kind", ["spec", "grid"])
def test_second_derivatives(kind, transposed, scheduler):
    rng = np.random.default_rng(0)
    mesh = spmd.Mesh(x=2, y=2, scheduler=scheduler)
    x, w, b = (rng.standard_normal(s) for s in ((2, 3, 5), (3, 3, 2), (3,)))
    spec, w_spec = P(None, "y", "x"), P(*("y", None) if transposed else (None, "y"))
    if kind == "grid":
        spec = Layout.grid(x.shape, (1, 2, 1), mesh.axes, [3, 0])
        w_spec = Layout.grid(w.shape, (2, 1, 1), mesh.axes, [1, 2])
    layer = functions.conv_transpose if transposed else functions.conv
    axes = tuple(mesh.axes)
    total = lambda y: spmd.psum(np.sum(np.sin(y)), axes if kind == "grid" else "x")
    place = lambda b: b if kind == "spec" else spmd.repartition(b, mesh.layout(b.shape, P()), bias_lies)
    bias_lies = bias_layout(layout_by(mesh, w_spec, w.shape), 1, transposed)
    loss = mesh.map(
        lambda x, w, b: total(layer(x, w, place(b), padding=1, spec=spec, w_spec=w_spec)),
        in_specs=(spec, w_spec, P()),
        out_specs=P(),
    )
    spmd.check_grads(loss, (x, w, b), order=2)


@pytest.mark.torch
@pytest.mark.parametrize("transposed", [False, True], ids=["conv", "conv_transpose"])
@pytest.mark.parametrize("spec", [P("y", "x"), P(None, None, "x", "y"), P(None, "y", None, "x")], ids=str)
def test_float32_is_as_near_to_torch_as_its_roundings(spec, transposed):
    import torch
    from torch.nn import functional as F

    from spmd.bridge import torch as spt

    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    x, w, b = draw(2, 4, 9, 8), draw(4, 4, 3, 3), draw(4)
    layer = spt.functions.conv_transpose if transposed else spt.functions.conv
    whole = [a.clone().requires_grad_() for a in (x, w, b)]
    y = (F.conv_transpose2d if transposed else F.conv2d)(*whole, stride=2, padding=1)
    g = draw(*y.shape)
    y.backward(g)
    ours = [a.clone().requires_grad_() for a in (x, w, b)]
    body = lambda x, w, b: layer(x, w, b, stride=2, padding=1, spec=spec)
    out = P(spec.dims[0] or None, None, *(n or None for n in [*spec.dims, (), ()][2:4]))
    result = spt.map(body, in_specs=(spec, P(), P()), out_specs=out, mesh=spmd.Mesh(x=2, y=2))(*ours)
    result.backward(g)
    for a, b in [(result, y), *((a.grad, b.grad) for a, b in zip(ours, whole, strict=True))]:
        a, b = a.detach(), b.detach()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))
