"""Copy or compare the parameters and buffers of a module over workers, for `data_parallel` and `shard_parameters`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spmd.bridge.torch.interop import block_of, owned
from spmd.bridge.torch.partitioned.tensor import PartitionedTensor
from spmd.bridge.torch.tensor_state import block_nbytes, local_data
from spmd.bridge.torch.worker_context import device_of
from spmd.errors import LayoutError, StateError
from spmd.mesh import Worker
from spmd.transport.call import Call

__all__ = [
    "WHERE",
    "any_worker",
    "broadcast_first",
    "check_initialized",
    "copy_first",
    "copy_module",
    "sync_call",
    "varying_axes",
]

WHERE = "spt.data_parallel"
_BROADCAST_BYTES = 32 << 20
"""A broadcast sends no further parameter after this many bytes."""


def sync_call(
    worker: Worker, axes: tuple[str, ...], dtype: Any, shape: tuple[int, ...], detail: str, where: str = WHERE
) -> Call:
    """The description of a collective that all workers along some axes call alike. where: the function of the user."""
    call = Call(where.removeprefix("spt."), axes, dtype, shape, detail=detail, same_shape=True, frame=sys._getframe(1))
    if worker.mesh.places is not None:
        call.host = False
    return call


def any_worker(worker: Worker, axes: tuple[str, ...], flags: list[bool], detail: str) -> list[bool]:
    """For each flag, whether it is set on any worker."""
    block, _ = block_of(torch.tensor(flags, dtype=torch.uint8, device=device_of(worker)), worker, WHERE)
    call = sync_call(worker, axes, block.dtype, block.shape, detail)
    cell = [worker.comm.all_reduce(worker.group(axes), call, block, "max").wait()]
    return [bool(f) for f in owned(cell).tolist()]


def broadcast_first(
    worker: Worker, axes: tuple[str, ...], x: torch.Tensor, detail: str, where: str = WHERE
) -> torch.Tensor:
    """The x of the first worker along some axes."""
    group = worker.group(axes)
    block, _ = block_of(x, worker, where)
    call = sync_call(worker, axes, block.dtype, block.shape, detail, where)
    cell = [worker.comm.broadcast(group, call, block if group.index == 0 else None, 0).wait()]
    return owned(cell)


def copy_first(
    worker: Worker,
    axes: tuple[str, ...],
    tensors: Sequence[torch.Tensor],
    what: str,
    verify: Sequence[str] = (),
    where: str = WHERE,
) -> None:
    """Copy the first worker's values of tensors, of any dtypes, in one broadcast.

    verify: the names of the tensors: compare them in place of copying, and raise StateError where one differs. where:
    the function that errors name.
    """
    own_bytes = [local_data(x).detach().contiguous().reshape(-1).view(torch.uint8) for x in tensors]
    first = broadcast_first(worker, axes, torch.cat(own_bytes), what, where)
    pieces = first.split([b.numel() for b in own_bytes])
    for index, (x, piece) in enumerate(zip(tensors, pieces, strict=True)):
        if not verify:
            own = local_data(x).detach()
            own.copy_(piece.clone().view(x.dtype).reshape(own.shape))
        elif not torch.equal(piece, own_bytes[index]):
            raise StateError.at(
                where,
                argument="module",
                got=f"{verify[index]} that differs from that of the first worker",
                need='one value on all workers, with init="verify"',
                mend='init="broadcast", which takes those of the first worker',
            )


def copy_module(worker: Worker, axes: tuple[str, ...], module: nn.Module, verify: bool, where: str = WHERE) -> None:
    """Copy the parameters and buffers of the first worker to the others, or compare them (verify).

    Raises LayoutError for parameters of which workers have different blocks along these axes.
    """
    for name, p in module.named_parameters():
        if isinstance(p, PartitionedTensor) and not p.block_layout.varying.isdisjoint(axes):
            raise LayoutError.at(
                where,
                argument="module",
                got=f"{name}, which lies as {p.block_layout}",
                need=f"parameters that {' and '.join(map(repr, axes))} do not split yet",
                mend="another axis of the mesh; or no wrapper: bodies sum the gradients of what is not split",
            )
    named = [(name, x) for name, x in (*module.named_parameters(), *module.named_buffers()) if not x.is_meta]
    with torch.no_grad():
        while named:
            count = nbytes = 0
            while count < len(named) and nbytes < _BROADCAST_BYTES:
                nbytes += block_nbytes(named[count][1])
                count += 1
            names, tensors = zip(*named[:count], strict=True)
            copy_first(worker, axes, tensors, "values", names if verify else (), where)
            named = named[count:]


def check_initialized(module: nn.Module, where: str) -> None:
    """Raise StateError for a lazy module that has not seen data."""
    for name, p in module.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise StateError.at(
                where,
                argument="module",
                got=f"a lazy module, whose {name} has no shape yet",
                need="parameters with a shape",
                mend="run a forward with any data before: with torch.no_grad(): module(x)",
            )


def varying_axes(worker: Worker, varying: str | Sequence[str], axes: tuple[str, ...], where: str) -> tuple[str, ...]:
    """The names of the axes along which parameters may differ. Raises StateError for one of axis_name."""
    names = worker.mesh.names(varying, where)
    both = [n for n in names if n in axes]
    if both:
        raise StateError.at(
            where,
            argument="varying",
            got=f"{varying!r}, and axis_name={axes}",
            need="other axes: along axis_name parameters are the same",
            mend=f"leave {both[0]!r} out of one of them",
        )
    return names
