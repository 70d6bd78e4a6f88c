"""torch's convolutions and poolings on blocks that are split over space, channels or batch, as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spmd import functions
from spmd.bridge.torch.sharded import ShardedModule
from spmd.errors import LayoutError, describe
from spmd.layout import P
from spmd.mesh import Worker, here
from spmd.tracebacks import api_boundary

__all__ = ["DistributedConv", "DistributedPool"]

_BOUNDARIES = {"zeros": "zero", "circular": "periodic", "reflect": "reflect", "replicate": "edge"}
_CONVOLUTIONS = dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), functions.conv)
_POOLINGS: dict[type, tuple[int, Any]] = {
    nn.MaxPool1d: (1, functions.max_pool),
    nn.MaxPool2d: (2, functions.max_pool),
    nn.MaxPool3d: (3, functions.max_pool),
    nn.AvgPool1d: (1, functions.avg_pool),
    nn.AvgPool2d: (2, functions.avg_pool),
    nn.AvgPool3d: (3, functions.avg_pool),
}
_OPTIONS = "stride padding dilation ceil_mode return_indices count_include_pad divisor_override".split()

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
