"""How values go from stage to stage: who sends does not wait, and who takes waits for one value only."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.autodiff.dtypes import dtype_name
from spmd.device import put
from spmd.errors import caller
from spmd.kernels.memory import pool
from spmd.mesh import Worker
from spmd.operators.partial_comm import whole_comm
from spmd.training.pipelines.schedules import Schedule, Transfer
from spmd.transport.call import Call, Group, Pair
from spmd.transport.plan import Forward, Plan

__all__ = ["Exchange", "packed", "unpacked"]

_ALIGNED = 64
"""Where arrays begin in a message: at multiples of so many bytes."""
_FAR = 1 << 24
"""The numbers of collectives among the workers of one stage begin so far behind those of transfers."""


def packed(arrays: Sequence[np.ndarray], note: Any) -> np.ndarray:
    """Arrays of any shapes and dtypes, and a note that JSON can hold, as one message of bytes."""
    shapes = [[dtype_name(x.dtype), *x.shape] for x in arrays]
    head = json.dumps([note, shapes]).encode()
    places, end = [], _ceil(8 + len(head))
    for x in arrays:
        places.append(end)
        end = _ceil(end + x.nbytes)
    message = pool.empty((end,), np.uint8)
    message[:8] = np.frombuffer(len(head).to_bytes(8, "little"), np.uint8)
    message[8 : 8 + len(head)] = np.frombuffer(head, np.uint8)
    for x, place in zip(arrays, places, strict=True):
        if x.nbytes:
            put(message[place : place + x.nbytes].view(x.dtype).reshape(x.shape), x)
    return message


def unpacked(message: np.ndarray) -> tuple[list[np.ndarray], Any]:
    """The arrays of a message, views of it, and the note."""
    length = int.from_bytes(message[:8].tobytes(), "little")
    note, shapes = json.loads(message[8 : 8 + length].tobytes())
    arrays, place = [], _ceil(8 + length)
    for name, *shape in shapes:
        dtype = np.dtype(name)
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        arrays.append(message[place : place + nbytes].view(dtype).reshape(shape))
        place = _ceil(place + nbytes)
    return arrays, note


def _ceil(n: int) -> int:
    return -(-n // _ALIGNED) * _ALIGNED


class Exchange:
    """The transfers of one run of a schedule, on one worker.

    All workers count all transfers as collectives, in the global order of the schedule, whether they take part or not.
    So each transfer has one number everywhere, in whatever order a worker comes to it. Collectives among the workers of
    one stage have numbers far behind, while the run lasts.
    """

    def __init__(self, schedule: Schedule, worker: Worker, group: Group):
        self.schedule, self.group, self.comm = schedule, group, whole_comm(worker.comm)
        self.first = self.comm.number
        self.numbers = {transfer: k for k, transfer in enumerate(schedule.transfers)}
        self.frame = caller(sys._getframe(1))
        self.comm.number = self.first + _FAR

    def send(self, transfer: Transfer, message: np.ndarray) -> None:
        """Send what a transfer carries, without waiting for it to be taken."""
        self._run(transfer, message, (None, ...), Forward(None, (0,)))

    def take(self, transfer: Transfer) -> np.ndarray:
        """What a transfer carries, once it has come."""
        return self._run(transfer, np.empty(0, np.uint8), (None, None), Forward(0))

    def _run(self, transfer: Transfer, message: np.ndarray, parts: Any, combine: Forward) -> np.ndarray:
        pair = Pair(self.group, transfer.source, transfer.target, transfer.stream)
        plan = Plan("exchange", pair, message.shape, message.dtype, parts, combine, _nothing)
        detail = f"{transfer.kind} {transfer.microbatch} of stage {transfer.stage}"
        axes = self.group.axes
        call = Call("pipeline", axes, plan.dtype, plan.shape, detail=detail, same_shape=None, frame=self.frame)
        call.operator, call.host = "Move", True
        inner, self.comm.number = self.comm.number, self.first + self.numbers[transfer]
        try:
            return self.comm.run(plan, call, message).wait()[0]
        finally:
            self.comm.number = inner

    def among_stages(self) -> None:
        """Number what follows as collectives among the workers of one stage, until the end."""
        self.comm.number = max(self.comm.number, self.first + _FAR)

    def finish(self) -> None:
        """Count all transfers, and nothing else: as on all other workers."""
        self.comm.number = self.first + len(self.numbers)


def _nothing(shapes: Any) -> None:
    return None
