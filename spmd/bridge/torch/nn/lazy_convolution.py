"""Lazy convolutions of `torch.nn` on blocks: the first input says how many channels there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.nn.convolution import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from spmd.bridge.torch.nn.lazy import LazyLayer
from spmd.functions.layouts import layout_of_operand
from spmd.tracebacks import api_boundary

__all__ = [
    "LazyConv1d",
    "LazyConv2d",
    "LazyConv3d",
    "LazyConvTranspose1d",
    "LazyConvTranspose2d",
    "LazyConvTranspose3d",
]


class _LazyConvolution(LazyLayer):
    """A convolution without weights, until the first input says how many channels there are.

    Arguments as those of torch's class; spec, w_spec, out_spec, in_size and generator as for the class that the layer
    becomes at its first call. If spec splits the channels, the workers exchange their numbers at this call. Loading a
    state gives the layer its weights too.
    """

    _learnt = "in_channels"
    _space: Any
    _wrong_input: Any
    transposed: bool
    groups: int

    def _length_of(self, input: torch.Tensor) -> int:
        space = self._space
        if input.ndim not in (space + 1, space + 2):
            raise self._wrong_input(input, space)
        layout = layout_of_operand(f"spt.nn.{self._class_name}", "spec", input, self._specs["spec"])
        return layout.shape[input.ndim - space - 1]

    def _length_in(self, shapes: dict[str, torch.Size]) -> int:
        rows, columns, *_ = shapes.get("weight", (0, 0))
        return rows if self.transposed else columns * self.groups


class _LazyConv(_LazyConvolution):
    __doc__ = _LazyConvolution.__doc__

    @api_boundary
    def __init__(
        self,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        out_spec: LayoutLike | None = None,
        in_size: int | Sequence[int] | None = None,
        generator: torch.Generator | int | None = None,
    ):
        options: Any = {"out_channels": out_channels, "kernel_size": kernel_size, "stride": stride, "padding": padding}
        options |= {"dilation": dilation, "groups": groups, "bias": bias, "padding_mode": padding_mode}
        options |= {"spec": spec, "w_spec": w_spec, "out_spec": out_spec, "in_size": in_size}
        super().__init__(in_channels=0, device="meta", dtype=dtype, **options)
        self._wait(device, dtype, generator=generator, **options)


class LazyConv1d(_LazyConv, Conv1d):
    __doc__ = _LazyConv.__doc__
    cls_to_become = Conv1d


class LazyConv2d(_LazyConv, Conv2d):
    __doc__ = _LazyConv.__doc__
    cls_to_become = Conv2d


class LazyConv3d(_LazyConv, Conv3d):
    __doc__ = _LazyConv.__doc__
    cls_to_become = Conv3d


class _LazyConvTranspose(_LazyConvolution):
    __doc__ = _LazyConvolution.__doc__

    @api_boundary
    def __init__(
        self,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        output_padding: int | tuple[int, ...] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, ...] = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        out_spec: LayoutLike | None = None,
        in_size: int | Sequence[int] | None = None,
        generator: torch.Generator | int | None = None,
    ):
        options: Any = {"out_channels": out_channels, "kernel_size": kernel_size, "stride": stride, "padding": padding}
        options |= {
            "output_padding": output_padding,
            "groups": groups,
            "bias": bias,
            "dilation": dilation,
            "padding_mode": padding_mode,
        }
        options |= {"spec": spec, "w_spec": w_spec, "out_spec": out_spec, "in_size": in_size}
        super().__init__(in_channels=0, device="meta", dtype=dtype, **options)
        self._wait(device, dtype, generator=generator, **options)


class LazyConvTranspose1d(_LazyConvTranspose, ConvTranspose1d):
    __doc__ = _LazyConvTranspose.__doc__
    cls_to_become = ConvTranspose1d


class LazyConvTranspose2d(_LazyConvTranspose, ConvTranspose2d):
    __doc__ = _LazyConvTranspose.__doc__
    cls_to_become = ConvTranspose2d


class LazyConvTranspose3d(_LazyConvTranspose, ConvTranspose3d):
    __doc__ = _LazyConvTranspose.__doc__
    cls_to_become = ConvTranspose3d
