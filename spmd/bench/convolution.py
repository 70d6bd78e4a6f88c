"""Convolution: a layer of an image network, one of a volume, and a depthwise one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spmd.bench import Row

_CASES = (
    ("2x16x256x256, 16 filters 3x3", (2, 16, 256, 256), (16, 16, 3, 3), 1),
    ("4x64x56x56, 64 filters 3x3", (4, 64, 56, 56), (64, 64, 3, 3), 1),
    ("1x8x48x48x48, 8 filters 3x3x3", (1, 8, 48, 48, 48), (8, 8, 3, 3, 3), 1),
    ("4x64x112x112, 64 depthwise 3x3", (4, 64, 112, 112), (64, 1, 3, 3), 64),
)


def _draw(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[Any]:
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def _rows(what: str, x: tuple[int, ...], w: tuple[int, ...], groups: int) -> list[Row]:
    dims = len(x) - 2
    options = ((1,) * dims, ((1, 1),) * dims, (1,) * dims, groups)
    y = (x[0], w[0], *x[2:])
    moved = 4 * (math.prod(x) + math.prod(y) + math.prod(w))
    flops = 2 * math.prod(y) * math.prod(w[1:])
    return [
        Row("conv", what, lambda rng: (*_draw(rng, x, w), *options), moved, flops),
        Row("conv_input_adjoint", what, lambda rng: (*_draw(rng, y, w), x[2:], *options), moved, flops),
        Row("conv_weight_adjoint", what, lambda rng: (*_draw(rng, y, x), w[2:], *options), moved, flops),
    ]


_X = (4, 16, 256, 256)
_WINDOW = ((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))

ROWS = [row for case in _CASES for row in _rows(*case)] + [
    Row("im2col", "4x16x256x256, 3x3", lambda rng: (*_draw(rng, _X), *_WINDOW), 10 * 4 * math.prod(_X)),
    Row(
        "col2im",
        "4x16x256x256, 3x3",
        lambda rng: (*_draw(rng, (4, 16, 3, 3, 256, 256)), (256, 256), *_WINDOW),
        10 * 4 * math.prod(_X),
    ),
]
