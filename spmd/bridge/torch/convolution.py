"""Convolutions and poolings of torch on blocks: split over space, over channels, over the batch.

A module of torch and the specs of its input and output give the same module on this worker's blocks. Each worker
fetches the interval of the input that its block of the output needs (`spmd.plan_windows`), and holds its own channels
of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spmd.bridge.torch.interop import array_dtype
from spmd.bridge.torch.sharded import ShardedModule
from spmd.errors import LayoutError, SpecError, describe
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
    nn.MaxPool1d: (1, F.max_pool1d),
    nn.MaxPool2d: (2, F.max_pool2d),
    nn.MaxPool3d: (3, F.max_pool3d),
    nn.AvgPool1d: (1, F.avg_pool1d),
    nn.AvgPool2d: (2, F.avg_pool2d),
    nn.AvgPool3d: (3, F.avg_pool3d),
}

_uncompiled: Any = torch.compiler.disable
"""Layers are not compiled, also if a compiled function calls them: the workers may have to exchange shapes."""


class DistributedConv(ShardedModule):
    """`conv`, an `nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d`, on blocks.

    conv: with the weights of the whole, the same on all workers. in_spec, out_spec: of the input and the output, by
    dimension: batch, channels, space; batch and space are split alike. out_spec: None for in_spec with its channels
    whole. With groups=1 the channels in and out are split over different axes or not at all; in groups over the same
    axes, whose workers share the groups evenly.
    size: the lengths of the whole input in space, if its blocks are balanced; without it they are learnt at each call.

    weight, bias: `spt.Parameter`s that lie as `specs` says; copies of those of conv. They are made in a body.
    state_dict (collective) and load_state_dict: whole tensors, as conv has them; see `ShardedModule`.
    Forward: this worker's block of conv(x), in balanced blocks. Each worker fetches what its block is made of, by one
    `halo_exchange`; where the channels that come in are split it convolves its own, and one `psum` adds up.
    Backward: `halo_accumulate`; one sum of the cotangent of x over the axes that split the channels that go out; the
    gradients of weights are summed over the axes that split batch and space.
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
        self._convolve = _function(where, "conv", conv, _CONVOLUTIONS)
        given: Any = conv
        self.space = given.weight.ndim - 2
        batch, in_axes, *space = _padded(where, worker, "in_spec", in_spec, self.space + 2)
        out_spec = P(batch or None, None, *(names or None for names in space)) if out_spec is None else out_spec
        out_batch, out_axes, *out_space = _padded(where, worker, "out_spec", out_spec, self.space + 2)
        if (batch, space) != (out_batch, out_space):
            raise SpecError.at(
                where,
                argument="out_spec",
                got=f"{out_spec}, where in_spec is {in_spec}",
                need="specs that differ in dimension 1 only, the channels",
                mend="repartition the result: spt.repartition(y, src, dst)",
            )
        self.groups = _groups(where, worker, given.groups, in_axes, out_axes)
        self.in_spec, self.out_spec = in_spec, out_spec
        self._spread = (*batch, *(n for names in space for n in names))  # along which each worker has the same weights
        # Without groups, workers along out_axes take the same x, and those along in_axes compute summands of y.
        self._same, self._added = (out_axes, in_axes) if given.groups == 1 else ((), ())
        self.specs = {"weight": P(out_axes or None, self._added or None), "bias": P(out_axes or None)}
        self._plan = _Plan(where, space, given.kernel_size, given.stride, given.dilation, _padding_of(given), size)
        self._boundary = _BOUNDARIES[given.padding_mode]
        for name, spec in self.specs.items():
            whole = getattr(given, name)
            if whole is None:
                self.register_parameter(name, None)
            else:
                self.register_shard(name, whole, spec, requires_grad=whole.requires_grad)

    @_uncompiled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = self._plan.windows(x)
        x = self._plan.exchanged(x, windows, [w.widths for w in windows], self._boundary)
        x = pvary(x, self._same) if self._same else x
        weight = self._parameter_block("weight")
        bias = None if self.bias is None else self._parameter_block("bias")
        y = self._valid(x, weight, None if self._added else bias, windows)
        if self._added:
            # The bias comes after the sum: before it, every worker would add it once.
            y = psum(y, self._added)
            y = y if bias is None else y + bias.reshape(-1, *[1] * self.space)
        return y

    def _parameter_block(self, name: str) -> Any:
        """The block of a parameter, varied to the state of the input."""
        block = self.shard(name)
        return pvary(block, self._spread) if self._spread else block

    def _valid(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, windows: list[Window]):
        """The convolution without padding. torch needs at least one channel and one window: empty ones are padded
        with zeros, so that the graphs of all workers hold the same collectives."""
        shape = (x.shape[0], weight.shape[0], *self._plan.own(windows))
        if 0 in (*shape[1:], weight.shape[1]):
            x = _at_least(x, (0, 1, *self._plan.extents))
            weight = _at_least(weight, (1, 1))
            bias = None if bias is None else _at_least(bias, (1,))
        y = self._convolve(x, weight, bias, self._plan.stride, 0, self._plan.dilation, self.groups)
        return y if y.shape == shape else y[tuple(slice(n) for n in shape)]

    def extra_repr(self) -> str:
        return f"weight={list(self.weight.shape)}, in_spec={self.in_spec}, out_spec={self.out_spec}"


class DistributedPool(nn.Module):
    """`pool`, an `nn.MaxPool1d` to `nn.AvgPool3d`, on blocks.

    spec: of the input and the output: batch, channels, space. size: as for `DistributedConv`.

    Forward: this worker's block of pool(x), in balanced blocks; one `halo_exchange`. Backward: `halo_accumulate`.
    Raises SpecError for a spec that does not fit, LayoutError for a pooling that gives indices.
    """

    _pool: Any

    @api_boundary
    def __init__(self, pool: nn.Module, spec: P, *, size: Sequence[int] | None = None):
        super().__init__()
        where = "spt.DistributedPool"
        space, self._pool = _function(where, "pool", pool, _POOLINGS)
        given: Any = pool
        if getattr(given, "return_indices", False):
            raise LayoutError.at(
                where,
                argument="pool",
                got=f"{pool}, with return_indices=True",
                need="a pooling that gives values: indices would count in the block with its halo",
                mend="leave return_indices out",
            )
        self.spec, self.pool = spec, given
        dims = _padded(where, here(where), "spec", spec, space + 2)
        kernel, stride, dilation = (
            _each(v, space) for v in (given.kernel_size, given.stride, getattr(given, "dilation", 1))
        )
        padding = [(p, p) for p in _each(given.padding, space)]
        self._plan = _Plan(where, dims[2:], kernel, stride, dilation, padding, size, given.ceil_mode)

    @_uncompiled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plan = self._plan
        windows = plan.windows(x)
        largest = hasattr(self.pool, "return_indices")
        x = plan.exchanged(x, windows, [w.halos for w in windows], "none")
        # Beyond the ends: the smallest value for a maximum, zero for a sum.
        pads = [w.pads[k] for w, k in zip(windows, plan.places(), strict=True)]
        if any(map(any, pads)):
            x = F.pad(x, [n for pair in reversed(pads) for n in pair], value=-math.inf if largest else 0.0)
        shape = (*x.shape[:2], *plan.own(windows))
        if 0 in shape[1:]:
            x = _at_least(x, (0, 1, *plan.extents))
        y = self._pool(x, plan.kernel, plan.stride, **({"dilation": plan.dilation} if largest else {}))
        y = y if y.shape == shape else y[tuple(slice(n) for n in shape)]
        return y if largest else self._weighed(y, windows)

    def _weighed(self, y: torch.Tensor, windows: list[Window]) -> torch.Tensor:
        """Averages over the full kernel, rescaled to averages over the entries that the module counts."""
        taps = math.prod(self._plan.kernel)
        override = getattr(self.pool, "divisor_override", None)
        if override:
            return y * (taps / override)
        counts = torch.ones((), dtype=torch.float64)
        full = True
        for w, k, low in zip(windows, self._plan.places(), (p for p, _ in self._plan.padding), strict=True):
            ends = (-low, w.length + low) if self.pool.count_include_pad else (0, w.length)
            assert w.taps is not None
            spans = [w.taps(o) for o in range(*w.output_bounds[k])]
            own = [min(b, ends[1]) - max(a, ends[0]) for a, b in spans]
            full = full and all(n == w.taps.kernel for n in own)
            counts = counts[..., None] * torch.tensor(own)
        return y if full else y * (taps / counts).to(y)

    def extra_repr(self) -> str:
        return f"spec={self.spec}"


class _Plan:
    """The windows of a module over the spatial dimensions.

    axes: over which each dimension is split. kernel, stride, dilation: one for each; padding: (low, high) for each.
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
        key = (self._inputs(x), tuple(axes.items()))
        if self._cached is None or self._cached[0] != key:
            cuts = key[0]
            source = Layout([sum(n) for n in cuts], P(*(names or None for names in self.axes)), axes, cuts)
            taps = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
            self._cached = key, list(plan_windows(source, self.kernel, **taps, ceil=self.ceil).dims)
        return self._cached[1]

    def _inputs(self, x: torch.Tensor) -> tuple[tuple[int, ...], ...]:
        """The lengths of the blocks of x in each dimension."""
        worker = here(self.where)
        if self.size is not None:
            parts = [[worker.mesh.axes[a] for a in names] for names in self.axes]
            return tuple(block_sizes(n, p) for n, p in zip(self.size, parts, strict=True))
        names = [(), (), *self.axes]
        return lengths_met(self.where, worker, names, tuple(x.shape), array_dtype(x.dtype))[2:]

    def places(self) -> list[int]:
        """Which block of each dimension is this worker's."""
        worker = here(self.where)
        return [worker.group(names).index for names in self.axes]

    def own(self, windows: list[Window]) -> list[int]:
        """The lengths of this worker's block of the result."""
        return [w.outputs[k] for w, k in zip(windows, self.places(), strict=True)]

    def exchanged(self, x: torch.Tensor, windows: list[Window], widths: list, boundary: str) -> torch.Tensor:
        """The block with these widths around it."""
        if not any(n for dim in widths for pair in dim for n in pair):
            return x
        whole = ((0, 0),)
        return halo_exchange(
            x, self.spec, (whole, whole, *widths), boundary, sizes=(None, None, *(w.inputs for w in windows))
        )


def _function(where: str, argument: str, module: Any, kinds: dict) -> Any:
    """What a module computes with."""
    for kind, function in kinds.items():
        if isinstance(module, kind):
            return function
    raise LayoutError.at(
        where,
        argument=argument,
        got=describe(module),
        need=f"one of {', '.join(f'nn.{kind.__name__}' for kind in kinds)}",
        mend="give the module of the whole, with its weights",
    )


def _padded(where: str, worker: Worker, argument: str, spec: P, ndim: int) -> list[tuple[str, ...]]:
    """The axes of each dimension."""
    spec.check(worker.mesh.axes, where, argument, ndim)
    return [*spec.dims, *[()] * (ndim - len(spec))]


def _groups(where: str, worker: Worker, groups: int, in_axes: tuple[str, ...], out_axes: tuple[str, ...]) -> int:
    """The groups of this worker."""
    if groups == 1:
        both = [n for n in in_axes if n in out_axes]
        if both:
            raise SpecError.at(
                where,
                argument="out_spec",
                got=f"channels that go out split over {both[0]!r}, as those that come in",
                need="different axes, or whole channels on one side: each channel is made of all that come in",
                mend="let them go out whole, and take a block: spt.pslice(y, axis_name, axis=1, tiled=True)",
            )
        return 1
    n = worker.group(in_axes).size
    if in_axes != out_axes:
        raise SpecError.at(
            where,
            argument="out_spec",
            got=f"channels in {groups} groups, split over {in_axes} coming in and over {out_axes} going out",
            need="the same axes: each worker has whole groups",
            mend="P(batch, axis, ...) for both, or whole channels for both",
        )
    if groups % n:
        raise LayoutError.at(
            where,
            argument="conv",
            got=f"{groups} groups for {n} workers along {' and '.join(map(repr, in_axes))}",
            need="as many groups for each of them",
            mend="split the channels over fewer workers, and space over more",
        )
    return groups // n


def _padding_of(conv: Any) -> list[tuple[int, int]]:
    """(low, high) of each dimension."""
    ends = conv._reversed_padding_repeated_twice
    return [(ends[k], ends[k + 1]) for k in range(len(ends) - 2, -1, -2)]


def _each(value: Any, count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value)


def _at_least(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """x with zeros at the ends of the dimensions that are shorter than this."""
    pads = [max(0, n - m) for n, m in zip(shape, x.shape, strict=False)]
    pads += [0] * (x.ndim - len(pads))
    return F.pad(x, [n for p in reversed(pads) for n in (0, p)])
