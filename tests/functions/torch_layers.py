"""Layers of `spt.functions` beside those of torch: how their operands are drawn, and how these may lie on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import spmd
from functions.layer_cases import random_layout
from spmd import Layout, P, functions
from spmd.functions.convolution_plans import bias_layout
from spmd.functions.norm_plans import params_of
from spmd.functions.products import rows_of

Arrays = Sequence[np.ndarray]


class Lies(NamedTuple):
    """specs: of the operands. options: the arguments of the layer that say so. out: the layout of the result."""

    specs: Sequence[P | Layout]
    options: dict[str, Any]
    out: P | Layout


class TorchLayer(NamedTuple):
    """ours(*operands, **specs) is a layer, theirs(*operands) that of torch. draw(rng): the operands, in float64.

    place(rng, arrays, mesh): some layouts. fixed: the places of operands that are not differentiated.
    """

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    draw: Callable[[np.random.Generator], Arrays]
    place: Callable[[np.random.Generator, Arrays, spmd.Mesh], Lies]
    fixed: tuple[int, ...] = ()

    def differentiated(self, arrays: Sequence[Any]) -> list[int]:
        return [k for k in range(len(arrays)) if k not in self.fixed]


def torch_functional(name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        import torch

        return getattr(torch.nn.functional, name)(*args, **options)

    return call


def normal(*shapes: Sequence[int]) -> Callable[[np.random.Generator], Arrays]:
    return lambda rng: [rng.standard_normal(tuple(s)) for s in shapes]


def as_layout(lies: P | Layout, shape: Sequence[int], mesh: spmd.Mesh) -> Layout:
    return lies if isinstance(lies, Layout) else mesh.layout(tuple(shape), lies)


def axes_of(lies: P | Layout) -> tuple[str, ...]:
    """The axes along which an array varies that lies so."""
    if isinstance(lies, P):
        return lies.axes
    return tuple(lies.axes) if lies.spec is None else lies.spec.axes


def place_weighted(result: Callable[..., Sequence[int]], bias: Callable[[Layout], Layout], whole: Sequence[int] = ()):
    """x, weights and a bias that lies as these do, and a result of the shape result(x, w), each anyhow."""

    def place(rng: np.random.Generator, arrays: Arrays, mesh: spmd.Mesh) -> Lies:
        x, w, *more = arrays
        spec, w_spec = random_layout(rng, x.shape, mesh), random_layout(rng, w.shape, mesh, whole=whole)
        out = random_layout(rng, result(x, w), mesh)
        own = as_layout(w_spec, w.shape, mesh)
        return Lies([spec, w_spec, *[bias(own)] * len(more)], {"spec": spec, "w_spec": w_spec, "out_spec": out}, out)

    return place


def place_alone(result: Callable[[np.ndarray], Sequence[int]]):
    """x and a result, each anyhow."""

    def place(rng: np.random.Generator, arrays: Arrays, mesh: spmd.Mesh) -> Lies:
        spec, out = random_layout(rng, arrays[0].shape, mesh), random_layout(rng, result(arrays[0]), mesh)
        return Lies([spec], {"spec": spec, "out_spec": out}, out)

    return place


def place_norm(params: Callable[[int], Sequence[int]]):
    """x anyhow, and parameters that lie as its dimensions params(ndim) do."""

    def place(rng: np.random.Generator, arrays: Arrays, mesh: spmd.Mesh) -> Lies:
        x, *others = arrays
        spec = random_layout(rng, x.shape, mesh)
        lies = params_of(as_layout(spec, x.shape, mesh), params(x.ndim))
        return Lies([spec, *[lies] * len(others)], {"spec": spec}, spec)

    return place


def place_alike(reduction: str):
    """All operands alike; the result too, unless it is reduced."""

    def place(rng: np.random.Generator, arrays: Arrays, mesh: spmd.Mesh) -> Lies:
        spec = random_layout(rng, arrays[0].shape, mesh)
        return Lies([spec] * len(arrays), {"spec": spec}, spec if reduction == "none" else P())

    return place


def place_classes(reduction: str):
    """Logits anyhow, and class numbers as their rows."""

    def place(rng: np.random.Generator, arrays: Arrays, mesh: spmd.Mesh) -> Lies:
        x = arrays[0]
        spec = random_layout(rng, x.shape, mesh)
        rest = [d for d in range(x.ndim) if d != 1]
        rows = params_of(as_layout(spec, x.shape, mesh), rest)
        return Lies([spec, rows], {"spec": spec}, rows if reduction == "none" else P())

    return place


def place_weighted_classes(rng: np.random.Generator, arrays: Arrays, mesh: spmd.Mesh) -> Lies:
    """As `place_classes`, with weights that lie as the classes; whole for a grid."""
    specs, options, out = place_classes("mean")(rng, arrays, mesh)
    layout = as_layout(specs[0], arrays[0].shape, mesh)
    weight = P() if layout.spec is None else params_of(layout, (1,))
    return Lies([*specs, weight], options, out)


def loss(name: str, reduction: str, draw: Callable[..., Arrays], place=place_alike, fixed=(), **options) -> TorchLayer:
    ours = partial(getattr(functions, name), reduction=reduction, **options)
    theirs = partial(torch_functional(name), reduction=reduction, **options)
    return TorchLayer(ours, theirs, draw, place(reduction), fixed)


def logits_and_labels(rng: np.random.Generator) -> Arrays:
    return [rng.standard_normal((5, 6, 3)), rng.integers(0, 6, (5, 3))]


def conv_length(n: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> int:
    return (n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def conv(stride: int, padding: int, groups: int) -> TorchLayer:
    options = {"stride": stride, "padding": padding, "groups": groups}

    def shape(x, w):
        return x.shape[0], w.shape[0], *(conv_length(n, 3, stride, padding) for n in x.shape[2:])

    return TorchLayer(
        partial(functions.conv, **options),
        partial(torch_functional("conv2d"), **options),
        normal((3, 4, 7, 6), (6, 4 // groups, 3, 3), (6,)),
        place_weighted(shape, lambda w: bias_layout(w, groups, False), whole=(2, 3)),
    )


def conv_transpose(stride: int, padding: int, groups: int) -> TorchLayer:
    options = {"stride": stride, "padding": padding, "groups": groups}

    def shape(x, w):
        return x.shape[0], w.shape[1] * groups, *((n - 1) * stride - 2 * padding + 3 for n in x.shape[2:])

    return TorchLayer(
        partial(functions.conv_transpose, **options),
        partial(torch_functional("conv_transpose2d"), **options),
        normal((3, 4, 5, 4), (4, 6 // groups, 3, 3), (6,)),
        place_weighted(shape, lambda w: bias_layout(w, groups, True), whole=(2, 3)),
    )


def attention(method: str | None, causal: bool = False) -> TorchLayer:
    def place(rng: np.random.Generator, arrays: Arrays, mesh: spmd.Mesh) -> Lies:
        kind = "spec" if method in ("ring", "sequence") else None
        whole = (2,) if method in ("ring", "sequence") else ()
        spec = random_layout(rng, arrays[0].shape, mesh, whole=whole, kind=kind)
        kv = spec if method in ("ring", "sequence") else random_layout(rng, arrays[1].shape, mesh)
        return Lies([spec, kv, kv], {"spec": spec, "kv_spec": kv, "out_spec": spec}, spec)

    return TorchLayer(
        partial(functions.attention, method=method, causal=causal),
        partial(torch_functional("scaled_dot_product_attention"), is_causal=causal),
        normal((4, 6, 3), (4, 6, 3), (4, 6, 3)),
        place,
    )


def embedding(rng_spec: Any = None) -> TorchLayer:
    def place(rng: np.random.Generator, arrays: Arrays, mesh: spmd.Mesh) -> Lies:
        table, ids = arrays
        t, i = random_layout(rng, table.shape, mesh), random_layout(rng, ids.shape, mesh)
        out = random_layout(rng, (*ids.shape, table.shape[1]), mesh)
        return Lies([t, i], {"table_spec": t, "spec": i, "out_spec": out}, out)

    return TorchLayer(
        functions.embedding,
        lambda table, ids: torch_functional("embedding")(ids, table),
        lambda rng: [rng.standard_normal((7, 4)), rng.integers(0, 7, (5, 3))],
        place,
        fixed=(1,),
    )


def recurrent(kind: str) -> TorchLayer:
    gates = {"rnn": 1, "gru": 3, "lstm": 4}[kind]

    def params(ih, hh):
        return {"weight_ih_l0": ih, "weight_hh_l0": hh}

    def ours(x, ih, hh, **specs):
        return getattr(functions, kind)(x, None, params(ih, hh), **specs)[0]

    def theirs(x, ih, hh):
        import torch

        module = {"rnn": torch.nn.RNN, "gru": torch.nn.GRU, "lstm": torch.nn.LSTM}[kind](3, 4, bias=False).double()
        return torch.func.functional_call(module, params(ih.reshape(-1, 3), hh.reshape(-1, 4)), (x,))[0]

    def place(rng: np.random.Generator, arrays: Arrays, mesh: spmd.Mesh) -> Lies:
        axes = list(mesh.axes)
        time, batch, hidden = ([n for n in axes if rng.random() < 0.5] for _ in range(3))
        batch = [n for n in batch if n not in time]
        hidden = [n for n in hidden if n not in (*time, *batch)]
        t, b, h = (tuple(n) or None for n in (time, batch, hidden))
        return Lies([P(t, b), P(None, h), P(None, h)], {"spec": P(t, b), "w_spec": P(h)}, P(t, b, h))

    return TorchLayer(ours, theirs, normal((5, 4, 3), (gates, 4, 3), (gates, 4, 4)), place)


def spectral() -> TorchLayer:
    def theirs(x, re, im):
        import torch

        w = torch.complex(re, im)
        full = torch.fft.rfftn(x, dim=(2, 3))
        top = torch.einsum("nchw,cohw->nohw", full[:, :, :2, :3], w[:, :, :2])
        low = torch.einsum("nchw,cohw->nohw", full[:, :, -1:, :3], w[:, :, 2:])
        rows = [top, full.new_zeros(x.shape[0], w.shape[1], x.shape[2] - 3, 3), low]
        return torch.fft.irfftn(torch.cat(rows, 2), s=x.shape[2:], dim=(2, 3))

    def ours(x, re, im, **specs):
        return functions.spectral_conv(x, re + 1j * im, **specs)

    def place(rng: np.random.Generator, arrays: Arrays, mesh: spmd.Mesh) -> Lies:
        x, w = arrays[:2]
        spec, w_spec = random_layout(rng, x.shape, mesh), random_layout(rng, w.shape, mesh)
        out = random_layout(rng, (x.shape[0], w.shape[1], *x.shape[2:]), mesh)
        return Lies([spec, w_spec, w_spec], {"spec": spec, "w_spec": w_spec, "out_spec": out}, out)

    return TorchLayer(ours, theirs, normal((2, 3, 6, 8), (3, 2, 3, 3), (3, 2, 3, 3)), place)


def rope() -> TorchLayer:
    def theirs(x):
        import torch

        n, half = x.shape[-2], x.shape[-1] // 2
        angles = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * cos - high * sin, low * sin + high * cos], -1)

    return TorchLayer(functions.rope, theirs, normal((3, 5, 4)), place_alike("none"))


def rows_of_softmax(name: str) -> TorchLayer:
    return TorchLayer(
        partial(getattr(functions, name), axis=1),
        partial(torch_functional(name), dim=1),
        normal((3, 6, 4)),
        place_alike("none"),
    )


def pool(name: str) -> TorchLayer:
    options = {"stride": 2, "padding": 1}
    return TorchLayer(
        partial(getattr(functions, name), window=3, **options),
        partial(torch_functional(f"{name}2d"), kernel_size=3, **options),
        normal((2, 3, 7, 6)),
        place_alone(lambda x: (*x.shape[:2], *(conv_length(n, 3, 2, 1) for n in x.shape[2:]))),
    )


def pad(mode: str) -> TorchLayer:
    return TorchLayer(
        partial(functions.pad, widths={-2: (2, 1), -1: (1, 2)}, mode=mode),
        lambda x: torch_functional("pad")(x, (1, 2, 2, 1), mode=mode),
        normal((2, 3, 7, 6)),
        place_alone(lambda x: (*x.shape[:2], x.shape[2] + 3, x.shape[3] + 3)),
    )


def resize(method: str, **options: Any) -> TorchLayer:
    name = {"linear": "bilinear", "cubic": "bicubic"}.get(method, method)
    return TorchLayer(
        partial(functions.resize, size=(11, 4), method=method, cubic=-0.75, **options),
        lambda x: torch_functional("interpolate")(x, (11, 4), mode=name, **options),
        normal((2, 3, 7, 6)),
        place_alone(lambda x: (*x.shape[:2], 11, 4)),
    )


IMAGE = (4, 6, 3, 5)
LAYERS: dict[str, TorchLayer] = {
    "linear": TorchLayer(
        functions.linear,
        torch_functional("linear"),
        normal((5, 3, 4), (6, 4), (6,)),
        place_weighted(lambda x, w: (*x.shape[:-1], w.shape[0]), rows_of),
    ),
    "conv": conv(1, 1, 1),
    "conv, stride 2": conv(2, 1, 1),
    "conv, groups": conv(1, 0, 2),
    "conv_transpose": conv_transpose(2, 1, 1),
    "conv_transpose, groups": conv_transpose(1, 0, 2),
    "max_pool": pool("max_pool"),
    "avg_pool": pool("avg_pool"),
    "pad, constant": pad("constant"),
    "pad, reflect": pad("reflect"),
    "pad, circular": pad("circular"),
    "resize, linear": resize("linear"),
    "resize, cubic": resize("cubic", align_corners=True),
    "resize, nearest": resize("nearest"),
    "layer_norm": TorchLayer(
        functions.layer_norm,
        lambda x, w, b: torch_functional("layer_norm")(x, w.shape, w, b),
        normal((4, 3, 6), (6,), (6,)),
        place_norm(lambda ndim: (ndim - 1,)),
    ),
    "rms_norm": TorchLayer(
        functions.rms_norm,
        lambda x, w: torch_functional("rms_norm")(x, w.shape, w, 1e-6),
        normal((4, 3, 6), (6,)),
        place_norm(lambda ndim: (ndim - 1,)),
    ),
    "batch_norm": TorchLayer(
        functions.batch_norm,
        lambda x, w, b: torch_functional("batch_norm")(x, None, None, w, b, training=True),
        normal(IMAGE, (6,), (6,)),
        place_norm(lambda ndim: (1,)),
    ),
    "group_norm": TorchLayer(
        lambda x, w, b, **specs: functions.group_norm(x, 2, w, b, **specs),
        lambda x, w, b: torch_functional("group_norm")(x, 2, w, b),
        normal(IMAGE, (6,), (6,)),
        place_norm(lambda ndim: (1,)),
    ),
    "instance_norm": TorchLayer(
        functions.instance_norm,
        lambda x, w, b: torch_functional("instance_norm")(x, weight=w, bias=b),
        normal(IMAGE, (6,), (6,)),
        place_norm(lambda ndim: (1,)),
    ),
    "softmax": rows_of_softmax("softmax"),
    "log_softmax": rows_of_softmax("log_softmax"),
    "softmin": rows_of_softmax("softmin"),
    "mse_loss": loss("mse_loss", "mean", normal((5, 4), (5, 4))),
    "mse_loss, none": loss("mse_loss", "none", normal((5, 4), (5, 4))),
    "l1_loss": loss("l1_loss", "mean", normal((5, 4), (5, 4))),
    "huber_loss": loss("huber_loss", "sum", normal((5, 4), (5, 4)), delta=0.7),
    "smooth_l1_loss": loss("smooth_l1_loss", "mean", normal((5, 4), (5, 4)), beta=0.7),
    "binary_cross_entropy": loss(
        "binary_cross_entropy", "mean", lambda rng: list(rng.uniform(0.01, 0.99, (2, 5, 4))), fixed=(1,)
    ),
    "binary_cross_entropy_with_logits": loss("binary_cross_entropy_with_logits", "mean", normal((5, 4), (5, 4))),
    "kl_div": loss("kl_div", "batchmean", lambda rng: [rng.standard_normal((5, 4)), rng.uniform(0.1, 3, (5, 4))]),
    "poisson_nll_loss": loss("poisson_nll_loss", "mean", normal((5, 4), (5, 4))),
    "cross_entropy": loss("cross_entropy", "mean", logits_and_labels, place_classes, (1,)),
    "cross_entropy, none": loss("cross_entropy", "none", logits_and_labels, place_classes, (1,), label_smoothing=0.2),
    "cross_entropy, weights": TorchLayer(
        lambda x, labels, w, **specs: functions.cross_entropy(x, labels, weight=w, label_smoothing=0.2, **specs),
        lambda x, labels, w: torch_functional("cross_entropy")(x, labels, w, label_smoothing=0.2),
        lambda rng: [*logits_and_labels(rng), rng.uniform(0.5, 2, 6)],
        place_weighted_classes,
        (1, 2),
    ),
    "cross_entropy of distributions": loss("cross_entropy", "mean", normal((5, 6, 3), (5, 6, 3))),
    "nll_loss": loss("nll_loss", "mean", logits_and_labels, place_classes, (1,)),
    "embedding": embedding(),
    "rope": rope(),
    "attention": attention(None),
    "attention by heads": attention("heads", causal=True),
    "attention by sequence": attention("sequence"),
    "attention in a ring": attention("ring"),
    "attention in a causal ring": attention("ring", causal=True),
    "rnn": recurrent("rnn"),
    "gru": recurrent("gru"),
    "lstm": recurrent("lstm"),
    "spectral_conv": spectral(),
}
