"""Convolutions of `torch.nn`, and their transposes, on blocks of batch, channels and space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spmd.bridge.torch import functions
from spmd.bridge.torch.layouts import LayoutLike, layout_for
from spmd.bridge.torch.nn.spatial import SpatialLayer
from spmd.functions.convolution_plans import bias_layout
from spmd.global_ops.call import names_of
from spmd.layout import P
from spmd.mesh import here
from spmd.tracebacks import api_boundary

__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Convolution"]

_BOUNDARIES = {"zeros": "zero", "circular": "periodic", "reflect": "reflect", "replicate": "edge"}


class Convolution(SpatialLayer):
    """What convolutions and their transposes have in common: weights and a bias."""

    _spec_names = "spec", "w_spec", "out_spec", "in_size"
    weight: Any
    groups: int
    transposed: bool
    in_channels: int

    def _layouts(self) -> dict[str, LayoutLike]:
        shape, axes = tuple(self.weight.shape), dict(here("spt.nn").mesh.axes)
        w_spec = self._specs["w_spec"]
        w_spec = self._derived() if w_spec is None else w_spec
        return {"weight": w_spec, "bias": bias_layout(layout_for(shape, w_spec, axes), self.groups, self.transposed)}

    def _derived(self) -> P:
        """The spec of the weights by those of the input and the result, with a batch."""
        axes, ndim = here("spt.nn").mesh.axes, self.weight.ndim
        both = {name: self._specs[name] for name in ("spec", "out_spec") if isinstance(self._specs[name], P)}
        for name, each in both.items():
            each.check(axes, f"spt.nn.{self._class_name}", name, ndim)
        spec, out_spec = (names_of(both.get(name, P()), ndim) for name in ("spec", "out_spec"))
        taken = {n for names in (spec[0], *spec[2:]) for n in names}
        rows, columns = (out_spec[1], spec[1]) if self.groups == 1 else (spec[1] or out_spec[1], ())
        rows = tuple(n for n in rows if n not in taken)
        columns = tuple(n for n in columns if n not in rows)
        first, second = (columns, rows) if self.transposed and self.groups == 1 else (rows, columns)
        return P(first or None, second or None)

    @property
    def _whole_channels(self) -> int | None:
        return self.in_channels

    def _applied(self, function: Any, input: torch.Tensor, **options: Any) -> torch.Tensor:
        w_spec, weight, bias = self._layout_of_parameter("weight"), self.shard("weight"), self._block("bias")
        return self._on_batch(function, input, weight, bias, groups=self.groups, w_spec=w_spec, **options)


class _Conv(Convolution):
    """A convolution of which anything may be split: by `spt.functions.conv`.

        rows = P(None, None, "rows")
        first = spt.nn.Conv2d(3, 16, 3, padding=1, spec=rows, out_spec=P(None, "channels", "rows"))
        second = spt.nn.Conv2d(16, 8, 3, padding=1, spec=P(None, "channels", "rows"), out_spec=rows)

    Arguments as those of torch's class. spec, out_spec: of the input and the result, which are (N, C, *space), or
    (C, *space) without a batch. out_spec None: as the input in batch and space, in balanced blocks, and as the rows of
    the weights in the channels. w_spec: of the weights, (out_channels, in_channels / groups, *kernel_size), in balanced
    blocks. None: rows lie as the channels of the result, and columns as those of the input, by specs of a batch; with
    groups rows lie as the channels of the input, or where these are whole as those of the result. bias lies as the
    rows. Each is a spec, a `Layout`, or a `Grid` of some of the workers. in_size: the lengths of the whole input in
    space, if spec splits them evenly. Without it workers that share space exchange the lengths of their blocks at each
    call. generator: as for `spt.drawing`.
    Construct it in a body, on every worker. Initial values are those of torch's class, on any mesh.

    Forward, gradients and cost: as `spmd.functions.conv`. Raises LayoutError and SpecError where specs do not fit.
    """

    @api_boundary
    def __init__(
        self,
        in_channels: int,
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
        torch_init: Any = super().__init__
        options = stride, padding, dilation, groups, bias, padding_mode
        torch_init(in_channels, out_channels, kernel_size, *options, "meta", dtype)
        self._place(device, generator, spec=spec, w_spec=w_spec, out_spec=out_spec, in_size=in_size)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        conv: Any = self
        options = {"stride": tuple(conv.stride), "padding": _padding_of(conv), "dilation": tuple(conv.dilation)}
        options["boundary"] = _BOUNDARIES[conv.padding_mode]
        return self._applied(functions.conv, input, **options)


class Conv1d(_Conv, nn.Conv1d):
    __doc__ = _Conv.__doc__
    _space = 1


class Conv2d(_Conv, nn.Conv2d):
    __doc__ = _Conv.__doc__
    _space = 2


class Conv3d(_Conv, nn.Conv3d):
    __doc__ = _Conv.__doc__
    _space = 3


class _ConvTranspose(Convolution):
    """A transposed convolution of which anything may be split: by `spt.functions.conv_transpose`.

        up = spt.nn.ConvTranspose2d(16, 8, 2, stride=2, spec=P(None, None, "rows"))

    Arguments as those of torch's class. spec, out_spec, in_size, generator: as for `spt.nn.Conv2d`. w_spec: of the
    weights, (in_channels, out_channels / groups, *kernel_size), in balanced blocks. None: rows lie as the channels of
    the input, and columns as those of the result, by specs of a batch; with groups rows lie as the channels of the
    input, or where these are whole as those of the result. bias lies as the columns; with groups as the rows.
    Construct it in a body, on every worker. Initial values are those of torch's class, on any mesh.

    Forward, gradients and cost: as `spmd.functions.conv_transpose`; forward takes an output_size as torch's does, the
    lengths of the whole result. Raises LayoutError and SpecError where specs do not fit.
    """

    @api_boundary
    def __init__(
        self,
        in_channels: int,
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
        torch_init: Any = super().__init__
        options = stride, padding, output_padding, groups, bias, dilation, padding_mode
        torch_init(in_channels, out_channels, kernel_size, *options, "meta", dtype)
        self._place(device, generator, spec=spec, w_spec=w_spec, out_spec=out_spec, in_size=in_size)

    def forward(self, input: torch.Tensor, output_size: Sequence[int] | None = None) -> torch.Tensor:
        conv: Any = self
        options = {"stride": tuple(conv.stride), "padding": tuple(conv.padding), "dilation": tuple(conv.dilation)}
        if output_size is not None:
            options["output_size"] = self._lengths(output_size)
        else:
            options["output_padding"] = tuple(conv.output_padding)
        return self._applied(functions.conv_transpose, input, **options)

    def _lengths(self, output_size: Sequence[int]) -> tuple[int, ...]:
        """The lengths of the whole result in space; torch takes its whole shape, too."""
        lengths, space = tuple(output_size), self.weight.ndim - 2
        return lengths[-space:] if len(lengths) in (space + 1, space + 2) else lengths


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    __doc__ = _ConvTranspose.__doc__
    _space = 1


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    __doc__ = _ConvTranspose.__doc__
    _space = 2


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    __doc__ = _ConvTranspose.__doc__
    _space = 3


def _padding_of(conv: Any) -> tuple[tuple[int, int], ...]:
    """(low, high) of each dimension."""
    pads = conv._reversed_padding_repeated_twice
    return tuple(zip(pads[-2::-2], pads[::-2], strict=True))
