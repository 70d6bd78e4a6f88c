"""Fourier transforms and layers, for the table of what every layer does."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from spmd import P
from spmd.bridge.torch.nn import whole_fourier
from tests.bridge.torch.nn.module_cases import Case

AXES = {"model": 3}
ROWS = P(None, "model")


def _transform(name: str, x: object) -> Case:
    specs = {"spec": ROWS, "out_spec": ROWS}
    return Case(name, {"dim": (1, 2)}, specs, [x], [ROWS], ROWS, AXES, whole=whole_fourier)


def _layers() -> Iterator[Case]:
    """Of one to three dimensions, with weights that are split unevenly in the channels of the result."""
    for n in (1, 2, 3):
        options = {"in_channels": 2, "out_channels": 4, "modes": 2}
        specs = {"w_spec": P(None, "model")}
        shape = (*(2, 2, 4, 3)[: n + 1], 4)
        yield Case(f"SpectralConv{n}d", options, specs, [shape], [P()], ROWS, AXES, whole=whole_fourier)


_PHASES = torch.linspace(0, 3, 2 * 5 * 4, dtype=torch.float64).reshape(2, 5, 4)
_WAVES = torch.polar(torch.ones_like(_PHASES), _PHASES.square())

CASES = [
    _transform("FFT", _WAVES),
    _transform("IFFT", _WAVES),
    _transform("RFFT", (2, 5, 4)),
    _transform("IRFFT", _WAVES),
    *_layers(),
]
