"""Convolutions and poolings on blocks are those of torch on the whole, and so are their gradients."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError, SpecError  # noqa: E402

pytestmark = pytest.mark.host("tensors of these tests lie on the host")

XY = {"x": 2, "y": 2}

# A module, the shape of its input, the specs of input and output, and a mesh.
CONVOLUTIONS = {
    "rows": (lambda: nn.Conv2d(3, 5, 3), (2, 3, 9, 8), P(None, None, "x"), None, {"x": 3}),
    "stride": (lambda: nn.Conv2d(3, 4, 3, 2, 1), (2, 3, 9, 7), P(None, None, "x", "y"), None, XY),
    "tuple": (lambda: nn.Conv1d(2, 3, 4, padding=2), (2, 2, 17), P(None, None, ("x", "y")), None, XY),
    "periodic": (
        lambda: nn.Conv1d(4, 6, 3, dilation=2, padding=2, padding_mode="circular"),
        (2, 4, 11),
        P(None, None, "x"),
        None,
        {"x": 4},
    ),
    "reflect": (
        lambda: nn.Conv3d(2, 4, (3, 1, 2), padding=(1, 0, 1), padding_mode="reflect"),
        (2, 2, 5, 3, 6),
        P(None, None, "x", None, "y"),
        None,
        XY,
    ),
    "replicate": (
        lambda: nn.Conv2d(2, 2, 3, 3, 2, padding_mode="replicate"),
        (1, 2, 10, 8),
        P(None, None, "x"),
        None,
        {"x": 3},
    ),
    "same": (lambda: nn.Conv2d(5, 7, (4, 2), padding="same", dilation=2), (2, 5, 8, 7), P(None, "x"), P(None, "y"), XY),
    "in": (lambda: nn.Conv2d(5, 4, 3, padding=1), (3, 5, 4, 4), P("x", "y"), P("x"), XY),
    "out": (lambda: nn.Conv2d(5, 3, 3), (3, 5, 4, 4), P(None, None, None, "y"), P(None, "x", None, "y"), XY),
    "no bias": (lambda: nn.Conv1d(3, 4, 2, bias=False), (2, 3, 7), P(None, "x", "y"), P(None, None, "y"), XY),
    "groups": (lambda: nn.Conv2d(8, 12, 3, groups=4), (2, 8, 5, 6), P(None, "x", "y"), P(None, "x", "y"), XY),
    "whole groups": (lambda: nn.Conv1d(6, 9, 3, groups=3), (2, 6, 9), P(None, None, "x"), None, {"x": 4}),
    "uneven groups": (lambda: nn.Conv1d(6, 3, 3, groups=3), (2, 6, 9), P(None, "x"), P(None, "x"), {"x": 2}),
    "groups apart": (lambda: nn.Conv1d(4, 4, 2, groups=2), (2, 4, 6), P(None, "x"), P(), {"x": 3}),
    "other rows": (lambda: nn.Conv1d(2, 3, 2), (2, 2, 7), P(None, None, "x"), P(None, "y"), XY),
    "same channels": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 7), P(None, "x"), P(None, "x"), {"x": 3}),
    "another batch": (lambda: nn.Conv1d(4, 6, 3), (3, 4, 7), P("x", "y"), P("y", "x"), XY),
    "few channels in": (lambda: nn.Conv2d(2, 3, 3), (2, 2, 5, 5), P(None, "x"), P(), {"x": 4}),
    "few channels out": (lambda: nn.Conv1d(2, 3, 2), (2, 2, 5), P(), P(None, "x"), {"x": 4}),
    "few rows": (lambda: nn.Conv1d(2, 3, 3, padding=1), (2, 2, 3), P(None, None, "x"), None, {"x": 4}),
    "few outputs": (lambda: nn.Conv2d(2, 3, 3, 2), (2, 2, 6, 5), P(None, None, "x"), None, {"x": 4}),
    "few samples": (lambda: nn.Conv2d(2, 3, 2), (3, 2, 4, 5), P("x"), None, {"x": 4}),
    "one worker": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 2, 4, 5), P(None, None, "x"), None, {"x": 1}),
    "eight": (
        lambda: nn.Conv2d(3, 5, 3, padding=1),
        (3, 3, 7, 5),
        P("x", "y", "z"),
        P("x", None, "z"),
        {"x": 2, "y": 2, "z": 2},
    ),
}
POOLINGS = {
    "largest": (lambda: nn.MaxPool2d(2), (2, 3, 9, 8), P(None, "y", "x"), XY),
    "largest, padded": (lambda: nn.MaxPool2d(3, 2, 1), (2, 3, 7, 8), P(None, None, "x", "y"), XY),
    "largest, dilated": (lambda: nn.MaxPool1d(3, 1, 1, dilation=2), (2, 3, 11), P("y", None, "x"), {"x": 3, "y": 1}),
    "largest, ceil": (lambda: nn.MaxPool2d(2, 3, ceil_mode=True), (2, 1, 10, 8), P(None, None, "x"), {"x": 3}),
    "largest, 3d": (lambda: nn.MaxPool3d((2, 1, 3), 2, (1, 0, 1)), (1, 2, 5, 3, 6), P(None, None, "x", None, "y"), XY),
    "mean": (lambda: nn.AvgPool2d(2), (2, 3, 9, 8), P(None, None, "x"), {"x": 4}),
    "mean, padded": (lambda: nn.AvgPool2d(3, 2, 1), (2, 3, 7, 8), P(None, None, "x", "y"), XY),
    "mean, padding not counted": (
        lambda: nn.AvgPool2d((3, 4), 2, (1, 2), count_include_pad=False),
        (2, 3, 7, 8),
        P(None, None, "x", "y"),
        XY,
    ),
    "mean, ceil": (lambda: nn.AvgPool1d(3, 2, 1, ceil_mode=True), (2, 3, 10), P(None, None, "x"), {"x": 3}),
    "mean, divisor": (lambda: nn.AvgPool2d(2, 1, divisor_override=3), (2, 1, 5, 5), P(None, None, None, "x"), {"x": 3}),
    "mean, 3d": (lambda: nn.AvgPool3d(2, 1, 1), (2, 1, 3, 4, 5), P(None, None, "x", "y"), XY),
    "few": (lambda: nn.MaxPool1d(2), (2, 3, 5), P(None, None, "x"), {"x": 4}),
    "few channels": (lambda: nn.AvgPool2d(2), (2, 2, 5, 4), P(None, "x"), {"x": 4}),
    "few samples": (lambda: nn.MaxPool2d(2), (2, 2, 5, 4), P("x"), {"x": 4}),
}


def whole(module: nn.Module, x, weights):
    """The result of torch on the whole, and the gradients of the sum of its products with some weights: those of x and
    of the parameters."""
    x = x.clone().requires_grad_()
    y = module(x)
    return y.detach(), *torch.autograd.grad((y * weights(y.shape)).sum(), (x, *module.parameters()))


def check_blocks(module, shape, in_spec, out_spec, axes, *, check=True, known=False):
    """Compare a module on blocks with the module."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(shape, dtype=torch.float64, generator=generator)
    weights = lambda s: torch.randn(s, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    module = module.double()
    if out_spec is None:
        out_spec = P(in_spec.dims[0] or None, None, *in_spec.dims[2:]) if isinstance(module, CONVOLVING) else in_spec
    size = shape[2:] if known else None
    parameters = {}
    if isinstance(module, CONVOLVING):
        made, taken = ((*s.dims, (), ())[1] for s in (out_spec, in_spec))
        others = {n for d, names in enumerate(in_spec.dims) if d != 1 for n in names}
        rows = tuple(n for n in (made if module.groups == 1 else taken or made) if n not in others)
        columns = tuple(n for n in taken if n not in rows) if module.groups == 1 else ()
        parameters = {"weight": P(rows, columns), "bias": P(rows)}
        parameters = {k: v for k, v in parameters.items() if getattr(module, k) is not None}
    expected = whole(module, drawn, weights)

    def body(x, w):
        if isinstance(module, CONVOLVING):
            layer = spt.DistributedConv(module, in_spec, out_spec, size=size)
            assert {k: layer.specs[k] for k in parameters} == parameters
        else:
            layer = spt.DistributedPool(module, in_spec, size=size)
        x = x.detach().requires_grad_()
        y = layer(x)
        (y * w).sum().backward()
        grads = [getattr(layer, k).grad for k in parameters]
        grads = [g.block() if isinstance(g, spt.PartitionedTensor) else g for g in grads]
        return y.detach(), spt.varying(x.grad, in_spec.axes), *grads

    with spmd.Mesh(**axes):
        out_specs = (out_spec, in_spec, *parameters.values())
        result = spt.map(body, in_specs=(in_spec, out_spec), out_specs=out_specs, check=check)(
            drawn, weights(expected[0].shape)
        )
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


CONVOLVING = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("check", [True, False], ids=["states", "plain"])
def test_a_convolution_on_blocks(case, check):
    make, *rest = CONVOLUTIONS[case]
    torch.manual_seed(0)
    check_blocks(make(), *rest, check=check, known=check)


@pytest.mark.parametrize("case", POOLINGS)
@pytest.mark.parametrize("check", [True, False], ids=["states", "plain"])
def test_a_pooling_on_blocks(case, check):
    make, shape, spec, axes = POOLINGS[case]
    check_blocks(make(), shape, spec, None, axes, check=check, known=not check)


def test_indices_are_those_of_the_whole():
    pool, x, rows = nn.MaxPool2d(3, 2, 1, return_indices=True), torch.randn(3, 2, 9, 8), P("x", None, "y")
    with spmd.Mesh(**XY):
        layer = lambda x: spt.DistributedPool(pool, rows)(x)
        result = spt.map(layer, in_specs=rows, out_specs=(rows, rows))(x)
    for ours, theirs in zip(result, pool(x), strict=True):
        assert torch.equal(ours, theirs)


@st.composite
def convolutions(draw):
    """A convolution in any number of dimensions, an input that it fits, and specs on a mesh."""
    space = draw(st.integers(1, 3))
    each = lambda least, most: tuple(draw(st.integers(least, most)) for _ in range(space))
    kernel, stride, dilation, padding = each(1, 3), each(1, 3), each(1, 2), each(0, 2)
    axes = draw(st.sampled_from([{"x": 3}, {"x": 2, "y": 2}, {"x": 4}, {"x": 2, "y": 3}]))
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    # Reflection wants more entries than it adds.
    lengths = [max(e - 2 * p, p + 1) + draw(st.integers(0, 6)) for e, p in zip(extents, padding, strict=True)]
    samples, taken, made = (draw(st.integers(1, 5)) for _ in range(3))
    mode = draw(st.sampled_from(["zeros", "zeros", "circular", "reflect", "replicate"]))
    places = draw(st.lists(st.integers(0, space + 2), min_size=len(axes), max_size=len(axes), unique=True))
    split = dict(zip(places, axes, strict=True))  # place 1: channels that come in; the last: channels that go out
    rest = [split.get(d) for d in range(2, space + 2)]
    module = lambda: (nn.Conv1d, nn.Conv2d, nn.Conv3d)[space - 1](
        taken, made, kernel, stride, padding, dilation, bias=draw(st.booleans()), padding_mode=mode
    )
    in_spec, out_spec = P(split.get(0), split.get(1), *rest), P(split.get(0), split.get(space + 2), *rest)
    return module(), (samples, taken, *lengths), in_spec, out_spec, axes


@given(convolutions(), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_convolution(case, check, known):
    check_blocks(*case, check=check, known=known)


@pytest.mark.full
@given(convolutions(), st.booleans(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_very_many_convolutions(case, check, known):
    check_blocks(*case, check=check, known=known)


def inside(f, **axes):
    """Call f on every worker."""
    return spt.map(f, (), None, mesh=spmd.Mesh(**axes))()


def test_a_kernel_that_is_too_long_has_no_outputs():
    def body():
        y = spt.DistributedConv(nn.Conv1d(2, 3, 5), P(None, None, "x"))(torch.ones(2, 2, 2 - spmd.worker_index("x")))
        return tuple(y.shape)

    assert inside(body, x=2) == (2, 3, 0)


def test_a_length_known_beforehand_saves_the_meeting():
    conv = nn.Conv1d(1, 1, 3)

    def body(x):
        for size in (None, (9,)):
            layer = spt.DistributedConv(conv, P(None, None, "x"), size=size)
            with spmd.ledger() as log:
                layer(x)
            yield log.verbs["shapes"], log.operators["HaloExchange"]

    counted = spt.map(lambda x: tuple(body(x)), (P(None, None, "x"),), None, mesh=spmd.Mesh(x=3))(torch.ones(1, 1, 9))
    assert counted == ((1, 1), (0, 1))


def test_a_layer_learns_of_other_lengths():
    conv = nn.Conv1d(1, 1, 3)
    layers = {}

    def body(x):
        layer = layers.setdefault(spmd.worker_index("x"), None)
        if layer is None:
            layer = layers[spmd.worker_index("x")] = spt.DistributedConv(conv, P(None, None, "x"))
        return layer(x)

    mapped = spt.map(body, P(None, None, "x"), P(None, None, "x"), mesh=spmd.Mesh(x=3))
    for n in (9, 10, 4, 9):
        x = torch.arange(float(n)).reshape(1, 1, n)
        torch.testing.assert_close(mapped(x), conv(x))


def test_one_sum_forward_and_one_backward():
    """Of a pair of layers whose channels between them are split."""
    first, second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)
    middle = P(None, "x")

    def body(x):
        pair = nn.Sequential(spt.DistributedConv(first, P(), middle), spt.DistributedConv(second, middle, P()))
        with spmd.ledger() as forward:
            y = pair(x.detach().requires_grad_())
        with spmd.ledger() as backward:
            y.sum().backward()
        return forward.operators["Sum"], backward.operators["Sum"]

    assert spt.map(body, (P(),), None, mesh=spmd.Mesh(x=4))(torch.ones(1, 3, 8, 8)) == (1, 1)


def test_a_compiled_model_runs_the_layers_as_they_are():
    first, second, pool = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3), nn.MaxPool2d(2)
    rows, maps = P(None, None, "x"), P(None, "y", "x")

    def body(x):
        parts = spt.DistributedConv(first, rows, maps), nn.Tanh(), spt.DistributedPool(pool, maps)
        model = nn.Sequential(*parts, spt.DistributedConv(second, maps, rows))
        result = []
        for f in (model, torch.compile(model, backend="eager")):
            own = x.clone().requires_grad_()
            y = f(own)
            (y * y).sum().backward()
            result.append((y.detach(), own.grad))
        return result

    mapped = spt.map(body, rows, rows, mesh=spmd.Mesh(**XY), check=False)
    eager, compiled = mapped(torch.randn(2, 2, 9, 8))
    for ours, theirs in zip(compiled, eager, strict=True):
        assert torch.equal(ours, theirs)


MISTAKES = {
    "no convolution": (lambda: spt.DistributedConv(nn.Linear(2, 2), P()), "argument conv", "nn.Conv1d"),
    "transposed": (lambda: spt.DistributedConv(nn.ConvTranspose1d(2, 2, 1), P()), "argument conv", "nn.Conv1d"),
    "too many dimensions": (lambda: spt.DistributedConv(nn.Conv1d(3, 3, 1), P(None, None, None, "x")), "in_spec", "3"),
    "no pooling": (lambda: spt.DistributedPool(nn.AdaptiveAvgPool1d(2), P()), "argument pool", "nn.MaxPool1d"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_explained(mistake):
    wrong, *words = MISTAKES[mistake]
    with pytest.raises((SpecError, LayoutError)) as caught:
        inside(wrong, x=2)
    for word in words:
        assert word in str(caught.value)
