"""Paddings of `torch.nn` on blocks of any dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from spmd.bridge.torch import functions
from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.nn.spatial import SpatialLayer
from spmd.tracebacks import api_boundary

__all__ = [
    "CircularPad1d",
    "CircularPad2d",
    "CircularPad3d",
    "ConstantPad1d",
    "ConstantPad2d",
    "ConstantPad3d",
    "ReflectionPad1d",
    "ReflectionPad2d",
    "ReflectionPad3d",
    "ReplicationPad1d",
    "ReplicationPad2d",
    "ReplicationPad3d",
    "ZeroPad1d",
    "ZeroPad2d",
    "ZeroPad3d",
]


class _Pad(SpatialLayer):
    """Padding of arrays that lie anyhow: by `spt.functions.pad`.

        pad = spt.nn.ReflectionPad2d(1, spec=P(None, None, "rows"))

    Arguments as those of torch's class: the last dimension comes first, and negative numbers crop. spec, out_spec: of
    the input and the result: specs, `Layout`s, or `Grid`s of some of the workers. out_spec None: as the input, in
    balanced blocks of the dimensions that are padded. in_size: the lengths of the whole input in these, if spec splits
    them evenly. Without it workers that share them exchange the lengths of their blocks at each call.
    Images go on as far as is needed, also where torch refuses a padding longer than the input.

    Forward, gradients and cost: as `spmd.functions.pad`. Raises LayoutError and SpecError where specs do not fit.
    """

    _mode: ClassVar[str]

    @api_boundary
    def __init__(
        self,
        padding: int | tuple[int, ...],
        *,
        spec: LayoutLike | None = None,
        out_spec: LayoutLike | None = None,
        in_size: int | Sequence[int] | None = None,
    ):
        torch_init: Any = super().__init__
        torch_init(padding)
        self._set_specs({"spec": spec, "out_spec": out_spec, "in_size": in_size})

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        layer: Any = self
        ends = tuple(layer.padding)
        pairs = tuple(zip(ends[-2::-2], ends[::-2], strict=True))
        if input.ndim < len(pairs):
            raise self._wrong_input(input, len(pairs))
        before = input.ndim - len(pairs)
        options = {"spec": self._specs["spec"], "out_spec": self._specs["out_spec"]}
        shape = self._shape(input.ndim)
        value = getattr(layer, "value", 0)
        return functions.pad(input, ((0, 0),) * before + pairs, self._mode, value, shape=shape, **options)


class _ConstantPad(_Pad):
    __doc__ = _Pad.__doc__

    @api_boundary
    def __init__(
        self,
        padding: int | tuple[int, ...],
        value: float,
        *,
        spec: LayoutLike | None = None,
        out_spec: LayoutLike | None = None,
        in_size: int | Sequence[int] | None = None,
    ):
        torch_init: Any = super(_Pad, self).__init__
        torch_init(padding, value)
        self._set_specs({"spec": spec, "out_spec": out_spec, "in_size": in_size})


class ConstantPad1d(_ConstantPad, nn.ConstantPad1d):
    __doc__ = _ConstantPad.__doc__
    _space, _mode = 1, "constant"


class ConstantPad2d(_ConstantPad, nn.ConstantPad2d):
    __doc__ = _ConstantPad.__doc__
    _space, _mode = 2, "constant"


class ConstantPad3d(_ConstantPad, nn.ConstantPad3d):
    __doc__ = _ConstantPad.__doc__
    _space, _mode = 3, "constant"


class ZeroPad1d(_Pad, nn.ZeroPad1d):
    __doc__ = _Pad.__doc__
    _space, _mode = 1, "constant"


class ZeroPad2d(_Pad, nn.ZeroPad2d):
    __doc__ = _Pad.__doc__
    _space, _mode = 2, "constant"


class ZeroPad3d(_Pad, nn.ZeroPad3d):
    __doc__ = _Pad.__doc__
    _space, _mode = 3, "constant"


class ReflectionPad1d(_Pad, nn.ReflectionPad1d):
    __doc__ = _Pad.__doc__
    _space, _mode = 1, "reflect"


class ReflectionPad2d(_Pad, nn.ReflectionPad2d):
    __doc__ = _Pad.__doc__
    _space, _mode = 2, "reflect"


class ReflectionPad3d(_Pad, nn.ReflectionPad3d):
    __doc__ = _Pad.__doc__
    _space, _mode = 3, "reflect"


class ReplicationPad1d(_Pad, nn.ReplicationPad1d):
    __doc__ = _Pad.__doc__
    _space, _mode = 1, "edge"


class ReplicationPad2d(_Pad, nn.ReplicationPad2d):
    __doc__ = _Pad.__doc__
    _space, _mode = 2, "edge"


class ReplicationPad3d(_Pad, nn.ReplicationPad3d):
    __doc__ = _Pad.__doc__
    _space, _mode = 3, "edge"


class CircularPad1d(_Pad, nn.CircularPad1d):
    __doc__ = _Pad.__doc__
    _space, _mode = 1, "periodic"


class CircularPad2d(_Pad, nn.CircularPad2d):
    __doc__ = _Pad.__doc__
    _space, _mode = 2, "periodic"


class CircularPad3d(_Pad, nn.CircularPad3d):
    __doc__ = _Pad.__doc__
    _space, _mode = 3, "periodic"
