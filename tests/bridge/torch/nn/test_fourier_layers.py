"""Fourier layers of `spt.nn` against `torch.fft` on one worker."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

import spmd
from bridge.torch.nn.module_cases import Case, check_module, table
from spmd import Grid, Layout, P, functions
from spmd.bridge import torch as spt
from spmd.bridge.torch.nn import whole_fourier
from spmd.errors import SpecError

pytestmark = pytest.mark.torch

THREE = {"model": 3}
FOUR = {"data": 2, "model": 2}


def case(name, options, specs, shape, lies, out, axes):
    return Case(name, options, specs, [shape], [lies], out, axes, whole=whole_fourier)


def grid(shape, dims, workers, axes):
    return Layout.grid(shape, dims, axes, workers)


COMPLEX = torch.randn((3, 4, 5), generator=torch.Generator().manual_seed(0), dtype=torch.complex128)


@table(
    case("FFT", {}, {}, (3, 4), P(), P(), THREE),
    case(
        "FFT", {"dim": (-1, 0)}, {"spec": P("model"), "out_spec": P("model")}, (4, 2, 5), P("model"), P("model"), THREE
    ),
    case(
        "IFFT",
        {"norm": "ortho"},
        {"spec": P("data", "model"), "out_spec": P(None, "data", "model")},
        COMPLEX,
        P("data", "model"),
        P(None, "data", "model"),
        FOUR,
    ),
    case(
        "RFFT",
        {"dim": (1, 2), "s": (4, 6)},
        {"spec": P(None, "model"), "out_spec": P("model")},
        (2, 3, 5),
        P(None, "model"),
        P("model"),
        THREE,
    ),
    case(
        "IRFFT",
        {"dim": (2,), "s": (7,)},
        {"spec": P(None, None, "model"), "out_spec": P("model")},
        COMPLEX,
        P(None, None, "model"),
        P("model"),
        THREE,
    ),
    case(
        "RFFT",
        {"dim": (1,)},
        {"spec": Grid((1, 2), workers=[2, 0]), "out_spec": Grid((2, 1), workers=[1, 2])},
        (3, 5),
        grid((3, 5), (1, 2), [2, 0], THREE),
        grid((3, 3), (2, 1), [1, 2], THREE),
        THREE,
    ),
    case("SpectralConv1d", {"in_channels": 2, "out_channels": 3, "modes": 3}, {}, (2, 2, 7), P(), P(), THREE),
    case(
        "SpectralConv1d",
        {"in_channels": 2, "out_channels": 4, "modes": 3},
        {"spec": P("data", None, "model"), "w_spec": P(None, "model"), "out_spec": P("data", "model")},
        (1, 2, 6),
        P("data", None, "model"),
        P("data", "model"),
        FOUR,
    ),
    case(
        "SpectralConv2d",
        {"in_channels": 3, "out_channels": 2, "modes": (3, 2)},
        {"spec": P("data", "model"), "w_spec": P("model")},
        (3, 3, 5, 4),
        P("data", "model"),
        P("data"),
        FOUR,
    ),
    case(
        "SpectralConv2d",
        {"in_channels": 2, "out_channels": 2, "modes": (4, 3)},
        {"spec": P(None, None, "model")},
        (2, 2, 4, 4),
        P(None, None, "model"),
        P(None, None, "model"),
        THREE,
    ),
    case(
        "SpectralConv3d",
        {"in_channels": 1, "out_channels": 2, "modes": 2},
        {"spec": P(None, None, "data", "model"), "w_spec": P(None, None, "model")},
        (2, 1, 3, 4, 4),
        P(None, None, "data", "model"),
        P(None, None, "data", "model"),
        FOUR,
    ),
    case(
        "SpectralConv1d",
        {"in_channels": 3, "out_channels": 2, "modes": 3},
        {"spec": Grid((1, 2, 1), workers=[2, 1]), "w_spec": Grid((2, 1, 1)), "out_spec": Grid((1, 1, 3))},
        (2, 3, 6),
        grid((2, 3, 6), (1, 2, 1), [2, 1], THREE),
        grid((2, 2, 6), (1, 1, 3), [0, 1, 2], THREE),
        THREE,
    ),
)
def test_fourier(case):
    check_module(case)


def test_whole_layers_are_the_functions():
    layer = whole_fourier.SpectralConv2d(2, 3, (4, 2), dtype=torch.float64)
    x = torch.randn((2, 2, 5, 6), dtype=torch.float64)
    torch.testing.assert_close(layer(x), functions.spectral_conv(x, layer.weight))
    with pytest.raises(SpecError, match="fewer modes"):
        layer(x[:, :, :3])
    with pytest.raises(SpecError, match="2 positive integers"):
        whole_fourier.SpectralConv2d(2, 3, (4, 2, 1))


def test_a_fourier_layer_of_another_kind_is_refused():
    def body():
        spt.nn.SpectralConv1d.from_torch(whole_fourier.SpectralConv2d(2, 2, 2))

    with pytest.raises(spmd.errors.LayoutError, match="SpectralConv1d"):
        spt.map(body, (), None, mesh=spmd.Mesh(**THREE))()
