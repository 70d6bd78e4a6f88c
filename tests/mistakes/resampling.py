"""Mistakes with layers that pool, pad and resize: options, widths and lengths that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mistakes import Row, run
from spmd import P, functions
from spmd.errors import LayoutError, SpecError

X = np.zeros((2, 1, 4, 4))
MATRIX = np.zeros((2, 3))


def pad(x: Any, *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: functions.pad(x, *args, **options)


def resize(*args: Any, x: Any = X, **options: Any) -> Callable[[], Any]:
    return lambda: functions.resize(x, *args, **options)


def rows(where: str, cases: dict[str, tuple]) -> list[Row]:
    return [
        Row(f"{where}: {name}", call, error, f"spmd.functions.{where}: argument {argument}", *words)
        for name, (call, error, argument, *words) in cases.items()
    ]


IN_PAIRS = "in pairs: (low, high) for each dimension, the first one first"

PADS = rows(
    "pad",
    {
        "a flat pair": (
            *(pad(MATRIX, (1, 2)), LayoutError, "widths", "(1, 2) for 2 dimensions"),
            *(IN_PAIRS, "widths=((0, 0), (1, 2)): what torch.nn.functional.pad means"),
        ),
        "torch's order": (
            *(pad(MATRIX, (1, 2, 3, 4)), LayoutError, "widths", "(1, 2, 3, 4)"),
            *(IN_PAIRS, "widths=((3, 4), (1, 2)): what torch.nn.functional.pad means, which has the last"),
        ),
        "three numbers": (
            pad(MATRIX, ((1, 2, 3),)),
            LayoutError,
            "widths",
            "((1, 2, 3),)",
            IN_PAIRS,
            "((1, 1), (1, 1))",
        ),
        "no number": (pad(MATRIX, 1.5), LayoutError, "widths", "1.5", IN_PAIRS, "the same around each"),
        "no such axis": (pad(MATRIX, {2: 1}), LayoutError, "widths", "{2: 1}", IN_PAIRS, "widths="),
        "an axis twice": (pad(MATRIX, {0: 1, -2: 1}), LayoutError, "widths", "{0: 1, -2: 1}", IN_PAIRS, "widths="),
        "all cut off": (
            *(pad(MATRIX, ((-2, -1), (0, 0))), LayoutError, "widths", "(-2, -1) for dimension 0, of length 2"),
            *("to cut off 2 entries at most", "negative"),
        ),
        "nothing to repeat": (
            *(pad(MATRIX[:0], ((1, 0), (0, 0)), "edge"), LayoutError, "widths", "dimension 0, which has no entry"),
            *("an entry", 'mode="constant"'),
        ),
        "blocks with nothing to repeat": (
            *(lambda: run(lambda x: functions.pad(x, {0: 1}, "wrap", spec=P("data")), MATRIX[:0]), LayoutError),
            *("widths", "dimension 0, which has no entry", "an entry", 'mode="constant"'),
        ),
        "an unknown mode": (
            *(pad(MATRIX, 1, "reflex"), SpecError, "mode", "'reflex'", "one of 'constant', 'reflect', 'symmetric'"),
            'mode="reflect"; np.pad',
        ),
        "a mode of np.pad": (
            pad(MATRIX, 1, "median"),
            SpecError,
            "mode",
            "'median'",
            "one of",
            "np.pad(x, widths, mode)",
        ),
        "a number as mode": (pad(MATRIX, 1, 3), SpecError, "mode", "3", "one of", 'mode="constant"'),
        "an array as value": (pad(MATRIX, 1, value=X), SpecError, "value", "ndarray", "a number", "value=0"),
        "no numbers": (pad(np.array(["a"]), 1), SpecError, "x", "<U1", "numbers", "np.asarray"),
    },
)

ONE_OF = "one of shape, size and scale_factor"

SIZES = rows(
    "resize",
    {
        "no length": (resize(), SpecError, "shape", "none of them", ONE_OF, "scale_factor=2"),
        "two": (resize(size=3, scale_factor=2), SpecError, "size", "size and scale_factor", ONE_OF, "size=(64, 64)"),
        "no scale factor": (
            *(resize(size=3, recompute_scale_factor=True), SpecError, "size", "size and recompute_scale_factor"),
            *(ONE_OF, "scale_factor=2"),
        ),
        "a short shape": (resize((8, 8)), SpecError, "shape", "(8, 8) for ndarray", "4 lengths", "shape=(4, 2, 8, 8)"),
        "a number as shape": (resize(8), SpecError, "shape", "8 for ndarray", "4 lengths", "shape=(4, 2, 8, 8)"),
        "three sizes": (resize(size=(8, 8, 8)), SpecError, "size", "(8, 8, 8)", "one for each spatial", "size=(2, 2)"),
        "no space": (resize(size=3, x=MATRIX), SpecError, "size", "3 for", "(N, C, *spatial)", "shape=(4, 6)"),
        "a broken size": (resize(size=3.5), SpecError, "size", "3.5", "lengths: ints", "scale_factor=1.5"),
        "a scale of 0": (resize(scale_factor=0), SpecError, "scale_factor", "0", "a number above 0", "scale_factor=2"),
        "a negative length": (resize(size=-1), SpecError, "size", "(-1, -1)", "at least 0", "shape=(4, 2, 8, 8)"),
        "more of nothing": (resize((2, 3), x=MATRIX[:0]), SpecError, "shape", "(2, 3)", "only stay empty", "shape="),
        "torch's word": (
            *(resize(size=3, method="bicubic"), SpecError, "method", "'bicubic'", "one of 'nearest', 'nearest-exact'"),
            "method='cubic'",
        ),
        "corners of an area": (
            *(resize(size=3, method="area", align_corners=True), SpecError, "align_corners", "method='area'"),
            *('method="linear" or "cubic"', "align_corners=False"),
        ),
    },
)

POOLS = rows(
    "avg_pool",
    {
        "a divisor of 0": (
            *(lambda: functions.avg_pool(X, 2, divisor_override=0), SpecError, "divisor_override", "0"),
            *("an int, not 0", "leave it out"),
        ),
        "a long spec": (
            *(lambda: run(lambda x: functions.avg_pool(x, 2, spec=P(*[None] * 4, "data")), X, out=None), SpecError),
            *("spec", "for an array of 4 dimensions", "at most 4 entries", "shorten"),
        ),
    },
)

ADAPTIVE = rows(
    "adaptive_max_pool",
    {
        "too many numbers": (
            *(lambda: functions.adaptive_max_pool(X, (2, 3, 4)), SpecError, "output_size", "(2, 3, 4)"),
            *("one for each of the 2 spatial dimensions", "output_size=(1, 1)"),
        ),
        "windows of nothing": (
            *(lambda: functions.adaptive_max_pool(X[:, :, :0], (2, None)), SpecError, "output_size"),
            *("an array of lengths [0,", "an entry for each window", "None keeps a length"),
        ),
    },
)

ROWS = [*PADS, *SIZES, *POOLS, *ADAPTIVE]
