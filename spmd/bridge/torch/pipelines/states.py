"""The state of all stages of a pipeline, on every worker."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from spmd.bridge.torch.pipelines.values import message_of, structured, value_of_message, value_of_output
from spmd.mesh import Worker
from spmd.operators.partial_comm import whole_comm
from spmd.training.pipelines.schedules import Schedule
from spmd.transport.call import Call

__all__ = ["state_of_stages"]


def state_of_stages(
    own: dict[int, dict[str, Any]], schedule: Schedule, axes: tuple[str, ...], worker: Worker, device: torch.device
) -> dict[str, Any]:
    """The states of all stages, named `stages.k.name`. own: those of this worker's stages, of whole tensors.

    Cost: one broadcast for each stage.
    """
    group = worker.group(axes)
    found: dict[str, Any] = {}
    with whole_comm(worker.comm).uncounted():
        for stage in range(schedule.stages):
            root = schedule.worker_of(stage)
            sent = message_of(value_of_output(dict(own[stage]))[0]) if stage in own else None
            shape = (0,) if sent is None else sent.shape
            detail = f"the state of stage {stage}"
            frame = sys._getframe(1)
            call = Call("pipeline", axes, np.dtype(np.uint8), shape, detail=detail, same_shape=None, frame=frame)
            call.host = True
            value = value_of_message(worker.comm.broadcast(group, call, sent, root).wait().copy(), device)
            state = structured(value.structure, value.tensors)
            found |= {f"stages.{stage}.{name}": x for name, x in state.items()}
    return found
