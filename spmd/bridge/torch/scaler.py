"""Loss scaling for mixed precision, on which all workers agree."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch

from spmd.bridge.torch.function import apply
from spmd.bridge.torch.partitioned.arguments import operator_error
from spmd.bridge.torch.partitioned.registry import handles
from spmd.bridge.torch.partitioned.tensor import PartitionedTensor
from spmd.bridge.torch.worker_context import assigned, context_of, device_of
from spmd.mesh import WORKER
from spmd.operators.sums import Sum

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for bodies: if a gradient of any worker is not finite, all workers skip the step.

        scaler = spt.GradScaler()
        for x, t in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = spt.mean((model(x) - t) ** 2, "data")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    Construct and use it in a body, on all workers of the mesh. device: by default that of the mesh. Other arguments and
    the results are those of torch's scaler in a program of one worker.
    Cost: one all-reduce of a number over the mesh for each optimiser and step.

        >>> scaler = spt.GradScaler(init_scale=8.0)
        >>> scaler.get_scale()
        8.0
    """

    def __init__(self, device: str | None = None, *args: Any, **kwargs: Any):
        if device is None:
            device = device_of(WORKER.get()).type
        super().__init__(device, *args, **kwargs)

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        with assigned(_unscaling, True):
            found_inf = super()._unscale_grads_(*args, **kwargs)
        worker = WORKER.get()
        if worker is None or worker.mesh.size == 1:
            return found_inf
        # Gradients lie on the device of the mesh; a worker may have none.
        count = sum((f.detach().double() for f in found_inf.values()), torch.zeros((), dtype=torch.float64))
        device = device_of(worker)
        total = apply(Sum(tuple(worker.mesh.axes)), count.reshape(()).to(device), context_of(worker))
        if not found_inf:  # this worker has no gradients, but skips the step if others do
            return {device: (total > 0).float()}
        return {d: f.copy_((total > 0).to(f)) for d, f in found_inf.items()}


_unscaling: ContextVar[bool] = ContextVar("spmd_torch_unscaling", default=False)
"""Whether a `GradScaler` checks this worker's gradients and shares the result among workers."""


@handles("_amp_foreach_non_finite_check_and_unscale_")
def _unscaled(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not _unscaling.get():
        raise operator_error(
            func,
            "gradients in blocks: a worker does not know of infinite entries in the blocks of others",
            "a scaler that shares the result among workers",
            "spt.GradScaler in place of torch.amp.GradScaler",
        )
    grads, found_inf, scale = args
    return func([g._block if isinstance(g, PartitionedTensor) else g for g in grads], found_inf, scale)
