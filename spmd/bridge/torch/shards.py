"""Parameters of which each worker keeps one part: which part, and all parts put together again.

A `Shard` says how a parameter, whole or in blocks of a plan, is split further over one or more axes. Optimiser states
and gradients of such parts are `PartitionedTensor`s of the shape of the whole, so norms, files and loss scaling know
how they lie.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from spmd.bridge.torch.interop import block_of, write
from spmd.bridge.torch.partitioned.placement import Placement
from spmd.bridge.torch.partitioned.tensor import PartitionedTensor, new_leaf
from spmd.bridge.torch.tensor_state import INVARIANT, block_nbytes, is_partitioned, local_data
from spmd.bridge.torch.worker_context import context_of
from spmd.layout import Layout, P
from spmd.mesh import Worker
from spmd.optim.sharding import sharded_layout
from spmd.transport.call import LEDGERS, Call
from spmd.transport.handles import Handle
from spmd.transport.observing import origin_of

__all__ = ["Shard", "gather_parts"]

_MESSAGE_BYTES = 4 << 20
"""Parts are packed into one message until it has this many bytes."""
_IN_FLIGHT = 2
"""Messages that are on their way at once."""


class Shard:
    """How a parameter is split further over some axes.

    p: the parameter. layout: of its parts, over the axes of its own blocks too. slices: by member of the group along
    the axes, its part of the data that this worker has of the parameter. is_split: False for numbers and for parameters
    that lie split over the axes already, or on a grid: each worker keeps what it has of them.
    """

    def __init__(self, p: torch.Tensor, axes: tuple[str, ...], worker: Worker):
        self.p = p
        self.axes = axes
        own = p._placement.layout if isinstance(p, PartitionedTensor) else Layout(tuple(p.shape), P(), {})
        self.own_layout = own
        self.layout = _split_further(own, axes, worker)
        self.is_split = self.layout != own
        self.group = worker.group(axes)
        if not self.is_split:
            return
        names = tuple(self.layout.axes)
        self.placement = Placement(self.layout, worker.group(names).index, context_of(worker))
        at = [a for a, _ in own.boxes[worker.group(tuple(own.axes)).index]] if own.axes else [0] * len(own.shape)
        self.slices = [
            tuple(
                slice(start - a, stop - a)
                for (start, stop), a in zip(self.layout.boxes[worker.mesh.group(member, names).index], at, strict=True)
            )
            for member in self.group.members
        ]

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """This worker's part of its data of a tensor that lies as the parameter: a view of the data."""
        local = local_data(x).detach()
        return local[self.slices[self.group.index]] if self.is_split else local

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The parts of all members of the group, as views of this worker's data."""
        local = local_data(x).detach()
        return [local[slices] for slices in self.slices]

    def like_part(self, part: torch.Tensor) -> Any:
        """The tensor of which this worker holds this part: of the shape of the parameter, in the layout of parts."""
        with torch._C.DisableTorchFunctionSubclass():
            like = self.p if is_partitioned(self.p) else None
            return new_leaf(PartitionedTensor, part, self.placement, INVARIANT, False, like)

    def taken(self, x: Any) -> torch.Tensor:
        """This worker's part of a tensor of the shape of the parameter, however it lies. Collective for other layouts
        than those of the parameter and of its parts."""
        if isinstance(x, PartitionedTensor):
            layout = x.block_layout
            if self.is_split and layout == self.layout:
                return x._block
            if layout == self.own_layout:
                return self.part(x)
            x = x.whole()
        if not self.is_split:
            return x if self.own_layout.axes == {} else self.p.like_whole(x)._block  # type: ignore[attr-defined]
        return local_data(x).detach().reshape(self.layout.shape)[self.placement.slices]


def _split_further(own: Layout, axes: tuple[str, ...], worker: Worker) -> Layout:
    """The layout of parts of blocks that lie by `own`."""
    mesh = worker.mesh
    if own.spec is None or not own.shape:
        return own
    names = {*own.axes, *axes}
    layout = Layout(own.shape, own.spec, {n: k for n, k in mesh.axes.items() if n in names}, own.cuts)
    return sharded_layout(layout, axes, "a parameter")


def gather_parts(worker: Worker, axes: tuple[str, ...], stepped: Iterable[tuple[Shard, torch.Tensor]]) -> None:
    """Write the parts of all workers into the parameters.

    stepped: parameters, and this worker's new parts of them. Cost: an all-gather for each 4 MiB of one dtype.
    """
    under_way: list[tuple[list[Shard], Handle]] = []
    for shards, parts in _messages(stepped):
        under_way.append((shards, _start(worker, axes, shards, parts)))
        if len(under_way) > _IN_FLIGHT:
            _finish(*under_way.pop(0))
    for each in under_way:
        _finish(*each)


def _messages(stepped: Iterable[tuple[Shard, torch.Tensor]]) -> Iterator[tuple[list[Shard], list[torch.Tensor]]]:
    """Parameters of one dtype whose parts go in one message: the same on all workers, whatever their parts have."""
    filling: dict[Any, tuple[list[Shard], list[torch.Tensor], int]] = {}
    for shard, part in stepped:
        kind = (shard.p.dtype, shard.p.device)
        shards, parts, nbytes = filling.pop(kind, ([], [], 0))
        shards.append(shard)
        parts.append(part)
        nbytes += block_nbytes(shard.p) // shard.group.size
        if nbytes >= _MESSAGE_BYTES:
            yield shards, parts
        else:
            filling[kind] = shards, parts, nbytes
    for shards, parts, _ in filling.values():
        yield shards, parts


def _start(worker: Worker, axes: tuple[str, ...], shards: list[Shard], parts: Sequence[torch.Tensor]) -> Handle:
    dtype = shards[0].p.dtype
    packed = parts[0].to(dtype).reshape(-1) if len(parts) == 1 else torch.cat([x.to(dtype).reshape(-1) for x in parts])
    block, _ = block_of(packed, worker, "spt.shard_optimizer")
    detail = f"{len(shards)} parameters of {sum(local_data(s.p).numel() for s in shards)} entries"
    call = Call("shard_optimizer", axes, block.dtype, block.shape, detail=detail, frame=sys._getframe(1))
    call.borrowed = _on_memory_of(packed, shards[0].p)
    call.operator = "AllGather"
    for observer in LEDGERS.get():
        for _ in shards:
            observer.operator(worker.index, origin_of(worker.comm, call))
    return worker.comm.all_gather(worker.group(axes), call, block)


def _finish(shards: list[Shard], handle: Handle) -> None:
    targets = [shard.parts(shard.p) for shard in shards]
    for member, block in enumerate(handle.wait()):
        at = 0
        for each in targets:
            size = each[member].numel()
            write(each[member], block[at : at + size].reshape(tuple(each[member].shape)))
            at += size
    torch.autograd.graph.increment_version([shard.p for shard in shards])


def _on_memory_of(x: torch.Tensor, p: torch.Tensor) -> bool:
    return x.untyped_storage().data_ptr() == local_data(p).untyped_storage().data_ptr()
