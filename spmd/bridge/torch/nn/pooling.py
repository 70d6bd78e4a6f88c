"""Poolings of `torch.nn` on blocks of batch, channels and space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spmd.bridge.torch import functions
from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.nn.spatial import SpatialLayer
from spmd.tracebacks import api_boundary

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
]

Ints = int | tuple[int, ...]


class _MaxPool(SpatialLayer):
    """Maxima of windows of arrays that lie anyhow: by `spt.functions.max_pool`.

        pool = spt.nn.MaxPool2d(2, spec=P(None, None, "rows"))

    Arguments as those of torch's class. spec, out_spec: of the input and the results, which are (N, C, *space), or
    (C, *space) without a batch: specs, `Layout`s, or `Grid`s of some of the workers. out_spec None: as the input, in
    balanced blocks of space. in_size: the lengths of the whole input in space, if spec splits them evenly. Without it
    workers that share space exchange the lengths of their blocks at each call. With return_indices=True the indices
    are those of the whole input.

    Forward, gradients and cost: as `spmd.functions.max_pool`. Raises LayoutError and SpecError where specs do not fit.
    """

    @api_boundary
    def __init__(
        self,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        dilation: Ints = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
        *,
        spec: LayoutLike | None = None,
        out_spec: LayoutLike | None = None,
        in_size: int | Sequence[int] | None = None,
    ):
        torch_init: Any = super().__init__
        torch_init(kernel_size, stride, padding, dilation, return_indices, ceil_mode)
        self._set_specs({"spec": spec, "out_spec": out_spec, "in_size": in_size})

    def forward(self, input: torch.Tensor) -> Any:
        pool: Any = self
        window = pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode, pool.return_indices
        return self._on_batch(functions.max_pool, input, *window)


class MaxPool1d(_MaxPool, nn.MaxPool1d):
    __doc__ = _MaxPool.__doc__
    _space = 1


class MaxPool2d(_MaxPool, nn.MaxPool2d):
    __doc__ = _MaxPool.__doc__
    _space = 2


class MaxPool3d(_MaxPool, nn.MaxPool3d):
    __doc__ = _MaxPool.__doc__
    _space = 3


class _AvgPool(SpatialLayer):
    """Means of windows of arrays that lie anyhow: by `spt.functions.avg_pool`.

        pool = spt.nn.AvgPool2d(2, spec=P(None, None, "rows"))

    Arguments as those of torch's class. spec, out_spec, in_size: as for `spt.nn.MaxPool2d`.

    Forward, gradients and cost: as `spmd.functions.avg_pool`. Raises LayoutError and SpecError where specs do not fit.
    """

    @api_boundary
    def __init__(
        self,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        *divisor_override: int | None,
        spec: LayoutLike | None = None,
        out_spec: LayoutLike | None = None,
        in_size: int | Sequence[int] | None = None,
        **divisor: int | None,
    ):
        torch_init: Any = super().__init__
        torch_init(kernel_size, stride, padding, ceil_mode, count_include_pad, *divisor_override, **divisor)
        self._set_specs({"spec": spec, "out_spec": out_spec, "in_size": in_size})

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        pool: Any = self
        options = {"ceil_mode": pool.ceil_mode, "count_include_pad": pool.count_include_pad}
        options["divisor_override"] = getattr(pool, "divisor_override", None)  # AvgPool1d has none
        return self._on_batch(functions.avg_pool, input, pool.kernel_size, pool.stride, pool.padding, **options)


class AvgPool1d(_AvgPool, nn.AvgPool1d):
    __doc__ = _AvgPool.__doc__
    _space = 1


class AvgPool2d(_AvgPool, nn.AvgPool2d):
    __doc__ = _AvgPool.__doc__
    _space = 2


class AvgPool3d(_AvgPool, nn.AvgPool3d):
    __doc__ = _AvgPool.__doc__
    _space = 3


class _AdaptiveAvgPool(SpatialLayer):
    """Means of as many windows as are asked for, of arrays that lie anyhow: by `spt.functions.resize`, method "area".

        pool = spt.nn.AdaptiveAvgPool2d(1, spec=P(None, None, "rows"), out_spec=P())

    Arguments as those of torch's class. spec, out_spec, in_size: as for `spt.nn.MaxPool2d`.

    Forward, gradients and cost: as `spmd.functions.resize`. Raises LayoutError and SpecError where specs do not fit.
    """

    @api_boundary
    def __init__(
        self,
        output_size: int | tuple[int | None, ...] | None,
        *,
        spec: LayoutLike | None = None,
        out_spec: LayoutLike | None = None,
        in_size: int | Sequence[int] | None = None,
    ):
        torch_init: Any = super().__init__
        torch_init(output_size)
        self._set_specs({"spec": spec, "out_spec": out_spec, "in_size": in_size})

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        def means(x: torch.Tensor, *, shape: Any, **specs: Any) -> torch.Tensor:
            return functions.resize(x, size=size, method="area", in_shape=shape, **specs)

        pool: Any = self
        size = pool.output_size
        size = tuple(size) if isinstance(size, Sequence) else (size,) * (self._space or 0)
        return self._on_batch(means, input)


class AdaptiveAvgPool1d(_AdaptiveAvgPool, nn.AdaptiveAvgPool1d):
    __doc__ = _AdaptiveAvgPool.__doc__
    _space = 1


class AdaptiveAvgPool2d(_AdaptiveAvgPool, nn.AdaptiveAvgPool2d):
    __doc__ = _AdaptiveAvgPool.__doc__
    _space = 2


class AdaptiveAvgPool3d(_AdaptiveAvgPool, nn.AdaptiveAvgPool3d):
    __doc__ = _AdaptiveAvgPool.__doc__
    _space = 3


class _AdaptiveMaxPool(SpatialLayer):
    """Maxima of as many windows as are asked for, of arrays that lie anyhow: by `spt.functions.adaptive_max_pool`.

        pool = spt.nn.AdaptiveMaxPool2d((4, None), spec=P(None, None, "rows"))

    Arguments as those of torch's class. spec, out_spec, in_size: as for `spt.nn.MaxPool2d`. With return_indices=True
    the indices are those of the whole input.

    Forward, gradients and cost: as `spmd.functions.adaptive_max_pool`. Raises LayoutError and SpecError where specs do
    not fit.
    """

    @api_boundary
    def __init__(
        self,
        output_size: int | tuple[int | None, ...] | None,
        return_indices: bool = False,
        *,
        spec: LayoutLike | None = None,
        out_spec: LayoutLike | None = None,
        in_size: int | Sequence[int] | None = None,
    ):
        torch_init: Any = super().__init__
        torch_init(output_size, return_indices)
        self._set_specs({"spec": spec, "out_spec": out_spec, "in_size": in_size})

    def forward(self, input: torch.Tensor) -> Any:
        pool: Any = self
        return self._on_batch(functions.adaptive_max_pool, input, pool.output_size, pool.return_indices)


class AdaptiveMaxPool1d(_AdaptiveMaxPool, nn.AdaptiveMaxPool1d):
    __doc__ = _AdaptiveMaxPool.__doc__
    _space = 1


class AdaptiveMaxPool2d(_AdaptiveMaxPool, nn.AdaptiveMaxPool2d):
    __doc__ = _AdaptiveMaxPool.__doc__
    _space = 2


class AdaptiveMaxPool3d(_AdaptiveMaxPool, nn.AdaptiveMaxPool3d):
    __doc__ = _AdaptiveMaxPool.__doc__
    _space = 3
