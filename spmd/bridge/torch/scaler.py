"""Loss scaling for mixed precision, on which all workers agree."""

from __future__ import annotations

from typing import Any

import torch

from spmd.bridge.torch.function import apply, seat_of
from spmd.bridge.torch.partitioned_ops import unscaling
from spmd.mesh import WORKER
from spmd.operators.sums import Sum

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for bodies: where a gradient of any worker is not finite, all skip the step.

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

    To be made and used in a body, by all workers of the mesh. device: by default that of the mesh. Other arguments, and
    the numbers that one worker alone would have: as torch's.
    Cost: one all-reduce of a number over the mesh for each optimiser and step.
    """

    def __init__(self, device: str | None = None, *args: Any, **kwargs: Any):
        worker = WORKER.get()
        if device is None:
            device = "cpu" if worker is None or worker.mesh.places is None else "cuda"
        super().__init__(device, *args, **kwargs)

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        with unscaling():
            found = super()._unscale_grads_(*args, **kwargs)
        worker = WORKER.get()
        if worker is None or worker.mesh.size == 1:
            return found
        # Gradients lie on the device of the mesh; a worker may have none.
        own = sum((f.detach().double() for f in found.values()), torch.zeros((), dtype=torch.float64))
        device = "cpu" if worker.mesh.places is None else "cuda"
        total = apply(Sum(tuple(worker.mesh.axes)), own.reshape(()).to(device), seat_of(worker))
        if not found:  # a worker without gradients, which is told what the others have found
            return {torch.device(device): (total > 0).float()}
        return {d: f.copy_((total > 0).to(f)) for d, f in found.items()}
