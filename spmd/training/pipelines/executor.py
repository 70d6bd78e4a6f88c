"""Running a schedule on one worker, whatever its stages compute with.

A frontend says what the actions do (`Stages`). The executor runs them in order, keeps what a later action needs, and
moves values between workers.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

from spmd.mesh import WORKER
from spmd.training.pipelines.exchange import Exchange
from spmd.training.pipelines.schedules import Action, Schedule, Transfer
from spmd.transport.call import LEDGERS

__all__ = ["Execution", "Stages"]


class Stages(Protocol):
    """What the actions of a worker's stages do.

    value: of a stage's input or output, or of their gradients; None where there is none: as input of the first stage,
    which takes its microbatch from the batch, and as gradient of the output of the last, which has the loss.
    """

    def forward(self, stage: int, microbatch: int, value: Any) -> tuple[Any, Any]:
        """The output of a stage, and what its backward action needs (None in inference)."""
        ...

    def backward(self, stage: int, microbatch: int, kept: Any, gradient: Any) -> tuple[Any, Any]:
        """The gradient of the input, and what the weight action needs. Where the schedule has no weight actions, it
        adds up the gradients of parameters, and the second is ignored."""
        ...

    def weight(self, stage: int, microbatch: int, kept: Any) -> None:
        """Add up the gradients of the parameters."""
        ...

    def pack(self, value: Any) -> Any:
        """A value as a message: an array of bytes."""
        ...

    def unpack(self, message: Any) -> Any:
        """The value of a message."""
        ...


class Execution:
    """One run of a schedule on the worker at `place` of the pipeline.

    kept: what backward and weight actions to come need, by kind, stage and microbatch. most: the most microbatches of
    which something was kept at a time.
    """

    def __init__(self, schedule: Schedule, place: int, stages: Stages, exchange: Exchange):
        self.schedule, self.place, self.stages, self.exchange = schedule, place, stages, exchange
        self.values: dict[Action, Any] = {}
        self.kept: dict[Action, Any] = {}
        self.most = 0

    def run(self, only_forward: bool = False) -> None:
        """Run the actions of this worker, in order. only_forward: those of inference."""
        try:
            for action in self.schedule.actions[self.place]:
                if not only_forward or action.kind == "forward":
                    self._act(action)
        finally:
            self.kept.clear()
            self.values.clear()

    def _act(self, action: Action) -> None:
        kind, stage, k = action
        if kind == "weight":
            self._observed(action, self.stages.weight, self.kept.pop(action))
            return
        value = self._taken(action)
        if kind == "forward":
            result, later = self._observed(action, self.stages.forward, value)
            if later is not None:
                self.kept[Action("backward", stage, k)] = later
        else:
            result, later = self._observed(action, self.stages.backward, self.kept.pop(action), value)
            if self.schedule.splits_backward:
                self.kept[Action("weight", stage, k)] = later
        del value, later
        self.most = max(self.most, len(self.kept))
        self._give(action, result)

    def _observed(self, action: Action, work: Callable[..., Any], *args: Any) -> Any:
        """What the stages do in an action, whose time observers see. Its errors say where they arose."""
        kind, stage, k = action
        observers, start = LEDGERS.get(), perf_counter()
        try:
            return work(stage, k, *args)
        except Exception as error:
            if not hasattr(error, "peer"):  # it arose elsewhere: this action was waiting
                error.add_note(f"raised in the {kind} action of stage {stage} of the pipeline, for microbatch {k}")
            raise
        finally:
            for observer in observers:
                observer.action(WORKER.get(), kind, stage, k, start)

    def _taken(self, action: Action) -> Any:
        """The value that an action takes from another stage."""
        kind, stage, k = action
        before = stage - 1 if kind == "forward" else stage + 1
        if not 0 <= before < self.schedule.stages:
            return None
        giver = Action(kind, before, k)
        transfer = self.schedule.transfer_of(giver)
        if transfer is None:
            return self.values.pop(giver)
        return self.stages.unpack(self.exchange.take(transfer))

    def _give(self, action: Action, result: Any) -> None:
        """Hand the result of an action to the stage that takes it, if there is one."""
        kind, stage, _ = action
        if not 0 <= (stage + 1 if kind == "forward" else stage - 1) < self.schedule.stages:
            return
        transfer: Transfer | None = self.schedule.transfer_of(action)
        if transfer is None:
            self.values[action] = result
        else:
            self.exchange.send(transfer, self.stages.pack(result))
