"""Upsampling by `torch.nn` on blocks of batch, channels and space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spmd.bridge.torch import functions
from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.nn.spatial import SpatialLayer
from spmd.errors import SpecError, describe
from spmd.tracebacks import api_boundary

__all__ = ["Upsample", "UpsamplingBilinear2d", "UpsamplingNearest2d"]

_METHODS = {
    "nearest": ("nearest", (3, 4, 5)),
    "nearest-exact": ("nearest-exact", (3, 4, 5)),
    "area": ("area", (3, 4, 5)),
    "linear": ("linear", (3,)),
    "bilinear": ("linear", (4,)),
    "bicubic": ("cubic", (4,)),
    "trilinear": ("linear", (5,)),
}
"""The modes of torch: the method of `resize`, and the numbers of dimensions that an input may have."""


class _Upsample(SpatialLayer):
    """What upsamplings have in common."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        def resized(x: torch.Tensor, *, shape: Any, **specs: Any) -> torch.Tensor:
            return functions.resize(x, method=method, in_shape=shape, **options, **specs)

        layer: Any = self
        method, dims = _METHODS.get(layer.mode, (None, ()))
        if input.ndim not in dims:
            raise self._wrong_mode(layer.mode, input)
        options = {
            "size": layer.size,
            "scale_factor": layer.scale_factor,
            "align_corners": bool(layer.align_corners),
            "recompute_scale_factor": bool(layer.recompute_scale_factor),
            "cubic": -0.75,  # torch's parameter
        }
        return self._on_batch(resized, input)

    def _wrong_mode(self, mode: str, input: torch.Tensor) -> SpecError:
        fitting = [name for name, (_, dims) in _METHODS.items() if input.ndim in dims]
        return SpecError.at(
            f"spt.nn.{self._class_name}",
            argument="mode",
            got=f"{mode!r} for {describe(input)}",
            need=f"one of {', '.join(map(repr, fitting))}" if fitting else "an input of shape (N, C, *space)",
            mend=f"mode={fitting[-1]!r}" if fitting else "input[None] adds a dimension",
        )


class Upsample(_Upsample, nn.Upsample):
    """`nn.Upsample` of arrays that lie anyhow, (N, C, *space): by `spt.functions.resize`.

        up = spt.nn.Upsample(scale_factor=2, mode="bilinear", spec=P(None, None, "rows"))

    Arguments as those of `nn.Upsample`. spec, out_spec, in_size: as for `spt.nn.MaxPool2d`.

    Forward, gradients and cost: as `spmd.functions.resize`. Raises LayoutError and SpecError where specs do not fit.
    """

    @api_boundary
    def __init__(
        self,
        size: int | tuple[int, ...] | None = None,
        scale_factor: float | tuple[float, ...] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
        *,
        spec: LayoutLike | None = None,
        out_spec: LayoutLike | None = None,
        in_size: int | Sequence[int] | None = None,
    ):
        torch_init: Any = super().__init__
        torch_init(size, scale_factor, mode, align_corners, recompute_scale_factor)
        self._set_specs({"spec": spec, "out_spec": out_spec, "in_size": in_size})


class _Upsample2d(_Upsample):
    """Upsampling of (N, C, H, W): `spt.nn.Upsample` in one mode.

    Arguments as those of torch's class. spec, out_spec, in_size: as for `spt.nn.MaxPool2d`.
    """

    @api_boundary
    def __init__(
        self,
        size: int | tuple[int, int] | None = None,
        scale_factor: float | tuple[float, float] | None = None,
        *,
        spec: LayoutLike | None = None,
        out_spec: LayoutLike | None = None,
        in_size: int | Sequence[int] | None = None,
    ):
        torch_init: Any = super().__init__
        torch_init(size, scale_factor)
        self._set_specs({"spec": spec, "out_spec": out_spec, "in_size": in_size})


class UpsamplingNearest2d(_Upsample2d, nn.UpsamplingNearest2d):
    __doc__ = _Upsample2d.__doc__


class UpsamplingBilinear2d(_Upsample2d, nn.UpsamplingBilinear2d):
    __doc__ = _Upsample2d.__doc__
