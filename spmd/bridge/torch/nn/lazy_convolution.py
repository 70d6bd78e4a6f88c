"""Lazy convolutions of `torch.nn` on blocks: the first input says how many channels there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.nn.convolution import (
    Conv1d,
    Conv2d,
    Conv3d,
    Convolution,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
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


class _LazyConvolution(Convolution):
    """A convolution without weights, until the first input says how many channels there are.

    Arguments as those of torch's class; spec, w_spec, out_spec, in_size and generator as for the class that the layer
    becomes at its first call. If spec splits the channels, the workers exchange their numbers at this call. Loading a
    state gives the layer its weights too.
    """

    device: Any
    generator: Any

    def _wait(self, device: Any, generator: Any, specs: dict[str, Any]) -> None:
        """Keep what `_place` takes until there are weights."""
        self._set_specs(specs)
        self._placed = False
        self.device = torch.get_default_device() if device is None else torch.device(device)
        self.generator = generator

    def _get_in_channels(self, input: torch.Tensor) -> int:
        space = self._space or 0
        if input.ndim not in (space + 1, space + 2):
            raise self._wrong_input(input, space)
        layout = layout_of_operand(f"spt.nn.{self._class_name}", "spec", input, self._specs["spec"])
        return layout.shape[input.ndim - space - 1]

    def initialize_parameters(self, *args: Any, **kwargs: Any) -> None:
        layer: Any = super()
        layer.initialize_parameters(*args, **kwargs)
        if not self._placed:
            generator = self.generator
            if self._lay_out().type != "meta":
                self.reset_parameters(generator)

    def _lazy_load_hook(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        layer: Any = super()
        layer._lazy_load_hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        lazy: Any = self
        if not self._placed and not lazy.has_uninitialized_params():
            self._lay_out()

    def _lay_out(self) -> torch.device:
        """Replace whole parameters on the device "meta" by blocks, which have no values yet."""
        self._placed, device = True, self.device
        del self.device, self.generator
        rows, columns = self.weight.shape[:2]
        self.in_channels = rows if self.transposed else columns * self.groups
        self._split_parameters()
        if device.type != "meta":
            self.to_empty(device=device)
        return device


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
        torch_init: Any = self.torch_class().__init__
        options = stride, padding, dilation, groups, bias, padding_mode
        torch_init(self, out_channels, kernel_size, *options, "meta", dtype)
        specs = {"spec": spec, "w_spec": w_spec, "out_spec": out_spec, "in_size": in_size}
        self._wait(device, generator, specs)


class LazyConv1d(_LazyConv, Conv1d, nn.LazyConv1d):
    __doc__ = _LazyConv.__doc__
    cls_to_become = Conv1d
    bias: Any


class LazyConv2d(_LazyConv, Conv2d, nn.LazyConv2d):
    __doc__ = _LazyConv.__doc__
    cls_to_become = Conv2d
    bias: Any


class LazyConv3d(_LazyConv, Conv3d, nn.LazyConv3d):
    __doc__ = _LazyConv.__doc__
    cls_to_become = Conv3d
    bias: Any


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
        torch_init: Any = self.torch_class().__init__
        options = stride, padding, output_padding, groups, bias, dilation, padding_mode
        torch_init(self, out_channels, kernel_size, *options, "meta", dtype)
        specs = {"spec": spec, "w_spec": w_spec, "out_spec": out_spec, "in_size": in_size}
        self._wait(device, generator, specs)


class LazyConvTranspose1d(_LazyConvTranspose, ConvTranspose1d, nn.LazyConvTranspose1d):
    __doc__ = _LazyConvTranspose.__doc__
    cls_to_become = ConvTranspose1d
    bias: Any


class LazyConvTranspose2d(_LazyConvTranspose, ConvTranspose2d, nn.LazyConvTranspose2d):
    __doc__ = _LazyConvTranspose.__doc__
    cls_to_become = ConvTranspose2d
    bias: Any


class LazyConvTranspose3d(_LazyConvTranspose, ConvTranspose3d, nn.LazyConvTranspose3d):
    __doc__ = _LazyConvTranspose.__doc__
    cls_to_become = ConvTranspose3d
    bias: Any
