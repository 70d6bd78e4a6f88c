"""Mistakes in convolutions of arrays that lie anyhow."""

from __future__ import annotations

import numpy as np

import spmd
from mistakes import Row
from spmd import P, functions
from spmd.errors import LayoutError, SpecError

SPACE = P(None, None, "data")
IMAGE, FILTERS = np.ones((2, 4, 8)), np.ones((2, 4, 3))


def _conv(x=IMAGE, w=FILTERS, spec: P = SPACE, **options):
    """A convolution in a body, of an array that lies so."""
    return lambda: spmd.map(lambda x, w: functions.conv(x, w, spec=spec, **options), (spec, P()), None)(x, w)


ROWS = [
    *(
        Row(
            f"a boundary as others call it: {name}",
            _conv(boundary=name),
            SpecError,
            "spmd.functions.conv: argument boundary",
            repr(name),
            "one of zero, periodic, reflect, edge",
            f'boundary="{ours}"',
        )
        for name, ours in (("zeros", "zero"), ("circular", "periodic"), ("wrap", "periodic"), ("replicate", "edge"))
    ),
    Row(
        "a boundary without a spec",
        lambda: functions.conv(IMAGE, FILTERS, boundary="edge"),
        SpecError,
        "spmd.functions.conv: argument boundary",
        "'edge'",
        "a spec beside it",
        "P() where none does",
    ),
    Row(
        "nothing that could be continued",
        lambda: functions.conv(spmd.put(np.ones((2, 4, 0)), P()), FILTERS, padding=2, boundary="periodic"),
        LayoutError,
        "spmd.functions.conv: argument boundary",
        "'periodic' for an array of shape [2, 4, 0]",
        "entries that continue the array",
        'boundary="zero"',
    ),
    Row(
        "a kernel without entries",
        lambda: functions.conv(spmd.put(IMAGE, P()), FILTERS[..., :0]),
        SpecError,
        "spmd.functions.conv: argument w",
        "w of shape [2, 4, 0] for x of shape [2, 4, 8]",
        "a kernel of 1 dimensions with entries",
        "correspond, one by one",
    ),
    Row(
        "filters of other channels, of a global array",
        lambda: functions.conv(spmd.put(IMAGE, P("data")), FILTERS[:, :2]),
        SpecError,
        "spmd.functions.conv: argument w",
        "of 2 channels for each of 1 groups, for x of 4",
        "shape (O, C / groups, *kernel)",
        "groups=2",
    ),
    Row(
        "a bias of other channels, of a global array",
        lambda: functions.conv(spmd.put(IMAGE, P("data")), FILTERS, np.ones(4)),
        SpecError,
        "spmd.functions.conv: argument bias",
        "shape [4]",
        "shape [2], a number for each channel",
        "leave it out",
    ),
    Row(
        "a layout of another result",
        _conv(out_spec=spmd.Layout((2, 2, 8), P("data"), {"data": 2, "model": 2})),
        LayoutError,
        "spmd.functions.conv: argument out_spec",
        "Layout",
        "[2, 2, 6]",
        "leave out_spec out",
    ),
    Row(
        "a length that no output padding gives",
        lambda: functions.conv_transpose(IMAGE, FILTERS.transpose(1, 0, 2), stride=2, output_size=19),
        SpecError,
        "spmd.functions.conv_transpose: argument output_size",
        "(19,)",
        "lengths from [17] to [18], for an input of lengths [8]",
        "output_size=[17]",
    ),
    Row(
        "a length and an output padding",
        lambda: functions.conv_transpose(IMAGE, FILTERS.transpose(1, 0, 2), stride=2, output_padding=1, output_size=18),
        SpecError,
        "spmd.functions.conv_transpose: argument output_size",
        "both",
        "one of output_size and output_padding",
        "output_padding=0",
    ),
    Row(
        "a transposed convolution of integers",
        lambda: functions.conv_transpose(spmd.put(IMAGE.astype(int), P()), FILTERS),
        SpecError,
        "spmd.functions.conv_transpose: argument x",
        "int64",
        "floating or complex numbers",
        "x.astype(float)",
    ),
]
