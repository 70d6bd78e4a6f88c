"""torch's convolutions and poolings on blocks that are split over space, channels or batch.

Each worker holds its own channels of the weights. It fetches the interval of the input that its block of the output
needs (`spmd.plan_windows`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spmd import functions
from spmd.bridge.torch.interop import array_dtype
from spmd.bridge.torch.sharded import ShardedModule
from spmd.errors import LayoutError, describe
from spmd.layout import Layout, P, block_sizes
from spmd.mesh import Worker, here
from spmd.operators.halo import halo_exchange
from spmd.operators.halo_arguments import lengths_met
from spmd.tracebacks import api_boundary
from spmd.window import Window
from spmd.window_nd import plan_windows

__all__ = ["DistributedConv", "DistributedPool"]

_BOUNDARIES = {"zeros": "zero", "circular": "periodic", "reflect": "reflect", "replicate": "edge"}
_CONVOLUTIONS = {nn.Conv1d: functions.conv, nn.Conv2d: functions.conv, nn.Conv3d: functions.conv}
_POOLINGS: dict[type, tuple[int, Any]] = {
    nn.MaxPool1d: (1, F.max_pool1d),
    nn.MaxPool2d: (2, F.max_pool2d),
    nn.MaxPool3d: (3, F.max_pool3d),
    nn.AvgPool1d: (1, F.avg_pool1d),
    nn.AvgPool2d: (2, F.avg_pool2d),
    nn.AvgPool3d: (3, F.avg_pool3d),
}

_uncompiled: Any = torch.compiler.disable
"""Compiled functions call these layers uncompiled, because the workers may have to exchange shapes."""


class DistributedConv(ShardedModule):
    """`conv`, an `nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d`, on blocks: parameters, and a call of `functions.conv`.

    conv: with the whole weights, the same on all workers. in_spec, out_spec: of the input and the output, for batch,
    channels and the dimensions of space. out_spec None: in_spec with whole channels.
    size: the lengths of the whole input in space, if its blocks are balanced. Without it, each call exchanges them.

    weight, bias: copies of those of conv, as `spt.Parameter`s with the specs `self.specs`: rows of the weights lie as
    channels of the output, columns as channels of the input. With groups rows lie as the channels of the input, or
    where these are whole as those of the output.
    state_dict (collective) and load_state_dict: whole tensors, as conv has them; see `ShardedModule`.
    Forward: this worker's block of conv(x), in balanced blocks; it costs what `spmd.functions.conv` costs.
    Backward: `halo_accumulate`; one sum of the cotangent of x over the axes that split output channels; the gradients
    of the weights are summed over the axes that split batch and space.
    Raises SpecError for specs that do not fit the arrays.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    @api_boundary
    def __init__(self, conv: nn.Module, in_spec: P, out_spec: P | None = None, *, size: Sequence[int] | None = None):
        super().__init__()
        where = "spt.DistributedConv"
        worker = here(where)
        _function_of(where, "conv", conv, _CONVOLUTIONS)
        whole: Any = conv
        ndim = whole.weight.ndim
        batch, in_axes, *space = _axes_by_dimension(where, worker, "in_spec", in_spec, ndim)
        out_spec = P(batch or None, None, *(names or None for names in space)) if out_spec is None else out_spec
        out_axes = _axes_by_dimension(where, worker, "out_spec", out_spec, ndim)[1]
        self.in_spec, self.out_spec = in_spec, out_spec
        self.size = None if size is None else tuple(size)
        taken = {n for names in (batch, *space) for n in names}
        rows, columns = (out_axes, in_axes) if whole.groups == 1 else (in_axes or out_axes, ())
        rows = tuple(n for n in rows if n not in taken)
        columns = tuple(n for n in columns if n not in rows)
        self.specs = {"weight": P(rows or None, columns or None), "bias": P(rows or None)}
        self._weights = worker.mesh.layout(tuple(whole.weight.shape), self.specs["weight"])
        self._batch_is_kept = out_spec.dims[:1] == in_spec.dims[:1]
        self._channels = whole.in_channels
        self._options = {
            "stride": tuple(whole.stride),
            "padding": tuple(_padding_of(whole)),
            "dilation": tuple(whole.dilation),
            "groups": whole.groups,
            "boundary": _BOUNDARIES[whole.padding_mode],
        }
        for name, spec in self.specs.items():
            parameter = getattr(whole, name)
            if parameter is None:
                self.register_parameter(name, None)
            else:
                self.register_shard(name, parameter, spec, requires_grad=parameter.requires_grad)

    @_uncompiled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.shard("bias")
        # The length of the batch matters only where it is split otherwise afterwards.
        shape = None if self.size is None or not self._batch_is_kept else (len(x), self._channels, *self.size)
        w_spec = self.specs["weight"] if self._options["groups"] == 1 else self._weights
        specs = {"spec": self.in_spec, "w_spec": w_spec, "out_spec": self.out_spec}
        return functions.conv(x, self.shard("weight"), bias, **self._options, **specs, shape=shape)

    def extra_repr(self) -> str:
        return f"weight={list(self.weight.shape)}, in_spec={self.in_spec}, out_spec={self.out_spec}"


class DistributedPool(nn.Module):
    """`pool`, one of `nn.MaxPool1d` to `nn.MaxPool3d` and `nn.AvgPool1d` to `nn.AvgPool3d`, on blocks.

    spec: of the input and the output, for batch, channels and space. size: as for `DistributedConv`.

    Forward: this worker's block of pool(x), in balanced blocks; one `halo_exchange`. Backward: `halo_accumulate`.
    Raises SpecError for a spec that does not fit, LayoutError for a pooling that gives indices.
    """

    _pool: Any

    @api_boundary
    def __init__(self, pool: Any, spec: P, *, size: Sequence[int] | None = None):
        super().__init__()
        where = "spt.DistributedPool"
        space, self._pool = _function_of(where, "pool", pool, _POOLINGS)
        self.pool: Any = pool
        if getattr(pool, "return_indices", False):
            raise LayoutError.at(
                where,
                argument="pool",
                got=f"{pool}, with return_indices=True",
                need="a pooling that returns only values: its indices would be those of the block with its halo",
                mend="leave return_indices out",
            )
        self.spec = spec
        axes = _axes_by_dimension(where, here(where), "spec", spec, space + 2)[2:]
        kernel, stride, dilation, padding = (
            (value,) * space if isinstance(value, int) else tuple(value)
            for value in (pool.kernel_size, pool.stride, getattr(pool, "dilation", 1), pool.padding)
        )
        self._plan = _Plan(where, axes, kernel, stride, dilation, [(p, p) for p in padding], size, pool.ceil_mode)

    @_uncompiled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plan = self._plan
        windows = plan.windows(x)
        is_max = hasattr(self.pool, "return_indices")
        x = plan.exchange(x, windows, [w.halos for w in windows], "none")
        # Beyond the ends: the smallest value for a maximum, zero for a sum.
        pads = [w.pads[index] for w, index in zip(windows, plan.block_indices(), strict=True)]
        if any(map(any, pads)):
            x = F.pad(x, [n for pair in reversed(pads) for n in pair], value=-math.inf if is_max else 0.0)
        shape = (*x.shape[:2], *plan.output_sizes(windows))
        if 0 in shape[1:]:
            x = _pad_to(x, (0, 1, *plan.extents))
        y = self._pool(x, plan.kernel, plan.stride, **({"dilation": plan.dilation} if is_max else {}))
        y = _cropped(y, shape)
        return y if is_max else self._rescaled(y, windows)

    def _rescaled(self, y: torch.Tensor, windows: list[Window]) -> torch.Tensor:
        """Averages over the full kernel, rescaled to averages over the entries that the module counts."""
        taps = math.prod(self._plan.kernel)
        override = getattr(self.pool, "divisor_override", None)
        if override:
            return y * (taps / override)
        counts = torch.ones((), dtype=torch.float64)
        full = True
        for w, index, (low, _) in zip(windows, self._plan.block_indices(), self._plan.padding, strict=True):
            start, stop = (-low, w.length + low) if self.pool.count_include_pad else (0, w.length)
            assert w.taps is not None
            intervals = [w.taps(output) for output in range(*w.output_bounds[index])]
            lengths = [min(b, stop) - max(a, start) for a, b in intervals]
            full = full and all(n == w.taps.kernel for n in lengths)
            counts = counts[..., None] * torch.tensor(lengths)
        return y if full else y * (taps / counts).to(y)

    def extra_repr(self) -> str:
        return f"spec={self.spec}"


class _Plan:
    """The windows of a module over the spatial dimensions.

    Each argument has an entry for each dimension. axes: those that split it. padding: (low, high).
    """

    def __init__(
        self,
        where: str,
        axes: Sequence[tuple[str, ...]],
        kernel: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        padding: Sequence[tuple[int, int]],
        size: Sequence[int] | None,
        ceil: bool = False,
    ):
        self.where, self.axes = where, list(axes)
        self.kernel, self.stride, self.dilation = tuple(kernel), tuple(stride), tuple(dilation)
        self.padding, self.ceil = tuple(padding), ceil
        self._cached: Any = None
        self.size = None if size is None else tuple(size)
        self.extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
        self.spec = P(None, None, *(names or None for names in self.axes))

    def windows(self, x: torch.Tensor) -> list[Window]:
        """The window of each dimension, cached for the last lengths."""
        axes = here(self.where).mesh.axes
        key = (self._input_sizes(x), tuple(axes.items()))
        if self._cached is None or self._cached[0] != key:
            cuts = key[0]
            source = Layout([sum(n) for n in cuts], P(*(names or None for names in self.axes)), axes, cuts)
            taps = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
            self._cached = key, list(plan_windows(source, self.kernel, **taps, ceil=self.ceil).dims)
        return self._cached[1]

    def _input_sizes(self, x: torch.Tensor) -> tuple[tuple[int, ...], ...]:
        """The lengths of the blocks of x in each dimension."""
        worker = here(self.where)
        if self.size is not None:
            parts = [[worker.mesh.axes[a] for a in names] for names in self.axes]
            return tuple(block_sizes(n, p) for n, p in zip(self.size, parts, strict=True))
        names = [(), (), *self.axes]
        return lengths_met(self.where, worker, names, tuple(x.shape), array_dtype(x.dtype))[2:]

    def block_indices(self) -> list[int]:
        """The index of this worker's block in each dimension."""
        worker = here(self.where)
        return [worker.group(names).index for names in self.axes]

    def output_sizes(self, windows: list[Window]) -> list[int]:
        """The lengths of this worker's block of the result."""
        return [w.outputs[index] for w, index in zip(windows, self.block_indices(), strict=True)]

    def exchange(self, x: torch.Tensor, windows: list[Window], widths: list, boundary: str) -> torch.Tensor:
        """The block with halos of these widths."""
        if not any(n for dim in widths for pair in dim for n in pair):
            return x
        sizes = (None, None, *(w.inputs for w in windows))
        return halo_exchange(x, self.spec, (((0, 0),), ((0, 0),), *widths), boundary, sizes=sizes)


def _function_of(where: str, argument: str, module: Any, kinds: dict) -> Any:
    """The function that a module applies."""
    for kind, function in kinds.items():
        if isinstance(module, kind):
            return function
    raise LayoutError.at(
        where,
        argument=argument,
        got=describe(module),
        need=f"one of {', '.join(f'nn.{kind.__name__}' for kind in kinds)}",
        mend="pass torch's module, with the whole weights",
    )


def _axes_by_dimension(where: str, worker: Worker, argument: str, spec: P, ndim: int) -> list[tuple[str, ...]]:
    """The axes that split each dimension."""
    spec.check(worker.mesh.axes, where, argument, ndim)
    return [*spec.dims, *[()] * (ndim - len(spec))]


def _padding_of(conv: Any) -> list[tuple[int, int]]:
    """(low, high) of each dimension."""
    pads = conv._reversed_padding_repeated_twice
    return list(zip(pads[-2::-2], pads[::-2], strict=True))


def _pad_to(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """x with zeros at the ends of the leading dimensions that are shorter than this."""
    pads = [max(0, n - m) for n, m in zip(shape, x.shape, strict=False)]
    pads += [0] * (x.ndim - len(pads))
    return F.pad(x, [n for p in reversed(pads) for n in (0, p)])


def _cropped(y: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The first entries of y, in this shape."""
    return y if y.shape == shape else y[tuple(slice(n) for n in shape)]
