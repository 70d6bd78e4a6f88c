"""Gradients of parameters, and the buckets in which they are summed over workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spmd.bridge.torch.interop import owned, write
from spmd.bridge.torch.module_broadcast import WHERE
from spmd.bridge.torch.partitioned.tensor import PartitionedTensor
from spmd.bridge.torch.tensor_state import block_nbytes, is_partitioned, local_data
from spmd.errors import StateError
from spmd.transport.handles import Handle

__all__ = ["Bucket", "ParameterGradient", "accumulator", "fill_buckets"]


def accumulator(p: torch.Tensor) -> Any:
    """The AccumulateGrad node of a leaf. Torch makes another one where the dtype of the leaf was another meanwhile."""
    with torch.inference_mode(False), torch.enable_grad():
        view: Any = p.view_as(p)
    return view.grad_fn.next_functions[0][0]


class ParameterGradient:
    """A parameter and its gradient.

    index: its position among the gradients that are summed. node: the AccumulateGrad node of the parameter.
    base: the sum of earlier backwards, while `.grad` does not hold it or does not hold it alone.
    unsynced: whether `.grad` holds this worker's own part, from a backward that sent nothing (`no_sync`).
    version: of `.grad` after that backward, if base is in it.
    arrived: whether this backward has computed it. set_aside: whether this backward has set base aside.
    shard: how the sum is split over workers, for `spt.shard_optimizer`; None: all have the whole. Then base lies in
    parts, and is never in `.grad` together with this worker's own part.
    handed_over: whether this worker's own part was taken out of `.grad`, because a message holds it or the sum is here.
    """

    __slots__ = (
        *("arrived", "base", "bucket", "handed_over", "index", "name"),
        *("node", "p", "set_aside", "shard", "unsynced", "version"),
    )

    def __init__(self, index: int, name: str, p: nn.Parameter):
        self.index = index
        self.name = name
        self.p = p
        self.bucket: Bucket
        self.node: Any = None
        self.base: torch.Tensor | None = None
        self.unsynced = False
        self.version = 0
        self.arrived = False
        self.set_aside = False
        self.shard: Any = None
        self.handed_over = False

    @property
    def kind(self) -> tuple[Any, ...]:
        """What gradients that are sent together have in common."""
        return self.p.dtype, self.p.device, None if self.shard is None else self.shard.axes

    def own(self) -> torch.Tensor | None:
        """This worker's own gradient."""
        return self.p.grad if self.arrived or self.unsynced else None

    def put_aside(self) -> None:
        """Leave only this worker's own part in `.grad`."""
        if self.set_aside:
            return
        self.set_aside = True
        if not self.unsynced:
            self.base, self.p.grad = self.p.grad, None
        elif self.base is not None and self.p.grad is not None and self.shard is None:
            self.p.grad -= self.base

    def begin_unsynced(self) -> None:
        """This worker's own part is about to be added to `.grad`, and not to be sent."""
        self.unsynced = True
        if self.shard is not None:
            self.base, self.p.grad = self.p.grad, None
        else:
            self.base = None if self.p.grad is None else self.p.grad.detach().clone()

    def hand_over(self) -> None:
        """Take this worker's own part out of `.grad`, whose memory is free as soon as no message needs it."""
        if self.arrived and not self.unsynced:
            self.handed_over, self.p.grad = True, None

    def restore(self) -> None:
        """Undo `put_aside`."""
        if not self.set_aside:
            return
        self.set_aside = False
        if not self.unsynced:
            self.p.grad, self.base = self.base, None
        elif self.base is not None and self.p.grad is not None and self.shard is None:
            self.p.grad += self.base
            self.version = self.p.grad._version

    def check_grad(self) -> None:
        """Handle changes of `.grad` by the user since a backward that sent nothing. Raises StateError for some."""
        grad = self.p.grad
        if grad is None:
            self.unsynced, self.base = False, None
        elif self.unsynced and grad._version != self.version:
            if bool(grad.any()):
                raise StateError.at(
                    WHERE,
                    argument=self.name,
                    got="a .grad that was changed after a backward under no_sync: it holds this worker's own part, "
                    "which is not summed yet, and so a norm of it was no norm of the sum",
                    need="a .grad that is cleared or left unchanged until the sum",
                    mend="change or clip .grad after a backward outside of no_sync; optimizer.zero_grad() drops what "
                    "is not summed",
                )
            self.base = None  # the user has cleared it


class Bucket:
    """Gradients of one kind that are sent together. missing: the number that this backward has not computed yet.
    shard_axes: the axes that split the sums; None: all workers get them whole. handle: of the message under way. sums:
    what it gave, once `complete` was called; mask: and the array behind the sums, if there was one."""

    __slots__ = ("gradients", "handle", "like", "mask", "missing", "shard_axes", "sums")

    def __init__(self, first: ParameterGradient):
        self.like = local_data(first.p).detach()
        self.shard_axes: tuple[str, ...] | None = None if first.shard is None else first.shard.axes
        self.gradients: list[ParameterGradient] = []
        self.reset()

    def reset(self) -> None:
        """Wait for the next backward."""
        self.handle: Handle | None = None
        self.sums: list[Any] | None = None
        self.mask: Any = None
        self.missing = len(self.gradients)

    @property
    def sent(self) -> bool:
        """Whether the sum was started."""
        return self.handle is not None or self.sums is not None

    def complete(self) -> None:
        """Wait for the sums, which take the place of this worker's own gradients in memory."""
        if self.handle is None:
            return
        totals = [*self.handle.wait()]
        self.handle = None
        if len(totals) > len(self.gradients):
            self.mask = totals.pop()
        for g in self.gradients:
            g.hand_over()
        if self.shard_axes is None:
            totals.reverse()
            totals = [_as_gradient(g.p, [totals.pop()]) for g in self.gradients]
        self.sums = totals


def _as_gradient(p: Any, cell: list[Any]) -> torch.Tensor:
    """The array in a cell as a gradient of a parameter, in the memory format of the parameter."""
    if not local_data(p).is_contiguous():
        g = torch.empty_like(p, requires_grad=False)
        write(local_data(g), cell.pop())
        return g
    return PartitionedTensor(owned(cell), p._placement, tuple(p.shape)) if is_partitioned(p) else owned(cell)


def fill_buckets(gradients: Sequence[ParameterGradient], order: Sequence[int], limit: int) -> list[Bucket]:
    """Buckets of `limit` bytes or more for gradients that arrive in this order. They are sent in the order in which
    they fill."""
    buckets: list[Bucket] = []
    filling: dict[Any, tuple[Bucket, int]] = {}
    for index in order:
        g = gradients[index]
        bucket, nbytes = filling.pop(g.kind, None) or (Bucket(g), 0)
        bucket.gradients.append(g)
        g.bucket = bucket
        nbytes += block_nbytes(g.p)
        if nbytes >= limit:
            buckets.append(bucket)
        else:
            filling[g.kind] = bucket, nbytes
    return buckets + [bucket for bucket, _ in filling.values()]
