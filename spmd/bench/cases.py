"""The rows of `spmd.bench`: each kernel at the sizes of a typical model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spmd.kernels import reference
from spmd.kernels.taps import resize_taps, transposed
from spmd.kernels.windows import output_length

__all__ = ["ROWS", "Row"]

Shape = tuple[int, ...]
Rng = np.random.Generator


@dataclass(frozen=True)
class Row:
    """A kernel at one size.

    kernel: its name. what: shapes, dtype and options, as the table shows them. make: rng -> its arguments, for one
    worker. moved: the bytes that go to and from memory, each operand and result counted once. flops: its additions and
    multiplications; 0 for a kernel that is bound by memory.
    """

    kernel: str
    what: str
    make: Callable[[Rng], tuple]
    moved: int
    flops: int = 0


def _normal(rng: Rng, shape: Shape, count: int = 1) -> tuple[np.ndarray, ...]:
    return tuple(rng.standard_normal(shape, np.float32) for _ in range(count))


def _activation() -> list[Row]:
    """Activations of a large layer."""
    shape, nbytes = (4096, 4096), 4096 * 4096 * 4
    bias = np.ones(4096, np.float32)
    rows = []
    for kind in ("relu", "silu", "gelu_tanh", "gelu", "elu", "softplus", "mish"):
        what = f"{kind} with bias, 4096x4096 float32"
        rows += [
            Row("activate", what, lambda rng, kind=kind: (*_normal(rng, shape), bias, kind), 2 * nbytes),
            Row("activate_vjp", what, lambda rng, kind=kind: (*_normal(rng, shape, 2), bias, kind), 3 * nbytes),
        ]
    return rows


def _convolution() -> list[Row]:
    """A layer of an image network, one of a volume, and a depthwise one."""

    def case(what: str, x: Shape, w: Shape, groups: int) -> list[Row]:
        dims = len(x) - 2
        options = ((1,) * dims, ((1, 1),) * dims, (1,) * dims, groups)
        y = (x[0], w[0], *x[2:])
        moved = 4 * (math.prod(x) + math.prod(y) + math.prod(w))
        flops = 2 * math.prod(y) * math.prod(w[1:])
        x_w = lambda rng: (*_normal(rng, x), *_normal(rng, w), *options)
        y_w = lambda rng: (*_normal(rng, y), *_normal(rng, w), x[2:], *options)
        y_x = lambda rng: (*_normal(rng, y), *_normal(rng, x), w[2:], *options)
        return [
            Row("conv", what, x_w, moved, flops),
            Row("conv_input_adjoint", what, y_w, moved, flops),
            Row("conv_weight_adjoint", what, y_x, moved, flops),
        ]

    shape, columns = (4, 16, 256, 256), (4, 16, 3, 3, 256, 256)
    window = ((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    what, moved = "4x16x256x256, 3x3", 10 * 4 * math.prod(shape)
    return [
        *case("2x16x256x256, 16 filters 3x3", (2, 16, 256, 256), (16, 16, 3, 3), 1),
        *case("4x64x56x56, 64 filters 3x3", (4, 64, 56, 56), (64, 64, 3, 3), 1),
        *case("1x8x48x48x48, 8 filters 3x3x3", (1, 8, 48, 48, 48), (8, 8, 3, 3, 3), 1),
        *case("4x64x112x112, 64 depthwise 3x3", (4, 64, 112, 112), (64, 1, 3, 3), 64),
        Row("im2col", what, lambda rng: (*_normal(rng, shape), *window), moved),
        Row("col2im", what, lambda rng: (*_normal(rng, columns), (256, 256), *window), moved),
    ]


def _embeddings() -> list[Row]:
    """Rows of a vocabulary's table, for the words of a text: few words are frequent."""
    rows, width, count = 32768, 512, 32768
    moved = count * width * 4

    def ids(rng: Rng) -> np.ndarray:
        return (rows * rng.random(count) ** 4).astype(np.int64)

    table, entries = (rows, width), (count, width)
    return [
        Row("take_rows", f"{count} of {rows}x{width} float32", lambda rng: (*_normal(rng, table), ids(rng)), 2 * moved),
        Row(
            "add_rows",
            f"{count}x{width} float32 to {rows}",
            lambda rng: (ids(rng), *_normal(rng, entries), rows),
            moved + rows * width * 4,
        ),
    ]


def _interpolation() -> list[Row]:
    """Images to twice the size and back, a field that is warped a little, receivers at random points."""
    n = 2048
    nbytes = 4 * n * n
    rows = []

    def double(method: str, axis: int):
        return lambda rng: (*_normal(rng, (2, n, n)), *resize_taps(n, 2 * n, method), axis)

    def halve(method: str, axis: int):
        shape = (2, 2 * n, n) if axis == 1 else (2, n, 2 * n)
        return lambda rng: (*_normal(rng, shape), *transposed(*resize_taps(n, 2 * n, method), n), axis)

    def warp(rng: Rng) -> np.ndarray:
        """Points near those of the grid."""
        grid = np.stack(np.meshgrid(np.arange(n), np.arange(n), indexing="ij"), axis=-1).reshape(-1, 2)
        return (grid + rng.uniform(-2, 2, grid.shape)).astype(np.float32)

    for method in ("linear", "cubic"):
        for axis, name in ((1, "rows"), (2, "columns")):
            what = f"{method}, {name} {n} -> {2 * n}, 2x{n}x{n} f4"
            rows += [
                Row("resample", what, double(method, axis), 6 * nbytes),
                Row("resample", f"its adjoint, {name} {2 * n} -> {n}", halve(method, axis), 6 * nbytes),
            ]
    for method in ("linear", "cubic"):
        options = (method, "zero", (0, 0))
        what = f"{method}, {n}x{n} float32, all warped"
        sample = lambda rng, options=options: (*_normal(rng, (1, n, n)), warp(rng), *options)
        inject = lambda rng, options=options: (*_normal(rng, (1, n * n)), warp(rng), (n, n), *options)
        rows += [Row("sample", what, sample, 4 * nbytes), Row("inject", what, inject, 4 * nbytes)]
    return rows


def _moves() -> list[Row]:
    """Blocks that are joined."""
    n = 1 << 24
    return [
        Row(
            "combine",
            f"{count} blocks of {n} float32",
            lambda rng, count=count: (list(_normal(rng, (n,), count)),),
            (count + 1) * 4 * n,
        )
        for count in (2, 4)
    ]


def _normalisation() -> list[Row]:
    """Rows of a transformer, vectors and images of a batch."""
    shape, what, nbytes = (16384, 1024), "16384x1024 float32", 16384 * 1024 * 4
    weight, bias = np.ones(1024, np.float32), np.zeros(1024, np.float32)
    mean, rstd = np.zeros(16384, np.float32), np.ones(16384, np.float32)
    rows = [
        Row("normalize", what, lambda rng: (*_normal(rng, shape), weight, bias, 1e-5, True), 2 * nbytes),
        Row("normalize_vjp", what, lambda rng: (*_normal(rng, shape, 2), weight, mean, rstd, True), 3 * nbytes),
    ]
    for name, s in {"vectors": (16384, 1024, 1), "images": (64, 64, 4096)}.items():
        channel = np.ones(s[1], np.float32)
        affine = lambda rng, s=s, channel=channel: (*_normal(rng, s), channel, channel, channel)
        sums = lambda rng, s=s, channel=channel: (*_normal(rng, s, 2), channel)
        rows += [
            Row("moments", f"of {name}, float32", lambda rng, s=s: _normal(rng, s), nbytes),
            Row("channel_affine", f"of {name}, float32", affine, 2 * nbytes),
            Row("channel_sums", f"of {name}, float32", sums, 2 * nbytes),
        ]
    return rows


def _philox() -> list[Row]:
    """Random numbers: only the results go to memory. Ten rounds of eight integer operations make four words; what makes
    numbers of them is not counted."""
    words = 1 << 24

    def row(kernel: str, dtype: str, *options: float) -> Row:
        n = words * 4 // np.dtype(dtype).itemsize
        make = lambda rng: (rng.integers(0, 1 << 32, 2, np.uint32), (n,), ((0, n),), dtype, *options)
        return Row(kernel, f"{n} {dtype}", make, 4 * words, 20 * words)

    return [
        row("random_bits", "uint32"),
        row("random_uniform", "float32", 0, 1),
        row("random_uniform", "float64", 0, 1),
        row("random_normal", "float32"),
        row("random_normal", "float64"),
        row("random_truncated", "float32", -2, 2),
        row("random_exponential", "float32"),
        row("random_gumbel", "float32"),
    ]


def _pooling() -> list[Row]:
    """Feature maps of a network for images."""
    shape, nbytes = (16, 16, 256, 256), 4 * 16 * 16 * 256 * 256

    def case(kernel: int, stride: int) -> list[Row]:
        low = (kernel - 1) // 2
        window = (kernel,) * 2, (stride,) * 2, ((low, low),) * 2, (1, 1)
        m = output_length(256, kernel, stride, (low, low))
        out_shape, out = (16, 16, m, m), 4 * 16 * 16 * m * m
        what = f"{kernel}x{kernel} stride {stride}, 16x16x256x256 float32"

        def index(rng: Rng) -> np.ndarray:
            one = reference.max_pool(*_normal(rng, (1, 1, 256, 256)), *window)[1].astype(np.int32)
            return np.ascontiguousarray(np.broadcast_to(one, out_shape))

        max_vjp = lambda rng: (*_normal(rng, out_shape), index(rng), (256, 256), *window)
        avg_vjp = lambda rng: (*_normal(rng, out_shape), (256, 256), *window)
        return [
            Row("max_pool", what, lambda rng: (*_normal(rng, shape), *window), nbytes + 2 * out),
            Row("max_pool_gather", what, lambda rng: (*_normal(rng, shape), index(rng)), nbytes + 2 * out),
            Row("max_pool_vjp", what, max_vjp, nbytes + 2 * out),
            Row("avg_pool", what, lambda rng: (*_normal(rng, shape), *window), nbytes + out),
            Row("avg_pool_vjp", what, avg_vjp, nbytes + out),
        ]

    return case(2, 2) + case(3, 2) + case(3, 1)


def _softmaxes() -> list[Row]:
    """Rows of a language model's attention, and of a classifier."""
    shape, what, nbytes = (16384, 1024), "16384x1024 float32", 16384 * 1024 * 4

    def one_per_row(rng: Rng) -> np.ndarray:
        return rng.standard_normal(16384, np.float32) + 9

    def logits_and_labels(rng: Rng) -> tuple[np.ndarray, ...]:
        return *_normal(rng, shape), rng.integers(0, 1024, 16384)

    scaled = lambda rng: (one_per_row(rng), *_normal(rng, shape), one_per_row(rng))
    sums = lambda rng: (*_normal(rng, shape), one_per_row(rng), rng.integers(0, 9999, 16384))
    two = lambda rng: _normal(rng, shape, 2)
    return [
        *(
            Row(name, what, lambda rng, n=n: _normal(rng, shape, n), (n + 1) * nbytes)
            for name, n in (("softmax", 1), ("softmax_vjp", 2), ("log_softmax", 1), ("log_softmax_vjp", 2))
        ),
        Row("logsumexp", what, lambda rng: _normal(rng, shape), nbytes),
        Row("scaled_exp", what, scaled, 2 * nbytes),
        Row("exp_sums", what, sums, nbytes),
        Row("cross_entropy", what, logits_and_labels, nbytes),
        Row("cross_entropy_and_gradient", what, logits_and_labels, 2 * nbytes),
        Row("soft_cross_entropy", what, two, 2 * nbytes),
        Row("soft_cross_entropy_and_gradient", what, two, 3 * nbytes),
    ]


def _stencils() -> list[Row]:
    """Five points of a plane, seven of a volume."""
    five = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
    seven = (*((0, *o) for o in five), (1, 0, 0), (-1, 0, 0))
    weights = (0.5, *(0.1,) * 6)
    plane, volume, n = (2048, 4096), (128, 256, 256), 1 << 23

    def five_points(dtype: str) -> Row:
        make = lambda rng: (rng.random(plane).astype(dtype), five, weights[:5], ((1, 1),) * 2)
        return Row("stencil", f"5 points, 2048x4096 {dtype}", make, 2 * n * np.dtype(dtype).itemsize)

    seven_points = lambda rng: (rng.random(volume, np.float32), seven, weights, ((1, 1),) * 3)
    of_weights = lambda rng: (*rng.random((2, *plane), np.float32), five, ((1, 1),) * 2)
    return [
        five_points("float32"),
        five_points("float64"),
        Row("stencil", "7 points, 128x256x256 float32", seven_points, 2 * 4 * n),
        Row("stencil_weights", "5 points, 2048x4096 float32", of_weights, 2 * 4 * n),
    ]


def _updates() -> list[Row]:
    """Steps of optimisers."""
    n = 1 << 23

    def arrays(rng: Rng, count: int) -> list[np.ndarray]:
        return [np.abs(x) for x in _normal(rng, (n,), count)]

    return [
        Row("sgd", f"{n} float32", lambda rng: (*arrays(rng, 2), None, 0.1, 0.0, False), 3 * 4 * n),
        Row("sgd", f"{n} float32, momentum", lambda rng: (*arrays(rng, 3), 0.1, 0.9, True), 5 * 4 * n),
        Row("adamw", f"{n} float32", lambda rng: (*arrays(rng, 4), 1e-3, 0.9, 0.999, 1e-8, 0.01, 5), 7 * 4 * n),
    ]


ROWS: dict[str, list[Row]] = {
    "activation": _activation(),
    "convolution": _convolution(),
    "embeddings": _embeddings(),
    "interpolation": _interpolation(),
    "moves": _moves(),
    "normalisation": _normalisation(),
    "philox": _philox(),
    "pooling": _pooling(),
    "softmaxes": _softmaxes(),
    "stencils": _stencils(),
    "updates": _updates(),
}
"""The rows of each family of `spmd.kernels`."""
