"""The messages of sharded parameters: wholes gathered of blocks, and blocks of the sums of gradients.

A unit sends one message for each dtype. It holds the blocks of all its parameters, one after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from spmd.bridge.torch.interop import block_of, message_buffer, owned, write
from spmd.bridge.torch.sharding.blocks import WHERE, ShardedParameter
from spmd.bridge.torch.worker_context import refuse_lockstep
from spmd.mesh import Worker
from spmd.transport.call import LEDGERS, Call, Group
from spmd.transport.handles import Handle
from spmd.transport.observing import origin_of

__all__ = ["GradientSums", "Wholes", "by_dtype"]


def by_dtype(
    parameters: Iterable[tuple[int, ShardedParameter]], dtype_of: Callable[[ShardedParameter], torch.dtype]
) -> dict[torch.dtype, list[tuple[int, ShardedParameter]]]:
    """Numbered parameters, by the dtype in which they are sent."""
    groups: dict[torch.dtype, list[tuple[int, ShardedParameter]]] = {}
    for number, q in parameters:
        groups.setdefault(dtype_of(q), []).append((number, q))
    return groups


def _call(worker: Worker, group: Group, block: Any, detail: str, operator: str, backward: bool) -> Call:
    refuse_lockstep(worker)
    call = Call("shard_parameters", group.axes, block.dtype, block.shape, detail=detail, frame=sys._getframe(2))
    if worker.mesh.places is not None:
        call.host = False
    call.operator, call.backward = operator, backward
    for observer in LEDGERS.get():
        observer.operator(worker.index, origin_of(worker.comm, call))
    return call


class Wholes:
    """The whole parameters of a unit, while they arrive and when they are there.

    handles: of the messages under way. tensors: the wholes, once `wait` was called.
    """

    __slots__ = ("groups", "handles", "index", "parameters", "tensors")

    def __init__(
        self,
        worker: Worker,
        axes: tuple[str, ...],
        name: str,
        parameters: Sequence[ShardedParameter],
        dtype_of: Callable[[ShardedParameter], torch.dtype],
        backward: bool,
    ):
        self.parameters = parameters
        self.tensors: list[torch.Tensor] | None = None
        self.groups = by_dtype(enumerate(parameters), dtype_of)
        group = worker.group(axes)
        self.index = group.index
        self.handles: list[Handle] = []
        for dtype, numbered in self.groups.items():
            blocks = [q.block.reshape(-1) for _, q in numbered if q.shape]
            packed = message_buffer(sum(b.numel() for b in blocks), dtype, numbered[0][1].block.device)
            for own, part in zip(blocks, packed.split([b.numel() for b in blocks]), strict=True):
                part.copy_(own)
            block, _ = block_of(packed, worker, WHERE)
            call = _call(worker, group, block, f"parameters of {name}", "AllGather", backward)
            self.handles.append(worker.comm.all_gather(group, call, block))

    def wait(self) -> list[torch.Tensor]:
        """The wholes, each in memory of its own."""
        if self.tensors is None:
            wholes: dict[int, torch.Tensor] = {}
            for (dtype, numbered), handle in zip(self.groups.items(), self.handles, strict=True):
                packed = handle.wait()
                starts = [0] * len(packed)
                for number, q in numbered:
                    if not q.outer_shape:
                        wholes[number] = q.block.to(dtype).clone()
                        continue
                    whole = wholes[number] = torch.empty(q.shape, dtype=dtype, device=q.block.device)
                    for k, buffer in enumerate(packed):
                        shape, part = q.part_shape(k), q.part(whole, k)
                        write(part, buffer[starts[k] : starts[k] + part.numel()].reshape(shape))
                        starts[k] += part.numel()
            self.handles = []
            self.tensors = [wholes[number] for number in range(len(self.parameters))]
        return self.tensors


class GradientSums:
    """The sums over workers of a unit's gradients, of which this worker gets its blocks.

    gradients: for each parameter this worker's own gradient of its whole, or None. Where no worker has one, the result
    is None too; those that lack one count as zeros. mean: divide by the number of workers.
    """

    __slots__ = ("count", "groups", "handles", "index", "mean", "size")

    def __init__(
        self,
        worker: Worker,
        axes: tuple[str, ...],
        name: str,
        parameters: Sequence[ShardedParameter | None],
        gradients: Sequence[torch.Tensor | None],
        dtype_of: Callable[[ShardedParameter], torch.dtype],
        mean: bool,
    ):
        self.count = len(parameters)
        self.mean = mean
        self.groups = by_dtype(((i, q) for i, q in enumerate(parameters) if q is not None), dtype_of)
        group = worker.group(axes)
        self.index, self.size = group.index, group.size
        self.handles: list[Handle] = []
        for dtype, numbered in self.groups.items():
            flags = [float(gradients[number] is not None) for number, _ in numbered]
            lengths = [sum(q.part(gradient_like(q), k).numel() for _, q in numbered) for k in range(group.size)]
            device = numbered[0][1].block.device
            parts = [message_buffer(n + len(flags), dtype, device) for n in lengths]
            for k, part in enumerate(parts):
                if not all(flags):
                    part.zero_()
                self._pack(part, k, numbered, gradients, flags)
            blocks = [block_of(part, worker, WHERE)[0] for part in parts]
            call = _call(worker, group, blocks[group.index], f"gradients of {name}", "ReduceScatter", True)
            self.handles.append(worker.comm.reduce_scatter(group, call, blocks))

    def _pack(self, part: torch.Tensor, k: int, numbered: Any, gradients: Any, flags: list[float]) -> None:
        """Write what a worker gets: its blocks, and which gradients there are here."""
        start = 0
        for number, q in numbered:
            g = gradients[number]
            own = q.part(gradient_like(q) if g is None else g, k)
            stop = start + own.numel()
            if g is not None:
                source = own if not self._divides_first(part.dtype) else own / self.size
                part[start:stop].view(own.shape).copy_(source)
            start = stop
        part[start:].copy_(torch.tensor(flags, device=part.device))

    def _divides_first(self, dtype: torch.dtype) -> bool:
        """For a mean, float16 is divided first, because the sum might overflow."""
        return self.mean and dtype is torch.float16

    def wait(self) -> list[torch.Tensor | None]:
        """This worker's block of each sum, in the dtype of its parameter."""
        results: list[torch.Tensor | None] = [None] * self.count
        for numbered, handle in zip(self.groups.values(), self.handles, strict=True):
            total = owned([handle.wait()])
            if self.mean and not self._divides_first(total.dtype):
                total[: total.numel() - len(numbered)].div_(self.size)
            counts = total[total.numel() - len(numbered) :].real.tolist()
            start = 0
            for (number, q), count in zip(numbered, counts, strict=True):
                stop = start + q.part(gradient_like(q), self.index).numel()
                if count:
                    results[number] = total[start:stop].view(q.part_shape(self.index)).to(q.block.dtype)
                start = stop
        self.handles = []
        return results


def gradient_like(q: ShardedParameter) -> torch.Tensor:
    """A tensor of the shape of a parameter's whole that takes no memory."""
    return torch.empty((), device="meta").expand(q.shape)
