"""torch's convolutions and poolings on blocks that are split over space, channels or batch.

Each worker holds its own channels of the weights. It fetches the interval of the input that its block of the output
needs (`spmd.plan_windows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spmd.bridge.torch.interop import array_dtype
from spmd.bridge.torch.sharded import ShardedModule
from spmd.errors import LayoutError, SpecError, describe
from spmd.functions import avg_pool, max_pool
from spmd.layout import Layout, P, block_sizes
from spmd.mesh import Worker, here
from spmd.operators.halo import halo_exchange
from spmd.operators.halo_arguments import lengths_met
from spmd.operators.reduce import psum, pvary
from spmd.tracebacks import api_boundary
from spmd.window import Window
from spmd.window_nd import plan_windows

__all__ = ["DistributedConv", "DistributedPool"]

_BOUNDARIES = {"zeros": "zero", "circular": "periodic", "reflect": "reflect", "replicate": "edge"}
_CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
_POOLINGS: dict[type, tuple[int, Any]] = {
    nn.MaxPool1d: (1, max_pool),
    nn.MaxPool2d: (2, max_pool),
    nn.MaxPool3d: (3, max_pool),
    nn.AvgPool1d: (1, avg_pool),
    nn.AvgPool2d: (2, avg_pool),
    nn.AvgPool3d: (3, avg_pool),
}
_OPTIONS = (
    *("stride", "padding", "dilation", "ceil_mode", "return_indices"),
    *("count_include_pad", "divisor_override"),
)

_uncompiled: Any = torch.compiler.disable
"""Compiled functions call these layers uncompiled, because the workers may have to exchange shapes."""


class DistributedConv(ShardedModule):
    """`conv`, an `nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d`, on blocks. Construct it in a body.

    conv: with the whole weights, the same on all workers. in_spec, out_spec: of the input and the output, for batch,
    channels and the dimensions of space. Batch and space are split alike in both. out_spec None: in_spec with whole
    channels. With groups=1, input and output channels are split over different axes or not at all; with more groups,
    over the same axes, whose workers share the groups evenly.
    size: the lengths of the whole input in space, if its blocks are balanced. Without it, each call exchanges them.

    weight, bias: copies of those of conv, as `spt.Parameter`s with the specs `self.specs`.
    state_dict (collective) and load_state_dict: whole tensors, as conv has them; see `ShardedModule`.
    Forward: this worker's block of conv(x), in balanced blocks. One `halo_exchange` fetches the input of the block. If
    input channels are split, each worker convolves its own, and one `psum` adds the results.
    Backward: `halo_accumulate`; one sum of the cotangent of x over the axes that split output channels; the gradients
    of the weights are summed over the axes that split batch and space.
    Raises SpecError for specs that do not fit together, LayoutError for groups that are not shared evenly.
    """

    _convolve: Any
    weight: nn.Parameter
    bias: nn.Parameter | None

    @api_boundary
    def __init__(self, conv: nn.Module, in_spec: P, out_spec: P | None = None, *, size: Sequence[int] | None = None):
        super().__init__()
        where = "spt.DistributedConv"
        worker = here(where)
        self._convolve = _function_of(where, "conv", conv, _CONVOLUTIONS)
        whole: Any = conv
        self.space = whole.weight.ndim - 2
        batch, in_axes, *space = _axes_by_dimension(where, worker, "in_spec", in_spec, self.space + 2)
        out_spec = P(batch or None, None, *(names or None for names in space)) if out_spec is None else out_spec
        out_batch, out_axes, *out_space = _axes_by_dimension(where, worker, "out_spec", out_spec, self.space + 2)
        if (batch, space) != (out_batch, out_space):
            raise SpecError.at(
                where,
                argument="out_spec",
                got=f"{out_spec}, where in_spec is {in_spec}",
                need="specs that differ in dimension 1 only, the channels",
                mend="repartition the result: spt.repartition(y, src, dst)",
            )
        self.groups = _local_groups(where, worker, whole.groups, in_axes, out_axes)
        self.in_spec, self.out_spec = in_spec, out_spec
        self._replicated_axes = (*batch, *(n for names in space for n in names))  # workers have the same weights
        # Without groups, workers along out_axes take the same x, and those along in_axes compute summands of y.
        self._input_axes, self._summed_axes = (out_axes, in_axes) if whole.groups == 1 else ((), ())
        self.specs = {"weight": P(out_axes or None, self._summed_axes or None), "bias": P(out_axes or None)}
        self._plan = _Plan(where, space, whole.kernel_size, whole.stride, whole.dilation, _padding_of(whole), size)
        self._boundary = _BOUNDARIES[whole.padding_mode]
        for name, spec in self.specs.items():
            parameter = getattr(whole, name)
            if parameter is None:
                self.register_parameter(name, None)
            else:
                self.register_shard(name, parameter, spec, requires_grad=parameter.requires_grad)

    @_uncompiled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = self._plan.windows(x)
        x = self._plan.exchange(x, windows, [w.widths for w in windows], self._boundary)
        x = pvary(x, self._input_axes) if self._input_axes else x
        weight = self._parameter_block("weight")
        bias = None if self.bias is None else self._parameter_block("bias")
        y = self._convolve_valid(x, weight, None if self._summed_axes else bias, windows)
        if self._summed_axes:
            # The bias is added after the sum: before it, every worker would add it once.
            y = psum(y, self._summed_axes)
            y = y if bias is None else y + bias.reshape(-1, *[1] * self.space)
        return y

    def _parameter_block(self, name: str) -> Any:
        """This worker's block of a parameter, varied along the axes that split batch and space."""
        block = self.shard(name)
        return pvary(block, self._replicated_axes) if self._replicated_axes else block

    def _convolve_valid(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, windows: list[Window]):
        """The convolution without padding. torch needs at least one channel and one window, so empty blocks are padded
        with zeros. The graphs of all workers then hold the same collectives."""
        shape = (x.shape[0], weight.shape[0], *self._plan.output_sizes(windows))
        if 0 in (*shape[1:], weight.shape[1]):
            x = _pad_to(x, (0, 1, *self._plan.extents))
            weight = _pad_to(weight, (1, 1))
            bias = None if bias is None else _pad_to(bias, (1,))
        y = self._convolve(x, weight, bias, self._plan.stride, 0, self._plan.dilation, self.groups)
        return _cropped(y, shape)

    def extra_repr(self) -> str:
        return f"weight={list(self.weight.shape)}, in_spec={self.in_spec}, out_spec={self.out_spec}"


class DistributedPool(nn.Module):
    """`pool`, one of `nn.MaxPool1d` to `nn.MaxPool3d` and `nn.AvgPool1d` to `nn.AvgPool3d`, on blocks.

    spec: of the input and the output, for batch, channels and space. size: as for `DistributedConv`.

    Forward: this worker's block of pool(x), in balanced blocks, by `spt.functions.max_pool` or `avg_pool`: one
    `halo_exchange`. Backward: `halo_accumulate`. With return_indices=True the indices are those of the whole input.
    Raises SpecError for a spec that does not fit, LayoutError for a module that is no such pooling.
    """

    @api_boundary
    def __init__(self, pool: Any, spec: P, *, size: Sequence[int] | None = None):
        super().__init__()
        where = "spt.DistributedPool"
        space, _ = self._function = _function_of(where, "pool", pool, _POOLINGS)
        self.pool: Any = pool
        self.spec, self.size = spec, None if size is None else tuple(size)
        # Workers along the axes that split batch and channels pool arrays of their own.
        axes = _axes_by_dimension(where, here(where), "spec", spec, space + 2)[2:]
        self._space = P(None, None, *(names or None for names in axes))

    @_uncompiled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pool, (_, function) = self.pool, self._function
        options = {name: getattr(pool, name) for name in _OPTIONS if hasattr(pool, name)}
        shape = None if self.size is None else (*x.shape[:2], *self.size)
        return function(x, pool.kernel_size, **options, spec=self._space, shape=shape)

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
    ):
        self.where, self.axes = where, list(axes)
        self.kernel, self.stride, self.dilation = tuple(kernel), tuple(stride), tuple(dilation)
        self.padding = tuple(padding)
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
            self._cached = key, list(plan_windows(source, self.kernel, **taps).dims)
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


def _local_groups(where: str, worker: Worker, groups: int, in_axes: tuple[str, ...], out_axes: tuple[str, ...]) -> int:
    """The number of groups of channels that this worker has."""
    if groups == 1:
        both = [n for n in in_axes if n in out_axes]
        if both:
            raise SpecError.at(
                where,
                argument="out_spec",
                got=f"output channels split over {both[0]!r}, as the input channels are",
                need="different axes, or whole channels on one side: each output channel needs all input channels",
                mend="whole output channels, of which spt.pslice(y, axis_name, axis=1, tiled=True) takes a block",
            )
        return 1
    count = worker.group(in_axes).size
    if in_axes != out_axes:
        raise SpecError.at(
            where,
            argument="out_spec",
            got=f"channels in {groups} groups, split over {in_axes} in the input and over {out_axes} in the output",
            need="the same axes: each worker has whole groups",
            mend="P(batch, axis, ...) for both, or whole channels for both",
        )
    if groups % count:
        raise LayoutError.at(
            where,
            argument="conv",
            got=f"{groups} groups for {count} workers along {' and '.join(map(repr, in_axes))}",
            need="as many groups for each of them",
            mend="split the channels over fewer workers, and space over more",
        )
    return groups // count


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
