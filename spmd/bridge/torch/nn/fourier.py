"""Fourier transforms, and convolutions by them, on tensors that are split. torch has no such modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmd import fft
from spmd.bridge.torch import functions
from spmd.bridge.torch.compiled_layers import compilable_layer
from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.nn import whole_fourier
from spmd.bridge.torch.nn.layer import Layer
from spmd.layout import P
from spmd.tracebacks import api_boundary

__all__ = ["FFT", "IFFT", "IRFFT", "RFFT", "SpectralConv1d", "SpectralConv2d", "SpectralConv3d"]

_transforms = {name: compilable_layer(name, fft) for name in ("fftn", "ifftn", "rfftn", "irfftn")}


class _Transform(Layer):
    """A Fourier transform by `spmd.fft`. See `FFT`."""

    _spec_names = "spec", "out_spec"
    _function: str
    s: tuple[int, ...] | None
    dim: tuple[int, ...] | None
    norm: str | None

    @api_boundary
    def __init__(
        self,
        s: Sequence[int] | None = None,
        dim: Sequence[int] | None = None,
        norm: str | None = None,
        *,
        spec: LayoutLike | None = None,
        out_spec: LayoutLike | None = None,
    ):
        super().__init__(s, dim, norm)
        self._set_specs({"spec": spec, "out_spec": out_spec})

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if all(spec is None for spec in self._specs.values()):
            return super().forward(input)
        return _transforms[self._function](input, self.s, self.dim, self.norm, **self._specs)


class FFT(_Transform, whole_fourier.FFT):
    """`torch.fft.fftn` of a tensor that is split.

        modes = spt.nn.FFT(dim=(-2, -1), spec=P("data", None, "rows"))(x)

    s: the lengths of the result; None: those of x. dim: the dimensions; None: the last of s, or all. norm: "backward",
    "ortho" or "forward". spec: of x; None: x is whole. out_spec: of the result; None: as it comes by the fewest
    messages. Each is a spec, a `Layout`, or a `Grid` of some of the workers. It has no parameters; `to_torch` gives a
    module that calls `torch.fft`.
    Forward, adjoint, cost and errors: as `spmd.fft.fftn`.
    """


class IFFT(_Transform, whole_fourier.IFFT):
    """`torch.fft.ifftn` of a tensor that is split. Arguments: see `FFT`."""


class RFFT(_Transform, whole_fourier.RFFT):
    """`torch.fft.rfftn` of a tensor that is split. Arguments: see `FFT`."""


class IRFFT(_Transform, whole_fourier.IRFFT):
    """`torch.fft.irfftn` of a tensor that is split. Arguments: see `FFT`; s is needed for an odd number of points."""


class _SpectralConv(Layer):
    """A Fourier layer. See `SpectralConv1d`."""

    _spec_names = "spec", "w_spec", "out_spec"
    modes: tuple[int, ...]

    @api_boundary
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        modes: int | Sequence[int],
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        out_spec: LayoutLike | None = None,
        generator: torch.Generator | int | None = None,
    ):
        super().__init__(in_channels, out_channels, modes, "meta", dtype)
        self._place(device, generator, spec=spec, w_spec=w_spec, out_spec=out_spec)

    def _layouts(self) -> dict[str, LayoutLike]:
        return {"weight": P() if self._specs["w_spec"] is None else self._specs["w_spec"]}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        spec, out_spec = self._specs["spec"], self._specs["out_spec"]
        if spec is None and out_spec is None and not self._split:
            return super().forward(input)
        w_spec = self._of_parameter("weight")
        return functions.spectral_conv(
            input, self.shard("weight"), self.modes, spec=spec, w_spec=w_spec, out_spec=out_spec
        )


class SpectralConv1d(_SpectralConv, whole_fourier.SpectralConv1d):
    """The Fourier layer of neural operators: the lowest modes of x times complex weights, (in_channels, out_channels,
    *modes), and back. Batch, channels, space and weights may be split.

        layer = spt.nn.SpectralConv2d(12, 12, (9, 5), spec=P("data", "model", "rows"), w_spec=P(None, "model"))

    x: (N, in_channels, length), real; the result (N, out_channels, length). modes: how many of the lowest modes have
    weights, in each dimension of space, or one number for all: as `spmd.functions.spectral_conv`. dtype: of x, or that
    of the weights. spec: of x; None: x is whole. w_spec: of the weights, in balanced blocks; None: whole. out_spec: of
    the result; None: as x in batch and space, and as the second dimension of the weights in channels. Each is a spec, a
    `Layout`, or a `Grid` of some of the workers. generator: as for `spt.drawing`.
    Parts of the weights are normal, of deviation 1 / in_channels, the same on any mesh. `to_torch` gives a module that
    calls `torch.fft`.
    Forward, gradients and cost: as `spmd.functions.spectral_conv`. Raises LayoutError and SpecError for modes and specs
    that do not fit. Li et al., "Fourier neural operator for parametric partial differential equations", 2021.
    """


class SpectralConv2d(_SpectralConv, whole_fourier.SpectralConv2d):
    """The Fourier layer of x of shape (N, in_channels, height, width): see `SpectralConv1d`."""


class SpectralConv3d(_SpectralConv, whole_fourier.SpectralConv3d):
    """The Fourier layer of x of shape (N, in_channels, depth, height, width): see `SpectralConv1d`."""
