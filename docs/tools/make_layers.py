"""Write the table of docs/reference/layers.md, of what layers send, counted in a run.

Run by `python docs/tools/make_layers.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import spmd
from spmd import P
from spmd import functions as F

PAGE = Path(__file__).parents[1] / "reference" / "layers.md"
COMMAND = "python docs/tools/make_layers.py"
START, END = f"<!-- by {COMMAND} -->", "<!-- end of the table -->"


class Row(NamedTuple):
    """A layer, as called in a body. split: what is split, in words. shapes, specs: of the whole operands. axes: of the
    mesh. integers: the places of operands that are not differentiated."""

    layer: str
    split: str
    call: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    specs: Sequence[P]
    axes: dict[str, int]
    integers: Sequence[int] = ()


class Counts(NamedTuple):
    """What one direction of a layer does: operators of worker 0, and messages and bytes of all workers."""

    operators: Counter[str]
    messages: int
    bytes: int

    def __str__(self) -> str:
        if not self.operators:
            return "nothing"
        names = ", ".join(f"{name} × {n}" if n > 1 else name for name, n in sorted(self.operators.items()))
        return f"{names}: {self.messages} messages, {self.bytes} B" if self.messages else f"{names}: no message"


def rows() -> list[Row]:
    """The rows of the table."""
    return [
        *_linear(),
        *_convolutions(),
        *_windows(),
        *_norms(),
        *_losses(),
        *_attention(),
        *_recurrent(),
        *_transforms(),
    ]


def _linear() -> list[Row]:
    x, w, features = (8, 12, 16), (24, 16), P(None, None, "m")
    return [
        Row("linear", "batch of x", lambda x, w: F.linear(x, w, spec=P("d")), (x, w), (P("d"), P()), {"d": 4}),
        Row("linear", "rows of w", lambda x, w: F.linear(x, w, w_spec=P("m")), (x, w), (P(), P("m")), {"m": 4}),
        Row(
            "linear",
            "columns of w, features of x",
            lambda x, w: F.linear(x, w, spec=features, w_spec=P(None, "m")),
            (x, w),
            (features, P(None, "m")),
            {"m": 4},
        ),
        Row(
            "linear",
            "positions of x, rows of w",
            lambda x, w: F.linear(x, w, spec=P(None, "m"), w_spec=P("m")),
            (x, w),
            (P(None, "m"), P("m")),
            {"m": 4},
        ),
        Row(
            "linear",
            "columns of w, features of x; positions of y",
            lambda x, w: F.linear(x, w, spec=features, w_spec=P(None, "m"), out_spec=P(None, "m")),
            (x, w),
            (features, P(None, "m")),
            {"m": 4},
        ),
    ]


def _convolutions() -> list[Row]:
    image, weights, rows = (4, 8, 16, 12), (8, 8, 3, 3), P(None, None, "m")
    channels, filters = P(None, "m"), P("m")

    def row(split: str, spec: P, w_spec: P) -> Row:
        call = partial(F.conv, padding=1, spec=spec, w_spec=w_spec)
        return Row("conv", split, call, (image, weights), (spec, w_spec), {"m": 4})

    return [
        row("batch", P("m"), P()),
        row("rows of the image", rows, P()),
        row("channels out", P(), filters),
        row("channels in", channels, P(None, "m")),
        Row(
            "conv_transpose",
            "rows of the image; stride 2",
            partial(F.conv_transpose, stride=2, padding=1, spec=rows),
            (image, weights),
            (rows, P()),
            {"m": 4},
        ),
    ]


def _windows() -> list[Row]:
    image, rows = (4, 2, 16, 12), P(None, None, "h")

    def row(layer: str, split: str, call: Callable[..., Any], spec: P = rows) -> Row:
        return Row(layer, split, partial(call, spec=spec), [image], [spec], {"h": 4})

    return [
        row("max_pool", "rows; windows of 2", partial(F.max_pool, window=2)),
        row("max_pool", "rows; windows of 3, stride 2", partial(F.max_pool, window=3, stride=2, padding=1)),
        row("avg_pool", "batch; windows of 3", partial(F.avg_pool, window=3), P("h")),
        row("pad", "rows; 1 on each side, periodic", partial(F.pad, widths={2: 1, 3: 1}, mode="wrap")),
        row("resize", "rows; to twice as many, linear", partial(F.resize, scale_factor=2)),
    ]


def _norms() -> list[Row]:
    x, batch, channels, features = (8, 12, 16), P("d"), P(None, "m"), P(None, None, "m")
    options = {"shape": x}
    return [
        Row("layer_norm", "batch", lambda x, w: F.layer_norm(x, w, spec=batch), (x, (16,)), (batch, P()), {"d": 4}),
        Row(
            "layer_norm",
            "features",
            lambda x, w: F.layer_norm(x, w, spec=features),
            (x, (16,)),
            (features, P("m")),
            {"m": 4},
        ),
        Row("softmax", "rows", lambda x: F.softmax(x, spec=batch), (x,), (batch,), {"d": 4}),
        Row("softmax", "entries of the rows", lambda x: F.softmax(x, spec=features), (x,), (features,), {"m": 4}),
        Row("batch_norm", "batch", lambda x, w: F.batch_norm(x, w, spec=batch), (x, (12,)), (batch, P()), {"d": 4}),
        Row(
            "batch_norm",
            "channels",
            lambda x, w: F.batch_norm(x, w, spec=channels),
            (x, (12,)),
            (channels, P("m")),
            {"m": 4},
        ),
        Row(
            "group_norm",
            "channels, 4 groups",
            lambda x, w: F.group_norm(x, 4, w, spec=channels, **options),
            (x, (12,)),
            (channels, P("m")),
            {"m": 4},
        ),
        Row(
            "group_norm",
            "channels, 2 groups across workers",
            lambda x, w: F.group_norm(x, 2, w, spec=channels, **options),
            (x, (12,)),
            (channels, P("m")),
            {"m": 4},
        ),
    ]


def _losses() -> list[Row]:
    x, rows, both = (8, 16), P("d"), P("d", "m")
    return [
        Row("mse_loss", "batch; the mean", lambda x, t: F.mse_loss(x, t, spec=rows), (x, x), (rows, rows), {"d": 4}),
        Row(
            "cross_entropy",
            "batch; the mean",
            lambda x, t: F.cross_entropy(x, t, spec=rows),
            (x, x[:1]),
            (rows, rows),
            {"d": 4},
            (1,),
        ),
        Row(
            "cross_entropy",
            "batch and classes; the mean",
            lambda x, t: F.cross_entropy(x, t, spec=both),
            (x, x[:1]),
            (both, rows),
            {"d": 2, "m": 2},
            (1,),
        ),
    ]


def _recurrent() -> list[Row]:
    shapes = (8, 12, 16), (3, 8, 16), (3, 8, 8)

    def row(split: str, axes: dict[str, int], spec: P, w_spec: P, **options: Any) -> Row:
        def call(x: Any, ih: Any, hh: Any) -> Any:
            params = {"weight_ih_l0": ih, "weight_hh_l0": hh}
            return F.gru(x, None, params, spec=spec, w_spec=w_spec, **options)[0]

        weights = P(None, *w_spec)
        return Row("gru", split, call, shapes, (spec, weights, weights), axes)

    return [
        row("batch of x", {"d": 4}, P(None, "d"), P()),
        row("hidden features", {"m": 4}, P(), P("m")),
        row("steps of x, in 4 microbatches", {"t": 4}, P("t"), P(), microbatches=4),
    ]


def _attention() -> list[Row]:
    shapes, heads, positions = ((8, 16, 4),) * 3, P("m"), P(None, "m")

    def row(split: str, spec: P, **options: Any) -> Row:
        call = lambda q, k, v: F.attention(q, k, v, spec=spec, **options)
        return Row("attention", split, call, shapes, (spec,) * 3, {"m": 4})

    def lookup(split: str, spec: P, table_spec: P, out_spec: P | None = None) -> Row:
        call = lambda t, ids: F.embedding(t, ids, spec=spec, table_spec=table_spec, out_spec=out_spec)
        return Row("embedding", split, call, ((12, 16), (8,)), (table_spec, spec), {"m": 4}, integers=[1])

    return [
        row("heads", heads),
        row("positions, by heads", positions, method="heads"),
        row("positions, by sequences", positions, method="sequence"),
        row("positions, in a ring", positions, method="ring"),
        row("positions, in a causal ring", positions, method="ring", causal=True),
        Row("rope", "positions", lambda x: F.rope(x, spec=positions), shapes[:1], (positions,), {"m": 4}),
        lookup("rows of the table", P(), P("m")),
        lookup("rows of the table, ids", P("m"), P("m"), P("m")),
        lookup("features of the table", P(), P(None, "m")),
    ]


def _transforms() -> list[Row]:
    field, modes = (16, 16), (2, 3, 4, 4, 2)

    def row(split: str, axes: tuple[int, ...], spec: P) -> Row:
        return Row("fftn", split, lambda x: spmd.fft.fftn(x, axes=axes, spec=spec), (field,), (spec,), {"m": 4})

    def fourier(split: str, spec: P) -> Row:
        call = lambda x, w: F.spectral_conv(x, w[..., 0] + 1j * w[..., 1], (4, 4), spec=spec)
        return Row("spectral_conv", split, call, ((4, 2, 16, 16), modes), (spec, P()), {"m": 4})

    return [
        row("rows, along columns", (1,), P("m")),
        row("rows, along both", (0, 1), P("m")),
        fourier("batch", P("m")),
        fourier("rows of the field", P(None, None, "m")),
    ]


def counted(row: Row) -> tuple[Counts, Counts]:
    """What the layer does forward, and for the cotangents of all operands."""
    mesh = spmd.Mesh(**row.axes, scheduler="lockstep")
    rng = np.random.default_rng(0)
    operands = [
        rng.integers(0, 4, shape) if k in row.integers else rng.standard_normal(shape)
        for k, shape in enumerate(row.shapes)
    ]
    chosen = [k for k in range(len(operands)) if k not in row.integers]

    def both(*blocks: Any) -> None:
        def layer(*some: Any) -> Any:
            given = dict(zip(chosen, some, strict=True))
            return row.call(*(given.get(k, block) for k, block in enumerate(blocks)))

        y, pullback = spmd.vjp(layer, *(blocks[k] for k in chosen))
        pullback(spmd.numpy.ones_like(y))

    def forward(*blocks: Any) -> None:
        row.call(*blocks)

    once, twice = (_run(mesh, body, row.specs, operands) for body in (forward, both))
    names, counts = twice.operators - once.operators, (twice.messages - once.messages, twice.bytes - once.bytes)
    return once, Counts(names, *counts)


def _run(mesh: spmd.Mesh, body: Callable[..., Any], specs: Sequence[P], operands: Sequence[Any]) -> Counts:
    with spmd.ledger() as log:
        mesh.map(body, in_specs=tuple(specs), out_specs=None)(*operands)
    workers = log.workers.values()
    operators = Counter({name: n for name, n in log.operators.items() if name != "Vary"})
    return Counts(operators, sum(w.messages for w in workers), sum(w.bytes for w in workers))


def table() -> str:
    """The table: a row for each case."""
    lines = ["| layer | split | forward | backward |", "|---|---|---|---|"]
    for row in rows():
        forward, backward = counted(row)
        axes = " × ".join(f"{name}={size}" for name, size in row.axes.items())
        shapes = ", ".join(str(list(shape)) for shape in row.shapes)
        lines.append(f"| `{row.layer}` | {row.split}; {shapes} on {axes} | {forward} | {backward} |")
    return "\n".join([START, "", *lines, "", END])


def text(page: str) -> str:
    """The page with its table written anew."""
    before, _, rest = page.partition(START)
    return before + table() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(text(PAGE.read_text()))
