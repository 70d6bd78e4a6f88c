"""A parameter that lies split over an axis, and where the blocks of the workers lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spmd.bridge.torch.partitioned.parameter import Parameter
from spmd.bridge.torch.partitioned.placement import Placement, own_placement
from spmd.bridge.torch.partitioned.tensor import PartitionedTensor, new_leaf
from spmd.bridge.torch.tensor_state import INVARIANT, is_partitioned, local_data, plain
from spmd.bridge.torch.unsummed import hang_up, take_down
from spmd.bridge.torch.worker_context import device_of
from spmd.errors import LayoutError
from spmd.layout import Layout, P
from spmd.mesh import Worker
from spmd.optim.sharding import sharded_layout
from spmd.transport.call import Group

__all__ = ["WHERE", "ShardedParameter", "block_gradient", "copy_unsummed", "leave_unsummed"]

WHERE = "spt.shard_parameters"


class ShardedParameter:
    """A parameter of a module, of which each worker keeps a block. "Its whole" is what this worker computes with: the
    whole parameter, or the block that a plan gives this worker.

    name: in the module. p: the `spt.Parameter` of this worker's block; the parameter itself where it is a number.
    base: how a plan splits it; None: not at all. shape: of its whole; outer_shape: the shape that the module knows.
    parts: for each worker along the axis, where its block lies in the whole. index: of this worker there. slots: the
    modules that have it, and the names there.
    """

    __slots__ = ("base", "index", "name", "outer_shape", "p", "parts", "shape", "slots")

    def __init__(self, name: str, own: nn.Parameter, axes: tuple[str, ...], worker: Worker):
        self.name = name
        self.slots: list[tuple[nn.Module, str]] = []
        self.outer_shape = tuple(own.shape)
        self.base: Placement | None = own._placement if isinstance(own, PartitionedTensor) else None
        data = local_data(own).detach()
        self.shape = tuple(data.shape)
        group = worker.group(axes)
        self.index = group.index
        device = device_of(worker) if data.is_meta else data.device
        if not self.outer_shape:
            self.p: Any = own if not data.is_meta else nn.Parameter(torch.empty((), dtype=data.dtype, device=device))
            self.p.requires_grad_(own.requires_grad)
            self.parts: list[tuple[slice, ...]] = [()] * group.size
            return
        layout = _with_axes(name, self.base, self.outer_shape, axes, worker)
        placement = own_placement(layout, worker)
        start = [0] * len(layout.shape) if self.base is None else [s.start for s in self.base.slices]
        self.parts = [
            tuple(slice(a.start - s, a.stop - s) for a, s in zip(layout.slices(k), start, strict=True))
            for k in _members(layout, placement.index, axes, group)
        ]
        part = plain(data)[self.parts[group.index]]
        block = torch.empty(part.shape, dtype=part.dtype, device=device)
        if not data.is_meta:
            block.copy_(part)
        like = None if tuple(layout.shape) == self.outer_shape else data.new_empty(self.outer_shape, device="meta")
        self.p = new_leaf(Parameter, block, placement, INVARIANT, own.requires_grad, like)
        self.p.unit_gathers = True

    @property
    def block(self) -> torch.Tensor:
        """This worker's block, without history."""
        return local_data(self.p).detach()

    @property
    def version(self) -> int:
        """The number of writes to this worker's block."""
        return local_data(self.p)._version

    def part_shape(self, k: int) -> tuple[int, ...]:
        """The shape of the block of a worker along the axis."""
        return tuple(s.stop - s.start for s in self.parts[k])

    def part(self, whole: torch.Tensor, k: int) -> torch.Tensor:
        """The block of a worker, as a view of the whole."""
        for d, s in enumerate(self.parts[k]):
            if s.stop - s.start != whole.shape[d]:
                whole = whole.narrow(d, s.start, s.stop - s.start)
        return whole


def _with_axes(
    name: str, base: Placement | None, shape: tuple[int, ...], axes: tuple[str, ...], worker: Worker
) -> Layout:
    """The layout of a parameter that these axes split too."""
    own = {} if base is None else dict(base.layout.axes)
    if base is not None and base.layout.spec is None:
        raise LayoutError.at(
            WHERE,
            argument="module",
            got=f"{name}, which lies as {base.layout}",
            need="parameters laid out by specs",
            mend="another axis of the mesh: spt.shard_parameters(spt.parallelize(net, plan), axis_name)",
        )
    mesh = {n: size for n, size in worker.mesh.axes.items() if n in axes or n in own}
    if base is None:
        return sharded_layout(Layout(shape, P(), mesh), axes, name)
    return sharded_layout(Layout(base.layout.shape, base.layout.spec, mesh, base.layout.cuts), axes, name)


def _members(layout: Layout, index: int, axes: Sequence[str], group: Group) -> list[int]:
    """The numbers in a layout of the workers that differ from this one only along some axes, in their order there."""
    own = layout.coordinates(index)
    numbers = []
    for k in range(group.size):
        place, rest = dict(own), k
        for n, size in zip(reversed(group.axes), reversed(group.dims), strict=True):
            rest, place[n] = divmod(rest, size)
        number = 0
        for n, size in layout.axes.items():
            number = number * size + place[n]
        numbers.append(number)
    return numbers


def block_gradient(q: ShardedParameter, g: torch.Tensor) -> Any:
    """A gradient of the block of a parameter, as the gradient of the parameter."""
    if not is_partitioned(q.p):
        return g
    return PartitionedTensor(g, q.p._placement, q.outer_shape)


def leave_unsummed(q: ShardedParameter, whole: torch.Tensor) -> None:
    """Keep this worker's own gradient of a whole until the sum."""
    block = q.part(whole, q.index).detach().to(q.block.dtype).contiguous()
    hang_up(q.name, q.p, whole, block_gradient(q, block))


def copy_unsummed(parameters: Sequence[ShardedParameter], copies: Sequence[ShardedParameter]) -> None:
    """Give copies of parameters copies of the gradients that are not summed yet."""
    for q, copied in zip(parameters, copies, strict=True):
        whole = take_down(q.p)
        if whole is not None:
            alone = q.p.grad is None
            leave_unsummed(q, whole)
            if alone:
                copied.p.grad = None
            elif copied.p.grad is not None:
                vars(copied.p.grad).pop("_unsummed", None)
            leave_unsummed(copied, whole.clone())
