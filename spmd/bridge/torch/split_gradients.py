"""Gradients of which each worker keeps one part of the sum: a bucket that is reduce-scattered."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from spmd.bridge.torch.gradient_buckets import Bucket, ParameterGradient
from spmd.bridge.torch.interop import block_of, tensor_of
from spmd.bridge.torch.module_broadcast import WHERE, sync_call
from spmd.bridge.torch.shards import Shard
from spmd.bridge.torch.tensor_state import local_data
from spmd.device import copied
from spmd.mesh import Worker
from spmd.transport.call import LEDGERS
from spmd.transport.handles import Chained, Handle
from spmd.transport.observing import origin_of

__all__ = ["start_reduce_scatter", "store_part"]


def start_reduce_scatter(
    worker: Worker,
    axes: tuple[str, ...],
    bucket: Bucket,
    summand: Callable[[ParameterGradient], torch.Tensor | None],
    mask: torch.Tensor | None,
    detail: str,
) -> Handle:
    """Start the sum of a bucket of which each worker gets its parts: a list of arrays, and the sum of mask.

    axes: those over which gradients are summed. Along those of them that do not split the parts, the parts are summed
    afterwards.
    """
    shards: list[Shard] = [g.shard for g in bucket.gradients]
    assert bucket.shard_axes is not None
    group = worker.group(bucket.shard_axes)
    rows = [_parts(g, summand(g)) for g in bucket.gradients]
    extra = [] if mask is None else [mask.reshape(-1)]
    packed = [_packed([*(parts[k] for parts in rows), *extra]) for k in range(group.size)]
    blocks = [block_of(x, worker, WHERE)[0] for x in packed]
    for g in bucket.gradients:
        g.hand_over()
    call = sync_call(worker, bucket.shard_axes, blocks[0].dtype, (sum(b.size for b in blocks),), detail)
    call.operator, call.backward = "ReduceScatter", True
    for observer in LEDGERS.get():
        for _ in bucket.gradients:
            observer.operator(worker.index, origin_of(worker.comm, call))
    call.borrowed = len(rows) == 1 and not extra and bucket.gradients[0].p.grad is not None
    remaining = tuple(n for n in axes if n not in bucket.shard_axes)

    def steps() -> Generator[Handle, Any, list[Any]]:
        total = yield worker.comm.reduce_scatter(group, call, blocks)
        if remaining:
            sums = sync_call(worker, remaining, total.dtype, total.shape, detail)
            sums.operator, sums.backward = "Sum", True
            total = yield worker.comm.all_reduce(worker.group(remaining), sums, total)
        sums = _unpacked(total, shards)
        return sums if mask is not None else sums[:-1]

    return Chained(steps())


def _parts(g: ParameterGradient, x: torch.Tensor | None) -> list[torch.Tensor]:
    """The parts of a summand, or of zeros, for all members."""
    if x is None:
        x = torch.zeros_like(local_data(g.p).detach())
    return g.shard.parts(x)


def _packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0].reshape(-1) if len(parts) == 1 else torch.cat([x.reshape(-1) for x in parts])


def _unpacked(total: Any, shards: Sequence[Shard]) -> list[Any]:
    """The sums of this worker's parts, and what follows."""
    sums, at = [], 0
    for shard in shards:
        shape = shard.layout.block_shape(shard.placement.index)
        size = torch.Size(shape).numel()
        sums.append(total[at : at + size].reshape(shape))
        at += size
    return [*sums, total[at:]]


def store_part(g: ParameterGradient, total: Any, divisor: int) -> None:
    """Store this worker's part of a sum, over `divisor`, in `.grad`, with that of earlier backwards."""
    part = tensor_of(copied(total))
    if divisor > 1 and part.dtype is not torch.float16:
        part /= divisor
    base = g.base if g.set_aside else g.p.grad
    if base is not None:
        part = g.shard.taken(base).add(part)
    g.p.grad = g.shard.like_part(part)
    g.base, g.unsynced = None, False
