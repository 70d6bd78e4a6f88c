"""Pooling: feature maps of a network for images."""

from __future__ import annotations

import numpy as np

from spmd.bench import Row
from spmd.kernels import reference
from spmd.kernels.windows import output_length

_SHAPE = (16, 16, 256, 256)
_IN = 4 * 16 * 16 * 256 * 256


def _window(kernel: int, stride: int) -> tuple:
    padding = (kernel - 1) // 2
    return (kernel,) * 2, (stride,) * 2, ((padding, padding),) * 2, (1, 1)


def _rows(kernel: int, stride: int) -> list[Row]:
    window = _window(kernel, stride)
    m = output_length(256, kernel, stride, window[2][0])
    shape, out = (16, 16, m, m), 4 * 16 * 16 * m * m
    what = f"{kernel}x{kernel} stride {stride}, 16x16x256x256 float32"

    def entries(rng: np.random.Generator, shape: tuple[int, ...] = _SHAPE) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def index(rng: np.random.Generator) -> np.ndarray:
        one = reference.max_pool(entries(rng, (1, 1, 256, 256)), *window)[1].astype(np.int32)
        return np.ascontiguousarray(np.broadcast_to(one, shape))

    return [
        Row("max_pool", what, lambda rng: (entries(rng), *window), _IN + 2 * out),
        Row("max_pool_gather", what, lambda rng: (entries(rng), index(rng)), _IN + 2 * out),
        Row("max_pool_vjp", what, lambda rng: (entries(rng, shape), index(rng), (256, 256), *window), _IN + 2 * out),
        Row("avg_pool", what, lambda rng: (entries(rng), *window), _IN + out),
        Row("avg_pool_vjp", what, lambda rng: (entries(rng, shape), (256, 256), *window), _IN + out),
    ]


ROWS = _rows(2, 2) + _rows(3, 2) + _rows(3, 1)
