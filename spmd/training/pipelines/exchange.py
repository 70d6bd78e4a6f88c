"""How values go from stage to stage: who takes one waits for it; who sends one goes on.

A message stays in the sender's memory until it has been taken. The sender waits for that when a message that it takes
itself tells that the other has done so, and at the end: earlier, workers could wait for each other in a cycle.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, cast

import numpy as np

from spmd.errors import caller
from spmd.mesh import Worker
from spmd.operators.partial_comm import whole_comm
from spmd.training.pipelines.schedules import Schedule, Transfer
from spmd.transport.call import Call, Group, Pair
from spmd.transport.handles import Handle, SentMessage
from spmd.transport.plan import Forward, Plan

__all__ = ["Exchange", "from_last"]


_AHEAD = 16
"""Messages of a worker that may be on their way before it waits for those that would have been taken by now if all
actions took equal times. In inference the first worker takes nothing that would tell it."""


class Exchange:
    """The transfers of one run of a schedule, on one worker.

    All workers count all transfers as collectives, in the global order of the schedule, whether they take part or not.
    So each transfer has one number everywhere, in whatever order a worker comes to it. Collectives among the workers of
    one stage are uncounted, while the run lasts: inside `with exchange`.
    """

    def __init__(self, schedule: Schedule, worker: Worker, group: Group):
        self.schedule, self.group, self.comm = schedule, group, whole_comm(worker.comm)
        self.first = self.comm.number
        self.numbers = {transfer: k for k, transfer in enumerate(schedule.transfers)}
        self.sent: dict[Transfer, SentMessage] = {}
        """Messages that may not have been taken, in the order in which they were sent."""
        self.plans: dict[tuple[str, bool, int], Plan] = {}
        self.frame = caller(sys._getframe(1))
        self._counting = ExitStack()

    def __enter__(self) -> Exchange:
        self._counting.enter_context(self.comm.uncounted())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._wait_for(self.sent)
        finally:
            self._counting.close()
            self.comm.number += len(self.numbers)

    def send(self, transfer: Transfer, message: np.ndarray) -> None:
        """Send what a transfer carries, without waiting for it to be taken."""
        self.sent[transfer] = cast(SentMessage, self._start(transfer, message, True))
        if len(self.sent) > _AHEAD:
            self._wait_for([t for t in self.sent if self.schedule.starts_before(t.taker, transfer.giver)])

    def take(self, transfer: Transfer) -> np.ndarray:
        """What a transfer carries, once it has come."""
        message = self._start(transfer, np.empty(0, np.uint8), False).wait()[0]
        self._wait_for([t for t in self.sent if self.schedule.follows(transfer.giver, t.taker)])
        return message

    def _wait_for(self, transfers: Iterable[Transfer]) -> None:
        """Wait until they have been taken."""
        for transfer in list(transfers):
            self.sent.pop(transfer).wait_until_taken()

    def _start(self, transfer: Transfer, message: np.ndarray, sends: bool) -> Handle:
        plan = self._plan(transfer, message, sends)
        detail = f"{transfer.kind} {transfer.microbatch} of stage {transfer.stage}"
        axes = self.group.axes
        call = Call("pipeline", axes, plan.dtype, plan.shape, detail=detail, same_shape=None, frame=self.frame)
        call.operator, call.host = "Move", True
        with self.comm.uncounted():
            self.comm.number = self.first + self.numbers[transfer]
            return self.comm.run(plan, call, message)

    def _plan(self, transfer: Transfer, message: np.ndarray, sends: bool) -> Plan:
        """The plan of a transfer. Messages of one stream and length have the same."""
        key = transfer.stream, sends, message.nbytes
        plan = self.plans.get(key)
        if plan is None:
            pair = Pair(self.group, transfer.source, transfer.target, transfer.stream, scheduled=True)
            parts, combine = ((None, ...), Forward(None, (0,))) if sends else ((None, None), Forward(0))
            plan = Plan("exchange", pair, message.shape, message.dtype, parts, combine, _nothing)
            self.plans[key] = plan
        return plan


def from_last(worker: Worker, group: Group, message: np.ndarray | None, frame: Any) -> np.ndarray:
    """What the last worker of a group gives, on all of them. frame: of the caller, for error messages."""
    shape = (0,) if message is None else message.shape
    call = Call("pipeline", group.axes, np.dtype(np.uint8), shape, detail="the result", same_shape=None, frame=frame)
    call.host = True
    return worker.comm.broadcast(group, call, message, group.size - 1).wait()


def _nothing(shapes: Any) -> None:
    return None
