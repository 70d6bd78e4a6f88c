"""Convolutions, poolings, padding and resampling, for the table of what every layer does."""

from __future__ import annotations

from collections.abc import Iterator

from spmd import P
from tests.bridge.torch.nn.module_cases import Case

CHANNELS = {"model": 3}
ROWS = {"rows": 2}


def _convolutions(name: str, **options: object) -> Iterator[Case]:
    """Of one to three dimensions, whose results have channels that are split unevenly."""
    made = {"in_channels": 4, "out_channels": 5, "kernel_size": 2} | options
    for n in (1, 2, 3):
        specs = {"out_spec": P(None, "model")}
        yield Case(f"{name}{n}d", made, specs, [(2, 4, 5, 4, 3)[: n + 2]], [P()], specs["out_spec"], CHANNELS)


def _on_rows(name: str, dims: tuple[int, ...] = (1, 2, 3), **named: object) -> Iterator[Case]:
    """Of one to three dimensions, of which the first is split unevenly."""
    for n in dims:
        spec = P(None, None, "rows")
        made = {k: v[n - 1] if isinstance(v, tuple) else v for k, v in named.items()}
        yield Case(f"{name}{n}d", made, {"spec": spec}, [(2, 2, 5, 4, 3)[: n + 2]], [spec], spec, ROWS)


ENDS = (1, 2), (1, 0, 2, 1), (1, 0, 0, 1, 2, 1)

CASES = [
    *_convolutions("Conv", padding=1, stride=2),
    *_convolutions("ConvTranspose", stride=2),
    *_on_rows("MaxPool", kernel_size=2),
    *_on_rows("AvgPool", kernel_size=2, stride=1),
    *_on_rows("AdaptiveAvgPool", output_size=3),
    *_on_rows("AdaptiveMaxPool", output_size=2),
    *_on_rows("ConstantPad", padding=ENDS, value=1.5),
    *_on_rows("ZeroPad", padding=ENDS),
    *_on_rows("ReflectionPad", padding=ENDS),
    *_on_rows("ReplicationPad", padding=ENDS),
    *_on_rows("CircularPad", padding=ENDS),
    *(c._replace(name="Upsample") for c in _on_rows("", dims=(1, 2, 3), scale_factor=2)),
    *_on_rows("UpsamplingNearest", dims=(2,), scale_factor=2),
    *_on_rows("UpsamplingBilinear", dims=(2,), scale_factor=2),
]
