"""Norms of torch by statistics of all workers: of channels (batch, group, instance) and of rows (layer, RMS)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spmd.bridge.torch import functions
from spmd.bridge.torch.in_place_checks import check_statistics
from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.nn.layer import Layer
from spmd.bridge.torch.nn.lazy import LazyLayer
from spmd.bridge.torch.tensor_state import plain
from spmd.errors import SpecError, describe
from spmd.functions.layouts import layout_of_operand
from spmd.functions.norm_plans import params_of
from spmd.grid import Grid
from spmd.layout import Layout, P
from spmd.mesh import here
from spmd.tracebacks import api_boundary

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LazyBatchNorm1d",
    "LazyBatchNorm2d",
    "LazyBatchNorm3d",
    "LazyInstanceNorm1d",
    "LazyInstanceNorm2d",
    "LazyInstanceNorm3d",
    "RMSNorm",
    "SyncBatchNorm",
]

_functional: Any = nn.functional


class _Norm(Layer):
    """A norm. weight, bias and running statistics lie by `w_spec`; by default as the channels of `spec` do."""

    _spec_names = "spec", "w_spec"
    _per_channel = "weight", "bias", "running_mean", "running_var"

    def _layouts(self) -> dict[str, LayoutLike]:
        w_spec = self._specs["w_spec"]
        w_spec = self._as_input(self._specs["spec"]) if w_spec is None else w_spec
        return dict.fromkeys(self._per_channel, w_spec)

    def _as_input(self, spec: LayoutLike | None) -> LayoutLike:
        """How the parameters lie where x lies by spec: as its second dimension."""
        if isinstance(spec, P):
            return P(*(names or None for names in spec.dims[1:2]))
        return P() if spec is None else _like_dims(spec, (1,))

    def _batch(self, x: torch.Tensor) -> torch.Tensor:
        """x with a batch."""
        return x

    def _given(self) -> dict[str, Any]:
        """spec and w_spec, for a function of blocks; nothing where nothing is split."""
        spec, name = self._specs["spec"], next((n for n in self._per_channel if getattr(self, n, None) is not None), "")
        if spec is None and name not in self._split:
            return {}
        return {"spec": spec, "w_spec": self._of_parameter(name) if name else None}

    def _check_statistics(self: Any, x: torch.Tensor) -> None:
        """Raise in training for a block where spec is left out: statistics would be those of this worker alone."""
        if self._specs["spec"] is None and not torch.compiler.is_dynamo_compiling():
            buffers = self.running_mean, self.running_var
            buffers = (self.weight,) if buffers[0] is None else buffers
            check_statistics(f"spt.nn.{type(self).__name__}", x, *buffers, takes_spec=True)


def _like_dims(spec: Layout | Grid, dims: Sequence[int]) -> Layout | Grid:
    """How parameters lie that have these dimensions of an array."""
    if isinstance(spec, Layout):
        return params_of(spec, dims)
    layout = params_of(spec.layout((0,) * len(spec.dims), dict(here("spt.nn").mesh.axes)), dims)
    return Grid(tuple(map(len, layout.cuts)), layout.workers, axes=tuple(layout.axes))


# Channels


class _BatchNorm(_Norm):
    """What batch norms have in common: statistics of the whole that spec names."""

    @api_boundary
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        generator: torch.Generator | int | None = None,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, "meta", dtype, bias=bias)  # type: ignore[call-arg]
        self._place(device, generator, spec=spec, w_spec=w_spec)

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1 / int(self.num_batches_tracked)
        tracks = self.running_mean is not None and (not self.training or self.track_running_stats)
        running = (self.shard("running_mean"), self.shard("running_var")) if tracks else None
        training = self.training or running is None
        given = self._given()
        if training:
            self._check_statistics(input)
        if training and not given:
            _functional._verify_batch_size(list(input.shape))
        weight, bias = self._block("weight"), self._block("bias")
        options = {"training": training, "momentum": momentum, "eps": self.eps, **given}
        y: Any = functions.batch_norm(input, weight, bias, running, **options)
        if running is None:
            return y
        if training:
            _update(self.shard("running_mean"), y[1][0])
            _update(self.shard("running_var"), y[1][1])
        return y[0]


def _update(block: torch.Tensor, new: torch.Tensor) -> None:
    """Write this worker's block of a buffer."""
    with torch.no_grad():
        block.copy_(new) if torch.compiler.is_dynamo_compiling() else plain(block).copy_(plain(new))


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` by the statistics of the whole that spec names: of all workers together, with the sizes of their
    blocks as weights. So it is `SyncBatchNorm` along the axes of spec.

        norm = spt.nn.BatchNorm2d(64, spec=P("data", None, "rows"))

    Arguments as those of `nn.BatchNorm1d`. spec: of x, whose dimension 1 has the channels; None: x is whole. w_spec: of
    weight, bias and running statistics, in balanced blocks; None: as the channels of x. Each is a spec, a `Layout`, or
    a `Grid`, here of all dimensions of x. generator: as for `spt.drawing`.
    Where something is split, a channel of one value gives its bias; torch raises.
    Forward, gradients and cost: as `spmd.functions.batch_norm`. In eval nothing is sent. Running statistics are the
    same on any mesh. Raises LayoutError and SpecError where specs do not fit.
    """


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` by the statistics of the whole that spec names. Arguments and all else: see `BatchNorm1d`."""


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` by the statistics of the whole that spec names. Arguments and all else: see `BatchNorm1d`."""


class SyncBatchNorm(_BatchNorm, nn.SyncBatchNorm):
    """`nn.SyncBatchNorm` over the workers that spec names: `BatchNorm1d` for inputs of any dimensions.

    process_group must be None. All else: see `BatchNorm1d`.
    """

    @api_boundary
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        generator: torch.Generator | int | None = None,
    ):
        if process_group is not None:
            raise SpecError.at(
                "spt.nn.SyncBatchNorm",
                argument="process_group",
                got=describe(process_group),
                need="None: spec names the axes that split x",
                mend='spec=P("data")',
            )
        nn.SyncBatchNorm.__init__(
            self, num_features, eps, momentum, affine, track_running_stats, None, "meta", dtype, bias=bias
        )
        self._place(device, generator, spec=spec, w_spec=w_spec)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: Any = None, *, spec: LayoutLike | None = None
    ) -> nn.Module:
        """A module with a `SyncBatchNorm` of this spec in place of each batch norm of torch in it, as torch's."""
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
        for name, child in list(converted.named_modules()):
            if type(child) is nn.SyncBatchNorm:
                parent, _, last = name.rpartition(".")
                if not name:
                    return cls.from_torch(child, spec=spec)
                setattr(converted.get_submodule(parent), last, cls.from_torch(child, spec=spec))
        return converted


class _LazyNorm(LazyLayer):
    """What lazy norms of channels have in common."""

    _learnt = "num_features"
    _batch: Any

    @api_boundary
    def __init__(
        self,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        generator: torch.Generator | int | None = None,
    ):
        options: Any = {"eps": eps, "momentum": momentum, "affine": affine, "track_running_stats": track_running_stats}
        options |= {"bias": bias, "spec": spec, "w_spec": w_spec}
        super().__init__(0, device="meta", dtype=dtype, **options)
        self._wait(device, dtype, generator=generator, **options)

    def _length_of(self, input: torch.Tensor) -> int:
        return layout_of_operand(f"spt.nn.{self._class_name}", "spec", self._batch(input), self._specs["spec"]).shape[1]

    def _length_in(self, shapes: dict[str, torch.Size]) -> int:
        return next((shapes[name][0] for name in _Norm._per_channel if name in shapes), 0)


class LazyBatchNorm1d(_LazyNorm, BatchNorm1d):
    """`BatchNorm1d` that takes the number of features from the first input. As `nn.LazyBatchNorm1d`."""

    cls_to_become = BatchNorm1d


class LazyBatchNorm2d(_LazyNorm, BatchNorm2d):
    """`BatchNorm2d` that takes the number of features from the first input. As `nn.LazyBatchNorm2d`."""

    cls_to_become = BatchNorm2d


class LazyBatchNorm3d(_LazyNorm, BatchNorm3d):
    """`BatchNorm3d` that takes the number of features from the first input. As `nn.LazyBatchNorm3d`."""

    cls_to_become = BatchNorm3d


class GroupNorm(_Norm, nn.GroupNorm):
    """`nn.GroupNorm`, of which batch, channels and places may be split.

    Arguments as those of `nn.GroupNorm`. spec: of x, whose dimension 1 has the channels; None: x is whole. w_spec: of
    weight and bias, in balanced blocks; None: as the channels of x. Each is a spec, a `Layout`, or a `Grid`, here of
    all dimensions of x. Groups may lie across workers. generator: as for `spt.drawing`.
    Forward, gradients and cost: as `spmd.functions.group_norm`.
    Raises LayoutError and SpecError where specs do not fit.
    """

    @api_boundary
    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        generator: torch.Generator | int | None = None,
    ):
        nn.GroupNorm.__init__(self, num_groups, num_channels, eps, affine, "meta", dtype, bias=bias)
        self._place(device, generator, spec=spec, w_spec=w_spec)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self._block("weight"), self._block("bias")
        return functions.group_norm(input, self.num_groups, weight, bias, self.eps, **self._given())


class _InstanceNorm(_Norm):
    """What instance norms have in common."""

    @api_boundary
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        generator: torch.Generator | int | None = None,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, "meta", dtype, bias=bias)  # type: ignore[call-arg]
        self._place(device, generator, spec=spec, w_spec=w_spec)

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        x = self._batch(input)
        return self._normalised(x) if x is input else self._normalised(x)[0]

    def _batch(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x[None] if x.ndim == self._get_no_batch_dim() else x

    def _normalised(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight, bias, given = self._block("weight"), self._block("bias"), self._given()
        training = self.training or not self.track_running_stats
        if not given:
            if training:
                _functional._verify_spatial_size(list(x.shape))
            if x.shape[1] != self.num_features and self.affine:
                raise ValueError(f"expected {self.num_features} channels, num_features, but got {x.shape[1]}")
        if self.running_mean is None:
            result: Any = functions.instance_norm(x, weight, bias, self.eps, **given)
            return result
        if training:
            self._check_statistics(x)
        running = self.shard("running_mean"), self.shard("running_var")
        options = {"training": training, "momentum": 0.0 if self.momentum is None else self.momentum, **given}
        y: Any = functions.instance_norm(x, weight, bias, self.eps, running=running, **options)
        if training:
            _update(self.shard("running_mean"), y[1][0])
            _update(self.shard("running_var"), y[1][1])
        return y[0]


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """`nn.InstanceNorm1d`, of which batch, channels and places may be split.

    Arguments as those of `nn.InstanceNorm1d`. spec: of x with a batch, (N, C, L); an x of (C, L) lies as its last
    dimensions. w_spec: of weight, bias and running statistics, in balanced blocks; None: as the channels of x. Each is
    a spec, a `Layout`, or a `Grid`, here of all dimensions of x. generator: as for `spt.drawing`.
    Forward, gradients and cost: as `spmd.functions.instance_norm`.
    Raises LayoutError and SpecError where specs do not fit.
    """


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """`nn.InstanceNorm2d`, of which batch, channels and places may be split: see `InstanceNorm1d`."""


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """`nn.InstanceNorm3d`, of which batch, channels and places may be split: see `InstanceNorm1d`."""


class LazyInstanceNorm1d(_LazyNorm, InstanceNorm1d):
    """`InstanceNorm1d` that takes the number of features from the first input. As `nn.LazyInstanceNorm1d`."""

    cls_to_become = InstanceNorm1d


class LazyInstanceNorm2d(_LazyNorm, InstanceNorm2d):
    """`InstanceNorm2d` that takes the number of features from the first input. As `nn.LazyInstanceNorm2d`."""

    cls_to_become = InstanceNorm2d


class LazyInstanceNorm3d(_LazyNorm, InstanceNorm3d):
    """`InstanceNorm3d` that takes the number of features from the first input. As `nn.LazyInstanceNorm3d`."""

    cls_to_become = InstanceNorm3d


# Rows


class _RowNorm(_Norm):
    """A norm of rows, which are the last dimensions of x: its parameters have their shape."""

    _per_channel = "weight", "bias"
    normalized_shape: tuple[int, ...]

    def _as_input(self, spec: LayoutLike | None) -> LayoutLike:
        ndim = len(self.normalized_shape)
        if isinstance(spec, P) or spec is None:
            return P()
        count = len(spec.dims if isinstance(spec, Grid) else spec.shape)
        return _like_dims(spec, range(count - ndim, count))

    def _given(self) -> dict[str, Any]:
        return {"ndim": len(self.normalized_shape), **super()._given()}


class LayerNorm(_RowNorm, nn.LayerNorm):
    """`nn.LayerNorm`, of which any dimension may be split, rows too.

        norm = spt.nn.LayerNorm(512, spec=P("data", "model"))  # the rows are whole: nothing is sent
        norm = spt.nn.LayerNorm(512, spec=P("data", None, "model"), w_spec=P("model"))

    Arguments as those of `nn.LayerNorm`. spec: of x; None: x is whole. w_spec: of weight and bias, in balanced blocks.
    None: whole, where spec is a spec, which does not tell how many dimensions x has; as the last dimensions of x, where
    it is a `Layout` or a `Grid`, here of all dimensions of x. generator: as for `spt.drawing`.
    Forward, gradients and cost: as `spmd.functions.layer_norm`.
    Raises LayoutError and SpecError where specs do not fit.
    """

    @api_boundary
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        generator: torch.Generator | int | None = None,
    ):
        shape: Any = normalized_shape
        nn.LayerNorm.__init__(self, shape, eps, elementwise_affine, bias, "meta", dtype)
        self._place(device, generator, spec=spec, w_spec=w_spec)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functions.layer_norm(input, self._block("weight"), self._block("bias"), self.eps, **self._given())


class RMSNorm(_RowNorm, nn.RMSNorm):
    """`nn.RMSNorm`, of which any dimension may be split, rows too. spec, w_spec and all else: see `LayerNorm`."""

    @api_boundary
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        spec: LayoutLike | None = None,
        w_spec: LayoutLike | None = None,
        generator: torch.Generator | int | None = None,
    ):
        shape: Any = normalized_shape
        nn.RMSNorm.__init__(self, shape, eps, elementwise_affine, "meta", dtype)
        self._place(device, generator, spec=spec, w_spec=w_spec)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return functions.rms_norm(x, self._block("weight"), eps, **self._given())
